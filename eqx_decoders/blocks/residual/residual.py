"""Residual connections of one stream: outputs of layers are added to it, or replace it."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.residual.base import CountingResidual, Dropout, Reader, ReadWriteResidual, Residual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveFloat, check
from eqx_decoders.layers.norm import LayerNormConfig, Norm, NormConfig
from eqx_decoders.numerics.einsum import scale
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Residual):
    """`x += residual_scale * branch(x)`, one branch after another; then `x *= scale`, and `x = norm(x)`.

    **Arguments:**

    - `residual_scale`: multiplies the output of every layer (Granite).
    - `output_scale`: whether the layer's output is multiplied by a number, a buffer (Gemma 4).
    - `output_norm`: of the layer's output, the stream itself (Conformers; Gulati et al. 2020); None for none.
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
    """`x += residual_scale * branch(x)`, one branch after another; then `x *= scale`, and `x = norm(x)`."""

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
    """`x = norm(x + branch(x))`, one branch after another, each with a norm of its own (Vaswani et al. 2017).

    To a branch that reads and writes all streams by itself (an Engram) no norm belongs.

    **Arguments:**

    - `norm`: of every sum.
    """

    norm: NormConfig = LayerNormConfig()

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "PostNormResidual":
        return PostNormResidual(norms=tuple(self.norm.build(embed_dim) for _ in range(branches)))


class PostNormResidual(CountingResidual):
    """`x = norm(x + branch(x))`, one branch after another."""

    norms: tuple[Norm, ...]

    def read(self, state: tuple[Array, int], reader: Reader, ctx: ForwardContext) -> tuple[Array, Norm | None]:
        x, used = state
        return x, None if reader.reads_streams else self.norms[used]

    def write(self, state: tuple[Array, int], out: Array, coefficients: Norm | None = None) -> tuple[Array, int]:
        x, used = state
        return (x + out, used) if coefficients is None else (coefficients(x + out), used + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Residual):
    """`x = keep * gain * s + add * branch(s)`, one branch after another, where s is x, or `norm(x)`.

    **Arguments:**

    - `keeps_normed`: whether the norm before a branch normalizes the stream itself, s = norm(x) (BLOOM, MiniMax-Text);
        else only what the branch reads.
    - `keep`, `add`: a number for each branch, in order; () for ones.
    - `gains`: whether each branch has a learned vector that multiplies the stream (Doge).
    """

    keeps_normed: bool = False  # pyright: ignore[reportIncompatibleVariableOverride] - others never do
    keep: tuple[PositiveFloat, ...] = ()
    add: tuple[PositiveFloat, ...] = ()
    gains: bool = False

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "WeightedResidual":
        for field in ("keep", "add"):
            value = getattr(self, field)
            rule = f"must have a number for each of the block's {branches} layers"
            check(len(value) in (0, branches), f"Weighted.{field}={value} {rule}.")
        gains = tuple(Gain(jnp.ones((embed_dim,))) for _ in range(branches)) if self.gains else None
        return WeightedResidual(gains=gains, config=self)


class Gain(eqx.Module):
    """Learned vector that multiplies the stream for one branch."""

    scale: Float[Array, "embed"]


class WeightedResidual(CountingResidual):
    """`x = keep * gain * s + add * branch(s)`, one branch after another."""

    gains: tuple[Gain, ...] | None
    config: Weighted = eqx.field(static=True)

    def read(self, state: tuple[Array, int], reader: Reader, ctx: ForwardContext) -> tuple[Array, Array | None]:
        x = state[0] if reader.stream_norm is None else reader.stream_norm(state[0])
        return x, None if reader.reads_streams else x

    def write(self, state: tuple[Array, int], out: Array, coefficients: Array | None = None) -> tuple[Array, int]:
        """Add a branch's output to what it read, `coefficients`; one that reads all streams is just added."""
        config, x, number = self.config, coefficients, state[1]
        if x is None:
            return state[0] + out, number
        if self.gains is not None:
            x = x * self.gains[number].scale.astype(x.dtype)[None, None]
        keep, add = (1.0 if not each else each[number] for each in (config.keep, config.add))
        return scale(x, keep) + scale(out, add), number + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Residual):
    """`x += dropout(mixer(n(x)) + mlp(n(x)))`: all branches read the same stream (Wang & Komatsuzaki 2021; PaLM)."""

    shares_norm: ClassVar[bool] = True

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "ParallelResidual":
        return ParallelResidual()


class ParallelResidual(ReadWriteResidual):
    """`x += dropout(sum of the branches of x)`."""

    def begin(self, x: Array) -> tuple[Array, Array | None]:
        return x, None

    def read(self, state: tuple[Array, Array | None], reader: Reader, ctx: ForwardContext) -> tuple[Array, None]:
        return state[0], None

    def write(self, state: tuple[Array, Array | None], out: Array, coefficients: None = None) -> tuple[Array, Array]:
        x, total = state
        return x, out if total is None else total + out

    def end(self, state: tuple[Array, Array | None], drop: Dropout, ctx: ForwardContext) -> Array:
        x, total = state
        return x + drop(jnp.zeros_like(x) if total is None else total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoResidual(Residual):
    """`x = branch(x)`, one branch after another: no residual connection (MaxText's `simple` blocks)."""

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "NoResidualModule":
        return NoResidualModule()


class NoResidualModule(ReadWriteResidual):
    """`x = branch(x)`, one branch after another."""

    def write(self, state: Array, out: Array, coefficients: None = None) -> Array:
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chained(Residual):
    """`x += up(mlp(mixer(x)))`: one residual connection around both layers (MaxText's `qwen3_custom_moe`).

    The mixer's output has `out_dim` features, which the matrix `up` maps back to those of the stream.
    """

    chains: ClassVar[bool] = True

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "ChainedResidual":
        return ChainedResidual(up=fan_in(key, (inner_dim, embed_dim), jnp.float32, inner_dim))


class ChainedResidual(ReadWriteResidual):
    """`x += up(mlp(mixer(x)))`."""

    up: Float[Array, "latent embed"]

    def begin(self, x: Array) -> tuple[Array, Array]:
        return x, x

    def read(self, state: tuple[Array, Array], reader: Reader, ctx: ForwardContext) -> tuple[Array, None]:
        return state[1], None

    def write(self, state: tuple[Array, Array], out: Array, coefficients: None = None) -> tuple[Array, Array]:
        return state[0], out

    def end(self, state: tuple[Array, Array], drop: Dropout, ctx: ForwardContext) -> Array:
        x, latent = state
        return drop(x + ctx.einsum("batch length latent, latent embed -> batch length embed", latent, self.up))
