"""Shared by recurrent mixers: base class, cache shapes, short causal convolutions, and proposed cache updates."""

import abc
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import BranchResult
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


class RecurrentLayer(eqx.Module):
    """Base class of layers that read their cache only in `__call__`."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(*self(x, ctx, past))


def cache_shapes(state: StateShape, taps: int, **channels: int) -> dict[str, Any]:
    """Return the cache shapes of a mixer: its recurrent state, and the last `taps - 1` inputs of each convolution.

    `channels` maps the name of each convolution to its number of channels. No shape depends on the sequence length.
    """
    conv_states = {name: ConvShape(num_inputs=taps - 1, channels=count) for name, count in channels.items()}
    return {"state": state} | conv_states


def project_and_convolve(
    layer: eqx.Module,
    x: Float[Array, "batch length embed"],
    axes: Mapping[str, str],
    cache: dict[str, Any] | None,
    ctx: ForwardContext,
    scales: Mapping[str, float] = {},
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Compute `silu(convolution(projection(x)))` for queries, keys and values, and the updates of convolution states.

    **Arguments:**

    - `axes`: for each projection the names of its output axes, e.g. `{"query": "heads key_dim"}`. The weights of the
        projection `query` are the attributes `query` and `query_taps` of the layer, and, if the layer has them, the
        biases `query_bias` and `query_taps_bias`.
    - `cache`: the layer's cache, with a convolution state under the name of each projection; None: no cache.
    - `scales`: factors by which projections are multiplied; 1 for a projection that is not listed.
    """
    streams = {}
    for name, out_axes in axes.items():
        pattern = f"batch length embed, embed {out_axes} -> batch length {out_axes}"
        projected = add_bias(ctx.einsum(pattern, x, getattr(layer, name)), getattr(layer, f"{name}_bias", None))
        projected = ctx.constrain(scale(projected, scales.get(name, 1.0)), f"batch length {out_axes}")
        kernel = getattr(layer, f"{name}_taps")
        bias = getattr(layer, f"{name}_taps_bias", None)
        streams[name] = convolve_heads(save(projected, f"{name}_proj"), kernel, bias, read_cache(cache, name), ctx)
    convolved = {name: out for name, (out, _) in streams.items()}
    updates = {name: update for name, (_, update) in streams.items()}
    return jax.tree.map(jax.nn.silu, convolved), updates


def init_dt_bias(key: PRNGKeyArray, *shape: int) -> Float32[Array, "..."]:
    """Sample biases such that `softplus(bias)` is log-uniform between 0.001 and 0.1, as in Mamba."""
    steps = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    return steps + jnp.log(-jnp.expm1(-steps))


def convolve_heads(
    x: Float[Array, "batch length heads dims"],
    kernel: Float[Array, "heads dims taps"],
    bias: Float[Array, "heads dims"] | None,
    conv_state: Float[Array, "batch conv_inputs channels"] | None,
    ctx: ForwardContext,
) -> tuple[Float[Array, "batch length heads dims"], ConvInputs | NewConvInputs]:
    """Call `convolve_channels` on arrays whose channels are split into heads."""
    channels = kernel.shape[0] * kernel.shape[1]
    flat = ctx.constrain(x.reshape(*x.shape[:2], channels), "batch length channels")
    flat_kernel = kernel.reshape(channels, -1)
    flat_bias = None if bias is None else bias.reshape(channels)
    convolved, update = convolve_channels(flat, flat_kernel, flat_bias, conv_state, ctx)
    return convolved.reshape(x.shape), update


def convolve_channels(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    conv_state: Float[Array, "batch conv_inputs channels"] | None,
    ctx: ForwardContext,
) -> tuple[Float[Array, "batch length channels"], ConvInputs | NewConvInputs]:
    """Compute the depthwise causal `convolution(x) + bias`, and the proposed update of its `ConvState`.

    `conv_state` holds the `taps - 1` inputs before this call, oldest first; None means zeros.
    """
    out = convolve_on_mesh(x, kernel, bias, conv_state, ctx.positions, ctx.segment_ids, execution=ctx.execution)
    if not ctx.accept_all or x.shape[1] < kernel.shape[1]:
        return out, ConvInputs(inputs=x)
    if conv_state is None:
        conv_state = jnp.zeros((x.shape[0], kernel.shape[1] - 1, x.shape[2]), x.dtype)
    return out, NewConvInputs(tail=last_inputs(conv_state, x, ctx.positions))


def state_update(
    shape: StateShape,
    log_decay: Float32[Array, "batch length heads decay_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    written: Float[Array, "batch length heads value_dim"],
    state: Float32[Array, "batch heads key_dim value_dim"],
    ctx: ForwardContext,
) -> StateUpdate | NewState:
    """Return the proposed update of a `RecurrentState`.

    This is `state`, the state after all tokens, if all tokens will be accepted and the state is smaller than the
    updates of the single tokens; else the update of each token (its decay, key and written value).
    """
    if not shape.proposes_writes(key.shape[1], ctx.accept_all):
        return NewState(state=state)
    repeated = jnp.repeat(key, shape.heads // key.shape[2], axis=2)
    return StateUpdate(log_decay=log_decay, key=repeated, value=written)


def last_value_update(
    values: Float32[Array, "batch length channels"], last: Float32[Array, "batch channels"], ctx: ForwardContext
) -> ConvInputs | NewConvInputs:
    """Return the proposed update of a `ConvState` that stores one vector: the last of `values`, one for each token."""
    return NewConvInputs(tail=last[:, None]) if ctx.accept_all else ConvInputs(inputs=values)


def l2_normalize(x: Float[Array, "*dims features"], eps: float = 1e-6) -> Float32[Array, "*dims features"]:
    """Compute `x / sqrt(sum(x²) + eps)` over the last axis, in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)


def read_cache(cache: dict[str, Any] | None, name: str) -> Any:
    """Return an array of a layer's cache, or None without a cache."""
    return None if cache is None else cache[name]
