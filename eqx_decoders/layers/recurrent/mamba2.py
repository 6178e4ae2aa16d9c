"""Mamba-2 (Dao & Gu 2024): a linear recurrence with one decay per head, and keys and queries shared by groups of heads.

    S_t = e^(-exp(a_log) dt_t) S_{t-1} + k_t (dt_t v_t)^T,  o_t = S_t^T q_t + skip v_t

The paper calls k, q and v B, C and x. All three are outputs of short convolutions. dt is a scalar per token and head.
"""

import dataclasses
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import (
    AtLeast,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check,
    check_number,
)
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import StateShape
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    cache_shapes,
    init_dt_bias,
    project_and_convolve,
    read_cache,
    state_update,
)
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.einsum import add_bias, scale
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerConfig):
    """Configuration of the Mamba-2 layer `out(norm(o * silu(gate x)))`, where o is the recurrence's output.

    **Arguments:**

    - `num_heads`, `value_dim`: number of heads, and features per head.
    - `num_groups`: number of keys and queries per token (the paper's groups). Each serves `num_heads / num_groups`
        consecutive heads, and the norm is computed over the features of these heads together.
    - `key_dim`: features of a key and a query (the paper's state size N).
    - `taps`: kernel size of the causal convolutions.
    - `taps_bias`: whether the convolutions have a bias.
    - `dt_min`, `dt_max`: bounds to which dt is clipped; `dt_max=None`: no upper bound.
    - `norm`: `"after_gate"`: `norm(o * silu(gate x))`; `"before_gate"`: `norm(o) * silu(gate x)`; None: no norm
        (Falcon-H1).
    - `eps`: epsilon of the norm.
    - `in_bias`: whether the projections to gates, values, keys, queries and dt have biases.
    - `out_bias`: whether the output projection has a bias.
    - `in_scales`: five factors that multiply the projected gates, values, keys, queries and dt, in this order
        (Falcon-H1).
    """

    num_heads: PositiveInt
    value_dim: PositiveInt
    num_groups: PositiveInt
    key_dim: PositiveInt
    taps: Annotated[int, AtLeast(2)] = 4
    taps_bias: bool = True
    dt_min: NonNegativeFloat = 0.0
    dt_max: float | None = None
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    eps: PositiveFloat = 1e-5
    in_bias: bool = False
    out_bias: bool = False
    in_scales: tuple[PositiveFloat, ...] = (1.0,) * 5

    def __post_init__(self):
        super().__post_init__()
        check(
            self.num_heads % self.num_groups == 0,
            f"Mamba2Config.num_heads={self.num_heads} must be a multiple of num_groups={self.num_groups}.",
        )
        check(
            len(self.in_scales) == 5,
            f"Mamba2Config.in_scales={self.in_scales} must have 5 elements: for gates, values, keys, queries and dt.",
        )
        if self.dt_max is not None:
            check_number("Mamba2Config.dt_max", self.dt_max, above=self.dt_min)

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state S."""
        return StateShape(heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name; they do not depend on `max_length`."""
        key_channels = self.num_groups * self.key_dim
        value_channels = self.num_heads * self.value_dim
        return cache_shapes(self.state, self.taps, query=key_channels, key=key_channels, value=value_channels)

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads and writes its state once."""
        return 2 * self.num_heads * self.key_dim * self.value_dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Mamba2":
        keys = jax.random.split(key, 11)
        heads = self.num_heads, self.value_dim
        groups = self.num_groups, self.key_dim

        def projection(key, *shape):
            return fan_in(key, (embed_dim, *shape), jnp.float32, embed_dim, "normal")

        def conv_kernel(key, *shape):
            return fan_in(key, (*shape, self.taps), jnp.float32, self.taps)

        def zeros(has_bias, *shape):
            return jnp.zeros(shape) if has_bias else None

        rates = jax.random.uniform(keys[9], (self.num_heads,), minval=1.0, maxval=16.0)
        return Mamba2(
            gate=projection(keys[0], *heads),
            value=projection(keys[1], *heads),
            key=projection(keys[2], *groups),
            query=projection(keys[3], *groups),
            dt=projection(keys[4], self.num_heads),
            value_taps=conv_kernel(keys[5], *heads),
            key_taps=conv_kernel(keys[6], *groups),
            query_taps=conv_kernel(keys[7], *groups),
            gate_bias=zeros(self.in_bias, *heads),
            value_bias=zeros(self.in_bias, *heads),
            key_bias=zeros(self.in_bias, *groups),
            query_bias=zeros(self.in_bias, *groups),
            dt_in_bias=zeros(self.in_bias, self.num_heads),
            value_taps_bias=zeros(self.taps_bias, *heads),
            key_taps_bias=zeros(self.taps_bias, *groups),
            query_taps_bias=zeros(self.taps_bias, *groups),
            a_log=jnp.log(rates),
            dt_bias=init_dt_bias(keys[8], self.num_heads),
            skip=jnp.ones((self.num_heads,)),
            norm_scale=None if self.norm is None else jnp.ones(heads),
            out=fan_in(keys[10], (*heads, embed_dim), jnp.float32, heads[0] * heads[1], "normal"),
            out_bias=zeros(self.out_bias, embed_dim),
            config=self,
        )


class Mamba2(RecurrentLayer):
    """Mamba-2 layer `out(norm(o * silu(gate x)))`, where o is the recurrence's output.

    `gate_bias`, `value_bias`, `key_bias`, `query_bias` and `dt_in_bias` are biases of the input projections, and
    `value_taps_bias`, `key_taps_bias` and `query_taps_bias` biases of the convolutions after them. The step size is
    `dt = softplus(in_scales[4] * (W_dt x + dt_in_bias) + dt_bias)`.
    """

    gate: Float[Array, "embed heads value_dim"]
    value: Float[Array, "embed heads value_dim"]
    key: Float[Array, "embed key_heads key_dim"]
    query: Float[Array, "embed key_heads key_dim"]
    dt: Float[Array, "embed heads"]
    gate_bias: Float[Array, "heads value_dim"] | None
    value_bias: Float[Array, "heads value_dim"] | None
    key_bias: Float[Array, "key_heads key_dim"] | None
    query_bias: Float[Array, "key_heads key_dim"] | None
    dt_in_bias: Float[Array, "heads"] | None
    value_taps: Float[Array, "heads value_dim taps"]
    key_taps: Float[Array, "key_heads key_dim taps"]
    query_taps: Float[Array, "key_heads key_dim taps"]
    value_taps_bias: Float[Array, "heads value_dim"] | None
    key_taps_bias: Float[Array, "key_heads key_dim"] | None
    query_taps_bias: Float[Array, "key_heads key_dim"] | None
    a_log: Float[Array, "heads"]
    dt_bias: Float[Array, "heads"]
    skip: Float[Array, "heads"]
    norm_scale: Float[Array, "heads value_dim"] | None
    out: Float[Array, "heads value_dim embed"]
    out_bias: Float[Array, "embed"] | None
    config: Mamba2Config = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        axes = dict(value="heads value_dim", key="key_heads key_dim", query="key_heads key_dim")
        _, value_scale, key_scale, query_scale, _ = self.config.in_scales
        scales = dict(value=value_scale, key=key_scale, query=query_scale)
        streams, updates = project_and_convolve(self, x, axes, cache, ctx, scales)
        value = streams["value"].astype(jnp.float32)
        dt = self._dt(x, ctx)
        key = zero_padding(streams["key"].astype(jnp.float32), ctx.positions)
        written = dt[..., None] * value
        log_decay = (-jnp.exp(self.a_log.astype(jnp.float32))[None, None] * dt)[..., None]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        query = streams["query"].astype(jnp.float32)
        scan_out, _, state = recur_on_mesh(query, key, written, log_decay, None, state, starts, execution=ctx.execution)
        updates["state"] = state_update(self.config.state, log_decay, key, written, state, ctx)
        scan_out = scan_out + self.skip.astype(jnp.float32)[None, None, :, None] * value
        scan_out = save(ctx.constrain(scan_out.astype(x.dtype), "batch length heads value_dim"), "attention_out")
        gated = self._gated(scan_out, x, ctx)
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj"), updates

    def _dt(self, x: Array, ctx: ForwardContext) -> Float32[Array, "batch length heads"]:
        """Compute `clip(softplus(scale * (dt x + dt_in_bias) + dt_bias))`, and 0 at padding."""
        dt = add_bias(ctx.einsum("batch length embed, embed heads -> batch length heads", x, self.dt), self.dt_in_bias)
        dt = scale(dt, self.config.in_scales[4]).astype(jnp.float32)
        dt = jax.nn.softplus(dt + self.dt_bias.astype(jnp.float32)[None, None])
        return zero_padding(jnp.clip(dt, self.config.dt_min, self.config.dt_max), ctx.positions)

    def _gated(self, scan_out: Array, x: Array, ctx: ForwardContext) -> Float[Array, "batch length heads value_dim"]:
        """Compute `norm(o * silu(gate x))`; the norm comes before the gate, or is absent, as configured."""
        pattern = "batch length embed, embed heads value_dim -> batch length heads value_dim"
        gate = scale(add_bias(ctx.einsum(pattern, x, self.gate), self.gate_bias), self.config.in_scales[0])
        gate = jax.nn.silu(gate.astype(jnp.float32))
        y = scan_out.astype(jnp.float32)
        y = self._normalize(y) * gate if self.config.norm == "before_gate" else self._normalize(y * gate)
        return y.astype(x.dtype)

    def _normalize(
        self, y: Float32[Array, "batch length heads value_dim"]
    ) -> Float32[Array, "batch length heads value_dim"]:
        """Apply RMS norm over all features of the heads that share a key; without a norm return `y`."""
        if self.norm_scale is None:
            return y
        grouped = y.reshape(*y.shape[:2], self.config.num_groups, -1)
        grouped *= jax.lax.rsqrt(jnp.mean(grouped * grouped, axis=-1, keepdims=True) + self.config.eps)
        return grouped.reshape(y.shape) * self.norm_scale.astype(jnp.float32)[None, None]
