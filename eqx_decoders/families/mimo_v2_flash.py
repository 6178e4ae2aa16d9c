"""MiMo-V2-Flash (Xiaomi 2025): five layers with windows per full layer, narrow scaled values, DeepSeek-V3's experts."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import (
    LAYER,
    DecoderSizes,
    attentions,
    decoder_sizes,
    llama_weights,
    read_masks,
    renamed,
    write_masks,
)  # fmt: skip
from eqx_decoders.families.deepseek.blocks import MLP, V3_EXPERTS, v3_router_settings
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.families.setting_rows import AUTO_MAP, Group, Integer, Number, Only, Renamed, Rule, Unused, Values
from eqx_decoders.families.weight_rows import Weight, depth_rows, mtp_rows
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Mask, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


_ROPE = Rope(theta=5e6, fraction=0.334)
_LOCAL_ROPE = Rope(theta=10_000.0, fraction=0.334)


def mimo_v2_flash(
    shape: DecoderSizes, *, masks: tuple[Mask, ...], dense_layers: Collection[int], router: RouterConfig,
    expert_dim: int, values: Mapping[str, Any], rope: Rope = _ROPE, local_rope: Rope = _LOCAL_ROPE, depths: int = 0,
    **counts: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of MiMo-V2 blocks. Layers with windows have twice as many key heads, and attention sinks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.num_kv_heads` is the number of key heads in full layers.
    - `masks`: the attention mask of each layer.
    - `dense_layers`: indices of the layers that have an MLP instead of experts.
    - `router`, `expert_dim`, `counts`: the router, the width of an expert, and the numbers of experts.
    - `values`: `value_dim` and `value_scale` of attention.
    - `rope`, `local_rope`: rotary embeddings of full layers and of layers with windows.
    - `depths`: number of layers of multi-token prediction.
    """
    experts = shape.experts(mlp_dim=expert_dim, router=router, **counts)

    def mixer(mask: Mask) -> AttentionConfig:
        if isinstance(mask, SlidingWindow):
            return shape.attention(
                mask=mask, rope=local_rope, num_kv_heads=2 * shape.num_kv_heads, sinks=True, out_bias=False, **values
            )
        return shape.attention(mask=mask, rope=rope, out_bias=False, **values)

    config = moe.sparse_decoder(shape, map(mixer, masks), experts, dense_layers)
    return with_depths(config, depths) if depths else config


def with_depths(config: DecoderConfig, depths: int) -> DecoderConfig:
    """Return the decoder with `depths` layers of multi-token prediction.

    They have the attention of a layer with a window and the MLP of a layer without experts. A layer of multi-token
    prediction reads the normalized stream of the previous layer, as in SGLang and vLLM.
    """
    blocks = zip(config.blocks, attentions(config), strict=True)
    window_block = next((block for block, mixer in blocks if isinstance(mixer.mask, SlidingWindow)), None)
    dense_block = next((block for block in config.blocks if isinstance(block.mlp, MLPConfig)), None)
    if window_block is None or dense_block is None:
        raise ConversionError(
            "DecoderConfig.blocks must have a layer with a window and a layer without experts, because layers of "
            "multi-token prediction have the same attention and MLP."
        )
    if config.final_norm is None:
        raise ConversionError(
            "DecoderConfig.final_norm=None must be a norm: multi-token prediction needs a final norm."
        )
    block = dataclasses.replace(window_block, mlp=dense_block.mlp)
    mtp = MTPConfig(num_depths=depths, block=block, norm=config.final_norm, normed_stream=True, normed_depths=True)
    return dataclasses.replace(config, mtp=mtp)


def _num_kv_heads(config: DecoderConfig) -> int:
    """Return the number of key heads in full layers; layers with windows have twice as many."""
    mixer = attentions(config)[0]
    return mixer.num_kv_heads // 2 if isinstance(mixer.mask, SlidingWindow) else mixer.num_kv_heads


def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...]:
    """Return the masks. `sliding_window_size` does not count the query's own token, unlike `sliding_window`."""
    size = fields.integer("sliding_window", 129)
    num_previous = fields.integer("sliding_window_size", None)
    if num_previous is not None:
        size = num_previous + 1
    return read_masks(fields, values, size, lambda index: index > 0 and (index + 1) % 6 != 0)


_ATTENTION = LAYER + "self_attn."
_WEIGHTS = (
    *llama_weights(experts=V3_EXPERTS),
    Weight(_ATTENTION + "v_proj.weight", "mixer.value", "(kv_heads value_dim) embed -> embed kv_heads value_dim"),
    Weight(_ATTENTION + "v_proj.bias", "mixer.value_bias", "(kv_heads value_dim) -> kv_heads value_dim"),
    Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
    Weight(_ATTENTION + "attention_sink_bias", "mixer.sink", "heads -> heads"),
)
_DEPTH = "model.mtp.layers.{depth}."
FAMILY = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    settings=(
        AUTO_MAP,
        Unused("n_shared_experts", "there are no shared experts"),
        Renamed({"layernorm_epsilon": "rms_norm_eps"}),
        decoder_sizes(num_kv_heads=4, head_dim=192, eps=1e-5, paths={"num_key_value_heads": _num_kv_heads}),
        Group(
            "values",
            dict,
            (
                Integer("v_head_dim", "attention.value_dim", 128),
                Number("attention_value_scale", "attention.value_scale", 0.707, null=1.0),
            ),
        ),
        Rule("masks", _read_masks, functools.partial(write_masks, default=129)),
        RopesByLayer(theta=5e6, local_theta=10_000.0, local_key="swa_rope_theta", fraction=0.334),
        *(Only(f"add_{kind}_attention_sink_bias", kind == "swa") for kind in ("swa", "full")),
        *v3_router_settings(scale=1.0),
        *moe.expert_counts("n_routed_experts", num=256, chosen=8, width=2048),
        moe.dense_layers_setting(1, listed=True),
        DEPTHS,
    ),
    build=mimo_v2_flash,
    weights=(
        *_WEIGHTS,
        *renamed(mtp_rows(_WEIGHTS, LAYER, _DEPTH), {"post_attention_layernorm": "pre_mlp_layernorm"}),
        *depth_rows(_DEPTH, embed_norm="enorm", stream_norm="hnorm", kernels="eh_proj", final_norm="final_layernorm"),
    ),
    with_depths=with_depths,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "swa_head_dim swa_v_head_dim swa_num_attention_heads "
        "swa_num_key_value_heads": "transformers derives them from the sizes of full layers",
        "hybrid_layer_pattern hybrid_block_size moe_layer_freq": "layer_types and mlp_layer_types determine it",
        "attention_chunk_size": "runtime option; it changes no output",
    },
)


MODELS = {
    "mimo-v2-flash-309b-a15b": dict(
        model_type="mimo_v2_flash", vocab_size=152_576, hidden_size=4096, num_hidden_layers=48, num_attention_heads=64,
        intermediate_size=16_384,
    ),
}  # fmt: skip
