"""MobileNet V5 of timm, the vision encoder of Gemma 3n: architectures, settings in `config.json` and tensor names."""

import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_keys import json_name
from eqx_decoders.families.gemma.mobilenet import (
    EdgeResidualConfig,
    Edges,
    InvertedResidualConfig,
    MobileNetConfig,
    PlaneAttentionConfig,
    PlaneBlockConfig,
)
from eqx_decoders.families.setting_rows import Values
from eqx_decoders.families.weight_rows import Weight


_Stage = tuple[PlaneBlockConfig, ...]
_MAX_STAGES = 4  # In later stages, timm dilates convolutions in place of their stride.
_CHANNEL_MULTIPLE = 8


def _first_two_stages() -> tuple[_Stage, ...]:
    return (
        (EdgeResidualConfig(dim=128, stride=2), EdgeResidualConfig(dim=128), EdgeResidualConfig(dim=128)),
        (
            InvertedResidualConfig(dim=256, start=3, middle=5, stride=2, expansion=6.0),
            *(InvertedResidualConfig(dim=256, start=kernel) for kernel in (5, 3, 5, 3)),
        ),
    )


def _downsampling_block(dim: int) -> PlaneBlockConfig:
    return InvertedResidualConfig(dim=dim, start=5, middle=5, stride=2, expansion=6.0)


def _convolution_blocks(count: int, dim: int) -> _Stage:
    """Return `count` blocks with a depthwise convolution, followed by one pointwise block."""
    return (
        *(InvertedResidualConfig(dim=dim, start=5),) * count,
        InvertedResidualConfig(dim=dim, expansion=1.0),
    )


def _attention_blocks(count: int, dim: int, heads: int, head_dim: int, kv_stride: int = 1) -> _Stage:
    """Return `count` pairs of an attention block and a pointwise block."""
    attention = PlaneAttentionConfig(dim=dim, num_heads=heads, head_dim=head_dim, kv_stride=kv_stride)
    return (attention, InvertedResidualConfig(dim=dim, expansion=2.0)) * count


def _large_stages() -> tuple[_Stage, ...]:
    return (
        *_first_two_stages(),
        (_downsampling_block(640), *_convolution_blocks(7, 640), *_attention_blocks(14, 640, 12, 64, kv_stride=2)),
        (_downsampling_block(1280), *_attention_blocks(19, 1280, 16, 96)),
    )


def _base_stages() -> tuple[_Stage, ...]:
    return (
        *_first_two_stages(),
        (_downsampling_block(512), *_convolution_blocks(2, 512), *_attention_blocks(6, 512, 8, 64)),
        (_downsampling_block(1024), *_attention_blocks(7, 1024, 16, 64)),
    )


_EDGES: dict[str, Edges] = {"same": "same", "": "equal"}  # by the value of `pad_type` in timm


def _network(stages: tuple[_Stage, ...], edges: Edges) -> MobileNetConfig:
    return MobileNetConfig(stem_dim=64, stages=stages, fused=(2, 3), edges=edges)


@functools.cache
def architectures() -> Mapping[str, MobileNetConfig]:
    """Return the architectures of timm by name."""
    return {
        "mobilenetv5_300m_enc": _network(_large_stages(), "same"),
        "mobilenetv5_300m": _network(_large_stages(), "equal"),
        "mobilenetv5_base": _network(_base_stages(), "equal"),
    }


_ENCODER = "mobilenetv5_300m_enc"  # timm ignores `num_features` for this architecture
_ENCODER_FEATURES = 2048
_CUSTOM = "mobilenetv5_300m"  # the architecture that an export names for a custom network, with `model_args`


# --- settings ---


def read_network(fields: Fields, values: Values) -> MobileNetConfig:
    """Read the network from `architecture` and `model_args`.

    `values["embed_dim"]` must contain `hidden_size`, the number of features of the network. Raises ConversionError if
    the network has another number of features, or if a setting is not supported.
    """
    known = architectures()
    name = fields.word("architecture", {name: name for name in known}, _ENCODER)
    network = known[name]
    args = fields.table("model_args") or Fields({}, f"{fields.where}: model_args")
    features = _ENCODER_FEATURES if name == _ENCODER else args.integer("num_features", _ENCODER_FEATURES)
    hidden_size = values["embed_dim"]
    if hidden_size != features:
        raise fields.error(
            f"hidden_size={hidden_size} must be {features}, the number of features of architecture={name}."
        )
    stages = _read_stages(args) or network.stages
    layer_scale = args.take("layer_scale_init_value", network.layer_scale, null=None)
    config = MobileNetConfig(
        stem_dim=_read_channels(args, "stem_size", network.stem_dim),
        stages=stages,
        fused=_read_fused(args, len(stages)),
        side=args.integer("msfa_output_resolution", network.side),
        channels=args.integer("in_chans", network.channels),
        edges=args.word("pad_type", _EDGES, json_name(_EDGES, network.edges, "pad_type")),
        layer_scale=None if layer_scale is None else args.number("layer_scale_init_value", layer_scale),
    )
    args.finish()
    return config


