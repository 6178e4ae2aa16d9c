"""Test load balancing of experts in training: balance losses, updates of router biases, and reports."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig, load_balance_loss, router_z_loss
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.balance import expert_configs, relative_loads, routing_report
from eqx_decoders.training.step.loss import next_token_loss
from eqx_decoders.training.step.router_bias import update_router_bias
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.models import EMBED, VOCAB, filled, packed


ROWS, LENGTH, POISONED, RATE = 8, 13, 31, 0.25
BIASED = RouterConfig(
    score="sigmoid", order="score_first", renormalize=True, selection_bias=True, bias_update_rate=RATE,
    balance_loss=0.3, balance_form="megatron", z_loss=0.2,
)  # fmt: skip
SWITCH = RouterConfig(balance_loss=0.7)


def block(mlp) -> BlockConfig:
    return BlockConfig(mixer=None, mlp=mlp, pre_mlp_norm=RMSNormConfig())


EIGHT = block(ExpertsConfig(num_experts=8, num_experts_per_token=2, mlp_dim=4, router=BIASED))
FOUR = block(ExpertsConfig(num_experts=4, num_experts_per_token=1, mlp_dim=4, router=SWITCH, capacity_factor=1.0))
DENSE = block(MLPConfig(mlp_dim=4))
# one scanned unit has two MoE layers with different numbers of experts
CONFIG = DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=(EIGHT, FOUR) * 2, final_norm=None, tied=True)
# two scanned segments with experts, separated by a layer without experts
MIXED = dataclasses.replace(CONFIG, blocks=(*CONFIG.blocks, DENSE, EIGHT))
# no weight is exempt from the decay
HARSH = OptimizerConfig(weight_decay=0.5, no_decay=(), learning_rate=0.1, schedule="constant", warmup_steps=0)


def batch_of(poison: bool = False) -> Batch:
    tokens, segments = (np.array(x) for x in packed(ROWS, LENGTH))
    tokens[tokens == POISONED] = 1
    if poison:
        tokens[0, 0] = POISONED
    return Batch(tokens=tokens, segment_ids=segments)


def trainer_of(model, **step) -> Trainer:
    return Trainer.create(HARSH, model, steps=10, config=StepConfig(**step))


def advanced(trainer, model, batch):
    state = trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(0))
    return trainer.step(state, place(batch, model.execution.layout, ROWS))


def biases(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items() if name.endswith("selection_bias")}


def biases_by_layer(model) -> list[np.ndarray]:
    """Return the router biases of the layers with eight experts, in layer order."""
    layers = []
    for segment in model.scanned_layers:
        for repeat in range(segment.repeats):
            for part in segment.unit:
                router = getattr(part.mlp, "router", None)
                if router is not None and router.selection_bias is not None:
                    layers.append(np.asarray(router.selection_bias[repeat]))
    return layers


def assert_same_step(state, metrics, stepped):
    """Assert equal biases to the bit, and equal weights and metrics up to rounding."""
    want, whole = stepped
    for one, other in zip(biases(state.model).values(), biases(want.model).values(), strict=True):
        assert_array_equal(one, other)
    for got, right in ((metrics, whole), (state.model, want.model)):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
            assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def model():
    return filled(CONFIG, experts="dense")  # this form compiles fastest


@pytest.fixture(scope="module")
def trainer(model):
    return trainer_of(model)


@pytest.fixture(scope="module")
def stepped(trainer, model):
    return advanced(trainer, model, batch_of())


@pytest.mark.slow
def test_router_biases_move_by_the_sign_of_the_global_load_error(model, stepped):
    """Weight decay and the optimizer do not change router biases."""
    state, metrics = stepped
    counts = np.asarray(metrics.stats.routing.counts)
    assert counts.shape == (4, 8) and not np.any(counts[1::2, 4:])
    eights = counts[0::2]
    real = float(np.sum(batch_of().segment_ids > 0))
    assert_array_equal(eights.sum(-1), [2 * real] * 2)
    for before, after, count in zip(biases_by_layer(model), biases_by_layer(state.model), eights, strict=True):
        assert_allclose(after, before + RATE * np.sign(count.mean() - count), rtol=1e-6)
        assert np.any(after > before) and np.any(after < before)
    assert not any("selection_bias" in name for name in named_leaves(state.optimizer))


@pytest.mark.slow
def test_expert_counts_are_summed_over_microbatches(model, stepped):
    """Losses, gradients and reports also equal those of the full batch."""
    state, metrics = advanced(trainer_of(model, gradient_accumulation_steps=2), model, batch_of())
    batch = batch_of()
    assert_same_step(state, metrics, stepped)
    # each microbatch would give a different update, so that this test can fail
    half = eqx.filter_jit(lambda m, tokens, ids: m(tokens, segment_ids=ids).stats.routing.counts[0::2])
    halves = [np.asarray(half(model, batch.tokens[start::2], batch.segment_ids[start::2])) for start in (0, 1)]
    first, second, both = (np.sign(c.mean(-1, keepdims=True) - c) for c in (*halves, halves[0] + halves[1]))
    assert np.any(np.sign(first + second) != both)


@pytest.mark.slow
def test_non_finite_step_changes_no_router_bias(trainer, model):
    table = model.embedding.table.at[POISONED].set(jnp.nan)
    poisoned = eqx.tree_at(lambda m: m.embedding.table, model, table)
    state, metrics = advanced(trainer, poisoned, batch_of(poison=True))
    assert bool(metrics.skipped)
    for name, leaf in biases(state.model).items():
        assert_array_equal(leaf, biases(model)[name])


@pytest.mark.slow
def test_sharded_steps_equal_single_device(model, stepped):
    """Losses and counts are computed over the global batch, not over the rows of one device."""
    placed = model.place(ed.Layout.create(data=4, fsdp=2))
    state, metrics = advanced(trainer_of(placed), placed, batch_of())
    assert_same_step(state, metrics, stepped)


@pytest.mark.slow
def test_balance_loss_is_the_mean_over_layers(model):
    loss, metrics = eqx.filter_jit(next_token_loss)(model, batch_of())
    stats = metrics.stats.routing
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], stats) for i in range(4)]
    want = sum(
        0.3 * float(load_balance_loss(each, "megatron")) + 0.2 * float(router_z_loss(each)) for each in layers[0::2]
    )
    want += sum(0.7 * float(load_balance_loss(each, "switch")) for each in layers[1::2])
    nll = float(metrics.nll / metrics.tokens)
    assert float(loss) == pytest.approx(nll + want / 4, rel=1e-5) and want / 4 > 0.1


@pytest.mark.slow
def test_update_router_bias_outside_of_a_step():
    model = filled(MIXED, experts="dense")
    out = eqx.filter_jit(lambda model, tokens: model(tokens).stats)(model, jnp.asarray(batch_of().tokens))
    moved = update_router_bias(model, out, 3.0)
    for before, after, count in zip(
        biases_by_layer(model), biases_by_layer(moved), np.asarray(out.routing.counts)[0::2], strict=True
    ):
        assert_allclose(after, before + 3.0 * np.sign(count.mean() - count), rtol=1e-6)
    balanced = eqx.tree_at(lambda s: s.routing.counts, out, jnp.ones_like(out.routing.counts))
    for before, after in zip(biases_by_layer(model), biases_by_layer(update_router_bias(model, balanced)), strict=True):
        assert_array_equal(after, before)
    with refused(ed.ConfigError, "update_router_bias"):
        update_router_bias(model, dataclasses.replace(out, routing=None))


@pytest.mark.slow
def test_routing_report_equals_numpy(model):
    out = eqx.filter_jit(lambda model, tokens: model(tokens).stats)(
        model.replace(experts="auto"), jnp.asarray(batch_of().tokens)
    )
    stats = jax.device_get(out.routing)
    report = jax.device_get(routing_report(CONFIG, stats))
    for layer, config in enumerate(expert_configs(CONFIG)):
        counts = stats.counts[layer, : config.num_experts]
        assert report["load"][layer] == pytest.approx(counts.max() / counts.mean(), rel=1e-5)
        assert report["dropped"][layer] == pytest.approx(stats.dropped[layer] / counts.sum(), rel=1e-5)
        assert (report["dropped"][layer] > 0) == (config.capacity_factor is not None)
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stats)
        form = config.router.balance_form
        assert report["balance_loss"][layer] == pytest.approx(float(load_balance_loss(one, form)), rel=1e-5)
        assert report["router_z_loss"][layer] == pytest.approx(float(router_z_loss(one)), rel=1e-5)
        assert 0 < report["router_entropy"][layer] < np.log(config.num_experts)


@pytest.mark.slow
def test_loads_are_relative_to_the_number_of_experts_of_the_layer():
    counts = np.array([[4.0, 0, 2, 2, 0, 0, 0, 0], [1.0, 1, 1, 5, 0, 0, 0, 0]])
    config = dataclasses.replace(CONFIG, blocks=(DENSE, EIGHT, DENSE, FOUR))
    loads = relative_loads(config, counts)
    assert list(loads) == ["1", "3"]
    assert_allclose(loads["1"], [4, 0, 2, 2, 0, 0, 0, 0])
    assert_allclose(loads["3"], [0.5, 0.5, 0.5, 2.5])
    assert not np.any(relative_loads(config, 0 * counts)["1"])  # no token was routed
