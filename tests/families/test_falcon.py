"""Falcon: which keys count in old and new files, and what the tensors of its norms are called."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from tests.families.samples import decode, mixers, sample


NEW_KEYS = ("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn")


def form(**keys):
    """The number of key heads, and whether the MLP has a norm of its own."""
    config = decode(sample("falcon", *NEW_KEYS, **keys))
    return mixers(config)[0].num_kv_heads, config.blocks[0].pre_mlp_norm is not None


def test_old_files_have_one_key_head_or_all():
    assert form() == form(num_kv_heads=2) == form(multi_query=True) == (1, False)
    assert form(multi_query=False) == form(multi_query=False, num_kv_heads=2) == (4, False)


def test_new_files_say_how_many():
    new = dict(new_decoder_architecture=True)
    assert form(**new) == (4, True)
    assert form(**new, num_kv_heads=2) == form(**new, num_kv_heads=2, multi_query=False) == (2, True)
    assert form(**new, num_kv_heads=2, num_ln_in_parallel_attn=1) == (2, False)


@pytest.mark.parametrize(
    "name, norms",
    [
        ("falcon-7b", {"input_layernorm"}),
        ("falcon2-11b", {"input_layernorm"}),
        ("falcon-40b", {"ln_attn", "ln_mlp"}),
        ("falcon-rw-1b", {"input_layernorm", "post_attention_layernorm"}),
    ],
)
def test_a_second_norm_renames_the_first(name, norms):
    mappings = FAMILIES["falcon"].bind(ed.abstract(ed.get_config(name)))
    names = [mapping.name((0,)) for path, mapping in mappings.items() if "norm" in path and path != "final_norm.scale"]
    inside = {name.split(".")[3] for name in names if name.startswith("transformer.h.0.")}
    assert inside == norms


def test_layers_follow_one_another_in_old_files_alone():
    form = [dict(), dict(parallel_attn=False), dict(parallel_attn=False, new_decoder_architecture=True)]
    configs = [decode(sample("falcon", *NEW_KEYS, "parallel_attn", **keys)) for keys in form]
    assert [config.blocks[0].residual.shares_norm for config in configs] == [True, False, True]


def test_linear_biases_are_scaled_and_rounded_and_nothing_is_rotated():
    (mixer, *_) = mixers(decode(sample("falcon", alibi=True)))
    assert mixer.rope is None and mixer.alibi.rounded and mixer.alibi.scale == pytest.approx(mixer.head_dim**-0.5)


def test_two_norms_of_parallel_layers_with_biases_are_refused():
    with pytest.raises(ed.ConversionError, match="bias=true"):
        decode(sample("falcon", *NEW_KEYS, new_decoder_architecture=True, bias=True))


def test_two_norms_need_the_new_form():
    with pytest.raises(ed.ConversionError, match=r"num_ln_in_parallel_attn=2.*new_decoder_architecture=true"):
        form(num_ln_in_parallel_attn=2)
