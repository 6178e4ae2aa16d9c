"""The start of a run: `Run.open` prepares everything that the steps need, `Run.first_state` the training state."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import prepare_tokenizer
from eqx_decoders.data.host_rows import host_rows
from eqx_decoders.data.media_documents import ProcessorReader, SyntheticReader
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.prompt_batches import PromptBatches
from eqx_decoders.data.synthetic_images import write_questions
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.errors import CheckpointError, ConfigError, check
from eqx_decoders.io.atomic_files import cache_directory
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints, Restored
from eqx_decoders.io.checkpoint.run_backup import GROWING
from eqx_decoders.io.huggingface.load import abstract_hf
from eqx_decoders.io.processes import LONG_TIMEOUT, all_gather_json, broadcast_json, first_then_all, wait_for
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import Tokenizer, decode, prompt_ids
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.replication import check_replicated
from eqx_decoders.training.methods.method import Data, Method, MethodStart, OpenedMethod
from eqx_decoders.training.optimizer.resume import adopt, describe_adoption, ema_weights, is_same, trained_weights
from eqx_decoders.training.run.directory import RunDirectory, resume, write_config, write_source
from eqx_decoders.training.run.load_export import check_exports, text_model_of
from eqx_decoders.training.run.log import MetricsRow, describe_model, print_status
from eqx_decoders.training.run.model import abstract_run, new_model
from eqx_decoders.training.settings.files import Changes, is_new, parse_settings
from eqx_decoders.training.settings.flags import flag
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.values import flat_settings
from eqx_decoders.training.step.critic import Critic
from eqx_decoders.training.step.loss_weights import LOSS_WEIGHTS, loss_shapes
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import StepMetrics, TrainState


SYNTHETIC_IMAGES = 60_000  # generated if a new vision-language model is trained without `data.path`

Methods = Mapping[str, Callable[[MethodStart], OpenedMethod]]
"""For each value of `method` in the settings, the function that opens its data and makes its loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A prepared run: everything that its steps need besides the training state.

    **Arguments:**

    - `directory`: the run directory, with the settings of this start.
    - `changes`: what this start changes of the saved settings.
    - `target`: the shapes of the model.
    - `trainer`: the compiled step.
    - `reader`: the reader of images, videos and audio; None for a language model.
    - `data`: training batches.
    - `held_out`: batches of each held-out set, by its name.
    - `method`: what the method computes besides the steps; None for `sft`.
    - `critic`: the critic that is trained with the model; None in runs without one.
    - `tasks`: the `TaskEvaluator` of `eval_tasks`; None without tasks.
    """

    directory: RunDirectory
    changes: Changes
    execution: Execution
    target: Decoder
    trainer: Trainer
    tokenizer: Tokenizer
    reader: MediaReader | None
    data: Data
    held_out: Mapping[str, Data]
    checkpoints: Checkpoints
    method: Method | None = None
    critic: Critic | None = None
    tasks: Any = None

    @classmethod
    def open(
        cls, directory: RunDirectory, execution: Execution, methods: Methods, stack: contextlib.ExitStack
    ) -> "Run":
        """Open the model, data and checkpoints of a run. All processes must call this; `stack` closes everything."""
        is_writer = jax.process_index() == 0
        if is_writer:
            directory.restore_backup()
        all_gather_json("backup", seconds=LONG_TIMEOUT)
        directory, changes = resume(directory)
        config = directory.settings
        if is_writer:
            directory.check_checkpoint_dir(changes)
        for name, (old, new) in changes.items():
            print_status(f"changed: {flag(name)} {_format_setting(old)} -> {_format_setting(new)}")
        _check_same_settings(directory)
        if is_writer:
            # the settings come before the tokenizer and the tokenized data that depend on them
            write_config(directory, save=not changes and not directory.checkpoints().steps)
            fetch_source(directory)
        all_gather_json("source", seconds=LONG_TIMEOUT)

        target = abstract_run(directory, execution)
        check_replicated(target, execution.layout, config.replicated_tolerance)
        check_exports(target, directory)

        data, reader = open_media(config.data, target.config, directory.source_dir)
        tokenizer = first_then_all(
            "tokenizer", lambda: _make_tokenizer(directory, target, data, reader), directory.path / "tokenizer"
        )
        tasks = _load_tasks(directory, target, tokenizer)
        start = MethodStart(
            run=directory,
            target=target,
            execution=execution,
            tokenizer=tokenizer,
            data=data,
            reader=reader,
            options=_dataset_options(directory, execution, target, reader),
            stack=stack,
        )
        opened = methods[config.method](start)
        if config.epochs is not None and not isinstance(opened.data, PromptBatches):
            steps = opened.data.steps_of_epochs(config.epochs)
            print_status(f"{config.epochs:g} epochs are {steps:,} steps")
            config = dataclasses.replace(config, steps=steps, epochs=None)
            directory = dataclasses.replace(directory, settings=config)

        trainer = Trainer.create(
            config.optimizer_config(),
            target,
            steps=config.steps,
            config=config.step,
            loss=None if opened.method is None else opened.method.loss,
            idle_steps=opened.idle_steps,
        )
        checkpoints = Checkpoints(directory.checkpoint_directory, max_checkpoints=config.max_checkpoints)
        return cls(
            directory=directory,
            changes=changes,
            execution=execution,
            target=target,
            trainer=trainer,
            tokenizer=tokenizer,
            reader=reader,
            data=opened.data,
            held_out=opened.held_out,
            checkpoints=stack.enter_context(checkpoints),
            method=opened.method,
            critic=opened.critic,
            tasks=tasks,
        )

    @property
    def config(self) -> TrainConfig:
        return self.directory.settings

    @property
    def is_writer(self) -> bool:
        """Whether this process writes settings, metrics and plots: only the first process does."""
        return jax.process_index() == 0

    def first_state(self) -> tuple[TrainState, int]:
        """Restore the newest checkpoint, or initialize the state; return it and the number of steps it has taken."""
        config, directory = self.config, self.directory
        key = jax.random.key(config.data.seed)
        print_status("\n".join(describe_model(config, self.target, self.trainer.trainable, self.execution)))
        loss_weights = sum(leaf.size for leaf in jax.tree.leaves(loss_shapes(self.trainer.loss, self.target)))
        if loss_weights > 0:
            print_status(f"the loss has {loss_weights:,} weights, which are trained and saved, but not exported")
        is_new_run = self.is_writer and (self.checkpoints.latest is None or directory.is_imported)
        if broadcast_json("new", is_new_run):
            start = 0
            with StatusLine("making the model", remains=self.describe_progress()):
                model = new_model(directory, self.execution)
                state = self.trainer.init(model, key=jax.random.fold_in(key, 1))
                if self.critic is not None:
                    state = dataclasses.replace(state, critic=self.critic.first_state(key))
        else:
            with StatusLine("loading the checkpoint", remains=self.describe_progress()):
                state, data_state, start = restore_state(
                    self.checkpoints, self.trainer, self.target, key, log=print_status, critic=self.critic
                )
            self.data.set_state(data_state)
            print_status(f"resumed at step {start}")
        print_status(self.data.describe(start, config.steps))
        check(
            start <= config.steps,
            f"steps={config.steps}, but {directory.path} has already taken {start} steps. Give a larger number.",
        )
        for field in ("export", "export_adapter"):
            export = getattr(config, field)
            is_free = export is None or start == config.steps or is_new(export)
            # Long timeout: the other processes may still load the model.
            is_free = broadcast_json(field, is_free, seconds=LONG_TIMEOUT)
            check(is_free, f"{field}={export!r} is not empty. Give a new directory.")
        if self.is_writer:
            directory.save_settings(self.changes, step=start)
            directory.backup.claim()
            directory.backup.save()
        return state, start

    def compile(self, state: TrainState, batch: Batch) -> int | None:
        """Compile `step`; return the memory that it needs per device, in bytes, or None if XLA does not report it."""
        if self.critic is None:
            return self.trainer.compile(state, batch)
        return self.critic.compile(self.trainer, state, batch)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step of the model and of the critic, if there is one. The buffers of `state` are donated."""
        return self.trainer.step(state, batch) if self.critic is None else self.critic.step(self.trainer, state, batch)

    def batch_metrics(self) -> MetricsRow:
        """Return metrics of the newest batch: epochs, in total and of each source, and the metrics of the method."""
        epochs = {f"epochs/{name}": epochs for name, epochs in self.data.source_epochs().items()}
        return epochs | {"epochs": self.data.epochs} | ({} if self.method is None else self.method.metrics())

    def text_model(self, model: Decoder) -> Any:
        """Return the `TextModel` of a model of this run."""
        return text_model_of(self.directory, model, self.tokenizer)

    def back_up_metrics(self) -> None:
        """Copy the metrics to the backup. A failure is only a warning, since the run does not need the copy."""
        try:
            if self.is_writer:
                self.directory.backup.save(GROWING)
        except CheckpointError as error:
            print_status(f"warning: {error}")

    def describe_progress(self) -> str:
        """Describe what is saved before the first step, for the message after a signal."""
        step = self.checkpoints.latest
        return f"the run is as it was saved at step {step}" if step else "the tokenizer and the tokens are kept"


