"""`config.json` round trips for every family, and random malformed configurations."""

import dataclasses
import json
import math
import random
import time

import pytest

import eqx_decoders as ed
from eqx_decoders.families.config_keys import IGNORED_KEYS
from eqx_decoders.families.registry import FAMILIES
from tests.errors import refused
from tests.families.samples import SAMPLES, decode, sample


@pytest.mark.parametrize("name", SAMPLES)
def test_config_round_trips(name):
    """Encoding and decoding gives the same model, and reading needs no further key."""
    content = SAMPLES[name]
    family = FAMILIES[content["model_type"]]
    config, kept = family.decode(content)
    written = family.encode(config)
    assert family.decode(kept | written)[0] == config
    assert json.loads(json.dumps(written)) == written
    nested = {key for key, value in kept.items() if isinstance(value, dict) and key.endswith("_config")}
    assert set(kept) <= set(IGNORED_KEYS) | set(family.ignored_keys) | nested


def test_keys_about_the_origin_and_kernels_of_a_model_have_no_effect():
    """Keys that transformers' GGUF reader sets, and keys that select kernels in transformers; they are not exported."""
    origin = {"_model_name_or_path": "org/name", "_commit_hash": "0123", "_from_auto": True}
    config, kept = FAMILIES["llama"].decode(sample("llama", **origin, _attn_implementation="org/kernel"))
    assert config == decode(sample("llama"))
    assert "_attn_implementation" not in kept


def test_ignored_keys_may_share_a_reason():
    family = dataclasses.replace(FAMILIES["llama"], ignored_keys={"one two": "why"})
    assert family.ignored_keys == {"one": "why", "two": "why"}
    config, kept = family.decode(sample("llama", one=1, two=2))
    assert config == decode(sample("llama"))
    assert {key: kept[key] for key in ("one", "two")} == {"one": 1, "two": 2}
    with refused(ed.ConversionError, "three"):
        family.decode(sample("llama", one=1, three=3))


# models that are not published on Hugging Face have these prefixes
UNPUBLISHED = ("gpt3", "maxtext", "qwen3-custom", "deepseek-custom", "tiny-moe", "tiny-vision")


@pytest.mark.slow(fast=("apertus-8b", "mamba2-780m", "opt-350m"))
@pytest.mark.parametrize("name", [name for name in ed.list_models() if not name.startswith(UNPUBLISHED)])
def test_every_published_model_has_a_config_json(name):
    config = ed.get_config(name)
    written = []
    for family in FAMILIES.values():
        try:
            written.append(family.encode(config))
        except ed.ConversionError:
            continue
    assert written
    assert all(FAMILIES[content["model_type"]].decode(content)[0] == config for content in written)


@pytest.mark.parametrize("kind", FAMILIES)
def test_dropout_is_not_written(kind):
    config = decode(sample(kind))
    block = dataclasses.replace(config.blocks[0], dropout=0.1)
    dropping = dataclasses.replace(config, dropout=0.2, blocks=(block, *config.blocks[1:]))
    assert FAMILIES[kind].encode(dropping) == FAMILIES[kind].encode(config)


ODD = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *("", "silu", "gelu", "full_attention", "sliding_attention", "yarn", "llama3", "linear", "default"),
    *("\u0000", "ü" * 99),
]
TEXTS = tuple(json.dumps(content) for content in SAMPLES.values())


def any_json(chance: random.Random, depth: int = 0):
    """Return any JSON value."""
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind < 3:
        return chance.choice(ODD)
    if kind == 3:
        return chance.choice([chance.randrange(-100, 5000), chance.gauss(0, 100), f"{chance.random()}"])
    values = [any_json(chance, depth + 1) for _ in range(chance.randrange(4))]
    return values if kind == 4 else {chance.choice(["factor", "type", "x", ""]): value for value in values}


def changed_config(chance: random.Random) -> dict:
    """Return a valid configuration in which keys are dropped, swapped, corrupted and added, also in nested objects."""
    content, lender = (json.loads(chance.choice(TEXTS)) for _ in range(2))
    for _ in range(chance.randint(1, 4)):
        table = chance.choice([content, *(value for value in content.values() if isinstance(value, dict))])
        keys = [key for key in table if key != "model_type"]
        if not keys:
            continue
        key, other, lent = chance.choice(keys), chance.choice(keys), chance.choice(list(lender))
        action = chance.choice(["drop", "swap", "corrupt", "corrupt", "invent", "borrow"])
        if action == "drop":
            del table[key]
        elif action == "swap":
            table[key], table[other] = table[other], table[key]
        elif action == "borrow":
            table[lent] = lender[lent]
        else:
            table[key if action == "corrupt" else chance.choice(["bias", "x", "", "head dim"])] = any_json(chance)
    return content


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_changed_configurations_are_valid_or_refused(part):
    valid = 0
    for seed in range(500 * part, 500 * (part + 1)):
        content = changed_config(random.Random(seed))
        family = FAMILIES[content["model_type"]]
        outcome, took = timed(family, content)
        assert took < 2, seed  # parsing any file takes limited time
        if isinstance(outcome, ed.ConversionError):
            assert len(str(outcome)) < 2000, seed
        else:
            assert isinstance(outcome, ed.DecoderConfig), seed
            assert family.decode(family.encode(outcome))[0] == outcome, seed
            valid += 1
    assert 0 < valid < 500


def timed(family, content) -> tuple[ed.DecoderConfig | ed.ConversionError, float]:
    """Return the configuration or the error, and the processor time in seconds."""
    begin = time.process_time()
    try:
        outcome = family.decode(content)[0]
    except ed.ConversionError as error:
        outcome = error
    return outcome, time.process_time() - begin


@pytest.mark.parametrize("name", ["internvl3.5-8b", "internvl3.5-30b-a3b", "internvl3-8b"])
def test_error_shows_the_differences_from_the_nearest_variant(name):
    """The variants have decoders of Qwen 3, Qwen 3 MoE and Qwen 2."""
    config = dataclasses.replace(ed.get_config(name), embedding_scale=3.0)
    with refused(ed.ConversionError, "embedding_scale=3.0") as caught:
        FAMILIES["internvl"].encode(config)
    assert "qk_norm" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, key", [("cohere", "logit_scale"), ("cohere2", "logit_scale"), ("hyperclovax", "logits_scaling")]
)
def test_logit_scale_round_trips(kind, key):
    """These families multiply logits by the value; our configuration stores a divisor."""
    for scale in (*(step / 100 for step in range(1, 200)), 3.0, 49.0, 1 / 3, 7e-5):
        config = decode(sample(kind, **{key: scale}))
        assert config.logit_divisor == pytest.approx(1 / scale)
        assert FAMILIES[kind].encode(config)[key] == scale
