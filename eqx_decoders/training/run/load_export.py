"""Trained models: load one from a run's checkpoints, and export one for transformers and PEFT."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import jax

from eqx_decoders.context import Execution, ExecutionOptions
from eqx_decoders.data.end_of_turn import end_of_turn_ids
from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import TextModel, build_text_model
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.checkpoint.checkpoints import load_weights
from eqx_decoders.io.huggingface.export import export_plan, save_hf
from eqx_decoders.io.huggingface.export_directory import check_new_directory, copy_tokenizer
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import abstract_hf, load_hf
from eqx_decoders.io.huggingface.peft import adapter_plan, save_peft
from eqx_decoders.io.processes import broadcast_json
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.lora import merge_lora
from eqx_decoders.training.optimizer.resume import ema_weights
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.model import abstract_run, with_params_dtype
from eqx_decoders.training.settings.files import is_new
from eqx_decoders.training.settings.run import TrainConfig


def load_run(
    run_dir: str | Path, step: int | None = None, *, ema: bool = True, **execution: Unpack[ExecutionOptions]
) -> Decoder:
    """Load a run's model from the checkpoint of `step` (None: the newest), with adapters merged.

    **Arguments:**

    - `run_dir`: the run directory, or the `checkpoint_dir` of a run, such as `gs://…`.
    - `ema`: load the exponential moving averages of the weights if the run has them.
    """
    return _load_weights(RunDirectory.open(run_dir), step, Execution(**execution), ema)


def load_text_run(run_dir: str | Path, step: int | None = None, **execution: Unpack[ExecutionOptions]) -> TextModel:
    """Load a run's model like `load_run`, with its tokenizer and chat template."""
    run = RunDirectory.open(run_dir)
    model = _load_weights(run, step, Execution(**execution), ema=True)
    return text_model_of(run, model, load_tokenizer(run.tokenizer_dir))


def text_model_of(run: RunDirectory, model: Decoder, tokenizer: Tokenizer) -> TextModel:
    """Return the `TextModel` of a run's model: with its tokenizer, chat template and stop ids."""
    if run.tokenizer_dir == run.source_dir:
        return dataclasses.replace(build_text_model(model, tokenizer, run.source_dir), stops=run.stop_ids)
    chat = load_chat_template(run.tokenizer_dir) if isinstance(tokenizer, JsonTokenizer) else None
    return TextModel(model=model, tokenizer=tokenizer, chat=chat, stops=run.stop_ids)


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """A second model that a run reads, such as a critic's or a reward model.

    `source`: a run directory, a directory in Hugging Face's format, or "org/name" on the hub.
    """

    source: str

    @property
    def _run(self) -> RunDirectory | None:
        return RunDirectory.open(self.source) if (Path(self.source) / "settings.json").is_file() else None

    @property
    def tokenizer(self) -> Tokenizer:
        """Load its tokenizer."""
        run = self._run
        return load_tokenizer(resolve(self.source).path if run is None else run.tokenizer_dir)

    def load(self, execution: Execution) -> Decoder:
        """Load its weights, like `load_run` if it is a run."""
        run = self._run
        if run is None:
            return load_hf(self.source, **vars(execution))
        return _load_weights(run, None, execution, ema=True)

    def abstract(self, execution: Execution) -> Decoder:
        """Return the shapes and shardings of its weights."""
        run = self._run
        if run is None:
            return abstract_hf(self.source, **vars(execution))
        return merge_lora(abstract_run(run, with_params_dtype(execution, run.settings.params_dtype)))


def _load_weights(run: RunDirectory, step: int | None, execution: Execution, ema: bool) -> Decoder:
    checkpoints = run.checkpoints()
    target = abstract_run(run, with_params_dtype(execution, run.settings.params_dtype))
    # a run in another process may save a newer checkpoint meanwhile: the averages below must be of the same step
    model, _, step = load_weights(checkpoints.directory, target, step)
    if ema and run.settings.optimizer.ema_decay is not None:
        weights = named_leaves(model)
        arrays = checkpoints.manifest(step)["arrays"]
        replicated = model.execution.layout.replicated()  # for weights of the loss, which are not in the model
        shapes = {
            name: jax.ShapeDtypeStruct(
                tuple(arrays[f"ema.{name}"]["shape"]),
                "float32",
                sharding=weights[name].sharding if name in weights else replicated,
            )
            for name in ema_weights(arrays)
        }
        averages = load_weights(checkpoints.directory, shapes, step, prefix="ema.").tree
        averaged = {name: averages[name].astype(leaf.dtype) for name, leaf in weights.items() if name in averages}
        model = replaced(model, averaged)
    return merge_lora(model)


