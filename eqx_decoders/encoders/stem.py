"""Input layers of an encoder of images: features of patches, and learned positions in an image."""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.packed_rows import PatchRows
from eqx_decoders.errors import CheckedFields, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in, normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedGrid(CheckedFields):
    """Learned positions of a square grid: `x + table[row, column]`.

    **Arguments:**

    - `side`: rows and columns of the grid.
    - `resample`: the positions of an image with other rows and columns: `"none"`, an error;
        `"bilinear"`, between four neighbors, corners on corners (Qwen3-VL); `"fraction"`, the one at the same fraction
        of the side (Idefics 3); `"antialias"`, as a picture that is resized, which averages more of them where there
        are fewer patches (SigLIP 2); `"bicubic"`, between sixteen neighbors, centers on centers (GLM-4.1V).
    - `class_first`: whether the row of a class token stands before those of the grid (InternVL), and not behind them.
    """

    side: PositiveInt
    resample: Literal["none", "bilinear", "fraction", "antialias", "bicubic"] = "none"
    class_first: bool = False

    def build(self, embed_dim: int, *, class_tokens: int, key: PRNGKeyArray) -> "GridTable":
        """Build the table, with a row behind the grid for each class token."""
        return GridTable(table=normal(key, (self.side**2 + class_tokens, embed_dim), jnp.float32, 0.02))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedAxes(CheckedFields):
    """Learned positions of columns and rows: `x + table[0, column] + table[1, row]` (Gemma 4).

    **Arguments:**

    - `size`: number of columns, and of rows, in the tables.
    """

    size: PositiveInt

    def build(self, embed_dim: int, *, class_tokens: int, key: PRNGKeyArray) -> "AxisTables":
        check(
            class_tokens == 0, "LearnedAxes has no position for a class token: use LearnedGrid, or class_token=False."
        )
        return AxisTables(table=normal(key, (2, self.size, embed_dim), jnp.float32, 0.02))


PatchPositions = LearnedGrid | LearnedAxes


