"""Gemma 4 with images (Gemma Team 2026): patches of images of any shape, rotated by column and row, averaged to tokens.

In the larger models the tokens of an image attend to all of it, in layers with a window; in the smaller ones the
encoder's matrices clip their inputs and outputs. A video is its frames: images, one behind the other. The smaller ones
also have an encoder of audio: `gemma4_audio`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedAxes
from eqx_decoders.families.gemma.audio import (
    SETTINGS as AUDIO_SETTINGS,
    WEIGHTS as AUDIO_WEIGHTS,
    gemma4_audio,
    maybe_clipped,
)
from eqx_decoders.families.gemma.text import unused_kv_tensors
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily, attention, linear, token, with_spans
from eqx_decoders.families.settings_table import (
    ABSENT,
    Check,
    Defaults,
    Flag,
    Integer,
    Layers,
    Number,
    Only,
    Rule,
    Values,
    activation,
    value_at,
)
from eqx_decoders.families.vision_fields import EncoderSizes, axial_theta, vision_config
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import Bidirectional, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE, VIDEO, AUDIO = 258_880, 258_884, 258_881


def gemma4_encoder(
    sizes: EncoderSizes,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    positions: int = 10_240,
    theta: float = 100.0,
    eps: float = 1e-6,
    standardize: bool = False,
    clipped: bool = False,
) -> EncoderConfig:
    """Return the encoder of images of any number of patches, of which `merge x merge` are averaged to one token.

    `positions` is the number of columns, and of rows, that have learned positions.
    """
    scaled, plain = RMSNormConfig(eps=eps), RMSNormConfig(eps=eps, scale=False)
    mixer = AttentionConfig(
        num_heads=sizes.heads,
        num_kv_heads=kv_heads or sizes.heads,
        head_dim=head_dim or sizes.embed_dim // sizes.heads,
        mask=Bidirectional(),
        rope=AxialRope(theta=theta, pairing="half_of_axis"),
        query_scale=1.0,
        qk_norm=QKNorm(norm=scaled),
        value_norm=plain,
    )
    block = BlockConfig(
        mixer=mixer,
        mlp=sizes.mlp(gated=True, bias=False),
        pre_mixer_norm=scaled,
        post_mixer_norm=scaled,
        pre_mlp_norm=scaled,
        post_mlp_norm=scaled,
    )
    stem = sizes.stem(
        bias=False,
        positions=LearnedAxes(size=positions),
        pixel_scale=2.0,
        pixel_shift=-1.0,
        coordinates="column_row",
    )
    projector = ProjectorConfig(
        group=sizes.merge**2,
        combine="mean",
        scale=sizes.embed_dim**0.5,
        standardize=standardize,
        norm=plain,
        layers=(ProjectionConfig(dim=sizes.out_dim),),
    )
    blocks = (block,) * sizes.layers
    return EncoderConfig(embed_dim=sizes.embed_dim, stem=stem, blocks=blocks, projector=projector, clipped=clipped)


def gemma4_vision(
    text: DecoderConfig,
    vision: EncoderConfig | None,
    *,
    whole: bool,
    audio: EncoderConfig | None = None,
    image_token: int = IMAGE,
    video_token: int = VIDEO,
    audio_token: int = AUDIO,
    lookup_token: int = 0,
) -> DecoderConfig:
    """Return a decoder with these encoders; `whole`: whether layers with a window attend to whole images.

    `lookup_token` is the token that per-layer embeddings read in place of placeholders.
    """
    media = MediaConfig(
        vision=vision,
        audio=audio,
        image_token=image_token,
        video_token=video_token,
        audio_token=None if audio is None else audio_token,
        spans=whole,
        lookup_token=lookup_token,
    )
    text = with_spans(text, lambda mixer: isinstance(mixer.mask, SlidingWindow)) if whole else text
    return dataclasses.replace(text, media=media)


# --- config.json ---

_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}


def _has_encoder(values: Values) -> bool:
    return values["vision"] is not None or values["audio"] is not None


def _lookup_token(fields: Fields, values: Values) -> int:
    return Fields(fields.content["text_config"], f"{fields.where}: text_config").integer("pad_token_id", 0, least=0)


# the settings of the decoder that depend on its encoders
_TEXT = (
    Rule(
        "",
        lambda fields, values: None,
        lambda config: {
            "use_bidirectional_attention": "vision" if value_at(config, "media.spans") else None,
            "pad_token_id": value_at(config, "media.lookup_token"),
        },
    ),
)


_IGNORED_VISION_KEYS = {
    "initializer_range": "of new weights",
    "default_output_length": "how large processors make images",
    "global_head_dim": "no layer of an encoder has a window",
}
_VISION = vision_config(
    gemma4_encoder,
    Only("attention_bias", False),  # transformers has the key and never applies it
    Integer("hidden_size", "embed_dim", 768),
    Layers("num_hidden_layers", "blocks", 16, name="layers"),
    Integer("num_attention_heads", "attention.num_heads", 12, name="heads"),
    Integer("intermediate_size", "mlp.mlp_dim", 3072),
    Integer("patch_size", "stem.size", 16),
    Integer("pooling_kernel_size", "stem.merge", 3),
    activation("hidden_activation", "mlp.activation", "gelu_pytorch_tanh"),
    Integer("num_key_value_heads", "attention.num_kv_heads", 12, name="kv_heads"),
    Integer("head_dim", "attention.head_dim", 64),
    Integer("position_embedding_size", "stem.positions.size", 10_240, name="positions"),
    axial_theta("axial", "default", default=100.0, key=""),  # the two are the same here
    Number("rms_norm_eps", "attention.value_norm.eps", 1e-6),
    Flag("standardize", "projector.standardize", False),
    Flag("use_clipped_linears", "clipped", False),
    model_type="gemma4_vision",
    ignored=_IGNORED_VISION_KEYS,
    what="",
)


def _audio_token(config: DecoderConfig) -> Any:
    media = value_at(config, "media")
    return ABSENT if media.audio is None else media.audio_token


_BESIDE = ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
IGNORED_KEYS = dict.fromkeys(_BESIDE, "a token around placeholders") | {
    "audio_token_id": "of a model without an encoder of audio",
    "initializer_range": "of new weights",
    "vision_soft_tokens_per_image": "how large processors make images",
    "vision_soft_tokens_per_video_frame": "how large processors make images",
    "audio_soft_tokens_per_image": "how long processors make audio",
    "audio_ms_per_token": "how long processors make audio",
}


def _maybe_clipped(rows: tuple[Weight, ...]) -> Iterator[Weight]:
    """Yield the rows of projections, without and with the bounds of inputs and outputs; other rows unchanged."""
    for row in rows:
        yield from maybe_clipped(row) if row.name.endswith("_proj.weight") else (row,)


_LAYER = "model.vision_tower.encoder.layers.{layer}."
_NORMS = {
    "vision.pre_mixer_norm": "input_layernorm",
    "vision.post_mixer_norm": "post_attention_layernorm",
    "vision.pre_mlp_norm": "pre_feedforward_layernorm",
    "vision.post_mlp_norm": "post_feedforward_layernorm",
}
WEIGHTS = (
    Weight(
        "model.vision_tower.patch_embedder.input_proj.weight",
        "vision.stem.kernel",
        "embed (frames patch_rows patch_columns channels) -> channels frames patch_rows patch_columns embed",
    ),
    Weight(
        "model.vision_tower.patch_embedder.position_embedding_table",
        "vision.stem.positions.table",
        "coordinates positions embed -> coordinates positions embed",
    ),
    *_maybe_clipped(attention(_LAYER)),
    *_maybe_clipped(gated_mlp(_LAYER + "mlp.", "vision.mlp.")),
    *norm_weights(_LAYER, **_NORMS),
    Weight("model.vision_tower.std_bias", "vision.projector.bias", "norm -> norm"),
    Weight("model.vision_tower.std_scale", "vision.projector.scale", "norm -> norm"),
    *linear("model.embed_vision.embedding_projection", "vision.projector.layers.0"),
    *AUDIO_WEIGHTS,
)
_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
FAMILY = MultimodalFamily(
    text_type="gemma4_text",
    text_settings=(Defaults(_DEFAULTS), *_TEXT),
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    settings=(
        _VISION,
        AUDIO_SETTINGS,
        Check(_has_encoder, "vision_config is missing: it describes the encoder. Without one: text_only=True."),
        Rule("whole", lambda fields, _: fields.content["text_config"].get("use_bidirectional_attention") == "vision"),
        token("image_token_id", "image_token", IMAGE),
        token("video_token_id", "video_token", VIDEO),
        dataclasses.replace(token("audio_token_id", "audio_token", AUDIO), path=_audio_token, name="audio_token"),
        Rule("lookup_token", _lookup_token),
    ),
    build=gemma4_vision,
    weights=WEIGHTS,
    text_names=_NAMES,
    ignored_keys=IGNORED_KEYS,
    ignored_tensors=lambda config: unused_kv_tensors(config, _NAMES["model."]),
)

_large = functools.partial(EncoderSizes, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=16, merge=3)
_small = functools.partial(EncoderSizes, embed_dim=768, layers=16, heads=12, mlp_dim=3072, size=16, merge=3)


def _with_large_vision(text: DecoderConfig) -> DecoderConfig:
    return gemma4_vision(text, gemma4_encoder(_large(out_dim=text.embed_dim), standardize=True), whole=True)


def _with_small_vision_and_audio(text: DecoderConfig) -> DecoderConfig:
    """Add encoders; that of audio is transformers' `Gemma4AudioConfig`, whose defaults are said to be e2b's."""
    vision = gemma4_encoder(_small(out_dim=text.embed_dim), clipped=True)
    return gemma4_vision(text, vision, whole=False, audio=gemma4_audio(out_dim=text.embed_dim))


MODELS = {
    "gemma4-e2b-vision": ExtendedModel("gemma4-e2b", _with_small_vision_and_audio),
    "gemma4-e4b-vision": ExtendedModel("gemma4-e4b", _with_small_vision_and_audio),
    "gemma4-26b-vision": ExtendedModel("gemma4-26b", _with_large_vision),
    "gemma4-31b-vision": ExtendedModel("gemma4-31b", _with_large_vision),
}
