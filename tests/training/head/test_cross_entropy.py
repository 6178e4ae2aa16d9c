"""Test that value and gradients of the fused loss equal the plain loss, for any tile, form and cotangent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.cross_entropy import (
    HeadTiles,
    cross_entropy,
    linear_argmax,
    linear_cross_entropy,
)
from eqx_decoders.training.head.head_tiles import tile_length
from eqx_decoders.training.head.log_probs import linear_log_probs
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused


BATCH, LENGTH, EMBED, VOCAB = 2, 7, 8, 19


def make(tied, dtype="float32", kernel_dtype="float32", batch=BATCH, length=LENGTH, biased=False):
    draws = np.random.default_rng(0)
    hidden = jnp.asarray(draws.standard_normal((batch, length, EMBED)), dtype)
    kernel = jnp.asarray(draws.standard_normal((VOCAB, EMBED) if tied else (EMBED, VOCAB)), kernel_dtype)
    targets = draws.integers(0, VOCAB, (batch, length))
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(VOCAB), kernel_dtype) if biased else None
    best = np.argmax(exact_logits(hidden, HeadWeights(kernel, bias), tied), axis=-1)
    targets[:, :2] = best[:, :2]  # some targets have the highest logit
    weights = np.where(draws.random((batch, length)) < 0.3, 0.0, 1.5)
    return hidden, HeadWeights(kernel, bias), jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32)


def exact_logits(hidden, head, tied):
    kernel = np.asarray(head.kernel.T if tied else head.kernel, np.float64)
    return np.asarray(hidden, np.float64) @ kernel + (0.0 if head.bias is None else np.asarray(head.bias, np.float64))


def plain(hidden, head, targets, weights, *, tied, soft_cap=None, z_loss=0.0):
    kernel = head.kernel.astype(hidden.dtype)
    pattern = "bld,vd->blv" if tied else "bld,dv->blv"
    logits = jnp.einsum(pattern, hidden, kernel, preferred_element_type=jnp.float32)
    if head.bias is not None:
        logits = logits + head.bias.astype(jnp.float32)[None, None]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    nll = cross_entropy(logits, targets)
    correct = jnp.argmax(logits, axis=-1) == targets
    loss = jnp.sum(weights * cross_entropy(logits, targets, z_loss=z_loss))
    return loss, (jnp.sum(weights * nll), jnp.sum(jnp.where(correct, weights, 0.0)))


def both(loss, *arguments):
    return jax.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True)(*arguments)


def expected_of(arguments, **options):
    value, (hidden, head, weights) = both(lambda *a: plain(*a, **options), *arguments)
    return value, (hidden, head, jnp.where(arguments[3] == 0, 0.0, weights))  # tokens of weight zero have no gradient


ALL = {"soft_cap": 3.0, "z_loss": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "biased", "options"),
    [
        (False, False, {}),
        (False, True, ALL),
        (True, False, ALL),
        (True, True, {}),
    ],
)
def test_fused_loss_equals_plain_loss(tied, biased, options):
    arguments = make(tied, biased=biased)
    forms = [(flatten, tile) for flatten in (False, True) for tile in (None, 3)] + [(True, 1)]

    @jax.jit
    def run(*arguments):
        fused = [
            both(
                lambda *a, f=f, t=t: linear_cross_entropy(*a, tied=tied, flatten=f, tiles=HeadTiles(t), **options),
                *arguments,
            )
            for f, t in forms
        ]
        undifferentiated = linear_cross_entropy(*arguments, tied=tied, tiles=HeadTiles(2), **options)
        return expected_of(arguments, tied=tied, **options), undifferentiated, fused

    expected, undifferentiated, fused = run(*arguments)
    assert expected[0][1][1] > 0
    for a, b in zip(jax.tree.leaves(undifferentiated), jax.tree.leaves(expected[0]), strict=True):
        assert_close(a, b, units=128)
    for form in fused:
        for a, b in zip(jax.tree.leaves(form), jax.tree.leaves(expected), strict=True):
            assert_close(a, b, units=128)


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "kernel_dtype"), [(False, "float32"), (True, "bfloat16")])
def test_fused_loss_in_bfloat16(tied, kernel_dtype):
    arguments = make(tied, "bfloat16", kernel_dtype, biased=tied)
    rounded = HeadWeights(arguments[1].kernel.astype(jnp.bfloat16), arguments[1].bias)
    exact = (*jax.tree.map(lambda x: x.astype(jnp.float32), (arguments[0], rounded)), *arguments[2:])

    @jax.jit
    def run(arguments, exact):
        fused = [
            both(
                lambda *a, f=f: linear_cross_entropy(*a, tied=tied, flatten=f, tiles=HeadTiles(3), z_loss=0.01),
                *arguments,
            )
            for f in (False, True)
        ]
        return expected_of(exact, tied=tied, z_loss=0.01), fused

    expected, fused = run(arguments, exact)
    for (loss, sums), gradients in fused:
        assert_close(loss, expected[0][0], units=128)  # products of 16-bit operands are exact in f32
        assert_close(sums.nll, expected[0][1][0], units=128)
        likes = jax.tree.leaves((arguments[0], arguments[1], arguments[3]))
        for a, b, like in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), likes, strict=True):
            assert a.dtype == like.dtype
            assert_close(a.astype(jnp.float32), b, units=2, dtype="bfloat16")


@pytest.mark.slow
def test_cotangent_scales_all_gradients():
    """Gradient accumulation scales the loss. The custom VJP must scale the gradients of all inputs."""
    hidden, head, targets, weights = make(False, batch=4, biased=True)
    weights = weights.at[0].multiply(0.5)

    def through_scan(loss):
        def total(hidden, head):
            def step(total, micro):
                hidden, targets, weights = micro
                return total + 1024.0 * loss(hidden, head, targets, weights)[0] / jnp.sum(weights), None

            micros = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (hidden, targets, weights))
            return jax.lax.scan(step, jnp.zeros(()), micros)[0]

        return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)

    fused, expected = jax.jit(
        lambda: (
            through_scan(lambda *a: linear_cross_entropy(*a, tied=False, flatten=True, tiles=HeadTiles(4))),
            through_scan(lambda *a: plain(*a, tied=False)),
        )
    )()
    assert_close(fused, expected, units=128)
    assert jnp.abs(fused[1][0]).max() > 10  # the gradient is scaled


@pytest.mark.slow
def test_reported_sums_carry_no_gradient():
    hidden, head, targets, weights = make(False)
    gradient = jax.grad(lambda h: linear_cross_entropy(h, head, targets, weights, tied=False)[1].nll)(hidden)
    assert not gradient.any()


@pytest.mark.slow(fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_of_batches_without_targets(dtype):
    hidden, head, targets, _ = make(False, dtype, biased=True)
    nothing = jnp.zeros((BATCH, LENGTH))
    targets = targets.at[0].set(-100)
    (loss, sums), gradients = jax.jit(
        lambda *a: both(
            lambda *a: linear_cross_entropy(*a, tied=False, flatten=True, tiles=HeadTiles(3), z_loss=0.1), *a
        )
    )(100 * hidden, head, targets, nothing)
    assert loss == 0 and sums.nll == 0 and sums.correct == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients[:2])) and jnp.isfinite(gradients[2]).all()


@pytest.mark.slow
def test_targets_outside_the_vocabulary():
    hidden, head, targets, _ = make(False)
    ones = jnp.ones((BATCH, LENGTH))
    masked = ones.at[0, 2].set(0.0)

    @jax.jit
    def loss(targets, weights):
        return linear_cross_entropy(hidden, head, targets, weights, tied=False)[0]

    for wrong in (-1, VOCAB):
        marked = targets.at[0, 2].set(wrong)
        assert jnp.isnan(loss(marked, ones)) and loss(marked, masked) == loss(targets, masked)
        assert jnp.isnan(cross_entropy(jnp.ones((BATCH, LENGTH, VOCAB)), marked)[0, 2])


@pytest.mark.slow(fast=("10000.0",))
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_stay_finite(size):
    _, head, targets, weights = make(False)
    hidden = jnp.full((BATCH, LENGTH, EMBED), size)
    run = jax.jit(lambda *a: both(lambda *a: linear_cross_entropy(*a, tied=False, flatten=True), *a))
    (loss, _), gradients = run(hidden, head, targets, weights)
    assert jnp.isfinite(loss) and all(jnp.isfinite(each).all() for each in jax.tree.leaves(gradients))


@pytest.mark.slow(fast=("2,0",))
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (1, 1)])
def test_empty_and_single_token_batches(shape):
    hidden, head, targets, _ = make(False, batch=shape[0], length=shape[1], biased=True)
    arguments = hidden, head, targets, jnp.ones(shape)

    @jax.jit
    def run(*arguments):
        fused = [
            both(lambda *a, f=f: linear_cross_entropy(*a, tied=False, flatten=f), *arguments) for f in (False, True)
        ]
        return expected_of(arguments, tied=False), fused

    expected, fused = run(*arguments)
    for each in fused:
        assert_close(jax.tree.leaves(each), jax.tree.leaves(expected), units=128)


def after(x, *results):
    """Make everything computed from `x` wait for `results`: concurrent loops with collectives deadlock on XLA:CPU."""
    return x + 0 * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(results))


MESHES = [
    dict(fsdp=4, tensor=2),
    dict(context=2, fsdp=2, tensor=2),
    dict(data=2, expert=2, tensor_sequence=2),
    dict(fsdp_transpose=2, stage=2, context=2),
    dict(data=8),
]
PARTS = 128 * EMBED * 12  # kernels and gradient of 128 token ids: a few parts; the last one overlaps its predecessor


# both cases of the most common mesh, and one case of a mesh that shards sequences
FEW = [(MESHES[0], False), (MESHES[0], True), (MESHES[1], False)]
REST = [(mesh, tied) for mesh in MESHES for tied in (False, True) if (mesh, tied) not in FEW]


@pytest.mark.slow(fast=("fsdp=4 tensor=2-False",))
@pytest.mark.parametrize(("mesh", "tied"), [*FEW, *REST])
def test_fused_loss_on_a_mesh(mesh, tied, monkeypatch):
    """Losses, gradients and predictions equal those of one device.

    Cases: the vocabulary at once or in parts, and gradients summed by XLA or (if tied) in rings.
    """
    draws = np.random.default_rng(0)
    vocab, layout = 600, Layout.create(**mesh)
    backend = dataclasses.replace(layout.backend, gradient_rings=tied)
    monkeypatch.setattr(Layout, "backend", property(lambda self: backend))
    hidden = jnp.asarray(draws.standard_normal((8, LENGTH + 1, EMBED)), jnp.float32)
    kernel = jnp.asarray(draws.standard_normal((vocab, EMBED) if tied else (EMBED, vocab)), jnp.float32)
    head = HeadWeights(kernel, jnp.asarray(draws.standard_normal(vocab), jnp.float32))
    targets = jnp.asarray(draws.integers(0, vocab, hidden.shape[:2]), jnp.int32)
    weights = jnp.asarray(draws.random(hidden.shape[:2]), jnp.float32)

    def run(form, **options):
        def one(head_bytes=None, **options):
            tiles = HeadTiles(3, head_bytes)
            fused = lambda *a: linear_cross_entropy(*a, tied=tied, tiles=tiles, **ALL, **options)  # noqa: E731
            arguments = hidden, head, targets, weights
            whole = HeadTiles(head_bytes=head_bytes)
            differentiated = both(fused, *arguments)
            sums = fused(after(hidden, differentiated), *arguments[1:])
            likeliest = linear_argmax(after(hidden, sums), head, tied=tied, tiles=whole, **options)
            return differentiated, sums, likeliest

        return [jax.jit(lambda: one(**options, **each))() for each in form]  # noqa: B023

    (want,) = run([{}])
    for got in run([{"head_bytes": 8 * kernel.size} if tied else {}, {"head_bytes": PARTS}], layout=layout):
        assert_close(got[:2], want[:2], units=128)
        assert_array_equal(got[2], want[2])


@pytest.mark.parametrize("rings", [False, True])
def test_any_positive_memory_bound_is_accepted(rings, monkeypatch):
    """Gradient rings compare gradients with half of the bound; half of 1 byte must not be rounded down to 0."""
    layout = Layout.create(fsdp=8)
    backend = dataclasses.replace(layout.backend, gradient_rings=rings)
    monkeypatch.setattr(Layout, "backend", property(lambda self: backend))
    hidden, kernel = jnp.ones((8, 4, 16)), jnp.ones((16, 32))

    def gradient(head_bytes):
        def loss(kernel):
            targets = jnp.zeros((8, 4), jnp.int32), jnp.ones((8, 4))
            tiles = HeadTiles(head_bytes=head_bytes)
            head = HeadWeights(kernel)
            return linear_cross_entropy(hidden, head, *targets, tied=False, tiles=tiles, layout=layout)[0]

        return jax.eval_shape(jax.grad(loss), kernel)

    assert all(gradient(head_bytes).shape == kernel.shape for head_bytes in (1, 2, 3, None))


@pytest.mark.parametrize(("rings", "bound", "ordered"), [(True, 15, True), (True, 16, False), (False, 15, False)])
def test_large_head_gradient_is_summed_before_the_backward_pass(rings, bound, ordered, monkeypatch):
    layout = Layout.create(fsdp=8)
    backend = dataclasses.replace(layout.backend, gradient_rings=rings)
    monkeypatch.setattr(Layout, "backend", property(lambda self: backend))
    kernel, hidden = jnp.ones((EMBED, 600)), jnp.ones((8, LENGTH, EMBED))
    tiles = HeadTiles(3, bound * kernel.size)

    def loss(hidden, kernel):
        targets = jnp.zeros(hidden.shape[:2], jnp.int32), jnp.ones(hidden.shape[:2])
        return linear_cross_entropy(hidden, HeadWeights(kernel), *targets, tied=False, tiles=tiles, layout=layout)[0]

    assert ("optimization_barrier" in str(jax.make_jaxpr(jax.grad(loss))(hidden, kernel))) == ordered


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_between_devices_are_rounded_to_16_bits(dtype):
    """The rounding error of bfloat16 is 0.3 % on average. Sums that overflow float16 are computed in float32."""
    draws = np.random.default_rng(0)
    hidden = jnp.asarray(draws.random((8, 4, EMBED)), dtype)
    kernel, targets = jnp.zeros((EMBED, 64)), jnp.full((8, 4), 7)
    weights = jnp.full((8, 4), 65504.0)

    def gradient(layout):
        def loss(kernel):
            head = HeadWeights(kernel)
            return linear_cross_entropy(hidden, head, targets, weights, tied=False, layout=layout)[0] / 65504 / 32

        return jax.jit(jax.grad(loss))(kernel)

    want, got = gradient(None), gradient(Layout.create(fsdp=8))
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert 1e-4 < error < 1e-2 if dtype == "bfloat16" else error < 1e-3


def bodies(equation):
    """Yield the jaxprs nested in an equation."""
    found = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [inner for inner in (getattr(each, "jaxpr", each) for each in found) if hasattr(inner, "eqns")]


def collectives(jaxpr, within=()):
    """Yield (primitive, enclosing loops) of all collectives over named axes."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("all_gather", "reduce_scatter") or (name.startswith("psum") and equation.invars[0].aval.ndim > 1):
            yield name, within
        for inner in bodies(equation):
            loop = (equation.params["length"],) if name == "scan" else ()
            yield from collectives(inner, within + loop)


