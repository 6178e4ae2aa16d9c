"""Engram (Cheng et al. 2026): embeddings of n-grams, looked up by hashes of a token and the few before it.

The hashes, multipliers and sizes of tables are those of MaxText, or of Qwen 4 (`ngram_hash`). Two things differ from
these: n-grams don't cross the border between documents that are packed into a row, and padding is skipped.
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
    CheckedFields,
    ConfigError,
    FiniteFloat,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
from eqx_decoders.layers.base import BranchResult
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs, last_inputs
from eqx_decoders.layers.embedding.ngram_hash import HashBits, hash_rows, multipliers, table_sizes, up_to_last
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.layers.norm import RMSNormConfig, normalize_streams
from eqx_decoders.layers.recurrent.sharded_conv import convolve_on_mesh
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True)
class TokenClasses:
    """Classes of token ids that count as the same, such as all spellings of a word.

    **Arguments:**

    - `packed`: the classes as text (base64 of zlib of the differences, as little-endian int32), so that a configuration
        stays small to hash and to store. `TokenClasses.of` makes it.
    """

    packed: str

    def __post_init__(self):
        try:
            good = len(self.ids) > 0 and bool(self.ids.min() >= 0)
        except (ValueError, zlib.error):
            good = False
        check(good, "TokenClasses.packed must be what TokenClasses.of makes of a class of at least 0 for each id.")

    @classmethod
    def of(cls, classes: Sequence[int] | np.ndarray) -> "TokenClasses":
        """Pack the class of each token id."""
        steps = np.diff(np.asarray(classes, "<i4"), prepend=np.int32(0))
        return cls(base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode())

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
    steps = np.frombuffer(zlib.decompress(base64.b64decode(packed, validate=True)), "<i4")
    return np.cumsum(steps, dtype=np.int32)


_AtLeastTwo = Annotated[int, AtLeast(2)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig(CheckedFields):
    """Configuration of an Engram layer, which adds embeddings of n-grams to the stream.

        v + silu(convolution(norm(v))),   v = sigmoid(root(<norm(x), norm(key e)> / sqrt(embed))) value e

    `e` are the vectors of the n-grams that end at a token, one for each order (pairs, triples, …) and each head, side
    by side; `root(s) = sign(s) sqrt(|s|)`. With several residual streams each has a key, norms and a convolution of its
    own. Give its `ExtraLayerConfig` a norm, and place it before the mixer.

    **Arguments:**

    - `embed_dim`: features of the residual stream.
    - `vocab_size`: token ids.
    - `layers`: all layers that have an Engram, in order; no two tables of them have the same size.
    - `layer`: this layer's number.
    - `streams`: residual streams.
    - `num_heads`: hashes of each order.
    - `head_dim`: features of one vector.
    - `vocab_bases`: for each order from 2 on, a lower bound of the sizes of its tables, which are primes.
    - `taps`: inputs of the convolution, as many tokens apart as the longest n-grams have.
    - `seed`: of the hashes.
    - `hash_bits`: of the hashes, 31 (MaxText) or 63 (Qwen 4).
    - `pad_token`: what stands before the first token.
    - `end_token`: n-grams reach back to behind the last one of these, which ends a text; before it `pad_token` counts.
        None: they reach as far as they are long.
    - `token_classes`: ids that count as the same; None: each is its own.
    - `bias`: whether keys and values have biases.
    - `row_multiple`: the number of the table's rows is rounded up to a multiple of it.
    - `table_parts`: equal parts, one behind the other, in which files hold the table; None for one table.
    - `eps`: of the norms.
    - `norm_offset`: added to the norms' scales, which then start at 0, if it is 1.
    """

    reads_streams: ClassVar[bool] = True
    embed_dim: PositiveInt
    vocab_size: PositiveInt
    layers: tuple[NonNegativeInt, ...]
    layer: int
    streams: PositiveInt = 1
    num_heads: PositiveInt = 8
    head_dim: PositiveInt = 1280
    vocab_bases: Annotated[tuple[_AtLeastTwo, ...], NonEmpty("number: one for each order")] = (226_240, 226_240)
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
            f"EngramConfig.layer={self.layer} must be one of layers={self.layers}, which must differ from each other.",
        )
        check(
            self.pad_token < self.vocab_size,
            f"EngramConfig.pad_token={self.pad_token} must be below vocab_size={self.vocab_size}.",
        )
        known = self.vocab_size if self.token_classes is None else len(self.token_classes.ids)
        check(
            known == self.vocab_size,
            f"EngramConfig.token_classes has {known} ids, but vocab_size={self.vocab_size}: give one class for each.",
        )
        parts, rule = self.table_parts or 1, "must divide the rows of the table"
        check(self.rows % parts == 0, f"EngramConfig.table_parts={parts} {rule}, {self.rows}: set row_multiple.")

    @property
    def max_ngram(self) -> int:
        """Number of tokens of the longest n-grams."""
        return len(self.vocab_bases) + 1

    @property
    def num_classes(self) -> int:
        """Number of different tokens that the hashes know."""
        return self.vocab_size if self.token_classes is None else self.token_classes.count

    @property
    def features(self) -> int:
        """Features of all vectors of one token."""
        return (self.max_ngram - 1) * self.num_heads * self.head_dim

    @property
    def multipliers(self) -> tuple[int, ...]:
        """Odd numbers by which the tokens of an n-gram are multiplied, the last token's first."""
        number = self.layer if self.hash_bits == 31 else self.layers.index(self.layer)
        return multipliers(self.hash_bits, self.seed, number, self.num_classes, self.max_ngram)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Sizes of the tables, for each order and head."""
        return table_sizes(self.layers, self.vocab_bases, self.num_heads)[self.layer]

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return -(-sum(self.table_sizes) // self.row_multiple) * self.row_multiple

    def cache_shape(self, max_length: int) -> dict[str, ConvShape]:
        """Return the shapes of the cache: the last tokens, and the last inputs of the convolution."""
        tokens = ConvShape(taps=self.max_ngram - 1, channels=1, dtype="int32")
        values = ConvShape(taps=(self.taps - 1) * self.max_ngram, channels=self.streams * self.embed_dim)
        return {"tokens": tokens, "values": values}

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Engram":
        rule = f"must be the residual stream's, {embed_dim}"
        check(embed_dim == self.embed_dim, f"EngramConfig.embed_dim={self.embed_dim} {rule}.")
        table_key, key_key, value_key = jax.random.split(key, 3)
        size, streams, parts = self.features, self.streams, self.table_parts
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
    """Layer `v + silu(convolution(norm(v)))`, `v = sigmoid(root(<norm(x), norm(key e)> / sqrt(embed))) value e`."""

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
        """Return the features to add to each stream, and the new tokens and convolution inputs for a cache."""
        streams = x.reshape(*x.shape[:2], self.config.streams, x.shape[-1])
        values = self._values(streams, self._vectors(ctx, None if past is None else past["tokens"]), ctx)
        inputs = self._normed(values, self.value_scale).reshape(*x.shape[:2], -1)
        tail = self._tail(inputs, None if past is None else past["values"])
        positions, dilation = (ctx.positions, ctx.segment_ids), self.config.max_ngram
        smooth = convolve_on_mesh(
            inputs, self.convolution, None, tail, *positions, dilation=dilation, execution=ctx.execution
        )
        out = values + jax.nn.silu(smooth).reshape(values.shape)
        return out.reshape(x.shape), self._entries(inputs, tail, ctx)

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _vectors(self, ctx: ForwardContext, tail: Array | None) -> Float[Array, "batch length ngram_features"]:
        """Look up the vectors of the n-grams that end at each token, side by side."""
        tokens = _tokens(ctx)
        tail = jnp.full((len(tokens), self.config.max_ngram - 1, 1), -1, jnp.int32) if tail is None else tail
        rows = ngram_rows(self.config, tokens, tail[..., 0], ctx.positions, ctx.segment_ids)
        vectors = look_up(self.table.reshape(-1, self.config.head_dim), rows, "rows row_dim", ctx)
        # split as products add them up before a cache splits these otherwise: XLA (jax 0.10) has wrong ones for both
        return ctx.constrain(vectors.reshape(*rows.shape[:2], -1), "batch length ngram_features")

    def _values(self, x: Array, vectors: Array, ctx: ForwardContext) -> Float[Array, "batch length streams embed"]:
        """Project the vectors to values, gated for each stream."""
        into = "batch length ngram_features, ngram_features streams embed -> batch length streams embed"
        key = self._normed(add_bias(ctx.einsum(into, vectors, self.key), self.key_bias), self.key_scale)
        into = "batch length ngram_features, ngram_features embed -> batch length embed"
        value = add_bias(ctx.einsum(into, vectors, self.value), self.value_bias)
        query = self._normed(x, self.query_scale)
        score = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), axis=-1) * x.shape[-1] ** -0.5
        gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
        return gate[..., None].astype(value.dtype) * value[:, :, None]

    def _normed(self, x: Array, scale: Array) -> Float[Array, "batch length streams embed"]:
        return normalize_streams(x, scale, RMSNormConfig(eps=self.config.eps, offset=self.config.norm_offset))

    def _tail(self, inputs: Array, tail: Array | None) -> Float[Array, "batch taps channels"]:
        """Return the inputs of the convolution before this call."""
        taps = (self.config.taps - 1) * self.config.max_ngram
        size = len(inputs), taps, inputs.shape[-1]
        return jnp.zeros(size, inputs.dtype) if tail is None else tail.astype(inputs.dtype)

    def _entries(self, inputs: Array, tail: Array, ctx: ForwardContext) -> dict[str, Any]:
        """Return new entries for a cache: only the last inputs for a call of which every token is accepted."""
        long = ctx.accept_all and inputs.shape[1] > tail.shape[1]
        values = NewConvInputs(tail=last_inputs(tail, inputs, ctx.positions)) if long else ConvInputs(inputs=inputs)
        return {"tokens": ConvInputs(inputs=_tokens(ctx)[..., None]), "values": values}


class EngramInParts(Engram):
    """Engram whose table is in several equal parts."""

    table: Float[Array, "table_parts rows row_dim"]


def ngram_rows(
    config: EngramConfig,
    tokens: Int[Array, "batch length"],
    tail: Int[Array, "batch taps"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
) -> Int32[Array, "batch length hashes"]:
    """Return the table rows of the n-grams that end at each token, pairs first.

    `tail` are the tokens before, -1 where there are none.
    """
    # before the first token of a document there is padding; what is beyond the vocabulary counts as its last id
    known = np.arange(config.vocab_size) if config.token_classes is None else config.token_classes.ids
    known = jnp.asarray(known, jnp.int32)
    window = earlier_tokens(tokens, tail, positions, segment_ids, config.max_ngram - 1)
    window = up_to_last(window, config.end_token)
    filled = (jnp.where(each < 0, config.pad_token, each) for each in (tokens, *window))
    classes = [jnp.take(known, each, mode="clip") for each in filled]
    sizes = np.asarray(config.table_sizes, np.int32).reshape(config.max_ngram - 1, config.num_heads)
    offsets = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    orders = hash_rows(config.hash_bits, classes, config.multipliers, sizes)
    return jnp.concatenate(orders, axis=-1) + offsets.astype(np.int32).reshape(1, 1, -1)


def earlier_tokens(
    tokens: Int[Array, "batch length"],
    tail: Int[Array, "batch taps"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    count: int,
) -> list[Int[Array, "batch length"]]:
    """Return the token before each token, the one before that, and so on, within its document; -1 for none."""
    taps = tail.shape[1]
    joined = jnp.concatenate([tail, tokens.astype(tail.dtype)], axis=1)
    real = jnp.concatenate([tail >= 0, positions >= 0], axis=1)
    segments = jnp.zeros_like(joined) if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (taps, 0)))
    index = jnp.broadcast_to(jnp.arange(joined.shape[1], dtype=jnp.int32)[None], joined.shape)
    latest = jax.lax.cummax(jnp.where(real, index, -1), axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    earlier, current = [], index

    def at_current(x):
        return jnp.take_along_axis(x, jnp.maximum(current, 0), axis=1)

    for _ in range(count):
        current = jnp.where(current < 0, -1, at_current(before))
        earlier.append(jnp.where((current >= 0) & (at_current(segments) == segments), at_current(joined), -1)[:, taps:])
    return earlier


def _tokens(ctx: ForwardContext) -> Int[Array, "batch length"]:
    if ctx.tokens is None:
        raise ConfigError("Engram hashes token ids: call the model with tokens, not with embeddings alone.")
    return ctx.tokens
