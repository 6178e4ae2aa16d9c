"""The model of a run: named, or from a Hugging Face directory whose description and tokenizer the run keeps.

A run that began from a checkpoint keeps its `config.json` and tokenizer in `source/`, so that it can be resumed,
sampled and exported when the checkpoint is gone. Others keep their configuration in `model.json`.
"""

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.context import Execution, ExecutionOptions
from eqx_decoders.errors import CheckpointError, ConfigError, ConversionError, check
from eqx_decoders.families import get_config
from eqx_decoders.inference.text_model import TextModel, published_model
from eqx_decoders.io.atomic_files import expanded, new_directory, write_atomically, write_json
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints, Restored, load_part, load_weights
from eqx_decoders.io.checkpoint.run_backup import RunBackup
from eqx_decoders.io.coordination import from_first
from eqx_decoders.io.huggingface.directory import parse_json
from eqx_decoders.io.huggingface.export import (
    check_new_directory,
    copy_tokenizer,
    export_config,
    export_plan,
    merged,
    save_hf,
)
from eqx_decoders.io.huggingface.load import abstract_hf, decode_config, load_hf, read_config
from eqx_decoders.io.huggingface.peft import adapter_plan, save_peft
from eqx_decoders.io.run_lock import OWNER, check_run_dir
from eqx_decoders.io.text.chat_template import JINJA, ChatTemplate, load_chat_template, read_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.model.decoder import Decoder, DecoderConfig
from eqx_decoders.model.init import abstract, add_mtp, init
from eqx_decoders.sharding.axes import matching, named_leaves, replaced
from eqx_decoders.training.config import (
    Changes,
    TrainConfig,
    changed_settings,
    check_changes,
    is_new,
    load_settings,
    save_settings,
    settings_of,
)
from eqx_decoders.training.lora import add_lora, merge_lora
from eqx_decoders.training.optimizer.resume import adopt, describe_adoption, is_same, trained_weights
from eqx_decoders.training.step.step import Trainer, TrainState


SOURCE = "source"
MODEL = "model.json"


def keep_source(model: Decoder, run_dir: str | Path) -> None:
    """Write the description of a loaded model, its tokenizer and its generation settings to `<run_dir>/source`."""
    folder = Path(run_dir) / SOURCE
    if model.origin is None:
        return
    _, settings = export_config(model)
    with new_directory(folder) as partial:
        copy_tokenizer(model.origin.directory, partial)
        write_json(partial / "config.json", merged(json.loads(model.origin.settings), settings))
        shutil.rmtree(folder, ignore_errors=True)  # of a start that did not come to its end


def model_config(settings: TrainConfig) -> DecoderConfig:
    """The configuration that the settings name: a preset or that of a file, with the fields that are `set`."""
    file = settings.model_config
    return with_fields(get_config(settings.model) if file is None else _read_config_file(file), settings.set)


