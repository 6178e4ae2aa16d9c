"""Embedding table, absolute positions, and output head."""

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
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.layers.recurrent.causal_conv import document_starts
from eqx_decoders.numerics.einsum import AbstractWeight, add_bias, as_weight
from eqx_decoders.numerics.initializers import fan_in, normal


class EmbeddingProjection(eqx.Module):
    """Matrix from the features of a table to those of the residual stream."""

    kernel: Float[Array, "inner embed"]

    def __call__(
        self, x: Float[Array, "batch length inner"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        return ctx.einsum("batch length inner, inner embed -> batch length embed", x, self.kernel)


class TokenEmbedding(eqx.Module):
    """Embedding `scale * projection(table[token])`; ids outside the vocabulary are clipped into it.

    Without a projection the table has the features of the residual stream.
    """

    table: Float[Array, "vocab embed"]
    projection: EmbeddingProjection | None = None
    scale: float = eqx.field(static=True, default=1.0)

    @classmethod
    def build(
        cls, shape: tuple[int, int], embed_dim: int, *, scale: float, std: float, key: PRNGKeyArray
    ) -> "TokenEmbedding":
        """Build a table of this shape, with a projection where its features are not `embed_dim`."""
        table, projection = normal(key, shape, jnp.float32, std), None
        if shape[1] != embed_dim:
            kernel = fan_in(jax.random.fold_in(key, 1), (shape[1], embed_dim), jnp.float32, shape[1])
            projection = EmbeddingProjection(kernel=kernel)
        return cls(table=table, projection=projection, scale=scale)

    def __call__(
        self, tokens: Integer[Array, "batch length"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        compute, tokens = ctx.execution.precision.compute, as_int32("tokens", tokens)
        one_hot = ctx.execution.lookup == "one_hot"
        rows = self._product(tokens, ctx) if one_hot else look_up(self.table, tokens, "vocab embed", ctx)
        x = rows if self.projection is None else self.projection(ctx.constrain(rows, "batch length embed"), ctx)
        x = ctx.constrain(x, "batch length embed")
        # the factor is rounded to the dtype first, as Hugging Face does it
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, compute)

    def _product(self, tokens: Array, ctx: ForwardContext) -> Array:
        size = self.table.shape[0]
        hot = jax.nn.one_hot(jnp.clip(tokens, 0, size - 1), size, dtype=ctx.execution.precision.compute)
        hot = ctx.constrain(hot, "batch length vocab")
        return ctx.einsum("batch length vocab, vocab embed -> batch length embed", hot, self.table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPositions(CheckedFields):
    """Configuration of `x + table[position + offset]` (GPT-2).

    **Arguments:**

    - `max_positions`: positions that have a row of the table; later ones take the last row.
    - `offset`: rows before that of the first position, of no use (2 in OPT).
    """

    max_positions: PositiveInt
    offset: NonNegativeInt = 0

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LearnedPositionTable":
        table = normal(key, (self.offset + self.max_positions, embed_dim), jnp.float32, 0.02)
        return LearnedPositionTable(table=table, offset=self.offset)


class LearnedPositionTable(eqx.Module):
    """Learned positions `x + table[position + offset]`."""

    table: Float[Array, "positions embed"]
    offset: int = eqx.field(static=True, default=0)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        rows = jnp.take(self.table, jnp.maximum(ctx.positions, 0) + self.offset, axis=0, mode="clip")
        return x + rows.astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalPositions(CheckedFields):
    """Configuration of `x + [sin(p w_k), cos(p w_k)]`, `w_k = max_timescale^(-k / (n - 1))`, n = embed_dim / 2.

    As in Vaswani et al. 2017.
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
    """Compute `[sin(p w_k), cos(p w_k)]`; an odd last feature gets 0, and positions below 0 count as 0."""
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
    """Head of a model that scores texts, `kernel^T x` in float32 throughout: a reward model has one score."""

    kernel: Float[Array, "embed scores"]

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float32[Array, "batch length scores"]:
        x, kernel = (y.astype(jnp.float32) for y in (x, as_weight(self.kernel).array(0)))
        return jnp.einsum("ble,es->bls", x, kernel, precision=lax.Precision.HIGHEST)


def build_head(embed_dim: int, vocab_size: int, scores: int | None, *, key: PRNGKeyArray) -> Head | ScoreHead:
    """Build a head, of logits or of scores, with variance `1 / embed_dim`."""
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
    """Compute `kernel^T x + bias` in float32, then `cap * tanh(y / cap)`. A tied kernel is the table, `vocab embed`."""
    right = "vocab embed" if tied else "embed vocab"
    # the table as its lookup has it: XLA's partitioner (jax 0.12) may abort where one weight is split in two ways
    kernel = ctx.constrain(as_weight(kernel).array(1), right) if tied else kernel
    y = ctx.einsum(f"batch length embed, {right} -> batch length vocab", x, kernel, out_dtype=jnp.float32)
    y = ctx.constrain(add_bias(y, bias), "batch length vocab")
    return y if soft_cap is None else soft_cap * jnp.tanh(y / soft_cap)


def document_positions(
    positions: Int[Array, "batch length"] | None,
    segment_ids: Int[Array, "batch length"] | None,
    shape: tuple[int, ...],
    begin: Int[Array, "batch"] | None = None,
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"] | None]:
    """Return positions of tokens in their documents, -1 for padding (segment 0), and document numbers, 0 for padding.

    Positions are counted where none are given: padding takes none, and an id that is used again after another document
    begins a new document. With `begin` each row goes on from there as one document.
    """
    if segment_ids is None:
        if positions is None:
            index = jnp.arange(shape[1], dtype=jnp.int32)[None]
            positions = jnp.broadcast_to(index, shape) if begin is None else begin[:, None] + index
        return positions, None
    real = segment_ids != 0
    if positions is None:
        index = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
        starts = document_starts(jnp.where(real, 0, -1), segment_ids)
        if begin is not None or starts is None:
            positions = index if begin is None else begin[:, None] + index
        else:
            positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
            segment_ids = jnp.where(real, jnp.cumsum(starts, axis=1, dtype=jnp.int32) + 1, 0)
    return jnp.where(real, positions, -1), segment_ids
