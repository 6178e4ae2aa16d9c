"""Real-gated linear recurrent unit (RG-LRU; De et al. 2024): one number for each channel, which decays by gates.

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t v_t),    a_t = exp(-8 r_t softplus(decay))

v comes from a short convolution, and the gates i and r are made from v by a matrix for each head. The first token of a
document has a = 0 and the factor 1. This is Mamba's recurrence with steps r and a single number as the key.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ChannelShape, ChannelUpdate, ConvShape, NewState
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.recurrent.causal_conv import document_starts
from eqx_decoders.layers.recurrent.common import convolve_heads, read_cache, zero_padding
from eqx_decoders.layers.recurrent.scans.selective_scan import scan_on_mesh
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_STRENGTH = 8.0  # of the decay: the paper's c
_STEEPEST = 1000.0  # slope of the root, which has no bound where a channel keeps all


@dataclasses.dataclass(frozen=True, kw_only=True)
class RGLRUConfig(MixerConfig):
    """Configuration of `out(h * act(gate x))`, h being the recurrence's output.

    **Arguments:**

    - `num_heads`, `value_dim`: heads, and channels of each: gates of a channel are made from those of its head.
    - `taps`: tokens that the convolution sees, the last among them.
    - `activation`: of the output's gate, one of `layers.mlp.ACTIVATIONS`.
    """

    num_heads: PositiveInt
    value_dim: PositiveInt
    taps: Annotated[int, AtLeast(2)] = 4
    activation: ActivationName = "gelu_tanh"

    @property
    def channels(self) -> int:
        """Number of channels of all heads."""
        return self.num_heads * self.value_dim

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the cache: a state, and the last inputs of the convolution, whatever the length."""
        stream = ConvShape(taps=self.taps - 1, channels=self.channels)
        return {"state": ChannelShape(key_dim=1, channels=self.channels), "stream": stream}

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the state, which is read once and written once."""
        return 2 * self.channels

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "RGLRU":
        keys, heads = jax.random.split(key, 7), (self.num_heads, self.value_dim)

        def matrix(key: PRNGKeyArray, *shape: int, size: int) -> Array:
            return fan_in(key, shape, jnp.float32, size)

        kept = jax.random.uniform(keys[6], heads, minval=0.9**2, maxval=0.999**2)  # squares of a where r is 1/8
        return RGLRU(
            value=matrix(keys[0], embed_dim, *heads, size=embed_dim),
            value_bias=jnp.zeros(heads),
            gate=matrix(keys[1], embed_dim, *heads, size=embed_dim),
            gate_bias=jnp.zeros(heads),
            taps=matrix(keys[2], *heads, self.taps, size=self.taps),
            taps_bias=jnp.zeros(heads),
            input_gate=matrix(keys[3], *heads, self.value_dim, size=self.value_dim),
            input_gate_bias=jnp.zeros(heads),
            decay_gate=matrix(keys[4], *heads, self.value_dim, size=self.value_dim),
            decay_gate_bias=jnp.zeros(heads),
            decay=jnp.log(jnp.expm1(-0.5 * jnp.log(kept))),
            out=matrix(keys[5], *heads, embed_dim, size=self.channels),
            out_bias=jnp.zeros((embed_dim,)),
            config=self,
        )


class RGLRU(eqx.Module):
    """Gated recurrent unit `out(h * act(gate x))`, h being the recurrence's output."""

    value: Float[Array, "embed heads value_dim"]
    value_bias: Float[Array, "heads value_dim"]
    gate: Float[Array, "embed heads value_dim"]
    gate_bias: Float[Array, "heads value_dim"]
    taps: Float[Array, "heads value_dim taps"]
    taps_bias: Float[Array, "heads value_dim"]
    input_gate: Float[Array, "heads inner value_dim"]
    input_gate_bias: Float[Array, "heads value_dim"]
    decay_gate: Float[Array, "heads inner value_dim"]
    decay_gate_bias: Float[Array, "heads value_dim"]
    decay: Float[Array, "heads value_dim"]
    out: Float[Array, "heads value_dim embed"]
    out_bias: Float[Array, "embed"]
    config: RGLRUConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and new entries for its state and for the convolution's last inputs."""
        pattern = "batch length embed, embed heads value_dim -> batch length heads value_dim"
        projected = save(add_bias(ctx.einsum(pattern, x, self.value), self.value_bias), "value_proj")
        tail = read_cache(past, "stream")
        value, stream = convolve_heads(projected, self.taps, self.taps_bias, tail, ctx)
        starts, first = document_starts(ctx.positions, ctx.segment_ids), ctx.positions == 0
        steps, rates, written = self._scan_inputs(ctx.constrain(value, "batch length heads value_dim"), first, ctx)
        one = jnp.ones((*x.shape[:2], 1), jnp.float32)
        resets = first if starts is None else starts | first
        inputs = steps, written, one, one, rates, read_cache(past, "state"), resets
        answer, state = scan_on_mesh(*inputs, execution=ctx.execution)
        if ctx.accept_all:
            entry = NewState(state=state)
        else:
            entry = ChannelUpdate(steps=steps, written=written, key=one, rates=rates)
        answer = ctx.constrain(answer.astype(x.dtype).reshape(value.shape), "batch length heads value_dim")
        gate = save(add_bias(ctx.einsum(pattern, x, self.gate), self.gate_bias), "query_proj")
        gated = save(answer, "attention_out") * ACTIVATIONS[self.config.activation](gate)
        pattern = "batch length heads value_dim, heads value_dim embed -> batch length embed"
        out = add_bias(ctx.einsum(pattern, gated, self.out), self.out_bias)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), {"state": entry, "stream": stream}

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _scan_inputs(
        self,
        value: Float[Array, "batch length heads value_dim"],
        first: Bool[Array, "batch length"],
        ctx: ForwardContext,
    ) -> tuple[
        Float32[Array, "batch length channels"],
        Float32[Array, "one channels"],
        Float32[Array, "batch length channels"],
    ]:
        """Compute steps r, the rates of decay, and what is written; steps and writes are 0 where there is no token."""
        pattern = "batch length heads inner, heads inner value_dim -> batch length heads value_dim"

        def gate(weight: Array, bias: Array) -> Array:
            made = add_bias(ctx.einsum(pattern, value, weight).astype(jnp.float32), bias)
            return jax.nn.sigmoid(made)

        def flat(x: Array) -> Array:
            x = zero_padding(x, ctx.positions).reshape(*x.shape[:2], self.config.channels)
            return ctx.constrain(x, "batch length channels")

        steps, rates = gate(self.decay_gate, self.decay_gate_bias), -_STRENGTH * jax.nn.softplus(_wide(self.decay))
        factor = _bounded_root(-jnp.expm1(2 * rates[None, None] * steps))
        factor = jnp.where(first[:, :, None, None], 1.0, factor)
        written = factor * gate(self.input_gate, self.input_gate_bias) * _wide(value)
        return flat(steps), rates.reshape(1, -1), flat(written)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


@jax.custom_jvp
def _bounded_root(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Compute a square root; the gradient takes no slope above `_STEEPEST`."""
    return jnp.sqrt(x)


@_bounded_root.defjvp
def _bounded_root_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    return jnp.sqrt(x), tangent * jax.lax.rsqrt(jnp.maximum(4 * x, _STEEPEST**-2))
