"""The thinker of Qwen3-Omni (Xu et al. 2025): Qwen3 with experts, which reads images, videos and audio and writes text.

Checkpoints of the complete model can be loaded as well. The talker, which generates speech, is not loaded.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.common import plain_mlp
from eqx_decoders.families.multimodal import (
    ExtendedModel,
    MultimodalFamily,
    encoder_attention,
    encoder_layer,
    linear,
    token,
    with_rope,
)
from eqx_decoders.families.qwen.text import VL_SECTIONS, sparse_text_settings
from eqx_decoders.families.qwen.vision import (
    IGNORED_KEYS,
    LARGE,
    LARGE_DEEPSTACK,
    MARKER_TOKEN_REASON,
    media_tokens,
    qwen_vision,
    qwen_vision_config,
    vision_weights,
    with_media,
)
from eqx_decoders.families.setting_rows import (
    Check,
    Flag,
    Group,
    Integer,
    Layers,
    Only,
    Renamed,
    Rule,
    Table,
    activation,
    value_at,
)
from eqx_decoders.families.vision_fields import OUT_DIM
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = LayerNormConfig(eps=1e-5)
_IMAGE, _VIDEO, _AUDIO = 151_655, 151_656, 151_675


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
    """Return the configuration of the audio encoder.

    **Arguments:**

    - `embed_dim`, `layers`, `heads`, `mlp_dim`: width, number of layers, heads and MLP width.
    - `out_dim`: width of the decoder.
    - `mel_bands`: number of mel bands per frame.
    - `filters`: number of filters of the convolutions in the stem.
    - `chunk_frames`: number of frames per chunk, which the stem processes separately.
    - `window_chunks`: number of chunks per attention window.
    - `activation`: activation of the MLPs and of the projector.
    """
    stem = AudioStemConfig(mel_bands=mel_bands, chunk_frames=chunk_frames, filters=filters)
    window = window_chunks * stem.chunk_tokens
    mlp = MLPConfig(mlp_dim=mlp_dim, activation=activation, gated=False, bias=True)
    return EncoderConfig(
        embed_dim=embed_dim,
        stem=stem,
        blocks=(encoder_layer(embed_dim, heads, mlp, _NORM, window=window),) * layers,
        post_norm=_NORM,
        projector=ProjectorConfig(
            layers=(
                ProjectionConfig(dim=embed_dim, bias=True, activation=activation),
                ProjectionConfig(dim=out_dim, bias=True),
            )
        ),
    )


def _window_frames(audio: EncoderConfig) -> int:
    stem = audio.stem
    mask = value_at(audio, "attention").mask
    if not isinstance(stem, AudioStemConfig):
        raise ConversionError(f"MediaConfig.audio.stem={stem!r} must be an AudioStemConfig to export Qwen3-Omni.")
    if not isinstance(mask, Bidirectional) or mask.size is None:
        raise ConversionError(
            f"The mask of MediaConfig.audio, {mask!r}, must be Bidirectional(size) with a window size to export "
            "Qwen3-Omni."
        )
    return mask.size // stem.chunk_tokens * stem.chunk_frames


_AUDIO_SETTINGS = (
    OUT_DIM,
    Renamed({"num_hidden_layers": "encoder_layers"}),
    Only("scale_embedding", False, written=True),
    Integer("output_dim", "projector.out_dim", 3584, name="_output_dim"),
    Check(
        lambda values: values["_output_dim"] == values["out_dim"],
        "output_dim={_output_dim} must be the decoder's hidden_size={out_dim}.",
    ),
    Integer("n_window", lambda audio: value_at(audio, "stem.chunk_frames") // 2, 50, name="_half_chunk"),
    Integer("n_window_infer", _window_frames, 800, name="_window"),
    Check(
        lambda values: values["_window"] >= 2 * values["_half_chunk"],
        "n_window_infer={_window} must be at least 2 x n_window={_half_chunk}: a window must have at least one chunk.",
    ),
    Rule("chunk_frames", lambda fields, values: 2 * values["_half_chunk"]),
    Rule("window_chunks", lambda fields, values: values["_window"] // (2 * values["_half_chunk"])),
    Integer("d_model", "embed_dim", 1280),
    Integer("encoder_attention_heads", "attention.num_heads", 20, name="heads"),
    Check(
        lambda values: values["embed_dim"] % values["heads"] == 0,
        "d_model={embed_dim} must be a multiple of encoder_attention_heads={heads}.",
    ),
    Layers("encoder_layers", "blocks", 32, name="layers"),
    Integer("encoder_ffn_dim", "mlp.mlp_dim", 5120),
    Integer("num_mel_bins", "stem.mel_bands", 128),
    Integer("downsample_hidden_size", "stem.filters", 480),
    activation("activation_function", "mlp.activation", "gelu"),
)
_AUDIO_CONFIG = Table(
    "audio_config",
    (Group("audio", omni_audio, _AUDIO_SETTINGS, path="media.audio"),),
    model_type="qwen3_omni_moe_audio_encoder",
    what="the audio encoder",
    ignored={
        "initializer_range": "only initializes new weights",
        "tie_word_embeddings": "an encoder has no word embeddings",
        "conv_chunksize": "only the number of chunks that transformers convolves at once",
        "max_source_positions": "positions start at 0 in each chunk",
        "dropout activation_dropout encoder_layerdrop": "only used in training, and loaded models have no dropout",
    },
)


def qwen3_omni(
    text: DecoderConfig, *, vision: EncoderConfig, audio: EncoderConfig, per_second: int | float, image_token: int,
    video_token: int, audio_token: int,
) -> DecoderConfig:  # fmt: skip
    """Return the decoder configuration with vision and audio encoders and M-RoPE positions.

    `per_second` is the number of time positions per second of video; `image_token`, `video_token` and `audio_token` are
    the ids of the placeholder tokens.
    """
    media = MediaConfig(
        vision=vision,
        audio=audio,
        image_token=image_token,
        video_token=video_token,
        audio_token=audio_token,
        positions=GridPositions(frames="together", per_second=float(per_second)),
    )
    return with_media(text, media)


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
    *encoder_attention(_LAYER, out="out_proj", owner="audio"),
    *plain_mlp(_LAYER, "audio.mlp.", "fc1", "fc2"),
    *norm(_TOWER + "ln_post", "audio.post_norm"),
    *linear(_TOWER + "proj1", "audio.projector.layers.0"),
    *linear(_TOWER + "proj2", "audio.projector.layers.1"),
)  # fmt: skip
_VISION_WEIGHTS = vision_weights(
    "visual.", "visual.merger.", "visual.merger_list.", fc1="mlp.0", fc2="mlp.2", norm_name="ln_q"
)


# Token ids around placeholders, by which transformers finds the placeholders.
_MARKER_TOKENS = {
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "audio_start_token_id": 151_669,
    "audio_end_token_id": 151_670,
}
_THINKER = "Qwen3OmniMoeThinkerForConditionalGeneration"
_COMPLETE_MODEL = "Qwen3OmniMoeForConditionalGeneration"


def _thinker_settings(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the thinker, which are nested in `thinker_config` for the complete model."""
    inner = content.get("thinker_config")
    if not isinstance(inner, Mapping):
        return content
    architectures = content.get("architectures")
    return {**inner, "architectures": [_THINKER] if architectures in (None, [_COMPLETE_MODEL]) else architectures}


