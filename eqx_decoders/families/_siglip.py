"""SigLIP (Zhai et al. 2023), the encoder of images of several families."""

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families.multimodal import encoder_layer
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig


def siglip(sizes: EncoderSizes, *, side: int, eps: float = 1e-6) -> EncoderConfig:
    """Return the encoder of images of `side x side` patches, of which `merge x merge` are averaged to one token."""
    layer_norm = LayerNormConfig(eps=eps)
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(positions=LearnedGrid(side=side)),
        blocks=(encoder_layer(sizes.embed_dim, sizes.heads, sizes.mlp(), layer_norm),) * sizes.layers,
        post_norm=layer_norm,
        projector=ProjectorConfig(
            group=sizes.merge**2,
            combine="mean",
            norm=RMSNormConfig(eps=eps, offset=1.0),
            layers=(ProjectionConfig(dim=sizes.out_dim),),
        ),
    )
