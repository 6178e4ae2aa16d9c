"""LLaVA 1.5 (Liu et al. 2023) and LLaVA-NeXT (Liu et al. 2024): a decoder with an image encoder, CLIP or SigLIP."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.geometry import SIZES, TilesConfig
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.errors import ConversionError
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.multimodal import (
    LANGUAGE_MODEL,
    LLAMA_SIZES,
    ExtendedModel,
    MultimodalFamily,
    linear,
    token,
    with_images,
    with_rope,
)
from eqx_decoders.families.setting_rows import (
    ABSENT,
    Defaults,
    Flag,
    Integer,
    Number,
    Renamed,
    Rule,
    Setting,
    Values,
    Word,
    activation,
    value_at,
)
from eqx_decoders.families.vision_fields import EncoderSizes, encoder_sizes, grid_side, outer_values, vision_config
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


# --- CLIP ---


def clip(sizes: EncoderSizes, *, side: int, eps: float = 1e-5) -> EncoderConfig:
    """Return CLIP's encoder of images of `side x side` patches, which has a class token, with SigLIP's projector."""
    encoder = siglip(sizes, side=side, eps=eps)
    positions = LearnedGrid(side=side, class_first=True)
    stem = dataclasses.replace(encoder.stem, bias=False, positions=positions, class_token=True)
    return dataclasses.replace(encoder, stem=stem, pre_norm=LayerNormConfig(eps=eps))


def clip_weights(prefix: str) -> tuple[Weight, ...]:
    """Return the weight rows of CLIP without its projector. They also cover SigLIP."""
    return (
        *siglip_weights(prefix),
        Weight(prefix + "embeddings.class_embedding", "vision.stem.class_embedding", "embed -> embed"),
        *norm(prefix + "pre_layrnorm", "vision.pre_norm"),
    )


# --- LLaVA ---


IMAGE = 32_000


def llava_encoder(
    sizes: EncoderSizes,
    *,
    side: int,
    siglip_tower: bool = False,
    eps: float = 1e-5,
    depths: tuple[int, ...],
    tiles: TilesConfig | None = None,
    hidden_activation: str = "gelu",
    bias: bool = True,
) -> EncoderConfig:
    """Return CLIP or SigLIP with LLaVA's projector.

    **Arguments:**

    - `sizes`, `eps`: sizes of the encoder, and `eps` of its norms.
    - `side`: rows and columns of patches in an image or a tile.
    - `siglip_tower`: whether the encoder is SigLIP; else CLIP.
    - `depths`: the layers, counted from 1, whose outputs are concatenated and projected; 0 is the input of layer 1.
    - `tiles`: how images are cut into tiles; None: images are not cut.
    - `hidden_activation`, `bias`: activation and biases of the projector.
    """
    encoder = siglip(sizes, side=side, eps=eps) if siglip_tower else clip(sizes, side=side, eps=eps)
    layers = (
        ProjectionConfig(dim=sizes.out_dim, bias=bias, activation=hidden_activation),
        ProjectionConfig(dim=sizes.out_dim, bias=bias),
    )
    return dataclasses.replace(encoder, depths=depths, tiles=tiles, projector=ProjectorConfig(layers=layers))


def llava(text: DecoderConfig, vision: EncoderConfig, *, image_token: int) -> DecoderConfig:
    """Return a decoder with an image encoder. Image features are scaled like token embeddings."""
    config = with_images(text, vision, image_token=image_token)
    media = dataclasses.replace(value_at(config, "media"), feature_scale=text.embedding_scale)
    return dataclasses.replace(config, media=media)


# --- config.json ---


def _is_siglip(encoder: EncoderConfig) -> bool:
    return not value_at(encoder, "stem.class_token")


def _read_layers(fields: Fields, values: Values) -> list[int]:
    value = fields.take("vision_feature_layer", -2)
    layers = value if isinstance(value, list) else [value]
    if not layers or not all(type(layer) is int for layer in layers):
        raise fields.error(f"vision_feature_layer={value} must be the index of a layer, or a list of indices.")
    return layers


def _read_depths(fields: Fields, values: Values) -> tuple[int, ...]:
    """Return the layers of the features, counted from 1. 0 is the input of layer 1, like `hidden_states[0]`."""
    layers = values["_layers"]
    count = values["layers"] + 1
    if not all(-count <= layer < count for layer in layers):
        raise fields.error(
            f"vision_feature_layer={layers} must be between {-count} and {count - 1}: the encoder has "
            f"num_hidden_layers={values['layers']} layers."
        )
    return tuple(layer % count for layer in layers)


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    depths = value_at(config, "media.vision.depths")
    num_layers = len(value_at(config, "media.vision.blocks"))
    if not depths:
        raise ConversionError("EncoderConfig.depths=() must have at least one layer for vision_feature_layer: set it.")
    layers = [depth - num_layers - 1 for depth in depths]
    return {"vision_feature_layer": layers if len(layers) > 1 else layers[0]}


def _read_tiles(fields: Fields, values: Values) -> TilesConfig | None:
    sizes = values.get("_sizes")
    return None if sizes is None else TilesConfig(side=values["_pixels"], sizes=sizes)


def _check_strategy(fields: Fields, values: Values) -> None:
    """Refuse strategies that keep CLIP's class token, or that remove the first patch of SigLIP."""
    strategy = fields.take("vision_feature_select_strategy", "default")
    if _is_siglip(values["vision"]):
        if strategy != "full":
            raise fields.error(
                f"vision_feature_select_strategy={strategy!r} must be 'full' for SigLIP, which has no class token."
            )
    elif strategy != "default":
        raise fields.error(
            f"vision_feature_select_strategy={strategy!r} must be 'default' for CLIP: features of the class token are "
            "not supported."
        )


