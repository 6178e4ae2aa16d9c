"""Features of images and audio around a decoder's layers: encoding, checks, and inputs of the layers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eqx_decoders.context import Execution, Inputs
from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.encoders.encoder import Encoder
from eqx_decoders.encoders.media import Encoded, Media, gather_features
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.deepstack import DEEPSTACK


def encode(
    vision: Encoder | None, audio: Encoder | None, media: Media, execution: Execution, embed_dim: int
) -> Encoded:
    """Return the features of all images and audio clips, in the order of their placeholders."""
    order = jnp.asarray(media.order)
    groups, dtype = order.shape[0], execution.precision.compute
    features: list[Array] = []
    own_features: list[Array] = []
    deepstacks: list[list[Array]] = []
    for name, encoder, rows in (("vision", vision, media.images), ("audio", audio, media.audio)):
        if rows is None:
            continue
        if encoder is None:
            raise ConfigError(f"media has rows for an encoder of {name}, but this model has none.")
        encoded = encoder(rows, execution)
        features.append(encoded.rows.reshape(groups, -1, encoded.rows.shape[-1]))
        own_features.append(encoded.features.reshape(groups, -1, encoded.features.shape[-1]))
        deepstacks.append([each.reshape(groups, -1, each.shape[-1]) for each in encoded.deepstack])
    if not features:
        return Encoded(by_group=jnp.zeros((*order.shape, embed_dim), dtype))
    levels = max(map(len, deepstacks))
    for rows, deepstack in zip(features, deepstacks, strict=True):  # an encoder without them adds zeros
        deepstack += [jnp.zeros_like(rows)] * (levels - len(deepstack))

    def in_order(parts: list[Array]) -> Array:
        rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        return jnp.take_along_axis(rows, order[:, :, None], axis=1)

    deepstack = tuple(in_order([each[level] for each in deepstacks]) for level in range(levels))
    # encoders whose features have several sizes have no common array of them
    known = len({each.shape[-1] for each in own_features}) == 1 and any(
        encoder is not None and encoder.into is not None for encoder in (vision, audio)
    )
    return Encoded(
        by_group=in_order(features), deepstack=deepstack, encoder_features=in_order(own_features) if known else None
    )


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
