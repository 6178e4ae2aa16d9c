"""The start of a training run: its settings, model, tokenizer, data and checkpoints, before the first step."""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from eqx_decoders.context import Execution
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import prepare_tokenizer
from eqx_decoders.data.host_rows import host_rows
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.errors import check
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.coordination import LONG, all_gather_json, first_then_all, from_first, wait_for
from eqx_decoders.io.huggingface.load import abstract_hf
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import Tokenizer, decode, prompt_ids
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.replication import check_replicated
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.config_file import flat_settings
from eqx_decoders.training.flags import flag
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod
from eqx_decoders.training.run.media_eval import with_images
from eqx_decoders.training.run.messages import describe_model, format_setting, print_status
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.run.resume_run import restore_state, resume
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.run.run_export import check_exports
from eqx_decoders.training.run.run_model import abstract_run, new_model, write_config, write_source
from eqx_decoders.training.settings_file import is_new
from eqx_decoders.training.step.loss_weights import loss_shapes
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import TrainState


# what opens the data of a method, and makes what its runs compute beside their steps; imported where a run needs it
METHODS = {
    "sft": "training.methods.texts:open_texts",
    "dpo": "training.methods.preference_run:open_preferences",
    "kto": "training.methods.preference_run:open_preferences",
    "reward": "training.methods.reward_run:open_rewards",
    "rl": "rl.open_run:open_rl",
    "distill": "training.methods.distill_run:open_distillation",
}


def open_method(start: MethodStart) -> OpenedMethod:
    """Open the data of a run's method."""
    module, function = METHODS[start.config.method].split(":")
    return getattr(importlib.import_module(f"eqx_decoders.{module}"), function)(start)


def prepare_run(run: RunDirectory, execution: Execution, stack: contextlib.ExitStack) -> PreparedRun:
    """Open the model and the data of a run, in all processes at once; `stack` closes them."""
    writes = jax.process_index() == 0
    if writes:
        run.restore()
    all_gather_json("brought back", seconds=LONG)
    run, changes = resume(run)
    config = run.settings
    if writes:
        run.check_checkpoint_dir(changes)
    for name, (was, now) in changes.items():
        print_status(f"changed: {flag(name)} {format_setting(was)} -> {format_setting(now)}")
    check_same_settings(run)
    if writes:  # settings now: they say what the tokenizer and the tokens are made with
        write_config(run, save=not changes and not run.checkpoints().steps)
        fetch_source(run)
    all_gather_json("source", seconds=LONG)
    target = abstract_run(run, execution)
    check_replicated(target, execution.layout, config.replicated_tolerance)
    check_exports(target, run)
    data_config, reader = with_images(config.dataset, target.config, run.source)
    tokenizer = first_then_all(
        "tokenizer", lambda: make_tokenizer(run, target, data_config, reader), run.path / "tokenizer"
    )
    tasks = _load_tasks(run, target, tokenizer)
    opened = open_method(
        MethodStart(
            run=run,
            target=target,
            execution=execution,
            tokenizer=tokenizer,
            data=data_config,
            reader=reader,
            options=_data_options(run, execution, target, reader),
            stack=stack,
        )
    )
    return PreparedRun(
        directory=run,
        changes=changes,
        execution=execution,
        target=target,
        tokenizer=tokenizer,
        reader=reader,
        data=opened.data,
        held_out=opened.held_out,
        checkpoints=stack.enter_context(Checkpoints(run.checkpoint_directory, max_checkpoints=config.max_checkpoints)),
        tasks=tasks,
        method=opened.method,
        trainer=Trainer.create(
            config.optimizer_config(),
            target,
            steps=config.steps,
            config=config.step,
            loss=None if opened.method is None else opened.method.loss,
            idle_steps=opened.idle_steps,
        ),
        critic=opened.critic,
    )


def fetch_source(run: RunDirectory) -> None:
    """Write the description of the model that a run starts from, which may have to be downloaded first."""
    source, exists = run.settings.init_from, run.source.exists()
    started = run.has_started or bool(run.checkpoints().steps)
    rule = f"{run.source} is there, but init_from={source}: of a start or an import that did not come to"
    check(source is not None or not exists, f"{rule} its end. Give init_from, or choose another run_dir.")
    if source is not None and not (exists and started):  # else it may be another one's
        with StatusLine(f"fetching {source}", remains="what was downloaded is kept"):
            write_source(abstract_hf(source), run.source)


def check_same_settings(run: RunDirectory) -> None:
    """Raise ConfigError unless all processes were started with the same settings, on one run directory."""
    shared = dataclasses.replace(run.settings, run_dir="", distributed_timeout=1)
    settings = json.loads(json.dumps(flat_settings(shared)))
    first = from_first("settings", settings)
    others = [flag(name) for name in first if settings.get(name) != first[name]]
    rule = "must be the same in all processes, started with one command and one version of this library"
    check(settings.keys() == first.keys() and not others, f"{', '.join(others) or 'the settings'} {rule}.")
    if jax.process_count() > 1:
        owner = from_first("lock", run.lock_owner() if jax.process_index() == 0 else "")
        rule = f"run_dir={run.settings.run_dir!r} is another directory for process {jax.process_index()}"
        wait_for(lambda: run.lock_owner() == owner, rule)


