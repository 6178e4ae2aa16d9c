"""The audio encoder of Phi-4 multimodal (Microsoft 2025): a Conformer (Gulati et al. 2020).

A token covers 80 ms. All layers share a learned attention bias for each relative position. Inputs with audio and images
use a separate audio projector.
"""

import dataclasses

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.families.multimodal import linear, token
from eqx_decoders.families.setting_rows import (
    Check,
    Flag,
    Group,
    Integer,
    Layers,
    Only,
    Rule,
    Table,
    Values,
    activation,
    sized,
    value_at,
)
from eqx_decoders.families.vision_fields import OUT_DIM
from eqx_decoders.families.weight_rows import Weight, norm, sharing
from eqx_decoders.layers.attention.relative_attention import RelativeAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig


AUDIO = 200_011
_NORM = LayerNormConfig(eps=1e-5)
_MAX_CONVOLUTIONS = 8  # maximum number of convolutions of the stem whose tensors are mapped
_MAX_TOKENS = 500  # maximum number of tokens in one sequence of the encoder, as in transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechSizes:
    """Sizes of the audio encoder. The defaults equal `Phi4MultimodalAudioConfig` in transformers.

    **Arguments:**

    - `embed_dim`, `layers`, `heads`, `mlp_dim`: width, number of layers, heads per layer and MLP width.
    - `mel_bands`: number of mel bands per frame.
    - `filters`, `convolutions`: number of filters of each convolution of the stem, and number of its convolutions.
    - `stem_activation`: activation after a convolution of the stem.
    - `activation`: activation of MLPs.
    - `gate`, `convolution_activation`: activations of the gate and of the output of the convolution in a layer.
    - `taps`: kernel size of the convolution in a layer.
    - `distances`, `symmetric`: as in `RelativeAttentionConfig`.
    """

    embed_dim: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_dim: int = 1536
    mel_bands: int = 80
    filters: int = 1024
    convolutions: int = 3
    stem_activation: str = "relu"
    activation: str = "silu"
    gate: str = "silu"
    convolution_activation: str = "silu"
    taps: int = 3
    distances: int = 1000
    symmetric: bool = False


def phi4_audio(sizes: SpeechSizes = SpeechSizes(), *, out_dim: int) -> EncoderConfig:
    """Return the configuration of the audio encoder. `out_dim` is the width of the decoder."""
    mlp = MLPConfig(mlp_dim=sizes.mlp_dim, activation=sizes.activation, bias=True)
    feed_forward = ExtraLayerConfig(layer=mlp, pre_norm=_NORM, scale=0.5)
    convolution = LightConvolutionConfig(
        taps=sizes.taps, activation=sizes.convolution_activation, gate=sizes.gate, norm=None, pointwise=True, bias=True
    )
    attention = RelativeAttentionConfig(
        num_heads=sizes.heads,
        head_dim=sizes.embed_dim // sizes.heads,
        distances=sizes.distances,
        symmetric=sizes.symmetric,
        reach=_MAX_TOKENS,
    )
    block = BlockConfig(
        pre_layers=(feed_forward,),
        mixer=attention,
        mlp=None,
        pre_mixer_norm=_NORM,
        post_layers=(ExtraLayerConfig(layer=convolution, pre_norm=_NORM), feed_forward),
        residual=Sequential(output_norm=_NORM),
    )
    projector = ProjectorConfig(
        layers=(ProjectionConfig(dim=out_dim, bias=True, activation="gelu"), ProjectionConfig(dim=out_dim, bias=True))
    )
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=FrameStemConfig(
            mel_bands=sizes.mel_bands,
            filters=(sizes.filters,) * sizes.convolutions,
            norm=None,
            bias=True,
            activation=sizes.stem_activation,
            separable=True,
            standardize=True,
            longest=_MAX_TOKENS,
        ),
        blocks=(block,) * sizes.layers,
        projector=projector,
        projector_beside=projector,
    )


# --- config.json ---


def _read_convolutions(fields: Fields, values: Values) -> int:
    reduction = fields.integer("time_reduction", 8, least=2)
    if reduction & (reduction - 1):
        raise fields.error(
            f"time_reduction={reduction} must be a power of two, because each convolution halves the number of frames."
        )
    if reduction > 2**_MAX_CONVOLUTIONS:
        raise fields.error(
            f"time_reduction={reduction} must be at most {2**_MAX_CONVOLUTIONS}, because the stem has at most "
            f"{_MAX_CONVOLUTIONS} convolutions: reduce it."
        )
    return reduction.bit_length() - 1


