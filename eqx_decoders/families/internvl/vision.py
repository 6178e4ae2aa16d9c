"""InternVL 3 and 3.5 (Zhu et al. 2025, Wang et al. 2025): Qwen with image tiles, four patches per token."""

import dataclasses
import functools

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families.common import plain_mlp
from eqx_decoders.families.multimodal import (
    LANGUAGE_MODEL,
    ExtendedModel,
    MultimodalFamily,
    encoder_attention,
    encoder_layer,
    linear,
    token,
    with_images,
    with_rope,
)
from eqx_decoders.families.setting_rows import Flag, Number, Only, Word, activation
from eqx_decoders.families.vision_fields import (
    KERNEL,
    EncoderSizes,
    encoder_sizes,
    grid_side,
    outer_values,
    shuffle_ratio,
    squares,
    vision_config,
)
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import LayerNormConfig, LayerScaleConfig, RMSNormConfig
from eqx_decoders.layers.rope import DynamicRope
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE = 151_667
_IMAGE_3_5 = 151_671


def intern_vit(
    sizes: EncoderSizes,
    *,
    side: int,
    norm: type[LayerNormConfig] | type[RMSNormConfig] = LayerNormConfig,
    eps: float = 1e-6,
    qkv_bias: bool = True,
    qk_norm: bool = False,
    layer_scale: float = 0.1,
    projector_activation: str = "gelu",
) -> EncoderConfig:
    """Return InternViT, the encoder of image tiles of `side x side` patches, which follow a class token.

    **Arguments:**

    - `sizes`: sizes of the encoder.
    - `side`: rows and columns of patches in a tile.
    - `norm`, `eps`: class and `eps` of the norms.
    - `qkv_bias`, `qk_norm`: whether attention has biases, and whether it normalizes queries and keys.
    - `layer_scale`: initial value of LayerScale.
    - `projector_activation`: activation of the projector, an MLP.
    """
    block = encoder_layer(
        sizes.embed_dim,
        sizes.heads,
        sizes.mlp(),
        norm(eps=eps),
        qkv_bias=qkv_bias,
        qk_norm=QKNorm(norm=RMSNormConfig(eps=1e-6), over="heads") if qk_norm else None,
    )
    scale = LayerScaleConfig(start=layer_scale)
    block = dataclasses.replace(block, post_mixer_norm=scale, post_mlp_norm=scale)
    layers = (
        ProjectionConfig(dim=sizes.out_dim, bias=True, activation=projector_activation),
        ProjectionConfig(dim=sizes.out_dim, bias=True),
    )
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(positions=LearnedGrid(side=side, class_first=True), class_token=True),
        blocks=(block,) * sizes.layers,
        projector=ProjectorConfig(group=sizes.merge**2, norm=LayerNormConfig(), layers=layers),
    )


# --- config.json ---

