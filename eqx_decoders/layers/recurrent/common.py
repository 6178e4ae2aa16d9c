"""Parts that recurrent mixers share: shapes of caches, convolutions over short tails, and new entries."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.cache.recurrent_state import (
    ConvInputs,
    ConvShape,
    NewConvInputs,
    NewState,
    StateShape,
    StateUpdate,
    last_inputs,
)
from eqx_decoders.layers.recurrent.sharded_conv import convolve_on_mesh
from eqx_decoders.numerics.einsum import add_bias, scale
from eqx_decoders.remat import save


def zero_padding(x: Float[Array, "batch length *dims"], positions: Int[Array, "batch length"]) -> Array:
    """Set padding to zero."""
    real = (positions >= 0).reshape(*positions.shape, *(1,) * (x.ndim - 2))
    return jnp.where(real, x, jnp.zeros((), x.dtype))


def cache_shapes(state: StateShape, taps: int, **channels: int) -> dict[str, Any]:
    """Return the shapes of a mixer's caches, whatever the length: a state, and the last inputs of its convolutions."""
    tails = {name: ConvShape(taps=taps - 1, channels=count) for name, count in channels.items()}
    return {"state": state} | tails


def projected_streams(
    layer: eqx.Module,
    x: Float[Array, "batch length embed"],
    heads: Mapping[str, str],
    past: dict[str, Any] | None,
    ctx: ForwardContext,
    scales: Mapping[str, float] = {},
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Compute a layer's queries, keys and values after their convolutions, and the new entries of their tails.

    `heads` has the axes of each; its weights are the layer's `query`, `query_taps` and perhaps `query_bias` and
    `query_taps_bias`. `scales` multiply projections, 1 where there is none.
    """
    streams = {}
    for name, words in heads.items():
        pattern = f"batch length embed, embed {words} -> batch length {words}"
        projected = add_bias(ctx.einsum(pattern, x, getattr(layer, name)), getattr(layer, f"{name}_bias", None))
        projected = ctx.constrain(scale(projected, scales.get(name, 1.0)), f"batch length {words}")
        taps, bias = getattr(layer, f"{name}_taps"), getattr(layer, f"{name}_taps_bias", None)
        streams[name] = convolved(save(projected, f"{name}_proj"), taps, bias, cached_part(past, name), ctx)
    smooth, tails = ({name: pair[part] for name, pair in streams.items()} for part in (0, 1))
    return jax.tree.map(jax.nn.silu, smooth), tails


def new_steps(key: PRNGKeyArray, *shape: int) -> Float32[Array, "..."]:
    """Draw biases of steps from 0.001 to 0.1, inverted through softplus, as in Mamba."""
    steps = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    return steps + jnp.log(-jnp.expm1(-steps))


def convolved(
    x: Float[Array, "batch length heads dims"],
    kernel: Float[Array, "heads dims taps"],
    bias: Float[Array, "heads dims"] | None,
    tail: Float[Array, "batch back channels"] | None,
    ctx: ForwardContext,
) -> tuple[Float[Array, "batch length heads dims"], ConvInputs | NewConvInputs]:
    """Compute `convolution(x) + bias` of heads, as `convolved_stream` does of channels."""
    channels = kernel.shape[0] * kernel.shape[1]
    flat = ctx.constrain(x.reshape(*x.shape[:2], channels), "batch length channels")
    weights = kernel.reshape(channels, -1), None if bias is None else bias.reshape(channels)
    smooth, entries = convolved_stream(flat, *weights, tail, ctx)
    return smooth.reshape(x.shape), entries


def convolved_stream(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    tail: Float[Array, "batch back channels"] | None,
    ctx: ForwardContext,
) -> tuple[Float[Array, "batch length channels"], ConvInputs | NewConvInputs]:
    """Compute `convolution(x) + bias`, causal and channel by channel, and the new entries of a `ConvState`."""
    smooth = convolve_on_mesh(x, kernel, bias, tail, ctx.positions, ctx.segment_ids, execution=ctx.execution)
    if not ctx.accept_all or x.shape[1] < kernel.shape[1]:
        return smooth, ConvInputs(inputs=x)
    tail = jnp.zeros((x.shape[0], kernel.shape[1] - 1, x.shape[2]), x.dtype) if tail is None else tail
    return smooth, NewConvInputs(tail=last_inputs(tail, x, ctx.positions))


def proposed_state(
    shape: StateShape,
    log_decay: Float32[Array, "batch length heads decay_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    written: Float[Array, "batch length heads value_dim"],
    state: Float32[Array, "batch heads key_dim value_dim"],
    ctx: ForwardContext,
) -> StateUpdate | NewState:
    """Return the new entries of a `RecurrentState`: `state`, after all tokens, or each token's update if smaller."""
    if not shape.proposes_writes(key.shape[1], ctx.accept_all):
        return NewState(state=state)
    repeated = jnp.repeat(key, shape.heads // key.shape[2], axis=2)
    return StateUpdate(log_decay=log_decay, key=repeated, value=written)


def new_states(
    after: Float32[Array, "batch length channels"], end: Float32[Array, "batch channels"], ctx: ForwardContext
) -> ConvInputs | NewConvInputs:
    """Return the new entries of a `ConvState` that keeps the state after the last token: `end`, or each token's."""
    return NewConvInputs(tail=end[:, None]) if ctx.accept_all else ConvInputs(inputs=after)


def l2_normalize(x: Float[Array, "*dims features"], eps: float = 1e-6) -> Float32[Array, "*dims features"]:
    """Compute `x / sqrt(sum(x²) + eps)` over the last axis, in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)


def cached_part(past: dict[str, Any] | None, name: str) -> Any:
    """Return a part of a layer's cache; None where there is no cache."""
    return None if past is None else past[name]
