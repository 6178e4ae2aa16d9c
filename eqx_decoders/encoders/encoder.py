"""Encoder of images or audio: a stem, scanned layers as in a decoder, and a projector."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.stack import ScannedLayers
from eqx_decoders.context import Execution, ForwardContext
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.packed_rows import AudioRows, PackedPatches
from eqx_decoders.encoders.projector import EncoderTokens, Projection, Projector
from eqx_decoders.encoders.stem import Stem
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.relative_attention import DISTANCE_BIAS
from eqx_decoders.layers.norm import Norm
from eqx_decoders.numerics.clipped_weight import with_clipping
from eqx_decoders.numerics.initializers import normal


class EncodedRows(NamedTuple):
    """Outputs of an encoder for packed sequences.

    **Arguments:**

    - `encoder_features`: outputs of the projector.
    - `features`: features that replace placeholders: `encoder_features` after `EncoderConfig.into`, if it is set.
    - `deepstack`: features that are added to the outputs of the first decoder layers.
    - `separators`: learned vectors at the end of each line of a tiled image, and between its tiles and thumbnail.
    """

    encoder_features: Float[Array, "batch rows features"]
    features: Float[Array, "batch rows embed"]
    deepstack: tuple[Float[Array, "batch rows embed"], ...]
    separators: tuple[Float[Array, "embed"], ...] = ()


class Encoder(eqx.Module):
    """Encoder of images or audio: `projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`.

    The fields correspond to `EncoderConfig`. `line_end` and `divider` are the learned vectors of `TilesConfig`.
    """

    stem: Stem
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
        keys = jax.random.split(block_key, len(config.blocks))
        stack = []
        start = 0
        for unit, repeats in config.parts:
            count = len(unit) * repeats
            stack.append(ScannedLayers.build(unit, config.embed_dim, keys=keys[start : start + count]))
            start += count
        further_keys = [jax.random.fold_in(key, index) for index in range(4, 10)]  # 0 to 3 are the keys of `split`
        into_key, token_key, line_end_key, divider_key, beside_key, bias_key = further_keys
        deepstack = config.deepstack_projector
        into = config.into
        combined_dim = config.projector.combined_dim(config.input_dim)
        out_dim = config.projector.out_dim
        tiles = config.tiles
        table_shape = config.distance_table
        beside = config.projector_beside
        separator_dim = config.input_dim if tiles is not None and tiles.projected else out_dim
        has_divider = tiles is not None and tiles.whole == "last"
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
            into=None if into is None else into.build(out_dim, key=into_key),
            tokens=None if config.tokens is None else config.tokens.build(combined_dim, key=token_key),
            projector_beside=None if beside is None else beside.build(config.input_dim, key=beside_key),
            line_end=None if tiles is None else _separator(line_end_key, separator_dim),
            divider=_separator(divider_key, separator_dim) if has_divider else None,
            distance_bias=None if table_shape is None else normal(bias_key, table_shape, jnp.float32, 0.02),
            config=config,
        )  # fmt: skip

    def __call__(
        self, rows: PackedPatches | AudioRows, execution: Execution, *, with_images: bool = False
    ) -> EncodedRows:
        """Encode packed sequences of patches, chunks or frames.

        `with_images`: for an audio encoder, whether the call also has images; then `projector_beside` is used if it is
        set.
        """
        ctx = self._context(rows, execution)
        x = self.stem(rows, ctx)
        x = x if self.pre_norm is None else self.pre_norm(x)
        x, deepstack = self._run_layers(x, ctx)
        beside = self.projector_beside if with_images else None
        projector = self.projector if beside is None else beside
        encoder_features = self._fill_padding(projector(x, ctx), ctx)
        features = encoder_features if self.into is None else self.into(encoder_features, ctx)
        return EncodedRows(encoder_features, features, deepstack, self._separators(ctx))

    def _separators(self, ctx: ForwardContext) -> tuple[Array, ...]:
        """Return the learned vectors for tiled images: `line_end`, and `divider` if there is one."""
        dtype = ctx.execution.precision.compute
        tiles = self.config.tiles
        learned = [x.astype(dtype) for x in (self.line_end, self.divider) if x is not None]
        if tiles is None or not tiles.projected:
            return tuple(learned)
        return tuple(self.projector.project(jnp.stack(learned)[None], ctx)[0])

    def _run_layers(self, x: Array, ctx: ForwardContext) -> tuple[Array, tuple[Array, ...]]:
        """Return the input of the projector, and the DeepStack features for the decoder's layers."""
        config = self.config
        deepstack: list[Array] = []
        max_depth = max((*config.depths, *(layer + 1 for layer in config.deepstack)), default=0)
        depth = 0
        outputs_by_depth = {0: x}
        for layers in self.scanned_layers:
            if config.depths and depth >= max_depth:
                break
            x = layers(x, ctx).x
            depth += len(layers.unit) * layers.repeats
            outputs_by_depth[depth] = x
            if depth - 1 in config.deepstack:
                deepstack.append(self.deepstack[len(deepstack)](x, ctx))
        if config.depths:
            return jnp.concatenate([outputs_by_depth[depth] for depth in config.depths], axis=-1), tuple(deepstack)
        return x if self.post_norm is None else self.post_norm(x), tuple(deepstack)

    def with_own_tokens(
        self, embeds: Float[Array, "batch length embed"], tokens: Int[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Replace the embeddings of tokens that this encoder embeds (`EncoderConfig.tokens`)."""
        if self.tokens is None:
            return embeds
        config = self.tokens.config
        is_encoder_token = (tokens >= config.first) & (tokens < config.first + config.count)
        encoder_embeds = self.tokens(tokens, self.projector, ctx)
        encoder_embeds = encoder_embeds if self.into is None else self.into(encoder_embeds, ctx)
        return jnp.where(is_encoder_token[:, :, None], encoder_embeds.astype(embeds.dtype), embeds)

    def _fill_padding(
        self, x: Float[Array, "batch rows features"], ctx: ForwardContext
    ) -> Float[Array, "batch rows features"]:
        """Replace padding features by the embedding of `EncoderTokensConfig.fill`."""
        if self.tokens is None or self.tokens.config.fill is None:
            return x
        fill = self.tokens(jnp.full((1, 1), self.tokens.config.fill), self.projector, ctx)
        padding = ctx.positions[:, :: self.config.stem.group] < 0
        return jnp.where(padding[:, :, None], fill.astype(x.dtype), x)

    def _context(self, rows: PackedPatches | AudioRows, execution: Execution) -> ForwardContext:
        # Only the decoder uses a pipeline, batch overlap and a zigzag order of tokens.
        execution = dataclasses.replace(execution, pipeline=None, batch_split=1, context_order="plain")
        coordinates = rows.coordinates if isinstance(rows, PackedPatches) else None
        masked = rows.masked if isinstance(rows, PackedPatches) else None
        segment_ids = None if rows.segment_ids is None else jnp.asarray(rows.segment_ids)
        return ForwardContext(
            positions=jnp.asarray(rows.positions),
            segment_ids=segment_ids,
            execution=execution,
            rotary_positions=None if coordinates is None else jnp.asarray(coordinates),
            masked_keys=None if masked is None else jnp.asarray(masked),
            shared={} if self.distance_bias is None else {DISTANCE_BIAS: self.distance_bias},
        )


def encode_media(
    vision: Encoder | None, audio: Encoder | None, media: Media, execution: Execution, embed_dim: int
) -> Encoded:
    """Encode all images and audio clips; return their features in the order of the placeholders.

    Raises ConfigError if `media` has images or audio, but the model has no encoder for them.
    """
    order = jnp.asarray(media.order)
    groups = order.shape[0]
    dtype = execution.precision.compute
    features: list[Array] = []
    encoder_features: list[Array] = []
    deepstacks: list[list[Array]] = []
    separators: tuple[Array, ...] = ()
    for name, encoder, rows in (("vision", vision, media.images), ("audio", audio, media.audio)):
        if rows is None:
            continue
        if encoder is None:
            raise ConfigError(f"media has inputs for a {name} encoder, but this model has none. Leave them out.")
        encoded = encoder(rows, execution, with_images=name == "audio" and media.images is not None)
        features.append(encoded.features.reshape(groups, -1, encoded.features.shape[-1]))
        encoder_features.append(encoded.encoder_features.reshape(groups, -1, encoded.encoder_features.shape[-1]))
        deepstacks.append([level.reshape(groups, -1, level.shape[-1]) for level in encoded.deepstack])
        separators += encoded.separators
    if not features:
        return Encoded(by_group=jnp.zeros((*order.shape, embed_dim), dtype))
    if separators:  # appended in reverse order, so that LINE_END = -1 and DIVIDER = -2 in `order` index them
        separator_features = jnp.broadcast_to(jnp.stack(separators[::-1])[None], (groups, len(separators), embed_dim))
        features.append(separator_features)
        encoder_features.append(separator_features)
        deepstacks.append([])
    num_levels = max(map(len, deepstacks))
    for encoder_output, deepstack in zip(features, deepstacks, strict=True):  # zeros for encoders without DeepStack
        deepstack += [jnp.zeros_like(encoder_output)] * (num_levels - len(deepstack))

    def sort_features(parts: list[Array]) -> Array:
        all_features = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        return jnp.take_along_axis(all_features, order[:, :, None], axis=1)

    deepstack = tuple(sort_features([levels[level] for levels in deepstacks]) for level in range(num_levels))
    # Encoder features can be concatenated only if they have the same size. Without `into` they equal `features`.
    has_encoder_features = len({array.shape[-1] for array in encoder_features}) == 1 and any(
        encoder is not None and encoder.into is not None for encoder in (vision, audio)
    )
    return Encoded(
        by_group=sort_features(features),
        deepstack=deepstack,
        encoder_features=sort_features(encoder_features) if has_encoder_features else None,
    )


def _separator(key: PRNGKeyArray, size: int) -> Float[Array, "embed"]:
    return normal(key, (size,), jnp.float32, size**-0.5)
