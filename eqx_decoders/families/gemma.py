"""Gemma (Gemma Team 2024): norms that store w - 1, scaled embeddings, tanh-gelu, tied head."""

import functools

from eqx_decoders.families.common import DecoderSizes, llama_weights, read_shape, write_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gemma(shape: DecoderSizes, *, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of Gemma blocks."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    block = shape.block(shape.attention(rope=rope), norm=norm)
    return shape.decoder(block, norm, embedding_scale=shape.embed_dim**0.5)


def _read(fields: Fields) -> DecoderConfig:
    # the first files say "gelu" and mean its tanh approximation; transformers reads them so, and reads this key alone
    if fields.content.get("hidden_act") == "gelu":
        fields.content["hidden_act"] = "gelu_pytorch_tanh"
    shape = read_shape(fields, num_kv_heads=16, head_dim=256, tied=True, activation="gelu_pytorch_tanh")
    return gemma(shape, rope=read_rope(fields))


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    read=_read,
    write=lambda config: write_shape(config) | write_rope(config),
    weights=llama_weights(),
    ignored_keys={"hidden_activation": "transformers reads hidden_act"},
)

_shape = functools.partial(DecoderSizes, vocab_size=256_128, head_dim=256, tied=True, activation="gelu_tanh")

MODELS = {
    "gemma-2b": lambda: gemma(_shape(embed_dim=2048, num_layers=18, num_heads=8, num_kv_heads=1, mlp_dim=16_384)),
    "gemma-7b": lambda: gemma(_shape(embed_dim=3072, num_layers=28, num_heads=16, num_kv_heads=16, mlp_dim=24_576)),
}
