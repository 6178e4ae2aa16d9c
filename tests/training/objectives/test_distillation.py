"""Test distillation losses against their formulas, with teacher logits or top tokens, on any mesh."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import ConfigError
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.head.divergence import Divergence
from eqx_decoders.training.objectives.distillation import DistillObjective, top_tokens
from eqx_decoders.training.objectives.hidden_states import HiddenProjection, HiddenStates
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import VOCAB, filled, rich_decoder


CONFIG = dataclasses.replace(rich_decoder(1), logit_soft_cap=4.0)
WIDER = dataclasses.replace(rich_decoder(1), vocab_size=VOCAB + 8)  # the head has more rows than there are token ids
PLAIN = OptimizerConfig(learning_rate=0.1, schedule="constant", warmup_steps=0, eps=1.0)
T, ALPHA = 2.0, 0.7
JSD = Divergence("jsd", beta=0.3)


@pytest.fixture(scope="module")
def models():
    return filled(CONFIG), filled(WIDER, 1)


@pytest.fixture(scope="module")
def deeper():
    return filled(rich_decoder(2)), filled(rich_decoder(3), 1)


def batch_of():
    rng = np.random.default_rng(0)
    segments = np.tile(np.repeat([1, 2, 0], [7, 6, 3]), (4, 1)).astype(np.int32)
    tokens = np.where(segments > 0, rng.integers(0, VOCAB, (4, 16)), 0).astype(np.int32)
    positions = np.tile(np.concatenate([np.arange(7), np.arange(6), np.zeros(3)]), (4, 1)).astype(np.int32)
    mask = rng.random((4, 16)) < 0.6
    return Batch(tokens=tokens, segment_ids=segments, positions=positions, loss_mask=mask & (segments > 0))


def targets_of(batch):
    segments, mask = np.asarray(batch.segment_ids), np.asarray(batch.loss_mask)
    return (segments[:, 1:] == segments[:, :-1]) & mask[:, 1:]


def logits_of(model, batch, temperature=1.0):
    logits = model(batch.tokens, batch.positions, batch.segment_ids).logits[:, :-1, :VOCAB]
    return jax.nn.log_softmax(logits / temperature)


def expected(student, teacher, batch, divergence):
    log_p, log_q = (logits_of(model, batch, T) for model in (student, teacher))
    found = jnp.sum(divergence.terms(log_p, log_q)[0], axis=-1)
    nll = -jnp.take_along_axis(logits_of(student, batch), jnp.asarray(batch.tokens)[:, 1:, None], axis=-1)[..., 0]
    weights = jnp.asarray(targets_of(batch), jnp.float32)
    return jnp.sum(weights * (ALPHA * T**2 * found + (1 - ALPHA) * nll)) / jnp.sum(weights)


def after_a_step(objective, model, batch, **step):
    trainer = Trainer.create(PLAIN, model, steps=10, config=StepConfig(**step), loss=objective)
    state = trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(0))
    state, metrics = trainer.step(state, place(batch, model.execution.layout, batch.tokens.shape[0]))
    return jax.device_get((state.model, dataclasses.replace(metrics, stats=None)))


@pytest.mark.slow
def test_distillation_step_equals_the_formula(models):
    """The teacher's head has more rows, and its weights do not change."""
    student, teacher = models
    batch, objective = batch_of(), DistillObjective(teacher, JSD, temperature=T, alpha=ALPHA)
    before = jax.tree.map(np.array, teacher)
    new, metrics = after_a_step(objective, student, batch)
    want, gradient = jax.jit(jax.value_and_grad(lambda s: expected(s, teacher, batch, JSD)))(student)
    assert_close(metrics.loss, want)
    moved = jax.tree.map(lambda old, new: np.asarray(old) - new, student, new)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
    assert_close(metrics.grad_norm, norm)
    assert max(np.abs(x).max() for x in jax.tree.leaves(moved)) > 0
    jax.tree.map(assert_array_equal, before, teacher)


