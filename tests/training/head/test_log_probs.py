"""Test that log-probs, entropies and divergences of the fused head equal those computed from all logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.divergence import Divergence, linear_divergence, log1mexp, top_divergence
from eqx_decoders.training.head.head_tiles import HeadForm, HeadTiles
from eqx_decoders.training.head.log_probs import LogProbs, linear_log_probs
from eqx_decoders.training.head.vocab_parallel import HeadWeights
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.training.head.test_cross_entropy import EMBED, FEW, PARTS, REST, VOCAB, after, make


def logits_of(hidden, head, *, tied, soft_cap=None, temperature=1.0):
    logits = hidden.astype(jnp.float32) @ (head.kernel.T if tied else head.kernel).astype(jnp.float32)
    logits = logits if head.bias is None else logits + head.bias[None, None]
    return (logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)) / temperature


def plain(hidden, head, targets, **options):
    logits = logits_of(hidden, head, **options)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    ids = targets if targets.ndim == 3 else targets[..., None]
    picked = jnp.take_along_axis(log_p, ids, axis=-1)
    top = (jnp.take_along_axis(logits, ids, axis=-1) >= jnp.max(logits, axis=-1, keepdims=True)).astype(jnp.float32)
    if targets.ndim == 2:
        picked, top = picked[..., 0], top[..., 0]
    return LogProbs(picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), jax.nn.logsumexp(logits, axis=-1), top)


def value_and_gradients(function, weights):
    """Return all outputs, and the gradients of a weighted sum of the outputs."""

    def loss(hidden, head):
        found = function(hidden, head)
        return sum(jnp.sum(w * x) for w, x in zip(weights, found[:3], strict=True)), found

    return lambda *arguments: jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments)


ALL = {"soft_cap": 3.0, "temperature": 0.7}


@pytest.mark.slow(fast=("False-True-False-soft_cap=3.0 temperature=0.7",))
@pytest.mark.parametrize(
    ("tied", "biased", "several", "options"),
    [
        (False, True, False, ALL),
        (True, False, True, ALL),
        (True, True, False, {}),
        (False, False, True, {}),
    ],
)
def test_fused_log_probs_equal_plain_log_probs(tied, biased, several, options):
    hidden, head, targets, _ = make(tied, biased=biased)
    draws = np.random.default_rng(2)
    if several:  # a repeated target has two cotangents
        more = jnp.asarray(draws.integers(0, VOCAB, (*targets.shape, 3)), jnp.int32)
        targets = jnp.concatenate([targets[..., None], more, targets[..., None]], axis=-1)
    shapes = targets.shape, targets.shape[:2], targets.shape[:2]
    weights = [jnp.asarray(draws.standard_normal(shape), jnp.float32) for shape in shapes]

    @jax.jit
    def run(hidden, head):
        forms = [dict(flatten=flatten, tiles=HeadTiles(tile)) for flatten in (False, True) for tile in (None, 3)]
        fused = [
            value_and_gradients(
                lambda *a, form=form: linear_log_probs(*a, targets, tied=tied, **options, **form), weights
            )(hidden, head)
            for form in forms
        ]
        return value_and_gradients(lambda *a: plain(*a, targets, tied=tied, **options), weights)(hidden, head), fused

    expected, fused = run(hidden, head)
    for form in fused:
        assert_close(form, expected, units=256)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "tied"), [*FEW, *REST])
def test_fused_log_probs_on_a_mesh(mesh, tied):
    """Cases: log-probs of one or several targets, and divergences, with the vocabulary at once or in parts."""
    draws = np.random.default_rng(0)
    vocab, layout = 600, Layout.create(**mesh)

    def head_of(size):
        hidden = jnp.asarray(draws.standard_normal((8, 8, size)), jnp.float32)
        kernel = jnp.asarray(draws.standard_normal((vocab, size) if tied else (size, vocab)), jnp.float32)
        return hidden, HeadWeights(kernel, jnp.asarray(draws.standard_normal(vocab), jnp.float32))

    (hidden, head), (teacher_hidden, teacher_head) = head_of(EMBED), head_of(2 * EMBED)
    targets = jnp.asarray(draws.integers(0, vocab, (8, 8, 3)), jnp.int32)
    shapes = targets.shape, targets.shape[:2], targets.shape[:2]
    weights = [jnp.asarray(draws.standard_normal(shape), jnp.float32) for shape in shapes]

    def run(layout, *bytes_of_parts):
        def one(head_bytes):
            form = HeadForm(tied=tied, **ALL, layout=layout, tiles=HeadTiles(3, head_bytes))
            options = dict(tied=tied, **ALL, layout=layout, tiles=form.tiles)
            teacher = dataclasses.replace(form, soft_cap=None)

            def divergence(hidden, head):
                rest = (teacher_hidden, teacher_head)
                forms = dict(form=form, teacher_form=teacher)
                return jnp.sum(weights[1] * linear_divergence(hidden, head, *rest, **forms, divergence=JSD))

            log_probs = value_and_gradients(lambda *a: linear_log_probs(*a, targets, **options), weights)
            found = log_probs(hidden, head)
            return found, jax.value_and_grad(divergence, (0, 1))(after(hidden, found), head)

        return [jax.jit(one, static_argnums=0)(each) for each in bytes_of_parts]

    (want,) = run(Layout(), None)
    for got in run(layout, None, PARTS):
        assert_close(got, want, units=256)


JSD = Divergence("jsd", beta=0.3)
KINDS = [Divergence("forward"), Divergence("reverse"), JSD, Divergence("jsd", beta=0.9, scaled=False)]


def written_out(log_p, log_q, divergence):
    p, q, beta = jnp.exp(log_p), jnp.exp(log_q), divergence.beta
    kl = lambda x, y: jnp.sum(jnp.exp(x) * (x - y), axis=-1)  # noqa: E731
    if divergence.kind == "forward":
        return kl(log_q, log_p)
    if divergence.kind == "reverse":
        return kl(log_p, log_q)
    log_m = jnp.log(beta * q + (1 - beta) * p)
    found = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    return found / (beta * (1 - beta)) if divergence.scaled else found


@pytest.mark.slow
def test_divergences_of_two_heads():
    """The heads differ in kind and width, and only the teacher has a logit soft cap. The temperature is not 1."""
    (hidden, head, _, weights), draws = make(True, biased=True), np.random.default_rng(3)
    teacher_hidden = jnp.asarray(draws.standard_normal((*hidden.shape[:2], 5)), jnp.float32)
    teacher_head = HeadWeights(jnp.asarray(draws.standard_normal((5, VOCAB)), jnp.float32))
    forms = {"form": dict(tied=True, temperature=2.0), "teacher_form": dict(tied=False, temperature=2.0, soft_cap=2.0)}

    @jax.jit
    def run(hidden, head):
        def fused(hidden, head, kind):
            heads = {name: HeadForm(**options, tiles=HeadTiles(3)) for name, options in forms.items()}
            found = linear_divergence(hidden, head, teacher_hidden, teacher_head, **heads, divergence=kind)
            return jnp.sum(weights * found)

        def plain(hidden, head, kind):
            log_p = jax.nn.log_softmax(logits_of(hidden, head, **forms["form"]))
            log_q = jax.nn.log_softmax(logits_of(teacher_hidden, teacher_head, **forms["teacher_form"]))
            return jnp.sum(weights * written_out(log_p, log_q, kind))

        each = [[jax.value_and_grad(f, (0, 1))(hidden, head, kind) for kind in KINDS] for f in (fused, plain)]
        to_teacher = jax.grad(lambda x: fused_of_teacher(x, hidden, head))(teacher_hidden)
        return each, to_teacher

    def fused_of_teacher(x, hidden, head):
        heads = {name: HeadForm(**options) for name, options in forms.items()}
        return jnp.sum(linear_divergence(hidden, head, x, teacher_head, **heads))

    (fused, plain), to_teacher = run(hidden, head)
    assert_close(fused, plain, units=512)
    assert not np.any(to_teacher)


# Logits of student and teacher; value and gradient with respect to the student logits, averaged over two positions.
STUDENT, TEACHER = [[0.2, -0.1, 0.4], [1.0, 0.0, -1.0]], [[0.0, 0.3, -0.2], [0.5, 0.5, -0.5]]
GOLDEN = [
    ("forward", 1, 1, 0.104098, [[0.010993, -0.087962, 0.076969], [0.121461, -0.088795, -0.032666]]),
    ("reverse", 1, 1, 0.100927, [[-0.002511, -0.076887, 0.079398], [0.111348, -0.081402, -0.029946]]),
    ("forward", 2, 4, 0.103302, [[0.011082, -0.088655, 0.077573], [0.122829, -0.076456, -0.046373]]),
    ("reverse", 2, 4, 0.103749, [[0.004227, -0.083423, 0.079197], [0.124979, -0.077794, -0.047185]]),
    (
        Divergence("jsd", 0.5, False),
        1,
        1,
        0.025359,
        [[0.001022, -0.020156, 0.019134], [0.028459, -0.020805, -0.007654]],
    ),
    (Divergence("jsd", 0.1, False), 1, 1, 0.009303, None),
    (Divergence("jsd", 0.9, False), 1, 1, 0.009078, None),
    (Divergence("jsd", 0.1), 1, 1, 0.103372, None),
    (Divergence("jsd", 0.5), 1, 1, 0.101438, None),
    (Divergence("jsd", 0.9), 1, 1, 0.100867, None),
]


def test_divergences_equal_golden_values():
    """The head is the identity, so that hidden states are logits."""
    student, teacher = jnp.asarray([STUDENT], jnp.float32), jnp.asarray([TEACHER], jnp.float32)
    head = HeadWeights(jnp.eye(3))

    def run(x, kind, temperature, scale):
        form = HeadForm(tied=False, temperature=float(temperature))
        kind = Divergence(kind) if isinstance(kind, str) else kind
        return scale * jnp.mean(
            linear_divergence(x, head, teacher, head, form=form, teacher_form=form, divergence=kind)
        )

    rows = [row[:3] for row in GOLDEN]
    found = jax.jit(lambda x: [jax.value_and_grad(run)(x, *row) for row in rows])(student)
    for (*_, value, gradient), (got, by_logits) in zip(GOLDEN, found, strict=True):
        assert_allclose(got, value, rtol=0, atol=1e-6)
        if gradient is not None:
            assert_allclose(by_logits[0], gradient, rtol=0, atol=1e-6)
    found = linear_log_probs(student, head, jnp.asarray([[2, 0]]), tied=False)
    assert_allclose(found.entropy[0], [1.078501, 0.832396], rtol=0, atol=1e-6)
    assert_allclose(found.log_probs[0], [-0.885939, -0.407606], rtol=0, atol=1e-6)
    assert_array_equal(found.top[0], [1, 1])


@pytest.mark.slow
def test_divergence_of_top_tokens_and_remaining_mass():
    """Two of three ids give the exact divergence, and three of many ids a lower bound.

    Teacher probabilities of exactly 1 give no NaN.
    """
    student, teacher = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (STUDENT, TEACHER))
    ids = jnp.argsort(-teacher, axis=-1)[:, :2]

    def loss(logits):
        mine = jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=-1)
        return jnp.mean(top_divergence(mine, jnp.take_along_axis(teacher, ids, axis=-1)))

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(STUDENT, jnp.float32))
    assert_allclose(value, 0.104098, rtol=0, atol=2e-6)
    assert_allclose(gradient, GOLDEN[0][4], rtol=0, atol=2e-6)
    whole = float(jnp.mean(written_out(student, teacher, KINDS[0])))
    assert 0 < float(jnp.mean(top_divergence(student[:, :1], teacher[:, :1]))) < whole
    certain = jnp.log(jnp.asarray([[1.0, 1e-30]]))
    assert np.isfinite(jax.grad(lambda x: jnp.sum(top_divergence(x, certain)))(certain)).all()
    near = jnp.asarray([-1e-6, -0.5, -1.0, -6.0])
    assert_allclose(log1mexp(near), np.log(-np.expm1(np.asarray(near, np.float64))), rtol=1e-5)


def test_logits_are_computed_in_tiles():
    hidden, head, targets, _ = make(False, batch=2, length=64, biased=True)

    def loss(hidden, head):
        options = dict(tied=False, tiles=HeadTiles(8))
        form = HeadForm(**options)
        other = linear_divergence(hidden, head, hidden, head, form=form, teacher_form=form)
        return jnp.sum(linear_log_probs(hidden, head, targets, **options).log_probs) + jnp.sum(other)

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, head))
    assert f"f32[2,8,{VOCAB}]" in text and f"f32[2,64,{VOCAB}]" not in text and f",2,8,{VOCAB}]" not in text


@pytest.mark.slow
def test_targets_outside_and_large_logits():
    hidden, head, targets, _ = make(False)
    found = linear_log_probs(1e4 * hidden, head, targets.at[0, 0].set(VOCAB).at[0, 1].set(-1), tied=False)
    assert np.isnan(found.log_probs[0, :2]).all() and np.isfinite(found.log_probs[1]).all()
    assert np.isfinite(found.entropy).all() and (np.asarray(found.entropy) >= 0).all()
    assert (np.asarray(found.log_probs[1]) <= 0).all()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        pytest.param(
            lambda a: linear_log_probs(*a, tied=False, temperature=0.0), ["temperature=0.0"], id="temperature"
        ),
        pytest.param(lambda a: linear_log_probs(*a, tied=True), ["tied=True"], id="tied"),
        pytest.param(
            lambda a: linear_divergence(*a[:2], *a[:2], **FORMS, divergence=Divergence("other")),
            ["Divergence.kind='other'", "jsd"],
            id="kind",
        ),
        pytest.param(
            lambda a: linear_divergence(*a[:2], *a[:2], **FORMS, divergence=Divergence("jsd", beta=1.0)),
            ["Divergence.beta=1.0", "kind='reverse'"],
            id="beta",
        ),
        pytest.param(
            lambda a: linear_divergence(*a[:2], a[0], HeadWeights(jnp.zeros((EMBED, 3))), **FORMS),
            ["linear_divergence", "3"],
            id="vocabulary",
        ),
    ],
)
def test_bad_options_are_refused(call, names):
    with refused(ConfigError, *names):
        call(make(False)[:3])


FORMS = {name: HeadForm(tied=False) for name in ("form", "teacher_form")}