def make_tokenizer(run: RunDirectory, target: Decoder, data: DataConfig, reader: MediaReader | None) -> Tokenizer:
    """Load the tokenizer of a run or of the checkpoint that it starts from, or train one; check that it fits."""
    config, size = run.settings, target.config.vocab_size
    spec = config.tokenizer or ("bpe" if config.init_from is None else str(run.source))
    limit = min(size, config.bpe_vocab_size or size, *placeholders(target.config.media))
    tokenizer = prepare_tokenizer(run.path / "tokenizer", spec, data, limit)
    writes = jax.process_index() == 0
    if writes:
        run.write_template()
        new = run.write_stop_ids(tokenizer)
        if new:
            names = ", ".join(f"{decode(tokenizer, [index], special=True)} ({index})" for index in new)
            print_status(
                f"the chat template ends turns with {names}: added to the stop tokens of the run and its exports"
            )
    length = config.dataset.seq_len
    rows = getattr(target.config.positions, "max_positions", length)
    check(length <= rows, f"seq_len={length}, but the model has {rows} learned positions: lower it.")
    trained = target.trained_positions
    if writes and trained is not None and length > trained:
        print_status(f"warning: seq_len={length} is beyond the {trained} positions that the model was trained on")
    rule = f"but the model only {size}. Choose a smaller tokenizer or another model"
    count = getattr(tokenizer, "plain_size", tokenizer.vocab_size)  # the data may have none of the added tokens
    check(count <= size, f"tokenizer={spec!r} has {count} ids, {rule}.")
    if reader is None or not config.dataset.evaluates:
        _check_sample_length(config, target, tokenizer)
    return tokenizer


def _load_tasks(run: RunDirectory, target: Decoder, tokenizer: Tokenizer) -> Any:
    """Load the `TaskEvaluator` of the tasks that a run is measured on, before what takes long; None without tasks."""
    if not run.settings.eval_tasks:
        return None
    # late: runs without tasks need neither the engine nor what answers and grades
    from eqx_decoders.evaluation.task_evaluator import TaskEvaluator
    from eqx_decoders.training.run.run_loading import text_model_of

    return TaskEvaluator.create(run.settings.eval_tasks, text_model_of(run, target, tokenizer), flag="eval_tasks")


def _check_sample_length(config: TrainConfig, target: Decoder, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a sample longer than the model's learned positions: now, not after hours."""
    new, rows = config.sample_tokens, getattr(target.config.positions, "max_positions", None)
    if new == 0 or rows is None:
        return
    prompt = len(prompt_ids(tokenizer, config.prompt))
    rule = f"exceed the model's {rows} learned positions with the {prompt} tokens of prompt={config.prompt!r}"
    check(prompt + new <= rows, f"sample_tokens={new} {rule}: lower sample_tokens, or shorten the prompt.")


def _data_options(
    run: RunDirectory, execution: Execution, target: Decoder, reader: MediaReader | None
) -> Mapping[str, Any]:
    """Return the folder of tokens, this process's rows of a batch, the chat template, and the reader of media."""
    rows = host_rows(execution.layout, run.settings.dataset.batch_size)
    options = {"folder": run.data, "rows": rows, "template": run.template()}
    if reader is None:
        return options
    by_row = run.settings.step.gradient_accumulation_steps > 1 or not execution.layout.single
    return options | {"media": (target.config, reader), "groups": len(rows) if by_row else 1}


def first_state(run: PreparedRun) -> tuple[TrainState, int]:
    """Restore the state of the newest checkpoint, or make a new one; return it and the steps that it has taken."""
    config, key, directory = run.config, jax.random.key(run.config.dataset.seed), run.directory
    print_status("\n".join(describe_model(config, run.target, run.trainer.trainable, run.execution)))
    size = sum(leaf.size for leaf in jax.tree.leaves(loss_shapes(run.trainer.loss, run.target)))
    if size > 0:
        print_status(f"the loss has {size:,} weights of its own, which are trained with the model and in no export")
    if from_first("new", run.writes and (run.checkpoints.latest is None or directory.is_imported)):
        with StatusLine("making the model", remains=run.progress_so_far()):
            model = new_model(directory, run.execution)
            state, start = run.trainer.init(model, key=jax.random.fold_in(key, 1)), 0
            if run.critic is not None:
                state = dataclasses.replace(state, critic=run.critic.first_state(key))
    else:
        with StatusLine("loading the checkpoint", remains=run.progress_so_far()):
            state, data_state, start = restore_state(
                run.checkpoints, run.trainer, run.target, key, say=print_status, critic=run.critic
            )
        run.data.set_state(data_state)
        print_status(f"resumed at step {start}")
    print_status(run.data.describe(start, config.steps))
    check(start <= config.steps, f"steps={config.steps}, but {directory.path} has done {start} already: ask for more.")
    for field in ("export", "export_adapter"):  # checked before the training, not after it
        export = getattr(config, field)
        free = export is None or start == config.steps or is_new(export)
        free = from_first(field, free, seconds=LONG)  # behind the loading of the model
        check(free, f"{field}={export!r} is not empty: give a new directory.")
    if run.writes:
        directory.save_settings(run.changes, step=start)
        directory.backup.claim()
        directory.backup.save()
    return state, start
