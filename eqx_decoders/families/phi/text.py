"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023), Phi-3, Phi-3.5-MoE and Phi-4 (Abdin et al. 2024)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    ENDS,
    LAYER,
    NO_BIAS,
    PRE_NORMS,
    DecoderSizes,
    decoder_sizes,
    fused_mlp,
    llama_weights,
    plain_mlp,
    renamed,
    same_window,
)
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import read_rope, rope_settings, write_rope
from eqx_decoders.families.setting_rows import AUTO_MAP, Flag, Number, Only, Rule, Values, value_at
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import LongRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


# --- Phi 1, 1.5 and 2: attention and MLP in parallel after a shared norm, biases in all linear layers and the head ---


def phi(shape: DecoderSizes, *, rope: Rope = Rope(fraction=0.5), qk_norm: bool = False) -> DecoderConfig:
    """Return the configuration of a decoder with Phi blocks. `qk_norm` adds a norm per head to queries and keys."""
    norm = LayerNormConfig(eps=shape.eps)
    mixer = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm) if qk_norm else None)
    block = shape.block(mixer, shape.mlp(gated=False, bias=True), norm, parallel_norms=1)
    return shape.decoder(block, norm, head_bias=True)


# Parts of Llama's tensor names, and their replacements.
_NAMES = {"model.norm": "model.final_layernorm", "o_proj": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    settings=(
        AUTO_MAP,
        decoder_sizes(
            eps=1e-5, activation="gelu_new", attention_bias=True, words={"gelu_new": "gelu_tanh", **ACTIVATIONS},
            keys={"rms_norm_eps": "layer_norm_eps", "head_dim": None, **NO_BIAS},
        ),
        Flag("qk_layernorm", "attention.qk_norm", False, name="qk_norm"),
        rope_settings(fraction=0.5),
    ),
    build=phi,
    weights=renamed(llama_weights(mlp=plain_mlp(LAYER + "mlp.", up="fc1", down="fc2")), _NAMES),
)  # fmt: skip


_PHI_BASE = dict(
    model_type="phi",
    vocab_size=51_200,
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=32,
    intermediate_size=8192,
)


# --- Phi-3 and Phi-4: Llama blocks with fused projections, LongRoPE for long contexts, sliding windows ---


def phi3(shape: DecoderSizes, *, rope: Rope = Rope(), mask: Mask = Causal()) -> DecoderConfig:
    """Return the configuration of a decoder with Phi-3 blocks."""
    attention = shape.attention(rope=rope, mask=mask, fused_qkv=True)
    return shape.decoder(shape.block(attention, shape.mlp(fused=True)))


def _write_original_length(config: DecoderConfig) -> dict[str, Any]:
    # transformers reads this key outside of rope_parameters.
    rope = value_at(config, "attention.rope")
    return {"original_max_position_embeddings": rope.original_length} if isinstance(rope, LongRope) else {}


_ATTENTION = LAYER + "self_attn."
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, keys={**NO_BIAS, "head_dim": None}),
        same_window(),
        rope_settings(fraction=1.0),
        Rule(writes=_write_original_length),
    ),
    build=phi3,
    weights=(
        *ENDS,
        *PRE_NORMS,
        Weight(_ATTENTION + "qkv_proj.weight", "mixer.qkv", "(qkv_heads head_dim) embed -> embed qkv_heads head_dim"),
        Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        *fused_mlp(LAYER + "mlp."),
    ),
    ignored_keys={"attention_bias mlp_bias": "transformers does not read these keys for Phi-3"},
)


# Divisors of the rotary frequencies of Phi-4 mini for long sequences.
_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip


def _phi4_mini() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=200_064, embed_dim=3072, num_layers=32, num_heads=24, num_kv_heads=8, head_dim=128, mlp_dim=8192,
        eps=1e-5, tied=True,
    )  # fmt: skip
    rope = LongRope(
        theta=10_000.0,
        fraction=0.75,
        short_factors=(1.0,) * 48,
        long_factors=_LONG,
        original_length=4096,
        factor=32.0,
    )
    return phi3(shape, rope=rope, mask=SlidingWindow(262_144))


