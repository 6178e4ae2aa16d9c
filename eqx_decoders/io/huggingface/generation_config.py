"""Generation settings that were published with a model, in `generation_config.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_keys import GENERATION_DEFAULTS
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.huggingface.directory import Directory


def read_generation_config(directory: str | Path | Directory) -> GenerationConfig:
    """Return the settings in a directory's `generation_config.json`.

    Without that file, the settings in `config.json` are used, as in transformers. Values equal to the defaults of
    transformers 4 are ignored there, because transformers 4 writes its defaults into every `config.json`.

    0 for `top_k`, and 1 for `top_p` and `repetition_penalty`, are transformers' values for "off". Other keys have no
    effect here. Raises ConversionError for invalid values.
    """
    folder = directory if isinstance(directory, Directory) else Directory(directory)
    name = "generation_config.json"
    if folder.has(name):
        content = folder.json(name)
    else:
        name = "config.json"
        content = _settings_in_config(folder.json(name) if folder.has(name) else {})
    path = folder.path / name
    do_sample = content.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConversionError(f"{path}: do_sample={str(do_sample)[:60]!r} must be true or false.")
    top_k = content.get("top_k")
    if top_k is not None and not (type(top_k) is int and 0 <= top_k < 1e9):
        raise ConversionError(f"{path}: top_k={str(top_k)[:60]} must be an integer from 0 to 999,999,999.")
    top_p = _number(path, content, "top_p", maximum=1)
    repetition_penalty = _number(path, content, "repetition_penalty")
    return GenerationConfig(
        stop_ids=parse_token_ids(f"{path}: eos_token_id", content.get("eos_token_id")),
        do_sample=do_sample,
        temperature=_number(path, content, "temperature"),
        top_k=top_k or None,
        top_p=None if top_p in (0, 1) else top_p,
        min_p=_number(path, content, "min_p", maximum=1) or None,
        repetition_penalty=None if repetition_penalty in (0, 1) else repetition_penalty,
    )


def _settings_in_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation settings in a `config.json` that differ from the defaults of transformers 4."""
    defaults = GENERATION_DEFAULTS.items()
    return {key: config[key] for key, value in defaults if config.get(key) is not None and config[key] != value}


def add_stop_ids(folder: Path, ids: Sequence[int], tokenizer_ids: Mapping[str, int | None]) -> tuple[int, ...]:
    """Add ids to `eos_token_id` in a directory's `generation_config.json`, and in its `config.json` if it has one.

    Returns the ids that `generation_config.json` did not have.

    **Arguments:**

    - `ids`: end-of-turn tokens that a model has learned.
    - `tokenizer_ids`: `bos_token_id` and `eos_token_id` of the tokenizer, for keys that the files do not have.
    """
    directory = Directory(folder)
    config = directory.json("config.json") if directory.has("config.json") else {}
    text_config = _text_config(config)
    published = {key: value for key in tokenizer_ids if (value := config.get(key, text_config.get(key))) is not None}
    found = {key: value for key, value in tokenizer_ids.items() if value is not None} | published
    name = "generation_config.json"
    if directory.has(name):
        content = directory.json(name)
        if content.get("eos_token_id") is None and "eos_token_id" in found:
            content = content | {"eos_token_id": found["eos_token_id"]}
    else:
        content = _settings_in_config(config) | found
    added = _write_with_stop_ids(folder / name, content, ids)
    if config:
        if config.get("eos_token_id") is None and text_config.get("eos_token_id") is not None:
            # In multimodal models, ids at the top level of config.json override the ids in text_config.
            old = parse_token_ids(f"{folder / 'config.json'}: text_config.eos_token_id", text_config["eos_token_id"])
            config = config | {"eos_token_id": list(old)}
        _write_with_stop_ids(folder / "config.json", config, ids)
    return added


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `text_config` of a multimodal `config.json`; empty for other models."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, Mapping) else {}


def _write_with_stop_ids(path: Path, content: Mapping[str, Any], ids: Sequence[int]) -> tuple[int, ...]:
    """Write `content` with additional `eos_token_id`, if any are new. Returns the new ids."""
    old = parse_token_ids(f"{path}: eos_token_id", content.get("eos_token_id"))
    new = tuple(token_id for token_id in ids if token_id not in old)
    if new:
        all_ids = [*old, *new]
        write_json(path, dict(content) | {"eos_token_id": all_ids if len(all_ids) > 1 else all_ids[0]})
    return new


def parse_token_ids(where: str, value: Any) -> tuple[int, ...]:
    """Return the ids in a value of `eos_token_id`: null, an id or a list of ids. Negative ids mean that there is no id.

    `where`: name of the value in error messages.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > 1000 or not all(type(token_id) is int and token_id < 2**31 for token_id in ids):
        shown = str(value[:5] if isinstance(value, list) else value)[:60]
        raise ConversionError(f"{where}={shown} must be a token id or a list of at most 1000 token ids.")
    return tuple(token_id for token_id in ids if token_id >= 0)


def _number(path: Path, content: Mapping[str, Any], key: str, maximum: int = 1_000_000_000) -> float | None:
    value = content.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise ConversionError(f"{path}: {key}={str(value)[:60]} must be a number from 0 to {maximum:,}.")
    return float(value)
