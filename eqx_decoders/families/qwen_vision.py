"""The vision encoder of Qwen3-VL, Qwen3-Omni and Qwen3.5 (Bai et al. 2025)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from eqx_decoders.blocks.branch import ExtraLayerConfig
from eqx_decoders.encoders.encoder import EncoderConfig
from eqx_decoders.encoders.media_config import GridPositions, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.hf_table import Weight, sharing
from eqx_decoders.families.multimodal import encoder_layer, finish, linear, norm, plain_mlp
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder import DecoderConfig


_NORM = LayerNormConfig(eps=1e-6)
MOST_DEEPSTACK = 8


def qwen_vision(
    *,
    embed_dim: int,
    layers: int,
    heads: int,
    mlp_dim: int,
    out_dim: int,
    deepstack: tuple[int, ...] = (),
    size: int = 16,
    frames: int = 2,
    merge: int = 2,
    side: int = 48,
    channels: int = 3,
    activation: str = "gelu_tanh",
    theta: float = 10_000.0,
) -> EncoderConfig:
    """The encoder; its learned positions are a grid of `side x side`, resampled for each image."""
    mlp = MLPConfig(mlp_dim=mlp_dim, activation=activation, gated=False, bias=True)
    block = encoder_layer(embed_dim, heads, mlp, _NORM, rope=AxialRope(theta=theta))
    joined = embed_dim * merge**2
    into = (ProjectionConfig(dim=joined, bias=True, activation="gelu"), ProjectionConfig(dim=out_dim, bias=True))
    projector = ProjectorConfig(group=merge**2, norm=_NORM, norm_of="patches", layers=into)
    return EncoderConfig(
        embed_dim=embed_dim,
        stem=PatchStemConfig(
            size=size,
            channels=channels,
            frames=frames,
            merge=merge,
            positions=LearnedGrid(side=side, resample="bilinear"),
        ),
        blocks=(block,) * layers,
        projector=projector,
        deepstack=deepstack,
        deepstack_projector=dataclasses.replace(projector, norm_of="groups") if deepstack else None,
    )


def with_media(config: DecoderConfig, media: MediaConfig) -> DecoderConfig:
    """The configuration with encoders, whose deeper features are added behind its first layers."""
    levels = 0 if media.vision is None else len(media.vision.deepstack)
    if levels > len(config.blocks):
        raise ConversionError(f"{levels} levels of deepstack need as many layers, not {len(config.blocks)}.")
    added = ExtraLayerConfig(layer=AddedFeaturesConfig())
    blocks = tuple(
        dataclasses.replace(block, post_layers=(*block.post_layers, added)) if index < levels else block
        for index, block in enumerate(config.blocks)
    )
    return dataclasses.replace(config, blocks=blocks, media=media)


def read_vision(fields: Fields, out_dim: int, *, deepstack: tuple[int, ...] = ()) -> EncoderConfig:
    """The encoder that `vision_config` describes; `deepstack` is the default of its levels."""
    table = fields.table("vision_config")
    if table is None:
        raise fields.error("vision_config is missing: it describes the encoder.")
    positions = table.integer("num_position_embeddings", 2304)
    side = round(positions**0.5)
    if side * side != positions:
        raise table.error(f"num_position_embeddings={positions} must be a square: positions are a grid.")
    made = table.integer("out_hidden_size", out_dim)
    if made != out_dim:
        raise table.error(f"out_hidden_size={made} must be the decoder's hidden_size={out_dim}.")
    embed, heads = read_heads(table, 1152)
    encoder = qwen_vision(
        embed_dim=embed,
        layers=table.layers("depth", 27),
        heads=heads,
        mlp_dim=table.integer("intermediate_size", 4304),
        out_dim=out_dim,
        deepstack=tuple(table.numbers("deepstack_visual_indexes", list(deepstack))),
        size=table.integer("patch_size", 16),
        frames=table.integer("temporal_patch_size", 2),
        merge=table.integer("spatial_merge_size", 2),
        side=side,
        channels=table.integer("in_channels", 3),
        activation=table.word("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        theta=read_axial_theta(table),
    )
    table.allow_only("apply_vit_abs_pos_embed", True)
    finish(fields, "vision_config", table, IGNORED_VISION_KEYS)
    return encoder


def read_heads(table: Fields, default: int) -> tuple[int, int]:
    """The features of an encoder of images, and its heads."""
    embed, heads = table.integer("hidden_size", default), table.integer("num_heads", 16)
    if embed % heads:
        raise table.error(f"hidden_size={embed} must be a multiple of num_heads={heads}.")
    return embed, heads


def read_axial_theta(table: Fields) -> float:
    """The base of an encoder's rotary embedding."""
    rope = table.table("rope_parameters")
    if rope is None:
        return 10_000.0
    theta = rope.number("rope_theta", 10_000.0)
    rope.allow_only("rope_type", "axial", "default")
    rope.finish()
    return theta


IGNORED_VISION_KEYS = {
    "initializer_range": "of new weights",
    "tie_word_embeddings": "there are none",
    "image_size": "images have any size",
    "spatial_patch_size": "patch_size says it",
    "in_chans": "in_channels says it",
    "tokens_per_second": "the families that count seconds say it elsewhere, or read it",
}


