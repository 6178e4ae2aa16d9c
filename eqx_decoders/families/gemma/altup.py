"""Residual connections of Gemma 3n.

- AltUp (alternating updates, Baykal et al. 2023): there are several residual streams; layers read and write the first.
- LAuReL (learned augmented residual layers, Menghani et al. 2024): a low-rank branch in parallel to the mixer.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer, Dropout, ReadWriteResidual, Residual
from eqx_decoders.blocks.residual.residual import Sequential, SequentialResidual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in, normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laurel(Residual):
    """Configuration of LAuReL: `x = (x + mixer(n) + n + norm(right^T left^T n)) / sqrt(2)`.

    n is the mixer's normalized input. The outputs of other layers are added as in `Sequential`.

    **Arguments:**

    - `rank`: rank of the product of the matrices `left` and `right`.
    - `norm`: norm of the output of the low-rank branch.
    """

    keeps_normed: ClassVar[bool] = True
    rank: PositiveInt = 64
    norm: NormConfig = RMSNormConfig()

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "LaurelResidual":
        left_key, right_key = jax.random.split(key)
        return LaurelResidual(
            left=fan_in(left_key, (embed_dim, self.rank), jnp.float32, embed_dim),
            right=fan_in(right_key, (self.rank, embed_dim), jnp.float32, self.rank),
            norm=self.norm.build(embed_dim),
        )


class LaurelResidual(ReadWriteResidual):
    """LAuReL connection; see `Laurel`."""

    left: Float[Array, "embed latent"]
    right: Float[Array, "latent embed"]
    norm: Norm

    def read(self, state: Array, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, Array | None]:
        x = state if layer.stream_norm is None else layer.stream_norm(state)
        if layer.name != "mixer":
            return x, None
        latent = ctx.einsum("batch length embed, embed latent -> batch length latent", x, self.left)
        out = ctx.einsum("batch length latent, latent embed -> batch length embed", latent, self.right)
        return x, x + self.norm(ctx.constrain(out, "batch length embed"))

    def write(self, state: Array, out: Array, coefficients: Array | None = None) -> Array:
        return state + out if coefficients is None else (state + out + coefficients) * 2**-0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp(Residual):
    """Configuration of AltUp: each block predicts all residual streams x_k, runs its layers on x_0, and corrects x_k.

    With the router `m(x) = tanh(router norm(x) / embed_dim)`, a vector with one value per stream, a block computes

        p_k = x_k + sum_j (predict m(x_0))_kj x_j                                (prediction)
        z   = p_0 after mixer and MLP, with the residual connection `inner`
        x_k = p_k + (1 + (correct m(z))_k) (z - p_0)                             (correction)

    Then the block's `post_layers` read `scale x_0`, and their output is added to all streams except the first. A layer
    with `reads_streams` (an Engram) is added to all streams before the prediction.

    For the embedding e the streams start as x_0 = e and `x_k = W_k e`, scaled to the root mean square of e. After the
    last block the streams are mapped to `V_k x_k`, scaled to the root mean square of x_0, and averaged. The block of an
    MTP depth uses copies of its input and the plain mean instead.

    **Arguments:**

    - `streams`: number of streams.
    - `inner`: residual connection of the first stream.
    - `norm`: norm of the router's input.
    - `read_scale`: whether `scale` is a learned vector; otherwise it is 1.
    """

    streams: Annotated[int, AtLeast(2)] = 4  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in Residual
    inner: Sequential | Laurel = Sequential()
    norm: NormConfig = RMSNormConfig()
    read_scale: bool = True

    @property
    def keeps_normed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in Residual
        """See `Residual.keeps_normed`: true if `inner` also uses the normalized stream."""
        return self.inner.keeps_normed

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length streams embed"]:
        """Copy the input to all streams."""
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))

    def reduce(self, x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length embed"]:
        """Return the mean of the streams."""
        return jnp.mean(x, axis=2, dtype=jnp.float32).astype(x.dtype)

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> "StreamMaps":
        """Build the maps from an embedding to the streams, and back after the last block."""

        def build_map(key: PRNGKeyArray) -> StreamMap:
            return StreamMap(kernel=fan_in(key, (embed_dim, embed_dim), jnp.float32, embed_dim))

        maps = tuple(map(build_map, jax.random.split(key, 2 * self.streams - 2)))
        return StreamMaps(first=maps[: self.streams - 1], last=maps[self.streams - 1 :])

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "AltUpResidual":
        inner_key, router_key, predict_key, correct_key = jax.random.split(key, 4)
        n = self.streams
        return AltUpResidual(
            inner=self.inner.build(embed_dim, branches=branches, inner_dim=inner_dim, key=inner_key),
            norm=self.norm.build(embed_dim),
            router=fan_in(router_key, (n, embed_dim), jnp.float32, embed_dim),
            predict=normal(predict_key, (n * n, n), jnp.float32, 0.02),
            correct=normal(correct_key, (n, n), jnp.float32, 0.02),
            scale=jnp.ones((embed_dim,)) if self.read_scale else None,
        )


class AltUpState(NamedTuple):
    """State of AltUp between the layers of a block.

    `inner`: state of the inner residual connection after the prediction; None before the prediction and after the
    correction.
    """

    streams: Array
    inner: Any = None


class AltUpResidual(ReadWriteResidual):
    """AltUp of one block: weights of the prediction and the correction; see `AltUp`."""

    inner: SequentialResidual | LaurelResidual
    norm: Norm
    router: Float[Array, "streams embed"]
    predict: Float[Array, "stream_pairs streams"]
    correct: Float[Array, "coefficients streams"]
    scale: Float[Array, "embed"] | None

    def begin(self, x: Float[Array, "batch length streams embed"]) -> AltUpState:
        return AltUpState(x)

    def read(self, state: AltUpState, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, tuple[AltUpState, Any]]:
        if layer.reads_streams or layer.name.startswith("post_layers"):
            state = self._corrected(state, ctx)
            y = state.streams if layer.reads_streams else self._read_first(state, layer)
            return y, (state, layer.reads_streams)
        state = self._predicted(state, ctx)
        y, coefficients = self.inner.read(state.inner, layer, ctx)
        return y, (state, coefficients)

    def write(self, state: AltUpState, out: Array, coefficients: Any = None) -> AltUpState:
        """Return the state after a layer.

        `state` is ignored, because `read` may have predicted or corrected it. `coefficients` is a pair: the state after
        `read`; and either the coefficients of `inner`, or whether to write to all streams.
        """
        (streams, inner), inner_coefficients_or_all = coefficients
        if inner is not None:
            return AltUpState(streams, self.inner.write(inner, out, inner_coefficients_or_all))
        if inner_coefficients_or_all:
            return AltUpState(streams + out)
        return AltUpState(jnp.concatenate([streams[:, :, :1], streams[:, :, 1:] + out[:, :, None]], axis=2))

    def end(self, state: AltUpState, drop: Dropout, ctx: ForwardContext) -> Float[Array, "batch length streams embed"]:
        return drop(self._corrected(state, ctx).streams)

    def _coefficients(
        self, x: Array, weight: Array, ctx: ForwardContext
    ) -> Float32[Array, "coefficients batch length"]:
        """Return `weight m(x)` in float32."""
        y = self.norm(x.astype(jnp.float32)) / x.shape[-1]
        m = jnp.tanh(ctx.einsum("batch length embed, streams embed -> batch length streams", y, self.router))
        pattern = "batch length streams, coefficients streams -> batch length coefficients"
        return jnp.moveaxis(ctx.einsum(pattern, m, weight), -1, 0)

    def _predicted(self, state: AltUpState, ctx: ForwardContext) -> AltUpState:
        if state.inner is not None:
            return state
        x = _upcast_streams(state.streams)
        mix = self._coefficients(state.streams[:, :, 0], self.predict, ctx)[..., None]
        n = len(x)
        predicted = [x[k] + sum(mix[n * k + j] * x[j] for j in range(n)) for k in range(n)]
        streams = jnp.stack(predicted, axis=2).astype(state.streams.dtype)
        return AltUpState(streams, self.inner.begin(streams[:, :, 0]))

    def _corrected(self, state: AltUpState, ctx: ForwardContext) -> AltUpState:
        if state.inner is None:
            return state
        z = self.inner.end(state.inner, lambda x: x, ctx)
        gain = self._coefficients(z, self.correct, ctx)[..., None]
        predicted = _upcast_streams(state.streams)
        change = z.astype(jnp.float32) - predicted[0]
        corrected = [stream + (1.0 + gain[k]) * change for k, stream in enumerate(predicted)]
        return AltUpState(jnp.stack(corrected, axis=2).astype(state.streams.dtype))

    def _read_first(self, state: AltUpState, layer: BlockLayer) -> Float[Array, "batch length embed"]:
        x = state.streams[:, :, 0]
        x = x if self.scale is None else x * self.scale.astype(x.dtype)[None, None]
        return x if layer.stream_norm is None else layer.stream_norm(x)


# Sums over streams are Python loops, because matrices of a few streams are too small for a matrix unit.


def _upcast_streams(streams: Array) -> list[Array]:
    return [streams[:, :, k].astype(jnp.float32) for k in range(streams.shape[2])]


class StreamMap(eqx.Module):
    """Linear map between the features of an embedding and the features of a stream."""

    kernel: Float[Array, "embed outer"]

    def __call__(
        self, x: Float[Array, "batch length embed"], like: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return `kernel^T x`, rescaled to the root mean square of `like`."""
        y = ctx.einsum("batch length embed, embed outer -> batch length outer", x, self.kernel)
        y = ctx.constrain(y, "batch length embed").astype(jnp.float32)
        return (y * jnp.sqrt(_mean_square(like, 1e-30) / _mean_square(y, 1e-5))).astype(x.dtype)


class StreamMaps(eqx.Module):
    """Maps from an embedding to all streams except the first, and back."""

    first: tuple[StreamMap, ...]
    last: tuple[StreamMap, ...]

    def expand(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length streams embed"]:
        """Return the input of the first block."""
        return jnp.stack([x, *(stream_map(x, x, ctx) for stream_map in self.first)], axis=2)

    def reduce(
        self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the input of the final norm: the mean of the mapped streams."""
        first = x[:, :, 0]
        mapped = [first, *(stream_map(x[:, :, k], first, ctx) for k, stream_map in enumerate(self.last, 1))]
        return jnp.mean(jnp.stack(mapped, axis=2), axis=2, dtype=jnp.float32).astype(x.dtype)


def _mean_square(x: Array, minimum: float) -> Float32[Array, "batch length 1"]:
    """Return the mean square, clipped to at least `minimum`, which bounds the gradient of its square root."""
    return jnp.maximum(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True), minimum)