def _read_config_file(path: str) -> DecoderConfig:
    """The configuration in a file of `DecoderConfig.to_json`, or in a `config.json` of Hugging Face."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_config={str(path)!r} cannot be read: {error}.") from error
    if '"model_type"' not in text:
        return DecoderConfig.from_json(text)
    return decode_config(parse_json(text.encode(), str(path)), str(path))[0]


def run_config(settings: TrainConfig, run_dir: str | Path) -> DecoderConfig:
    """The configuration of a run that has no `source/`: the one it keeps, if the settings name the same as its own."""
    kept, own = Path(run_dir) / MODEL, Path(run_dir) / "settings.json"
    if kept.is_file() and own.is_file() and _same_model(load_settings(own), settings):
        return DecoderConfig.from_json(kept.read_text())
    return model_config(settings)


def _same_model(one: TrainConfig, other: TrainConfig) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("model", "model_config", "set", "init_from"))


def keep_config(settings: TrainConfig, run_dir: str | Path, *, save: bool = False) -> None:
    """Write the run's configuration into its directory, where no flag is needed to find it again.

    save: write the settings, too, and first: they tell that the directory is a run's.
    """
    file, own = Path(run_dir) / MODEL, settings.init_from is None and not (Path(run_dir) / SOURCE).exists()
    content = run_config(settings, run_dir).to_json().encode() if own else b""
    if save:
        if own and file.is_file() and file.read_bytes() != content:
            file.unlink()  # of an earlier start: these never stand beside the configuration of another model
        save_settings(settings, Path(run_dir) / "settings.json")
    if own:
        write_atomically(file, content)


def resume_settings(settings: TrainConfig, run_dir: str | Path) -> tuple[TrainConfig, Changes]:
    """The settings with which a run directory is resumed, or begun if it is new, and what they change.

    `init_from` may be left out. Raises ConfigError for changes that `check_changes` refuses. A directory in which
    nothing was made yet, or that the convert program made, has not been trained, and takes any.
    """
    run = Path(run_dir)
    if not _has_model(run):
        return settings, {}
    old = load_settings(run / "settings.json")
    if settings.init_from is None and settings.model == old.model:
        settings = dataclasses.replace(settings, init_from=old.init_from)
    if not (is_begun(run) or checkpoints_of(old, run).steps) or is_imported(settings, run_dir):
        return settings, {}
    if settings.init_from is None and old.init_from is None and not _same_model(old, settings):
        kept, same = run_config(old, run), _same_model(dataclasses.replace(old, set=settings.set), settings)
        if kept == (with_fields(kept, settings.set) if same else model_config(settings)):  # the same in other words
            settings = dataclasses.replace(settings, model=old.model, model_config=old.model_config, set=old.set)
    changes = changed_settings(old, settings)
    trained = checkpoints_of(old, run).latest
    check_changes(changes, run_dir, allowed=settings.allow_changes, trained=trained is not None)
    if "checkpoint_dir" in changes and trained is not None:
        _check_moved(old, settings, run, trained)
    return settings, changes


def _check_moved(old: TrainConfig, settings: TrainConfig, run: Path, trained: int) -> None:
    """A run whose checkpoints are in another directory from now on must find its own there."""
    was, now = (str(_checkpoint_dir(each, run)) for each in (old, settings))
    rule = f"checkpoint_dir={settings.checkpoint_dir!r}, but step {trained} of {run} is in {was}"
    there = Checkpoints(now).latest
    check(there is not None and there >= trained, f"{rule}: copy {was} to {now}, or leave checkpoint_dir as it was.")
    copied = copied_run(now)
    if copied is not None:
        other = load_settings(copied / "settings.json")
        check_changes(changed_settings(other, settings), now, allowed=settings.allow_changes, trained=True)


def _checkpoint_dir(settings: TrainConfig, run_dir: str | Path) -> str | Path:
    return settings.checkpoint_dir or Path(run_dir) / "checkpoints"


def checkpoints_of(settings: TrainConfig, run_dir: str | Path) -> Checkpoints:
    """The checkpoints of a run, to be read: where the settings say, or what the convert program put into the run."""
    elsewhere = Checkpoints(_checkpoint_dir(settings, run_dir))
    if settings.checkpoint_dir is None or elsewhere.latest is not None:
        return elsewhere
    return Checkpoints(Path(run_dir) / "checkpoints")


def copied_run(checkpoint_dir: str) -> Path | None:
    """What a run keeps beside its checkpoints as a run directory, until this process ends; None if there is none."""
    if not RunBackup("", checkpoint_dir).there:
        return None
    folder = Path(tempfile.mkdtemp(prefix="eqx_decoders-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    RunBackup(folder, checkpoint_dir).bring_back()
    settings = load_settings(folder / "settings.json")
    save_settings(dataclasses.replace(settings, checkpoint_dir=checkpoint_dir), folder / "settings.json")
    return folder


def local_run(run_dir: str | Path) -> Path:
    """A run directory, of which a copy is made if it is `gs://…`, the directory of the checkpoints of a run."""
    if "://" not in str(run_dir):
        return Path(expanded(run_dir))
    folder = copied_run(str(run_dir))
    if folder is None:
        rule = f"run_dir={str(run_dir)!r} is no checkpoint_dir of a run"
        raise CheckpointError(f"{rule}: it has no run/settings.json. Give the run's directory, or its checkpoint_dir.")
    return folder


def begun_run(run_dir: str | Path, checkpoint_dir: str | None) -> Path | None:
    """Where the files of a run are that was begun: its directory, or a copy of those beside its checkpoints.

    The latter where there is no such directory on this machine, or the run was started on another one since.
    """
    run = Path(run_dir)
    if _has_model(run):
        check_run_dir(run)
        checkpoint_dir = checkpoint_dir or load_settings(run / "settings.json").checkpoint_dir
        if not RunBackup(run, checkpoint_dir).taken_over:
            return run
    return None if checkpoint_dir is None else copied_run(checkpoint_dir)


def check_found(settings: TrainConfig, changes: Changes, run_dir: str | Path) -> None:
    """Raise CheckpointError if a run that has taken steps finds nothing of it in its checkpoint_dir: not mounted?"""
    metrics = Path(run_dir) / "metrics.jsonl"
    if settings.checkpoint_dir is None or "checkpoint_dir" in changes or not metrics.exists():
        return
    there = metrics.stat().st_size == 0 or RunBackup(run_dir, settings.checkpoint_dir).there
    rule = f"checkpoint_dir={settings.checkpoint_dir!r} is empty, but {run_dir} has saved there"
    check(there, f"{rule}: is it mounted? To begin anew, choose another run_dir.", CheckpointError)


def is_begun(run_dir: str | Path) -> bool:
    """Whether there is a run with at least a tokenizer or a checkpoint, or that has come to its first step.

    An earlier start may have been stopped before. What it was to start from is no sign that anything was made of it.
    """
    run = Path(run_dir)
    made, metrics = ("tokenizer", "checkpoints", OWNER), run / "metrics.jsonl"
    stepped = metrics.is_file() and metrics.stat().st_size > 0
    return (run / "settings.json").is_file() and (stepped or any((run / name).exists() for name in made))


def _has_model(run: Path) -> bool:
    """Whether a start without init_from goes on with what a run was begun with, or was to start from."""
    return is_begun(run) or ((run / "settings.json").is_file() and (run / SOURCE).exists())


def is_imported(settings: TrainConfig, run_dir: str | Path) -> bool:
    """Whether the checkpoint of a run is weights alone, from the convert program."""
    checkpoints = checkpoints_of(settings, run_dir)
    return checkpoints.latest == 0 and checkpoints.manifest(0)["data_state"] == {}


def abstract_run(settings: TrainConfig, run_dir: str | Path, execution: Execution = Execution()) -> Decoder:
    """The shapes of a run's model, with its LoRA pairs."""
    return _extended(_abstract_base(settings, run_dir, execution), settings, jax.random.key(0))


