"""Gemma 2 (Gemma Team 2024): Gemma with norms around both layers, soft caps, and a window in every other layer."""

import functools
from collections.abc import Iterable
from typing import Any

from eqx_decoders.families.common import (
    DecoderSizes,
    attentions,
    llama_weights,
    read_cycle_masks,
    read_shape,
    write_masks,
    write_shape,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder import DecoderConfig


def gemma_decoder(shape: DecoderSizes, mixers: Iterable[AttentionConfig], logit_cap: float | None) -> DecoderConfig:
    """Norms around both layers of a block, their scales stored as w - 1; embeddings times the root of their width."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    blocks = (shape.block(mixer, norm=norm, norms="sandwich") for mixer in mixers)
    return shape.decoder(blocks, norm, embedding_scale=shape.embed_dim**0.5, logit_soft_cap=logit_cap)


def gemma2(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int = 256,
    rope: Rope = Rope(),
    attention_cap: float | None = 50.0,
    logit_cap: float | None = 30.0,
) -> DecoderConfig:
    """A decoder of Gemma 2 blocks; queries are multiplied by `query_scalar ** -0.5`."""
    options: dict[str, Any] = dict(rope=rope, query_scale=query_scalar**-0.5, soft_cap=attention_cap)
    return gemma_decoder(shape, (shape.attention(mask=mask, **options) for mask in masks), logit_cap)


_KEYS = {"hidden_act": "hidden_activation"}


def read_gemma_shape(fields: Fields) -> DecoderSizes:
    """Gemma 2's and 3's sizes."""
    return read_shape(fields, num_kv_heads=4, head_dim=256, tied=True, activation="gelu_pytorch_tanh", keys=_KEYS)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_gemma_shape(fields)
    return gemma2(
        shape,
        masks=read_cycle_masks(fields, shape.num_layers, 2),
        query_scalar=fields.integer("query_pre_attn_scalar", 256),
        rope=read_rope(fields),
        attention_cap=fields.number("attn_logit_softcapping", 50.0, null=None),
        logit_cap=fields.number("final_logit_softcapping", 30.0, null=None),
    )


def write_gemma(config: DecoderConfig) -> dict[str, Any]:
    """The keys that Gemma 2 and 3 share."""
    mixer = attentions(config)[0]
    scale = mixer.head_dim**-0.5 if mixer.query_scale is None else mixer.query_scale
    settings = {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    # transformers makes the mask of the window even if no layer has it
    return write_shape(config, _KEYS) | settings | write_masks(config, default=4096)


IGNORED_ACTIVATION_KEY = {"hidden_act": "transformers reads hidden_activation"}
FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read,
    write=lambda config: write_gemma(config) | write_rope(config),
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)

_shape = functools.partial(DecoderSizes, vocab_size=256_128, tied=True, activation="gelu_tanh")
_2B = _shape(embed_dim=2304, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, mlp_dim=9216)
_9B = _shape(embed_dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, head_dim=256, mlp_dim=14_336)
_27B = _shape(embed_dim=4608, num_layers=46, num_heads=32, num_kv_heads=16, head_dim=128, mlp_dim=36_864)

MODELS = {
    "gemma2-2b": lambda: gemma2(_2B, masks=_2B.cycle_masks(4096, 2)),
    "gemma2-9b": lambda: gemma2(_9B, masks=_9B.cycle_masks(4096, 2)),
    "gemma2-27b": lambda: gemma2(_27B, masks=_27B.cycle_masks(4096, 2), query_scalar=144),
}
