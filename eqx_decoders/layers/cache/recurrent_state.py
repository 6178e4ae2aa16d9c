"""Caches of recurrent layers: recurrent states and convolution states."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Shaped

from eqx_decoders.layers.cache.base import LayerCache, empty_value
from eqx_decoders.layers.cache.format import CacheFormat


# --- states of linear recurrences with heads ---


class StateUpdate(eqx.Module):
    """State updates of one recurrent layer for each token: `S <- exp(log_decay) S + key value^T`.

    `value` is the value that is written to the state (for delta rules, after subtracting the prediction). It does not
    depend on later tokens, so `commit` computes the state after the accepted tokens from their updates only, and
    rejecting the other tokens is free. `log_decay` has one value per head (`decay_dim` 1) or per key feature.
    """

    log_decay: Float32[Array, "batch length heads decay_dim"]
    key: Float[Array, "batch length heads key_dim"]
    value: Float[Array, "batch length heads value_dim"]


class NewState(eqx.Module):
    """State after all tokens of a call, if no token is rejected. It is smaller than `StateUpdate` for long prompts."""

    state: Float32[Array, "batch ..."]


class RecurrentState(LayerCache):
    """States of equal recurrent layers. They are zero before the first token."""

    state: Float32[Array, "layers batch heads key_dim value_dim"]

    def slices(self) -> Any:
        return self.state

    def commit(self, entries: StateUpdate | NewState, positions: Int[Array, "batch length"]) -> "RecurrentState":
        if isinstance(entries, NewState):
            return RecurrentState(state=entries.state)
        accepted = (positions >= 0)[None, :, :, None, None]
        # exp(-100) is 0 in float32; sums of much smaller logarithms would lose the precision of the small ones
        decay = jnp.where(accepted, jnp.maximum(entries.log_decay, -100.0), 0.0)
        key = jnp.where(accepted, entries.key.astype(jnp.float32), 0.0)
        value = jnp.where(accepted, entries.value.astype(jnp.float32), 0.0)  # the value may be NaN, and 0 * NaN is NaN
        # sums over a token and all later tokens
        sums = jnp.flip(jnp.cumsum(jnp.flip(decay, 2), axis=2), 2)
        key = key * jnp.exp(jnp.pad(sums[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))))
        state = jnp.exp(sums[:, :, 0])[..., None] * self.state
        if key.shape[2] > 8:
            return RecurrentState(state=state + jnp.einsum("nblhk,nblhv->nbhkv", key, value))
        for token in range(key.shape[2]):  # unrolled: XLA fuses this to one pass over the state, in place
            state += key[:, :, token, :, :, None] * value[:, :, token, :, None, :]
        return RecurrentState(state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
    """Shape of one recurrent layer's state: a float32 matrix `key_dim x value_dim` for each head."""

    by_token: ClassVar[bool] = False
    heads: int
    key_dim: int
    value_dim: int

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> RecurrentState:
        """Return empty states for `layers` equal layers."""
        shape = (layers, batch_size, self.heads, self.key_dim, self.value_dim)
        return RecurrentState(state=jnp.zeros(shape, jnp.float32))

    def proposes_writes(self, length: int, accept_all: bool) -> bool:
        """Return whether a call of `length` tokens returns `StateUpdate`, not `NewState`.

        `NewState` is possible if all tokens are accepted, and is used if it is smaller.
        """
        return not accept_all or length * (self.key_dim + self.value_dim) < self.key_dim * self.value_dim


# --- states of linear recurrences with channels (Mamba-1, RG-LRU) ---


class ChannelUpdate(eqx.Module):
    """State updates of one layer for each token: `S <- exp(rates * steps) S + key written^T`.

    Updates do not depend on each other, so `commit` computes the state after the accepted tokens from their updates.
    """

    steps: Float32[Array, "batch length channels"]
    written: Float32[Array, "batch length channels"]
    key: Float[Array, "batch length key_dim"]
    rates: Float32[Array, "key_dim channels"]


