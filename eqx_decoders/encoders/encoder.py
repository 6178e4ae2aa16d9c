"""Encoder of images or audio: a stem, the layers and the scan of decoders, and a projector."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.stack import ScannedLayers
from eqx_decoders.context import Execution, ForwardContext
from eqx_decoders.encoders.audio.audio_stem import AudioStem
from eqx_decoders.encoders.audio.frame_stem import FrameStem
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.mobilenet.mobilenet import MobileNet
from eqx_decoders.encoders.packed_rows import AudioRows, PatchRows
from eqx_decoders.encoders.projector import EncoderTokens, Projection, Projector
from eqx_decoders.encoders.stem import PatchStem
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.relative_attention import DISTANCE_BIAS
from eqx_decoders.layers.norm import Norm
from eqx_decoders.numerics.clipped_weight import with_clipping
from eqx_decoders.numerics.initializers import normal


class EncodedRows(NamedTuple):
    """Outputs of an encoder for rows of patches, chunks or frames.

    **Arguments:**

    - `features`: the projector's features.
    - `rows`: the rows that replace placeholders: the same, unless `EncoderConfig.into` multiplies them.
    - `deepstack`: features that are added behind the first layers of the decoder.
    - `separators`: the rows at the end of each line of an image's tokens, and between its parts and the whole.
    """

    features: Float[Array, "batch rows features"]
    rows: Float[Array, "batch rows embed"]
    deepstack: tuple[Float[Array, "batch rows embed"], ...]
    separators: tuple[Float[Array, "embed"], ...] = ()


class Encoder(eqx.Module):
    """Encoder of images or audio: `projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`."""

    stem: PatchStem | MobileNet | AudioStem | FrameStem
    scanned_layers: tuple[ScannedLayers, ...]
    pre_norm: Norm | None
    post_norm: Norm | None
    projector: Projector
    projector_beside: Projector | None
    deepstack: tuple[Projector, ...]
    into: Projection | None
    tokens: EncoderTokens | None
    line_end: Float[Array, "embed"] | None
    divider: Float[Array, "embed"] | None
    distance_bias: Float[Array, "positions heads"] | None
    config: EncoderConfig = eqx.field(static=True)

    @classmethod
    def build(cls, config: EncoderConfig, *, key: PRNGKeyArray) -> "Encoder":
        stem_key, block_key, projector_key, deepstack_key = jax.random.split(key, 4)
        keys, stack, begin = jax.random.split(block_key, len(config.blocks)), [], 0
        for unit, repeats in config.parts:
            count = len(unit) * repeats
            stack.append(ScannedLayers.build(unit, config.embed_dim, keys=keys[begin : begin + count]))
            begin += count
        deepstack, into = config.deepstack_projector, config.into
        inner, out = config.projector.combined_dim(config.input_dim), config.projector.out_dim
        keys_of_more = [jax.random.fold_in(projector_key, index) for index in range(6)]
        into_key, token_key, end_key, divider_key, beside_key, bias_key = keys_of_more
        tiles, table, beside = config.tiles, config.distance_table, config.projector_beside
        size = config.input_dim if tiles is not None and tiles.projected else out
        return cls(
            stem=config.stem.build(config.embed_dim, key=stem_key),
            scanned_layers=with_clipping(tuple(stack)) if config.clipped else tuple(stack),
            pre_norm=None if config.pre_norm is None else config.pre_norm.build(config.embed_dim),
            post_norm=None if config.post_norm is None else config.post_norm.build(config.embed_dim),
            projector=config.projector.build(config.input_dim, key=projector_key),
            deepstack=() if deepstack is None else tuple(
                deepstack.build(config.embed_dim, key=jax.random.fold_in(deepstack_key, index))
                for index in range(len(config.deepstack))
            ),
            into=None if into is None else into.build(out, key=into_key),
            tokens=None if config.tokens is None else config.tokens.build(inner, key=token_key),
            projector_beside=None if beside is None else beside.build(config.input_dim, key=beside_key),
            line_end=None if tiles is None else normal(end_key, (size,), jnp.float32, size**-0.5),
            divider=normal(divider_key, (size,), jnp.float32, size**-0.5) if tiles and tiles.whole == "last" else None,
            distance_bias=None if table is None else normal(bias_key, table, jnp.float32, 0.02),
            config=config,
        )  # fmt: skip

    def __call__(self, rows: PatchRows | AudioRows, execution: Execution, *, with_images: bool = False) -> EncodedRows:
        """Return the features that replace placeholders, and those that are added behind the decoder's layers.

        with_images: whether the call has images, and this is the encoder of audio.
        """
        ctx = self._context(rows, execution)
        stem: Any = self.stem
        x = stem(rows, ctx)
        x = x if self.pre_norm is None else self.pre_norm(x)
        x, deepstack = self._layers(x, ctx)
        beside = self.projector_beside if with_images else None
        projector = self.projector if beside is None else beside
        features = self._filled(projector(x, ctx), ctx)
        replacing = features if self.into is None else self.into(features, ctx)
        return EncodedRows(features, replacing, deepstack, self._separators(ctx))

    def _separators(self, ctx: ForwardContext) -> tuple[Array, ...]:
        """Return the learned rows among an image's tokens."""
        dtype, tiles = ctx.execution.precision.compute, self.config.tiles
        learned = [x.astype(dtype) for x in (self.line_end, self.divider) if x is not None]
        if tiles is None or not tiles.projected:
            return tuple(learned)
        return tuple(self.projector.project(jnp.stack(learned)[None], ctx)[0])

    def _layers(self, x: Array, ctx: ForwardContext) -> tuple[Array, tuple[Array, ...]]:
        """Return the features for the projector, and those that are added behind the decoder's layers."""
        config, deepstack, depth = self.config, list[Array](), 0
        known, deepest = {0: x}, max((*config.depths, *(layer + 1 for layer in config.deepstack)), default=0)
        for layers in self.scanned_layers:
            if config.depths and depth >= deepest:
                break
            x = layers(x, ctx).x
            depth += len(layers.unit) * layers.repeats
            known[depth] = x
            if depth - 1 in config.deepstack:
                deepstack.append(self.deepstack[len(deepstack)](x, ctx))
        if config.depths:
            return jnp.concatenate([known[each] for each in config.depths], axis=-1), tuple(deepstack)
        return x if self.post_norm is None else self.post_norm(x), tuple(deepstack)

    def with_own_tokens(
        self, embeds: Float[Array, "batch length embed"], tokens: Int[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Replace the embeddings of the tokens that are the encoder's own."""
        if self.tokens is None:
            return embeds
        config = self.tokens.config
        is_own = (tokens >= config.first) & (tokens < config.first + config.count)
        embedded = self.tokens(tokens, self.projector, ctx)
        embedded = embedded if self.into is None else self.into(embedded, ctx)
        return jnp.where(is_own[:, :, None], embedded.astype(embeds.dtype), embeds)

    def _filled(
        self, x: Float[Array, "batch rows features"], ctx: ForwardContext
    ) -> Float[Array, "batch rows features"]:
        """Replace rows of padding by the embedding that fills up audio clips."""
        if self.tokens is None or self.tokens.config.fill is None:
            return x
        fill = self.tokens(jnp.full((1, 1), self.tokens.config.fill), self.projector, ctx)
        padding = ctx.positions[:, :: self.config.stem.group] < 0
        return jnp.where(padding[:, :, None], fill.astype(x.dtype), x)

    def _context(self, rows: PatchRows | AudioRows, execution: Execution) -> ForwardContext:
        # pipelines and batch overlap are the decoder's; the order of tokens is that of the image
        execution = dataclasses.replace(execution, pipeline=None, batch_split=1, context_order="plain")
        coordinates = rows.coordinates if isinstance(rows, PatchRows) else None
        unseen = rows.unseen if isinstance(rows, PatchRows) else None
        segment_ids = None if rows.segment_ids is None else jnp.asarray(rows.segment_ids)
        return ForwardContext(
            positions=jnp.asarray(rows.positions),
            segment_ids=segment_ids,
            execution=execution,
            rotary_positions=None if coordinates is None else jnp.asarray(coordinates),
            unseen=None if unseen is None else jnp.asarray(unseen),
            shared={} if self.distance_bias is None else {DISTANCE_BIAS: self.distance_bias},
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
    separators: tuple[Array, ...] = ()
    for name, encoder, rows in (("vision", vision, media.images), ("audio", audio, media.audio)):
        if rows is None:
            continue
        if encoder is None:
            raise ConfigError(f"media has rows for an encoder of {name}, but this model has none.")
        encoded = encoder(rows, execution, with_images=name == "audio" and media.images is not None)
        features.append(encoded.rows.reshape(groups, -1, encoded.rows.shape[-1]))
        own_features.append(encoded.features.reshape(groups, -1, encoded.features.shape[-1]))
        deepstacks.append([each.reshape(groups, -1, each.shape[-1]) for each in encoded.deepstack])
        separators += encoded.separators
    if not features:
        return Encoded(by_group=jnp.zeros((*order.shape, embed_dim), dtype))
    if separators:  # the last rows, from the last one on: they are -1, -2 in the order
        last = jnp.broadcast_to(jnp.stack(separators[::-1])[None], (groups, len(separators), embed_dim))
        features, own_features, deepstacks = [*features, last], [*own_features, last], [*deepstacks, []]
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
