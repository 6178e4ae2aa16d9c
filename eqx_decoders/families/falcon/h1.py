"""Falcon-H1 (Falcon LLM Team 2025): attention and Mamba-2 side by side in each layer, and many multipliers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import ENDS, LAYER, DecoderSizes, decoder_sizes, renamed
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.mamba.blocks import mamba_settings, mamba_weights
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Group, Inverse, Number, Rule, Values, first_layer, value_at
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.parallel_mixers import NamedMixer, ParallelMixersConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def falcon_h1(
    shape: DecoderSizes,
    *,
    mamba: Mamba2Config,
    rope: Rope = Rope(theta=1e11),
    mlp: MLPConfig | None = None,
    key_scale: float = 1.0,
    mamba_in: float = 1.0,
    mamba_out: float = 1.0,
    attention_in: float = 1.0,
    attention_out: float = 1.0,
    **scales: Any,
) -> DecoderConfig:
    """Return a decoder of Falcon-H1 blocks, with scales of inputs and outputs of mixers, and those of its ends."""
    attention = shape.attention(rope=rope, key_scale=key_scale)
    mixers = (
        NamedMixer(name="mamba", mixer=mamba, input_scale=mamba_in, output_scale=mamba_out),
        NamedMixer(name="attention", mixer=attention, input_scale=attention_in, output_scale=attention_out),
    )
    return shape.decoder(shape.block(ParallelMixersConfig(mixers=mixers), mlp), **scales)


# --- config.json ---


def _read_numbers(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    """Read a list of so many numbers above 0; those of null are 1."""
    value = fields.take(key, None)
    if value is None:
        return (1.0,) * count
    if not isinstance(value, list) or len(value) != count:
        raise fields.error(f"{key} must be a list of {count} numbers.")
    each = Fields({f"{key}[{index}]": number for index, number in enumerate(value)}, fields.where)
    return tuple(each.number(name) for name in each.content)


def _read_norm(fields: Fields, values: Values) -> str | None:
    before = fields.flag("mamba_norm_before_gate", True)
    return ("before_gate" if before else "after_gate") if fields.flag("mamba_rms_norm", False) else None


def _write_norm(config: DecoderConfig) -> dict[str, Any]:
    norm = first_layer(config, "mamba").norm
    place = {} if norm is None else {"mamba_norm_before_gate": norm == "before_gate"}
    return {"mamba_rms_norm": norm is not None, **place}


def _mlp(shape: DecoderSizes, *, bias: bool, scales: tuple[float, ...]) -> MLPConfig:
    gate, out = scales
    return shape.mlp(bias=bias, gate_scale=gate, out_scale=out)


def _write_mlp_scales(config: DecoderConfig) -> dict[str, Any]:
    mlp = value_at(config, "mlp")
    return {"mlp_multipliers": [mlp.gate_scale, mlp.out_scale]}


_MAMBA_OPTIONS = (
    Flag("projectors_bias", "mamba.out_bias", False),
    Rule("norm", _read_norm, _write_norm),
    Rule(
        "in_scales",
        lambda fields, values: _read_numbers(fields, "ssm_multipliers", 5),
        lambda config: {"ssm_multipliers": list(first_layer(config, "mamba").in_scales)},
    ),
)
_MLP_OPTIONS = (
    Flag("mlp_bias", "mlp.bias", False),
    Rule("scales", lambda fields, values: _read_numbers(fields, "mlp_multipliers", 2), _write_mlp_scales),
)
_MIXER = "blocks.0.mixer.mixers."
# --- tensors ---


def _within(rows: Iterable[Weight], name: str) -> tuple[Weight, ...]:
    """Return the rows of a mixer for the one of several that has this name."""

    def path(inside: str) -> str:
        return inside.replace("mixer.", f"mixer.mixers.{name}.", 1)

    return tuple(dataclasses.replace(row, path=path(row.path), needs=path(row.needs)) for row in rows)


FAMILY = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, eps=1e-5),
        mamba_settings(inner_dim=1024, more=_MAMBA_OPTIONS),
        Group("mlp", _mlp, _MLP_OPTIONS, uses=("shape",)),
        rope_settings(),
        Number("key_multiplier", "attention.key_scale", 1.0),
        Number("ssm_in_multiplier", _MIXER + "0.input_scale", 1.0, name="mamba_in"),
        Number("ssm_out_multiplier", _MIXER + "0.output_scale", 1.0, name="mamba_out"),
        Number("attention_in_multiplier", _MIXER + "1.input_scale", 1.0, name="attention_in"),
        Number("attention_out_multiplier", _MIXER + "1.output_scale", 1.0, name="attention_out"),
        Number("embedding_multiplier", "embedding_scale", 1.0),
        Inverse("lm_head_multiplier", "logit_divisor", 1.0),
    ),
    build=falcon_h1,
    weights=(
        *renamed(ENDS, {"model.norm": "model.final_layernorm"}),
        *norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_ff_layernorm"),
        *_within(mamba_weights(LAYER + "mamba."), "mamba"),
        *_within(self_attention(LAYER), "attention"),
        *gated_mlp(LAYER + "feed_forward."),
    ),
    ignored_keys={
        "mamba_expand": "mamba_d_ssm says it",
        "mamba_chunk_size num_logits_to_keep": "how it is run",
        "attn_layer_indices mamba_use_mlp mlp_expansion_factor expansion_factor": "transformers does not read it",
    },
)


_SETTINGS = dict(
    model_type="falcon_h1",
    num_key_value_heads=2,
    head_dim=128,
    mamba_n_heads=24,
    rope_theta=100_000_000_000.0,
)

MODELS = {
    "falcon-h1-0.5b": _SETTINGS | dict(
        vocab_size=32_784, hidden_size=1024, num_hidden_layers=36, num_attention_heads=8, head_dim=64,
        intermediate_size=2048, mamba_d_ssm=1536, mamba_d_state=128,
    ),
    "falcon-h1-7b": _SETTINGS | dict(
        vocab_size=130_049, hidden_size=3072, num_hidden_layers=44, num_attention_heads=12, intermediate_size=12_288,
        mamba_d_ssm=3072,
    ),
    "falcon-h1-34b": _SETTINGS | dict(
        vocab_size=261_120, hidden_size=5120, num_hidden_layers=72, num_attention_heads=20, num_key_value_heads=4,
        intermediate_size=21_504, mamba_d_ssm=4096, mamba_n_groups=2, mamba_n_heads=32, mamba_norm_before_gate=False,
        mamba_rms_norm=True,
    ),
}  # fmt: skip
