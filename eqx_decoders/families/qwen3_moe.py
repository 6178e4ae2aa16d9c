"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention; layers with experts and dense ones mixed at will."""

import functools
from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._qwen import qwen3_moe
from eqx_decoders.families.common import GATED_MLP, DecoderSizes, find_window, llama_weights, read_shape, write_sizes
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def _read(fields: Fields) -> DecoderConfig:
    fields.rename("num_experts", "num_local_experts")
    fields.content.setdefault("intermediate_size", 6144)
    shape = read_shape(fields, num_kv_heads=4)
    step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    on, window = fields.flag("use_sliding_window", False), fields.integer("sliding_window", 4096, null=None)
    fields.take("max_window_layers", None)  # transformers gives all layers the window
    # the next three stand in Qwen3-Coder's files, and transformers does not read them
    fields.allow_only("use_qk_norm", True)
    fields.allow_only("qkv_bias", False)
    fields.allow_only("shared_expert_intermediate_size", 0)
    config = qwen3_moe(
        shape,
        num_experts=fields.integer("num_local_experts", 128),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_dim=fields.integer("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        dense_layers=frozenset(index for index in range(shape.num_layers) if index in only or (index + 1) % step),
        rope=read_rope(fields),
        mask=SlidingWindow(window) if on and window is not None else Causal(),
    )
    return moe.need_experts(fields, config)


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, window, sparse = moe.experts_of(config), find_window(config), moe.sparse_layers(config)
    settings = {
        "intermediate_size": moe.dense_dim(config, default=experts.mlp_dim),
        "norm_topk_prob": experts.router.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index in range(len(config.blocks)) if index not in sparse],
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
    sizes = write_sizes(config) | moe.write_experts(config, count="num_experts", width="moe_intermediate_size")
    return sizes | settings | write_rope(config)


_MLP = "model.layers.{layer}.mlp."
FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    weights=llama_weights(mlp=GATED_MLP + moe.separate_experts(_MLP)),
    fused=moe.fused_experts(_MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)

_shape = functools.partial(DecoderSizes, vocab_size=151_936, head_dim=128)
_30B = _shape(embed_dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, mlp_dim=768)
_235B = _shape(embed_dim=4096, num_layers=94, num_heads=64, num_kv_heads=4, mlp_dim=1536)
_480B = _shape(embed_dim=6144, num_layers=62, num_heads=96, num_kv_heads=8, mlp_dim=2560)

MODELS = {
    "qwen3-30b-a3b": lambda: qwen3_moe(_30B, expert_dim=768, rope=Rope(theta=1e7)),
    "qwen3-30b-a3b-base": lambda: qwen3_moe(_30B, expert_dim=768),
    "qwen3-235b-a22b": lambda: qwen3_moe(_235B, expert_dim=1536, rope=Rope(theta=5e6)),
    "qwen3-480b-a35b": lambda: qwen3_moe(_480B, expert_dim=2560, num_experts=160, rope=Rope(theta=1e7)),
}