@runtime_checkable
class ImageStem(Protocol):
    """Properties of an input layer for images, by which they are cut and packed: see `PatchStemConfig`."""

    @property
    def channels(self) -> int: ...

    @property
    def merge(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def positions(self) -> PatchPositions | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def class_token(self) -> bool: ...

    @property
    def class_position(self) -> int: ...

    @property
    def coordinates(self) -> str: ...

    @property
    def first_coordinate(self) -> int: ...


@runtime_checkable
class WholeImageStem(ImageStem, Protocol):
    """Input of an encoder that reads whole images: `side x side` features of one whose sides `multiple` divides."""

    @property
    def side(self) -> int: ...

    @property
    def multiple(self) -> int: ...


class GridTable(eqx.Module):
    """Table of learned positions: `sum_i weight_i table[index_i]`."""

    table: Float[Array, "positions embed"]

    def __call__(
        self, index: Int[Array, "batch length neighbors"], weight: Float[Array, "batch length neighbors"]
    ) -> Float[Array, "batch length embed"]:
        return _weighted(self.table, index, weight)


class AxisTables(eqx.Module):
    """Two tables of learned positions, the second's rows behind the first's: `sum_i weight_i table[index_i]`."""

    table: Float[Array, "coordinates positions embed"]

    def __call__(
        self, index: Int[Array, "batch length neighbors"], weight: Float[Array, "batch length neighbors"]
    ) -> Float[Array, "batch length embed"]:
        return _weighted(self.table.reshape(-1, self.table.shape[-1]), index, weight)


def _weighted(table: Array, index: Array, weight: Array) -> Array:
    """Return the weighted sum of a few rows of a table, in float32."""
    rows = jnp.take(table, index, axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(rows * weight[..., None].astype(jnp.float32), axis=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchStemConfig(CheckedFields):
    """Linear layer over patches of `channels x frames x size x size` numbers: `norm(kernel^T patch + bias) + position`.

    **Arguments:**

    - `size`: rows and columns of pixels in a patch.
    - `channels`: values of a pixel.
    - `frames`: images of a patch, one behind the other in time.
    - `merge`: rows and columns of patches that become one row of features; they stand one behind the other.
    - `bias`: whether a bias is added.
    - `norm`: norm of the sum, before positions are added (GLM-4.1V); None for none.
    - `positions`: learned positions; None for none.
    - `class_token`: whether a learned token stands behind each image's patches (Llama 4).
    - `pixel_scale`, `pixel_shift`: the kernel multiplies `pixel_scale * pixel + pixel_shift`.
    - `coordinates`: order of the coordinates of rotary embeddings: `"row_column"` or `"column_row"`.
    - `first_coordinate`: coordinate of the first row and column.
    - `window`: rows and columns of merged patches in a window, for layers whose mask is
        `Bidirectional((window * merge) ** 2)`; None for none.
    """

    size: PositiveInt
    channels: PositiveInt = 3
    frames: PositiveInt = 1
    merge: PositiveInt = 1
    bias: bool = True
    norm: NormConfig | None = None
    positions: PatchPositions | None = None
    class_token: bool = False
    pixel_scale: PositiveFloat = 1.0
    pixel_shift: FiniteFloat = 0.0
    coordinates: Literal["row_column", "column_row"] = "row_column"
    first_coordinate: NonNegativeInt = 0
    window: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()
        alone = not self.class_token or self.window is None
        check(alone, "PatchStemConfig.class_token=True excludes windows: the token would be in one of them.")
        first = isinstance(self.positions, LearnedGrid) and self.positions.class_first
        check(self.class_token or not first, "LearnedGrid.class_first=True needs PatchStemConfig.class_token=True.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of a patch: channels, frames, rows and columns of pixels."""
        return self.channels, self.frames, self.size, self.size

    @property
    def group(self) -> int:
        """Number of patches that become one row of features."""
        return self.merge**2

    @property
    def class_position(self) -> int:
        """Row of the position table for a class token: the one behind the grid, or before it."""
        grid = self.positions
        return grid.side**2 if isinstance(grid, LearnedGrid) and not grid.class_first else 0

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "PatchStem":
        kernel_key, position_key, class_key = jax.random.split(key, 3)
        inputs = self.channels * self.frames * self.size**2
        class_tokens, at = int(self.class_token), None
        if self.positions is not None:
            at = self.positions.build(embed_dim, class_tokens=class_tokens, key=position_key)
        return PatchStem(
            kernel=fan_in(kernel_key, (*self.shape, embed_dim), jnp.float32, inputs),
            bias=jnp.zeros((embed_dim,)) if self.bias else None,
            norm=None if self.norm is None else self.norm.build(embed_dim),
            class_embedding=normal(class_key, (embed_dim,), jnp.float32, 0.02) if self.class_token else None,
            positions=at,
            config=self,
        )


class PatchStem(eqx.Module):
    """Linear layer over patches: `norm(kernel^T patch + bias) + position`."""

    kernel: Float[Array, "channels frames patch_rows patch_columns embed"]
    bias: Float[Array, "embed"] | None
    norm: Norm | None
    class_embedding: Float[Array, "embed"] | None
    positions: GridTable | AxisTables | None
    config: PatchStemConfig = eqx.field(static=True)

    def __call__(self, rows: PatchRows, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        config, dtype = self.config, ctx.execution.precision.compute
        pixels = jnp.asarray(rows.patches).astype(jnp.float32) * config.pixel_scale + config.pixel_shift
        pixels = ctx.constrain(pixels.astype(dtype), "batch length patch")
        pixels = pixels.reshape(*pixels.shape[:2], *config.shape)
        words = "channels frames patch_rows patch_columns"
        x = ctx.einsum(f"batch length {words}, {words} embed -> batch length embed", pixels, self.kernel)
        x = add_bias(x, self.bias)
        x = x if self.norm is None else self.norm(x)
        if self.class_embedding is not None and rows.class_tokens is not None:
            class_embedding = self.class_embedding.astype(dtype)[None, None]
            x = jnp.where(jnp.asarray(rows.class_tokens)[:, :, None], class_embedding, x)
        if self.positions is not None and rows.position_index is not None and rows.position_weights is not None:
            x = x + self.positions(jnp.asarray(rows.position_index), jnp.asarray(rows.position_weights)).astype(dtype)
        return ctx.constrain(x, "batch length embed")