def _format_setting(value: Any) -> str:
    """Format a setting as on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_same_settings(run: RunDirectory) -> None:
    """Raise ConfigError unless all processes have the same settings and the same run directory."""
    shared = dataclasses.replace(run.settings, run_dir="", distributed_timeout=1)
    settings = json.loads(json.dumps(flat_settings(shared)))
    expected = broadcast_json("settings", settings)
    different = [flag(name) for name in expected if settings.get(name) != expected[name]]
    check(
        settings.keys() == expected.keys() and not different,
        f"{', '.join(different) or 'the settings'} must be the same in all processes. Start all of them with the same "
        "command and the same version of this library.",
    )
    if jax.process_count() > 1:
        owner = broadcast_json("lock", run.lock_owner() if jax.process_index() == 0 else "")
        wait_for(
            lambda: run.lock_owner() == owner,
            f"run_dir={run.settings.run_dir!r} is another directory for process {jax.process_index()}",
        )


def fetch_source(run: RunDirectory) -> None:
    """Write the description of the checkpoint `init_from` to `source/`; download the checkpoint if needed."""
    init_from = run.settings.init_from
    exists = run.source_dir.exists()
    is_used = run.has_started or bool(run.checkpoints().steps)
    check(
        init_from is not None or not exists,
        f"{run.source_dir} exists, but init_from={init_from}: it is left from a start or an import that was "
        "interrupted. Give init_from, or choose another run_dir.",
    )
    # an unused source may be that of another init_from
    if init_from is not None and not (exists and is_used):
        with StatusLine(f"fetching {init_from}", remains="what was downloaded is kept"):
            write_source(abstract_hf(init_from), run.source_dir)


def open_media(data: DataConfig, config: DecoderConfig, source: Path) -> tuple[DataConfig, MediaReader | None]:
    """Return the data settings of a run and the reader of its images, videos and audio.

    The reader uses the processor in the directory `source`. A new vision-language model without data is trained on
    generated images. The reader is None for language models, and for new models that are trained on text.
    """
    media = config.media
    tokens = placeholders(media)
    if media is None or not tokens:
        return data, None
    if source.is_dir():
        return data, ProcessorReader(str(source), tokens[0])
    if data.path is not None or media.vision is None or media.image_token is None:
        return data, None
    reader = SyntheticReader.of(config)
    file = cache_directory(data.cache_dir) / "images" / f"{SYNTHETIC_IMAGES}.jsonl"
    return dataclasses.replace(data, path=str(write_questions(file, SYNTHETIC_IMAGES))), reader


def _make_tokenizer(run: RunDirectory, target: Decoder, data: DataConfig, reader: MediaReader | None) -> Tokenizer:
    """Load or train the tokenizer of a run, write it, and check that it fits the model."""
    config = run.settings
    vocab_size = target.config.vocab_size
    source = config.tokenizer or ("bpe" if config.init_from is None else str(run.source_dir))
    max_size = min(vocab_size, config.bpe_vocab_size or vocab_size, *placeholders(target.config.media))
    tokenizer = prepare_tokenizer(run.path / "tokenizer", source, data, max_size)
    is_writer = jax.process_index() == 0
    if is_writer:
        run.write_template()
        new_ids = run.write_stop_ids(tokenizer)
        if new_ids:
            names = ", ".join(f"{decode(tokenizer, [index], special=True)} ({index})" for index in new_ids)
            print_status(
                f"the chat template ends turns with {names}: added to the stop tokens of the run and its exports"
            )
    seq_len = config.data.seq_len
    max_positions = getattr(target.config.positions, "max_positions", seq_len)
    check(
        seq_len <= max_positions,
        f"seq_len={seq_len} exceeds the model's {max_positions} learned positions. Lower seq_len.",
    )
    if is_writer and target.trained_positions is not None and seq_len > target.trained_positions:
        print_status(
            f"warning: seq_len={seq_len} is longer than the {target.trained_positions} positions that the model was "
            "trained on"
        )
    size = getattr(tokenizer, "plain_size", tokenizer.vocab_size)  # without added tokens, which the data may not use
    check(
        size <= vocab_size,
        f"tokenizer={source!r} has {size} ids, but the model has {vocab_size}. Choose a smaller tokenizer or another "
        "model.",
    )
    if reader is None or not config.data.evaluates:
        _check_sample_length(config, target, tokenizer)
    return tokenizer


def _check_sample_length(config: TrainConfig, target: Decoder, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a sample would be longer than the model's learned positions."""
    max_positions = getattr(target.config.positions, "max_positions", None)
    if config.sample_tokens == 0 or max_positions is None:
        return
    prompt_tokens = len(prompt_ids(tokenizer, config.prompt))
    check(
        prompt_tokens + config.sample_tokens <= max_positions,
        f"sample_tokens={config.sample_tokens} and the {prompt_tokens} tokens of prompt={config.prompt!r} exceed the "
        f"model's {max_positions} learned positions. Lower sample_tokens, or shorten the prompt.",
    )


