"""Compression of the tokens of a window into one key (DeepSeek-V4, 2026).

    key_w = rotate(norm(sum over tokens t of window w of softmax_t(W_g x_t + bias_t) * W_k x_t))

The softmax is over the tokens, for each feature by itself. A window is `size` positions of a document from a multiple
of `size` on; its key is rotated to its first position, and seen from its last one on. With `overlaps` tokens of the
window before join the softmax, by a second series of features.
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

    - `size`: tokens of a window.
    - `overlaps`: whether a key is also made of the window before.
    - `norm`: normalization of the keys.
    """

    size: PositiveInt
    overlaps: bool = False
    norm: NormConfig = RMSNormConfig()

    def __post_init__(self):
        super().__post_init__()
        check(self.size > 1, f"CompressionConfig.size={self.size} must be at least 2: one token is its own key.")

    @property
    def span(self) -> int:
        """Tokens that a key is made of."""
        return self.size * (2 if self.overlaps else 1)

    def tail_shape(self, head_dim: int) -> ConvShape:
        """Return the shape of the cache of the last tokens' projections, which later windows need."""
        return ConvShape(taps=self.span - 1, channels=2 * (2 if self.overlaps else 1) * head_dim)

    def build(self, embed_dim: int, head_dim: int, *, key: PRNGKeyArray) -> "Compressor":
        shape = (embed_dim, 2 if self.overlaps else 1, head_dim)
        kernels = (fan_in(k, shape, jnp.float32, embed_dim, "normal") for k in jax.random.split(key))
        return Compressor(
            *kernels, bias=jnp.zeros((self.size, *shape[1:])), norm=self.norm.build(head_dim), config=self
        )


class Windows(NamedTuple):
    """Windows that are complete with a token of a call: at most so many as there can be.

    **Arguments:**

    - `tokens`: numbers of their tokens, in the tail of a cache and the call, one behind the other.
    - `ends`, `segments`: position and document of their last tokens; position -1 where there is no window.
    - `last`: number of their last token in the call.
    - `follows`: whether the window before is there, too.
    """

    tokens: Int[Array, "batch places span"]
    ends: Int[Array, "batch places"]
    segments: Int[Array, "batch places"] | None
    last: Int[Array, "batch places"]
    follows: Bool[Array, "batch places"]


class Compressed(NamedTuple):
    """Keys of windows, the places of their last tokens, and the projections that are new for a cache."""

    key: Float[Array, "batch places 1 head_dim"]
    ends: Int[Array, "batch places"]
    segments: Int[Array, "batch places"] | None
    tail: ConvInputs | NewConvInputs


def find_windows(config: CompressionConfig, ctx: ForwardContext, cached: bool) -> Windows:
    """Find the windows that end in a call. A call with a cache has the last `span - 1` tokens before it."""
    positions, segments, size, span = ctx.positions, ctx.segment_ids, config.size, config.span
    length, before = positions.shape[1], span - 1 if cached else 0
    count = (length + size - 1) // size if cached else length // size
    count = -(-count // context_parts(ctx.execution.layout)) * context_parts(ctx.execution.layout)
    back = jnp.arange(1 - span, 1, dtype=positions.dtype)
    if cached:
        first = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(positions.dtype).max), axis=1, keepdims=True)
        some = jnp.any(positions >= 0, axis=1, keepdims=True)
        positions = jnp.concatenate([jnp.where(some, first + back[None, :-1], -1), positions], axis=1)
    documents = jnp.zeros_like(positions) if segments is None else segments
    order = jnp.argsort(positions >= 0, axis=1, stable=True)  # padding first: tokens of a document are neighbors
    places, documents = (jnp.take_along_axis(x, order, axis=1) for x in (positions, documents))
    is_end = (places >= 0) & ((places + 1) % size == 0) & (order >= before)
    picked = jnp.argsort(~is_end, axis=1, stable=True)[:, :count]
    picked = jnp.pad(picked, ((0, 0), (0, count - picked.shape[1])))

    def at(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index.reshape(len(index), -1), axis=1).reshape(index.shape)

    index = picked[:, :, None] + back[None, None]
    inside, ends, owners = jnp.maximum(index, 0), at(places, picked), at(documents, picked)
    there = (index >= 0) & (at(documents, inside) == owners[..., None]) & (at(places, inside) >= 0)
    there &= at(places, inside) == ends[..., None] + back[None, None]
    is_first = jnp.arange(count)[None] < jnp.sum(is_end, axis=1, keepdims=True)  # not one that was filled up with
    whole = jnp.all(there[..., -size:], axis=-1) & is_first
    ends = jnp.where(whole, ends, -1)
    last = jnp.where(whole, at(order, picked) - before, length)
    return Windows(at(order, inside), ends, None if segments is None else owners, last, jnp.all(there, axis=-1))


