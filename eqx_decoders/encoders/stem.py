"""Stems of encoders: the base class, and the patch embedding of vision encoders with learned positions."""

import abc
import dataclasses
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.packed_rows import PackedPatches
from eqx_decoders.errors import CheckedFields, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.base import RegisteredConfig
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in, normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class StemConfig(RegisteredConfig):
    """Base class of the configurations of stems (`EncoderConfig.stem`). Subclasses are frozen dataclasses.

    Images are split and packed according to the fields of `PatchStemConfig` or of a `WholeImageStem`, and audio
    according to those of `AudioStemConfig` or `FrameStemConfig`. So a stem is derived from one of these classes,
    overrides `build`, and reads the same packed inputs.

    - `complete`: whether the stem is a complete network, so that the encoder has no further layers.
    """

    complete: ClassVar[bool] = False

    @property
    def group(self) -> int:
        """Number of the stem's outputs that become one feature."""
        return 1

    @abc.abstractmethod
    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Stem":
        """Return the stem with new weights, for an encoder with `embed_dim` features."""


@runtime_checkable
class Stem(Protocol):
    """First layer of an encoder."""

    def __call__(self, rows: Any, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        """Return the inputs of the encoder's layers. `rows`: packed patches, chunks or frames (`packed_rows`)."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedGrid(CheckedFields):
    """Learned positions on a square grid: `x + table[row, column]`.

    **Arguments:**

    - `side`: number of rows and of columns of the grid.
    - `resample`: interpolation for images with other numbers of rows and columns of patches: `"none"`, such images
        raise DataError; `"bilinear"`, with aligned corners (Qwen3-VL); `"fraction"`, the grid position at the same
        fraction of the side (Idefics 3); `"antialias"`, antialiased bilinear resizing of the grid (SigLIP 2);
        `"bicubic"`, with aligned centers (GLM-4.1V).
    - `class_first`: whether the class token's row of the table is before the grid (InternVL) or after it.
    """

    side: PositiveInt
    resample: Literal["none", "bilinear", "fraction", "antialias", "bicubic"] = "none"
    class_first: bool = False

    def build(self, embed_dim: int, *, class_tokens: int, key: PRNGKeyArray) -> "GridTable":
        """Build the table, with one row per grid position and per class token."""
        return GridTable(table=normal(key, (self.side**2 + class_tokens, embed_dim), jnp.float32, 0.02))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedAxes(CheckedFields):
    """Separate learned positions of columns and rows: `x + table[0, column] + table[1, row]` (Gemma 4).

    **Arguments:**

    - `size`: maximum number of columns, and of rows.
    """

    size: PositiveInt

    def build(self, embed_dim: int, *, class_tokens: int, key: PRNGKeyArray) -> "AxisTables":
        check(
            class_tokens == 0,
            "PatchStemConfig.class_token=True needs a position for the class token, but LearnedAxes has none. Use "
            "LearnedGrid, or class_token=False.",
        )
        return AxisTables(table=normal(key, (2, self.size, embed_dim), jnp.float32, 0.02))


PatchPositions = LearnedGrid | LearnedAxes


@runtime_checkable
class ImageStem(Protocol):
    """Properties of a vision stem that determine how images are split and packed; see `PatchStemConfig`."""

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
    """Stem that processes complete images instead of patches, such as `MobileNetConfig`.

    It returns `side x side` features for a square image whose height is a multiple of `multiple`.
    """

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
        return _weighted_sum(self.table, index, weight)


class AxisTables(eqx.Module):
    """Tables of learned positions of columns and rows, concatenated: `sum_i weight_i table[index_i]`."""

    table: Float[Array, "coordinates positions embed"]

    def __call__(
        self, index: Int[Array, "batch length neighbors"], weight: Float[Array, "batch length neighbors"]
    ) -> Float[Array, "batch length embed"]:
        return _weighted_sum(self.table.reshape(-1, self.table.shape[-1]), index, weight)


def _weighted_sum(table: Array, index: Array, weight: Array) -> Array:
    """Return the weighted sum of rows of a table, in float32."""
    rows = jnp.take(table, index, axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(rows * weight[..., None].astype(jnp.float32), axis=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchStemConfig(StemConfig):
    """Configuration of a patch embedding: `norm(kernel^T patch + bias) + position`.

    A patch has `channels x frames x size x size` values.

    **Arguments:**

    - `size`: height and width of a patch in pixels.
    - `channels`: number of channels of a pixel.
    - `frames`: number of consecutive video frames per patch.
    - `merge`: `merge x merge` patches become one feature; these patches are adjacent in the sequence.
    - `bias`: whether a bias is added.
    - `norm`: norm before positions are added (GLM-4.1V); None: no norm.
    - `positions`: learned positions; None: no learned positions.
    - `class_token`: whether a learned class token is appended to the patches of each image (Llama 4).
    - `pixel_scale`, `pixel_shift`: pixels are transformed to `pixel_scale * pixel + pixel_shift`.
    - `coordinates`: order of the coordinates of rotary embeddings: `"row_column"` or `"column_row"`.
    - `first_coordinate`: coordinate of the first row and column.
    - `window`: height and width of an attention window, in merged patches, for layers whose mask is
        `Bidirectional((window * merge) ** 2)`; None: no windows.
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
        check(
            not self.class_token or self.window is None,
            f"PatchStemConfig.class_token=True does not support window={self.window}, since the class token belongs to "
            "no window. Leave one of them out.",
        )
        check(
            self.class_token or not (isinstance(self.positions, LearnedGrid) and self.positions.class_first),
            "LearnedGrid.class_first=True needs PatchStemConfig.class_token=True.",
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of a patch: channels, frames, height and width in pixels."""
        return self.channels, self.frames, self.size, self.size

    @property
    def group(self) -> int:
        """Number of patches that become one feature."""
        return self.merge**2

    @property
    def class_position(self) -> int:
        """Row of the position table for the class token: after the grid, or before it."""
        grid = self.positions
        return grid.side**2 if isinstance(grid, LearnedGrid) and not grid.class_first else 0

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "PatchStem":
        kernel_key, position_key, class_key = jax.random.split(key, 3)
        inputs = self.channels * self.frames * self.size**2
        positions = None
        if self.positions is not None:
            positions = self.positions.build(embed_dim, class_tokens=int(self.class_token), key=position_key)
        return PatchStem(
            kernel=fan_in(kernel_key, (*self.shape, embed_dim), jnp.float32, inputs),
            bias=jnp.zeros((embed_dim,)) if self.bias else None,
            norm=None if self.norm is None else self.norm.build(embed_dim),
            class_embedding=normal(class_key, (embed_dim,), jnp.float32, 0.02) if self.class_token else None,
            positions=positions,
            config=self,
        )


class PatchStem(eqx.Module):
    """Patch embedding: `norm(kernel^T patch + bias) + position`."""

    kernel: Float[Array, "channels frames patch_rows patch_columns embed"]
    bias: Float[Array, "embed"] | None
    norm: Norm | None
    class_embedding: Float[Array, "embed"] | None
    positions: GridTable | AxisTables | None
    config: PatchStemConfig = eqx.field(static=True)

    def __call__(self, rows: PackedPatches, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        config = self.config
        dtype = ctx.execution.precision.compute
        pixels = jnp.asarray(rows.patches).astype(jnp.float32) * config.pixel_scale + config.pixel_shift
        pixels = ctx.constrain(pixels.astype(dtype), "batch length patch")
        pixels = pixels.reshape(*pixels.shape[:2], *config.shape)
        patch_axes = "channels frames patch_rows patch_columns"
        x = ctx.einsum(f"batch length {patch_axes}, {patch_axes} embed -> batch length embed", pixels, self.kernel)
        x = add_bias(x, self.bias)
        x = x if self.norm is None else self.norm(x)
        if self.class_embedding is not None and rows.class_tokens is not None:
            class_embedding = self.class_embedding.astype(dtype)[None, None]
            x = jnp.where(jnp.asarray(rows.class_tokens)[:, :, None], class_embedding, x)
        if self.positions is not None and rows.position_index is not None and rows.position_weights is not None:
            x = x + self.positions(jnp.asarray(rows.position_index), jnp.asarray(rows.position_weights)).astype(dtype)
        return ctx.constrain(x, "batch length embed")
