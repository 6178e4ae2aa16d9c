"""GLM-4.5 to 4.7 (GLM Team 2025), GLM-4.7-Flash and GLM-5 (Z.ai 2026).

All models have DeepSeek-V3's experts.
"""

import dataclasses
import functools
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import decoder_sizes, llama_weights
from eqx_decoders.families.deepseek.blocks import (
    DEPTH,
    INDEXER,
    MLP,
    V3_COPIES,
    V3_EXPERTS,
    V3_ROPE,
    V3_WEIGHTS,
    deepseek_v3,
    expert_settings,
    indexer_settings,
    latent_mixer,
    latent_sizes,
    v3_experts_decoder,
    v3_router_settings,
    with_indexer,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP, Flag, Only, Rule, Values, values_by_layer
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.model.decoder_config import DecoderConfig


# --- GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates half of each head ---


glm4_moe = functools.partial(v3_experts_decoder, output_bias=False)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    settings=(
        AUTO_MAP,
        decoder_sizes(num_kv_heads=8, eps=1e-5),
        rope_settings(fraction=0.5),
        Flag("use_qk_norm", "attention.qk_norm", False, name="normalized"),
        *v3_router_settings(scale=1.0),
        *expert_settings(num_experts=128, chosen=8, shared=1, expert_dim=1408),
        moe.dense_layers_setting(1),
        DEPTHS,
    ),
    build=glm4_moe,
    weights=(*llama_weights(experts=V3_EXPERTS), *DEPTH),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"moe_router_dtype": "router scores are always computed in float32"},
    copies=V3_COPIES,
)


_GLM4_MOE_BASE = dict(
    model_type="glm4_moe",
    vocab_size=151_552,
    hidden_size=5120,
    num_hidden_layers=92,
    num_attention_heads=96,
    head_dim=128,
    intermediate_size=12_288,
    attention_bias=True,
    rope_theta=1_000_000.0,
)

_355B = _GLM4_MOE_BASE | dict(
    first_k_dense_replace=3,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    routed_scaling_factor=2.5,
    use_qk_norm=True,
)


# --- GLM-4.7-Flash: DeepSeek-V3's blocks with larger heads ---


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=(
        *v3_router_settings(scale=1.8),
        *latent_sizes(nope_dim=192, eps=1e-5),
        V3_ROPE,
        latent_mixer(768, value_dim=256),
        *expert_settings(num_experts=64, chosen=4, shared=1, expert_dim=1536),
        moe.dense_layers_setting(1, listed=True),
        DEPTHS,
    ),
    build=deepseek_v3,
    weights=V3_WEIGHTS,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    copies=V3_COPIES,
)


# --- GLM-5: DeepSeek-V3.2's sparse attention; several layers can share the keys that one indexer selects ---


_LAYER_TYPE = "indexed_attention"
_INDEXER_TYPES = ("shared", "full")


def glm_moe_dsa(*, indexer: IndexerConfig, full_indexers: tuple[bool, ...], **options: Any) -> DecoderConfig:
    """Return a decoder of GLM-5 blocks.

    `full_indexers`: for each layer, whether its indexer selects keys. Any other layer uses the keys that the previous
    full indexer selected. `options`: arguments of `deepseek_v3`.
    """
    config = with_indexer(deepseek_v3(**options), indexer)
    blocks = []
    next_full_indexers = (*full_indexers[1:], True)
    for block, is_full, next_is_full in zip(config.blocks, full_indexers, next_full_indexers, strict=True):
        layer_indexer = dataclasses.replace(
            indexer,
            shared_from=None if is_full else "choice",
            shares_as="choice" if is_full and not next_is_full else None,
        )
        mixer: Any = block.mixer
        blocks.append(dataclasses.replace(block, mixer=dataclasses.replace(mixer, indexer=layer_indexer)))
    return dataclasses.replace(config, blocks=tuple(blocks))


def _read_full_indexers(fields: Fields, values: Values) -> tuple[bool, ...]:
    num_layers = values["shape"].num_layers
    period = fields.integer("index_topk_freq", 1)
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    pattern = fields.take("index_topk_pattern", None)
    if isinstance(pattern, str):
        types_by_letter = {"F": "full", "S": "shared"}
        fields.content["index_topk_pattern"] = [types_by_letter.get(letter, letter) for letter in pattern]
    types = fields.words("indexer_types", _INDEXER_TYPES, num_layers)
    pattern_types = fields.words("index_topk_pattern", _INDEXER_TYPES, num_layers)
    if types is not None and pattern_types is not None and types != pattern_types:
        raise fields.error(
            f"index_topk_pattern={abbreviate(pattern)} describes other layers than indexer_types: make them equal, or "
            "remove index_topk_pattern."
        )
    types = types or pattern_types
    if types:
        return tuple(indexer_type == "full" for indexer_type in types)
    return tuple(max(index - offset + 1, 0) % period == 0 for index in range(num_layers))


def _write_full_indexers(config: DecoderConfig) -> dict[str, Any]:
    return {
        "layer_types": [_LAYER_TYPE] * len(config.blocks),
        "indexer_types": ["full" if chooses else "shared" for chooses in values_by_layer(config, "mixer.chooses")],
        "first_k_dense_replace": moe.first_sparse_layer(config),
    }


GLM_MOE_DSA = Family(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    settings=(
        indexer_settings(num_heads=32, pairing="interleaved"),
        Only("indexer_rope_interleave", True),
        Only("rope_interleave", True),
        AUTO_MAP,
        *v3_router_settings(scale=2.5),
        *latent_sizes(nope_dim=192, eps=1e-5),
        V3_ROPE,
        latent_mixer(2048, value_dim=256),
        *expert_settings(num_experts=256, chosen=8, shared=1, expert_dim=2048),
        moe.dense_layers_setting(3, listed=True),
        DEPTHS,
        Only("layer_types", lambda values: [_LAYER_TYPE] * values["shape"].num_layers),
        Rule("full_indexers", _read_full_indexers, _write_full_indexers),
    ),
    build=glm_moe_dsa,
    weights=(*V3_WEIGHTS, *INDEXER),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "the MLPs of this model have no bias in transformers"},
    copies=V3_COPIES,
)


FAMILIES = (GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA)

MODELS = {
    "glm4.5-air-106b-a12b": _GLM4_MOE_BASE | dict(hidden_size=4096, num_hidden_layers=46, intermediate_size=10_944),
    "glm4.5-355b-a32b": _355B,
    "glm4.6-355b-a32b": _355B,
    "glm4.7-355b-a32b": _355B,
    "glm4.7-flash-30b-a3b": dict(
        model_type="glm4_moe_lite", vocab_size=154_880, hidden_size=2048, num_hidden_layers=47, num_attention_heads=20,
        intermediate_size=10_240, rope_theta=1_000_000.0,
    ),
    "glm5-744b-a40b": dict(
        model_type="glm_moe_dsa", vocab_size=154_880, hidden_size=6144, num_hidden_layers=78, num_attention_heads=64,
        intermediate_size=12_288, rope_theta=1_000_000.0,
    ),
}  # fmt: skip
