"""xLSTM (Beck et al. 2025): mLSTMs, linear recurrences with exponential gates and a normalizer, without attention."""

import math
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
    """Return a decoder of mLSTM blocks, each with a gated MLP."""
    norm, mlp = RMSNormConfig(eps=shape.eps), MLPConfig(mlp_dim=mlp_dim)
    block = BlockConfig(mixer=mixer, mlp=mlp, pre_mixer_norm=norm, pre_mlp_norm=norm)
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=shape.embed_dim, blocks=(block,) * shape.num_layers, final_norm=norm,
        tied=shape.tied, logit_soft_cap=logit_cap,
    )  # fmt: skip


# --- config.json ---


def _mixer(shape: MambaSizes, *, num_heads: int, keys: float, values: float, **options: Any) -> MLSTMConfig:
    """Return the mixer; `keys` and `values` are the features of all heads, as shares of the stream's."""
    sizes = {"key_dim": int(shape.embed_dim * keys), "value_dim": int(shape.embed_dim * values)}
    for name, size in sizes.items():
        rule = f"hidden_size x {'qk' if name == 'key_dim' else 'v'}_dim_factor={size} must be a multiple of num_heads"
        check(size > 0 and size % num_heads == 0, f"{rule}={num_heads}.")
    heads = {name: size // num_heads for name, size in sizes.items()}
    return MLSTMConfig(num_heads=num_heads, norm_eps=shape.eps, **heads, **options)


def _share(name: str) -> Any:
    def share(config: DecoderConfig) -> float:
        mixer: Any = config.blocks[0].mixer
        return mixer.num_heads * getattr(mixer, name) / config.embed_dim

    return share


def _read_mlp(fields: Fields, values: Values) -> int:
    """Read the features of the MLPs: a share of the stream's, rounded up to whole multiples."""
    multiple = fields.integer("ffn_round_up_to_multiple_of", 64)
    wanted = values["shape"].embed_dim * fields.number("ffn_proj_factor", 2.667)
    return int((wanted + multiple - 1) // multiple * multiple)


def _write_mlp(config: DecoderConfig) -> dict[str, Any]:
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
    Number("qk_dim_factor", _share("key_dim"), 0.5, name="keys"),
    Number("v_dim_factor", _share("value_dim"), 1.0, name="values"),
    Number("gate_soft_cap", "blocks.0.mixer.gate_cap", 15.0),
    Number("eps", "blocks.0.mixer.eps", 1e-6),
)
_LAYER = "backbone.blocks.{layer}."
_LSTM = _LAYER + "mlstm_layer."
_KEYS, _VALUES = "(heads key_dim) embed -> embed heads key_dim", "(heads value_dim) embed -> embed heads value_dim"
FAMILY = Family(
    model_type="xlstm",
    architecture="xLSTMForCausalLM",
    settings=(
        Group("shape", MambaSizes, _SIZES),
        Group("mixer", _mixer, _MIXER, uses=("shape",)),
        Rule("mlp_dim", _read_mlp, _write_mlp),
        Number("output_logit_soft_cap", "logit_soft_cap", 30.0, name="logit_cap"),
        Only("use_bias", False, written=True),
        Only("add_out_norm", True, written=True),
        Only("weight_mode", "single", written=True),
        # published files have these keys of earlier code, and transformers does not read them
        *only(
            head_dim=lambda values: values["mixer"].value_dim, cell_norm_eps=lambda values: values["shape"].eps,
            add_post_blocks_norm=True, add_post_norm=False, add_qk_norm=False,
        ),
    ),
    build=xlstm,
    weights=(
        *ends("backbone.embeddings", "backbone.out_norm"),
        *norm_weights(_LAYER, pre_mixer_norm="norm_mlstm", pre_mlp_norm="norm_ffn"),
        Weight(_LSTM + "q.weight", "mixer.query", _KEYS),
        Weight(_LSTM + "k.weight", "mixer.key", _KEYS),
        Weight(_LSTM + "v.weight", "mixer.value", _VALUES),
        Weight(_LSTM + "ogate_preact.weight", "mixer.gate", _VALUES),
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
        "add_forward_backend_padding": "how it is run",
        "add_embedding_dropout igate_bias_init_range": "how it was begun and trained",
        "force_bos_token_insert": "for tokenizers",
        "mlstm_round_up_to_multiple_of": "`qk_dim_factor` and `v_dim_factor` say it",
    },
)  # fmt: skip


MODELS = {
    "xlstm-7b": dict(model_type="xlstm"),
}  # fmt: skip
