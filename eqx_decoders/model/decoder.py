"""The decoder: embedding, stack, final norm and head, and its forward pass."""

import dataclasses
import json
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Integer, PRNGKeyArray

from eqx_decoders.blocks.layer_inputs import takers
from eqx_decoders.blocks.pipelined_stack import check_pipeline, run_stack
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.residual.registry import StreamMapping
from eqx_decoders.blocks.stack import ScannedLayers
from eqx_decoders.blocks.stats import BlockStats, join_layer_stats
from eqx_decoders.context import Execution, ExecutionOptions, ForwardContext, Inputs, Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.core.input_checks import as_int32, as_key, check_inputs
from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.encoders import merge
from eqx_decoders.encoders.encoder import Encoder, encode_media
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.errors import check
from eqx_decoders.layers.cache.cache import Cache, Proposal
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.embedding.embedding import (
    Head,
    LearnedPositions,
    LearnedPositionTable,
    ScoreHead,
    Sinusoids,
    TokenEmbedding,
    build_head,
    document_positions,
    logits,
)
from eqx_decoders.layers.embedding.head_transform import HeadTransform
from eqx_decoders.layers.embedding.per_layer_embedding import INPUT, PerLayerEmbedding
from eqx_decoders.layers.norm import Norm
from eqx_decoders.layers.recurrent.common import zero_padding
from eqx_decoders.layers.shared_transformer import SharedTransformers, share
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.forward_inputs import (
    PreparedInputs,
    TokenInputs,
    as_arrays,
    as_int32_inputs,
    layer_positions,
    positions_after,
    prepare_inputs,
)
from eqx_decoders.model.mtp import MTP, MTPOutput, add_streams, flat_streams, run_depths, shift_left
from eqx_decoders.model.provenance import Provenance
from eqx_decoders.numerics.einsum import AbstractWeight
from eqx_decoders.numerics.rounded_weight import round_weights
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed
from eqx_decoders.sharding.layout import Layout


class Output(eqx.Module):
    """Result of a decoder.

    **Arguments:**

    - `logits`: of the next token, in float32; scores of the text so far where the model gives these.
    - `hidden`: the residual stream after the last block, before the final norm; all with `MTPConfig.all_streams`.
    - `cache`: the given cache with this call's tokens, or None.
    - `stats`: statistics of the layers, stacked in their order.
    """

    logits: Float32[Array, "batch length vocab"]
    hidden: Float[Array, "batch length stream_embed"]
    cache: Cache | None
    stats: BlockStats


