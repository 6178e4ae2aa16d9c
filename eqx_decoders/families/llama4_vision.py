"""Llama 4 with images, Scout and Maverick (Meta 2025): tiles of an image, with a class token behind their patches."""

import dataclasses
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    attention,
    encoder_layer,
    finish,
    linear,
    norm,
    plain_mlp,
)
from eqx_decoders.families.vision_fields import (
    EncoderSizes,
    read_side,
    read_sizes,
    read_theta,
    vision_fields,
    vision_of,
    write_sizes,
)
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE = 200_092
_NORM = LayerNormConfig(eps=1e-5)


def llama4_encoder(sizes: EncoderSizes, *, feature_dim: int, side: int, theta: float = 10_000.0) -> EncoderConfig:
    """Return the encoder of tiles of `side x side` patches; `merge x merge` become one token of `feature_dim`."""
    rope = AxialRope(theta=theta, pairing="interleaved")
    projection = ProjectionConfig(dim=feature_dim, activation="gelu")
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(
            bias=False,
            positions=LearnedGrid(side=side),
            class_token=True,
            coordinates="column_row",
            first_coordinate=1,  # the class token stands at 0
        ),
        blocks=(encoder_layer(sizes.embed_dim, sizes.heads, sizes.mlp(), _NORM, rope=rope),) * sizes.layers,
        pre_norm=_NORM,
        post_norm=_NORM,
        projector=ProjectorConfig(group=sizes.merge**2, layers=(projection, projection)),
        into=ProjectionConfig(dim=sizes.out_dim),
    )


def llama4_vision(text: DecoderConfig, vision: EncoderConfig, *, image_token: int = IMAGE) -> DecoderConfig:
    """Return a decoder with this encoder."""
    return dataclasses.replace(text, media=MediaConfig(vision=vision, image_token=image_token))


# --- config.json ---


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    for name in ("image_token", "boi_token", "eoi_token"):
        fields.rename(f"{name}_id", f"{name}_index")
    vision = _read_vision(fields, config.embed_dim)
    return llama4_vision(config, vision, image_token=fields.integer("image_token_index", IMAGE, least=0))


def _read_vision(fields: Fields, out_dim: int) -> EncoderConfig:
    table = vision_fields(fields)
    sizes = read_sizes(table, width=768, heads=16, layers=34, mlp_dim=5632, size=14)
    ratio = table.number("pixel_shuffle_ratio", 0.5)
    merge = round(1 / ratio)
    if merge < 1 or abs(merge * ratio - 1) > 1e-6:
        raise table.error(f"pixel_shuffle_ratio={ratio} must be one divided by a whole number.")
    joined = sizes["embed_dim"] * merge**2
    if sizes["mlp_dim"] != joined:
        rule = f"must be {joined}, the features of {merge**2} patches: transformers takes one size for both"
        raise table.error(f"intermediate_size={sizes['mlp_dim']} {rule}.")
    features = table.integer("vision_output_dim", 7680)
    for key in ("projector_input_dim", "projector_output_dim"):
        if table.integer(key, 4096) != features:
            raise table.error(f"{key}={table.take(key, 4096)} must be vision_output_dim={features}.")
    table.allow_only("multi_modal_projector_bias", False)
    table.allow_only("vision_feature_layer", -1)
    encoder = llama4_encoder(
        EncoderSizes(**sizes, out_dim=out_dim, merge=merge, activation="gelu"),
        feature_dim=features,
        side=read_side(table, sizes["size"], 448),
        theta=read_theta(table, "default"),
    )
    finish(fields, "vision_config", table, _IGNORED_OF_VISION)
    return encoder


_IGNORED_OF_VISION = {
    "initializer_range": "of new weights",
    "projector_dropout": "dropout happens in training only",
    "hidden_act": "transformers has gelu, whatever it says",
    "norm_eps": "transformers has 1e-5, whatever it says",
    "vision_feature_select_strategy": "transformers does not read it",
}


def _write(config: DecoderConfig) -> dict[str, Any]:
    media, vision = vision_of(config)
    stem: Any = vision.stem
    mixer: Any = vision.blocks[0].mixer
    features = vision.projector.out_dim
    return {
        "image_token_index": media.image_token,
        "vision_config": {
            "model_type": "llama4_vision_model",
            **write_sizes(vision),
            "pixel_shuffle_ratio": 1 / stem.merge,
            "vision_output_dim": features,
            "projector_input_dim": features,
            "projector_output_dim": features,
            "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope.theta},
        },
    }


_LAYER = "vision_model.model.layers.{layer}."
WEIGHTS = (
    Weight(
        "vision_model.patch_embedding.linear.weight",
        "vision.stem.kernel",
        "embed (channels frames patch_rows patch_columns) -> channels frames patch_rows patch_columns embed",
    ),
    Weight("vision_model.class_embedding", "vision.stem.class_embedding", "embed -> embed"),
    Weight(
        "vision_model.positional_embedding_vlm", "vision.stem.positions.table", "positions embed -> positions embed"
    ),
    *norm("vision_model.layernorm_pre", "vision.pre_norm"),
    *norm("vision_model.layernorm_post", "vision.post_norm"),
    *norm(_LAYER + "input_layernorm", "vision.pre_mixer_norm"),
    *norm(_LAYER + "post_attention_layernorm", "vision.pre_mlp_norm"),
    *attention(_LAYER),
    *plain_mlp(_LAYER + "mlp.", "fc1", "fc2"),
    *linear("vision_model.vision_adapter.mlp.fc1", "vision.projector.layers.0"),
    *linear("vision_model.vision_adapter.mlp.fc2", "vision.projector.layers.1"),
    *linear("multi_modal_projector.linear_1", "vision.into"),
)
FAMILY = MultimodalFamily(
    text="llama4_text",
    model_type="llama4",
    architecture="Llama4ForConditionalGeneration",
    read=_read,
    write=_write,
    weights=WEIGHTS,
    names={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ignored_keys={
        "boi_token_index": "a token around placeholders: part of the prompt",
        "eoi_token_index": "a token around placeholders: part of the prompt",
    },
)


def _with_vision(text: DecoderConfig) -> DecoderConfig:
    sizes = EncoderSizes(
        embed_dim=1408, layers=34, heads=16, mlp_dim=5632, out_dim=text.embed_dim, size=14, activation="gelu"
    )
    return llama4_vision(text, llama4_encoder(sizes, feature_dim=4096, side=24))


MODELS = {
    "llama4-17b-16e-vision": ExtendedModel("llama4-17b-16e", _with_vision),
    "llama4-17b-128e-vision": ExtendedModel("llama4-17b-128e", _with_vision),
}
