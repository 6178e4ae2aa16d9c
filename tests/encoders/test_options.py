"""Every option of an encoder is read: another value gives other logits, or says why it does not fit."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.geometry import grid_of, token_order
from eqx_decoders.encoders.media_config import MediaConfig
from eqx_decoders.families.gemma.mobilenet import MobileNetConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import named_leaves, replaced
from tests.encoders.options import ENCODER_NEEDS, ENCODER_OPTIONS
from tests.encoders.samples import STEM, audio, patches, text, whole_audio


CASES = [(kind, field) for kind, (_, _, values) in ENCODER_OPTIONS.items() for field in values]
TOKENS = text("xiiiiiixvvxxvvvxaaax")[None]
IMAGES, VIDEOS = [(1, 4, 6)], [(2, 2, 2), (1, 2, 6)]
SECONDS = np.asarray([0.7, 1.0])
# an axis has half of the pairs; only tables beside the embedding look a placeholder up
UNREAD = {(AxialRope, "interleaved_sections"), (MediaConfig, "lookup_token")}


def drawn(config):
    """A model whose weights depend on their names and shapes alone."""
    shapes = abstract(config, scan=False, attention="dot")
    leaves = {}
    for name, leaf in named_leaves(shapes).items():
        seed = sum(map(ord, name)) + 31 * len(name)
        leaves[name] = jnp.asarray(np.random.default_rng(seed).normal(0.1, 0.4, leaf.shape), leaf.dtype)
    return replaced(shapes, leaves)


_known: dict = {}


def logits(config) -> np.ndarray:
    if config not in _known and isinstance(stem := config.media.vision.stem, MobileNetConfig):
        tokens = text("x" + "i" * stem.side**2 + "xxaaaxx")[None]
        pixels = np.random.default_rng(3).normal(size=(1, stem.channels, 16, 16))
        media = ed.Media.create(config, tokens, pixel_values=pixels, **audio([10]))
        _known[config] = np.asarray(drawn(config)(tokens, media=media).logits)[:, -7:]  # behind the image
    if config not in _known and (tiles := config.media.tiles) is not None:
        order, count = token_order(tiles, 5, 12, tiles.side // 4), 1 + math.prod(grid_of(tiles, 5, 12))
        tokens = text("x" + "i" * len(order) + "xxaaaxx")[None]
        pixels = np.random.default_rng(3).normal(size=(count, 3, tiles.side, tiles.side))
        media = ed.Media.create(config, tokens, pixel_values=pixels, image_sizes=[[5, 12]], **audio([10]))
        _known[config] = np.asarray(drawn(config)(tokens, media=media).logits)[:, -7:]  # behind the image
    if config not in _known:
        frames = STEM.frames if config.media.vision.stem.frames == STEM.frames else 1
        media = ed.Media.create(
            config,
            TOKENS,
            pixel_values=patches(IMAGES, 1, dataclasses.replace(STEM, frames=frames)),
            image_grid_thw=np.asarray(IMAGES),
            pixel_values_videos=patches(VIDEOS, 2, dataclasses.replace(STEM, frames=frames)),
            video_grid_thw=np.asarray(VIDEOS),
            video_second_per_grid=SECONDS,
            **(whole_audio if isinstance(config.media.audio.stem, FrameStemConfig) else audio)([10]),
        )
        _known[config] = np.asarray(drawn(config)(TOKENS, media=media).logits)
    return _known[config]


@pytest.mark.slow
@pytest.mark.parametrize("kind, field", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_every_option_of_an_encoder_is_read(kind, field):
    base, place, values = ENCODER_OPTIONS[kind]
    base = dataclasses.replace(base, **ENCODER_NEEDS.get((kind, field), {}))
    before = logits(place(base))
    assert np.isfinite(before).all()
    try:
        after = logits(place(dataclasses.replace(base, **{field: values[field]})))
    except ed.EqxDecodersError as error:
        assert str(error).endswith(".") and len(str(error)) > 30
        return
    assert ((kind, field) in UNREAD) == bool(np.allclose(before, after, atol=1e-4))


@pytest.mark.slow(
    fast=(
        *("AxialRope-theta", "EncoderConfig-blocks", "PatchStemConfig-positions", "ProjectionConfig-norm"),
        *("EncoderTokensConfig-first", "PlaneAttentionConfig-head_dim"),
    )
)
@pytest.mark.parametrize("kind, field", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_every_option_of_an_encoder_comes_back_from_json(kind, field):
    base, place, values = ENCODER_OPTIONS[kind]
    base = dataclasses.replace(base, **ENCODER_NEEDS.get((kind, field), {}))
    try:
        config = place(dataclasses.replace(base, **{field: values[field]}))
    except ed.ConfigError:
        return
    assert ed.DecoderConfig.from_json(config.to_json()) == config != place(base)
