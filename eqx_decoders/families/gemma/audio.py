"""The audio encoder of the smaller Gemma 4 models (Gemma Team 2026): a Conformer (Gulati et al. 2020).

A token covers 40 ms. Attention is local, and its scores depend on contents and on distances. Linear layers clip their
inputs and outputs.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.families.multimodal import linear
from eqx_decoders.families.setting_rows import (
    Check,
    Flag,
    Group,
    Integer,
    Layers,
    Number,
    Rule,
    Table,
    Values,
    activation,
    sized,
    value_at,
)
from eqx_decoders.families.vision_fields import OUT_DIM
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.local_attention import LocalAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig


CLIP = 1e10  # bound of the inputs of norms, which are the residual stream and the outputs of layers
_MLP_RATIO = 4  # ratio of the MLP width to the width of the encoder
_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConformerSizes:
    """Sizes of an audio encoder. The defaults equal `Gemma4AudioConfig` in transformers.

    **Arguments:**

    - `embed_dim`, `layers`, `heads`: width, number of layers, and heads per layer.
    - `mel_bands`: number of mel bands per frame.
    - `filters`: number of filters of each convolution of the stem.
    - `feature_dim`: number of features before the last norm.
    - `taps`: kernel size of the convolution in a layer.
    - `feed_forward_scale`: factor of the output of feed-forward layers.
    - `chunk`, `left`, `right`, `soft_cap`: as in `LocalAttentionConfig`.
    - `eps`, `clip`: as in `RMSNormConfig`.
    - `activation`: activation of MLPs and convolutions.
    - `clipped`: as in `EncoderConfig`.
    """

    embed_dim: int = 1024
    layers: int = 12
    heads: int = 8
    mel_bands: int = 128
    filters: tuple[int, int] = (128, 32)
    feature_dim: int = 1536
    taps: int = 5
    feed_forward_scale: float = 0.5
    chunk: int = 12
    left: int = 13
    right: int = 0
    soft_cap: float = 50.0
    eps: float = 1e-6
    clip: float = CLIP
    activation: str = "silu"
    clipped: bool = True


def conformer_block(sizes: ConformerSizes, **attention_options: Any) -> BlockConfig:
    """Return the configuration of a Conformer layer.

    `attention_options` are further fields of `LocalAttentionConfig`.
    """
    norm = RMSNormConfig(eps=_EPS, clip=sizes.clip)
    mlp = MLPConfig(mlp_dim=_MLP_RATIO * sizes.embed_dim, activation=sizes.activation, gated=False)
    feed_forward = ExtraLayerConfig(layer=mlp, pre_norm=norm, post_norm=norm, scale=sizes.feed_forward_scale)
    convolution = LightConvolutionConfig(
        taps=sizes.taps, activation=sizes.activation, norm=RMSNormConfig(eps=sizes.eps, clip=sizes.clip)
    )
    attention = LocalAttentionConfig(
        num_heads=sizes.heads,
        head_dim=sizes.embed_dim // sizes.heads,
        chunk=sizes.chunk,
        left=sizes.left,
        right=sizes.right,
        soft_cap=sizes.soft_cap,
        **attention_options,
    )
    return BlockConfig(
        pre_layers=(feed_forward,),
        mixer=attention,
        mlp=None,
        pre_mixer_norm=norm,
        post_mixer_norm=norm,
        post_layers=(ExtraLayerConfig(layer=convolution, pre_norm=RMSNormConfig(eps=sizes.eps)), feed_forward),
        residual=Sequential(output_norm=norm),
    )


def gemma4_audio(sizes: ConformerSizes = ConformerSizes(), *, out_dim: int) -> EncoderConfig:
    """Return the configuration of the audio encoder. `out_dim` is the width of the decoder."""
    stem_norm = LayerNormConfig(eps=sizes.eps, bias=False)
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=FrameStemConfig(mel_bands=sizes.mel_bands, filters=sizes.filters, norm=stem_norm),
        blocks=(conformer_block(sizes),) * sizes.layers,
        projector=ProjectorConfig(
            layers=(
                ProjectionConfig(dim=sizes.feature_dim, bias=True),
                ProjectionConfig(dim=out_dim, norm=RMSNormConfig(eps=sizes.eps, scale=False)),
            )
        ),
        clipped=sizes.clipped,
    )


# --- config.json ---


def _mel_bands(fields: Fields, values: Values) -> int:
    # The input projection in transformers expects filters[0] // 4 bands after two convolutions of stride 2.
    return 4 * (values["filters"][0] // 4)


def _check_invalid_logits(fields: Fields, values: Values) -> None:
    value = fields.take("attention_invalid_logits_value", -1e9)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value <= -1e4:
        raise fields.error(
            f"attention_invalid_logits_value={abbreviate(value)} must be a number of at most -10000, so that masked "
            "keys have an attention weight of 0."
        )


def _read_filters(fields: Fields, values: Values) -> tuple[int, int]:
    filters = fields.integers("subsampling_conv_channels", [128, 32])
    if len(filters) != 2 or not 4 <= filters[0] < 2**31 or not 1 <= filters[1] < 2**31:
        raise fields.error(
            f"subsampling_conv_channels={abbreviate(list(filters))} must be a list of two numbers: the first at least "
            "4, the second at least 1."
        )
    return filters[0], filters[1]


_FEED_FORWARD = "blocks.0.pre_layers.0."
_MIXER = "blocks.0.mixer."
_CONVOLUTION = "blocks.0.post_layers.0.layer."
_AUDIO_SETTINGS = (
    OUT_DIM,
    Integer("hidden_size", "embed_dim", 1024),
    Integer("num_attention_heads", _MIXER + "num_heads", 8, name="heads"),
    Check(
        lambda values: values["embed_dim"] % values["heads"] == 0,
        "hidden_size={embed_dim} must be a multiple of num_attention_heads={heads}.",
    ),
    Integer("attention_context_left", _MIXER + "left", 13),
    Integer("attention_context_right", _MIXER + "right", 0, least=0),
    Check(
        lambda values: values["left"] >= 2,
        "attention_context_left={left} must be at least 2, so that every token attends to itself.",
    ),
    Rule("", _check_invalid_logits, lambda audio: {"attention_invalid_logits_value": -1e9}),
    Rule("filters", _read_filters, lambda audio: {"subsampling_conv_channels": list(value_at(audio, "stem.filters"))}),
    Rule("mel_bands", _mel_bands),
    Layers("num_hidden_layers", "blocks", 12, name="layers"),
    Integer("output_proj_dims", "projector.layers.0.dim", 1536, name="feature_dim"),
    Integer("conv_kernel_size", _CONVOLUTION + "taps", 5),
    Number("residual_weight", _FEED_FORWARD + "scale", 0.5, name="feed_forward_scale"),
    Integer("attention_chunk_size", _MIXER + "chunk", 12),
    Number("attention_logit_cap", _MIXER + "soft_cap", 50.0),
    Number("rms_norm_eps", _CONVOLUTION + "norm.eps", 1e-6),
    Number(
        "gradient_clipping", lambda audio: value_at(audio, "blocks.0.pre_mixer_norm.clip") or CLIP, CLIP, name="clip"
    ),
    activation("hidden_act", _FEED_FORWARD + "layer.activation", "silu"),
    Flag("use_clipped_linears", "clipped", True),
)
SETTINGS = Table(
    "audio_config",
    (Group("audio", sized(ConformerSizes, gemma4_audio), _AUDIO_SETTINGS, path="media.audio"),),
    model_type="gemma4_audio",
    what="",
    ignored={"initializer_range": "only initializes new weights"},
)


# --- tensors ---


def maybe_clipped(row: Weight) -> Iterator[Weight]:
    """Yield the weight rows of a linear layer, for both a plain weight and a `ClippedWeight` with its bounds."""
    prefix = row.name.removesuffix("weight")
    yield Weight(f"{prefix}linear.weight", row.path, row.pattern)
    yield Weight(f"{prefix}linear.weight", f"{row.path}.weight", row.pattern)
    for bound in ("input_min", "input_max", "output_min", "output_max"):
        yield Weight(prefix + bound, f"{row.path}.{bound}", " -> ")


_TOWER = "model.audio_tower."
_LAYER = _TOWER + "layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_HEADS = "(heads head_dim)"
_INTO_HEADS = f"{_HEADS} embed -> embed heads head_dim"
_KERNEL = "filters input_filters kernel_columns kernel_rows"
_MATRICES = (
    Weight(_ATTENTION + "q_proj.weight", "audio.mixer.query", _INTO_HEADS),
    Weight(_ATTENTION + "k_proj.weight", "audio.mixer.key", _INTO_HEADS),
    Weight(_ATTENTION + "v_proj.weight", "audio.mixer.value", _INTO_HEADS),
    Weight(_ATTENTION + "post.weight", "audio.mixer.out", f"embed {_HEADS} -> heads head_dim embed"),
    Weight(_LAYER + "feed_forward1.ffw_layer_1.weight", "audio.pre_layers.0.layer.up", "mlp embed -> embed mlp"),
    Weight(_LAYER + "feed_forward2.ffw_layer_1.weight", "audio.post_layers.1.layer.up", "mlp embed -> embed mlp"),
    Weight(_LAYER + "feed_forward1.ffw_layer_2.weight", "audio.pre_layers.0.layer.down", "embed mlp -> mlp embed"),
    Weight(_LAYER + "feed_forward2.ffw_layer_2.weight", "audio.post_layers.1.layer.down", "embed mlp -> mlp embed"),
    Weight(_LAYER + "lconv1d.linear_start.weight", "audio.post_layers.0.layer.into",
           "(inputs channels) embed -> embed inputs channels"),
    Weight(_LAYER + "lconv1d.linear_end.weight", "audio.post_layers.0.layer.out", "embed channels -> channels embed"),
)  # fmt: skip
_NORMS = {
    "feed_forward1.pre_layer_norm": "pre_layers.0.pre_norm",
    "feed_forward1.post_layer_norm": "pre_layers.0.post_norm",
    "norm_pre_attn": "pre_mixer_norm",
    "norm_post_attn": "post_mixer_norm",
    "lconv1d.pre_layer_norm": "post_layers.0.pre_norm",
    "lconv1d.conv_norm": "post_layers.0.layer.norm",
    "feed_forward2.pre_layer_norm": "post_layers.1.pre_norm",
    "feed_forward2.post_layer_norm": "post_layers.1.post_norm",
    "norm_out": "residual.norm",
}
_STEM = _TOWER + "subsample_conv_projection."
_OTHERS = (
    *(Weight(f"{_STEM}layer{index}.conv.weight", f"audio.stem.convolutions.{index}.kernel", f"{_KERNEL} -> {_KERNEL}")
      for index in range(2)),
    *(Weight(f"{_STEM}layer{index}.norm.weight", f"audio.stem.convolutions.{index}.norm.scale", "norm -> norm")
      for index in range(2)),
    Weight(_STEM + "input_proj_linear.weight", "audio.stem.out", "embed (mel filters) -> mel filters embed"),
    Weight(_ATTENTION + "relative_k_proj.weight", "audio.mixer.relative_key",
           f"{_HEADS} signal -> signal heads head_dim"),
    Weight(_ATTENTION + "per_dim_scale", "audio.mixer.scale", "head_dim -> head_dim"),
    Weight(_LAYER + "lconv1d.depthwise_conv1d.weight", "audio.post_layers.0.layer.taps",
           "channels 1 taps -> channels taps"),
    *(Weight(f"{_LAYER}{name}.weight", f"audio.{path}.scale", "norm -> norm") for name, path in _NORMS.items()),
)  # fmt: skip
CONFORMER_WEIGHTS = _MATRICES + _OTHERS  # without a projector and without the bounds of linear layers
WEIGHTS = (
    *(clipped_row for row in _MATRICES for clipped_row in maybe_clipped(row)),
    *_OTHERS,
    *linear(_TOWER + "output_proj", "audio.projector.layers.0"),
    *linear("model.embed_audio.embedding_projection", "audio.projector.layers.1"),
)
