"""Routers: the choice of experts for each token, their weights, and statistics of the choice.

All are `top-k(choice)` with weights from scores; families differ in the score, the order of the two steps and a few
corrections, each of which is an option here. Everything is computed in float32.
"""

import dataclasses
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt, check, check_word
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import FROZEN


BalanceForm = Literal["switch", "megatron"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(CheckedFields):
    """Configuration of a router: `logits = kernel^T x (+ bias)`; the best k experts, weighed by their scores.

    Ties go to the lower index. Mixtral, GPT-OSS: `order="select_first"` (GPT-OSS with `bias`). Qwen3:
    `order="score_first"`, with `renormalize`. DeepSeek-V2: `order="score_first"` and groups by `"max"`; V3: also
    `score="sigmoid"`, `renormalize`, `selection_bias` and groups by `"top2_sum"`. Llama 4: `score="sigmoid"`,
    `input_scaling`. Gemma 4: `order="score_first"`, `renormalize`, `per_expert_scale`, `input_norm`.

    **Arguments:**

    - `score`: what makes logits weights; `"sqrt_softplus"` is `sqrt(log(1 + exp(logit)))` (DeepSeek-V4).
    - `order`: `"select_first"` scores the k chosen logits only (a softmax is then over these k); `"score_first"` scores
        all experts and chooses by their scores.
    - `sparse_mixer`: the weight of each chosen expert is its share of a softmax over those experts that no earlier
        choice took and whose logits are near its own, `(own - logit) / max(|logit|, own) <= 2 sparse_mixer`
        (SparseMixer, Liu et al. 2023; Phi-3.5-MoE). Training differentiates these weights: there is neither jitter nor
        another estimate of the gradient. None: weights as `order` says.
    - `renormalize`: weights are divided by their sum over the chosen; `1e-20` is added to it unless scores are a
        softmax.
    - `bias`: logits have a bias that is trained by gradient.
    - `selection_bias`: a bias joins the scores for the choice alone and never enters a weight. No gradient moves it,
        but `update_router_bias` does (Wang et al. 2024). Keep such a model's weights in float32: its steps are small.
    - `num_groups`, `groups_per_token`: experts are chosen from the best groups of neighbors; one group: from all.
    - `group_score`: a group is as good as its best expert, `"max"`, and experts of other groups have score 0; or as
        its best two together, `"top2_sum"`, and other groups are out of question.
    - `scaling_factor`: multiplies the weights.
    - `hashed_tokens`: experts are not chosen by scores, but are those of the token's id in a table of so many ids that
        nothing moves (hash layers, Roller et al. 2021; DeepSeek-V4). Scores are the weights. None: the best k.
    - `per_expert_scale`: weights are multiplied by a learned number of their expert.
    - `input_norm`: the router reads `norm(x) / sqrt(embed)`; None: x.
    - `input_scaling`: weights multiply the inputs of the experts; outputs are added up as they are.
    - `random`: with a key, experts are drawn at random, without repetition; to measure balanced loads.
    - `balance_loss`, `balance_form`: weight of `load_balance_loss` in the training loss, and its form.
    - `z_loss`: weight of `router_z_loss` in the training loss.
    - `bias_update_rate`: by how much a training step moves each selection bias.
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
    random: bool = False
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
        first = self.order == "select_first"
        rule = "needs order='score_first': it is about the scores of all experts."
        check(not (first and self.selection_bias), f"RouterConfig.selection_bias={self.selection_bias} {rule}")
        check(not (first and self.num_groups > 1), f"RouterConfig.num_groups={self.num_groups} {rule}")
        check(
            not (first and self.renormalize and self.score == "softmax"),
            f"RouterConfig.renormalize={self.renormalize} changes nothing where order='select_first': a softmax over "
            "the chosen sums to 1. Leave it out.",
        )
        chosen = self.selection_bias or self.random or self.num_groups > 1 or self.sparse_mixer is not None
        rule = "excludes selection_bias, random, sparse_mixer and groups: nothing is chosen"
        check(self.hashed_tokens is None or not chosen, f"RouterConfig.hashed_tokens={self.hashed_tokens} {rule}.")
        shares = first and self.score == "softmax"
        rule = "needs score='softmax' and order='select_first': it chooses by logits"
        check(self.sparse_mixer is None or shares, f"RouterConfig.sparse_mixer={self.sparse_mixer} {rule}.")
        check(
            self.selection_bias or self.bias_update_rate == 0,
            f"RouterConfig.bias_update_rate={self.bias_update_rate} needs selection_bias=True.",
        )

    def check_experts(self, num_experts: int, num_experts_per_token: int) -> None:
        """Raise ConfigError where so many experts can't be grouped like this."""
        groups, allowed = self.num_groups, self.groups_per_token
        if groups == 1:
            return
        where, size = f"ExpertsConfig.num_experts={num_experts}", num_experts // groups
        check(num_experts % groups == 0, f"{where} must be a multiple of RouterConfig.num_groups={groups}.")
        check(self.group_score == "max" or size > 1, f"{where}: group_score='top2_sum' needs two experts a group.")
        check(
            allowed * size >= num_experts_per_token,
            f"{where}: groups_per_token={allowed} groups of {size} hold fewer than num_experts_per_token="
            f"{num_experts_per_token} experts.",
        )

    def build(self, embed_dim: int, num_experts: int, num_experts_per_token: int, *, key: PRNGKeyArray) -> "Router":
        zeros = jnp.zeros((num_experts,))
        return Router(
            kernel=fan_in(key, (embed_dim, num_experts), jnp.float32, embed_dim),
            bias=zeros if self.bias else None,
            selection_bias=zeros if self.selection_bias else None,
            table=_spread_tokens(self.hashed_tokens, num_experts, num_experts_per_token)
            if self.hashed_tokens
            else None,
            per_expert_scale=jnp.ones((num_experts,)) if self.per_expert_scale else None,
            input_norm=None if self.input_norm is None else self.input_norm.build(embed_dim),
            num_experts_per_token=num_experts_per_token,
            config=self,
        )


class RoutingStats(eqx.Module):
    """Statistics of routing: sums, so that layers' microbatches can be added up; padding isn't counted.

    Every field has a leading `layers` axis once stacked. The functions that read them divide them.

    **Arguments:**

    - `tokens`, `sequences`: tokens that were routed, and rows that have any.
    - `counts`: tokens sent to each expert, dropped ones included.
    - `dropped`: number of dropped choices; 0 but for the capacity form.
    - `probabilities`: over tokens, of each expert's share of a token's scores.
    - `switch`, `megatron`: over sequences, of either form of the balance loss.
    - `z`: over tokens, of the squared log-sum-exp of the logits.
    - `entropy`: over tokens, of the entropy of those shares, in nats.
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
    """Compute `E sum_e f_e p_e`, the mean over sequences: 1 for a balanced load, E where one expert does everything.

    f_e is the share of a sequence's choices that fell on expert e, p_e the mean of its share of the scores; gradients
    flow through p alone (Fedus et al. 2021, per sequence as in MaxText). In the form `"megatron"` f_e counts the best k
    scores instead, without biases or groups (Megatron-LM, DeepSeek-V3). The two differ only where choices do.

    MaxText takes a softmax of sigmoid scores for p in the first form, which is nearly flat; here scores are divided by
    their sum in both.
    """
    check_word("load_balance_loss form", form, get_args(BalanceForm))
    return (stats.switch if form == "switch" else stats.megatron) / jnp.maximum(stats.sequences, 1.0)


def router_z_loss(stats: RoutingStats) -> Float32[Array, "*layers"]:
    """Compute `log(sum_e exp(logit_e))²`, the mean over tokens: it holds logits small (Zoph et al. 2022)."""
    return stats.z / jnp.maximum(stats.tokens, 1.0)


class Router(eqx.Module):
    """Router to the best k experts of each token."""

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
        key: PRNGKeyArray | None = None,
        replayed: Integer[Array, "batch length choices"] | None = None,
    ) -> tuple[Int32[Array, "batch length slots"], Float[Array, "batch length slots"], RoutingStats]:
        """Return the k experts of each token, best first, their weights, and statistics.

        Padding (tokens at position -1) goes nowhere: to the expert after the last one, with weight 0.

        **Arguments:**

        - `replayed`: experts that another program has chosen for these tokens, in place of the best ones; -1 for tokens
            of which it is not known. Weights are of this router's own scores of them, and so are gradients.
        """
        logits = self._logits(x, ctx)
        scores = _score(logits, self.config.score)
        indices, allowed = self._choose(logits, scores, key) if self.table is None else self._look_up(scores, ctx)
        if replayed is not None:
            indices, allowed = self._replay(replayed, indices, allowed)
        weights = self._combine_weights(logits, jnp.where(allowed, scores, 0.0), indices)
        real = ctx.positions >= 0
        stats = self._stats(logits.astype(jnp.float32), scores.astype(jnp.float32), indices, real)
        indices = jnp.where(real[..., None], indices, logits.shape[-1])
        return indices, jnp.where(real[..., None], weights, 0.0), stats

    def _logits(self, x: Array, ctx: ForwardContext) -> Float[Array, "batch length experts"]:
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        if self.input_norm is not None:
            wide = self.input_norm(wide) * x.shape[-1] ** -0.5
        # few columns, and they decide: not rounded on any platform
        with jax.default_matmul_precision("highest"):
            logits = ctx.einsum("batch length embed, embed experts -> batch length experts", wide, self.kernel)
        return add_bias(logits, self.bias)

    def _choose(
        self, logits: Array, scores: Array, key: PRNGKeyArray | None
    ) -> tuple[Int32[Array, "batch length slots"], Bool[Array, "batch length experts"]]:
        """Return the chosen experts, and the experts that were allowed."""
        config = self.config
        choice = logits if config.order == "select_first" else scores
        if self.selection_bias is not None:
            choice = add_bias(choice, self.selection_bias)
        if config.random and key is not None:
            choice = jax.random.uniform(key, choice.shape)
        choice = jax.lax.stop_gradient(choice)
        allowed = self._best_groups(choice)
        choice = jnp.where(allowed, choice, 0.0 if config.group_score == "max" else -jnp.inf)
        return _top_k(choice, self.num_experts_per_token)[1], allowed

    def _look_up(
        self, scores: Array, ctx: ForwardContext
    ) -> tuple[Int32[Array, "batch length slots"], Bool[Array, "batch length experts"]]:
        """Return the experts of each token's id, and that all are allowed."""
        rule = "RouterConfig.hashed_tokens finds experts by token ids: not with model(embeds=…)"
        check(ctx.tokens is not None and self.table is not None, f"{rule}.")
        assert ctx.tokens is not None and self.table is not None
        return jnp.take(self.table, ctx.tokens, axis=0, mode="clip"), jnp.ones(scores.shape, bool)

    def _replay(
        self, replayed: Array, indices: Array, allowed: Array
    ) -> tuple[Int32[Array, "batch length slots"], Bool[Array, "batch length experts"]]:
        """Return the replayed experts where there are any; those of other groups than the own ones are allowed, too."""
        chosen = replayed[..., : self.num_experts_per_token].astype(jnp.int32)
        chosen = jnp.where(chosen[..., :1] >= 0, chosen, indices)
        others = jnp.any(chosen != indices, axis=-1, keepdims=True)
        return chosen, allowed | others

    def _best_groups(self, choice: Array) -> Bool[Array, "batch length experts"]:
        """Return which experts are in the groups that a token may use."""
        config = self.config
        if config.groups_per_token == config.num_groups:
            return jnp.ones(choice.shape, bool)
        groups = choice.reshape(*choice.shape[:2], config.num_groups, -1)
        best, _ = _top_k(groups, 1 if config.group_score == "max" else 2)
        _, best_groups = _top_k(jnp.sum(best, axis=-1), config.groups_per_token)
        inside = jnp.any(_one_hot(best_groups, config.num_groups), axis=-2)
        return jnp.repeat(inside, groups.shape[-1], axis=-1)

    def _combine_weights(self, logits: Array, scores: Array, indices: Array) -> Float[Array, "batch length slots"]:
        config = self.config
        if config.sparse_mixer is not None:
            weights = _sequential_shares(logits, indices, 2.0 * config.sparse_mixer)
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

    def _stats(self, logits: Array, scores: Array, indices: Array, real: Array) -> RoutingStats:
        """Sum statistics over all tokens but padding; sequences are rows."""
        experts, chosen = logits.shape[-1], indices.shape[-1]
        weight = real.astype(jnp.float32)
        tokens = jnp.sum(weight, axis=1)
        shares = scores if self.config.score == "softmax" else scores / (jnp.sum(scores, -1, keepdims=True) + 1e-20)
        per_row = jnp.sum(shares * weight[..., None], axis=1)
        counts = _count_choices(indices, real, experts)
        plain = counts if self._is_plain else _count_choices(_top_k(scores, chosen)[1], real, experts)

        def balance(counts):
            # E * sum of (counts / (tokens k)) * (per_row / tokens)
            return jnp.sum(experts * jnp.sum(counts * per_row, axis=-1) / (chosen * jnp.maximum(tokens, 1.0) ** 2))

        entropy = jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(shares)), axis=-1)
        return RoutingStats(
            tokens=jnp.sum(tokens),
            sequences=jnp.sum((tokens > 0).astype(jnp.float32)),
            counts=jnp.sum(counts, axis=0),
            dropped=jnp.zeros((), jnp.float32),
            probabilities=jnp.sum(per_row, axis=0),
            switch=balance(counts),
            megatron=balance(plain),
            z=jnp.sum(weight * jax.nn.logsumexp(logits, axis=-1) ** 2),
            entropy=jnp.sum(weight * entropy),
        )

    @property
    def _is_plain(self) -> bool:
        """True if the choice is the best k scores."""
        config = self.config
        return not (
            config.hashed_tokens
            or config.selection_bias
            or config.random
            or config.groups_per_token < config.num_groups
        )


