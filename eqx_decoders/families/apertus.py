"""Apertus (Hernández-Cano et al. 2025): normalized queries and keys, MLPs without a gate and with learned xIELU."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import ENDS, LAYER, DecoderSizes, decoder_sizes, plain_mlp
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Rule, Values, only
from eqx_decoders.families.weight_rows import Weight, norm_weights, self_attention
from eqx_decoders.layers.rope import Llama3Rope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_THETA = 12_000_000.0


def apertus(shape: DecoderSizes, *, rope: Rope = Llama3Rope(theta=_THETA)) -> DecoderConfig:
    """Return a decoder of Apertus blocks."""
    mixer = shape.attention(rope=rope, qk_norm=shape.qk_norm)
    return shape.decoder(shape.block(mixer, shape.mlp(gated=False)))


def _default_rope(fields: Fields, values: Values) -> None:
    """Set `rope_parameters` to transformers' default, which is Llama 3's RoPE, if the file has no RoPE settings."""
    if all(fields.content.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        fields.content["rope_parameters"] = dict(
            rope_type="llama3",
            rope_theta=_THETA,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )


_MLP = LAYER + "mlp."
FAMILY = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, activation="xielu", words={"xielu": "xielu", **ACTIVATIONS}),
        Rule("", _default_rope),
        rope_settings(theta=_THETA),
        *only(mlp_bias=False, post_norm=False, qk_norm=True),
    ),
    build=apertus,
    weights=(
        *ENDS,
        *self_attention(LAYER),
        *norm_weights(LAYER, pre_mixer_norm="attention_layernorm", pre_mlp_norm="feedforward_layernorm"),
        *plain_mlp(_MLP),
        *(Weight(f"{_MLP}act_fn.{name}", f"mlp.xielu.{name}", "1 ->") for name in ("alpha_p", "alpha_n")),
        *(Weight(f"{_MLP}act_fn.{name}", f"mlp.xielu.{name}", "->") for name in ("beta", "eps")),
    ),
)


_BASE = dict(model_type="apertus", vocab_size=131_072, num_key_value_heads=8)

MODELS = {
    "apertus-8b": _BASE | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=21_504,
    ),
    "apertus-70b": _BASE | dict(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=43_008,
    ),
}  # fmt: skip
