"""OLMo 2 (OLMo et al. 2024): norms on outputs only, norms over all heads of queries and keys."""

import functools

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

_shape = functools.partial(DecoderSizes, vocab_size=100_352, head_dim=128)

MODELS = {
    "olmo2-1b": lambda: olmo2(_shape(embed_dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, mlp_dim=8192)),
    "olmo2-7b": lambda: olmo2(_shape(embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, mlp_dim=11_008)),
    "olmo2-13b": lambda: olmo2(_shape(embed_dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, mlp_dim=13_824)),
    "olmo2-32b": lambda: olmo2(_shape(embed_dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, mlp_dim=27_648)),
}
