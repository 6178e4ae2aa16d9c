"""SmolVLM 2 (Marafioti et al. 2025): Idefics 3 with SmolLM 2, a smaller Llama."""

import functools

from eqx_decoders.families._idefics3 import idefics3_encoder, idefics3_family
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.multimodal import with_images
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


FAMILY = idefics3_family("smolvlm", "SmolVLMForConditionalGeneration")

_shape = functools.partial(DecoderSizes, vocab_size=49_280, head_dim=64, eps=1e-5)
_256M = _shape(embed_dim=576, num_layers=30, num_heads=9, num_kv_heads=3, mlp_dim=1536)
_500M = _shape(embed_dim=960, num_layers=32, num_heads=15, num_kv_heads=5, mlp_dim=2560)
_2B = _shape(embed_dim=2048, num_layers=24, num_heads=32, num_kv_heads=32, mlp_dim=8192)
_base = functools.partial(EncoderSizes, embed_dim=768, layers=12, heads=12, mlp_dim=3072, size=16, merge=4)
_so400m = functools.partial(EncoderSizes, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=14, merge=3)


def _model(shape: DecoderSizes, encoder: functools.partial[EncoderSizes], side: int, theta: float) -> DecoderConfig:
    text = shape.decoder(shape.block(shape.attention(rope=Rope(theta=theta))))
    return with_images(text, idefics3_encoder(encoder(out_dim=shape.embed_dim), side=side), image_token=49_190)


MODELS = {
    "smolvlm2-256m": lambda: _model(_256M, _base, 32, 100_000.0),
    "smolvlm2-500m": lambda: _model(_500M, _base, 32, 100_000.0),
    "smolvlm2-2.2b": lambda: _model(_2B, _so400m, 27, 130_000.0),
}