@pytest.mark.slow
@pytest.mark.parametrize("distance", ["cosine", "mse"])
def test_hidden_state_loss_equals_the_formula(deeper, distance):
    """The added loss equals the formula on the residual streams after the paired layers."""
    student, teacher = deeper
    batch, hidden = batch_of(), HiddenStates(weight=0.5, distance=distance, layers=("0:1", "1:2", "1:0"))
    plain, found = (
        after_a_step(DistillObjective(teacher, JSD, temperature=T, alpha=ALPHA, hidden=each), student, batch)[1]
        for each in (HiddenStates(), hidden)
    )
    one, other = (
        np.asarray(each.replace(layer_streams=True)(batch.tokens, batch.positions, batch.segment_ids).stats.streams)
        for each in deeper
    )
    one, other = one[[0, 1, 1], :, :-1].astype(float), other[[1, 2, 0], :, :-1].astype(float)
    weights = targets_of(batch)
    products = [np.sum(x * y, -1) for x, y in ((one, other), (one, one), (other, other))]
    cosine = 1 - products[0] / np.sqrt(products[1] * products[2])
    distances = np.mean((one - other) ** 2, -1) if distance == "mse" else cosine
    want = np.sum(weights * distances.mean(0)) / weights.sum()
    assert_close(found.objective["hidden_distance"], want)
    assert_close(found.loss, plain.loss + 0.5 * want)
    assert "hidden_distance" not in plain.objective and abs(found.grad_norm - plain.grad_norm) > 1e-3


@pytest.mark.slow
def test_hidden_distance_to_an_equal_teacher_is_zero(models):
    for distance in ("cosine", "mse"):
        hidden = HiddenStates(weight=1.0, distance=distance)
        _, metrics = after_a_step(DistillObjective(models[0], temperature=T, hidden=hidden), models[0], batch_of())
        assert abs(metrics.objective["hidden_distance"]) < 1e-6 and metrics.grad_norm < 1e-4


@pytest.mark.parametrize("distance", ["cosine", "mse"])
def test_projection_gradient_equals_the_formula(distance):
    """The formula is the mean over layer pairs of the distance between x W and t, in float64."""
    rng, hidden = np.random.default_rng(0), HiddenStates(weight=1.0, distance=distance, projection=True)
    x, t, w = rng.normal(size=(2, 1, 3, 4)), rng.normal(size=(2, 1, 3, 6)), rng.normal(size=(2, 4, 6))

    def mean(kernel):
        streams = HiddenProjection(jnp.float32(kernel))(jnp.float32(x), ed.Layout())
        return jnp.mean(hidden.distances(streams, jnp.float32(t)))

    value, gradient = jax.jit(jax.value_and_grad(mean))(jnp.float32(w))
    y = np.einsum("pble,pef->pblf", x, w)
    slope, want = 2 * (y - t) / 6, np.mean((y - t) ** 2)
    if distance == "cosine":
        norms = [np.linalg.norm(each, axis=-1, keepdims=True) for each in (y, t)]
        cosine = np.sum(y * t, -1, keepdims=True) / (norms[0] * norms[1])
        slope, want = cosine * y / norms[0] ** 2 - t / (norms[0] * norms[1]), np.mean(1 - cosine)
    assert_close(value, want)
    assert_close(gradient, np.einsum("pble,pblf->pef", x, slope) / 6)


@pytest.fixture(scope="module")
def widths():
    """Return a student and a teacher of twice its width."""
    return filled(rich_decoder(1)), filled(dataclasses.replace(rich_decoder(1), embed_dim=32), 1)


def projected_steps(models, batch, steps=1, **step):
    """Return the state after the steps, the initial projection, and the metrics of each step."""
    hidden = HiddenStates(weight=5.0, distance="mse", layers=("0:0",), projection=True)
    optimizer = dataclasses.replace(PLAIN, ema_decay=0.5, lr_multipliers=(("loss_weights.*", 2.0),))
    objective = DistillObjective(models[1], alpha=0.5, hidden=hidden)
    trainer = Trainer.create(optimizer, models[0], steps=10, config=StepConfig(**step), loss=objective)
    state = trainer.init(jax.tree.map(jnp.copy, models[0]), key=jax.random.key(0))
    before, found = jax.device_get(state.loss_weights), []
    for _ in range(steps):
        state, metrics = trainer.step(state, place(batch, models[0].execution.layout, batch.tokens.shape[0]))
        assert metrics.objective is not None
        found.append(jax.device_get((metrics.loss, metrics.grad_norm, metrics.objective["hidden_distance"])))
    return jax.device_get(state), before, np.array(found)


