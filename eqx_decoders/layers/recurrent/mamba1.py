"""Mamba (Gu & Dao 2023): a recurrence with a state vector per channel, each element of which has its own decay rate.

    S_t = e^(-exp(a_log) dt_t) S_{t-1} + (dt_t v_t) k_t^T,  o_t = S_t q_t + skip v_t

The paper calls k, q and v B, C and x. v is the output of a short convolution; k, q and dt are projections of v.
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
from eqx_decoders.layers.cache.recurrent_state import ChannelShape, ChannelUpdate, ConvShape, NewState
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.norm import RMSNorm, RMSNormConfig
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    convolve_channels,
    init_dt_bias,
    read_cache,
)
from eqx_decoders.layers.recurrent.scans.selective_scan import selective_scan_on_mesh
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba1Config(MixerConfig):
    """Configuration of the Mamba layer `out(o * silu(gate))`, where o is the recurrence's output.

    **Arguments:**

    - `channels`: features of a value (the paper's expanded dimension).
    - `key_dim`: features of a key and a query, the size of each channel's state (the paper's N).
    - `step_rank`: rank of the projection to dt (`dt_rank`).
    - `taps`: kernel size of the causal convolution.
    - `taps_bias`: whether the convolution has a bias.
    - `bias`: whether the input and the output projection have a bias.
    - `norm`: norm applied to keys, queries and the `step_rank` features of dt; None: no norm.
    """

    channels: PositiveInt
    key_dim: PositiveInt
    step_rank: PositiveInt
    taps: Annotated[int, AtLeast(2)] = 4
    taps_bias: bool = True
    bias: bool = False
    norm: RMSNormConfig | None = None

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name; they do not depend on `max_length`."""
        conv_state = ConvShape(num_inputs=self.taps - 1, channels=self.channels)
        return {"state": ChannelShape(key_dim=self.key_dim, channels=self.channels), "stream": conv_state}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads and writes its state once."""
        return 2 * self.channels * self.key_dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Mamba1":
        keys = jax.random.split(key, 6)
        channels, rank = self.channels, self.step_rank

        def norm(size: int) -> RMSNorm | None:
            return None if self.norm is None else self.norm.build(size)

        return Mamba1(
            inputs=fan_in(keys[0], (embed_dim, 2, channels), jnp.float32, embed_dim),
            inputs_bias=jnp.zeros((2, channels)) if self.bias else None,
            taps=fan_in(keys[1], (channels, self.taps), jnp.float32, self.taps),
            taps_bias=jnp.zeros((channels,)) if self.taps_bias else None,
            scan_inputs=fan_in(keys[2], (channels, rank + 2 * self.key_dim), jnp.float32, channels),
            step_norm=norm(rank),
            key_norm=norm(self.key_dim),
            query_norm=norm(self.key_dim),
            dt=fan_in(keys[3], (rank, channels), jnp.float32, rank),
            dt_bias=init_dt_bias(keys[4], channels),
            a_log=jnp.log(jnp.broadcast_to(jnp.arange(1.0, self.key_dim + 1), (channels, self.key_dim))),
            skip=jnp.ones((channels,)),
            out=fan_in(keys[5], (channels, embed_dim), jnp.float32, channels),
            out_bias=jnp.zeros((embed_dim,)) if self.bias else None,
            config=self,
        )


class Mamba1(RecurrentLayer):
    """Mamba layer `out(o * silu(gate))`, where o is the recurrence's output.

    `inputs` projects to values and gates, `scan_inputs` to the low-rank features of dt, keys and queries.
    """

    inputs: Float[Array, "embed inputs mlp"]
    inputs_bias: Float[Array, "inputs mlp"] | None
    taps: Float[Array, "mlp taps"]
    taps_bias: Float[Array, "mlp"] | None
    scan_inputs: Float[Array, "inner scan_inputs"]
    step_norm: RMSNorm | None
    key_norm: RMSNorm | None
    query_norm: RMSNorm | None
    dt: Float[Array, "gate_rank mlp"]
    dt_bias: Float[Array, "mlp"]
    a_log: Float[Array, "mlp key_dim"]
    skip: Float[Array, "mlp"]
    out: Float[Array, "mlp embed"]
    out_bias: Float[Array, "embed"] | None
    config: Mamba1Config = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        pattern = "batch length embed, embed inputs mlp -> batch length inputs mlp"
        projected = save(add_bias(ctx.einsum(pattern, x, self.inputs), self.inputs_bias), "qkv_proj")
        flat = ctx.constrain(projected[:, :, 0], "batch length channels")
        conv_state = read_cache(cache, "stream")
        convolved, conv_update = convolve_channels(flat, self.taps, self.taps_bias, conv_state, ctx)
        value = ctx.constrain(jax.nn.silu(convolved), "batch length mlp")
        steps, key, query = self._scan_inputs(value, ctx)
        written = steps * value.astype(jnp.float32)
        rates = -jnp.exp(self.a_log.astype(jnp.float32)).T
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        scan_out, state = selective_scan_on_mesh(
            steps, written, key, query, rates, state, starts, execution=ctx.execution
        )
        if ctx.accept_all:
            update = NewState(state=state)
        else:
            update = ChannelUpdate(steps=steps, written=written, key=key, rates=rates)
        scan_out = scan_out + self.skip.astype(jnp.float32)[None, None] * value.astype(jnp.float32)
        scan_out = save(ctx.constrain(scan_out.astype(x.dtype), "batch length mlp"), "attention_out")
        gated = scan_out * jax.nn.silu(projected[:, :, 1])
        out = add_bias(ctx.einsum("batch length mlp, mlp embed -> batch length embed", gated, self.out), self.out_bias)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), {"state": update, "stream": conv_update}

    def _scan_inputs(
        self, value: Float[Array, "batch length mlp"], ctx: ForwardContext
    ) -> tuple[
        Float32[Array, "batch length channels"],
        Float[Array, "batch length key_dim"],
        Float[Array, "batch length key_dim"],
    ]:
        """Compute step sizes `softplus(dt f + dt_bias)` (0 at padding), keys and queries."""
        rank = self.config.step_rank
        key_end = rank + self.config.key_dim
        pattern = "batch length inner, inner scan_inputs -> batch length scan_inputs"
        projected = ctx.einsum(pattern, value, self.scan_inputs)
        features, key, query = projected[..., :rank], projected[..., rank:key_end], projected[..., key_end:]
        if self.step_norm is not None and self.key_norm is not None and self.query_norm is not None:
            features, key, query = self.step_norm(features), self.key_norm(key), self.query_norm(query)
        steps = ctx.einsum("batch length gate_rank, gate_rank mlp -> batch length mlp", features, self.dt)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.dt_bias.astype(jnp.float32)[None, None])
        return ctx.constrain(zero_padding(steps, ctx.positions), "batch length channels"), key, query
