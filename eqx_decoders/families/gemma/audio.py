"""Audio encoder of the smaller Gemma 4 (Gemma Team 2026): a Conformer (Gulati et al. 2020), 40 ms a token.

Its attention is local, by content and distance; its matrices clip their inputs and outputs.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.families.multimodal import linear
from eqx_decoders.families.settings_table import (
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


# The stream is never larger, and neither is what a layer adds before its norm.
CLIP = 1e10
_MLP_SIZE, _EPS = 4, 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConformerSizes:
    """Sizes of the encoder of audio; the defaults are those of transformers' `Gemma4AudioConfig`.

    **Arguments:**

    - `embed_dim`, `layers`, `heads`: features, number and heads of the layers.
    - `feature_dim`: number of features before the last norm.
    - `mel_bands`, `filters`: bands of a frame, and filters of each convolution of the input layers.
    - `taps`: taps of a layer's convolution.
    - `half`: factor of feed-forward layers.
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
    half: float = 0.5
    chunk: int = 12
    left: int = 13
    right: int = 0
    soft_cap: float = 50.0
    eps: float = 1e-6
    clip: float = CLIP
    activation: str = "silu"
    clipped: bool = True


def conformer_block(sizes: ConformerSizes, **distances: Any) -> BlockConfig:
    """Return a layer; `distances` are further fields of its attention."""
    activation, heads = sizes.activation, sizes.heads
    plain, norm = RMSNormConfig(eps=sizes.eps), RMSNormConfig(eps=_EPS, clip=sizes.clip)
    mlp = MLPConfig(mlp_dim=_MLP_SIZE * sizes.embed_dim, activation=activation, gated=False)
    feed_forward = ExtraLayerConfig(layer=mlp, pre_norm=norm, post_norm=norm, scale=sizes.half)
    convolution_norm = RMSNormConfig(eps=sizes.eps, clip=sizes.clip)
    convolution = LightConvolutionConfig(taps=sizes.taps, activation=activation, norm=convolution_norm)
    return BlockConfig(
        pre_layers=(feed_forward,),
        mixer=LocalAttentionConfig(
            num_heads=heads, head_dim=sizes.embed_dim // heads, chunk=sizes.chunk, left=sizes.left, right=sizes.right,
            soft_cap=sizes.soft_cap, **distances,
        ),
        mlp=None,
        pre_mixer_norm=norm,
        post_mixer_norm=norm,
        post_layers=(ExtraLayerConfig(layer=convolution, pre_norm=plain), feed_forward),
        residual=Sequential(output_norm=norm),
    )  # fmt: skip


def gemma4_audio(sizes: ConformerSizes = ConformerSizes(), *, out_dim: int) -> EncoderConfig:
    """Return the encoder of audio."""
    stem_norm = LayerNormConfig(eps=sizes.eps, bias=False)
    last = ProjectionConfig(dim=out_dim, norm=RMSNormConfig(eps=sizes.eps, scale=False))
    return EncoderConfig(
        embed_dim=sizes.embed_dim,
        stem=FrameStemConfig(mel_bands=sizes.mel_bands, filters=sizes.filters, norm=stem_norm),
        blocks=(conformer_block(sizes),) * sizes.layers,
        projector=ProjectorConfig(layers=(ProjectionConfig(dim=sizes.feature_dim, bias=True), last)),
        clipped=sizes.clipped,
    )


# --- config.json ---


