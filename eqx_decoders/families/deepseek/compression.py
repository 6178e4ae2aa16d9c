"""Compression of the tokens of a window into one key (DeepSeek-V4, 2026).

    key_w = rotate(norm(sum over tokens t of window w of softmax_t(W_g x_t + bias_t) * W_k x_t))

The softmax over the tokens of the window is computed separately for each feature. Window w covers the positions
`w * size` to `(w + 1) * size - 1` of a document. Its key is rotated to the window's first position, and is visible to
queries from the window's last position on. With `overlaps` the tokens of the previous window take part in the softmax,
with a second set of key and gate projections.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.layers.attention.context_parallel import context_parts
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs, last_inputs
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionConfig(CheckedFields):
    """Configuration of the compression of `size` tokens into one key.

    **Arguments:**

    - `size`: tokens per window.
    - `overlaps`: whether a key also depends on the tokens of the previous window.
    - `norm`: normalization of the compressed keys.
    """

    size: PositiveInt
    overlaps: bool = False
    norm: NormConfig = RMSNormConfig()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.size > 1,
            f"CompressionConfig.size={self.size} must be at least 2: a window of 1 token would not be compressed.",
        )

    @property
    def tokens_per_key(self) -> int:
        """Number of tokens on which a compressed key depends."""
        return self.size * (2 if self.overlaps else 1)

    def state_shape(self, head_dim: int) -> ConvShape:
        """Return the shape of the cached projections of the last tokens, which are needed for the next windows."""
        return ConvShape(num_inputs=self.tokens_per_key - 1, channels=2 * (2 if self.overlaps else 1) * head_dim)

    def build(self, embed_dim: int, head_dim: int, *, key: PRNGKeyArray) -> "Compressor":
        shape = (embed_dim, 2 if self.overlaps else 1, head_dim)
        kernels = (fan_in(k, shape, jnp.float32, embed_dim, "normal") for k in jax.random.split(key))
        return Compressor(
            *kernels, bias=jnp.zeros((self.size, *shape[1:])), norm=self.norm.build(head_dim), config=self
        )


class CompletedWindows(NamedTuple):
    """Compression windows that a call completes. The axis `places` has the maximum number of such windows.

    **Arguments:**

    - `tokens`: indices of the tokens of each window, in the concatenation of the cached state and the call.
    - `ends`: position of each window's last token; -1 for an unused place.
    - `segments`: segment id of each window's document.
    - `last`: index of each window's last token in the call; the call's length for an unused place.
    - `has_previous`: whether all tokens of the previous window are present, too.
    """

    tokens: Int[Array, "batch places span"]
    ends: Int[Array, "batch places"]
    segments: Int[Array, "batch places"] | None
    last: Int[Array, "batch places"]
    has_previous: Bool[Array, "batch places"]


class NewCompressedKeys(NamedTuple):
    """Compressed keys of the windows that a call completes.

    **Arguments:**

    - `key`: the keys.
    - `ends`, `segments`: see `CompletedWindows`.
    - `state`: new projections for the cache, see `CompressionConfig.state_shape`.
    """

    key: Float[Array, "batch places 1 head_dim"]
    ends: Int[Array, "batch places"]
    segments: Int[Array, "batch places"] | None
    state: ConvInputs | NewConvInputs


def find_windows(config: CompressionConfig, ctx: ForwardContext, cached: bool) -> CompletedWindows:
    """Find the compression windows that the tokens of a call complete.

    `cached`: whether there is a cache. Its state then precedes the call with `tokens_per_key - 1` tokens.
    """
    positions = ctx.positions
    segments = ctx.segment_ids
    size = config.size
    length = positions.shape[1]
    state_length = config.tokens_per_key - 1 if cached else 0
    max_windows = (length + size - 1) // size if cached else length // size
    shards = context_parts(ctx.execution.layout)
    max_windows = -(-max_windows // shards) * shards
    offsets = jnp.arange(1 - config.tokens_per_key, 1, dtype=positions.dtype)
    if cached:
        first = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(positions.dtype).max), axis=1, keepdims=True)
        has_tokens = jnp.any(positions >= 0, axis=1, keepdims=True)
        positions = jnp.concatenate([jnp.where(has_tokens, first + offsets[None, :-1], -1), positions], axis=1)
    documents = jnp.zeros_like(positions) if segments is None else segments
    # sort padding to the front, so that the tokens of a document are adjacent
    order = jnp.argsort(positions >= 0, axis=1, stable=True)
    positions, documents = (jnp.take_along_axis(x, order, axis=1) for x in (positions, documents))
    is_end = (positions >= 0) & ((positions + 1) % size == 0) & (order >= state_length)
    end_index = jnp.argsort(~is_end, axis=1, stable=True)[:, :max_windows]
    end_index = jnp.pad(end_index, ((0, 0), (0, max_windows - end_index.shape[1])))

    def take(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index.reshape(len(index), -1), axis=1).reshape(index.shape)

    index = end_index[:, :, None] + offsets[None, None]
    clipped = jnp.maximum(index, 0)
    ends = take(positions, end_index)
    window_documents = take(documents, end_index)
    present = (index >= 0) & (take(documents, clipped) == window_documents[..., None])
    present &= (take(positions, clipped) >= 0) & (take(positions, clipped) == ends[..., None] + offsets[None, None])
    is_used = jnp.arange(max_windows)[None] < jnp.sum(is_end, axis=1, keepdims=True)
    complete = jnp.all(present[..., -size:], axis=-1) & is_used
    return CompletedWindows(
        tokens=take(order, clipped),
        ends=jnp.where(complete, ends, -1),
        segments=None if segments is None else window_documents,
        last=jnp.where(complete, take(order, end_index) - state_length, length),
        has_previous=jnp.all(present, axis=-1),
    )


class Compressor(eqx.Module):
    """Compression of windows of tokens into keys.

    The axis `series` has one element, or two with `overlaps`: projections of tokens as part of the previous window, and
    projections of tokens as part of the window itself.
    """

    key: Float[Array, "embed series head_dim"]
    gate: Float[Array, "embed series head_dim"]
    bias: Float[Array, "taps series head_dim"]
    norm: Norm
    config: CompressionConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        state: Float[Array, "batch back channels"] | None,
        windows: CompletedWindows,
        rope: Rope,
        rope_dim: int,
        ctx: ForwardContext,
    ) -> NewCompressedKeys:
        """Compute the compressed keys of windows.

        `state`: cached projections of the last `tokens_per_key - 1` tokens before the call; None without a cache.
        """
        pattern = "batch length embed, embed series head_dim -> batch length series head_dim"
        projected = jnp.stack([ctx.einsum(pattern, x, kernel) for kernel in (self.key, self.gate)], axis=2)
        flat = projected.reshape(*x.shape[:2], -1)
        joined = flat if state is None else jnp.concatenate([state.astype(flat.dtype), flat], axis=1)
        batch, places, tokens = windows.tokens.shape
        gathered = jnp.take_along_axis(joined, windows.tokens.reshape(batch, -1, 1), axis=1)
        gathered = gathered.reshape(batch, places, tokens, *projected.shape[2:]).astype(jnp.float32)
        key, gate = jnp.moveaxis(gathered, 3, 0)
        key = self._pool(key, gate, windows.has_previous).astype(x.dtype)
        first_positions = jnp.where(windows.ends >= 0, windows.ends - self.config.size + 1, -1)
        key = rotate_last(self.norm(key)[:, :, None], first_positions, rope, rope_dim)
        key = ctx.constrain(key, "batch slots heads head_dim")
        return NewCompressedKeys(key, windows.ends, windows.segments, self._new_state(state, flat, ctx))

    def _pool(
        self, key: Array, gate: Array, has_previous: Bool[Array, "batch places"]
    ) -> Float[Array, "batch places head_dim"]:
        """Compute the gated sum over the tokens of each window.

        `key`, `gate`: `[batch, places, tokens, series, head_dim]`.
        """
        repeats = self.config.tokens_per_key // self.config.size
        gate = gate + jnp.tile(self.bias.astype(jnp.float32), (repeats, 1, 1))[None, None]
        if self.config.overlaps:
            size = self.config.size
            previous = jnp.where(has_previous[..., None, None, None], gate[:, :, :size], -jnp.inf)
            gate = gate.at[:, :, :size].set(previous)
            key, gate = (jnp.concatenate([y[:, :, :size, 0], y[:, :, size:, 1]], axis=2) for y in (key, gate))
        else:
            key, gate = key[:, :, :, 0], gate[:, :, :, 0]
        return jnp.sum(jax.nn.softmax(gate, axis=2) * key, axis=2)

    def _new_state(self, state: Array | None, inputs: Array, ctx: ForwardContext) -> ConvInputs | NewConvInputs:
        taps = self.config.tokens_per_key - 1
        if not ctx.accept_all or inputs.shape[1] <= taps:
            return ConvInputs(inputs=inputs)
        state = jnp.zeros((len(inputs), taps, inputs.shape[2]), inputs.dtype) if state is None else state
        return NewConvInputs(tail=last_inputs(state, inputs, ctx.positions))


def rotate_last(
    x: Float[Array, "batch length heads head_dim"], positions: Int[Array, "batch length"], rope: Rope, count: int
) -> Float[Array, "batch length heads head_dim"]:
    """Rotate the last `count` features of every head; the other features are unchanged."""
    unrotated, rotated = jnp.split(x, [x.shape[-1] - count], axis=-1)
    return jnp.concatenate([unrotated, rotate(rotated, positions, rope)], axis=-1)
