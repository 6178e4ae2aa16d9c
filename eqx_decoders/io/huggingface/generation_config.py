"""Generation settings that were published with a model, in `generation_config.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.config_keys import GENERATION_DEFAULTS
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.huggingface.directory import Directory


def read_generation_config(directory: str | Path | Directory) -> GenerationConfig:
    """Read the settings in a directory's `generation_config.json`.

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
    where = f"{folder.path / name}"
    flag = content.get("do_sample")
    check(
        flag is None or isinstance(flag, bool), f"{where}: do_sample={flag!r} must be true or false.", ConversionError
    )
    top_k = content.get("top_k")
    whole = top_k is None or (isinstance(top_k, int) and not isinstance(top_k, bool) and 0 <= top_k < 1e9)
    check(whole, f"{where}: top_k={str(top_k)[:60]} must be an integer of at least 0.", ConversionError)
    top_p, penalty = _number(where, content, "top_p", most=1), _number(where, content, "repetition_penalty")
    return GenerationConfig(
        stop_ids=parse_token_ids(f"{where}: eos_token_id", content.get("eos_token_id")),
        do_sample=flag,
        temperature=_number(where, content, "temperature"),
        top_k=top_k or None,
        top_p=None if top_p in (0, 1) else top_p,
        min_p=_number(where, content, "min_p", most=1) or None,
        repetition_penalty=None if penalty in (0, 1) else penalty,
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
    added = _with_stop_ids(folder / name, content, ids)
    if config:
        if config.get("eos_token_id") is None and text_config.get("eos_token_id") is not None:
            # In multimodal models, ids at the top level of config.json override the ids in text_config.
            old = parse_token_ids(f"{folder / 'config.json'}: text_config.eos_token_id", text_config["eos_token_id"])
            config = config | {"eos_token_id": list(old)}
        _with_stop_ids(folder / "config.json", config, ids)
    return added


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `text_config` of a multimodal `config.json`; empty for other models."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, Mapping) else {}


def _with_stop_ids(path: Path, content: Mapping[str, Any], ids: Sequence[int]) -> tuple[int, ...]:
    old = parse_token_ids(f"{path}: eos_token_id", content.get("eos_token_id"))
    new = tuple(index for index in ids if index not in old)
    if new:
        known = [*old, *new]
        write_json(path, dict(content) | {"eos_token_id": known if len(known) > 1 else known[0]})
    return new


def parse_token_ids(where: str, value: Any) -> tuple[int, ...]:
    """Parse the ids in `eos_token_id`: null, one or a list. Negative ones, which some files have, stand for none."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    few = len(values) <= 1000
    if not few or not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ < 2**31 for id_ in values):
        shown = str(value[:5] if isinstance(value, list) else value)[:60]
        raise ConversionError(f"{where}={shown} must be a token id or a list of at most 1000 of them.")
    return tuple(id_ for id_ in values if id_ >= 0)


def _number(where: str, content: Mapping[str, Any], key: str, most: int = 1_000_000_000) -> float | None:
    value = content.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    rule = f"must be a number from 0 to {most:,}"
    check(value is None or number, f"{where}: {key}={str(value)[:60]} {rule}.", ConversionError)
    return None if value is None else float(value)
