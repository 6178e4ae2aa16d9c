"""Gated delta net (Yang et al. 2025; Qwen3-Next): a recurrence that corrects what its state answers to a key.

    S_t = e^(g_t) S_{t-1} + k_t u_t^T,  u_t = beta_t (v_t - e^(g_t) S_{t-1}^T k_t),  o_t = S_t^T q_t

g and beta are numbers of a token and a head; q, k and v come from short convolutions.
"""

import dataclasses
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt, check
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.recurrent_state import StateShape
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.layers.recurrent.causal_conv import document_starts
from eqx_decoders.layers.recurrent.common import (
    cache_shapes,
    l2_normalize,
    project_and_convolve,
    read_cache,
    state_update,
    zero_padding,
)
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(MixerConfig):
    """Configuration of `out(norm(o) * silu(gate x))`, o being the recurrence's answer to queries.

    **Arguments:**

    - `num_key_heads`, `num_heads`: heads of queries and keys; of values and states, a multiple: each key head serves
        `num_heads / num_key_heads` consecutive ones.
    - `key_dim`, `value_dim`: features of a key and of a value.
    - `taps`: tokens that the convolutions see, the last among them.
    - `norm`: normalization of each head's answer.
    - `negative_eigenvalues`: whether beta is twice a sigmoid: above 1 the factor `1 - beta` of the state along a key is
        negative (Grazzi et al. 2025; Olmo Hybrid).
    - `gate_activation`: of the gate, `"silu"` or `"sigmoid"` (Qwen 4).
    """

    num_key_heads: PositiveInt
    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    taps: Annotated[int, AtLeast(2)] = 4
    norm: RMSNormConfig = RMSNormConfig()
    negative_eigenvalues: bool = False
    gate_activation: Literal["silu", "sigmoid"] = "silu"

    def __post_init__(self):
        super().__post_init__()
        rule = f"must be a multiple of num_key_heads={self.num_key_heads}"
        check(self.num_heads % self.num_key_heads == 0, f"GatedDeltaNetConfig.num_heads={self.num_heads} {rule}.")

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state."""
        return StateShape(heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the cache: a state, and the last inputs of the convolutions, whatever the length."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return cache_shapes(self.state, self.taps, query=keys, key=keys, value=values)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the state, which is read twice and written once."""
        return 3 * self.num_heads * self.key_dim * self.value_dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "GatedDeltaNet":
        keys, heads = jax.random.split(key, 11), (self.num_heads, self.value_dim)
        key_heads = (self.num_key_heads, self.key_dim)

        def into(key, *shape):
            return fan_in(key, (embed_dim, *shape), jnp.float32, embed_dim, "normal")

        def taps(key, *shape):
            return fan_in(key, (*shape, self.taps), jnp.float32, self.taps)

        rates = jax.random.uniform(keys[9], (self.num_heads,), minval=0.01, maxval=16.0)
        return GatedDeltaNet(
            query=into(keys[0], *key_heads),
            key=into(keys[1], *key_heads),
            value=into(keys[2], *heads),
            gate=into(keys[3], *heads),
            beta=into(keys[4], self.num_heads),
            dt=into(keys[5], self.num_heads),
            query_taps=taps(keys[6], *key_heads),
            key_taps=taps(keys[7], *key_heads),
            value_taps=taps(keys[8], *heads),
            a_log=jnp.log(rates),
            dt_bias=jnp.ones((self.num_heads,)),
            norm=self.norm.build(self.value_dim),
            out=fan_in(keys[10], (*heads, embed_dim), jnp.float32, heads[0] * heads[1], "normal"),
            config=self,
        )


class GatedDeltaNet(eqx.Module):
    """Gated delta net `out(norm(o) * silu(gate x))`, o being the recurrence's answer to queries."""

    query: Float[Array, "embed key_heads key_dim"]
    key: Float[Array, "embed key_heads key_dim"]
    value: Float[Array, "embed heads value_dim"]
    gate: Float[Array, "embed heads value_dim"]
    beta: Float[Array, "embed heads"]
    dt: Float[Array, "embed heads"]
    query_taps: Float[Array, "key_heads key_dim taps"]
    key_taps: Float[Array, "key_heads key_dim taps"]
    value_taps: Float[Array, "heads value_dim taps"]
    a_log: Float[Array, "heads"]
    dt_bias: Float[Array, "heads"]
    norm: Norm
    out: Float[Array, "heads value_dim embed"]
    config: GatedDeltaNetConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and new entries for its state and for the tails of its convolutions."""
        config, keys = self.config, "key_heads key_dim"
        streams, entries = project_and_convolve(self, x, dict(query=keys, key=keys, value="heads value_dim"), past, ctx)
        query, key = (
            l2_normalize(streams["query"]) * config.key_dim**-0.5,
            zero_padding(l2_normalize(streams["key"]), ctx.positions),
        )
        log_decay, beta = self._decay_and_beta(x, ctx)
        starts, state = document_starts(ctx.positions, ctx.segment_ids), read_cache(past, "state")
        inputs = query, key, streams["value"], log_decay, beta, state, starts
        answer, written, state = recur_on_mesh(*inputs, execution=ctx.execution)
        entries["state"] = state_update(config.state, log_decay, key, written, state, ctx)
        answer = save(ctx.constrain(answer, "batch length heads value_dim"), "attention_out")
        pattern = "batch length embed, embed heads value_dim -> batch length heads value_dim"
        gate = ctx.einsum(pattern, x, self.gate).astype(jnp.float32)
        gate = jax.nn.sigmoid(gate) if config.gate_activation == "sigmoid" else jax.nn.silu(gate)
        gated = (self.norm(answer).astype(jnp.float32) * gate).astype(x.dtype)
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), entries

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _decay_and_beta(
        self, x: Array, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads 1"], Float32[Array, "batch length heads"]]:
        """Compute `g = -exp(a_log) softplus(dt x + dt_bias)`, and the written share of a correction; 0 at padding."""
        pattern = "batch length embed, embed heads -> batch length heads"
        dt, beta = (ctx.einsum(pattern, x, weight).astype(jnp.float32) for weight in (self.dt, self.beta))
        a_log, dt_bias = (each.astype(jnp.float32)[None, None] for each in (self.a_log, self.dt_bias))
        log_decay = zero_padding(-jnp.exp(a_log) * jax.nn.softplus(dt + dt_bias), ctx.positions)
        share = jax.nn.sigmoid(beta) * (2.0 if self.config.negative_eigenvalues else 1.0)
        return log_decay[..., None], zero_padding(share, ctx.positions)
