"""RWKV-4 (Peng et al. 2023): weighted means of values that decay by channel, and an MLP that looks a token back.

    o_t = (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + bonus} v_t) / (the same with v = 1),    w = e^decay

k, v and the gate are made from a mix of a token and the one before it. A row keeps the logarithm of the weights' sum
and the mean: no exponential is ever above 1.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.layers.base import BranchResult, ChannelConfig, MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs
from eqx_decoders.layers.recurrent.causal_conv import document_starts
from eqx_decoders.layers.recurrent.common import convolve_channels, last_value_update, read_cache, zero_padding
from eqx_decoders.layers.recurrent.scans.log_scan import EMPTY, MEANS, State, scan_on_mesh, weighted
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_INTO = "batch length embed, embed mlp -> batch length mlp"
_OUT_OF = "batch length mlp, mlp embed -> batch length embed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeMixConfig(MixerConfig):
    """Configuration of `out(sigmoid(gate) * o)`, o being the weighted means.

    **Arguments:**

    - `embed_dim`: features of the residual stream, of which a cache keeps the last token's.
    - `channels`: features of keys, values and gates.
    """

    embed_dim: PositiveInt
    channels: PositiveInt

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the cache: the weights' sum and the mean of each channel, and the last token."""
        state = ConvShape(taps=1, channels=self.channels, dtype="float32")
        return {"level": state, "mean": state, "stream": ConvShape(taps=1, channels=self.embed_dim)}

    def token_products(self, length: int) -> int:
        """Count multiplications per token besides those of the projections: of the mean, read and written."""
        return 2 * self.channels

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "TimeMix":
        _check_stream(self, embed_dim)
        keys, into = jax.random.split(key, 4), (embed_dim, self.channels)
        matrices = (fan_in(each, into, jnp.float32, embed_dim) for each in keys[:3])
        return TimeMix(
            **dict(zip(("key", "value", "gate"), matrices, strict=True)),
            key_mix=_new_mix(embed_dim),
            value_mix=_new_mix(embed_dim),
            gate_mix=_new_mix(embed_dim),
            decay=jnp.linspace(-5.0, 3.0, self.channels),
            bonus=jnp.log(0.3) + 0.5 * ((jnp.arange(self.channels) + 1) % 3 - 1).astype(jnp.float32),
            out=fan_in(keys[3], (self.channels, embed_dim), jnp.float32, self.channels),
            config=self,
        )


class TimeMix(eqx.Module):
    """RWKV-4's mixer `out(sigmoid(gate) * o)`, o being weighted means of values."""

    key: Float[Array, "embed mlp"]
    value: Float[Array, "embed mlp"]
    gate: Float[Array, "embed mlp"]
    key_mix: Float[Array, "embed"]
    value_mix: Float[Array, "embed"]
    gate_mix: Float[Array, "embed"]
    decay: Float[Array, "mlp"]
    bonus: Float[Array, "mlp"]
    out: Float[Array, "mlp embed"]
    config: TimeMixConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and new entries for its state and for the last token."""
        earlier, stream = _shifted(x, past, ctx)

        def projected(weight: Array, mix: Array, name: str) -> Array:
            return save(ctx.constrain(ctx.einsum(_INTO, _mixed(x, earlier, mix), weight), "batch length mlp"), name)

        gate = jax.nn.sigmoid(projected(self.gate, self.gate_mix, "query_proj"))
        key = projected(self.key, self.key_mix, "key_proj").astype(jnp.float32)
        value = projected(self.value, self.value_mix, "value_proj").astype(jnp.float32)
        answer, entries = self._means(key, value, past, ctx)
        answer = save(ctx.constrain(answer.astype(x.dtype), "batch length mlp"), "attention_out")
        out = ctx.einsum(_OUT_OF, gate * answer, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), {**entries, "stream": stream}

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _means(
        self,
        key: Float32[Array, "batch length channels"],
        value: Float32[Array, "batch length channels"],
        past: dict[str, Any] | None,
        ctx: ForwardContext,
    ) -> tuple[Float32[Array, "batch length channels"], dict[str, Any]]:
        """Compute the weighted means, and new entries of the state."""
        real, starts = (ctx.positions >= 0)[:, :, None], document_starts(ctx.positions, ctx.segment_ids)
        decay, bonus = (x.astype(jnp.float32)[None, None] for x in (self.decay, self.bonus))
        log_decay = jnp.where(real, -jnp.exp(decay), 0.0)
        if starts is not None:
            log_decay = jnp.where(starts[:, :, None], EMPTY, log_decay)
        tokens = log_decay, jnp.where(real, key, EMPTY), zero_padding(value, ctx.positions)
        before, end = scan_on_mesh(MEANS, tokens, _state(past, key[:, 0]), execution=ctx.execution)
        answer = weighted(_forgotten(before[0], starts), before[1], key + bonus, value)
        (level, mean), (last_level, last_mean) = MEANS.advance(before, tokens), end
        entry = last_value_update(_stored(level), _stored(last_level), ctx)
        return answer, {"level": entry, "mean": last_value_update(mean, last_mean, ctx)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelMixConfig(ChannelConfig):
    """Configuration of `sigmoid(gate) * value relu(key)^2`, key and gate being made from a token and the one before it.

    **Arguments:**

    - `embed_dim`: features of the residual stream, of which a cache keeps the last token's.
    - `mlp_dim`: hidden features.
    """

    embed_dim: PositiveInt
    mlp_dim: PositiveInt

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shape of the cache: the last token."""
        return {"stream": ConvShape(taps=1, channels=self.embed_dim)}

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "ChannelMix":
        _check_stream(self, embed_dim)
        keys = jax.random.split(key, 3)
        return ChannelMix(
            key=fan_in(keys[0], (embed_dim, self.mlp_dim), jnp.float32, embed_dim),
            gate=fan_in(keys[1], (embed_dim, embed_dim), jnp.float32, embed_dim),
            key_mix=_new_mix(embed_dim),
            gate_mix=_new_mix(embed_dim),
            value=fan_in(keys[2], (self.mlp_dim, embed_dim), jnp.float32, self.mlp_dim),
            config=self,
        )


