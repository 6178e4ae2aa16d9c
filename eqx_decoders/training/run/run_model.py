"""The model of a run: named in its settings, in its `model.json`, or from a Hugging Face checkpoint."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.context import Execution
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.families.registry import get_config
from eqx_decoders.io.atomic_files import new_directory, write_atomically, write_json
from eqx_decoders.io.checkpoint.checkpoints import load_weights
from eqx_decoders.io.huggingface.directory import parse_json
from eqx_decoders.io.huggingface.export_config import export_config, merged
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer
from eqx_decoders.io.huggingface.load import abstract_hf, decode_config, load_hf, read_config
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract, add_mtp, add_score_head, init
from eqx_decoders.sharding.axes import matching, named_leaves, replaced
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.step_settings import ModelSettings


def model_config(settings: ModelSettings) -> DecoderConfig:
    """Return the configuration that the settings name: a preset or that of a file, with the fields that are `set`."""
    file = settings.model_config
    return with_fields(get_config(settings.model) if file is None else _read_config_file(file), settings.set)


def _read_config_file(path: str) -> DecoderConfig:
    """Read a configuration from a file of `DecoderConfig.to_json`, or from a `config.json` of Hugging Face."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_config={str(path)!r} cannot be read: {error}.") from error
    if '"model_type"' not in text:
        return DecoderConfig.from_json(text)
    return decode_config(parse_json(text.encode(), str(path)), str(path))[0]


def run_config(run: RunDirectory) -> DecoderConfig:
    """Return the configuration of a run without `source/`: its `model.json`, if the settings still name that model."""
    if run.model_file.is_file() and run.has_settings and names_same_model(run.as_saved().settings, run.settings):
        return DecoderConfig.from_json(run.model_file.read_text())
    return model_config(run.settings)


def names_same_model(one: TrainConfig, other: TrainConfig) -> bool:
    """Return whether two settings name a model in the same words."""
    return all(getattr(one, name) == getattr(other, name) for name in ("model", "model_config", "set", "init_from"))


def write_config(run: RunDirectory, *, save: bool = False) -> None:
    """Write the configuration of a run into its directory, where no flag is needed to find it again.

    save: write the settings, too, and first: they tell that the directory is a run's.
    """
    file, has_config = run.model_file, run.settings.init_from is None and not run.source.exists()
    content = run_config(run).to_json().encode() if has_config else b""
    if save:
        if has_config and file.is_file() and file.read_bytes() != content:
            file.unlink()  # of an earlier start: these never stand beside the configuration of another model
        run.save_settings()
    if has_config:
        write_atomically(file, content)


def write_source(model: Decoder, folder: Path) -> None:
    """Write the description of a loaded model, its tokenizer and its generation settings to a run's `source`."""
    if model.origin is None:
        return
    _, settings = export_config(model)
    with new_directory(folder) as partial:
        copy_tokenizer(model.origin.directory, partial)
        write_json(partial / "config.json", merged(json.loads(model.origin.settings), settings))
        shutil.rmtree(folder, ignore_errors=True)  # of a start that did not come to its end


def abstract_run(run: RunDirectory, execution: Execution = Execution()) -> Decoder:
    """Return the shapes of a run's model, with its LoRA pairs."""
    return _with_additions(abstract_base(run, execution), run.settings, jax.random.key(0))


def _with_additions(model: Decoder, settings: TrainConfig, key: PRNGKeyArray) -> Decoder:
    """Return the model with what the run adds: depths of multi-token prediction, a head of scores, LoRA pairs."""
    lora = settings.lora()
    if settings.method == "reward":
        rule = f"method='reward' trains one score, but init_from={settings.init_from!r} gives {model.config.scores}"
        check(model.config.scores in (None, 1), f"{rule}: take a model with one, or with logits.")
    if settings.method == "reward" and model.config.scores is None:
        model = add_score_head(model, key=jax.random.fold_in(key, 3))
    if settings.mtp_depths > 0:
        model = add_mtp(model, settings.mtp_depths, key=jax.random.fold_in(key, 2))
    return model if lora is None else add_lora(model, lora, key=jax.random.fold_in(key, 1))


def abstract_base(run: RunDirectory, execution: Execution) -> Decoder:
    """Return the shapes of a run's model without what the run adds to it."""
    options = vars(execution)
    if run.source.exists():
        config, origin = read_config(run.source)
        return dataclasses.replace(abstract(config, **options), origin=origin)
    if run.settings.init_from is not None:
        return abstract_hf(run.settings.init_from, **options)
    return abstract(run_config(run), **options)


def new_model(run: RunDirectory, execution: Execution = Execution()) -> Decoder:
    """Make a run's model before its first step."""
    return _with_additions(new_base(run, execution), run.settings, _first_key(run))


def _first_key(run: RunDirectory) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.key(run.settings.dataset.seed), 0)


def new_base(run: RunDirectory, execution: Execution) -> Decoder:
    """Make a run's model before its first step, without what the run adds to it."""
    options, settings, key = vars(execution), run.settings, _first_key(run)
    if settings.init_from is None:
        return init(run_config(run), key=key, **options)
    if run.is_imported:
        target = abstract_base(run, with_params_dtype(execution, "float32"))  # as they were imported
        model = load_weights(run.checkpoints().directory, target, 0).tree.replace(precision=execution.precision)
        model = jax.tree.map(lambda leaf: leaf.astype(execution.precision.params), model)
    else:
        model = load_hf(settings.init_from, **options)
    if settings.init_weights == ("*",):
        return model
    leaves = named_leaves(model)
    loaded = matching(leaves, settings.init_weights, "init_weights")
    fresh = init(model.config, key=key, **options)
    return dataclasses.replace(replaced(fresh, {name: leaves[name] for name in loaded}), origin=model.origin)


def with_params_dtype(execution: Execution, dtype: str) -> Execution:
    """Return the execution with weights in another dtype."""
    return dataclasses.replace(execution, precision=dataclasses.replace(execution.precision, params=dtype))
