"""Qwen2.5-VL (Bai et al. 2025): Qwen2 with images and videos.

Most layers of the vision encoder attend within windows. The M-RoPE positions of video frames depend on time.
"""

import dataclasses
import functools

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.common import NO_BIAS, decoder_sizes
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily, encoder_layer, nested, with_rope
from eqx_decoders.families.qwen.text import IGNORED_QWEN2_KEYS, LATE_WINDOWS
from eqx_decoders.families.qwen.vision import (
    IGNORED_KEYS,
    IGNORED_VISION_KEYS,
    QWEN_KEYS,
    SAME_OUT_DIM,
    media_keys,
    media_tokens,
    vision_weights,
    with_media,
)
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import (
    Check,
    Defaults,
    Integer,
    Numbers,
    Rule,
    Values,
    activation,
    value_at,
)
from eqx_decoders.families.vision_fields import EncoderSizes, axial_theta, encoder_sizes, vision_config
from eqx_decoders.families.weight_rows import gated_mlp
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


_SECTIONS = (16, 24, 24)  # M-RoPE sections for time, height and width
_IMAGE, _VIDEO = 151_655, 151_656
_NORM = RMSNormConfig(eps=1e-6)
_FULL_LAYERS = (7, 15, 23, 31)


def windowed_vision(
    sizes: EncoderSizes,
    *,
    full_layers: tuple[int, ...] = _FULL_LAYERS,
    window: int = 4,
    frames: int = 2,
    theta: float = 10_000.0,
) -> EncoderConfig:
    """Return the configuration of the vision encoder of Qwen2.5-VL.

    **Arguments:**

    - `sizes`: sizes of the encoder.
    - `full_layers`: indices of layers in which a patch attends to all patches of its frame. In other layers it attends
        to the patches of its window.
    - `window`: number of rows and columns of merged patches in a window.
    - `frames`: number of video frames per patch.
    - `theta`: base of the rotary embedding.
    """
    merge = sizes.merge
    mlp = sizes.mlp(gated=True)
    rope = AxialRope(theta=theta)

    def block(layer: int) -> BlockConfig:
        window_patches = None if layer in full_layers else (window * merge) ** 2
        return encoder_layer(sizes.embed_dim, sizes.heads, mlp, _NORM, rope=rope, window=window_patches)

    layers = (
        ProjectionConfig(dim=sizes.embed_dim * merge**2, bias=True, activation="gelu"),
        ProjectionConfig(dim=sizes.out_dim, bias=True),
    )
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(frames=frames, bias=False, window=window),
        blocks=tuple(map(block, range(sizes.layers))),
        projector=ProjectorConfig(group=merge**2, norm=_NORM, norm_of="patches", layers=layers),
    )


def qwen2_5_vl(
    text: DecoderConfig,
    vision: EncoderConfig,
    *,
    per_second: int | float,
    image_token: int = _IMAGE,
    video_token: int = _VIDEO,
) -> DecoderConfig:
    """Return the decoder configuration with a vision encoder and M-RoPE positions.

    `per_second` is the number of time positions per second of video; `image_token` and `video_token` are the ids of the
    placeholder tokens.
    """
    positions = GridPositions(frames="together", per_second=float(per_second), whole=True, behind_times=False)
    media = MediaConfig(vision=vision, image_token=image_token, video_token=video_token, positions=positions)
    return with_media(text, media)


# --- config.json ---


def _full_layers(encoder: EncoderConfig) -> tuple[int, ...]:
    masks = [getattr(block.mixer, "mask", None) for block in encoder.blocks]
    return tuple(layer for layer, mask in enumerate(masks) if mask == Bidirectional())


def _window_pixels(encoder: EncoderConfig) -> int:
    stem = encoder.stem
    if not isinstance(stem, PatchStemConfig) or stem.window is None:
        raise ConversionError(
            f"EncoderConfig.stem={stem!r} must be a PatchStemConfig with a window, whose size config.json describes."
        )
    return stem.window * stem.merge * stem.size


