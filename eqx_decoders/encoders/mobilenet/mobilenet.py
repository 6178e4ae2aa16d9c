"""MobileNet V5 in the place of an encoder's input layer and layers: stages of convolutions and attention over an image.

It is Gemma 3n's (Google 2025), as timm has it: stages halve the rows and columns, and the outputs of the last ones
become the features of one grid, whatever the size of the image is.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray

from eqx_decoders.blocks.checkpointing import checkpointed
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.stack import map_layers
from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.mobilenet.blocks import PlaneBlock, PlaneBlockConfig, gelu, hidden_features
from eqx_decoders.encoders.mobilenet.convolution import (
    NORM,
    Edges,
    Plane,
    PlaneConvolution,
    PointConvolution,
    plane,
    point,
)
from eqx_decoders.encoders.packed_rows import PatchRows
from eqx_decoders.errors import CheckedFields, NonEmpty, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import RMSNorm
from eqx_decoders.sharding.explicit import at_layer


_STEM_KERNEL, _EXPANSION = 3, 2.0
Placed = tuple[PlaneBlockConfig, int]  # a block, and the features that it reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class MobileNetConfig(CheckedFields):
    """Configuration of `norm(pool(project(gelu(expand(stages, side by side)))))`, behind `gelu(stem * image)`.

    An image is square, and reaches the encoder as `side x side` squares of pixels, which are put together again: each
    becomes a row of features. Every stage begins with a block of stride 2.

    **Arguments:**

    - `stem_dim`: features of the first convolution, 3 x 3 in steps of 2.
    - `stages`: blocks of each stage, in order.
    - `fused`: the stages, counted from 0, whose outputs are put side by side, those of later ones being repeated to the
        size of the first.
    - `side`: rows and columns of the features, each the mean of equally many.
    - `channels`: values of a pixel.
    - `edges`: zeros at the edges of images: `"same"`, an odd one behind (TensorFlow), or `"equal"`.
    - `layer_scale`: factor of a new block's output, which is learned; None for no such factor.
    """

    stem_dim: PositiveInt
    stages: Annotated[tuple[tuple[PlaneBlockConfig, ...], ...], NonEmpty("stage")]
    fused: Annotated[tuple[NonNegativeInt, ...], NonEmpty("stage")]
    side: PositiveInt = 16
    channels: PositiveInt = 3
    edges: Edges = "same"
    layer_scale: PositiveFloat | None = 1e-5

    # what a stem of patches has, too
    group, merge = 1, 1
    positions, window, class_token, class_position = None, None, False, 0
    coordinates, first_coordinate = "row_column", 0

    def __post_init__(self):
        super().__post_init__()
        strides = [[block.stride for block in stage] for stage in self.stages]
        good = all(each[:1] == [2] and max(each[1:], default=1) == 1 for each in strides)
        check(good, "MobileNetConfig.stages: the first block of each must have a stride of 2, and no other one.")
        good = [*self.fused] == sorted({*self.fused}) and self.fused[-1] < len(self.stages)
        rule = f"must name stages from 0 to {len(self.stages) - 1}, each once, ascending"
        check(good, f"MobileNetConfig.fused={self.fused} {rule}.")

    @property
    def multiple(self) -> int:
        """Number that divides the height and the width of an image."""
        return self.side * 2 ** (self.fused[0] + 2)

    @property
    def stage_parts(self) -> tuple[tuple[tuple[tuple[Placed, ...], int], ...], ...]:
        """For each stage its blocks as `(unit, repeats)`, each a scan."""
        inputs, stages = self.stem_dim, []
        for stage in self.stages:
            dims = [inputs, *(block.dim for block in stage)]
            stages.append(find_repeats(tuple(zip(stage, dims, strict=False))))
            inputs = dims[-1]
        return tuple(stages)

    @property
    def parts(self) -> tuple[tuple[tuple[Placed, ...], int], ...]:
        """The same of all stages, one behind the other."""
        return tuple(part for stage in self.stage_parts for part in stage)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MobileNet":
        stem_key, block_key, *keys = jax.random.split(key, 4)
        parts, begin, stack = self.parts, 0, []
        block_keys = jax.random.split(block_key, sum(len(unit) * repeats for unit, repeats in parts))
        for unit, repeats in parts:
            count = len(unit) * repeats
            stack.append(RepeatedPlanes.build(unit, self, keys=block_keys[begin : begin + count]))
            begin += count
        width = sum(self.stages[stage][-1].dim for stage in self.fused)
        hidden = hidden_features(_EXPANSION * width)
        stem: Any = dict(stride=2, edges=self.edges, key=stem_key, bias=True)
        return MobileNet(
            first=plane(self.channels, self.stem_dim, _STEM_KERNEL, **stem),
            repeated_planes=tuple(stack),
            expand=point(width, hidden, key=keys[0]),
            project=point(hidden, embed_dim, key=keys[1]),
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
        cls, unit: tuple[Placed, ...], config: MobileNetConfig, *, keys: Key[Array, "layers"]
    ) -> "RepeatedPlanes":
        """Return new blocks, one key each, in their order."""

        def build_unit(keys: Key[Array, "unit"]) -> tuple[PlaneBlock, ...]:
            options: Any = dict(edges=config.edges, layer_scale=config.layer_scale)
            return tuple(block.build(dim, **options, key=key) for (block, dim), key in zip(unit, keys, strict=True))

        keys = keys.reshape(-1, len(unit))
        return cls(unit=map_layers(build_unit, keys), repeats=len(keys))

    def __call__(self, x: Plane, ctx: ForwardContext) -> Plane:
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


def _call(block: PlaneBlock, x: Plane, ctx: ForwardContext, past: None, *, key: None) -> Plane:
    return ctx.constrain(block(x, ctx), "batch patch_rows patch_columns filters")


class MobileNet(eqx.Module):
    """Stages of convolutions and attention over an image, and the fusion of some of their outputs in one grid."""

    first: PlaneConvolution
    repeated_planes: tuple[RepeatedPlanes, ...]
    expand: PointConvolution
    project: PointConvolution
    norm: RMSNorm
    config: MobileNetConfig = eqx.field(static=True)

    def __call__(self, rows: PatchRows, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        config, left = self.config, iter(self.repeated_planes)
        x = gelu(self.first(self._images(rows, ctx)))
        outputs = []
        for stage, parts in enumerate(config.stage_parts):
            for _ in parts:
                x = next(left)(x, ctx)
            outputs += [x] if stage in config.fused else []
        large = outputs[0].shape[1:3]
        x = jnp.concatenate([_repeated(each, large) for each in outputs], axis=-1)
        x = self.project(gelu(self.expand(x, ctx)), ctx)
        size, count = large[0] // config.side, config.side**2
        x = x.reshape(len(x), config.side, size, config.side, size, x.shape[-1])
        x = jnp.mean(x.astype(jnp.float32), axis=(2, 4)).astype(x.dtype)
        x = self.norm(x.reshape(len(x), count, -1))
        x = jnp.pad(x, ((0, 0), (0, rows.patches.shape[1] - count), (0, 0)))  # rows may end in padding
        return ctx.constrain(x, "batch length embed")

    def _images(self, rows: PatchRows, ctx: ForwardContext) -> Plane:
        """Return the images, whose squares stand row by row, with their channels first."""
        channels, side = self.config.channels, self.config.side
        patches = jnp.asarray(rows.patches)[:, : side**2].astype(ctx.execution.precision.compute)
        size = round((patches.shape[-1] // channels) ** 0.5)
        x = patches.reshape(len(patches), side, side, channels, size, size)
        return jnp.transpose(x, (0, 1, 4, 2, 5, 3)).reshape(len(x), side * size, side * size, channels)


def _repeated(x: Plane, size: tuple[int, int]) -> Plane:
    """Return the features of a larger plane, each those of the nearest place."""
    for axis, count in enumerate(size, start=1):
        if x.shape[axis] != count:
            index = jnp.arange(count) * x.shape[axis] // count
            x = jnp.take(x, index, axis=axis)
    return x
