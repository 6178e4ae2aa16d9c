"""Attention to near tokens on both sides, by content and by distance (Dai et al. 2019; Gemma 3n's and 4's audio)."""

import dataclasses
import math
from typing import Annotated, Literal

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


_LONGEST = 10_000.0  # timescale of the sinusoids
SHIFTED_KEY_SCALE = math.log2(1 + math.e)
_MASKED = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalAttentionConfig(MixerConfig):
    """Configuration of `out(softmax(cap tanh((q_i . k_j + q_i . r_(i - j)) / cap)) v)`, with the keys j near i.

        q = softplus(scale) query x / (ln 2 sqrt(head_dim)),  k = key_scale key x
        r_d = relative_key sinusoids(d + s)

    With `distances="plain"` (Gemma 3n) a token sees itself, the `left - 1` tokens before it and the `right` after it,
    and s is 0. With `"shifted"` (Gemma 4) it sees the `left - 2` tokens before it and the `right - 1` after it, and
    `s = (chunk + left - 1 + right) // 2 - (left - 1)`; a distance with `d + s` below 0 has no r.

    **Arguments:**

    - `num_heads`, `head_dim`: heads, and features of each.
    - `chunk`: queries that are computed at once, with the keys that any of them sees.
    - `left`, `right`: how far is near; a shifted `right` of 0 sees as far as one of 1.
    - `soft_cap`: the bound of scores.
    - `distances`: `"shifted"` or `"plain"`.
    - `key_scale`: factor of keys.
    """

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
    def behind(self) -> int:
        """Number of later tokens that a token sees."""
        return self.right if self.distances == "plain" else max(self.right - 1, 0)

    @property
    def shift(self) -> int:
        """Number that is added to a distance."""
        return 0 if self.distances == "plain" else (self.chunk + self.left - 1 + self.right) // 2 - (self.left - 1)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of scores, of contents and distances, and of their products with values."""
        return self.num_heads * self.head_dim * 3 * min(length, self.before + 1 + self.behind)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LocalAttention":
        keys, heads = jax.random.split(key, 5), (self.num_heads, self.head_dim)
        query, key, value, relative = (
            fan_in(each, (embed_dim, *heads), jnp.float32, embed_dim, "normal") for each in keys[:4]
        )
        return LocalAttention(
            query=query,
            key=key,
            value=value,
            relative_key=relative,
            scale=jnp.zeros((self.head_dim,)),
            out=fan_in(keys[4], (*heads, embed_dim), jnp.float32, heads[0] * heads[1], "normal"),
            config=self,
        )


