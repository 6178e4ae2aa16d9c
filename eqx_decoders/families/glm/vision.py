"""GLM-4.1V and 4.5V (GLM-V Team 2025), and 4.6V (Z.ai 2025): images of any shape.

The position of an image token consists of a time, a row and a column.
"""

from collections.abc import Callable, Mapping
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import GroupConvolutionConfig, ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import NO_BIAS, decoder_sizes
from eqx_decoders.families.deepseek.blocks import expert_settings, v3_router_settings
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    encoder_layer,
    linear,
    nested,
    token,
    with_rope,
)
from eqx_decoders.families.qwen.vision import (
    QWEN_KEYS,
    SAME_OUT_DIM,
    VL_NAMES,
    joint_attention,
    media_keys,
    with_media,
)
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Integer, Number, Only, Rule, activation
from eqx_decoders.families.vision_fields import (
    KERNEL_IN_TIME,
    EncoderSizes,
    axial_theta,
    encoder_sizes,
    grid_side,
    squares,
    vision_config,
)
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


SECTIONS = (8, 12, 12)


def glm_vision(
    sizes: EncoderSizes,
    *,
    hidden_dim: int,
    side: int = 24,
    frames: int = 2,
    eps: float = 1e-5,
    qkv_bias: bool = False,
    theta: float = 10_000.0,
) -> EncoderConfig:
    """Return the vision encoder of GLM-4.1V.

    **Arguments:**

    - `sizes`: sizes of the encoder.
    - `hidden_dim`: hidden features of the projector's MLP.
    - `side`: rows and columns of the table of position embeddings.
    - `frames`: video frames per patch.
    - `eps`: eps of RMSNorms.
    - `qkv_bias`: whether the query, key and value projections have biases.
    - `theta`: base of the rotary embedding.
    """
    rms_norm = RMSNormConfig(eps=eps)
    mlp = sizes.mlp(gated=True, bias=False)
    rope = AxialRope(theta=theta)
    block = encoder_layer(sizes.embed_dim, sizes.heads, mlp, rms_norm, rope=rope, bias=False, qkv_bias=qkv_bias)
    projection = ProjectionConfig(dim=sizes.out_dim, out_norm=LayerNormConfig(), activation="gelu")
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(frames=frames, norm=rms_norm, positions=LearnedGrid(side=side, resample="bicubic")),
        blocks=(block,) * sizes.layers,
        post_norm=rms_norm,
        projector=ProjectorConfig(
            group=sizes.merge**2,
            convolution=GroupConvolutionConfig(side=sizes.merge, dim=sizes.out_dim),
            layers=(projection, MLPConfig(mlp_dim=hidden_dim, activation=sizes.activation)),
        ),
    )


def glm_v(text: DecoderConfig, vision: EncoderConfig, *, image_token: int) -> DecoderConfig:
    """Return the decoder `text` with the encoder `vision`. `image_token`: placeholder of images and video frames."""
    return with_media(text, MediaConfig(vision=vision, image_token=image_token, positions=GridPositions()))


def _with_vision(hidden_dim: int, image_token: int) -> Callable[[DecoderConfig], DecoderConfig]:
    """Return a function that adds the published encoder; `hidden_dim` is the hidden size of the projector's MLP."""

    def add_encoder(text: DecoderConfig) -> DecoderConfig:
        sizes = EncoderSizes(
            embed_dim=1536, layers=24, heads=12, size=14, mlp_dim=text.embed_dim, out_dim=text.embed_dim,
            activation="silu",
        )  # fmt: skip
        text = with_rope(text, sections=SECTIONS, interleaved_sections=False)
        return glm_v(text, glm_vision(sizes, hidden_dim=hidden_dim), image_token=image_token)

    return add_encoder


# --- config.json ---


def glm_vision_config(model_type: str) -> Any:
    """Return the settings of `vision_config`."""
    # `intermediate_size` is the projector's hidden size here; the MLPs of the layers have `out_hidden_size` features
    sizes = encoder_sizes(width=1536, heads=12, layers=24, mlp_dim=13_696, size=14, keys=QWEN_KEYS)
    return vision_config(
        glm_vision,
        squares("image_size", "patch_size", "temporal_patch_size"),
        Integer("out_hidden_size", "projector.out_dim", 4096, name="_out_dim"),
        SAME_OUT_DIM,
        Integer("intermediate_size", "projector.layers.1.mlp_dim", 13_696, name="hidden_dim"),
        *(setting for setting in sizes if getattr(setting, "key", "") != "intermediate_size"),
        Rule("mlp_dim", lambda fields, values: values["out_dim"]),
        *grid_side(336),
        Integer("spatial_merge_size", "stem.merge", 2),
        Integer("temporal_patch_size", "stem.frames", 2),
        activation("hidden_act", "mlp.activation", "silu"),
        Flag("attention_bias", "attention.qkv_bias", False, name="qkv_bias"),
        Number("rms_norm_eps", "post_norm.eps", 1e-5),
        axial_theta("axial", "default", key=""),
        model_type=model_type,
        ignored={"initializer_range": "it affects only the initialization of weights"},
    )