def _load_tasks(run: RunDirectory, target: Decoder, tokenizer: Tokenizer) -> Any:
    """Load the `TaskEvaluator` of `eval_tasks`, before the data, so that mistakes are reported early."""
    if not run.settings.eval_tasks:
        return None
    from eqx_decoders.evaluation.task_evaluator import TaskEvaluator  # imports the serving engine

    return TaskEvaluator.create(run.settings.eval_tasks, text_model_of(run, target, tokenizer), flag="eval_tasks")


def _dataset_options(
    run: RunDirectory, execution: Execution, target: Decoder, reader: MediaReader | None
) -> Mapping[str, Any]:
    """Return the options of `make_dataset`.

    They are the directory of tokenized data, the batch rows of this process, the chat template, and the media reader.
    """
    rows = host_rows(execution.layout, run.settings.data.batch_size)
    options = {"folder": run.data_dir, "rows": rows, "template": run.template()}
    if reader is None:
        return options
    by_row = run.settings.step.gradient_accumulation_steps > 1 or not execution.layout.single
    return options | {"media": (target.config, reader), "groups": len(rows) if by_row else 1}


def restore_state(
    checkpoints: Checkpoints,
    trainer: Trainer,
    model: Decoder,
    key: PRNGKeyArray,
    log: Callable[[str], None] = lambda text: None,
    critic: Critic | None = None,
) -> Restored:
    """Restore the newest training state of a run, the state of its data and its step.

    A state with another optimizer, other trainable weights, or with or without moving averages is read as it was saved,
    then converted to a state of `trainer` by `adopt`. Raises ConfigError unless the checkpoint and the run both have a
    critic, or neither has one.

    **Arguments:**

    - `model`: the shapes of the model.
    - `log`: called with a line about the parts of the optimizer state that are new.
    """
    savers: dict[int, Trainer] = {}
    critic_savers: dict[int, Trainer] = {}

    def saved_shapes(manifest: dict[str, Any]) -> TrainState:
        saver = _saver_of(manifest, trainer, model)
        savers[manifest["step"]] = saver
        state = saver.abstract(model, key=key)
        _check_critic(manifest, critic)
        _check_loss_weights(manifest, state)
        if critic is None:
            return state
        settings = parse_settings(manifest["config"])
        critic_saver = critic.trainer if settings is None else critic.make_trainer(settings)
        critic_savers[manifest["step"]] = critic_saver
        return dataclasses.replace(state, critic=critic_saver.abstract(critic.target, key=key))

    state, data_state, step = checkpoints.restore_for(saved_shapes)
    if not is_same(trainer, savers[step]):
        log(describe_adoption(trainer, savers[step]))
    state = adopt(trainer, state, savers[step])
    if critic is not None and state.critic is not None:
        state = dataclasses.replace(state, critic=adopt(critic.trainer, state.critic, critic_savers[step]))
    return Restored(state, data_state, step)


