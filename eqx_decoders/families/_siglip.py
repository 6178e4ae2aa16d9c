"""SigLIP (Zhai et al. 2023), the vision encoder of several families."""

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families.common import plain_mlp
from eqx_decoders.families.multimodal import encoder_attention, encoder_layer
from eqx_decoders.families.vision_fields import KERNEL, EncoderSizes
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig


def siglip(sizes: EncoderSizes, *, side: int, eps: float = 1e-6) -> EncoderConfig:
    """Return the configuration of SigLIP for images of `side x side` patches.

    A projector averages squares of `sizes.merge x sizes.merge` patches to one token. `eps`: epsilon of all norms.
    """
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


def siglip_weights(prefix: str) -> tuple[Weight, ...]:
    """Return the rows of the encoder without its projector. `prefix`: prefix of the encoder's tensors."""
    layer = prefix + "encoder.layers.{layer}."
    embeddings = prefix + "embeddings."
    return (
        Weight(embeddings + "patch_embedding.weight", "vision.stem.kernel", KERNEL),
        Weight(embeddings + "patch_embedding.bias", "vision.stem.bias", "embed -> embed"),
        Weight(
            embeddings + "position_embedding.weight",
            "vision.stem.positions.table",
            "positions embed -> positions embed",
        ),
        *norm(layer + "layer_norm1", "vision.pre_mixer_norm"),
        *norm(layer + "layer_norm2", "vision.pre_mlp_norm"),
        *encoder_attention(layer, out="out_proj"),
        *plain_mlp(layer + "mlp.", "vision.mlp.", "fc1", "fc2"),
        *norm(prefix + "post_layernorm", "vision.post_norm"),
    )
