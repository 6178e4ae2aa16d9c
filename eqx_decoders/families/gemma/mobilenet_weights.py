"""MobileNet V5 as timm's files have it (Gemma 3n's encoder of images): its architectures, settings and tensors."""

import functools
from collections.abc import Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.families.config_keys import json_name
from eqx_decoders.families.gemma.mobilenet import (
    EdgeResidualConfig,
    Edges,
    InvertedResidualConfig,
    MobileNetConfig,
    PlaneAttentionConfig,
    PlaneBlockConfig,
)
from eqx_decoders.families.settings_table import Values
from eqx_decoders.families.weight_rows import Weight


_edge, _inverted, _attention = EdgeResidualConfig, InvertedResidualConfig, PlaneAttentionConfig
Stage = tuple[PlaneBlockConfig, ...]
_MOST_STAGES = 4  # timm widens the convolutions of later ones, in place of their steps
_EIGHT = 8


def _first_stages() -> tuple[Stage, ...]:
    small = (5, 3, 5, 3)
    return (
        (_edge(dim=128, stride=2), _edge(dim=128), _edge(dim=128)),
        (
            _inverted(dim=256, start=3, middle=5, stride=2, expansion=6.0),
            *(_inverted(dim=256, start=size) for size in small),
        ),
    )


def _begin(dim: int) -> PlaneBlockConfig:
    return _inverted(dim=dim, start=5, middle=5, stride=2, expansion=6.0)


def _attending(times: int, dim: int, heads: int, head_dim: int, kv_stride: int = 1) -> Stage:
    """Return pairs of a block that attends and one that computes at each pixel."""
    mixer = _attention(dim=dim, num_heads=heads, head_dim=head_dim, kv_stride=kv_stride)
    return (mixer, _inverted(dim=dim, expansion=2.0)) * times


def _large() -> tuple[Stage, ...]:
    wide = (*(_inverted(dim=640, start=5),) * 7, _inverted(dim=640, expansion=1.0))
    return (
        *_first_stages(),
        (_begin(640), *wide, *_attending(14, 640, 12, 64, 2)),
        (_begin(1280), *_attending(19, 1280, 16, 96)),
    )


def _base() -> tuple[Stage, ...]:
    wide = (*(_inverted(dim=512, start=5),) * 2, _inverted(dim=512, expansion=1.0))
    return (
        *_first_stages(),
        (_begin(512), *wide, *_attending(6, 512, 8, 64)),
        (_begin(1024), *_attending(7, 1024, 16, 64)),
    )


_EDGES: dict[str, Edges] = {"same": "same", "": "equal"}  # by timm's `pad_type`


def _network(stages: tuple[Stage, ...], edges: Edges) -> MobileNetConfig:
    return MobileNetConfig(stem_dim=64, stages=stages, fused=(2, 3), edges=edges)


@functools.cache
def architectures() -> Mapping[str, MobileNetConfig]:
    """Return timm's architectures by name."""
    return {
        "mobilenetv5_300m_enc": _network(_large(), "same"),
        "mobilenetv5_300m": _network(_large(), "equal"),
        "mobilenetv5_base": _network(_base(), "equal"),
    }


_FIXED, _OTHER = "mobilenetv5_300m_enc", "mobilenetv5_300m"  # the first one makes as many features whatever is said
_FIXED_FEATURES = 2048


# --- settings ---


def read_network(fields: Fields, values: Values) -> MobileNetConfig:
    """Read the network from `architecture` and `model_args`, behind `hidden_size`, its number of features."""
    known = architectures()
    name = fields.word("architecture", {each: each for each in known}, _FIXED)
    args = fields.table("model_args") or Fields({}, f"{fields.where}: model_args")
    network, features = known[name], values["embed_dim"]
    width = _FIXED_FEATURES if name == _FIXED else args.integer("num_features", _FIXED_FEATURES)
    if width != features:
        raise fields.error(f"hidden_size={features} must be the {width} features that {name} makes.")
    stages = _read_stages(args) or network.stages
    scale = args.take("layer_scale_init_value", network.layer_scale, null=None)
    config: dict[str, Any] = dict(
        stem_dim=_multiple(args, "stem_size", network.stem_dim),
        stages=stages,
        fused=_read_fused(args, len(stages)),
        side=args.integer("msfa_output_resolution", network.side),
        channels=args.integer("in_chans", network.channels),
        edges=args.word("pad_type", _EDGES, json_name(_EDGES, network.edges, "pad_type")),
        layer_scale=None if scale is None else args.number("layer_scale_init_value", scale),
    )
    args.finish()
    return MobileNetConfig(**config)


def _read_fused(args: Fields, stages: int) -> tuple[int, ...]:
    """Read the fused stages; in timm 0 is the input layer, and negative numbers count from the last."""
    indices = args.numbers("msfa_indices", [-2, -1])
    if not indices or any(not -stages <= index <= stages or index == 0 for index in indices):
        rule = f"must name stages, 1 to {stages} or -{stages} to -1: the input layer is not fused here"
        raise args.error(f"msfa_indices={abbreviate(list(indices))} {rule}.")
    return tuple(index - 1 if index > 0 else index + stages for index in indices)


def _read_stages(args: Fields) -> tuple[Stage, ...] | None:
    content = args.take("block_args", None)
    if content is None:
        return None
    good = isinstance(content, list) and 0 < len(content) <= _MOST_STAGES
    if not good or not all(isinstance(stage, list) and stage for stage in content):
        raise args.error(f"block_args must be a list of 1 to {_MOST_STAGES} stages, each a list of blocks.")
    return tuple(
        tuple(
            _read_block(block, index, f"{args.where}: block_args[{number}][{index}]")
            for index, block in enumerate(stage)
        )
        for number, stage in enumerate(content)
    )