def _extended(model: Decoder, settings: TrainConfig, key: PRNGKeyArray) -> Decoder:
    """The model with the depths of multi-token prediction and the LoRA pairs that the run adds."""
    lora = settings.lora()
    if settings.mtp_depths > 0:
        model = add_mtp(model, settings.mtp_depths, key=jax.random.fold_in(key, 2))
    return model if lora is None else add_lora(model, lora, key=jax.random.fold_in(key, 1))


def _abstract_base(settings: TrainConfig, run_dir: str | Path, execution: Execution) -> Decoder:
    options, source = vars(execution), Path(run_dir) / SOURCE
    if source.exists():
        config, origin = read_config(source)
        return dataclasses.replace(abstract(config, **options), origin=origin)
    if settings.init_from is not None:
        return abstract_hf(settings.init_from, **options)
    return abstract(run_config(settings, run_dir), **options)


def new_model(settings: TrainConfig, run_dir: str | Path, execution: Execution = Execution()) -> Decoder:
    """A run's model before its first step."""
    key = jax.random.fold_in(jax.random.key(settings.dataset.seed), 0)
    return _extended(_new_base(settings, run_dir, execution, key), settings, key)


def _new_base(settings: TrainConfig, run_dir: str | Path, execution: Execution, key: PRNGKeyArray) -> Decoder:
    options = vars(execution)
    if settings.init_from is None:
        return init(run_config(settings, run_dir), key=key, **options)
    if is_imported(settings, run_dir):
        target = _abstract_base(settings, run_dir, _with_params(execution, "float32"))  # as they were imported
        model = load_weights(Path(run_dir) / "checkpoints", target, 0).replace(precision=execution.precision)
        model = jax.tree.map(lambda leaf: leaf.astype(execution.precision.params), model)
    else:
        model = load_hf(settings.init_from, **options)
    if settings.init_weights == ("*",):
        return model
    leaves = named_leaves(model)
    taken = matching(leaves, settings.init_weights, "init_weights")
    fresh = init(model.config, key=key, **options)
    return dataclasses.replace(replaced(fresh, {name: leaves[name] for name in taken}), origin=model.origin)


