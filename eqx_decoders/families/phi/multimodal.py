"""Phi-4 multimodal (Microsoft 2025): Phi-4 mini with images and audio.

Images are split into tiles, which SigLIP encodes separately.
"""

import dataclasses
import functools
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.geometry import TilesConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.families._siglip import siglip, siglip_weights
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily, linear, nested, token
from eqx_decoders.families.phi.audio import AUDIO, SETTINGS as AUDIO_SETTINGS, WEIGHTS as AUDIO_WEIGHTS, phi4_audio
from eqx_decoders.families.setting_rows import Check, Integer, Number, Rule, Values, activation, value_at
from eqx_decoders.families.vision_fields import EncoderSizes, encoder_sizes, grid_side, vision_config
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.model.decoder_config import DecoderConfig


_IMAGE = 200_010


def phi4_vision(sizes: EncoderSizes, *, side: int, depth: int, eps: float = 1e-6) -> EncoderConfig:
    """Return the configuration of the vision encoder: SigLIP, applied to tiles.

    **Arguments:**

    - `sizes`: sizes of the encoder. The projector reads the mean of `merge x merge` patches.
    - `side`: number of rows and columns of patches in a tile.
    - `depth`: number of layers after which features are taken.
    - `eps`: epsilon of the norms.
    """
    encoder = siglip(sizes, side=side, eps=eps)
    layers = (
        ProjectionConfig(dim=sizes.out_dim, bias=True, activation="gelu"),
        ProjectionConfig(dim=sizes.out_dim, bias=True),
    )
    return dataclasses.replace(
        encoder,
        stem=dataclasses.replace(encoder.stem, positions=LearnedGrid(side=side, resample="fraction")),
        depths=(depth,),
        tiles=TilesConfig(side=side * sizes.size, sizes=(), whole="last", projected=True),
        projector=ProjectorConfig(group=sizes.merge**2, combine="mean", layers=layers),
    )


def phi4_multimodal(
    text: DecoderConfig, vision: EncoderConfig, audio: EncoderConfig, *, image_token: int, audio_token: int
) -> DecoderConfig:
    """Return the decoder configuration with encoders and the ids of their placeholder tokens."""
    media = MediaConfig(vision=vision, audio=audio, image_token=image_token, audio_token=audio_token)
    return dataclasses.replace(text, media=media)


# --- config.json ---


def _read_depth(fields: Fields, values: Values) -> int:
    """Return the number of layers after which features are taken.

    `feature_layer` is an index into `hidden_states` of transformers, which starts with the input of the first layer.
    """
    feature_layer = fields.take("feature_layer", -2)
    num_layers = values["layers"]
    num_states = num_layers + 1
    if type(feature_layer) is not int or not -num_states <= feature_layer < num_states:
        raise fields.error(
            f"feature_layer={abbreviate(feature_layer)} must be an integer from {-num_states} to {num_layers}, because "
            f"num_hidden_layers={num_layers}."
        )
    return feature_layer % num_states


def _write_depth(encoder: EncoderConfig) -> dict[str, Any]:
    return {"feature_layer": value_at(encoder, "depths.0") - len(encoder.blocks) - 1}


_VISION = vision_config(
    phi4_vision,
    *encoder_sizes(width=1152, heads=16, layers=27, mlp_dim=4304, size=14),
    *grid_side(448),
    Integer("crop_size", "tiles.side", 448, name="_crop"),
    Check(
        lambda values: values["_crop"] == values["_pixels"] and values["_crop"] % (2 * values["size"]) == 0,
        "crop_size={_crop} must equal image_size={_pixels}, and be a multiple of 2 x patch_size={size}.",
    ),
    activation("hidden_act", "mlp.activation", "gelu_pytorch_tanh"),
    Number("layer_norm_eps", "post_norm.eps", 1e-6),
    Rule("depth", _read_depth, _write_depth),
    model_type="phi4_multimodal_vision",
    ignored={"initializer_range": "only initializes new weights"},
)
_EMBED = "model.embed_tokens_extend.image_embed."
_ENCODER = _EMBED + "img_processor."
_WEIGHTS = (
    *siglip_weights(_ENCODER),
    *linear(_EMBED + "img_projection_up", "vision.projector.layers.0"),
    *linear(_EMBED + "img_projection_down", "vision.projector.layers.1"),
    Weight(_EMBED + "sub_img_feature_extensor", "vision.line_end", "1 1 1 embed -> embed"),
    Weight(_EMBED + "global_img_feature_extensor", "vision.divider", "1 1 embed -> embed"),
    *AUDIO_WEIGHTS,
)
_TEXT_PREFIXES = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
FAMILY = MultimodalFamily(
    text_type="phi3",
    model_type="phi4_multimodal",
    architecture="Phi4MultimodalForCausalLM",
    settings=(
        dataclasses.replace(_VISION, settings=(*_VISION.settings, token("image_token_id", "image_token", _IMAGE))),
        AUDIO_SETTINGS,
    ),
    build=phi4_multimodal,
    weights=_WEIGHTS,
    flat=True,
    text_names={prefix: prefix for prefix in _TEXT_PREFIXES},
    # The output of SigLIP's head is not used.
    ignored_tensors=r".*(rotary_emb\.inv_freq|position_ids)|" + _ENCODER.replace(".", r"\.") + r"head\..*",
    own_settings=nested("audio_config"),
    auto_class="AutoModelForCausalLM",
)

_so400m = functools.partial(EncoderSizes, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=14)


def _with_encoders(text: DecoderConfig) -> DecoderConfig:
    vision = phi4_vision(_so400m(out_dim=text.embed_dim), side=32, depth=26)
    audio = phi4_audio(out_dim=text.embed_dim)
    return phi4_multimodal(text, vision, audio, image_token=_IMAGE, audio_token=AUDIO)


MODELS = {"phi4-multimodal-4.7b": ExtendedModel("phi4-mini-3.8b", _with_encoders)}
