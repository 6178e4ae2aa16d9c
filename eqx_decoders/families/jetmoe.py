"""JetMoe (Shen et al. 2024): a mixture of attention heads, and a mixture of experts instead of MLPs."""

from eqx_decoders.families import moe
from eqx_decoders.families.common import ENDS, LAYER, PRE_NORMS, DecoderSizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Check, Flag, Group, Integer, Layers, Number, activation
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.variants.head_mixture import HeadMixtureConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def jetmoe(shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of JetMoe blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.num_heads` is the number of query heads that a token uses, and `shape.eps`
        applies only to the final norm.
    - `num_experts`, `num_experts_per_token`: number of experts, and number of experts per token. Attention and MLP have
        equal numbers.
    - `rope`: rotary embedding.
    """
    mixer = HeadMixtureConfig(attention=shape.attention(rope=rope, out_bias=True), num_experts=num_experts)
    experts = shape.experts(out_bias=True, num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.decoder(shape.block(mixer, experts, RMSNormConfig(eps=1e-6)))


_HEADS = "blocks.0.mixer.attention."
_SIZES = (
    Integer("num_key_value_heads", _HEADS + "num_kv_heads", 16),
    Integer("", None, lambda values: values["num_kv_heads"] * values["num_experts_per_token"], name="num_heads"),
    Integer("kv_channels", _HEADS + "head_dim", 128),
    Integer("hidden_size", "embed_dim", 2048),
    Integer("vocab_size", "vocab_size", 32_000),
    Layers("num_hidden_layers", "blocks", 12, name="num_layers"),
    Integer("intermediate_size", "experts.mlp_dim", 5632),
    Number("rms_norm_eps", "final_norm.eps", 1e-6),
    Flag("tie_word_embeddings", "tied", True),
    activation("activation_function", "experts.activation", "silu"),
    Number("initializer_range", "init_std", 0.01),
)

_ATTENTION = LAYER + "self_attention."
_HEAD_EXPERTS = _ATTENTION + "experts."
_MLP = LAYER + "mlp."
_KEY_PATTERN = "(kv_heads head_dim) embed -> embed kv_heads head_dim"
_MLP_PATTERN = "experts mlp embed -> experts embed mlp"
_ROUTER_PATTERN = "experts embed -> embed experts"
FAMILY = Family(
    model_type="jetmoe",
    architecture="JetMoeForCausalLM",
    settings=(
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        Group("shape", DecoderSizes, _SIZES),
        Integer("num_attention_heads", _HEADS + "num_heads", lambda values: values["shape"].num_heads, name="_heads"),
        Check(
            lambda values: values["_heads"] == values["shape"].num_heads,
            "num_attention_heads={_heads} must be num_key_value_heads x num_experts_per_tok={shape.num_heads}.",
        ),
        rope_settings(),
    ),
    build=jetmoe,
    weights=(
        *ENDS,
        *PRE_NORMS,
        Weight(_HEAD_EXPERTS + "router.layer.weight", "mixer.router.kernel", _ROUTER_PATTERN),
        Weight(
            _HEAD_EXPERTS + "input_linear.weight", "mixer.query",
            "experts (kv_heads head_dim) embed -> experts embed kv_heads head_dim",
        ),
        Weight(
            _HEAD_EXPERTS + "output_linear.weight", "mixer.out",
            "experts embed (kv_heads head_dim) -> experts kv_heads head_dim embed",
        ),
        Weight(_HEAD_EXPERTS + "bias", "mixer.out_bias", "embed -> embed"),
        *sharing(_ATTENTION + "kv_proj.weight", ("mixer.key", _KEY_PATTERN), ("mixer.value", _KEY_PATTERN)),
        Weight(_MLP + "router.layer.weight", "mlp.router.kernel", _ROUTER_PATTERN),
        *sharing(_MLP + "input_linear.weight", ("mlp.gate", _MLP_PATTERN), ("mlp.up", _MLP_PATTERN), axis=1),
        Weight(_MLP + "output_linear.weight", "mlp.down", "experts embed mlp -> experts mlp embed"),
        Weight(_MLP + "bias", "mlp.out_bias", "embed -> embed"),
    ),
    other_architectures=("JetMoEForCausalLM",),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"aux_loss_coef": "training of routers only"},
)  # fmt: skip


MODELS = {
    "jetmoe-8b-a2b": dict(model_type="jetmoe", num_hidden_layers=24, rms_norm_eps=1e-05),
}  # fmt: skip
