"""2-D convolutions, each followed by a norm over the channels."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.norm import RMSNorm, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in


Edges = Literal["same", "equal"]
FeatureMap = Float[Array, "batch _ _ _"]  # batch, height, width, channels
NORM = RMSNormConfig()


class PlaneConvolution(eqx.Module):
    """Convolution `norm(kernel * x + bias)` over all channels.

    The output has `ceil(size / stride)` rows and columns. Zero padding: `edges="same"` as in TensorFlow, where an odd
    number of zeros adds one at the end; `edges="equal"`, the same number of zeros on both sides.
    """

    kernel: Float[Array, "kernel_rows kernel_columns input_filters filters"]
    bias: Float[Array, "filters"] | None
    norm: RMSNorm
    stride: int = eqx.field(static=True)
    edges: Edges = eqx.field(static=True)

    def __call__(self, x: FeatureMap) -> FeatureMap:
        y = _convolve(x, self.kernel, self.stride, self.edges)
        return self.norm(y if self.bias is None else y + self.bias.astype(x.dtype)[None, None, None])


class DepthwiseConvolution(eqx.Module):
    """Depthwise convolution `norm(kernel * x)`; `edges` as in `PlaneConvolution`."""

    kernel: Float[Array, "kernel_rows kernel_columns filters"]
    norm: RMSNorm
    stride: int = eqx.field(static=True)
    edges: Edges = eqx.field(static=True)

    def __call__(self, x: FeatureMap) -> FeatureMap:
        return self.norm(_convolve(x, self.kernel[:, :, None], self.stride, self.edges, groups=x.shape[-1]))


def _convolve(x: FeatureMap, kernel: Array, stride: int, edges: Edges, groups: int = 1) -> FeatureMap:
    padding = (stride + len(kernel) - 2) // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        "SAME" if edges == "same" else ((padding, padding),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


class PointConvolution(eqx.Module):
    """Pointwise (1 x 1) convolution `norm(kernel^T x)`."""

    kernel: Float[Array, "inner outer"]
    norm: RMSNorm

    def __call__(self, x: FeatureMap, ctx: ForwardContext) -> FeatureMap:
        pattern = "batch rows columns inner, inner outer -> batch rows columns outer"
        return self.norm(ctx.einsum(pattern, x, self.kernel))


def build_convolution(
    inputs: int, filters: int, size: int, *, stride: int, edges: Edges, key: PRNGKeyArray, bias: bool = False
) -> PlaneConvolution:
    """Return a new convolution with a `size x size` kernel."""
    kernel = fan_in(key, (size, size, inputs, filters), jnp.float32, size * size * inputs)
    bias_array = jnp.zeros((filters,)) if bias else None
    return PlaneConvolution(kernel=kernel, bias=bias_array, norm=NORM.build(filters), stride=stride, edges=edges)


def build_depthwise(
    filters: int, size: int, *, stride: int, edges: Edges, key: PRNGKeyArray
) -> DepthwiseConvolution | None:
    """Return a new depthwise convolution with a `size x size` kernel; None for a size of 0."""
    if size == 0:
        return None
    kernel = fan_in(key, (size, size, filters), jnp.float32, size * size)
    return DepthwiseConvolution(kernel=kernel, norm=NORM.build(filters), stride=stride, edges=edges)


def build_pointwise(inner: int, outer: int, *, key: PRNGKeyArray) -> PointConvolution:
    """Return a new pointwise convolution."""
    return PointConvolution(kernel=fan_in(key, (inner, outer), jnp.float32, inner), norm=NORM.build(outer))
