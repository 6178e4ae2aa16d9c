"""Small vision-language model for training from scratch on a CPU. It is not a published model."""

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


NORM = RMSNormConfig()


def tiny_vision() -> DecoderConfig:
    """Return the configuration: images of 32 x 32 pixels become 16 tokens; encoder and decoder have three layers."""
    encoder_block = BlockConfig(
        mixer=AttentionConfig(
            num_heads=4,
            num_kv_heads=4,
            head_dim=24,
            mask=Bidirectional(),
            rope=AxialRope(theta=100.0),
            qk_norm=QKNorm(),
        ),
        mlp=MLPConfig(mlp_dim=192, activation="gelu_tanh", gated=False),
        pre_mixer_norm=NORM,
        pre_mlp_norm=NORM,
    )
    vision = EncoderConfig(
        embed_dim=96,
        stem=PatchStemConfig(size=4, merge=2, positions=LearnedGrid(side=8)),
        blocks=(encoder_block,) * 3,
        post_norm=NORM,
        projector=ProjectorConfig(group=4, layers=(ProjectionConfig(dim=128),)),
    )
    decoder_block = BlockConfig(
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=QKNorm(), spans=True),
        mlp=MLPConfig(mlp_dim=256),
        pre_mixer_norm=NORM,
        pre_mlp_norm=NORM,
    )
    media = MediaConfig(vision=vision, image_token=511, spans=True)
    return DecoderConfig(
        vocab_size=512, embed_dim=128, blocks=(decoder_block,) * 3, final_norm=NORM, tied=True, media=media
    )


MODELS = {"tiny-vision": tiny_vision}
