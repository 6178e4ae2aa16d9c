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
    [("falcon-7b", {"input_layernorm"}), ("falcon2-11b", {"input_layernorm"}), ("falcon-40b", {"ln_attn", "ln_mlp"})],
)
def test_a_second_norm_renames_the_first(name, norms):
    mappings = FAMILIES["falcon"].bind(ed.abstract(ed.get_config(name)))
    names = [mapping.name((0,)) for path, mapping in mappings.items() if "norm" in path and path != "final_norm.scale"]
    inside = {name.split(".")[3] for name in names if name.startswith("transformer.h.0.")}
    assert inside == norms


@pytest.mark.parametrize("keys", [dict(alibi=True), dict(parallel_attn=False)], ids=str)
def test_other_falcons_are_refused(keys):
    (key,) = keys
    with pytest.raises(ed.ConversionError, match=f"{key}=.* changes what the model computes and is not implemented"):
        decode(sample("falcon", **keys))


def test_two_norms_need_the_new_form():
    with pytest.raises(ed.ConversionError, match="num_ln_in_parallel_attn=2 needs new_decoder_architecture=true"):
        form(num_ln_in_parallel_attn=2)
