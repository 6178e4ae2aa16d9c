"""Engram (Cheng et al. 2026): embeddings of n-grams, looked up by hashes of a token and the tokens before it.

Hashes, multipliers and table sizes are those of MaxText or of Qwen 4 (see `ngram_hash`). Unlike both, n-grams do not
cross document boundaries in packed sequences, and padding is skipped.
"""

import base64
import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import (
    AtLeast,
    ConfigError,
    FiniteFloat,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
from eqx_decoders.layers.base import BranchResult, ExtraConfig
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs, last_inputs
from eqx_decoders.layers.documents import previous_tokens
from eqx_decoders.layers.embedding.ngram_hash import HashBits, hash_rows, multipliers, table_sizes, up_to_last
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.layers.norm import RMSNormConfig, normalize_streams
from eqx_decoders.layers.recurrent.sharded_conv import convolve_on_mesh
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True)
class TokenClasses:
    """Classes of token ids that are hashed as the same token, such as all spellings of a word.

    **Arguments:**

    - `packed`: the class of each token id, compressed to a text (base64 of zlib of the differences as little-endian
        int32), so that configurations are small to hash and to store. Create it with `TokenClasses.of`.
    """

    packed: str

    def __post_init__(self):
        try:
            valid = len(self.ids) > 0 and bool(self.ids.min() >= 0)
        except (ValueError, zlib.error):
            valid = False
        check(valid, "TokenClasses.packed must be created by TokenClasses.of from a class >= 0 for each token id.")

    @classmethod
    def of(cls, classes: Sequence[int] | np.ndarray) -> "TokenClasses":
        """Compress the class of each token id."""
        differences = np.diff(np.asarray(classes, "<i4"), prepend=np.int32(0))
        return cls(base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode())

    @property
    def ids(self) -> np.ndarray:
        """Class of each token id."""
        return _unpack(self.packed)

    @property
    def count(self) -> int:
        """Number of classes."""
        return int(self.ids.max()) + 1


@functools.lru_cache(maxsize=16)
def _unpack(packed: str) -> np.ndarray:
    differences = np.frombuffer(zlib.decompress(base64.b64decode(packed, validate=True)), "<i4")
    return np.cumsum(differences, dtype=np.int32)


