"""Divergence of a student's distribution from a teacher's: over all ids of two heads, or over the teacher's top ids."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from eqx_decoders.errors import check, check_number, check_option
from eqx_decoders.training.head.device_head import DeviceHead, VocabPart
from eqx_decoders.training.head.head_tiles import HeadForm, float32_zeros
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights


DivergenceKind = Literal["forward", "reverse", "jsd"]


class Divergence(NamedTuple):
    """Kind of divergence of a student's distribution p from a teacher's distribution q.

    **Arguments:**

    - `kind`: `"forward"`: `sum q (log q - log p)`; `"reverse"`: `sum p (log p - log q)`; `"jsd"`: the generalized
        Jensen–Shannon divergence `beta KL(q | m) + (1 - beta) KL(p | m)` with `m = beta q + (1 - beta) p` (GKD, Agarwal
        et al. 2024).
    - `beta`: weight of the teacher in `"jsd"`, between 0 and 1.
    - `scaled`: divide `"jsd"` by `beta (1 - beta)`. Its limits for beta towards 0 and 1 are then the forward and the
        reverse divergence; without the division both limits are 0.
    """

    kind: DivergenceKind = "forward"
    beta: float = 0.5
    scaled: bool = True

    def checked(self) -> "Divergence":
        """Return the divergence. Raises ConfigError for an unknown kind and, with `"jsd"`, for a beta out of range."""
        check_option("Divergence.kind", self.kind, ("forward", "reverse", "jsd"))
        if self.kind == "jsd":
            check_number("Divergence.beta", self.beta, above=0.0)
            check(
                self.beta < 1, f"Divergence.beta={self.beta} must be less than 1. For the limit 1, use kind='reverse'."
            )
        return self

    def terms(self, log_p: Array, log_q: Array) -> tuple[Array, Array]:
        """Return the terms of the sum over ids, and the derivatives of the terms with respect to `log_p`."""
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        if self.kind == "forward":
            return _weighted(q, log_q - log_p), -q
        if self.kind == "reverse":
            terms = _weighted(p, log_p - log_q)
            return terms, terms + p
        log_m = jnp.logaddexp(log_q + jnp.log(self.beta), log_p + jnp.log1p(-self.beta))
        scale = 1 / (self.beta * (1 - self.beta)) if self.scaled else 1.0
        student_terms = scale * (1 - self.beta) * _weighted(p, log_p - log_m)
        # `student_terms` are also the derivatives: the other parts of the derivative cancel. These are -(1 - beta) p
        # from log m, summed over both KLs, and (1 - beta) p from log p.
        return scale * self.beta * _weighted(q, log_q - log_m) + student_terms, student_terms


def _weighted(probs: Array, values: Array) -> Array:
    """Multiply values by probabilities. The product is 0 if the probability is 0, also for an infinite value."""
    return jnp.where(probs > 0, probs * values, 0.0)


def top_divergence(
    log_probs: Float[Array, "*batch top"], teacher: Float[Array, "*batch top"], divergence: Divergence = Divergence()
) -> Float[Array, "*batch"]:
    """Compute the divergence over a teacher's most likely ids and one class for all other ids.

    The result is a lower bound of the divergence over all ids, and equal to it if there is a single other id. Without
    the class of other ids, whose probability is `1 - sum p`, the loss would not determine where the student puts the
    remaining probability.

    **Arguments:**

    - `log_probs`: the student's log-probs of the teacher's most likely ids, in nats.
    - `teacher`: the teacher's log-probs of the same ids. They have no gradient.
    - `divergence`: kind of the divergence.
    """
    divergence = divergence.checked()

    def with_other_ids(x: Array) -> Array:
        log_prob_of_top = jnp.minimum(jax.nn.logsumexp(x, axis=-1, keepdims=True), -1e-7)
        return jnp.concatenate([x, log1mexp(log_prob_of_top)], axis=-1)

    terms = _terms(divergence, with_other_ids(log_probs), lax.stop_gradient(with_other_ids(teacher)))
    return jnp.sum(terms, axis=-1)


def log1mexp(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute `log(1 - exp(x))` for `x < 0` without cancellation (Mächler 2012)."""
    is_near_zero = x > -0.6931472  # -log(2)
    for_near_zero = jnp.log(-jnp.expm1(jnp.where(is_near_zero, x, -1.0)))
    return jnp.where(is_near_zero, for_near_zero, jnp.log1p(-jnp.exp(jnp.where(is_near_zero, -1.0, x))))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _terms(divergence: Divergence, log_p: Array, log_q: Array) -> Array:
    return divergence.terms(log_p, log_q)[0]


