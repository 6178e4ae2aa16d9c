"""Qwen2.5-VL (Bai et al. 2025): Qwen2 with images and videos, encoded mostly in windows; video frames have times."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families._qwen import qwen2, read_late_windows, write_late_windows
from eqx_decoders.families._qwen_vision import (
    IGNORED_KEYS,
    IGNORED_VISION_KEYS,
    TOKENS,
    media_of,
    read_axial_theta,
    read_heads,
    vision_weights,
    with_media,
)
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, gated_mlp, read_shape, write_shape
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import MultimodalFamily, encoder_layer, finish
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.vision_fields import EncoderSizes, vision_fields
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import AxialRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


SECTIONS = (16, 24, 24)
IMAGE, VIDEO = 151_655, 151_656
_NORM = RMSNormConfig(eps=1e-6)


def windowed_vision(
    sizes: EncoderSizes,
    *,
    whole: tuple[int, ...] = (7, 15, 23, 31),
    window: int = 4,
    frames: int = 2,
    theta: float = 10_000.0,
) -> EncoderConfig:
    """Return the encoder: layers see windows of `window x window` merged patches, those in `whole` the whole frame."""
    merge = sizes.merge

    def block(layer: int) -> BlockConfig:
        size = None if layer in whole else (window * merge) ** 2
        mlp, rope = sizes.mlp(gated=True), AxialRope(theta=theta)
        return encoder_layer(sizes.embed_dim, sizes.heads, mlp, _NORM, rope=rope, window=size)

    first = ProjectionConfig(dim=sizes.embed_dim * merge**2, bias=True, activation="gelu")
    layers = (first, ProjectionConfig(dim=sizes.out_dim, bias=True))
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(frames=frames, bias=False, window=window),
        blocks=tuple(map(block, range(sizes.layers))),
        projector=ProjectorConfig(group=merge**2, norm=_NORM, norm_of="patches", layers=layers),
    )


def _read_vision(table: Fields, out_dim: int) -> EncoderConfig:
    output_dim = table.integer("out_hidden_size", 3584)
    if output_dim != out_dim:
        raise table.error(f"out_hidden_size={output_dim} must be the decoder's hidden_size={out_dim}.")
    size, merge, window = (
        table.integer(key, default)
        for key, default in (("patch_size", 14), ("spatial_merge_size", 2), ("window_size", 112))
    )
    if window < size * merge:
        raise table.error(f"window_size={window} must be at least {size * merge} pixels: those of one token.")
    embed, heads = read_heads(table, 3584)
    sizes = EncoderSizes(
        embed_dim=embed,
        layers=table.layers("depth", 32),
        heads=heads,
        mlp_dim=table.integer("intermediate_size", 3420),
        out_dim=out_dim,
        size=size,
        merge=merge,
        channels=table.integer("in_channels", 3),
        activation=table.word("hidden_act", ACTIVATIONS, "silu"),
    )
    return windowed_vision(
        sizes,
        whole=tuple(table.numbers("fullatt_block_indexes", [7, 15, 23, 31])),
        window=window // merge // size,
        frames=table.integer("temporal_patch_size", 2),
        theta=read_axial_theta(table),
    )


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    table = vision_fields(fields)
    rate = table.integer("tokens_per_second", 4)
    vision = _read_vision(table, config.embed_dim)
    finish(fields, "vision_config", table, IGNORED_VISION_KEYS)
    media = MediaConfig(
        vision=vision,
        image_token=fields.integer("image_token_id", IMAGE, least=0),
        video_token=fields.integer("video_token_id", VIDEO, least=0),
        positions=GridPositions(frames="together", per_second=float(rate), whole=True, behind_times=False),
    )
    return with_media(config, media)


def _write(config: DecoderConfig) -> dict[str, Any]:
    media = media_of(config)
    encoder, positions = media.vision, media.positions
    if encoder is None or not isinstance(encoder.stem, PatchStemConfig) or positions is None:
        raise ConversionError("MediaConfig must have an encoder of images, and positions.")
    stem, mixers = encoder.stem, [block.mixer for block in encoder.blocks]
    first, mlp = mixers[0], encoder.blocks[0].mlp
    if not isinstance(first, AttentionConfig) or not isinstance(mlp, MLPConfig) or stem.window is None:
        raise ConversionError("MediaConfig.vision must have attention, an MLP, and windows.")
    assert first.rope is not None
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "hidden_size": encoder.embed_dim,
        "depth": len(encoder.blocks),
        "num_heads": first.num_heads,
        "intermediate_size": mlp.mlp_dim,
        "out_hidden_size": encoder.projector.out_dim,
        "patch_size": stem.size,
        "temporal_patch_size": stem.frames,
        "spatial_merge_size": stem.merge,
        "window_size": stem.window * stem.merge * stem.size,
        "fullatt_block_indexes": [
            index for index, mixer in enumerate(mixers)
            if isinstance(mixer, AttentionConfig) and mixer.mask == Bidirectional()
        ],
        "tokens_per_second": int(positions.per_second),
        "in_channels": stem.channels,
        "hidden_act": activation_name(mlp.activation),
        "rope_parameters": {"rope_type": "axial", "rope_theta": first.rope.theta},
    }  # fmt: skip
    return {**{name: getattr(media, field) for field, name in TOKENS.items()}, "vision_config": vision}


def _read_text(fields: Fields) -> DecoderConfig:
    fields.content.setdefault("max_window_layers", 80)
    shape = read_shape(fields, num_kv_heads=8, eps=1e-5, keys=NO_BIAS)
    rope = read_rope(fields, theta=1e6, sections=SECTIONS, interleaved_sections=False)
    return qwen2(shape, rope=rope, masks=read_late_windows(fields, shape.num_layers))


def _adapt(text: Family) -> Family:
    return dataclasses.replace(
        text,
        model_type="qwen2_5_vl_text",
        architecture="Qwen2_5_VLTextModel",
        read=_read_text,
        write=lambda config: write_shape(config, NO_BIAS) | write_late_windows(config) | write_rope(config),
        ignored_keys={**text.ignored_keys, **IGNORED_KEYS},
    )


_TIED = "tie_word_embeddings"
# keys that are not the decoder's where all settings stand in one object
_OUTSIDE = {
    *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("vision_config", "text_config", _TIED, *TOKENS.values()),
    *(key for key in IGNORED_KEYS if key.endswith("token_id")),
}


def _nested(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nest the decoder's settings; old files have them next to the encoder's, or in both positions."""
    inner = content.get("text_config")
    if isinstance(inner, Mapping):
        inner = {key: value for key, value in inner.items() if key != "architectures"}
        outer = {key: value for key, value in content.items() if key in _OUTSIDE or key not in inner}
        outer[_TIED] = outer.get(_TIED) or inner.get(_TIED) or False
        return {**outer, "text_config": inner}
    if inner is not None:
        return content
    inner = {key: value for key, value in content.items() if key not in _OUTSIDE}
    return {**{key: value for key, value in content.items() if key in _OUTSIDE}, "text_config": inner}


