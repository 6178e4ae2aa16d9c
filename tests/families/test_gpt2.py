"""GPT-2: its own names of sizes, and how it scales scores."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from tests.families.samples import decode, mixers, sample


def test_gpt2_has_two_names_for_its_sizes():
    content = sample("gpt2")
    renamed = {_LONG.get(key, key): value for key, value in content.items()}
    assert renamed.keys() != content.keys()
    assert decode(renamed) == decode(content)
    with pytest.raises(ed.ConversionError, match=r"hidden_size=8.*n_embd=\d+"):
        decode(content | dict(hidden_size=8))


_LONG = dict(
    n_embd="hidden_size",
    n_positions="max_position_embeddings",
    n_head="num_attention_heads",
    n_layer="num_hidden_layers",
)


def test_gpt2_scales_its_scores():
    def scales(**keys):
        return [mixer.query_scale for mixer in mixers(decode(sample("gpt2") | keys))]

    head_dim = decode(sample("gpt2")).blocks[0].mixer.head_dim
    assert scales() == [None] * len(scales())
    assert set(scales(scale_attn_weights=False)) == {1.0}
    by_layer = scales(scale_attn_by_inverse_layer_idx=True)
    assert by_layer == [head_dim**-0.5 / (index + 1) for index in range(len(by_layer))]
    keys = dict(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False)
    assert scales(**keys) == [1 / (index + 1) for index in range(len(by_layer))]
    both = decode(sample("gpt2") | keys)
    assert FAMILIES["gpt2"].decode(FAMILIES["gpt2"].encode(both))[0] == both


def test_the_width_of_the_mlp_may_be_left_out():
    """It is null in published files: four times the width of the stream."""
    content = sample("gpt2")
    wide = decode(content | dict(n_inner=4 * content["n_embd"]))
    assert decode(content | dict(n_inner=None)) == decode(sample("gpt2", "n_inner")) == wide
