"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, whose queries grow with their position."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.settings_table import Only, Rule, Values, value_at
from eqx_decoders.layers.attention.attention import QueryTemperature
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.model.decoder_config import DecoderConfig


_BETA, _TABLES = "llama_4_scaling_beta", ("rope_parameters", "rope_scaling")


def ministral3(shape: DecoderSizes, *, rope: YarnRope, growth: float = 0.1) -> DecoderConfig:
    """Return a decoder of Ministral 3; queries grow by `1 + growth ln(1 + floor(position / original length))`."""
    temperature = QueryTemperature(scale=growth, length=rope.original_length, offset=0)
    return shape.decoder(shape.block(shape.attention(rope=rope, temperature=temperature)))


def _read_rope(fields: Fields, values: Values) -> Rope:
    rope = read_rope(fields, theta=1e6, others=(_BETA,))
    if not isinstance(rope, YarnRope):
        raise fields.error("rope_type must be yarn: its original length is that over which queries do not grow.")
    return rope


def _read_growth(fields: Fields, values: Values) -> float:
    tables = [table for key in _TABLES if (table := fields.table(key)) is not None]
    return next((table.number(_BETA) for table in tables if _BETA in table.content), 0.1)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    written, beta = write_rope(config), {_BETA: value_at(config, "attention.temperature.scale")}
    return {key: value | beta if key in _TABLES else value for key, value in written.items()}


FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, head_dim=128, eps=1e-5, keys=NO_BIAS),
        Only("sliding_window", None, written=True),
        Rule("growth", _read_growth, lambda config: {}),
        Rule("rope", _read_rope, _write_rope),
    ),
    build=ministral3,
    weights=llama_weights(),
)


MODELS = {
    "ministral3-8b": dict(
        model_type="ministral3", vocab_size=131_072, hidden_size=4096, num_hidden_layers=34, num_attention_heads=32,
        intermediate_size=14_336,
        rope_scaling=dict(
            factor=16.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16_384, rope_type="yarn",
        ),
    ),
}  # fmt: skip
