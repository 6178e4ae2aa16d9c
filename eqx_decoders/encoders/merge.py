"""What a decoder does with images and audio around its own layers."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.context import Execution, Inputs
from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.encoders.encoder import Encoder
from eqx_decoders.encoders.media import Encoded, HasMedia, Media, placed
from eqx_decoders.encoders.media_config import MediaConfig
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.attention.conformer import LocalAttentionConfig
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.deepstack import DEEPSTACK, AddedFeaturesConfig


@runtime_checkable
class _Sizes(HasMedia, Protocol):
    @property
    def embed_dim(self) -> int: ...


def check_media(media: MediaConfig | None, blocks: tuple[BlockConfig, ...], embed_dim: int) -> None:
    """Raise ConfigError unless encoders make what the decoder takes, and none of its layers is for encoders alone."""
    layers = [layer for block in blocks for layer in block.branches().values()]
    for layer in layers:
        rule = "remembers nothing of earlier calls: it is for the layers of encoders"
        only = isinstance(layer, LocalAttentionConfig | LightConvolutionConfig)
        check(not only, f"DecoderConfig.blocks has a {type(layer).__name__}, which {rule}.")
    takers = sum(isinstance(layer, AddedFeaturesConfig) for layer in layers)
    if media is None:
        return
    given = 0 if media.vision is None else len(media.vision.deepstack)
    rule = f"but {takers} layers of DecoderConfig.blocks have an AddedFeaturesConfig: give as many"
    check(given == takers, f"MediaConfig.vision.deepstack has {given} layers, {rule}.")
    for name, encoder in (("vision", media.vision), ("audio", media.audio)):
        if encoder is None:
            continue
        further = encoder.deepstack_projector
        sizes = {encoder.out_dim} | (set() if further is None else {further.out_dim})
        rule = f"must make DecoderConfig.embed_dim={embed_dim} features"
        check(sizes == {embed_dim}, f"MediaConfig.{name}: its projectors make {sorted(sizes)}, and {rule}.")


def encode(
    vision: Encoder | None, audio: Encoder | None, media: Media, execution: Execution, config: _Sizes
) -> Encoded:
    """The features of all images and audio, in the order of their placeholders."""
    order = jnp.asarray(media.order)
    groups, dtype = order.shape[0], execution.precision.compute
    made: list[Array] = []
    own: list[Array] = []
    further: list[list[Array]] = []
    for name, encoder, rows in (("vision", vision, media.images), ("audio", audio, media.audio)):
        if rows is None:
            continue
        if encoder is None:
            raise ConfigError(f"media has rows for an encoder of {name}, but this model has none.")
        encoded = encoder(rows, execution)
        made.append(encoded.rows.reshape(groups, -1, encoded.rows.shape[-1]))
        own.append(encoded.features.reshape(groups, -1, encoded.features.shape[-1]))
        further.append([each.reshape(groups, -1, each.shape[-1]) for each in encoded.deepstack])
    if not made:
        return Encoded(by_group=jnp.zeros((*order.shape, config.embed_dim), dtype))
    levels = max(map(len, further))
    for rows, deepstack in zip(made, further, strict=True):  # what has none adds nothing
        deepstack += [jnp.zeros_like(rows)] * (levels - len(deepstack))

    def in_order(parts: list[Array]) -> Array:
        rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        return jnp.take_along_axis(rows, order[:, :, None], axis=1)

    deepstack = tuple(in_order([each[level] for each in further]) for level in range(levels))
    # encoders whose features have several sizes have no common array of them
    known = len({each.shape[-1] for each in own}) == 1 and any(
        encoder is not None and encoder.into is not None for encoder in (vision, audio)
    )
    return Encoded(by_group=in_order(made), deepstack=deepstack, own=in_order(own) if known else None)


def stacked_deepstack(encoded: Encoded, index: Int[Array, "batch length"]) -> dict[str, Array]:
    """What is added behind the first layers, at the places of its tokens; nothing where there is none."""
    if not encoded.deepstack:
        return {}
    return {DEEPSTACK: jnp.stack([placed(each, index) for each in encoded.deepstack])}


def beside(media: Media, inputs: Inputs, segment_ids: Any) -> tuple[Inputs, Any]:
    """The inputs and the documents of tokens, those that were not given being those of `media`."""
    given = {"spans": media.spans, "rotary_positions": media.grid_positions}
    missing = {name: value for name, value in given.items() if getattr(inputs, name) is None}
    return dataclasses.replace(inputs, **missing), media.real if segment_ids is None else segment_ids


def with_offsets(
    inputs: Inputs, positions: Int[Array, "batch length"], cache: Cache | None
) -> tuple[Inputs, Float[Array, "batch"] | None]:
    """Rotary positions behind those of a cache, and the offset that the next ones have; None without such a cache.

    Given positions count from 0 in each call; where none are given, all dimensions count on.
    """
    if cache is None or cache.rope_offset is None:
        return inputs, None
    offset, given = cache.rope_offset, inputs.rotary_positions
    if given is None:
        counted = positions.astype(jnp.float32) + offset[:, None]
        rotary = jnp.where(positions >= 0, counted, -1.0)[:, :, None]
        return dataclasses.replace(inputs, rotary_positions=jnp.repeat(rotary, 3, axis=2)), offset
    begin = cache.length.astype(jnp.float32) + offset
    rotary = jnp.asarray(given).astype(jnp.float32) + begin[:, None, None]
    real = positions >= 0
    last = jnp.max(jnp.where(real[:, :, None], rotary, -jnp.inf), axis=(1, 2))
    new = last - jnp.max(positions, axis=1).astype(jnp.float32)
    return dataclasses.replace(inputs, rotary_positions=rotary), jnp.where(real.any(axis=1), new, offset)


def without_placeholders(tokens: Any, media: Media) -> Any:
    """Tokens for a check of their ids: placeholders may be outside of the vocabulary."""
    known, index = concrete(tokens), concrete(media.index)
    if known is None or index is None or known.shape != index.shape:
        return tokens
    return np.where(index >= 0, 0, known)


def check_tokens(tokens: Any, media: Media) -> None:
    """Raise ConfigError where `media` was made for tokens of another shape."""
    shape, made = np.shape(tokens), media.index.shape
    rule = "Media.create must be called with the tokens of the call"
    check(shape == made, f"media is for tokens of shape {made}, and these are {shape}: {rule}.")
