"""Qwen3, dense (Yang et al. 2025): Llama's block with normalised queries and keys."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.qwen2 import HARMLESS, read_late_windows, write_late_windows
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import LLAMA_WEIGHTS, Shape, attentions, read_shape, write_shape
from eqx_decoders.layers.attention import QKNorm
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


def qwen3(
    shape: Shape, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = (), attention_bias: bool = False
) -> DecoderConfig:
    """A decoder of Qwen3 blocks; `masks` has one for each layer, or is empty: all are causal."""
    norm = RMSNormConfig(eps=shape.eps)
    biases = dict(qkv_bias=attention_bias, out_bias=attention_bias)

    def block(mask):
        mixer = shape.attention(mask=mask, rope=rope, qk_norm=QKNorm(norm=norm), **biases)
        return BlockConfig(mixer=mixer, mlp=shape.mlp(), pre_mixer_norm=norm, pre_mlp_norm=norm)

    return shape.decoder(block, norm, masks)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=32, head_dim=128)
    return qwen3(
        shape,
        rope=read_rope(fields),
        masks=read_late_windows(fields, shape.num_layers),
        attention_bias=fields.flag("attention_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = attentions(config)[0]
    bias = {"attention_bias": mixer.qkv_bias}
    return write_shape(config) | bias | write_late_windows(config) | write_ropes(mixer.rope)


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read,
    write=_write,
    weights=LLAMA_WEIGHTS,
    harmless=HARMLESS,
)


def _qwen3(
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    mlp_dim: int,
    tied: bool = False,
    rope: Rope = Rope(theta=1e6),
) -> DecoderConfig:
    shape = Shape(
        vocab_size=151_936,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        tied=tied,
    )
    return qwen3(shape, rope=rope)


_SIZES = {
    "qwen3-0.6b": lambda: _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": lambda: _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": lambda: _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": lambda: _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": lambda: _qwen3(5120, 64, 64, 25_600),
}

MODELS = {
    **_SIZES,
    **{f"{name}-base": make for name, make in _SIZES.items() if name not in ("qwen3-0.6b", "qwen3-32b")},
    "qwen3-4b-thinking-2507": lambda: _qwen3(2560, 36, 32, 9728, tied=True, rope=Rope(theta=5e6)),
}
