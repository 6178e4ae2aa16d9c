"""Real-gated linear recurrent unit (RG-LRU; De et al. 2024): a scalar state per channel with a gated decay.

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t v_t),    a_t = exp(-8 r_t softplus(decay))

v is the output of a short convolution. The gates i and r are projections of v, with a separate matrix for each head.
For the first token of a document a is 0 and the factor sqrt(1 - a^2) is 1. The recurrence is computed as Mamba's, with
step sizes r and a key of size 1 that is always 1.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ChannelShape, ChannelUpdate, ConvShape, NewState
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.recurrent.common import RecurrentLayer, convolve_heads, read_cache
from eqx_decoders.layers.recurrent.scans.selective_scan import selective_scan_on_mesh
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_DECAY_SCALE = 8.0  # the paper's constant c
_MAX_SQRT_SLOPE = 1000.0  # bounds the gradient of sqrt(1 - a^2), which is infinite at a = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RGLRUConfig(MixerConfig):
    """Configuration of the RG-LRU layer `out(h * act(gate x))`, where h is the recurrence's output.

    **Arguments:**

    - `num_heads`, `value_dim`: number of heads, and channels per head. The input and decay gates of a channel are
        computed from the channels of its head.
    - `taps`: kernel size of the causal convolution.
    - `activation`: activation of the output gate, a name in `layers.mlp.ACTIVATIONS`.
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
        """Return the cache shapes by name; they do not depend on `max_length`."""
        conv_state = ConvShape(num_inputs=self.taps - 1, channels=self.channels)
        return {"state": ChannelShape(key_dim=1, channels=self.channels), "stream": conv_state}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads and writes its state once."""
        return 2 * self.channels

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "RGLRU":
        keys = jax.random.split(key, 7)
        heads = (self.num_heads, self.value_dim)

        def matrix(key: PRNGKeyArray, *shape: int, size: int) -> Array:
            return fan_in(key, shape, jnp.float32, size)

        # the square of a for r = 1/8
        decay_squared = jax.random.uniform(keys[6], heads, minval=0.9**2, maxval=0.999**2)
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
            decay=jnp.log(jnp.expm1(-0.5 * jnp.log(decay_squared))),
            out=matrix(keys[5], *heads, embed_dim, size=self.channels),
            out_bias=jnp.zeros((embed_dim,)),
            config=self,
        )


class RGLRU(RecurrentLayer):
    """RG-LRU layer `out(h * act(gate x))`, where h is the recurrence's output."""

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
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        pattern = "batch length embed, embed heads value_dim -> batch length heads value_dim"
        projected = save(add_bias(ctx.einsum(pattern, x, self.value), self.value_bias), "value_proj")
        conv_state = read_cache(cache, "stream")
        value, conv_update = convolve_heads(projected, self.taps, self.taps_bias, conv_state, ctx)
        starts = document_starts(ctx.positions, ctx.segment_ids)
        is_first = ctx.positions == 0
        steps, rates, written = self._scan_inputs(ctx.constrain(value, "batch length heads value_dim"), is_first, ctx)
        ones = jnp.ones((*x.shape[:2], 1), jnp.float32)
        resets = is_first if starts is None else starts | is_first
        state = read_cache(cache, "state")
        scan_out, state = selective_scan_on_mesh(
            steps, written, ones, ones, rates, state, resets, execution=ctx.execution
        )
        if ctx.accept_all:
            update = NewState(state=state)
        else:
            update = ChannelUpdate(steps=steps, written=written, key=ones, rates=rates)
        scan_out = ctx.constrain(scan_out.astype(x.dtype).reshape(value.shape), "batch length heads value_dim")
        gate = save(add_bias(ctx.einsum(pattern, x, self.gate), self.gate_bias), "query_proj")
        gated = save(scan_out, "attention_out") * ACTIVATIONS[self.config.activation](gate)
        pattern = "batch length heads value_dim, heads value_dim embed -> batch length embed"
        out = add_bias(ctx.einsum(pattern, gated, self.out), self.out_bias)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), {"state": update, "stream": conv_update}

    def _scan_inputs(
        self,
        value: Float[Array, "batch length heads value_dim"],
        is_first: Bool[Array, "batch length"],
        ctx: ForwardContext,
    ) -> tuple[
        Float32[Array, "batch length channels"],
        Float32[Array, "one channels"],
        Float32[Array, "batch length channels"],
    ]:
        """Compute step sizes r, decay rates, and written values; step sizes and written values are 0 at padding."""
        pattern = "batch length heads inner, heads inner value_dim -> batch length heads value_dim"

        def gate(weight: Array, bias: Array) -> Array:
            logits = add_bias(ctx.einsum(pattern, value, weight).astype(jnp.float32), bias)
            return jax.nn.sigmoid(logits)

        def flat(x: Array) -> Array:
            x = zero_padding(x, ctx.positions).reshape(*x.shape[:2], self.config.channels)
            return ctx.constrain(x, "batch length channels")

        steps = gate(self.decay_gate, self.decay_gate_bias)
        rates = -_DECAY_SCALE * jax.nn.softplus(self.decay.astype(jnp.float32))
        factor = _sqrt(-jnp.expm1(2 * rates[None, None] * steps))
        factor = jnp.where(is_first[:, :, None, None], 1.0, factor)
        written = factor * gate(self.input_gate, self.input_gate_bias) * value.astype(jnp.float32)
        return flat(steps), rates.reshape(1, -1), flat(written)


@jax.custom_jvp
def _sqrt(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Compute the square root, with a derivative that is clipped to `_MAX_SQRT_SLOPE`."""
    return jnp.sqrt(x)


@_sqrt.defjvp
def _sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    return jnp.sqrt(x), tangent * jax.lax.rsqrt(jnp.maximum(4 * x, _MAX_SQRT_SLOPE**-2))