def _read_block(content: Any, index: int, where: str) -> PlaneBlockConfig:
    fields = Fields(content if isinstance(content, dict) else {}, where)
    kind = fields.word("block_type", {"er": _read_edge, "uir": _read_inverted, "mqa": _read_attention})
    stride = fields.integer("stride", 1)
    for key, value in (("act_layer", None), ("noskip", False), ("group_size", 1)):
        fields.allow_only(key, *(() if value is None else (value,)))
    for key in ("se_ratio", "force_in_chs"):
        fields.allow_only(key, 0, 0.0)
    block = kind(fields, _multiple(fields, "out_chs"), stride if index == 0 else 1)  # as timm does
    fields.finish()
    return block


def _read_edge(fields: Fields, dim: int, stride: int) -> PlaneBlockConfig:
    fields.allow_only("pw_kernel_size", 1)
    kernel = fields.integer("exp_kernel_size", 3)
    return _edge(dim=dim, kernel=kernel, stride=stride, expansion=float(fields.number("exp_ratio", 1.0)))


def _read_inverted(fields: Fields, dim: int, stride: int) -> PlaneBlockConfig:
    fields.allow_only("dw_kernel_size_end", 0)
    start, middle = (
        fields.integer(f"dw_kernel_size_{place}", size, least=0) for place, size in (("start", 0), ("mid", 3))
    )
    expansion = float(fields.number("exp_ratio", 1.0))
    return _inverted(dim=dim, start=start, middle=middle, stride=stride, expansion=expansion)


def _read_attention(fields: Fields, dim: int, stride: int) -> PlaneBlockConfig:
    head_dim = fields.integer("key_dim", 64)
    fields.allow_only("value_dim", head_dim)
    if stride != 1:
        raise fields.error(f"stride={stride} must be 1: attention does not halve an image.")
    return _attention(
        dim=dim,
        num_heads=fields.integer("num_heads", 8),
        head_dim=head_dim,
        kv_stride=fields.integer("kv_stride", 1),
        kernel=fields.integer("dw_kernel_size", 3),
    )


def _multiple(fields: Fields, key: str, *default: int) -> int:
    """Read a number of features, which timm would round."""
    count = fields.integer(key, *default)
    if count % _EIGHT:
        raise fields.error(f"{key}={count} must be a multiple of {_EIGHT}.")
    return count


def write_network(encoder: EncoderConfig) -> dict[str, Any]:
    """Return the settings of an encoder's network: the name of an architecture, or one with its arguments."""
    network, features = encoder.stem, encoder.embed_dim
    for name, known in architectures().items():
        if network == known and features == _FIXED_FEATURES:
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
    return {"architecture": _OTHER, "model_args": args}


def _write_block(block: PlaneBlockConfig) -> dict[str, Any]:
    """Return a block as timm's `decode_arch_def` does."""
    common = {"out_chs": block.dim, "stride": block.stride, "act_layer": None, "noskip": False}
    if isinstance(block, PlaneAttentionConfig):
        sizes = {"num_heads": block.num_heads, "key_dim": block.head_dim, "value_dim": block.head_dim}
        reduced = {"kv_stride": block.kv_stride, "dw_kernel_size": block.kernel}
        return {"block_type": "mqa", **common, **sizes, **reduced}
    ratios = {"exp_ratio": block.expansion, "se_ratio": 0.0}
    if isinstance(block, EdgeResidualConfig):
        kernels = {"exp_kernel_size": block.kernel, "pw_kernel_size": 1, "force_in_chs": 0}
        return {"block_type": "er", **common, **kernels, **ratios}
    kernels = {"dw_kernel_size_start": block.start, "dw_kernel_size_mid": block.middle, "dw_kernel_size_end": 0}
    return {"block_type": "uir", **common, **kernels, **ratios}


# --- tensors ---

_PLANE = "filters input_filters kernel_rows kernel_columns -> kernel_rows kernel_columns input_filters filters"
_DEPTHWISE = "filters 1 kernel_rows kernel_columns -> kernel_rows kernel_columns filters"
_POINT = "outer inner 1 1 -> inner outer"
_BLOCK = "blocks.{stage}.{block}."
_ATTENTION = _BLOCK + "attn."
# name, its norm's, path, pattern
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
    """Return the rows of an encoder's network whose tensors begin with `tower`."""
    rows = [Weight(f"{name}.weight", f"vision.{path}.kernel", pattern) for name, _, path, pattern in _CONVOLUTIONS]
    rows += [
        Weight(f"{norm}.weight", f"vision.{path}.norm.scale", "norm -> norm") for _, norm, path, _ in _CONVOLUTIONS
    ]
    heads = "(heads head_dim)"
    rows += [
        Weight("conv_stem.conv.bias", "vision.stem.first.bias", "filters -> filters"),
        Weight(_BLOCK + "norm.weight", "vision.norm.scale", "norm -> norm"),
        Weight(_BLOCK + "layer_scale.gamma", "vision.scale.scale", "norm -> norm"),
        Weight(_ATTENTION + "query.proj.weight", "vision.query", f"{heads} embed 1 1 -> embed heads head_dim"),
        *(
            Weight(f"{_ATTENTION}{part}.proj.weight", f"vision.{part}", "head_dim embed 1 1 -> embed head_dim")
            for part in ("key", "value")
        ),
        Weight(_ATTENTION + "output.proj.weight", "vision.out", f"embed {heads} 1 1 -> heads head_dim embed"),
        Weight("msfa.norm.weight", "vision.stem.norm.scale", "norm -> norm"),
    ]
    return tuple(Weight(tower + row.name, row.path, row.pattern) for row in rows)
