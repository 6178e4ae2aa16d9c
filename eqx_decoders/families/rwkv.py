"""RWKV-4 (Peng et al. 2023): time mixing, a weighted mean with decaying weights, and channel mixing, an MLP.

    o_t = (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + bonus} v_t) / (sum_{i<t} e^{k_i - (t-1-i) w} + e^{k_t + bonus})

with w = e^decay. Keys, values and gates are projections of a mix of each token with the previous token (token shift).
The state is the logarithm of the sum of weights and the weighted mean, so that no exponential exceeds 1.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.families.common import ends
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import MambaSizes
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Layers, Number
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.base import ChannelConfig, MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    convolve_channels,
    last_value_update,
    read_cache,
)
from eqx_decoders.layers.recurrent.scans.log_scan import DECAYING_MEAN, LOG_ZERO, State, log_scan_on_mesh, weighted_mean
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_UP = "batch length embed, embed mlp -> batch length mlp"
_DOWN = "batch length mlp, mlp embed -> batch length embed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeMixConfig(MixerConfig):
    """Configuration of RWKV-4's time mixing `out(sigmoid(gate) * o)`, where o is the weighted mean of values.

    **Arguments:**

    - `embed_dim`: features of the residual stream; the cache stores the last token of the stream for the token shift.
    - `channels`: features of keys, values and gates.
    """

    embed_dim: PositiveInt
    channels: PositiveInt

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name: the log of the sum of weights, the mean, and the last token."""
        state = ConvShape(num_inputs=1, channels=self.channels, dtype="float32")
        return {"level": state, "mean": state, "stream": ConvShape(num_inputs=1, channels=self.embed_dim)}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token: one update and one read of the weighted mean for each channel."""
        return 2 * self.channels

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "TimeMix":
        _check_embed_dim(self, embed_dim)
        keys = jax.random.split(key, 4)

        def projection(key: PRNGKeyArray) -> Array:
            return fan_in(key, (embed_dim, self.channels), jnp.float32, embed_dim)

        return TimeMix(
            key=projection(keys[0]),
            value=projection(keys[1]),
            gate=projection(keys[2]),
            key_mix=_init_mix(embed_dim),
            value_mix=_init_mix(embed_dim),
            gate_mix=_init_mix(embed_dim),
            decay=jnp.linspace(-5.0, 3.0, self.channels),
            bonus=jnp.log(0.3) + 0.5 * ((jnp.arange(self.channels) + 1) % 3 - 1).astype(jnp.float32),
            out=fan_in(keys[3], (self.channels, embed_dim), jnp.float32, self.channels),
            config=self,
        )


class TimeMix(RecurrentLayer):
    """RWKV-4's time mixing `out(sigmoid(gate) * o)`, where o is the weighted mean of values."""

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
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        previous, stream_update = _token_shift(x, cache, ctx)

        def project(weight: Array, mix: Array, name: str) -> Array:
            return save(ctx.constrain(ctx.einsum(_UP, _mix(x, previous, mix), weight), "batch length mlp"), name)

        gate = jax.nn.sigmoid(project(self.gate, self.gate_mix, "query_proj"))
        key = project(self.key, self.key_mix, "key_proj").astype(jnp.float32)
        value = project(self.value, self.value_mix, "value_proj").astype(jnp.float32)
        means, updates = self._weighted_means(key, value, cache, ctx)
        means = save(ctx.constrain(means.astype(x.dtype), "batch length mlp"), "attention_out")
        out = ctx.einsum(_DOWN, gate * means, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), {**updates, "stream": stream_update}

    def _weighted_means(
        self,
        key: Float32[Array, "batch length channels"],
        value: Float32[Array, "batch length channels"],
        cache: dict[str, Any] | None,
        ctx: ForwardContext,
    ) -> tuple[Float32[Array, "batch length channels"], dict[str, Any]]:
        """Compute the weighted means, and the proposed updates of the state."""
        real = (ctx.positions >= 0)[:, :, None]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        decay, bonus = (x.astype(jnp.float32)[None, None] for x in (self.decay, self.bonus))
        log_decay = jnp.where(real, -jnp.exp(decay), 0.0)
        if starts is not None:
            log_decay = jnp.where(starts[:, :, None], LOG_ZERO, log_decay)
        tokens = log_decay, jnp.where(real, key, LOG_ZERO), zero_padding(value, ctx.positions)
        before, (last_level, last_mean) = log_scan_on_mesh(
            DECAYING_MEAN, tokens, _read_state(cache, key[:, 0]), execution=ctx.execution
        )
        level_before, mean_before = before
        if starts is not None:
            level_before = jnp.where(starts[:, :, None], LOG_ZERO, level_before)
        out = weighted_mean(level_before, mean_before, key + bonus, value)
        level, mean = DECAYING_MEAN.advance(before, tokens)
        level_update = last_value_update(_encode_level(level), _encode_level(last_level), ctx)
        return out, {"level": level_update, "mean": last_value_update(mean, last_mean, ctx)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelMixConfig(ChannelConfig):
    """Configuration of RWKV-4's channel mixing `sigmoid(gate) * value relu(key)^2`, with a token shift.

    **Arguments:**

    - `embed_dim`: features of the residual stream; the cache stores the last token of the stream for the token shift.
    - `mlp_dim`: hidden features.
    """

    embed_dim: PositiveInt
    mlp_dim: PositiveInt

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name: only the last token."""
        return {"stream": ConvShape(num_inputs=1, channels=self.embed_dim)}

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "ChannelMix":
        _check_embed_dim(self, embed_dim)
        keys = jax.random.split(key, 3)
        return ChannelMix(
            key=fan_in(keys[0], (embed_dim, self.mlp_dim), jnp.float32, embed_dim),
            gate=fan_in(keys[1], (embed_dim, embed_dim), jnp.float32, embed_dim),
            key_mix=_init_mix(embed_dim),
            gate_mix=_init_mix(embed_dim),
            value=fan_in(keys[2], (self.mlp_dim, embed_dim), jnp.float32, self.mlp_dim),
            config=self,
        )


class ChannelMix(RecurrentLayer):
    """RWKV-4's channel mixing `sigmoid(gate) * value relu(key)^2`."""

    key: Float[Array, "embed mlp"]
    gate: Float[Array, "embed outer"]
    key_mix: Float[Array, "embed"]
    gate_mix: Float[Array, "embed"]
    value: Float[Array, "mlp embed"]
    config: ChannelMixConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        previous, stream_update = _token_shift(x, cache, ctx)
        key = save(ctx.einsum(_UP, _mix(x, previous, self.key_mix), self.key), "mlpwi_1")
        pattern = "batch length embed, embed outer -> batch length outer"
        gate = ctx.einsum(pattern, _mix(x, previous, self.gate_mix), self.gate)
        gate = jax.nn.sigmoid(save(ctx.constrain(gate, "batch length embed"), "mlpwi_0"))
        hidden = ctx.constrain(jnp.square(jax.nn.relu(key)), "batch length mlp")
        out = gate * ctx.constrain(ctx.einsum(_DOWN, hidden, self.value), "batch length embed")
        return save(out, "mlpwo"), {"stream": stream_update}


# --- token shift: mixing each token with the previous token ---


def _check_embed_dim(config: TimeMixConfig | ChannelMixConfig, embed_dim: int) -> None:
    check(
        embed_dim == config.embed_dim,
        f"{type(config).__name__}.embed_dim={config.embed_dim} must equal the model's embed_dim={embed_dim}.",
    )


def _init_mix(size: int) -> Float32[Array, "embed"]:
    return jnp.arange(size, dtype=jnp.float32) / size


def _token_shift(
    x: Float[Array, "batch length embed"], cache: dict[str, Any] | None, ctx: ForwardContext
) -> tuple[Float[Array, "batch length embed"], ConvInputs | NewConvInputs]:
    """Return the previous token of each token, and the proposed cache update.

    Zeros precede the first token of a document. The shift is computed as a causal convolution with kernel size 2.
    """
    kernel = jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (x.shape[2], 2))
    previous, update = convolve_channels(x, kernel, None, read_cache(cache, "stream"), ctx)
    return ctx.constrain(previous, "batch length embed"), update


