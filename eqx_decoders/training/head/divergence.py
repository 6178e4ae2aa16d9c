"""Divergence between a model's distribution and a teacher's: of two heads, tile by tile, or of a teacher's top ids."""

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
    """Kind of divergence of a student p from a teacher q.

    **Arguments:**

    - `kind`: `"forward"`, `sum q (log q - log p)`; `"reverse"`, `sum p (log p - log q)`; `"jsd"`,
        `beta KL(q | m) + (1 - beta) KL(p | m)` with `m = beta q + (1 - beta) p` (GKD, Agarwal et al. 2024).
    - `beta`: of `"jsd"`, between 0 and 1.
    - `scaled`: divide `"jsd"` by `beta (1 - beta)`: then its limits for beta towards 0 and 1 are the forward and the
        reverse divergence, and not 0.
    """

    kind: DivergenceKind = "forward"
    beta: float = 0.5
    scaled: bool = True

    def checked(self) -> "Divergence":
        """Raise ConfigError for an unknown kind and for a beta out of range."""
        check_option("Divergence.kind", self.kind, ("forward", "reverse", "jsd"))
        if self.kind == "jsd":
            check_number("Divergence.beta", self.beta, above=0.0)
            check(self.beta < 1, f"Divergence.beta={self.beta} must be below 1: use kind='reverse' for that limit.")
        return self

    def terms(self, log_p: Array, log_q: Array) -> tuple[Array, Array]:
        """Return the terms of the sum over ids, and their derivatives by `log_p`."""
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        if self.kind == "forward":
            return _product(q, log_q - log_p), -q
        if self.kind == "reverse":
            terms = _product(p, log_p - log_q)
            return terms, terms + p
        log_m = jnp.logaddexp(log_q + jnp.log(self.beta), log_p + jnp.log1p(-self.beta))
        scale = 1 / (self.beta * (1 - self.beta)) if self.scaled else 1.0
        to_p = scale * (1 - self.beta) * _product(p, log_p - log_m)
        # d/dlog p: through m both KLs give -(1 - beta) p, and log p itself + (1 - beta) p: they cancel
        return scale * self.beta * _product(q, log_q - log_m) + to_p, to_p


def _product(weight: Array, value: Array) -> Array:
    return jnp.where(weight > 0, weight * value, 0.0)


def top_divergence(
    log_probs: Float[Array, "*batch top"], teacher: Float[Array, "*batch top"], divergence: Divergence = Divergence()
) -> Float[Array, "*batch"]:
    """Compute the divergence over a teacher's likeliest ids and one cell for all others.

    `log_probs` are the student's of the same ids. The tail's cell, `log(1 - sum p)`, makes it a lower bound of the
    whole divergence, equal where there is a single other id; a sum of the ids alone would push mass anywhere.
    """
    divergence = divergence.checked()

    def with_tail(x: Array) -> Array:
        inside = jnp.minimum(jax.nn.logsumexp(x, axis=-1, keepdims=True), -1e-7)
        return jnp.concatenate([x, log1mexp(inside)], axis=-1)

    return jnp.sum(_terms(divergence, with_tail(log_probs), lax.stop_gradient(with_tail(teacher))), axis=-1)


