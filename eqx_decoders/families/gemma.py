"""Gemma (Gemma Team 2024): scales stored as w - 1, embeddings times the root of their width, tanh-gelu, tied head."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import LLAMA_WEIGHTS, Shape, attentions, read_shape, write_shape
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


def gemma(shape: Shape, *, rope: Rope = Rope(), attention_bias: bool = False) -> DecoderConfig:
    """A decoder of Gemma blocks; `attention_bias` is that of all four projections."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    block = BlockConfig(
        mixer=shape.attention(rope=rope, qkv_bias=attention_bias, out_bias=attention_bias),
        mlp=shape.mlp(),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
    )
    return shape.decoder(lambda _: block, norm, embedding_scale=shape.embed_dim**0.5)


def _read(fields: Fields) -> DecoderConfig:
    # the first files say "gelu" and mean its tanh approximation; transformers reads them so, and reads this key alone
    if fields.content.get("hidden_act") == "gelu":
        fields.content["hidden_act"] = "gelu_pytorch_tanh"
    shape = read_shape(fields, num_kv_heads=16, head_dim=256, tied=True, default_activation="gelu_pytorch_tanh")
    return gemma(shape, rope=read_rope(fields), attention_bias=fields.flag("attention_bias", False))


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = attentions(config)[0]
    return write_shape(config) | {"attention_bias": mixer.qkv_bias} | write_ropes(mixer.rope)


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    read=_read,
    write=_write,
    weights=LLAMA_WEIGHTS,
    harmless={"hidden_activation": "transformers reads hidden_act"},
)


def _gemma(embed_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_dim: int) -> DecoderConfig:
    shape = Shape(
        vocab_size=256_128,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=256,
        mlp_dim=mlp_dim,
        tied=True,
        activation="gelu_tanh",
    )
    return gemma(shape)


MODELS = {
    "gemma-2b": lambda: _gemma(2048, 18, 8, 1, 16_384),
    "gemma-7b": lambda: _gemma(3072, 28, 16, 16, 24_576),
}
