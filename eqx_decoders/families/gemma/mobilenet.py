"""MobileNet V5, a convolutional backbone that replaces the stem and layers of a vision encoder.

The vision encoder of Gemma 3n (Google 2025), as in timm. Each stage halves the rows and columns. The outputs of the
last stages are fused into a grid of features, whose size does not depend on the size of the image.
"""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.stack import checkpointed, map_layers
from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.packed_rows import PackedPatches
from eqx_decoders.encoders.stem import StemConfig
from eqx_decoders.errors import (
    AtLeast,
    CheckedFields,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
from eqx_decoders.layers.norm import LayerScale, LayerScaleConfig, RMSNorm, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.explicit import at_layer


Edges = Literal["same", "equal"]
FeatureMap = Float[Array, "batch _ _ _"]  # batch, height, width, channels
Stride = Annotated[int, AtLeast(1, maximum=2)]
NORM = RMSNormConfig()
_CHANNEL_MULTIPLE = 8
_STEM_KERNEL = 3  # kernel size of the first convolution
_EXPANSION = 2.0  # ratio of hidden channels to input channels in the fusion of the stages


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


BlockAndInputs = tuple[PlaneBlockConfig, int]  # a block and its number of input channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class MobileNetConfig(StemConfig):
    """Configuration of MobileNet V5: `norm(pool(project(gelu(expand(concat(fused stages))))))`.

    The first stage reads `gelu(stem * image)`, where `stem` is a 3 x 3 convolution with stride 2. Images are square. An
    image is passed as `side x side` patches, from which the encoder restores the image; it returns one feature per
    patch. Every stage starts with a block of stride 2.

    **Arguments:**

    - `stem_dim`: number of output channels of the first convolution.
    - `stages`: blocks of each stage, in order.
    - `fused`: indices of the stages whose outputs are concatenated; later outputs are upsampled to the size of the
        first by nearest neighbor.
    - `side`: number of rows and of columns of features, to which the fused output is average-pooled.
    - `channels`: number of channels of a pixel.
    - `edges`: zero padding of convolutions: `"same"` or `"equal"`, see `PlaneConvolution`.
    - `layer_scale`: initial value of the learned scale of block outputs (LayerScale); None: no scale.
    """

    stem_dim: PositiveInt
    stages: Annotated[tuple[tuple[PlaneBlockConfig, ...], ...], NonEmpty("stage")]
    fused: Annotated[tuple[NonNegativeInt, ...], NonEmpty("stage")]
    side: PositiveInt = 16
    channels: PositiveInt = 3
    edges: Edges = "same"
    layer_scale: PositiveFloat | None = 1e-5

    complete: ClassVar[bool] = True

    # further properties of the `ImageStem` protocol
    merge = 1
    positions, window, class_token, class_position = None, None, False, 0
    coordinates, first_coordinate = "row_column", 0

    def __post_init__(self):
        super().__post_init__()
        strides = [[block.stride for block in stage] for stage in self.stages]
        check(
            all(stage[:1] == [2] and max(stage[1:], default=1) == 1 for stage in strides),
            f"MobileNetConfig.stages has blocks with strides {strides}: the first block of each stage must have stride "
            "2, and all other blocks stride 1.",
        )
        check(
            [*self.fused] == sorted({*self.fused}) and self.fused[-1] < len(self.stages),
            f"MobileNetConfig.fused={self.fused} must be ascending, different indices of stages from 0 to "
            f"{len(self.stages) - 1}.",
        )

    @property
    def multiple(self) -> int:
        """Height and width of images must be multiples of this number."""
        return self.side * 2 ** (self.fused[0] + 2)

    @property
    def stage_parts(self) -> tuple[tuple[tuple[tuple[BlockAndInputs, ...], int], ...], ...]:
        """Blocks of each stage as `(unit, repeats)`, one scan for each."""
        inputs = self.stem_dim
        stages = []
        for stage in self.stages:
            dims = [inputs, *(block.dim for block in stage)]
            stages.append(find_repeats(tuple(zip(stage, dims, strict=False))))
            inputs = dims[-1]
        return tuple(stages)

    @property
    def parts(self) -> tuple[tuple[tuple[BlockAndInputs, ...], int], ...]:
        """Blocks of all stages as `(unit, repeats)`, one scan for each."""
        return tuple(part for stage in self.stage_parts for part in stage)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MobileNet":
        stem_key, block_key, *keys = jax.random.split(key, 4)
        parts = self.parts
        start = 0
        stack = []
        block_keys = jax.random.split(block_key, sum(len(unit) * repeats for unit, repeats in parts))
        for unit, repeats in parts:
            count = len(unit) * repeats
            stack.append(RepeatedPlanes.build(unit, self, keys=block_keys[start : start + count]))
            start += count
        fused_dim = sum(self.stages[stage][-1].dim for stage in self.fused)
        hidden = hidden_features(_EXPANSION * fused_dim)
        return MobileNet(
            first=build_convolution(
                self.channels, self.stem_dim, _STEM_KERNEL, stride=2, edges=self.edges, key=stem_key, bias=True
            ),
            repeated_planes=tuple(stack),
            expand=build_pointwise(fused_dim, hidden, key=keys[0]),
            project=build_pointwise(hidden, embed_dim, key=keys[1]),
            norm=NORM.build(embed_dim),
            config=self,
        )


class RepeatedPlanes(eqx.Module):
    """Repeated blocks, `repeats` copies of `unit`: weights stacked on a leading `layers` axis, run by one scan."""

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    unit: tuple[PlaneBlock, ...]
    repeats: int = eqx.field(static=True)

    @classmethod
    def build(
        cls, unit: tuple[BlockAndInputs, ...], config: MobileNetConfig, *, keys: Key[Array, "layers"]
    ) -> "RepeatedPlanes":
        """Return new blocks; `keys` has one key per block, in order."""

        def build_unit(keys: Key[Array, "unit"]) -> tuple[PlaneBlock, ...]:
            return tuple(
                block.build(inputs, edges=config.edges, layer_scale=config.layer_scale, key=key)
                for (block, inputs), key in zip(unit, keys, strict=True)
            )

        keys = keys.reshape(-1, len(unit))
        return cls(unit=map_layers(build_unit, keys), repeats=len(keys))

    def __call__(self, x: FeatureMap, ctx: ForwardContext) -> FeatureMap:
        arrays, static = eqx.partition(self.unit, eqx.is_array)
        scanned = ctx.execution.scan and self.repeats > 1
        run = checkpointed(_call, ctx, prevent_cse=not scanned or len(self.unit) > 1)

        def step(x, arrays):
            for block in eqx.combine(arrays, static):
                x = run(block, x, ctx, None, None)
            return x, None

        if scanned:
            return jax.lax.scan(step, x, arrays)[0]
        for index in range(self.repeats):
            x, _ = step(x, at_layer(arrays, index))
        return x


def _call(block: PlaneBlock, x: FeatureMap, ctx: ForwardContext, past: None, *, key: None) -> FeatureMap:
    return ctx.constrain(block(x, ctx), "batch patch_rows patch_columns filters")


class MobileNet(eqx.Module):
    """MobileNet V5: stages of convolutions and attention, and the fusion of their outputs; see `MobileNetConfig`."""

    first: PlaneConvolution
    repeated_planes: tuple[RepeatedPlanes, ...]
    expand: PointConvolution
    project: PointConvolution
    norm: RMSNorm
    config: MobileNetConfig = eqx.field(static=True)

    def __call__(self, rows: PackedPatches, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        config = self.config
        remaining_blocks = iter(self.repeated_planes)
        x = gelu(self.first(self._images(rows, ctx)))
        outputs = []
        for stage, parts in enumerate(config.stage_parts):
            for _ in parts:
                x = next(remaining_blocks)(x, ctx)
            if stage in config.fused:
                outputs.append(x)
        max_size = outputs[0].shape[1:3]
        x = jnp.concatenate([_upsample(output, max_size) for output in outputs], axis=-1)
        x = self.project(gelu(self.expand(x, ctx)), ctx)
        pool_size = max_size[0] // config.side
        num_features = config.side**2
        x = x.reshape(len(x), config.side, pool_size, config.side, pool_size, x.shape[-1])
        x = jnp.mean(x.astype(jnp.float32), axis=(2, 4)).astype(x.dtype)
        x = self.norm(x.reshape(len(x), num_features, -1))
        x = jnp.pad(x, ((0, 0), (0, rows.patches.shape[1] - num_features), (0, 0)))  # sequences may end with padding
        return ctx.constrain(x, "batch length embed")

    def _images(self, rows: PackedPatches, ctx: ForwardContext) -> FeatureMap:
        """Return the images, restored from their patches (in row order, channels first), with channels last."""
        channels = self.config.channels
        side = self.config.side
        patches = jnp.asarray(rows.patches)[:, : side**2].astype(ctx.execution.precision.compute)
        size = round((patches.shape[-1] // channels) ** 0.5)
        x = patches.reshape(len(patches), side, side, channels, size, size)
        return jnp.transpose(x, (0, 1, 4, 2, 5, 3)).reshape(len(x), side * size, side * size, channels)


def _upsample(x: FeatureMap, size: tuple[int, int]) -> FeatureMap:
    """Resize a feature map to `size` rows and columns by nearest neighbor."""
    for axis, count in enumerate(size, start=1):
        if x.shape[axis] != count:
            index = jnp.arange(count) * x.shape[axis] // count
            x = jnp.take(x, index, axis=axis)
    return x
