"""Projectors, which map encoder outputs to the features that replace the embeddings of placeholder tokens."""

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
    - `norm`, `out_norm`: norm of the input, and norm before the activation; None: no norm.
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
    """Configuration of a convolution that maps `side x side` patches to one feature: `sum_rc kernel_rc^T x_rc + bias`.

    **Arguments:**

    - `side`: height and width of the kernel in patches; also the stride.
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
    """Convolution that maps `side x side` patches to one feature: `sum_rc kernel_rc^T x_rc + bias`."""

    kernel: Float[Array, "patch_rows patch_columns inner outer"]
    bias: Float[Array, "outer"] | None
    config: GroupConvolutionConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length inner"], ctx: ForwardContext) -> Float[Array, "batch rows outer"]:
        side = self.config.side
        x = x.reshape(x.shape[0], x.shape[1] // side**2, side, side, x.shape[2])
        patch_axes = "patch_rows patch_columns inner"
        pattern = f"batch length {patch_axes}, {patch_axes} outer -> batch length outer"
        return add_bias(ctx.einsum(pattern, x, self.kernel), self.bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig(CheckedFields):
    """Configuration of a projector, which maps every `group` adjacent patches to one feature.

    **Arguments:**

    - `group`: number of adjacent patches per feature.
    - `combine`: combination of the patches: `"join"`, concatenated; `"interleave"`, the first value of each patch, then
        the second value of each patch, and so on (Mistral 3); `"mean"`; `"first"`, only the first patch (Gemma 3n's
        audio).
    - `convolution`: combines the patches instead of `combine` (GLM-4.1V); None: no convolution.
    - `norm`: norm of the inputs; None: no norm.
    - `norm_of`: `"patches"`, the norm is applied before the combination; `"groups"`, after it.
    - `scale`: factor of the combined values (Gemma 4: the square root of their number).
    - `standardize`: whether the combined values are standardized with a mean and a scale, which are not trained
        (Gemma 4).
    - `layers`: layers applied in order. The last `ProjectionConfig` determines the output size; an MLP does not change
        the size.
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
            isinstance(self.layers[0], ProjectionConfig), "ProjectorConfig.layers must start with a ProjectionConfig."
        )
        if self.convolution is not None:
            check(
                self.group == self.convolution.side**2,
                f"ProjectorConfig.group={self.group} must be the square of "
                f"ProjectorConfig.convolution.side={self.convolution.side}.",
            )
            check(
                self.combine == "join",
                f"ProjectorConfig.combine={self.combine!r} is not used with ProjectorConfig.convolution. Leave one of "
                "them out.",
            )

    @property
    def out_dim(self) -> int:
        """Size of an output feature."""
        return self._dims[-1]

    @property
    def _dims(self) -> list[int]:
        """Output size of each layer."""
        dims: list[int] = []
        for layer in self.layers:
            dims.append(layer.dim if isinstance(layer, ProjectionConfig) else dims[-1])
        return dims

    def combined_dim(self, embed_dim: int) -> int:
        """Return the size of the combined patches, which the layers read."""
        if self.convolution is not None:
            return self.convolution.dim
        return embed_dim * (1 if self.combine in ("mean", "first") else self.group)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Projector":
        combined_dim = self.combined_dim(embed_dim)
        convolution = self.convolution
        input_dims = [combined_dim, *self._dims]
        convolution_key, *keys = jax.random.split(key, len(self.layers) + 1)
        layers = zip(self.layers, input_dims, keys, strict=False)
        norm_dim = embed_dim if self.norm_of == "patches" else combined_dim
        return Projector(
            convolution=None if convolution is None else convolution.build(embed_dim, key=convolution_key),
            norm=None if self.norm is None else self.norm.build(norm_dim),
            bias=jnp.zeros((combined_dim,)) if self.standardize else None,
            scale=jnp.ones((combined_dim,)) if self.standardize else None,
            layers=tuple(layer.build(input_dim, key=layer_key) for layer, input_dim, layer_key in layers),
            config=self,
        )


class Projector(eqx.Module):
    """Projector, which computes `layers(norm(combine(patches)))`.

    With `ProjectorConfig.norm_of="patches"` the norm comes first: `layers(combine(norm(patches)))`.
    """

    convolution: GroupConvolution | None
    norm: Norm | None
    bias: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    scale: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    layers: tuple[Projection | MLP, ...]
    config: ProjectorConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch rows features"]:
        """Return one feature for every `group` patches."""
        norm_patches = self.config.norm_of == "patches"
        x = self.norm(x) if self.norm is not None and norm_patches else x
        x = self._combine(x, ctx)
        x = self.norm(x) if self.norm is not None and not norm_patches else x
        x = self.project(x, ctx)
        out_dim = self.config.out_dim
        check(
            x.shape[-1] == out_dim,
            f"Projector: the layers return features of size {x.shape[-1]}, but ProjectorConfig.out_dim={out_dim}. "
            "Build the layers from the same ProjectorConfig.",
        )
        return x

    def project(self, x: Float[Array, "batch rows inner"], ctx: ForwardContext) -> Float[Array, "batch rows features"]:
        """Apply the layers to combined and normalized patches."""
        for layer in self.layers:
            x = layer(x, ctx)
        return x

    def _combine(self, x: Array, ctx: ForwardContext) -> Array:
        config = self.config
        dtype = x.dtype
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
    """Configuration of token ids that an encoder embeds instead of the decoder (Gemma 3n: hard tokens).

    Their embedding is `project(norm(table[token - first]))`, where `project` has the layers of the encoder's projector.

    **Arguments:**

    - `first`, `count`: the token ids are `first, …, first + count - 1`.
    - `norm`: norm of the table's rows.
    - `fill`: token id whose embedding pads audio clips to `FrameStemConfig.rows_per_clip` features; None: no padding.
    """

    first: NonNegativeInt
    count: PositiveInt
    norm: NormConfig
    fill: NonNegativeInt | None = None

    def __post_init__(self):
        super().__post_init__()
        check(
            self.fill is None or self.first <= self.fill < self.first + self.count,
            f"EncoderTokensConfig.fill={self.fill} must be one of the tokens from {self.first} to "
            f"{self.first + self.count - 1}.",
        )

    def build(self, features: int, *, key: PRNGKeyArray) -> "EncoderTokens":
        """Build the table. `features`: input size of the projector's layers."""
        table = normal(key, (self.count, features), jnp.float32, 1.0)
        return EncoderTokens(table=table, norm=self.norm.build(features), config=self)


class EncoderTokens(eqx.Module):
    """Embedding of the tokens of an encoder: `project(norm(table[token - first]))`; see `EncoderTokensConfig`."""

    table: Float[Array, "rows row_dim"]
    norm: Norm
    config: EncoderTokensConfig = eqx.field(static=True)

    def __call__(
        self, tokens: Int[Array, "batch length"], projector: Projector, ctx: ForwardContext
    ) -> Float[Array, "batch length features"]:
        """Return the embeddings of `tokens`; the results for other token ids are undefined."""
        index = jnp.clip(tokens - self.config.first, 0, self.config.count - 1)
        return projector.project(self.norm(look_up(self.table, index, "rows row_dim", ctx)), ctx)
