"""Kimi Linear (Moonshot 2025): three delta attentions with decay by channel to one latent attention, and experts.

Nothing is rotated: positions come from the recurrence alone.
"""

from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import WEIGHTS, latent_attention, v3_router
from eqx_decoders.families.common import (
    NO_BIAS,
    DecoderSizes,
    first_mixer,
    gated_mlp,
    read_hybrid_layers,
    read_shape,
    write_hybrid_layers,
    write_outer,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def kimi_linear(
    shape: DecoderSizes,
    *,
    delta: KimiDeltaAttentionConfig | None,
    full: tuple[bool, ...],
    experts: ExpertsConfig,
    dense: tuple[bool, ...],
    kv_rank: int = 512,
    nope_dim: int = 128,
    value_dim: int = 128,
    q_rank: int | None = None,
) -> DecoderConfig:
    """Return a decoder of Kimi Linear's blocks: latent attention where `full` is True, an MLP where `dense` is.

    Heads of latent attention have `shape.head_dim` features in queries and keys: `nope_dim` from the latent, and the
    others shared by all heads.
    """
    latent = latent_attention(shape, rope=None, q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim, value_dim=value_dim)

    def block(has_latent: bool, is_dense: bool) -> BlockConfig:
        return shape.block(latent if has_latent or delta is None else delta, shape.mlp() if is_dense else experts)

    return shape.decoder(map(block, full, dense))


def kimi_experts(shape: DecoderSizes, *, dim: int, num_shared: int, scaling_factor: float, groups: int = 1,
                 groups_per_token: int = 1, renormalize: bool = True, **options: Any) -> ExpertsConfig:  # fmt: skip
    """Return DeepSeek-V3's experts of width `dim`."""
    return shape.experts(
        mlp_dim=dim,
        shared=MLPConfig(mlp_dim=dim * num_shared, activation=shape.activation),
        router=v3_router(
            groups=groups, groups_per_token=groups_per_token, scaling_factor=scaling_factor, renormalize=renormalize
        ),
        **options,
    )


def _read(fields: Fields) -> DecoderConfig:
    for old, new in _RENAMED.items():
        fields.rename(old, new)
    for key in ("head_dim", "qk_head_dim", "auto_map"):  # they follow from others, or name code that is not run
        fields.content.pop(key, None)
    fields.content = _DEFAULTS | fields.content
    fields.allow_only("hidden_act", "silu")
    fields.allow_only("moe_router_activation_func", "sigmoid")
    fields.allow_only("moe_layer_freq", 1)
    fields.allow_only("mla_use_nope", True)
    fields.allow_only("attention_bias", False)
    fields.allow_only("num_nextn_predict_layers", 0)
    nope_dim = fields.integer("qk_nope_head_dim", 128)
    shape = read_shape(fields, head_dim=nope_dim + fields.integer("qk_rope_head_dim", 64), eps=1e-5, keys=NO_BIAS)
    if shape.num_kv_heads != shape.num_heads:
        raise fields.error("num_key_value_heads must be num_attention_heads: latent attention has as many of both.")
    full, delta = _read_delta(fields, shape)
    experts = kimi_experts(
        shape,
        num_experts=fields.integer("num_local_experts", 256),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        dim=fields.integer("moe_intermediate_size", 1024),
        num_shared=fields.integer("n_shared_experts", 1),
        scaling_factor=fields.number("routed_scaling_factor", 2.446),
        groups=fields.integer("n_group", 1),
        groups_per_token=fields.integer("topk_group", 1),
        renormalize=fields.flag("norm_topk_prob", True),
    )
    first = fields.integer("first_k_dense_replace", 1, least=0)
    kinds = fields.words("mlp_layer_types", ("dense", "sparse"), shape.num_layers)
    dense = [index < first for index in range(shape.num_layers)] if kinds is None else [x == "dense" for x in kinds]
    config = kimi_linear(
        shape,
        delta=None if all(full) else delta,
        full=full,
        experts=experts,
        dense=tuple(dense),
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        q_rank=fields.integer("q_lora_rank", None),
    )
    return moe.need_experts(fields, config)


def _read_delta(fields: Fields, shape: DecoderSizes) -> tuple[tuple[bool, ...], KimiDeltaAttentionConfig]:
    """Read the flags of latent attention, and delta attention; published files nest them, newer ones do not."""
    table = fields.table("linear_attn_config") or Fields({}, fields.where)

    def size(nested: str, flat: str, default: int) -> int:
        inner, outer = table.integer(nested, None), fields.integer(flat, None)
        if inner is not None and outer is not None and inner != outer:
            raise fields.error(
                f"linear_attn_config: {nested}={inner}, but {flat}={outer} outside of it: make them equal."
            )
        return inner or outer or default

    head_dim = size("head_dim", "linear_head_dim", 128)
    delta = KimiDeltaAttentionConfig(
        num_heads=size("num_heads", "linear_num_heads", 32),
        head_dim=head_dim,
        gate_rank=head_dim,
        taps=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        norm=RMSNormConfig(eps=shape.eps),
    )
    latents, others = table.numbers("full_attn_layers"), table.numbers("kda_layers")  # counted from 1
    table.finish()
    if latents or others:
        if sorted((*latents, *others)) != list(range(1, shape.num_layers + 1)):
            raise fields.error("linear_attn_config: each layer from 1 on must be in one of its two lists.")
        types = ["full_attention" if index + 1 in latents else "linear_attention" for index in range(shape.num_layers)]
        fields.content.setdefault("layer_types", types)
    elif "layer_types" not in fields.content:
        raise fields.error("layer_types is missing, and linear_attn_config does not tell the layers: add one of them.")
    return read_hybrid_layers(fields, shape.num_layers, None), delta


def _write(config: DecoderConfig) -> dict[str, Any]:
    latent, experts = first_mixer(config, LatentAttentionConfig), moe.experts_of(config)
    if experts.shared is None:
        raise ConversionError("DecoderConfig.blocks must have shared experts.")
    sparse = moe.sparse_layers(config)
    settings: dict[str, Any] = {
        "num_attention_heads": latent.num_heads,
        "num_key_value_heads": latent.num_heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "intermediate_size": moe.dense_dim(config, default=experts.mlp_dim),
        "mlp_layer_types": ["sparse" if index in sparse else "dense" for index in range(len(config.blocks))],
        "n_shared_experts": experts.shared.mlp_dim // experts.mlp_dim,
        "routed_scaling_factor": experts.router.scaling_factor,
        "n_group": experts.router.num_groups,
        "topk_group": experts.router.groups_per_token,
        "norm_topk_prob": experts.router.renormalize,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
    }
    sizes = moe.write_experts(config, count="num_local_experts", width="moe_intermediate_size")
    written = write_outer(config) | sizes | settings | _write_delta(config) | {"attention_bias": False}
    return written | {old: written[new] for old, new in _RENAMED.items()}


def _write_delta(config: DecoderConfig) -> dict[str, Any]:
    """Return the layers of delta attention, and its sizes, in both spellings."""
    layers = write_hybrid_layers(config, LatentAttentionConfig)
    full = [index + 1 for index, kind in enumerate(layers["layer_types"]) if kind == "full_attention"]
    nested: dict[str, Any] = {"full_attn_layers": full}
    nested["kda_layers"] = [index + 1 for index in range(len(config.blocks)) if index + 1 not in full]
    mixer = next((block.mixer for block in config.blocks if isinstance(block.mixer, KimiDeltaAttentionConfig)), None)
    if mixer is None:
        return layers
    nested |= {"head_dim": mixer.head_dim, "num_heads": mixer.num_heads, "short_conv_kernel_size": mixer.taps}
    flat = {
        "linear_head_dim": mixer.head_dim,
        "linear_num_heads": mixer.num_heads,
        "linear_conv_kernel_dim": mixer.taps,
    }
    return layers | flat | {"linear_attn_config": nested}


_DEFAULTS = dict(
    vocab_size=163_840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, num_attention_heads=32
)
# the names of published files, and those that transformers writes
_RENAMED = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
}
_LAYER = "model.layers.{layer}."
_OWN = _LAYER + "self_attn."
_MOE = _LAYER + "block_sparse_moe."
_HEADS = "(heads head_dim)"
_STREAMS = {"q": "query", "k": "key", "v": "value"}
_DELTA = (
    *(
        Weight(f"{_OWN}{letter}_proj.weight", f"mixer.{name}", f"{_HEADS} embed -> embed heads head_dim")
        for letter, name in _STREAMS.items()
    ),
    *(
        Weight(f"{_OWN}{letter}_conv1d.weight", f"mixer.{name}_taps", f"{_HEADS} 1 taps -> heads head_dim taps")
        for letter, name in _STREAMS.items()
    ),
    *(
        Weight(f"{_OWN}{letter}_a_proj.weight", f"mixer.{name}_down", "gate_rank embed -> embed gate_rank")
        for letter, name in (("f", "dt"), ("g", "gate"))
    ),
    *(
        Weight(f"{_OWN}{letter}_b_proj.weight", f"mixer.{name}_up", f"{_HEADS} gate_rank -> gate_rank heads head_dim")
        for letter, name in (("f", "dt"), ("g", "gate"))
    ),
    Weight(_OWN + "b_proj.weight", "mixer.beta", "heads embed -> embed heads"),
    Weight(_OWN + "A_log", "mixer.a_log", "1 1 heads 1 -> heads"),
    Weight(_OWN + "dt_bias", "mixer.dt_bias", f"{_HEADS} -> heads head_dim"),
    Weight(_OWN + "o_norm.weight", "mixer.norm.scale", "norm -> norm"),
    Weight(_OWN + "o_proj.weight", "mixer.out", f"embed {_HEADS} -> heads head_dim embed"),
)
FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *(row for row in WEIGHTS if ".mlp.experts." not in row.name and ".mlp.shared_experts." not in row.name),
        *_DELTA,
        *moe.separate_experts(_MOE, gate="w1", up="w3", down="w2"),
        *gated_mlp(_MOE + "shared_experts.", "mlp.shared."),
        Weight(_MOE + "gate.e_score_correction_bias", "mlp.router.selection_bias", "experts -> experts"),
    ),
    # transformers writes the MLPs of dense layers under the name of experts
    renamed={r"\.block_sparse_moe\.(\w+_proj)\.": r".mlp.\1."},
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), "nothing is rotated")
    | {"use_grouped_topk": "n_group says it", "model_max_length": "a promise, not a limit"},
)


def _48b() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=163_840, embed_dim=2304, num_layers=27, num_heads=32, num_kv_heads=32, head_dim=192, mlp_dim=9216,
        eps=1e-5,
    )  # fmt: skip
    delta = KimiDeltaAttentionConfig(num_heads=32, head_dim=128, gate_rank=128, norm=RMSNormConfig(eps=shape.eps))
    experts = kimi_experts(
        shape, num_experts=256, num_experts_per_token=8, dim=1024, num_shared=1, scaling_factor=2.446
    )
    full = tuple((index + 1) % 4 == 0 or index == 26 for index in range(27))
    return kimi_linear(shape, delta=delta, full=full, experts=experts, dense=tuple(index < 1 for index in range(27)))


MODELS = {"kimi-linear-48b-a3b": _48b}