def _saver_of(manifest: Mapping[str, Any], trainer: Trainer, model: Decoder) -> Trainer:
    """Return the trainer that saved a checkpoint, from its settings; `trainer` if the settings are unknown."""
    settings = parse_settings(manifest["config"])
    if settings is not None:
        optimizer = settings.optimizer_config()
        saver = Trainer.create(optimizer, model, steps=settings.steps, loss=trainer.loss)
        trained = trained_weights(manifest["arrays"], model)
        if trained and trained != saver.trainable:  # the patterns matched other weights when the checkpoint was saved
            optimizer = dataclasses.replace(optimizer, trainable=tuple(sorted(trained)))
            saver = Trainer.create(optimizer, model, steps=settings.steps, loss=trainer.loss)
        if not is_same(trainer, saver):
            trainer = saver
    return dataclasses.replace(trainer, ema_decay=0.5 if ema_weights(manifest["arrays"]) else None)


def _check_critic(manifest: Mapping[str, Any], critic: Critic | None) -> None:
    has_critic = any(name.startswith("critic.") for name in manifest["arrays"])
    if has_critic and critic is None:
        raise ConfigError(
            f"rl.baseline: the checkpoint of step {manifest['step']} has a critic, but the run has none. Set "
            "rl.baseline='critic', or start a new run."
        )
    if critic is not None and not has_critic:
        raise ConfigError(
            f"rl.baseline='critic': the checkpoint of step {manifest['step']} has no critic. Leave rl.baseline as it "
            "was, or start a new run."
        )


def _check_loss_weights(manifest: Mapping[str, Any], state: TrainState) -> None:
    """Raise ConfigError unless the checkpoint has the weights of the loss that the run needs."""
    arrays = manifest["arrays"]
    saved = {name: tuple(array["shape"]) for name, array in arrays.items() if name.startswith(LOSS_WEIGHTS)}
    needed = {LOSS_WEIGHTS + name: leaf.shape for name, leaf in named_leaves(state.loss_weights).items()}
    check(
        saved == needed,
        f"the checkpoint of step {manifest['step']} has the loss weights {saved or 'none'}, but the loss of this run "
        f"has {needed or 'none'}. Leave the settings of the loss as they were, or start a new run.",
    )