def _write_strategy(config: DecoderConfig) -> dict[str, Any]:
    strategy = "full" if _is_siglip(value_at(config, "media.vision")) else "default"
    return {"vision_feature_select_strategy": strategy}


def _pixels(encoder: EncoderConfig) -> int:
    if encoder.tiles:
        return encoder.tiles.side
    return value_at(encoder, "stem.positions.side") * value_at(encoder, "stem.size")


def _by_tower(*, clip: Any, siglip: Any) -> Callable[[Values], Any]:
    return lambda values: siglip if values["siglip_tower"] else clip


_HIDDEN = "media.vision.projector.layers.0."
_, *_GRID = grid_side(224)
_VISION = vision_config(
    llava_encoder,
    Word(
        "model_type",
        _is_siglip,
        "clip_vision_model",
        known={"clip_vision_model": False, "siglip_vision_model": True},
        name="siglip_tower",
    ),
    *encoder_sizes(width=768, heads=12, layers=12, mlp_dim=3072, size=_by_tower(clip=32, siglip=16)),
    Rule("merge", lambda fields, values: 1),
    *outer_values("hidden_activation", "bias"),
    Integer("image_size", _pixels, 224, name="_pixels"),
    *_GRID,
    Word(
        "hidden_act",
        "mlp.activation",
        _by_tower(clip="quick_gelu", siglip="gelu_pytorch_tanh"),
        known=ACTIVATIONS,
    ),
    Number("layer_norm_eps", "post_norm.eps", _by_tower(clip=1e-5, siglip=1e-6)),
    # the head's output is not used
    Flag("vision_use_head", lambda encoder: False if _is_siglip(encoder) else ABSENT, True, name="_head"),
    Rule("depths", _read_depths),
    Rule("tiles", _read_tiles),
    model_type=None,
    ignored={
        "initializer_range initializer_factor": "initialization only",
        "projection_dim": "CLIP's own projection is not used",
        "vocab_size": "an image encoder has no vocabulary",
    },
)
_WEIGHTS = (
    *clip_weights("vision_tower."),
    *linear("multi_modal_projector.linear_1", "vision.projector.layers.0"),
    *linear("multi_modal_projector.linear_2", "vision.projector.layers.1"),
)
_NEWLINE = Weight("image_newline", "vision.line_end", "embed -> embed")
_RENAMED = {
    **LANGUAGE_MODEL["renamed"],
    r"^(model\.)?vision_tower\.(vision_model\.)?": "vision_tower.",
    r"^model\.image_newline$": "image_newline",
}
_MODULES = {**LANGUAGE_MODEL["modules"], r"^image_newline$": "model.image_newline"}


