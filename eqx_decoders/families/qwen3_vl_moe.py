"""Qwen3-VL with experts (Bai et al. 2025): Qwen3 with experts that sees images and videos, at three depths."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.families import moe, qwen3_moe
from eqx_decoders.families.common import GATED_MLP, DecoderSizes, llama_weights, read_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Weight
from eqx_decoders.families.multimodal import multimodal
from eqx_decoders.families.qwen3_vl import IMAGE, LARGE, NAMES, ROPE, SECTIONS, VIDEO, WEIGHTS, qwen3_vl
from eqx_decoders.families.qwen_vision import IGNORED_KEYS, read_media, write_media
from eqx_decoders.families.rope_config import read_rope
from eqx_decoders.model.decoder import DecoderConfig


def read_sparse_text(
    fields: Fields,
    *,
    num_kv_heads: int,
    mlp_dim: int,
    expert_dim: int,
    num_experts: int,
    num_experts_per_token: int,
    theta: float,
    renormalize: bool = True,
) -> DecoderConfig:
    """Qwen3's layers with experts, and positions of three dimensions; the arguments are what missing keys stand for."""
    fields.rename("num_experts", "num_local_experts")
    fields.content.setdefault("intermediate_size", mlp_dim)
    shape = read_shape(fields, num_kv_heads=num_kv_heads)
    step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    for key in ("sliding_window", "use_sliding_window", "max_window_layers"):
        fields.take(key, None)  # transformers reads none of them: all layers see all
    fields.allow_only("use_qk_norm", True)
    fields.allow_only("qkv_bias", False)
    fields.allow_only("shared_expert_intermediate_size", 0)
    config = qwen3_moe.qwen3_moe(
        shape,
        num_experts=fields.integer("num_local_experts", num_experts),
        num_experts_per_token=fields.integer("num_experts_per_tok", num_experts_per_token),
        expert_dim=fields.integer("moe_intermediate_size", expert_dim),
        renormalize=renormalize,
        dense_layers=frozenset(index for index in range(shape.num_layers) if index in only or (index + 1) % step),
        rope=read_rope(fields, theta=theta, sections=SECTIONS),
    )
    return moe.need_experts(fields, config)


def _read_text(fields: Fields) -> DecoderConfig:
    fields.allow_only("norm_topk_prob", True)  # transformers always does it
    return read_sparse_text(
        fields,
        num_kv_heads=16,
        mlp_dim=5632,
        expert_dim=1408,
        num_experts=60,
        num_experts_per_token=4,
        theta=500_000.0,
    )


_MLP = "model.layers.{layer}.mlp."


def _stored_rows(tensors: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Published files have matrices `[in, out]`; transformers 5 writes them as `[out, in]`, and reads both."""
    if not moe.are_transposed(tensors):
        return ()
    return moe.fused_experts(_MLP, gate_up="experts embed mlp", down="experts mlp embed")


TEXT = dataclasses.replace(
    qwen3_moe.FAMILY,
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeTextModel",
    read=_read_text,
    weights=llama_weights(mlp=GATED_MLP + moe.fused_experts(_MLP)),
    fused=(),
    stored_rows=_stored_rows,
)

FAMILY = multimodal(
    TEXT,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    read=functools.partial(read_media, image=IMAGE, video=VIDEO, deepstack=(8, 16, 24)),
    write=write_media("qwen3_vl_moe_vision"),
    weights=WEIGHTS,
    names=NAMES,
    ignored_keys=IGNORED_KEYS,
    # the class of the decoder's settings ties tables by default, and what stands outside of them counts
    own_settings=lambda content: {"tie_word_embeddings": False, **content},
    alone=qwen3_moe.FAMILY,
)

_shape = functools.partial(DecoderSizes, vocab_size=151_936, num_kv_heads=4, head_dim=128)
_30B = _shape(embed_dim=2048, num_layers=48, num_heads=32, mlp_dim=768)
_235B = _shape(embed_dim=4096, num_layers=94, num_heads=64, mlp_dim=1536)

MODELS = {
    "qwen3-vl-30b-a3b": lambda: qwen3_vl(qwen3_moe.qwen3_moe(_30B, expert_dim=768, rope=ROPE), LARGE(out_dim=2048)),
    "qwen3-vl-235b-a22b": lambda: qwen3_vl(qwen3_moe.qwen3_moe(_235B, expert_dim=1536, rope=ROPE), LARGE(out_dim=4096)),
}