def run_template(settings: TrainConfig, run_dir: str | Path) -> ChatTemplate | None:
    """What writes a run's conversations as texts: the file that it was given, else what came with its tokenizer."""
    folder, file = _tokenizer_dir(settings, run_dir), settings.dataset.chat_template
    kept = file is not None and not Path(file).exists() and (folder / JINJA).exists()
    return load_chat_template(folder, file=None if kept else file)


def keep_template(settings: TrainConfig, run_dir: str | Path) -> None:
    """Put the file of a chat template beside the tokenizer of the run, with which it is exported."""
    file = settings.dataset.chat_template
    if file is not None and Path(file).exists():
        source = read_chat_template(file).source
        write_atomically(_tokenizer_dir(settings, run_dir) / JINJA, source.encode())


def _tokenizer_dir(settings: TrainConfig, run_dir: str | Path) -> Path:
    own = settings.tokenizer is not None or not (Path(run_dir) / SOURCE).exists()
    return Path(run_dir) / ("tokenizer" if own else SOURCE)


def restore_state(
    checkpoints: Checkpoints,
    trainer: Trainer,
    model: Decoder,
    key: PRNGKeyArray,
    say: Callable[[str], None] = lambda text: None,
) -> Restored:
    """The newest state of a run, its data's state and its step, for models shaped like `model`.

    One that was saved by another optimizer, of other weights that are trained, or with or without running means is read
    as it was saved, and goes on as one of `trainer` (see `adopt`); `say` is told what is new then.
    """
    savers: dict[int, Trainer] = {}

    def as_saved(manifest: dict[str, Any]) -> TrainState:
        savers[manifest["step"]] = saver = _trainer_of(manifest, trainer, model)
        return saver.abstract(model, key=key)

    state, data_state, step = checkpoints.restore_for(as_saved)
    if not is_same(trainer, savers[step]):
        say(describe_adoption(trainer, savers[step]))
    return Restored(adopt(trainer, state, savers[step]), data_state, step)


def _trainer_of(manifest: Mapping[str, Any], trainer: Trainer, model: Decoder) -> Trainer:
    """What trained the state of a checkpoint, as far as it tells: `trainer`, or one with the settings kept there."""
    settings = settings_of(manifest["config"])
    if settings is not None:
        optimizer, trained = settings.optimizer_config(), trained_weights(manifest["arrays"], model)
        saver = Trainer.create(optimizer, model, steps=settings.steps)
        if trained and trained != saver.trainable:  # its patterns meant others: those of buffers, in earlier versions
            optimizer = dataclasses.replace(optimizer, trainable=tuple(sorted(trained)))
            saver = Trainer.create(optimizer, model, steps=settings.steps)
        if not is_same(trainer, saver):
            trainer = saver
    return dataclasses.replace(trainer, ema_decay=0.5 if _means(manifest["arrays"]) else None)


def load_run(
    run_dir: str | Path, step: int | None = None, *, ema: bool = True, **execution: Unpack[ExecutionOptions]
) -> Decoder:
    """The newest weights of a run, or those of `step`, with adapters merged into them.

    They are the running means where the run keeps them, unless `ema` is False. `run_dir` may also be the
    `checkpoint_dir` of a run, as `gs://…`.
    """
    run = local_run(run_dir)
    settings = load_settings(run / "settings.json")
    checkpoints = checkpoints_of(settings, run)
    target = abstract_run(settings, run, _with_params(Execution(**execution), settings.params_dtype))
    model, _, step = load_part(checkpoints.directory, target, step)  # all of what follows is of this step
    if ema and settings.optimizer.ema_decay is not None:
        weights = named_leaves(model)
        names = _means(checkpoints.manifest(step)["arrays"])
        like = {name: jax.ShapeDtypeStruct(x.shape, "float32", sharding=x.sharding) for name, x in weights.items()}
        means = load_weights(checkpoints.directory, {name: like[name] for name in names}, step, prefix="ema.")
        model = replaced(model, {name: mean.astype(weights[name].dtype) for name, mean in means.items()})
    return merge_lora(model)


