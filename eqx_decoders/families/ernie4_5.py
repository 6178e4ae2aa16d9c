"""ERNIE 4.5 (Baidu 2025), dense and with experts: RoPE with interleaved pairs, and one setting for all biases."""

import dataclasses
from collections.abc import Collection
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings, unread_depths
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP, Check, Integer, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, depth_rows, mtp_rows
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


_THETA = 500_000.0


def ernie4_5(shape: DecoderSizes, *, rope: Rope = Rope(theta=_THETA, pairing="interleaved")) -> DecoderConfig:
    """Return a decoder of ERNIE 4.5 blocks; `shape.attention_bias` also adds biases to the MLP."""
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


# --- ERNIE 4.5 with experts: softmax over all experts, a selection bias, shared experts ---


def ernie4_5_moe(
    shape: DecoderSizes, *, sparse: Collection[int], rope: Rope = Rope(theta=_THETA, pairing="interleaved"),
    depths: int = 0, **options: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of ERNIE 4.5 blocks with experts.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.attention_bias` also adds biases to MLPs, shared experts and the output
        head, but not to routed experts.
    - `sparse`: the layers with experts, from 0.
    - `rope`: rotary embedding.
    - `depths`: number of layers of multi-token prediction, which have an MLP. They read the stream after the final
        norm, as in vLLM, SGLang and FastDeploy. The final norm also normalizes their output, as in FastDeploy and
        in the official training code; vLLM and SGLang have no norm there.
    - `options`: arguments of `moe.experts_with_shared`.
    """
    bias = shape.attention_bias
    router = RouterConfig(order="score_first", renormalize=True, selection_bias=True)
    experts = moe.experts_with_shared(shape, router=router, shared_bias=bias, **options)
    mixer = shape.attention(rope=rope)
    mlp = shape.mlp(bias=bias)
    blocks = (shape.block(mixer, experts if index in sparse else mlp) for index in range(shape.num_layers))
    config = moe.need_experts(shape.decoder(blocks, head_bias=bias))
    if depths == 0:
        return config
    mtp = MTPConfig(
        num_depths=depths, block=shape.block(mixer, mlp), norm=shape.norm, normed_stream=True, model_norm=True
    )
    return dataclasses.replace(config, mtp=mtp)


def _read_sparse(fields: Fields, values: Values) -> frozenset[int]:
    step = fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    num_layers = values["shape"].num_layers
    end = num_layers if last == -1 else min(last + 1, num_layers)
    return frozenset(index for index in range(first, end) if (index + 1) % step == 0)


def _write_sparse(config: DecoderConfig) -> dict[str, Any]:
    first = moe.first_sparse_layer(config)
    sparse = moe.sparse_layer_indices(config)
    step = sparse[1] - first if len(sparse) > 1 else 1
    return {"moe_layer_interval": step, "moe_layer_start_index": first, "moe_layer_end_index": sparse[-1]}


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
            "num_nextn_predict_layers={depths} must be 0 with use_bias=true: a bias of mtp_linear_proj is not "
            "implemented.",
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
        "moe_capacity": "training only: inference drops no tokens",
        "moe_use_aux_free": "transformers does not read it, and always has selection biases",
    },
    ignored_tensors=unread_depths(r"model\.mtp_.*"),
)


_MOE_BASE = dict(model_type="ernie4_5_moe", vocab_size=103_424)


FAMILIES = (ERNIE4_5, ERNIE4_5_MOE)

MODELS = {
    "ernie4.5-0.3b": dict(
        model_type="ernie4_5", vocab_size=103_424, hidden_size=1024, num_hidden_layers=18, num_attention_heads=16,
        intermediate_size=3072,
    ),
    "ernie4.5-21b-a3b": _MOE_BASE | dict(
        hidden_size=2560, num_hidden_layers=28, num_attention_heads=20, intermediate_size=12_288,
    ),
    "ernie4.5-300b-a47b": _MOE_BASE | dict(
        hidden_size=8192, num_hidden_layers=54, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28_672,
        moe_intermediate_size=3584, moe_k=8, moe_layer_start_index=3, moe_num_shared_experts=0,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
