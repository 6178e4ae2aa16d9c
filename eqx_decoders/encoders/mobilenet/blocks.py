"""Blocks of MobileNets (Qin et al. 2024, V4) over the rows and columns of images, as timm has them."""

import dataclasses
import math
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.mobilenet.convolution import (
    NORM,
    DepthwiseConvolution,
    Edges,
    Plane,
    PlaneConvolution,
    PointConvolution,
    depthwise,
    plane,
    point,
)
from eqx_decoders.errors import AtLeast, CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import LayerScale, LayerScaleConfig, RMSNorm
from eqx_decoders.numerics.initializers import fan_in


_EIGHT = 8  # hidden features are a multiple of it
Stride = Annotated[int, AtLeast(1, most=2)]


def hidden_features(size: float) -> int:
    """Return the multiple of 8 next to `size`, or the one above where that is less than nine tenths of it."""
    rounded = max(_EIGHT, int(size + _EIGHT / 2) // _EIGHT * _EIGHT)
    return rounded + _EIGHT if rounded < 0.9 * size else rounded


def gelu(x: Plane) -> Plane:
    """Compute the activation of all blocks."""
    return jax.nn.gelu(x, approximate=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeResidualConfig(CheckedFields):
    """Configuration of `narrow(gelu(widen * x))`, with `x +` before it where the sizes are those of x.

    **Arguments:**

    - `dim`: number of features behind the block.
    - `kernel`: rows and columns that the convolution looks at.
    - `stride`: its step.
    - `expansion`: hidden features for each feature of x.
    """

    dim: PositiveInt
    kernel: PositiveInt = 3
    stride: Stride = 1
    expansion: PositiveFloat = 4.0

    def build(self, inputs: int, *, edges: Edges, layer_scale: float | None, key: PRNGKeyArray) -> "EdgeResidual":
        hidden, keys = hidden_features(inputs * self.expansion), jax.random.split(key)
        return EdgeResidual(
            widen=plane(inputs, hidden, self.kernel, stride=self.stride, edges=edges, key=keys[0]),
            narrow=point(hidden, self.dim, key=keys[1]),
        )


class EdgeResidual(eqx.Module):
    """Block `narrow(gelu(widen * x))`, with `x +` before it where the sizes are those of x."""

    widen: PlaneConvolution
    narrow: PointConvolution

    def __call__(self, x: Plane, ctx: ForwardContext) -> Plane:
        return _residual(x, self.narrow(gelu(self.widen(x)), ctx))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvertedResidualConfig(CheckedFields):
    """Configuration of `scale project(gelu(middle * gelu(expand(start * x))))`, with `x +` before it as above.

    This is the universal inverted bottleneck: `start` and `middle` are convolutions of each feature by itself.

    **Arguments:**

    - `dim`: number of features behind the block.
    - `start`, `middle`: rows and columns that these look at; 0 for none.
    - `stride`: step of the middle one, or else of the first.
    - `expansion`: hidden features for each feature of x.
    """

    dim: PositiveInt
    start: NonNegativeInt = 0
    middle: NonNegativeInt = 0
    stride: Stride = 1
    expansion: PositiveFloat = 4.0

    def __post_init__(self):
        super().__post_init__()
        good = self.stride == 1 or self.start + self.middle > 0
        check(good, f"InvertedResidualConfig.stride={self.stride} needs a convolution: give start or middle.")

    def build(self, inputs: int, *, edges: Edges, layer_scale: float | None, key: PRNGKeyArray) -> "InvertedResidual":
        hidden, keys = hidden_features(inputs * self.expansion), jax.random.split(key, 4)
        first = 1 if self.middle else self.stride
        return InvertedResidual(
            start=depthwise(inputs, self.start, stride=first, edges=edges, key=keys[0]),
            expand=point(inputs, hidden, key=keys[1]),
            middle=depthwise(hidden, self.middle, stride=self.stride, edges=edges, key=keys[2]),
            project=point(hidden, self.dim, key=keys[3]),
            scale=_scale(layer_scale, self.dim),
        )


class InvertedResidual(eqx.Module):
    """Block `scale project(gelu(middle * gelu(expand(start * x))))`, with `x +` before it."""

    start: DepthwiseConvolution | None
    expand: PointConvolution
    middle: DepthwiseConvolution | None
    project: PointConvolution
    scale: LayerScale | None

    def __call__(self, x: Plane, ctx: ForwardContext) -> Plane:
        y = x if self.start is None else self.start(x)
        y = gelu(self.expand(y, ctx))
        y = y if self.middle is None else gelu(self.middle(y))
        y = self.project(y, ctx)
        return _residual(x, y if self.scale is None else self.scale(y))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaneAttentionConfig(CheckedFields):
    """Configuration of `x + scale attention(norm(x))`: every pixel attends to all, with one head of keys and values.

    **Arguments:**

    - `dim`: number of features, before and behind the block.
    - `num_heads`, `head_dim`: query heads, and features of each.
    - `kv_stride`: step of a convolution, of each feature by itself, before keys and one before values; 1 for none.
    - `kernel`: rows and columns that these look at.
    """

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    kv_stride: PositiveInt = 1
    kernel: PositiveInt = 3

    stride = 1

    def build(self, inputs: int, *, edges: Edges, layer_scale: float | None, key: PRNGKeyArray) -> "PlaneAttention":
        rule = "features of the block before it: attention changes no sizes"
        check(inputs == self.dim, f"PlaneAttentionConfig.dim={self.dim} must be the {inputs} {rule}.")
        keys, heads = jax.random.split(key, 6), (self.num_heads, self.head_dim)
        size = self.kernel if self.kv_stride > 1 else 0
        reduced: Any = dict(stride=self.kv_stride, edges=edges)
        return PlaneAttention(
            norm=NORM.build(inputs),
            query=fan_in(keys[0], (inputs, *heads), jnp.float32, inputs),
            key=fan_in(keys[1], (inputs, self.head_dim), jnp.float32, inputs),
            value=fan_in(keys[2], (inputs, self.head_dim), jnp.float32, inputs),
            out=fan_in(keys[3], (*heads, inputs), jnp.float32, math.prod(heads)),
            reduce_key=depthwise(inputs, size, **reduced, key=keys[4]),
            reduce_value=depthwise(inputs, size, **reduced, key=keys[5]),
            scale=_scale(layer_scale, inputs),
        )


class PlaneAttention(eqx.Module):
    """Block `x + scale attention(norm(x))`: every pixel attends to all, with one head of keys and values."""

    norm: RMSNorm
    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed head_dim"]
    value: Float[Array, "embed head_dim"]
    out: Float[Array, "heads head_dim embed"]
    reduce_key: DepthwiseConvolution | None
    reduce_value: DepthwiseConvolution | None
    scale: LayerScale | None

    def __call__(self, x: Plane, ctx: ForwardContext) -> Plane:
        normed = self.norm(x)
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        query = ctx.constrain(ctx.einsum(pattern, _in_line(normed), self.query), "batch length heads head_dim")
        key, value = (
            ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", _in_line(y), weight)
            for y, weight in (
                (normed if self.reduce_key is None else self.reduce_key(normed), self.key),
                (normed if self.reduce_value is None else self.reduce_value(normed), self.value),
            )
        )
        scores = jnp.einsum("bqhd,bkd->bhqk", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkd->bqhd", weights, value)
        y = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", mixed, self.out)
        y = y.reshape(x.shape)
        return x + (y if self.scale is None else self.scale(y))


def _scale(start: float | None, size: int) -> LayerScale | None:
    return None if start is None else LayerScaleConfig(start=start).build(size)


def _residual(x: Plane, y: Plane) -> Plane:
    return x + y if x.shape == y.shape else y


def _in_line(x: Plane) -> Float[Array, "batch length channels"]:
    return x.reshape(x.shape[0], -1, x.shape[-1])


PlaneBlockConfig = EdgeResidualConfig | InvertedResidualConfig | PlaneAttentionConfig
PlaneBlock = EdgeResidual | InvertedResidual | PlaneAttention
