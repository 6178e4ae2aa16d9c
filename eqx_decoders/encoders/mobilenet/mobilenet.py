"""MobileNet V5, a convolutional backbone that replaces the stem and layers of a vision encoder.

The vision encoder of Gemma 3n (Google 2025), as in timm. Each stage halves the rows and columns. The outputs of the
last stages are fused into a grid of features, whose size does not depend on the size of the image.
"""

import dataclasses
from typing import Annotated, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.stack import checkpointed, map_layers
from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.mobilenet.blocks import PlaneBlock, PlaneBlockConfig, gelu, hidden_features
from eqx_decoders.encoders.mobilenet.convolution import (
    NORM,
    Edges,
    FeatureMap,
    PlaneConvolution,
    PointConvolution,
    build_convolution,
    build_pointwise,
)
from eqx_decoders.encoders.packed_rows import PackedPatches
from eqx_decoders.encoders.stem import StemConfig
from eqx_decoders.errors import NonEmpty, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import RMSNorm
from eqx_decoders.sharding.explicit import at_layer


_STEM_KERNEL = 3  # kernel size of the first convolution
_EXPANSION = 2.0  # ratio of hidden channels to input channels in the fusion of the stages
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
