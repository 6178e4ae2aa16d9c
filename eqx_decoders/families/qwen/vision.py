"""Qwen3-VL (Bai et al. 2025) and Qwen3.5 (Qwen Team 2026) with images and videos.

Qwen3-Omni uses the same vision encoder.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.blocks.block import ExtraLayerConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, decoder_sizes, llama_weights, plain_mlp
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily, encoder_layer, linear, token, with_rope
from eqx_decoders.families.qwen.text import VL_SECTIONS, sparse_text_settings
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check, Integer, Numbers, Only, Setting, Table, activation
from eqx_decoders.families.vision_fields import (
    KERNEL_IN_TIME,
    EncoderSizes,
    axial_theta,
    encoder_sizes,
    square_grid,
    vision_config,
)
from eqx_decoders.families.weight_rows import Weight, norm, sharing
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = LayerNormConfig(eps=1e-6)
_MAX_DEEPSTACK_LEVELS = 8  # maximum number of DeepStack levels whose tensors are mapped


def qwen_vision(
    sizes: EncoderSizes,
    *,
    deepstack: tuple[int, ...] = (),
    frames: int = 2,
    side: int = 48,
    theta: float = 10_000.0,
) -> EncoderConfig:
    """Return the configuration of the vision encoder of Qwen3-VL.

    **Arguments:**

    - `sizes`: sizes of the encoder.
    - `deepstack`: indices of encoder layers whose outputs are added to the decoder (DeepStack).
    - `frames`: number of video frames per patch.
    - `side`: number of rows and columns of the grid of learned positions, which is resampled for each image.
    - `theta`: base of the rotary embedding.
    """
    block = encoder_layer(sizes.embed_dim, sizes.heads, sizes.mlp(), _NORM, rope=AxialRope(theta=theta))
    merged_dim = sizes.embed_dim * sizes.merge**2
    layers = (
        ProjectionConfig(dim=merged_dim, bias=True, activation="gelu"),
        ProjectionConfig(dim=sizes.out_dim, bias=True),
    )
    projector = ProjectorConfig(group=sizes.merge**2, norm=_NORM, norm_of="patches", layers=layers)
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=sizes.stem(frames=frames, positions=LearnedGrid(side=side, resample="bilinear")),
        blocks=(block,) * sizes.layers,
        projector=projector,
        deepstack=deepstack,
        deepstack_projector=dataclasses.replace(projector, norm_of="groups") if deepstack else None,
    )


def with_media(config: DecoderConfig, media: MediaConfig) -> DecoderConfig:
    """Return the configuration with encoders.

    The DeepStack features of the vision encoder are added to the residual stream after the first decoder layers. Raises
    ConversionError if the decoder has fewer layers than DeepStack levels.
    """
    num_levels = 0 if media.vision is None else len(media.vision.deepstack)
    num_layers = len(config.blocks)
    if num_levels > num_layers:
        raise ConversionError(
            f"EncoderConfig.deepstack (deepstack_visual_indexes) has {num_levels} entries, but the decoder has only "
            f"{num_layers} layers: each entry needs a decoder layer. Remove entries or add decoder layers."
        )
    added_features = ExtraLayerConfig(layer=AddedFeaturesConfig())
    blocks = tuple(
        dataclasses.replace(block, post_layers=(*block.post_layers, added_features)) if layer < num_levels else block
        for layer, block in enumerate(config.blocks)
    )
    return dataclasses.replace(config, blocks=blocks, media=media)


QWEN_KEYS = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth", "num_channels": "in_channels"}
SAME_OUT_DIM = Check(
    lambda values: values["_out_dim"] == values["out_dim"],
    "out_hidden_size={_out_dim} must be the decoder's hidden_size={out_dim}.",
)


def qwen_vision_config(model_type: str, *, deepstack: tuple[int, ...] = ()) -> Table:
    """Return the settings of `vision_config`. `deepstack` is the default of `deepstack_visual_indexes`."""
    return vision_config(
        qwen_vision,
        *square_grid("num_position_embeddings", 2304),
        Integer("out_hidden_size", "projector.out_dim", lambda values: values["out_dim"], name="_out_dim"),
        SAME_OUT_DIM,
        *encoder_sizes(width=1152, heads=16, layers=27, mlp_dim=4304, size=16, keys=QWEN_KEYS),
        Integer("spatial_merge_size", "stem.merge", 2),
        activation("hidden_act", "mlp.activation", "gelu_pytorch_tanh"),
        Numbers("deepstack_visual_indexes", "deepstack", deepstack),
        Check(
            lambda values: len(values["deepstack"]) <= _MAX_DEEPSTACK_LEVELS,
            f"deepstack_visual_indexes={{deepstack}} must have at most {_MAX_DEEPSTACK_LEVELS} entries: remove some.",
        ),
        Integer("temporal_patch_size", "stem.frames", 2),
        axial_theta("axial", "default", key=""),
        Only("apply_vit_abs_pos_embed", True),
        model_type=model_type,
        ignored=IGNORED_VISION_KEYS,
    )  # fmt: skip


IGNORED_VISION_KEYS = {
    "initializer_range": "only initializes new weights",
    "tie_word_embeddings": "an encoder has no word embeddings",
    "image_size": "images of any size are supported",
    "spatial_patch_size": "patch_size is read instead",
    "in_chans": "in_channels is read instead",
    "tokens_per_second": "not used, or read outside of these settings",
}


def media_tokens(image: int, video: int) -> tuple[Setting, ...]:
    """Return the settings of the placeholder token ids of images and videos, with these defaults."""
    return token("image_token_id", "image_token", image), token("video_token_id", "video_token", video)


MARKER_TOKEN_REASON = "tokens around placeholders are part of the prompt"
_MARKER_TOKEN_KEYS = ("vision_start_token_id", "vision_end_token_id", "vision_token_id")
IGNORED_KEYS = dict.fromkeys(_MARKER_TOKEN_KEYS, MARKER_TOKEN_REASON) | {
    "initializer_range": "only initializes new weights"
}


def media_keys(ignored: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of placeholder token ids, and the ignored keys of other token ids."""
    return ("image_token_id", "video_token_id", *(key for key in ignored if key.endswith("token_id")))


