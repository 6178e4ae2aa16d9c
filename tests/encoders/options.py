"""Of each configuration of encoders one to start from, how a decoder gets it, and another value for each field."""

import dataclasses

from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import CumulativeNormConfig, FrameStemConfig
from eqx_decoders.encoders.geometry import TilesConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import (
    EncoderTokensConfig,
    GroupConvolutionConfig,
    ProjectionConfig,
    ProjectorConfig,
)
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import LearnedAxes, LearnedGrid, PatchStemConfig
from eqx_decoders.families.gemma.mobilenet import (
    EdgeResidualConfig,
    InvertedResidualConfig,
    MobileNetConfig,
    PlaneAttentionConfig,
)
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.local_attention import LocalAttentionConfig
from eqx_decoders.layers.attention.relative_attention import RelativeAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import AxialRope
from tests.encoders.samples import (
    CHUNK_AUDIO,
    CONFORMER_BLOCK,
    EMBED,
    FRAME_AUDIO,
    INTO,
    JOIN,
    MEDIA,
    STEM,
    VISION,
    VISION_BLOCK,
    media_decoder,
)


def media(**changes):
    return media_decoder(dataclasses.replace(MEDIA, **changes))


def vision(**changes):
    return media(vision=dataclasses.replace(VISION, **changes))


def stem(config):
    """With layers that look at blocks of positions, so that windows matter."""
    near = dataclasses.replace(VISION_BLOCK, mixer=dataclasses.replace(VISION_BLOCK.mixer, mask=Bidirectional(16)))
    return vision(stem=config, blocks=(near,) * 3)


def eye(mixer: AttentionConfig):
    return vision(blocks=(dataclasses.replace(VISION_BLOCK, mixer=mixer),) * 3)


def rope(config):
    return eye(dataclasses.replace(VISION_BLOCK.mixer, head_dim=8, rope=config))


def near(**changes):
    return media(audio=dataclasses.replace(FRAME_AUDIO, blocks=(dataclasses.replace(CONFORMER_BLOCK, **changes),) * 2))


def frames(stem):
    """An encoder of audio with the projector and the tokens that its input layers need."""
    combine = "first" if stem.group > 1 else "join"
    projector = dataclasses.replace(FRAME_AUDIO.projector, group=stem.group, combine=combine)
    tokens = None if stem.rows_per_clip is None else dataclasses.replace(OWN, fill=2)
    return media(audio=dataclasses.replace(FRAME_AUDIO, stem=stem, projector=projector, tokens=tokens))


def network(stem):
    projector = ProjectorConfig(layers=(ProjectionConfig(dim=EMBED),))
    encoder = EncoderConfig(embed_dim=8, stem=stem, blocks=(), projector=projector)
    return media(vision=encoder, video_token=None)


def staged(**changes):
    blocks = dict(first=EDGE, second=INVERTED, third=PLANE) | changes
    return network(dataclasses.replace(NETWORK, stages=((blocks["first"],), (blocks["second"], blocks["third"]))))


