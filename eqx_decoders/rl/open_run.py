"""The start of a run whose model draws answers: its prompts, its engine, and what it computes beside its steps."""

import dataclasses
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.data.dataset import written_by
from eqx_decoders.data.prompt_batches import PromptBatches, read_prompts, read_tasks
from eqx_decoders.errors import check
from eqx_decoders.io.processes import check_same
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.expert_choices import check_choices
from eqx_decoders.model.init import add_score_head
from eqx_decoders.rl.answerer import Answerer, ends_of_answers
from eqx_decoders.rl.episodes import EpisodeAnswerer
from eqx_decoders.rl.on_policy import OnPolicyRun
from eqx_decoders.rl.reward_model import RewardModel
from eqx_decoders.rl.rl_run import RLRun, packer_of
from eqx_decoders.rl.sampler_engine import SamplerEngine, drawing
from eqx_decoders.rl.turn_writer import rewritten_turns
from eqx_decoders.serving import Engine
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.lora_config import LORA_WEIGHTS
from eqx_decoders.training.mesh_config import describe_devices
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.methods.teacher import check_same_tokens
from eqx_decoders.training.objectives.values import ValueObjective
from eqx_decoders.training.run.log import print_status
from eqx_decoders.training.run.model import abstract_base, new_base
from eqx_decoders.training.sampler_config import split_devices
from eqx_decoders.training.step.critic import Critic
from eqx_decoders.training.step.step import Trainer


LARGEST_CHUNK = 128  # tokens of prompts that are prefilled at once
HEAD = "head.kernel"  # of values


def open_rl(start: MethodStart) -> OpenedMethod:
    """Read the prompts of a run, and the held-out ones, if there is a `held_out_path`; import what rewards them."""
    return _opened(start, RLRun)


def open_on_policy(start: MethodStart) -> OpenedMethod:
    """Read the prompts of a run, and the held-out ones, and load its teacher."""
    return _opened(start, OnPolicyRun)


def _opened(start: MethodStart, run: type[RLRun]) -> OpenedMethod:
    start.check_text_alone()
    config, data, tokenizer = start.config, start.config.data, start.tokenizer
    template, rl = written_by(data, start.options["template"], tokenizer), config.rl

    def prompts(path: Any, flag: str, *, held_out: bool = False) -> PromptBatches:
        most = data.seq_len - rl.max_new_tokens
        if rl.environment is None:
            read = read_prompts(path, tokenizer, most_tokens=most, template=template, flag=flag)
        else:
            read = read_tasks(path, flag=flag)
        return PromptBatches(read, count=rl.prompts, seed=data.seed, held_out=held_out)

    trained = prompts(data.path, "--data")
    sets = {} if data.held_out_path is None else {"": prompts(data.held_out_path, "--held-out", held_out=True)}
    hashes = [each.prompts.content_hash for each in (trained, *sets.values())]
    check_same("the prompts", hashes, "all must read the same files")
    longest = max(each.prompts.longest for each in (trained, *sets.values()))
    limit = longest + rl.max_new_tokens if rl.environment is None else rl.episode_tokens or data.seq_len
    _check_room(config, limit)
    stop_ids = ends_of_answers(tokenizer, template, start.target.generation_config.stop_ids)
    if rl.routing_replay:
        check_choices(start.target.config, "rl.routing_replay=True")
    layout, sizes = _sampler_layout(start), _engine_config(rl, longest or limit, limit)
    engine = SamplerEngine(Engine, sizes, layout, compute_dtype=config.sampler.compute_dtype)
    more: dict[str, Any] = {"stop_ids": stop_ids, "engine": engine}
    if rl.environment is None:
        answerer = Answerer(rl, tokenizer, **more)
    else:
        _check_template(template)
        answerer = EpisodeAnswerer(rl, tokenizer, template, limit=limit, **more)
    if rl.reward_model is not None:
        where = start
        if layout is not None and config.sampler.devices:  # nothing of a thread runs where a step is computed
            where = dataclasses.replace(start, execution=drawing(start.execution, layout))
        answerer.judge = RewardModel(rl, tokenizer, where.execution, packer_of(where))
    method = run(start, trained, answerer)
    start.stack.callback(method.close)
    if rl.preset is not None:
        print_status(f"rl.preset={rl.preset}: {rl.describe_preset()}")
    critic = open_critic(start) if rl.baseline == "critic" else None
    return OpenedMethod(trained, sets, method, critic, rl.critic.warmup_steps)


_REWRITTEN_TURNS = {"plain": "answers", "reasoning": "answers with reasoning"}


def _check_template(template: ChatTemplate | None) -> None:
    """Print a line if the template writes earlier turns of conversations another way. Raises ConfigError."""
    one = jax.process_count() == 1
    check(one, f"rl.environment: a run has one process, not {jax.process_count()}. Take rl.reward, or one process.")
    rewritten = rewritten_turns(template)
    if rewritten:
        names = " and ".join(_REWRITTEN_TURNS[kind] for kind in rewritten)
        print_status(
            f"the chat template changes earlier {names} when a message follows: such episodes continue in other rows "
            "(forked_rows)"
        )