def _rename_misspelled(fields: Fields, values: Values) -> None:
    # transformers 4.5x writes `depthwise_seperable_out_channel`. The correct spelling takes precedence.
    value = fields.content.pop("depthwise_seperable_out_channel", None)
    if value is not None:
        fields.content.setdefault("depthwise_separable_out_channel", value)


def _only_embed_dim(key: str) -> Rule:
    """Return the setting of a number of features that must equal `hidden_size`."""

    def read(fields: Fields, values: Values) -> None:
        fields.allow_only(key, values["embed_dim"])

    return Rule("", read, lambda audio: {key: audio.embed_dim})


_FEED_FORWARD = "blocks.0.pre_layers.0.layer."
_MIXER = "blocks.0.mixer."
_CONVOLUTION = "blocks.0.post_layers.0.layer."
_AUDIO_SETTINGS = (
    Rule("", _rename_misspelled),
    OUT_DIM,
    Integer("hidden_size", "embed_dim", 1024),
    Integer("intermediate_size", _FEED_FORWARD + "mlp_dim", 1536),
    Layers("num_blocks", "blocks", 24, name="layers"),
    Integer("num_attention_heads", _MIXER + "num_heads", 16, name="heads"),
    Check(
        lambda values: values["embed_dim"] % values["heads"] == 0,
        "hidden_size={embed_dim} must be a multiple of num_attention_heads={heads}.",
    ),
    Integer("input_size", "stem.mel_bands", 80),
    Integer("nemo_conv_channels", lambda audio: value_at(audio, "stem.filters")[0], 1024, name="filters"),
    Rule("convolutions", _read_convolutions, lambda audio: {"time_reduction": value_at(audio, "stem.stride")}),
    activation("nemo_activation", "stem.activation", "relu", name="stem_activation"),
    activation("activation", _FEED_FORWARD + "activation", "swish"),
    activation("conv_glu_type", _CONVOLUTION + "gate", "swish"),
    activation("conv_activation", _CONVOLUTION + "activation", "swish", name="convolution_activation"),
    Integer("kernel_size", _CONVOLUTION + "taps", 3),
    Integer("bias_max_distance", _MIXER + "distances", 1000),
    Flag("bias_symmetric", _MIXER + "symmetric", False),
    _only_embed_dim("ext_pw_out_channel"),
    _only_embed_dim("depthwise_separable_out_channel"),
    Only("depthwise_multiplier", 1, written=True),
    Only("downsample_rate", 1, written=True),
    Only("chunk_size", -1, written=True),
)
SETTINGS = Table(
    "audio_config",
    (
        Group("audio", sized(SpeechSizes, phi4_audio), _AUDIO_SETTINGS, path="media.audio"),
        token("audio_token_id", "audio_token", AUDIO),
    ),
    model_type="phi4_multimodal_audio",
    ignored={
        "initializer_range": "only initializes new weights",
        "dropout_rate": "only used in training",
        "left_chunk": "only used with several chunks, but chunk_size is -1",
        "feature_layer": "transformers does not read it",
        "nemo_final_size": "determined by the other sizes",
    },
)


# --- tensors ---

_EMBED = "model.embed_tokens_extend.audio_embed."
_TOWER = _EMBED + "encoder."
_LAYER = _TOWER + "encoders.{layer}."
_CONV = _LAYER + "conv."
_CONV_PATH = "audio.post_layers.0.layer."
_KERNEL = "filters input_filters kernel_columns kernel_rows"


def _feed_forward(name: str, path: str) -> tuple[Weight, ...]:
    prefix = f"{_LAYER}{name}."
    mlp = f"audio.{path}.layer."
    return (
        *norm(prefix + "layer_norm", f"audio.{path}.pre_norm"),
        *sharing(
            prefix + "gate_up_proj.weight",
            (mlp + "up", "mlp embed -> embed mlp"),
            (mlp + "gate", "mlp embed -> embed mlp"),
        ),
        *sharing(prefix + "gate_up_proj.bias", (mlp + "up_bias", "mlp -> mlp"), (mlp + "gate_bias", "mlp -> mlp")),
        Weight(prefix + "down_proj.weight", mlp + "down", "embed mlp -> mlp embed"),
        Weight(prefix + "down_proj.bias", mlp + "down_bias", "embed -> embed"),
    )


