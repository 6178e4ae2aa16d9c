"""Gemma 3 with images (Gemma Team 2025): a SigLIP encoder (Zhai et al. 2023), its patches averaged to a few tokens.

The tokens of an image attend to all of it, in layers with a window and without.
"""

import dataclasses
import math
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.families._siglip import siglip
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    attention,
    finish,
    norm,
    plain_mlp,
    with_defaults,
    with_spans,
)
from eqx_decoders.families.vision_fields import KERNEL, EncoderSizes, read_sizes, vision_fields, vision_of, write_sizes
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE, VOCAB = 262_144, 262_208


def gemma3_vision(text: DecoderConfig, vision: EncoderConfig, *, image_token: int = IMAGE) -> DecoderConfig:
    """Return a decoder with this encoder, all of whose layers attend to whole images."""
    media = MediaConfig(vision=vision, image_token=image_token, spans=True)
    return dataclasses.replace(with_spans(text), media=media)


# --- config.json ---

# Sizes that published files leave out of text_config.
_DEFAULTS = {
    "vocab_size": VOCAB,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    if config.logit_soft_cap is not None:
        cap = f"final_logit_softcapping={config.logit_soft_cap}"
        raise fields.error(f"text_config: {cap} must be null: transformers ignores it in models with an encoder.")
    for name in ("image_token", "boi_token", "eoi_token"):
        fields.rename(f"{name}_id", f"{name}_index")
    vision = _read_vision(fields, config.embed_dim)
    return gemma3_vision(config, vision, image_token=fields.integer("image_token_index", IMAGE, least=0))


def _read_vision(fields: Fields, out_dim: int) -> EncoderConfig:
    table = vision_fields(fields)
    sizes = read_sizes(table, width=768, heads=12, layers=12, mlp_dim=3072, size=16)
    pixels, size = table.integer("image_size", 224), sizes["size"]
    if pixels % size:
        raise table.error(f"image_size={pixels} must be a multiple of patch_size={size}.")
    side, tokens = pixels // size, fields.integer("mm_tokens_per_image", 256)
    if math.isqrt(tokens) ** 2 != tokens or side % math.isqrt(tokens):
        rule = f"must be a square whose root divides the {side} patches of a side"
        raise fields.error(f"mm_tokens_per_image={tokens} {rule}: they are averages of equally many patches.")
    table.flag("vision_use_head", True)  # nothing reads what it makes
    encoder_sizes = EncoderSizes(
        **sizes,
        out_dim=out_dim,
        merge=side // math.isqrt(tokens),
        activation=table.word("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    encoder = siglip(encoder_sizes, side=side, eps=table.number("layer_norm_eps", 1e-6))
    finish(fields, "vision_config", table, {"initializer_range": "of new weights"})
    return encoder


def _write(config: DecoderConfig) -> dict[str, Any]:
    media, vision = vision_of(config)
    mlp: Any = vision.blocks[0].mlp
    stem: Any = vision.stem
    post_norm: Any = vision.post_norm
    return {
        "image_token_index": media.image_token,
        "mm_tokens_per_image": (stem.positions.side // stem.merge) ** 2,
        "vision_config": {
            "model_type": "siglip_vision_model",
            **write_sizes(vision),
            "layer_norm_eps": post_norm.eps,
            "hidden_act": activation_name(mlp.activation),
            "vision_use_head": False,
        },
    }


_LAYER = "vision_tower.encoder.layers.{layer}."
WEIGHTS = (
    Weight(
        "vision_tower.embeddings.patch_embedding.weight",
        "vision.stem.kernel",
        KERNEL,
    ),
    Weight("vision_tower.embeddings.patch_embedding.bias", "vision.stem.bias", "embed -> embed"),
    Weight(
        "vision_tower.embeddings.position_embedding.weight",
        "vision.stem.positions.table",
        "positions embed -> positions embed",
    ),
    *norm(_LAYER + "layer_norm1", "vision.pre_mixer_norm"),
    *norm(_LAYER + "layer_norm2", "vision.pre_mlp_norm"),
    *attention(_LAYER, out="out_proj"),
    *plain_mlp(_LAYER + "mlp.", "fc1", "fc2"),
    *norm("vision_tower.post_layernorm", "vision.post_norm"),
    *norm("multi_modal_projector.mm_soft_emb_norm", "vision.projector.norm"),
    Weight(
        "multi_modal_projector.mm_input_projection_weight",
        "vision.projector.layers.0.kernel",
        "inner outer -> inner outer",
    ),
)
IGNORED_KEYS = {
    "boi_token_index": "a token around placeholders: part of the prompt",
    "eoi_token_index": "a token around placeholders: part of the prompt",
    "initializer_range": "of new weights",
}
FAMILY = MultimodalFamily(
    text="gemma3_text",
    adapt=lambda text: with_defaults(text, _DEFAULTS),
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    read=_read,
    write=_write,
    weights=WEIGHTS,
    names={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ignored_keys=IGNORED_KEYS,
    renamed={
        r"^model\.language_model\.": "language_model.model.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^vision_tower\.vision_model\.": "vision_tower.",
        r"^lm_head\.": "language_model.lm_head.",
    },
    modules={
        r"^language_model\.model\.": "model.language_model.",
        r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
        r"^language_model\.lm_head\.": "lm_head.",
    },
    ignored_tensors=r".*(rotary_emb\.inv_freq|position_ids)|vision_tower\.head\..*",
)


def _with_vision(text: DecoderConfig) -> DecoderConfig:
    sizes = EncoderSizes(embed_dim=1152, layers=27, heads=16, mlp_dim=4304, out_dim=text.embed_dim, size=14, merge=4)
    return gemma3_vision(dataclasses.replace(text, vocab_size=VOCAB), siglip(sizes, side=64))


MODELS = {
    "gemma3-4b-vision": ExtendedModel("gemma3-4b", _with_vision),
    "gemma3-12b-vision": ExtendedModel("gemma3-12b", _with_vision),
    "gemma3-27b-vision": ExtendedModel("gemma3-27b", _with_vision),
}
