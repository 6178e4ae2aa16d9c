"""Kimi delta attention (Kimi Linear, 2025): the gated delta rule with a separate decay for each key feature.

    S_t = Diag(e^(g_t)) S_{t-1} + k_t u_t^T,  u_t = beta_t (v_t - (Diag(e^(g_t)) S_{t-1})^T k_t),  o_t = S_t^T q_t

q, k and v are outputs of short convolutions. g and the output gate are computed by low-rank projections.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import StateShape
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    cache_shapes,
    init_dt_bias,
    l2_normalize,
    project_and_convolve,
    read_cache,
    state_update,
)
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDeltaAttentionConfig(MixerConfig):
    """Configuration of Kimi delta attention `out(norm(o) * sigmoid(gate x))`, where o is the recurrence's output.

    **Arguments:**

    - `num_heads`, `head_dim`: number of heads, and features of a query, key and value per head.
    - `gate_rank`: rank of the projections to decays and to the output gate.
    - `taps`: kernel size of the causal convolutions.
    - `norm`: norm of each head's recurrence output.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    gate_rank: PositiveInt
    taps: Annotated[int, AtLeast(2)] = 4
    norm: RMSNormConfig = RMSNormConfig()

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state."""
        return StateShape(heads=self.num_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name; they do not depend on `max_length`."""
        channels = self.num_heads * self.head_dim
        return cache_shapes(self.state, self.taps, query=channels, key=channels, value=channels)

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads its state twice and writes it once."""
        return 3 * self.num_heads * self.head_dim**2

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "KimiDeltaAttention":
        keys = jax.random.split(key, 14)
        heads = (self.num_heads, self.head_dim)
        rank = self.gate_rank

        def projection(key, fan, *shape):
            return fan_in(key, shape, jnp.float32, fan, "normal")

        def conv_kernel(key):
            return fan_in(key, (*heads, self.taps), jnp.float32, self.taps)

        rates = jax.random.uniform(keys[12], (self.num_heads,), minval=1.0, maxval=16.0)
        return KimiDeltaAttention(
            query=projection(keys[0], embed_dim, embed_dim, *heads),
            key=projection(keys[1], embed_dim, embed_dim, *heads),
            value=projection(keys[2], embed_dim, embed_dim, *heads),
            query_taps=conv_kernel(keys[3]),
            key_taps=conv_kernel(keys[4]),
            value_taps=conv_kernel(keys[5]),
            dt_down=projection(keys[6], embed_dim, embed_dim, rank),
            dt_up=projection(keys[7], rank, rank, *heads),
            gate_down=projection(keys[8], embed_dim, embed_dim, rank),
            gate_up=projection(keys[9], rank, rank, *heads),
            beta=projection(keys[10], embed_dim, embed_dim, self.num_heads),
            a_log=jnp.log(rates),
            dt_bias=init_dt_bias(keys[11], *heads),
            norm=self.norm.build(self.head_dim),
            out=projection(keys[13], heads[0] * heads[1], *heads, embed_dim),
            config=self,
        )


class KimiDeltaAttention(RecurrentLayer):
    """Kimi delta attention `out(norm(o) * sigmoid(gate x))`, where o is the recurrence's output."""

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed heads head_dim"]
    value: Float[Array, "embed heads head_dim"]
    query_taps: Float[Array, "heads head_dim taps"]
    key_taps: Float[Array, "heads head_dim taps"]
    value_taps: Float[Array, "heads head_dim taps"]
    dt_down: Float[Array, "embed gate_rank"]
    dt_up: Float[Array, "gate_rank heads head_dim"]
    gate_down: Float[Array, "embed gate_rank"]
    gate_up: Float[Array, "gate_rank heads head_dim"]
    beta: Float[Array, "embed heads"]
    a_log: Float[Array, "heads"]
    dt_bias: Float[Array, "heads head_dim"]
    norm: Norm
    out: Float[Array, "heads head_dim embed"]
    config: KimiDeltaAttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        axes: dict[str, str] = dict.fromkeys(("query", "key", "value"), "heads head_dim")
        streams, updates = project_and_convolve(self, x, axes, cache, ctx)
        query = l2_normalize(streams["query"]) * self.config.head_dim**-0.5
        key = zero_padding(l2_normalize(streams["key"]), ctx.positions)
        log_decay, beta = self._decay_and_beta(x, ctx)
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        scan_out, written, state = recur_on_mesh(
            query, key, streams["value"], log_decay, beta, state, starts, execution=ctx.execution
        )
        updates["state"] = state_update(self.config.state, log_decay, key, written, state, ctx)
        scan_out = save(ctx.constrain(scan_out, "batch length heads head_dim"), "attention_out")
        gate = jax.nn.sigmoid(self._low_rank(x, self.gate_down, self.gate_up, ctx).astype(jnp.float32))
        gated = (self.norm(scan_out.astype(jnp.float32)) * gate).astype(x.dtype)
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), updates

    def _low_rank(
        self, x: Array, down: Array, up: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length heads head_dim"]:
        low = ctx.einsum("batch length embed, embed gate_rank -> batch length gate_rank", x, down)
        return ctx.einsum("batch length gate_rank, gate_rank heads head_dim -> batch length heads head_dim", low, up)

    def _decay_and_beta(
        self, x: Array, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads head_dim"], Float32[Array, "batch length heads"]]:
        """Compute `g = -exp(a_log) softplus(dt x + dt_bias)` and `beta = sigmoid(W_beta x)`; both are 0 at padding."""
        dt = self._low_rank(x, self.dt_down, self.dt_up, ctx).astype(jnp.float32)
        rate = jnp.exp(self.a_log.astype(jnp.float32))[None, None, :, None]
        log_decay = -rate * jax.nn.softplus(dt + self.dt_bias.astype(jnp.float32)[None, None])
        beta = ctx.einsum("batch length embed, embed heads -> batch length heads", x, self.beta).astype(jnp.float32)
        return zero_padding(log_decay, ctx.positions), zero_padding(jax.nn.sigmoid(beta), ctx.positions)
