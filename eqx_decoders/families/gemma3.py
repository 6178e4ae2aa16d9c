"""Gemma 3, text (Gemma Team 2025): five layers with a window to one without, each kind with its own RoPE."""

from typing import Any

from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.gemma2 import HARMLESS, WEIGHTS, read_gemma_shape, sandwich, write_gemma
from eqx_decoders.families.ropes import read_ropes, write_rope
from eqx_decoders.families.shape import Shape, attentions, read_masks
from eqx_decoders.layers.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import LinearRope, Rope


def gemma3(
    shape: Shape,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int,
    rope: Rope = Rope(theta=1e6),
    local_rope: Rope = Rope(theta=10_000.0),
    logit_cap: float | None = None,
    attention_bias: bool = False,
) -> DecoderConfig:
    """A decoder of Gemma 3 blocks; layers with a window have the rotary embedding `local_rope`."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    options = dict(query_scale=query_scalar**-0.5, qk_norm=QKNorm(norm=norm))
    biases = dict(qkv_bias=attention_bias, out_bias=attention_bias)

    def block(mask):
        turned = local_rope if isinstance(mask, SlidingWindow) else rope
        return sandwich(shape, shape.attention(mask=mask, rope=turned, **options, **biases))

    return shape.decoder(block, norm, masks, embedding_scale=shape.embed_dim**0.5, logit_soft_cap=logit_cap)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_gemma_shape(fields)
    fields.off("attn_logit_softcapping")  # transformers has the key and never applies it
    window = fields.integer("sliding_window", 4096, null=None)
    pattern = fields.integer("sliding_window_pattern", 6)
    masks = read_masks(fields, shape.num_layers, window, lambda index: (index + 1) % pattern != 0)
    ropes = read_ropes(fields, theta=1e6, local_theta=10_000.0, local_key="rope_local_base_freq")
    return gemma3(
        shape,
        masks=masks,
        query_scalar=fields.integer("query_pre_attn_scalar", 256),
        rope=ropes["full_attention"],
        local_rope=ropes["sliding_attention"],
        logit_cap=fields.number("final_logit_softcapping", None),
        attention_bias=fields.flag("attention_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_gemma(config) | write_local_ropes(config)


def write_local_ropes(config: DecoderConfig) -> dict[str, Any]:
    """`rope_parameters` by the type of the layer; a type that no layer has is left out."""
    kinds = {isinstance(mixer.mask, SlidingWindow): mixer.rope for mixer in attentions(config)}
    names = {False: "full_attention", True: "sliding_attention"}
    return {"rope_parameters": {names[kind]: write_rope(rope) for kind, rope in kinds.items()}}


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    weights=WEIGHTS,
    harmless=HARMLESS | {"_sliding_window_pattern": "layer_types says it"},
)


def _gemma3(
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    mlp_dim: int,
    *,
    head_dim: int = 256,
    query_scalar: int = 256,
    window: int = 1024,
    rope: Rope = LinearRope(theta=1e6, factor=8.0),
) -> DecoderConfig:
    shape = Shape(
        vocab_size=262_144,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        tied=True,
        activation="gelu_tanh",
    )
    masks = tuple(SlidingWindow(window) if (index + 1) % 6 else Causal() for index in range(num_layers))
    return gemma3(shape, masks=masks, query_scalar=query_scalar, rope=rope)


MODELS = {
    "gemma3-1b": lambda: _gemma3(1152, 26, 4, 1, 6912, window=512, rope=Rope(theta=1e6)),
    "gemma3-4b": lambda: _gemma3(2560, 34, 8, 4, 10_240),
    "gemma3-12b": lambda: _gemma3(3840, 48, 16, 8, 15_360),
    "gemma3-27b": lambda: _gemma3(5376, 62, 32, 16, 21_504, head_dim=128, query_scalar=168),
}
