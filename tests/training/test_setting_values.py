"""Test settings files: spellings of names and values, and refused files."""

import dataclasses
import json
import sys
from typing import Literal

import pytest

from eqx_decoders.errors import ConfigError, MissingPackage
from eqx_decoders.training.settings.values import flat_settings, read_mapping, typed_settings, with_settings
from tests.errors import refused


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    name: Literal["on", "off", "2"] = "on"
    limit: float | None = 1.0

    def __post_init__(self):
        if self.rate < 0:
            raise ConfigError("negative")


@dataclasses.dataclass(frozen=True)
class Settings:
    count: int = 1
    text: str = "a"
    file: str | None = None
    switch: bool = False
    maybe: bool | None = None
    words: tuple[str, ...] = ()
    pair: tuple[int, int] | None = None
    pairs: tuple[tuple[str, float], ...] = ()
    inner: Inner = dataclasses.field(default_factory=Inner)


def read(text: str, folder, name: str = "run.yaml") -> dict[str, object]:
    (folder / name).write_text(text)
    aliases = {"old": "inner.rate", "inner.older": "count"}
    return typed_settings(read_mapping(folder / name), Settings(), aliases, name)


NUMBERS = ["3e-4", "3.0e-4", "0.0003", ".0003", "'3e-4'"]
MEANT = [
    *((f"inner: {{rate: {word}}}", "inner.rate", 3e-4) for word in NUMBERS),
    ("inner: {rate: 3}", "inner.rate", 3.0),
    *((f"count: {word}", "count", 10_000) for word in ("10000", "1e4", "10_000", "1.0e+4", "'1e4'")),
    ("count: 9007199254740993", "count", 2**53 + 1),
    *((f"switch: {word}", "switch", True) for word in ("true", "True", "yes", "on", "ON")),
    *((f"switch: {word}", "switch", False) for word in ("false", "no", "off")),
    *((f"text: {word}", "text", word.strip("'")) for word in ("word", "3e-4", "'no'", "None")),
    ("text: 'null'", "text", "null"),
    ("text: ''", "text", ""),
    ("inner.name: 'off'", "inner.name", "off"),
    ("inner.name: '2'", "inner.name", "2"),
    *(
        (f"{name}: {word}", name, None)
        for name in ("file", "maybe", "inner.limit")
        for word in ("null", "~", "", "None")
    ),
    ("file: 'null'", "file", "null"),
    ("maybe: no", "maybe", False),
    ("words: [a, 'no', '1']", "words", ("a", "no", "1")),
    ("words:\n- a", "words", ("a",)),
    ("words: a b", "words", ("a b",)),
    ("words: []", "words", ()),
    ("pair: [3, 1e1]", "pair", (3, 10)),
    ("pair: null", "pair", None),
    ("pairs: {'*.a-b': 5e-1, c=d: 2}", "pairs", (("*.a-b", 0.5), ("c=d", 2.0))),
    ("pairs: ['*.a-b=0.5', [c=d, 2]]", "pairs", (("*.a-b", 0.5), ("c=d", 2.0))),
    ("pairs: c=d=2", "pairs", (("c=d", 2.0),)),
    ("old: 2", "inner.rate", 2.0),
    ("inner: {older: 2}", "count", 2),
]


@pytest.mark.parametrize("text, name, value", MEANT, ids=lambda value: str(value))
def test_values_are_converted_to_the_type_of_their_field(tmp_path, text, name, value):
    found = read(text, tmp_path)
    assert found == {name: value} and type(found[name]) is type(value)


def test_json_values_have_types(tmp_path):
    value = {"count": 3, "inner": {"rate": 1, "limit": None}, "pair": [1, 2], "text": "no", "switch": True}
    found = read(json.dumps(value), tmp_path, "run.json")
    assert found == {"count": 3, "inner.rate": 1.0, "inner.limit": None, "pair": (1, 2), "text": "no", "switch": True}
    assert read(json.dumps({"text": "ä \U0001f600 \\/", "file": "null"}), tmp_path, "x.json")["file"] == "null"
    assert read("", tmp_path) == {}


