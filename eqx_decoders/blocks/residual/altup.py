"""Alternating updates (Baykal et al. 2023): several residual streams, of which layers read and write the first."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.residual.base import Dropout, Reader, ReadWriteResidual, Residual
from eqx_decoders.blocks.residual.laurel import Laurel, LaurelResidual
from eqx_decoders.blocks.residual.residual import Sequential, SequentialResidual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in, normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp(Residual):
    """Residual streams x_k that are predicted before a block's layers, and corrected after them.

    `m(x) = tanh(router norm(x) / embed_dim)` are numbers of a token, one for each stream. A block computes

        p_k = x_k + sum_j (predict m(x_0))_kj x_j
        z   = p_0 after mixer and MLP, joined by the residual connection `inner`
        x_k = p_k + (1 + (correct m(z))_k) (z - p_0)

    Then its `post_layers` read `scale x_0`, and what they return is added to the other streams. A layer that reads and
    writes all streams by itself (an Engram) is added to them before they are predicted.

    Behind the embedding x_0 is the embedding e, and the other streams are `W_k e`, as large as e (root mean square).
    After the last block they are `V_k x_k`, as large as x_0, and the mean of all follows. The block of multi-token
    prediction begins with copies, and ends with the mean.

    **Arguments:**

    - `streams`: number of streams.
    - `inner`: residual connection of the first one.
    - `norm`: of the router.
    - `read_scale`: whether there is a `scale`, a learned vector; else it is 1.
    """

    streams: Annotated[int, AtLeast(2)] = 4  # pyright: ignore[reportIncompatibleVariableOverride] - others have one
    inner: Sequential | Laurel = Sequential()
    norm: NormConfig = RMSNormConfig()
    read_scale: bool = True

    @property
    def keeps_normed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - as the inner one says
        """Whether norms before layers normalize the first stream itself."""
        return self.inner.keeps_normed

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length streams embed"]:
        """Copy the input to all streams."""
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))

    def reduce(self, x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length embed"]:
        """Return the mean of the streams."""
        return jnp.mean(x, axis=2, dtype=jnp.float32).astype(x.dtype)

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> "StreamMaps":
        """Build the maps from an embedding to the streams, and back behind the last block."""

        def one(key):
            return StreamMap(kernel=fan_in(key, (embed_dim, embed_dim), jnp.float32, embed_dim))

        maps = tuple(map(one, jax.random.split(key, 2 * self.streams - 2)))
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
    """Streams between blocks' layers; `inner` is the state of the first one since they were predicted, or None."""

    streams: Array
    inner: Any = None


