"""Merge media features into the token embeddings and layer inputs of a decoder."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Inputs
from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.encoders.media_config import MediaConfig
from eqx_decoders.errors import check
from eqx_decoders.layers.deepstack import DEEPSTACK


def with_encoded(
    media: MediaConfig | None,
    embeds: Float[Array, "batch length embed"],
    encoded: Encoded,
    index: Int[Array, "batch length"],
) -> Float[Array, "batch length embed"]:
    """Replace the embeddings of placeholders by features. `index` is -1 for all other tokens."""
    scale = 1.0 if media is None else media.feature_scale
    return merge_features(embeds, encoded.by_group, index, scale=scale)


def gather_features(
    features: Float[Array, "groups features embed"], index: Int[Array, "batch length"]
) -> Float[Array, "batch length embed"]:
    """Return `features[index]` within the group of each sequence; zeros where the index is -1."""
    groups = features.shape[0]
    batch, length = index.shape
    index = index.reshape(groups, -1)
    gathered = jnp.take_along_axis(features, jnp.maximum(index, 0)[:, :, None], axis=1)
    gathered = jnp.where((index >= 0)[:, :, None], gathered, jnp.zeros((), gathered.dtype))
    return gathered.reshape(batch, length, features.shape[-1])


def merge_features(
    embeds: Float[Array, "batch length embed"],
    features: Float[Array, "groups features embed"],
    index: Int[Array, "batch length"],
    *,
    scale: float = 1.0,
) -> Float[Array, "batch length embed"]:
    """Replace the embeddings of placeholders by `scale * features[index]`. `index` is -1 for all other tokens."""
    gathered = gather_features(features, index).astype(embeds.dtype)
    return jnp.where((index >= 0)[:, :, None], gathered if scale == 1.0 else gathered * scale, embeds)


def stacked_deepstack(encoded: Encoded, index: Int[Array, "batch length"]) -> dict[str, Array]:
    """Return the layer input with the DeepStack features of each token, stacked over layers; {} without DeepStack."""
    if not encoded.deepstack:
        return {}
    return {DEEPSTACK: jnp.stack([gather_features(features, index) for features in encoded.deepstack])}


def merge_media_inputs(media: Media, inputs: Inputs, segment_ids: Any) -> tuple[Inputs, Any]:
    """Return the layer inputs and segment ids, with missing ones taken from `media`."""
    candidates = {"spans": media.spans, "rotary_positions": media.grid_positions}
    missing = {name: value for name, value in candidates.items() if getattr(inputs, name) is None}
    return dataclasses.replace(inputs, **missing), media.real if segment_ids is None else segment_ids


def without_placeholders(tokens: Any, media: Media) -> Any:
    """Return the tokens with placeholders replaced by 0, to check ids: placeholders may be outside of the vocabulary.

    Tokens with unknown values (traced) are returned unchanged.
    """
    ids = concrete(tokens)
    index = concrete(media.index)
    if ids is None or index is None or ids.shape != index.shape:
        return tokens
    return np.where(index >= 0, 0, ids)


def check_tokens(tokens: Any, media: Media) -> None:
    """Raise ConfigError if there are no tokens, or if `media` was created for tokens of another shape."""
    check(
        tokens is not None,
        "media needs tokens, whose placeholders its features replace, and cannot be combined with embeds. Pass tokens "
        "and media, or embeds without media.",
    )
    shape = np.shape(tokens)
    media_shape = media.index.shape
    check(
        shape == media_shape,
        f"media was created for tokens of shape {media_shape}, but the tokens have shape {shape}. Call Media.create "
        "with the same tokens.",
    )
