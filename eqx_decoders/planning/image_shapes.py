"""Images of a planned step, as shapes: a number of images of one size in each sequence."""

from typing import Any

import jax
import numpy as np

from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.layout import Layout


def abstract_media(
    config: DecoderConfig, layout: Layout, batch_size: int, seq_len: int, *, images: int, side: int
) -> Media:
    """Return the media of a batch whose sequences each begin with `images` images of `side` pixels, as shapes.

    A model whose positions are of one size takes images of that size, whatever `side` is.
    """
    media = config.media
    stem = None if media is None or media.vision is None else media.vision.stem
    if media is None or media.image_token is None or not isinstance(stem, PatchStemConfig):
        raise ConfigError(f"images={images} needs a model that sees: this one has no encoder of images.")
    fixed = isinstance(stem.positions, LearnedGrid) and stem.positions.resample == "none"
    rows = stem.positions.side if fixed and isinstance(stem.positions, LearnedGrid) else side // stem.size
    rows -= rows % stem.merge
    tokens = images * (rows // stem.merge) ** 2
    rule = f"images={images} of {rows} x {rows} patches are {tokens} tokens: seq_len={seq_len} must be above"
    check(0 < tokens < seq_len, f"{rule}.")
    ids = np.zeros((1, seq_len), np.int32)
    ids[0, :tokens] = media.image_token
    patches = np.zeros((images * rows * rows, int(np.prod(stem.shape))), np.float32)
    grids = np.asarray([[1, rows, rows]] * images)
    one = Media.create(config, ids, pixel_values=patches, image_grid_thw=grids, segment_ids=np.ones_like(ids))

    def of_batch(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (leaf.shape[0] * batch_size, *leaf.shape[1:])
        sharding = layout.activation_sharding("batch", shape[:1])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)

    return jax.tree.map(of_batch, one)
