"""Published sampling settings: arguments take precedence over the file, and the file over our defaults."""

import json
from pathlib import Path

import pytest

from eqx_decoders.core.sampling import GenerationConfig, Greedy, Sample
from eqx_decoders.errors import ConfigError, ConversionError
from eqx_decoders.io.huggingface.generation_config import add_stop_ids, parse_token_ids, read_generation_config
from tests.errors import refused


def read(folder: Path, **content) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_generation_config(folder)


OURS = Sample(temperature=0.7, top_p=0.95)


@pytest.mark.parametrize(
    "content, given, expected",
    [
        ({}, {}, OURS),
        ({"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.40.0"}, {}, OURS),
        ({}, {"top_k": 5}, Sample(temperature=0.7, top_p=0.95, top_k=5)),
        ({}, {"temperature": 0.2, "top_p": 1.0}, Sample(temperature=0.2, top_p=1.0)),
        ({}, {"temperature": 0.0}, Greedy()),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {}, Sample(temperature=0.6, top_p=0.9)),
        ({"do_sample": True, "top_k": 20}, {}, Sample(top_k=20)),
        ({"temperature": 0.6, "top_k": 20, "min_p": 0.1}, {"top_k": 3}, Sample(temperature=0.6, top_k=3, min_p=0.1)),
        ({"temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0}, {}, Sample(temperature=0.6)),
        ({"temperature": 1}, {}, Sample(temperature=1.0)),
        ({"do_sample": False}, {}, Greedy()),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, Greedy()),
        ({"do_sample": False}, {"temperature": 0.5}, Sample(temperature=0.5, top_p=0.95)),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.0}, Greedy()),
        ({"temperature": 0}, {}, Greedy()),
        ({"temperature": None, "top_k": None}, {}, OURS),
    ],
)
def test_arguments_take_precedence_over_the_file(tmp_path, content, given, expected):
    nothing = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    assert read(tmp_path, **content).sampler(**(nothing | given)) == expected


def test_defaults_without_the_file(tmp_path):
    assert read_generation_config(tmp_path) == GenerationConfig()


@pytest.mark.parametrize("value, found", [(1.05, 1.05), (1, None), (0, None), (None, None)])
def test_a_repetition_penalty(tmp_path, value, found):
    assert read(tmp_path, repetition_penalty=value).repetition_penalty == found


@pytest.mark.parametrize("value, ids", [(None, ()), (3, (3,)), ([3, 1], (3, 1)), (-1, ()), ([], ())])
def test_stop_ids(tmp_path, value, ids):
    assert read(tmp_path, eos_token_id=value).stop_ids == ids == parse_token_ids("eos", value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, True]),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_p", 1.5),
        ("min_p", 2),
        ("repetition_penalty", -1),
        ("do_sample", "no"),
    ],
)
def test_invalid_values_are_refused(tmp_path, name, value):
    with refused(ConversionError, "generation_config.json", f"{name}=", value):
        read(tmp_path, **{name: value})


def test_stop_ids_are_added_to_those_in_text_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 1}}))
    assert add_stop_ids(tmp_path, [106], {"bos_token_id": 2, "eos_token_id": 1}) == (106,)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == [1, 106]


def test_invalid_arguments_are_refused():
    with refused(ConfigError, "top_p=1.5"):
        GenerationConfig().sampler(top_p=1.5)


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").symlink_to(tmp_path / "other")
    with refused(ConversionError, tmp_path / "model" / "generation_config.json"):
        read_generation_config(tmp_path / "model")


@pytest.mark.parametrize(
    "content, expected",
    [
        (dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.9), (True, 0.6, 20, 0.9)),
        (dict(do_sample=False, temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0), (None,) * 4),
        (dict(temperature=0.3, top_k=50), (None, 0.3, None, None)),
    ],
)
def test_config_json_is_used_without_a_generation_config(tmp_path, content, expected):
    """As in transformers. Default values that transformers 4 writes into every config.json are ignored."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = read_generation_config(tmp_path)
    assert (found.do_sample, found.temperature, found.top_k, found.top_p) == expected
    assert read(tmp_path, top_k=3) == GenerationConfig(top_k=3)
