"""GPT-OSS (OpenAI 2025): attention sinks, windows in every other layer, biases, experts with a clipped SwiGLU."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, cycle_mask_settings, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import Number, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.model.decoder_config import DecoderConfig


_ROPE = YarnRope(theta=150_000.0, factor=32.0, original_length=4096, truncate=False)


def gpt_oss(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    num_experts: int,
    num_experts_per_token: int = 4,
    rope: Rope = _ROPE,
    limit: float = 7.0,
) -> DecoderConfig:
    """Return a decoder of GPT-OSS blocks.

    Experts compute `down((up + 1) * gate * sigmoid(1.702 gate))`.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.mlp_dim` is the width of an expert.
    - `masks`: the attention mask of each layer.
    - `num_experts`, `num_experts_per_token`: number of experts, and number of experts per token.
    - `rope`: rotary embedding.
    - `limit`: bound to which gate and up projections are clipped.
    """
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        activation="quick_gelu",
        up_offset=1.0,
        limit=limit,
        bias=True,
        router=RouterConfig(bias=True),
    )
    return shape.decoder(shape.block(shape.attention(mask=mask, rope=rope, sinks=True), experts) for mask in masks)


def _read_rope(fields: Fields, values: Values) -> Rope:
    has_scaling = any(fields.content.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    return read_rope(fields, theta=150_000.0) if has_scaling else _ROPE


_MLP = LAYER + "mlp."
_EXPERTS = moe.fused_experts(_MLP, "router", gate_up="experts embed mlp", down="experts mlp embed", within="mlp")
_BIAS = "experts mlp -> experts mlp"
FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    settings=(
        decoder_sizes(
            num_kv_heads=8, head_dim=64, eps=1e-5, attention_bias=True, keys={"hidden_act": None},
            paths=moe.EXPERT_PATHS,
        ),
        Only("hidden_act", "silu", written=True),
        Only("swiglu_alpha", 1.702, written=True),
        Number("swiglu_limit", "experts.limit", 7.0),
        *moe.expert_counts("num_local_experts", num=128, chosen=4),
        Only("experts_per_token", lambda values: values["num_experts_per_token"]),  # older name of num_experts_per_tok
        cycle_mask_settings(2, window=128),
        Rule("rope", _read_rope, write_rope),
    ),
    build=gpt_oss,
    weights=(
        *llama_weights(mlp=_EXPERTS),
        Weight(LAYER + "self_attn.sinks", "mixer.sink", "heads -> heads"),
        Weight(_MLP + "router.bias", "mlp.router.bias", "experts -> experts"),
        *sharing(
            _MLP + "experts.gate_up_proj_bias",
            ("mlp.gate_bias", _BIAS),
            ("mlp.up_bias", _BIAS),
            axis=1,
            within="mlp",
        ),
        Weight(_MLP + "experts.down_proj_bias", "mlp.down_bias", "experts embed -> experts embed"),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"initial_context_length": "rope_scaling determines it"},
)  # fmt: skip


_BASE = dict(
    model_type="gpt_oss",
    vocab_size=201_088,
    hidden_size=2880,
    num_attention_heads=64,
    intermediate_size=2880,
    rope_scaling=dict(factor=32.0, original_max_position_embeddings=4096, rope_type="yarn", truncate=False),
)

MODELS = {
    "gpt-oss-20b": _BASE | dict(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": _BASE | dict(num_hidden_layers=36),
}  # fmt: skip
