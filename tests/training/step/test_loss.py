"""Test the loss: targets, fused and plain form, and reported sums."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.input_checks import check_inputs
from eqx_decoders.data.batch import Batch
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.training.evaluation import evaluate
from eqx_decoders.training.head.cross_entropy import cross_entropy
from eqx_decoders.training.step.balance import routing_loss
from eqx_decoders.training.step.loss import evaluation_sums, next_token_loss, next_tokens
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.models import filled, packed, rich_decoder, some_tokens
from tests.steps import SPARSE, decoder


ROWS, LENGTH = 4, 13


def batch_of(**parts) -> Batch:
    """Return rows with several documents (some of one token) and padding. `parts`: fields to add or replace."""
    tokens, segments = packed(ROWS, LENGTH)
    return Batch(**{"tokens": tokens, "segment_ids": segments, **parts})


def some_mask(seed: int = 0) -> np.ndarray:
    """Return a mask of zeros and ones. The row sums are very different."""
    shares = np.array([[1.0], [0.1], [0.5], [0.9]])
    return np.random.default_rng(seed).random((ROWS, LENGTH)) < shares


def one_block(**changes):
    config = rich_decoder(1, **changes)
    block = dataclasses.replace(
        config.blocks[0], mixer=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8), post_mlp_norm=None
    )
    return dataclasses.replace(config, blocks=(block,))


@eqx.filter_jit
def value_and_gradient(model, batch, z_loss, fused, key=None):
    return eqx.filter_value_and_grad(next_token_loss, has_aux=True)(model, batch, z_loss=z_loss, fused=fused, key=key)


CASES = {
    "tied, soft cap, z-loss, packed": (dict(tied=True, head_bias=True, logit_soft_cap=3.0), 1e-2, {}),
    "own head, loss mask, dropout": (dict(dropout=0.3), 0.0, dict(loss_mask=some_mask(), segment_ids=None)),
    "own head, bias, divisor, soft cap, weights, padding by position": (
        dict(head_bias=True, logit_divisor=2.0, logit_soft_cap=2.0),
        0.1,
        dict(
            segment_ids=None,
            positions=np.where(np.arange(LENGTH) < [[13], [1], [7], [12]], np.arange(LENGTH), -1).astype(np.int32),
            loss_mask=np.linspace(0.0, 2.0, ROWS * LENGTH, dtype=np.float32).reshape(ROWS, LENGTH),
        ),
    ),
}


@pytest.mark.slow(fast=("tied, soft cap, z-loss, packed",))
@pytest.mark.parametrize("case", CASES)
def test_fused_loss_equals_plain_loss(case):
    changes, z_loss, parts = CASES[case]
    model, batch = filled(one_block(**changes)), batch_of(**parts)
    keys = jax.random.split(jax.random.key(5), 2)
    fused, other = (value_and_gradient(model, batch, z_loss, True, key) for key in keys)
    plain = value_and_gradient(model, batch, z_loss, False, keys[0])
    assert_close(fused, plain, units=256)
    assert (float(other[0][0]) != float(fused[0][0])) == (model.config.dropout > 0)
    (loss, metrics), gradient = plain
    for leaf in jax.tree.leaves(gradient):
        assert np.any(np.asarray(leaf) != 0)
    assert float(loss) == pytest.approx(float(metrics.loss / metrics.tokens), rel=1e-6)
    assert (float(metrics.loss) > float(metrics.nll) + 1e-3) == (z_loss > 0)


def test_router_losses_are_added():
    """Router losses are means over tokens that are not padding."""
    model, batch = filled(decoder(SPARSE)), batch_of()
    _, metrics = added = eqx.filter_jit(next_token_loss)(model, batch)
    routing = metrics.stats.routing
    assert_array_equal(routing.tokens, [np.sum(np.asarray(batch.segment_ids) > 0)])
    want = metrics.nll / metrics.tokens + routing_loss(model.config, routing)
    assert_close(added[0], want, units=64)
    assert float(routing_loss(model.config, routing)) > 1e-2


@pytest.mark.slow
def test_loss_without_targets_is_zero():
    model = filled(one_block())
    batch = batch_of(segment_ids=None, loss_mask=np.zeros((ROWS, LENGTH), bool))
    for fused in (True, False):
        (loss, metrics), gradient = value_and_gradient(model, batch, 1e-2, fused)
        assert float(loss) == 0.0 and float(metrics.tokens) == 0.0 and float(metrics.correct) == 0.0
        for leaf in jax.tree.leaves(gradient):
            assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.slow
def test_packed_batch_has_the_sums_of_its_documents():
    """Sums of a packed batch equal those of unpacked documents, and those computed from the logits with NumPy."""
    model, batch = filled(rich_decoder(2)), batch_of()
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segment_ids)
    documents = [tokens[row][segments[row] == s] for row in range(ROWS) for s in range(1, segments[row].max() + 1)]
    alone = np.zeros((len(documents), LENGTH), np.int32)
    present = np.zeros_like(alone)
    for row, document in enumerate(documents):
        alone[row, : len(document)], present[row, : len(document)] = document, 1
    run = eqx.filter_jit(lambda model, batch: (next_token_loss(model, batch)[1], model(batch.tokens).logits))
    together, _ = run(model, batch)
    apart, logits = run(model, Batch(tokens=jnp.asarray(alone), segment_ids=jnp.asarray(present)))
    assert_close(together, apart, units=256)

    nll = correct = count = 0.0
    for row, document in enumerate(documents):
        for here, target in enumerate(document[1:]):
            scores = np.asarray(logits[row, here], np.float64)
            nll += np.log(np.exp(scores).sum()) - scores[target]
            correct += scores.argmax() == target
            count += 1
    assert float(together.tokens) == count and float(together.correct) == correct
    assert float(together.nll) == pytest.approx(nll, rel=1e-5)
    assert together.stats is None


@pytest.mark.parametrize("part", ["tokens", "segments", "positions", "mask", "all", "weights", "one token"])
def test_next_tokens_equals_a_python_loop(part):
    tokens, segments = (np.asarray(x) for x in packed(ROWS, LENGTH))
    positions = np.where(np.arange(LENGTH) < [[13], [4], [0], [12]], np.arange(LENGTH), -1).astype(np.int32)
    parts: dict = {"tokens": tokens}
    if part in ("segments", "all"):
        parts["segment_ids"] = segments
    if part in ("positions", "all"):
        parts["positions"] = positions
    if part in ("mask", "all"):
        parts["loss_mask"] = some_mask()
    if part == "weights":
        parts["loss_mask"] = np.random.default_rng(1).random((ROWS, LENGTH)).astype(np.float32)
    if part == "one token":
        parts = {"tokens": tokens[:, :1], "segment_ids": segments[:, :1]}
    targets, weights = next_tokens(Batch(**parts))
    rows, length = parts["tokens"].shape
    assert targets.shape == weights.shape == (rows, length)
    for row in range(rows):
        for here in range(length):
            want, following = 0.0, here + 1
            if following < length:
                want = float(parts.get("loss_mask", np.ones((rows, length)))[row, following])
                if "segment_ids" in parts:
                    same = segments[row, here] == segments[row, following] != 0
                    want *= float(same)
                if "positions" in parts:
                    want *= float(positions[row, following] >= 0)
            assert float(weights[row, here]) == pytest.approx(want)
            if want:
                assert int(targets[row, here]) == int(parts["tokens"][row, following])


@pytest.mark.slow
def test_evaluate_weights_batches_by_their_number_of_targets():
    model, batch = filled(one_block()), batch_of(positions=None)
    few = batch_of(segment_ids=jnp.where(jnp.arange(ROWS)[:, None] == 1, batch.segment_ids, 0))
    host = [jax.tree.map(np.asarray, each) for each in (batch, few)]
    parts = [eqx.filter_jit(evaluation_sums)(model, each) for each in (batch, few)]
    sums = sum(np.asarray([part.nll, part.tokens], np.float64) for part in parts)
    result = evaluate(model, host, ROWS)
    assert result.tokens == int(sums[1]) == sum(int(next_tokens(each)[1].sum()) for each in (batch, few))
    assert result.nats == pytest.approx(sums[0], rel=1e-6)
    assert result.loss == pytest.approx(sums[0] / sums[1], rel=1e-6)
    assert result.nats_per_byte(50) == pytest.approx(sums[0] / 50)
    asked = []
    early = evaluate(model, host, ROWS, stop=lambda: asked.append(1) is None)
    assert len(asked) == 1 and early.tokens == int(next_tokens(batch)[1].sum())


@pytest.mark.slow
def test_loss_does_not_depend_on_the_scale_of_the_weights():
    """This holds for the loss, MTP losses, gradients and evaluation. They are 0 if all weights are 0."""
    config = dataclasses.replace(one_block(), blocks=(BlockConfig(mixer=None, mlp=None),))
    mtp = MTPConfig(num_depths=1, block=config.blocks[0], norm=RMSNormConfig(), loss_weight=0.5)
    model = filled(dataclasses.replace(config, mtp=mtp))
    mask = np.linspace(0.5, 1.5, ROWS * LENGTH, dtype=np.float32).reshape(ROWS, LENGTH)
    scales = (1.0, 2.0**-6, 2.0**-20, 0.0)
    batches = [batch_of(loss_mask=mask * np.float32(scale), segment_ids=None) for scale in scales]
    (whole, small, least, none) = [value_and_gradient(model, batch, 1e-3, True) for batch in batches]
    for ((loss, metrics), gradient), scale in ((small, scales[1]), (least, scales[2])):
        assert float(metrics.tokens) == pytest.approx(float(whole[0][1].tokens) * scale) and float(metrics.tokens) < 1
        assert float(loss) == pytest.approx(float(whole[0][0]), rel=1e-5)
        assert_close(gradient, whole[1], units=64)
    assert float(none[0][0]) == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(none[1]))
    results = [evaluate(model, [batch], ROWS) for batch in batches]
    assert results[2].loss == pytest.approx(results[0].loss, rel=1e-5) and np.isnan(results[3].loss)


def test_loss_of_an_empty_evaluation_is_nan():
    result = evaluate(filled(one_block()), [], ROWS)
    assert np.isnan(result.loss) and (result.tokens, result.nats) == (0, 0.0)


def test_layer_stats_are_optional():
    batch = Batch(tokens=some_tokens(2, 5))
    for asked in (False, True):
        model = filled(one_block(), layer_stats=asked)
        _, metrics = jax.eval_shape(next_token_loss, model, batch)
        assert (metrics.stats is not None) == asked


@pytest.mark.slow
def test_spans_are_passed_to_decoder_and_mtp_layers():
    config = one_block()
    mixer = dataclasses.replace(config.blocks[0].mixer, spans=True)
    seeing = dataclasses.replace(config.blocks[0], mixer=mixer)
    tokens, spans = some_tokens(2, 6), jnp.asarray([[0, 1, 1, 1, 0, 0], [2, 2, 0, 0, 3, 3]])
    plain, wide = Batch(tokens=tokens), Batch(tokens=tokens, spans=spans)
    for blocks, block, changed in (((seeing,), config.blocks[0], (True, True)), (config.blocks, seeing, (False, True))):
        mtp = MTPConfig(num_depths=1, block=block, norm=RMSNormConfig())
        model = filled(dataclasses.replace(config, blocks=blocks, mtp=mtp))
        sums = [value_and_gradient(model, batch, 0.0, True)[0][1] for batch in (plain, wide)]
        one, other = ((each.nll, each.mtp.nll[0]) for each in sums)
        assert tuple(abs(float(a - b)) > 1e-3 for a, b in zip(one, other, strict=True)) == changed
    logits = model(tokens, inputs=ed.Inputs(spans=spans)).logits
    assert_close(sums[1].nll, jnp.sum(cross_entropy(logits[:, :-1], tokens[:, 1:])))


@pytest.mark.parametrize(
    ("spans", "names"),
    [
        pytest.param(jnp.zeros((2, 5), jnp.int32), ["(2, 5)", "Batch.tokens", "(2, 6)"], id="shape"),
        pytest.param(jnp.zeros((2, 6)), ["float32"], id="dtype"),
    ],
)
def test_invalid_spans_are_refused(spans, names):
    """The checks do not rely on jaxtyping."""
    with refused(ed.ConfigError, "spans", *names):
        check_inputs(one_block(), some_tokens(2, 6), spans=spans, name="Batch.tokens")
