"""Bidirectional attention with learned relative position biases, which all layers of an encoder share."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.attention.local_attention import in_chunks
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


DISTANCE_BIAS = "distance_bias"  # name of the bias table in `ForwardContext.shared`
_MASKED = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeAttentionConfig(MixerConfig):
    """Configuration of `out(softmax(q_i . k_j / sqrt(head_dim) + b[j - i]) v)` over keys j close to i (Phi-4's audio).

    A token sees the tokens of its document that are fewer than `reach` tokens away. The distance `j - i` is clipped to
    the range of the bias table b, `-distances` to `distances - 1`.

    **Arguments:**

    - `num_heads`, `head_dim`: number of heads, and features per head.
    - `distances`: rows of the bias table in one direction.
    - `symmetric`: whether earlier and later tokens at the same distance have the same bias.
    - `reach`: distance from which on tokens are not visible.
    """

    encoder_only: ClassVar[bool] = True

    num_heads: PositiveInt
    head_dim: PositiveInt
    distances: PositiveInt = 1000
    symmetric: bool = False
    reach: PositiveInt = 500

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of the bias table, `(rows, heads)`."""
        return self.distances + (1 if self.symmetric else self.distances), self.num_heads

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the scores and of the weighted sum of values."""
        return self.num_heads * self.head_dim * 2 * min(length, 2 * self.reach - 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "RelativeAttention":
        keys = jax.random.split(key, 4)
        head_shape = (self.num_heads, self.head_dim)
        query, key, value = (
            fan_in(kernel_key, (embed_dim, *head_shape), jnp.float32, embed_dim, "normal") for kernel_key in keys[:3]
        )
        return RelativeAttention(
            query=query,
            key=key,
            value=value,
            out=fan_in(keys[3], (*head_shape, embed_dim), jnp.float32, self.num_heads * self.head_dim, "normal"),
            query_bias=jnp.zeros(head_shape),
            key_bias=jnp.zeros(head_shape),
            value_bias=jnp.zeros(head_shape),
            out_bias=jnp.zeros((embed_dim,)),
            config=self,
        )


class RelativeAttention(eqx.Module):
    """Bidirectional attention with relative position biases; the bias table is in `ForwardContext.shared`.

    The tokens of a document must be contiguous: distances are differences of indices in the sequence.
    """

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed heads head_dim"]
    value: Float[Array, "embed heads head_dim"]
    out: Float[Array, "heads head_dim embed"]
    query_bias: Float[Array, "heads head_dim"]
    key_bias: Float[Array, "heads head_dim"]
    value_bias: Float[Array, "heads head_dim"]
    out_bias: Float[Array, "embed"]
    config: RelativeAttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the layer's output. The output of padding tokens is undefined."""
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"

        def project(name: str) -> Array:
            projected = add_bias(ctx.einsum(pattern, x, getattr(self, name)), getattr(self, f"{name}_bias"))
            return save(ctx.constrain(projected, "batch length heads head_dim"), f"{name}_proj")

        mixed = self._attend(project("query"), project("key"), project("value"), ctx)
        mixed = save(ctx.constrain(mixed.astype(x.dtype), "batch length heads head_dim"), "attention_out")
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", mixed, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx))

    def _attend(self, query: Array, key: Array, value: Array, ctx: ForwardContext) -> Array:
        """Compute attention in float32, in chunks of `reach` queries with all keys that any of them sees."""
        config = self.config
        length = query.shape[1]
        size = min(config.reach, length)
        neighbors = 0 if length == size else size - 1  # keys on each side of a chunk
        segments = jnp.ones_like(ctx.positions) if ctx.segment_ids is None else ctx.segment_ids
        documents = jnp.where(ctx.positions >= 0, segments + 1, 0)[..., None]  # 0: padding, also of the last chunk
        queries, query_documents = (in_chunks(x, size, 0, 0) for x in (query.astype(jnp.float32), documents))
        keys, values, key_documents = (
            in_chunks(x, size, neighbors, neighbors)
            for x in (key.astype(jnp.float32), value.astype(jnp.float32), documents)
        )
        distance = jnp.arange(keys.shape[2])[None] - neighbors - jnp.arange(size)[:, None]
        seen = (query_documents == key_documents.swapaxes(2, 3)) & (jnp.abs(distance) < config.reach)[None, None]
        scores = jnp.einsum("bcqhd,bckhd->bchqk", queries, keys) * config.head_dim**-0.5
        scores = scores + jnp.moveaxis(self._bias(distance, ctx), 2, 0)[None, None]
        weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, _MASKED), axis=-1)
        mixed = jnp.einsum("bchqk,bckhd->bcqhd", weights, values)
        return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length]

    def _bias(self, distance: Array, ctx: ForwardContext) -> Float[Array, "queries keys heads"]:
        max_distance = self.config.distances
        row = jnp.clip(distance, -max_distance, max_distance - 1)
        row = jnp.abs(row) if self.config.symmetric else row + max_distance
        return jnp.take(ctx.shared[DISTANCE_BIAS].astype(jnp.float32), row, axis=0, mode="clip")