@_terms.defjvp
def _terms_jvp(divergence: Divergence, values: Any, tangents: Any) -> Any:
    terms, derivatives = divergence.terms(*values)
    return terms, derivatives * tangents[0]  # tangents[1] is of the teacher, which has no gradient


def linear_divergence(
    hidden: Float[Array, "batch length embed"],
    head: HeadWeights,
    teacher_hidden: Float[Array, "batch length teacher_embed"],
    teacher_head: HeadWeights,
    *,
    form: HeadForm,
    teacher_form: HeadForm,
    divergence: Divergence = Divergence(),
) -> Float[Array, "batch length"]:
    """Compute the divergence of a student from a teacher at each position, in tiles of positions.

    The logits of the complete batch are never stored. The gradient is with respect to `hidden` and `head`. The forward
    pass computes the logits of both models twice, first for the normalizers; the backward pass computes them again.

    **Arguments:**

    - `hidden`, `head`: inputs and weights of the student's output head.
    - `teacher_hidden`, `teacher_head`: inputs and weights of the teacher's output head.
    - `form`, `teacher_form`: functions from the inputs to the logits of the student and of the teacher. If both have
        the temperature `T`, multiply the result by `T^2`, so that the size of gradients does not depend on `T` (Hinton
        et al. 2015).
    - `divergence`: kind of the divergence.

    Raises ConfigError if the vocabularies of the two heads have different sizes.
    """
    form.check_kernel("linear_divergence", hidden, head.kernel)
    teacher_form.check_kernel("linear_divergence teacher", teacher_hidden, teacher_head.kernel)
    vocab_size = head.kernel.shape[0 if form.tied else 1]
    teacher_vocab_size = teacher_head.kernel.shape[0 if teacher_form.tied else 1]
    check(
        vocab_size == teacher_vocab_size,
        f"linear_divergence: the student's head has {vocab_size} ids and the teacher's head {teacher_vocab_size}, but "
        "both must have the same vocabulary. Slice both kernels to the ids that the vocabularies have in common.",
    )
    embed, teacher_embed = hidden.shape[2], teacher_hidden.shape[2]
    head_bytes = form.tiles.head_bytes  # for both heads together
    student_bytes = None if head_bytes is None else max(1, head_bytes * embed // (embed + teacher_embed))
    form = dataclasses.replace(form, tiles=form.tiles._replace(head_bytes=student_bytes))
    heads = _Heads(form, teacher_form, divergence.checked())
    return _divergence(heads, hidden, head, *lax.stop_gradient((teacher_hidden, teacher_head)))


class _Heads(NamedTuple):
    """Static arguments of the loss: how both heads compute logits, and the divergence."""

    student: HeadForm
    teacher: HeadForm
    divergence: Divergence

    def shard_map(self, function: Callable[..., Any], outputs: Callable[[HeadSplit], Any], *arguments: Any) -> Any:
        """Run a function on each device of the mesh.

        **Arguments:**

        - `function`: called as `function(student, teacher, hidden, teacher_hidden, *values)` with each `DeviceHead`.
            The hidden states and `values` are split into tiles.
        - `outputs`: returns the partition specs of the results of `function`.
        - `arguments`: `hidden, head, teacher_hidden, teacher_head, *values`. `values` have an element for each token.
        """
        hidden, head, teacher_hidden, teacher_head, *values = arguments
        split = self.student.split(hidden, head.kernel)
        teacher_split = self.teacher.split(teacher_hidden, teacher_head.kernel)
        teacher_form = dataclasses.replace(self.teacher, tiles=self.student.tiles)

        def on_device(hidden, head, teacher_hidden, teacher_head, *values):
            student = DeviceHead.create(self.student, split, hidden, head)
            teacher = DeviceHead.create(teacher_form, teacher_split, teacher_hidden, teacher_head)
            return function(student, teacher, *student.split_tiles(hidden, teacher_hidden, *values))

        if split.layout.single:
            return on_device(*arguments)
        specs = (split.tokens, split.head, split.tokens, teacher_split.head, *(split.tokens for _ in values))
        return split.layout.shard_map(on_device, specs, outputs(split))(*arguments)


def _teacher_logits(student: DeviceHead, teacher: DeviceHead, part: VocabPart) -> Callable[[Array], Array]:
    """Return a function from the teacher's hidden states of a tile to its logits, for the ids of a student's part.

    The teacher's kernel is gathered in this function, once for all tiles.
    """
    teacher = dataclasses.replace(teacher, parts=student.parts, width=student.width)
    teacher_part = teacher.part(part.number, teacher.gather_kernel(part.number))
    (kernel, _), (dimension, _) = teacher.form.kernels(teacher_part.head.kernel)
    return lambda hidden: teacher.form.logits(hidden, kernel, dimension, teacher_part.head.bias)


def _forward(heads: _Heads, hidden: Array, head: HeadWeights, teacher_hidden: Array, teacher_head: HeadWeights) -> Any:
    """Return four values per position: the divergence, the sum of its derivatives, and the two normalizers."""

    def on_device(student, teacher, hidden, teacher_hidden):
        no_targets = jnp.zeros((*hidden.shape[:-1], 0), jnp.int32)
        normalizer = student.sums(hidden, no_targets)[0].normalizer
        teacher_normalizer = teacher.sums(teacher_hidden, no_targets)[0].normalizer

        def prepare(part: VocabPart) -> Any:
            teacher_logits = _teacher_logits(student, teacher, part)

            def add_terms(logits, values, sums):
                teacher_hidden, normalizer, teacher_normalizer = values
                log_p = logits - normalizer[..., None]
                log_q = teacher_logits(teacher_hidden) - teacher_normalizer[..., None]
                terms = (part.without_repeated(x, 0.0) for x in heads.divergence.terms(log_p, log_q))
                return tuple(total + jnp.sum(x, axis=-1) for total, x in zip(sums, terms, strict=True))

            return add_terms

        values = (teacher_hidden, normalizer, teacher_normalizer)
        zeros = float32_zeros((normalizer, normalizer))
        sums = student.split.sum_over_ids(student.over_logits(hidden, values, prepare, zeros)[0])
        return jax.tree.map(student.join_tiles, (*sums, normalizer, teacher_normalizer))

    return heads.shard_map(on_device, lambda split: (split.tokens,) * 4, hidden, head, teacher_hidden, teacher_head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(heads: _Heads, *arguments: Any) -> Array:
    return _forward(heads, *arguments)[0]


def _forward_saved(heads: _Heads, *arguments: Any) -> Any:
    divergence, *saved = _forward(heads, *arguments)
    return divergence, (arguments, saved)


def _backward(heads: _Heads, saved: Any, cotangent: Array) -> Any:
    arguments, (derivative_sums, normalizer, teacher_normalizer) = saved

    def on_device(student, teacher, hidden, *values):
        def prepare(part: VocabPart) -> Any:
            teacher_logits = _teacher_logits(student, teacher, part)

            def logit_gradient(logits, values):
                """Compute `cotangent (d - p sum d)`, where d are the derivatives with respect to log-probs."""
                teacher_hidden, cotangent, derivative_sums, normalizer, teacher_normalizer = values
                log_p = logits - normalizer[..., None]
                log_q = teacher_logits(teacher_hidden) - teacher_normalizer[..., None]
                derivatives = heads.divergence.terms(log_p, log_q)[1]
                return cotangent[..., None] * (derivatives - jnp.exp(log_p) * derivative_sums[..., None])

            return logit_gradient

        to_hidden, to_head = student.gradients(hidden, values, prepare)
        return student.join_tiles(to_hidden), to_head

    values = (cotangent, derivative_sums, normalizer, teacher_normalizer)
    gradients = heads.shard_map(on_device, lambda split: (split.tokens, split.head_gradient), *arguments, *values)
    gradients = jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, arguments[:2])
    return *gradients, *jax.tree.map(jnp.zeros_like, arguments[2:])


_divergence.defvjp(_forward_saved, _backward)
