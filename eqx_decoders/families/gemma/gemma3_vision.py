"""Gemma 3 with images (Gemma Team 2025), encoded by SigLIP (Zhai et al. 2023).

The encoder averages groups of patches to one token. In all decoder layers, the tokens of an image attend to all tokens
of the image.
"""

import dataclasses
import math

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.multimodal import LANGUAGE_MODEL, ExtendedModel, MultimodalFamily, token, with_spans
from eqx_decoders.families.setting_rows import (
    Check,
    Defaults,
    Flag,
    Integer,
    Number,
    Renamed,
    Rule,
    Values,
    activation,
    value_at,
)
from eqx_decoders.families.vision_fields import EncoderSizes, encoder_sizes, grid_side, vision_config
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.model.decoder_config import DecoderConfig


_IMAGE = 262_144
_VOCAB_SIZE = 262_208


def gemma3_vision(text: DecoderConfig, vision: EncoderConfig, *, image_token: int = _IMAGE) -> DecoderConfig:
    """Return the decoder configuration with a vision encoder.

    In all layers the tokens of an image attend to all tokens of the image. `image_token` is the placeholder token id.
    """
    media = MediaConfig(vision=vision, image_token=image_token, spans=True)
    return dataclasses.replace(with_spans(text), media=media)


# --- config.json ---

# Sizes that published configurations omit from text_config.
_DEFAULTS = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def _read_merge(fields: Fields, values: Values) -> int:
    patches_per_side = values["side"]
    tokens = values["_tokens"]
    tokens_per_side = math.isqrt(tokens)
    if tokens_per_side**2 != tokens or patches_per_side % tokens_per_side:
        raise ConfigError(
            f"mm_tokens_per_image={tokens} must be the square of a divisor of {patches_per_side}: an image has "
            f"{patches_per_side} x {patches_per_side} patches, and each token is the mean of a square of patches."
        )
    return patches_per_side // tokens_per_side


def _tokens_per_image(config: DecoderConfig) -> int:
    stem = value_at(config, "media.vision.stem")
    return (value_at(stem, "positions.side") // stem.merge) ** 2


_VISION = vision_config(
    siglip,
    *encoder_sizes(width=768, heads=12, layers=12, mlp_dim=3072, size=16),
    *grid_side(224),
    Check(
        lambda values: values["_pixels"] % values["size"] == 0,
        "image_size={_pixels} must be a multiple of patch_size={size}.",
    ),
    Rule("merge", _read_merge),
    Flag("vision_use_head", lambda encoder: False, True, name="_head"),  # the output of the head is not used
    activation("hidden_act", "mlp.activation", "gelu_pytorch_tanh"),
    Number("layer_norm_eps", "post_norm.eps", 1e-6),
    model_type="siglip_vision_model",
    ignored={"initializer_range": "only initializes new weights"},
)
_WEIGHTS = (
    *siglip_weights("vision_tower."),
    *norm("multi_modal_projector.mm_soft_emb_norm", "vision.projector.norm"),
    Weight(
        "multi_modal_projector.mm_input_projection_weight",
        "vision.projector.layers.0.kernel",
        "inner outer -> inner outer",
    ),
)
_IGNORED_KEYS = {
    "boi_token_index eoi_token_index": "tokens around placeholders are part of the prompt",
    "initializer_range": "only initializes new weights",
}
FAMILY = MultimodalFamily(
    text_type="gemma3_text",
    text_settings=(Defaults(_DEFAULTS),),
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    settings=(
        Check(
            lambda values: values["text"].logit_soft_cap is None,
            "text_config: final_logit_softcapping={text.logit_soft_cap} must be null, because transformers ignores it "
            "in models with an encoder.",
        ),
        Renamed({f"{name}_id": f"{name}_index" for name in ("image_token", "boi_token", "eoi_token")}),
        Integer("mm_tokens_per_image", _tokens_per_image, 256, name="_tokens"),
        _VISION,
        token("image_token_index", "image_token", _IMAGE),
    ),
    build=gemma3_vision,
    weights=_WEIGHTS,
    ignored_keys=_IGNORED_KEYS,
    text_names=LANGUAGE_MODEL["text_names"],
    renamed={**LANGUAGE_MODEL["renamed"], r"^vision_tower\.vision_model\.": "vision_tower."},
    modules=LANGUAGE_MODEL["modules"],
    ignored_tensors=r".*(rotary_emb\.inv_freq|position_ids)|vision_tower\.head\..*",
)


def _with_vision(text: DecoderConfig) -> DecoderConfig:
    sizes = EncoderSizes(embed_dim=1152, layers=27, heads=16, mlp_dim=4304, out_dim=text.embed_dim, size=14, merge=4)
    return gemma3_vision(dataclasses.replace(text, vocab_size=_VOCAB_SIZE), siglip(sizes, side=64))


MODELS = {
    "gemma3-4b-vision": ExtendedModel("gemma3-4b", _with_vision),
    "gemma3-12b-vision": ExtendedModel("gemma3-12b", _with_vision),
    "gemma3-27b-vision": ExtendedModel("gemma3-27b", _with_vision),
}
