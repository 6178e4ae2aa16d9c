"""Trinity (Arcee AI 2025): gated attention, RoPE in the layers with windows only, four norms a block, experts."""

import dataclasses
import functools
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import v3_router
from eqx_decoders.families.common import (
    ENDS,
    GATED_MLP,
    DecoderSizes,
    cycle_masks,
    decoder_sizes,
    gated_mlp,
    norm_weights,
    self_attention,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Flag, Integer, Number, Only
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def afmoe(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    num_dense_layers: int = 2,
    scaling_factor: float = 2.826,
    rope: Rope = Rope(),
    scaled_embedding: bool = True,
    **options: Any,
) -> DecoderConfig:
    """Return a decoder of Trinity blocks, the first with `shape`'s MLP, the others with experts with these options."""
    experts = moe.with_shared(shape, router=v3_router(scaling_factor=scaling_factor), **options)
    attention = shape.attention(qk_norm=QKNorm(norm=shape.norm), output_gate=True)

    def block(index: int, mask: Mask) -> BlockConfig:
        mixer = dataclasses.replace(attention, mask=mask, rope=None if mask == Causal() else rope)
        return shape.block(mixer, None if index < num_dense_layers else experts, norms="sandwich")

    scale = shape.embed_dim**0.5 if scaled_embedding else 1.0
    return moe.need_experts(shape.decoder(map(block, range(shape.num_layers), masks), embedding_scale=scale))


_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "mlp."
FAMILY = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    settings=(
        AUTO_MAP,
        # these stand in the published files, and transformers does not read them
        *(Only(key, 1) for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")),
        Only("score_func", "sigmoid"),
        Only("route_norm", True),
        decoder_sizes(head_dim=128, eps=1e-5),
        Integer("global_attn_every_n_layers", None, 4, name="_period"),
        cycle_masks(window=1024),
        Integer("moe_intermediate_size", "experts.mlp_dim", 1408, name="expert_dim"),
        *moe.expert_counts("num_experts", num=64, chosen=6),
        moe.num_shared("num_shared_experts", 2),
        moe.num_dense_layers("num_dense_layers", 1),
        Number("route_scale", "experts.router.scaling_factor", 1.0),
        Flag("mup_enabled", lambda config: config.embedding_scale != 1.0, False, name="scaled_embedding"),
        rope_settings(required=False),
    ),
    build=afmoe,
    weights=(
        *ENDS,
        *self_attention(_LAYER),
        Weight(_LAYER + "self_attn.gate_proj.weight", "mixer.gate", "(heads head_dim) embed -> embed heads head_dim"),
        *norm_weights(
            _LAYER,
            pre_mixer_norm="input_layernorm",
            post_mixer_norm="post_attention_layernorm",
            pre_mlp_norm="pre_mlp_layernorm",
            post_mlp_norm="post_mlp_layernorm",
        ),
        *GATED_MLP,
        *moe.separate_experts(_MLP, router="router.gate"),
        Weight(_MLP + "expert_bias", "mlp.router.selection_bias", "experts -> experts"),
        *gated_mlp(_MLP + "shared_experts.", "mlp.shared."),
    ),
    fused=moe.fused_experts(_MLP, "router.gate"),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {"global_attn_every_n_layers": "layer_types says it", "load_balance_coeff": "how it was trained"}
    | {"use_grouped_mm": "how it is run"},
)

_shape = functools.partial(DecoderSizes, vocab_size=200_192, head_dim=128, eps=1e-5)
_NANO = _shape(embed_dim=1024, num_layers=56, num_heads=8, num_kv_heads=2, mlp_dim=3072)
_MINI = _shape(embed_dim=2048, num_layers=32, num_heads=32, num_kv_heads=4, mlp_dim=6144)
_LARGE = _shape(embed_dim=3072, num_layers=60, num_heads=48, num_kv_heads=8, mlp_dim=12_288)
_8_OF_128: dict[str, Any] = dict(num_experts=128, num_experts_per_token=8, num_shared=1)
_4_OF_256: dict[str, Any] = dict(num_experts=256, num_experts_per_token=4, num_shared=1)

MODELS = {
    "trinity-nano-6b-a1b": lambda: afmoe(_NANO, masks=_NANO.cycle_masks(2048, 4), expert_dim=256, **_8_OF_128),
    "trinity-mini-26b-a3b": lambda: afmoe(_MINI, masks=_MINI.cycle_masks(2048, 4), expert_dim=1024, **_8_OF_128),
    "trinity-large-398b-a13b": lambda: afmoe(
        _LARGE, masks=_LARGE.cycle_masks(4096, 4), expert_dim=3072, num_dense_layers=6, scaling_factor=2.448,
        **_4_OF_256,
    ),
}  # fmt: skip
