"""Llama 4 with images, Scout and Maverick (Meta 2025): tiles of an image, with a class token after their patches."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families.common import plain_mlp
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    encoder_attention,
    encoder_layer,
    linear,
    token,
    with_images,
)
from eqx_decoders.families.setting_rows import Check, Integer, Only, Renamed, Rule, Setting, Values
from eqx_decoders.families.vision_fields import (
    EncoderSizes,
    axial_theta,
    encoder_sizes,
    grid_side,
    shuffle_ratio,
    vision_config,
)
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE = 200_092
_NORM = LayerNormConfig(eps=1e-5)


def llama4_encoder(sizes: EncoderSizes, *, feature_dim: int, side: int, theta: float = 10_000.0) -> EncoderConfig:
    """Return the encoder of image tiles of `side x side` patches.

    The projector concatenates `sizes.merge x sizes.merge` patches and returns one token with `feature_dim` features.
    """
    rope = AxialRope(theta=theta, pairing="interleaved")
    projection = ProjectionConfig(dim=feature_dim, activation="gelu")
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(
            bias=False,
            positions=LearnedGrid(side=side),
            class_token=True,
            coordinates="column_row",
            first_coordinate=1,  # the class token has the coordinate 0
        ),
        blocks=(encoder_layer(sizes.embed_dim, sizes.heads, sizes.mlp(), _NORM, rope=rope),) * sizes.layers,
        pre_norm=_NORM,
        post_norm=_NORM,
        projector=ProjectorConfig(group=sizes.merge**2, layers=(projection, projection)),
        into=ProjectionConfig(dim=sizes.out_dim),
    )


# --- config.json ---


def _check_merged_width(fields: Fields, values: Values) -> None:
    count = values["merge"] ** 2
    merged_width = values["embed_dim"] * count
    if values["mlp_dim"] != merged_width:
        raise fields.error(
            f"intermediate_size={values['mlp_dim']} must be {merged_width}, the features of {count} patches: "
            "transformers uses it both for the MLPs and for the input of the projector."
        )


def _projector_width(key: str) -> tuple[Setting, ...]:
    """Return the rows of a key that must be equal to `vision_output_dim`."""
    return (
        Integer(key, "projector.out_dim", 4096, name="_projector_width"),
        Check(
            lambda values: values["_projector_width"] == values["feature_dim"],
            f"{key}={{_projector_width}} must be equal to vision_output_dim={{feature_dim}}.",
        ),
    )


_VISION = vision_config(
    llama4_encoder,
    *encoder_sizes(width=768, heads=16, layers=34, mlp_dim=5632, size=14),
    Rule("activation", lambda fields, values: "gelu"),
    shuffle_ratio("pixel_shuffle_ratio", "stem.merge"),
    Rule("", _check_merged_width),
    Integer("vision_output_dim", "projector.out_dim", 7680, name="feature_dim"),
    *_projector_width("projector_input_dim"),
    *_projector_width("projector_output_dim"),
    Only("multi_modal_projector_bias", False),
    Only("vision_feature_layer", -1),
    *grid_side(448),
    axial_theta("default"),
    model_type="llama4_vision_model",
    ignored={
        "initializer_range": "initialization only",
        "projector_dropout": "dropout is used in training only",
        "hidden_act": "transformers always uses gelu",
        "norm_eps": "transformers always uses 1e-5",
        "vision_feature_select_strategy _vision_feature_layer": "transformers does not read it",
    },
)
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
    *encoder_attention(_LAYER),
    *plain_mlp(_LAYER + "mlp.", "vision.mlp.", "fc1", "fc2"),
    *linear("vision_model.vision_adapter.mlp.fc1", "vision.projector.layers.0"),
    *linear("vision_model.vision_adapter.mlp.fc2", "vision.projector.layers.1"),
    *linear("multi_modal_projector.linear_1", "vision.into"),
)
FAMILY = MultimodalFamily(
    text_type="llama4_text",
    model_type="llama4",
    architecture="Llama4ForConditionalGeneration",
    settings=(
        Renamed({f"{name}_id": f"{name}_index" for name in ("image_token", "boi_token", "eoi_token")}),
        _VISION,
        token("image_token_index", "image_token", IMAGE),
    ),
    build=with_images,
    weights=WEIGHTS,
    text_names={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ignored_keys={
        "boi_token_index eoi_token_index": "tokens around the image placeholders are part of the prompt",
    },
)


def _with_vision(text: DecoderConfig) -> DecoderConfig:
    sizes = EncoderSizes(
        embed_dim=1408, layers=34, heads=16, mlp_dim=5632, out_dim=text.embed_dim, size=14, activation="gelu"
    )
    return with_images(text, llama4_encoder(sizes, feature_dim=4096, side=24), image_token=IMAGE)


MODELS = {
    "llama4-17b-16e-vision": ExtendedModel("llama4-17b-16e", _with_vision),
    "llama4-17b-128e-vision": ExtendedModel("llama4-17b-128e", _with_vision),
}
