"""Attention in both directions with a learned number for each distance, which all layers of an encoder share."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.attention.conformer import in_chunks
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


DISTANCE_BIAS = "distance_bias"  # name of the table in `ForwardContext.shared`
_MASKED = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeAttentionConfig(MixerConfig):
    """Configuration of `out(softmax(q_i . k_j / sqrt(head_dim) + b[j - i]) v)`, with the keys j near i (Phi-4's audio).

    A token sees those of its document that are fewer than `reach` tokens away. Distances from `distances` on count as
    the largest that the table b has: `distances - 1` ahead, `distances` back.

    **Arguments:**

    - `num_heads`, `head_dim`: heads, and features of each.
    - `distances`: rows of the table in one direction.
    - `symmetric`: whether distances ahead and back have the same rows.
    - `reach`: how far is near.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    distances: PositiveInt = 1000
    symmetric: bool = False
    reach: PositiveInt = 500

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of the table of distances, `[distances, heads]`."""
        return self.distances + (1 if self.symmetric else self.distances), self.num_heads

    def token_products(self, length: int) -> int:
        """Count multiplications per token of scores, and of their products with values."""
        return self.num_heads * self.head_dim * 2 * min(length, 2 * self.reach - 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "RelativeAttention":
        keys, heads = jax.random.split(key, 4), (self.num_heads, self.head_dim)
        query, key, value = (fan_in(each, (embed_dim, *heads), jnp.float32, embed_dim, "normal") for each in keys[:3])
        return RelativeAttention(
            query=query,
            key=key,
            value=value,
            out=fan_in(keys[3], (*heads, embed_dim), jnp.float32, heads[0] * heads[1], "normal"),
            query_bias=jnp.zeros(heads),
            key_bias=jnp.zeros(heads),
            value_bias=jnp.zeros(heads),
            out_bias=jnp.zeros((embed_dim,)),
            config=self,
        )


class RelativeAttention(eqx.Module):
    """Attention `out(softmax(q_i . k_j / sqrt(head_dim) + b[j - i]) v)`; b stands in `ForwardContext.shared`.

    The tokens of a document must follow one another: distances are counted along the row.
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
        """Return the layer's output; at padding it is meaningless."""
        pattern, names = "batch length embed, embed heads head_dim -> batch length heads head_dim", {}
        for part in ("query", "key", "value"):
            projected = add_bias(ctx.einsum(pattern, x, getattr(self, part)), getattr(self, f"{part}_bias"))
            names[part] = save(ctx.constrain(projected, "batch length heads head_dim"), f"{part}_proj")
        mixed = self._mixed(**names, ctx=ctx)
        mixed = save(ctx.constrain(mixed.astype(x.dtype), "batch length heads head_dim"), "attention_out")
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", mixed, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(self(x, ctx))

    def _mixed(self, query: Array, key: Array, value: Array, ctx: ForwardContext) -> Array:
        """Attend in pieces of `reach` queries, each with the keys that any of them sees; in float32."""
        config, length = self.config, query.shape[1]
        size = min(config.reach, length)
        around = 0 if length == size else size - 1
        segments = jnp.ones_like(ctx.positions) if ctx.segment_ids is None else ctx.segment_ids
        documents = jnp.where(ctx.positions >= 0, segments + 1, 0)[..., None]  # 0 is also what fills the last piece
        queries, of_query = (in_chunks(each, size, 0, 0) for each in (query.astype(jnp.float32), documents))
        keys, values, of_key = (
            in_chunks(each, size, around, around)
            for each in (key.astype(jnp.float32), value.astype(jnp.float32), documents)
        )
        distance = jnp.arange(keys.shape[2])[None] - around - jnp.arange(size)[:, None]
        seen = (of_query == of_key.swapaxes(2, 3)) & (jnp.abs(distance) < config.reach)[None, None]
        scores = jnp.einsum("bcqhd,bckhd->bchqk", queries, keys) * config.head_dim**-0.5
        scores = scores + jnp.moveaxis(self._bias(distance, ctx), 2, 0)[None, None]
        weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, _MASKED), axis=-1)
        mixed = jnp.einsum("bchqk,bckhd->bcqhd", weights, values)
        return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length]

    def _bias(self, distance: Array, ctx: ForwardContext) -> Float[Array, "queries keys heads"]:
        most = self.config.distances
        row = jnp.clip(distance, -most, most - 1)
        row = jnp.abs(row) if self.config.symmetric else row + most
        return jnp.take(ctx.shared[DISTANCE_BIAS].astype(jnp.float32), row, axis=0, mode="clip")
