"""ERNIE 4.5 (Baidu 2025), dense and with experts: RoPE of neighboring features, and one switch for all biases."""

import dataclasses
from collections.abc import Collection
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings, unread_depths
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Check, Integer, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, depth_rows, mtp_rows
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


_THETA = 500_000.0


def ernie4_5(shape: DecoderSizes, *, rope: Rope = Rope(theta=_THETA, pairing="interleaved")) -> DecoderConfig:
    """Return a decoder of ERNIE 4.5 blocks; `shape.attention_bias` is that of the MLP, too."""
    return shape.decoder(shape.block(shape.attention(rope=rope), shape.mlp(bias=shape.attention_bias)))


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=2, head_dim=128, eps=1e-5, tied=True, keys={"attention_bias": "use_bias"}),
        rope_settings(theta=_THETA, pairing="interleaved"),
    ),
    build=ernie4_5,
    weights=llama_weights(),
)


# --- ERNIE 4.5 with experts: softmax over all experts, a bias that only affects their selection, shared experts ---


def ernie4_5_moe(
    shape: DecoderSizes, *, sparse: Collection[int], rope: Rope = Rope(theta=_THETA, pairing="interleaved"),
    depths: int = 0, **options: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of ERNIE 4.5 blocks; the layers in `sparse`, counted from 0, have experts with these options.

    `shape.attention_bias` is that of MLPs and the head, too, but not of experts. `depths` of multi-token prediction
    have an MLP. They read the stream after the final norm, as vLLM, SGLang and FastDeploy run these weights. The norm
    stands behind them again, as in FastDeploy and the model's own code for training: the other two leave it out.
    """
    router, bias = RouterConfig(order="score_first", renormalize=True, selection_bias=True), shape.attention_bias
    experts = moe.with_shared(shape, router=router, shared_bias=bias, **options)
    mixer, mlp = shape.attention(rope=rope), shape.mlp(bias=bias)
    blocks = (shape.block(mixer, experts if index in sparse else mlp) for index in range(shape.num_layers))
    config = moe.need_experts(shape.decoder(blocks, head_bias=bias))
    if depths == 0:
        return config
    mtp = MTPConfig(
        num_depths=depths, block=shape.block(mixer, mlp), norm=shape.norm, normed_stream=True, model_norm=True
    )
    return dataclasses.replace(config, mtp=mtp)


def _read_sparse(fields: Fields, values: Values) -> frozenset[int]:
    last, step = values["shape"].num_layers - 1, fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    end = fields.integer("moe_layer_end_index", -1, least=-1)
    end = last if end == -1 else min(end, last)
    return frozenset(index for index in range(first, end + 1) if (index + 1) % step == 0)


def _write_sparse(config: DecoderConfig) -> dict[str, Any]:
    sparse = moe.sparse_layers(config)
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return {"moe_layer_interval": step, "moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}


_MLP = LAYER + "mlp."
_BIAS = Weight(_MLP + "moe_statics.e_score_correction_bias", "mlp.router.selection_bias", "1 experts -> experts")
_WEIGHTS = llama_weights(experts=(*moe.separate_experts(_MLP, shared="shared_experts"), _BIAS))
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    settings=(
        AUTO_MAP,
        Only("moe_norm_min", 1e-12, written=True),
        Only("moe_gate", "topk"),
        Only("use_rmsnorm", True),
        decoder_sizes(num_kv_heads=4, eps=1e-5, tied=True, keys={"attention_bias": "use_bias"}),
        Rule("sparse", _read_sparse, _write_sparse),
        Integer("moe_intermediate_size", "experts.mlp_dim", 1536, name="expert_dim"),
        *moe.expert_counts("moe_num_experts", "moe_k", num=64, chosen=6),
        moe.num_shared("moe_num_shared_experts", 2, least=0),
        rope_settings(theta=_THETA, pairing="interleaved"),
        *depth_settings("num_nextn_predict_layers", always=False),
        Check(
            lambda values: values["depths"] == 0 or not values["shape"].attention_bias,
            "num_nextn_predict_layers must be 0 with use_bias: a bias of mtp_linear_proj is not known here.",
        ),
    ),
    build=ernie4_5_moe,
    weights=(
        *_WEIGHTS,
        *mtp_rows(_WEIGHTS, LAYER, "model.mtp_block.{depth}."),
        *renamed(
            depth_rows("model.", embed_norm="mtp_emb_norm", stream_norm="mtp_hidden_norm", kernels="mtp_linear_proj"),
            {".weight": ".{depth}.weight"},
        ),
    ),
    fused=moe.fused_experts(_MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "moe_capacity": "how it was trained: no token is dropped",
        "moe_use_aux_free": "transformers does not read it: the biases are always there",
    },
    ignored_tensors=unread_depths(r"model\.mtp_.*"),
)


_MOE_KEYS = dict(model_type="ernie4_5_moe", vocab_size=103_424)


FAMILIES = (ERNIE4_5, ERNIE4_5_MOE)

MODELS = {
    "ernie4.5-0.3b": dict(
        model_type="ernie4_5", vocab_size=103_424, hidden_size=1024, num_hidden_layers=18, num_attention_heads=16,
        intermediate_size=3072,
    ),
    "ernie4.5-21b-a3b": _MOE_KEYS | dict(
        hidden_size=2560, num_hidden_layers=28, num_attention_heads=20, intermediate_size=12_288,
    ),
    "ernie4.5-300b-a47b": _MOE_KEYS | dict(
        hidden_size=8192, num_hidden_layers=54, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28_672,
        moe_intermediate_size=3584, moe_k=8, moe_layer_start_index=3, moe_num_shared_experts=0,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