RMS = RMSNormConfig(eps=0.5)
TILES = TilesConfig(side=8, sizes=((8, 16), (16, 8)))
TILED = dataclasses.replace(VISION, stem=dataclasses.replace(STEM, frames=1), deepstack=(), deepstack_projector=None)
OWN = EncoderTokensConfig(first=1, count=10, norm=RMSNormConfig())
EDGE = EdgeResidualConfig(dim=8, stride=2, expansion=1.0)
INVERTED = InvertedResidualConfig(dim=8, start=3, middle=3, stride=2, expansion=1.0)
PLANE = PlaneAttentionConfig(dim=8, num_heads=2, head_dim=3, kv_stride=2)
NETWORK = MobileNetConfig(stem_dim=8, stages=((EDGE,), (INVERTED, PLANE)), fused=(0, 1), side=2)
ENCODER_OPTIONS: dict[type, tuple] = {
    AxialRope: (
        AxialRope(theta=100.0),
        rope,
        dict(theta=50.0, fraction=0.5, pairing="half_of_axis", sections=(1, 0), staggered=True)
        | dict(interleaved_sections=False, reverse=True),
    ),
    MediaConfig: (
        MEDIA,
        media_decoder,
        dict(vision=dataclasses.replace(VISION, post_norm=RMS), audio=dataclasses.replace(CHUNK_AUDIO, post_norm=RMS))
        | dict(image_token=27, video_token=27, audio_token=27, spans=False, positions=None, lookup_token=3)
        | dict(feature_scale=2.0),
    ),
    GridPositions: (
        GridPositions(),
        lambda c: media(positions=c),
        dict(frames="together", per_second=2.5, whole=True, behind_times=False),
    ),
    EncoderConfig: (
        VISION,
        lambda c: media(vision=c),
        dict(
            embed_dim=12,
            stem=dataclasses.replace(STEM, bias=False),
            blocks=(VISION_BLOCK,) * 2,
            projector=dataclasses.replace(JOIN, norm=None),
        )
        | dict(pre_norm=RMS, post_norm=RMS, deepstack=(0, 2), deepstack_projector=dataclasses.replace(JOIN, norm=RMS))
        | dict(clipped=True, into=ProjectionConfig(dim=EMBED), tokens=OWN, depths=(2,), tiles=TILES)
        | dict(projector_beside=JOIN),
    ),
    TilesConfig: (
        TILES,
        lambda c: media(vision=dataclasses.replace(TILED, tiles=c), positions=None, video_token=None),
        dict(side=4, sizes=((8, 8), (16, 8)), whole="last", projected=True),
    ),
    PatchStemConfig: (
        STEM,
        stem,
        dict(
            size=3,
            channels=1,
            frames=1,
            merge=1,
            bias=False,
            norm=RMS,
            positions=None,
            class_token=True,
            pixel_scale=2.0,
        )
        | dict(pixel_shift=0.5, coordinates="column_row", first_coordinate=1, window=2),
    ),
    LearnedGrid: (
        LearnedGrid(side=3, resample="bilinear"),
        lambda c: stem(dataclasses.replace(STEM, positions=c, class_token=True)),
        dict(side=4, resample="fraction", class_first=True),
    ),
    LearnedAxes: (
        LearnedAxes(size=6),
        lambda c: stem(dataclasses.replace(STEM, positions=c)),
        dict(size=7),
    ),
    ProjectorConfig: (
        JOIN,
        lambda c: vision(projector=c),
        dict(
            group=1,
            combine="mean",
            convolution=GroupConvolutionConfig(side=2, dim=6),
            norm=RMS,
            norm_of="groups",
            scale=2.0,
            standardize=True,
            layers=INTO[1:],
        ),
    ),
    ProjectionConfig: (
        ProjectionConfig(dim=EMBED),
        lambda c: vision(projector=dataclasses.replace(JOIN, layers=(INTO[0], c))),
        dict(dim=12, bias=True, activation="relu", norm=RMS, out_norm=RMS),
    ),
    GroupConvolutionConfig: (
        GroupConvolutionConfig(side=2, dim=6),
        lambda c: vision(projector=dataclasses.replace(JOIN, convolution=c)),
        dict(side=1, dim=12, bias=False),
    ),
    AudioStemConfig: (
        CHUNK_AUDIO.stem,
        lambda c: media(audio=dataclasses.replace(CHUNK_AUDIO, stem=c)),
        dict(mel_bands=5, chunk_frames=8, filters=2, convolutions=3, activation="relu"),
    ),
    FrameStemConfig: (
        FRAME_AUDIO.stem,
        frames,
        dict(mel_bands=5, filters=(4, 2), norm=LayerNormConfig(eps=0.5, bias=False), activation="gelu")
        | dict(frames="behind", merge=2, rows_per_clip=3, separable=True, bias=True, standardize=True, longest=2),
    ),
    CumulativeNormConfig: (
        CumulativeNormConfig(),
        lambda c: frames(dataclasses.replace(FRAME_AUDIO.stem, norm=c)),
        dict(eps=0.5),
    ),
    EncoderTokensConfig: (
        OWN,
        lambda c: vision(tokens=c),
        dict(first=3, count=28, norm=RMS, fill=4),
    ),
    MobileNetConfig: (
        NETWORK,
        network,
        dict(
            stem_dim=16, stages=((EDGE,), (INVERTED,)), fused=(1,), side=4, channels=1, edges="equal", layer_scale=None
        ),
    ),
    EdgeResidualConfig: (
        EDGE,
        lambda c: staged(first=c),
        dict(dim=16, kernel=5, stride=1, expansion=2.0),
    ),
    InvertedResidualConfig: (
        INVERTED,
        lambda c: staged(second=c),
        dict(dim=16, start=5, middle=0, stride=1, expansion=2.0),
    ),
    PlaneAttentionConfig: (
        PLANE,
        lambda c: staged(third=c),
        dict(dim=16, num_heads=1, head_dim=4, kv_stride=1, kernel=5),
    ),
    LocalAttentionConfig: (
        CONFORMER_BLOCK.mixer,
        lambda c: near(mixer=c),
        dict(num_heads=1, head_dim=2, chunk=5, left=2, right=3, soft_cap=0.5, distances="plain", key_scale=0.5),
    ),
    RelativeAttentionConfig: (
        RelativeAttentionConfig(num_heads=2, head_dim=4, distances=3, reach=3),
        lambda c: near(mixer=c),
        dict(num_heads=1, head_dim=2, distances=1, symmetric=True, reach=2),
    ),
    LightConvolutionConfig: (
        CONFORMER_BLOCK.post_layers[0].layer,
        lambda c: near(post_layers=(dataclasses.replace(CONFORMER_BLOCK.post_layers[0], layer=c),)),
        dict(taps=1, activation="relu", norm=RMS, gate="tanh", pointwise=True, bias=True),
    ),
}
# other fields that a field needs before it means anything, and their values on both sides
ENCODER_NEEDS: dict[tuple[type, str], dict] = {
    (PatchStemConfig, "first_coordinate"): dict(class_token=True),  # else all turn by as much more
    (GridPositions, "per_second"): dict(frames="together"),
    (GridPositions, "behind_times"): dict(frames="together", per_second=9.0),
    (GridPositions, "whole"): dict(frames="together", per_second=2.5),
}
