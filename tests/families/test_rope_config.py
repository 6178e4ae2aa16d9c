"""Rotary embeddings in `config.json`: partial rotation, sections, and settings per type of layer."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import rope_config
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.rope import LinearRope, ProportionalRope, Rope, YarnRope
from tests.errors import refused
from tests.families.samples import decode, sample


QUARTER = dict(theta=100.0, fraction=0.25, sections=(11, 11, 10))
MROPE = dict(mrope_section=[1, 2, 3], mrope_interleaved=True)
# keys of the config, the expected rotary embedding, and default sections of the family
SPELLINGS = {
    "none": ({}, Rope(theta=100.0, fraction=0.25), ()),
    "null": (
        dict(rope_theta=5e5, partial_rotary_factor=0.5, rope_scaling=None),
        Rope(theta=5e5, fraction=0.5),
        (),
    ),
    "inside": (
        dict(rope_parameters=dict(rope_theta=5e5, partial_rotary_factor=0.5)),
        Rope(theta=5e5, fraction=0.5),
        (),
    ),
    "outside": (dict(rope_parameters=dict(rope_theta=5e5), partial_rotary_factor=1), Rope(theta=5e5), ()),
    "linear": (
        dict(rope_parameters=dict(rope_type="linear", factor=2)),
        LinearRope(theta=100.0, fraction=0.25, factor=2.0),
        (),
    ),
    "sections": ({}, Rope(**QUARTER), (11, 11, 10)),
    "sections-default": (
        dict(rope_scaling=dict(MROPE, rope_type="default")),
        Rope(theta=100.0, fraction=0.25, sections=(1, 2, 3)),
        (11, 11, 10),
    ),
    "sections-yarn": (
        dict(rope_parameters=dict(MROPE, rope_type="yarn", factor=4, original_max_position_embeddings=32)),
        YarnRope(theta=100.0, fraction=0.25, sections=(1, 2, 3), factor=4.0, original_length=32),
        (11, 11, 10),
    ),
}


def written(rope, **options) -> dict:
    block = BlockConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=256, rope=rope), mlp=None)
    none = dataclasses.replace(block, mixer=None)
    config = ed.DecoderConfig(vocab_size=8, embed_dim=8, final_norm=None, blocks=(none, block))
    return rope_config.write_rope(config, **options)


@pytest.mark.parametrize("keys, rope, sections", SPELLINGS.values(), ids=SPELLINGS)
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
    ids=["both", "zero", "two_sections", "not_interleaved"],
)
def test_bad_partial_rotations_are_refused(keys, names):
    with refused(ed.ConversionError, *names):
        rope_config.read_rope(Fields(keys), **QUARTER)


def test_unsupported_position_dimensions_are_refused():
    with refused(ed.ConversionError, "mrope_interleaved"):
        rope_config.read_rope(Fields(dict(rope_parameters=MROPE)), fraction=0.25)
    with refused(ed.ConversionError, "partial_rotary_factor=0.5"):
        decode(sample("llama", partial_rotary_factor=0.5))


def test_proportional_rotation_is_a_nested_object():
    proportional = dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25)
    tables = dict(full_attention=proportional, sliding_attention=dict(rope_type="default", rope_theta=100.0))
    found = rope_config.read_ropes(Fields(dict(rope_parameters=tables)), theta=1.0, local_theta=1.0, local_key=None)
    want = ProportionalRope(theta=1e6, fraction=0.25)
    assert found == {"full_attention": want, "sliding_attention": Rope(theta=100.0)}
    assert written(want)["rope_parameters"] == proportional  # transformers has no factor here
    scaled = dataclasses.replace(want, factor=2.0)
    assert rope_config.read_rope(Fields(dict(rope_parameters=written(scaled)["rope_parameters"]))) == scaled