def _stem_convolution(index: int) -> tuple[Weight, ...]:
    """Return the weight rows of a convolution of the stem.

    In the `Sequential` of the checkpoint, the first convolution and its activation are modules 0 and 1. Each later
    convolution is three modules: depthwise convolution, pointwise convolution and activation.
    """
    path = f"audio.stem.convolutions.{index}."
    module = 0 if index == 0 else 3 * index - 1
    conv = f"{_TOWER}embed.conv.{module}."
    point = f"{_TOWER}embed.conv.{module + 1}."
    return (
        Weight(conv + "weight", path + "kernel", f"{_KERNEL} -> {_KERNEL}"),
        Weight(conv + "bias", path + "bias", "filters -> filters"),
        Weight(point + "weight", path + "point", "outer inner 1 1 -> outer inner"),
        Weight(point + "bias", path + "point_bias", "outer -> outer"),
    )


_INTO_HEADS = "(heads head_dim) embed -> embed heads head_dim"
_HEADS_BIAS = "(heads head_dim) -> heads head_dim"
WEIGHTS = (
    Weight(_TOWER + "encoder_embedding.global_mean", "audio.stem.mean", "norm -> norm"),
    Weight(_TOWER + "encoder_embedding.global_invstd", "audio.stem.scale", "norm -> norm"),
    *(row for index in range(_MAX_CONVOLUTIONS) for row in _stem_convolution(index)),
    Weight(_TOWER + "embed.out.weight", "audio.stem.out", "embed (filters mel) -> mel filters embed"),
    Weight(_TOWER + "embed.out.bias", "audio.stem.out_bias", "embed -> embed"),
    Weight(
        _TOWER + "relative_attention_bias_layer.bias_values.weight", "audio.distance_bias",
        "positions heads -> positions heads",
    ),
    *_feed_forward("feed_forward_in", "pre_layers.0"),
    *norm(_LAYER + "layer_norm_att", "audio.pre_mixer_norm"),
    Weight(_LAYER + "self_attn.q_proj.weight", "audio.mixer.query", _INTO_HEADS),
    Weight(_LAYER + "self_attn.q_proj.bias", "audio.mixer.query_bias", _HEADS_BIAS),
    Weight(_LAYER + "self_attn.k_proj.weight", "audio.mixer.key", _INTO_HEADS),
    Weight(_LAYER + "self_attn.k_proj.bias", "audio.mixer.key_bias", _HEADS_BIAS),
    Weight(_LAYER + "self_attn.v_proj.weight", "audio.mixer.value", _INTO_HEADS),
    Weight(_LAYER + "self_attn.v_proj.bias", "audio.mixer.value_bias", _HEADS_BIAS),
    Weight(_LAYER + "self_attn.o_proj.weight", "audio.mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
    Weight(_LAYER + "self_attn.o_proj.bias", "audio.mixer.out_bias", "embed -> embed"),
    *norm(_CONV + "layer_norm", "audio.post_layers.0.pre_norm"),
    Weight(
        _CONV + "glu.ext_pw_conv_1d.weight", _CONV_PATH + "into", "(inputs channels) embed 1 -> embed inputs channels"
    ),
    Weight(_CONV + "glu.ext_pw_conv_1d.bias", _CONV_PATH + "into_bias", "(inputs channels) -> inputs channels"),
    Weight(_CONV + "glu.b1", _CONV_PATH + "value_shift", "1 channels 1 -> channels"),
    Weight(_CONV + "glu.b2", _CONV_PATH + "gate_shift", "1 channels 1 -> channels"),
    Weight(_CONV + "dw_sep_conv_1d.dw_conv.weight", _CONV_PATH + "taps", "channels 1 taps -> channels taps"),
    Weight(_CONV + "dw_sep_conv_1d.dw_conv.bias", _CONV_PATH + "taps_bias", "channels -> channels"),
    Weight(_CONV + "dw_sep_conv_1d.pw_conv.weight", _CONV_PATH + "point", "outer channels 1 -> channels outer"),
    Weight(_CONV + "dw_sep_conv_1d.pw_conv.bias", _CONV_PATH + "point_bias", "outer -> outer"),
    Weight(_CONV + "ext_pw_conv_1d.weight", _CONV_PATH + "out", "embed channels 1 -> channels embed"),
    Weight(_CONV + "ext_pw_conv_1d.bias", _CONV_PATH + "out_bias", "embed -> embed"),
    *_feed_forward("feed_forward_out", "post_layers.1"),
    *norm(_LAYER + "layer_norm", "audio.residual.norm"),
    *linear(_EMBED + "up_proj_for_speech", "audio.projector.layers.0"),
    *linear(_EMBED + "down_proj_for_speech", "audio.projector.layers.1"),
    *linear(_EMBED + "up_proj_for_vision_speech", "audio.projector_beside.layers.0"),
    *linear(_EMBED + "down_proj_for_vision_speech", "audio.projector_beside.layers.1"),
)  # fmt: skip
