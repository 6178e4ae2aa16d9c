"""Doge (Shi et al. 2025): attention to the keys with the largest learned biases, residual connections with gains.

Models with experts are not implemented, because their router mixes tokens.
"""

from eqx_decoders.blocks.residual.residual import Weighted
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Integer, Only
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.variants.dynamic_mask import DynamicMaskConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def doge(shape: DecoderSizes, *, top_k: int = 2048, mlp_bias: bool = False, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of Doge blocks; each query attends to `top_k` keys."""
    attention = shape.attention(rope=rope, qk_norm=shape.qk_norm)
    mixer = DynamicMaskConfig(attention=attention, top_k=top_k)
    return shape.decoder(shape.block(mixer, shape.mlp(bias=mlp_bias), residual=Weighted(gains=True)))


_ATTENTION = LAYER + "self_attn."
_HEADS = "blocks.0.mixer.attention."
_PATHS = {
    "num_attention_heads": _HEADS + "num_heads",
    "num_key_value_heads": _HEADS + "num_kv_heads",
    "head_dim": _HEADS + "head_dim",
    "attention_bias": _HEADS + "qkv_bias",
}
FAMILY = Family(
    model_type="doge",
    architecture="DogeForCausalLM",
    settings=(
        decoder_sizes(paths=_PATHS),
        Integer("keep_window_size", "blocks.0.mixer.top_k", 2048, name="top_k"),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        Only("sliding_window", written=True),
        Only("is_moe", False, written=True),
        rope_settings(),
    ),
    build=doge,
    weights=(
        *llama_weights(),
        Weight(
            _ATTENTION + "dt_proj.weight", "mixer.step",
            "mask_heads (kv_heads head_dim) -> kv_heads head_dim mask_heads",
        ),
        Weight(_ATTENTION + "dt_proj.bias", "mixer.step_bias", "mask_heads -> mask_heads"),
        Weight(_ATTENTION + "A", "mixer.rate", "mask_heads -> mask_heads"),
        Weight(LAYER + "input_residual", "residual.gains.0.scale", "embed -> embed"),
        Weight(LAYER + "post_attention_residual", "residual.gains.1.scale", "embed -> embed"),
    ),
    ignored_keys={
        "hidden_dropout": "dropout is used in training only",
        "num_experts num_experts_per_tok norm_topk_prob output_router_logits "
        "router_aux_loss_coef": "there are no experts",
    },
)  # fmt: skip


_SETTINGS = dict(
    model_type="doge",
    vocab_size=32_768,
    max_position_embeddings=2048,
    rope_scaling=dict(factor=4.0, rope_type="dynamic"),
    tie_word_embeddings=True,
)

MODELS = {
    "doge-20m": _SETTINGS | dict(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=512,
    ),
    "doge-60m": _SETTINGS | dict(
        hidden_size=512, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024,
    ),
    "doge-160m": _SETTINGS | dict(
        hidden_size=768, num_hidden_layers=24, num_attention_heads=6, num_key_value_heads=3, intermediate_size=1536,
    ),
    "doge-320m": _SETTINGS | dict(
        hidden_size=1024, num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=4, intermediate_size=2048,
    ),
}  # fmt: skip
