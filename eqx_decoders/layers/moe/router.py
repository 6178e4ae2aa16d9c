"""Routers select the top k experts of each token, weight them by their scores, and return routing statistics.

Model families differ in the score function, in whether scores are computed before or after the selection, and in a few
corrections; each is an option here. Everything is computed in float32. In the shapes, `slots` is k.
"""

import dataclasses
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt, check, check_option
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import FROZEN


BalanceForm = Literal["switch", "megatron"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(CheckedFields):
    """Configuration of a router: `logits = kernel^T x (+ bias)`; the top k experts, weighted by their scores.

    Ties go to the lower index. Mixtral, GPT-OSS: `order="select_first"` (GPT-OSS with `bias`). Qwen3:
    `order="score_first"`, with `renormalize`. DeepSeek-V2: `order="score_first"` and expert groups by `"max"`; V3: also
    `score="sigmoid"`, `renormalize`, `selection_bias` and expert groups by `"top2_sum"`. Llama 4: `score="sigmoid"`,
    `input_scaling`. Gemma 4: `order="score_first"`, `renormalize`, `per_expert_scale`, `input_norm`.

    **Arguments:**

    - `score`: score function of the logits; `"sqrt_softplus"` is `sqrt(log(1 + exp(logit)))` (DeepSeek-V4).
    - `order`: `"select_first"` selects by logits and scores the k selected logits only (a softmax is over these k);
        `"score_first"` scores all experts and selects by their scores.
    - `sparse_mixer`: the weight of each selected expert is its softmax probability among the experts that were not
        selected before it and whose logits are close to its own, `(own - logit) / max(|logit|, own) <= 2 sparse_mixer`
        (SparseMixer, Liu et al. 2023; Phi-3.5-MoE). Gradients are computed from these weights: neither jitter nor
        the paper's gradient estimator is implemented. None: weights as `order` says.
    - `renormalize`: divides the weights by their sum over the selected experts, plus `1e-20` unless scores are a
        softmax.
    - `bias`: adds a bias to the logits, trained by gradient.
    - `selection_bias`: adds a bias to the scores for the selection only, not for the weights. It has no gradient;
        `update_router_bias` updates it (Wang et al. 2024). Keep it in float32, because its updates are small.
    - `num_groups`, `groups_per_token`: divides the experts into `num_groups` groups of consecutive experts; a token
        selects experts from its best `groups_per_token` groups only.
    - `group_score`: score of an expert group: `"max"` of its experts' scores, or `"top2_sum"`, the sum of its best two.
        In the selection, experts of other groups have score 0 with `"max"`, and are excluded with `"top2_sum"`.
    - `scaling_factor`: multiplies the weights.
    - `hashed_tokens`: vocabulary size of a fixed table from token id to experts that replaces the selection (hash
        layers, Roller et al. 2021; DeepSeek-V4). Weights are the scores of these experts. None: top k.
    - `per_expert_scale`: multiplies the weight of each expert by a learned scalar.
    - `input_norm`: the router reads `norm(x) / sqrt(embed)`; None: x.
    - `input_scaling`: weights multiply the inputs of the experts, and outputs are summed without weights.
    - `balance_loss`, `balance_form`: coefficient of `load_balance_loss` in the training loss, and its form.
    - `z_loss`: coefficient of `router_z_loss` in the training loss.
    - `bias_update_rate`: change of each selection bias per training step.
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    order: Literal["select_first", "score_first"] = "select_first"
    sparse_mixer: PositiveFloat | None = None
    renormalize: bool = False
    bias: bool = False
    selection_bias: bool = False
    num_groups: PositiveInt = 1
    groups_per_token: PositiveInt = 1
    group_score: Literal["max", "top2_sum"] = "max"
    scaling_factor: PositiveFloat = 1.0
    hashed_tokens: PositiveInt | None = None
    per_expert_scale: bool = False
    input_norm: NormConfig | None = None
    input_scaling: bool = False
    balance_loss: NonNegativeFloat = 0.0
    balance_form: BalanceForm = "switch"
    z_loss: NonNegativeFloat = 0.0
    bias_update_rate: NonNegativeFloat = 0.0

    def __post_init__(self):
        super().__post_init__()
        check(
            self.groups_per_token <= self.num_groups,
            f"RouterConfig.groups_per_token={self.groups_per_token} must be at most num_groups={self.num_groups}.",
        )
        scores_all = self.order == "score_first"
        check(
            scores_all or not self.selection_bias,
            f"RouterConfig.selection_bias={self.selection_bias} needs order='score_first': it is added to the scores "
            "of all experts.",
        )
        check(
            scores_all or self.num_groups == 1,
            f"RouterConfig.num_groups={self.num_groups} needs order='score_first': expert groups are compared by the "
            "scores of all experts.",
        )
        check(
            scores_all or not self.renormalize or self.score != "softmax",
            f"RouterConfig.renormalize={self.renormalize} has no effect with order='select_first' and score='softmax': "
            "a softmax over the selected experts sums to 1. Leave it out.",
        )
        has_selection_option = self.selection_bias or self.num_groups > 1 or self.sparse_mixer is not None
        check(
            self.hashed_tokens is None or not has_selection_option,
            f"RouterConfig.hashed_tokens={self.hashed_tokens} excludes selection_bias, sparse_mixer and num_groups: "
            "a table selects the experts. Leave these out.",
        )
        check(
            self.sparse_mixer is None or (not scores_all and self.score == "softmax"),
            f"RouterConfig.sparse_mixer={self.sparse_mixer} needs score='softmax' and order='select_first': it selects "
            "experts by their logits.",
        )
        check(
            self.selection_bias or self.bias_update_rate == 0,
            f"RouterConfig.bias_update_rate={self.bias_update_rate} needs selection_bias=True.",
        )

    def check_experts(self, num_experts: int, num_experts_per_token: int) -> None:
        """Raise ConfigError if the expert groups do not fit these numbers of experts."""
        if self.num_groups == 1:
            return
        check(
            num_experts % self.num_groups == 0,
            f"ExpertsConfig.num_experts={num_experts} must be a multiple of RouterConfig.num_groups={self.num_groups}.",
        )
        group_size = num_experts // self.num_groups
        check(
            self.group_score == "max" or group_size > 1,
            f"ExpertsConfig.num_experts={num_experts} must be at least two per expert group for "
            f"RouterConfig.group_score='top2_sum', with num_groups={self.num_groups}.",
        )
        check(
            self.groups_per_token * group_size >= num_experts_per_token,
            f"ExpertsConfig.num_experts={num_experts}: groups_per_token={self.groups_per_token} groups of {group_size} "
            f"experts have fewer than num_experts_per_token={num_experts_per_token} experts. Raise groups_per_token.",
        )

    def build(self, embed_dim: int, num_experts: int, num_experts_per_token: int, *, key: PRNGKeyArray) -> "Router":
        zeros = jnp.zeros((num_experts,))
        return Router(
            kernel=fan_in(key, (embed_dim, num_experts), jnp.float32, embed_dim),
            bias=zeros if self.bias else None,
            selection_bias=zeros if self.selection_bias else None,
            table=_hash_table(self.hashed_tokens, num_experts, num_experts_per_token) if self.hashed_tokens else None,
            per_expert_scale=jnp.ones((num_experts,)) if self.per_expert_scale else None,
            input_norm=None if self.input_norm is None else self.input_norm.build(embed_dim),
            num_experts_per_token=num_experts_per_token,
            config=self,
        )


class RoutingStats(eqx.Module):
    """Routing statistics as sums over tokens or sequences, so that statistics of microbatches can be added.

    Padding is not counted. Stacked over layers, each field has a leading `layers` axis. Divide by `tokens` or
    `sequences` for means, as `load_balance_loss` and `router_z_loss` do.

    **Arguments:**

    - `tokens`, `sequences`: number of routed tokens, and of sequences that have any.
    - `counts`: number of tokens sent to each expert, with dropped ones.
    - `dropped`: number of dropped assignments; 0 unless `Execution.experts` is "capacity".
    - `probabilities`: sum over tokens of each expert's normalized score.
    - `switch`, `megatron`: sums over sequences of the two forms of `load_balance_loss`.
    - `z`: sum over tokens of the squared log-sum-exp of the logits.
    - `entropy`: sum over tokens of the entropy of the normalized scores, in nats.
    """

    tokens: Float32[Array, "*layers"]
    sequences: Float32[Array, "*layers"]
    counts: Float32[Array, "*layers experts"]
    dropped: Float32[Array, "*layers"]
    probabilities: Float32[Array, "*layers experts"]
    switch: Float32[Array, "*layers"]
    megatron: Float32[Array, "*layers"]
    z: Float32[Array, "*layers"]
    entropy: Float32[Array, "*layers"]


def load_balance_loss(stats: RoutingStats, form: BalanceForm = "switch") -> Float32[Array, "*layers"]:
    """Return `E sum_e f_e p_e`, averaged over sequences: 1 for a balanced load, E if one expert gets all tokens.

    f_e is the fraction of a sequence's assignments to expert e, p_e the mean of its normalized score; gradients flow
    through p only (Fedus et al. 2021, per sequence as in MaxText). In the form `"megatron"` f_e counts the top k scores
    without selection bias and expert groups (Megatron-LM, DeepSeek-V3), which may differ from the selected experts.

    For p with sigmoid scores, MaxText's "switch" form takes a softmax of the scores, which is nearly uniform; here
    both forms divide the scores by their sum.
    """
    check_option("load_balance_loss form", form, get_args(BalanceForm))
    return (stats.switch if form == "switch" else stats.megatron) / jnp.maximum(stats.sequences, 1.0)


def router_z_loss(stats: RoutingStats) -> Float32[Array, "*layers"]:
    """Return the mean over tokens of `log(sum_e exp(logit_e))²`, which keeps logits small (Zoph et al. 2022)."""
    return stats.z / jnp.maximum(stats.tokens, 1.0)


class Router(eqx.Module):
    """Router that selects the top k experts of each token."""

    kernel: Float[Array, "embed experts"]
    bias: Float[Array, "experts"] | None
    selection_bias: Float[Array, "experts"] | None = eqx.field(metadata=FROZEN)
    table: Int32[Array, "vocab slots"] | None = eqx.field(metadata=FROZEN)
    per_expert_scale: Float[Array, "experts"] | None
    input_norm: Norm | None
    num_experts_per_token: int = eqx.field(static=True)
    config: RouterConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        ctx: ForwardContext,
        *,
        replayed: Integer[Array, "batch length choices"] | None = None,
    ) -> tuple[Int32[Array, "batch length slots"], Float[Array, "batch length slots"], RoutingStats]:
        """Return the indices of the k experts of each token, their weights, and statistics.

        Experts are ordered from best to worst, except experts of `RouterConfig.hashed_tokens` and `replayed` experts.
        Padding (tokens at position -1) has the index `num_experts`, which is no expert, and weight 0.

        **Arguments:**

        - `replayed`: experts recorded by another program for these tokens, which replace the selection; -1 for tokens
            without a record. Their weights and gradients are computed from this router's own scores.
        """
        logits = self._logits(x, ctx)
        scores = _score(logits, self.config.score)
        indices, allowed = self._select(logits, scores) if self.table is None else self._look_up(scores, ctx)
        if replayed is not None:
            indices, allowed = self._replay(replayed, indices, allowed)
        weights = self._combine_weights(logits, jnp.where(allowed, scores, 0.0), indices)
        is_token = ctx.positions >= 0
        stats = self._stats(
            logits.astype(jnp.float32),
            scores.astype(jnp.float32),
            indices,
            is_token,
            indices_are_top_scores=self._selects_top_scores and replayed is None,
        )
        indices = jnp.where(is_token[..., None], indices, logits.shape[-1])
        return indices, jnp.where(is_token[..., None], weights, 0.0), stats

    def _logits(self, x: Array, ctx: ForwardContext) -> Float[Array, "batch length experts"]:
        x = x.astype(np.promote_types(x.dtype, np.float32))
        if self.input_norm is not None:
            x = self.input_norm(x) * x.shape[-1] ** -0.5
        # full precision on every platform: the product is small, and rounding would change the selection
        with jax.default_matmul_precision("highest"):
            logits = ctx.einsum("batch length embed, embed experts -> batch length experts", x, self.kernel)
        return add_bias(logits, self.bias)

    def _select(
        self, logits: Array, scores: Array
    ) -> tuple[Int32[Array, "batch length slots"], Bool[Array, "batch length experts"]]:
        """Return the selected experts, and which experts could be selected (those of the best expert groups)."""
        config = self.config
        ranking = logits if config.order == "select_first" else scores
        if self.selection_bias is not None:
            ranking = add_bias(ranking, self.selection_bias)
        ranking = jax.lax.stop_gradient(ranking)
        allowed = self._in_best_groups(ranking)
        ranking = jnp.where(allowed, ranking, 0.0 if config.group_score == "max" else -jnp.inf)
        return _top_k(ranking, self.num_experts_per_token)[1], allowed

    def _look_up(
        self, scores: Array, ctx: ForwardContext
    ) -> tuple[Int32[Array, "batch length slots"], Bool[Array, "batch length experts"]]:
        """Return the experts of each token id; all experts are allowed."""
        check(
            ctx.tokens is not None and self.table is not None,
            f"RouterConfig.hashed_tokens={self.config.hashed_tokens} selects experts by token ids: call the model with "
            "token ids, not with model(embeds=...).",
        )
        assert ctx.tokens is not None and self.table is not None
        return jnp.take(self.table, ctx.tokens, axis=0, mode="clip"), jnp.ones(scores.shape, bool)

    def _replay(
        self, replayed: Array, indices: Array, allowed: Array
    ) -> tuple[Int32[Array, "batch length slots"], Bool[Array, "batch length experts"]]:
        """Return recorded experts where there are any; if they differ from `indices`, all experts are allowed."""
        replayed = replayed[..., : self.num_experts_per_token].astype(jnp.int32)
        replayed = jnp.where(replayed[..., :1] >= 0, replayed, indices)
        differs = jnp.any(replayed != indices, axis=-1, keepdims=True)
        return replayed, allowed | differs

    def _in_best_groups(self, ranking: Array) -> Bool[Array, "batch length experts"]:
        """Return which experts are in the best expert groups of a token."""
        config = self.config
        if config.groups_per_token == config.num_groups:
            return jnp.ones(ranking.shape, bool)
        groups = ranking.reshape(*ranking.shape[:2], config.num_groups, -1)
        best, _ = _top_k(groups, 1 if config.group_score == "max" else 2)
        _, best_groups = _top_k(jnp.sum(best, axis=-1), config.groups_per_token)
        is_best_group = jnp.any(_one_hot(best_groups, config.num_groups), axis=-2)
        return jnp.repeat(is_best_group, groups.shape[-1], axis=-1)

    def _combine_weights(self, logits: Array, scores: Array, indices: Array) -> Float[Array, "batch length slots"]:
        config = self.config
        if config.sparse_mixer is not None:
            weights = _sparse_mixer_weights(logits, indices, 2.0 * config.sparse_mixer)
        elif config.order == "select_first":
            weights = _score(_take(logits, indices), config.score)
        else:
            weights = _take(scores, indices)
        if config.renormalize:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (total if config.score == "softmax" else total + 1e-20)
        weights = weights * config.scaling_factor
        if self.per_expert_scale is not None:
            weights = weights * _take(self.per_expert_scale.astype(weights.dtype).reshape(1, 1, -1), indices)
        return weights

    def _stats(
        self, logits: Array, scores: Array, indices: Array, is_token: Array, *, indices_are_top_scores: bool
    ) -> RoutingStats:
        """Return the sums of all statistics over tokens; `is_token` is False for padding."""
        num_experts = logits.shape[-1]
        experts_per_token = indices.shape[-1]
        mask = is_token.astype(jnp.float32)
        tokens = jnp.sum(mask, axis=1)
        if self.config.score == "softmax":
            probabilities = scores
        else:
            probabilities = scores / (jnp.sum(scores, -1, keepdims=True) + 1e-20)
        sums = jnp.sum(probabilities * mask[..., None], axis=1)
        counts = _count_assignments(indices, is_token, num_experts)
        if indices_are_top_scores:
            top_score_counts = counts
        else:
            top_score_counts = _count_assignments(_top_k(scores, experts_per_token)[1], is_token, num_experts)

        def balance(counts):
            # sum over sequences of E * sum over experts of (counts / (tokens k)) * (sums / tokens)
            products = num_experts * jnp.sum(counts * sums, axis=-1)
            return jnp.sum(products / (experts_per_token * jnp.maximum(tokens, 1.0) ** 2))

        entropy = jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(probabilities)), axis=-1)
        return RoutingStats(
            tokens=jnp.sum(tokens),
            sequences=jnp.sum((tokens > 0).astype(jnp.float32)),
            counts=jnp.sum(counts, axis=0),
            dropped=jnp.zeros((), jnp.float32),
            probabilities=jnp.sum(sums, axis=0),
            switch=balance(counts),
            megatron=balance(top_score_counts),
            z=jnp.sum(mask * jax.nn.logsumexp(logits, axis=-1) ** 2),
            entropy=jnp.sum(mask * entropy),
        )

    @property
    def _selects_top_scores(self) -> bool:
        """Whether the router always selects the experts with the top k scores."""
        config = self.config
        return not (config.hashed_tokens or config.selection_bias or config.groups_per_token < config.num_groups)


def _hash_table(vocab_size: int, num_experts: int, experts_per_token: int) -> Int32[Array, "vocab slots"]:
    """Return a table of different experts for each token id, in which all experts are equally frequent."""
    indices = jnp.arange(vocab_size * experts_per_token, dtype=jnp.int32)
    return indices.reshape(vocab_size, experts_per_token) % num_experts


def _score(logits: Array, score: str) -> Array:
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if score == "sigmoid":
        return jax.nn.sigmoid(logits)
    # the square root has no finite gradient at 0, to which softplus underflows
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(logits.dtype).tiny))


def _sparse_mixer_weights(logits: Array, indices: Array, tolerance: float) -> Float[Array, "batch length slots"]:
    """Return the weights of selected experts as in `RouterConfig.sparse_mixer`; `tolerance` is twice its value."""
    remaining = jnp.ones(logits.shape, bool)
    weights = []
    for selected in jnp.moveaxis(_one_hot(indices, logits.shape[-1]), -2, 0):
        own = jnp.sum(jnp.where(selected, logits, 0.0), axis=-1, keepdims=True)
        # if both logits are 0 the quotient is NaN, and the comparison is False
        is_far = (own - logits) / jnp.maximum(jnp.abs(logits), own) > tolerance
        probabilities = jax.nn.softmax(jnp.where(remaining & ~is_far, logits, -jnp.inf), axis=-1)
        weights.append(jnp.sum(jnp.where(selected, probabilities, 0.0), axis=-1))
        remaining &= ~selected
    return jnp.stack(weights, axis=-1)


def _top_k(values: Float[Array, "*dims candidates"], k: int) -> tuple[Array, Int32[Array, "*dims slots"]]:
    """Return the k largest values and their indices, like `lax.top_k`; ties go to the lower index.

    For a partitioned `lax.top_k`, XLA gathers the values of all tokens on every device; repeated argmax does not
    communicate.
    """
    positions = jnp.arange(values.shape[-1], dtype=jnp.int32).reshape((1,) * (values.ndim - 1) + (-1,))
    is_taken = jnp.zeros(values.shape, bool)
    top_values = []
    top_indices = []
    for _ in range(k):
        best = jnp.argmax(jnp.where(is_taken, -jnp.inf, values), axis=-1, keepdims=True).astype(jnp.int32)
        is_best = positions == best
        top_values.append(jnp.sum(jnp.where(is_best, values, 0.0), axis=-1))
        top_indices.append(best[..., 0])
        is_taken |= is_best
    return jnp.stack(top_values, axis=-1), jnp.stack(top_indices, axis=-1)


def _one_hot(indices: Array, size: int) -> Bool[Array, "batch length slots experts"]:
    """Return a one-hot mask of indices; all False for an index of `size` or more."""
    return indices[..., None] == jnp.arange(size, dtype=indices.dtype).reshape(1, 1, 1, -1)


def _take(values: Array, indices: Array) -> Float[Array, "batch length slots"]:
    """Return `values` at the indices, as a sum over a one-hot mask, because the gradient of a gather is a scatter."""
    return jnp.sum(jnp.where(_one_hot(indices, values.shape[-1]), values[..., None, :], 0.0), axis=-1)


def _count_assignments(indices: Array, is_token: Array, num_experts: int) -> Float32[Array, "batch experts"]:
    """Count the assignments of each sequence to each expert."""
    is_assigned = _one_hot(indices, num_experts) & is_token[..., None, None]
    return jnp.sum(is_assigned, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32)
