"""Lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): selects the keys that a query attends to.

    score_ts = sum_h w_th relu(q_th . k_s),    w_t = (W_w x_t) num_heads^-1/2 head_dim^-1/2

All heads share one key k per token. A query attends to the `top_k` visible keys with the largest scores; among equal
scores the earlier keys are selected. With at most `top_k` keys, attention is dense. Later layers may reuse the
selection of an earlier layer (IndexCache, 2026).

The indexer's inputs are detached (`stop_gradient`) and its selection has no gradient. It is trained only by a separate
loss, the divergence KL(p || softmax(score)), where p is the attention distribution of the layer, averaged over heads.
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
from eqx_decoders.layers.attention.topk import SelectedKeys, map_queries, top_k_mask
from eqx_decoders.layers.mask import Mask, visible
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig(CheckedFields):
    """Configuration of an indexer, which selects `top_k` keys for each query of multi-head latent attention.

    **Arguments:**

    - `num_heads`: indexer heads.
    - `head_dim`: features of the indexer's queries and of its single key per token.
    - `top_k`: number of keys that a query attends to.
    - `norm`: normalization of the keys.
    - `loss_weight`: weight of the indexer's loss (mean over tokens and layers) in the training loss.
    - `warmup`: dense warm-up stage: attention stays dense, and the loss covers all visible keys instead of the selected
        ones. Unlike in MaxText, the selection is not applied in this stage, as in the paper.
    - `pairing`: pairing of features in the indexer's rope, independent of the attention's rope: `"half"`, or
        `"interleaved"` (GLM-5).
    - `shares_as`: name under which later layers can reuse this selection with `shared_from`; None: it is not shared.
    - `shared_from`: reuse the selection of the latest earlier layer whose `shares_as` is this name (GLM-5). The layer
        then has no indexer, and all other fields must equal those of the sharing layer. None: the layer has an indexer.
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
        check(
            self.shares_as is None or self.shared_from is None,
            f"IndexerConfig.shares_as={self.shares_as!r} needs shared_from=None, not {self.shared_from!r}: a layer "
            "that reuses a selection cannot share it again.",
        )

    @property
    def without_sharing(self) -> "IndexerConfig":
        """This configuration without `shares_as` and `shared_from`; equal for all layers that share a selection."""
        return dataclasses.replace(self, shares_as=None, shared_from=None)

    def token_products(self, keys: int) -> int:
        """Count multiplications per token for scoring `keys` keys; 0 if the selection of another layer is reused."""
        return 0 if self.shared_from is not None else self.num_heads * self.head_dim * keys

    def build(self, embed_dim: int, q_rank: int, *, key: PRNGKeyArray) -> "Indexer":
        query_key, key_key, weight_key = jax.random.split(key, 3)
        return Indexer(
            query=fan_in(query_key, (q_rank, self.num_heads, self.head_dim), jnp.float32, q_rank, "normal"),
            key=fan_in(key_key, (embed_dim, self.head_dim), jnp.float32, embed_dim, "normal"),
            key_norm=self.norm.build(self.head_dim),
            head_weight=fan_in(weight_key, (embed_dim, self.num_heads), jnp.float32, embed_dim, "normal"),
            config=self,
        )


class IndexerStats(eqx.Module):
    """Statistics of an indexer: sums over tokens. Stacked statistics of several layers have a leading `layers` axis.

    **Arguments:**

    - `loss`: KL divergence of the indexer's distribution from the attention distribution, in nats.
    - `tokens`: number of tokens.
    """

    loss: Float32[Array, "*layers"]
    tokens: Float32[Array, "*layers"]


class IndexerOutput(NamedTuple):
    """Queries, head weights and keys of an indexer for the tokens of a call."""

    query: Float[Array, "batch length heads head_dim"]
    weight: Float32[Array, "batch length heads"]
    key: Float[Array, "batch length 1 head_dim"]


