"""MPT: what transformers does not read is refused where it would count."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, sample


@pytest.mark.parametrize(
    "keys", [dict(alibi=False), dict(alibi_bias_max=16), dict(qk_ln=True), dict(prefix_lm=True)], ids=str
)
def test_other_attention_is_refused(keys):
    (key,) = keys
    content = sample("mpt")
    with pytest.raises(ed.ConversionError, match=f"{key}=.* is not supported"):
        decode(content | dict(attn_config=content["attn_config"] | keys))


def test_the_mlp_is_always_four_times_as_wide_as_the_stream():
    assert decode(sample("mpt", expansion_ratio=2)).blocks[0].mlp.mlp_dim == 4 * 24
