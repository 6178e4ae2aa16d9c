"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025): Mamba-2, few attention layers, squared ReLU.

A layer has a single branch: Mamba-2, attention, an MLP or experts. Attention has no position embedding.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings, unread_depths
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, plain_mlp, self_attention
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.deepseek.blocks import v3_router
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import mamba_weights
from eqx_decoders.families.setting_rows import (
    ABSENT,
    AUTO_MAP,
    Defaults,
    Flag,
    Group,
    Integer,
    Key,
    Number,
    Only,
    Renamed,
    Rule,
    Values,
    Word,
    first_layer,
)
from eqx_decoders.families.weight_rows import Weight, depth_rows, mtp_rows
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


_LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LEGACY_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_MTP_PATTERN = "*E"  # the two layers of each multi-token prediction (MTP) depth


def nemotron_h(
    shape: DecoderSizes, pattern: str, *, mamba: Mamba2Config, experts: ExpertsConfig | None = None, depths: int = 0,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of Nemotron-H layers.

    **Arguments:**

    - `shape`: sizes of the decoder. Attention has no rotary embedding, and MLPs have no gate.
    - `pattern`: the branch of each layer: `M` (Mamba-2), `*` (attention), `-` (MLP) or `E` (experts).
    - `mamba`, `experts`: layers for `M` and `E`. `experts` is required if `pattern` has `E` or `depths` is not 0.
    - `depths`: number of multi-token prediction (MTP) depths. Their two layers, attention and experts, are a single
        block here.
    """
    norm = shape.norm
    mixers = {"M": mamba, "*": shape.attention(rope=None)}
    mlps = {"-": shape.mlp(gated=False), "E": experts}

    def block(letter: str) -> BlockConfig:
        if letter in mixers:
            return BlockConfig(mixer=mixers[letter], mlp=None, pre_mixer_norm=norm)
        return BlockConfig(mixer=None, mlp=mlps[letter], pre_mlp_norm=norm)

    config = shape.decoder(map(block, pattern))
    if depths == 0:
        return config
    mtp = MTPConfig(
        num_depths=depths,
        block=dataclasses.replace(block("*"), mlp=experts, pre_mlp_norm=norm),
        norm=norm,
        normed_stream=True,  # vLLM and SGLang also apply MTP layers to the output of the final norm
    )
    return dataclasses.replace(config, mtp=mtp)


def nemotron_experts(
    shape: DecoderSizes, *, scaling_factor: float, groups: int = 1, groups_per_token: int = 1,
    renormalize: bool = True, **options: Any,
) -> ExpertsConfig:  # fmt: skip
    """Return experts without gates. `options`: arguments of `DecoderSizes.experts`; the others: see `v3_router`."""
    router = v3_router(
        groups=groups, groups_per_token=groups_per_token, scaling_factor=scaling_factor, renormalize=renormalize
    )
    return shape.experts(gated=False, router=router, **options)


def _remove_infinite_limit(fields: Fields, values: Values) -> None:
    # this limit has no effect, and an export could not write infinity as JSON
    if fields.content.get("time_step_limit") == [0.0, float("inf")]:
        del fields.content["time_step_limit"]


def _read_letters(fields: Fields, letters_key: str, types_key: str) -> Any:
    """Return the layers as letters. Raises ConversionError if both keys are present and describe different layers."""
    pattern = fields.take(letters_key, None)
    layer_types = fields.words(types_key, (*_LAYER_TYPES.values(), *_LEGACY_LAYER_TYPES), None)
    if layer_types is None:
        return pattern
    letters_by_type = {layer_type: letter for letter, layer_type in _LAYER_TYPES.items()}
    letters = "".join(letters_by_type[_LEGACY_LAYER_TYPES.get(layer_type, layer_type)] for layer_type in layer_types)
    if pattern is not None and pattern != letters:
        raise fields.error(
            f"{letters_key}={abbreviate(pattern)} differs from {types_key}, which is {abbreviate(letters)} in letters: "
            f"make them equal, or remove {letters_key}."
        )
    return letters


def _read_pattern(fields: Fields, values: Values) -> str:
    pattern = _read_letters(fields, "hybrid_override_pattern", "layers_block_type")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LAYER_TYPES):
        raise fields.error(
            f"hybrid_override_pattern={abbreviate(pattern)} must have a letter for each layer: M (Mamba-2), "
            "* (attention), - (MLP) or E (experts). Set it, or set layers_block_type."
        )
    if "*" not in pattern:
        raise fields.error(
            f"hybrid_override_pattern={abbreviate(pattern)} or layers_block_type must have at least one attention "
            "layer (* or full_attention)."
        )
    # `decoder_sizes` reads this key; in transformers, the number of layers is the length of the pattern
    fields.content["num_hidden_layers"] = len(pattern)
    return pattern


def _write_pattern(config: DecoderConfig) -> dict[str, Any]:
    pattern = "".join(map(_letter, config.blocks))
    return {"layers_block_type": [_LAYER_TYPES[letter] for letter in pattern], "hybrid_override_pattern": pattern}


def _check_mtp_pattern(fields: Fields, values: Values) -> None:
    """Raise ConversionError unless MTP layers are attention and experts."""
    pattern = _read_letters(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    depths = values["depths"]
    if depths and (pattern or _MTP_PATTERN) != _MTP_PATTERN:
        raise fields.error(
            f"mtp_hybrid_override_pattern={pattern} is not supported. Supported: {_MTP_PATTERN} (attention, experts)."
        )
    if depths and "E" not in values["pattern"]:
        raise fields.error(
            f"num_nextn_predict_layers={depths} needs a layer with experts in hybrid_override_pattern or "
            "layers_block_type, because multi-token prediction layers have the same experts. Set it to 0."
        )


def _write_mtp_pattern(config: DecoderConfig) -> dict[str, Any]:
    if config.mtp is None:
        return {}
    layer_types = [_LAYER_TYPES[letter] for letter in _MTP_PATTERN]
    return {"mtp_layers_block_type": layer_types, "mtp_hybrid_override_pattern": _MTP_PATTERN}


def _letter(block: BlockConfig) -> str:
    letters = {AttentionConfig: "*", Mamba2Config: "M", MLPConfig: "-", ExpertsConfig: "E", type(None): ""}
    letter = "".join(letters.get(type(layer), "?") for layer in (block.mixer, block.mlp))
    if letter not in _LAYER_TYPES:
        raise ConversionError(
            f"DecoderConfig.blocks: {block!r} cannot be written as a nemotron_h layer, which has exactly one layer of "
            "AttentionConfig, Mamba2Config, MLPConfig or ExpertsConfig. Use another family."
        )
    return letter


def _mlp_field(field: str) -> Callable[[DecoderConfig], Any]:
    """Return a function that returns a field of the first MLP, or ABSENT if no layer has an MLP."""

    def value(config: DecoderConfig) -> Any:
        mlp = first_layer(config, "mlp")
        return getattr(mlp, field) if isinstance(mlp, MLPConfig) else ABSENT

    return value


_MAMBA = (
    Integer("mamba_num_heads", "mamba.num_heads", 128),
    Integer("mamba_head_dim", "mamba.value_dim", 64),
    Integer("n_groups", "mamba.num_groups", 8),
    Integer("ssm_state_size", "mamba.key_dim", 128),
    Integer("conv_kernel", "mamba.taps", 4),
    Flag("use_conv_bias", "mamba.taps_bias", True),
    Flag("use_bias", "mamba.in_bias", False, name="bias"),
    Number("time_step_min", "mamba.dt_min", 0.001),  # lower bound of step sizes in transformers; vLLM has no bound
)
_EXPERTS: tuple[Key | Only, ...] = (
    *moe.expert_counts("n_routed_experts", num=8, chosen=2),
    Integer("moe_intermediate_size", "experts.mlp_dim", 7688),
    Integer("moe_shared_expert_intermediate_size", "experts.shared.mlp_dim", 7688, name="shared_dim"),
    Integer("moe_latent_size", "experts.latent_dim", None),
    Number("routed_scaling_factor", "experts.router.scaling_factor", 1.0),
    Integer("n_group", "experts.router.num_groups", 1, name="groups"),
    Integer("topk_group", "experts.router.groups_per_token", 1, name="groups_per_token"),
    Flag("norm_topk_prob", "experts.router.renormalize", True),
    Only("n_shared_experts", 1, written=True),
    Word("mlp_hidden_act", "experts.activation", "relu2", known=ACTIVATIONS, name="_activation"),
)


def _skip_expert_keys(fields: Fields, values: Values) -> None:
    """Ignore the sizes of experts if no layer has experts, because transformers writes its default sizes."""
    if "E" in values["pattern"]:
        return
    for setting in _EXPERTS:
        if setting.key != "mlp_hidden_act":  # also the activation of MLPs
            fields.take(setting.key, None)


def _mamba(shape: DecoderSizes, *, bias: bool, **options: Any) -> Mamba2Config:
    return Mamba2Config(eps=shape.eps, in_bias=bias, out_bias=bias, **options)


_KEY_NAMES = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act", **NO_BIAS}
# other spellings that transformers also reads
_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "attention_head_dim": "head_dim",
}
_IGNORED = {
    "attention_bias mamba_proj_bias sliding_window rope_theta rope_parameters rope_scaling partial_rotary_factor "
    "time_step_limit mamba_dt_limit num_hidden_layers norm_eps rms_norm_eps": "transformers does not read it",
    "chunk_size mamba_chunk_size use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep moe_shared_expert_overlap "
    "residual_in_fp32 expand mamba_expand": "it affects only how transformers runs the model",
    "mtp_hybrid_override_pattern mtp_layers_block_type": "only attention followed by experts is supported",
    "rescale_prenorm_residual time_step_max time_step_floor mamba_dt_max mamba_dt_init_floor": "it affects only the "
    "initialization of weights",
}
_LAYER = "backbone.layers.{layer}."
_MIXER = _LAYER + "mixer."
_ATTENTION = (
    Weight(_LAYER + "norm.weight", "pre_mixer_norm.scale", "norm -> norm"),
    *self_attention(_LAYER, "mixer."),
)
_SPARSE = (
    Weight(_LAYER + "norm.weight", "pre_mlp_norm.scale", "norm -> norm"),
    *plain_mlp(_MIXER + "experts.{expert}.", "mlp."),
    Weight(_MIXER + "experts.{expert}.up_proj.weight", "mlp.up", "mlp latent -> latent mlp"),
    Weight(_MIXER + "experts.{expert}.down_proj.weight", "mlp.down", "latent mlp -> mlp latent"),
    Weight(_MIXER + "fc1_latent_proj.weight", "mlp.latent_in", "latent embed -> embed latent"),
    Weight(_MIXER + "fc2_latent_proj.weight", "mlp.latent_out", "embed latent -> latent embed"),
    Weight(_MIXER + "gate.weight", "mlp.router.kernel", "experts embed -> embed experts"),
    Weight(_MIXER + "gate.e_score_correction_bias", "mlp.router.selection_bias", "experts -> experts"),
    *plain_mlp(_MIXER + "shared_experts.", "mlp.shared."),
)

FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    settings=(
        AUTO_MAP,
        Renamed(_RENAMED),
        Rule("", _remove_infinite_limit),
        Defaults(dict(vocab_size=131_072, hidden_size=4096, num_attention_heads=32, intermediate_size=21_504)),
        Rule("pattern", _read_pattern, _write_pattern),
        decoder_sizes(
            num_kv_heads=8, head_dim=128, eps=1e-5, activation="relu2", keys=_KEY_NAMES,
            paths={"intermediate_size": _mlp_field("mlp_dim"), "hidden_act": _mlp_field("activation")},
        ),
        Only("mlp_bias", False, written=True),
        Only("mamba_hidden_act", "silu", written=True),
        Only("n_shared_experts", 1),
        Group("mamba", _mamba, _MAMBA, uses=("shape",), layer="mamba"),
        Group(
            "experts", nemotron_experts, _EXPERTS, uses=("shape",), layer="experts",
            when=lambda values: "E" in values["pattern"],
        ),
        Rule("", _skip_expert_keys),
        *depth_settings("num_nextn_predict_layers"),
        Rule("", _check_mtp_pattern, _write_mtp_pattern),
    ),
    build=nemotron_h,
    weights=(
        Weight("backbone.embeddings.weight", "embedding.table", "vocab embed -> vocab embed"),
        *_ATTENTION,
        *mamba_weights(_MIXER),
        *plain_mlp(_MIXER, "mlp."),
        *_SPARSE,
        *mtp_rows(_ATTENTION, _LAYER, "mtp.layers.0."),
        *mtp_rows(_SPARSE, _LAYER, "mtp.layers.1."),
        *depth_rows("mtp.layers.0.", embed_norm="enorm", stream_norm="hnorm", kernels="eh_proj"),
        Weight("mtp.layers.1.final_layernorm.weight", "mtp.depth.final_norm.scale", "norm -> norm"),
        Weight("backbone.norm_f.weight", "final_norm.scale", "norm -> norm"),
        Weight("lm_head.weight", "head.kernel", "vocab embed -> embed vocab"),
    ),
    ignored_keys=_IGNORED | moe.IGNORED_ROUTER_KEYS,
    ignored_tensors=unread_depths(r"(backbone\.)?mtp\..*"),
    renamed={r"^model\.": "backbone."},
    modules={r"^backbone\.": "model."},
)  # fmt: skip


def _model(
    pattern: str, mamba_heads: int, *, value_dim: int = 64, key_dim: int = 128,
    experts: Mapping[str, Any] | None = None, **sizes: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a published model.

    `pattern`: see `nemotron_h`. `experts`: arguments of `nemotron_experts`. `sizes`: fields of `DecoderSizes`.
    """
    defaults: dict[str, Any] = dict(vocab_size=131_072, num_layers=len(pattern), num_kv_heads=8, head_dim=128)
    shape = DecoderSizes(activation="relu2", eps=1e-5, **{**defaults, **sizes})
    mamba = Mamba2Config(
        num_heads=mamba_heads, value_dim=value_dim, num_groups=8, key_dim=key_dim, dt_min=0.001, eps=shape.eps
    )
    experts_config = None if experts is None else nemotron_experts(shape, **experts)
    return nemotron_h(shape, pattern, mamba=mamba, experts=experts_config)


_SMALL = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
_56B = "M-M-M-M" + "*-M-M-M-M-M" * 10 + "-"
_NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_NANO_12B = "M-M-M-M" + "*-M-M-M-M" * 6 + "-"
_NANO_30B = "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"

MODELS = {
    "nemotron-h-4b": lambda: _model(_SMALL, 112, embed_dim=3072, num_heads=32, mlp_dim=12_288),
    "nemotron-h-8b": lambda: _model(_SMALL, 128, embed_dim=4096, num_heads=32, mlp_dim=21_504),
    "nemotron-h-47b": lambda: _model(_47B, 256, key_dim=256, embed_dim=8192, num_heads=64, mlp_dim=30_720),
    "nemotron-h-56b": lambda: _model(_56B, 256, key_dim=256, embed_dim=8192, num_heads=64, mlp_dim=32_768),
    "nemotron-nano2-9b": lambda: _model(_NANO, 128, value_dim=80, embed_dim=4480, num_heads=40, mlp_dim=15_680),
    "nemotron-nano2-12b": lambda: _model(_NANO_12B, 128, value_dim=80, embed_dim=5120, num_heads=40, mlp_dim=20_480),
    "nemotron3-nano-30b-a3b": lambda: _model(
        _NANO_30B, 64, embed_dim=2688, num_heads=32, num_kv_heads=2, mlp_dim=1856,
        experts=dict(num_experts=128, num_experts_per_token=6, shared_dim=3712, scaling_factor=2.5),
    ),
    "nemotron3-super-120b-a12b": lambda: _model(
        _SUPER, 128, embed_dim=4096, num_heads=32, num_kv_heads=2, mlp_dim=2688,
        experts=dict(
            num_experts=512, num_experts_per_token=22, shared_dim=5376, scaling_factor=5.0, latent_dim=1024
        ),
    ),
}  # fmt: skip
