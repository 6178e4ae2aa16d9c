"""Dynamic mask attention (Shi et al. 2025; Doge): keys have learned biases, and those with the largest are attended to.

    b_s = exp(r softplus(W v_s)) for each key head, v_s being the values of all of them
    o_t = softmax(q_t . k_s + b_s) v_s, over the keys s with the `top_k` largest b_s of those that t sees

The bias is one more feature of a key, for which queries have a one: so kernels and caches are those of attention. Of
equal biases the later ones are taken, which makes a window of a new layer's choice, whose biases are all one. The
choice has no gradient; the biases have that of their scores.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.attention.block_indexer import BlockIndex
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_lanes
from eqx_decoders.layers.attention.topk import KeyChoice, map_queries, top_k_mask
from eqx_decoders.layers.attention.variants.base import AttentionVariant
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, Past, kv_shape
from eqx_decoders.layers.mask import Causal, seen_keys, visible
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicMaskConfig(AttentionVariant, MixerConfig):
    """Configuration of attention to the keys with the largest learned biases, which are added to scores.

    **Arguments:**

    - `attention`: the attention.
    - `top_k`: keys that a query attends to.
    """

    attention: AttentionConfig
    top_k: PositiveInt = 2048

    def __post_init__(self):
        super().__post_init__()
        rule = "keys are chosen of what came before, by their own values"
        self.refuse("spans", "out_dim", "value_dim", "kv_shared_from", "selection", rule=rule)
        mask = self.attention.mask
        check(isinstance(mask, Causal), f"DynamicMaskConfig.attention has mask={mask}, which must be Causal().")

    def cache_shape(self, max_length: int) -> KVShape:
        """Return the shape of the cache: keys have their bias as last feature."""
        heads, dim = self.attention.num_kv_heads, self.attention.head_dim
        return kv_shape(self.mask, max_length, kv_heads=heads, head_dim=dim + 1, value_dim=dim)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of scores and of their products with values."""
        keys = min(seen_keys(self.mask, length), self.top_k)
        return self.attention.num_heads * keys * (2 * self.attention.head_dim + 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "DynamicMaskAttention":
        config, (own, step_key) = self.attention, jax.random.split(key)
        attention = config.build(embed_dim, key=own)
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        heads, dim = config.num_kv_heads, config.head_dim
        return DynamicMaskAttention(
            **fields,
            step=fan_in(step_key, (heads, dim, heads), jnp.float32, heads * dim, "normal"),
            step_bias=jnp.zeros((heads,)) if config.qkv_bias else None,
            rate=jnp.zeros((heads,)),
            top_k=self.top_k,
        )


class DynamicMaskAttention(Attention):
    """Attention to the keys with the largest biases `exp(rate * softplus(step v))`."""

    step: Float[Array, "kv_heads head_dim mask_heads"]
    step_bias: Float[Array, "mask_heads"] | None
    rate: Float[Array, "mask_heads"]
    top_k: int = eqx.field(static=True)

    def _normalize_and_rotate(
        self, query: Array, key: Array | None, value: Array | None, ctx: ForwardContext
    ) -> tuple[Array, NewKV]:
        """Return queries with a one, and keys with their bias, as last feature."""
        query, new = super()._normalize_and_rotate(query, key, value, ctx)
        assert new is not None and new.value is not None
        bias = self._biases(new.value, ctx).astype(new.key.dtype)
        query = jnp.concatenate([query, jnp.ones((*query.shape[:3], 1), query.dtype)], axis=-1)
        key = jnp.concatenate([new.key, bias[..., None]], axis=-1)
        return (
            ctx.constrain(query, "batch length heads head_dim"),
            NewKV(key=ctx.constrain(key, "batch length kv_heads head_dim"), value=new.value),
        )

    def _biases(self, value: Array, ctx: ForwardContext) -> Float32[Array, "batch length mask_heads"]:
        pattern = "batch length kv_heads head_dim, kv_heads head_dim mask_heads -> batch length mask_heads"
        with jax.default_matmul_precision("highest"):  # few columns, and they decide
            step = add_bias(ctx.einsum(pattern, value.astype(jnp.float32), self.step), self.step_bias)
        return jnp.exp(self.rate.astype(jnp.float32)[None, None] * jax.nn.softplus(step))

    def _choose_blocks(self, index: BlockIndex, past: Past | None, ctx: ForwardContext) -> KeyChoice:
        """Select the keys of this call and of the cache that have the largest biases."""
        bias = jax.lax.stop_gradient(index.key[..., -1]).astype(jnp.float32).swapaxes(1, 2)
        choice = KeyChoice(self._chosen(bias, ctx)) if past is None else self._chosen_cached(bias, past, ctx)
        return choice.repeated(self.config.num_heads // self.config.num_kv_heads)

    def _chosen(self, bias: Float32[Array, "batch kv_heads length"], ctx: ForwardContext) -> Selection | None:
        length = bias.shape[2]
        if length <= self.top_k:
            return None

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def some(queries):
            return pack_lanes(self._largest(bias, visible(self.config.mask, *_with_keys(queries, ctx))))

        found = map_queries(some, (ctx.positions, ctx.segment_ids), length, bias.shape[1])
        words = jnp.moveaxis(found, 0, 2)
        return Selection(words.reshape(*words.shape[:2], -1, words.shape[4])[:, :, :length])

    def _chosen_cached(
        self, bias: Float32[Array, "batch kv_heads length"], past: Past, ctx: ForwardContext
    ) -> KeyChoice:
        whole = past.whole()
        slots = whole.positions.shape[1]
        if slots + bias.shape[2] <= self.top_k:
            return KeyChoice()
        earlier = whole.keys(jnp.float32)[..., -1]
        seen = [visible(self.config.mask, ctx.positions, positions) for positions in (whole.positions, ctx.positions)]
        chosen = self._largest(jnp.concatenate([earlier, bias], axis=-1), jnp.concatenate(seen, axis=-1))
        return KeyChoice(present=chosen[..., slots:], past=chosen[..., :slots])

    def _largest(
        self, bias: Float32[Array, "batch kv_heads keys"], seen: Bool[Array, "batch length keys"]
    ) -> Bool[Array, "batch kv_heads length keys"]:
        """Return the keys with the largest biases of those that each query sees, the later ones of equals."""
        scores = jnp.where(seen[:, None], bias[:, :, None], -jnp.inf)
        return top_k_mask(scores[..., ::-1], self.top_k)[..., ::-1] & seen[:, None]


def _with_keys(queries: Any, ctx: ForwardContext) -> tuple[Any, ...]:
    """Return the positions and segments of queries and of all keys, as `visible` takes them."""
    positions, segments = queries
    return positions, ctx.positions, segments, ctx.segment_ids