def _read_fused(args: Fields, num_stages: int) -> tuple[int, ...]:
    """Return the indices of the fused stages. In timm, 0 is the stem and negative numbers count from the last stage."""
    indices = args.integers("msfa_indices", [-2, -1])
    if not indices or any(not -num_stages <= index <= num_stages or index == 0 for index in indices):
        raise args.error(
            f"msfa_indices={abbreviate(list(indices))} must be stage numbers from 1 to {num_stages} or from "
            f"-{num_stages} to -1. Fusing the stem (0) is not supported."
        )
    return tuple(index - 1 if index > 0 else index + num_stages for index in indices)


def _read_stages(args: Fields) -> tuple[_Stage, ...] | None:
    content = args.take("block_args", None)
    if content is None:
        return None
    is_valid = isinstance(content, list) and 0 < len(content) <= _MAX_STAGES
    if not is_valid or not all(isinstance(blocks, list) and blocks for blocks in content):
        raise args.error(
            f"block_args={abbreviate(content)} must be a list of 1 to {_MAX_STAGES} stages. A stage is a list of at "
            "least one block."
        )
    return tuple(
        tuple(
            _read_block(block, index, f"{args.where}: block_args[{stage}][{index}]")
            for index, block in enumerate(blocks)
        )
        for stage, blocks in enumerate(content)
    )


def _read_block(content: Any, index: int, where: str) -> PlaneBlockConfig:
    if not isinstance(content, dict):
        raise ConversionError(f"{where}={abbreviate(content)} must be an object with a block_type.")
    fields = Fields(content, where)
    read = fields.word("block_type", {"er": _read_edge, "uir": _read_inverted, "mqa": _read_attention})
    stride = fields.integer("stride", 1)
    fields.allow_only("act_layer")
    fields.allow_only("noskip", False)
    fields.allow_only("group_size", 1)
    fields.allow_only("se_ratio", 0, 0.0)
    fields.allow_only("force_in_chs", 0, 0.0)
    dim = _read_channels(fields, "out_chs")
    block = read(fields, dim, stride if index == 0 else 1)  # timm ignores the stride of later blocks of a stage
    fields.finish()
    return block


def _read_edge(fields: Fields, dim: int, stride: int) -> PlaneBlockConfig:
    fields.allow_only("pw_kernel_size", 1)
    kernel = fields.integer("exp_kernel_size", 3)
    expansion = float(fields.number("exp_ratio", 1.0))
    return EdgeResidualConfig(dim=dim, kernel=kernel, stride=stride, expansion=expansion)


def _read_inverted(fields: Fields, dim: int, stride: int) -> PlaneBlockConfig:
    fields.allow_only("dw_kernel_size_end", 0)
    start = fields.integer("dw_kernel_size_start", 0, least=0)
    middle = fields.integer("dw_kernel_size_mid", 3, least=0)
    expansion = float(fields.number("exp_ratio", 1.0))
    return InvertedResidualConfig(dim=dim, start=start, middle=middle, stride=stride, expansion=expansion)


def _read_attention(fields: Fields, dim: int, stride: int) -> PlaneBlockConfig:
    head_dim = fields.integer("key_dim", 64)
    fields.allow_only("value_dim", head_dim)
    if stride != 1:
        raise fields.error(f"stride={stride} must be 1: attention blocks do not change the size of an image.")
    return PlaneAttentionConfig(
        dim=dim,
        num_heads=fields.integer("num_heads", 8),
        head_dim=head_dim,
        kv_stride=fields.integer("kv_stride", 1),
        kernel=fields.integer("dw_kernel_size", 3),
    )


def _read_channels(fields: Fields, key: str, *default: int) -> int:
    channels = fields.integer(key, *default)
    if channels % _CHANNEL_MULTIPLE:
        raise fields.error(
            f"{key}={channels} must be a multiple of {_CHANNEL_MULTIPLE}, because timm would round it to a multiple."
        )
    return channels


def write_network(encoder: EncoderConfig) -> dict[str, Any]:
    """Return `architecture` and `model_args` for an encoder's network.

    `model_args` is None if the network equals an architecture of timm. The result is empty if the encoder is not a
    MobileNet.
    """
    network = encoder.stem
    features = encoder.embed_dim
    for name, known in architectures().items():
        if network == known and features == _ENCODER_FEATURES:
            return {"architecture": name, "model_args": None}
    if not isinstance(network, MobileNetConfig):
        return {}
    args = {
        "block_args": [[_write_block(block) for block in stage] for stage in network.stages],
        "stem_size": network.stem_dim,
        "num_features": features,
        "msfa_indices": [stage + 1 for stage in network.fused],
        "msfa_output_resolution": network.side,
        "in_chans": network.channels,
        "pad_type": json_name(_EDGES, network.edges, "pad_type"),
        "layer_scale_init_value": network.layer_scale,
    }
    return {"architecture": _CUSTOM, "model_args": args}