def vision_weights(
    visual: str, merger: str, deepstack: str, *, fc1: str, fc2: str, norm_name: str
) -> tuple[Weight, ...]:
    """Return the weight rows of the vision encoder and its projectors.

    **Arguments:**

    - `visual`, `merger`, `deepstack`: tensor name prefixes of the encoder, of its projector, and of the projectors of
        DeepStack levels.
    - `fc1`, `fc2`, `norm_name`: names of the linear layers and of the norm of a projector.
    """
    layer = visual + "blocks.{layer}."
    rows = [
        Weight(visual + "patch_embed.proj.weight", "vision.stem.kernel", KERNEL_IN_TIME),
        Weight(visual + "patch_embed.proj.bias", "vision.stem.bias", "embed -> embed"),
        Weight(visual + "pos_embed.weight", "vision.stem.positions.table", "positions embed -> positions embed"),
        *norm(layer + "norm1", "vision.pre_mixer_norm"),
        *norm(layer + "norm2", "vision.pre_mlp_norm"),
        *joint_attention(layer),
        *plain_mlp(layer + "mlp.", "vision.mlp.", "linear_fc1", "linear_fc2"),
    ]
    projectors = {merger: "vision.projector"}
    projectors |= {f"{deepstack}{level}.": f"vision.deepstack.{level}" for level in range(_MAX_DEEPSTACK_LEVELS)}
    for prefix, path in projectors.items():
        rows += norm(prefix + norm_name, f"{path}.norm")
        rows += linear(prefix + fc1, f"{path}.layers.0")
        rows += linear(prefix + fc2, f"{path}.layers.1")
    return tuple(rows)


