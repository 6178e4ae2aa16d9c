"""Blocks of MobileNet V4 and V5 (Qin et al. 2024) as in timm."""

import dataclasses
import math
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.mobilenet.convolution import (
    NORM,
    DepthwiseConvolution,
    Edges,
    FeatureMap,
    PlaneConvolution,
    PointConvolution,
    build_convolution,
    build_depthwise,
    build_pointwise,
)
from eqx_decoders.errors import AtLeast, CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import LayerScale, LayerScaleConfig, RMSNorm
from eqx_decoders.numerics.initializers import fan_in


_CHANNEL_MULTIPLE = 8
Stride = Annotated[int, AtLeast(1, maximum=2)]


def hidden_features(size: float) -> int:
    """Return `size` rounded to a multiple of 8, but not below `0.9 * size` (`make_divisible` of MobileNets)."""
    rounded = max(_CHANNEL_MULTIPLE, int(size + _CHANNEL_MULTIPLE / 2) // _CHANNEL_MULTIPLE * _CHANNEL_MULTIPLE)
    return rounded + _CHANNEL_MULTIPLE if rounded < 0.9 * size else rounded


def gelu(x: FeatureMap) -> FeatureMap:
    """Compute the activation function of all blocks: GELU with the tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeResidualConfig(CheckedFields):
    """Configuration of an edge residual block (fused inverted residual): `x + narrow(gelu(widen * x))`.

    `widen` is a convolution that expands the channels, and `narrow` a pointwise convolution. `x +` is omitted if the
    output has another shape than x.

    **Arguments:**

    - `dim`: number of output channels.
    - `kernel`: kernel size of `widen`.
    - `stride`: stride of `widen`.
    - `expansion`: ratio of hidden channels to input channels.
    """

    dim: PositiveInt
    kernel: PositiveInt = 3
    stride: Stride = 1
    expansion: PositiveFloat = 4.0

    def build(self, inputs: int, *, edges: Edges, layer_scale: float | None, key: PRNGKeyArray) -> "EdgeResidual":
        hidden = hidden_features(inputs * self.expansion)
        keys = jax.random.split(key)
        return EdgeResidual(
            widen=build_convolution(inputs, hidden, self.kernel, stride=self.stride, edges=edges, key=keys[0]),
            narrow=build_pointwise(hidden, self.dim, key=keys[1]),
        )


class EdgeResidual(eqx.Module):
    """Edge residual block: `x + narrow(gelu(widen * x))`; see `EdgeResidualConfig`."""

    widen: PlaneConvolution
    narrow: PointConvolution

    def __call__(self, x: FeatureMap, ctx: ForwardContext) -> FeatureMap:
        return _residual(x, self.narrow(gelu(self.widen(x)), ctx))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvertedResidualConfig(CheckedFields):
    """Configuration of a universal inverted bottleneck: `x + scale project(gelu(middle * gelu(expand(start * x))))`.

    `start` and `middle` are optional depthwise convolutions. `x +` is omitted if the output has another shape than x.

    **Arguments:**

    - `dim`: number of output channels.
    - `start`, `middle`: kernel sizes of the depthwise convolutions; 0: no such convolution.
    - `stride`: stride of `middle`, or of `start` if `middle` is 0.
    - `expansion`: ratio of hidden channels to input channels.
    """

    dim: PositiveInt
    start: NonNegativeInt = 0
    middle: NonNegativeInt = 0
    stride: Stride = 1
    expansion: PositiveFloat = 4.0

    def __post_init__(self):
        super().__post_init__()
        check(
            self.stride == 1 or self.start + self.middle > 0,
            f"InvertedResidualConfig.stride={self.stride} needs a depthwise convolution. Set start or middle.",
        )

    def build(self, inputs: int, *, edges: Edges, layer_scale: float | None, key: PRNGKeyArray) -> "InvertedResidual":
        hidden = hidden_features(inputs * self.expansion)
        keys = jax.random.split(key, 4)
        start_stride = 1 if self.middle else self.stride
        return InvertedResidual(
            start=build_depthwise(inputs, self.start, stride=start_stride, edges=edges, key=keys[0]),
            expand=build_pointwise(inputs, hidden, key=keys[1]),
            middle=build_depthwise(hidden, self.middle, stride=self.stride, edges=edges, key=keys[2]),
            project=build_pointwise(hidden, self.dim, key=keys[3]),
            scale=_scale(layer_scale, self.dim),
        )


class InvertedResidual(eqx.Module):
    """Universal inverted bottleneck; see `InvertedResidualConfig`."""

    start: DepthwiseConvolution | None
    expand: PointConvolution
    middle: DepthwiseConvolution | None
    project: PointConvolution
    scale: LayerScale | None

    def __call__(self, x: FeatureMap, ctx: ForwardContext) -> FeatureMap:
        y = x if self.start is None else self.start(x)
        y = gelu(self.expand(y, ctx))
        y = y if self.middle is None else gelu(self.middle(y))
        y = self.project(y, ctx)
        return _residual(x, y if self.scale is None else self.scale(y))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaneAttentionConfig(CheckedFields):
    """Configuration of multi-query attention over all pixels: `x + scale attention(norm(x))`.

    **Arguments:**

    - `dim`: number of input and output channels.
    - `num_heads`, `head_dim`: number of query heads, and their size.
    - `kv_stride`: stride of the depthwise convolutions that reduce the inputs of keys and values; 1: no convolutions.
    - `kernel`: kernel size of these convolutions.
    """

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    kv_stride: PositiveInt = 1
    kernel: PositiveInt = 3

    stride = 1

    def build(self, inputs: int, *, edges: Edges, layer_scale: float | None, key: PRNGKeyArray) -> "PlaneAttention":
        check(
            inputs == self.dim,
            f"PlaneAttentionConfig.dim={self.dim} must be {inputs}, the number of output channels of the block before.",
        )
        keys = jax.random.split(key, 6)
        heads = (self.num_heads, self.head_dim)
        kernel_size = self.kernel if self.kv_stride > 1 else 0
        return PlaneAttention(
            norm=NORM.build(inputs),
            query=fan_in(keys[0], (inputs, *heads), jnp.float32, inputs),
            key=fan_in(keys[1], (inputs, self.head_dim), jnp.float32, inputs),
            value=fan_in(keys[2], (inputs, self.head_dim), jnp.float32, inputs),
            out=fan_in(keys[3], (*heads, inputs), jnp.float32, math.prod(heads)),
            reduce_key=build_depthwise(inputs, kernel_size, stride=self.kv_stride, edges=edges, key=keys[4]),
            reduce_value=build_depthwise(inputs, kernel_size, stride=self.kv_stride, edges=edges, key=keys[5]),
            scale=_scale(layer_scale, inputs),
        )


class PlaneAttention(eqx.Module):
    """Multi-query attention over all pixels: `x + scale attention(norm(x))`; see `PlaneAttentionConfig`."""

    norm: RMSNorm
    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed head_dim"]
    value: Float[Array, "embed head_dim"]
    out: Float[Array, "heads head_dim embed"]
    reduce_key: DepthwiseConvolution | None
    reduce_value: DepthwiseConvolution | None
    scale: LayerScale | None

    def __call__(self, x: FeatureMap, ctx: ForwardContext) -> FeatureMap:
        normed = self.norm(x)
        query_pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        query = ctx.einsum(query_pattern, _flatten_pixels(normed), self.query)
        query = ctx.constrain(query, "batch length heads head_dim")
        key_input = normed if self.reduce_key is None else self.reduce_key(normed)
        value_input = normed if self.reduce_value is None else self.reduce_value(normed)
        pattern = "batch length embed, embed head_dim -> batch length head_dim"
        key = ctx.einsum(pattern, _flatten_pixels(key_input), self.key)
        value = ctx.einsum(pattern, _flatten_pixels(value_input), self.value)
        scores = jnp.einsum("bqhd,bkd->bhqk", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkd->bqhd", weights, value)
        y = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", mixed, self.out)
        y = y.reshape(x.shape)
        return x + (y if self.scale is None else self.scale(y))


def _scale(start: float | None, size: int) -> LayerScale | None:
    return None if start is None else LayerScaleConfig(start=start).build(size)


def _residual(x: FeatureMap, y: FeatureMap) -> FeatureMap:
    return x + y if x.shape == y.shape else y


def _flatten_pixels(x: FeatureMap) -> Float[Array, "batch length channels"]:
    return x.reshape(x.shape[0], -1, x.shape[-1])


PlaneBlockConfig = EdgeResidualConfig | InvertedResidualConfig | PlaneAttentionConfig
PlaneBlock = EdgeResidual | InvertedResidual | PlaneAttention