class ChannelState(LayerCache):
    """States of equal recurrent layers with a separate state for each channel. They are zero before the first token."""

    state: Float32[Array, "layers batch key_dim channels"]

    def slices(self) -> Any:
        return self.state

    def commit(self, entries: ChannelUpdate | NewState, positions: Int[Array, "batch length"]) -> "ChannelState":
        if isinstance(entries, NewState):
            return ChannelState(state=entries.state)
        accepted = (positions >= 0)[None, :, :, None]
        rates = entries.rates[:, None]

        def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, None]:
            steps, written, key = token
            return jnp.exp(rates * steps[:, :, None]) * state + key[..., None] * written[:, :, None], None

        # set rejected tokens to zero in all three arrays, because 0 * NaN is NaN
        updates = (jnp.where(accepted, x, 0.0) for x in (entries.steps, entries.written, entries.key))
        tokens = tuple(jnp.moveaxis(x.astype(jnp.float32), 2, 0) for x in updates)
        # unrolled for a few tokens: XLA fuses this to one pass over the state, in place
        state, _ = jax.lax.scan(step, self.state, tokens, unroll=min(8, len(tokens[0])))
        return ChannelState(state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelShape:
    """Shape of one layer's state: a float32 vector of `key_dim` values for each channel."""

    by_token: ClassVar[bool] = False
    key_dim: int
    channels: int

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> ChannelState:
        """Return empty states for `layers` equal layers."""
        return ChannelState(state=jnp.zeros((layers, batch_size, self.key_dim, self.channels), jnp.float32))


# --- convolution states ---


class ConvInputs(eqx.Module):
    """Inputs of a causal convolution for the tokens of a call."""

    inputs: Shaped[Array, "batch length channels"]


class NewConvInputs(eqx.Module):
    """Convolution state after all tokens of a call, if no token will be rejected."""

    tail: Shaped[Array, "batch conv_inputs channels"]


class ConvState(LayerCache):
    """Convolution states of equal layers: the last inputs, oldest first.

    Layers with n-grams use it for token ids. Before the first token inputs are 0, and token ids are -1.
    """

    tail: Shaped[Array, "layers batch conv_inputs channels"]

    def slices(self) -> Any:
        return self.tail

    def commit(self, entries: ConvInputs | NewConvInputs, positions: Int[Array, "batch length"]) -> "ConvState":
        if isinstance(entries, NewConvInputs):
            return ConvState(tail=entries.tail.astype(self.tail.dtype))
        return ConvState(tail=jax.vmap(last_inputs, in_axes=(0, 0, None))(self.tail, entries.inputs, positions))


def last_inputs(
    tail: Shaped[Array, "batch conv_inputs channels"],
    inputs: Shaped[Array, "batch length channels"],
    positions: Int[Array, "batch length"],
) -> Shaped[Array, "batch conv_inputs channels"]:
    """Append inputs to the convolution state `tail`, and drop the oldest. Inputs at positions below 0 are ignored."""
    num_inputs = tail.shape[1]
    real = jnp.pad(positions >= 0, ((0, 0), (num_inputs, 0)), constant_values=True)
    order = jnp.argsort(real, axis=1, stable=True)[:, -num_inputs:]  # ignored inputs are sorted to the front
    joined = jnp.concatenate([tail, inputs.astype(tail.dtype)], axis=1)
    return jnp.take_along_axis(joined, order[:, :, None], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvShape:
    """Shape of a convolution state, for one layer.

    **Arguments:**

    - `num_inputs`: number of inputs before the next token that the convolution reads: its kernel size - 1.
    - `channels`: features of an input.
    - `dtype`: dtype of the state; None for the dtype of the cache.
    """

    by_token: ClassVar[bool] = False
    num_inputs: int
    channels: int
    dtype: str | None = None

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> ConvState:
        """Return empty convolution states for `layers` equal layers."""
        state_dtype = jnp.dtype(self.dtype or CacheFormat.of(dtype).unscaled_dtype)
        shape = (layers, batch_size, self.num_inputs, self.channels)
        return ConvState(tail=jnp.full(shape, empty_value(state_dtype), state_dtype))