def check_exports(target: Decoder, run: RunDirectory) -> None:
    """Raise ConversionError before the first step if `export` or `export_adapter` could not be written at the end.

    `target`: the result of `abstract_run`.
    """
    settings = run.settings

    def plan_export() -> None:
        export_plan(_exported_model(target, settings), settings=_config_keys(run))

    def plan_adapter() -> None:
        adapter_plan(_without_added_mtp(target, settings))

    for field, plan in (("export", plan_export), ("export_adapter", plan_adapter)):
        directory = getattr(settings, field)
        if directory is None or not broadcast_json("is_new", is_new(directory)):
            continue
        try:
            check_new_directory(directory)
            plan()
        except ConversionError as error:
            raise ConversionError(f"{field}={directory!r} would fail after the last step. {error}") from error


def write_exports(model: Decoder, target: Decoder, run: RunDirectory) -> None:
    """Write `export` and `export_adapter` of a run unless they exist. All processes must call this."""
    settings = run.settings
    model = dataclasses.replace(model, origin=target.origin)
    if settings.export_adapter is not None and broadcast_json("is_new", is_new(settings.export_adapter)):
        export_adapter(model, run, settings.export_adapter)
    if settings.export is not None and broadcast_json("is_new", is_new(settings.export)):
        export_run(model, run, settings.export)


def export_run(model: Decoder, run: RunDirectory, directory: str | Path, **options: Any) -> None:
    """Write a run's model, adapters merged, and its tokenizer to a directory that `from_pretrained` opens.

    `options`: further options of `save_hf`.
    """
    keys = _config_keys(run)
    if run.tokenizer_dir != run.source_dir:
        tokenizer = load_tokenizer(run.tokenizer_dir)
        keys |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    keys |= _stop_id_keys(run)
    with _exported_tokenizer(run) as files:
        save_hf(_exported_model(model, run.settings), directory, settings=keys, tokenizer=files, **options)


def export_adapter(model: Decoder, run: RunDirectory, directory: str | Path) -> None:
    """Write the adapters of a run's model in PEFT's format, with the tokenizer and stop ids."""
    base_model = run.settings.init_from or ""
    with _exported_tokenizer(run) as files:
        save_peft(_without_added_mtp(model, run.settings), directory, base_model=base_model, tokenizer=files)


def _exported_model(model: Decoder, settings: TrainConfig) -> Decoder:
    """Return the model with adapters merged, without the layers for multi-token prediction that the run added."""
    return merge_lora(_without_added_mtp(model, settings))


def _without_added_mtp(model: Decoder, settings: TrainConfig) -> Decoder:
    return model.without_mtp() if settings.mtp_depths > 0 else model


def _config_keys(run: RunDirectory) -> dict[str, Any]:
    """Return keys of the exported `config.json` that do not follow from the model's configuration."""
    return {} if run.source_dir.exists() else {"max_position_embeddings": run.settings.data.seq_len}


def _stop_id_keys(run: RunDirectory) -> dict[str, Any]:
    """Return the key `eos_token_id` of the exported `config.json`, which includes the run's end-of-turn tokens."""
    if run.tokenizer_dir != run.source_dir:
        ids = [*run.stop_ids]
        return {} if not ids else {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    eos_token_id = json.loads((run.source_dir / "config.json").read_bytes()).get("eos_token_id")
    return {} if eos_token_id is None else {"eos_token_id": eos_token_id}


@contextlib.contextmanager
def _exported_tokenizer(run: RunDirectory) -> Iterator[Path]:
    """Yield a temporary directory with the tokenizer files that are exported with a run's model.

    After training on conversations, `eos_token` becomes the end-of-turn token if there is only one, as in published
    chat models. `eos_token` stays if the chat template or the post-processor writes it, since their output would
    change.
    """
    with tempfile.TemporaryDirectory(prefix="eqx_decoders-") as scratch:
        folder = Path(scratch)
        copy_tokenizer(run.tokenizer_dir, folder)
        tokenizer = load_tokenizer(run.tokenizer_dir)
        template = run.template()
        end_ids = end_of_turn_ids(tokenizer, template) if run.trains_on_chats else ()
        if template is not None and isinstance(tokenizer, JsonTokenizer) and len(end_ids) == 1:
            name = tokenizer.name_of(end_ids[0])
            is_written = "eos_token" in template.source
            is_written = is_written or tokenizer.eos_id in tokenizer.encode_prompt("a").tolist()
            if name is not None and tokenizer.eos_id != end_ids[0] and not is_written:
                _set_eos_token(folder, name)
        yield folder


def _set_eos_token(folder: Path, name: str) -> None:
    """Set `eos_token` in `tokenizer_config.json`, and in `special_tokens_map.json` if it has the key."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / file
        if path.exists():
            content = json.loads(path.read_bytes())
            if file == "tokenizer_config.json" or "eos_token" in content:
                write_json(path, content | {"eos_token": name})
