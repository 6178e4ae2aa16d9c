"""Local bidirectional attention with relative positions (Dai et al. 2019), as in Gemma 3n's and 4's audio."""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, NonNegativeInt, PositiveFloat, PositiveInt
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.embedding.embedding import sinusoids
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_MAX_TIMESCALE = 10_000.0  # of the sinusoids
SHIFTED_KEY_SCALE = math.log2(1 + math.e)
_MASKED = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalAttentionConfig(MixerConfig):
    """Configuration of `out(softmax(cap tanh((q_i . k_j + q_i . r_(i - j)) / cap)) v)` over the keys j close to i.

        q = softplus(scale) query x / (ln 2 sqrt(head_dim)),  k = key_scale key x
        r_d = relative_key sinusoids(d + s)

    With `distances="plain"` (Gemma 3n) a token sees itself, the `left - 1` tokens before it and the `right` after it,
    and s is 0. With `"shifted"` (Gemma 4) it sees itself, the `left - 2` tokens before it and the `right - 1` after it,
    and `s = (chunk + left - 1 + right) // 2 - (left - 1)`; r_d is 0 if `d + s` is negative.

    **Arguments:**

    - `num_heads`, `head_dim`: number of heads, and features per head.
    - `chunk`: number of queries that are processed together, with all keys that any of them sees.
    - `left`, `right`: reach to earlier and to later tokens. With `"shifted"`, `right=0` reaches as far as 1.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`.
    - `distances`: `"shifted"` or `"plain"`.
    - `key_scale`: multiplies keys.
    """

    encoder_only: ClassVar[bool] = True

    num_heads: PositiveInt
    head_dim: PositiveInt
    chunk: PositiveInt = 12
    left: Annotated[int, AtLeast(2)] = 13
    right: NonNegativeInt = 0
    soft_cap: PositiveFloat = 50.0
    distances: Literal["shifted", "plain"] = "shifted"
    key_scale: PositiveFloat = SHIFTED_KEY_SCALE

    @property
    def before(self) -> int:
        """Number of earlier tokens that a token sees."""
        return self.left - 1 if self.distances == "plain" else self.left - 2

    @property
    def after(self) -> int:
        """Number of later tokens that a token sees."""
        return self.right if self.distances == "plain" else max(self.right - 1, 0)

    @property
    def shift(self) -> int:
        """The offset s that is added to distances."""
        return 0 if self.distances == "plain" else (self.chunk + self.left - 1 + self.right) // 2 - (self.left - 1)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of content scores, of position scores and of the weighted sum of values."""
        return self.num_heads * self.head_dim * 3 * min(length, self.before + 1 + self.after)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LocalAttention":
        keys = jax.random.split(key, 5)
        head_shape = (self.num_heads, self.head_dim)
        query, key, value, relative_key = (
            fan_in(kernel_key, (embed_dim, *head_shape), jnp.float32, embed_dim, "normal") for kernel_key in keys[:4]
        )
        return LocalAttention(
            query=query,
            key=key,
            value=value,
            relative_key=relative_key,
            scale=jnp.zeros((self.head_dim,)),
            out=fan_in(keys[4], (*head_shape, embed_dim), jnp.float32, self.num_heads * self.head_dim, "normal"),
            config=self,
        )