def _write_block(block: PlaneBlockConfig) -> dict[str, Any]:
    """Return the arguments of a block in the format of `decode_arch_def` in timm."""
    common = {"out_chs": block.dim, "stride": block.stride, "act_layer": None, "noskip": False}
    if isinstance(block, PlaneAttentionConfig):
        return {
            "block_type": "mqa",
            **common,
            "num_heads": block.num_heads,
            "key_dim": block.head_dim,
            "value_dim": block.head_dim,
            "kv_stride": block.kv_stride,
            "dw_kernel_size": block.kernel,
        }
    if isinstance(block, EdgeResidualConfig):
        return {
            "block_type": "er",
            **common,
            "exp_kernel_size": block.kernel,
            "pw_kernel_size": 1,
            "force_in_chs": 0,
            "exp_ratio": block.expansion,
            "se_ratio": 0.0,
        }
    return {
        "block_type": "uir",
        **common,
        "dw_kernel_size_start": block.start,
        "dw_kernel_size_mid": block.middle,
        "dw_kernel_size_end": 0,
        "exp_ratio": block.expansion,
        "se_ratio": 0.0,
    }


# --- tensors ---

_PLANE = "filters input_filters kernel_rows kernel_columns -> kernel_rows kernel_columns input_filters filters"
_DEPTHWISE = "filters 1 kernel_rows kernel_columns -> kernel_rows kernel_columns filters"
_POINT = "outer inner 1 1 -> inner outer"
_BLOCK = "blocks.{stage}.{block}."
_ATTENTION = _BLOCK + "attn."
# (name of a convolution, name of its norm, path, pattern)
_CONVOLUTIONS = (
    ("conv_stem.conv", "conv_stem.bn", "stem.first", _PLANE),
    (_BLOCK + "conv_exp", _BLOCK + "bn1", "widen", _PLANE),
    (_BLOCK + "conv_pwl", _BLOCK + "bn2", "narrow", _POINT),
    (_BLOCK + "dw_start.conv", _BLOCK + "dw_start.bn", "start", _DEPTHWISE),
    (_BLOCK + "pw_exp.conv", _BLOCK + "pw_exp.bn", "expand", _POINT),
    (_BLOCK + "dw_mid.conv", _BLOCK + "dw_mid.bn", "middle", _DEPTHWISE),
    (_BLOCK + "pw_proj.conv", _BLOCK + "pw_proj.bn", "project", _POINT),
    (_ATTENTION + "key.down_conv", _ATTENTION + "key.norm", "reduce_key", _DEPTHWISE),
    (_ATTENTION + "value.down_conv", _ATTENTION + "value.norm", "reduce_value", _DEPTHWISE),
    ("msfa.ffn.pw_exp.conv", "msfa.ffn.pw_exp.bn", "stem.expand", _POINT),
    ("msfa.ffn.pw_proj.conv", "msfa.ffn.pw_proj.bn", "stem.project", _POINT),
)


def network_weights(tower: str) -> tuple[Weight, ...]:
    """Return the weight rows of the network. `tower` is the prefix of its tensor names."""
    heads = "(heads head_dim)"
    rows = [
        *(Weight(f"{name}.weight", f"vision.{path}.kernel", pattern) for name, _, path, pattern in _CONVOLUTIONS),
        *(Weight(f"{norm}.weight", f"vision.{path}.norm.scale", "norm -> norm") for _, norm, path, _ in _CONVOLUTIONS),
        Weight("conv_stem.conv.bias", "vision.stem.first.bias", "filters -> filters"),
        Weight(_BLOCK + "norm.weight", "vision.norm.scale", "norm -> norm"),
        Weight(_BLOCK + "layer_scale.gamma", "vision.scale.scale", "norm -> norm"),
        Weight(_ATTENTION + "query.proj.weight", "vision.query", f"{heads} embed 1 1 -> embed heads head_dim"),
        Weight(_ATTENTION + "key.proj.weight", "vision.key", "head_dim embed 1 1 -> embed head_dim"),
        Weight(_ATTENTION + "value.proj.weight", "vision.value", "head_dim embed 1 1 -> embed head_dim"),
        Weight(_ATTENTION + "output.proj.weight", "vision.out", f"embed {heads} 1 1 -> heads head_dim embed"),
        Weight("msfa.norm.weight", "vision.stem.norm.scale", "norm -> norm"),
    ]
    return tuple(Weight(tower + row.name, row.path, row.pattern) for row in rows)