class ChannelMix(eqx.Module):
    """RWKV-4's channel layer `sigmoid(gate) * value relu(key)^2`."""

    key: Float[Array, "embed mlp"]
    gate: Float[Array, "embed outer"]
    key_mix: Float[Array, "embed"]
    gate_mix: Float[Array, "embed"]
    value: Float[Array, "mlp embed"]
    config: ChannelMixConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and a new entry for the last token."""
        earlier, stream = _shifted(x, past, ctx)
        key = save(ctx.einsum(_INTO, _mixed(x, earlier, self.key_mix), self.key), "mlpwi_1")
        pattern = "batch length embed, embed outer -> batch length outer"
        gate = ctx.einsum(pattern, _mixed(x, earlier, self.gate_mix), self.gate)
        gate = jax.nn.sigmoid(save(ctx.constrain(gate, "batch length embed"), "mlpwi_0"))
        hidden = ctx.constrain(jnp.square(jax.nn.relu(key)), "batch length mlp")
        out = gate * ctx.constrain(ctx.einsum(_OUT_OF, hidden, self.value), "batch length embed")
        return save(out, "mlpwo"), {"stream": stream}

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))


# --- a token and the one before it ---


def _check_stream(config: TimeMixConfig | ChannelMixConfig, embed_dim: int) -> None:
    rule = f"must be the residual stream's, {embed_dim}"
    check(embed_dim == config.embed_dim, f"{type(config).__name__}.embed_dim={config.embed_dim} {rule}.")


def _new_mix(size: int) -> Float32[Array, "embed"]:
    return jnp.arange(size, dtype=jnp.float32) / size


def _shifted(
    x: Float[Array, "batch length embed"], past: dict[str, Any] | None, ctx: ForwardContext
) -> tuple[Float[Array, "batch length embed"], ConvInputs | NewConvInputs]:
    """Return the token before each, zeros before a document, and new entries for the last one: a convolution."""
    taps = jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (x.shape[2], 2))
    earlier, stream = convolve_channels(x, taps, None, read_cache(past, "stream"), ctx)
    return ctx.constrain(earlier, "batch length embed"), stream


def _mixed(x: Array, earlier: Array, mix: Array) -> Array:
    mix = mix.astype(x.dtype)[None, None]
    return x * mix + earlier * (1 - mix)


# --- the state: a cache begins with zeros, and a sum's logarithm that is none is far below ---


def _state(past: dict[str, Any] | None, like: Array) -> State:
    """Return the state before a call."""
    if past is None:
        return MEANS.nothing(like)
    level, mean = past["level"][:, 0], past["mean"][:, 0]
    return jnp.where(level == 0, EMPTY, level), mean


def _stored(level: Array) -> Array:
    """Return logarithms as a cache holds them: 0 stands for nothing."""
    return jnp.where(level == 0, 1e-30, level)


def _forgotten(level: Array, starts: Bool[Array, "batch length"] | None) -> Array:
    return level if starts is None else jnp.where(starts[:, :, None], EMPTY, level)
