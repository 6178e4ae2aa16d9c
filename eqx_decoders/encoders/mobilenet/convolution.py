"""Convolutions over the rows and columns of images, each with a norm of the features behind it."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.norm import RMSNorm, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in


Edges = Literal["same", "equal"]
Plane = Float[Array, "batch _ _ _"]  # rows, columns and features
NORM = RMSNormConfig()


class PlaneConvolution(eqx.Module):
    """Convolution `norm(kernel * x + bias)` of all features.

    An image has `ceil(size / stride)` rows and columns behind it. At its edges stand zeros: with `edges="same"` an odd
    one behind (TensorFlow), with `"equal"` as many before as behind.
    """

    kernel: Float[Array, "kernel_rows kernel_columns input_filters filters"]
    bias: Float[Array, "filters"] | None
    norm: RMSNorm
    stride: int = eqx.field(static=True)
    edges: Edges = eqx.field(static=True)

    def __call__(self, x: Plane) -> Plane:
        y = _convolve(x, self.kernel, self.stride, self.edges)
        return self.norm(y if self.bias is None else y + self.bias.astype(x.dtype)[None, None, None])


class DepthwiseConvolution(eqx.Module):
    """Convolution `norm(kernel * x)` of each feature by itself; its edges are those of `PlaneConvolution`."""

    kernel: Float[Array, "kernel_rows kernel_columns filters"]
    norm: RMSNorm
    stride: int = eqx.field(static=True)
    edges: Edges = eqx.field(static=True)

    def __call__(self, x: Plane) -> Plane:
        return self.norm(_convolve(x, self.kernel[:, :, None], self.stride, self.edges, groups=x.shape[-1]))


def _convolve(x: Plane, kernel: Array, stride: int, edges: Edges, groups: int = 1) -> Plane:
    side = (stride + len(kernel) - 2) // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        "SAME" if edges == "same" else ((side, side),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


class PointConvolution(eqx.Module):
    """Matrix `norm(kernel^T x)` of the features of each pixel."""

    kernel: Float[Array, "inner outer"]
    norm: RMSNorm

    def __call__(self, x: Plane, ctx: ForwardContext) -> Plane:
        pattern = "batch rows columns inner, inner outer -> batch rows columns outer"
        return self.norm(ctx.einsum(pattern, x, self.kernel))


def plane(
    inputs: int, filters: int, size: int, *, stride: int, edges: Edges, key: PRNGKeyArray, bias: bool = False
) -> PlaneConvolution:
    """Return a new convolution of all features over `size x size` neighbors."""
    kernel = fan_in(key, (size, size, inputs, filters), jnp.float32, size * size * inputs)
    bias_array = jnp.zeros((filters,)) if bias else None
    return PlaneConvolution(kernel=kernel, bias=bias_array, norm=NORM.build(filters), stride=stride, edges=edges)


def depthwise(filters: int, size: int, *, stride: int, edges: Edges, key: PRNGKeyArray) -> DepthwiseConvolution | None:
    """Return a new convolution of each feature by itself over `size x size` neighbors; None for a size of 0."""
    if size == 0:
        return None
    kernel = fan_in(key, (size, size, filters), jnp.float32, size * size)
    return DepthwiseConvolution(kernel=kernel, norm=NORM.build(filters), stride=stride, edges=edges)


def point(inner: int, outer: int, *, key: PRNGKeyArray) -> PointConvolution:
    """Return a new matrix of the features of each pixel."""
    return PointConvolution(kernel=fan_in(key, (inner, outer), jnp.float32, inner), norm=NORM.build(outer))