def _means(arrays: Mapping[str, Any]) -> list[str]:
    """The paths of the weights whose running means a checkpoint has, from the paths of all that it has."""
    return [name.removeprefix("ema.") for name in arrays if name.startswith("ema.")]


def _with_params(execution: Execution, dtype: str) -> Execution:
    return dataclasses.replace(execution, precision=dataclasses.replace(execution.precision, params=dtype))


def load_text_run(run_dir: str | Path, step: int | None = None, **execution: Unpack[ExecutionOptions]) -> TextModel:
    """The model and the tokenizer of a run (see `load_run`).

    One that was trained with the tokenizer of a published model has its chat template and its defaults, too.
    """
    run = local_run(run_dir)
    settings = load_settings(run / "settings.json")
    model = load_run(run, step, **execution)
    source = run / SOURCE
    if settings.tokenizer is None and source.exists():
        return published_model(model, load_tokenizer(source), source)
    tokenizer = load_tokenizer(run / "tokenizer")
    chat = load_chat_template(run / "tokenizer") if isinstance(tokenizer, JsonTokenizer) else None
    return TextModel(model=model, tokenizer=tokenizer, chat=chat)


def check_exports(target: Decoder, settings: TrainConfig, run_dir: str | Path) -> None:
    """Raise at the start of a run what would keep `settings.export` and `export_adapter` from being written at its end.

    `target` is that of `abstract_run`.
    """
    plans: dict[str, Callable[[], Any]] = {
        "export": lambda: export_plan(_exported(target, settings), settings=_further_keys(settings, Path(run_dir))),
        "export_adapter": lambda: adapter_plan(_without_added(target, settings)),
    }
    for field, plan in plans.items():
        directory = getattr(settings, field)
        if directory is None or not from_first("is_new", is_new(directory)):
            continue
        try:
            check_new_directory(directory)
            plan()
        except ConversionError as error:
            raise ConversionError(f"{field}={directory!r} would fail after the last step. {error}") from error


def export_run(
    model: Decoder, settings: TrainConfig, run_dir: str | Path, directory: str | Path, **options: Any
) -> None:
    """Write a run's model, adapters merged, with its tokenizer as a directory that `from_pretrained` opens.

    `options` are those of `save_hf`.
    """
    run = Path(run_dir)
    own = settings.init_from is None or settings.tokenizer is not None
    keys, tokenizer = _further_keys(settings, run), run / ("tokenizer" if own else SOURCE)
    if own:
        keys |= special_token_ids(load_tokenizer(tokenizer))
    save_hf(_exported(model, settings), directory, settings=keys, tokenizer=tokenizer, **options)


def export_adapter(model: Decoder, settings: TrainConfig, directory: str | Path) -> None:
    """Write the low-rank pairs of a run's model as an adapter of PEFT."""
    save_peft(_without_added(model, settings), directory, base_model=settings.init_from or "")


def _exported(model: Decoder, settings: TrainConfig) -> Decoder:
    """The model of a run as it is exported: adapters merged, without what the run added."""
    return merge_lora(_without_added(model, settings))


def _without_added(model: Decoder, settings: TrainConfig) -> Decoder:
    return model.without_mtp() if settings.mtp_depths > 0 else model


def _further_keys(settings: TrainConfig, run: Path) -> dict[str, Any]:
    """Keys of `config.json` that a run's model has besides those of its source."""
    return {} if (run / SOURCE).exists() else {"max_position_embeddings": settings.dataset.seq_len}


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The keys of `config.json` that name the tokens which begin and end a text."""
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
