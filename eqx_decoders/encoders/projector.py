"""Projector from an encoder's features to rows that replace placeholder tokens: patches joined, normed, multiplied."""

import dataclasses
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import Context
from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectionConfig(CheckedFields):
    """Configuration of a linear layer with an activation: `act(kernel^T norm(x) + bias)`.

    **Arguments:**

    - `dim`: number of output features.
    - `bias`: whether a bias is added.
    - `activation`: one of `ACTIVATIONS`.
    - `norm`: norm of the input features; None for none.
    """

    dim: PositiveInt
    bias: bool = False
    activation: ActivationName = "identity"
    norm: NormConfig | None = None

    def build(self, input_dim: int, *, key: PRNGKeyArray) -> "Projection":
        return Projection(
            norm=None if self.norm is None else self.norm.build(input_dim),
            kernel=fan_in(key, (input_dim, self.dim), jnp.float32, input_dim),
            bias=jnp.zeros((self.dim,)) if self.bias else None,
            config=self,
        )


class Projection(eqx.Module):
    """Linear layer with an activation: `act(kernel^T norm(x) + bias)`."""

    norm: Norm | None
    kernel: Float[Array, "inner outer"]
    bias: Float[Array, "outer"] | None
    config: ProjectionConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length inner"], ctx: Context) -> Float[Array, "batch length outer"]:
        x = x if self.norm is None else self.norm(x)
        y = ctx.einsum("batch length inner, inner outer -> batch length outer", x, self.kernel)
        return ACTIVATIONS[self.config.activation](add_bias(y, self.bias))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig(CheckedFields):
    """Configuration of a projector: groups of `group` patches become one row each.

    **Arguments:**

    - `group`: number of patches of a row, which stand one behind the other.
    - `combine`: `"join"`, their features one after the other; `"interleave"`, the first feature of each, then the
        second (Mistral 3); or `"mean"`.
    - `norm`: norm of the features; None for none.
    - `norm_of`: `"patches"`, a norm before they are combined, or `"groups"`, after it.
    - `scale`: multiplies the combined features (Gemma 4: the root of their number).
    - `standardize`: whether a mean is then subtracted, and a scale multiplied, neither of which is trained (Gemma 4).
    - `layers`: one after the other; the last one makes the features of the residual stream.
    """

    group: PositiveInt = 1
    combine: Literal["join", "interleave", "mean"] = "join"
    norm: NormConfig | None = None
    norm_of: Literal["patches", "groups"] = "groups"
    scale: PositiveFloat = 1.0
    standardize: bool = False
    layers: Annotated[tuple[ProjectionConfig, ...], NonEmpty("ProjectionConfig")]

    @property
    def out_dim(self) -> int:
        """Number of features of a row."""
        return self.layers[-1].dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Projector":
        size = embed_dim * (1 if self.combine == "mean" else self.group)
        sizes = [size, *(layer.dim for layer in self.layers)]
        keys = jax.random.split(key, len(self.layers))
        inputs = zip(self.layers, sizes, keys, strict=False)
        normed = embed_dim if self.norm_of == "patches" else size
        return Projector(
            norm=None if self.norm is None else self.norm.build(normed),
            bias=jnp.zeros((size,)) if self.standardize else None,
            scale=jnp.ones((size,)) if self.standardize else None,
            layers=tuple(layer.build(size, key=key) for layer, size, key in inputs),
            config=self,
        )


class Projector(eqx.Module):
    """Projector of groups of patches: `layers(norm(combine(patches)))`."""

    norm: Norm | None
    bias: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    scale: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    layers: tuple[Projection, ...]
    config: ProjectorConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length embed"], ctx: Context) -> Float[Array, "batch rows features"]:
        """Return a row of features for every group of patches."""
        config, first = self.config, self.norm is not None and self.config.norm_of == "patches"
        x = self.norm(x) if first and self.norm is not None else x
        x = self._combined(x)
        x = self.norm(x) if self.norm is not None and not first else x
        for layer in self.layers:
            x = layer(x, ctx)
        check(x.shape[-1] == config.out_dim, "Projector: its layers do not make the features that its config says.")
        return x

    def _combined(self, x: Array) -> Array:
        config, dtype = self.config, x.dtype
        x = x.reshape(x.shape[0], x.shape[1] // config.group, config.group, x.shape[2])
        if config.combine != "mean":
            x = x.swapaxes(2, 3) if config.combine == "interleave" else x
            x = x.reshape(*x.shape[:2], -1)
        if config.combine == "mean" or config.scale != 1.0 or self.bias is not None:
            x = x.astype(jnp.float32)
            x = jnp.mean(x, axis=2) if config.combine == "mean" else x
            x = x * config.scale
        if self.bias is not None and self.scale is not None:
            x = (x - self.bias.astype(jnp.float32)[None, None]) * self.scale.astype(jnp.float32)[None, None]
        return x.astype(dtype)