def _spread_tokens(tokens: int, experts: int, chosen: int) -> Int32[Array, "vocab slots"]:
    """Return as many different experts for each id, all of them equally often."""
    return jnp.arange(tokens * chosen, dtype=jnp.int32).reshape(tokens, chosen) % experts


def _score(logits: Array, score: str) -> Array:
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if score == "sigmoid":
        return jax.nn.sigmoid(logits)
    # the root has no gradient at 0, where softplus underflows
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(logits.dtype).tiny))


def _sequential_shares(logits: Array, indices: Array, tolerance: float) -> Float[Array, "batch length slots"]:
    """Return each choice's share of a softmax over experts that are left and no further from it than `tolerance`."""
    left, shares = jnp.ones(logits.shape, bool), []
    for chosen in jnp.moveaxis(_one_hot(indices, logits.shape[-1]), -2, 0):
        own = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1, keepdims=True)
        # where both are 0 there is no number, and nothing is far
        is_far = (own - logits) / jnp.maximum(jnp.abs(logits), own) > tolerance
        share = jax.nn.softmax(jnp.where(left & ~is_far, logits, -jnp.inf), axis=-1)
        shares.append(jnp.sum(jnp.where(chosen, share, 0.0), axis=-1))
        left &= ~chosen
    return jnp.stack(shares, axis=-1)