BAD = {  # names in each error message
    "cuont: 3": ["'cuont'", "'count'"],
    "inner: {raet: 3}": ["'inner.raet'", "'inner.rate'"],
    "rate: 3": ["'rate'", "'inner.rate'"],
    "in-ner: 1": ["'in_ner'", "'inner."],
    "inner: 3": ["'inner'"],
    "inner: {inner: {rate: 1}}": ["'inner.inner'"],
    "count: {a: 3}": ["'count'={'a': 3}"],
    "count: 1.5": ["'count'=1.5"],
    "count: 1e999": ["'count'='1e999'"],
    "count: yes": ["'count'=True"],
    "count:": ["'count'=None"],
    "text: null": ["'text'=None"],
    "text: [a]": ["'text'=['a']"],
    "text: !!python/object/apply:os.getcwd []": ["YAML"],
    "switch: maybe": ["'switch'='maybe'", "true", "false"],
    "text: no": ["'text'=False", "quotes"],
    "text: 012": ["'text'=10", "quotes"],
    "text: 2026-01-01": ["'text'=", "quotes"],
    "inner.name: off": ["'inner.name'=False", "'off'", "quotes"],
    "words: [no]": ["'words'=[False]"],
    "inner.rate: fast": ["'inner.rate'='fast'"],
    "inner.name: maybe": ["'inner.name'='maybe'", "on", "off", "2"],
    "pair: [1]": ["'pair'=[1]", "null"],
    "pair: [1, b]": ["'pair'=[1, 'b']"],
    "pairs: [a]": ["'pairs'=['a']"],
    "pairs: {a: b}": ["'pairs'={'a': 'b'}"],
    "words: {a: 1}": ["'words'={'a': 1}"],
    "words:": ["'words'=None"],
    "words: [[a]]": ["'words'=[['a']]"],
    "count: 1\ncount: 2": ["count"],
    "inner: {rate: 1}\nold: 2": ["'inner.rate'", "'old'"],
    "count: [": ["YAML"],
    "inner: &a {inner: *a}": ["'inner.inner'"],
    "- count": [],
}
BAD_JSON = {
    '{"count": true}': ["'count'=True"],
    '{"count": null}': ["'count'=None"],
    '{"text": 3}': ["'text'=3"],
    '{"switch": 2}': ["'switch'=2"],
    '{"count": 1, "count": 2}': ["count", "more than once"],
    "{": ["JSON"],
    "3": [],
}


@pytest.mark.parametrize("text", BAD)
def test_invalid_yaml_is_refused_by_name(tmp_path, text):
    with refused(ConfigError, "run.yaml", *BAD[text]):
        read(text, tmp_path)


@pytest.mark.parametrize("text", BAD_JSON)
def test_invalid_json_is_refused_by_name(tmp_path, text):
    with refused(ConfigError, "run.json", *BAD_JSON[text]):
        read(text, tmp_path, "run.json")


def test_missing_file_or_package_is_reported(tmp_path, monkeypatch):
    with refused(ConfigError, "none.yaml"):
        read_mapping(tmp_path / "none.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with refused(MissingPackage, "'pyyaml'", "[train]"):
        read("count: 3", tmp_path)
    assert read('{"count": 3}', tmp_path, "run.json") == {"count": 3}


def test_values_are_assigned_to_their_fields():
    found = with_settings(Settings(text="b", inner=Inner(limit=None)), {"inner.rate": 2.0, "count": 5})
    assert found == Settings(text="b", count=5, inner=Inner(rate=2.0, limit=None))
    assert flat_settings(found)["inner.rate"] == 2.0 and len(flat_settings(found)) == 11
    with refused(ConfigError, "negative"):
        with_settings(found, {"inner.rate": -1.0})
    late = with_settings(found, {"inner.rate": -1.0}, checked=False)
    assert late.inner.rate == -1.0 and type(late) is Settings and late.count == 5


@pytest.mark.slow(fast=("run.json-700", "run.json-200000", "run.yaml-100"))
@pytest.mark.parametrize(
    ("name", "depth"), [("run.json", 700), ("run.json", 200_000), ("run.yaml", 100), ("run.yaml", 1000)]
)
def test_deep_nesting_is_refused(tmp_path, name, depth):
    with refused(ConfigError, name):
        read('{"text": ' + "[" * depth + "]" * depth + "}", tmp_path, name)
