"""Test DoRA and PiSSA: formulas, initialization, and the invariants of all low-rank adapters."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.model.quantize import quantize
from eqx_decoders.numerics.einsum import einsum, grouped_products
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights
from eqx_decoders.sharding.axes import axes, named_leaves, replaced
from eqx_decoders.training.lora import add_lora, merge_lora, without_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, muon_dimensions
from eqx_decoders.training.settings.lora import LORA_WEIGHTS, LoRAConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import filled, some_tokens
from tests.numerics.test_grouped_matmul import RAGGED_DOT
from tests.training.test_lora import KINDS, SPLIT, UPDATES


DORA = LoRAConfig(rank=2, alpha=3.0, targets=("*.query", "*.out", "*.gate", "*.down"), dora=True)
PISSA = dataclasses.replace(DORA, dora=False, init="pissa", rank_pattern=(("*.down", 3),))
BOTH = dataclasses.replace(PISSA, dora=True)


@eqx.filter_jit
def logits(model, tokens):
    return model(tokens).logits


@pytest.fixture(scope="module")
def plain():
    return filled(SPLIT)


def with_changed_factors(model, size: float = 0.3):
    """Return the model with changed factors."""
    draws = np.random.default_rng(7)
    moved = {
        name: leaf + jax.device_put(draws.normal(0, size, leaf.shape).astype(leaf.dtype), leaf.sharding)
        for name, leaf in named_leaves(model).items()
        if ".lora_" in name
    }
    return replaced(model, moved)


# --- the product ---


def expected_dora_weight(update, base, a, b, magnitude, inner: tuple[int, ...]):
    """Return the DoRA weight by its definition; column norms are not differentiated."""
    whole = base + 1.5 * jnp.einsum(update, a, b)
    first, length = (jnp.sqrt(jnp.sum(w**2, axis=inner, keepdims=True)) for w in (base, whole))
    return (first + magnitude.reshape(length.shape)) * whole / jax.lax.stop_gradient(length)


def test_dora_equals_its_definition():
    """Cases: products with two input and two output axes, with experts, and with rows sorted by expert."""
    draws = np.random.default_rng(0)
    counts, form = jnp.asarray((2, 0, 3)), RAGGED_DOT

    @jax.jit
    def run(operands):
        got, want = {}, {}
        for kind, (x, base, a, b, magnitude) in operands.items():
            pattern, inner = KINDS[kind][0], {"out": (0, 1), "gate_up": (0,), "batched": (1,)}[kind]
            product = lambda w, x, pattern=pattern: jnp.sin(einsum(pattern, x, w))  # noqa: E731
            rows = lambda w, x: jnp.sin(grouped_products(x[0], (w,), counts, form=form)[0])  # noqa: E731
            for name, multiply in {kind: product, **({"rows": rows} if kind == "batched" else {})}.items():
                by_parts = lambda parts, f=multiply, base=base, x=x: jnp.sum(  # noqa: E731
                    f(LowRank(base, parts[0], parts[1], 1.5, parts[2]), x)
                )
                by_hand = lambda parts, f=multiply, base=base, x=x, kind=kind, inner=inner: jnp.sum(  # noqa: E731
                    f(expected_dora_weight(UPDATES[kind], base, *parts, inner), x)
                )
                got[name], want[name] = (jax.value_and_grad(one)((a, b, magnitude)) for one in (by_parts, by_hand))
        return got, want

    operands = {}
    for kind, columns in {"out": (8,), "gate_up": (2, 6), "batched": (3, 6)}.items():
        arrays = [draws.normal(size=shape).astype(np.float32) for shape in KINDS[kind][1:]]
        operands[kind] = (*arrays, draws.normal(size=columns).astype(np.float32))
    got, want = run(operands)
    for name, (value, gradients) in want.items():
        assert_allclose(got[name][0], value, rtol=1e-5, err_msg=name)
        for mine, gradient in zip(got[name][1], gradients, strict=True):
            assert_allclose(mine, gradient, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_dora_magnitudes_are_computed_in_float32():
    ones = jnp.ones((64, 2), jnp.bfloat16)
    node = LowRank(ones, jnp.zeros((64, 1)), jnp.zeros((1, 2)), 1.0, jnp.full((2,), 0.008))  # of 8
    y = einsum("b embed, embed mlp -> b mlp", jnp.full((1, 64), 1000.0, jnp.bfloat16), node, out_dtype=jnp.float32)
    assert_allclose(y, 64064.0, rtol=1e-5)


# --- initialization ---


@pytest.fixture(scope="module")
def initialized(plain):
    return {name: add_lora(plain, lora, key=jax.random.key(0)) for name, lora in (("dora", DORA), ("both", BOTH))}


@pytest.mark.slow
def test_new_dora_magnitudes_change_no_logits(plain, initialized):
    tokens = some_tokens(4, 8)
    assert_array_equal(logits(initialized["dora"], tokens), logits(plain, tokens))


@pytest.mark.slow
def test_pissa_factors_have_the_largest_singular_values(plain, initialized):
    """The base has the other singular values. The base plus the factors equals the weight up to rounding."""
    words = axes(plain)
    for path, node in low_rank_weights(initialized["both"]).items():
        inner = node.lora_a.ndim - 1 - words[path].count("layers")
        weight, rest, pair = (
            np.asarray(each, np.float64).reshape(len(each), int(np.prod(each.shape[1 : 1 + inner])), -1)
            for each in (
                named_leaves(plain)[path],
                node.base,
                LowRank(0 * node.base, node.lora_a, node.lora_b, node.scale).array(),
            )
        )
        values = np.linalg.svd(weight, compute_uv=False)
        rank = node.lora_a.shape[-1]
        assert rank == (3 if path.endswith("down") else 2)
        assert_allclose(rest + pair, weight, atol=1e-6)
        assert_allclose(np.linalg.svd(pair, compute_uv=False)[:, :rank], values[:, :rank], rtol=1e-5)
        kept = np.linalg.svd(rest, compute_uv=False)[:, : values.shape[1] - rank]
        assert_allclose(kept, values[:, rank:], atol=1e-5)
        assert_array_equal(node.lora_a, node.start_a)


@pytest.mark.slow
def test_new_pissa_factors_change_no_logits(plain, initialized):
    tokens, model = some_tokens(4, 8), initialized["both"]
    before = logits(plain, tokens)
    assert_allclose(logits(model, tokens), before, atol=2e-6 * np.abs(before).max())
    start = without_lora(with_changed_factors(model))
    assert (
        named_leaves(start).keys() == named_leaves(without_lora(add_lora(plain, PISSA, key=jax.random.key(0)))).keys()
    )
    for path, node in low_rank_weights(start).items():
        first = low_rank_weights(model)[path]
        assert node.base is first.base and np.array_equal(node.lora_a, first.lora_a) and node.lora_magnitude is None
    assert_allclose(logits(start, tokens), before, atol=2e-6 * np.abs(before).max())
    merged = named_leaves(merge_lora(start))
    for name, leaf in named_leaves(plain).items():
        assert_allclose(merged[name], leaf, atol=1e-6, err_msg=name)


def test_a_rank_above_the_number_of_singular_values_is_refused(plain):
    lora = dataclasses.replace(PISSA, rank=17, targets=("*.query",), rank_pattern=())
    with refused(ConfigError, "LoRAConfig.rank=17", "16"):
        add_lora(plain, lora, key=jax.random.key(0))


# --- invariants of all adapters ---


def gradient_of_pairs(model, tokens):
    own = {name: leaf for name, leaf in named_leaves(model).items() if ".lora_" in name}

    @jax.jit
    def run(own, model, tokens):
        def loss(own):
            logits = replaced(model, own)(tokens).logits
            return jnp.sum(jnp.sin(logits)), logits

        return jax.grad(loss, has_aux=True)(own)

    gradient, logits = run(own, model, tokens)
    return logits, gradient


@pytest.fixture(scope="module")
def expected(initialized):
    return gradient_of_pairs(with_changed_factors(initialized["both"]), some_tokens(4, 8))


@pytest.mark.slow
def test_merging_changes_no_logits(plain, initialized, expected):
    merged = merge_lora(with_changed_factors(initialized["both"]))
    assert jax.tree.structure(merged) == jax.tree.structure(plain)
    assert_allclose(logits(merged, some_tokens(4, 8)), expected[0], atol=4e-5)
    assert all(np.any(leaf) for leaf in expected[1].values())


@pytest.mark.slow
def test_scan_equals_loop_with_remat(initialized, expected):
    changed = gradient_of_pairs(
        with_changed_factors(initialized["both"]).replace(scan=False, remat="full"), some_tokens(4, 8)
    )
    jax.tree.map(lambda a, b: assert_close(a, b, units=512), changed, expected)


@pytest.mark.slow
def test_sharded_equals_single_device(plain, initialized, expected):
    placed = plain.place(ed.Layout.create(fsdp=4, tensor=2))
    model = add_lora(placed, BOTH, key=jax.random.key(0))
    shardings = named_leaves(placed.execution.layout.shardings(model))
    for name, leaf in named_leaves(model).items():
        assert leaf.sharding == shardings[name]
        assert_allclose(leaf, named_leaves(initialized["both"])[name], atol=1e-4, err_msg=name)
    model = with_changed_factors(initialized["both"]).place(placed.execution.layout)
    jax.tree.map(lambda a, b: assert_close(a, b, units=1024), gradient_of_pairs(model, some_tokens(4, 8)), expected)


def test_dora_magnitudes_are_not_treated_as_matrices(plain):
    assert muon_dimensions(("layers", "heads", "head_dim")) is None
    trainer = Trainer.create(
        OptimizerConfig(trainable=LORA_WEIGHTS), add_lora(plain, BOTH, key=jax.random.key(0)), steps=2
    )
    assert {name.rpartition(".")[2] for name in trainer.trainable} == {"lora_a", "lora_b", "lora_magnitude"}


@pytest.mark.slow
def test_steps_change_only_factors_and_magnitudes_and_resume_exactly(plain, tmp_path):
    model = add_lora(plain, BOTH, key=jax.random.key(0))
    first = jax.device_get(named_leaves(model))
    optimizer = OptimizerConfig(trainable=LORA_WEIGHTS, learning_rate=0.02, schedule="constant", warmup_steps=0)
    trainer = Trainer.create(optimizer, model, steps=10, config=StepConfig(fused_loss=False))
    state, losses, batch = trainer.init(model, key=jax.random.key(1)), [], Batch(tokens=some_tokens(4, 8))
    for _ in range(3):
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[2] < losses[1] < losses[0]
    moved = {name for name, leaf in named_leaves(state.model).items() if np.any(first[name] != np.asarray(leaf))}
    assert moved == {name for name in first if ".lora_" in name}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, data_state={}, config={}, wait=True)
        target = add_lora(ed.abstract(SPLIT), BOTH, key=jax.random.key(5))
        back = checkpoints.restore(trainer.abstract(target, key=jax.random.key(1))).tree
    assert jax.tree.structure(back.model) == jax.tree.structure(state.model)
    jax.tree.map(assert_array_equal, named_leaves(back.model), named_leaves(state.model))


# --- quantized weights ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nf4", "int8", "fp8_block"])
def test_dora_and_pissa_on_quantized_weights(plain, mode):
    """Column norms are computed from the dequantized sum. The PiSSA residual has the same number of bits as the weight,
    and a smaller quantization error."""
    options = dict(group_size=8) if mode == "nf4" else {}
    base, tokens = quantize(plain, mode, **options), some_tokens(4, 8)
    tuned = with_changed_factors(add_lora(base, DORA, key=jax.random.key(0)))
    assert_allclose(
        logits(tuned, tokens),
        logits(with_changed_factors(add_lora(ed.dequantize(base), DORA, key=jax.random.key(0))), tokens),
        atol=2e-5,
    )
    split, late = (
        add_lora(base, PISSA, key=jax.random.key(0)),
        quantize(add_lora(plain, PISSA, key=jax.random.key(0)), mode, **options),
    )
    target = add_lora(quantize(ed.abstract(SPLIT), mode, **options), PISSA, key=jax.random.key(0))
    for model in (split, late):
        assert jax.tree.structure(model) == jax.tree.structure(target)
    weights = named_leaves(plain)

    def loss(found):
        return {path: float(jnp.linalg.norm(found[path] - weights[path])) for path in low_rank_weights(split)}

    whole, first, second = (
        loss(named_leaves(each)) for each in (ed.dequantize(base), merge_lora(split), merge_lora(late))
    )
    assert all(second[path] < whole[path] for path in whole)
    assert all(first[path] < 2 * whole[path] for path in whole)


def test_pissa_of_weights_with_zero_points_is_refused(plain):
    base = quantize(plain, "int8")
    path = "scanned_layers.0.unit.0.mixer.query"
    weight = base.scanned_layers[0].unit[0].mixer.query
    other = dataclasses.replace(weight, zeros=jnp.zeros_like(weight.scales))
    with refused(ConfigError, "init='pissa'", path, "int8", "zeros", "dequantize"):
        add_lora(replaced(base, {path: other}), PISSA, key=jax.random.key(0))
