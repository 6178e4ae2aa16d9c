"""Lightning attention (Qin et al. 2024; MiniMax-Text-01): linear attention with a fixed decay rate per head.

    S_t = e^(-r) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t

SiLU is applied to q, k and v. The decay rate r of head h = 1, …, H is 2^(-8 h / H) in the first layer, and falls with
the layer index. Rates are buffers: they are stored with the weights, but not trained by default.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import StateShape
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.layers.recurrent.common import RecurrentLayer, read_cache, state_update
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightningAttentionConfig(MixerConfig):
    """Configuration of lightning attention `out(norm(o) * sigmoid(gate x))`, where o is the recurrence's output.

    **Arguments:**

    - `num_heads`, `head_dim`: number of heads, and features of a query, key and value per head.
    - `norm`: norm over the recurrence outputs of all heads together.
    - `rate_layers`: number of layers over which initial decay rates fall linearly, from full rates in layer 0 to
        nearly zero in layer `rate_layers - 1`.
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
        """Return the cache shapes by name; they do not depend on `max_length`."""
        return {"state": self.state}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads and writes its state once."""
        return 2 * self.num_heads * self.head_dim**2

    def rates(self, layer: int | Int[Array, ""]) -> Float32[Array, "heads"]:
        """Return the initial decay rates of a layer.

        These are `2^(-8 h / H) * (1 - layer / (rate_layers - 1 + 1e-5) + 1e-5)` for the layer with index `layer`,
        counted from 0. Layers after the first `rate_layers` get the factor 1e-5.
        """
        first = jnp.exp2(-8.0 / self.num_heads * jnp.arange(1.0, self.num_heads + 1.0))
        last = self.rate_layers - 1
        # equals 1 - layer / (last + 1e-5) + 1e-5
        factor = (jnp.asarray(last - layer, jnp.float32) + 1e-5) / (last + 1e-5) + 1e-5
        return first * jnp.maximum(factor, 1e-5)[None]

    def build(self, embed_dim: int, *, key: PRNGKeyArray, layer: int | Int[Array, ""] = 0) -> "LightningAttention":
        keys = jax.random.split(key, 5)
        heads = (self.num_heads, self.head_dim)

        def projection(key: PRNGKeyArray) -> Array:
            return fan_in(key, (embed_dim, *heads), jnp.float32, embed_dim, "normal")

        return LightningAttention(
            query=projection(keys[0]),
            key=projection(keys[1]),
            value=projection(keys[2]),
            gate=projection(keys[3]),
            rates=self.rates(layer),
            norm=self.norm.build(self.num_heads * self.head_dim),
            out=fan_in(keys[4], (*heads, embed_dim), jnp.float32, self.num_heads * self.head_dim, "normal"),
            config=self,
        )


class LightningAttention(RecurrentLayer):
    """Lightning attention `out(norm(o) * sigmoid(gate x))`, where o is the recurrence's output.

    `rates` holds the decay rate of each head.
    """

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed heads head_dim"]
    value: Float[Array, "embed heads head_dim"]
    gate: Float[Array, "embed heads head_dim"]
    rates: Float[Array, "heads"] = eqx.field(metadata=BUFFER)
    norm: Norm
    out: Float[Array, "heads head_dim embed"]
    config: LightningAttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        query, key, value = (
            save(jax.nn.silu(self._project(x, weight, ctx)), name)
            for name, weight in (("query_proj", self.query), ("key_proj", self.key), ("value_proj", self.value))
        )
        query = query.astype(jnp.float32)
        key = zero_padding(key.astype(jnp.float32), ctx.positions)
        rates = jnp.maximum(self.rates.astype(jnp.float32), 0.0)  # a negative rate would make the state grow
        rates = jnp.broadcast_to(rates, (*x.shape[:2], self.config.num_heads))
        log_decay = zero_padding(-rates, ctx.positions)[..., None]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        scan_out, written, state = recur_on_mesh(
            query, key, value, log_decay, None, state, starts, execution=ctx.execution
        )
        updates = {"state": state_update(self.config.state, log_decay, key, written, state, ctx)}
        scan_out = save(ctx.constrain(scan_out, "batch length heads head_dim"), "attention_out")
        normed = self.norm(scan_out.reshape(*scan_out.shape[:2], -1)).reshape(scan_out.shape)
        gated = normed * jax.nn.sigmoid(self._project(x, self.gate, ctx))
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), updates

    def _project(self, x: Array, weight: Array, ctx: ForwardContext) -> Float[Array, "batch length heads head_dim"]:
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        return ctx.constrain(ctx.einsum(pattern, x, weight), "batch length heads head_dim")