def log1mexp(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute `log(1 - exp(x))` for `x < 0` without cancellation (Mächler 2012)."""
    near = x > -0.6931472
    first = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
    return jnp.where(near, first, jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _terms(divergence: Divergence, log_p: Array, log_q: Array) -> Array:
    return divergence.terms(log_p, log_q)[0]


@_terms.defjvp
def _terms_jvp(divergence: Divergence, values: Any, tangents: Any) -> Any:
    terms, slopes = divergence.terms(*values)
    return terms, slopes * tangents[0]  # none to the teacher


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
    """Compute the divergence at each position of two models with one vocabulary, a tile of positions at a time.

    The forms' temperatures soften both; where that is `T`, multiply by `T^2` to keep the size of gradients (Hinton et
    al. 2015). Gradients go to `hidden` and `head` alone. Neither model's logits are ever held for all positions; the
    gradient computes both again: two products of the teacher's and four of the student's.

    Raises ConfigError for heads of different vocabularies.
    """
    form.check_kernel("linear_divergence", hidden, head.kernel)
    teacher_form.check_kernel("linear_divergence teacher", teacher_hidden, teacher_head.kernel)
    ids = head.kernel.shape[0 if form.tied else 1], teacher_head.kernel.shape[0 if teacher_form.tied else 1]
    rule = f"linear_divergence: a student with {ids[0]} ids and a teacher with {ids[1]} have no common vocabulary:"
    check(ids[0] == ids[1], f"{rule} cut both kernels to the ids that both mean.")
    sizes = hidden.shape[2], teacher_hidden.shape[2]
    most = form.tiles.head_bytes  # of both heads together
    most = None if most is None else max(1, most * sizes[0] // sum(sizes))
    form = dataclasses.replace(form, tiles=form.tiles._replace(head_bytes=most))
    forms = _Forms(form, teacher_form, divergence.checked())
    return _divergence(forms, hidden, head, *lax.stop_gradient((teacher_hidden, teacher_head)))


class _Forms(NamedTuple):
    student: HeadForm
    teacher: HeadForm
    divergence: Divergence

    def mapped(self, function: Callable[..., Any], outputs: Callable[[HeadSplit], Any], *arguments: Any) -> Any:
        """Map `function(student, teacher, hidden, teacher_hidden, *of tokens)`, heads and tiles, over the devices."""
        hidden, head, teacher_hidden, teacher_head, *others = arguments
        split = self.student.split(hidden, head.kernel)
        teachers_split = self.teacher.split(teacher_hidden, teacher_head.kernel)
        teachers_form = dataclasses.replace(self.teacher, tiles=self.student.tiles)

        def on_device(hidden, head, teacher_hidden, teacher_head, *others):
            student = DeviceHead.create(self.student, split, hidden, head)
            teacher = DeviceHead.create(teachers_form, teachers_split, teacher_hidden, teacher_head)
            return function(student, teacher, *student.split_tiles(hidden, teacher_hidden, *others))

        if split.layout.single:
            return on_device(*arguments)
        specs = (split.tokens, split.head, split.tokens, teachers_split.head, *(split.tokens for _ in others))
        return split.layout.shard_map(on_device, specs, outputs(split))(*arguments)


def _teachers_logits(student: DeviceHead, teacher: DeviceHead, part: VocabPart) -> Callable[[Array], Array]:
    """Gather the teacher's features of a student's part, now; return the map from a tile of its hidden states."""
    teacher = dataclasses.replace(teacher, parts=student.parts, width=student.width)
    ids = teacher.part(part.number, teacher.gather_kernel(part.number))
    (kernel, _), (dimension, _) = teacher.form.kernels(ids.head.kernel)
    return lambda hidden: teacher.form.logits(hidden, kernel, dimension, ids.head.bias)


def _forward(forms: _Forms, hidden: Array, head: HeadWeights, teacher_hidden: Array, teacher_head: HeadWeights) -> Any:
    """Return divergence, sum of its slopes, and both normalizers."""

    def on_device(student, teacher, hidden, teacher_hidden):
        none = jnp.zeros((*hidden.shape[:-1], 0), jnp.int32)
        normalizers = tuple(
            head.sums(tiles, none)[0].normalizer for head, tiles in ((student, hidden), (teacher, teacher_hidden))
        )

        def prepare(part: VocabPart) -> Any:
            teachers = _teachers_logits(student, teacher, part)

            def step(logits, values, before):
                logits = logits, teachers(values[0])
                log_probs = (x - normalizer[..., None] for x, normalizer in zip(logits, values[1], strict=True))
                terms = (part.without_repeated(x, 0.0) for x in forms.divergence.terms(*log_probs))
                return tuple(each + jnp.sum(x, axis=-1) for each, x in zip(before, terms, strict=True))

            return step

        begin = float32_zeros((normalizers[0], normalizers[0]))
        sums = student.over_logits(hidden, (teacher_hidden, normalizers), prepare, begin)[0]
        return jax.tree.map(student.join_tiles, (*student.split.sum_over_ids(sums), *normalizers))

    return forms.mapped(on_device, lambda split: (split.tokens,) * 4, hidden, head, teacher_hidden, teacher_head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(forms: _Forms, *arguments: Any) -> Array:
    return _forward(forms, *arguments)[0]


def _forward_saved(forms: _Forms, *arguments: Any) -> Any:
    found, *rest = _forward(forms, *arguments)
    return found, (arguments, rest)


def _backward(forms: _Forms, saved: Any, cotangent: Array) -> Any:
    arguments, (slopes, *normalizers) = saved

    def on_device(student, teacher, hidden, *values):
        def prepare(part: VocabPart) -> Any:
            teachers = _teachers_logits(student, teacher, part)

            def by_logits(logits, values):
                """Compute `cotangent (f' - p sum f')`, f' being the slopes by log-probs."""
                teacher_hidden, cotangent, sums, normalizer, teachers_normalizer = values
                log_p = logits - normalizer[..., None]
                log_q = teachers(teacher_hidden) - teachers_normalizer[..., None]
                slopes = forms.divergence.terms(log_p, log_q)[1]
                return cotangent[..., None] * (slopes - jnp.exp(log_p) * sums[..., None])

            return by_logits

        to_hidden, to_head = student.gradients(hidden, values, prepare)
        return student.join_tiles(to_hidden), to_head

    values = (cotangent, slopes, *normalizers)
    slopes = forms.mapped(on_device, lambda split: (split.tokens, split.head_gradient), *arguments, *values)
    slopes = jax.tree.map(lambda x, like: x.astype(like.dtype), slopes, arguments[:2])
    return *slopes, *jax.tree.map(jnp.zeros_like, arguments[2:])


_divergence.defvjp(_forward_saved, _backward)