def _bands(filters: Sequence[int]) -> int:
    """Return the bands of a frame: transformers' input projection expects `filters[0] // 4` behind the convolutions."""
    return 4 * (filters[0] // 4)


def _check_invalid_logits(fields: Fields, values: Values) -> None:
    invalid = fields.take("attention_invalid_logits_value", -1e9)
    if not isinstance(invalid, int | float) or isinstance(invalid, bool) or not invalid <= -1e4:
        rule = "must be a number of at most -10000: what is not seen has no weight"
        raise fields.error(f"attention_invalid_logits_value={abbreviate(invalid)} {rule}.")


def _read_filters(fields: Fields, values: Values) -> tuple[int, int]:
    filters = fields.numbers("subsampling_conv_channels", [128, 32])
    if len(filters) != 2 or filters[0] < 4 or not 0 < filters[1] < 2**31 or filters[0] >= 2**31:
        rule = "must be two numbers above 0, the first one at least 4"
        raise fields.error(f"subsampling_conv_channels={abbreviate(filters)} {rule}.")
    return filters[0], filters[1]


_BRANCH = "blocks.0.pre_layers.0."
_MIXER = "blocks.0.mixer."
_CONVOLUTION = "blocks.0.post_layers.0.layer."
_AUDIO = (
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
        "attention_context_left={left} must be at least 2: tokens that see none have no meaning.",
    ),
    Rule("", _check_invalid_logits, lambda audio: {"attention_invalid_logits_value": -1e9}),
    Rule("filters", _read_filters, lambda audio: {"subsampling_conv_channels": list(value_at(audio, "stem.filters"))}),
    Rule("mel_bands", lambda fields, values: _bands(values["filters"])),
    Layers("num_hidden_layers", "blocks", 12, name="layers"),
    Integer("output_proj_dims", "projector.layers.0.dim", 1536, name="feature_dim"),
    Integer("conv_kernel_size", _CONVOLUTION + "taps", 5),
    Number("residual_weight", _BRANCH + "scale", 0.5, name="half"),
    Integer("attention_chunk_size", _MIXER + "chunk", 12),
    Number("attention_logit_cap", _MIXER + "soft_cap", 50.0),
    Number("rms_norm_eps", _CONVOLUTION + "norm.eps", 1e-6),
    Number(
        "gradient_clipping", lambda audio: value_at(audio, "blocks.0.pre_mixer_norm.clip") or CLIP, CLIP, name="clip"
    ),
    activation("hidden_act", _BRANCH + "layer.activation", "silu"),
    Flag("use_clipped_linears", "clipped", True),
)
SETTINGS = Table(
    "audio_config",
    (Group("audio", sized(ConformerSizes, gemma4_audio), _AUDIO, path="media.audio"),),
    model_type="gemma4_audio",
    what="",
    ignored={"initializer_range": "of new weights"},
)


# --- tensors ---


def maybe_clipped(row: Weight) -> Iterator[Weight]:
    """Yield the rows of a projection, without and with the bounds of its inputs and outputs."""
    name = row.name.removesuffix("weight")
    yield Weight(f"{name}linear.weight", row.path, row.pattern)
    yield Weight(f"{name}linear.weight", f"{row.path}.weight", row.pattern)
    for bound in ("input_min", "input_max", "output_min", "output_max"):
        yield Weight(name + bound, f"{row.path}.{bound}", " -> ")


_TOWER = "model.audio_tower."
_LAYER = _TOWER + "layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_HEADS, _KERNEL = "(heads head_dim)", "filters input_filters kernel_columns kernel_rows"
_MATRICES = (
    *(Weight(f"{_ATTENTION}{part[0]}_proj.weight", f"audio.mixer.{part}", f"{_HEADS} embed -> embed heads head_dim")
      for part in ("query", "key", "value")),
    Weight(_ATTENTION + "post.weight", "audio.mixer.out", f"embed {_HEADS} -> heads head_dim embed"),
    *(Weight(f"{_LAYER}feed_forward{number}.ffw_layer_1.weight", f"audio.{path}.layer.up", "mlp embed -> embed mlp")
      for number, path in ((1, "pre_layers.0"), (2, "post_layers.1"))),
    *(Weight(f"{_LAYER}feed_forward{number}.ffw_layer_2.weight", f"audio.{path}.layer.down", "embed mlp -> mlp embed")
      for number, path in ((1, "pre_layers.0"), (2, "post_layers.1"))),
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
CONFORMER = _MATRICES + _OTHERS  # without a projector and without bounds
WEIGHTS = (
    *(bounded for row in _MATRICES for bounded in maybe_clipped(row)),
    *_OTHERS,
    *linear(_TOWER + "output_proj", "audio.projector.layers.0"),
    *linear("model.embed_audio.embedding_projection", "audio.projector.layers.1"),
)