def _top_k(values: Float[Array, "*dims candidates"], count: int) -> tuple[Array, Int32[Array, "*dims slots"]]:
    """Return the best values and their indices, as `lax.top_k` does; the lower index of equals.

    For a partitioned `lax.top_k` XLA gathers the values of all tokens on every device; rounds of argmax stay where
    they are.
    """
    results, index = [], jnp.arange(values.shape[-1], dtype=jnp.int32)
    taken = jnp.zeros(values.shape, bool)
    for _ in range(count):
        best = jnp.argmax(jnp.where(taken, -jnp.inf, values), axis=-1, keepdims=True).astype(jnp.int32)
        is_best = index.reshape((1,) * (values.ndim - 1) + (-1,)) == best
        results.append((jnp.sum(jnp.where(is_best, values, 0.0), axis=-1), best[..., 0]))
        taken |= is_best
    return jnp.stack([value for value, _ in results], axis=-1), jnp.stack([place for _, place in results], axis=-1)


def _one_hot(indices: Array, size: int) -> Bool[Array, "batch length slots experts"]:
    """Return a one-hot mask of indices; all False for an index beyond `size`."""
    return indices[..., None] == jnp.arange(size, dtype=indices.dtype).reshape(1, 1, 1, -1)


def _take(values: Array, indices: Array) -> Float[Array, "batch length slots"]:
    """Return `values` of the chosen experts, as a sum over all of them: its gradient is one too, and no scatter."""
    return jnp.sum(jnp.where(_one_hot(indices, values.shape[-1]), values[..., None, :], 0.0), axis=-1)


def _count_choices(indices: Array, real: Array, experts: int) -> Float32[Array, "batch experts"]:
    """Count a row's choices of each expert."""
    return jnp.sum(_one_hot(indices, experts) & real[..., None, None], axis=(1, 2), dtype=jnp.int32).astype(jnp.float32)