_AtLeastTwo = Annotated[int, AtLeast(2)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig(ExtraConfig):
    """Configuration of an Engram layer, which adds embeddings of n-grams to the residual stream.

        v   = sigmoid(root(<norm(x), norm(key e)> / sqrt(embed))) value e
        out = v + silu(convolution(norm(v)))

    `e` is the concatenation of the embeddings of the n-grams that end at a token: one embedding for each order (2
    tokens, 3 tokens, …) and head. `root(s) = sign(s) sqrt(|s|)`. With several residual streams, each stream has a
    separate key, separate norms and a separate convolution. Use the layer in `BlockConfig.pre_layers`, with a
    `pre_norm`.

    **Arguments:**

    - `embed_dim`: features of the residual stream.
    - `vocab_size`: number of token ids.
    - `layers`: indices of all layers with an Engram, in order. Hash tables of different layers have different sizes.
    - `layer`: index of this layer.
    - `streams`: number of residual streams.
    - `num_heads`: number of hashes (heads) for each order.
    - `head_dim`: features of the embedding of one hash.
    - `vocab_bases`: lower bound of the hash table sizes (primes) for each order from 2 on.
    - `taps`: kernel size of the convolution. Its dilation is the number of tokens of the longest n-gram.
    - `seed`: seed of the hash multipliers.
    - `hash_bits`: bits of the hashes, 31 (MaxText) or 63 (Qwen 4).
    - `pad_token`: token id that replaces missing tokens before the first token of a document.
    - `end_token`: token id that ends a text. N-grams do not include an earlier end token or the tokens before it; they
        use `pad_token` instead. None: n-grams are not cut.
    - `token_classes`: token ids that are hashed as the same token; None: every token id is its own class.
    - `bias`: whether keys and values have biases.
    - `row_multiple`: the number of table rows is rounded up to a multiple of it.
    - `table_parts`: number of equal parts in which checkpoints store the table; None for one table.
    - `eps`: epsilon of the norms.
    - `norm_offset`: offset added to the scales of the norms; with 1 the scales are initialized to 0.
    """

    reads_streams: ClassVar[bool] = True
    embed_dim: PositiveInt
    vocab_size: PositiveInt
    layers: tuple[NonNegativeInt, ...]
    layer: int
    streams: PositiveInt = 1
    num_heads: PositiveInt = 8
    head_dim: PositiveInt = 1280
    vocab_bases: Annotated[tuple[_AtLeastTwo, ...], NonEmpty("table size: one for each order of n-grams")] = (
        226_240,
        226_240,
    )
    taps: _AtLeastTwo = 4
    seed: int = 0
    hash_bits: HashBits = 31
    pad_token: NonNegativeInt = 0
    end_token: NonNegativeInt | None = None
    token_classes: TokenClasses | None = None
    bias: bool = True
    row_multiple: PositiveInt = 1
    table_parts: PositiveInt | None = None
    eps: PositiveFloat = 1e-6
    norm_offset: FiniteFloat = 0.0

    def __post_init__(self):
        super().__post_init__()
        check(
            self.layer in self.layers and len(set(self.layers)) == len(self.layers),
            f"EngramConfig.layer={self.layer} must be one of layers={self.layers}, which must not contain duplicates.",
        )
        check(
            self.pad_token < self.vocab_size,
            f"EngramConfig.pad_token={self.pad_token} must be below vocab_size={self.vocab_size}.",
        )
        class_count = self.vocab_size if self.token_classes is None else len(self.token_classes.ids)
        check(
            class_count == self.vocab_size,
            f"EngramConfig.token_classes has classes for {class_count} ids, but vocab_size={self.vocab_size}: "
            "it must have one class for each token id.",
        )
        parts = self.table_parts or 1
        check(
            self.rows % parts == 0,
            f"EngramConfig.table_parts={parts} must divide the {self.rows} rows of the table. "
            f"Set row_multiple to a multiple of {parts}.",
        )

    @property
    def max_ngram(self) -> int:
        """Number of tokens of the longest n-gram."""
        return len(self.vocab_bases) + 1

    @property
    def num_classes(self) -> int:
        """Number of distinct tokens in hashes."""
        return self.vocab_size if self.token_classes is None else self.token_classes.count

    @property
    def features(self) -> int:
        """Features of the concatenated embeddings of one token."""
        return (self.max_ngram - 1) * self.num_heads * self.head_dim

    @property
    def multipliers(self) -> tuple[int, ...]:
        """Odd hash multipliers of the tokens of an n-gram, starting with the last token."""
        layer_number = self.layer if self.hash_bits == 31 else self.layers.index(self.layer)
        return multipliers(self.hash_bits, self.seed, layer_number, self.num_classes, self.max_ngram)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Sizes of the hash tables of this layer, for each order and head."""
        return table_sizes(self.layers, self.vocab_bases, self.num_heads)[self.layer]

    @property
    def rows(self) -> int:
        """Number of rows of the concatenated hash tables, with padding to `row_multiple`."""
        return -(-sum(self.table_sizes) // self.row_multiple) * self.row_multiple

    def cache_shape(self, max_length: int) -> dict[str, ConvShape]:
        """Return the shapes of the caches of the last tokens, and of the last inputs of the convolution."""
        tokens = ConvShape(num_inputs=self.max_ngram - 1, channels=1, dtype="int32")
        values = ConvShape(num_inputs=(self.taps - 1) * self.max_ngram, channels=self.streams * self.embed_dim)
        return {"tokens": tokens, "values": values}

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Engram":
        check(
            embed_dim == self.embed_dim,
            f"EngramConfig.embed_dim={self.embed_dim} must be equal to DecoderConfig.embed_dim={embed_dim}.",
        )
        table_key, key_key, value_key = jax.random.split(key, 3)
        size = self.features
        streams = self.streams
        parts = self.table_parts
        shape = (self.rows, self.head_dim) if parts is None else (parts, self.rows // parts, self.head_dim)
        scale = jnp.full((streams, embed_dim), 1.0 - self.norm_offset)
        return (Engram if parts is None else EngramInParts)(
            table=fan_in(table_key, shape, jnp.float32, self.head_dim, "normal"),
            key=fan_in(key_key, (size, streams, embed_dim), jnp.float32, size, "normal"),
            key_bias=jnp.zeros((streams, embed_dim)) if self.bias else None,
            value=fan_in(value_key, (size, embed_dim), jnp.float32, size, "normal"),
            value_bias=jnp.zeros((embed_dim,)) if self.bias else None,
            query_scale=scale,
            key_scale=scale,
            value_scale=scale,
            convolution=jnp.zeros((streams * embed_dim, self.taps)),
            config=self,
        )


class Engram(eqx.Module):
    """Engram layer: adds embeddings of n-grams to the residual stream; see `EngramConfig`."""

    table: Float[Array, "rows row_dim"]
    key: Float[Array, "ngram_features streams embed"]
    key_bias: Float[Array, "streams embed"] | None
    value: Float[Array, "ngram_features embed"]
    value_bias: Float[Array, "embed"] | None
    query_scale: Float[Array, "streams norm"]
    key_scale: Float[Array, "streams norm"]
    value_scale: Float[Array, "streams norm"]
    convolution: Float[Array, "channels taps"]
    config: EngramConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length *streams embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length *streams embed"], dict[str, Any]]:
        """Return the features to add to each stream, and the new cache entries (tokens and convolution inputs)."""
        streams = x.reshape(*x.shape[:2], self.config.streams, x.shape[-1])
        embeddings = self._ngram_embeddings(ctx, None if past is None else past["tokens"])
        values = self._values(streams, embeddings, ctx)
        inputs = self._normed(values, self.value_scale).reshape(*x.shape[:2], -1)
        conv_state = self._conv_state(inputs, None if past is None else past["values"])
        convolved = convolve_on_mesh(
            inputs,
            self.convolution,
            None,
            conv_state,
            ctx.positions,
            ctx.segment_ids,
            dilation=self.config.max_ngram,
            execution=ctx.execution,
        )
        out = values + jax.nn.silu(convolved).reshape(values.shape)
        return out.reshape(x.shape), self._cache_entries(inputs, conv_state, ctx)

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(*self(x, ctx, past))

    def _ngram_embeddings(
        self, ctx: ForwardContext, cached_tokens: Array | None
    ) -> Float[Array, "batch length ngram_features"]:
        """Look up and concatenate the embeddings of the n-grams that end at each token."""
        tokens = _tokens(ctx)
        if cached_tokens is None:
            cached_tokens = jnp.full((len(tokens), self.config.max_ngram - 1, 1), -1, jnp.int32)
        rows = ngram_rows(self.config, tokens, cached_tokens[..., 0], ctx.positions, ctx.segment_ids)
        embeddings = look_up(self.table.reshape(-1, self.config.head_dim), rows, "rows row_dim", ctx)
        # This constraint is needed: XLA (jax 0.10) computes wrong results if the products below and a cache require
        # different shardings of these embeddings.
        return ctx.constrain(embeddings.reshape(*rows.shape[:2], -1), "batch length ngram_features")

    def _values(self, x: Array, embeddings: Array, ctx: ForwardContext) -> Float[Array, "batch length streams embed"]:
        """Project the n-gram embeddings to values, with a gate for each stream."""
        pattern = "batch length ngram_features, ngram_features streams embed -> batch length streams embed"
        key = self._normed(add_bias(ctx.einsum(pattern, embeddings, self.key), self.key_bias), self.key_scale)
        pattern = "batch length ngram_features, ngram_features embed -> batch length embed"
        value = add_bias(ctx.einsum(pattern, embeddings, self.value), self.value_bias)
        query = self._normed(x, self.query_scale)
        score = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), axis=-1) * x.shape[-1] ** -0.5
        gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
        return gate[..., None].astype(value.dtype) * value[:, :, None]

    def _normed(self, x: Array, scale: Array) -> Float[Array, "batch length streams embed"]:
        return normalize_streams(x, scale, RMSNormConfig(eps=self.config.eps, offset=self.config.norm_offset))

    def _conv_state(self, inputs: Array, cached: Array | None) -> Float[Array, "batch conv_inputs channels"]:
        """Return the inputs of the convolution before this call; zeros without a cache."""
        taps = (self.config.taps - 1) * self.config.max_ngram
        shape = len(inputs), taps, inputs.shape[-1]
        return jnp.zeros(shape, inputs.dtype) if cached is None else cached.astype(inputs.dtype)

    def _cache_entries(self, inputs: Array, conv_state: Array, ctx: ForwardContext) -> dict[str, Any]:
        """Return new cache entries: the new convolution state if that is smaller and no token can be rejected."""
        returns_state = ctx.accept_all and inputs.shape[1] > conv_state.shape[1]
        if returns_state:
            values = NewConvInputs(tail=last_inputs(conv_state, inputs, ctx.positions))
        else:
            values = ConvInputs(inputs=inputs)
        return {"tokens": ConvInputs(inputs=_tokens(ctx)[..., None]), "values": values}


class EngramInParts(Engram):
    """Engram whose table is stored in several equal parts (`EngramConfig.table_parts`)."""

    table: Float[Array, "table_parts rows row_dim"]


def ngram_rows(
    config: EngramConfig,
    tokens: Int[Array, "batch length"],
    tail: Int[Array, "batch conv_inputs"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
) -> Int32[Array, "batch length hashes"]:
    """Return the table rows of the n-grams that end at each token, pairs first.

    `tail` has the cached tokens before the call, or -1. Ids outside of the vocabulary are clipped.
    """
    class_of_id = np.arange(config.vocab_size) if config.token_classes is None else config.token_classes.ids
    class_of_id = jnp.asarray(class_of_id, jnp.int32)
    window = earlier_tokens(tokens, tail, positions, segment_ids, config.max_ngram - 1)
    window = up_to_last(window, config.end_token)
    padded = (jnp.where(ids < 0, config.pad_token, ids) for ids in (tokens, *window))
    classes = [jnp.take(class_of_id, ids, mode="clip") for ids in padded]
    sizes = np.asarray(config.table_sizes, np.int32).reshape(config.max_ngram - 1, config.num_heads)
    offsets = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    rows_by_order = hash_rows(config.hash_bits, classes, config.multipliers, sizes)
    return jnp.concatenate(rows_by_order, axis=-1) + offsets.astype(np.int32).reshape(1, 1, -1)


def earlier_tokens(
    tokens: Int[Array, "batch length"],
    tail: Int[Array, "batch conv_inputs"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    count: int,
) -> list[Int[Array, "batch length"]]:
    """Return for each token the `count` tokens before it, nearest first. Padding is skipped.

    The result is -1 where a document has no such token. `tail` has the cached tokens before the call, or -1.
    """
    taps = tail.shape[1]
    joined = jnp.concatenate([tail, tokens.astype(tail.dtype)], axis=1)
    real = jnp.concatenate([tail >= 0, positions >= 0], axis=1)
    segments = jnp.zeros_like(joined) if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (taps, 0)))
    index = jnp.broadcast_to(jnp.arange(joined.shape[1], dtype=jnp.int32)[None], joined.shape)
    before = previous_tokens(real)
    earlier = []
    current = index

    def at_current(x: Array) -> Array:
        return jnp.take_along_axis(x, jnp.maximum(current, 0), axis=1)

    for _ in range(count):
        current = jnp.where(current < 0, -1, at_current(before))
        same_document = (current >= 0) & (at_current(segments) == segments)
        earlier.append(jnp.where(same_document, at_current(joined), -1)[:, taps:])
    return earlier


def _tokens(ctx: ForwardContext) -> Int[Array, "batch length"]:
    if ctx.tokens is None:
        raise ConfigError("Engram layers need token ids: call the model with tokens, not only with embeds.")
    return ctx.tokens
