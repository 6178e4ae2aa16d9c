"""Qwen3-Omni's thinker (Xu et al. 2025): Qwen3 with experts, images, videos and audio; its output is text.

Files of the whole model are read, too, without the talker.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eqx_decoders.encoders.audio_stem import AudioStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.errors import ConversionError
from eqx_decoders.families._qwen import VL_SECTIONS, qwen3_moe, read_sparse_text
from eqx_decoders.families._qwen_vision import (
    IGNORED_KEYS,
    LARGE,
    LARGE_DEEPSTACK,
    TOKENS,
    media_of,
    qwen_vision,
    read_vision,
    vision_weights,
    with_media,
    write_vision,
)
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import MultimodalFamily, attention, encoder_layer, finish, linear, norm, plain_mlp
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = LayerNormConfig(eps=1e-5)
IMAGE, VIDEO, AUDIO = 151_655, 151_656, 151_675
_ALL_TOKENS = TOKENS | {"audio_token": "audio_token_id"}


def omni_audio(
    *,
    embed_dim: int,
    layers: int,
    heads: int,
    mlp_dim: int,
    out_dim: int,
    mel_bands: int = 128,
    filters: int = 480,
    chunk_frames: int = 100,
    window_chunks: int = 8,
    activation: str = "gelu",
) -> EncoderConfig:
    """Return the encoder of audio: tokens attend to their window of `window_chunks` chunks."""
    stem = AudioStemConfig(mel_bands=mel_bands, chunk_frames=chunk_frames, filters=filters)
    window = window_chunks * stem.chunk_tokens
    mlp = MLPConfig(mlp_dim=mlp_dim, activation=activation, gated=False, bias=True)
    into = ProjectionConfig(dim=embed_dim, bias=True, activation=activation)
    return EncoderConfig(
        embed_dim=embed_dim,
        stem=stem,
        blocks=(encoder_layer(embed_dim, heads, mlp, _NORM, window=window),) * layers,
        post_norm=_NORM,
        projector=ProjectorConfig(layers=(into, ProjectionConfig(dim=out_dim, bias=True))),
    )


def read_audio(fields: Fields, out_dim: int) -> EncoderConfig:
    """Read the encoder of `audio_config`."""
    table = fields.table("audio_config")
    if table is None:
        raise fields.error("audio_config is missing: it describes the encoder of audio.")
    table.rename("num_hidden_layers", "encoder_layers")
    table.allow_only("scale_embedding", False)
    output_dim = table.integer("output_dim", 3584)
    if output_dim != out_dim:
        raise table.error(f"output_dim={output_dim} must be the decoder's hidden_size={out_dim}.")
    half, window = table.integer("n_window", 50), table.integer("n_window_infer", 800)
    if window < 2 * half:
        raise table.error(f"n_window_infer={window} must be at least 2 x n_window={half}: one chunk.")
    embed, heads = table.integer("d_model", 1280), table.integer("encoder_attention_heads", 20)
    if embed % heads:
        raise table.error(f"d_model={embed} must be a multiple of encoder_attention_heads={heads}.")
    encoder = omni_audio(
        embed_dim=embed,
        layers=table.layers("encoder_layers", 32),
        heads=heads,
        mlp_dim=table.integer("encoder_ffn_dim", 5120),
        out_dim=out_dim,
        mel_bands=table.integer("num_mel_bins", 128),
        filters=table.integer("downsample_hidden_size", 480),
        chunk_frames=2 * half,
        window_chunks=window // (2 * half),
        activation=table.word("activation_function", ACTIVATIONS, "gelu"),
    )
    finish(fields, "audio_config", table, _IGNORED_AUDIO_KEYS)
    return encoder


_IGNORED_AUDIO_KEYS = {
    "initializer_range": "of new weights",
    "tie_word_embeddings": "there are none",
    "conv_chunksize": "how many chunks transformers convolves at once",
    "max_source_positions": "positions begin anew in each chunk",
    "dropout": "dropout happens in training only, and a loaded model has none",
    "activation_dropout": "likewise",
    "encoder_layerdrop": "likewise",
}


def write_audio(encoder: EncoderConfig | None) -> dict[str, Any]:
    """Return the keys that `read_audio` reads."""
    if encoder is None or not isinstance(encoder.stem, AudioStemConfig):
        raise ConversionError("MediaConfig.audio=None: there must be an encoder of audio.")
    stem, mixer, mlp = encoder.stem, encoder.blocks[0].mixer, encoder.blocks[0].mlp
    if not isinstance(mixer, AttentionConfig) or not isinstance(mlp, MLPConfig):
        raise ConversionError("MediaConfig.audio must have attention and an MLP.")
    window = mixer.mask.size if isinstance(mixer.mask, Bidirectional) else None
    if window is None:
        raise ConversionError("MediaConfig.audio: the mask of its attention must be Bidirectional(size).")
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "d_model": encoder.embed_dim,
        "encoder_layers": len(encoder.blocks),
        "encoder_attention_heads": mixer.num_heads,
        "encoder_ffn_dim": mlp.mlp_dim,
        "output_dim": encoder.projector.out_dim,
        "num_mel_bins": stem.mel_bands,
        "downsample_hidden_size": stem.filters,
        "n_window": stem.chunk_frames // 2,
        "n_window_infer": window // stem.chunk_tokens * stem.chunk_frames,
        "activation_function": activation_name(mlp.activation),
        "scale_embedding": False,
    }


def _read(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    rate = fields.integer("position_id_per_seconds", 25)
    media = MediaConfig(
        vision=read_vision(fields, config.embed_dim, deepstack=LARGE_DEEPSTACK),
        audio=read_audio(fields, config.embed_dim),
        image_token=fields.integer("image_token_id", 151_655, least=0),
        video_token=fields.integer("video_token_id", 151_656, least=0),
        audio_token=fields.integer("audio_token_id", 151_646, least=0),
        positions=GridPositions(frames="together", per_second=float(rate)),
    )
    return with_media(config, media)


def _write(config: DecoderConfig) -> dict[str, Any]:
    media = media_of(config)
    if media.positions is None:
        raise ConversionError("MediaConfig.positions=None: there must be positions of time, row and column.")
    return {
        **{name: getattr(media, field) for field, name in _ALL_TOKENS.items()},
        "position_id_per_seconds": int(media.positions.per_second),
        "vision_config": write_vision(media.vision, "qwen3_omni_moe_vision_encoder"),
        "audio_config": write_audio(media.audio),
    }


def _read_text(fields: Fields) -> DecoderConfig:
    return read_sparse_text(
        fields,
        num_kv_heads=4,
        mlp_dim=18_944,
        expert_dim=768,
        num_experts=128,
        num_experts_per_token=8,
        theta=1e6,
        renormalize=fields.flag("norm_topk_prob", True),
    )


def _adapt(text: Family) -> Family:
    architecture = "Qwen3OmniMoeThinkerTextModel"
    return dataclasses.replace(text, model_type="qwen3_omni_moe_text", architecture=architecture, read=_read_text)


_TOWER = "audio_tower."
_LAYER = _TOWER + "layers.{layer}."
_KERNEL = "filters input_filters kernel_rows kernel_columns"
_AUDIO_WEIGHTS = (
    *(Weight(f"{_TOWER}conv2d{index + 1}.weight", f"audio.stem.convolutions.{index}.kernel", f"{_KERNEL} -> {_KERNEL}")
      for index in range(3)),
    *(Weight(f"{_TOWER}conv2d{index + 1}.bias", f"audio.stem.convolutions.{index}.bias", "filters -> filters")
      for index in range(3)),
    Weight(_TOWER + "conv_out.weight", "audio.stem.out", "embed (filters mel) -> filters mel embed"),
    *norm(_LAYER + "self_attn_layer_norm", "audio.pre_mixer_norm"),
    *norm(_LAYER + "final_layer_norm", "audio.pre_mlp_norm"),
    *attention(_LAYER, out="out_proj", owner="audio"),
    *plain_mlp(_LAYER, "fc1", "fc2", owner="audio"),
    *norm(_TOWER + "ln_post", "audio.post_norm"),
    *linear(_TOWER + "proj1", "audio.projector.layers.0"),
    *linear(_TOWER + "proj2", "audio.projector.layers.1"),
)  # fmt: skip
_VISION_WEIGHTS = vision_weights(
    "visual.", "visual.merger.", "visual.merger_list.", first="mlp.0", second="mlp.2", normed="ln_q"
)


# transformers finds placeholders by these
_AROUND = {
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "audio_start_token_id": 151_669,
    "audio_end_token_id": 151_670,
}
_ARCHITECTURE, _WHOLE = "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"


def _thinker(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the thinker's settings, which those of the whole model contain."""
    inner = content.get("thinker_config")
    if not isinstance(inner, Mapping):
        return content
    named = content.get("architectures")
    return {**inner, "architectures": [_ARCHITECTURE] if named in (None, [_WHOLE]) else named}


