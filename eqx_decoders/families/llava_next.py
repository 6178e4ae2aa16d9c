"""LLaVA-NeXT (Liu et al. 2024): tiles of images of any shape; with Granite's decoder Granite Vision (IBM 2025)."""

import dataclasses
from typing import Any

from eqx_decoders.encoders.geometry import SIZES, TilesConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families._llava import llava, llava_encoder, llava_family, with_clip
from eqx_decoders.families.multimodal import ExtendedModel, with_rope
from eqx_decoders.families.settings_table import Rule, value_at
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.model.decoder_config import DecoderConfig


_SIZES = "image_grid_pinpoints"


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    tiles = value_at(config, "media.vision").tiles
    if tiles is None:
        raise ConversionError("EncoderConfig.tiles=None: LLaVA-NeXT cuts images into tiles. LLaVA does not.")
    return {_SIZES: [list(size) for size in tiles.sizes]}


FAMILY = llava_family(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    Rule("_sizes", lambda fields, values: fields.pairs(_SIZES, SIZES), _write_sizes),
    tiled=True,
)


def _with_tiles(text: DecoderConfig) -> DecoderConfig:
    return with_clip(text, TilesConfig(side=336, sizes=SIZES))


def _granite_vision(text: DecoderConfig) -> DecoderConfig:
    """Return Granite 3.1 with another base of its rotary embedding, and SigLIP's features at four depths."""
    most = {1: 10, 2: 5, 3: 3, 4: 2, 5: 2}  # columns of tiles by rows
    sizes = tuple((384 * rows, 384 * columns) for rows in range(1, 11) for columns in range(1, most.get(rows, 1) + 1))
    text = with_rope(dataclasses.replace(text, vocab_size=49_156), theta=300_000.0)
    vision = llava_encoder(
        EncoderSizes(
            embed_dim=1152, layers=27, heads=16, mlp_dim=4304, out_dim=text.embed_dim, size=14, merge=1
        ),
        side=27,
        siglip_tower=True,
        eps=1e-6,
        depths=(4, 8, 16, 27),
        tiles=TilesConfig(side=384, sizes=sizes),
    )  # fmt: skip
    return llava(text, vision, image_token=49_155)


MODELS = {
    "llava1.6-vicuna-7b": ExtendedModel("llama2-7b", _with_tiles),
    "llava1.6-vicuna-13b": ExtendedModel("llama2-13b", _with_tiles),
    "llava1.6-mistral-7b": ExtendedModel("mistral-7b", _with_tiles),
    "granite-vision-3.2-2b": ExtendedModel("granite3.1-2b", _granite_vision),
}