FAMILY = MultimodalFamily(
    text_type="qwen3_moe",
    changes=dict(
        model_type="qwen3_omni_moe_text",
        architecture="Qwen3OmniMoeThinkerTextModel",
        settings=(
            *sparse_text_settings(
                num_kv_heads=4, mlp_dim=18_944, expert_dim=768, num_experts=128, num_experts_per_token=8, theta=1e6
            ),
            Flag("norm_topk_prob", "experts.router.renormalize", True),
        ),
    ),
    reads_as_text=True,
    model_type="qwen3_omni_moe_thinker",
    architecture=_THINKER,
    settings=(
        Integer(
            "position_id_per_seconds", lambda config: int(value_at(config, "media.positions.per_second")), 25,
            name="per_second",
        ),
        qwen_vision_config("qwen3_omni_moe_vision_encoder", deepstack=LARGE_DEEPSTACK),
        _AUDIO_CONFIG,
        *media_tokens(_IMAGE, _VIDEO),
        token("audio_token_id", "audio_token", 151_646),
    ),
    build=qwen3_omni,
    weights=(*_VISION_WEIGHTS, *_AUDIO_WEIGHTS),
    text_names={"model.": "model.", "lm_head.": "lm_head."},
    ignored_keys=IGNORED_KEYS
    | dict.fromkeys(_MARKER_TOKENS, MARKER_TOKEN_REASON)
    | {"user_token_id seconds_per_chunk": "only used by processors"},
    default_settings=_MARKER_TOKENS,
    # Checkpoints of the complete model also contain the talker.
    renamed={r"^thinker\.": "", r"^model\.language_model\.": "model.", r"^model\.(visual|audio_tower)\.": r"\1."},
    modules={r"^model\.": "model.language_model.", r"^(visual|audio_tower)\.": r"model.\1."},
    ignored_tensors=r"(talker|code2wav)\..*|.*rotary_emb\.inv_freq",
    auto_class=_THINKER,
    own_settings=_thinker_settings,
    aliases=("qwen3_omni_moe",),
)  # fmt: skip


def _with_encoders(text: DecoderConfig) -> DecoderConfig:
    text = dataclasses.replace(with_rope(text, theta=1e6, sections=VL_SECTIONS), vocab_size=152_064)
    return qwen3_omni(
        text,
        vision=qwen_vision(LARGE(out_dim=text.embed_dim), deepstack=LARGE_DEEPSTACK),
        audio=omni_audio(embed_dim=1280, layers=32, heads=20, mlp_dim=5120, out_dim=text.embed_dim),
        per_second=13.0,
        image_token=_IMAGE,
        video_token=_VIDEO,
        audio_token=_AUDIO,
    )


MODELS = {"qwen3-omni-30b-a3b-thinker": ExtendedModel("qwen3-30b-a3b", _with_encoders)}
