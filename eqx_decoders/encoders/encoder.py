"""Encoder of images or audio: a stem, the layers and the scan of decoders, and a projector."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.stack import Segment
from eqx_decoders.context import Context, Execution
from eqx_decoders.encoders.audio.audio_stem import AudioStem
from eqx_decoders.encoders.audio.frame_stem import FrameStem
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.mobilenet.mobilenet import MobileNet
from eqx_decoders.encoders.packed_rows import AudioRows, PatchRows
from eqx_decoders.encoders.projector import EncoderTokens, Projection, Projector
from eqx_decoders.encoders.stem import PatchStem
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.norm import Norm
from eqx_decoders.numerics.clipped_weight import with_clipping
from eqx_decoders.numerics.initializers import normal


class EncodedRows(NamedTuple):
    """Outputs of an encoder for rows of patches, chunks or frames.

    **Arguments:**

    - `features`: the projector's features.
    - `rows`: the rows that replace placeholders: the same, unless `EncoderConfig.into` multiplies them.
    - `deepstack`: features that are added behind the first layers of the decoder.
    - `line_end`: the row at the end of each line of an image's tokens; None for none.
    """

    features: Float[Array, "batch rows features"]
    rows: Float[Array, "batch rows embed"]
    deepstack: tuple[Float[Array, "batch rows embed"], ...]
    line_end: Float[Array, "embed"] | None


class Encoder(eqx.Module):
    """Encoder of images or audio: `projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`."""

    stem: PatchStem | MobileNet | AudioStem | FrameStem
    segments: tuple[Segment, ...]
    pre_norm: Norm | None
    post_norm: Norm | None
    projector: Projector
    deepstack: tuple[Projector, ...]
    into: Projection | None
    tokens: EncoderTokens | None
    line_end: Float[Array, "embed"] | None
    config: EncoderConfig = eqx.field(static=True)

    @classmethod
    def build(cls, config: EncoderConfig, *, key: PRNGKeyArray) -> "Encoder":
        stem_key, block_key, projector_key, deepstack_key = jax.random.split(key, 4)
        keys, stack, begin = jax.random.split(block_key, len(config.blocks)), [], 0
        for unit, repeats in config.parts:
            count = len(unit) * repeats
            stack.append(Segment.build(unit, config.embed_dim, keys=keys[begin : begin + count]))
            begin += count
        deepstack, into = config.deepstack_projector, config.into
        inner, out = config.projector.combined_dim(config.input_dim), config.projector.out_dim
        into_key, token_key, end_key = (jax.random.fold_in(projector_key, index) for index in range(3))
        return cls(
            stem=config.stem.build(config.embed_dim, key=stem_key),
            segments=with_clipping(tuple(stack)) if config.clipped else tuple(stack),
            pre_norm=None if config.pre_norm is None else config.pre_norm.build(config.embed_dim),
            post_norm=None if config.post_norm is None else config.post_norm.build(config.embed_dim),
            projector=config.projector.build(config.input_dim, key=projector_key),
            deepstack=() if deepstack is None else tuple(
                deepstack.build(config.embed_dim, key=jax.random.fold_in(deepstack_key, index))
                for index in range(len(config.deepstack))
            ),
            into=None if into is None else into.build(out, key=into_key),
            tokens=None if config.tokens is None else config.tokens.build(inner, key=token_key),
            line_end=None if config.tiles is None else normal(end_key, (out,), jnp.float32, out**-0.5),
            config=config,
        )  # fmt: skip

    def __call__(self, rows: PatchRows | AudioRows, execution: Execution) -> EncodedRows:
        """Return the features that replace placeholders, and those that are added behind the decoder's layers."""
        ctx = self._context(rows, execution)
        stem: Any = self.stem
        x = stem(rows, ctx)
        x = x if self.pre_norm is None else self.pre_norm(x)
        x, deepstack = self._layers(x, ctx)
        features = self._filled(self.projector(x, ctx), ctx)
        replacing = features if self.into is None else self.into(features, ctx)
        return EncodedRows(features, replacing, deepstack, self.line_end)

    def _layers(self, x: Array, ctx: Context) -> tuple[Array, tuple[Array, ...]]:
        """Return the features for the projector, and those that are added behind the decoder's layers."""
        config, deepstack, depth = self.config, list[Array](), 0
        known, deepest = {0: x}, max((*config.depths, *(layer + 1 for layer in config.deepstack)), default=0)
        for segment in self.segments:
            if config.depths and depth >= deepest:
                break
            x = segment(x, ctx).x
            depth += len(segment.unit) * segment.repeats
            known[depth] = x
            if depth - 1 in config.deepstack:
                deepstack.append(self.deepstack[len(deepstack)](x, ctx))
        if config.depths:
            return jnp.concatenate([known[each] for each in config.depths], axis=-1), tuple(deepstack)
        return x if self.post_norm is None else self.post_norm(x), tuple(deepstack)

    def with_own_tokens(
        self, embeds: Float[Array, "batch length embed"], tokens: Int[Array, "batch length"], ctx: Context
    ) -> Float[Array, "batch length embed"]:
        """Replace the embeddings of the tokens that are the encoder's own."""
        if self.tokens is None:
            return embeds
        config = self.tokens.config
        is_own = (tokens >= config.first) & (tokens < config.first + config.count)
        embedded = self.tokens(tokens, self.projector, ctx)
        embedded = embedded if self.into is None else self.into(embedded, ctx)
        return jnp.where(is_own[:, :, None], embedded.astype(embeds.dtype), embeds)

    def _filled(self, x: Float[Array, "batch rows features"], ctx: Context) -> Float[Array, "batch rows features"]:
        """Replace rows of padding by the embedding that fills up audio clips."""
        if self.tokens is None or self.tokens.config.fill is None:
            return x
        fill = self.tokens(jnp.full((1, 1), self.tokens.config.fill), self.projector, ctx)
        padding = ctx.positions[:, :: self.config.stem.group] < 0
        return jnp.where(padding[:, :, None], fill.astype(x.dtype), x)

    def _context(self, rows: PatchRows | AudioRows, execution: Execution) -> Context:
        # pipelines and batch overlap are the decoder's; the order of tokens is that of the image
        execution = dataclasses.replace(execution, pipeline=None, batch_split=1, context_order="plain")
        coordinates = rows.coordinates if isinstance(rows, PatchRows) else None
        segment_ids = None if rows.segment_ids is None else jnp.asarray(rows.segment_ids)
        return Context(
            positions=jnp.asarray(rows.positions),
            segment_ids=segment_ids,
            execution=execution,
            rotary_positions=None if coordinates is None else jnp.asarray(coordinates),
        )


