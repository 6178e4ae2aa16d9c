"""Gemma 4 with images, videos and audio (Gemma Team 2026).

The vision encoder accepts images of any shape. Its queries and keys are rotated by the column and row of a patch, and
it averages groups of patches to one token. The frames of a video are images, one after another. In the larger models,
the tokens of an image attend to all tokens of the image in decoder layers with a sliding window. In the smaller models,
the linear layers of the encoder clip their inputs and outputs. The smaller models also have an audio encoder,
`gemma4_audio`.
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
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    encoder_attention,
    linear,
    token,
    with_spans,
)
from eqx_decoders.families.setting_rows import (
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


_IMAGE, _VIDEO, _AUDIO = 258_880, 258_884, 258_881


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
    """Return the configuration of the vision encoder, which averages `merge x merge` patches to one token.

    **Arguments:**

    - `sizes`: sizes of the encoder.
    - `kv_heads`: number of key and value heads; None: the number of query heads.
    - `head_dim`: features per head; None: `embed_dim / heads`.
    - `positions`: number of learned positions for columns, and for rows.
    - `theta`: base of the rotary embedding.
    - `eps`: epsilon of the norms.
    - `standardize`: whether the projector standardizes features with a mean and a scale from the checkpoint.
    - `clipped`: whether linear layers clip their inputs and outputs.
    """
    norm = RMSNormConfig(eps=eps)
    norm_without_scale = RMSNormConfig(eps=eps, scale=False)
    mixer = AttentionConfig(
        num_heads=sizes.heads,
        num_kv_heads=kv_heads or sizes.heads,
        head_dim=head_dim or sizes.embed_dim // sizes.heads,
        mask=Bidirectional(),
        rope=AxialRope(theta=theta, pairing="half_of_axis"),
        query_scale=1.0,
        qk_norm=QKNorm(norm=norm),
        value_norm=norm_without_scale,
    )
    block = BlockConfig(
        mixer=mixer,
        mlp=sizes.mlp(gated=True, bias=False),
        pre_mixer_norm=norm,
        post_mixer_norm=norm,
        pre_mlp_norm=norm,
        post_mlp_norm=norm,
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
        norm=norm_without_scale,
        layers=(ProjectionConfig(dim=sizes.out_dim),),
    )
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=stem,
        blocks=(block,) * sizes.layers,
        projector=projector,
        clipped=clipped,
    )


def gemma4_vision(
    text: DecoderConfig,
    vision: EncoderConfig | None,
    *,
    image_spans: bool,
    audio: EncoderConfig | None = None,
    image_token: int = _IMAGE,
    video_token: int = _VIDEO,
    audio_token: int = _AUDIO,
    lookup_token: int = 0,
) -> DecoderConfig:
    """Return the decoder configuration with encoders.

    **Arguments:**

    - `text`: configuration of the decoder.
    - `vision`, `audio`: configurations of the encoders; None: no such encoder.
    - `image_spans`: whether the tokens of an image attend to all tokens of the image in layers with a sliding window.
    - `image_token`, `video_token`, `audio_token`: ids of the placeholder tokens.
    - `lookup_token`: token id that per-layer embeddings look up for placeholders.
    """
    if image_spans:
        text = with_spans(text, lambda mixer: isinstance(mixer.mask, SlidingWindow))
    media = MediaConfig(
        vision=vision,
        audio=audio,
        image_token=image_token,
        video_token=video_token,
        audio_token=None if audio is None else audio_token,
        spans=image_spans,
        lookup_token=lookup_token,
    )
    return dataclasses.replace(text, media=media)


# --- config.json ---

# Sizes that published configurations omit from text_config.
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
    text_fields = Fields(fields.content["text_config"], f"{fields.where}: text_config")
    return text_fields.integer("pad_token_id", 0, least=0)


# Settings in text_config that depend on the encoders.
_TEXT_SETTINGS = (
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
    "initializer_range": "only initializes new weights",
    "default_output_length": "only determines the image size in processors",
    "global_head_dim": "all layers of the encoder have the same head_dim",
}
_VISION = vision_config(
    gemma4_encoder,
    Only("attention_bias", False),  # transformers writes this key, but does not use it
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
    axial_theta("axial", "default", default=100.0, key=""),  # both types are equivalent for this encoder
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


_MARKER_TOKEN_KEYS = "boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index"
_IGNORED_KEYS = {
    _MARKER_TOKEN_KEYS: "tokens around placeholders are part of the prompt",
    "audio_token_id": "not used without an audio encoder",
    "initializer_range": "only initializes new weights",
    "vision_soft_tokens_per_image vision_soft_tokens_per_video_frame": "only determines the image size in processors",
    "audio_soft_tokens_per_image audio_ms_per_token": "only determines the length of audio clips in processors",
}


def _maybe_clipped(rows: tuple[Weight, ...]) -> Iterator[Weight]:
    """Yield the weight rows of layers whose linear layers may be clipped; see `maybe_clipped`."""
    for row in rows:
        if row.name.endswith("_proj.weight"):
            yield from maybe_clipped(row)
        else:
            yield row


_LAYER = "model.vision_tower.encoder.layers.{layer}."
_NORMS = {
    "vision.pre_mixer_norm": "input_layernorm",
    "vision.post_mixer_norm": "post_attention_layernorm",
    "vision.pre_mlp_norm": "pre_feedforward_layernorm",
    "vision.post_mlp_norm": "post_feedforward_layernorm",
}
_WEIGHTS = (
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
    *_maybe_clipped(encoder_attention(_LAYER)),
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
    text_settings=(Defaults(_DEFAULTS), *_TEXT_SETTINGS),
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    settings=(
        _VISION,
        AUDIO_SETTINGS,
        Check(
            _has_encoder,
            "vision_config is missing: it describes the vision encoder. To load the decoder without encoders, pass "
            "text_only=True.",
        ),
        Rule(
            "image_spans",
            lambda fields, _: fields.content["text_config"].get("use_bidirectional_attention") == "vision",
        ),
        token("image_token_id", "image_token", _IMAGE),
        token("video_token_id", "video_token", _VIDEO),
        dataclasses.replace(token("audio_token_id", "audio_token", _AUDIO), path=_audio_token, name="audio_token"),
        Rule("lookup_token", _lookup_token),
    ),
    build=gemma4_vision,
    weights=_WEIGHTS,
    text_names=_NAMES,
    ignored_keys=_IGNORED_KEYS,
    ignored_tensors=lambda config: unused_kv_tensors(config, _NAMES["model."]),
)

_large = functools.partial(EncoderSizes, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, size=16, merge=3)
_small = functools.partial(EncoderSizes, embed_dim=768, layers=16, heads=12, mlp_dim=3072, size=16, merge=3)


def _with_large_vision(text: DecoderConfig) -> DecoderConfig:
    return gemma4_vision(text, gemma4_encoder(_large(out_dim=text.embed_dim), standardize=True), image_spans=True)


def _with_small_vision_and_audio(text: DecoderConfig) -> DecoderConfig:
    # The defaults of `Gemma4AudioConfig` in transformers are documented as the audio encoder of Gemma 4 E2B.
    vision = gemma4_encoder(_small(out_dim=text.embed_dim), clipped=True)
    return gemma4_vision(text, vision, image_spans=False, audio=gemma4_audio(out_dim=text.embed_dim))


MODELS = {
    "gemma4-e2b-vision": ExtendedModel("gemma4-e2b", _with_small_vision_and_audio),
    "gemma4-e4b-vision": ExtendedModel("gemma4-e4b", _with_small_vision_and_audio),
    "gemma4-26b-vision": ExtendedModel("gemma4-26b", _with_large_vision),
    "gemma4-31b-vision": ExtendedModel("gemma4-31b", _with_large_vision),
}
