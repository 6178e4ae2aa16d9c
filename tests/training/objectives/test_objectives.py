"""Test that objectives equal their formulas, for any microbatches, packing, mesh and token order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import ConfigError
from eqx_decoders.training.objectives.objectives import KTOObjective, PairObjective, PolicyObjective
from eqx_decoders.training.objectives.policy_loss import Correction, PolicyLoss, policy_loss
from eqx_decoders.training.objectives.preference_loss import KTOLoss, PairLoss, kto_loss, pair_loss
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_close
from tests.errors import refused
from tests.models import VOCAB, filled, rich_decoder
from tests.steps import copied


PLAIN = OptimizerConfig(learning_rate=0.1, schedule="constant", warmup_steps=0, eps=1.0)
CONFIG = dataclasses.replace(rich_decoder(2), logit_soft_cap=4.0)
LENGTHS = [(2, 3, 1), (3, 2, 4), (1, 1, 2), (2, 4, 3)]  # prompt, chosen, rejected of each pair
TEMPERATURE = 0.7


@functools.cache
def sampled():
    """Return documents (prompt and completion, two per pair), prompt lengths, and per-token values of all signals."""
    rng = np.random.default_rng(0)
    documents = []
    for prompt, *completions in LENGTHS:
        ids = rng.integers(0, VOCAB, prompt)
        documents += [np.concatenate([ids, rng.integers(0, VOCAB, size)]) for size in completions]
    prompts = [prompt for prompt, *_ in LENGTHS for _ in range(2)]
    numbers = [{name: rng.normal(-1, 0.5, len(each)) for name in NUMBERS} for each in documents]
    return documents, prompts, numbers


NUMBERS = ("old", "sampler", "reference", "advantages", "nll", "divergence")


def batch_of(rows, length, poison=np.nan):
    """Pack documents into a batch. `rows`: document indices of each row. Signals of other tokens are `poison`."""
    documents, prompts, numbers = sampled()
    tokens, segments = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32)
    positions = np.zeros((len(rows), length), np.int32)
    completions = np.zeros_like(tokens)
    signals = {name: np.full(tokens.shape, poison, np.float32) for name in (*NUMBERS, "policy")}
    for row, members in enumerate(rows):
        begin = 0
        for number, index in enumerate(members, 1):
            ids = documents[index]
            place = np.s_[row, begin : begin + len(ids)]
            tokens[place], segments[place], positions[place] = ids, number, np.arange(len(ids))
            completion = np.s_[row, begin + prompts[index] : begin + len(ids)]
            completions[completion] = number
            for name in NUMBERS:
                signals[name][completion] = numbers[index][name][prompts[index] :]
            signals["policy"][completion] = WEIGHTS[index // 2]
            begin += len(ids)
    for name in ("policy", "nll", "divergence"):
        signals[name] = np.where(completions > 0, signals[name], 0.0).astype(np.float32)
    most = max(map(len, rows))
    return Batch(
        tokens=tokens,
        segment_ids=segments,
        positions=positions,
        signals=Signals(completion_ids=completions, max_completions=most, **signals),
    )


WEIGHTS = (0.25, 0.5, 0.125, 0.75)
PACKED, LONG = [(0, 1, 2, 3), (4, 5, 6, 7)], 32
ROWS, SHORT = [(0, 1), (2, 3), (4, 5), (6, 7)], 16
KTO_LABELS = (1, -1, -1, 1, 1, 1, 0, -1)


def with_labels(batch, rows):
    """Return the batch with the labels and the baseline of KTO as signals."""
    labels, completions = np.zeros(batch.tokens.shape, np.float32), batch.signals.completion_ids
    for row, members in enumerate(rows):
        for number, index in enumerate(members, 1):
            labels[row][completions[row] == number] = KTO_LABELS[index]
    baseline = np.full(labels.shape, 0.3, np.float32)
    return dataclasses.replace(batch, signals=dataclasses.replace(batch.signals, advantages=labels, baseline=baseline))


PAIR = PairObjective(pair=PairLoss(beta=0.5, smoothing=0.1, nll_weight=0.7))
SIMPO = PairObjective(pair=PairLoss(kind="simpo", beta=2.0, gamma=0.3))
KTO = KTOObjective(kto=KTOLoss(beta=0.5, desirable_weight=1.5))
CORRECTED = PolicyLoss(correction=Correction(kind="tis"))
POLICY = PolicyObjective(policy=CORRECTED, temperature=TEMPERATURE, entropy=0.1)
GSPO = PolicyObjective(policy=PolicyLoss(kind="gspo"))


def expected(objective, model):
    """Compute the loss by its formula, from log-probs of each document without packing."""
    documents, prompts, numbers = sampled()
    longest = max(map(len, documents))
    logits = model(jnp.asarray([np.pad(ids, (0, longest - len(ids))) for ids in documents], jnp.int32)).logits

    def log_probs(index):
        ids = jnp.asarray(documents[index])
        log_p = jax.nn.log_softmax(logits[index, : len(ids) - 1] / getattr(objective, "temperature", 1.0))
        picked = jnp.take_along_axis(log_p, ids[1:, None], axis=-1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return picked[prompts[index] - 1 :], entropy[prompts[index] - 1 :]

    each = [log_probs(index) for index in range(len(documents))]
    sums = jnp.stack([jnp.sum(x) for x, _ in each])
    lengths = jnp.asarray([len(x) for x, _ in each])
    signal = lambda index, name: jnp.asarray(numbers[index][name][prompts[index] :], jnp.float32)  # noqa: E731
    references = jnp.stack([jnp.sum(signal(index, "reference")) for index in range(len(each))])
    if isinstance(objective, PairObjective):
        pair = objective.pair
        more = (
            dict(reference_chosen=references[::2], reference_rejected=references[1::2]) if pair.needs_reference else {}
        )
        losses, _ = pair_loss(
            pair, sums[::2], sums[1::2], chosen_lengths=lengths[::2], rejected_lengths=lengths[1::2], **more
        )
        return jnp.sum(jnp.asarray(WEIGHTS) * losses)
    if isinstance(objective, KTOObjective):
        labels = jnp.asarray(KTO_LABELS)
        counted = jnp.where(labels == 0, 0, lengths)
        losses, _ = kto_loss(
            objective.kto, sums, references, labels > 0, lengths=counted, baseline=jnp.full(8, 0.3, jnp.float32)
        )
        return jnp.sum(jnp.repeat(jnp.asarray(WEIGHTS), 2) * losses)
    total = jnp.float32(0)
    for index, (picked, entropy) in enumerate(each):
        weights = jnp.full(picked.shape, WEIGHTS[index // 2])
        some = {name: signal(index, name)[None] for name in ("old", "sampler", "advantages")}
        total += policy_loss(objective.policy, picked[None], weights=weights[None], **some)[0]
        total -= objective.entropy * jnp.sum(weights * entropy) + jnp.sum(signal(index, "nll") * picked)
        total += jnp.sum(signal(index, "divergence") * (picked - signal(index, "reference")) ** 2 / 2)
    return total


def after_a_step(objective, model, batch, **step):
    trainer = Trainer.create(PLAIN, model, steps=10, config=StepConfig(**step), loss=objective)
    state = trainer.init(copied(model), key=jax.random.key(0))
    state, metrics = trainer.step(state, place(batch, model.execution.layout, batch.tokens.shape[0]))
    return jax.device_get((state.model, dataclasses.replace(metrics, stats=None)))


@pytest.mark.slow
@pytest.mark.parametrize("objective", [PAIR, POLICY, KTO, SIMPO, GSPO])
def test_step_equals_the_formula(objective):
    """Cases: one or several completions per row, microbatches, and meshes that shard rows, sequences (also in zigzag
    order) and the vocabulary."""
    model = filled(CONFIG)

    @jax.jit
    def value_and_norm(model):
        value, gradient = jax.value_and_grad(lambda model: expected(objective, model))(model)
        return value, jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))

    value, norm = value_and_norm(model)
    rows, packed = (with_labels(batch_of(*each), each[0]) if objective is KTO else batch_of(*each) for each in FORMS)
    new, metrics = after_a_step(objective, model, rows)
    assert_close(metrics.loss, value, units=128)
    assert_close(metrics.grad_norm, norm, units=512)
    assert not metrics.skipped and all(np.isfinite(each) for each in metrics.objective.values())
    layout = ed.Layout.create(fsdp=2, context=2, tensor=2)
    placed = model.place(layout).replace(context_order="zigzag")
    forms = [(model, rows, dict(gradient_accumulation_steps=2)), (placed, packed, {})]
    for other, batch, step in forms:
        other_new, other_metrics = after_a_step(objective, other, batch, **step)
        assert_close(other_metrics, metrics, units=1024)
        for a, b in zip(jax.tree.leaves(other_new), jax.tree.leaves(new), strict=True):
            assert_close(a, b, units=1024)


FORMS = ((ROWS, SHORT), (PACKED, LONG))


@pytest.mark.slow
def test_log_probs_are_aligned_with_tokens():
    """This also holds for the zigzag order. The first token of a document and padding have a log-prob of 0."""
    model, batch = filled(CONFIG), batch_of(PACKED, LONG)
    plain = token_log_probs(model, batch, temperature=TEMPERATURE)
    log_p = jax.nn.log_softmax(
        model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions).logits / TEMPERATURE
    )
    picked = np.take_along_axis(np.asarray(log_p)[:, :-1], batch.tokens[:, 1:, None], axis=-1)[..., 0]
    segments = batch.segment_ids
    real = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    assert_close(plain[:, 1:], np.where(real, picked, 0.0), units=256)
    assert not np.any(plain[:, 0])
    layout = ed.Layout.create(fsdp=2, context=4)
    placed = model.place(layout).replace(context_order="zigzag")
    assert_close(token_log_probs(placed, place(batch, layout, 2), temperature=TEMPERATURE), plain, units=256)


def test_on_policy_ratio_is_exactly_one():
    """Log-probs saved with the same weights are equal to the bit, so that no token is clipped."""
    model, batch = filled(CONFIG), batch_of(PACKED, LONG)
    old = np.asarray(token_log_probs(model, batch))
    signals = dataclasses.replace(batch.signals, old=old, sampler=old, reference=old, divergence=None, nll=None)
    batch = dataclasses.replace(batch, signals=signals)
    loss = PolicyObjective(policy=CORRECTED)
    _, metrics = jax.jit(lambda model: loss(model, batch, key=None, full_batch=batch))(model)
    figures = loss.metrics(metrics.sums)
    for name, value in dict(ratio=1, importance=1, log_prob_gap=0, clip=0, k1=0, k3=0).items():
        assert float(figures[name]) == value, name


@pytest.mark.slow(fast=("completion_ids", "reference"))
@pytest.mark.parametrize("name", ["completion_ids", "policy", "reference"])
def test_missing_signals_are_named_in_the_error(name):
    batch = batch_of(ROWS, SHORT)
    batch = dataclasses.replace(batch, signals=dataclasses.replace(batch.signals, **{name: None}))
    with refused(ConfigError, "Batch.signals", name):
        jax.eval_shape(lambda model: PAIR(model, batch, key=None, full_batch=batch), filled(CONFIG))
