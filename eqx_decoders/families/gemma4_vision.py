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
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.stem import LearnedAxes
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import _gemma4_audio
from eqx_decoders.families._gemma import unused_kv_tensors
from eqx_decoders.families._gemma4_audio import gemma4_audio, maybe_clipped
from eqx_decoders.families.common import gated_mlp, norm_weights
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    attention,
    finish,
    linear,
    with_defaults,
    with_spans,
)
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.families.weight_rows import Weight
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


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    text = fields.table("text_config")
    assert text is not None  # it has been read
    vision, audio = _read_vision(fields, config.embed_dim), _gemma4_audio.read_audio(fields, config.embed_dim)
    if vision is None and audio is None:
        raise fields.error("vision_config is missing: it describes the encoder. Without one: text_only=True.")
    return gemma4_vision(
        config,
        vision,
        whole=text.take("use_bidirectional_attention", None) == "vision",
        audio=audio,
        image_token=fields.integer("image_token_id", IMAGE, least=0),
        video_token=fields.integer("video_token_id", VIDEO, least=0),
        audio_token=fields.integer("audio_token_id", AUDIO, least=0),
        lookup_token=text.integer("pad_token_id", 0, least=0),
    )


def _read_vision(fields: Fields, out_dim: int) -> EncoderConfig | None:
    table = fields.table("vision_config")
    if table is None:
        return None
    table.allow_only("attention_bias", False)  # transformers has the key and never applies it
    heads, rope, theta = table.integer("num_attention_heads", 12), table.table("rope_parameters"), 100.0
    if rope is not None:
        theta = rope.number("rope_theta", theta)
        rope.allow_only("rope_type", "axial", "default")  # the same here
        rope.finish()
    sizes = EncoderSizes(
        embed_dim=table.integer("hidden_size", 768),
        layers=table.layers("num_hidden_layers", 16),
        heads=heads,
        mlp_dim=table.integer("intermediate_size", 3072),
        out_dim=out_dim,
        size=table.integer("patch_size", 16),
        merge=table.integer("pooling_kernel_size", 3),
        activation=table.word("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    encoder = gemma4_encoder(
        sizes,
        kv_heads=table.integer("num_key_value_heads", 12),
        head_dim=table.integer("head_dim", 64),
        positions=table.integer("position_embedding_size", 10_240),
        theta=theta,
        eps=table.number("rms_norm_eps", 1e-6),
        standardize=table.flag("standardize", False),
        clipped=table.flag("use_clipped_linears", False),
    )
    finish(fields, "vision_config", table, _IGNORED_VISION_KEYS)
    return encoder


def _media(config: DecoderConfig) -> MediaConfig:
    """Return the encoders; ConversionError where there are none."""
    media = config.media
    if media is None or (media.vision is None and media.audio is None):
        raise ConversionError("DecoderConfig.media must have an encoder of images or of audio.")
    return media


def _write(config: DecoderConfig) -> dict[str, Any]:
    media = _media(config)
    return {
        "image_token_id": media.image_token,
        "video_token_id": media.video_token,
        **({} if media.audio is None else {"audio_token_id": media.audio_token}),
        "audio_config": None if media.audio is None else _gemma4_audio.write_audio(media.audio),
        "vision_config": None if media.vision is None else _write_vision(media.vision),
    }


def _write_vision(vision: EncoderConfig) -> dict[str, Any]:
    mixer: Any = vision.blocks[0].mixer
    mlp: Any = vision.blocks[0].mlp
    stem: Any = vision.stem
    return {
        "model_type": "gemma4_vision",
        "hidden_size": vision.embed_dim,
        "num_hidden_layers": len(vision.blocks),
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "intermediate_size": mlp.mlp_dim,
        "hidden_activation": activation_name(mlp.activation),
        "rms_norm_eps": mixer.value_norm.eps,
        "rope_parameters": {"rope_type": "axial", "rope_theta": mixer.rope.theta},
        "patch_size": stem.size,
        "pooling_kernel_size": stem.merge,
        "position_embedding_size": stem.positions.size,
        "standardize": vision.projector.standardize,
        "use_clipped_linears": vision.clipped,
    }


def _adapt(text: Family) -> Family:
    """Add the settings of the decoder that depend on its encoders."""

    def write(config: DecoderConfig) -> dict[str, Any]:
        media = _media(config)
        settings = {"use_bidirectional_attention": "vision" if media.spans else None}
        return text.write(config) | settings | {"pad_token_id": media.lookup_token}

    return dataclasses.replace(with_defaults(text, _DEFAULTS), write=write)


_IGNORED_VISION_KEYS = {
    "initializer_range": "of new weights",
    "default_output_length": "how large processors make images",
    "global_head_dim": "no layer of an encoder has a window",
}
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
    *_gemma4_audio.WEIGHTS,
)
_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
FAMILY = MultimodalFamily(
    text="gemma4_text",
    adapt=_adapt,
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    read=_read,
    write=_write,
    weights=WEIGHTS,
    names=_NAMES,
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
