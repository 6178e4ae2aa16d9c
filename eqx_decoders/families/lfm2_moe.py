"""LFM2-MoE (Liquid AI 2025): LFM2's layers, behind the first of which stand experts chosen by sigmoid scores."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._lfm2 import MLP, MLP_NAMES, WEIGHTS, lfm2, settings
from eqx_decoders.families.common import DecoderSizes, renamed
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Integer, Rule, Values
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def _read_router(fields: Fields, values: Values) -> RouterConfig:
    return RouterConfig(
        score="sigmoid",
        order="score_first",
        selection_bias=fields.flag("use_expert_bias", True),
        renormalize=fields.flag("norm_topk_prob", True),
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )


def _write_router(config: DecoderConfig) -> dict[str, Any]:
    router = next(block.mlp.router for block in config.blocks if hasattr(block.mlp, "router"))  # pyright: ignore
    return {
        "use_expert_bias": router.selection_bias,
        "norm_topk_prob": router.renormalize,
        "routed_scaling_factor": router.scaling_factor,
    }


FAMILY = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    settings=(
        *settings(),
        Integer("moe_intermediate_size", "experts.mlp_dim", 1792, name="mlp_dim"),
        *moe.expert_counts("num_experts", num=32, chosen=4),
        Integer("num_dense_layers", lambda config: moe.sparse_layers(config)[0], 2, name="dense_layers", least=0),
        Rule("router", _read_router, _write_router),
    ),
    build=lfm2,
    weights=(
        *WEIGHTS,
        Weight(MLP + "expert_bias", "mlp.router.selection_bias", "experts -> experts"),
        *renamed(moe.separate_experts(MLP), MLP_NAMES),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)

_8B = DecoderSizes(
    vocab_size=65_536, embed_dim=2048, num_layers=24, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=7168,
    eps=1e-5, tied=True,
)  # fmt: skip
_ROUTER = RouterConfig(score="sigmoid", order="score_first", selection_bias=True, renormalize=True)

MODELS = {
    "lfm2-8b-a1b": lambda: lfm2(
        _8B, full=tuple(index in (2, 6, 10, 14, 18, 21) for index in range(24)), dense_layers=2,
        num_experts=32, num_experts_per_token=4, mlp_dim=1792, router=_ROUTER,
    ),
}  # fmt: skip
