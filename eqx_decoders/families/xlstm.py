"""xLSTM (Beck et al. 2025): mLSTM layers, which are linear recurrences with exponential gates and a normalizer."""

import math
from collections.abc import Callable
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import check
from eqx_decoders.families.common import ends, renamed
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.mamba.blocks import MambaSizes
from eqx_decoders.families.settings_table import Flag, Group, Integer, Layers, Number, Only, Rule, Values, only
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.mlstm import MLSTMConfig
from eqx_decoders.model.decoder_config import DecoderConfig


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


def _dim_factor(field: str) -> Callable[[DecoderConfig], float]:
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
    Number("qk_dim_factor", _dim_factor("key_dim"), 0.5, name="qk_dim_factor"),
    Number("v_dim_factor", _dim_factor("value_dim"), 1.0, name="v_dim_factor"),
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
