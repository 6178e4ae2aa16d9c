"""Gated DeltaNet (Yang et al. 2025; Qwen3-Next): each token corrects the value that the state returns for its key.

    S_t = e^(g_t) S_{t-1} + k_t u_t^T,  u_t = beta_t (v_t - e^(g_t) S_{t-1}^T k_t),  o_t = S_t^T q_t

g and beta are scalars per token and head. q, k and v are outputs of short convolutions.
"""

import dataclasses
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt, check
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import StateShape
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    cache_shapes,
    l2_normalize,
    project_and_convolve,
    read_cache,
    state_update,
)
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(MixerConfig):
    """Configuration of Gated DeltaNet `out(norm(o) * act(gate x))`, where o is the recurrence's output.

    **Arguments:**

    - `num_key_heads`: number of query and key heads.
    - `num_heads`: number of value heads, each with a state. Each key head serves `num_heads / num_key_heads`
        consecutive value heads.
    - `key_dim`, `value_dim`: features of a key and of a value.
    - `taps`: kernel size of the causal convolutions.
    - `norm`: norm of each head's recurrence output.
    - `negative_eigenvalues`: whether beta ranges over (0, 2) instead of (0, 1). Above 1, the factor `1 - beta` of the
        state along a key is negative (Grazzi et al. 2025; Olmo Hybrid).
    - `gate_activation`: activation of the gate, `"silu"` or `"sigmoid"` (Qwen 4).
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
        check(
            self.num_heads % self.num_key_heads == 0,
            f"GatedDeltaNetConfig.num_heads={self.num_heads} must be a multiple of num_key_heads={self.num_key_heads}.",
        )

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state."""
        return StateShape(heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name; they do not depend on `max_length`."""
        key_channels = self.num_key_heads * self.key_dim
        value_channels = self.num_heads * self.value_dim
        return cache_shapes(self.state, self.taps, query=key_channels, key=key_channels, value=value_channels)

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads its state twice and writes it once."""
        return 3 * self.num_heads * self.key_dim * self.value_dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "GatedDeltaNet":
        keys = jax.random.split(key, 11)
        heads = (self.num_heads, self.value_dim)
        key_heads = (self.num_key_heads, self.key_dim)

        def projection(key, *shape):
            return fan_in(key, (embed_dim, *shape), jnp.float32, embed_dim, "normal")

        def conv_kernel(key, *shape):
            return fan_in(key, (*shape, self.taps), jnp.float32, self.taps)

        rates = jax.random.uniform(keys[9], (self.num_heads,), minval=0.01, maxval=16.0)
        return GatedDeltaNet(
            query=projection(keys[0], *key_heads),
            key=projection(keys[1], *key_heads),
            value=projection(keys[2], *heads),
            gate=projection(keys[3], *heads),
            beta=projection(keys[4], self.num_heads),
            dt=projection(keys[5], self.num_heads),
            query_taps=conv_kernel(keys[6], *key_heads),
            key_taps=conv_kernel(keys[7], *key_heads),
            value_taps=conv_kernel(keys[8], *heads),
            a_log=jnp.log(rates),
            dt_bias=jnp.ones((self.num_heads,)),
            norm=self.norm.build(self.value_dim),
            out=fan_in(keys[10], (*heads, embed_dim), jnp.float32, heads[0] * heads[1], "normal"),
            config=self,
        )


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet `out(norm(o) * act(gate x))`, where o is the recurrence's output."""

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
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        config = self.config
        axes = dict(query="key_heads key_dim", key="key_heads key_dim", value="heads value_dim")
        streams, updates = project_and_convolve(self, x, axes, cache, ctx)
        query = l2_normalize(streams["query"]) * config.key_dim**-0.5
        key = zero_padding(l2_normalize(streams["key"]), ctx.positions)
        log_decay, beta = self._decay_and_beta(x, ctx)
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        scan_out, written, state = recur_on_mesh(
            query, key, streams["value"], log_decay, beta, state, starts, execution=ctx.execution
        )
        updates["state"] = state_update(config.state, log_decay, key, written, state, ctx)
        scan_out = save(ctx.constrain(scan_out, "batch length heads value_dim"), "attention_out")
        pattern = "batch length embed, embed heads value_dim -> batch length heads value_dim"
        gate = ctx.einsum(pattern, x, self.gate).astype(jnp.float32)
        gate = jax.nn.sigmoid(gate) if config.gate_activation == "sigmoid" else jax.nn.silu(gate)
        gated = (self.norm(scan_out).astype(jnp.float32) * gate).astype(x.dtype)
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), updates

    def _decay_and_beta(
        self, x: Array, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads 1"], Float32[Array, "batch length heads"]]:
        """Compute `g = -exp(a_log) softplus(dt x + dt_bias)` and beta; both are 0 at padding."""
        pattern = "batch length embed, embed heads -> batch length heads"
        dt, beta = (ctx.einsum(pattern, x, weight).astype(jnp.float32) for weight in (self.dt, self.beta))
        a_log, dt_bias = (weight.astype(jnp.float32)[None, None] for weight in (self.a_log, self.dt_bias))
        log_decay = zero_padding(-jnp.exp(a_log) * jax.nn.softplus(dt + dt_bias), ctx.positions)
        beta = jax.nn.sigmoid(beta) * (2.0 if self.config.negative_eigenvalues else 1.0)
        return log_decay[..., None], zero_padding(beta, ctx.positions)