_PHI3_BASE = dict(
    model_type="phi3",
    vocab_size=32_064,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    intermediate_size=17_920,
)


# --- Phi-3.5-MoE: LayerNorm, biases in attention and in the head, two experts per token selected by SparseMixer ---


_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_SHORT_SCALE, _LONG_SCALE = "short_mscale", "long_mscale"


def phimoe(
    shape: DecoderSizes, *, num_experts: int = 16, jitter: float = 0.01, rope: Rope = Rope(), mask: Mask = Causal(),
    head_bias: bool = False,
) -> DecoderConfig:  # fmt: skip
    """Return the configuration of a decoder with Phi-3.5-MoE blocks. `jitter` is `RouterConfig.sparse_mixer`."""
    norm = LayerNormConfig(eps=shape.eps)
    router = RouterConfig(sparse_mixer=jitter)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=2, router=router)
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask), experts, norm), norm, head_bias=head_bias)


def _read_rope(fields: Fields, values: Values) -> Rope:
    """Return the rotary embedding. In LongRoPE, the attention factors are `short_mscale` and `long_mscale`."""
    rope = read_rope(fields, theta=1e6, others=(_SHORT_SCALE, _LONG_SCALE))
    tables = [table for key in _ROPE_TABLES if (table := fields.table(key)) is not None]
    if not isinstance(rope, LongRope):
        if type(rope) is not Rope:
            raise fields.error(
                'The rope_type of phimoe must be "default" or "longrope": other types are not supported.'
            )
        return rope
    return dataclasses.replace(
        rope,
        attention_factor=_read_scale(fields, tables, _SHORT_SCALE),
        long_attention_factor=_read_scale(fields, tables, _LONG_SCALE),
        keeps_short=True,  # transformers uses the short factors for all sequence lengths
    )


def _read_scale(fields: Fields, tables: Sequence[Fields], key: str) -> float:
    scales = {table.number(key) for table in tables}
    if len(scales) > 1:
        raise fields.error(
            f"{key} must be the same in rope_parameters and rope_scaling, but the values are {sorted(scales)}: make "
            "them equal or remove rope_scaling."
        )
    return scales.pop()


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    written = write_rope(config)
    rope = value_at(config, "attention.rope")
    if not isinstance(rope, LongRope):
        return written
    scales = {_SHORT_SCALE: rope.attention_factor, _LONG_SCALE: rope.long_attention_factor}
    for key in _ROPE_TABLES:
        table = {name: value for name, value in written[key].items() if name != "attention_factor"}
        written[key] = table | scales
    return written | {"original_max_position_embeddings": rope.original_length}


PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    settings=(
        AUTO_MAP,
        same_window(),
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
        "input_jitter_noise": "only used in training",
    },
)


FAMILIES = (PHI, PHI3, PHIMOE)

MODELS = {
    "phi1-1.4b": _PHI_BASE,
    "phi1.5-1.4b": _PHI_BASE,
    "phi2-2.8b": _PHI_BASE | dict(
        hidden_size=2560, num_hidden_layers=32, intermediate_size=10_240,
        rope_parameters=dict(partial_rotary_factor=0.4),
    ),
    "phi3-mini-3.8b": _PHI3_BASE | dict(
        hidden_size=3072, num_hidden_layers=32, num_attention_heads=32, intermediate_size=8192, sliding_window=2047,
    ),
    "phi3-medium-14b": _PHI3_BASE | dict(num_key_value_heads=10, sliding_window=2047),
    "phi4-mini-3.8b": _phi4_mini,
    "phi4-14b": _PHI3_BASE | dict(vocab_size=100_352, num_key_value_heads=10, rope_theta=250_000.0),
    "phi3.5-moe-42b-a7b": dict(
        model_type="phimoe", vocab_size=32_064, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=6400, attention_bias=True, lm_head_bias=True, rope_theta=10_000.0,
    ),
}  # fmt: skip
