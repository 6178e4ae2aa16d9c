"""Features of images and audio around a decoder's layers: checks, and inputs of the layers."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eqx_decoders.context import ForwardContext, Inputs
from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.encoders.media import Encoded, Media, gather_features, merge_features
from eqx_decoders.encoders.media_config import MediaConfig
from eqx_decoders.errors import check
from eqx_decoders.layers.deepstack import DEEPSTACK
from eqx_decoders.layers.embedding.embedding import TokenEmbedding


def with_encoded(
    media: MediaConfig | None,
    embeds: Float[Array, "batch length embed"],
    encoded: Encoded,
    index: Int[Array, "batch length"],
) -> Float[Array, "batch length embed"]:
    """Replace the embeddings of placeholders by features; the index is -1 for other tokens."""
    scale = 1.0 if media is None else media.feature_scale
    return merge_features(embeds, encoded.by_group, index, scale=scale)


def stacked_deepstack(encoded: Encoded, index: Int[Array, "batch length"]) -> dict[str, Array]:
    """Return the features that are added behind the first layers, at their tokens; empty where there are none."""
    if not encoded.deepstack:
        return {}
    return {DEEPSTACK: jnp.stack([gather_features(each, index) for each in encoded.deepstack])}


@runtime_checkable
class HasOwnTokens(Protocol):
    """An encoder, which may have tokens of its own."""

    def with_own_tokens(
        self, embeds: Float[Array, "batch length embed"], tokens: Int[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Replace the embeddings of these."""
        ...


@runtime_checkable
class HasEmbeddings(Protocol):
    """A decoder, with or without encoders."""

    @property
    def embedding(self) -> TokenEmbedding: ...

    @property
    def vision(self) -> HasOwnTokens | None: ...

    @property
    def audio(self) -> HasOwnTokens | None: ...


def embed_tokens(
    model: HasEmbeddings, tokens: Int[Array, "batch length"], ctx: ForwardContext
) -> Float[Array, "batch length embed"]:
    """Return the embeddings of tokens, of which encoders may have some of their own."""
    embeds = model.embedding(tokens, ctx)
    for encoder in (model.vision, model.audio):
        embeds = embeds if encoder is None else encoder.with_own_tokens(embeds, tokens, ctx)
    return embeds


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
