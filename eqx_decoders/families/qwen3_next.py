"""Qwen3-Next (Qwen Team 2025): three gated delta nets to one gated attention, and experts.

Published checkpoints have a layer of multi-token prediction that `config.json` does not mention.
"""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._qwen_hybrid import (
    DEPTH,
    EXPERTS,
    FUSED_EXPERTS,
    INTO_KEYS,
    INTO_VALUES,
    LINEAR,
    SHARED_WEIGHTS,
    delta_net,
    every_fourth,
    qwen3_next,
    qwen_experts,
    read_depth,
    read_experts,
    read_hybrid,
    with_depth,
    with_depths,
    write_depth,
    write_experts,
    write_hybrid,
)
from eqx_decoders.families.common import ENDS, GATED_MLP, NO_BIAS, DecoderSizes, read_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope
from eqx_decoders.families.weight_rows import sharing
from eqx_decoders.model.decoder_config import DecoderConfig


def _read(fields: Fields) -> DecoderConfig:
    fields.content.setdefault("intermediate_size", 5632)
    shape = read_shape(fields, num_kv_heads=2, head_dim=256, keys=NO_BIAS)
    experts = read_experts(fields, shape, renormalize=fields.flag("norm_topk_prob", True), num=512, per_token=10)
    step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    delta, full = read_hybrid(fields, shape)
    dense = [index in only or (index + 1) % step != 0 for index in range(shape.num_layers)]
    mlps = tuple(shape.mlp() if each else experts for each in dense)
    config = qwen3_next(shape, delta=delta, full=full, mlps=mlps, rope=read_rope(fields, fraction=0.25))
    return read_depth(fields, "num_nextn_predict_layers", moe.need_experts(fields, config))


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, sparse = moe.experts_of(config), moe.sparse_layers(config)
    settings = {
        "intermediate_size": moe.dense_dim(config, default=experts.mlp_dim),
        "norm_topk_prob": experts.router.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index in range(len(config.blocks)) if index not in sparse],
    }
    depth = {} if config.mtp is None else write_depth(config, "num_nextn_predict_layers")
    return write_hybrid(config) | write_experts(config) | settings | depth


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *ENDS,
        *with_depths(
            (
                *SHARED_WEIGHTS,
                *GATED_MLP,
                *EXPERTS,
                *sharing(  # with each key head the value heads that use it
                    LINEAR + "in_proj_qkvz.weight",
                    *(("mixer.query", INTO_KEYS), ("mixer.key", INTO_KEYS)),
                    *(("mixer.value", INTO_VALUES), ("mixer.gate", INTO_VALUES)),
                    within="key_heads",
                ),
                *sharing(
                    LINEAR + "in_proj_ba.weight",
                    *((f"mixer.{name}", "heads embed -> embed heads") for name in ("beta", "dt")),
                    within="key_heads",
                ),
            )
        ),
        *DEPTH,
    ),
    fused=with_depths(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    with_depth=with_depth,
)


def _80b() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=151_936, embed_dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, head_dim=256, mlp_dim=5120
    )
    experts = qwen_experts(shape, num_experts=512, num_experts_per_token=10, dim=512, shared_dim=512)
    return qwen3_next(shape, delta=delta_net(shape), full=every_fourth(48), mlps=(experts,) * 48)


MODELS = {"qwen3-next-80b": _80b}