class LocalAttention(eqx.Module):
    """Local bidirectional attention with relative positions, see `LocalAttentionConfig`.

    The tokens of a document must be contiguous: distances are differences of indices in the sequence.
    """

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed heads head_dim"]
    value: Float[Array, "embed heads head_dim"]
    relative_key: Float[Array, "signal heads head_dim"]
    scale: Float[Array, "head_dim"]
    out: Float[Array, "heads head_dim embed"]
    config: LocalAttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the layer's output. The output of padding tokens is undefined."""
        config = self.config
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        kernels = {"query_proj": self.query, "key_proj": self.key, "value_proj": self.value}
        query, key, value = (
            save(ctx.constrain(ctx.einsum(pattern, x, kernel), "batch length heads head_dim"), name)
            for name, kernel in kernels.items()
        )
        factor = jax.nn.softplus(self.scale.astype(jnp.float32)) / (math.log(2) * math.sqrt(config.head_dim))
        mixed = attend_locally(
            query.astype(jnp.float32) * factor[None, None, None],
            key.astype(jnp.float32) * config.key_scale,
            value.astype(jnp.float32),
            self._relative_keys(x.dtype, ctx),
            visible_keys(config, ctx),
            config,
        )
        mixed = save(ctx.constrain(mixed.astype(x.dtype), "batch length heads head_dim"), "attention_out")
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", mixed, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx))

    def _relative_keys(self, dtype: jnp.dtype, ctx: ForwardContext) -> Float32[Array, "places heads head_dim"]:
        """Compute `r_d` of each visible distance, from `d = before` down to `d = -after`."""
        config = self.config
        distances = config.shift + jnp.arange(config.before, -config.after - 1, -1)
        size = self.relative_key.shape[0]
        signal = sinusoids(jnp.abs(distances), size, _MAX_TIMESCALE)
        # the first half are sines, which are odd functions: negate them for negative distances
        signal = jnp.where((distances < 0)[:, None] & (jnp.arange(size) < size // 2)[None], -signal, signal)
        signal = signal.astype(dtype)
        relative = ctx.einsum(
            "places signal, signal heads head_dim -> places heads head_dim", signal, self.relative_key
        )
        exists = (distances >= 0) | (config.distances == "plain")
        return jnp.where(exists[:, None, None], relative.astype(jnp.float32), 0.0)


def visible_keys(config: LocalAttentionConfig, ctx: ForwardContext) -> Bool[Array, "batch chunks queries keys"]:
    """Return which keys of its chunk each query sees: keys of the same document within reach."""
    segments = jnp.ones_like(ctx.positions) if ctx.segment_ids is None else ctx.segment_ids
    documents = jnp.where(ctx.positions >= 0, segments + 1, 0)[..., None]  # 0: padding, also of the last chunk
    query = in_chunks(documents, config.chunk, 0, 0)
    key = in_chunks(documents, config.chunk, config.before, config.after).swapaxes(2, 3)
    offset = jnp.arange(key.shape[3])[None] - jnp.arange(config.chunk)[:, None]  # from the query's first visible key
    within_reach = (offset >= 0) & (offset <= config.before + config.after)
    return (query == key) & within_reach[None, None]


def attend_locally(
    query: Float32[Array, "batch length heads head_dim"],
    key: Float32[Array, "batch length heads head_dim"],
    value: Float32[Array, "batch length heads head_dim"],
    relative: Float32[Array, "places heads head_dim"],
    visible: Bool[Array, "batch chunks queries keys"],
    config: LocalAttentionConfig,
) -> Float32[Array, "batch length heads head_dim"]:
    """Compute the attention to visible keys.

    **Arguments:**

    - `query`, `key`, `value`: scaled queries, keys and values.
    - `relative`: relative keys `r_d`, from `d = before` down to `d = -after`.
    - `visible`: as returned by `visible_keys`.
    """
    length = query.shape[1]
    query = in_chunks(query, config.chunk, 0, 0)
    key, value = (in_chunks(x, config.chunk, config.before, config.after) for x in (key, value))
    scores = jnp.einsum("bcqhd,bckhd->bchqk", query, key)
    scores = scores + _distances_to_keys(jnp.einsum("bcqhd,phd->bchqp", query, relative), key.shape[2])
    scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    scores = jnp.where(visible[:, :, None], scores, _MASKED)
    mixed = jnp.einsum("bchqk,bckhd->bcqhd", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length]


def in_chunks(x: Array, size: int, before: int, after: int) -> Array:
    """Split `[batch, length, ...]` into overlapping chunks, `[batch, chunks, before + size + after, ...]`.

    Each chunk of `size` tokens includes the `before` tokens before it and the `after` tokens after it; zeros beyond the
    ends of the sequence.
    """
    num_chunks = -(-x.shape[1] // size)
    width = before + size + after
    num_parts = -(-width // size)  # a chunk with its neighbors is assembled from parts of `size` tokens
    unpadded = ((0, 0),) * (x.ndim - 2)
    x = jnp.pad(x, ((0, 0), (before, (num_chunks + num_parts) * size - x.shape[1] - before), *unpadded))
    shifted = (x[:, index * size : (index + num_chunks) * size] for index in range(num_parts))
    parts = [part.reshape(x.shape[0], num_chunks, size, *x.shape[2:]) for part in shifted]
    return jnp.concatenate(parts, axis=2)[:, :, :width]


def _distances_to_keys(scores: Array, keys: int) -> Array:
    """Shift `[..., queries, distances]` to `[..., queries, keys]`: distance n of query i becomes key i + n."""
    *outer, queries, distances = scores.shape
    scores = jnp.pad(scores, ((0, 0),) * (scores.ndim - 1) + ((0, keys + 1 - distances),))
    return scores.reshape(*outer, -1)[..., : queries * keys].reshape(*outer, queries, keys)