def _mix(x: Array, previous: Array, mix: Array) -> Array:
    mix = mix.astype(x.dtype)[None, None]
    return x * mix + previous * (1 - mix)


# --- encoding of the state in the cache: an empty cache is zero, so a stored level of 0 means log(0) ---


def _read_state(cache: dict[str, Any] | None, like: Array) -> State:
    """Return the state before a call: the log of the sum of weights, and the mean."""
    if cache is None:
        return DECAYING_MEAN.initial_state(like)
    level, mean = cache["level"][:, 0], cache["mean"][:, 0]
    return jnp.where(level == 0, LOG_ZERO, level), mean


def _encode_level(level: Array) -> Array:
    """Replace a level of exactly 0 by a tiny number, because 0 is reserved for log(0)."""
    return jnp.where(level == 0, 1e-30, level)


def rwkv(shape: MambaSizes, *, channels: int | None = None, mlp_dim: int | None = None) -> DecoderConfig:
    """Return a decoder of RWKV-4 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.eps` does not apply to the final norm.
    - `channels`: number of channels of time mixing; None: `embed_dim`.
    - `mlp_dim`: number of hidden features of channel mixing; None: `4 * embed_dim`.
    """
    embed_dim = shape.embed_dim
    norm = LayerNormConfig(eps=shape.eps)
    mixer = TimeMixConfig(embed_dim=embed_dim, channels=channels or embed_dim)
    mlp = ChannelMixConfig(embed_dim=embed_dim, mlp_dim=mlp_dim or 4 * embed_dim)
    block = BlockConfig(mixer=mixer, mlp=mlp, pre_mixer_norm=norm, pre_mlp_norm=norm)
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=embed_dim, blocks=(block,) * shape.num_layers, tied=shape.tied,
        embedding_norm=norm, final_norm=LayerNormConfig(eps=1e-5),
    )  # fmt: skip