class Compressor(eqx.Module):
    """Compression of windows of tokens into keys."""

    key: Float[Array, "embed series head_dim"]
    gate: Float[Array, "embed series head_dim"]
    bias: Float[Array, "taps series head_dim"]
    norm: Norm
    config: CompressionConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        tail: Float[Array, "batch back channels"] | None,
        windows: Windows,
        rope: Rope,
        rope_dim: int,
        ctx: ForwardContext,
    ) -> Compressed:
        """Compute the keys of these windows, of which `tail` has the tokens before the call."""
        pattern = "batch length embed, embed series head_dim -> batch length series head_dim"
        raw = jnp.stack([ctx.einsum(pattern, x, kernel) for kernel in (self.key, self.gate)], axis=2)
        flat = raw.reshape(*x.shape[:2], -1)
        joined = flat if tail is None else jnp.concatenate([tail.astype(flat.dtype), flat], axis=1)
        batch, places, span = windows.tokens.shape
        some = jnp.take_along_axis(joined, windows.tokens.reshape(batch, -1, 1), axis=1)
        key, gate = jnp.moveaxis(some.reshape(batch, places, span, *raw.shape[2:]).astype(jnp.float32), 3, 0)
        key = self._mixed(key, gate, windows.follows).astype(x.dtype)
        first = jnp.where(windows.ends >= 0, windows.ends - self.config.size + 1, -1)
        key = rotate_last(self.norm(key)[:, :, None], first, rope, rope_dim)
        key = ctx.constrain(key, "batch slots heads head_dim")
        return Compressed(key, windows.ends, windows.segments, self._new_tail(tail, flat, ctx))

    def _mixed(
        self, key: Array, gate: Array, follows: Bool[Array, "batch places"]
    ) -> Float[Array, "batch places head_dim"]:
        """Mix the tokens of windows; before them stand those of the windows before, if they are mixed in, too."""
        gate = gate + jnp.tile(self.bias.astype(jnp.float32), (self.config.span // self.config.size, 1, 1))[None, None]
        if self.config.overlaps:
            size = self.config.size
            gate = gate.at[:, :, :size].set(jnp.where(follows[..., None, None, None], gate[:, :, :size], -jnp.inf))
            key, gate = (jnp.concatenate([y[:, :, :size, 0], y[:, :, size:, 1]], axis=2) for y in (key, gate))
        else:
            key, gate = key[:, :, :, 0], gate[:, :, :, 0]
        return jnp.sum(jax.nn.softmax(gate, axis=2) * key, axis=2)

    def _new_tail(self, tail: Array | None, inputs: Array, ctx: ForwardContext) -> ConvInputs | NewConvInputs:
        taps = self.config.span - 1
        if not ctx.accept_all or inputs.shape[1] <= taps:
            return ConvInputs(inputs=inputs)
        tail = jnp.zeros((len(inputs), taps, inputs.shape[2]), inputs.dtype) if tail is None else tail
        return NewConvInputs(tail=last_inputs(tail, inputs, ctx.positions))


def rotate_last(
    x: Float[Array, "batch length heads head_dim"], positions: Int[Array, "batch length"], rope: Rope, count: int
) -> Float[Array, "batch length heads head_dim"]:
    """Rotate the last `count` features of every head."""
    first, last = jnp.split(x, [x.shape[-1] - count], axis=-1)
    return jnp.concatenate([first, rotate(last, positions, rope)], axis=-1)
