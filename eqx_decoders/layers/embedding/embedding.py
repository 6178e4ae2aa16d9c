"""Token embedding, absolute positions, and output head."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Integer, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt
from eqx_decoders.layers.documents import document_starts
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.numerics.einsum import AbstractWeight, add_bias, as_weight
from eqx_decoders.numerics.initializers import fan_in, normal


class EmbeddingProjection(eqx.Module):
    """Linear map from the features of the embedding table to the features of the residual stream."""

    kernel: Float[Array, "inner embed"]

    def __call__(
        self, x: Float[Array, "batch length inner"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        return ctx.einsum("batch length inner, inner embed -> batch length embed", x, self.kernel)


class TokenEmbedding(eqx.Module):
    """Token embedding `scale * projection(table[token])`. Ids outside of the vocabulary are clipped.

    **Arguments:**

    - `table`: embedding of each token. Without a projection it has as many features as the residual stream.
    - `projection`: linear map to the features of the residual stream (factorized embedding); None: no projection.
    - `scale`: multiplies the embeddings.
    """

    table: Float[Array, "vocab embed"]
    projection: EmbeddingProjection | None = None
    scale: float = eqx.field(static=True, default=1.0)

    @classmethod
    def build(
        cls, shape: tuple[int, int], embed_dim: int, *, scale: float, std: float, key: PRNGKeyArray
    ) -> "TokenEmbedding":
        """Build a table of shape `(vocab, features)`, with a projection if `features` is not `embed_dim`.

        `std` is the standard deviation of the table.
        """
        table = normal(key, shape, jnp.float32, std)
        projection = None
        if shape[1] != embed_dim:
            kernel = fan_in(jax.random.fold_in(key, 1), (shape[1], embed_dim), jnp.float32, shape[1])
            projection = EmbeddingProjection(kernel=kernel)
        return cls(table=table, projection=projection, scale=scale)

    def __call__(
        self, tokens: Integer[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        tokens = as_int32("tokens", tokens)
        if ctx.execution.lookup == "one_hot":
            x = self._one_hot_product(tokens, ctx)
        else:
            x = look_up(self.table, tokens, "vocab embed", ctx)
        if self.projection is not None:
            x = self.projection(ctx.constrain(x, "batch length embed"), ctx)
        x = ctx.constrain(x, "batch length embed")
        # the scale is rounded to the dtype of activations first, as in Hugging Face
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, ctx.execution.precision.compute)

    def _one_hot_product(self, tokens: Array, ctx: ForwardContext) -> Array:
        size = self.table.shape[0]
        one_hot = jax.nn.one_hot(jnp.clip(tokens, 0, size - 1), size, dtype=ctx.execution.precision.compute)
        one_hot = ctx.constrain(one_hot, "batch length vocab")
        return ctx.einsum("batch length vocab, vocab embed -> batch length embed", one_hot, self.table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPositions(CheckedFields):
    """Configuration of learned absolute positions `x + table[position + offset]` (GPT-2).

    **Arguments:**

    - `max_positions`: number of positions in the table; later positions use the last row.
    - `offset`: number of unused rows before the row of position 0 (2 in OPT).
    """

    max_positions: PositiveInt
    offset: NonNegativeInt = 0

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LearnedPositionTable":
        table = normal(key, (self.offset + self.max_positions, embed_dim), jnp.float32, 0.02)
        return LearnedPositionTable(table=table, offset=self.offset)


class LearnedPositionTable(eqx.Module):
    """Learned absolute positions `x + table[position + offset]`."""

    table: Float[Array, "positions embed"]
    offset: int = eqx.field(static=True, default=0)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        rows = jnp.take(self.table, jnp.maximum(ctx.positions, 0) + self.offset, axis=0, mode="clip")
        return x + rows.astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalPositions(CheckedFields):
    """Configuration of sinusoidal positions (Vaswani et al. 2017).

    They are `x + [sin(p w_k), cos(p w_k)]` for position p, with `w_k = max_timescale^(-k / (n - 1))` for k = 0 … n - 1
    and n = embed_dim / 2.
    """

    max_timescale: PositiveFloat = 10_000.0

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Sinusoids":
        return Sinusoids(config=self)


class Sinusoids(eqx.Module):
    """Sinusoidal positions `x + [sin(p w_k), cos(p w_k)]`, computed in float32."""

    config: SinusoidalPositions = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        return x + sinusoids(ctx.positions, x.shape[-1], self.config.max_timescale).astype(x.dtype)


def sinusoids(positions: Int[Array, "*dims"], size: int, max_timescale: float) -> Float32[Array, "*dims size"]:
    """Compute `[sin(p w_k), cos(p w_k)]`. With odd `size` the last feature is 0. Positions below 0 count as 0."""
    count = size // 2
    rates = jnp.exp(-math.log(max_timescale) / max(count - 1, 1) * jnp.arange(count, dtype=jnp.float32))
    real = jnp.maximum(positions, 0).astype(jnp.float32)[..., None]
    angles = real * rates.reshape((1,) * (real.ndim - 1) + (-1,))
    signal = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(signal, ((0, 0),) * positions.ndim + ((0, size - 2 * count),))


PositionsConfig = LearnedPositions | SinusoidalPositions


class Head(eqx.Module):
    """Untied output head `kernel^T x`."""

    kernel: Float[Array, "embed vocab"]


class ScoreHead(eqx.Module):
    """Head that returns scores of the text so far, `kernel^T x` computed in float32; a reward model has one score."""

    kernel: Float[Array, "embed scores"]

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float32[Array, "batch length scores"]:
        x, kernel = (y.astype(jnp.float32) for y in (x, as_weight(self.kernel).array(0)))
        return jnp.einsum("ble,es->bls", x, kernel, precision=lax.Precision.HIGHEST)


def build_head(embed_dim: int, vocab_size: int, scores: int | None, *, key: PRNGKeyArray) -> Head | ScoreHead:
    """Build a head of `vocab_size` logits, or of `scores` scores, with weights of variance `1 / embed_dim`."""
    kernel = fan_in(key, (embed_dim, vocab_size if scores is None else scores), jnp.float32, embed_dim)
    return Head(kernel=kernel) if scores is None else ScoreHead(kernel=kernel)


def logits(
    x: Float[Array, "batch length embed"],
    kernel: Array | AbstractWeight,
    ctx: ForwardContext,
    *,
    tied: bool,
    bias: Float[Array, "vocab"] | None = None,
    soft_cap: float | None,
) -> Float32[Array, "batch length vocab"]:
    """Compute `y = kernel^T x + bias` in float32, and with a soft cap `cap * tanh(y / cap)`.

    A tied kernel is the embedding table with axes `vocab embed`; otherwise the kernel has axes `embed vocab`.
    """
    kernel_axes = "vocab embed" if tied else "embed vocab"
    # use the sharding of the table's lookup: XLA's partitioner (jax 0.12) may abort if a weight has two shardings
    kernel = ctx.constrain(as_weight(kernel).array(1), kernel_axes) if tied else kernel
    y = ctx.einsum(f"batch length embed, {kernel_axes} -> batch length vocab", x, kernel, out_dtype=jnp.float32)
    y = ctx.constrain(add_bias(y, bias), "batch length vocab")
    return y if soft_cap is None else soft_cap * jnp.tanh(y / soft_cap)


def document_positions(
    positions: Int[Array, "batch length"] | None,
    segment_ids: Int[Array, "batch length"] | None,
    shape: tuple[int, ...],
    start: Int[Array, "batch"] | None = None,
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"] | None]:
    """Return the positions of tokens in their documents (-1 for padding), and the segment ids (0 for padding).

    If `positions` is None, they count the tokens of each document from 0, without padding. A segment id that occurs
    again after another document starts a new document. With `start`, each sequence is one document that continues at
    position `start`.
    """
    if segment_ids is None:
        if positions is None:
            index = jnp.arange(shape[1], dtype=jnp.int32)[None]
            positions = jnp.broadcast_to(index, shape) if start is None else start[:, None] + index
        return positions, None
    real = segment_ids != 0
    if positions is None:
        index = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
        is_start = document_starts(jnp.where(real, 0, -1), segment_ids)
        if start is not None or is_start is None:
            positions = index if start is None else start[:, None] + index
        else:
            positions = index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
            segment_ids = jnp.where(real, jnp.cumsum(is_start, axis=1, dtype=jnp.int32) + 1, 0)
    return jnp.where(real, positions, -1), segment_ids