@pytest.mark.parametrize("over_data", [False, True])
@pytest.mark.parametrize("head_bytes, parts", [(None, 1), (PARTS, 5)])
def test_head_is_gathered_once(head_bytes, parts, over_data):
    """The head is gathered before the tiles, and its gradient is reduced after the tiles.

    With parts, the gather of a part overlaps with the products of the previous part; the second pass starts with the
    last part of the first pass. The gradient is reduced once over replicas of the head (all-reduce or
    reduce-scatter).
    """
    layout, vocab = dataclasses.replace(Layout.create(data=2, fsdp=4), gradients_over_data=over_data), 600
    hidden, kernel = jnp.zeros((8, 32, EMBED)), jnp.zeros((EMBED, vocab))
    targets, weights = jnp.zeros((8, 32), jnp.int32), jnp.ones((8, 32))

    def loss(hidden, kernel):
        options = dict(tied=False, tiles=HeadTiles(4, head_bytes), layout=layout)
        return linear_cross_entropy(hidden, HeadWeights(kernel), targets, weights, **options)[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, kernel).jaxpr
    loops = [()] if parts == 1 else [(), (parts - 1,)]
    gathers = [("all_gather", loop) for loop in sorted(loops + loops[1:])]
    shared = sorted([("reduce_scatter" if over_data else "psum", ()), *(("reduce_scatter", loop) for loop in loops)])
    found = sorted((name.replace("psum_invariant", "psum"), within) for name, within in collectives(jaxpr))
    assert found == gathers + shared
    for body in loops_that_gather(jaxpr):
        behind = set()
        for equation in body.eqns:
            if equation.primitive.name == "all_gather" or behind & set(map(id, equation.invars)):
                assert equation.primitive.name != "scan", "tiles wait for what is gathered"
                behind |= set(map(id, equation.outvars))