def _engine_config(rl: RLConfig, longest: int, length: int) -> EngineConfig:
    """Return the sizes of an engine for prompts of up to `longest` tokens, and of `length` with their answers."""
    chunk = min(LARGEST_CHUNK, max(16, 1 << (longest - 1).bit_length()))
    slots = min(rl.slots, rl.prompts * rl.samples)
    budget = slots + 4 * chunk
    sizes: dict[str, Any] = dict(max_length=length, prefill_chunk=chunk, token_budget=budget)
    sizes |= dict(expert_choices=rl.routing_replay)
    return EngineConfig(max_batch_size=slots, max_logprobs=0, max_logit_bias=0, **sizes)


def _sampler_layout(start: MethodStart) -> Layout | None:
    """Return where the model has its weights while it draws, and say so; None: where it is trained."""
    sampler, trained = start.config.sampler, start.execution.layout
    if not sampler.is_separate:
        return None
    devices = split_devices(sampler.devices)[1] if sampler.devices else [*trained.mesh.devices.flat]
    layout = sampler.layout(devices, start.target)
    print_status(f"answers are drawn on {len(devices)} devices: {describe_devices(layout)}")
    return layout


def _check_room(config: Any, limit: int) -> None:
    """Raise ConfigError unless answers which have up to `limit` tokens with their prompts would fit into a batch."""
    rl, data = config.rl, config.data
    rows, most = rl.most_rows, rl.answers_per_row
    check(limit <= data.seq_len, f"rl.episode_tokens={limit} must be at most data.seq_len={data.seq_len}.")
    rule = f"rl.answers_per_row={most} must be at least {rows}, as many rows as an episode of rl.max_turns may have"
    check(most >= rows, f"{rule}, unless rl.strict_prefix.")
    in_row = min(most // rows, data.seq_len // limit)
    needed = -(-rl.prompts * rl.samples // in_row)
    rule = f"rl.prompts={rl.prompts} x rl.samples={rl.samples} answers of up to {limit} tokens with their prompts"
    remedy = f"raise it, or data.seq_len={data.seq_len}, or draw fewer"
    remedy += "" if rl.environment is None else ", or set rl.episode_tokens"
    check(needed <= data.batch_size, f"{rule} need data.batch_size={needed}, not {data.batch_size}: {remedy}.")


def open_critic(start: MethodStart) -> Critic:
    """Make what a run needs to train its critic. Raises ConfigError for `init_from` with another vocabulary."""
    from eqx_decoders.training.run.load_export import OtherModel  # late: of its imports this needs few

    config, source = start.config, start.config.rl.critic.init_from
    other = None if source is None else OtherModel(source)
    if other is not None:
        name = f"rl.critic.init_from={source!r}"
        remedy = "It would read other tokens: take a model with the policy's tokenizer"
        check_same_tokens(start.tokenizer, other.tokenizer, name, "the policy's", remedy)
    execution = start.execution
    base = abstract_base(start.run, execution) if other is None else other.abstract(execution)
    target, key = _with_values(base, config, jax.random.key(0)), jax.random.key(config.data.seed)

    def new_model() -> Decoder:
        with StatusLine("making the critic", remains="nothing of it is kept"):
            model = new_base(start.run, execution) if other is None else other.load(execution)
            return _with_values(model, config, jax.random.fold_in(key, 4))

    def trainer_by(settings: TrainConfig) -> Trainer:
        return critic_trainer(settings, target)

    trainer = trainer_by(config)
    weights = sum(leaf.size for name, leaf in named_leaves(target).items() if name in trainer.trainable)
    print_status(f"critic: begins with {source or 'the weights of the policy'}, {weights:,} weights trained")
    updates = config.rl.critic.updates
    return Critic(trainer_by=trainer_by, trainer=trainer, target=target, new_model=new_model, updates=updates)


def critic_trainer(config: TrainConfig, target: Decoder) -> Trainer:
    """Make the trainer of a run's critic: the run's optimizer, with a learning rate of its own.

    It trains what the policy trains, and the head of values.
    """
    critic, optimizer = config.rl.critic, config.optimizer
    patterns = optimizer.trainable if config.lora.rank is None else LORA_WEIGHTS
    trainable = patterns if "*" in patterns else (*patterns, HEAD)
    rate = optimizer.learning_rate if critic.learning_rate is None else critic.learning_rate
    optimizer = dataclasses.replace(optimizer, trainable=trainable, learning_rate=rate, ema_decay=None)
    step = dataclasses.replace(config.step, qk_clip_threshold=None)
    loss = ValueObjective(clip=critic.clip)
    return Trainer.create(optimizer, target, steps=config.steps * critic.updates, config=step, loss=loss)


def _with_values(model: Decoder, config: TrainConfig, key: PRNGKeyArray) -> Decoder:
    """Return a model with a head of one value, which is 0 at first where it is new, and the run's low-rank pairs."""
    scores, lora = model.config.scores, config.lora.config()
    check(scores in (None, 1), f"rl.critic.init_from: the model has {scores} scores, and not one: take another.")
    if scores is None:
        model = add_score_head(model, key=key)
        head = named_leaves(model)[HEAD]
        if isinstance(head, jax.Array):
            model = replaced(model, {HEAD: jax.numpy.zeros_like(head, device=head.sharding)})
    return model if lora is None else add_lora(model, lora, key=jax.random.fold_in(key, 1))