@pytest.mark.slow
def test_projection_has_optimizer_moments_and_weight_averages(widths):
    student, teacher = widths
    batch = batch_of()
    state, before, found = projected_steps(widths, batch, steps=3)
    read = [
        each.replace(layer_streams=True)(batch.tokens, batch.positions, batch.segment_ids).stats.streams
        for each in widths
    ]
    one, other = (np.asarray(streams[0, :, :-1], np.float64) for streams in read)
    weights = targets_of(batch)
    want = np.sum(weights * np.mean((one @ before.kernel[0] - other) ** 2, -1)) / weights.sum()
    assert_close(found[0, 2], want)
    assert found[2, 2] < found[0, 2]
    assert before.kernel.shape == (1, 16, 32) and abs(np.std(before.kernel) * 4 - 1) < 0.1
    assert np.abs(state.loss_weights.kernel - before.kernel).max() > 1e-3
    assert jax.tree.structure(state.model) == jax.tree.structure(student)
    assert not np.array_equal(state.ema["loss_weights.kernel"], state.loss_weights.kernel)
    assert "loss_weights.kernel" in " ".join(named_leaves(state.optimizer))
    objective = DistillObjective(teacher, alpha=0.5)
    assert objective.new_weights(student, key=jax.random.key(0)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "step"),
    [
        ({"fsdp": 2, "tensor": 2}, {}),
        ({"data": 2, "context": 2}, {}),
        ({"fsdp": 4, "explicit": True}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
    ],
    ids=["fsdp-tensor", "data-context", "explicit", "microbatches"],
)
def test_projection_with_a_mesh_or_microbatches(widths, axes, step):
    want = projected_steps(widths, batch_of(), 2)
    layout = ed.Layout.create(**axes, devices=jax.devices()[:4]) if axes else ed.Layout()
    found = projected_steps([model.place(layout) for model in widths], batch_of(), 2, **step)
    assert_allclose(found[2], want[2], rtol=1e-4)
    assert_allclose(found[0].loss_weights.kernel, want[0].loss_weights.kernel, rtol=1e-3, atol=1e-5)


def test_default_and_explicit_layer_pairs():
    """By default, all student layers are paired with evenly spaced teacher layers. `layers` overrides the pairs."""
    few, many = (ed.abstract(rich_decoder(count)) for count in (1, 3))
    counts = [len(each.config.blocks) for each in (few, many)]
    hidden = HiddenStates(weight=1.0)
    assert hidden.pairs(few, few) == tuple((layer, layer) for layer in range(counts[0]))
    pairs = hidden.pairs(few, many)
    assert pairs[-1] == (counts[0] - 1, counts[1] - 1) and len(pairs) == counts[0]
    assert hidden.pairs(many, few) == ((0, 0), (1, 0), (2, 0))
    with refused(ConfigError, f"0:{counts[0]}", f"{counts[0]} layers"):
        HiddenStates(weight=1.0, layers=(f"0:{counts[0]}",)).pairs(few, few)
    with refused(ConfigError, "projection=False", "16", "32"):
        hidden.pairs(few, ed.abstract(dataclasses.replace(rich_decoder(1), embed_dim=32)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"scan": False}, {"remat": "full"}, {"batch_split": 2}],
    ids=["plain", "loop", "remat", "batch_split"],
)
def test_residual_streams_after_each_layer(deeper, options):
    """The last stream is the input of the final norm."""
    model, batch = deeper[1], batch_of()
    read = model.replace(layer_streams=True, **options)
    hidden, _, stats = read.run(batch.tokens, batch.positions, batch.segment_ids)
    assert_close(stats.streams[-1], hidden)
    blocks = [block for segment in model.scanned_layers for block in segment.unstacked()]
    assert len(stats.streams) == len(blocks)
    want = model.replace(layer_streams=True).run(batch.tokens, batch.positions, batch.segment_ids)[2].streams
    assert_close(stats.streams, want)


