"""The decoder: embedding, stack, final norm, head; its configuration and its caches."""

import dataclasses
import json
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Integer, PRNGKeyArray

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.kv_sharing import check_borrowing
from eqx_decoders.blocks.layer_inputs import LayerInputs, check_per_layer, takers
from eqx_decoders.blocks.pipelined_stack import check_pipeline, run_segment
from eqx_decoders.blocks.residual.registry import ResidualConfig
from eqx_decoders.blocks.stack import Segment, segments
from eqx_decoders.blocks.stats import BlockStats, join_layer_stats
from eqx_decoders.context import Context, Execution, ExecutionOptions, Inputs
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.core.input_checks import as_int32, as_key, check_inputs, check_shapes
from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.encoders.encoder import Encoder
from eqx_decoders.encoders.media import Encoded, Media, merge_features
from eqx_decoders.encoders.media_config import MediaConfig
from eqx_decoders.encoders.merge import (
    beside,
    check_media,
    check_tokens,
    encode,
    stacked_deepstack,
    with_offsets,
    without_placeholders,
)
from eqx_decoders.errors import ConfigError, check, check_integer, check_number
from eqx_decoders.layers.cache.cache import Cache, Proposal
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.embedding.embedding import (
    Head,
    LearnedPositions,
    LearnedPositionTable,
    PositionsConfig,
    Sinusoids,
    TokenEmbedding,
    build_head,
    logits,
    placed_in_documents,
)
from eqx_decoders.layers.embedding.per_layer_embedding import INPUT, PerLayerEmbedding, PerLayerEmbeddingConfig
from eqx_decoders.layers.mask import spans_of
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.model.config_json import decoder_from_json, decoder_to_json
from eqx_decoders.model.mtp import MTP, MTPConfig, MTPOutput, same_document, shift_left
from eqx_decoders.model.provenance import Provenance
from eqx_decoders.numerics.int8_matmul import round_weights
from eqx_decoders.numerics.matmul import normal
from eqx_decoders.numerics.quantized_weight import QuantizedWeight
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder is data: one `BlockConfig` per layer, between an embedding and a head.

    **Arguments:**

    - `vocab_size`: token ids.
    - `embed_dim`: features of the residual stream.
    - `blocks`: one configuration per layer, in order.
    - `final_norm`: before the head; None for none.
    - `tied`: whether the embedding table is the head.
    - `embedding_scale`: multiplies embeddings (Gemma: `embed_dim ** 0.5`).
    - `positions`: absolute positions added to the embeddings; None for none.
    - `logit_divisor`: logits are divided by it (Granite).
    - `logit_soft_cap`: logits become `cap * tanh(logits / cap)`; None for none.
    - `dropout`: rate on the embeddings and before the head.
    - `init_std`: standard deviation of a new embedding table.
    - `per_layer_embedding`: what makes the embeddings that layers get each for themselves; None for none.
    - `mtp`: multi-token prediction beside the head; None for none. It changes no logits.
    - `media`: encoders of images and audio, and which tokens their features replace; None for none.
    """

    vocab_size: int
    embed_dim: int
    blocks: tuple[BlockConfig, ...]
    final_norm: NormConfig | None
    tied: bool = False
    embedding_scale: float = 1.0
    positions: PositionsConfig | None = None
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None
    dropout: float = 0.0
    init_std: float = 0.02
    per_layer_embedding: PerLayerEmbeddingConfig | None = None
    mtp: MTPConfig | None = None
    media: MediaConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, "blocks", tuple(self.blocks))
        check_integer("DecoderConfig.vocab_size", self.vocab_size)
        check_integer("DecoderConfig.embed_dim", self.embed_dim)
        check(len(self.blocks) > 0, "DecoderConfig.blocks=() must hold at least one BlockConfig.")
        for index, block in enumerate(self.blocks):
            if not isinstance(block, BlockConfig):
                raise ConfigError(f"DecoderConfig.blocks[{index}]={block!r} must be a BlockConfig.")
        streams = {block.residual.streams for block in self.blocks}
        rule = "must have as many residual streams in all layers"
        check(len(streams) == 1, f"DecoderConfig.blocks {rule}, not {' and '.join(map(str, sorted(streams)))}.")
        check_number("DecoderConfig.embedding_scale", self.embedding_scale, above=0)
        check_number("DecoderConfig.logit_divisor", self.logit_divisor, above=0)
        check_number("DecoderConfig.dropout", self.dropout, least=0)
        check(self.dropout < 1, f"DecoderConfig.dropout={self.dropout} must be below 1.")
        check_number("DecoderConfig.init_std", self.init_std, above=0)
        if self.logit_soft_cap is not None:
            check_number("DecoderConfig.logit_soft_cap", self.logit_soft_cap, above=0)
        check_borrowing(self.blocks, None if self.mtp is None else self.mtp.block)
        check_per_layer(self.blocks, self.per_layer_embedding)
        check_media(self.media, self.blocks, self.embed_dim)

    @property
    def residual(self) -> ResidualConfig:
        """That of the first layer, which says how many residual streams there are."""
        return self.blocks[0].residual

    @property
    def has_grid_positions(self) -> bool:
        """Whether rotary positions have time, row and column."""
        return self.media is not None and self.media.positions is not None

    def to_json(self) -> str:
        """The configuration as JSON, for `from_json`; repeated layers are written once: `{"repeat": 4, "blocks": …}`.

        Every field is there, whatever its default, so that it means the same in later versions.
        """
        return decoder_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """The configuration in the words of `to_json`; ConfigError for classes, fields and values that are none."""
        return decoder_from_json(text, cls)

    def build(self, *, key: PRNGKeyArray, execution: Execution = Execution()) -> "Decoder":
        """A new decoder in float32 on the default device; `init` puts it where and in what dtype it belongs."""
        table_key, position_key, head_key, block_key = jax.random.split(key, 4)
        mtp_key, per_layer_key = jax.random.fold_in(key, 4), jax.random.fold_in(key, 5)
        vision_key, audio_key = jax.random.fold_in(key, 6), jax.random.fold_in(key, 7)
        vision, audio = (None, None) if self.media is None else (self.media.vision, self.media.audio)
        keys = jax.random.split(block_key, len(self.blocks))
        stack, begin = [], 0
        for unit, repeats in segments(self.blocks):
            count = len(unit) * repeats
            stack.append(Segment.build(unit, self.embed_dim, keys=keys[begin : begin + count]))
            begin += count
        further, layers = self.per_layer_embedding, len(takers(self.blocks))
        table = normal(table_key, (self.vocab_size, self.embed_dim), jnp.float32, self.init_std)
        return Decoder(
            embedding=TokenEmbedding(table=table, scale=self.embedding_scale),
            positions=None if self.positions is None else self.positions.build(self.embed_dim, key=position_key),
            per_layer_embedding=None if further is None else further.build(self.embed_dim, layers, key=per_layer_key),
            segments=tuple(stack),
            final_norm=None if self.final_norm is None else self.final_norm.build(self.embed_dim),
            head=None if self.tied else build_head(self.embed_dim, self.vocab_size, key=head_key),
            mtp=None if self.mtp is None else self.mtp.build(self.embed_dim, key=mtp_key),
            vision=None if vision is None else vision.build(key=vision_key),
            audio=None if audio is None else audio.build(key=audio_key),
            config=self,
            execution=execution,
        )


class Output(eqx.Module):
    """What a decoder returns.

    **Arguments:**

    - `logits`: scores of the next token, in float32.
    - `hidden`: the residual stream after the last block, before the final norm.
    - `cache`: the given cache with this call's tokens, or None.
    - `stats`: what the layers tell about themselves, stacked in their order.
    """

    logits: Float32[Array, "batch length vocab"]
    hidden: Float[Array, "batch length embed"]
    cache: Cache | None
    stats: BlockStats


class Decoder(eqx.Module):
    """`head(norm(block_n(... block_1(embed(tokens)))))`, an immutable pytree, with encoders if it sees or hears.

    Made by `init`, `abstract` or `load_*`. `model.replace(remat="full")` is the same model run another way.

    Who knows MaxText's `Transformer` finds each argument of its call here:

    | MaxText | here |
    |---|---|
    | `decoder_input_tokens`, `decoder_positions`, `decoder_segment_ids` | `tokens`, `positions`, `segment_ids` |
    | `encoder_images`, `encoder_image_masks`, `encoder_audios` | `media`, by `Media.create`; no padded tiles |
    | bidirectional masks of images | `media.spans`, in layers with `AttentionConfig.spans` |
    | deepstack embeddings | made by `encode`, added by `AddedFeaturesConfig`, with and without scan |
    | `enable_dropout`, rngs | `key`; None is without |
    | `model_mode="train"` | no `cache` |
    | `model_mode="prefill"`, `"autoregressive"` | a `cache`, empty or not; any number of tokens at a time |
    | `previous_chunk` | the `cache`: a chunk is a call that goes on with it |
    | `true_length` | positions of -1, or segment 0, for padding; `prompt_lengths` of `generate` |
    | `slot` | a row of the cache: `cache.with_row`, `cache.reset` |
    | `page_state` | tables of a cache with `pages`, by `cache.with_tables`; without, its rows are contiguous |
    | `decoder_target_tokens`, `decoder_target_mask` | `Batch` and `next_token_loss`; `predict_mtp` alone |
    | `kv_caches`, `attention_metadata` | `propose`, which writes nothing, and `cache.commit` |
    | `nnx_method`, intermediates | methods (`run`, `logits`, `head_input`), and `Output.stats` |
    """

    embedding: TokenEmbedding
    positions: LearnedPositionTable | Sinusoids | None
    per_layer_embedding: PerLayerEmbedding | None
    segments: tuple[Segment, ...]
    final_norm: Norm | None
    head: Head | None
    mtp: MTP | None
    vision: Encoder | None
    audio: Encoder | None
    config: DecoderConfig = eqx.field(static=True)
    execution: Execution = eqx.field(static=True)
    origin: Provenance | None = eqx.field(static=True, default=None)

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
        """Logits for the token after each token. Outside of `jax.jit` it is compiled, too, for each shape once.

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
        - `embeds`: in place of tokens, what `embed_tokens` makes of them, for example to differentiate by it.
        - `inputs`: what layers read beside these.
        - `media`: images, videos and audio, made by `Media.create` for these tokens; a placeholder may then be
            outside of the vocabulary. With a cache they are this call's, as its tokens are.
        """
        tokens, positions, segment_ids = _as_int32(tokens, positions, segment_ids)
        known = tokens if media is None else without_placeholders(tokens, media)
        check_inputs(self.config, known, positions, segment_ids, embeds=embeds, packed=cache is None)
        return _whole(self, tokens, positions, segment_ids, cache, key, embeds, inputs, media)

    def encode(self, media: Media) -> Encoded:
        """The features of images and audio, which stand for placeholder tokens."""
        return _encoded(self, media)

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
        cache_is_empty: bool = False,
        contiguous: bool = False,
    ) -> tuple[Float[Array, "batch length embed"], Cache | None, BlockStats]:
        """Everything but the head: `Output`'s hidden, cache and stats.

        `encoded` is `encode(media)`, where that is known. With `cache_is_empty` nothing of the cache is read.
        `contiguous` promises that no document has padding or a gap in positions inside: see `Context.contiguous`.
        """
        seen: Any = dict(inputs=inputs, media=media, encoded=encoded, contiguous=contiguous)
        options: Any = dict(embeds=embeds, **seen, cache_is_empty=cache_is_empty, keeps_all=True)
        hidden, proposal, stats = self.propose(tokens, positions, segment_ids, cache, key, **options)
        if cache is not None:
            cache = cache.commit(proposal.entries, proposal.positions, proposal.rope_offset)
        return hidden, cache, stats

    @typed
    def propose(
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
        cache_is_empty: bool = False,
        keeps_all: bool = False,
        contiguous: bool = False,
    ) -> tuple[Float[Array, "batch length embed"], Proposal, BlockStats]:
        """`run` up to what the cache would take, for `cache.commit`, which rejects tokens at a position of -1.

        With `keeps_all` it may reject none: then recurrent layers propose their state, and nothing per token.
        """
        inputs = Inputs() if inputs is None else inputs
        if media is not None:
            check_tokens(tokens, media)
            encoded, inputs, segment_ids = _seen(self, media, encoded, inputs, segment_ids)
        given = tokens, positions, segment_ids = _as_int32(tokens, positions, segment_ids)
        rows, length = check_shapes(self.config, *given, embeds=embeds, spans=inputs.spans)
        tokens, positions, segment_ids, embeds = (
            None if x is None else jnp.asarray(x) for x in (tokens, positions, segment_ids, embeds)
        )
        kept = rows if cache is None else cache.length.shape[0]
        check(kept == rows, f"cache has {kept} rows, but tokens {rows}: make one with init_cache.")
        begin = None if cache is None else cache.length
        dense_positions = all(x is None for x in (positions, segment_ids, cache))
        positions, segment_ids = placed_in_documents(positions, segment_ids, (rows, length), begin)
        segment_ids = None if cache is not None else segment_ids
        inputs, rope_offset = with_offsets(inputs, positions, cache)
        ctx = Context(
            positions=positions,
            segment_ids=segment_ids,
            execution=self.execution,
            cache_is_empty=cache_is_empty,
            keeps_all=keeps_all,
            dense_positions=dense_positions,
            contiguous=contiguous or dense_positions,
            tokens=tokens,
            **_seen_by_layers(inputs, positions),
        )
        if cache is None:
            check_pipeline(self.segments, ctx)
        embed_key, block_key, _ = self._keys(key)
        given = self.embedding(jnp.asarray(tokens), ctx) if embeds is None else embeds
        further: dict[str, Array] = {}
        if media is not None and encoded is not None and self.config.media is not None:
            index = jnp.asarray(media.index)
            given = ctx.constrain(merge_features(given, encoded.by_group, index), "batch length embed")
            further = stacked_deepstack(encoded, index)
            tokens = None if tokens is None else jnp.where(index >= 0, self.config.media.lookup_token, tokens)
        x = self.config.residual.expand(self._inputs(given, ctx, key=embed_key))
        layer_keys = None if block_key is None else jax.random.split(block_key, len(self.config.blocks))
        made = {} if self.per_layer_embedding is None else {INPUT: self.per_layer_embedding(tokens, given, ctx)}
        entries, stats, begin, by_layer = [], [], 0, LayerInputs(inputs.by_layer | further | made)
        for index, segment in enumerate(self._rounded("segments", key).segments):
            count, unit = segment.repeats * len(segment.unit), tuple(block.config for block in segment.unit)
            keys = None if layer_keys is None else layer_keys[begin : begin + count]
            own = by_layer.cut(unit, segment.repeats)
            memories = None if cache is None else cache.segments[index]
            found = run_segment(segment, x, ctx, memories, keys=keys, inputs=own)
            x, ctx = found.x, dataclasses.replace(ctx, shared=found.shared)
            entries.append(found.entries)
            stats.append(found.stats)
            begin += count
        by_layer.finish()
        return (
            self.config.residual.reduce(x),
            Proposal(entries=tuple(entries), positions=self._behind(x, positions, cache), rope_offset=rope_offset),
            join_layer_stats(stats),
        )

    def _behind(self, x: Array, positions: Int[Array, "batch length"], cache: Cache | None) -> Array:
        """Positions that are known once `x` is: then all of a cache is read before it is written, which is in place.

        XLA's CPU backend would copy it. A barrier does not do: in jax 0.10 it is dropped before that is decided.
        """
        layout = self.execution.layout
        if cache is None or x.size == 0 or not layout.single or layout.platform != "cpu":
            return positions
        return jnp.where(x.reshape(-1)[0] > jnp.inf, -1, positions)  # never

    def embed(
        self, tokens: Int[Array, "batch length"], ctx: Context, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "batch length embed"]:
        """What the first layer reads: embeddings (with dropout) and absolute positions."""
        return self._inputs(self.embedding(tokens, ctx), ctx, key)

    def embed_tokens(self, tokens: Integer[AnyArray, "batch length"]) -> Float[Array, "batch length embed"]:
        """The embeddings of tokens, as the model takes them for `embeds`: scaled, without dropout and positions."""
        check_inputs(self.config, tokens)
        return _embeddings(self, jnp.asarray(as_int32("tokens", tokens)))

    def _inputs(self, x: Array, ctx: Context, key: PRNGKeyArray | None) -> Float[Array, "batch length embed"]:
        x = dropout(x.astype(self.execution.precision.compute), self.config.dropout, key)
        x = x if self.positions is None else self.positions(x, ctx)
        return ctx.constrain(x, "batch length embed")

    @typed
    def predict_mtp(
        self,
        hidden: Float[Array, "batch length embed"],
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
        """Multi-token prediction over whole sequences: the streams of all depths, of which `logits` makes scores.

        At token t depth k predicts token t + k + 1, from the tokens up to t + k. Where that one belongs to another
        document, the depth sees padding. `hidden` is `Output.hidden` of the same tokens, positions, segment ids, inputs
        and media, `encoded` is `encode(media)` where that is known: features stand in the place of placeholders.
        `order` says which token of its text stands where in a row, if they do not follow one another.
        """
        check(
            self.mtp is not None,
            "Decoder.predict_further needs a model with multi-token prediction: DecoderConfig.mtp is None.",
        )
        assert self.mtp is not None
        tokens, positions, segment_ids = _as_int32(tokens, positions, segment_ids)
        tokens, inputs, key = jnp.asarray(tokens), Inputs() if inputs is None else inputs, as_key(key)
        if media is not None:
            check_tokens(tokens, media)
            encoded, inputs, segment_ids = _seen(self, media, encoded, inputs, segment_ids)
        segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
        given = None if positions is None else jnp.asarray(positions)
        positions, segment_ids = placed_in_documents(given, segment_ids, tokens.shape)
        seen: Any = dict(contiguous=contiguous) | _seen_by_layers(inputs, positions)
        x, hiddens, reals, stats = self.mtp_input(hidden), [], [], []
        rounded = self._rounded("mtp", key).mtp or self.mtp
        for count, depth in enumerate(rounded.unstacked(), 1):
            embed_key, block_key = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 3 + count))
            real = same_document(positions, segment_ids, count, order)
            later = Context(positions=shift_left(positions, count, order), execution=self.execution)
            here = Context(jnp.where(real, positions, -1), segment_ids, self.execution, **seen)
            following = self.embedding(shift_left(tokens, count, order), later)
            if media is not None and encoded is not None:
                index = shift_left(jnp.asarray(media.index) + 1, count, order) - 1
                following = merge_features(following, encoded.by_group, index)
            embedded = self._inputs(following, later, embed_key)
            x, _, stat = depth(x, embedded, here, key=block_key)
            hiddens.append(x)
            reals.append(real)
            stats.append(stat)
        return MTPOutput(tuple(hiddens), tuple(reals), jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats))

    @typed
    def mtp_input(self, hidden: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        """What the first depth of multi-token prediction reads."""
        assert self.mtp is not None
        return self.final_norm(hidden) if self.mtp.config.normed_stream and self.final_norm is not None else hidden

    @typed
    def head_input(
        self, hidden: Float[Array, "batch length embed"], *, key: PRNGKeyArray | None = None, depth: int = 0
    ) -> Float[Array, "batch length embed"]:
        """What the head reads: the final norm (and dropout) of `hidden`; with `depth` that of `MTPOutput.hidden`.

        Divided by what logits are divided by: so no loss needs to know of it.
        """
        norm = self.final_norm
        if depth > 0:
            assert self.mtp is not None
            norm = self.mtp.unstacked()[depth - 1].final_norm
        hidden = hidden if norm is None else norm(hidden)
        if self.config.logit_divisor != 1.0:
            hidden = hidden / self.config.logit_divisor
        return dropout(hidden, self.config.dropout, self._keys(key)[2])

    @typed
    def logits(
        self, hidden: Float[Array, "batch length embed"], *, key: PRNGKeyArray | None = None, depth: int = 0
    ) -> Float32[Array, "batch length vocab"]:
        """The head, applied to `Output.hidden`; with `depth`, counted from 1, to `MTPOutput.hidden[depth - 1]`."""
        ctx = Context(positions=jnp.zeros(hidden.shape[:2], jnp.int32), execution=self.execution)
        cap, tied = self.config.logit_soft_cap, self.head is None
        return logits(self.head_input(hidden, key=key, depth=depth), self.head_kernel, ctx, tied=tied, soft_cap=cap)

    @property
    def head_kernel(self) -> Array | QuantizedWeight:
        """The head's weight: `embed vocab`, or the embedding table, `vocab embed`, when tied."""
        return self.embedding.table if self.head is None else self.head.kernel

    @property
    def generation_config(self) -> GenerationConfig:
        """Sampling and stop ids that were published with the model, which `generate` takes where none are given."""
        return GenerationConfig() if self.origin is None else self.origin.generation

    @property
    def trained_positions(self) -> int | None:
        """The length that the model was trained for, as far as its checkpoint or its learned positions say."""
        if isinstance(self.config.positions, LearnedPositions):
            return self.config.positions.max_positions
        length = json.loads(self.origin.settings).get("max_position_embeddings") if self.origin is not None else None
        return length if isinstance(length, int) else None

    def replace(self, **changes: Unpack[ExecutionOptions]) -> "Decoder":
        """The same weights, run another way: `model.replace(remat="full", attention="dot", scan=False)`."""
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changes))

    def without_mtp(self) -> "Decoder":
        """The same model without multi-token prediction."""
        return dataclasses.replace(self, mtp=None, config=dataclasses.replace(self.config, mtp=None))

    def place(self, layout: Layout) -> "Decoder":
        """The same model on another layout: its weights are moved there."""
        model = self.replace(layout=layout)
        arrays, static = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, layout.shardings(arrays)), static)

    def unstacked(self) -> tuple[Any, ...]:
        """All blocks one by one, in the order of the layers."""
        return tuple(block for segment in self.segments for block in segment.unstacked())

    def _rounded(self, below: str, key: PRNGKeyArray | None) -> "Decoder":
        """The model whose weights there are multiplied in 8 bits where `Execution.low_precision` says so."""
        key = None if key is None else jax.random.fold_in(as_key(key), 2**16)
        return round_weights(self, self.execution.low_precision, below=below, key=key)

    def _keys(self, key: PRNGKeyArray | None) -> tuple[PRNGKeyArray | None, ...]:
        return (None, None, None) if key is None else tuple(jax.random.split(as_key(key), 3))


