"""Exports of a run for transformers and PEFT, checked before the first step and written after the last one."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eqx_decoders.data.end_of_turn import end_of_turn_ids
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.coordination import from_first
from eqx_decoders.io.huggingface.export import export_plan, save_hf
from eqx_decoders.io.huggingface.export_directory import check_new_directory, copy_tokenizer
from eqx_decoders.io.huggingface.peft import adapter_plan, save_peft
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.lora import merge_lora
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.settings_file import is_new


def check_exports(target: Decoder, run: RunDirectory) -> None:
    """Raise ConversionError before a run if its `export` or `export_adapter` could not be written after it.

    `target` is that of `abstract_run`.
    """
    settings = run.settings
    plans: dict[str, Callable[[], Any]] = {
        "export": lambda: export_plan(_exported(target, settings), settings=_config_keys(run)),
        "export_adapter": lambda: adapter_plan(_without_added_mtp(target, settings)),
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


def write_exports(model: Decoder, target: Decoder, run: RunDirectory) -> None:
    """Write the `export` and the `export_adapter` of a run unless they exist; all processes take part."""
    settings, model = run.settings, dataclasses.replace(model, origin=target.origin)
    if settings.export_adapter is not None and from_first("is_new", is_new(settings.export_adapter)):
        export_adapter(model, run, settings.export_adapter)
    if settings.export is not None and from_first("is_new", is_new(settings.export)):
        export_run(model, run, settings.export)


def export_run(model: Decoder, run: RunDirectory, directory: str | Path, **options: Any) -> None:
    """Write a run's model, adapters merged, with its tokenizer as a directory that `from_pretrained` opens.

    `options` are those of `save_hf`.
    """
    keys = _config_keys(run)
    if run.tokenizer != run.source:
        keys |= special_token_ids(load_tokenizer(run.tokenizer))
    keys |= _eos_ids(run)
    with tokenizer_files(run) as files:
        save_hf(_exported(model, run.settings), directory, settings=keys, tokenizer=files, **options)


def export_adapter(model: Decoder, run: RunDirectory, directory: str | Path) -> None:
    """Write the low-rank pairs of a run's model as an adapter of PEFT, with its tokenizer and stop ids."""
    base_model = run.settings.init_from or ""
    with tokenizer_files(run) as files:
        save_peft(_without_added_mtp(model, run.settings), directory, base_model=base_model, tokenizer=files)


@contextlib.contextmanager
def tokenizer_files(run: RunDirectory) -> Iterator[Path]:
    """Make a temporary directory with the tokenizer files that are exported with a run's model.

    After training on conversations, `eos_token` becomes the end-of-turn token if there is only one, as in published
    chat models. `eos_token` is unchanged if the chat template or the post-processor writes it, since their output would
    change.
    """
    with tempfile.TemporaryDirectory(prefix="eqx_decoders-") as scratch:
        folder = Path(scratch)
        copy_tokenizer(run.tokenizer, folder)
        tokenizer, template = load_tokenizer(run.tokenizer), run.template()
        ends = end_of_turn_ids(tokenizer, template) if run.trains_on_chats else ()
        if template is not None and isinstance(tokenizer, JsonTokenizer) and len(ends) == 1:
            name, is_written = tokenizer.name_of(ends[0]), "eos_token" in template.source
            is_written = is_written or tokenizer.eos_id in tokenizer.encode_prompt("a").tolist()
            if name is not None and tokenizer.eos_id != ends[0] and not is_written:
                _set_eos(folder, name)
        yield folder


def _set_eos(folder: Path, name: str) -> None:
    """Set `eos_token` in `tokenizer_config.json`, and in `special_tokens_map.json` if it has the key."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / file
        if path.exists():
            content = json.loads(path.read_bytes())
            if file == "tokenizer_config.json" or "eos_token" in content:
                write_json(path, content | {"eos_token": name})


def _exported(model: Decoder, settings: TrainConfig) -> Decoder:
    """Return the model with adapters merged, without the layers that the run added."""
    return merge_lora(_without_added_mtp(model, settings))


def _without_added_mtp(model: Decoder, settings: TrainConfig) -> Decoder:
    return model.without_mtp() if settings.mtp_depths > 0 else model


def _config_keys(run: RunDirectory) -> dict[str, Any]:
    """Return the keys of `config.json` that a run's model has besides those of its source."""
    return {} if run.source.exists() else {"max_position_embeddings": run.settings.dataset.seq_len}


def _eos_ids(run: RunDirectory) -> dict[str, Any]:
    """Return the key `eos_token_id` of the exported `config.json`, including the end-of-turn tokens of the run."""
    if run.tokenizer != run.source:
        ids = [*run.stop_ids]
        return {} if not ids else {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    content = json.loads((run.source / "config.json").read_bytes())
    return {key: content[key] for key in ("eos_token_id",) if content.get(key) is not None}


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the keys of `config.json` that name the tokens which begin and end a text."""
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
