"""Granite without Mamba, and HyperCLOVA X, which has its multipliers."""

import pytest

from eqx_decoders.families import FAMILIES
from eqx_decoders.layers.mlp import MLPConfig
from tests.families.samples import decode, sample


MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


@pytest.mark.parametrize("kind", ["granite", "granitemoe", "granitemoeshared"])
def test_multipliers_are_one_unless_given(kind):
    """That of scores too, in the place of `head_dim ** -0.5`."""
    config = decode(sample(kind, *MULTIPLIERS))
    block = config.blocks[0]
    assert (block.mixer.query_scale, block.residual.residual_scale) == (1.0, 1.0)
    assert (config.embedding_scale, config.logit_divisor) == (1.0, 1.0)


def test_hyperclova_scales_scores_as_usual_unless_it_says_more():
    for content in (sample("hyperclovax", *MULTIPLIERS), sample("hyperclovax", attention_multiplier=None)):
        assert decode(content).blocks[0].mixer.query_scale == 8**-0.5


@pytest.mark.parametrize("scale", [0.6, 3.0, 49.0, 0.1, 1 / 3, 7e-5])
def test_hyperclova_multiplies_logits(scale):
    """Where Granite divides them; what is written is the number that was read."""
    config = decode(sample("hyperclovax", logits_scaling=scale))
    assert config.logit_divisor == pytest.approx(1 / scale)
    assert FAMILIES["hyperclovax"].encode(config)["logits_scaling"] == scale


def test_hyperclova_has_norms_of_outputs_unless_they_are_off():
    on, off = (decode(sample("hyperclovax", use_post_norm=flag)).blocks[0] for flag in (True, False))
    assert on.post_mixer_norm == on.post_mlp_norm == on.pre_mixer_norm
    assert off.post_mixer_norm is off.post_mlp_norm is None


def test_there_may_be_no_shared_expert():
    content = sample("granitemoeshared", shared_intermediate_size=0)
    assert decode(content).blocks[0].mlp.shared is None
    assert FAMILIES["granitemoeshared"].encode(decode(content))["shared_intermediate_size"] == 0
    assert decode(sample("granitemoeshared")).blocks[0].mlp.shared == MLPConfig(mlp_dim=14)