class Decoder(eqx.Module):
    """`head(norm(block_n(... block_1(embed(tokens)))))`, an immutable pytree, with encoders if it has any.

    Created by `init`, `abstract` or `load_*`. `model.replace(remat="full")` is the same model run another way.
    """

    embedding: TokenEmbedding
    embedding_norm: Norm | None
    positions: LearnedPositionTable | Sinusoids | None
    per_layer_embedding: PerLayerEmbedding | None
    streams: StreamMapping | None
    scanned_layers: tuple[ScannedLayers, ...]
    final_norm: Norm | None
    head_transform: HeadTransform | None
    head: Head | ScoreHead | None
    head_bias: Float[AnyArray, "vocab"] | None
    shared: SharedTransformers | None
    mtp: MTP | None
    vision: Encoder | None
    audio: Encoder | None
    config: DecoderConfig = eqx.field(static=True)
    execution: Execution = eqx.field(static=True)
    origin: Provenance | None = eqx.field(static=True, default=None)
    # paths of weights that an adapter stores completely (set by `load_peft` and `Trainer.init`, used by `save_peft`)
    saved_modules: tuple[str, ...] = eqx.field(static=True, default=())

    @classmethod
    def build(cls, config: DecoderConfig, *, key: PRNGKeyArray, execution: Execution = Execution()) -> "Decoder":
        """Return a new decoder in float32 on the default device; `init` chooses device and dtype."""
        table_key, position_key, head_key, block_key = jax.random.split(key, 4)
        mtp_key, per_layer_key = jax.random.fold_in(key, 4), jax.random.fold_in(key, 5)
        vision_key, audio_key = jax.random.fold_in(key, 6), jax.random.fold_in(key, 7)
        vision, audio = (None, None) if config.media is None else (config.media.vision, config.media.audio)
        keys = jax.random.split(block_key, len(config.blocks))
        stack, begin = [], 0
        for unit, repeats in find_repeats(config.blocks):
            count = len(unit) * repeats
            stack.append(ScannedLayers.build(unit, config.embed_dim, keys=keys[begin : begin + count], begin=begin))
            begin += count
        per_layer, layers = config.per_layer_embedding, len(takers(config.blocks))
        transform, transformer = config.head_transform, config.shared_transformer
        transform_key, shared_key = jax.random.fold_in(key, 8), jax.random.fold_in(key, 9)
        return cls(
            embedding=TokenEmbedding.build(
                (config.vocab_size, config.table_features),
                config.embed_dim,
                scale=config.embedding_scale,
                std=config.init_std,
                key=table_key,
            ),
            embedding_norm=None if config.embedding_norm is None else config.embedding_norm.build(config.embed_dim),
            positions=None if config.positions is None else config.positions.build(config.embed_dim, key=position_key),
            per_layer_embedding=per_layer and per_layer.build(config.embed_dim, layers, key=per_layer_key),
            streams=config.residual.build_maps(config.embed_dim, key=jax.random.fold_in(key, 10)),
            scanned_layers=tuple(stack),
            final_norm=None if config.final_norm is None else config.final_norm.build(config.embed_dim),
            head_transform=None if transform is None else transform.build(config.embed_dim, key=transform_key),
            head=None
            if config.tied
            else build_head(config.head_features, config.vocab_size, config.scores, key=head_key),
            head_bias=jnp.zeros(config.vocab_size) if config.head_bias else None,
            shared=None if transformer is None else transformer.build(config.embed_dim, key=shared_key),
            mtp=None if config.mtp is None else MTP.build(config.mtp, config.embed_dim, key=mtp_key),
            vision=None if vision is None else Encoder.build(vision, key=vision_key),
            audio=None if audio is None else Encoder.build(audio, key=audio_key),
            config=config,
            execution=execution,
        )

    def __call__(
        self,
        tokens: Integer[AnyArray, "batch length"] | None = None,
        positions: Integer[AnyArray, "batch length"] | None = None,
        segment_ids: Integer[AnyArray, "batch length"] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
        *,
        embeds: Float[AnyArray, "batch length embed"] | None = None,
        inputs: Inputs | None = None,
        media: Media | None = None,
    ) -> Output:
        """Return logits for the token after each token. Outside of `jax.jit` it is compiled, once for each shape.

        Raises ConfigError for arrays of other shapes or dtypes than these and, where they are known, for ids that are
        not in the vocabulary.

        **Arguments:**

        - `tokens`: ids below `vocab_size`.
        - `positions`: of each token in its document, increasing; -1 marks padding. Default: counted from the beginning
            of each document, with a cache from where each row stopped; padding takes none.
        - `segment_ids`: documents packed into a row, 1, 2, …; 0 marks padding, which may stand within a document, too.
            With a cache each row is one document, and only the 0 matters.
        - `cache`: of earlier tokens; `Output.cache` then holds these too. Tokens beyond its length aren't stored.
        - `key`: for dropout; None for none.
        - `embeds`: results of `embed_tokens` in place of tokens, for example to differentiate by them.
        - `inputs`: more inputs of layers.
        - `media`: images, videos and audio, made by `Media.create` for these tokens; a placeholder may then be
            outside of the vocabulary. With a cache they are this call's, as its tokens are.
        """
        arrays = as_int32_inputs(TokenInputs(tokens, positions, segment_ids, embeds))
        known = arrays.tokens if media is None else merge.without_placeholders(arrays.tokens, media)
        documents = arrays.positions, arrays.segment_ids
        check_inputs(self.config, known, *documents, embeds=embeds, packed=cache is None)
        return _compiled_call(self, arrays, cache, key, inputs, media)

    def encode(self, media: Media) -> Encoded:
        """Return the features of images and audio, which stand for placeholder tokens."""
        return _compiled_encode(self, media)

    def _encode(self, media: Media) -> Encoded:
        rounded = self._rounded("vision", None)._rounded("audio", None)
        return encode_media(rounded.vision, rounded.audio, media, self.execution, self.config.embed_dim)

    @typed
    def run(
        self,
        tokens: Integer[AnyArray, "batch length"] | None = None,
        positions: Integer[AnyArray, "batch length"] | None = None,
        segment_ids: Integer[AnyArray, "batch length"] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
        *,
        embeds: Float[AnyArray, "batch length embed"] | None = None,
        inputs: Inputs | None = None,
        media: Media | None = None,
        encoded: Encoded | None = None,
        promises: Promises = Promises(),
    ) -> tuple[Float[Array, "batch length stream_embed"], Cache | None, BlockStats]:
        """Run everything but the head: return `Output`'s hidden, cache and stats.

        `encoded` is `encode(media)`, where that is known. `promises.accept_all` is always so here.
        """
        promises = promises._replace(accept_all=True)
        more: Any = dict(embeds=embeds, inputs=inputs, media=media, encoded=encoded, promises=promises)
        hidden, proposal, stats = self.forward_uncommitted(tokens, positions, segment_ids, cache, key, **more)
        if cache is not None:
            cache = cache.commit(proposal.entries, proposal.positions, proposal.rope_offset)
        return hidden, cache, stats

    @typed
    def forward_uncommitted(
        self,
        tokens: Integer[AnyArray, "batch length"] | None = None,
        positions: Integer[AnyArray, "batch length"] | None = None,
        segment_ids: Integer[AnyArray, "batch length"] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
        *,
        embeds: Float[AnyArray, "batch length embed"] | None = None,
        inputs: Inputs | None = None,
        media: Media | None = None,
        encoded: Encoded | None = None,
        promises: Promises = Promises(),
    ) -> tuple[Float[Array, "batch length stream_embed"], Proposal, BlockStats]:
        """Run without writing to the cache: `cache.commit` takes the proposal, less rejected tokens."""
        inputs = Inputs() if inputs is None else inputs
        if media is not None:
            merge.check_tokens(tokens, media)
            encoded = self._encode(media) if encoded is None else encoded
            inputs, segment_ids = merge.merge_media_inputs(media, inputs, segment_ids)
        arrays = TokenInputs(tokens, positions, segment_ids, embeds)
        batch = prepare_inputs(self.config, self.execution, arrays, inputs, cache, promises)
        if cache is None:
            check_pipeline(self.scanned_layers, batch.ctx)
        embed_key, block_key, _ = self._keys(key)
        x, by_layer = self._embed_inputs(batch, media, encoded, embed_key)
        if cache is not None:  # idle rows read an old token, and a NaN in its embedding must not reach the cache
            x = zero_padding(x, batch.ctx.positions)
        layer_keys = None if block_key is None else jax.random.split(block_key, len(self.config.blocks))
        scanned_layers = self._rounded("scanned_layers", key).scanned_layers
        shared = share(batch.ctx, self.shared, x), None if cache is None else cache.layer_caches
        x, entries, stats = run_stack(scanned_layers, x, *shared, keys=layer_keys, by_layer=by_layer)
        hidden = (
            flat_streams(x) if self.config.hands_on_streams else add_streams(self.config.residual, self, x, batch.ctx)
        )
        positions = batch.ctx.positions if cache is None else positions_after(x, batch.ctx)
        proposal = Proposal(entries=entries, positions=positions, rope_offset=batch.rope_offset)
        return hidden, proposal, join_layer_stats(stats)

    def _embed_inputs(
        self, batch: PreparedInputs, media: Media | None, encoded: Encoded | None, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "batch length *streams embed"], dict[str, Array]]:
        """Return the input of the first layer, and the inputs that single layers have for themselves."""
        tokens, ctx, by_layer = batch.tokens, batch.ctx, batch.by_layer
        embeds = merge.embed_tokens(self, jnp.asarray(tokens), ctx) if batch.embeds is None else batch.embeds
        if media is not None and encoded is not None and self.config.media is not None:
            index = jnp.asarray(media.index)
            embeds = ctx.constrain(merge.with_encoded(self.config.media, embeds, encoded, index), "batch length embed")
            by_layer = by_layer | merge.stacked_deepstack(encoded, index)
            tokens = None if tokens is None else jnp.where(index >= 0, self.config.media.lookup_token, tokens)
        x = self._inputs(embeds, ctx, key)
        x = self.config.residual.expand(x) if self.streams is None else self.streams.expand(x, ctx)
        if self.per_layer_embedding is not None:
            by_layer = by_layer | {INPUT: self.per_layer_embedding(tokens, embeds, ctx)}
        return x, by_layer

    def embed(
        self, tokens: Int[Array, "batch length"], ctx: ForwardContext, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "batch length embed"]:
        """Return the input of the first layer: embeddings (with dropout) and absolute positions."""
        return self._inputs(merge.embed_tokens(self, tokens, ctx), ctx, key)

    def embed_tokens(self, tokens: Integer[AnyArray, "batch length"]) -> Float[Array, "batch length embed"]:
        """Return the embeddings of tokens, as `embeds` of a call: scaled, without dropout and positions."""
        check_inputs(self.config, tokens)
        return _compiled_embedding(self, jnp.asarray(as_int32("tokens", tokens)))

    def _inputs(self, x: Array, ctx: ForwardContext, key: PRNGKeyArray | None) -> Float[Array, "batch length embed"]:
        x = dropout(x.astype(self.execution.precision.compute), self.config.dropout, key)
        x = x if self.positions is None else self.positions(x, ctx)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return ctx.constrain(x, "batch length embed")

    @typed
    def predict_mtp(
        self,
        hidden: Float[Array, "batch length stream_embed"],
        tokens: Integer[AnyArray, "batch length"],
        positions: Integer[AnyArray, "batch length"] | None = None,
        segment_ids: Integer[AnyArray, "batch length"] | None = None,
        key: PRNGKeyArray | None = None,
        *,
        inputs: Inputs | None = None,
        media: Media | None = None,
        encoded: Encoded | None = None,
        order: np.ndarray | None = None,
        contiguous: bool = False,
    ) -> MTPOutput:
        """Predict several tokens at each position of whole sequences: `logits` makes scores of each depth's stream.

        At token t depth k predicts token t + k + 1, from the tokens up to t + k. If that one belongs to another
        document, the depth sees padding. `hidden` is `Output.hidden` of the same tokens, positions, segment ids, inputs
        and media, `encoded` is `encode(media)` if that is known: features replace placeholders.
        `order` has the index of each column's token in the text, if they do not follow one another.
        """
        rule = "needs a model with multi-token prediction: DecoderConfig.mtp is None"
        check(self.mtp is not None, f"Decoder.predict_mtp {rule}.")
        assert self.mtp is not None
        inputs, key = Inputs() if inputs is None else inputs, as_key(key)
        if media is not None:
            merge.check_tokens(tokens, media)
            encoded = self._encode(media) if encoded is None else encoded
            inputs, segment_ids = merge.merge_media_inputs(media, inputs, segment_ids)
        token_ids, positions, segment_ids, _ = as_arrays(TokenInputs(tokens, positions, segment_ids))
        positions, segment_ids = document_positions(positions, segment_ids, token_ids.shape)
        seen: Any = dict(contiguous=contiguous) | layer_positions(inputs, positions)
        ctx = ForwardContext(positions=positions, segment_ids=segment_ids, execution=self.execution, **seen)

        def embed(count: int, later: ForwardContext, key: PRNGKeyArray | None) -> Array:
            following = merge.embed_tokens(self, shift_left(token_ids, count, order), later)
            if media is not None and encoded is not None:
                index = shift_left(jnp.asarray(media.index) + 1, count, order) - 1
                following = merge.with_encoded(self.config.media, following, encoded, index)
            return self._inputs(following, later, key)

        mtp = self._rounded("mtp", key).mtp or self.mtp
        return run_depths(mtp.unstacked(), self.mtp_input(hidden), embed, ctx, order=order, key=key)

    @typed
    def mtp_input(self, hidden: Float[Array, "batch length stream_embed"]) -> Float[Array, "batch length *rest"]:
        """Return the input of the first depth of multi-token prediction."""
        assert self.mtp is not None
        return self.final_norm(hidden) if self.mtp.config.normed_stream and self.final_norm is not None else hidden

    @typed
    def head_input(
        self, hidden: Float[Array, "batch length stream_embed"], *, key: PRNGKeyArray | None = None, depth: int = 0
    ) -> Float[Array, "batch length head_embed"]:
        """Return the head's input, of `hidden`, or with `depth` of `MTPOutput.hidden`: norm, transform and dropout.

        It is divided by `logit_divisor`, so that losses need not do it.
        """
        owner = self if depth == 0 or self.mtp is None else self.mtp.unstacked()[depth - 1]
        if self.config.hands_on_streams:
            hidden = add_streams(self.config.residual, owner, hidden, self._head_context(hidden))
        norm = self.final_norm if self.mtp is None or self.mtp.config.model_norm else owner.final_norm
        hidden = hidden if norm is None else norm(hidden)
        hidden = hidden if self.head_transform is None else self.head_transform(hidden, self._head_context(hidden))
        if self.config.logit_divisor != 1.0:
            hidden = hidden / self.config.logit_divisor
        return dropout(hidden, self.config.dropout, self._keys(key)[2])

    @typed
    def logits(
        self, hidden: Float[Array, "batch length stream_embed"], *, key: PRNGKeyArray | None = None, depth: int = 0
    ) -> Float32[Array, "batch length vocab"]:
        """Apply the head, of logits or of scores, to `Output.hidden`; with `depth` to `MTPOutput.hidden[depth - 1]`."""
        if isinstance(self.head, ScoreHead):
            return self.head(self.head_input(hidden, key=key))
        options: Any = dict(tied=self.head is None, bias=self.logit_bias, soft_cap=self.config.logit_soft_cap)
        x = self.head_input(hidden, key=key, depth=depth)
        return logits(x, self.head_kernel, self._head_context(hidden), **options)

    def _head_context(self, hidden: Array) -> ForwardContext:
        return ForwardContext(positions=jnp.zeros(hidden.shape[:2], jnp.int32), execution=self.execution)

    @property
    def head_kernel(self) -> Array | AbstractWeight:
        """Weight of the head: `embed vocab`, or the embedding table, `vocab embed`, when tied."""
        return self.embedding.table if self.head is None else self.head.kernel

    @property
    def logit_bias(self) -> Float32[Array, "vocab"] | None:
        """What is added to the head's products: its bias, divided by `logit_divisor` as `head_input` is."""
        return None if self.head_bias is None else self.head_bias.astype(jnp.float32) / self.config.logit_divisor

    @property
    def generation_config(self) -> GenerationConfig:
        """Sampling settings and stop ids published with the model, the defaults of `generate`."""
        return GenerationConfig() if self.origin is None else self.origin.generation

    @property
    def trained_positions(self) -> int | None:
        """Length for which the model was trained, if its checkpoint or its learned positions have it."""
        if isinstance(self.config.positions, LearnedPositions):
            return self.config.positions.max_positions
        length = json.loads(self.origin.settings).get("max_position_embeddings") if self.origin is not None else None
        return length if isinstance(length, int) else None

    def replace(self, **changes: Unpack[ExecutionOptions]) -> "Decoder":
        """Return the same weights, run another way: `model.replace(remat="full", attention="dot", scan=False)`."""
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changes))

    def without_mtp(self) -> "Decoder":
        """Return the same model without multi-token prediction."""
        saved = tuple(path for path in self.saved_modules if not path.startswith("mtp."))
        config = dataclasses.replace(self.config, mtp=None)
        return dataclasses.replace(self, mtp=None, config=config, saved_modules=saved)

    def place(self, layout: Layout) -> "Decoder":
        """Return the same model with its weights moved to another layout."""
        model = self.replace(layout=layout)
        arrays, static = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, layout.shardings(arrays)), static)

    def unstacked(self) -> tuple[Any, ...]:
        """Return all blocks one by one, in the order of the layers."""
        return tuple(block for layers in self.scanned_layers for block in layers.unstacked())

    def _rounded(self, below: str, key: PRNGKeyArray | None) -> "Decoder":
        """Return the model; weights below this name are multiplied in 8 bits if `Execution.low_precision` says so."""
        key = None if key is None else jax.random.fold_in(as_key(key), 2**16)
        return round_weights(self, self.execution.low_precision, below=below, key=key)

    def _keys(self, key: PRNGKeyArray | None) -> tuple[PRNGKeyArray | None, ...]:
        return (None, None, None) if key is None else tuple(jax.random.split(as_key(key), 3))


@jit_if_eager
@typed
def _compiled_call(model: Decoder, arrays: TokenInputs, cache, key, inputs, media) -> Output:
    tokens, positions, segment_ids, embeds = arrays
    more: Any = dict(embeds=embeds, inputs=inputs, media=media)
    hidden, cache, stats = model.run(tokens, positions, segment_ids, cache, key, **more)
    return Output(logits=model.logits(hidden, key=key), hidden=hidden, cache=cache, stats=stats)


@jit_if_eager
@typed
def _compiled_embedding(model: Decoder, tokens: Array) -> Float[Array, "batch length embed"]:
    return merge.embed_tokens(model, tokens, model._head_context(tokens))


@jit_if_eager
@typed
def _compiled_encode(model: Decoder, media: Media) -> Encoded:
    return model._encode(media)
