"""What DeepSeek-V2, DeepSeek-V3 and Kimi K2 share: latent attention, a few dense layers, then layers with experts."""

from typing import Any

from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families.common import ENDS, GATED_MLP, PRE_NORMS, DecoderSizes, gated_mlp, read_shape, write_outer
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Weight
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder import DecoderConfig


def deepseek(
    shape: DecoderSizes,
    *,
    router: RouterConfig,
    num_experts: int,
    num_experts_per_token: int,
    num_shared: int,
    expert_dim: int,
    num_dense_layers: int,
    rope: Rope,
    q_rank: int | None,
    kv_rank: int = 512,
    nope_dim: int = 128,
    value_dim: int = 128,
    mlp_bias: bool = False,
) -> DecoderConfig:
    """A decoder of DeepSeek blocks.

    Heads have `shape.head_dim` features in queries and keys: `nope_dim` that are not rotated, and the others. `shape`'s
    MLP is that of the first `num_dense_layers`; `num_shared` experts are used by every token.
    """
    mixer = LatentAttentionConfig(  # its norms have the default eps, not that of the other norms
        num_heads=shape.num_heads,
        q_rank=q_rank,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=shape.head_dim - nope_dim,
        value_dim=value_dim,
        rope=rope,
        bias=shape.attention_bias,
    )
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=expert_dim,
        router=router,
        shared=MLPConfig(mlp_dim=expert_dim * num_shared, activation=shape.activation, bias=mlp_bias),
    )
    dense, sparse = shape.block(mixer, shape.mlp(bias=mlp_bias)), shape.block(mixer, experts)
    return shape.decoder(dense if index < num_dense_layers else sparse for index in range(shape.num_layers))


def read_deepseek(
    fields: Fields, router: RouterConfig, *, num_experts: int, num_shared: int, expert_dim: int, num_dense_layers: int,
    interleaved: bool, **options: Any,
) -> DecoderConfig:  # fmt: skip
    """The configuration with this router; the four numbers are what transformers takes where a key is missing."""
    for key in ("head_dim", "qk_head_dim"):  # they follow from the sizes with and without rotation
        fields.content.pop(key, None)
    fields.content.pop("auto_map", None)  # names code in the same directory, which is neither run nor exported
    fields.allow_only("moe_layer_freq", 1)
    fields.allow_only("ep_size", 1)
    nope_dim = fields.integer("qk_nope_head_dim", 128)
    shape = read_shape(fields, head_dim=nope_dim + fields.integer("qk_rope_head_dim", 64))
    if shape.num_kv_heads != shape.num_heads:
        raise fields.error("num_key_value_heads must be num_attention_heads: latent attention has as many of both.")
    config = deepseek(
        shape,
        router=router,
        num_experts=fields.integer("n_routed_experts", num_experts),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        num_shared=fields.integer("n_shared_experts", num_shared),
        expert_dim=fields.integer("moe_intermediate_size", expert_dim),
        num_dense_layers=fields.integer("first_k_dense_replace", num_dense_layers, least=0),
        rope=read_rope(fields, pairing="interleaved" if interleaved else "half"),
        q_rank=fields.integer("q_lora_rank", 1536, null=None),
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        **options,
    )
    return moe.need_experts(fields, config)


def write_deepseek(config: DecoderConfig) -> dict[str, Any]:
    """The keys that `read_deepseek` reads, and those of the router."""
    mixer, experts = config.blocks[0].mixer, moe.experts_of(config)
    if not isinstance(mixer, LatentAttentionConfig) or experts.shared is None:
        raise ConversionError("DecoderConfig.blocks must have latent attention, and shared experts.")
    settings = {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "intermediate_size": moe.dense_dim(config, default=experts.mlp_dim),
        "n_shared_experts": max(1, experts.shared.mlp_dim // experts.mlp_dim),
        "first_k_dense_replace": moe.sparse_layers(config)[0],
        "routed_scaling_factor": experts.router.scaling_factor,
        "n_group": experts.router.num_groups,
        "topk_group": experts.router.groups_per_token,
    }
    sizes = write_outer(config) | moe.write_experts(config, count="n_routed_experts", width="moe_intermediate_size")
    return sizes | settings | write_rope(config)


_ATTENTION = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."
WEIGHTS = (
    *ENDS,
    *PRE_NORMS,
    Weight(_ATTENTION + "q_proj.weight", "mixer.query", "(heads qk_dim) embed -> embed heads qk_dim"),
    Weight(_ATTENTION + "q_a_proj.weight", "mixer.query_down", "q_rank embed -> embed q_rank"),
    Weight(_ATTENTION + "q_a_proj.bias", "mixer.query_down_bias", "q_rank -> q_rank"),
    Weight(_ATTENTION + "q_a_layernorm.weight", "mixer.query_norm.scale", "norm -> norm"),
    Weight(_ATTENTION + "q_b_proj.weight", "mixer.query_up", "(heads qk_dim) q_rank -> q_rank heads qk_dim"),
    Weight(_ATTENTION + "kv_a_proj_with_mqa.weight", "mixer.kv_down", "latent embed -> embed latent"),
    Weight(_ATTENTION + "kv_a_proj_with_mqa.bias", "mixer.kv_down_bias", "latent -> latent"),
    Weight(_ATTENTION + "kv_a_layernorm.weight", "mixer.kv_norm.scale", "norm -> norm"),
    Weight(_ATTENTION + "kv_b_proj.weight", "mixer.kv_up", "(heads kv_dim) kv_rank -> kv_rank heads kv_dim"),
    Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
    Weight(_ATTENTION + "o_proj.bias", "mixer.out_bias", "embed -> embed"),
    *GATED_MLP,
    *moe.separate_experts(MLP),
    *gated_mlp(MLP + "shared_experts.", "mlp.shared."),
)
