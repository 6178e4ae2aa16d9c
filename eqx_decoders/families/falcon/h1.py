"""Falcon-H1 (Falcon LLM Team 2025): parallel attention and Mamba-2 in each layer, and constant multipliers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.families.common import ENDS, LAYER, DecoderSizes, decoder_sizes, renamed
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import mamba_settings, mamba_weights
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Group, Inverse, Number, Rule, Values, first_layer, value_at
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
    mlp: MLPConfig,
    rope: Rope = Rope(theta=1e11),
    key_scale: float = 1.0,
    mamba_in: float = 1.0,
    mamba_out: float = 1.0,
    attention_in: float = 1.0,
    attention_out: float = 1.0,
    **scales: Any,
) -> DecoderConfig:
    """Return a decoder of Falcon-H1 blocks, in which Mamba-2 and attention read the same normalized stream.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `mamba`, `mlp`: the Mamba-2 mixer, and the MLP.
    - `rope`: rotary embedding of attention.
    - `key_scale`: multiplies the keys of attention.
    - `mamba_in`, `mamba_out`, `attention_in`, `attention_out`: multiply the inputs and outputs of the mixers.
    - `scales`: `embedding_scale` and `logit_divisor` of `DecoderConfig`.
    """
    attention = shape.attention(rope=rope, key_scale=key_scale)
    mixers = (
        NamedMixer(name="mamba", mixer=mamba, input_scale=mamba_in, output_scale=mamba_out),
        NamedMixer(name="attention", mixer=attention, input_scale=attention_in, output_scale=attention_out),
    )
    return shape.decoder(shape.block(ParallelMixersConfig(mixers=mixers), mlp), **scales)


# --- config.json ---


def _read_multipliers(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    """Return the list of `count` numbers above 0 under `key`. null means that all of them are 1."""
    value = fields.take(key, None)
    if value is None:
        return (1.0,) * count
    if not isinstance(value, list) or len(value) != count:
        raise fields.error(f"{key}={abbreviate(value)} must be a list of {count} numbers above 0, or null.")
    numbers = Fields({f"{key}[{index}]": number for index, number in enumerate(value)}, fields.where)
    return tuple(numbers.number(name) for name in numbers.content)


def _read_norm(fields: Fields, values: Values) -> str | None:
    is_before_gate = fields.flag("mamba_norm_before_gate", True)
    if not fields.flag("mamba_rms_norm", False):
        return None
    return "before_gate" if is_before_gate else "after_gate"


def _write_norm(config: DecoderConfig) -> dict[str, Any]:
    norm = first_layer(config, "mamba").norm
    if norm is None:
        return {"mamba_rms_norm": False}
    return {"mamba_rms_norm": True, "mamba_norm_before_gate": norm == "before_gate"}


def _mlp(shape: DecoderSizes, *, bias: bool, scales: tuple[float, ...]) -> MLPConfig:
    gate_scale, out_scale = scales
    return shape.mlp(bias=bias, gate_scale=gate_scale, out_scale=out_scale)


def _write_mlp_scales(config: DecoderConfig) -> dict[str, Any]:
    return {"mlp_multipliers": [value_at(config, "mlp.gate_scale"), value_at(config, "mlp.out_scale")]}


_MAMBA_OPTIONS = (
    Flag("projectors_bias", "mamba.out_bias", False),
    Rule("norm", _read_norm, _write_norm),
    Rule(
        "in_scales",
        lambda fields, values: _read_multipliers(fields, "ssm_multipliers", 5),
        lambda config: {"ssm_multipliers": list(first_layer(config, "mamba").in_scales)},
    ),
)
_MLP_OPTIONS = (
    Flag("mlp_bias", "mlp.bias", False),
    Rule("scales", lambda fields, values: _read_multipliers(fields, "mlp_multipliers", 2), _write_mlp_scales),
)
_MIXERS = "blocks.0.mixer.mixers."


# --- tensors ---


def _for_parallel_mixer(rows: Iterable[Weight], name: str) -> tuple[Weight, ...]:
    """Return the rows of a single mixer with the paths that the parallel mixer `name` has."""

    def nested_path(path: str) -> str:
        return path.replace("mixer.", f"mixer.mixers.{name}.", 1)

    return tuple(dataclasses.replace(row, path=nested_path(row.path), needs=nested_path(row.needs)) for row in rows)


FAMILY = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, eps=1e-5),
        mamba_settings(inner_dim=1024, more=_MAMBA_OPTIONS),
        Group("mlp", _mlp, _MLP_OPTIONS, uses=("shape",)),
        rope_settings(),
        Number("key_multiplier", "attention.key_scale", 1.0),
        Number("ssm_in_multiplier", _MIXERS + "0.input_scale", 1.0, name="mamba_in"),
        Number("ssm_out_multiplier", _MIXERS + "0.output_scale", 1.0, name="mamba_out"),
        Number("attention_in_multiplier", _MIXERS + "1.input_scale", 1.0, name="attention_in"),
        Number("attention_out_multiplier", _MIXERS + "1.output_scale", 1.0, name="attention_out"),
        Number("embedding_multiplier", "embedding_scale", 1.0),
        Inverse("lm_head_multiplier", "logit_divisor", 1.0),
    ),
    build=falcon_h1,
    weights=(
        *renamed(ENDS, {"model.norm": "model.final_layernorm"}),
        *norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_ff_layernorm"),
        *_for_parallel_mixer(mamba_weights(LAYER + "mamba."), "mamba"),
        *_for_parallel_mixer(self_attention(LAYER), "attention"),
        *gated_mlp(LAYER + "feed_forward."),
    ),
    ignored_keys={
        "mamba_expand": "mamba_d_ssm determines it",
        "mamba_chunk_size num_logits_to_keep": "runtime option; it changes no output",
        "attn_layer_indices mamba_use_mlp mlp_expansion_factor expansion_factor": "transformers does not read it",
    },
)


_BASE = dict(
    model_type="falcon_h1",
    num_key_value_heads=2,
    head_dim=128,
    mamba_n_heads=24,
    rope_theta=100_000_000_000.0,
)

MODELS = {
    "falcon-h1-0.5b": _BASE | dict(
        vocab_size=32_784, hidden_size=1024, num_hidden_layers=36, num_attention_heads=8, head_dim=64,
        intermediate_size=2048, mamba_d_ssm=1536, mamba_d_state=128,
    ),
    "falcon-h1-7b": _BASE | dict(
        vocab_size=130_049, hidden_size=3072, num_hidden_layers=44, num_attention_heads=12, intermediate_size=12_288,
        mamba_d_ssm=3072,
    ),
    "falcon-h1-34b": _BASE | dict(
        vocab_size=261_120, hidden_size=5120, num_hidden_layers=72, num_attention_heads=20, num_key_value_heads=4,
        intermediate_size=21_504, mamba_d_ssm=4096, mamba_n_groups=2, mamba_n_heads=32, mamba_norm_before_gate=False,
        mamba_rms_norm=True,
    ),
}  # fmt: skip
