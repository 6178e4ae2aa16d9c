"""Qwen3-VL with experts (Bai et al. 2025): Qwen3 with experts, and images and videos that enter at three depths."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._qwen import VL_ROPE, qwen3_moe, read_sparse_text
from eqx_decoders.families._qwen_vision import (
    IGNORED_KEYS,
    IMAGE,
    LARGE,
    LARGE_DEEPSTACK,
    VIDEO,
    VL_NAMES,
    VL_WEIGHTS,
    qwen3_vl,
    qwen_vision,
    read_media,
    write_media,
)
from eqx_decoders.families.common import GATED_MLP, DecoderSizes, llama_weights
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import MultimodalFamily
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.model.decoder_config import DecoderConfig


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
    """Return rows for matrices `[in, out]`, as in published files; transformers 5 also writes `[out, in]`."""
    if not moe.are_transposed(tensors):
        return ()
    return moe.fused_experts(_MLP, gate_up="experts embed mlp", down="experts mlp embed")


def _adapt(text: Family) -> Family:
    return dataclasses.replace(
        text,
        model_type="qwen3_vl_moe_text",
        architecture="Qwen3VLMoeTextModel",
        read=_read_text,
        weights=llama_weights(mlp=GATED_MLP + moe.fused_experts(_MLP)),
        fused=(),
        stored_rows=_stored_rows,
    )


FAMILY = MultimodalFamily(
    text="qwen3_moe",
    adapt=_adapt,
    reads_as_text=True,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    read=functools.partial(read_media, image=IMAGE, video=VIDEO, deepstack=LARGE_DEEPSTACK),
    write=write_media("qwen3_vl_moe_vision"),
    weights=VL_WEIGHTS,
    names=VL_NAMES,
    ignored_keys=IGNORED_KEYS,
    # the class of the decoder's settings ties tables by default, and the outer value counts
    own_settings=lambda content: {"tie_word_embeddings": False, **content},
)

_shape = functools.partial(DecoderSizes, vocab_size=151_936, num_kv_heads=4, head_dim=128)
_30B = _shape(embed_dim=2048, num_layers=48, num_heads=32, mlp_dim=768)
_235B = _shape(embed_dim=4096, num_layers=94, num_heads=64, mlp_dim=1536)


def _model(shape: DecoderSizes) -> DecoderConfig:
    vision = qwen_vision(LARGE(out_dim=shape.embed_dim), deepstack=LARGE_DEEPSTACK)
    return qwen3_vl(qwen3_moe(shape, expert_dim=shape.mlp_dim, rope=VL_ROPE), vision)


MODELS = {"qwen3-vl-30b-a3b": lambda: _model(_30B), "qwen3-vl-235b-a22b": lambda: _model(_235B)}
