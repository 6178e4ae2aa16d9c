"""Mistral Small 3.1 (Mistral AI 2025): Mistral with the vision encoder of Pixtral (Agrawal et al. 2024).

Images keep their sizes; four neighboring patches become one token.
"""

import dataclasses
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.families.common import DecoderSizes, gated_mlp
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import (
    MultimodalFamily,
    attention,
    check_model_type,
    encoder_layer,
    finish,
    linear,
    norm,
)
from eqx_decoders.families.vision_fields import (
    KERNEL,
    EncoderSizes,
    read_sizes,
    read_theta,
    vision_fields,
    vision_of,
    write_sizes,
)
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import AxialRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE = 10
_NORM = RMSNormConfig(eps=1e-5)


def pixtral(
    sizes: EncoderSizes,
    *,
    eps: float,
    theta: float = 10_000.0,
    projector_activation: str = "gelu",
    projector_bias: bool = False,
) -> EncoderConfig:
    """Return the encoder of images of any size; `eps` is that of the norm behind it."""
    rope, mlp = AxialRope(theta=theta, staggered=True), sizes.mlp(gated=True, bias=False)
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(bias=False),
        blocks=(encoder_layer(sizes.embed_dim, sizes.heads, mlp, _NORM, rope=rope, bias=False),) * sizes.layers,
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


def mistral3(text: DecoderConfig, vision: EncoderConfig, *, image_token: int = IMAGE) -> DecoderConfig:
    """Return a decoder with this encoder."""
    return dataclasses.replace(text, media=MediaConfig(vision=vision, image_token=image_token))


# --- config.json ---


def _adapt(text: Family) -> Family:
    """Refuse the settings of a decoder of another family."""

    def read(fields: Fields) -> DecoderConfig:
        check_model_type(fields, text.model_type)
        return text.read(fields)

    return dataclasses.replace(text, read=read)


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    fields.rename("image_token_id", "image_token_index")
    fields.allow_only("vision_feature_layer", -1)
    table = vision_fields(fields)
    sizes = read_sizes(table, width=1024, heads=16, layers=24, mlp_dim=4096, size=16)
    head_dim = sizes["embed_dim"] // sizes["heads"]
    if table.integer("head_dim", head_dim) != head_dim:
        raise table.error(f"head_dim={table.take('head_dim')} must be hidden_size / num_attention_heads={head_dim}.")
    assert config.final_norm is not None
    encoder_sizes = EncoderSizes(
        **sizes,
        out_dim=config.embed_dim,
        merge=fields.integer("spatial_merge_size", 2),
        activation=table.word("hidden_act", ACTIVATIONS, "gelu"),
    )
    vision = pixtral(
        encoder_sizes,
        eps=config.final_norm.eps,
        theta=read_theta(table, "axial", "default"),
        projector_activation=fields.word("projector_hidden_act", ACTIVATIONS, "gelu"),
        projector_bias=fields.flag("multimodal_projector_bias", False),
    )
    ignored = {
        "initializer_range": "of new weights",
        "image_size": "of the largest image: positions have no table",
        "vocab_size": "an encoder has none",
    }
    finish(fields, "vision_config", table, ignored)
    return mistral3(config, vision, image_token=fields.integer("image_token_index", IMAGE, least=0))


def _write(config: DecoderConfig) -> dict[str, Any]:
    media, vision = vision_of(config)
    stem: Any = vision.stem
    mixer: Any = vision.blocks[0].mixer
    mlp: Any = vision.blocks[0].mlp
    hidden = vision.projector.layers[1]
    return {
        "image_token_index": media.image_token,
        "spatial_merge_size": stem.merge,
        "projector_hidden_act": activation_name(hidden.activation),
        "multimodal_projector_bias": hidden.bias,
        "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "pixtral",
            **write_sizes(vision),
            "head_dim": mixer.head_dim,
            "hidden_act": activation_name(mlp.activation),
            "rope_parameters": {"rope_type": "axial", "rope_theta": mixer.rope.theta},
        },
    }


_LAYER = "vision_tower.transformer.layers.{layer}."
WEIGHTS = (
    Weight("vision_tower.patch_conv.weight", "vision.stem.kernel", KERNEL),
    *norm("vision_tower.ln_pre", "vision.pre_norm"),
    *norm(_LAYER + "attention_norm", "vision.pre_mixer_norm"),
    *norm(_LAYER + "ffn_norm", "vision.pre_mlp_norm"),
    *attention(_LAYER, "attention."),
    *gated_mlp(_LAYER + "feed_forward.", "vision.mlp."),
    *norm("multi_modal_projector.norm", "vision.projector.norm"),
    *linear("multi_modal_projector.patch_merger.merging_layer", "vision.projector.layers.0"),
    *linear("multi_modal_projector.linear_1", "vision.projector.layers.1"),
    *linear("multi_modal_projector.linear_2", "vision.projector.layers.2"),
)
FAMILY = MultimodalFamily(
    text="mistral",
    adapt=_adapt,
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    read=_read,
    write=_write,
    weights=WEIGHTS,
    names={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    renamed={
        r"^model\.language_model\.": "language_model.model.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^lm_head\.": "language_model.lm_head.",
    },
    modules={
        r"^language_model\.model\.": "model.language_model.",
        r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
        r"^language_model\.lm_head\.": "lm_head.",
    },
)


def _small_31() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=131_072, embed_dim=5120, num_layers=40, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=32_768,
        eps=1e-5,
    )  # fmt: skip
    sizes = EncoderSizes(
        embed_dim=1024, layers=24, heads=16, mlp_dim=4096, out_dim=shape.embed_dim, size=14, activation="silu"
    )
    text = shape.decoder(shape.block(shape.attention(rope=Rope(theta=1e9))))
    return mistral3(text, pixtral(sizes, eps=shape.eps))


MODELS = {"mistral-small-3.1-24b": _small_31}
