"""Residual connections with a single residual stream."""

import dataclasses
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer, Dropout, ReadWriteResidual, Residual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveFloat, check
from eqx_decoders.layers.norm import LayerNormConfig, Norm, NormConfig
from eqx_decoders.numerics.einsum import scale
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Residual):
    """Configuration of the sequential residual connection `x += residual_scale * layer(x)`, for each layer in order.

    The block's output is `norm(scale * x)`.

    **Arguments:**

    - `residual_scale`: factor of the output of every layer (Granite).
    - `output_scale`: whether the block's output has a factor `scale`, which is a buffer (Gemma 4).
    - `output_norm`: norm of the block's output (Conformers; Gulati et al. 2020); None for no norm.
    """

    residual_scale: PositiveFloat = 1.0
    output_scale: bool = False
    output_norm: NormConfig | None = None

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "SequentialResidual":
        return SequentialResidual(
            scale=jnp.ones((1,)) if self.output_scale else None,
            norm=None if self.output_norm is None else self.output_norm.build(embed_dim),
            config=self,
        )


class SequentialResidual(ReadWriteResidual):
    """Residual connection `x += residual_scale * layer(x)` for each layer in order; the output is `norm(scale * x)`."""

    scale: Float[Array, "one"] | None = eqx.field(metadata=BUFFER)
    norm: Norm | None
    config: Sequential = eqx.field(static=True)

    def write(self, state: Array, out: Array, coefficients: None = None) -> Array:
        return state + scale(out, self.config.residual_scale)

    def end(self, state: Array, drop: Dropout, ctx: ForwardContext) -> Array:
        x = drop(state)
        x = x if self.scale is None else x * self.scale.astype(x.dtype).reshape((1,) * x.ndim)
        return x if self.norm is None else self.norm(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNorm(Residual):
    """Configuration of post-norm: `x = norm(x + layer(x))` for each layer in order (Vaswani et al. 2017).

    Each layer has a separate norm, except layers with `reads_streams` (an Engram), whose sum is not normalized.

    **Arguments:**

    - `norm`: norm of every sum.
    """

    norm: NormConfig = LayerNormConfig()

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "PostNormResidual":
        return PostNormResidual(norms=tuple(self.norm.build(embed_dim) for _ in range(branches)))


class PostNormResidual(ReadWriteResidual):
    """Residual connection `x = norm(x + layer(x))` for each layer in order."""

    norms: tuple[Norm, ...]

    def read(self, state: Array, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, Norm | None]:
        return state, None if layer.reads_streams else self.norms[layer.position]

    def write(self, state: Array, out: Array, coefficients: Norm | None = None) -> Array:
        return state + out if coefficients is None else coefficients(state + out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Residual):
    """Configuration of the weighted connection: `x = stream_scale * gain * s + layer_scale * layer(s)` for each layer.

    **Arguments:**

    - `keeps_normed`: whether s = norm(x), with the norm before the layer (BLOOM, MiniMax-Text). Otherwise s = x, and
        the norm applies only to the layer's input.
    - `stream_scales`, `layer_scales`: one factor for each layer, in order; () for factors of 1.
    - `gains`: whether each layer has a learned vector `gain` (Doge); otherwise it is 1.
    """

    keeps_normed: bool = False  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in Residual
    stream_scales: tuple[PositiveFloat, ...] = ()
    layer_scales: tuple[PositiveFloat, ...] = ()
    gains: bool = False

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "WeightedResidual":
        for field in ("stream_scales", "layer_scales"):
            factors = getattr(self, field)
            check(
                len(factors) in (0, branches),
                f"Weighted.{field}={factors} must have one factor for each of the block's {branches} layers, or be ().",
            )
        gains = tuple(Gain(jnp.ones((embed_dim,))) for _ in range(branches)) if self.gains else None
        return WeightedResidual(gains=gains, config=self)


class Gain(eqx.Module):
    """Learned vector that multiplies the stream at one layer."""

    scale: Float[Array, "embed"]


class WeightedResidual(ReadWriteResidual):
    """Residual connection `x = stream_scale * gain * s + layer_scale * layer(s)` for each layer in order."""

    gains: tuple[Gain, ...] | None
    config: Weighted = eqx.field(static=True)

    def read(self, state: Array, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, tuple[Array, int] | None]:
        x = state if layer.stream_norm is None else layer.stream_norm(state)
        return x, None if layer.reads_streams else (x, layer.position)

    def write(self, state: Array, out: Array, coefficients: tuple[Array, int] | None = None) -> Array:
        """Return the stream after a layer.

        `coefficients` are the stream s and the layer's position; None for a layer with `reads_streams`.
        """
        if coefficients is None:
            return state + out
        x, index = coefficients
        if self.gains is not None:
            x = x * self.gains[index].scale.astype(x.dtype)[None, None]
        stream_scale = self.config.stream_scales[index] if self.config.stream_scales else 1.0
        layer_scale = self.config.layer_scales[index] if self.config.layer_scales else 1.0
        return scale(x, stream_scale) + scale(out, layer_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Residual):
    """Parallel block `x += dropout(mixer(norm(x)) + mlp(norm(x)))` (GPT-J, Wang & Komatsuzaki 2021; PaLM)."""

    shares_norm: ClassVar[bool] = True

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "ParallelResidual":
        return ParallelResidual()


class ParallelResidual(ReadWriteResidual):
    """Residual connection of a parallel block: `x += dropout(sum of all layers of x)`."""

    def begin(self, x: Array) -> tuple[Array, Array | None]:
        return x, None

    def read(self, state: tuple[Array, Array | None], layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, None]:
        return state[0], None

    def write(self, state: tuple[Array, Array | None], out: Array, coefficients: None = None) -> tuple[Array, Array]:
        x, total = state
        return x, out if total is None else total + out

    def end(self, state: tuple[Array, Array | None], drop: Dropout, ctx: ForwardContext) -> Array:
        x, total = state
        return x + drop(jnp.zeros_like(x) if total is None else total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoResidual(Residual):
    """No residual connection: `x = layer(x)` for each layer in order (MaxText's `simple` blocks)."""

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "NoResidualModule":
        return NoResidualModule()


class NoResidualModule(ReadWriteResidual):
    """`x = layer(x)` for each layer in order."""

    def write(self, state: Array, out: Array, coefficients: None = None) -> Array:
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chained(Residual):
    """One residual connection around mixer and MLP: `x += up(mlp(mixer(x)))` (MaxText's `qwen3_custom_moe`).

    The mixer's output has `AttentionConfig.out_dim` features, which the matrix `up` maps to the features of the stream.
    """

    chains: ClassVar[bool] = True

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "ChainedResidual":
        return ChainedResidual(up=fan_in(key, (inner_dim, embed_dim), jnp.float32, inner_dim))


class ChainedResidual(ReadWriteResidual):
    """Residual connection `x += up(mlp(mixer(x)))`."""

    up: Float[Array, "latent embed"]

    def begin(self, x: Array) -> tuple[Array, Array]:
        return x, x

    def read(self, state: tuple[Array, Array], layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, None]:
        return state[1], None

    def write(self, state: tuple[Array, Array], out: Array, coefficients: None = None) -> tuple[Array, Array]:
        return state[0], out

    def end(self, state: tuple[Array, Array], drop: Dropout, ctx: ForwardContext) -> Array:
        x, latent = state
        return drop(x + ctx.einsum("batch length latent, latent embed -> batch length embed", latent, self.up))


ResidualName = Literal["sequential", "parallel", "none", "chained"]
RESIDUALS: dict[str, Residual] = {
    "sequential": Sequential(),
    "parallel": Parallel(),
    "none": NoResidual(),
    "chained": Chained(),
}
