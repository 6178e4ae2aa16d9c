"""CLIP (Radford et al. 2021), the encoder of images of several families."""

import dataclasses

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.norm import LayerNormConfig


def clip(sizes: EncoderSizes, *, side: int, eps: float = 1e-5) -> EncoderConfig:
    """Return the encoder of images of `side x side` patches with a class token; with SigLIP's projector."""
    encoder = siglip(sizes, side=side, eps=eps)
    positions = LearnedGrid(side=side, class_first=True)
    stem = dataclasses.replace(encoder.stem, bias=False, positions=positions, class_token=True)
    return dataclasses.replace(encoder, stem=stem, pre_norm=LayerNormConfig(eps=eps))


def clip_weights(prefix: str) -> tuple[Weight, ...]:
    """Return the rows of the encoder, without its projector."""
    return (
        *siglip_weights(prefix),
        Weight(prefix + "embeddings.class_embedding", "vision.stem.class_embedding", "embed -> embed"),
        *norm(prefix + "pre_layrnorm", "vision.pre_norm"),
    )
