"""What recurrent mixers share: convolutions over short tails, and what they propose."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.context import Context
from eqx_decoders.layers.convolution import causal_convolution
from eqx_decoders.layers.memory import (
    NewState,
    NewTail,
    StateShape,
    StateWrites,
    TailInputs,
    last_inputs,
)


def only_tokens(x: Float[Array, "batch length *dims"], positions: Int[Array, "batch length"]) -> Array:
    """Zero where there is no token."""
    real = (positions >= 0).reshape(*positions.shape, *(1,) * (x.ndim - 2))
    return jnp.where(real, x, jnp.zeros((), x.dtype))


def convolved(
    x: Float[Array, "batch length heads dims"],
    kernel: Float[Array, "heads dims taps"],
    bias: Float[Array, "heads dims"] | None,
    tail: Float[Array, "batch back channels"] | None,
    ctx: Context,
) -> tuple[Float[Array, "batch length heads dims"], TailInputs | NewTail]:
    """`silu(convolution(x) + bias)`, causal and channel by channel, and what is proposed for a `TailCache`."""
    channels, taps = kernel.shape[0] * kernel.shape[1], kernel.shape[2]
    flat = ctx.constrain(x.reshape(*x.shape[:2], channels), "batch length channels")
    weights = kernel.reshape(channels, taps), None if bias is None else bias.reshape(channels)
    smooth = causal_convolution(flat, *weights, tail, ctx.positions, ctx.segment_ids)
    if ctx.keeps_all and x.shape[1] >= taps:
        tail = jnp.zeros((x.shape[0], taps - 1, channels), x.dtype) if tail is None else tail
        return jax.nn.silu(smooth).reshape(x.shape), NewTail(tail=last_inputs(tail, flat, ctx.positions))
    return jax.nn.silu(smooth).reshape(x.shape), TailInputs(inputs=flat)


def proposed_state(
    shape: StateShape,
    log_decay: Float32[Array, "batch length heads decay_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    written: Float[Array, "batch length heads value_dim"],
    state: Float32[Array, "batch heads key_dim value_dim"],
    ctx: Context,
) -> StateWrites | NewState:
    """What is proposed for a `StateCache`: `state`, after all tokens, or what each of them writes, if it is less."""
    if not shape.proposes_writes(key.shape[1], ctx.keeps_all):
        return NewState(state=state)
    repeated = jnp.repeat(key, shape.heads // key.shape[2], axis=2)
    return StateWrites(log_decay=log_decay, key=repeated, value=written)


def unit(x: Float[Array, "*dims features"], eps: float = 1e-6) -> Float32[Array, "*dims features"]:
    """`x / sqrt(sum(x²) + eps)` over the last axis, in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)


def of_past(past: dict[str, Any] | None, name: str) -> Any:
    """A part of what a layer remembers; None where there is no past."""
    return None if past is None else past[name]