def write_vision(encoder: EncoderConfig | None, model_type: str) -> dict[str, Any]:
    """What `read_vision` reads."""
    if encoder is None or not isinstance(encoder.stem, PatchStemConfig):
        raise ConversionError("MediaConfig.vision=None: there must be an encoder of images.")
    stem, block = encoder.stem, encoder.blocks[0]
    mixer, mlp, grid = block.mixer, block.mlp, stem.positions
    if not isinstance(mixer, AttentionConfig) or not isinstance(mlp, MLPConfig) or not isinstance(grid, LearnedGrid):
        raise ConversionError("MediaConfig.vision must have attention, an MLP and a LearnedGrid.")
    if mixer.rope is None:
        raise ConversionError("MediaConfig.vision must have a rotary embedding.")
    return {
        "model_type": model_type,
        "hidden_size": encoder.embed_dim,
        "depth": len(encoder.blocks),
        "num_heads": mixer.num_heads,
        "intermediate_size": mlp.mlp_dim,
        "out_hidden_size": encoder.projector.out_dim,
        "patch_size": stem.size,
        "temporal_patch_size": stem.frames,
        "spatial_merge_size": stem.merge,
        "num_position_embeddings": grid.side**2,
        "in_channels": stem.channels,
        "hidden_act": activation_name(mlp.activation),
        "rope_parameters": {"rope_type": "axial", "rope_theta": mixer.rope.theta},
        "deepstack_visual_indexes": list(encoder.deepstack),
    }


TOKENS = {"image_token": "image_token_id", "video_token": "video_token_id"}


def read_media(
    fields: Fields, config: DecoderConfig, *, image: int, video: int, deepstack: tuple[int, ...] = ()
) -> DecoderConfig:
    """The configuration with the encoder of `vision_config`."""
    media = MediaConfig(
        vision=read_vision(fields, config.embed_dim, deepstack=deepstack),
        image_token=fields.integer("image_token_id", image, least=0),
        video_token=fields.integer("video_token_id", video, least=0),
        positions=GridPositions(),
    )
    return with_media(config, media)


def media_of(config: DecoderConfig) -> MediaConfig:
    """Its encoders; ConversionError where there are none."""
    if config.media is None:
        raise ConversionError("DecoderConfig.media=None: there must be encoders.")
    return config.media


def write_media(model_type: str) -> Callable[[DecoderConfig], dict[str, Any]]:
    """What `read_media` reads, `model_type` being that of the encoder."""

    def write(config: DecoderConfig) -> dict[str, Any]:
        media = media_of(config)
        written = {name: getattr(media, field) for field, name in TOKENS.items()}
        return {**written, "vision_config": write_vision(media.vision, model_type)}

    return write


_AROUND = ("vision_start_token_id", "vision_end_token_id", "vision_token_id")
IGNORED_KEYS = dict.fromkeys(_AROUND, "a token around placeholders: part of the prompt") | {
    "initializer_range": "of new weights"
}


def vision_weights(
    visual: str, merger: str, deepstack: str, first: str, second: str, normed: str
) -> tuple[Weight, ...]:
    """The table of the encoder, whose mergers are called so, with these names of their parts."""
    layer = visual + "blocks.{layer}."
    rows = [
        Weight(
            visual + "patch_embed.proj.weight",
            "vision.stem.kernel",
            "embed channels frames patch_rows patch_columns -> channels frames patch_rows patch_columns embed",
        ),
        Weight(visual + "patch_embed.proj.bias", "vision.stem.bias", "embed -> embed"),
        Weight(visual + "pos_embed.weight", "vision.stem.positions.table", "positions embed -> positions embed"),
        *norm(layer + "norm1", "vision.pre_mixer_norm"),
        *norm(layer + "norm2", "vision.pre_mlp_norm"),
        *_joint(layer + "attn.qkv.weight", "", "({heads} head_dim) embed -> embed {heads} head_dim"),
        *_joint(layer + "attn.qkv.bias", "_bias", "({heads} head_dim) -> {heads} head_dim"),
        Weight(layer + "attn.proj.weight", "vision.mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        Weight(layer + "attn.proj.bias", "vision.mixer.out_bias", "embed -> embed"),
        *plain_mlp(layer + "mlp.", "linear_fc1", "linear_fc2"),
    ]
    levels = [(merger, "vision.projector")]
    levels += [(f"{deepstack}{level}.", f"vision.deepstack.{level}") for level in range(MOST_DEEPSTACK)]
    for name, path in levels:
        rows += norm(name + normed, f"{path}.norm")
        rows += (*linear(name + first, f"{path}.layers.0"), *linear(name + second, f"{path}.layers.1"))
    return tuple(rows)


def _joint(name: str, ending: str, pattern: str) -> tuple[Weight, ...]:
    kinds = (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))
    return sharing(name, *((f"vision.mixer.{kind}{ending}", pattern.format(heads=heads)) for kind, heads in kinds))