def loops_that_gather(jaxpr):
    """Yield the bodies of loops that contain an all-gather of weights."""
    for equation in jaxpr.eqns:
        for inner in bodies(equation):
            if equation.primitive.name == "scan" and any(each.primitive.name == "all_gather" for each in inner.eqns):
                yield inner
            yield from loops_that_gather(inner)


@pytest.mark.parametrize(
    "most, want",
    [(None, (1, 600)), (600 * 96, (1, 600)), (600 * 96 - 1, (2, 384)), (300 * 128 - 1, (3, 256)), (1, (5, 128))],
)
def test_size_of_vocabulary_parts(most, want):
    """Two kernels in bfloat16 and one gradient in float32 fit into the bound, for 16 features."""
    split = HeadSplit.create(Layout.create(fsdp=8), False, (8, LENGTH, 16), (16, 600))
    assert split.parts(jnp.zeros((2, 600)), jnp.bfloat16, most) == want


def test_logits_are_computed_in_tiles():
    hidden, head, targets, weights = make(False, batch=2, length=64, biased=True)

    def loss(hidden, head):
        return linear_cross_entropy(hidden, head, targets, weights, tied=False, tiles=HeadTiles(8))[0]

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, head))
    assert f"f32[2,8,{VOCAB}]" in text and f"f32[2,64,{VOCAB}]" not in text and f",2,8,{VOCAB}]" not in text


