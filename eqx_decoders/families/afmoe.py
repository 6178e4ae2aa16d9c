"""Trinity (Arcee AI 2025): gated attention, RoPE only in layers with windows, four norms per block, experts."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, cycle_mask_settings, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.deepseek.blocks import MLP, v3_router
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP, Flag, Number, only
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def afmoe(
    shape: DecoderSizes, *, masks: tuple[Mask, ...], num_dense_layers: int = 2, scaling_factor: float = 2.826,
    rope: Rope = Rope(), scaled_embedding: bool = True, **options: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of Trinity blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `masks`: the attention mask of each layer.
    - `num_dense_layers`: number of layers before the first layer with experts.
    - `scaling_factor`: factor of the router's weights.
    - `rope`: rotary embedding of layers with windows.
    - `scaled_embedding`: whether embeddings are multiplied by `embed_dim**0.5`.
    - `options`: arguments of `moe.experts_with_shared`.
    """
    experts = moe.experts_with_shared(shape, router=v3_router(scaling_factor=scaling_factor), **options)
    mixers = shape.attention_by_mask(masks, None, rope, qk_norm=shape.qk_norm, output_gate=True)
    scale = shape.embed_dim**0.5 if scaled_embedding else 1.0
    return moe.sparse_decoder(shape, mixers, experts, range(num_dense_layers), norms="sandwich", embedding_scale=scale)


_EXPERTS = moe.separate_experts(MLP, router="router.gate", bias="expert_bias", shared="shared_experts")
FAMILY = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    settings=(
        AUTO_MAP,
        # published files have these keys; transformers does not read them
        *only(n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1),
        *only(score_func="sigmoid", route_norm=True),
        decoder_sizes(head_dim=128, eps=1e-5),
        cycle_mask_settings(4, key="global_attn_every_n_layers", window=1024),
        *moe.expert_counts("num_experts", num=64, chosen=6, width=1408),
        moe.num_shared("num_shared_experts", 2),
        moe.num_dense_layers("num_dense_layers", 1),
        Number("route_scale", "experts.router.scaling_factor", 1.0),
        Flag("mup_enabled", lambda config: config.embedding_scale != 1.0, False, name="scaled_embedding"),
        rope_settings(required=False),
    ),
    build=afmoe,
    weights=(
        *renamed(llama_weights(norms="sandwich", experts=_EXPERTS), {"feedforward": "mlp"}),
        Weight(LAYER + "self_attn.gate_proj.weight", "mixer.gate", "(heads head_dim) embed -> embed heads head_dim"),
    ),
    fused=moe.fused_experts(MLP, "router.gate"),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "global_attn_every_n_layers": "layer_types determines it",
        "load_balance_coeff": "training only",
        "use_grouped_mm": "runtime option; it changes no output",
    },
)


_BASE = dict(
    model_type="afmoe",
    vocab_size=200_192,
    mup_enabled=True,
    num_dense_layers=2,
    num_experts=128,
    num_experts_per_tok=8,
    num_shared_experts=1,
    route_scale=2.826,
    sliding_window=2048,
)

MODELS = {
    "trinity-nano-6b-a1b": _BASE | dict(
        hidden_size=1024, num_hidden_layers=56, num_attention_heads=8, num_key_value_heads=2, intermediate_size=3072,
        moe_intermediate_size=256,
    ),
    "trinity-mini-26b-a3b": _BASE | dict(
        hidden_size=2048, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=4, intermediate_size=6144,
        moe_intermediate_size=1024,
    ),
    "trinity-large-398b-a13b": _BASE | dict(
        hidden_size=3072, num_hidden_layers=60, num_attention_heads=48, num_key_value_heads=8, intermediate_size=12_288,
        moe_intermediate_size=3072, num_dense_layers=6, num_experts=256, num_experts_per_tok=4, route_scale=2.448,
        sliding_window=4096,
    ),
}  # fmt: skip