_VISION = vision_config(
    intern_vit,
    squares("image_size", "patch_size"),
    *encoder_sizes(width=1024, heads=16, layers=24, mlp_dim=4096, size=14),
    *outer_values("merge", "projector_activation"),
    *grid_side(448),
    Word(
        "norm_type",
        lambda encoder: type(encoder.blocks[0].pre_mixer_norm),
        "layer_norm",
        known={"layer_norm": LayerNormConfig, "rms_norm": RMSNormConfig},
        name="norm",
    ),
    Number("layer_norm_eps", "blocks.0.pre_mixer_norm.eps", 1e-6),
    activation("hidden_act", "mlp.activation", "gelu"),
    Flag("attention_bias", "attention.qkv_bias", False),
    Flag("use_qk_norm", "attention.qk_norm", False, name="qk_norm"),
    Number("layer_scale_init_value", "blocks.0.post_mixer_norm.start", 0.1, name="layer_scale"),
    Only("use_absolute_position_embeddings", True, written=True),
    Only("use_mean_pooling", True, written=True),
    Only("use_mask_token", False, written=True),
    model_type="internvl_vision",
    ignored={
        "initializer_range": "initialization only",
        "projection_dropout": "dropout is used in training only",
        "architectures": "model_type determines it",
    },
)
_TOWER = "vision_tower."
_LAYER = _TOWER + "encoder.layer.{layer}."
WEIGHTS = (
    Weight(_TOWER + "embeddings.patch_embeddings.projection.weight", "vision.stem.kernel", KERNEL),
    Weight(_TOWER + "embeddings.patch_embeddings.projection.bias", "vision.stem.bias", "embed -> embed"),
    Weight(_TOWER + "embeddings.cls_token", "vision.stem.class_embedding", "1 1 embed -> embed"),
    Weight(
        _TOWER + "embeddings.position_embeddings", "vision.stem.positions.table", "1 positions embed -> positions embed"
    ),
    *norm(_LAYER + "layernorm_before", "vision.pre_mixer_norm"),
    *norm(_LAYER + "layernorm_after", "vision.pre_mlp_norm"),
    Weight(_LAYER + "lambda_1", "vision.post_mixer_norm.scale", "norm -> norm"),
    Weight(_LAYER + "lambda_2", "vision.post_mlp_norm.scale", "norm -> norm"),
    *encoder_attention(_LAYER, "attention.", out="projection_layer"),
    *plain_mlp(_LAYER + "mlp.", "vision.mlp.", "fc1", "fc2"),
    *norm("multi_modal_projector.layer_norm", "vision.projector.norm"),
    *linear("multi_modal_projector.linear_1", "vision.projector.layers.0"),
    *linear("multi_modal_projector.linear_2", "vision.projector.layers.1"),
)
FAMILY = MultimodalFamily(
    text_type="qwen2",
    other_texts=("qwen3", "qwen3_moe", "llama", "gpt_oss"),
    model_type="internvl",
    architecture="InternVLForConditionalGeneration",
    settings=(
        Only("vision_feature_layer", -1, written=True),
        Only("vision_feature_select_strategy", "default", written=True),
        shuffle_ratio("downsample_ratio", "media.vision.stem.merge", name="_merge"),
        activation(
            "projector_hidden_act",
            "media.vision.projector.layers.0.activation",
            "gelu",
            name="_projector_activation",
        ),
        _VISION,
        token("image_token_id", "image_token", IMAGE),
    ),
    build=with_images,
    weights=WEIGHTS,
    ignored_keys={"image_seq_length": "sizes of the encoder determine it"},
    own_settings=lambda content: {"tie_word_embeddings": True, **content},
    **LANGUAGE_MODEL,
)

_small = functools.partial(EncoderSizes, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, size=14, activation="gelu")


def _with_vision(text: DecoderConfig, large: bool = False, image_token: int = _IMAGE_3_5) -> DecoderConfig:
    """Return the decoder with InternViT of 300M, or of 6B if `large`."""
    sizes = _small(out_dim=text.embed_dim)
    if large:
        sizes = dataclasses.replace(sizes, embed_dim=3200, layers=45, heads=25, mlp_dim=12_800)
        vision = intern_vit(sizes, side=32, norm=RMSNormConfig, qkv_bias=False, qk_norm=True)
    else:
        vision = intern_vit(sizes, side=32)
    return with_images(dataclasses.replace(text, tied=False), vision, image_token=image_token)


def _with_vision_3(text: DecoderConfig, large: bool = False) -> DecoderConfig:
    """Return InternVL 3: Qwen2.5 with InternViT and dynamic RoPE scaling for longer texts."""
    text = with_rope(dataclasses.replace(text, vocab_size=151_674), DynamicRope, factor=2.0, original_length=32_768)
    return _with_vision(text, large, IMAGE)


_with_large = functools.partial(_with_vision, large=True)
_with_large_3 = functools.partial(_with_vision_3, large=True)

MODELS = {
    "internvl3-1b": ExtendedModel("qwen2.5-0.5b", _with_vision_3),
    "internvl3-2b": ExtendedModel("qwen2.5-1.5b", _with_vision_3),
    "internvl3-8b": ExtendedModel("qwen2.5-7b", _with_vision_3),
    "internvl3-14b": ExtendedModel("qwen2.5-14b", _with_vision_3),
    "internvl3-38b": ExtendedModel("qwen2.5-32b", _with_large_3),
    "internvl3-78b": ExtendedModel("qwen2.5-72b", _with_large_3),
    "internvl3.5-1b": ExtendedModel("qwen3-0.6b", _with_vision),
    "internvl3.5-2b": ExtendedModel("qwen3-1.7b", _with_vision),
    "internvl3.5-4b": ExtendedModel("qwen3-4b", _with_vision),
    "internvl3.5-8b": ExtendedModel("qwen3-8b", _with_vision),
    "internvl3.5-14b": ExtendedModel("qwen3-14b", _with_vision),
    "internvl3.5-38b": ExtendedModel("qwen3-32b", _with_large),
    "internvl3.5-30b-a3b": ExtendedModel("qwen3-30b-a3b", _with_vision),
    "internvl3.5-241b-a28b": ExtendedModel("qwen3-235b-a22b", _with_large),
}