def test_default_tile():
    cpu, tpu = backend_of("cpu"), backend_of("tpu")
    assert tile_length(2, 512, 32000, None, cpu) == 256  # two tiles of 65 MB
    assert tile_length(2, 512, 32000, 4096, cpu) == 512
    assert tile_length(512, 3, 10**6, None, cpu) == 3
    assert tile_length(1, 8192, 128_000, None, cpu) == 131 and tile_length(1, 8192, 128_000, None, tpu) == 512
    assert tile_length(64, 8192, 128_000, None, cpu) == 64  # at least 64 tokens, however large the batch is


@pytest.mark.slow
def test_argmax_equals_argmax_of_all_logits(monkeypatch):
    """Tiles need not divide the length. Ties are resolved to the lowest id."""
    backend = dataclasses.replace(backend_of("cpu"), loss_tile_bytes=4 * BATCH * VOCAB * 3)
    monkeypatch.setattr(Layout, "backend", backend)
    monkeypatch.setattr("eqx_decoders.training.head.head_tiles._TILE_LEAST", 1)
    assert tile_length(BATCH, LENGTH, VOCAB, None, backend) == 3
    for tied in (False, True):
        hidden, (kernel, bias), *_ = make(tied, biased=not tied)
        kernel = kernel.at[4 if tied else (slice(None), 4)].set(kernel[2] if tied else kernel[:, 2])
        head = HeadWeights(kernel, None if bias is None else bias.at[4].set(bias[2]))
        want = np.argmax(exact_logits(hidden, head, tied), axis=-1)
        for flatten in (False, True):
            found = linear_argmax(hidden, head, tied=tied, flatten=flatten)
            assert found.dtype == jnp.int32 and found.tolist() == want.tolist()


