"""OLMo 2 (OLMo et al. 2024): norms on outputs only, norms over all heads of queries and keys."""

from eqx_decoders.families._olmo import olmo_block
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def olmo2(shape: DecoderSizes, *, rope: Rope = Rope(theta=500_000.0)) -> DecoderConfig:
    """Return a decoder of OLMo 2 blocks."""
    return shape.decoder(olmo_block(shape, rope=rope))


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5),
        rope_settings(),
    ),
    build=olmo2,
    weights=llama_weights(norms="post"),
)


_SETTINGS = dict(model_type="olmo2", vocab_size=100_352, rms_norm_eps=1e-06, rope_theta=500_000.0)

MODELS = {
    "olmo2-1b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, intermediate_size=8192,
    ),
    "olmo2-7b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11_008,
    ),
    "olmo2-13b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13_824,
    ),
    "olmo2-32b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27_648,
    ),
}  # fmt: skip
