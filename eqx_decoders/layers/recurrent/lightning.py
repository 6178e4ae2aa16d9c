"""Lightning attention (Qin et al. 2024; MiniMax-Text-01): linear attention whose heads forget at fixed rates.

    S_t = e^(-r) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t

q, k and v pass a SiLU. The rate r of head h = 1, 2, … of H is 2^(-8 h / H), less in later layers: a buffer.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.recurrent_state import StateShape
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.layers.recurrent.causal_conv import document_starts
from eqx_decoders.layers.recurrent.common import read_cache, state_update, zero_padding
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightningAttentionConfig(MixerConfig):
    """Configuration of `out(norm(o) * sigmoid(gate x))`, o being what the states answer to queries.

    **Arguments:**

    - `num_heads`, `head_dim`: heads, and features of queries, keys and values.
    - `norm`: normalization of the answers of all heads together.
    - `rate_layers`: layers from the first of which to the last the rates of a new model fall to nearly zero.
    """

    built_by_layer: ClassVar[bool] = True

    num_heads: PositiveInt
    head_dim: PositiveInt
    norm: RMSNormConfig = RMSNormConfig()
    rate_layers: PositiveInt = 1

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state."""
        return StateShape(heads=self.num_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shape of the cache: a state, whatever the length."""
        return {"state": self.state}

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the state, which is read once and written once."""
        return 2 * self.num_heads * self.head_dim**2

    def rates(self, layer: int | Int[Array, ""]) -> Float32[Array, "heads"]:
        """Return the rates of a new layer, by its number from 0: `2^(-8 h / H) (1 - layer / (layers - 1) + 1e-5)`."""
        first = jnp.exp2(-8.0 / self.num_heads * jnp.arange(1.0, self.num_heads + 1.0))
        last = self.rate_layers - 1
        share = (jnp.asarray(last - layer, jnp.float32) + 1e-5) / (
            last + 1e-5
        ) + 1e-5  # 1 - layer / (last + 1e-5) + 1e-5
        return first * jnp.maximum(share, 1e-5)[None]  # of layers beyond those, too

    def build(self, embed_dim: int, *, key: PRNGKeyArray, layer: int | Int[Array, ""] = 0) -> "LightningAttention":
        keys, heads = jax.random.split(key, 5), (self.num_heads, self.head_dim)
        query, key_, value, gate = (
            fan_in(each, (embed_dim, *heads), jnp.float32, embed_dim, "normal") for each in keys[:4]
        )
        return LightningAttention(
            query=query,
            key=key_,
            value=value,
            gate=gate,
            rates=self.rates(layer),
            norm=self.norm.build(self.num_heads * self.head_dim),
            out=fan_in(keys[4], (*heads, embed_dim), jnp.float32, self.num_heads * self.head_dim, "normal"),
            config=self,
        )


class LightningAttention(eqx.Module):
    """Lightning attention `out(norm(o) * sigmoid(gate x))`; `rates` are those at which its heads forget."""

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed heads head_dim"]
    value: Float[Array, "embed heads head_dim"]
    gate: Float[Array, "embed heads head_dim"]
    rates: Float[Array, "heads"] = eqx.field(metadata=BUFFER)
    norm: Norm
    out: Float[Array, "heads head_dim embed"]
    config: LightningAttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the new entries of its state."""
        query, key, value = (
            save(jax.nn.silu(self._heads(x, weight, ctx)), name)
            for name, weight in (("query_proj", self.query), ("key_proj", self.key), ("value_proj", self.value))
        )
        query, key = query.astype(jnp.float32), zero_padding(key.astype(jnp.float32), ctx.positions)
        rates = jnp.maximum(self.rates.astype(jnp.float32), 0.0)  # states never grow
        rates = jnp.broadcast_to(rates, (*x.shape[:2], self.config.num_heads))
        log_decay = zero_padding(-rates, ctx.positions)[..., None]
        starts, state = document_starts(ctx.positions, ctx.segment_ids), read_cache(past, "state")
        inputs = query, key, value, log_decay, None, state, starts
        answer, written, state = recur_on_mesh(*inputs, execution=ctx.execution)
        entries = {"state": state_update(self.config.state, log_decay, key, written, state, ctx)}
        answer = save(ctx.constrain(answer, "batch length heads head_dim"), "attention_out")
        normed = self.norm(answer.reshape(*answer.shape[:2], -1)).reshape(answer.shape)
        gated = normed * jax.nn.sigmoid(self._heads(x, self.gate, ctx))
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), entries

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _heads(self, x: Array, weight: Array, ctx: ForwardContext) -> Float[Array, "batch length heads head_dim"]:
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        return ctx.constrain(ctx.einsum(pattern, x, weight), "batch length heads head_dim")
