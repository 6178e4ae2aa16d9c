"""Configurations as JSON, exactly; and with single fields changed."""

import dataclasses
import json

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.model.config_json import with_fields
from tests.cases import covering_array, decoder_config
from tests.errors import refused
from tests.models import rich_decoder


@pytest.mark.slow(fast=("deepseek3-671b",))
@pytest.mark.parametrize("name", ed.list_models())
def test_every_model_comes_back(name):
    config = ed.get_config(name)
    assert ed.DecoderConfig.from_json(config.to_json()) == config


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_drawn_configurations_come_back(part):
    for case in covering_array()[part::6]:
        config = decoder_config(case)
        assert ed.DecoderConfig.from_json(config.to_json()) == config


def test_repeated_layers_are_written_once_and_may_be_written_out():
    config = rich_decoder(5)
    plain = json.loads(config.to_json())
    assert [(entry["repeat"], len(entry["blocks"])) for entry in plain["blocks"]] == [(2, 2), (1, 1)]
    blocks = [block for entry in plain["blocks"] for _ in range(entry["repeat"]) for block in entry["blocks"]]
    assert ed.DecoderConfig.from_json(json.dumps(plain | {"blocks": blocks})) == config
    del plain["tied"], plain["init_std"]  # what is left out has its default
    assert ed.DecoderConfig.from_json(json.dumps(plain)) == config


def changed(**fields) -> str:
    return json.dumps(json.loads(rich_decoder(1).to_json()) | fields)


def in_block(**fields) -> str:
    plain = json.loads(rich_decoder(1).to_json())
    plain["blocks"][0]["blocks"][0]["mlp"].update(fields)
    return json.dumps(plain)


# Texts that are no configurations, and what their errors name.
WRONG_TEXTS = {
    "no JSON": ("{", ["JSON", "line 1"]),
    "deep": ("[" * 100_000, ["JSON", "recursion"]),
    "list": ("[]", ["JSON object", "blocks"]),
    "no blocks": (changed(blocks=3), ["JSON object", "blocks"]),
    "empty blocks": (changed(blocks=[]), ["blocks=()", "BlockConfig"]),
    "repeat": (changed(blocks=[{"repeat": 0, "blocks": []}]), ["repeat=0"]),
    "number as block": (changed(blocks=[3]), ["DecoderConfig.blocks[0]=3", "BlockConfig"]),
    "field": (changed(vocab_siz=3), ["DecoderConfig", "'vocab_siz'", "'vocab_size'"]),
    "class": (changed(**{"class": "Decoder"}), ["class='Decoder'", "DecoderConfig"]),
    "integer as text": (changed(vocab_size="3"), ["DecoderConfig.vocab_size='3'"]),
    "integer as bool": (changed(vocab_size=True), ["DecoderConfig.vocab_size=True"]),
    "integer as float": (changed(vocab_size=3.0), ["DecoderConfig.vocab_size=3.0"]),
    "bool": (changed(tied=1), ["DecoderConfig.tied=1"]),
    "number": (changed(logit_soft_cap="x"), ["DecoderConfig.logit_soft_cap='x'"]),
    "norm": (changed(final_norm=[]), ["DecoderConfig.final_norm", "RMSNormConfig", "LayerNormConfig"]),
    "class of a block": (in_block(**{"class": "MLP"}), ["blocks[0].mlp", "class='MLP'", "MLPConfig"]),
    "value of a block": (in_block(mlp_dim=-1), ["MLPConfig.mlp_dim=-1"]),
    "no fields": (json.dumps({"class": "DecoderConfig", "blocks": []}), ["embed_dim", "final_norm", "vocab_size"]),
}


@pytest.mark.parametrize("case", WRONG_TEXTS)
def test_wrong_configurations_are_refused(case):
    text, names = WRONG_TEXTS[case]
    with refused(ed.ConfigError, *names):
        ed.DecoderConfig.from_json(text)


