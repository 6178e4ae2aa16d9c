"""What DeepSeek's families share: the factors by which YaRN sharpens latent attention."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from tests.families.samples import SAMPLES, decode


# by what queries are multiplied, to the last bit: (128 + 64) ** -0.5 * (0.1 mscale ln(factor) + 1) ** 2
SCALES = {
    "deepseek2-16b": 0.11472138679292611,
    "deepseek2-236b": 0.11472138679292611,
    "deepseek3-671b": 0.1352337788608801,
    "kimi-k2-1t": 0.13086079996295005,
}


@pytest.mark.parametrize("name", SCALES)
def test_scores_of_published_models(name):
    for block in ed.get_config(name).blocks:
        assert (block.mixer.scale, block.mixer.rope.magnitude) == (SCALES[name], 1.0)


def test_both_factors_together():
    mixer = decode(SAMPLES["deepseek2_groups/config"]).blocks[0].mixer  # 1.0 and 0.707
    assert (mixer.scale, mixer.rope.magnitude) == (0.37979454312603067, 1.053118360780668)


@pytest.mark.parametrize("mscale", [1.0, 0.707, 1e-300])
@pytest.mark.parametrize("mscale_all_dim, factor", [(0.707, 40.0), (1691.0, 8.0)])
def test_both_factors_survive_an_export(mscale, mscale_all_dim, factor):
    factors = {"mscale": mscale, "mscale_all_dim": mscale_all_dim, "factor": factor}
    content = SAMPLES["deepseek2_groups/config"]
    config = decode(content | {"rope_parameters": content["rope_parameters"] | factors})
    written = FAMILIES["deepseek_v2"].encode(config)
    assert factors.items() <= written["rope_parameters"].items()
    assert factors.items() <= written["rope_scaling"].items()
    assert decode(written) == config


def test_another_scale_is_not_exported():
    config = decode(SAMPLES["deepseek2_groups/config"])
    first, *others = config.blocks
    scaled = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, query_scale=0.1))
    with pytest.raises(ed.ConversionError, match=r"blocks\[0\]\.mixer\.query_scale=0\.1"):
        FAMILIES["deepseek_v2"].encode(dataclasses.replace(config, blocks=(scaled, *others)))
