"""Vision encoder of Qwen3-VL, Qwen3-Omni and Qwen3.5 (Bai et al. 2025), and their settings and tensors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from eqx_decoders.blocks.block import ExtraLayerConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.multimodal import MultimodalFamily, encoder_layer, finish, linear, norm, plain_mlp
from eqx_decoders.families.vision_fields import EncoderSizes, vision_fields
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = LayerNormConfig(eps=1e-6)
MOST_DEEPSTACK = 8


def qwen_vision(
    sizes: EncoderSizes,
    *,
    deepstack: tuple[int, ...] = (),
    frames: int = 2,
    side: int = 48,
    theta: float = 10_000.0,
) -> EncoderConfig:
    """Return the encoder; its learned positions are a grid of `side x side`, resampled for each image."""
    block = encoder_layer(sizes.embed_dim, sizes.heads, sizes.mlp(), _NORM, rope=AxialRope(theta=theta))
    joined = sizes.embed_dim * sizes.merge**2
    layers = (
        ProjectionConfig(dim=joined, bias=True, activation="gelu"),
        ProjectionConfig(dim=sizes.out_dim, bias=True),
    )
    projector = ProjectorConfig(group=sizes.merge**2, norm=_NORM, norm_of="patches", layers=layers)
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(frames=frames, positions=LearnedGrid(side=side, resample="bilinear")),
        blocks=(block,) * sizes.layers,
        projector=projector,
        deepstack=deepstack,
        deepstack_projector=dataclasses.replace(projector, norm_of="groups") if deepstack else None,
    )


def with_media(config: DecoderConfig, media: MediaConfig) -> DecoderConfig:
    """Return the configuration with encoders, whose deeper features are added behind its first layers."""
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
    """Read the encoder of `vision_config`; `deepstack` is the default of its levels."""
    table = vision_fields(fields)
    positions = table.integer("num_position_embeddings", 2304)
    side = round(positions**0.5)
    if side * side != positions:
        raise table.error(f"num_position_embeddings={positions} must be a square: positions are a grid.")
    output_dim = table.integer("out_hidden_size", out_dim)
    if output_dim != out_dim:
        raise table.error(f"out_hidden_size={output_dim} must be the decoder's hidden_size={out_dim}.")
    embed, heads = read_heads(table, 1152)
    sizes = EncoderSizes(
        embed_dim=embed,
        layers=table.layers("depth", 27),
        heads=heads,
        mlp_dim=table.integer("intermediate_size", 4304),
        out_dim=out_dim,
        size=table.integer("patch_size", 16),
        merge=table.integer("spatial_merge_size", 2),
        channels=table.integer("in_channels", 3),
        activation=table.word("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    encoder = qwen_vision(
        sizes,
        deepstack=tuple(table.numbers("deepstack_visual_indexes", list(deepstack))),
        frames=table.integer("temporal_patch_size", 2),
        side=side,
        theta=read_axial_theta(table),
    )
    table.allow_only("apply_vit_abs_pos_embed", True)
    finish(fields, "vision_config", table, IGNORED_VISION_KEYS)
    return encoder


def read_heads(table: Fields, default: int) -> tuple[int, int]:
    """Return the features and the heads of an encoder of images."""
    embed, heads = table.integer("hidden_size", default), table.integer("num_heads", 16)
    if embed % heads:
        raise table.error(f"hidden_size={embed} must be a multiple of num_heads={heads}.")
    return embed, heads


def read_axial_theta(table: Fields) -> float:
    """Return the base of an encoder's rotary embedding."""
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
    """Return the keys that `read_vision` reads."""
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
    """Return the configuration with the encoder of `vision_config`."""
    media = MediaConfig(
        vision=read_vision(fields, config.embed_dim, deepstack=deepstack),
        image_token=fields.integer("image_token_id", image, least=0),
        video_token=fields.integer("video_token_id", video, least=0),
        positions=GridPositions(),
    )
    return with_media(config, media)


def media_of(config: DecoderConfig) -> MediaConfig:
    """Return the encoders; ConversionError where there are none."""
    if config.media is None:
        raise ConversionError("DecoderConfig.media=None: there must be encoders.")
    return config.media


def write_media(model_type: str) -> Callable[[DecoderConfig], dict[str, Any]]:
    """Return a function that writes the keys that `read_media` reads; `model_type` is that of the encoder."""

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
    """Return the rows of the encoder; the arguments are prefixes and names of its tensors."""
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


# --- Qwen3-VL ---

IMAGE, VIDEO = 151_655, 151_656
VL_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
VL_WEIGHTS = vision_weights(
    "model.visual.",
    "model.visual.merger.",
    "model.visual.deepstack_merger_list.",
    first="linear_fc1",
    second="linear_fc2",
    normed="norm",
)
LARGE = functools.partial(EncoderSizes, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=16)
LARGE_DEEPSTACK = (8, 16, 24)


def qwen3_vl(text: DecoderConfig, vision: EncoderConfig) -> DecoderConfig:
    """Return a decoder with this encoder, and the published placeholders."""
    media = MediaConfig(vision=vision, image_token=IMAGE, video_token=VIDEO, positions=GridPositions())
    return with_media(text, media)


# --- Qwen3.5 ---

_IMAGE, _VIDEO = 248_056, 248_057


def qwen3_5_family(text: str, *, model_type: str, architecture: str) -> MultimodalFamily:
    """Return the family with encoders of a text family of Qwen3.5."""
    return MultimodalFamily(
        text=text,
        model_type=model_type,
        architecture=architecture,
        read=functools.partial(read_media, image=_IMAGE, video=_VIDEO),
        write=write_media(f"{model_type}_vision"),
        weights=VL_WEIGHTS,
        names=VL_NAMES | {"mtp.": "mtp."},  # layers of multi-token prediction stand outside of the decoder
        ignored_keys=IGNORED_KEYS,
    )


def qwen3_5_vision(text: DecoderConfig, vision: EncoderConfig) -> DecoderConfig:
    """Return a decoder with this encoder, and the published placeholders."""
    media = MediaConfig(vision=vision, image_token=_IMAGE, video_token=_VIDEO, positions=GridPositions())
    return with_media(text, media)


def with_large_vision(text: DecoderConfig) -> DecoderConfig:
    """Return a decoder with the largest encoder."""
    return qwen3_5_vision(text, qwen_vision(LARGE(out_dim=text.embed_dim)))
