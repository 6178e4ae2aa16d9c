"""Caches of recurrent layers: states, and the last inputs of convolutions."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Shaped

from eqx_decoders.layers.cache.base import LayerCache, empty_value
from eqx_decoders.layers.cache.format import CacheFormat


# --- the state of a linear recurrence ---


class StateUpdate(eqx.Module):
    """Updates that one recurrent layer proposes, token by token: `S <- exp(log_decay) S + key value^T`.

    `value` is what is really written; it does not depend on later tokens. So the state after the accepted tokens
    follows from these alone, and rejecting the others costs nothing. A decay is one number or one for each key feature.
    """

    log_decay: Float32[Array, "batch length heads decay_dim"]
    key: Float[Array, "batch length heads key_dim"]
    value: Float[Array, "batch length heads value_dim"]


class NewState(eqx.Module):
    """State after all tokens of a call of which none will be rejected: nothing per token of a long prompt."""

    state: Float32[Array, "batch ..."]


class RecurrentState(LayerCache):
    """States of equal recurrent layers, in float32; zero before the first token."""

    state: Float32[Array, "layers batch heads key_dim value_dim"]

    def slices(self) -> Any:
        return self.state

    def commit(self, entries: StateUpdate | NewState, positions: Int[Array, "batch length"]) -> "RecurrentState":
        if isinstance(entries, NewState):
            return RecurrentState(state=entries.state)
        accepted = (positions >= 0)[None, :, :, None, None]
        # e^-100 is 0 in float32; far below it, differences of sums would lose what is small
        decay = jnp.where(accepted, jnp.maximum(entries.log_decay, -100.0), 0.0)
        key = jnp.where(accepted, entries.key.astype(jnp.float32), 0.0)
        value = jnp.where(accepted, entries.value.astype(jnp.float32), 0.0)  # the value may be NaN, and 0 * NaN is NaN
        sums = jnp.flip(jnp.cumsum(jnp.flip(decay, 2), axis=2), 2)  # of a token and all that follow
        key = key * jnp.exp(jnp.pad(sums[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))))
        state = jnp.exp(sums[:, :, 0])[..., None] * self.state
        if key.shape[2] > 8:
            return RecurrentState(state=state + jnp.einsum("nblhk,nblhv->nbhkv", key, value))
        for token in range(key.shape[2]):  # written out, it is one pass over the state, in place
            state += key[:, :, token, :, :, None] * value[:, :, token, :, None, :]
        return RecurrentState(state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
    """Shape of one recurrent layer's state: for each head a matrix from keys to values, in float32."""

    by_token: ClassVar[bool] = False
    heads: int
    key_dim: int
    value_dim: int

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> RecurrentState:
        """Return empty states for `layers` equal layers."""
        shape = (layers, batch_size, self.heads, self.key_dim, self.value_dim)
        return RecurrentState(state=jnp.zeros(shape, jnp.float32))

    def proposes_writes(self, length: int, accept_all: bool) -> bool:
        """Return whether a call of so many tokens proposes updates; if all are accepted the state may be smaller."""
        return not accept_all or length * (self.key_dim + self.value_dim) < self.key_dim * self.value_dim


# --- the state of a recurrence by channels ---


class ChannelUpdate(eqx.Module):
    """Updates that one layer proposes, token by token: `S <- exp(rates * steps) S + key written^T`.

    None of them depends on others, so that the state after the accepted tokens follows from these alone.
    """

    steps: Float32[Array, "batch length channels"]
    written: Float32[Array, "batch length channels"]
    key: Float[Array, "batch length key_dim"]
    rates: Float32[Array, "key_dim channels"]


class ChannelState(LayerCache):
    """States of equal layers of which each channel has its own, in float32; zero before the first token."""

    state: Float32[Array, "layers batch key_dim channels"]

    def slices(self) -> Any:
        return self.state

    def commit(self, entries: ChannelUpdate | NewState, positions: Int[Array, "batch length"]) -> "ChannelState":
        if isinstance(entries, NewState):
            return ChannelState(state=entries.state)
        accepted, rates = (positions >= 0)[None, :, :, None], entries.rates[:, None]

        def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, None]:
            steps, written, key = token
            return jnp.exp(rates * steps[:, :, None]) * state + key[..., None] * written[:, :, None], None

        # rejected tokens need zeros in all three arrays, because 0 * NaN is NaN
        changes = (jnp.where(accepted, x, 0.0) for x in (entries.steps, entries.written, entries.key))
        tokens = tuple(jnp.moveaxis(x.astype(jnp.float32), 2, 0) for x in changes)
        # a few tokens are written out: then they are one pass over the state, in place
        state, _ = jax.lax.scan(step, self.state, tokens, unroll=min(8, len(tokens[0])))
        return ChannelState(state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelShape:
    """Shape of one layer's state: for each channel a vector of `key_dim` numbers, in float32."""

    by_token: ClassVar[bool] = False
    key_dim: int
    channels: int

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> ChannelState:
        """Return empty states for `layers` equal layers."""
        return ChannelState(state=jnp.zeros((layers, batch_size, self.key_dim, self.channels), jnp.float32))


# --- the last inputs of a stream ---


class ConvInputs(eqx.Module):
    """Inputs of a causal convolution, for the tokens of a call."""

    inputs: Shaped[Array, "batch length channels"]


class NewConvInputs(eqx.Module):
    """Last inputs after all tokens of a call of which none will be rejected."""

    tail: Shaped[Array, "batch taps channels"]


class ConvState(LayerCache):
    """Last inputs of a stream, oldest first: what a convolution, or n-grams, see of earlier tokens.

    Before the first token there are zeros; in a stream of token ids -1.
    """

    tail: Shaped[Array, "layers batch taps channels"]

    def slices(self) -> Any:
        return self.tail

    def commit(self, entries: ConvInputs | NewConvInputs, positions: Int[Array, "batch length"]) -> "ConvState":
        if isinstance(entries, NewConvInputs):
            return ConvState(tail=entries.tail.astype(self.tail.dtype))
        return ConvState(tail=jax.vmap(last_inputs, in_axes=(0, 0, None))(self.tail, entries.inputs, positions))


def last_inputs(
    tail: Shaped[Array, "batch taps channels"],
    inputs: Shaped[Array, "batch length channels"],
    positions: Int[Array, "batch length"],
) -> Shaped[Array, "batch taps channels"]:
    """Append inputs to the tail and drop the oldest; inputs at positions below 0 are left out."""
    taps = tail.shape[1]
    real = jnp.pad(positions >= 0, ((0, 0), (taps, 0)), constant_values=True)
    order = jnp.argsort(real, axis=1, stable=True)[:, -taps:]  # those that are left out first
    joined = jnp.concatenate([tail, inputs.astype(tail.dtype)], axis=1)
    return jnp.take_along_axis(joined, order[:, :, None], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvShape:
    """Shape of a stream's tail: inputs and their features; `dtype`: None for the cache's own."""

    by_token: ClassVar[bool] = False
    taps: int
    channels: int
    dtype: str | None = None

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> ConvState:
        """Return an empty tail for `layers` equal layers."""
        kind = jnp.dtype(self.dtype or CacheFormat.of(dtype).unscaled_dtype)
        return ConvState(tail=jnp.full((layers, batch_size, self.taps, self.channels), empty_value(kind), kind))