def encode_media(
    vision: Encoder | None, audio: Encoder | None, media: Media, execution: Execution, embed_dim: int
) -> Encoded:
    """Return the features of all images and audio clips, in the order of their placeholders."""
    order = jnp.asarray(media.order)
    groups, dtype = order.shape[0], execution.precision.compute
    features: list[Array] = []
    own_features: list[Array] = []
    deepstacks: list[list[Array]] = []
    line_end: Array | None = None
    for name, encoder, rows in (("vision", vision, media.images), ("audio", audio, media.audio)):
        if rows is None:
            continue
        if encoder is None:
            raise ConfigError(f"media has rows for an encoder of {name}, but this model has none.")
        encoded = encoder(rows, execution)
        features.append(encoded.rows.reshape(groups, -1, encoded.rows.shape[-1]))
        own_features.append(encoded.features.reshape(groups, -1, encoded.features.shape[-1]))
        deepstacks.append([each.reshape(groups, -1, each.shape[-1]) for each in encoded.deepstack])
        line_end = encoded.line_end if line_end is None else line_end
    if not features:
        return Encoded(by_group=jnp.zeros((*order.shape, embed_dim), dtype))
    if line_end is not None:  # the last row, which is -1 in the order
        row = jnp.broadcast_to(line_end.astype(features[0].dtype), (groups, 1, embed_dim))
        features, own_features, deepstacks = [*features, row], [*own_features, row], [*deepstacks, []]
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
