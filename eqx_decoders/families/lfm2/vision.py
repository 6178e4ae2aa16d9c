"""LFM2-VL (Liquid AI 2025): LFM2 with images of any shape, encoded by SigLIP 2 (Tschannen et al. 2025)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    linear,
    needs_model_type,
    token,
    with_images,
)
from eqx_decoders.families.setting_rows import Flag, Integer, Number, Only, Renamed, activation, value_at
from eqx_decoders.families.vision_fields import EncoderSizes, encoder_sizes, outer_values, square_grid, vision_config
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE = 396


def siglip2(
    sizes: EncoderSizes,
    *,
    side: int = 16,
    eps: float = 1e-6,
    hidden_dim: int = 2560,
    hidden_activation: str = "gelu",
    bias: bool = True,
    normed: bool = True,
) -> EncoderConfig:
    """Return a SigLIP 2 encoder, whose position embeddings are resized to the patch grid of each image.

    **Arguments:**

    - `sizes`, `eps`: sizes of the encoder, and `eps` of its norms.
    - `side`: rows and columns of the learned position grid.
    - `hidden_dim`, `hidden_activation`, `bias`: width, activation and biases of the projector, an MLP. Its input is the
        concatenation of `sizes.merge x sizes.merge` patches.
    - `normed`: whether the input of the projector is normalized.
    """
    encoder = siglip(sizes, side=side, eps=eps)
    layers = (
        ProjectionConfig(dim=hidden_dim, bias=bias, activation=hidden_activation),
        ProjectionConfig(dim=sizes.out_dim, bias=bias),
    )
    return dataclasses.replace(
        encoder,
        stem=dataclasses.replace(encoder.stem, positions=LearnedGrid(side=side, resample="antialias")),
        projector=ProjectorConfig(group=sizes.merge**2, norm=LayerNormConfig() if normed else None, layers=layers),
    )


# --- config.json ---

_PROJECTOR = "media.vision.projector."
_VISION = vision_config(
    siglip2,
    *encoder_sizes(width=768, heads=12, layers=12, mlp_dim=3072, size=16),
    *outer_values("merge", "hidden_dim", "hidden_activation", "bias", "normed"),
    *square_grid("num_patches", 256),
    Flag("vision_use_head", lambda encoder: False, True, name="_head"),  # the head's output is not used
    activation("hidden_act", "mlp.activation", "gelu_pytorch_tanh"),
    Number("layer_norm_eps", "post_norm.eps", 1e-6),
    model_type="siglip2_vision_model",
    ignored={"initializer_range": "initialization only"},
)
WEIGHTS = (
    *siglip_weights("model.vision_tower."),
    Weight(
        "model.vision_tower.embeddings.patch_embedding.weight",
        "vision.stem.kernel",
        "embed (frames patch_rows patch_columns channels) -> channels frames patch_rows patch_columns embed",
    ),
    *norm("model.multi_modal_projector.layer_norm", "vision.projector.norm"),
    *linear("model.multi_modal_projector.linear_1", "vision.projector.layers.0"),
    *linear("model.multi_modal_projector.linear_2", "vision.projector.layers.1"),
)


def _normalize_tied(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with `tie_word_embeddings` outside of `text_config` as the only key for tied embeddings."""
    tied = content.get("tie_embedding", content.get("tie_word_embeddings", True))
    settings = {key: value for key, value in content.items() if key != "tie_embedding"}
    text = settings.get("text_config")
    if isinstance(text, Mapping):
        settings["text_config"] = {key: value for key, value in text.items() if key != "tie_embedding"}
    return {**settings, "tie_word_embeddings": tied}


FAMILY = MultimodalFamily(
    text_type="lfm2",
    text_settings=(needs_model_type("lfm2"),),
    model_type="lfm2_vl",
    aliases=("lfm2-vl",),  # the spelling of transformers 4
    architecture="Lfm2VlForConditionalGeneration",
    settings=(
        Renamed({"image_token_index": "image_token_id"}),
        Only("vision_feature_layer", -1),
        Only("vision_feature_select_strategy", "default"),
        Integer("downsample_factor", "media.vision.stem.merge", 2, name="_merge"),
        Integer("projector_hidden_size", _PROJECTOR + "layers.0.dim", 2560, name="_hidden_dim"),
        activation("projector_hidden_act", _PROJECTOR + "layers.0.activation", "gelu", name="_hidden_activation"),
        Flag("projector_bias", _PROJECTOR + "layers.0.bias", True, name="_bias"),
        Flag(
            "projector_use_layernorm",
            lambda config: value_at(config, _PROJECTOR + "norm") is not None,
            True,
            name="_normed",
        ),
        _VISION,
        token("image_token_id", "image_token", IMAGE),
    ),
    build=with_images,
    weights=WEIGHTS,
    text_names={"model.": "model.language_model.", "lm_head.": "lm_head."},
    renamed={r"^model\.vision_tower\.vision_model\.": "model.vision_tower."},
    ignored_tensors=r".*(rotary_emb\.inv_freq|position_ids)|model\.vision_tower\.head\..*",
    ignored_keys={
        "do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance max_tiles "
        "min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail": "image processor setting",
    },
    own_settings=_normalize_tied,
)  # fmt: skip

_base = functools.partial(EncoderSizes, embed_dim=768, layers=12, heads=12, mlp_dim=3072, size=16)
_so400m = functools.partial(EncoderSizes, embed_dim=1152, layers=26, heads=16, mlp_dim=4304, size=16)


def _with_vision(text: DecoderConfig, sizes: functools.partial[EncoderSizes]) -> DecoderConfig:
    return with_images(text, siglip2(sizes(out_dim=text.embed_dim)), image_token=IMAGE)


MODELS = {
    "lfm2-vl-450m": ExtendedModel("lfm2-350m", functools.partial(_with_vision, sizes=_base)),
    "lfm2-vl-1.6b": ExtendedModel("lfm2-1.2b", functools.partial(_with_vision, sizes=_so400m)),
}
