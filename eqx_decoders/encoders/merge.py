"""Merging of media features into the inputs of a decoder: token embeddings, layer inputs, and checks."""

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
    """Replace the embeddings of placeholders by features. `index` is -1 for all other tokens."""
    scale = 1.0 if media is None else media.feature_scale
    return merge_features(embeds, encoded.by_group, index, scale=scale)


def stacked_deepstack(encoded: Encoded, index: Int[Array, "batch length"]) -> dict[str, Array]:
    """Return the layer input with the DeepStack features of each token, stacked over layers; {} without DeepStack."""
    if not encoded.deepstack:
        return {}
    return {DEEPSTACK: jnp.stack([gather_features(features, index) for features in encoded.deepstack])}


@runtime_checkable
class HasOwnTokens(Protocol):
    """Encoder that may embed some token ids instead of the decoder (`EncoderConfig.tokens`)."""

    def with_own_tokens(
        self, embeds: Float[Array, "batch length embed"], tokens: Int[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Replace the embeddings of these token ids."""
        ...


@runtime_checkable
class HasEmbeddings(Protocol):
    """Decoder with a token embedding, and optional encoders."""

    @property
    def embedding(self) -> TokenEmbedding: ...

    @property
    def vision(self) -> HasOwnTokens | None: ...

    @property
    def audio(self) -> HasOwnTokens | None: ...


def embed_tokens(
    model: HasEmbeddings, tokens: Int[Array, "batch length"], ctx: ForwardContext
) -> Float[Array, "batch length embed"]:
    """Return the embeddings of tokens; encoders replace the embeddings of the token ids that they embed."""
    embeds = model.embedding(tokens, ctx)
    for encoder in (model.vision, model.audio):
        embeds = embeds if encoder is None else encoder.with_own_tokens(embeds, tokens, ctx)
    return embeds


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
    """Raise ConfigError if `media` was created for tokens of another shape."""
    shape = np.shape(tokens)
    media_shape = media.index.shape
    check(
        shape == media_shape,
        f"media was created for tokens of shape {media_shape}, but the tokens have shape {shape}. Call Media.create "
        "with the same tokens.",
    )
