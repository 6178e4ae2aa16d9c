"""LongCat-Flash (Meituan 2025): two layers of latent attention each, around which experts take a shortcut.

A layer of a checkpoint is two blocks. The MLP of the first is the shared one of its experts, whose output is added to
the stream behind the second. A third of the router's experts return their input.
"""

import dataclasses
import itertools
import re
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import ENDS, LAYER, DecoderSizes, renamed
from eqx_decoders.families.deepseek.blocks import LATENT, latent_attention
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.settings_table import (
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
_DEPTH_TABLE = "model.mtp.embed_tokens.weight"


def longcat_flash(
    shape: DecoderSizes, *, rope: Rope = Rope(theta=_THETA, pairing="interleaved"), q_rank: int = 1536,
    kv_rank: int = 512, nope_dim: int = 128, value_dim: int = 128, expert_dim: int = 2048, scaling_factor: float = 6.0,
    depths: int = 0, **counts: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of LongCat-Flash's layers; `counts` are those of `ExpertsConfig`."""
    mixer = latent_attention(shape, rope=rope, q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim, value_dim=value_dim)
    scales = ((shape.embed_dim / rank) ** 0.5 for rank in (q_rank, kv_rank))
    mixer = dataclasses.replace(mixer, query_scale=mixer.scale * next(scales), kv_scale=next(scales))
    router = RouterConfig(order="score_first", selection_bias=True, scaling_factor=scaling_factor)
    experts = shape.experts(mlp_dim=expert_dim, router=router, shared_dim=shape.mlp_dim, shortcut="experts", **counts)
    first, second = shape.block(mixer, experts), shape.block(mixer, shortcut_from="experts")
    config = shape.decoder((first, second) * shape.num_layers)
    return with_depths(config, depths) if depths else config


def with_depths(config: DecoderConfig, depths: int) -> DecoderConfig:
    """Return the decoder with multi-token prediction, whose layer is one block without experts.

    The stream is read after the final norm, as vLLM and SGLang run these weights.
    """
    assert config.final_norm is not None
    block = dataclasses.replace(config.blocks[1], shortcut_from=None)
    mtp = MTPConfig(num_depths=depths, block=block, norm=config.final_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


def _read_head_dim(fields: Fields, values: Values) -> None:
    """Read the number of rotated features, which transformers has under two names."""
    rotated = fields.integer("head_dim", 64)
    if rotated != values["_rope_dim"]:
        raise fields.error(f"head_dim={rotated} must be qk_rope_head_dim={values['_rope_dim']}.")


def _write_head_dim(config: DecoderConfig) -> dict[str, Any]:
    latent = value_at(config, "latent")
    return {"head_dim": latent.rope_dim, "qk_head_dim": latent.head_dim}


def _of_zero_experts(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that transformers has for zero experts, too, and never uses."""
    experts = value_at(config, "experts")
    numbers = range(experts.num_experts, experts.num_choices)
    names = (
        f"model.layers.{layer}.mlp.experts.{number}.{name}_proj.weight"
        for layer, number, name in itertools.product(range(len(config.blocks) // 2), numbers, ("gate", "up"))
    )
    return dict.fromkeys(names, (experts.mlp_dim, config.embed_dim))


def _without_weights(config: DecoderConfig) -> str:
    """Return the tensors without a weight; vLLM and SGLang have the model's table for that of a depth, too."""
    experts = value_at(config, "experts")
    numbers = "|".join(map(str, range(experts.num_experts, experts.num_choices)))
    of_zero_experts = rf"model\.layers\.\d+\.mlp\.experts\.({numbers or '-'})\.(gate|up)_proj\.weight"
    return rf".*rotary_emb\.inv_freq|{re.escape(_DEPTH_TABLE)}|{of_zero_experts}"


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

_LAYER = "model.layers.{layer}."
_PART = {"self_attn.": "self_attn.{part}."}
_MLPS = _LAYER + "mlps.{part}."
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
        Unused("num_hidden_layers", "transformers 4 writes the number of blocks there, but reads num_layers"),
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
            _LAYER, pre_mixer_norm="input_layernorm.{part}", pre_mlp_norm="post_attention_layernorm.{part}"
        ),
        *(row for row in renamed(LATENT, _PART) if "self_attn" in row.name),
        *gated_mlp(_MLPS),
        *gated_mlp(_MLPS, "mlp.shared."),
        *moe.separate_experts(_LAYER + "mlp.", router="router.classifier", bias="router.e_score_correction_bias"),
        *renamed(mtp_rows(LATENT, LAYER, _DEPTH), {".mlp.": ".transformer_layer.mlp."}),
        *renamed(
            depth_rows(_DEPTH, embed_norm="enorm.m", stream_norm="hnorm.m", kernels="eh_proj", final_norm="norm"),
            {"layers.{depth}.norm": "norm"},
        ),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"router_dtype": "routers are in float32"},
    ignored_tensors=_without_weights,
    zero_tensors=_of_zero_experts,
    copies={_DEPTH_TABLE: "model.embed_tokens.weight"},
    with_depths=with_depths,
    blocks_per_layer=2,
)  # fmt: skip


MODELS = {
    "longcat-flash-560b-a27b": dict(model_type="longcat_flash"),
}  # fmt: skip
