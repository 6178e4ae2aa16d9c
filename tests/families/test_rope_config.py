"""Rotary embeddings in `config.json`: all spellings, and what is refused."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import rope_config
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.rope import DynamicRope, LinearRope, Llama3Rope, ProportionalRope, Rope, YarnRope
from tests.errors import refused
from tests.families.samples import decode, mixers, sample


ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling")
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPES = [
    (dict(rope_theta=5e5), Rope(theta=5e5)),
    (dict(rope_theta=500000, rope_scaling=None), Rope(theta=5e5)),
    (dict(), Rope(theta=10_000.0)),
    (dict(rope_parameters=dict(rope_theta=5e5)), Rope(theta=5e5)),
    (dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2)), LinearRope(theta=5e5, factor=2.0)),
    (dict(rope_scaling=dict(factor=2.0)), Rope()),
    (
        dict(rope_theta=5e5, rope_scaling=LLAMA3 | dict(original_max_position_embeddings=64)),
        Llama3Rope(theta=5e5, original_length=64),
    ),
    (dict(rope_scaling=LLAMA3, max_position_embeddings=2048), Llama3Rope(original_length=2048)),
    (
        dict(rope_scaling=dict(type="yarn", factor=4, original_max_position_embeddings=32, finetuned=True)),
        YarnRope(factor=4.0, original_length=32),
    ),
    (
        dict(
            rope_scaling=dict(type="yarn", factor=None), original_max_position_embeddings=32, max_position_embeddings=96
        ),
        YarnRope(factor=3.0, original_length=32),
    ),
    (
        dict(rope_parameters=dict(rope_type="yarn", factor=2, mscale=1, mscale_all_dim=1, truncate=False)),
        YarnRope(factor=2.0, original_length=128, mscale=1.0, mscale_all_dim=1.0, truncate=False),
    ),
    (
        dict(rope_parameters=dict(rope_type="yarn", factor=2, mscale=1, mscale_all_dim=2.0, attention_factor=1.5)),
        YarnRope(factor=2.0, original_length=128, mscale_all_dim=2.0, attention_factor=1.5),
    ),
    (dict(rope_scaling=dict(type="dynamic", factor=2)), DynamicRope(factor=2.0, original_length=128)),
    (
        dict(rope_parameters=dict(rope_type="yarn", factor=2, mscale=1.0, beta_fast=16)),
        YarnRope(factor=2.0, original_length=128, beta_fast=16.0),
    ),
]


@pytest.mark.parametrize("keys, rope", ROPES, ids=str)
def test_spellings_of_a_rotary_embedding(keys, rope):
    content = sample("llama", *ROPE_KEYS, max_position_embeddings=128)
    assert decode(content | keys).blocks[0].mixer.rope == rope


@pytest.mark.parametrize(
    "keys, names",
    [
        (dict(rope_parameters=dict(rope_type="spiral", factor=2)), ["rope_parameters", "rope_type=spiral"]),
        (dict(rope_parameters=dict(rope_type="yarn")), ["factor"]),
        (dict(rope_parameters=dict(rope_type="linear", factor=0.5)), ["factor=0.5"]),
        (dict(rope_parameters=dict(rope_type="llama3", factor=8)), ["low_freq_factor"]),
        (dict(rope_parameters=dict(LLAMA3, high_freq_factor=0.5)), ["high_frequency_factor=0.5"]),
        (dict(rope_parameters=dict(short_factor=[1])), ["short_factor"]),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), ["partial_rotary_factor=0.5"]),
        (dict(rope_parameters=dict(rope_theta=1e4), rope_theta=5e5), ["rope_theta=10000.0", "500000.0"]),
        (
            dict(rope_parameters=dict(rope_theta=1e4), rope_scaling=dict(type="linear", factor=2)),
            ["rope_parameters", "rope_scaling"],
        ),
        (dict(rope_parameters=["yarn"]), ["rope_parameters"]),
        (dict(rope_theta="1e4"), ["rope_theta="]),
    ],
    ids=str,
)
def test_bad_rotary_embeddings_are_refused(keys, names):
    content = sample("llama", *ROPE_KEYS)
    with refused(ed.ConversionError, *names):
        decode(content | dict(max_position_embeddings=128) | keys)


def test_old_files_of_gemma_3_and_olmo_3_have_two_thetas():
    gemma = sample("gemma3_text", *ROPE_KEYS) | dict(
        rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=dict(rope_type="linear", factor=4.0)
    )
    ropes = {mixer.mask: mixer.rope for mixer in mixers(decode(gemma))}
    assert set(ropes.values()) == {LinearRope(theta=5e5, factor=4.0), Rope(theta=2e4)}
    names = [dict(type="linear"), dict(type="linear", rope_type="linear")]
    names += [dict(type=None, rope_type="linear"), dict(type="linear", rope_type=None)]
    for scaling in (name | dict(factor=4.0) for name in names):
        assert decode(gemma | dict(rope_scaling=scaling)) == decode(gemma)  # transformers 4 reads and writes these
    with refused(ed.ConversionError, "type=yarn", "rope_type=linear"):
        decode(gemma | dict(rope_scaling=dict(type="yarn", rope_type="linear", factor=4.0)))
    olmo = sample("olmo3", *ROPE_KEYS)
    assert {mixer.rope.theta for mixer in mixers(decode(olmo | dict(rope_theta=1e4)))} == {1e4, 5e5}


QUARTER = dict(theta=100.0, fraction=0.25, sections=(11, 11, 10))
MROPE = dict(mrope_section=[1, 2, 3], mrope_interleaved=True)
PARTIAL = [
    (dict(), Rope(theta=100.0, fraction=0.25)),
    (dict(rope_theta=5e5, partial_rotary_factor=0.5, rope_scaling=None), Rope(theta=5e5, fraction=0.5)),
    (dict(rope_parameters=dict(rope_theta=5e5, partial_rotary_factor=0.5)), Rope(theta=5e5, fraction=0.5)),
    (dict(rope_parameters=dict(rope_theta=5e5), partial_rotary_factor=1), Rope(theta=5e5)),
    (dict(rope_parameters=dict(rope_type="linear", factor=2)), LinearRope(theta=100.0, fraction=0.25, factor=2.0)),
]
AXES = [
    (dict(), Rope(theta=100.0, fraction=0.25, sections=(11, 11, 10))),
    (dict(rope_scaling=dict(MROPE, rope_type="default")), Rope(theta=100.0, fraction=0.25, sections=(1, 2, 3))),
    (
        dict(rope_parameters=dict(MROPE, rope_type="yarn", factor=4, original_max_position_embeddings=32)),
        YarnRope(theta=100.0, fraction=0.25, sections=(1, 2, 3), factor=4.0, original_length=32),
    ),
]


def written(rope, **options) -> dict:
    block = BlockConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=256, rope=rope), mlp=None)
    none = dataclasses.replace(block, mixer=None)
    config = ed.DecoderConfig(vocab_size=8, embed_dim=8, final_norm=None, blocks=(none, block))
    return rope_config.write_rope(config, **options)


@pytest.mark.parametrize(
    "keys, rope, sections",
    [(*case, ()) for case in PARTIAL] + [(*case, (11, 11, 10)) for case in AXES],
    ids=str,
)
def test_partial_rotation_and_positions_of_several_dimensions(keys, rope, sections):
    options = dict(theta=100.0, fraction=0.25, sections=sections)
    assert rope_config.read_rope(Fields(keys), **options) == rope
    again = written(rope, partial=True)
    assert rope_config.read_rope(Fields(again), **options) == rope
    old = {key: value for key, value in again.items() if key != "rope_parameters"}
    assert rope_config.read_rope(Fields(old), **options) == rope


@pytest.mark.parametrize(
    "keys, names",
    [
        (
            dict(rope_parameters=dict(partial_rotary_factor=0.5), partial_rotary_factor=0.25),
            ["partial_rotary_factor=0.5", "0.25"],
        ),
        (dict(partial_rotary_factor=0), ["partial_rotary_factor=0"]),
        (dict(rope_scaling=dict(mrope_section=[1, 2])), ["mrope_section", 3]),
        (dict(rope_scaling=dict(MROPE, mrope_interleaved=False)), ["mrope_interleaved=false"]),
    ],
    ids=str,
)
def test_bad_partial_rotations_are_refused(keys, names):
    with refused(ed.ConversionError, *names):
        rope_config.read_rope(Fields(keys), **QUARTER)


def test_dimensions_that_a_family_does_not_have_are_refused():
    with refused(ed.ConversionError, "mrope_interleaved"):
        rope_config.read_rope(Fields(dict(rope_parameters=MROPE)), fraction=0.25)
    with refused(ed.ConversionError, "partial_rotary_factor=0.5"):
        decode(sample("llama", partial_rotary_factor=0.5))


def test_rotation_in_proportion_is_nested():
    proportional = dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25)
    tables = dict(full_attention=proportional, sliding_attention=dict(rope_type="default", rope_theta=100.0))
    found = rope_config.read_ropes(Fields(dict(rope_parameters=tables)), theta=1.0, local_theta=1.0, local_key=None)
    want = ProportionalRope(theta=1e6, fraction=0.25)
    assert found == {"full_attention": want, "sliding_attention": Rope(theta=100.0)}
    assert written(want)["rope_parameters"] == proportional  # transformers knows no factor there
    scaled = dataclasses.replace(want, factor=2.0)
    assert rope_config.read_rope(Fields(dict(rope_parameters=written(scaled)["rope_parameters"]))) == scaled


YARN_ZEROS = [
    (dict(mscale_all_dim=0), {}),
    (dict(mscale_all_dim=0.0, mscale=1.0), {}),
    (dict(mscale=0, mscale_all_dim=0), {}),
    (dict(mscale=0, mscale_all_dim=0.7), dict(mscale_all_dim=0.7)),
    (dict(beta_fast=0, beta_slow=0), {}),
    (dict(extrapolation_factor=1.0, attn_factor=1), {}),
    (dict(mscale=0.7, mscale_all_dim=1), dict(mscale=0.7, mscale_all_dim=1)),
]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("keys, same", YARN_ZEROS, ids=str)
def test_a_zero_in_yarn_settings_means_the_default(kind, keys, same):
    """transformers tests these numbers as booleans: `if mscale and mscale_all_dim`."""
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    content = sample(kind, *ROPE_KEYS)
    assert decode(content | dict(rope_scaling=yarn | keys)) == decode(content | dict(rope_scaling=yarn | same))


def test_other_extrapolation_factors_are_refused():
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, extrapolation_factor=2.0)
    with refused(ed.ConversionError, "extrapolation_factor=2.0"):
        decode(sample("llama", *ROPE_KEYS) | dict(rope_scaling=yarn))
