"""Stems: one of a user's own, and those that an encoder refuses."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import eqx_decoders as ed
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.stem import PatchStemConfig, StemConfig
from eqx_decoders.numerics.initializers import fan_in
from tests.encoders.samples import IMAGE, MEDIA, STEM, VISION, media_decoder, patches
from tests.errors import refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanColorStemConfig(PatchStemConfig):
    """A stem that reads the mean color of a patch."""

    gain: float = 1.0

    def build(self, embed_dim, *, key):
        kernel = fan_in(key, (self.channels, embed_dim), jnp.float32, self.channels)
        return MeanColorStem(kernel=kernel, config=self)


class MeanColorStem(eqx.Module):
    kernel: Float[Array, "channels embed"]
    config: MeanColorStemConfig = eqx.field(static=True)

    def __call__(self, rows, ctx):
        pixels = jnp.asarray(rows.patches).reshape(*rows.patches.shape[:2], self.config.channels, -1).mean(axis=-1)
        pixels = self.config.gain * pixels.astype(ctx.execution.precision.compute)
        return ctx.einsum("batch length channels, channels embed -> batch length embed", pixels, self.kernel)


SMALL = dataclasses.replace(VISION, blocks=VISION.blocks[:1], deepstack=(), deepstack_projector=None)


def with_stem(stem: StemConfig) -> ed.DecoderConfig:
    vision = dataclasses.replace(SMALL, stem=stem)
    return media_decoder(dataclasses.replace(MEDIA, vision=vision, audio=None, audio_token=None), layers=1)


def test_a_users_stem_is_saved_and_run():
    config = with_stem(MeanColorStemConfig(size=2, frames=2, merge=2, gain=0.5))
    assert ed.DecoderConfig.from_json(config.to_json()) == config
    model = ed.init(config, key=jax.random.key(0))
    pixels = patches([(1, 4, 4)])
    permuted = np.random.default_rng(0).permuted(pixels.reshape(len(pixels), 3, -1), axis=2).reshape(pixels.shape)
    media = ed.Media.create(
        config,
        np.full((1, 12), IMAGE),
        pixel_values=np.concatenate([pixels, permuted, 2 * pixels]),
        image_grid_thw=np.asarray([(1, 4, 4)] * 3),
    )
    features = np.asarray(model.encode(media).features).reshape(3, 4, -1)
    assert np.allclose(features[0], features[1], atol=1e-5)  # only the mean of a channel counts
    assert not np.allclose(features[0], features[2], atol=1e-2)


def test_a_stem_of_the_other_kind_is_refused():
    projector = dataclasses.replace(SMALL.projector, group=1)
    encoder = dataclasses.replace(SMALL, stem=FrameStemConfig(mel_bands=6), projector=projector)
    with refused(ed.ConfigError, "MediaConfig.vision.stem", "PatchStemConfig", "FrameStemConfig"):
        dataclasses.replace(MEDIA, vision=encoder)
    with refused(ed.ConfigError, "EncoderConfig.blocks"):
        dataclasses.replace(SMALL, stem=STEM, blocks=())
