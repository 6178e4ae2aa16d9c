"""Gemma 3n with images and audio (Gemma Team 2025): a MobileNet V5, 256 tokens an image, and a Conformer, 160 ms each.

Each encoder has tokens of its own, whose embeddings its projector makes, too; audio clips are filled up with the last
one to 188 tokens, half a minute.
"""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.audio.frame_stem import CumulativeNormConfig, FrameStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import EncoderTokensConfig, ProjectionConfig, ProjectorConfig
from eqx_decoders.families.gemma.audio import CLIP, CONFORMER, ConformerSizes, conformer_block
from eqx_decoders.families.gemma.mobilenet import MobileNetConfig
from eqx_decoders.families.gemma.mobilenet_weights import architectures, network_weights, read_network, write_network
from eqx_decoders.families.gemma.text import unused_kv_tensors
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily, linear, token
from eqx_decoders.families.settings_table import (
    Check,
    Group,
    Integer,
    Layers,
    Number,
    Only,
    Rule,
    Table,
    Values,
    sized,
    value_at,
)
from eqx_decoders.families.vision_fields import OUT_DIM
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


IMAGE, AUDIO = 262_145, 262_273
_VISION_TOKENS, _AUDIO_TOKENS, _COUNT = 262_144, 262_272, 128
_CLIP_TOKENS = 188


def gemma3n_encoder(
    network: MobileNetConfig, *, embed_dim: int, out_dim: int, first: int, count: int, eps: float = 1e-6
) -> EncoderConfig:
    """Return the encoder of images; `first` and `count` are the ids of its own tokens."""
    return EncoderConfig(
        embed_dim=embed_dim,
        stem=network,
        blocks=(),
        projector=_projector(out_dim, eps, scale=embed_dim**0.5),
        tokens=EncoderTokensConfig(first=first, count=count, norm=RMSNormConfig(eps=eps)),
    )


def gemma3n_audio(
    sizes: ConformerSizes,
    *,
    out_dim: int,
    first: int,
    count: int,
    fill: int,
    clip_tokens: int = _CLIP_TOKENS,
    reduction: int = 4,
    stem_eps: float = 1e-3,
) -> EncoderConfig:
    """Return the encoder of audio.

    **Arguments:**

    - `sizes`: of its layers.
    - `first`, `count`: the ids of its own tokens.
    - `clip_tokens`, `fill`: number of tokens of a clip, and the one that fills it up.
    - `reduction`: number of the layers' tokens of which the first one becomes a row of features.
    - `stem_eps`: of the norms of the input layers.
    """
    stem = FrameStemConfig(
        mel_bands=sizes.mel_bands,
        filters=sizes.filters,
        norm=CumulativeNormConfig(eps=stem_eps),
        frames="behind",
        merge=reduction,
        rows_per_clip=clip_tokens,
    )
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=stem,
        blocks=(conformer_block(sizes, distances="plain", key_scale=1.0),) * sizes.layers,
        projector=_projector(out_dim, sizes.eps, group=reduction, combine="first"),
        tokens=EncoderTokensConfig(first=first, count=count, norm=RMSNormConfig(eps=sizes.eps), fill=fill),
    )


def _projector(out_dim: int, eps: float, **options: Any) -> ProjectorConfig:
    layer = ProjectionConfig(dim=out_dim, out_norm=RMSNormConfig(eps=eps, scale=False))
    return ProjectorConfig(norm=RMSNormConfig(eps=eps), layers=(layer,), **options)


def gemma3n_vision(
    text: DecoderConfig,
    vision: EncoderConfig,
    audio: EncoderConfig,
    *,
    image_token: int = IMAGE,
    audio_token: int = AUDIO,
) -> DecoderConfig:
    """Return a decoder with these encoders."""
    media = MediaConfig(vision=vision, audio=audio, image_token=image_token, audio_token=audio_token)
    return dataclasses.replace(text, media=media)


# --- config.json ---


