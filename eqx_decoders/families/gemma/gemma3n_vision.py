"""Gemma 3n with images and audio (Gemma Team 2025).

The vision encoder is a MobileNet V5 with 256 tokens per image. The audio encoder is a Conformer; a token covers 160 ms.
Each encoder also embeds a separate range of token ids, with a table and its projector. Audio clips are padded to 188
tokens (30 seconds) with the last of these token ids.
"""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.audio.frame_stem import CumulativeNormConfig, FrameStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import EncoderTokensConfig, ProjectionConfig, ProjectorConfig
from eqx_decoders.families.gemma.audio import CLIP, CONFORMER_WEIGHTS, ConformerSizes, conformer_block
from eqx_decoders.families.gemma.mobilenet import MobileNetConfig
from eqx_decoders.families.gemma.mobilenet_config import architectures, network_weights, read_network, write_network
from eqx_decoders.families.gemma.text import unused_kv_tensors
from eqx_decoders.families.multimodal import ExtendedModel, MultimodalFamily, linear, token
from eqx_decoders.families.setting_rows import (
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


_IMAGE, _AUDIO = 262_145, 262_273  # ids of placeholder tokens
_FIRST_VISION_TOKEN, _FIRST_AUDIO_TOKEN = 262_144, 262_272
_NUM_TOKENS = 128  # number of token ids that each encoder embeds
_CLIP_TOKENS = 188


def gemma3n_encoder(
    network: MobileNetConfig, *, embed_dim: int, out_dim: int, first: int, count: int, eps: float = 1e-6
) -> EncoderConfig:
    """Return the configuration of the vision encoder.

    **Arguments:**

    - `network`: the MobileNet.
    - `embed_dim`: number of features of the network.
    - `out_dim`: width of the decoder.
    - `first`, `count`: first id and number of the token ids that the encoder embeds.
    - `eps`: epsilon of the norms.
    """
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
    """Return the configuration of the audio encoder.

    **Arguments:**

    - `sizes`: sizes of the Conformer.
    - `out_dim`: width of the decoder.
    - `first`, `count`: first id and number of the token ids that the encoder embeds.
    - `fill`: token id that pads clips.
    - `clip_tokens`: number of decoder tokens per clip.
    - `reduction`: number of consecutive encoder outputs per decoder token; only the first of them is used.
    - `stem_eps`: epsilon of the norms of the stem.
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
    image_token: int = _IMAGE,
    audio_token: int = _AUDIO,
) -> DecoderConfig:
    """Return the decoder configuration with encoders and the ids of their placeholder tokens."""
    media = MediaConfig(vision=vision, audio=audio, image_token=image_token, audio_token=audio_token)
    return dataclasses.replace(text, media=media)


# --- config.json ---


def _only_square(key: str, size: int) -> Rule:
    """Return the setting of the sizes of two convolutions, which must both be `size x size`."""
    supported = [[size, size], [size, size]]

    def read(fields: Fields, values: Values) -> None:
        value = fields.take(key, supported)
        pairs = value if isinstance(value, list | tuple) else []
        if [list(pair) if isinstance(pair, tuple) else pair for pair in pairs] != supported:
            raise fields.error(f"{key}={abbreviate(value)} is not supported. Supported: {supported}.")

    return Rule("", read, lambda audio: {key: supported})


def _read_filters(fields: Fields, values: Values) -> tuple[int, int]:
    filters = fields.integers("sscp_conv_channel_size", [128, 32])
    if len(filters) != 2 or not all(0 < count < 2**31 for count in filters):
        raise fields.error(f"sscp_conv_channel_size={abbreviate(list(filters))} must be a list of two numbers above 0.")
    return filters[0], filters[1]


def _token_settings(first: int) -> tuple[Integer, Integer]:
    return (
        Integer("vocab_size", "tokens.count", _NUM_TOKENS, name="count"),
        Integer("vocab_offset", "tokens.first", first, name="first", least=0),
    )


_VISION_CONFIG = Table(
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
                *_token_settings(_FIRST_VISION_TOKEN),
                Number("rms_norm_eps", "projector.norm.eps", 1e-6),
            ),
            path="media.vision",
        ),
    ),
    model_type="gemma3n_vision",
    ignored={
        "initializer_range": "only initializes new weights",
        "num_classes label_names": "the network is used without its classifier",
    },
)
_FEED_FORWARD = "blocks.0.pre_layers.0."
_MIXER = "blocks.0.mixer."
_CONVOLUTION = "blocks.0.post_layers.0.layer."
_AUDIO_CONFIG = Table(
    "audio_config",
    (
        Group(
            "audio",
            sized(ConformerSizes, gemma3n_audio),
            (
                OUT_DIM,
                Rule("fill", lambda fields, values: values["text"].vocab_size - 1),
                *_token_settings(_FIRST_AUDIO_TOKEN),
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
                Number("conf_residual_weight", _FEED_FORWARD + "scale", 0.5, name="feed_forward_scale"),
                Number("gradient_clipping", lambda audio: value_at(audio, "blocks.0.pre_mixer_norm.clip"), CLIP,
                       name="clip"),
                Number("rms_norm_eps", _CONVOLUTION + "norm.eps", 1e-6),
                Rule("filters", _read_filters,
                     lambda audio: {"sscp_conv_channel_size": list(value_at(audio, "stem.filters"))}),
                Number("sscp_conv_group_norm_eps", "stem.norm.eps", 1e-3, name="stem_eps"),
                _only_square("sscp_conv_kernel_size", 3),
                _only_square("sscp_conv_stride_size", 2),
            ),
            uses=("clip_tokens",),
            path="media.audio",
        ),
    ),
    model_type="gemma3n_audio",
)  # fmt: skip


def _placeholders_have_no_per_layer_embedding(values: Values) -> bool:
    num_embeddings = values["text"].per_layer_embedding.vocab_size
    return min(values["image_token"], values["audio_token"]) >= num_embeddings


# --- tensors ---

# Names of Conformer modules in Gemma 4, and the corresponding names in Gemma 3n.
_CONFORMER_NAMES = {
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
    for old, new in _CONFORMER_NAMES.items():
        name = name.replace(old, new)
    return name


def _embedder(owner: str) -> tuple[Weight, ...]:
    """Return the weight rows of an encoder's projector and of the table of its token ids."""
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
        _VISION_CONFIG,
        _AUDIO_CONFIG,
        Integer("vision_soft_tokens_per_image", lambda config: value_at(config, "media.vision.stem.side") ** 2, 256,
                name="_image_tokens"),
        Check(
            lambda values: values["_image_tokens"] == values["vision"].stem.side ** 2,
            "vision_soft_tokens_per_image={_image_tokens} must be {vision.stem.side} x {vision.stem.side}, the size of "
            "the network's output.",
        ),
        token("image_token_id", "image_token", _IMAGE),
        token("audio_token_id", "audio_token", _AUDIO),
        Check(
            _placeholders_have_no_per_layer_embedding,
            "image_token_id={image_token} and audio_token_id={audio_token} must be at least "
            "vocab_size_per_layer_input={text.per_layer_embedding.vocab_size}, because placeholders have no per-layer "
            "embeddings.",
        ),
    ),
    build=lambda clip_tokens, **values: gemma3n_vision(**values),
    weights=(
        *network_weights("model.vision_tower.timm_model."),
        *_embedder("vision"),
        *(dataclasses.replace(row, name=_renamed(row.name)) for row in CONFORMER_WEIGHTS),
        *_embedder("audio"),
    ),
    text_names=_TEXT_NAMES,
    ignored_keys={
        "boi_token_id eoi_token_id boa_token_id eoa_token_id": "tokens around placeholders are part of the prompt",
        "initializer_range": "only initializes new weights",
    },
    ignored_tensors=lambda config: unused_kv_tensors(config, _TEXT_NAMES["model."]),
)  # fmt: skip


def _with_encoders(text: DecoderConfig) -> DecoderConfig:
    vision = gemma3n_encoder(
        architectures()["mobilenetv5_300m_enc"],
        embed_dim=2048,
        out_dim=text.embed_dim,
        first=_FIRST_VISION_TOKEN,
        count=_NUM_TOKENS,
    )
    audio = gemma3n_audio(
        ConformerSizes(embed_dim=1536, clipped=False),
        out_dim=text.embed_dim,
        first=_FIRST_AUDIO_TOKEN,
        count=_NUM_TOKENS,
        fill=text.vocab_size - 1,
    )
    return gemma3n_vision(text, vision, audio)


MODELS = {
    "gemma3n-e2b-vision": ExtendedModel("gemma3n-e2b", _with_encoders),
    "gemma3n-e4b-vision": ExtendedModel("gemma3n-e4b", _with_encoders),
}
