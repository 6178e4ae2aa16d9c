"""Differential attention (Ye et al. 2024; DiffLlama): the results of two heads, of which the second is taken off.

    o = softmax(q_1 K_1^T) V - lambda softmax(q_2 K_2^T) V,
    lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_0,    lambda_0 = 0.8 - 0.6 e^(-0.3 layer), the first layer being 0

V is as wide as both keys together, which makes the two of them one ordinary key head of twice the features: a query is
zero in those of the other half. So kernels, caches and meshes are those of attention, for a third more of products.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig, AttentionPast
from eqx_decoders.layers.attention.variants.base import AttentionVariant
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, kv_shape
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import COMPUTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifferentialAttentionConfig(AttentionVariant, MixerConfig):
    """Configuration of attention whose heads are differences of two: `(1 - lambda_0) norm(o)`, projected out.

    **Arguments:**

    - `attention`: the attention of single heads; half as many differential heads, and key heads, are made of them.
    - `norm`: normalization of the difference.
    """

    built_by_layer: ClassVar[bool] = True

    attention: AttentionConfig
    norm: RMSNormConfig = RMSNormConfig(scale=False)

    def __post_init__(self):
        super().__post_init__()
        count = self.attention.num_kv_heads
        check(count % 2 == 0, f"DifferentialAttentionConfig.attention has num_kv_heads={count}: two make one, so even.")
        none = ("fused_qkv", "shared_kv", "sinks", "output_gate", "inner_norm", "out_dim", "kv_shared_from")
        none += ("value_dim", "value_norm", "selection", "alibi")
        self.refuse(*none, rule="differential heads have none")
        over = "head" if self.attention.qk_norm is None else self.attention.qk_norm.over
        check(over == "head", f"DifferentialAttentionConfig.attention has qk_norm.over={over!r}, which must be 'head'.")

    def cache_shape(self, max_length: int) -> KVShape:
        """Return the shape of the cache: two keys side by side, and values that are as wide."""
        heads, dim = self.attention.num_kv_heads // 2, 2 * self.attention.head_dim
        return kv_shape(self.mask, max_length, kv_heads=heads, head_dim=dim)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of scores and of their products with values, both twice as wide."""
        return 2 * self.attention.token_products(length)

    def build(self, embed_dim: int, *, key: PRNGKeyArray, layer: int | Int[Array, ""] = 0) -> "DifferentialAttention":
        config, keys = self.attention, jax.random.split(key, 8)
        inner, biased = (2, config.head_dim), config.qkv_bias
        heads, kv_heads = config.num_heads // 2, config.num_kv_heads // 2
        attention = config.build(embed_dim, key=key)
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        for name, count, own in zip(("query", "key", "value"), (heads, kv_heads, kv_heads), keys[:3], strict=True):
            fields[name] = fan_in(own, (embed_dim, count, *inner), jnp.float32, embed_dim, "normal")
            fields[f"{name}_bias"] = jnp.zeros((count, *inner)) if biased else None
        out = (heads, 2 * config.head_dim, embed_dim)
        fields["out"] = fan_in(keys[3], out, jnp.float32, config.num_heads * config.head_dim, "normal")
        for name, own in zip(("first_query", "first_key", "second_query", "second_key"), keys[4:], strict=True):
            fields[name] = 0.1 * jax.random.normal(own, (config.head_dim,))
        number = jnp.asarray(layer, jnp.float32)[None]
        return DifferentialAttention(**fields, layer_number=number, norm=self.norm.build(2 * config.head_dim))


class DifferentialAttention(Attention):
    """Attention whose heads are differences of two; `layer_number` counts from 0."""

    query: Float[Array, "embed heads halves head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    key: Float[Array, "embed kv_heads halves head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    value: Float[Array, "embed kv_heads halves head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    query_bias: Float[Array, "heads halves head_dim"] | None
    key_bias: Float[Array, "kv_heads halves head_dim"] | None
    value_bias: Float[Array, "kv_heads halves head_dim"] | None
    out: Float[Array, "heads value_dim embed"]
    first_query: Float[Array, "head_dim"]
    first_key: Float[Array, "head_dim"]
    second_query: Float[Array, "head_dim"]
    second_key: Float[Array, "head_dim"]
    layer_number: Float[Array, "one"] = eqx.field(metadata=COMPUTED)
    norm: Norm

    def _attend_heads(self, x: Array, ctx: ForwardContext, past: AttentionPast | None) -> tuple[Array, Any]:
        out, entries = super()._attend_heads(x, ctx, past)
        out = out.reshape(*out.shape[:2], -1, 2, out.shape[-1]).astype(jnp.float32)
        first = 0.8 - 0.6 * jnp.exp(-0.3 * self.layer_number.astype(jnp.float32))
        factor = (self._exponential("first") - self._exponential("second") + first)[:, None, None, None]
        difference = self.norm(out[:, :, :, 0] - factor * out[:, :, :, 1])
        return (difference * (1.0 - first)[:, None, None, None]).astype(x.dtype), entries

    def _exponential(self, name: str) -> Float32[Array, ""]:
        query, key = (getattr(self, f"{name}_{part}").astype(jnp.float32) for part in ("query", "key"))
        return jnp.exp(jnp.sum(query * key))

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array, Array]:
        """Project to the queries, keys and values of single heads, the two of each one after the other."""

        def projected(name: str) -> Array:
            pattern = "batch length embed, embed heads halves head_dim -> batch length heads halves head_dim"
            both = add_bias(ctx.einsum(pattern, x, getattr(self, name)), getattr(self, f"{name}_bias"))
            return both.reshape(*x.shape[:2], -1, self.config.head_dim)

        return projected("query"), projected("key"), projected("value")

    def _normalize_and_rotate(
        self, query: Array, key: Array | None, value: Array | None, ctx: ForwardContext
    ) -> tuple[Array, NewKV]:
        """Return queries that are zero in the features of the other half, and keys and values side by side."""
        query, new = super()._normalize_and_rotate(query, key, value, ctx)
        assert new is not None and new.value is not None
        batch, length, heads, dim = query.shape
        own = jnp.eye(2, dtype=bool)[None, None, None, :, :, None]
        query = jnp.where(own, query.reshape(batch, length, -1, 2, 1, dim), 0).reshape(batch, length, heads, 2 * dim)
        key, value = (x.reshape(batch, length, -1, 2 * dim) for x in (new.key, new.value))
        return ctx.constrain(query, "batch length heads head_dim"), NewKV(key=key, value=value)