def with_ties(tied, vocab=24):
    """Return hidden states and a head of small integers, so that sums are exact and most highest logits are ties."""
    draws = np.random.default_rng(7)
    hidden = draws.integers(-1, 2, (8, 6, EMBED)).astype(np.float32)
    hidden[:, 0] = 0  # all logits are equal
    kernel = draws.integers(-1, 2, (vocab, EMBED)).astype(np.float32)
    kernel[vocab // 2 :] = kernel[: vocab // 2]  # each logit occurs twice
    head = HeadWeights(jnp.asarray(kernel if tied else kernel.T))
    best = np.argmax(exact_logits(hidden, head, tied), axis=-1)
    targets = np.where(draws.random(best.shape) < 0.5, best, best + vocab // 2)
    return jnp.asarray(hidden), head, jnp.asarray(targets, jnp.int32), best


@pytest.mark.slow(fast=("default-False-4,None", "tensor=4 fsdp=2-True-None,1"))
@pytest.mark.parametrize(
    ("mesh", "tied", "tiles"),
    [
        ({}, False, HeadTiles(4)),
        ({"tensor": 4, "fsdp": 2}, True, HeadTiles(head_bytes=1)),
        ({"fsdp": 8}, False, HeadTiles(head_bytes=1)),
        ({"fsdp": 4, "tensor": 2}, False, HeadTiles()),
        ({"data": 8}, True, HeadTiles()),
    ],
)
def test_ties_are_resolved_to_the_lowest_id(mesh, tied, tiles):
    """This holds for the loss with and without gradients, log-probs and argmax, over tiles, parts and devices."""
    layout = Layout.create(**mesh) if mesh else Layout()
    vocab = 24 if tiles.head_bytes is None else 512  # a part has 128 ids
    hidden, head, targets, best = with_ties(tied, vocab)
    weights, options = jnp.ones(targets.shape), dict(tied=tied, tiles=tiles, layout=layout)
    right = np.asarray(targets) == best
    assert 0 < right.sum() < right.size

    @jax.jit
    def found(hidden, head):
        def loss(hidden):
            return linear_cross_entropy(hidden, head, targets, weights, **options)

        without_gradients = loss(hidden)[1].correct
        (_, sums), _ = jax.value_and_grad(loss, has_aux=True)(hidden)
        top = linear_log_probs(hidden, head, targets, **options).top
        return without_gradients, sums.correct, top, linear_argmax(hidden, head, **options)

    without_gradients, with_gradients, top, argmax = found(hidden, head)
    assert float(without_gradients) == float(with_gradients) == right.sum()
    assert_array_equal(top, right)
    assert_array_equal(argmax, best)
    logits = jnp.asarray(exact_logits(hidden, head, tied), jnp.float32)
    assert_array_equal(jnp.argmax(logits, axis=-1), best)  # the plain loss


@pytest.mark.slow
def test_cross_entropy_equals_its_formula(getkey):
    logits = 3 * jax.random.normal(getkey(), (BATCH, LENGTH, VOCAB), jnp.bfloat16)
    targets = jax.random.randint(getkey(), (BATCH, LENGTH), 0, VOCAB)
    exact = np.asarray(logits, np.float64)
    normaliser = np.log(np.exp(exact).sum(-1))
    picked = np.take_along_axis(exact, np.asarray(targets)[..., None], -1)[..., 0]
    losses = cross_entropy(logits, targets, z_loss=0.3)
    assert losses.dtype == jnp.float32
    assert_allclose(losses, normaliser - picked + 0.3 * normaliser**2, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param({"soft_cap": 0.0}, ["soft_cap=0.0"], id="soft_cap"),
        pytest.param({"tiles": HeadTiles(0)}, ["HeadTiles.positions=0"], id="positions"),
        pytest.param({"z_loss": -1.0}, ["z_loss=-1.0"], id="z_loss"),
        pytest.param({"tied": True}, ["tied=True", str((EMBED, VOCAB))], id="tied"),
        pytest.param({"tiles": HeadTiles(head_bytes=0)}, ["HeadTiles.head_bytes=0"], id="head_bytes"),
    ],
)
def test_bad_options_are_refused(options, names):
    with refused(ConfigError, *names) as error:
        linear_cross_entropy(*make(False), **({"tied": False} | options))
    assert "Form" not in str(error.value)
