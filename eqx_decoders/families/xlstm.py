"""xLSTM (Beck et al. 2025): a stack of mLSTM layers (Beck et al. 2024).

mLSTM is a linear recurrence with exponential gates per head, and a normalizer:

    S_t = sigmoid(f_t) S_{t-1} + e^{i_t} k_t [v_t, 1]^T,    [a_t, n_t] = S_t^T q_t / sqrt(key_dim)
    h_t = a_t / (max(|n_t|, 1) + eps e^{m_t}),              m_t = max(m_{t-1} + log sigmoid(f_t), i_t)

f and i are the logits of the forget gate and the input gate. The normalizer n is computed as an additional feature of
the values. The paper stores S e^{-m} to allow gates of any size. Here gate logits are capped, so S itself is finite in
float32, and m only scales `eps`. At the start of a document m is 0.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.context import ForwardContext
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import InRange, PositiveFloat, PositiveInt, check
from eqx_decoders.families.common import ends, renamed
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import MambaSizes
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Layers, Number, Only, Rule, Values, only
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs, StateShape
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    last_value_update,
    read_cache,
    state_update,
)
from eqx_decoders.layers.recurrent.scans.log_scan import DECAYING_MAX, LOG_ZERO, log_scan_on_mesh
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_MAX_GATE_CAP = 40.0  # exp(40)^2 is finite in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLSTMConfig(MixerConfig):
    """Configuration of the mLSTM layer `out(sigmoid(gate x) * norm(h))`, where h is the recurrence's output.

    **Arguments:**

    - `num_heads`, `key_dim`, `value_dim`: number of heads, and features of a key and of a value per head.
    - `gate_cap`: soft cap c of the gate logits x: `c tanh(x / c)`.
    - `eps`: epsilon added to the normalizer.
    - `norm_eps`: epsilon of the layer norm of each head.
    """

    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    gate_cap: Annotated[float, InRange(above=0, maximum=_MAX_GATE_CAP)] = 15.0
    eps: PositiveFloat = 1e-6
    norm_eps: PositiveFloat = 1e-6

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state; the normalizer is its last value feature."""
        return StateShape(heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim + 1)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name: the state S, and m as `level`; they do not depend on `max_length`."""
        return {"state": self.state, "level": ConvShape(num_inputs=1, channels=self.num_heads, dtype="float32")}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads and writes its state once."""
        return 2 * self.num_heads * self.key_dim * (self.value_dim + 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MLSTM":
        keys = jax.random.split(key, 7)
        heads = self.num_heads

        def projection(key: PRNGKeyArray, *shape: int) -> Array:
            return fan_in(key, (embed_dim, heads, *shape), jnp.float32, embed_dim, "normal")

        inner = heads, self.value_dim
        return MLSTM(
            query=projection(keys[0], self.key_dim),
            key=projection(keys[1], self.key_dim),
            value=projection(keys[2], self.value_dim),
            gate=projection(keys[3], self.value_dim),
            input_gate=projection(keys[4]),
            input_gate_bias=jnp.full((heads,), -10.0),
            forget_gate=projection(keys[5]),
            forget_gate_bias=jnp.linspace(3.0, 6.0, heads),
            norm_scale=jnp.ones(inner),
            out=fan_in(keys[6], (*inner, embed_dim), jnp.float32, inner[0] * inner[1], "normal"),
            config=self,
        )


class MLSTM(RecurrentLayer):
    """mLSTM layer `out(sigmoid(gate x) * norm(h))`, where h is the recurrence's output."""

    query: Float[Array, "embed heads key_dim"]
    key: Float[Array, "embed heads key_dim"]
    value: Float[Array, "embed heads value_dim"]
    gate: Float[Array, "embed heads value_dim"]
    input_gate: Float[Array, "embed heads"]
    input_gate_bias: Float[Array, "heads"]
    forget_gate: Float[Array, "embed heads"]
    forget_gate_bias: Float[Array, "heads"]
    norm_scale: Float[Array, "heads value_dim"]
    out: Float[Array, "heads value_dim embed"]
    config: MLSTMConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""

        def project(weight: Array, axes: str, name: str) -> Array:
            projected = ctx.einsum(f"batch length embed, embed {axes} -> batch length {axes}", x, weight)
            return save(ctx.constrain(projected, f"batch length {axes}"), name).astype(jnp.float32)

        query = project(self.query, "heads key_dim", "query_proj") * self.config.key_dim**-0.5
        key = project(self.key, "heads key_dim", "key_proj")
        value = project(self.value, "heads value_dim", "value_proj")
        log_input, log_forget = self._gates(x, ctx)
        level, level_update = self._level(log_input, log_forget, cache, ctx)
        input_gate = zero_padding(jnp.exp(log_input), ctx.positions)[..., None]
        written = input_gate * jnp.concatenate([value, jnp.ones_like(input_gate)], -1)
        log_decay = log_forget[..., None]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        scan_out, _, state = recur_on_mesh(query, key, written, log_decay, None, state, starts, execution=ctx.execution)
        updates = {
            "state": state_update(self.config.state, log_decay, key, written, state, ctx),
            "level": level_update,
        }
        normalizer = jnp.maximum(jnp.abs(scan_out[..., -1:]), 1.0) + self.config.eps * jnp.exp(level)[..., None]
        hidden = ctx.constrain((scan_out[..., :-1] / normalizer).astype(x.dtype), "batch length heads value_dim")
        gate = jax.nn.sigmoid(project(self.gate, "heads value_dim", "qkv_proj"))
        gated = (gate * self._normalize(save(hidden, "attention_out"))).astype(x.dtype)
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), updates

    def _gates(
        self, x: Array, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads"], Float32[Array, "batch length heads"]]:
        """Compute the logarithms of the input gate and of the forget gate; the forget gate is 1 at padding."""
        pattern = "batch length embed, embed heads -> batch length heads"
        cap = self.config.gate_cap

        def capped_logits(weight: Array, bias: Array) -> Array:
            logits = ctx.einsum(pattern, x, weight).astype(jnp.float32) + bias.astype(jnp.float32)[None, None]
            return ctx.constrain(cap * jnp.tanh(logits / cap), "batch length heads")

        log_forget = jax.nn.log_sigmoid(capped_logits(self.forget_gate, self.forget_gate_bias))
        log_input = capped_logits(self.input_gate, self.input_gate_bias)
        return log_input, zero_padding(log_forget, ctx.positions)

    def _level(
        self, log_input: Array, log_forget: Array, cache: dict[str, Any] | None, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads"], ConvInputs | NewConvInputs]:
        """Compute m for each token, and the proposed update of its cache."""
        level = jnp.zeros_like(log_input[:, 0]) if cache is None else cache["level"][:, 0]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        tokens = log_forget, jnp.where((ctx.positions >= 0)[:, :, None], log_input, LOG_ZERO)
        if starts is not None:  # m is 0 before a document's first token
            is_start = starts[:, :, None]
            decay, log_input = tokens
            log_input = jnp.maximum(log_input, jnp.where(is_start, log_forget, LOG_ZERO))
            tokens = jnp.where(is_start, LOG_ZERO, decay), log_input
        before, (end,) = log_scan_on_mesh(DECAYING_MAX, tokens, (level,), execution=ctx.execution)
        (after,) = DECAYING_MAX.advance(before, tokens)
        return after, last_value_update(after, end, ctx)

    def _normalize(self, hidden: Array) -> Float32[Array, "batch length heads value_dim"]:
        """Apply layer norm to each head."""
        y = hidden.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.norm_eps)
        return y * self.norm_scale.astype(jnp.float32)[None, None]


def xlstm(shape: MambaSizes, *, mixer: MLSTMConfig, mlp_dim: int, logit_cap: float = 30.0) -> DecoderConfig:
    """Return a decoder of mLSTM blocks with gated MLPs; `logit_cap` is the soft cap of the logits."""
    norm = RMSNormConfig(eps=shape.eps)
    block = BlockConfig(mixer=mixer, mlp=MLPConfig(mlp_dim=mlp_dim), pre_mixer_norm=norm, pre_mlp_norm=norm)
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=shape.embed_dim, blocks=(block,) * shape.num_layers, final_norm=norm,
        tied=shape.tied, logit_soft_cap=logit_cap,
    )  # fmt: skip