_VISUAL = "model.visual."
_LAYER = _VISUAL + "blocks.{layer}."
WEIGHTS = (
    Weight(_VISUAL + "patch_embed.proj.weight", "vision.stem.kernel", KERNEL_IN_TIME),
    Weight(_VISUAL + "patch_embed.proj.bias", "vision.stem.bias", "embed -> embed"),
    *norm(_VISUAL + "post_conv_layernorm", "vision.stem.norm"),
    Weight(
        _VISUAL + "embeddings.position_embedding.weight",
        "vision.stem.positions.table",
        "positions embed -> positions embed",
    ),
    *norm(_LAYER + "norm1", "vision.pre_mixer_norm"),
    *norm(_LAYER + "norm2", "vision.pre_mlp_norm"),
    *joint_attention(_LAYER),
    *gated_mlp(_LAYER + "mlp.", "vision.mlp."),
    *norm(_VISUAL + "post_layernorm", "vision.post_norm"),
    Weight(
        _VISUAL + "downsample.weight",
        "vision.projector.convolution.kernel",
        "outer inner patch_rows patch_columns -> patch_rows patch_columns inner outer",
    ),
    Weight(_VISUAL + "downsample.bias", "vision.projector.convolution.bias", "outer -> outer"),
    *linear(_VISUAL + "merger.proj", "vision.projector.layers.0"),
    *norm(_VISUAL + "merger.post_projection_norm", "vision.projector.layers.0.out_norm"),
    *gated_mlp(_VISUAL + "merger.", "vision.projector.layers.1."),
)
IGNORED_KEYS = dict.fromkeys(
    ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"),
    "these tokens surround image placeholders; they are part of the prompt",
) | {
    "video_token_id": "video frames have the placeholder of images",
    "initializer_range": "it affects only the initialization of weights",
}


def dense_family(**options: Any) -> MultimodalFamily:
    """Return a vision-language family with GLM-4-0414 as text model. `options`: arguments of `_glm_v_family`."""
    settings = (
        Only("attention_bias", True),
        decoder_sizes(num_kv_heads=2, eps=1e-5, attention_bias=True, keys=NO_BIAS),
        rope_settings(fraction=1.0, pairing="interleaved", sections=SECTIONS, interleaved_sections=False),
    )
    changes = dict(model_type="glm4v_text", architecture="Glm4vTextModel", settings=settings)
    return _glm_v_family("glm4", changes, vision_type="glm4v_vision", **options)


def sparse_family(**options: Any) -> MultimodalFamily:
    """Return a vision-language family with GLM-4.5 as text model. `options`: arguments of `_glm_v_family`."""
    settings = (
        decoder_sizes(num_kv_heads=8, eps=1e-5, attention_bias=True),
        rope_settings(fraction=0.5, sections=SECTIONS, interleaved_sections=False),
        Only("use_qk_norm", False),
        *v3_router_settings(scale=1.0),
        *expert_settings(num_experts=128, chosen=8, shared=1, expert_dim=1408),
        moe.dense_layers_setting(1),
        DEPTHS,
    )
    changes = dict(model_type="glm4v_moe_text", architecture="Glm4vMoeTextModel", settings=settings)
    return _glm_v_family("glm4_moe", changes, vision_type="glm4v_moe_vision", **options)


def _glm_v_family(
    text_type: str, changes: Mapping[str, Any], *, vision_type: str, image_token: int, **options: Any
) -> MultimodalFamily:
    """Return a vision-language family.

    **Arguments:**

    - `text_type`: `model_type` of the text model's family.
    - `changes`: fields of the text model's family that differ in this family.
    - `vision_type`: `model_type` of the encoder.
    - `image_token`: default of the image placeholder.
    - `options`: other fields of `MultimodalFamily`.
    """
    return MultimodalFamily(
        text_type=text_type,
        changes=changes,
        reads_as_text=True,
        settings=(token("image_token_id", "image_token", image_token), glm_vision_config(vision_type)),
        build=glm_v,
        weights=WEIGHTS,
        text_names=VL_NAMES,
        ignored_keys=IGNORED_KEYS,
        own_settings=nested(*media_keys(IGNORED_KEYS)),
        **options,
    )


_GLM4_IMAGE = 151_343
_IMAGE = 151_363

# GLM-4.1V: GLM-4-0414 with images
GLM4V = dense_family(model_type="glm4v", architecture="Glm4vForConditionalGeneration", image_token=_GLM4_IMAGE)
# GLM-4.5V: GLM-4.5 with images
GLM4V_MOE = sparse_family(model_type="glm4v_moe", architecture="Glm4vMoeForConditionalGeneration", image_token=_IMAGE)
# GLM-4.6V: both text models. Its processor samples video frames in another way.
_GLM46V: dict[str, Any] = dict(
    model_type="glm46v", architecture="Glm46VForConditionalGeneration", image_token=_GLM4_IMAGE
)
GLM46V = dense_family(**_GLM46V, alternatives=(sparse_family(**_GLM46V, writes_fused=True),))

FAMILIES = (GLM4V, GLM4V_MOE, GLM46V)

MODELS = {
    "glm4.1v-9b": ExtendedModel("glm4-0414-9b", _with_vision(13_696, _GLM4_IMAGE)),
    "glm4.5v-106b-a12b": ExtendedModel("glm4.5-air-106b-a12b", _with_vision(10_944, _IMAGE)),
    "glm4.6v-flash-9b": ExtendedModel("glm4-0414-9b", _with_vision(13_696, _IMAGE)),
    "glm4.6v-106b-a12b": ExtendedModel("glm4.5-air-106b-a12b", _with_vision(10_944, _IMAGE)),
}  # fmt: skip
