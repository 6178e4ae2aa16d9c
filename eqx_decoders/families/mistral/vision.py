"""Mistral Small 3.1 and Ministral 3 (Mistral AI 2025), with the vision encoder of Pixtral (Agrawal et al. 2024).

The encoder does not resize images to a fixed size. The projector merges groups of 2 x 2 patches into tokens.
"""

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.families.multimodal import (
    LANGUAGE_MODEL,
    ExtendedModel,
    MultimodalFamily,
    encoder_attention,
    encoder_layer,
    linear,
    token,
    with_images,
)
from eqx_decoders.families.setting_rows import Check, Flag, Integer, Only, Renamed, Rule, activation, value_at
from eqx_decoders.families.vision_fields import (
    KERNEL,
    EncoderSizes,
    axial_theta,
    encoder_sizes,
    outer_values,
    vision_config,
)
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


_IMAGE_TOKEN = 10
_NORM = RMSNormConfig(eps=1e-5)


def pixtral(
    sizes: EncoderSizes,
    *,
    eps: float,
    theta: float = 10_000.0,
    projector_activation: str = "gelu",
    projector_bias: bool = False,
) -> EncoderConfig:
    """Return Pixtral's encoder of images of any size.

    **Arguments:**

    - `sizes`: sizes of the encoder.
    - `eps`: eps of the projector's norm.
    - `theta`: base of the rotary embedding.
    - `projector_activation`, `projector_bias`: activation and biases of the projector's MLP.
    """
    rope = AxialRope(theta=theta, staggered=True)
    mlp = sizes.mlp(gated=True, bias=False)
    block = encoder_layer(sizes.embed_dim, sizes.heads, mlp, _NORM, rope=rope, bias=False)
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(bias=False),
        blocks=(block,) * sizes.layers,
        pre_norm=_NORM,
        projector=ProjectorConfig(
            group=sizes.merge**2,
            combine="interleave",
            norm=RMSNormConfig(eps=eps),
            norm_of="patches",
            layers=(
                ProjectionConfig(dim=sizes.embed_dim),
                ProjectionConfig(dim=sizes.out_dim, bias=projector_bias, activation=projector_activation),
                ProjectionConfig(dim=sizes.out_dim, bias=projector_bias),
            ),
        ),
    )


# --- config.json ---


_VISION = vision_config(
    pixtral,
    *encoder_sizes(width=1024, heads=16, layers=24, mlp_dim=4096, size=16),
    Rule("_default_head_dim", lambda fields, values: values["embed_dim"] // values["heads"]),
    Integer("head_dim", "attention.head_dim", lambda values: values["_default_head_dim"], name="_head_dim"),
    Check(
        lambda values: values["_head_dim"] == values["_default_head_dim"],
        "head_dim={_head_dim} must equal hidden_size / num_attention_heads, {_default_head_dim}. Remove head_dim.",
    ),
    activation("hidden_act", "mlp.activation", "gelu"),
    Rule("eps", lambda fields, values: values["text"].final_norm.eps),
    axial_theta("axial", "default"),
    *outer_values("merge", "projector_activation", "projector_bias"),
    model_type="pixtral",
    ignored={
        "initializer_range": "it affects only the initialization of weights",
        "image_size": "it is the size of the largest image, but the encoder has no table of positions",
        "vocab_size": "an encoder has no vocabulary",
    },
)
_HIDDEN = "media.vision.projector.layers.1."
_LAYER = "vision_tower.transformer.layers.{layer}."
WEIGHTS = (
    Weight("vision_tower.patch_conv.weight", "vision.stem.kernel", KERNEL),
    *norm("vision_tower.ln_pre", "vision.pre_norm"),
    *norm(_LAYER + "attention_norm", "vision.pre_mixer_norm"),
    *norm(_LAYER + "ffn_norm", "vision.pre_mlp_norm"),
    *encoder_attention(_LAYER, "attention."),
    *gated_mlp(_LAYER + "feed_forward.", "vision.mlp."),
    *norm("multi_modal_projector.norm", "vision.projector.norm"),
    *linear("multi_modal_projector.patch_merger.merging_layer", "vision.projector.layers.0"),
    *linear("multi_modal_projector.linear_1", "vision.projector.layers.1"),
    *linear("multi_modal_projector.linear_2", "vision.projector.layers.2"),
)
FAMILY = MultimodalFamily(
    text_type="mistral",
    other_texts=("ministral3",),
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    settings=(
        Renamed({"image_token_id": "image_token_index"}),
        Only("vision_feature_layer", -1, written=True),
        Integer("spatial_merge_size", "media.vision.stem.merge", 2, name="_merge"),
        activation("projector_hidden_act", _HIDDEN + "activation", "gelu", name="_projector_activation"),
        Flag("multimodal_projector_bias", _HIDDEN + "bias", False, name="_projector_bias"),
        _VISION,
        token("image_token_index", "image_token", _IMAGE_TOKEN),
    ),
    build=with_images,
    weights=WEIGHTS,
    **LANGUAGE_MODEL,
)


def _with_vision(text: DecoderConfig) -> DecoderConfig:
    sizes = EncoderSizes(
        embed_dim=1024, layers=24, heads=16, mlp_dim=4096, out_dim=text.embed_dim, size=14, activation="silu"
    )
    return with_images(text, pixtral(sizes, eps=value_at(text, "final_norm.eps")), image_token=_IMAGE_TOKEN)


MODELS = {
    "mistral-small-3.1-24b": dict(
        model_type="mistral3",
        text_config=dict(
            head_dim=128, rms_norm_eps=1e-05, rope_theta=1_000_000_000.0, sliding_window=None, hidden_size=5120,
            intermediate_size=32_768, num_attention_heads=32, num_hidden_layers=40, vocab_size=131_072,
        ),
        vision_config=dict(hidden_act="silu", patch_size=14),
    ),
    "ministral3-8b-vision": ExtendedModel("ministral3-8b", _with_vision),
}  # fmt: skip
