"""DBRX: where the base of its rotary embedding stands, and which norms of its experts' weights there are."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, mixers, sample


def test_published_files_have_the_base_in_the_table_of_attention():
    content = sample("dbrx", "rope_parameters", "rope_theta", "rope_scaling")
    content["attn_config"] = content["attn_config"] | dict(rope_theta=5e5)
    assert {mixer.rope.theta for mixer in mixers(decode(content))} == {5e5}
    with pytest.raises(ed.ConversionError, match=r"attn_config\.rope_theta=500000\.0.*10000\.0"):
        decode(content | dict(rope_theta=1e4))


def test_norms_of_the_weights_of_experts():
    content = sample("dbrx")
    for power, renormalize in ((1, True), (None, False)):
        content["ffn_config"] = content["ffn_config"] | dict(moe_normalize_expert_weights=power)
        assert {block.mlp.router.renormalize for block in decode(content).blocks} == {renormalize}
    content["ffn_config"] = content["ffn_config"] | dict(moe_normalize_expert_weights=2.0)
    with pytest.raises(ed.ConversionError, match=r"moe_normalize_expert_weights=2\.0"):
        decode(content)