class TeacherAttention(NamedTuple):
    """Scaled queries and keys of the attention layer whose distribution the indexer learns."""

    query: Float[Array, "batch length heads qk_dim"]
    key: Float[Array, "batch length heads qk_dim"]


class Indexer(eqx.Module):
    """Indexer that selects the keys with the largest scores `score_ts = sum_h w_th relu(q_th . k_s)`."""

    query: Float[Array, "q_rank heads head_dim"]
    key: Float[Array, "embed head_dim"]
    key_norm: LayerNorm
    head_weight: Float[Array, "embed heads"]
    config: IndexerConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        query_latent: Float[Array, "batch length q_rank"],
        rope: Rope,
        rope_dim: int,
        ctx: ForwardContext,
    ) -> IndexerOutput:
        """Compute queries from the attention's query latent, and keys and head weights from `x`.

        Rope rotates the first `rope_dim` features of queries and keys.
        """
        x, query_latent = jax.lax.stop_gradient((x, query_latent))
        rope = dataclasses.replace(rope, pairing=self.config.pairing)

        def rotate_first(y: Array) -> Array:
            rotated, unrotated = jnp.split(y, [rope_dim], axis=-1)
            return jnp.concatenate([rotate(rotated, ctx.positions, rope, ctx.segment_ids), unrotated], axis=-1)

        pattern = "batch length q_rank, q_rank heads head_dim -> batch length heads head_dim"
        query = rotate_first(ctx.einsum(pattern, query_latent, self.query))
        key = self.key_norm(ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", x, self.key))
        upcast_x = x.astype(np.promote_types(x.dtype, np.float32))
        with jax.default_matmul_precision("highest"):  # rounding could change the selection, and there are few columns
            weight = ctx.einsum("batch length embed, embed heads -> batch length heads", upcast_x, self.head_weight)
        scale = (self.config.num_heads * self.config.head_dim) ** -0.5
        return IndexerOutput(
            query=ctx.constrain(query, "batch length heads head_dim"),
            weight=weight.astype(jnp.float32) * scale,
            key=ctx.constrain(rotate_first(key[:, :, None]), "batch length one head_dim"),
        )

    def select(
        self, indexer_output: IndexerOutput, mask: Mask, ctx: ForwardContext, teacher: TeacherAttention | None = None
    ) -> tuple[Selection | None, IndexerStats | None]:
        """Select keys for each token of a call without a cache, and compute the loss if there is a teacher.

        Queries are processed in tiles, and the scores are recomputed in the backward pass, so that the scores of all
        heads and queries never exist at once.

        **Returns:**

        The selection (None: all visible keys) and the statistics (None without a teacher).
        """
        config = self.config
        length = ctx.positions.shape[1]
        selects = length > config.top_k and not config.warmup
        if not selects and teacher is None:
            return None, None
        teacher_query, teacher_key = (None, None) if teacher is None else teacher
        key_arrays = (indexer_output.key[:, :, 0], ctx.positions, ctx.segment_ids, teacher_key)
        query_arrays = (indexer_output.query, indexer_output.weight, ctx.positions, ctx.segment_ids, teacher_query)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def select_tile(query_arrays, key_arrays):
            query, weight, query_positions, query_segments, teacher_query = query_arrays
            key, key_positions, key_segments, teacher_key = key_arrays
            seen = visible(mask, query_positions, key_positions, query_segments, key_segments)
            scores = jnp.where(seen, index_scores(query, weight, key), -jnp.inf)
            selected = top_k_mask(scores, config.top_k) & seen if selects else seen
            loss = None
            if teacher_query is not None:
                teacher = TeacherAttention(*jax.lax.stop_gradient((teacher_query, teacher_key)))
                loss = jnp.sum(_divergence(teacher, scores, selected))
            return (pack_lanes(selected) if selects else None), loss

        heads = max(config.num_heads, 0 if teacher is None else teacher.query.shape[2])
        words, losses = map_queries(lambda queries: select_tile(queries, key_arrays), query_arrays, length, heads)
        selected = None
        if words is not None:
            words = jnp.moveaxis(words, 0, 1)
            selected = Selection(words.reshape(words.shape[0], 1, -1, words.shape[3])[:, :, :length])
        if losses is None:
            return selected, None
        tokens = jnp.sum((ctx.positions >= 0).astype(jnp.float32))
        return selected, IndexerStats(loss=jnp.sum(losses), tokens=tokens)

    def select_cached(
        self,
        indexer_output: IndexerOutput,
        past_key: Num[Array, "batch 1 slots head_dim"],
        past_scale: Float[Array, "batch 1 slots"] | None,
        past_positions: Int[Array, "batch slots"],
        mask: Mask,
        ctx: ForwardContext,
    ) -> SelectedKeys:
        """Select the tokens of a call and of a cache for each query.

        `past_key`, `past_scale`, `past_positions`: the cached keys of the indexer, their scales and their positions.
        The result has indices of cache slots if all queries together select fewer slots than the cache has, else masks.
        """
        length = ctx.positions.shape[1]
        slots = past_positions.shape[1]
        top_k = self.config.top_k
        if slots + length <= top_k or self.config.warmup:
            return SelectedKeys()
        cached_scores = index_scores(
            indexer_output.query, indexer_output.weight, past_key[:, 0].astype(indexer_output.query.dtype)
        )
        if past_scale is not None:  # scales are positive: relu(s x) = s relu(x)
            cached_scores *= past_scale.astype(jnp.float32)
        new_scores = index_scores(indexer_output.query, indexer_output.weight, indexer_output.key[:, :, 0])
        parts = [(cached_scores, past_positions), (new_scores, ctx.positions)]
        scores = jnp.concatenate(
            [jnp.where(visible(mask, ctx.positions, key_positions), part, -jnp.inf) for part, key_positions in parts],
            axis=-1,
        )
        if length * top_k < slots:
            indices = jax.lax.top_k(scores, top_k)[1]
            is_new = indices[..., None] == slots + jnp.arange(length, dtype=indices.dtype).reshape(1, 1, 1, -1)
            return SelectedKeys(new=jnp.any(is_new, axis=2)[:, None], cached_slots=indices)
        selected = top_k_mask(scores, top_k)[:, None]
        return SelectedKeys(new=selected[..., slots:], cached=selected[..., :slots])


def index_scores(
    query: Array, weight: Array, key: Float[Array, "batch keys head_dim"]
) -> Float32[Array, "batch length keys"]:
    """Compute the indexer's scores in float32.

    The sum over heads is an elementwise product and a reduction: in a matrix product a TPU would round to bfloat16.
    """
    head_scores = jnp.einsum("blhd,bsd->blhs", query, key, preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(head_scores) * weight[..., None], axis=2)


def _divergence(
    teacher: TeacherAttention, scores: Array, selected: Bool[Array, "batch length keys"]
) -> Float32[Array, "batch length"]:
    """Compute `KL(p || softmax(score))` over the selected keys; 0 for a query without keys.

    p is the attention distribution of the teacher over the selected keys, averaged over heads.
    """
    teacher_scores = jnp.einsum("blhd,bshd->bhls", *teacher, preferred_element_type=jnp.float32)
    target = jnp.mean(jnp.exp(_log_softmax(teacher_scores, selected[:, None])), axis=1)
    terms = -jax.scipy.special.entr(target) - target * jnp.where(selected, _log_softmax(scores, selected), 0.0)
    return jnp.sum(jnp.where(selected, terms, 0.0), axis=-1)


def _log_softmax(scores: Array, selected: Bool[Array, "..."]) -> Array:
    """Compute the log-softmax over the selected keys; -inf for the other keys."""
    scores = jnp.where(selected, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=EMPTY))
    total = jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)
    return scores - top - jnp.log(jnp.where(total > 0, total, 1.0))
