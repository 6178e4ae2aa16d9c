"""Several mixers in parallel: the sum of their outputs, and their caches."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.parallel_mixers import NamedMixer, ParallelMixersConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.rope import LongRope
from eqx_decoders.training.step.zigzag import _order_dependent_layers
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.models import rich_decoder


ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4)
CONVOLUTION = GatedConvolutionConfig(channels=6)
CONFIG = ParallelMixersConfig(
    mixers=(
        NamedMixer(name="near", mixer=dataclasses.replace(ATTENTION, mask=SlidingWindow(2)), output_scale=3.0),
        NamedMixer(name="convolution", mixer=CONVOLUTION, input_scale=0.5),
        NamedMixer(name="far", mixer=ATTENTION, input_scale=2.0, output_scale=0.25),
    )
)


def test_output_is_the_sum_of_scaled_mixers():
    layer, x = drawn(lambda key: CONFIG.build(6, key=key)), jnp.asarray(normal(2, 5, 6))
    ctx = context(np.tile(np.arange(5), (2, 1)))

    @eqx.filter_jit
    def both(layer):
        near, convolution, far = (layer.mixers[name] for name in ("near", "convolution", "far"))
        want = 3.0 * near(x, ctx)[0] + convolution(0.5 * x, ctx)[0] + 0.25 * far(2.0 * x, ctx)[0]
        return *layer(x, ctx), want

    got, entries, want = both(layer)
    assert_close(got, np.asarray(want), units=32)
    assert entries.keys() == CONFIG.cache_shape(8).keys() == {"near", "convolution", "far"}
    assert CONFIG.token_products(9) == sum(each.mixer.token_products(9) for each in CONFIG.mixers)


def decoder(mixer) -> ed.DecoderConfig:
    config = rich_decoder(1)
    return dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], mixer=mixer),))


def test_decoder_config_reads_the_properties_of_all_mixers():
    """The display name, key rotation, and whether tokens may be reordered."""
    rope = LongRope(short_factors=(1.0, 1.0), long_factors=(2.0, 2.0), original_length=7)
    turned = dataclasses.replace(ATTENTION, rope=rope)
    config = decoder(ParallelMixersConfig(mixers=(NamedMixer(name="a", mixer=turned), CONFIG.mixers[0])))
    assert config.fixed_length == 7
    assert ed.describe_model(config).layers == {"Attention and Attention (window 2)": 1}
    # keys, values and positions of the only attention without a window
    assert ed.describe_model(decoder(CONFIG)).bytes_per_token == 2 * 2 * 2 * 4 + 4
    assert not list(_order_dependent_layers(config, ed.Execution()))
    assert len(list(_order_dependent_layers(decoder(CONFIG), ed.Execution()))) == 1


def test_wrong_parallel_mixers_are_refused():
    with refused(ed.ConfigError, "ParallelMixersConfig.mixers", "near"):
        ParallelMixersConfig(mixers=CONFIG.mixers[:1] * 2)
    for field, value in dict(out_dim=6, kv_shared_from="first").items():
        mixer = dataclasses.replace(ATTENTION, **{field: value})
        with refused(ed.ConfigError, f"NamedMixer.mixer.{field}={value!r}"):
            NamedMixer(name="a", mixer=mixer)
