"""One `config.json` of each family, in both spellings where there are two, and what the tests read from it."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

import eqx_decoders as ed
from eqx_decoders.families.registry import FAMILIES, find_family
from tests.families.published import FILES, WITH_ENCODERS


FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
SAMPLES = {
    f"{path.parent.name}/{path.stem}": json.loads(path.read_text())
    for path in sorted(FIXTURES.glob("*/config*.json"))
    if "model_type" in json.loads(path.read_text())
}


# Published models for families without a checkpoint there; most of these have encoders.
PUBLISHED = {
    "gemma3": "gemma3-4b-vision",
    "gemma4": "gemma4-e2b-vision",
    "llama4": "llama4-17b-16e-vision",
    "mimo": "mimo-7b",
    "idefics3": "smolvlm2-256m",
    "nemotron_h": "nemotron-h-8b",  # without experts
    "glm46v": "glm4.6v-flash-9b",
    "qwen3_vl": "qwen3-vl-2b",
    "qwen3_vl_moe": "qwen3-vl-30b-a3b",
    "qwen3_5": "qwen3.5-0.8b-vision",
    "qwen3_5_moe": "qwen3.5-35b-a3b-vision",
}
SAMPLES |= {f"{kind}/model": FAMILIES[kind].encode(ed.get_config(name)) for kind, name in PUBLISHED.items()}


def decode(content) -> ed.DecoderConfig:
    return find_family(content["model_type"]).decode(content)[0]


def encode(content) -> dict:
    """Return the `config.json` that is written for the model that `content` describes."""
    return find_family(content["model_type"]).encode(decode(content))


class Absent:
    """Value of a key that is left out of `config.json`, and of a field that a configuration does not have."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


def drop(*keys: str) -> dict[str, Absent]:
    return dict.fromkeys(keys, ABSENT)


def settings(source: str, keys: Mapping[str, Any]) -> dict:
    """Return the `config.json` of a family's fixture, a fixture's file or a published model, with changed keys.

    `"attn_config.alibi"` is a key in a nested object; keys that are ABSENT are left out.
    """
    if source in FILES:
        content = FILES[source][1]
    elif source in SAMPLES or source in WITH_ENCODERS:
        content = (SAMPLES | WITH_ENCODERS)[source]
    else:
        content = next(content for content in SAMPLES.values() if content["model_type"] == source)
    content = copy.deepcopy(content)
    for path, value in keys.items():
        *outer, key = path.split(".")
        inner = content
        for name in outer:
            inner = inner[int(name) if isinstance(inner, list) else name]
        if value is ABSENT:
            inner.pop(key, None)
        else:
            inner[key] = copy.deepcopy(value)
    return content


def sample(kind: str, *missing: str, **keys) -> dict:
    """Return the `config.json` of a family without the keys `missing` and with the keys `keys`."""
    return settings(kind, drop(*missing) | keys)


def mixers(config) -> list:
    return [block.mixer for block in config.blocks]


WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")


def windows(config) -> list[int | None]:
    """Return the window of each layer; None: the layer has no window."""
    return [getattr(mixer.mask, "size", None) for mixer in mixers(config)]


# --- values of a configuration at a path ---

OF_BLOCKS = {field.name for field in dataclasses.fields(ed.BlockConfig)}


def value_at(owner: Any, path: str) -> Any:
    """Return the value at a path such as `"mlp.router.score"`, or ABSENT; `"mixer.type"` is the name of the class."""
    for name in path.split("."):
        if name == "type":
            owner = type(owner).__name__
        elif name.lstrip("-").isdigit():
            owner = owner[int(name)]
        elif isinstance(owner, dict):
            owner = owner.get(name, ABSENT)
        else:
            owner = getattr(owner, name, ABSENT)
    return owner


def assert_values(config: ed.DecoderConfig, wanted: Mapping[str | Callable, Any]) -> None:
    """Assert that the configuration has these values, at a path or returned by a function.

    A path that begins with a field of BlockConfig is read in all layers: a list has the value of each layer, and
    anything else is the value of all. A path in the decoder that begins so starts with `config.`.
    """
    for path, value in wanted.items():
        if callable(path):
            found = path(config)
        elif path.partition(".")[0] in OF_BLOCKS:
            found = [value_at(block, path) for block in config.blocks]
            value = value if isinstance(value, list) else [value] * len(found)
        else:
            found = value_at(config, path.removeprefix("config."))
        assert found == value, f"{getattr(path, '__name__', path)}: {found} != {value}"


def replaced(owner: Any, path: str, value: Any) -> Any:
    """Return `owner` with another value at a path such as `"blocks.0.mixer.query_scale"`."""
    name, _, inner = path.partition(".")
    if isinstance(owner, tuple):
        index = int(name)
        return (*owner[:index], replaced(owner[index], inner, value), *owner[index + 1 :])
    return dataclasses.replace(owner, **{name: replaced(getattr(owner, name), inner, value) if inner else value})


# --- cases of tables ---


def row(source: str, *columns: Any, name: Mapping[str, Any] | None = None) -> pytest.param:
    """Return a case whose id names the source and its keys, such as `gemma2-sliding_window=7`."""
    keys = columns[0] if name is None else name
    given = [f"{key}={text(value)[:60]}" for key, value in keys.items() if value is not ABSENT]
    left_out = [f"no_{key}" for key, value in keys.items() if value is ABSENT]
    return pytest.param(source, *columns, id="-".join([source, *given, *left_out])[:120])


def rows(sources: str | tuple[str, ...], common: Mapping[str, Any], pairs: Iterable[tuple[dict, Any]]) -> list:
    """Return a case for every pair of changed keys and expected result, and every source; all have `common` keys."""
    sources = (sources,) if isinstance(sources, str) else sources
    return [row(source, common | keys, result, name=keys or common) for keys, result in pairs for source in sources]


def text(value: Any) -> str:
    """Return a value as text for an id, in ASCII and without spaces."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    return ascii(value).strip("'").replace(" ", "_")


def cases(names: str, rows: list) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` of rows, after a check that all ids are different."""
    ids = [case.id for case in rows]
    assert len(set(ids)) == len(ids), sorted(name for name in ids if ids.count(name) > 1)
    return pytest.mark.parametrize(names, rows)
