"""Rotary embeddings in `config.json`: all spellings, and what is refused."""

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, Rope, YarnRope
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
    "keys, sentence",
    [
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2)), "rope_parameters: rope_type=dynamic is not known"),
        (dict(rope_parameters=dict(rope_type="yarn")), "factor is missing"),
        (
            dict(rope_parameters=dict(rope_type="linear", factor=0.5)),
            "factor=0.5 must be a finite number of at least 1",
        ),
        (dict(rope_parameters=dict(rope_type="llama3", factor=8)), "low_freq_factor is missing"),
        (dict(rope_parameters=dict(LLAMA3, high_freq_factor=0.5)), "high_frequency_factor=0.5"),
        (dict(rope_parameters=dict(short_factor=[1])), "short_factor: not known here"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor=0.5 changes"),
        (dict(rope_parameters=dict(rope_theta=1e4), rope_theta=5e5), "make them equal"),
        (dict(rope_parameters=dict(rope_theta=1e4), rope_scaling=dict(type="linear", factor=2)), "remove one of them"),
        (dict(rope_parameters=["yarn"]), "must be an object"),
        (dict(rope_theta="1e4"), "rope_theta=.* must be a finite number above 0"),
    ],
    ids=str,
)
def test_bad_rotary_embeddings_are_refused(keys, sentence):
    content = sample("llama", *ROPE_KEYS)
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(content | dict(max_position_embeddings=128) | keys)


def test_old_files_of_gemma_3_and_olmo_3_have_two_thetas():
    gemma = sample("gemma3_text", *ROPE_KEYS) | dict(
        rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=dict(rope_type="linear", factor=4.0)
    )
    ropes = {mixer.mask: mixer.rope for mixer in mixers(decode(gemma))}
    assert set(ropes.values()) == {LinearRope(theta=5e5, factor=4.0), Rope(theta=2e4)}
    with pytest.raises(ed.ConversionError, match="type: not known here"):  # transformers passes it over in silence
        decode(gemma | dict(rope_scaling=dict(type="linear", factor=4.0)))
    olmo = sample("olmo3", *ROPE_KEYS)
    assert {mixer.rope.theta for mixer in mixers(decode(olmo | dict(rope_theta=1e4)))} == {1e4, 5e5}
