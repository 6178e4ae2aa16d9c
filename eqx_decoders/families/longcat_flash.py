"""LongCat-Flash (Meituan 2025): experts with a shortcut over two blocks of latent attention.

A layer of a checkpoint is two blocks here. The first block has experts, and its MLP is their shared expert. The output
of the routed experts is added to the stream after the second block. A third of the router's experts are zero experts,
which return their input.
"""

import dataclasses
import itertools
import re
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import ENDS, LAYER, DecoderSizes, renamed
from eqx_decoders.families.deepseek.blocks import LATENT, latent_attention
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import (
    AUTO_MAP,
    Flag,
    Group,
    Integer,
    Layers,
    Number,
    Only,
    Rule,
    Unused,
    Values,
    activation,
    only,
    value_at,
)
from eqx_decoders.families.weight_rows import depth_rows, gated_mlp, mtp_rows, norm_weights
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


_THETA = 10_000_000.0
_DEPTH_EMBEDDING = "model.mtp.embed_tokens.weight"


def longcat_flash(
    shape: DecoderSizes, *, rope: Rope = Rope(theta=_THETA, pairing="interleaved"), q_rank: int = 1536,
    kv_rank: int = 512, nope_dim: int = 128, value_dim: int = 128, expert_dim: int = 2048, scaling_factor: float = 6.0,
    depths: int = 0, **counts: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of LongCat-Flash layers.

    **Arguments:**

    - `shape`: sizes of the decoder; each of its `num_layers` layers is two blocks.
    - `rope`, `q_rank`, `kv_rank`, `nope_dim`, `value_dim`: options of latent attention.
    - `expert_dim`, `scaling_factor`: width of an expert, and factor of the router's weights.
    - `depths`: number of layers of multi-token prediction.
    - `counts`: `num_experts`, `num_experts_per_token` and `num_zero_experts` of `ExpertsConfig`.
    """
    mixer = latent_attention(shape, rope=rope, q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim, value_dim=value_dim)
    mixer = dataclasses.replace(
        mixer,
        query_scale=mixer.scale * (shape.embed_dim / q_rank) ** 0.5,
        kv_scale=(shape.embed_dim / kv_rank) ** 0.5,
    )
    router = RouterConfig(order="score_first", selection_bias=True, scaling_factor=scaling_factor)
    experts = shape.experts(mlp_dim=expert_dim, router=router, shared_dim=shape.mlp_dim, shortcut="experts", **counts)
    first = shape.block(mixer, experts)
    second = shape.block(mixer, shortcut_from="experts")
    config = shape.decoder((first, second) * shape.num_layers)
    return with_depths(config, depths) if depths else config


def with_depths(config: DecoderConfig, depths: int) -> DecoderConfig:
    """Return the decoder with `depths` layers of multi-token prediction; these are blocks without experts.

    They read the stream after the final norm, as in vLLM and SGLang.
    """
    if config.final_norm is None:
        raise ConversionError(
            "DecoderConfig.final_norm=None must be a norm, because layers of multi-token prediction read its output. "
            "Set it to a norm."
        )
    block = dataclasses.replace(config.blocks[1], shortcut_from=None)
    mtp = MTPConfig(num_depths=depths, block=block, norm=config.final_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


def _read_head_dim(fields: Fields, values: Values) -> None:
    """Check `head_dim`, which is the number of rotated features in transformers, like `qk_rope_head_dim`."""
    head_dim = fields.integer("head_dim", 64)
    if head_dim != values["_rope_dim"]:
        raise fields.error(f"head_dim={head_dim} must be equal to qk_rope_head_dim={values['_rope_dim']}.")


def _write_head_dim(config: DecoderConfig) -> dict[str, Any]:
    latent = value_at(config, "latent")
    return {"head_dim": latent.rope_dim, "qk_head_dim": latent.head_dim}


def _zero_expert_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the unused tensors that transformers has for zero experts, with their shapes."""
    experts = value_at(config, "experts")
    zero_experts = range(experts.num_experts, experts.num_choices)
    names = (
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        for layer, expert, projection in itertools.product(range(len(config.blocks) // 2), zero_experts, ("gate", "up"))
    )
    return dict.fromkeys(names, (experts.mlp_dim, config.embed_dim))


def _ignored_tensors(config: DecoderConfig) -> str:
    """Return the regular expression of ignored tensors.

    The embedding of multi-token prediction is one of them: vLLM and SGLang use the embedding of the model.
    """
    experts = value_at(config, "experts")
    zero_experts = "|".join(map(str, range(experts.num_experts, experts.num_choices)))
    zero_expert_tensors = rf"model\.layers\.\d+\.mlp\.experts\.({zero_experts or '-'})\.(gate|up)_proj\.weight"
    return rf".*rotary_emb\.inv_freq|{re.escape(_DEPTH_EMBEDDING)}|{zero_expert_tensors}"


_SIZES = (
    Integer("num_attention_heads", "latent.num_heads", 64, name="num_heads"),
    Integer("num_key_value_heads", "latent.num_heads", lambda values: values["num_heads"], name="num_kv_heads"),
    Integer("", None, lambda values: values["nope_dim"] + values["_rope_dim"], name="head_dim"),
    Integer("hidden_size", "embed_dim", 6144),
    Integer("vocab_size", "vocab_size", 131_072),
    Layers("num_layers", lambda config: config.blocks[::2], 28, name="num_layers"),
    Integer("ffn_hidden_size", "mlp.mlp_dim", 12_288),
    Number("rms_norm_eps", "final_norm.eps", 1e-5),
    Flag("tie_word_embeddings", "tied", False),
    activation("hidden_act", "mlp.activation", "silu"),
    Number("initializer_range", "init_std", 0.02),
    Flag("attention_bias", "latent.bias", False, name="attention_bias"),
)

_PART = {"self_attn.": "self_attn.{part}."}
_MLPS = LAYER + "mlps.{part}."
_DEPTH = "model.mtp.layers.{depth}."
FAMILY = Family(
    model_type="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    settings=(
        AUTO_MAP,
        Integer("qk_nope_head_dim", "latent.nope_dim", 128),
        Integer("qk_rope_head_dim", "latent.rope_dim", 64, name="_rope_dim"),
        Rule("", _read_head_dim, _write_head_dim),
        Only("qk_head_dim", lambda values: values["nope_dim"] + values["_rope_dim"]),
        Group("shape", DecoderSizes, _SIZES),
        Unused("num_hidden_layers", "transformers 4 writes the number of blocks to this key, but reads num_layers"),
        Integer("q_lora_rank", "latent.q_rank", 1536),
        Integer("kv_lora_rank", "latent.kv_rank", 512),
        Integer("v_head_dim", "latent.value_dim", 128),
        *moe.expert_counts("n_routed_experts", "moe_topk", num=512, chosen=12),
        Integer("zero_expert_num", "experts.num_zero_experts", 256, null=0, least=0),
        Integer("expert_ffn_hidden_size", "experts.mlp_dim", 2048, name="expert_dim"),
        Number("routed_scaling_factor", "experts.router.scaling_factor", 6.0),
        Rule("rope", lambda fields, values: read_rope(fields, theta=_THETA, pairing="interleaved"), write_rope),
        DEPTHS,
        *only(
            attention_method="MLA", mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_type="identity",
            router_bias=False, norm_topk_prob=False,
        ),
    ),
    build=longcat_flash,
    weights=(
        *ENDS,
        *norm_weights(
            LAYER, pre_mixer_norm="input_layernorm.{part}", pre_mlp_norm="post_attention_layernorm.{part}"
        ),
        *(row for row in renamed(LATENT, _PART) if "self_attn" in row.name),
        *gated_mlp(_MLPS),
        *gated_mlp(_MLPS, "mlp.shared."),
        *moe.separate_experts(LAYER + "mlp.", router="router.classifier", bias="router.e_score_correction_bias"),
        *renamed(mtp_rows(LATENT, LAYER, _DEPTH), {".mlp.": ".transformer_layer.mlp."}),
        *renamed(
            depth_rows(_DEPTH, embed_norm="enorm.m", stream_norm="hnorm.m", kernels="eh_proj", final_norm="norm"),
            {"layers.{depth}.norm": "norm"},
        ),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"router_dtype": "routers are always computed in float32"},
    ignored_tensors=_ignored_tensors,
    zero_tensors=_zero_expert_tensors,
    copies={_DEPTH_EMBEDDING: "model.embed_tokens.weight"},
    with_depths=with_depths,
    blocks_per_layer=2,
)  # fmt: skip


MODELS = {
    "longcat-flash-560b-a27b": dict(model_type="longcat_flash"),
}  # fmt: skip
