"""Features of images and audio around a decoder's layers: checks, and inputs of the layers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eqx_decoders.context import Inputs
from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.encoders.media import Encoded, Media, gather_features
from eqx_decoders.errors import check
from eqx_decoders.layers.deepstack import DEEPSTACK


def stacked_deepstack(encoded: Encoded, index: Int[Array, "batch length"]) -> dict[str, Array]:
    """Return the features that are added behind the first layers, at their tokens; empty where there are none."""
    if not encoded.deepstack:
        return {}
    return {DEEPSTACK: jnp.stack([gather_features(each, index) for each in encoded.deepstack])}


def merge_media_inputs(media: Media, inputs: Inputs, segment_ids: Any) -> tuple[Inputs, Any]:
    """Return the inputs of the layers and the tokens' documents, taken from `media` where they are missing."""
    candidates = {"spans": media.spans, "rotary_positions": media.grid_positions}
    missing = {name: value for name, value in candidates.items() if getattr(inputs, name) is None}
    return dataclasses.replace(inputs, **missing), media.real if segment_ids is None else segment_ids


def without_placeholders(tokens: Any, media: Media) -> Any:
    """Return tokens for a check of their ids, placeholders as 0: they may be outside of the vocabulary."""
    ids, index = concrete(tokens), concrete(media.index)
    if ids is None or index is None or ids.shape != index.shape:
        return tokens
    return np.where(index >= 0, 0, ids)


def check_tokens(tokens: Any, media: Media) -> None:
    """Raise ConfigError where `media` was made for tokens of another shape."""
    shape, media_shape = np.shape(tokens), media.index.shape
    rule = "Media.create must be called with the tokens of the call"
    check(shape == media_shape, f"media is for tokens of shape {media_shape}, and these are {shape}: {rule}.")
