"""Blocks and settings that several Gemma families share."""

import re
from collections.abc import Iterable
from typing import Any

from eqx_decoders.families.common import DecoderSizes, attentions, read_shape, write_masks, write_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


ACTIVATION_KEY = {"hidden_act": "hidden_activation"}
IGNORED_ACTIVATION_KEY = {"hidden_act": "transformers reads hidden_activation"}


def gemma_decoder(shape: DecoderSizes, mixers: Iterable[AttentionConfig], logit_cap: float | None) -> DecoderConfig:
    """Return a decoder with norms around both layers of a block, which store w - 1, and scaled embeddings."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    blocks = (shape.block(mixer, norm=norm, norms="sandwich") for mixer in mixers)
    return shape.decoder(blocks, norm, embedding_scale=shape.embed_dim**0.5, logit_soft_cap=logit_cap)


def read_gemma_shape(fields: Fields) -> DecoderSizes:
    """Read the sizes of Gemma 2 and 3."""
    return read_shape(
        fields, num_kv_heads=4, head_dim=256, tied=True, activation="gelu_pytorch_tanh", keys=ACTIVATION_KEY
    )


def write_gemma(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that Gemma 2 and 3 share."""
    mixer = attentions(config)[0]
    scale = mixer.head_dim**-0.5 if mixer.query_scale is None else mixer.query_scale
    settings = {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    # transformers makes the mask of the window even if no layer has it
    return write_shape(config, ACTIVATION_KEY) | settings | write_masks(config, default=4096)


def unused_kv_tensors(config: DecoderConfig, prefix: str = "model.") -> str:
    """Return a pattern of unused tensors: keys and values of layers that share those of earlier ones."""
    layers = "|".join(str(index) for index, mixer in enumerate(attentions(config)) if mixer.kv_shared_from is not None)
    return rf"{re.escape(prefix)}layers\.({layers})\.self_attn\.[kv]_(proj|norm)\.(weight|bias)"
