"""Projector from an encoder's features to rows that replace placeholder tokens: patches joined, normed, multiplied."""

import dataclasses
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonEmpty, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.layers.mlp import ACTIVATIONS, MLP, ActivationName, MLPConfig
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in, normal
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectionConfig(CheckedFields):
    """Configuration of a linear layer with an activation: `act(out_norm(kernel^T norm(x) + bias))`.

    **Arguments:**

    - `dim`: number of output features.
    - `bias`: whether a bias is added.
    - `activation`: one of `ACTIVATIONS`.
    - `norm`, `out_norm`: norms of the input features, and before the activation; None for none.
    """

    dim: PositiveInt
    bias: bool = False
    activation: ActivationName = "identity"
    norm: NormConfig | None = None
    out_norm: NormConfig | None = None

    def build(self, input_dim: int, *, key: PRNGKeyArray) -> "Projection":
        return Projection(
            norm=None if self.norm is None else self.norm.build(input_dim),
            out_norm=None if self.out_norm is None else self.out_norm.build(self.dim),
            kernel=fan_in(key, (input_dim, self.dim), jnp.float32, input_dim),
            bias=jnp.zeros((self.dim,)) if self.bias else None,
            config=self,
        )


class Projection(eqx.Module):
    """Linear layer with an activation: `act(out_norm(kernel^T norm(x) + bias))`."""

    norm: Norm | None
    out_norm: Norm | None
    kernel: Float[Array, "inner outer"]
    bias: Float[Array, "outer"] | None
    config: ProjectionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length inner"], ctx: ForwardContext
    ) -> Float[Array, "batch length outer"]:
        x = x if self.norm is None else self.norm(x)
        y = ctx.einsum("batch length inner, inner outer -> batch length outer", x, self.kernel)
        y = add_bias(y, self.bias)
        return ACTIVATIONS[self.config.activation](y if self.out_norm is None else self.out_norm(y))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupConvolutionConfig(CheckedFields):
    """Configuration of a convolution that makes one row of each group of patches: `sum_rc kernel_rc^T x_rc + bias`.

    **Arguments:**

    - `side`: rows and columns of patches in a group.
    - `dim`: number of output features.
    - `bias`: whether a bias is added.
    """

    side: PositiveInt
    dim: PositiveInt
    bias: bool = True

    def build(self, input_dim: int, *, key: PRNGKeyArray) -> "GroupConvolution":
        shape = (self.side, self.side, input_dim, self.dim)
        return GroupConvolution(
            kernel=fan_in(key, shape, jnp.float32, input_dim * self.side**2),
            bias=jnp.zeros((self.dim,)) if self.bias else None,
            config=self,
        )


