"""Mixture of attention heads (Zhang et al. 2022): each token chooses heads, and all heads share keys and values."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig, AttentionPast
from eqx_decoders.layers.attention.variants.base import AttentionVariant
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.moe.router import Router, RouterConfig
from eqx_decoders.layers.moe.sorted_rows import dispatch, sort_by_expert
from eqx_decoders.numerics.einsum import add_bias, grouped_products
from eqx_decoders.numerics.grouped_matmul import choose_form
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_RULE = "which heads a token has is not fixed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadMixtureConfig(AttentionVariant, MixerConfig):
    """Configuration of attention whose query and output projections are those of experts that each token chooses.

    An expert has `num_kv_heads` query heads, one for each key head, which all experts share; a token's heads are those
    of its `num_heads / num_kv_heads` experts. Their outputs are added up, weighed by a softmax over the logits of the
    chosen (JetMoe). The router's statistics are not returned: no loss balances these experts.

    **Arguments:**

    - `attention`: the attention of a token's heads; what it says of single heads must hold for all of them.
    - `num_experts`: number of experts.
    """

    attention: AttentionConfig
    num_experts: PositiveInt

    def __post_init__(self):
        super().__post_init__()
        fixed = ("fused_qkv", "qkv_bias", "sinks", "output_gate", "inner_norm", "out_dim", "kv_shared_from")
        self.refuse(*fixed, "value_dim", "alibi", rule=_RULE)
        over = "head" if self.attention.qk_norm is None else self.attention.qk_norm.over
        check(over == "head", f"HeadMixtureConfig.attention has qk_norm.over={over!r}, not 'head': {_RULE}.")
        chosen, rule = self.num_experts_per_token, f"experts, but num_experts={self.num_experts}"
        check(chosen <= self.num_experts, f"HeadMixtureConfig.attention has the num_heads of {chosen} {rule}.")

    @property
    def num_experts_per_token(self) -> int:
        """Experts that each token uses."""
        return self.attention.num_heads // self.attention.num_kv_heads

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "HeadMixture":
        own, query_key, out_key, router_key = jax.random.split(key, 4)
        inner = self.attention.num_kv_heads, self.attention.head_dim
        attention = self.attention.build(embed_dim, key=own)
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        into, out_of = (self.num_experts, embed_dim, *inner), (self.num_experts, *inner, embed_dim)
        fields |= {
            "query": fan_in(query_key, into, jnp.float32, embed_dim, "normal"),
            "out": fan_in(out_key, out_of, jnp.float32, math.prod(inner), "normal"),
            "router": RouterConfig().build(embed_dim, self.num_experts, self.num_experts_per_token, key=router_key),
        }
        return HeadMixture(**fields)


class HeadMixture(Attention):
    """Attention of the heads that each token chooses; keys and values are those of all heads."""

    query: Float[Array, "experts embed kv_heads head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    out: Float[Array, "experts kv_heads head_dim embed"]
    router: Router

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: AttentionPast | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """Return the layer's output, and the new keys and values for a cache."""
        chosen, weights, _ = self.router(x, ctx)
        sorts = self._sorts_rows(chosen, ctx)
        query = self._sorted_queries(x, chosen, ctx) if sorts else self._all_queries(x, chosen, ctx)
        # key heads first, as grouped queries have them
        query = jnp.swapaxes(query, 2, 3).reshape(*x.shape[:2], self.config.num_heads, -1)
        out, entries = self._attend_projected((query, *self._keys_and_values(x, ctx)), x, ctx, past)
        out = jnp.swapaxes(out.reshape(*x.shape[:2], self.config.num_kv_heads, chosen.shape[-1], -1), 2, 3)
        out = (self._sorted_outputs if sorts else self._all_outputs)(out, chosen, weights, ctx)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj"), entries

    def _keys_and_values(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        pattern = "batch length embed, embed kv_heads head_dim -> batch length kv_heads head_dim"
        assert self.key is not None
        key = ctx.einsum(pattern, x, self.key)
        return key, key if self.value is None else ctx.einsum(pattern, x, self.value)

    def _sorts_rows(self, chosen: Array, ctx: ForwardContext) -> bool:
        """Return whether tokens are sorted by expert: on one device, where that has fewer products."""
        plain = eqx.is_array(self.query) and eqx.is_array(self.out)
        return plain and ctx.execution.layout.single and ctx.execution.experts in ("auto", "dropless")

    # --- all experts on all tokens ---

    def _all_queries(
        self, x: Array, chosen: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length slots kv_heads head_dim"]:
        """Return the queries of each token's experts, of those of all."""
        if eqx.is_array(self.query):
            pattern = "batch length embed, experts embed kv_heads head_dim -> batch length experts kv_heads head_dim"
            of_all = ctx.einsum(pattern, x, self.query)
        else:  # other kinds of weights have a product for each expert
            pattern = (
                "experts batch length embed, experts embed kv_heads head_dim -> experts batch length kv_heads head_dim"
            )
            spread = jnp.broadcast_to(x[None], (self._num_experts, *x.shape))
            of_all = jnp.moveaxis(ctx.einsum(pattern, spread, self.query), 0, 2)
        of_all = ctx.constrain(of_all, "batch length experts kv_heads head_dim")
        mine = self._is_chosen(chosen)[..., None, None]
        return jnp.sum(jnp.where(mine, of_all[:, :, None], 0), axis=3)

    def _all_outputs(
        self, heads: Array, chosen: Array, weights: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the sum of the outputs of all experts on the weighed heads that chose them."""
        mine, weighed = self._is_chosen(chosen)[..., None, None], heads * weights.astype(heads.dtype)[..., None, None]
        shares = jnp.sum(jnp.where(mine, weighed[:, :, :, None], 0), axis=2)
        shares = ctx.constrain(shares, "batch length experts kv_heads head_dim")
        if eqx.is_array(self.out):
            pattern = "batch length experts kv_heads head_dim, experts kv_heads head_dim embed -> batch length embed"
            return ctx.einsum(pattern, shares, self.out)
        pattern = (
            "experts batch length kv_heads head_dim, experts kv_heads head_dim embed -> experts batch length embed"
        )
        return jnp.sum(ctx.einsum(pattern, jnp.moveaxis(shares, 2, 0), self.out), axis=0)

    def _is_chosen(self, chosen: Int32[Array, "batch length slots"]) -> Bool[Array, "batch length slots experts"]:
        return chosen[..., None] == jnp.arange(self._num_experts, dtype=chosen.dtype).reshape(1, 1, 1, -1)

    @property
    def _num_experts(self) -> int:
        return self.query.shape[0]

    # --- rows sorted by expert ---

    def _sorted_queries(
        self, x: Array, chosen: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length slots kv_heads head_dim"]:
        rows, slots = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, chosen.shape[-1])
        kernel = self.query.reshape(*self.query.shape[:2], -1)
        return _multiply_by_chosen(rows, slots, kernel, ctx).reshape(*chosen.shape, *self.query.shape[2:])

    def _sorted_outputs(
        self, heads: Array, chosen: Array, weights: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        kernel = self.out.reshape(self._num_experts, -1, self.out.shape[-1])
        out = _multiply_by_chosen(heads.reshape(chosen.size, -1), chosen.reshape(-1, 1), kernel, ctx)
        out = out.reshape(*chosen.shape, -1).astype(weights.dtype) * weights[..., None]
        return jnp.sum(out, axis=2).astype(heads.dtype)


def _multiply_by_chosen(
    x: Float[Array, "tokens inner"],
    chosen: Int32[Array, "tokens slots"],
    kernel: Float[Array, "experts inner outer"],
    ctx: ForwardContext,
) -> Float[Array, "choices outer"]:
    """Multiply each token by the matrix of each of its choices; zeros for choices of no expert."""
    layout, (experts, *features) = ctx.execution.layout, kernel.shape
    largest = max(chosen.size * max(features), math.prod(kernel.shape))
    form = choose_form(layout.backend, layout.device, x.dtype, rows=chosen.size, groups=experts, largest=largest)
    destinations, sources = sort_by_expert(chosen, experts, form.block)
    mine = chosen.reshape(-1, 1) == jnp.arange(experts, dtype=chosen.dtype)[None]
    counts = jnp.sum(mine, axis=0, dtype=jnp.int32)
    (out,) = grouped_products(dispatch(x, destinations, sources), (kernel,), counts=counts, form=form)
    return dispatch(out, sources[:, None], destinations.reshape(-1))