@pytest.mark.slow
def test_microbatches_equal_one_batch(models):
    student, teacher = models
    objective = DistillObjective(teacher, JSD, temperature=T, alpha=ALPHA, hidden=HiddenStates(weight=0.5))
    want = after_a_step(objective, student, batch_of())
    parts = after_a_step(objective, student, batch_of(), gradient_accumulation_steps=2)
    assert_close([*jax.tree.leaves(parts[0]), parts[1].loss], [*jax.tree.leaves(want[0]), want[1].loss])


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2, "order": "zigzag"}],
    ids=["fsdp-tensor", "zigzag"],
)
def test_sharded_step_equals_single_device(models, axes):
    student, teacher = models
    hidden = HiddenStates(weight=0.5)
    want = after_a_step(DistillObjective(teacher, temperature=T, hidden=hidden), student, batch_of())[1]
    degrees = dict(axes)
    order = degrees.pop("order", "plain")
    layout = ed.Layout.create(**degrees, devices=jax.devices()[:4])
    models = [model.place(layout).replace(context_order=order) for model in (student, teacher)]
    found = after_a_step(DistillObjective(models[1], temperature=T, hidden=hidden), models[0], batch_of())[1]
    assert_close((found.loss, found.grad_norm), (want.loss, want.grad_norm))


@pytest.mark.slow
def test_top_token_loss_is_a_lower_bound_of_the_full_loss(models):
    """All other tokens form a single class, so the loss is exact if only one token is left out."""
    _, teacher = models
    student, batch = filled(WIDER, 2), batch_of()

    def loss(objective, top=None):
        found = None if top is None else top_tokens(teacher, batch, top=top, temperature=T)
        signals = None if found is None else Signals(top_ids=found.ids, top_log_probs=found.log_probs)
        rows = dataclasses.replace(batch, signals=signals)
        return jax.jit(lambda s: objective(s, rows, key=None, full_batch=rows)[0])(student)

    whole = loss(DistillObjective(teacher, temperature=T))
    assert_close(loss(DistillObjective(temperature=T), VOCAB + 7), whole)
    assert 0 < loss(DistillObjective(temperature=T), 3) < whole * (1 - 1e-4)
    found = top_tokens(teacher, batch, top=3)
    want, ids = jax.lax.top_k(jax.nn.log_softmax(teacher(batch.tokens, batch.positions, batch.segment_ids).logits), 3)
    real = targets_of(batch)
    assert np.array_equal(found.ids[:, 1:][real], ids[:, :-1][real])
    assert_close(found.log_probs[:, 1:][real], want[:, :-1][real])
    assert not np.any(found.ids[:, 1:][~real]) and not np.any(found.ids[:, 0])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        pytest.param(lambda: DistillObjective(alpha=1.5), ["DistillObjective.alpha=1.5"], id="alpha"),
        pytest.param(lambda: DistillObjective(temperature=0.0), ["DistillObjective.temperature=0.0"], id="temperature"),
        pytest.param(
            lambda: DistillObjective(divergence=Divergence("jsd", beta=0.0)), ["Divergence.beta=0.0"], id="beta"
        ),
        pytest.param(
            lambda: DistillObjective(hidden=HiddenStates(weight=1.0)), ["HiddenStates.weight=1.0"], id="no-teacher"
        ),
        pytest.param(lambda: HiddenStates(weight=1.0, layers=("3",)), ["distill.hidden.layers='3'"], id="layers"),
        pytest.param(
            lambda: HiddenStates(distance="mse"), ["distill.hidden.distance", "distill.hidden.weight"], id="distance"
        ),
        pytest.param(lambda: HiddenStates(projection=True), ["projection", "distill.hidden.weight"], id="projection"),
    ],
)
def test_bad_objectives_are_refused(make, names):
    with refused(ConfigError, *names):
        make()


def test_invalid_numbers_of_top_tokens_are_refused(models):
    student, _ = models
    batch = batch_of()
    with refused(ConfigError, f"top={VOCAB}", VOCAB - 1):
        top_tokens(student, batch, top=VOCAB)
    with refused(ConfigError, "Batch.signals", "top_ids", "top_log_probs"):
        jax.eval_shape(lambda s: DistillObjective()(s, batch, key=None, full_batch=batch), student)


def test_both_loss_terms_use_the_same_dropout():
    student = filled(dataclasses.replace(rich_decoder(1), dropout=0.5))
    teacher, batch, key = filled(rich_decoder(1), 1), batch_of(), jax.random.key(2)
    divergence = Divergence("forward")
    objective = DistillObjective(teacher, divergence, temperature=T, alpha=ALPHA)
    found, _ = eqx.filter_jit(objective)(student, batch, key=key, full_batch=batch)

    def dropped(tokens, positions, segments):
        return student(tokens, positions, segments, key=key)

    def whole(tokens, positions, segments):
        return teacher(tokens, positions, segments)

    want = expected(dropped, whole, batch, divergence)
    assert_close(found, want * float(targets_of(batch).sum()))