class GroupConvolution(eqx.Module):
    """Convolution that makes one row of each group of patches: `sum_rc kernel_rc^T x_rc + bias`."""

    kernel: Float[Array, "patch_rows patch_columns inner outer"]
    bias: Float[Array, "outer"] | None
    config: GroupConvolutionConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length inner"], ctx: ForwardContext) -> Float[Array, "batch rows outer"]:
        side = self.config.side
        x = x.reshape(x.shape[0], x.shape[1] // side**2, side, side, x.shape[2])
        words = "patch_rows patch_columns inner"
        pattern = f"batch length {words}, {words} outer -> batch length outer"
        return add_bias(ctx.einsum(pattern, x, self.kernel), self.bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig(CheckedFields):
    """Configuration of a projector: groups of `group` patches become one row each.

    **Arguments:**

    - `group`: number of patches of a row, which stand one behind the other.
    - `combine`: `"join"`, their features one after the other; `"interleave"`, the first feature of each, then the
        second (Mistral 3); `"mean"`; or `"first"`, those of the first patch alone (Gemma 3n's audio).
    - `convolution`: combines them instead, with a matrix for each place in a group (GLM-4.1V); None for none.
    - `norm`: norm of the features; None for none.
    - `norm_of`: `"patches"`, a norm before they are combined, or `"groups"`, after it.
    - `scale`: multiplies the combined features (Gemma 4: the root of their number).
    - `standardize`: whether a mean is then subtracted, and a scale multiplied, neither of which is trained (Gemma 4).
    - `layers`: one after the other; the last one makes the features of the residual stream. An MLP has as many
        features behind it as before it.
    """

    group: PositiveInt = 1
    combine: Literal["join", "interleave", "mean", "first"] = "join"
    convolution: GroupConvolutionConfig | None = None
    norm: NormConfig | None = None
    norm_of: Literal["patches", "groups"] = "groups"
    scale: PositiveFloat = 1.0
    standardize: bool = False
    layers: Annotated[tuple[ProjectionConfig | MLPConfig, ...], NonEmpty("ProjectionConfig")]

    def __post_init__(self):
        super().__post_init__()
        check(
            isinstance(self.layers[0], ProjectionConfig), "ProjectorConfig.layers must begin with a ProjectionConfig."
        )
        if self.convolution is not None:
            rule = f"must be the square of ProjectorConfig.convolution.side={self.convolution.side}"
            check(self.group == self.convolution.side**2, f"ProjectorConfig.group={self.group} {rule}.")
            rule = "says how groups are combined without ProjectorConfig.convolution: leave one of them out"
            check(self.combine == "join", f"ProjectorConfig.combine={self.combine!r} {rule}.")

    @property
    def out_dim(self) -> int:
        """Number of features of a row."""
        return self._dims[-1]

    @property
    def _dims(self) -> list[int]:
        """Numbers of features behind the layers."""
        dims: list[int] = []
        for layer in self.layers:
            dims.append(layer.dim if isinstance(layer, ProjectionConfig) else dims[-1])
        return dims

    def combined_dim(self, embed_dim: int) -> int:
        """Return the number of features of a group of patches behind their combination."""
        if self.convolution is not None:
            return self.convolution.dim
        return embed_dim * (1 if self.combine in ("mean", "first") else self.group)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Projector":
        size, convolution = self.combined_dim(embed_dim), self.convolution
        sizes = [size, *self._dims]
        keys = jax.random.split(key, len(self.layers))
        inputs = zip(self.layers, sizes, keys, strict=False)
        normed = embed_dim if self.norm_of == "patches" else size
        convolution_key = jax.random.fold_in(key, 0)
        return Projector(
            convolution=None if convolution is None else convolution.build(embed_dim, key=convolution_key),
            norm=None if self.norm is None else self.norm.build(normed),
            bias=jnp.zeros((size,)) if self.standardize else None,
            scale=jnp.ones((size,)) if self.standardize else None,
            layers=tuple(layer.build(size, key=key) for layer, size, key in inputs),
            config=self,
        )


class Projector(eqx.Module):
    """Projector of groups of patches: `layers(norm(combine(patches)))`."""

    convolution: GroupConvolution | None
    norm: Norm | None
    bias: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    scale: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    layers: tuple[Projection | MLP, ...]
    config: ProjectorConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch rows features"]:
        """Return a row of features for every group of patches."""
        config, first = self.config, self.norm is not None and self.config.norm_of == "patches"
        x = self.norm(x) if first and self.norm is not None else x
        x = self._combined(x, ctx)
        x = self.norm(x) if self.norm is not None and not first else x
        x = self.project(x, ctx)
        check(x.shape[-1] == config.out_dim, "Projector: its layers do not make the features that its config says.")
        return x

    def project(self, x: Float[Array, "batch rows inner"], ctx: ForwardContext) -> Float[Array, "batch rows features"]:
        """Return the layers' output, of combined and normed features."""
        for layer in self.layers:
            x = layer(x, ctx)
        return x

    def _combined(self, x: Array, ctx: ForwardContext) -> Array:
        config, dtype = self.config, x.dtype
        if self.convolution is not None:
            x = self.convolution(x, ctx)
        else:
            x = x.reshape(x.shape[0], x.shape[1] // config.group, config.group, x.shape[2])
            x = x.swapaxes(2, 3) if config.combine == "interleave" else x
            x = x[:, :, :1] if config.combine == "first" else x
            x = x.reshape(*x.shape[:2], -1) if config.combine != "mean" else jnp.mean(x.astype(jnp.float32), axis=2)
        if config.scale != 1.0 or self.bias is not None:
            x = x.astype(jnp.float32) * config.scale
        if self.bias is not None and self.scale is not None:
            x = (x - self.bias.astype(jnp.float32)[None, None]) * self.scale.astype(jnp.float32)[None, None]
        return x.astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderTokensConfig(CheckedFields):
    """Configuration of tokens whose embedding is `project(norm(table[token - first]))`, by an encoder's projector.

    They take the place of rows of the decoder's embedding (Gemma 3n).

    **Arguments:**

    - `first`, `count`: their ids, one behind the other.
    - `norm`: norm of the table's rows.
    - `fill`: the one whose embedding fills up audio clips with fewer rows of features than `rows_per_clip`; None for
        none.
    """

    first: NonNegativeInt
    count: PositiveInt
    norm: NormConfig
    fill: NonNegativeInt | None = None

    def __post_init__(self):
        super().__post_init__()
        good = self.fill is None or self.first <= self.fill < self.first + self.count
        rule = f"must be one of the tokens from {self.first} to {self.first + self.count - 1}"
        check(good, f"EncoderTokensConfig.fill={self.fill} {rule}.")

    def build(self, features: int, *, key: PRNGKeyArray) -> "EncoderTokens":
        """Build the table, with rows of so many features as the projector's layers read."""
        table = normal(key, (self.count, features), jnp.float32, 1.0)
        return EncoderTokens(table=table, norm=self.norm.build(features), config=self)


class EncoderTokens(eqx.Module):
    """Tokens whose embedding is `project(norm(table[token - first]))`, by an encoder's projector."""

    table: Float[Array, "rows row_dim"]
    norm: Norm
    config: EncoderTokensConfig = eqx.field(static=True)

    def __call__(
        self, tokens: Int[Array, "batch length"], projector: Projector, ctx: ForwardContext
    ) -> Float[Array, "batch length features"]:
        """Return the embeddings; those of other tokens are meaningless."""
        index = jnp.clip(tokens - self.config.first, 0, self.config.count - 1)
        return projector.project(self.norm(look_up(self.table, index, "rows row_dim", ctx)), ctx)