def _check_full_layers(fields: Fields, values: Values) -> None:
    full_layers = values["full_layers"]
    num_layers = values["layers"]
    # transformers also writes its default for encoders with fewer layers
    if full_layers != _FULL_LAYERS and not all(0 <= layer < num_layers for layer in full_layers):
        raise fields.error(
            f"fullatt_block_indexes={abbreviate(list(full_layers))} must be indices of layers from 0 to "
            f"{num_layers - 1}, because depth={num_layers}: correct one of them."
        )


_VISION = vision_config(
    windowed_vision,
    Integer("out_hidden_size", "projector.out_dim", 3584, name="_out_dim"),
    SAME_OUT_DIM,
    *encoder_sizes(width=3584, heads=16, layers=32, mlp_dim=3420, size=14, keys=QWEN_KEYS),
    Integer("spatial_merge_size", "stem.merge", 2),
    Integer("window_size", _window_pixels, 112, name="_pixels"),
    Rule("_token_pixels", lambda fields, values: values["size"] * values["merge"]),
    Check(
        lambda values: values["_pixels"] >= values["_token_pixels"],
        "window_size={_pixels} must be at least {_token_pixels} pixels, which is patch_size x spatial_merge_size.",
    ),
    Rule("window", lambda fields, values: values["_pixels"] // values["merge"] // values["size"]),
    activation("hidden_act", "mlp.activation", "silu"),
    Numbers("fullatt_block_indexes", _full_layers, _FULL_LAYERS, name="full_layers"),
    Rule("", _check_full_layers),
    Integer("temporal_patch_size", "stem.frames", 2),
    axial_theta("axial", "default", key=""),
    model_type="qwen2_5_vl_vision",
    ignored=IGNORED_VISION_KEYS,
)
# A field of `MediaConfig`, although `vision_config` contains its key.
_TIME_POSITIONS = Integer(
    "tokens_per_second", lambda config: int(value_at(config, "media.positions.per_second")), 4, name="per_second"
)


FAMILY = MultimodalFamily(
    text_type="qwen2",
    changes=dict(
        model_type="qwen2_5_vl_text",
        architecture="Qwen2_5_VLTextModel",
        settings=(
            Defaults({"max_window_layers": 80}),
            decoder_sizes(num_kv_heads=8, eps=1e-5, keys=NO_BIAS),
            rope_settings(theta=1e6, sections=_SECTIONS, interleaved_sections=False),
            LATE_WINDOWS,
        ),
        ignored_keys={**IGNORED_QWEN2_KEYS, **IGNORED_KEYS},
    ),
    reads_as_text=True,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    settings=(
        *media_tokens(_IMAGE, _VIDEO),
        dataclasses.replace(_VISION, settings=(_TIME_POSITIONS, *_VISION.settings)),
    ),
    build=qwen2_5_vl,
    weights=(
        *vision_weights("visual.", "visual.merger.", "", fc1="mlp.0", fc2="mlp.2", norm_name="ln_q"),
        *(
            dataclasses.replace(row, path=f"vision.{row.path}")
            for row in gated_mlp("visual.blocks.{layer}.mlp.")
        ),
    ),
    text_names={"model.": "model.", "lm_head.": "lm_head."},
    renamed={r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."},
    modules={r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
    ignored_keys=IGNORED_KEYS,
    own_settings=nested(*media_keys(IGNORED_KEYS)),
)  # fmt: skip


def _with_vision(text: DecoderConfig, mlp_dim: int = 3420) -> DecoderConfig:
    sizes = EncoderSizes(
        embed_dim=1280, layers=32, heads=16, mlp_dim=mlp_dim, out_dim=text.embed_dim, size=14, activation="silu"
    )
    text = with_rope(text, theta=1e6, sections=_SECTIONS, interleaved_sections=False)
    return qwen2_5_vl(text, windowed_vision(sizes), per_second=2.0)


_with_wide_vision = functools.partial(_with_vision, mlp_dim=3456)

MODELS = {
    "qwen2.5-vl-3b": ExtendedModel("qwen2.5-3b", _with_vision),
    "qwen2.5-vl-7b": ExtendedModel("qwen2.5-7b", _with_vision),
    "qwen2.5-vl-32b": ExtendedModel("qwen2.5-32b", _with_wide_vision),
    "qwen2.5-vl-72b": ExtendedModel("qwen2.5-72b", _with_wide_vision),
}