FAMILY = MultimodalFamily(
    text="qwen2",
    adapt=_adapt,
    reads_as_text=True,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    read=_read,
    write=_write,
    weights=(
        *vision_weights("visual.", "visual.merger.", "", first="mlp.0", second="mlp.2", normed="ln_q"),
        *(
            dataclasses.replace(row, path=f"vision.{row.path}")
            for row in gated_mlp("visual.blocks.{layer}.mlp.")
        ),
    ),
    names={"model.": "model.", "lm_head.": "lm_head."},
    renamed={r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."},
    modules={r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
    ignored_keys=IGNORED_KEYS,
    own_settings=_nested,
)  # fmt: skip


def _model(shape: DecoderSizes, mlp_dim: int) -> DecoderConfig:
    sizes = EncoderSizes(
        embed_dim=1280, layers=32, heads=16, mlp_dim=mlp_dim, out_dim=shape.embed_dim, size=14, activation="silu"
    )
    media = MediaConfig(
        vision=windowed_vision(sizes),
        image_token=IMAGE,
        video_token=VIDEO,
        positions=GridPositions(frames="together", per_second=2.0, whole=True, behind_times=False),
    )
    rope = Rope(theta=1e6, sections=SECTIONS, interleaved_sections=False)
    return with_media(qwen2(shape, rope=rope), media)


_shape = functools.partial(DecoderSizes, vocab_size=152_064, head_dim=128)
_3B = _shape(vocab_size=151_936, embed_dim=2048, num_layers=36, num_heads=16, num_kv_heads=2, mlp_dim=11_008, tied=True)
_7B = _shape(embed_dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, mlp_dim=18_944)
_32B = _shape(embed_dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, mlp_dim=27_648)
_72B = _shape(embed_dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, mlp_dim=29_568)

MODELS = {
    "qwen2.5-vl-3b": lambda: _model(_3B, 3420),
    "qwen2.5-vl-7b": lambda: _model(_7B, 3420),
    "qwen2.5-vl-32b": lambda: _model(_32B, 3456),
    "qwen2.5-vl-72b": lambda: _model(_72B, 3456),
}