# --- config.json ---


def _mixer(
    shape: MambaSizes, *, num_heads: int, qk_dim_factor: float, v_dim_factor: float, **options: Any
) -> MLSTMConfig:
    """Return the mixer. The factors are the total features of all heads, divided by the features of the stream."""
    key_features = int(shape.embed_dim * qk_dim_factor)
    value_features = int(shape.embed_dim * v_dim_factor)
    check(
        key_features > 0 and key_features % num_heads == 0,
        f"hidden_size x qk_dim_factor={key_features} must be a positive multiple of num_heads={num_heads}.",
    )
    check(
        value_features > 0 and value_features % num_heads == 0,
        f"hidden_size x v_dim_factor={value_features} must be a positive multiple of num_heads={num_heads}.",
    )
    return MLSTMConfig(
        num_heads=num_heads,
        key_dim=key_features // num_heads,
        value_dim=value_features // num_heads,
        norm_eps=shape.eps,
        **options,
    )


def _dim_factor_of(field: str) -> Callable[[DecoderConfig], float]:
    def factor(config: DecoderConfig) -> float:
        mixer: Any = config.blocks[0].mixer
        return mixer.num_heads * getattr(mixer, field) / config.embed_dim

    return factor


def _read_mlp_dim(fields: Fields, values: Values) -> int:
    multiple = fields.integer("ffn_round_up_to_multiple_of", 64)
    unrounded = values["shape"].embed_dim * fields.number("ffn_proj_factor", 2.667)
    return int((unrounded + multiple - 1) // multiple * multiple)


def _write_mlp_dim(config: DecoderConfig) -> dict[str, Any]:
    mlp: Any = config.blocks[0].mlp
    return {
        "ffn_proj_factor": mlp.mlp_dim / config.embed_dim,
        "ffn_round_up_to_multiple_of": math.gcd(mlp.mlp_dim, 64),
    }


_SIZES = (
    Integer("vocab_size", "vocab_size", 50_304),
    Integer("hidden_size", "embed_dim", 4096, twin="embedding_dim"),
    Layers("num_hidden_layers", "blocks", 32, name="num_layers", twin="num_blocks"),
    Number("norm_eps", "final_norm.eps", 1e-6),
    Flag("tie_word_embeddings", "tied", False),
)
_MIXER = (
    Integer("num_heads", "blocks.0.mixer.num_heads", 8),
    Number("qk_dim_factor", _dim_factor_of("key_dim"), 0.5, name="qk_dim_factor"),
    Number("v_dim_factor", _dim_factor_of("value_dim"), 1.0, name="v_dim_factor"),
    Number("gate_soft_cap", "blocks.0.mixer.gate_cap", 15.0),
    Number("eps", "blocks.0.mixer.eps", 1e-6),
)
_LAYER = "backbone.blocks.{layer}."
_LSTM = _LAYER + "mlstm_layer."
_KEY_PATTERN = "(heads key_dim) embed -> embed heads key_dim"
_VALUE_PATTERN = "(heads value_dim) embed -> embed heads value_dim"
FAMILY = Family(
    model_type="xlstm",
    architecture="xLSTMForCausalLM",
    settings=(
        Group("shape", MambaSizes, _SIZES),
        Group("mixer", _mixer, _MIXER, uses=("shape",)),
        Rule("mlp_dim", _read_mlp_dim, _write_mlp_dim),
        Number("output_logit_soft_cap", "logit_soft_cap", 30.0, name="logit_cap"),
        Only("use_bias", False, written=True),
        Only("add_out_norm", True, written=True),
        Only("weight_mode", "single", written=True),
        # published files have these keys; transformers does not read them
        *only(
            head_dim=lambda values: values["mixer"].value_dim, cell_norm_eps=lambda values: values["shape"].eps,
            add_post_blocks_norm=True, add_post_norm=False, add_qk_norm=False,
        ),
    ),
    build=xlstm,
    weights=(
        *ends("backbone.embeddings", "backbone.out_norm"),
        *norm_weights(_LAYER, pre_mixer_norm="norm_mlstm", pre_mlp_norm="norm_ffn"),
        Weight(_LSTM + "q.weight", "mixer.query", _KEY_PATTERN),
        Weight(_LSTM + "k.weight", "mixer.key", _KEY_PATTERN),
        Weight(_LSTM + "v.weight", "mixer.value", _VALUE_PATTERN),
        Weight(_LSTM + "ogate_preact.weight", "mixer.gate", _VALUE_PATTERN),
        Weight(_LSTM + "igate_preact.weight", "mixer.input_gate", "heads embed -> embed heads"),
        Weight(_LSTM + "igate_preact.bias", "mixer.input_gate_bias", "heads -> heads"),
        Weight(_LSTM + "fgate_preact.weight", "mixer.forget_gate", "heads embed -> embed heads"),
        Weight(_LSTM + "fgate_preact.bias", "mixer.forget_gate_bias", "heads -> heads"),
        Weight(_LSTM + "multihead_norm.weight", "mixer.norm_scale", "(heads value_dim) -> heads value_dim"),
        Weight(_LSTM + "out_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
        *renamed(
            gated_mlp(_LAYER + "ffn."), {"gate_proj": "proj_up_gate", "up_proj": "proj_up", "down_proj": "proj_down"}
        ),
    ),
    ignored_keys={
        "autocast_kernel_dtype chunk_size chunkwise_kernel inference_state_dtype max_inference_chunksize mode "
        "norm_reduction_force_float32 return_last_states sequence_kernel step_kernel "
        "add_forward_backend_padding": "runtime option; it changes no output",
        "add_embedding_dropout igate_bias_init_range": "initialization and training only",
        "force_bos_token_insert": "for tokenizers",
        "mlstm_round_up_to_multiple_of": "qk_dim_factor and v_dim_factor determine it",
    },
)  # fmt: skip


MODELS = {
    "xlstm-7b": dict(model_type="xlstm"),
}  # fmt: skip