_SIZES = (
    Integer("vocab_size", "vocab_size", 50_277),
    Integer("hidden_size", "embed_dim", 4096),
    Layers("num_hidden_layers", "blocks", 32, name="num_layers"),
    Number("layer_norm_epsilon", "embedding_norm.eps", 1e-5),
    Flag("tie_word_embeddings", "tied", False),
)
_LAYER = "rwkv.blocks.{layer}."
_INPUT_PATTERN = "mlp embed -> embed mlp"
FAMILY = Family(
    model_type="rwkv",
    architecture="RwkvForCausalLM",
    settings=(
        Group("shape", MambaSizes, _SIZES),
        Integer("attention_hidden_size", "blocks.0.mixer.channels", None),
        Integer("intermediate_size", "blocks.0.mlp.mlp_dim", None),
    ),
    build=rwkv,
    weights=(
        *ends("rwkv.embeddings", "rwkv.ln_out", "head"),
        *norm_weights("rwkv.", embedding_norm="blocks.0.pre_ln"),
        *norm_weights(_LAYER, pre_mixer_norm="ln1", pre_mlp_norm="ln2"),
        *(
            Weight(f"{_LAYER}{part}.time_mix_{name}", f"{path}_mix", "1 1 embed -> embed")
            for part, name, path in (
                ("attention", "key", "mixer.key"),
                ("attention", "value", "mixer.value"),
                ("attention", "receptance", "mixer.gate"),
                ("feed_forward", "key", "mlp.key"),
                ("feed_forward", "receptance", "mlp.gate"),
            )
        ),
        Weight(_LAYER + "attention.time_decay", "mixer.decay", "mlp -> mlp"),
        Weight(_LAYER + "attention.time_first", "mixer.bonus", "mlp -> mlp"),
        Weight(_LAYER + "attention.key.weight", "mixer.key", _INPUT_PATTERN),
        Weight(_LAYER + "attention.value.weight", "mixer.value", _INPUT_PATTERN),
        Weight(_LAYER + "attention.receptance.weight", "mixer.gate", _INPUT_PATTERN),
        Weight(_LAYER + "attention.output.weight", "mixer.out", "embed mlp -> mlp embed"),
        Weight(_LAYER + "feed_forward.key.weight", "mlp.key", _INPUT_PATTERN),
        Weight(_LAYER + "feed_forward.receptance.weight", "mlp.gate", "outer embed -> embed outer"),
        Weight(_LAYER + "feed_forward.value.weight", "mlp.value", "embed mlp -> mlp embed"),
    ),
    ignored_keys={"context_length rescale_every": "runtime option; it changes no output"},
)

_sizes = functools.partial(MambaSizes, vocab_size=50_277)
_SHAPES = {
    "rwkv4-169m": _sizes(embed_dim=768, num_layers=12),
    "rwkv4-430m": _sizes(embed_dim=1024, num_layers=24),
    "rwkv4-1.5b": _sizes(embed_dim=2048, num_layers=24),
    "rwkv4-3b": _sizes(embed_dim=2560, num_layers=32),
    "rwkv4-7b": _sizes(embed_dim=4096, num_layers=32),
    "rwkv4-14b": _sizes(embed_dim=5120, num_layers=40),
}

MODELS = {name: functools.partial(rwkv, shape) for name, shape in _SHAPES.items()}