def llava_family(model_type: str, architecture: str, *settings: Setting, tiled: bool = False) -> MultimodalFamily:
    """Return a family of checkpoints with LLaVA's names of settings and tensors.

    **Arguments:**

    - `model_type`, `architecture`: the names of the family in `config.json`.
    - `settings`: additional rows of settings.
    - `tiled`: whether checkpoints have the embedding that ends a row of patches.
    """
    return MultimodalFamily(
        text_type="llama",
        other_texts=("llama", "granite", "mistral", "qwen2"),  # Mistral without windows is saved as Llama
        text_settings=(Defaults(LLAMA_SIZES),),
        model_type=model_type,
        architecture=architecture,
        settings=(
            Renamed({"image_token_id": "image_token_index"}),
            *settings,
            Rule("_layers", _read_layers, _write_layers),
            activation("projector_hidden_act", _HIDDEN + "activation", "gelu", name="_hidden_activation"),
            Flag("multimodal_projector_bias", _HIDDEN + "bias", True, name="_bias"),
            _VISION,
            Rule("", _check_strategy, _write_strategy),
            token("image_token_index", "image_token", IMAGE),
        ),
        build=llava,
        weights=(*_WEIGHTS, _NEWLINE) if tiled else _WEIGHTS,
        **{**LANGUAGE_MODEL, "renamed": _RENAMED, "modules": _MODULES},
        ignored_tensors=r".*(rotary_emb\.inv_freq|position_ids)|vision_tower\.head\..*",
        ignored_keys={
            "image_seq_length": "sizes of the encoder determine it",
            "use_image_newline_parameter": "transformers always has this parameter",
            "vocab_size": "text_config has it",
            "ignore_index": "labels in training only",
        },
    )


# --- published sizes ---

_CLIP = functools.partial(
    EncoderSizes, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, size=14, merge=1, activation="quick_gelu"
)


def with_clip(text: DecoderConfig, tiles: TilesConfig | None = None) -> DecoderConfig:
    """Return a decoder with CLIP for images or tiles of 336 x 336 pixels. The last layer of CLIP is not used."""
    text = dataclasses.replace(text, vocab_size=32_064)
    vision = llava_encoder(_CLIP(out_dim=text.embed_dim), side=24, depths=(23,), tiles=tiles)
    return llava(text, vision, image_token=IMAGE)


LLAVA = llava_family("llava", "LlavaForConditionalGeneration")


# --- LLaVA-NeXT, which cuts images of any shape into tiles; Granite Vision (IBM 2025), with Granite's decoder ---


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    tiles = value_at(config, "media.vision.tiles")
    if tiles is None:
        raise ConversionError(
            "EncoderConfig.tiles=None must be a TilesConfig for LLaVA-NeXT. LLaVA is the family without tiles."
        )
    return {"image_grid_pinpoints": [list(size) for size in tiles.sizes]}


LLAVA_NEXT = llava_family(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    Rule("_sizes", lambda fields, values: fields.pairs("image_grid_pinpoints", SIZES), _write_sizes),
    tiled=True,
)


def _with_tiles(text: DecoderConfig) -> DecoderConfig:
    return with_clip(text, TilesConfig(side=336, sizes=SIZES))


def _granite_vision(text: DecoderConfig) -> DecoderConfig:
    """Return Granite 3.1 with a different RoPE base, and with SigLIP features of four layers."""
    max_columns = {1: 10, 2: 5, 3: 3, 4: 2, 5: 2}  # by number of rows; 1 for more rows
    sizes = tuple(
        (384 * rows, 384 * columns) for rows in range(1, 11) for columns in range(1, max_columns.get(rows, 1) + 1)
    )
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


FAMILIES = (LLAVA, LLAVA_NEXT)

MODELS = {
    "llava1.5-7b": ExtendedModel("llama2-7b", with_clip),
    "llava1.5-13b": ExtendedModel("llama2-13b", with_clip),
    "llava1.6-vicuna-7b": ExtendedModel("llama2-7b", _with_tiles),
    "llava1.6-vicuna-13b": ExtendedModel("llama2-13b", _with_tiles),
    "llava1.6-mistral-7b": ExtendedModel("mistral-7b", _with_tiles),
    "granite-vision-3.2-2b": ExtendedModel("granite3.1-2b", _granite_vision),
}  # fmt: skip