def joint_attention(layer: str) -> tuple[Weight, ...]:
    """Return the weight rows of attention whose queries, keys and values share one matrix."""
    return (
        *_qkv(layer + "attn.qkv.weight", "", "({heads} head_dim) embed -> embed {heads} head_dim"),
        *_qkv(layer + "attn.qkv.bias", "_bias", "({heads} head_dim) -> {heads} head_dim"),
        Weight(layer + "attn.proj.weight", "vision.mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        Weight(layer + "attn.proj.bias", "vision.mixer.out_bias", "embed -> embed"),
    )


def _qkv(name: str, suffix: str, pattern: str) -> tuple[Weight, ...]:
    heads = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    return sharing(
        name, *((f"vision.mixer.{kind}{suffix}", pattern.format(heads=axis)) for kind, axis in heads.items())
    )


# --- Qwen3-VL ---

IMAGE, VIDEO = 151_655, 151_656
VL_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
VL_WEIGHTS = vision_weights(
    "model.visual.",
    "model.visual.merger.",
    "model.visual.deepstack_merger_list.",
    fc1="linear_fc1",
    fc2="linear_fc2",
    norm_name="norm",
)
_small = functools.partial(EncoderSizes, embed_dim=768, layers=12, heads=12, mlp_dim=3072, size=16)
_medium = functools.partial(EncoderSizes, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, size=16)
LARGE = functools.partial(EncoderSizes, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=16)
LARGE_DEEPSTACK = (8, 16, 24)


def qwen3_vl(
    text: DecoderConfig, vision: EncoderConfig, *, image_token: int = IMAGE, video_token: int = VIDEO
) -> DecoderConfig:
    """Return the decoder configuration with a vision encoder and M-RoPE positions.

    `image_token` and `video_token` are the placeholder token ids.
    """
    media = MediaConfig(vision=vision, image_token=image_token, video_token=video_token, positions=GridPositions())
    return with_media(text, media)


def _with_vl_vision(
    text: DecoderConfig,
    sizes: functools.partial[EncoderSizes] = LARGE,
    deepstack: tuple[int, ...] = LARGE_DEEPSTACK,
) -> DecoderConfig:
    """Return a Qwen3 configuration with M-RoPE and a vision encoder of the given sizes."""
    vision = qwen_vision(sizes(out_dim=text.embed_dim), deepstack=deepstack)
    return qwen3_vl(with_rope(text, theta=5e6, sections=VL_SECTIONS), vision)


def _qwen3_vl_family(
    text_type: str, changes: Mapping[str, Any], *, encoder_type: str, **options: Any
) -> MultimodalFamily:
    """Return the family that adds a vision encoder to a Qwen3 text family.

    **Arguments:**

    - `text_type`: `model_type` of the text family.
    - `changes`: fields of the text family that differ.
    - `encoder_type`: `model_type` of the encoder.
    - `options`: further fields of `MultimodalFamily`.
    """
    return MultimodalFamily(
        text_type=text_type,
        changes=changes,
        reads_as_text=True,
        settings=(*media_tokens(IMAGE, VIDEO), qwen_vision_config(encoder_type, deepstack=LARGE_DEEPSTACK)),
        build=qwen3_vl,
        weights=VL_WEIGHTS,
        text_names=VL_NAMES,
        ignored_keys=IGNORED_KEYS,
        **options,
    )


# --- Qwen3.5 ---

_QWEN3_5_IMAGE, _QWEN3_5_VIDEO = 248_056, 248_057


def _qwen3_5_family(text_type: str, *, model_type: str, architecture: str) -> MultimodalFamily:
    """Return the family that adds a vision encoder to the Qwen3.5 text family `text_type`."""
    return MultimodalFamily(
        text_type=text_type,
        model_type=model_type,
        architecture=architecture,
        settings=(*media_tokens(_QWEN3_5_IMAGE, _QWEN3_5_VIDEO), qwen_vision_config(f"{model_type}_vision")),
        build=qwen3_vl,
        weights=VL_WEIGHTS,
        text_names=VL_NAMES | {"mtp.": "mtp."},  # the MTP layers are not part of `model.language_model`
        ignored_keys=IGNORED_KEYS,
    )


def qwen3_5_vision(text: DecoderConfig, vision: EncoderConfig) -> DecoderConfig:
    """Return the decoder configuration with a vision encoder and the published placeholder token ids."""
    return qwen3_vl(text, vision, image_token=_QWEN3_5_IMAGE, video_token=_QWEN3_5_VIDEO)


def _with_large_vision(text: DecoderConfig) -> DecoderConfig:
    return qwen3_5_vision(text, qwen_vision(LARGE(out_dim=text.embed_dim)))


# --- Qwen3-VL: DeepStack adds features of images and videos after the first three decoder layers ---


QWEN3_VL = _qwen3_vl_family(
    "qwen3",
    dict(
        model_type="qwen3_vl_text",
        architecture="Qwen3VLTextModel",
        settings=(
            decoder_sizes(num_kv_heads=32, head_dim=128),
            rope_settings(theta=500_000.0, sections=VL_SECTIONS),
        ),
        ignored_keys={},
    ),
    model_type="qwen3_vl",
    encoder_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
)


def _with_medium_vl_vision(text: DecoderConfig) -> DecoderConfig:
    return _with_vl_vision(text, _medium, (5, 11, 17))


# --- Qwen3-VL with experts ---


_MLP = LAYER + "mlp."

# Published checkpoints store expert matrices as `[in, out]`. transformers 5 also writes `[out, in]`.
_TRANSPOSED = moe.fused_experts(_MLP, gate_up="experts embed mlp", down="experts mlp embed")
QWEN3_VL_MOE = _qwen3_vl_family(
    "qwen3_moe",
    dict(
        model_type="qwen3_vl_moe_text",
        architecture="Qwen3VLMoeTextModel",
        settings=(
            Only("norm_topk_prob", True, written=True),  # transformers always renormalizes
            *sparse_text_settings(
                num_kv_heads=16, mlp_dim=5632, expert_dim=1408, num_experts=60, num_experts_per_token=4, theta=500_000.0
            ),
        ),
        weights=llama_weights(experts=moe.fused_experts(_MLP)),
        fused=(),
        transposed=_TRANSPOSED,
    ),
    model_type="qwen3_vl_moe",
    encoder_type="qwen3_vl_moe_vision",
    architecture="Qwen3VLMoeForConditionalGeneration",
    # The configuration class of the decoder defaults to tied embeddings, but the outer value takes precedence.
    own_settings=lambda content: {"tie_word_embeddings": False, **content},
)


# --- Qwen3.5: M-RoPE in the attention layers ---


QWEN3_5 = _qwen3_5_family("qwen3_5_text", model_type="qwen3_5", architecture="Qwen3_5ForConditionalGeneration")


def _with_small_vision(text: DecoderConfig) -> DecoderConfig:
    return qwen3_5_vision(text, qwen_vision(_small(out_dim=text.embed_dim)))


def _with_medium_vision(text: DecoderConfig) -> DecoderConfig:
    return qwen3_5_vision(text, qwen_vision(_medium(out_dim=text.embed_dim)))


# --- Qwen3.5 with experts ---


QWEN3_5_MOE = _qwen3_5_family(
    "qwen3_5_moe_text", model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration"
)


FAMILIES = (QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_MOE)

MODELS = {
    "qwen3-vl-2b": ExtendedModel("qwen3-1.7b", _with_medium_vl_vision),
    "qwen3-vl-4b": ExtendedModel("qwen3-4b", _with_medium_vl_vision),
    "qwen3-vl-8b": ExtendedModel("qwen3-8b", _with_vl_vision),
    "qwen3-vl-32b": ExtendedModel("qwen3-32b", _with_vl_vision),
    "qwen3-vl-30b-a3b": ExtendedModel("qwen3-30b-a3b", _with_vl_vision),
    "qwen3-vl-235b-a22b": ExtendedModel("qwen3-235b-a22b", _with_vl_vision),
    "qwen3.5-0.8b-vision": ExtendedModel("qwen3.5-0.8b", _with_small_vision),
    "qwen3.5-2b-vision": ExtendedModel("qwen3.5-2b", _with_medium_vision),
    "qwen3.5-4b-vision": ExtendedModel("qwen3.5-4b", _with_medium_vision),
    "qwen3.5-9b-vision": ExtendedModel("qwen3.5-9b", _with_large_vision),
    "qwen3.5-27b-vision": ExtendedModel("qwen3.5-27b", _with_large_vision),
    "qwen3.5-35b-a3b-vision": ExtendedModel("qwen3.5-35b-a3b", _with_large_vision),
    "qwen3.5-122b-a10b-vision": ExtendedModel("qwen3.5-122b-a10b", _with_large_vision),
    "qwen3.5-397b-a17b-vision": ExtendedModel("qwen3.5-397b-a17b", _with_large_vision),
}  # fmt: skip