class LocalAttention(eqx.Module):
    """Attention `out(softmax(cap tanh((q_i . k_j + q_i . r_(i - j)) / cap)) v)`, with the keys j near i.

    The tokens of a document must follow one another: distances are counted along the row.
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
        """Return the layer's output; at padding it is meaningless."""
        config, pattern = self.config, "batch length embed, embed heads head_dim -> batch length heads head_dim"
        names = {"query": "query_proj", "key": "key_proj", "value": "value_proj"}
        query, key, value = (
            save(ctx.constrain(ctx.einsum(pattern, x, getattr(self, part)), "batch length heads head_dim"), name)
            for part, name in names.items()
        )
        factor = jax.nn.softplus(self.scale.astype(jnp.float32)) / (math.log(2) * math.sqrt(config.head_dim))
        mixed = attend_locally(
            query.astype(jnp.float32) * factor[None, None, None],
            key.astype(jnp.float32) * config.key_scale,
            value.astype(jnp.float32),
            self._relative(x.dtype, ctx),
            visible_keys(config, ctx),
            config,
        )
        mixed = save(ctx.constrain(mixed.astype(x.dtype), "batch length heads head_dim"), "attention_out")
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", mixed, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(self(x, ctx))

    def _relative(self, dtype: jnp.dtype, ctx: ForwardContext) -> Float32[Array, "places heads head_dim"]:
        """Compute `r` of each visible distance, the farthest before first; zeros where there is none."""
        config = self.config
        distances = config.shift + jnp.arange(config.before, -config.behind - 1, -1)
        size = self.relative_key.shape[0]
        signal = sinusoids(jnp.abs(distances), size, _LONGEST)
        # the sine of a distance to a later token is below 0
        signal = jnp.where((distances < 0)[:, None] & (jnp.arange(size) < size // 2)[None], -signal, signal)
        signal = signal.astype(dtype)
        relative = ctx.einsum(
            "places signal, signal heads head_dim -> places heads head_dim", signal, self.relative_key
        )
        real = (distances >= 0) | (config.distances == "plain")
        return jnp.where(real[:, None, None], relative.astype(jnp.float32), 0.0)


def visible_keys(config: LocalAttentionConfig, ctx: ForwardContext) -> Bool[Array, "batch chunks queries keys"]:
    """Return which keys of its chunk each query sees: near ones of its own document, without padding."""
    segments = jnp.ones_like(ctx.positions) if ctx.segment_ids is None else ctx.segment_ids
    documents = jnp.where(ctx.positions >= 0, segments + 1, 0)[..., None]  # 0 is also what fills the last chunk
    query = in_chunks(documents, config.chunk, 0, 0)
    key = in_chunks(documents, config.chunk, config.before, config.behind).swapaxes(2, 3)
    distance = jnp.arange(key.shape[3])[None] - jnp.arange(config.chunk)[:, None]
    near = (distance >= 0) & (distance <= config.before + config.behind)
    return (query == key) & near[None, None]


def attend_locally(
    query: Float32[Array, "batch length heads head_dim"],
    key: Float32[Array, "batch length heads head_dim"],
    value: Float32[Array, "batch length heads head_dim"],
    relative: Float32[Array, "places heads head_dim"],
    visible: Bool[Array, "batch chunks queries keys"],
    config: LocalAttentionConfig,
) -> Float32[Array, "batch length heads head_dim"]:
    """Attend to the visible keys: return the values, weighted by the softmax of scores."""
    length = query.shape[1]
    query = in_chunks(query, config.chunk, 0, 0)
    key, value = (in_chunks(each, config.chunk, config.before, config.behind) for each in (key, value))
    scores = jnp.einsum("bcqhd,bckhd->bchqk", query, key)
    scores = scores + _by_key(jnp.einsum("bcqhd,phd->bchqp", query, relative), key.shape[2])
    scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    scores = jnp.where(visible[:, :, None], scores, _MASKED)
    mixed = jnp.einsum("bchqk,bckhd->bcqhd", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length]


def in_chunks(x: Array, size: int, before: int, behind: int) -> Array:
    """Split into `[batch, chunks, size + before + behind, ...]`: each chunk with its neighbors, or zeros."""
    count = -(-x.shape[1] // size)
    width, unpadded = before + size + behind, ((0, 0),) * (x.ndim - 2)
    pieces = -(-width // size)  # a chunk and what is around it, in pieces of a chunk's length
    x = jnp.pad(x, ((0, 0), (before, (count + pieces) * size - x.shape[1] - before), *unpadded))
    shifted = (x[:, index * size : (index + count) * size] for index in range(pieces))
    parts = [each.reshape(x.shape[0], count, size, *x.shape[2:]) for each in shifted]
    return jnp.concatenate(parts, axis=2)[:, :, :width]


def _by_key(scores: Array, keys: int) -> Array:
    """Shift `[..., queries, distances]` to `[..., queries, keys]`: query i's first distance is key i."""
    *outer, queries, distances = scores.shape
    scores = jnp.pad(scores, ((0, 0),) * (scores.ndim - 1) + ((0, keys + 1 - distances),))
    return scores.reshape(*outer, -1)[..., : queries * keys].reshape(*outer, queries, keys)