def test_fields_of_the_decoder_of_its_mixers_and_of_its_mlps():
    config = rich_decoder(3)
    pairs = ("vocab_size=50", "logit_soft_cap=3", "num_heads=8", "num_kv_heads=8", "mlp_dim=20", "mlp.bias=true")
    new = with_fields(config, (*pairs, "activation=relu", "mixer.rope.theta=5e5", "block.dropout=0.25"))
    assert (new.vocab_size, new.logit_soft_cap, new.embed_dim) == (50, 3.0, config.embed_dim)
    for old, block in zip(config.blocks, new.blocks, strict=True):
        rope = dataclasses.replace(old.mixer.rope, theta=5e5)
        mixer = dataclasses.replace(old.mixer, num_heads=8, num_kv_heads=8, rope=rope)
        mlp = dataclasses.replace(old.mlp, mlp_dim=20, bias=True, activation="relu")
        assert block == dataclasses.replace(old, mixer=mixer, mlp=mlp, dropout=0.25)
    assert with_fields(config, ()) == config
    window = with_fields(config, ('mask={"class": "SlidingWindow", "size": 9}', "soft_cap=None", "mixer.rope=None"))
    assert all(block.mixer.mask == SlidingWindow(9) and block.mixer.rope is None for block in window.blocks)
    ahead = with_fields(ed.with_mtp(config, 1), ("mlp_dim=20", "num_layers=1"))
    assert ahead.mtp.block.mlp.mlp_dim == 20 and len(ahead.blocks) == 1


def test_fields_change_the_layers_that_have_them():
    config = ed.get_config("deepseek2-16b")  # one dense layer, then experts
    new = with_fields(config, ("num_experts=8", "mlp.router.scaling_factor=2", "kv_rank=64"))
    assert new.blocks[0].mlp == config.blocks[0].mlp and new.blocks[1].mlp.num_experts == 8
    assert new.blocks[1].mlp.router.scaling_factor == 2.0
    assert all(isinstance(block.mixer, LatentAttentionConfig) and block.mixer.kv_rank == 64 for block in new.blocks)


@pytest.mark.parametrize(
    "layers, want",
    [
        ("a", "aaaaaaaaa"),
        ("aaaa", "aaaaaaaaa"),
        ("abab", "ababababa"),
        ("aab", "aabaabaab"),
        ("abbb", "abbbbbbbb"),
        ("aabaabaa", "aabaabaab"),
        ("abbcbbcb", "abbcbbcbb"),
        ("abc", "abcabcabc"),
    ],
)
def test_the_pattern_of_layers_is_cut_or_continued(layers, want):
    a, b = rich_decoder(2).blocks
    block = {"a": a, "b": b, "c": dataclasses.replace(a, dropout=0.5)}
    config = dataclasses.replace(rich_decoder(1), blocks=tuple(block[each] for each in layers))
    for count in (1, 2, len(layers), 9):
        new = with_fields(config, (f"num_layers={count}",))
        assert new.blocks == tuple(block[each] for each in (want if count > len(layers) else layers)[:count])


@pytest.mark.parametrize(
    "pair, names",
    [
        ("num_layers", ["set='num_layers'"]),
        ("=3", ["set='=3'"]),
        ("num_head=3", ["set='num_head'", "'num_heads'"]),
        ("vocab_siz=3", ["set='vocab_siz'", "'vocab_size'"]),
        ("num_layers=0", ["num_layers=0"]),
        ("num_layers=2.5", ["num_layers=2.5"]),
        ("num_kv_heads=3", ["num_heads=4", "num_kv_heads=3"]),
        ("num_heads=many", ["AttentionConfig.num_heads='many'"]),
        ("mixer.rope.thetta=3", ["set='mixer.rope.thetta'"]),
        ("kv_rank=3", ["set='kv_rank'"]),
        ("blocks=3", ["set='blocks'"]),
        ("dropout=2", ["dropout=2"]),
    ],
)
def test_fields_that_cannot_be_changed_are_refused(pair, names):
    with refused(ed.ConfigError, *names):
        with_fields(rich_decoder(2), (pair,))


def test_ambiguous_fields_are_refused():
    with refused(ed.ConfigError, "set='bias'", "mixer.bias", "mlp.bias"):
        with_fields(ed.get_config("deepseek2-16b"), ("bias=true",))
