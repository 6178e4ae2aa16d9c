"""Kimi Linear (Moonshot 2025): experts, three layers of Kimi delta attention per layer of latent attention.

There are no rotary embeddings: the model learns positions from the recurrence.
"""

from collections.abc import Collection
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, NO_BIAS, DecoderSizes, hybrid_layers
from eqx_decoders.families.deepseek.blocks import (
    WEIGHTS,
    latent_attention,
    latent_ranks,
    latent_sizes,
    v3_router,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.setting_rows import Defaults, Flag, Group, Integer, Number, Only, Rule, Values, first_layer
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def kimi_linear(
    shape: DecoderSizes,
    *,
    delta: KimiDeltaAttentionConfig,
    full: tuple[bool, ...],
    experts: ExpertsConfig,
    dense_layers: Collection[int],
    latent: LatentAttentionConfig,
) -> DecoderConfig:
    """Return a decoder of Kimi Linear blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `delta`, `latent`: delta attention and latent attention.
    - `full`: for each layer, whether it has latent attention; the other layers have delta attention.
    - `experts`: the experts.
    - `dense_layers`: indices of the layers that have an MLP instead of experts.
    """
    mixers = (latent if is_full else delta for is_full in full)
    return moe.sparse_decoder(shape, mixers, experts, dense_layers)


def kimi_experts(shape: DecoderSizes, *, mlp_dim: int, num_shared: int, num_experts: int, num_experts_per_token: int,
                 **router: Any) -> ExpertsConfig:  # fmt: skip
    """Return DeepSeek-V3's experts with `mlp_dim` hidden features each; `router` are arguments of `v3_router`."""
    counts: dict[str, Any] = dict(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.experts(mlp_dim=mlp_dim, shared_dim=mlp_dim * num_shared, router=v3_router(**router), **counts)


def _read_delta(fields: Fields, values: Values) -> KimiDeltaAttentionConfig:
    """Return the delta attention, and set `layer_types`.

    Published files have the sizes in `linear_attn_config`, and transformers writes them outside of it.
    """
    shape = values["shape"]
    table = fields.table("linear_attn_config") or Fields({}, fields.where)

    def size(nested_key: str, flat_key: str, default: int) -> int:
        nested = table.integer(nested_key, None)
        flat = fields.integer(flat_key, None)
        if nested is not None and flat is not None and nested != flat:
            raise fields.error(f"linear_attn_config.{nested_key}={nested} must be equal to {flat_key}={flat}.")
        return nested or flat or default

    head_dim = size("head_dim", "linear_head_dim", 128)
    delta = KimiDeltaAttentionConfig(
        num_heads=size("num_heads", "linear_num_heads", 32),
        head_dim=head_dim,
        gate_rank=head_dim,
        taps=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        norm=RMSNormConfig(eps=shape.eps),
    )
    full_layers = table.integers("full_attn_layers")  # counted from 1
    delta_layers = table.integers("kda_layers")
    table.finish()
    layers = range(1, shape.num_layers + 1)
    if full_layers or delta_layers:
        if sorted((*full_layers, *delta_layers)) != list(layers):
            raise fields.error(
                f"linear_attn_config: each layer from 1 to {len(layers)} must be in full_attn_layers or in kda_layers, "
                "but not in both."
            )
        if fields.content.get("layer_types") is None:
            types = ["full_attention" if layer in full_layers else "linear_attention" for layer in layers]
            fields.content["layer_types"] = types
    elif fields.content.get("layer_types") is None:
        raise fields.error("layer_types is missing: add it, or full_attn_layers and kda_layers to linear_attn_config.")
    return delta


def _check_full_layers(fields: Fields, values: Values) -> None:
    """Raise ConversionError if `layer_types` and `linear_attn_config` have different layers of latent attention."""
    table = fields.table("linear_attn_config")
    if table is None or not (table.integers("full_attn_layers") or table.integers("kda_layers")):
        return
    listed_layers = sorted(table.integers("full_attn_layers"))
    full_layers = [layer for layer, is_full in enumerate(values["full"], start=1) if is_full]
    if listed_layers != full_layers:
        raise fields.error(
            f"linear_attn_config.full_attn_layers={abbreviate(listed_layers)} differs from the layers of type "
            f"full_attention in layer_types, {abbreviate(full_layers)} (counted from 1): make them equal, or remove "
            "layer_types."
        )


def _write_delta(config: DecoderConfig) -> dict[str, Any]:
    """Return the layers and sizes of delta attention, both in `linear_attn_config` and outside of it."""
    delta = first_layer(config, "delta")
    if not isinstance(delta, KimiDeltaAttentionConfig):
        return {}
    layers = list(enumerate(config.blocks, start=1))
    nested = {
        "full_attn_layers": [layer for layer, block in layers if block.mixer != delta],
        "kda_layers": [layer for layer, block in layers if block.mixer == delta],
        "head_dim": delta.head_dim,
        "num_heads": delta.num_heads,
        "short_conv_kernel_size": delta.taps,
    }
    return {
        "linear_attn_config": nested,
        "linear_head_dim": delta.head_dim,
        "linear_num_heads": delta.num_heads,
        "linear_conv_kernel_dim": delta.taps,
    }


# `twin` is the key of published files; transformers writes the other key
_EXPERTS = (
    Integer("num_local_experts", "experts.num_experts", 256, twin="num_experts"),
    Integer("num_experts_per_tok", "experts.num_experts_per_token", 8, twin="num_experts_per_token"),
    Integer("moe_intermediate_size", "experts.mlp_dim", 1024),
    moe.num_shared("n_shared_experts", 1, twin="num_shared_experts"),
    Number("routed_scaling_factor", "experts.router.scaling_factor", 2.446),
    Integer("n_group", "experts.router.num_groups", 1, name="groups", twin="num_expert_group"),
    Integer("topk_group", "experts.router.groups_per_token", 1, name="groups_per_token"),
    Flag("norm_topk_prob", "experts.router.renormalize", True, twin="moe_renormalize"),
)
_DEFAULTS = dict(
    vocab_size=163_840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, num_attention_heads=32
)
_ATTENTION = LAYER + "self_attn."
_MOE = LAYER + "block_sparse_moe."
_HEADS = "(heads head_dim)"
_PROJECTIONS = {"q": "query", "k": "key", "v": "value"}
_DELTA = (
    *(
        Weight(f"{_ATTENTION}{letter}_proj.weight", f"mixer.{name}", f"{_HEADS} embed -> embed heads head_dim")
        for letter, name in _PROJECTIONS.items()
    ),
    *(
        Weight(f"{_ATTENTION}{letter}_conv1d.weight", f"mixer.{name}_taps", f"{_HEADS} 1 taps -> heads head_dim taps")
        for letter, name in _PROJECTIONS.items()
    ),
    *(
        Weight(f"{_ATTENTION}{letter}_a_proj.weight", f"mixer.{name}_down", "gate_rank embed -> embed gate_rank")
        for letter, name in (("f", "dt"), ("g", "gate"))
    ),
    *(
        Weight(
            f"{_ATTENTION}{letter}_b_proj.weight", f"mixer.{name}_up", f"{_HEADS} gate_rank -> gate_rank heads head_dim"
        )
        for letter, name in (("f", "dt"), ("g", "gate"))
    ),
    Weight(_ATTENTION + "b_proj.weight", "mixer.beta", "heads embed -> embed heads"),
    Weight(_ATTENTION + "A_log", "mixer.a_log", "1 1 heads 1 -> heads"),
    Weight(_ATTENTION + "dt_bias", "mixer.dt_bias", f"{_HEADS} -> heads head_dim"),
    Weight(_ATTENTION + "o_norm.weight", "mixer.norm.scale", "norm -> norm"),
    Weight(_ATTENTION + "o_proj.weight", "mixer.out", f"embed {_HEADS} -> heads head_dim embed"),
)
FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    settings=(
        Defaults(_DEFAULTS),
        Only("hidden_act", "silu"),
        Only("moe_router_activation_func", "sigmoid", written=True),
        Only("moe_layer_freq", 1),
        Only("mla_use_nope", True, written=True),
        Only("attention_bias", False, written=True),
        Only("num_nextn_predict_layers", 0),
        *latent_sizes(eps=1e-5, keys=NO_BIAS),
        Rule("delta", _read_delta, _write_delta),
        hybrid_layers(LatentAttentionConfig),
        Rule("", _check_full_layers),
        Group("experts", kimi_experts, _EXPERTS, uses=("shape",)),
        moe.dense_layers_setting(1, listed=True),
        Group("latent", latent_attention, latent_ranks(None), uses=("shape", "_nope_dim")),
    ),
    build=kimi_linear,
    weights=(
        *(row for row in WEIGHTS if ".mlp.experts." not in row.name and ".mlp.shared_experts." not in row.name),
        *_DELTA,
        *moe.separate_experts(_MOE, "w1", "w3", "w2", bias="gate.e_score_correction_bias", shared="shared_experts"),
    ),
    # transformers writes the MLPs of dense layers with the prefix of experts
    renamed={r"\.block_sparse_moe\.(\w+_proj)\.": r".mlp.\1."},
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "rope_theta rope_scaling rope_parameters": "there are no rotary embeddings",
        "use_grouped_topk": "n_group determines it",
        "model_max_length": "the model has no maximum length",
    },
)


def _48b() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=163_840, embed_dim=2304, num_layers=27, num_heads=32, num_kv_heads=32, head_dim=192, mlp_dim=9216,
        eps=1e-5,
    )  # fmt: skip
    delta = KimiDeltaAttentionConfig(num_heads=32, head_dim=128, gate_rank=128, norm=RMSNormConfig(eps=shape.eps))
    experts = kimi_experts(
        shape, num_experts=256, num_experts_per_token=8, mlp_dim=1024, num_shared=1, scaling_factor=2.446
    )
    full = tuple((index + 1) % 4 == 0 or index == 26 for index in range(27))
    latent = latent_attention(shape, rope=None, q_rank=None)
    return kimi_linear(shape, delta=delta, full=full, experts=experts, dense_layers=range(1), latent=latent)


MODELS = {"kimi-linear-48b-a3b": _48b}
