"""SmolVLM 2 (Marafioti et al. 2025): Idefics 3 with SmolLM 2, a smaller Llama."""

import functools

from eqx_decoders.encoders.encoder import EncoderConfig
from eqx_decoders.families import llama
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.idefics3 import idefics3, idefics3_encoder, idefics3_family
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder import DecoderConfig


FAMILY = idefics3_family("smolvlm", "SmolVLMForConditionalGeneration")

_shape = functools.partial(DecoderSizes, vocab_size=49_280, head_dim=64, eps=1e-5)
_256M = _shape(embed_dim=576, num_layers=30, num_heads=9, num_kv_heads=3, mlp_dim=1536)
_500M = _shape(embed_dim=960, num_layers=32, num_heads=15, num_kv_heads=5, mlp_dim=2560)
_2B = _shape(embed_dim=2048, num_layers=24, num_heads=32, num_kv_heads=32, mlp_dim=8192)
_base = functools.partial(idefics3_encoder, embed_dim=768, layers=12, heads=12, mlp_dim=3072, size=16, side=32, merge=4)
_so400m = functools.partial(
    idefics3_encoder, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=14, side=27, merge=3
)


def _published(shape: DecoderSizes, encoder: functools.partial[EncoderConfig], theta: float) -> DecoderConfig:
    text = llama.llama(shape, rope=Rope(theta=theta))
    return idefics3(text, encoder(out_dim=shape.embed_dim), image_token=49_190)


MODELS = {
    "smolvlm2-256m": lambda: _published(_256M, _base, 100_000.0),
    "smolvlm2-500m": lambda: _published(_500M, _base, 100_000.0),
    "smolvlm2-2.2b": lambda: _published(_2B, _so400m, 130_000.0),
}
