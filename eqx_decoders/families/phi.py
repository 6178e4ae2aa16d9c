"""Phi 1 to 2 (Gunasekar et al. 2023): attention and MLP in parallel after one norm, biases everywhere, the head too."""

from eqx_decoders.families.common import (
    LAYER,
    NO_BIAS,
    DecoderSizes,
    decoder_sizes,
    llama_weights,
    plain_mlp,
    renamed,
)
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Flag
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def phi(shape: DecoderSizes, *, rope: Rope = Rope(fraction=0.5), qk_norm: bool = False) -> DecoderConfig:
    """Return a decoder of Phi's blocks, with queries and keys normalized per head if `qk_norm`."""
    norm = LayerNormConfig(eps=shape.eps)
    mixer = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm) if qk_norm else None)
    block = shape.block(mixer, shape.mlp(gated=False, bias=True), norm, parallel=1)
    return shape.decoder(block, norm, head_bias=True)


_NAMES = {"model.norm": "model.final_layernorm", "o_proj": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
FAMILY = Family(
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


_SETTINGS = dict(
    model_type="phi",
    vocab_size=51_200,
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=32,
    intermediate_size=8192,
)

MODELS = {
    "phi1-1.4b": _SETTINGS,
    "phi1.5-1.4b": _SETTINGS,
    "phi2-2.8b": _SETTINGS | dict(
        hidden_size=2560, num_hidden_layers=32, intermediate_size=10_240,
        rope_parameters=dict(partial_rotary_factor=0.4),
    ),
}  # fmt: skip