def _pairs(key: str, number: int) -> Rule:
    """Return the row of the sizes of two convolutions, both of which must be `number` by `number`."""

    def read(fields: Fields, values: Values) -> None:
        value = fields.take(key, [[number] * 2] * 2)
        if not isinstance(value, list | tuple) or [list(each) for each in value if each] != [[number] * 2] * 2:
            raise fields.error(f"{key}={abbreviate(value)} must be {[[number] * 2] * 2}: others are not implemented.")

    return Rule("", read, lambda audio: {key: [[number] * 2] * 2})


def _read_filters(fields: Fields, values: Values) -> tuple[int, int]:
    filters = fields.numbers("sscp_conv_channel_size", [128, 32])
    if len(filters) != 2 or not all(0 < count < 2**31 for count in filters):
        raise fields.error(f"sscp_conv_channel_size={abbreviate(filters)} must be two numbers above 0.")
    return filters[0], filters[1]


def _tokens(offset: int) -> tuple[Integer, Integer]:
    return (
        Integer("vocab_size", "tokens.count", _COUNT, name="count"),
        Integer("vocab_offset", "tokens.first", offset, name="first", least=0),
    )


_VISION = Table(
    "vision_config",
    (
        Group(
            "vision",
            gemma3n_encoder,
            (
                OUT_DIM,
                Only("do_pooling", False),
                Integer("hidden_size", "embed_dim", 2048),
                Rule("network", read_network, write_network),
                *_tokens(_VISION_TOKENS),
                Number("rms_norm_eps", "projector.norm.eps", 1e-6),
            ),
            path="media.vision",
        ),
    ),
    model_type="gemma3n_vision",
    ignored={
        "initializer_range": "of new weights",
        "num_classes": "of a classifier that there is not",
        "label_names": "of a classifier that there is not",
    },
)
_BLOCK, _MIXER, _CONVOLUTION = "blocks.0.pre_layers.0.", "blocks.0.mixer.", "blocks.0.post_layers.0.layer."
_AUDIO = Table(
    "audio_config",
    (
        Group(
            "audio",
            sized(ConformerSizes, gemma3n_audio),
            (
                OUT_DIM,
                Rule("fill", lambda fields, values: values["text"].vocab_size - 1),
                *_tokens(_AUDIO_TOKENS),
                Integer("input_feat_size", "stem.mel_bands", 128),
                Integer("hidden_size", "embed_dim", 1536),
                Integer("conf_num_attention_heads", _MIXER + "num_heads", 8, name="heads"),
                Check(
                    lambda values: values["embed_dim"] % values["heads"] == 0,
                    "hidden_size={embed_dim} must be a multiple of conf_num_attention_heads={heads}.",
                ),
                Layers("conf_num_hidden_layers", "blocks", 12, name="layers"),
                Integer("conf_attention_chunk_size", _MIXER + "chunk", 12),
                Integer("conf_attention_context_left", _MIXER + "left", 13, least=2),
                Integer("conf_attention_context_right", _MIXER + "right", 0, least=0),
                Number("conf_attention_logit_cap", _MIXER + "soft_cap", 50.0),
                Integer("conf_conv_kernel_size", _CONVOLUTION + "taps", 5),
                Integer("conf_reduction_factor", "stem.merge", 4, name="reduction"),
                Number("conf_residual_weight", _BLOCK + "scale", 0.5, name="half"),
                Number("gradient_clipping", lambda audio: value_at(audio, "blocks.0.pre_mixer_norm.clip"), CLIP,
                       name="clip"),
                Number("rms_norm_eps", _CONVOLUTION + "norm.eps", 1e-6),
                Rule("filters", _read_filters,
                     lambda audio: {"sscp_conv_channel_size": list(value_at(audio, "stem.filters"))}),
                Number("sscp_conv_group_norm_eps", "stem.norm.eps", 1e-3, name="stem_eps"),
                _pairs("sscp_conv_kernel_size", 3),
                _pairs("sscp_conv_stride_size", 2),
            ),
            uses=("clip_tokens",),
            path="media.audio",
        ),
    ),
    model_type="gemma3n_audio",
)  # fmt: skip