class AltUpResidual(ReadWriteResidual):
    """Predictions and corrections of one block's streams, around the layers that read the first."""

    inner: SequentialResidual | LaurelResidual
    norm: Norm
    router: Float[Array, "streams embed"]
    predict: Float[Array, "stream_pairs streams"]
    correct: Float[Array, "coefficients streams"]
    scale: Float[Array, "embed"] | None

    def begin(self, x: Float[Array, "batch length streams embed"]) -> AltUpState:
        return AltUpState(x)

    def read(self, state: AltUpState, reader: Reader, ctx: ForwardContext) -> tuple[Array, tuple[AltUpState, Any]]:
        if reader.reads_streams or reader.name.startswith("post_layers"):
            state = self._corrected(state, ctx)
            y = state.streams if reader.reads_streams else self._read_first(state, reader)
            return y, (state, reader.reads_streams)
        state = self._predicted(state, ctx)
        y, coefficients = self.inner.read(state.inner, reader, ctx)
        return y, (state, coefficients)

    def write(self, state: AltUpState, out: Array, coefficients: Any = None) -> AltUpState:
        """Write to the state that `read` made; with it come the coefficients of `inner`, or whether to write to all."""
        (streams, inner), rest = coefficients
        if inner is not None:
            return AltUpState(streams, self.inner.write(inner, out, rest))
        if rest:
            return AltUpState(streams + out)
        return AltUpState(jnp.concatenate([streams[:, :, :1], streams[:, :, 1:] + out[:, :, None]], axis=2))

    def end(self, state: AltUpState, drop: Dropout, ctx: ForwardContext) -> Float[Array, "batch length streams embed"]:
        return drop(self._corrected(state, ctx).streams)

    def _numbers(self, x: Array, weight: Array, ctx: ForwardContext) -> Float32[Array, "coefficients batch length"]:
        """Return `weight m(x)`, in float32."""
        y = self.norm(x.astype(jnp.float32)) / x.shape[-1]
        m = jnp.tanh(ctx.einsum("batch length embed, streams embed -> batch length streams", y, self.router))
        pattern = "batch length streams, coefficients streams -> batch length coefficients"
        return jnp.moveaxis(ctx.einsum(pattern, m, weight), -1, 0)

    def _predicted(self, state: AltUpState, ctx: ForwardContext) -> AltUpState:
        if state.inner is not None:
            return state
        x = _wide(state.streams)
        mix = self._numbers(state.streams[:, :, 0], self.predict, ctx)[..., None]
        n = len(x)
        predicted = [x[k] + sum(mix[n * k + j] * x[j] for j in range(n)) for k in range(n)]
        streams = jnp.stack(predicted, axis=2).astype(state.streams.dtype)
        return AltUpState(streams, self.inner.begin(streams[:, :, 0]))

    def _corrected(self, state: AltUpState, ctx: ForwardContext) -> AltUpState:
        if state.inner is None:
            return state
        z = self.inner.end(state.inner, lambda x: x, ctx)
        gain = self._numbers(z, self.correct, ctx)[..., None]
        p, change = _wide(state.streams), z.astype(jnp.float32) - state.streams[:, :, 0].astype(jnp.float32)
        corrected = [each + (1.0 + gain[k]) * change for k, each in enumerate(p)]
        return AltUpState(jnp.stack(corrected, axis=2).astype(state.streams.dtype))

    def _read_first(self, state: AltUpState, reader: Reader) -> Float[Array, "batch length embed"]:
        x = state.streams[:, :, 0]
        x = x if self.scale is None else x * self.scale.astype(x.dtype)[None, None]
        return x if reader.stream_norm is None else reader.stream_norm(x)


# Sums over a few streams are written out: a product of matrices this small would leave a matrix unit idle.


def _wide(streams: Array) -> list[Array]:
    return [streams[:, :, k].astype(jnp.float32) for k in range(streams.shape[2])]


class StreamMap(eqx.Module):
    """Matrix between the features of an embedding and those of a stream."""

    kernel: Float[Array, "embed outer"]

    def __call__(
        self, x: Float[Array, "batch length embed"], like: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return `kernel^T x`, scaled to the root mean square of `like`."""
        y = ctx.einsum("batch length embed, embed outer -> batch length outer", x, self.kernel)
        y = ctx.constrain(y, "batch length embed").astype(jnp.float32)
        return (y * jnp.sqrt(_square(like, 1e-30) / _square(y, 1e-5))).astype(x.dtype)


class StreamMaps(eqx.Module):
    """Maps from an embedding to all streams but the first, and back."""

    first: tuple[StreamMap, ...]
    last: tuple[StreamMap, ...]

    def expand(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length streams embed"]:
        """Return the input of the first block."""
        return jnp.stack([x, *(each(x, x, ctx) for each in self.first)], axis=2)

    def reduce(
        self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the input of the final norm: the mean of the mapped streams."""
        first = x[:, :, 0]
        mapped = [first, *(each(x[:, :, k], first, ctx) for k, each in enumerate(self.last, 1))]
        return jnp.mean(jnp.stack(mapped, axis=2), axis=2, dtype=jnp.float32).astype(x.dtype)


def _square(x: Array, least: float) -> Float32[Array, "batch length 1"]:
    """Return the mean square, of at least so much: the slope of its root has a bound."""
    return jnp.maximum(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True), least)