def _as_int32(tokens: Any, positions: Any, segment_ids: Any) -> tuple[Any, Any, Any]:
    given = dict(tokens=tokens, positions=positions, segment_ids=segment_ids)
    tokens, positions, segment_ids = (as_int32(name, array) for name, array in given.items())
    return tokens, positions, segment_ids


@jit_if_eager
@typed
def _whole(model: Decoder, tokens, positions, segment_ids, cache, key, embeds, inputs, media) -> Output:
    further: Any = dict(embeds=embeds, inputs=inputs, media=media)
    hidden, cache, stats = model.run(tokens, positions, segment_ids, cache, key, **further)
    return Output(logits=model.logits(hidden, key=key), hidden=hidden, cache=cache, stats=stats)


@jit_if_eager
@typed
def _embeddings(model: Decoder, tokens: Array) -> Float[Array, "batch length embed"]:
    return model.embedding(tokens, Context(positions=jnp.zeros(tokens.shape, jnp.int32), execution=model.execution))


def _encode(model: Decoder, media: Media) -> Encoded:
    rounded = model._rounded("vision", None)._rounded("audio", None)
    return encode(rounded.vision, rounded.audio, media, model.execution, model.config)


@jit_if_eager
@typed
def _encoded(model: Decoder, media: Media) -> Encoded:
    return _encode(model, media)


def _seen(
    model: Decoder, media: Media, encoded: Encoded | None, inputs: Inputs, segment_ids: Any
) -> tuple[Encoded, Inputs, Any]:
    """The features of images and audio, and what layers read beside the stream."""
    return _encode(model, media) if encoded is None else encoded, *beside(media, inputs, segment_ids)


def _seen_by_layers(inputs: Inputs, positions: Array) -> dict[str, Any]:
    """The fields of a `Context` that every layer reads of the inputs."""
    spans = as_int32("spans", inputs.spans)
    spans, rotary = (None if x is None else jnp.asarray(x) for x in (spans, inputs.rotary_positions))
    return dict(spans=None if spans is None else spans_of(spans, positions), rotary_positions=rotary)
