"""Mistral 7B (Jiang et al. 2023), Ministral 8B and 3 (Mistral AI 2024, 2025), and Mixtral (Jiang et al. 2024).

All models have Llama's blocks. Mistral 7B v0.1 has sliding-window attention in every layer, and Ministral 8B in three
of four layers. Ministral 3 has YaRN, and scales queries by a factor that grows with their position. Mixtral has eight
experts and selects two of them for each token.
"""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    LAYER,
    NO_BIAS,
    DecoderSizes,
    decoder_sizes,
    find_window,
    layer_masks,
    llama_weights,
    read_masks,
    same_window,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import read_rope, rope_settings, write_rope
from eqx_decoders.families.setting_rows import Only, Rule, Values, value_at
from eqx_decoders.layers.attention.attention import QueryTemperature
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.model.decoder_config import DecoderConfig


# --- Mistral ---


def mistral(shape: DecoderSizes, *, rope: Rope, mask: Mask) -> DecoderConfig:
    """Return a decoder of Mistral blocks. All layers have the same attention mask."""
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask)))


def _read_mask(fields: Fields, values: Values) -> Mask:
    window = fields.integer("sliding_window", 4096, null=None)
    masks = read_masks(fields, values, window, lambda index: window is not None)
    if window is not None and Causal() in masks:
        raise fields.error(
            f"sliding_window={window} needs sliding_attention for all layers in layer_types, because all layers of "
            "Mistral have the same mask. Change layer_types, or set both keys to null."
        )
    return masks[0]


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, keys=NO_BIAS),
        Rule("mask", _read_mask, lambda config: {"sliding_window": find_window(config)}),
        rope_settings(),
    ),
    build=mistral,
    weights=llama_weights(),
    ignored_keys={"attention_bias mlp_bias use_sliding_window max_window_layers": "transformers does not read it"},
)


_BASE = dict(
    model_type="mistral",
    vocab_size=32_000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=14_336,
    rms_norm_eps=1e-05,
)


# --- Ministral ---


def ministral(shape: DecoderSizes, *, rope: Rope, masks: tuple[Mask, ...]) -> DecoderConfig:
    """Return a decoder of Ministral blocks. `masks`: attention mask of each layer."""
    return shape.decoder(map(shape.block, shape.attention_by_mask(masks, rope, rope)))


MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, keys=NO_BIAS),
        layer_masks(lambda index, values: True),
        rope_settings(),
    ),
    build=ministral,
    weights=llama_weights(),
)


# --- Ministral 3 ---


_BETA = "llama_4_scaling_beta"
_ROPE_TABLES = ("rope_parameters", "rope_scaling")


def ministral3(shape: DecoderSizes, *, rope: YarnRope, growth: float) -> DecoderConfig:
    """Return a decoder of Ministral 3 blocks.

    Queries are scaled by `1 + growth ln(1 + floor(position / rope.original_length))`.
    """
    temperature = QueryTemperature(scale=growth, length=rope.original_length, offset=0)
    return shape.decoder(shape.block(shape.attention(rope=rope, temperature=temperature)))


def _read_rope(fields: Fields, values: Values) -> Rope:
    rope = read_rope(fields, theta=1e6, others=(_BETA,))
    if not isinstance(rope, YarnRope):
        raise fields.error(
            f"rope_parameters describe {type(rope).__name__}, but rope_type must be yarn, because queries are scaled "
            "by their position relative to original_max_position_embeddings. Change rope_type."
        )
    return rope


def _read_growth(fields: Fields, values: Values) -> float:
    tables = [table for key in _ROPE_TABLES if (table := fields.table(key)) is not None]
    growths = [table.number(_BETA) for table in tables if table.content.get(_BETA) is not None]
    if len(set(growths)) > 1:
        raise fields.error(
            f"rope_parameters.{_BETA}={growths[0]} must be equal to rope_scaling.{_BETA}={growths[1]}: change or "
            "remove one of them."
        )
    return growths[0] if growths else 0.1


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    beta = {_BETA: value_at(config, "attention.temperature.scale")}
    return {key: value | beta if key in _ROPE_TABLES else value for key, value in write_rope(config).items()}


MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, head_dim=128, eps=1e-5, keys=NO_BIAS),
        Only("sliding_window", None, written=True),
        Rule("growth", _read_growth, lambda config: {}),
        Rule("rope", _read_rope, _write_rope),
    ),
    build=ministral3,
    weights=llama_weights(),
)


# --- Mixtral ---


def mixtral(
    shape: DecoderSizes,
    *,
    num_experts: int,
    num_experts_per_token: int,
    rope: Rope,
    mask: Mask,
) -> DecoderConfig:
    """Return a decoder of Mixtral blocks. Router weights are a softmax over the scores of the selected experts."""
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask), experts))


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    settings=(
        same_window(),
        decoder_sizes(num_kv_heads=8, eps=1e-5, keys=NO_BIAS, paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        rope_settings(theta=1e6),
    ),
    build=mixtral,
    weights=llama_weights(mlp=moe.separate_experts(LAYER + "block_sparse_moe.", gate="w1", up="w3", down="w2")),
    fused=moe.fused_experts(LAYER + "mlp."),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


FAMILIES = (MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL)

MODELS = {
    "mistral-7b": _BASE | dict(rope_theta=1_000_000.0, sliding_window=None),
    "mistral-7b-v0.1": _BASE,
    "ministral-8b": dict(
        model_type="ministral", vocab_size=131_072, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
        intermediate_size=12_288,
        layer_types=["full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(36)],
        rms_norm_eps=1e-05, rope_theta=100_000_000.0, sliding_window=32_768,
    ),
    "ministral3-8b": dict(
        model_type="ministral3", vocab_size=131_072, hidden_size=4096, num_hidden_layers=34, num_attention_heads=32,
        intermediate_size=14_336,
        rope_scaling=dict(
            factor=16.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16_384, rope_type="yarn",
        ),
    ),
    "mixtral-8x7b": dict(
        model_type="mixtral", vocab_size=32_000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=14_336,
    ),
    "mixtral-8x22b": dict(
        model_type="mixtral", vocab_size=32_768, hidden_size=6144, num_hidden_layers=56, num_attention_heads=48,
        intermediate_size=16_384,
    ),
}  # fmt: skip
