"""Small decoders with encoders of images and audio, and inputs for them."""

import dataclasses

import numpy as np

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.local_attention import LocalAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.mask import Bidirectional, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import AxialRope, Rope


IMAGE, VIDEO, AUDIO, VOCAB, EMBED = 29, 30, 31, 32, 16
NORM = RMSNormConfig()
VISION_BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, mask=Bidirectional(), rope=AxialRope(theta=100.0)),
    mlp=MLPConfig(mlp_dim=12, activation="gelu_tanh", gated=False, bias=True),
    pre_mixer_norm=LayerNormConfig(),
    pre_mlp_norm=LayerNormConfig(),
)
AUDIO_BLOCK = dataclasses.replace(
    VISION_BLOCK, mixer=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, mask=Bidirectional(4), rope=None)
)
CONFORMER_BLOCK = BlockConfig(  # the block of a Conformer
    pre_layers=(ExtraLayerConfig(layer=MLPConfig(mlp_dim=12, gated=False), pre_norm=NORM, post_norm=NORM, scale=0.5),),
    mixer=LocalAttentionConfig(num_heads=2, head_dim=4, chunk=2, left=3, soft_cap=2.0),
    mlp=None,
    pre_mixer_norm=NORM,
    post_layers=(ExtraLayerConfig(layer=LightConvolutionConfig(taps=3), pre_norm=NORM),),
    residual=Sequential(output_norm=NORM),
)
INTO = (ProjectionConfig(dim=12, bias=True, activation="gelu"), ProjectionConfig(dim=EMBED))
JOIN = ProjectorConfig(group=4, norm=LayerNormConfig(), norm_of="patches", layers=INTO)
STEM = PatchStemConfig(size=2, frames=2, merge=2, positions=LearnedGrid(side=3, resample="bilinear"))
VISION = EncoderConfig(
    embed_dim=8,
    stem=STEM,
    blocks=(VISION_BLOCK,) * 3,
    projector=JOIN,
    deepstack=(0, 1),
    deepstack_projector=dataclasses.replace(JOIN, norm_of="groups"),
)
CHUNK_AUDIO = EncoderConfig(
    embed_dim=8,
    stem=AudioStemConfig(mel_bands=6, chunk_frames=10, filters=3, convolutions=2),
    blocks=(AUDIO_BLOCK,) * 2,
    projector=ProjectorConfig(layers=INTO),
    post_norm=LayerNormConfig(),
)
FRAME_AUDIO = EncoderConfig(
    embed_dim=8,
    stem=FrameStemConfig(mel_bands=6, filters=(4, 3)),
    blocks=(CONFORMER_BLOCK,) * 2,
    projector=ProjectorConfig(layers=(INTO[0], dataclasses.replace(INTO[1], norm=NORM))),
)
MEDIA = MediaConfig(
    vision=VISION,
    audio=CHUNK_AUDIO,
    image_token=IMAGE,
    video_token=VIDEO,
    audio_token=AUDIO,
    spans=True,
    positions=GridPositions(),
)


def media_decoder(media: MediaConfig = MEDIA, layers: int = 4, **changes) -> ed.DecoderConfig:
    """A decoder with two kinds of layers, which see images whole, and features added behind the first ones."""
    rope = Rope(sections=(2, 1, 1)) if media.positions is not None else Rope()
    mixer = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rope=rope, spans=media.spans)
    full = BlockConfig(mixer=mixer, mlp=MLPConfig(mlp_dim=24), pre_mixer_norm=NORM, pre_mlp_norm=NORM)
    local = dataclasses.replace(full, mixer=dataclasses.replace(mixer, mask=SlidingWindow(5)))
    levels = 0 if media.vision is None else len(media.vision.deepstack)
    added = (ed.ExtraLayerConfig(layer=AddedFeaturesConfig()),)
    blocks = [
        dataclasses.replace((local, full)[index % 2], post_layers=added if index < levels else ())
        for index in range(layers)
    ]
    config = ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=tuple(blocks), final_norm=NORM, media=media)
    return dataclasses.replace(config, **changes)


def patches(grids, seed: int = 0, stem: PatchStemConfig = STEM) -> np.ndarray:
    """The numbers of all patches of images with these grids."""
    count = sum(t * h * w for t, h, w in grids)
    return np.random.default_rng(seed).normal(size=(count, int(np.prod(stem.shape)))).astype(np.float32)


def audio(lengths, seed: int = 1) -> dict[str, np.ndarray]:
    """Spectra of audio with so many frames."""
    longest = max(lengths)
    values = np.random.default_rng(seed).normal(size=(len(lengths), 6, longest)).astype(np.float32)
    mask = np.arange(longest)[None] < np.asarray(lengths)[:, None]
    return dict(input_features=values, feature_attention_mask=mask.astype(np.int32))


def whole_audio(lengths, seed: int = 1) -> dict[str, np.ndarray]:
    """The same, frame by frame, for encoders that read audio as a whole."""
    made = audio(lengths, seed)
    return dict(
        input_features=made["input_features"].swapaxes(1, 2), input_features_mask=made["feature_attention_mask"]
    )


def text(pattern: str, seed: int = 2) -> np.ndarray:
    """Tokens: `i`, `v` and `a` are placeholders, anything else is a word."""
    words = np.random.default_rng(seed).integers(1, IMAGE, len(pattern))
    known = {"i": IMAGE, "v": VIDEO, "a": AUDIO}
    return np.asarray([known.get(letter, word) for letter, word in zip(pattern, words, strict=True)], np.int32)