FAMILY = MultimodalFamily(
    text="qwen3_moe",
    adapt=_adapt,
    reads_as_text=True,
    model_type="qwen3_omni_moe_thinker",
    architecture=_ARCHITECTURE,
    read=_read,
    write=_write,
    weights=(*_VISION_WEIGHTS, *_AUDIO_WEIGHTS),
    names={"model.": "model.", "lm_head.": "lm_head."},
    ignored_keys=IGNORED_KEYS
    | dict.fromkeys(_AROUND, "a token around placeholders: part of the prompt")
    | {"user_token_id": "for processors", "seconds_per_chunk": "for processors"},
    default_settings=_AROUND,
    # the talker is stored next to the thinker
    renamed={r"^thinker\.": "", r"^model\.language_model\.": "model.", r"^model\.(visual|audio_tower)\.": r"\1."},
    modules={r"^model\.": "model.language_model.", r"^(visual|audio_tower)\.": r"model.\1."},
    ignored_tensors=r"(talker|code2wav)\..*|.*rotary_emb\.inv_freq",
    auto_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    own_settings=_thinker,
    aliases=("qwen3_omni_moe",),
)


def _30b() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=152_064, embed_dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, mlp_dim=768
    )
    text = qwen3_moe(shape, expert_dim=768, rope=Rope(theta=1e6, sections=VL_SECTIONS))
    media = MediaConfig(
        vision=qwen_vision(LARGE(out_dim=2048), deepstack=LARGE_DEEPSTACK),
        audio=omni_audio(embed_dim=1280, layers=32, heads=20, mlp_dim=5120, out_dim=2048),
        image_token=IMAGE,
        video_token=VIDEO,
        audio_token=AUDIO,
        positions=GridPositions(frames="together", per_second=13.0),
    )
    return with_media(text, media)


MODELS = {"qwen3-omni-30b-a3b-thinker": _30b}
