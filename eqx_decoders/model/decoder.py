"""The decoder: embedding, stack, final norm and head, and its forward pass."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Never, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Integer, PRNGKeyArray

from eqx_decoders.blocks.layer_inputs import per_layer_input_configs
from eqx_decoders.blocks.pipelined_stack import check_pipeline, run_in_pipeline
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.residual.base import StreamMapping
from eqx_decoders.blocks.residual.streams import flat_streams, reduce_streams
from eqx_decoders.blocks.stack import ScannedLayers, run_stack
from eqx_decoders.blocks.stats import BlockStats, join_layer_stats
from eqx_decoders.context import Execution, ExecutionOptions, ForwardContext, Inputs, Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.core.input_checks import as_int32, as_key, check_inputs
from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.encoders import merge
from eqx_decoders.encoders.encoder import Encoder, encode_media
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.errors import ConfigError, check, suggest
from eqx_decoders.layers.cache.cache import Cache, Proposal
from eqx_decoders.layers.documents import zero_padding
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
from eqx_decoders.layers.shared_transformer import SharedTransformers, share
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.forward_inputs import (
    ForwardInputs,
    as_arrays,
    as_int32_inputs,
    layer_positions,
    prepare_inputs,
    write_positions,
)
from eqx_decoders.model.mtp import MTP, MTPOutput, run_depths, shift_left
from eqx_decoders.model.provenance import Provenance
from eqx_decoders.numerics.einsum import AbstractWeight
from eqx_decoders.numerics.rounded_weight import round_weights
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.sharding.layout import Layout


class Output(eqx.Module):
    """Result of a forward pass.

    **Arguments:**

    - `logits`: logits of the next token; scores of the text so far for a model with `DecoderConfig.scores`.
    - `hidden`: the residual stream after the last block, before the final norm; with `MTPConfig.all_streams` the
        concatenation of all residual streams.
    - `cache`: the cache of the call extended by its tokens; None for a call without a cache.
    - `stats`: statistics of the layers, stacked in the order of the layers.
    """

    logits: Float32[Array, "batch length vocab"]
    hidden: Float[Array, "batch length stream_embed"]
    cache: Cache | None
    stats: BlockStats


# Type of unknown arguments. Type checkers report them; beartype does not support `Never`.
if TYPE_CHECKING:
    Unknown = Never
else:
    Unknown = Any

# Arguments of transformers' models, with what replaces them here.
_OTHER_ARGUMENTS = {
    "input_ids": "Use tokens.",
    "attention_mask": "Mark padding with positions of -1, or with segment_ids of 0.",
    "position_ids": "Use positions.",
    "inputs_embeds": "Use embeds.",
    "past_key_values": "Use cache; see init_cache.",
    "use_cache": "Use cache; see init_cache.",
    "labels": "Use next_token_loss(model, batch).",
    "output_hidden_states": "Use model.replace(layer_streams=True); Output.stats.streams has the hidden states.",
    "output_attentions": "Attention probabilities are not returned.",
    "pixel_values": "Use media=Media.create(…).",
}


class Decoder(eqx.Module):
    """A decoder language model `head(norm(block_n(... block_1(embed(tokens)))))`, with optional media encoders.

    It is an immutable pytree, created by `init`, `abstract` or `load_*`. `model.replace(remat="full")` returns the
    same weights with other execution options.

    **Arguments:**

    - `positions`: absolute position embeddings, which are added to the token embeddings.
    - `streams`: maps from the embedding to the residual streams and back; None if these have no weights.
    - `shared`: transformer blocks that several layers share (`DecoderConfig.shared_transformer`).
    - `origin`: the checkpoint from which the model was loaded.
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
        """Return a new decoder in float32 on the default device. Use `init` for a layout and other dtypes."""
        table_key, position_key, head_key, block_key = jax.random.split(key, 4)
        mtp_key, per_layer_key, vision_key, audio_key, transform_key, shared_key, streams_key = (
            jax.random.fold_in(key, index) for index in range(4, 11)
        )
        vision, audio = (None, None) if config.media is None else (config.media.vision, config.media.audio)
        keys = jax.random.split(block_key, len(config.blocks))
        stack = []
        start = 0
        for unit, repeats in find_repeats(config.blocks):
            count = len(unit) * repeats
            stack.append(
                ScannedLayers.build(unit, config.embed_dim, keys=keys[start : start + count], first_layer=start)
            )
            start += count
        per_layer = config.per_layer_embedding
        per_layer_count = len(per_layer_input_configs(config.blocks))
        transform = config.head_transform
        transformer = config.shared_transformer
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
            per_layer_embedding=per_layer and per_layer.build(config.embed_dim, per_layer_count, key=per_layer_key),
            streams=config.residual.build_maps(config.embed_dim, key=streams_key),
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
        key: PRNGKeyArray | int | None = None,
        *,
        embeds: Float[AnyArray, "batch length embed"] | None = None,
        inputs: Inputs | None = None,
        media: Media | None = None,
        **unknown: Unknown,
    ) -> Output:
        """Return the logits of the next token at each position.

        Outside of `jax.jit` the call is compiled, once for each combination of shapes. Raises ConfigError for wrong
        shapes or dtypes, for arguments of other libraries (such as `attention_mask`) and, unless values are traced, for
        ids outside of the vocabulary and positions that do not increase.

        **Arguments:**

        - `tokens`: token ids below `vocab_size`.
        - `positions`: position of each token in its document, increasing; -1 marks padding. None: positions count the
            tokens of each document from 0 without padding; with a cache they continue at the length of each sequence.
        - `segment_ids`: ids 1, 2, … of the documents packed into a sequence; 0 marks padding, which may also be
            within a document. With a cache each sequence is one document, and ids only distinguish padding.
        - `cache`: cache of earlier tokens; `Output.cache` extends it by the tokens of this call. Tokens at positions
            beyond the cache's `max_length` are not stored.
        - `key`: random key for dropout; None disables dropout.
        - `embeds`: results of `embed_tokens` in place of `tokens`, for example to compute gradients for embeddings.
        - `inputs`: further inputs of layers.
        - `media`: images, videos and audio, created by `Media.create` for these tokens; placeholder ids may then be
            outside of the vocabulary. With a cache, only the media of this call's tokens.
        """
        for name in unknown:
            raise ConfigError(f"model(…): {name} is not an argument. {_OTHER_ARGUMENTS.get(name, '')}".rstrip())
        arguments = as_int32_inputs(ForwardInputs(tokens, positions, segment_ids, embeds, inputs, media))
        checked_tokens = arguments.tokens
        if media is not None:
            merge.check_tokens(checked_tokens, media)
            checked_tokens = merge.without_placeholders(checked_tokens, media)
        check_inputs(
            self.config,
            checked_tokens,
            arguments.positions,
            arguments.segment_ids,
            embeds=embeds,
            packed=cache is None,
        )
        return _compiled_call(self, arguments, cache, as_key(key))

    def encode(self, media: Media) -> Encoded:
        """Run the encoders: return the features of images and audio that replace the placeholder tokens' embeddings."""
        return _compiled_encode(self, media)

    def _encode(self, media: Media) -> Encoded:
        rounded = self._rounded("vision", None)._rounded("audio", None)
        return encode_media(rounded.vision, rounded.audio, media, self.execution, self.config.embed_dim)

    @run_with_auto_axes
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
        """Run the model without the head: return `hidden`, `cache` and `stats` of `Output`.

        `encoded` is `encode(media)` if the caller has computed it. `promises.accept_all` is always True here.
        """
        hidden, proposal, stats = self.forward_uncommitted(
            tokens,
            positions,
            segment_ids,
            cache,
            key,
            embeds=embeds,
            inputs=inputs,
            media=media,
            encoded=encoded,
            promises=promises._replace(accept_all=True),
        )
        if cache is not None:
            cache = cache.commit(proposal.entries, proposal.positions, proposal.rope_offset)
        return hidden, cache, stats

    @run_with_auto_axes
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
        """Run the model without the head, and without writing to the cache.

        Returns the hidden states, the proposed cache update and statistics. The caller writes the update with
        `cache.commit(proposal.entries, positions, proposal.rope_offset)`; before, it sets the positions of rejected
        tokens to -1.
        """
        arguments = self._with_media(ForwardInputs(tokens, positions, segment_ids, embeds, inputs, media, encoded))
        arguments, ctx, rope_offset = prepare_inputs(self.config, self.execution, arguments, cache, promises)
        pipelined = cache is None and self.execution.pipeline is not None
        if pipelined:
            check_pipeline(self.scanned_layers, ctx)
        embed_key, block_key, _ = self._keys(key)
        x, by_layer = self._embed_inputs(arguments, ctx, embed_key)
        if cache is not None:  # idle sequences read an old token; a NaN in its embedding must not reach the cache
            x = zero_padding(x, ctx.positions)
        layer_keys = None if block_key is None else jax.random.split(block_key, len(self.config.blocks))
        scanned_layers = self._rounded("scanned_layers", key).scanned_layers
        layer_ctx = share(ctx, self.shared, x)
        layer_caches = None if cache is None else cache.layer_caches
        x, entries, stats = run_stack(
            scanned_layers,
            x,
            layer_ctx,
            layer_caches,
            keys=layer_keys,
            by_layer=by_layer,
            run_layers=run_in_pipeline if pipelined else ScannedLayers.__call__,
        )
        if self.config.returns_all_streams:
            hidden = flat_streams(x)
        else:
            hidden = reduce_streams(self.config.residual, self.streams, x, ctx)
        positions = ctx.positions if cache is None else write_positions(x, ctx)
        proposal = Proposal(entries=entries, positions=positions, rope_offset=rope_offset)
        return hidden, proposal, join_layer_stats(stats)

    def _with_media(self, inputs: ForwardInputs) -> ForwardInputs:
        """Return the inputs with the features of their media, and with missing inputs taken from the media."""
        media = inputs.media
        if media is None:
            return inputs
        merge.check_tokens(inputs.tokens, media)
        extra_inputs = Inputs() if inputs.extra_inputs is None else inputs.extra_inputs
        extra_inputs, segment_ids = merge.merge_media_inputs(media, extra_inputs, inputs.segment_ids)
        encoded = self._encode(media) if inputs.encoded is None else inputs.encoded
        return inputs._replace(segment_ids=segment_ids, extra_inputs=extra_inputs, encoded=encoded)

    def _embed_inputs(
        self, inputs: ForwardInputs, ctx: ForwardContext, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "batch length *streams embed"], dict[str, Array]]:
        """Return the input of the first layer, and the inputs of individual layers by name (see `Inputs.by_layer`)."""
        tokens = inputs.tokens
        media = inputs.media
        encoded = inputs.encoded
        by_layer = {} if inputs.extra_inputs is None else inputs.extra_inputs.by_layer
        embeds = self._token_embeddings(tokens, ctx) if inputs.embeds is None else inputs.embeds
        if media is not None and encoded is not None and self.config.media is not None:
            index = jnp.asarray(media.index)
            embeds = ctx.constrain(merge.with_encoded(self.config.media, embeds, encoded, index), "batch length embed")
            by_layer = by_layer | merge.stacked_deepstack(encoded, index)
            tokens = jnp.where(index >= 0, self.config.media.lookup_token, tokens)
        x = self._first_input(embeds, ctx, key)
        x = self.config.residual.expand(x) if self.streams is None else self.streams.expand(x, ctx)
        if self.per_layer_embedding is not None:
            by_layer = by_layer | {INPUT: self.per_layer_embedding(tokens, embeds, ctx)}
        return x, by_layer

    def embed(
        self, tokens: Int[Array, "batch length"], ctx: ForwardContext, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "batch length embed"]:
        """Return the embeddings of tokens with dropout, absolute positions and the embedding norm."""
        return self._first_input(self._token_embeddings(tokens, ctx), ctx, key)

    def embed_tokens(self, tokens: Integer[AnyArray, "batch length"]) -> Float[Array, "batch length embed"]:
        """Return the embeddings of tokens for the argument `embeds`: scaled, without dropout and positions."""
        check_inputs(self.config, tokens)
        return _compiled_embedding(self, jnp.asarray(as_int32("tokens", tokens)))

    def _token_embeddings(
        self, tokens: Int[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Look up the embeddings of tokens; encoders embed some ids instead (`EncoderConfig.tokens`)."""
        embeds = self.embedding(tokens, ctx)
        for encoder in (self.vision, self.audio):
            embeds = embeds if encoder is None else encoder.with_own_tokens(embeds, tokens, ctx)
        return embeds

    def _first_input(
        self, x: Array, ctx: ForwardContext, key: PRNGKeyArray | None
    ) -> Float[Array, "batch length embed"]:
        """Apply dropout, absolute positions and the embedding norm to embeddings."""
        x = dropout(x.astype(self.execution.precision.compute), self.config.dropout, key)
        x = x if self.positions is None else self.positions(x, ctx)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return ctx.constrain(x, "batch length embed")

    @run_with_auto_axes
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
        documents_are_contiguous: bool = False,
    ) -> MTPOutput:
        """Run the depths of multi-token prediction on complete sequences; `logits` computes logits of their streams.

        At token t, depth k predicts token t + k + 1 from the tokens up to t + k. Positions where token t + k belongs
        to another document are treated as padding.

        **Arguments:**

        - `hidden`: `Output.hidden` of the same tokens, positions, segment ids, inputs and media.
        - `inputs`: spans and rotary positions. `by_layer` is not used, because it has the inputs of the model's layers.
        - `encoded`: `encode(media)`, if the caller has computed it.
        - `order`: for each column the index of its token in the text, if tokens are reordered; see `mtp.shift_left`.
        - `documents_are_contiguous`: see `ForwardContext`.
        """
        if self.mtp is None:
            raise ConfigError(
                "Decoder.predict_mtp needs a model with multi-token prediction, but DecoderConfig.mtp is None: "
                "use a checkpoint that has it, or add_mtp."
            )
        key = as_key(key)
        arguments = ForwardInputs(tokens, positions, segment_ids, None, inputs, media, encoded)
        arguments = as_arrays(self._with_media(arguments))
        token_ids = arguments.tokens
        extra_inputs = Inputs() if arguments.extra_inputs is None else arguments.extra_inputs
        positions, segment_ids = document_positions(arguments.positions, arguments.segment_ids, token_ids.shape)
        ctx = ForwardContext(
            positions=positions,
            segment_ids=segment_ids,
            execution=self.execution,
            documents_are_contiguous=documents_are_contiguous,
            **layer_positions(extra_inputs, positions),
        )

        def embed(count: int, later_ctx: ForwardContext, key: PRNGKeyArray | None) -> Array:
            later_embeds = self._token_embeddings(shift_left(token_ids, count, order), later_ctx)
            if media is not None and arguments.encoded is not None:
                index = shift_left(jnp.asarray(media.index) + 1, count, order) - 1
                later_embeds = merge.with_encoded(self.config.media, later_embeds, arguments.encoded, index)
            return self._first_input(later_embeds, later_ctx, key)

        mtp = self._rounded("mtp", key).mtp or self.mtp
        return run_depths(mtp.unstacked(), self.mtp_input(hidden), embed, ctx, order=order, key=key)

    @run_with_auto_axes
    def mtp_input(self, hidden: Float[Array, "batch length stream_embed"]) -> Float[Array, "batch length *rest"]:
        """Return the input of the first MTP depth for `Output.hidden`. Raises ConfigError without MTP."""
        if self.mtp is None:
            raise ConfigError(
                "Decoder.mtp_input needs a model with multi-token prediction, but DecoderConfig.mtp is None."
            )
        return self.final_norm(hidden) if self.mtp.config.normed_stream and self.final_norm is not None else hidden

    @run_with_auto_axes
    def head_input(
        self, hidden: Float[Array, "batch length stream_embed"], *, key: PRNGKeyArray | None = None, depth: int = 0
    ) -> Float[Array, "batch length head_embed"]:
        """Return the input of the output head: `hidden` after the final norm, head transform and dropout.

        `hidden` is `Output.hidden` for `depth=0`, else `MTPOutput.hidden[depth - 1]`. The result is already divided by
        `DecoderConfig.logit_divisor`.
        """
        check(depth == 0 or self.mtp is not None, f"depth={depth} needs a model with multi-token prediction: use 0.")
        owner = self if depth == 0 or self.mtp is None else self.mtp.unstacked()[depth - 1]
        if self.config.returns_all_streams:
            hidden = reduce_streams(self.config.residual, owner.streams, hidden, self._head_context(hidden))
        norm = self.final_norm if self.mtp is None or self.mtp.config.model_norm else owner.final_norm
        hidden = hidden if norm is None else norm(hidden)
        hidden = hidden if self.head_transform is None else self.head_transform(hidden, self._head_context(hidden))
        if self.config.logit_divisor != 1.0:
            hidden = hidden / self.config.logit_divisor
        return dropout(hidden, self.config.dropout, self._keys(key)[2])

    @run_with_auto_axes
    def logits(
        self, hidden: Float[Array, "batch length stream_embed"], *, key: PRNGKeyArray | None = None, depth: int = 0
    ) -> Float32[Array, "batch length vocab"]:
        """Return the logits (or scores) of `Output.hidden` for `depth=0`, else of `MTPOutput.hidden[depth - 1]`."""
        if isinstance(self.head, ScoreHead):
            return self.head(self.head_input(hidden, key=key))
        return logits(
            self.head_input(hidden, key=key, depth=depth),
            self.head_kernel,
            self._head_context(hidden),
            tied=self.head is None,
            bias=self.logit_bias,
            soft_cap=self.config.logit_soft_cap,
        )

    def _head_context(self, hidden: Array) -> ForwardContext:
        return ForwardContext(positions=jnp.zeros(hidden.shape[:2], jnp.int32), execution=self.execution)

    @property
    def head_kernel(self) -> Array | AbstractWeight:
        """Weight of the output head with axes `embed vocab`; for tied weights the embedding table, `vocab embed`."""
        return self.embedding.table if self.head is None else self.head.kernel

    @property
    def logit_bias(self) -> Float32[Array, "vocab"] | None:
        """Bias of the logits, divided by `logit_divisor` as `head_input` is; None for a head without bias."""
        return None if self.head_bias is None else self.head_bias.astype(jnp.float32) / self.config.logit_divisor

    @property
    def generation_config(self) -> GenerationConfig:
        """Sampling settings and stop ids published with the checkpoint: the defaults of `generate`."""
        return GenerationConfig() if self.origin is None else self.origin.generation

    @property
    def trained_positions(self) -> int | None:
        """Context length for which the model was trained, from learned positions or the checkpoint; None: unknown."""
        if isinstance(self.config.positions, LearnedPositions):
            return self.config.positions.max_positions
        if self.origin is None:
            return None
        length = json.loads(self.origin.settings).get("max_position_embeddings")
        return length if isinstance(length, int) else None

    def replace(self, **changes: Unpack[ExecutionOptions]) -> "Decoder":
        """Return the model with other execution options: `model.replace(remat="full", attention="dot", scan=False)`.

        Raises ConfigError for other names. Fields of the configuration, such as `dropout`, cannot change in a model.
        """
        options = {field.name for field in dataclasses.fields(self.execution)}
        for name in changes.keys() - options:
            if name in {field.name for field in dataclasses.fields(self.config)}:
                raise ConfigError(
                    f"replace: {name} is a field of the configuration, not an execution option. Create a model with "
                    f"dataclasses.replace(model.config, {name}=…)."
                )
            raise ConfigError(f"replace: {name} is not an execution option.{suggest(name, options)}")
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changes))

    def without_mtp(self) -> "Decoder":
        """Return the model without multi-token prediction."""
        saved = tuple(path for path in self.saved_modules if not path.startswith("mtp."))
        config = dataclasses.replace(self.config, mtp=None)
        return dataclasses.replace(self, mtp=None, config=config, saved_modules=saved)

    def place(self, layout: Layout) -> "Decoder":
        """Return the model with its weights moved to another layout."""
        model = self.replace(layout=layout)
        arrays, static = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, layout.shardings(arrays)), static)

    def unstacked(self) -> tuple[Any, ...]:
        """Return a tuple of all blocks in the order of the layers, with unstacked weights."""
        return tuple(block for layers in self.scanned_layers for block in layers.unstacked())

    def _rounded(self, below: str, key: PRNGKeyArray | None) -> "Decoder":
        """Return the model with the weights below this path prepared for 8-bit products (`Execution.low_precision`)."""
        key = None if key is None else jax.random.fold_in(as_key(key), 2**16)
        return round_weights(self, self.execution.low_precision, below=below, key=key)

    def _keys(self, key: PRNGKeyArray | None) -> tuple[PRNGKeyArray | None, ...]:
        return (None, None, None) if key is None else tuple(jax.random.split(as_key(key), 3))


@jit_if_eager
@run_with_auto_axes
def _compiled_call(model: Decoder, inputs: ForwardInputs, cache, key) -> Output:
    hidden, cache, stats = model.run(
        inputs.tokens,
        inputs.positions,
        inputs.segment_ids,
        cache,
        key,
        embeds=inputs.embeds,
        inputs=inputs.extra_inputs,
        media=inputs.media,
    )
    return Output(logits=model.logits(hidden, key=key), hidden=hidden, cache=cache, stats=stats)


@jit_if_eager
@run_with_auto_axes
def _compiled_embedding(model: Decoder, tokens: Array) -> Float[Array, "batch length embed"]:
    return model._token_embeddings(tokens, model._head_context(tokens))


@jit_if_eager
@run_with_auto_axes
def _compiled_encode(model: Decoder, media: Media) -> Encoded:
    return model._encode(media)
