"""Lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): selects the keys that a query attends to.

    score_ts = sum_h w_th relu(q_th . k_s),    w_t = (W_w x_t) num_heads^-1/2 head_dim^-1/2

One key k per token is shared by all heads. A query takes the best `top_k` of the keys that it sees; the earlier ones
of equals. Where there are no more keys than that, attention is dense. Later layers may use the choice of an earlier
one (IndexCache, 2026).

The indexer reads detached inputs, and its selection has no gradient: it learns from a loss of its own alone, the
divergence KL(p || softmax(score)) from the distribution p of the attention it serves, the mean over its heads.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Num, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveInt, check
from eqx_decoders.layers.attention.kernels.common import EMPTY
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_lanes
from eqx_decoders.layers.attention.topk import KeyChoice, map_queries, top_k_mask
from eqx_decoders.layers.mask import Mask, visible
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig(CheckedFields):
    """Configuration of an indexer, which chooses `top_k` keys for each query of a latent attention.

    **Arguments:**

    - `num_heads`, `head_dim`: its heads, and the features of their queries and of the key that they share.
    - `top_k`: keys that a query attends to.
    - `norm`: normalization of the keys.
    - `loss_weight`: weight of its loss, the mean over tokens and over layers, in the training loss.
    - `warmup`: leave attention dense and learn from all visible keys, not from the chosen ones alone. MaxText applies
        its selection in this stage too, so that the indexer is taught by its own errors; the paper does not.
    - `pairing`: which features are rotated together, whatever the attention's: `"half"`, or `"interleaved"` (GLM-5).
    - `shares_as`: name by which later layers use its choice (`shared_from`); None for none.
    - `shared_from`: uses the choice of an earlier layer, the latest whose `shares_as` is this word (GLM-5). The layer
        has no indexer of its own, and all other fields are that one's. None: it chooses.
    """

    num_heads: PositiveInt = 64
    head_dim: PositiveInt = 128
    top_k: PositiveInt = 2048
    norm: LayerNormConfig = LayerNormConfig(eps=1e-6)
    loss_weight: NonNegativeFloat = 0.0
    warmup: bool = False
    pairing: Literal["half", "interleaved"] = "half"
    shares_as: str | None = None
    shared_from: str | None = None

    def __post_init__(self):
        super().__post_init__()
        rule = f"IndexerConfig.shares_as={self.shares_as!r} needs shared_from=None, not {self.shared_from!r}"
        check(self.shares_as is None or self.shared_from is None, f"{rule}: the choice is another layer's.")

    @property
    def alone(self) -> "IndexerConfig":
        """The same indexer without names, which those that share a choice have in common."""
        return dataclasses.replace(self, shares_as=None, shared_from=None)

    def token_products(self, keys: int) -> int:
        """Count multiplications per token of its scores over so many keys."""
        return 0 if self.shared_from is not None else self.num_heads * self.head_dim * keys

    def build(self, embed_dim: int, q_rank: int, *, key: PRNGKeyArray) -> "Indexer":
        keys, heads, head_dim = jax.random.split(key, 3), self.num_heads, self.head_dim
        return Indexer(
            query=fan_in(keys[0], (q_rank, heads, head_dim), jnp.float32, q_rank, "normal"),
            key=fan_in(keys[1], (embed_dim, head_dim), jnp.float32, embed_dim, "normal"),
            key_norm=self.norm.build(head_dim),
            head_weight=fan_in(keys[2], (embed_dim, heads), jnp.float32, embed_dim, "normal"),
            config=self,
        )


class IndexerStats(eqx.Module):
    """Statistics of an indexer: sums over tokens, with a leading `layers` axis once stacked.

    **Arguments:**

    - `loss`: the divergence of the indexer's distribution from the attention's, in nats.
    - `tokens`: number of tokens.
    """

    loss: Float32[Array, "*layers"]
    tokens: Float32[Array, "*layers"]


class Index(NamedTuple):
    """Queries, keys and weights of an indexer for the tokens of a call."""

    query: Float[Array, "batch length heads head_dim"]
    weight: Float32[Array, "batch length heads"]
    key: Float[Array, "batch length 1 head_dim"]


class Teacher(NamedTuple):
    """Scaled queries and keys of the attention that the indexer imitates."""

    query: Float[Array, "batch length heads qk_dim"]
    key: Float[Array, "batch length heads qk_dim"]


class Indexer(eqx.Module):
    """Indexer `score_ts = sum_h w_th relu(q_th . k_s)`, and the keys with the best scores."""

    query: Float[Array, "q_rank heads head_dim"]
    key: Float[Array, "embed head_dim"]
    key_norm: LayerNorm
    head_weight: Float[Array, "embed heads"]
    config: IndexerConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        low: Float[Array, "batch length q_rank"],
        rope: Rope,
        rope_dim: int,
        ctx: ForwardContext,
    ) -> Index:
        """Compute queries from the latent of queries, and the key and the weights of heads from the stream.

        The first `rope_dim` features are rotated.
        """
        x, low = jax.lax.stop_gradient((x, low))
        rope = dataclasses.replace(rope, pairing=self.config.pairing)

        def rotated(y: Array) -> Array:
            first, rest = jnp.split(y, [rope_dim], axis=-1)
            return jnp.concatenate([rotate(first, ctx.positions, rope, ctx.segment_ids), rest], axis=-1)

        pattern = "batch length q_rank, q_rank heads head_dim -> batch length heads head_dim"
        query = rotated(ctx.einsum(pattern, low, self.query))
        key = self.key_norm(ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", x, self.key))
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        with jax.default_matmul_precision("highest"):  # few columns, and they decide
            weight = ctx.einsum("batch length embed, embed heads -> batch length heads", wide, self.head_weight)
        scale = (self.config.num_heads * self.config.head_dim) ** -0.5
        return Index(
            query=ctx.constrain(query, "batch length heads head_dim"),
            weight=weight.astype(jnp.float32) * scale,
            key=ctx.constrain(rotated(key[:, :, None]), "batch length slots head_dim"),
        )

    def choose(
        self, index: Index, mask: Mask, ctx: ForwardContext, teacher: Teacher | None = None
    ) -> tuple[Selection | None, IndexerStats | None]:
        """Select the tokens of a call that each of them attends to (None: all visible), and compute a teacher's loss.

        It takes some queries at a time, and once more in the backward pass: the scores of single heads never exist at
        once.
        """
        length, config = ctx.positions.shape[1], self.config
        selects, learns = length > config.top_k and not config.warmup, teacher is not None
        if not selects and not learns:
            return None, None
        of_keys = (index.key[:, :, 0], ctx.positions, ctx.segment_ids, None if teacher is None else teacher.key)
        of_queries = (index.query, index.weight, ctx.positions, ctx.segment_ids)
        of_queries = (*of_queries, None if teacher is None else teacher.query)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def block(of_queries, of_keys):
            query, weight, query_positions, segments, teaching = of_queries
            key, key_positions, key_segments, taught = of_keys
            seen = visible(mask, query_positions, key_positions, segments, key_segments)
            scores = jnp.where(seen, index_scores(query, weight, key), -jnp.inf)
            chosen = top_k_mask(scores, config.top_k) & seen if selects else seen
            loss = None
            if teaching is not None:
                loss = jnp.sum(_divergence(jax.lax.stop_gradient((teaching, taught)), scores, chosen))
            return (pack_lanes(chosen) if selects else None), loss

        heads = max(config.num_heads, 0 if teacher is None else teacher.query.shape[2])
        chosen, losses = map_queries(lambda queries: block(queries, of_keys), of_queries, length, heads)
        if chosen is not None:
            words = jnp.moveaxis(chosen, 0, 1)
            chosen = Selection(words.reshape(words.shape[0], 1, -1, words.shape[3])[:, :, :length])
        if losses is None:
            return chosen, None
        tokens = jnp.sum((ctx.positions >= 0).astype(jnp.float32))
        return chosen, IndexerStats(loss=jnp.sum(losses), tokens=tokens)

    def choose_cached(
        self,
        index: Index,
        past_key: Num[Array, "batch 1 slots head_dim"],
        past_scale: Float[Array, "batch 1 slots"] | None,
        past_positions: Int[Array, "batch slots"],
        mask: Mask,
        ctx: ForwardContext,
    ) -> KeyChoice:
        """Select the tokens of a call and of a cache that are attended to.

        The selection is of slots where these are fewer than the cache has, for all queries together; else a mask.
        """
        length, slots, top_k = ctx.positions.shape[1], past_positions.shape[1], self.config.top_k
        if slots + length <= top_k or self.config.warmup:
            return KeyChoice()
        earlier = index_scores(index.query, index.weight, past_key[:, 0].astype(index.query.dtype))
        if past_scale is not None:  # it is positive: relu(s x) = s relu(x)
            earlier *= past_scale.astype(jnp.float32)
        present = index_scores(index.query, index.weight, index.key[:, :, 0])
        parts = [(earlier, past_positions), (present, ctx.positions)]
        scores = jnp.concatenate(
            [jnp.where(visible(mask, ctx.positions, key_positions), part, -jnp.inf) for part, key_positions in parts],
            axis=-1,
        )
        if length * top_k < slots:
            best = jax.lax.top_k(scores, top_k)[1]
            of_call = best[..., None] == slots + jnp.arange(length, dtype=best.dtype).reshape(1, 1, 1, -1)
            return KeyChoice(present=jnp.any(of_call, axis=2)[:, None], slots=best)
        chosen = top_k_mask(scores, top_k)[:, None]
        return KeyChoice(present=chosen[..., slots:], past=chosen[..., :slots])


def index_scores(
    query: Array, weight: Array, key: Float[Array, "batch keys head_dim"]
) -> Float32[Array, "batch length keys"]:
    """Compute scores in f32. The sum over heads is no product: a TPU would round its factors to 16 bits."""
    each = jnp.einsum("blhd,bsd->blhs", query, key, preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(each) * weight[..., None], axis=2)


def _divergence(
    taught: tuple[Array, Array], scores: Array, chosen: Bool[Array, "batch length keys"]
) -> Float32[Array, "batch length"]:
    """Compute `KL(p || softmax(score))` over the chosen keys, p being the attention's mean over heads; else 0."""
    each = jnp.einsum("blhd,bshd->bhls", *taught, preferred_element_type=jnp.float32)
    teacher = jnp.mean(jnp.exp(_log_softmax(each, chosen[:, None])), axis=1)
    terms = -jax.scipy.special.entr(teacher) - teacher * jnp.where(chosen, _log_softmax(scores, chosen), 0.0)
    return jnp.sum(jnp.where(chosen, terms, 0.0), axis=-1)


def _log_softmax(scores: Array, chosen: Bool[Array, "..."]) -> Array:
    """Compute the log-softmax over the chosen keys; -inf elsewhere."""
    scores = jnp.where(chosen, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=EMPTY))
    total = jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)
    return scores - top - jnp.log(jnp.where(total > 0, total, 1.0))
