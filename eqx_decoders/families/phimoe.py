"""Phi-3.5-MoE (Abdin et al. 2024): LayerNorms, biases, the head's too, and two experts in turn by SparseMixer."""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, same_window
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.settings_table import AUTO_MAP, Flag, Number, Only, Rule, Values, value_at
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import LongRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_TABLES, _SHORT, _LONG = ("rope_parameters", "rope_scaling"), "short_mscale", "long_mscale"


def phimoe(
    shape: DecoderSizes, *, num_experts: int = 16, jitter: float = 0.01, rope: Rope = Rope(), mask: Mask = Causal(),
    head_bias: bool = False,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of Phi-3.5-MoE blocks."""
    norm = LayerNormConfig(eps=shape.eps)
    router = RouterConfig(sparse_mixer=jitter)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=2, router=router)
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask), experts, norm), norm, head_bias=head_bias)


def _read_rope(fields: Fields, values: Values) -> Rope:
    """Read a rotary embedding whose magnitude stands in the file, for short texts and for long ones."""
    rope = read_rope(fields, theta=1e6, others=(_SHORT, _LONG))
    tables = [table for key in _TABLES if (table := fields.table(key)) is not None]
    if not isinstance(rope, LongRope):
        if type(rope) is not Rope:
            raise fields.error("rope_type must be default or longrope.")
        return rope
    short, long = ({table.number(key) for table in tables} for key in (_SHORT, _LONG))
    if len(short) > 1 or len(long) > 1:
        raise fields.error(f"rope_parameters and rope_scaling say different things of {_SHORT} or {_LONG}.")
    # transformers takes the divisors of short texts for all
    magnitudes = dict(attention_factor=short.pop(), long_attention_factor=long.pop())
    return dataclasses.replace(rope, keeps_short=True, **magnitudes)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    written, rope = write_rope(config), value_at(config, "attention.rope")
    if not isinstance(rope, LongRope):
        return written
    magnitudes = {_SHORT: rope.attention_factor, _LONG: rope.long_attention_factor}
    for key in _TABLES:
        written[key] = {name: value for name, value in written[key].items() if name != "attention_factor"} | magnitudes
    return written | {"original_max_position_embeddings": rope.original_length}


FAMILY = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    settings=(
        AUTO_MAP,
        same_window(None),
        decoder_sizes(num_kv_heads=8, eps=1e-5, paths=moe.EXPERT_PATHS),
        Flag("lm_head_bias", "head_bias", False),
        moe.expert_counts("num_local_experts", num=16, chosen=2)[0],
        Only("num_experts_per_tok", 2, written=True),
        Number("router_jitter_noise", "experts.router.sparse_mixer", 0.01, name="jitter"),
        Rule("rope", _read_rope, _write_rope),
    ),
    build=phimoe,
    weights=llama_weights(mlp=moe.separate_experts(LAYER + "block_sparse_moe.", gate="w1", up="w3", down="w2")),
    fused=moe.fused_experts(LAYER + "mlp.", router="router"),
    other_architectures=("PhiMoEForCausalLM",),
    ignored_keys={
        **{key: reason for key, reason in moe.IGNORED_ROUTER_KEYS.items() if key != "router_jitter_noise"},
        "input_jitter_noise": "noise in training only",
    },
)


MODELS = {
    "phi3.5-moe-42b-a7b": dict(
        model_type="phimoe", vocab_size=32_064, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=6400, attention_bias=True, lm_head_bias=True, rope_theta=10_000.0,
    ),
}  # fmt: skip
