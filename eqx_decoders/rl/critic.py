"""The critic of a run: a second model with a score head, which learns the values of tokens (PPO)."""

import dataclasses

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.errors import check
from eqx_decoders.io.status import StatusLine
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import add_score_head
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.methods.method import MethodStart
from eqx_decoders.training.methods.teachers import check_same_tokens
from eqx_decoders.training.objectives.scores import ValueObjective
from eqx_decoders.training.run.log import print_status
from eqx_decoders.training.run.model import abstract_base, new_base
from eqx_decoders.training.settings.lora import LORA_WEIGHTS
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.critic import Critic
from eqx_decoders.training.step.step import Trainer


SCORE_HEAD = "head.kernel"


def open_critic(start: MethodStart) -> Critic:
    """Create the critic of a run. Raises ConfigError if `rl.critic.init_from` has another vocabulary."""
    from eqx_decoders.training.run.load_export import OtherModel  # late: most of its imports are not needed here

    config, source, execution = start.config, start.config.rl.critic.init_from, start.execution
    other = None if source is None else OtherModel(source)
    if other is not None:
        remedy = "Use a model with the policy's tokenizer"
        check_same_tokens(start.tokenizer, other.tokenizer, f"rl.critic.init_from={source!r}", "the policy's", remedy)
    base = abstract_base(start.run, execution) if other is None else other.abstract(execution)
    target, key = _with_score_head(base, config, jax.random.key(0)), jax.random.key(config.data.seed)

    def new_model() -> Decoder:
        with StatusLine("making the critic", remains="nothing of it is kept"):
            model = new_base(start.run, execution) if other is None else other.load(execution)
            return _with_score_head(model, config, jax.random.fold_in(key, 4))

    def make_trainer(settings: TrainConfig) -> Trainer:
        return critic_trainer(settings, target)

    trainer = make_trainer(config)
    num_trained = sum(leaf.size for name, leaf in named_leaves(target).items() if name in trainer.trainable)
    print_status(f"critic: initial weights from {source or 'the policy'}, {num_trained:,} weights trained")
    updates = config.rl.critic.updates
    return Critic(make_trainer=make_trainer, trainer=trainer, target=target, new_model=new_model, updates=updates)


def critic_trainer(config: TrainConfig, target: Decoder) -> Trainer:
    """Return the critic's trainer: the run's optimizer with the critic's learning rate.

    It trains the weights that the run trains, and the score head.
    """
    critic, optimizer = config.rl.critic, config.optimizer
    patterns = optimizer.trainable if config.lora.rank is None else LORA_WEIGHTS
    optimizer = dataclasses.replace(
        optimizer,
        trainable=patterns if "*" in patterns else (*patterns, SCORE_HEAD),
        learning_rate=optimizer.learning_rate if critic.learning_rate is None else critic.learning_rate,
        ema_decay=None,
    )
    step = dataclasses.replace(config.step, qk_clip_threshold=None)
    loss = ValueObjective(clip=critic.clip)
    return Trainer.create(optimizer, target, steps=config.steps * critic.updates, config=step, loss=loss)


def _with_score_head(model: Decoder, config: TrainConfig, key: PRNGKeyArray) -> Decoder:
    """Return a model with a score head and the run's LoRA factors. A new score head is initialized to 0."""
    scores, lora = model.config.scores, config.lora.config()
    check(
        scores in (None, 1), f"rl.critic.init_from: the model has {scores} scores, but a critic has one: use another."
    )
    if scores is None:
        model = add_score_head(model, key=key)
        head = named_leaves(model)[SCORE_HEAD]
        if isinstance(head, jax.Array):
            model = replaced(model, {SCORE_HEAD: jax.numpy.zeros_like(head, device=head.sharding)})
    return model if lora is None else add_lora(model, lora, key=jax.random.fold_in(key, 1))
