"""GPT-OSS: sinks and biases everywhere, its clamped experts, and YaRN even where a file does not say so."""

import numpy as np
import pytest
from einops import rearrange

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import YarnRope
from tests.compare import assert_array_equal
from tests.families.samples import decode, mixers, sample


def test_published_models():
    for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        config = ed.get_config(name)
        assert [mixer.mask for mixer in mixers(config)] == [SlidingWindow(128), Causal()] * (layers // 2)
        for block in config.blocks[:2]:
            assert (block.mixer.sinks, block.mixer.qkv_bias, block.mixer.out_bias) == (True, True, True)
            assert (block.mlp.num_experts, block.mlp.num_experts_per_token) == (experts, 4)
            assert (block.mlp.activation, block.mlp.up_offset, block.mlp.limit) == ("quick_gelu", 1.0, 7.0)
            assert block.mlp.bias and block.mlp.router.bias


def test_positions_are_stretched_unless_the_file_says_otherwise():
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    ropes = {mixer.rope for mixer in mixers(decode(sample("gpt_oss", *keys)))}
    assert ropes == {YarnRope(theta=150_000.0, factor=32.0, original_length=4096, truncate=False)}
    plain = decode(sample("gpt_oss", *keys, rope_parameters=dict(rope_type="default"))).blocks[0].mixer.rope
    assert (type(plain).__name__, plain.theta) == ("Rope", 150_000.0)


@pytest.mark.parametrize("keys", [dict(hidden_act="gelu"), dict(swiglu_alpha=1.0), dict(experts_per_token=3)], ids=str)
def test_settings_that_are_not_implemented_are_refused(keys):
    (key,) = keys
    with pytest.raises(ed.ConversionError, match=f"{key}=.* is not supported"):
        decode(sample("gpt_oss", **keys))
    assert decode(sample("gpt_oss", experts_per_token=2)) == decode(sample("gpt_oss"))


def test_gates_and_up_projections_take_turns_in_a_tensor():
    """transformers reads `gate_up[..., ::2]` and `gate_up[..., 1::2]`."""
    found = FAMILIES["gpt_oss"].bind(ed.abstract(decode(sample("gpt_oss"))))
    for tensor, ending in (("gate_up_proj", ""), ("gate_up_proj_bias", "_bias")):
        for part, path in enumerate(("gate", "up")):
            mapping = found[f"segments.0.unit.0.mlp.{path}{ending}"]
            stored = np.arange(np.prod(mapping.shape)).reshape(mapping.shape)
            own = mapping.section.of(stored).reshape(mapping.own_shape)
            assert_array_equal(rearrange(own, mapping.pattern), stored[..., part::2])
            assert mapping.section.index == part and mapping.name((0,)).endswith(f".experts.{tensor}")
