"""Qwen3-VL with experts (Bai et al. 2025): Qwen3 with experts, and images and videos that enter at three depths."""

from eqx_decoders.families import moe
from eqx_decoders.families._qwen import sparse_text_settings
from eqx_decoders.families._qwen_vision import qwen3_vl_family, with_vl_vision
from eqx_decoders.families.common import llama_weights
from eqx_decoders.families.multimodal import ExtendedModel
from eqx_decoders.families.settings_table import Only


_MLP = "model.layers.{layer}.mlp."


# published files have matrices `[in, out]`; transformers 5 also writes `[out, in]`
_TRANSPOSED = moe.fused_experts(_MLP, gate_up="experts embed mlp", down="experts mlp embed")
FAMILY = qwen3_vl_family(
    "qwen3_moe",
    dict(
        model_type="qwen3_vl_moe_text",
        architecture="Qwen3VLMoeTextModel",
        settings=(
            Only("norm_topk_prob", True, written=True),  # transformers always does it
            *sparse_text_settings(
                num_kv_heads=16, mlp_dim=5632, expert_dim=1408, num_experts=60, num_experts_per_token=4, theta=500_000.0
            ),
        ),
        weights=llama_weights(experts=moe.fused_experts(_MLP)),
        fused=(),
        transposed=_TRANSPOSED,
    ),
    model_type="qwen3_vl_moe",
    kind="qwen3_vl_moe_vision",
    architecture="Qwen3VLMoeForConditionalGeneration",
    # the class of the decoder's settings ties tables by default, and the outer value counts
    own_settings=lambda content: {"tie_word_embeddings": False, **content},
)

MODELS = {
    "qwen3-vl-30b-a3b": ExtendedModel("qwen3-30b-a3b", with_vl_vision),
    "qwen3-vl-235b-a22b": ExtendedModel("qwen3-235b-a22b", with_vl_vision),
}
