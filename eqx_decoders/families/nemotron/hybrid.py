"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025): Mamba-2, few layers of attention, squared ReLU.

A layer has one branch only: a recurrence, attention, an MLP or experts. Nothing knows positions but the recurrence.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings, unread_depths
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, plain_mlp, self_attention
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.deepseek.blocks import v3_router
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.mamba.blocks import mamba_weights
from eqx_decoders.families.settings_table import (
    ABSENT,
    AUTO_MAP,
    Defaults,
    Flag,
    Group,
    Integer,
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


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}
_DEPTH = "*E"  # the layers of multi-token prediction


def nemotron_h(
    shape: DecoderSizes, pattern: str, *, mamba: Mamba2Config | None, experts: ExpertsConfig | None = None,
    depths: int = 0,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of layers with one branch each: M(amba), * (attention), - (an MLP) or E(xperts).

    The two layers of multi-token prediction, attention and experts, are one block here. They read the stream after the
    final norm, as vLLM and SGLang run these weights.
    """
    norm, mixers = shape.norm, {"M": mamba, "*": shape.attention(rope=None)}
    channels = {"-": shape.mlp(gated=False), "E": experts}

    def block(letter: str) -> BlockConfig:
        mixer, mlp = mixers.get(letter), channels.get(letter)
        if mixer is None:
            return BlockConfig(mixer=None, mlp=mlp, pre_mlp_norm=norm)
        return BlockConfig(mixer=mixer, mlp=None, pre_mixer_norm=norm)

    config = shape.decoder(map(block, pattern))
    if depths == 0:
        return config
    ahead = dataclasses.replace(block("*"), mlp=experts, pre_mlp_norm=norm)
    return dataclasses.replace(config, mtp=MTPConfig(num_depths=depths, block=ahead, norm=norm, normed_stream=True))


def nemotron_experts(shape: DecoderSizes, *, scaling_factor: float, **options: Any) -> ExpertsConfig:
    """Return experts without gates, and a shared one; those of the options that are the router's are `v3_router`'s."""
    names = {"groups", "groups_per_token", "renormalize"} & options.keys()
    router = v3_router(scaling_factor=scaling_factor, **{name: options.pop(name) for name in names})
    return shape.experts(gated=False, router=router, **options)


def _without_infinite_limit(fields: Fields, values: Values) -> None:
    if fields.content.get("time_step_limit") == [0.0, float("inf")]:  # which an export could not write
        del fields.content["time_step_limit"]


def _read_letters(fields: Fields, key: str, key_of_words: str) -> Any:
    pattern, names = fields.take(key, None), fields.words(key_of_words, (*_LETTERS.values(), *_LEGACY), None)
    if names is None:
        return pattern
    letters = {name: letter for letter, name in _LETTERS.items()}
    return "".join(letters[_LEGACY.get(name, name)] for name in names)  # it counts where both are given


def _read_pattern(fields: Fields, values: Values) -> str:
    """Read the pattern: one letter for each layer."""
    pattern = _read_letters(fields, "hybrid_override_pattern", "layers_block_type")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS):
        raise fields.error(f"hybrid_override_pattern must have one of {' '.join(_LETTERS)} for each layer.")
    if "*" not in pattern:
        raise fields.error("hybrid_override_pattern or layers_block_type must have at least one attention layer.")
    fields.content["num_hidden_layers"] = len(pattern)  # which transformers does not read
    return pattern


def _write_pattern(config: DecoderConfig) -> dict[str, Any]:
    pattern = "".join(map(_letter, config.blocks))
    return {"layers_block_type": [_LETTERS[letter] for letter in pattern], "hybrid_override_pattern": pattern}


def _read_depth_pattern(fields: Fields, values: Values) -> None:
    """Refuse other layers of multi-token prediction than attention and experts."""
    pattern = _read_letters(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if values["depths"] and (pattern or _DEPTH) != _DEPTH:
        raise fields.error(f"mtp_hybrid_override_pattern={pattern} is not known here: only {_DEPTH} is.")
    if values["depths"] and "E" not in values["pattern"]:
        raise fields.error("num_nextn_predict_layers must be 0 where no layer has experts, whose sizes its are.")


def _write_depth_pattern(config: DecoderConfig) -> dict[str, Any]:
    names = [_LETTERS[letter] for letter in _DEPTH]
    return {"mtp_layers_block_type": names, "mtp_hybrid_override_pattern": _DEPTH} if config.mtp else {}


def _letter(block: BlockConfig) -> str:
    kinds = {AttentionConfig: "*", Mamba2Config: "M", MLPConfig: "-", ExpertsConfig: "E", type(None): ""}
    letter = "".join(kinds.get(type(part), "?") for part in (block.mixer, block.mlp))
    if letter not in _LETTERS:
        raise ConversionError(
            f"DecoderConfig.blocks: a layer must have one of the branches that Nemotron-H has: {block!r}."
        )
    return letter


def _of_mlp(field: str) -> Callable[[DecoderConfig], Any]:
    """Return a function of the first MLP's field; it is not written where no layer has an MLP."""

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
    Number("time_step_min", "mamba.dt_min", 0.001),  # with which transformers limits steps; vLLM does not
)
_EXPERTS = (
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
    if "E" not in values["pattern"]:
        for setting in _EXPERTS:
            for key in (getattr(setting, name, None) for name in ("key", "twin")):
                if key and key != "mlp_hidden_act":
                    fields.take(key, None)


def _mamba(shape: DecoderSizes, *, bias: bool, **options: Any) -> Mamba2Config:
    return Mamba2Config(eps=shape.eps, in_bias=bias, out_bias=bias, **options)


_KEYS = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act", **NO_BIAS}
# the names that transformers reads as well
_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "attention_head_dim": "head_dim",
}
_IGNORED = {
    "transformers does not read it": "attention_bias mamba_proj_bias sliding_window rope_theta rope_parameters "
    "rope_scaling partial_rotary_factor time_step_limit mamba_dt_limit num_hidden_layers norm_eps rms_norm_eps",
    "how it is run": "chunk_size mamba_chunk_size use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep "
    "moe_shared_expert_overlap residual_in_fp32 expand mamba_expand",
    "only one kind of layers of multi-token prediction is read": "mtp_hybrid_override_pattern mtp_layers_block_type",
    "how it was begun": "rescale_prenorm_residual time_step_max time_step_floor mamba_dt_max mamba_dt_init_floor",
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
        Rule("", _without_infinite_limit),
        Defaults(dict(vocab_size=131_072, hidden_size=4096, num_attention_heads=32, intermediate_size=21_504)),
        Rule("pattern", _read_pattern, _write_pattern),
        decoder_sizes(
            num_kv_heads=8, head_dim=128, eps=1e-5, activation="relu2", keys=_KEYS,
            paths={"intermediate_size": _of_mlp("mlp_dim"), "hidden_act": _of_mlp("activation")},
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
        Rule("", _read_depth_pattern, _write_depth_pattern),
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
    ignored_keys={key: reason for reason, keys in _IGNORED.items() for key in keys.split()} | moe.IGNORED_ROUTER_KEYS,
    ignored_tensors=unread_depths(r"(backbone\.)?mtp\..*"),
    renamed={r"^model\.": "backbone."},
    modules={r"^backbone\.": "model."},
)  # fmt: skip

_shape = functools.partial(
    DecoderSizes, vocab_size=131_072, num_kv_heads=8, head_dim=128, activation="relu2", eps=1e-5
)  # fmt: skip


def _model(shape: DecoderSizes, pattern: str, heads: int, value_dim: int = 64, key_dim: int = 128, **experts: Any):
    mamba = Mamba2Config(
        num_heads=heads, value_dim=value_dim, num_groups=8, key_dim=key_dim, dt_min=0.001, eps=shape.eps
    )
    experts_config = nemotron_experts(shape, **experts) if experts else None
    return nemotron_h(shape, pattern, mamba=mamba, experts=experts_config)


_SMALL = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
_56B = "M-M-M-M" + "*-M-M-M-M-M" * 10 + "-"
_NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_NANO_12B = "M-M-M-M" + "*-M-M-M-M" * 6 + "-"
_NANO_30B = "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"


def _sized(pattern: str, **sizes: Any) -> DecoderSizes:
    return _shape(num_layers=len(pattern), **sizes)


MODELS = {
    "nemotron-h-4b": lambda: _model(_sized(_SMALL, embed_dim=3072, num_heads=32, mlp_dim=12_288), _SMALL, 112),
    "nemotron-h-8b": lambda: _model(_sized(_SMALL, embed_dim=4096, num_heads=32, mlp_dim=21_504), _SMALL, 128),
    "nemotron-h-47b": lambda: _model(
        _sized(_47B, embed_dim=8192, num_heads=64, mlp_dim=30_720), _47B, 256, key_dim=256
    ),
    "nemotron-h-56b": lambda: _model(
        _sized(_56B, embed_dim=8192, num_heads=64, mlp_dim=32_768), _56B, 256, key_dim=256
    ),
    "nemotron-nano2-9b": lambda: _model(
        _sized(_NANO, embed_dim=4480, num_heads=40, mlp_dim=15_680), _NANO, 128, value_dim=80
    ),
    "nemotron-nano2-12b": lambda: _model(
        _sized(_NANO_12B, embed_dim=5120, num_heads=40, mlp_dim=20_480), _NANO_12B, 128, value_dim=80
    ),
    "nemotron3-nano-30b-a3b": lambda: _model(
        _sized(_NANO_30B, embed_dim=2688, num_heads=32, num_kv_heads=2, mlp_dim=1856), _NANO_30B, 64,
        num_experts=128, num_experts_per_token=6, shared_dim=3712, scaling_factor=2.5,
    ),
    "nemotron3-super-120b-a12b": lambda: _model(
        _sized(_SUPER, embed_dim=4096, num_heads=32, num_kv_heads=2, mlp_dim=2688), _SUPER, 128,
        num_experts=512, num_experts_per_token=22, shared_dim=5376, scaling_factor=5.0, latent_dim=1024,
    ),
}  # fmt: skip