def _is_outside(values: Values) -> bool:
    table = values["text"].per_layer_embedding
    return min(values["image_token"], values["audio_token"]) >= table.vocab_size


# --- tensors ---

# names of a Conformer's tensors in Gemma 4, and those here
_NAMES = {
    "layers.{layer}": "conformer.{layer}",
    "self_attn.relative_k_proj": "attention.attn.relative_position_embedding.pos_proj",
    "self_attn.post": "attention.post",
    "self_attn": "attention.attn",
    "feed_forward1": "ffw_layer_start",
    "feed_forward2": "ffw_layer_end",
    "norm_pre_attn": "attention.pre_attn_norm",
    "norm_post_attn": "attention.post_norm",
    "norm_out": "norm",
    "projection.layer": "projection.conv_",
}


def _renamed(name: str) -> str:
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def _embedder(owner: str) -> tuple[Weight, ...]:
    """Return the rows of the projector of an encoder, and of its tokens."""
    prefix = f"model.embed_{owner}."
    return (
        Weight(prefix + "embedding.weight", f"{owner}.tokens.table", "rows row_dim -> rows row_dim"),
        *norm(prefix + "hard_embedding_norm", f"{owner}.tokens.norm"),
        *norm(prefix + "soft_embedding_norm", f"{owner}.projector.norm"),
        *linear(prefix + "embedding_projection", f"{owner}.projector.layers.0"),
    )


_TEXT_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
FAMILY = MultimodalFamily(
    text_type="gemma3n_text",
    model_type="gemma3n",
    architecture="Gemma3nForConditionalGeneration",
    settings=(
        Integer("audio_soft_tokens_per_image", "media.audio.stem.rows_per_clip", _CLIP_TOKENS, name="clip_tokens"),
        _VISION,
        _AUDIO,
        Integer("vision_soft_tokens_per_image", lambda config: value_at(config, "media.vision.stem.side") ** 2, 256,
                name="_image_tokens"),
        Check(
            lambda values: values["_image_tokens"] == values["vision"].stem.side ** 2,
            "vision_soft_tokens_per_image={_image_tokens} must be {vision.stem.side} x {vision.stem.side}.",
        ),
        token("image_token_id", "image_token", IMAGE),
        token("audio_token_id", "audio_token", AUDIO),
        Check(
            _is_outside,
            "image_token_id={image_token} and audio_token_id={audio_token} must be at least "
            "vocab_size_per_layer_input={text.per_layer_embedding.vocab_size}.",
        ),
    ),
    build=lambda clip_tokens, **values: gemma3n_vision(**values),
    weights=(
        *network_weights("model.vision_tower.timm_model."),
        *_embedder("vision"),
        *(dataclasses.replace(row, name=_renamed(row.name)) for row in CONFORMER),
        *_embedder("audio"),
    ),
    text_names=_TEXT_NAMES,
    ignored_keys={
        "boi_token_id eoi_token_id boa_token_id eoa_token_id": "a token around placeholders",
        "initializer_range": "of new weights",
    },
    ignored_tensors=lambda config: unused_kv_tensors(config, _TEXT_NAMES["model."]),
)  # fmt: skip


def _with_encoders(text: DecoderConfig) -> DecoderConfig:
    sizes = ConformerSizes(embed_dim=1536, clipped=False)
    network, out_dim = architectures()["mobilenetv5_300m_enc"], text.embed_dim
    audio = dict(first=_AUDIO_TOKENS, count=_COUNT, fill=text.vocab_size - 1)
    return gemma3n_vision(
        text,
        gemma3n_encoder(network, embed_dim=2048, out_dim=out_dim, first=_VISION_TOKENS, count=_COUNT),
        gemma3n_audio(sizes, out_dim=out_dim, **audio),
    )


MODELS = {
    "gemma3n-e2b-vision": ExtendedModel("gemma3n-e2b", _with_encoders),
    "gemma3n-e4b-vision": ExtendedModel("gemma3n-e4b", _with_encoders),
}
