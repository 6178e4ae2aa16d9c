"""Test optimizers against NumPy, learning-rate schedules, and which weights are updated and decayed."""

import dataclasses
import fnmatch
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import axes, matching
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, make_optimizer, make_schedule, muon_dimensions
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.models import filled, rich_decoder


MATRIX = "scanned_layers.0.unit.0.mlp.up"
WORDS = {
    "embedding.table": ("vocab", "embed"),
    MATRIX: ("layers", "embed", "mlp"),
    "scanned_layers.0.unit.0.mlp.up_bias": ("layers", "mlp"),
    "scanned_layers.0.unit.0.pre_mlp_norm.scale": ("layers", "norm"),
    "head.kernel": ("embed", "vocab"),
}
SIZES = {"vocab": 7, "embed": 4, "mlp": 6, "norm": 4, "layers": 3}


def some_weights(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=[SIZES[w] for w in words]).astype(np.float32) for name, words in WORDS.items()}


def rates(steps: int = 100, **changes) -> np.ndarray:
    """Return the learning rates of steps 0 to `steps`, with a peak of 2."""
    config = OptimizerConfig(learning_rate=2.0, **changes)
    return np.asarray(jax.vmap(lambda step: jnp.asarray(make_schedule(config, steps)(step)))(jnp.arange(steps + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warmup_is_linear_up_to_the_peak(schedule):
    """The first of ten warmup steps has a tenth of the peak rate; no step has a rate of zero."""
    rate = rates(schedule=schedule, warmup_steps=10)
    assert_allclose(rate[:10], np.linspace(0.2, 2, 10), rtol=1e-6)
    assert rate[10] == pytest.approx(2.0)
    assert rate.max() == pytest.approx(2.0)
    default = rates(schedule=schedule)  # the default warmup is a tenth of the run
    assert_array_equal(default, rate)
    for warmup in (0, 1):
        assert rates(schedule=schedule, warmup_steps=warmup)[0] == pytest.approx(2.0)
    long = make_schedule(
        OptimizerConfig(schedule=schedule, learning_rate=1.0), 20_000
    )  # the default warmup has at most 1000 steps
    assert_allclose([float(long(step)) for step in (0, 499, 999, 1000)], [0.001, 0.5, 1, 1], rtol=1e-4)


def test_schedules_after_the_warmup():
    after = np.arange(91) / 90
    cosine = rates(warmup_steps=10, min_lr_ratio=0.1)[10:]
    assert_allclose(cosine, 2 * (0.1 + 0.9 * (1 + np.cos(np.pi * after)) / 2), rtol=1e-5)
    linear = rates(schedule="linear", warmup_steps=10, min_lr_ratio=0.5)[10:]
    assert_allclose(linear, 2 * (1 - 0.5 * after), rtol=1e-5)
    assert_allclose(rates(schedule="constant", warmup_steps=10)[10:], 2.0, rtol=1e-6)
    wsd = rates(schedule="wsd", warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert_allclose(wsd[10:81], 2.0, rtol=1e-6)
    assert_allclose(wsd[80:], np.linspace(2, 0, 21), atol=1e-6)
    all_decay = rates(schedule="wsd", warmup_steps=10, decay_fraction=1.0, min_lr_ratio=0.0)
    assert_allclose(all_decay[10:], np.linspace(2, 0, 91), atol=1e-5)


def test_schedules_of_very_short_runs():
    for schedule in ("cosine", "linear", "wsd", "constant"):
        assert float(make_schedule(OptimizerConfig(schedule=schedule, learning_rate=1.0), 1)(0)) == pytest.approx(1.0)
    constant = make_schedule(OptimizerConfig(schedule="constant", learning_rate=1.0, warmup_steps=4), 2)
    assert float(constant(1)) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_warmup_as_long_as_the_run_is_refused(schedule):
    with refused(ConfigError, "OptimizerConfig.warmup_steps=50"):
        make_schedule(OptimizerConfig(schedule=schedule, warmup_steps=50), 50)


BAD = {
    "name": ["adam", "sgd"],
    "schedule": ["cosin", "step"],
    "learning_rate": [0.0, -1e-3, float("nan"), float("inf")],
    "warmup_steps": [-1, 1.5, True],
    "decay_fraction": [-0.1, 1.1],
    "min_lr_ratio": [-0.1, 1.5],
    "weight_decay": [-0.1, float("nan")],
    "beta1": [1.0, -0.1],
    "beta2": [1.0],
    "momentum": [1.0],
    "eps": [0.0],
    "max_grad_norm": [0.0, -1.0],
    "lr_multipliers": [(("*", 0.0),), (("head.*", 2.0), ("*", -1.0)), (("*", float("nan")),), (("*", float("inf")),)],
    "moments_dtype": ["float16", "bf16"],
    "ema_decay": [0.0, 1.0, -0.5, float("nan")],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field}={value}") for field, values in BAD.items() for value in values],
)
def test_bad_settings_are_refused_by_name(field, value):
    config = OptimizerConfig()
    object.__setattr__(config, field, value)  # bypass the type checks, which are active only in tests
    with refused(ConfigError, f"OptimizerConfig.{field}=", repr(value)):
        config.__post_init__()


UNREAD = {
    "adamw": ["momentum"],
    "lion": ["eps", "momentum"],
    "adafactor": ["beta1", "beta2", "eps", "momentum", "moments_dtype"],
    "muon": ["eps"],
    "cosine": ["decay_fraction"],
    "linear": ["decay_fraction"],
    "wsd": [],
    "constant": ["decay_fraction", "min_lr_ratio"],
}
OTHER = dict(
    beta1=0.8, beta2=0.9, eps=1e-3, momentum=0.5, moments_dtype="bfloat16", decay_fraction=0.5, min_lr_ratio=0.5
)


@pytest.mark.parametrize("reader", UNREAD)
def test_settings_without_effect_are_refused(reader):
    choice = {"name" if reader in ("adamw", "lion", "adafactor", "muon") else "schedule": reader}
    for field in list(OTHER)[:5] if "name" in choice else list(OTHER)[5:]:
        if field not in UNREAD[reader]:
            OptimizerConfig(**choice, **{field: OTHER[field]})
            continue
        with refused(ConfigError, f"OptimizerConfig.{field}={OTHER[field]}", repr(reader)):
            OptimizerConfig(**choice, **{field: OTHER[field]})


# For each setting: (other settings that it needs, a value that must change the result).
CHANGES = {
    "name": ({}, "lion"),
    "learning_rate": ({}, 0.1),
    "schedule": ({}, "linear"),
    "warmup_steps": ({}, 2),
    "decay_fraction": (dict(schedule="wsd"), 0.9),
    "min_lr_ratio": ({}, 0.9),
    "weight_decay": ({}, 0.0),
    "no_decay": ({}, ()),
    "beta1": ({}, 0.5),
    "beta2": ({}, 0.5),
    "eps": ({}, 1e-2),
    "momentum": (dict(name="muon"), 0.5),
    "lr_multipliers": ({}, (("head.*", 0.5),)),
    "moments_dtype": ({}, "bfloat16"),
}


@pytest.mark.slow
def test_every_optimizer_setting_takes_effect():
    """Settings that the training step reads are tested in test_step.py."""
    by_the_step = {"trainable", "max_grad_norm", "ema_decay", "shard_over_data"}
    assert CHANGES.keys() | by_the_step == {field.name for field in dataclasses.fields(OptimizerConfig)}
    weights, gradients = some_weights(0), [some_weights(seed) for seed in (1, 2, 3)]

    @functools.cache
    def moved(config):
        return run(make_optimizer(config, WORDS, 4), weights, gradients)[0]

    for field, (others, value) in CHANGES.items():
        config = OptimizerConfig(**(dict(learning_rate=0.05, warmup_steps=1, weight_decay=0.5) | others))
        got, want = moved(dataclasses.replace(config, **{field: value})), moved(config)
        assert max(float(jnp.abs(got[name] - want[name]).max()) for name in WORDS) > 1e-4, field


def numpy_adamw(config, weights, gradients, rate, decayed):
    """Reference implementation of AdamW (Loshchilov & Hutter 2019) in float64."""
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    first, second = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step, gradient in enumerate(gradients, 1):
        for name, g in gradient.items():
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * g.astype(np.float64) ** 2
            mean, square = first[name] / (1 - config.beta1**step), second[name] / (1 - config.beta2**step)
            move = mean / (np.sqrt(square) + config.eps) + config.weight_decay * decayed[name] * weights[name]
            weights[name] = weights[name] - rate(step - 1) * move
    return weights


def run(optimizer, weights, gradients):
    """Return the weights and the optimizer state after updates with the given gradients."""

    @jax.jit
    def step(weights, state, gradient):
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    weights = jax.tree.map(jnp.asarray, weights)
    state = jax.jit(optimizer.init)(weights)
    for gradient in gradients:
        weights, state = step(weights, state, gradient)
    return weights, state


def test_adamw_equals_numpy_with_weight_decay_by_path():
    config = OptimizerConfig(learning_rate=0.05, warmup_steps=2, beta1=0.8, beta2=0.9, weight_decay=0.3, eps=1e-3)
    weights, gradients = some_weights(0), [some_weights(seed) for seed in range(1, 6)]
    got, _ = run(make_optimizer(config, WORDS, 10), weights, gradients)
    decayed = {name: name in (MATRIX, "head.kernel") for name in WORDS}
    want = numpy_adamw(config, weights, gradients, make_schedule(config, 10), decayed)
    for name in WORDS:
        assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow(fast=("adamw",))
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_weight_decay_without_gradients(name):
    """Decayed weights are multiplied by `1 - rate * weight_decay`; exempt weights do not change."""
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5)
    weights = some_weights(0)
    still = {key: np.zeros_like(w) for key, w in weights.items()}
    got, _ = run(make_optimizer(config, WORDS, 10), weights, [still])
    for key in WORDS:
        factor = 0.95 if key in (MATRIX, "head.kernel") else 1.0
        assert_allclose(got[key], factor * weights[key], rtol=1e-6, atol=1e-7, err_msg=key)


def test_default_no_decay_covers_norms_biases_sinks_and_embeddings():
    config = rich_decoder(2, positions=LearnedPositions(max_positions=16), tied=True)
    words = axes(abstract(config))
    patterns = OptimizerConfig().no_decay
    exempt = {name for name in words if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    inside = {name: [word for word in each if word != "layers"] for name, each in words.items()}
    assert {name for name in words if len(inside[name]) < 2} <= exempt
    matrices = words.keys() - exempt
    assert {name.split(".")[-1] for name in matrices} == {
        "query",
        "key",
        "value",
        "out",
        "qkv",
        "gate",
        "up",
        "down",
    } | {"gate_up"}
    assert {"embedding.table", "positions.table"} <= exempt
    assert any(name.endswith(".qkv_bias") for name in exempt) and any(name.endswith(".sink") for name in exempt)


def test_pattern_without_a_match_is_refused_with_examples():
    assert matching(WORDS, ["*norm*", "head.*"], "f") == {"scanned_layers.0.unit.0.pre_mlp_norm.scale", "head.kernel"}
    with refused(ConfigError, "OptimizerConfig.trainable", "'heads.*'", "embedding.table", MATRIX):
        matching(WORDS, ["head.*", "heads.*"], "OptimizerConfig.trainable")


@pytest.mark.slow(fast=("adamw",))
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_updates_and_weight_decay_follow_the_schedule(name):
    """The first of two warmup steps changes every weight by half of the change at the full rate."""
    config = OptimizerConfig(name=name, learning_rate=0.1, warmup_steps=2, schedule="constant", weight_decay=0.5)
    weights, gradients = some_weights(0), [some_weights(1)]
    full, _ = run(make_optimizer(dataclasses.replace(config, warmup_steps=0), WORDS, 10), weights, gradients)
    half, _ = run(make_optimizer(config, WORDS, 10), weights, gradients)
    for key, weight in weights.items():
        assert np.abs(full[key] - weight).max() > 1e-3
        assert_allclose(half[key] - weight, (full[key] - weight) / 2, atol=1e-6, err_msg=key)


KINDS = {
    "layers embed heads head_dim": ((1,), (2, 3)),
    "layers embed kv_heads head_dim": ((1,), (2, 3)),
    "layers embed qkv_heads head_dim": ((1,), (2, 3)),
    "embed qkv_heads head_dim": ((0,), (1, 2)),
    "layers heads head_dim embed": ((1, 2), (3,)),
    "heads head_dim embed": ((0, 1), (2,)),
    "layers embed mlp": ((1,), (2,)),
    "embed mlp": ((0,), (1,)),
    "layers mlp embed": ((1,), (2,)),
    "layers embed inputs mlp": ((1,), (3,)),
    "vocab embed": None,
    "embed vocab": None,
    "positions embed": None,
    "norm": None,
    "layers norm": None,
    "layers embed": None,
    "layers mlp": None,
    "layers heads": None,
    "layers heads head_dim": None,
    "layers qkv_heads head_dim": None,
}


@pytest.mark.parametrize("words", KINDS)
def test_muon_dimensions_by_axis_names(words):
    found = muon_dimensions(tuple(words.split()))
    assert (None if found is None else (found.reduction_axis, found.output_axis)) == KINDS[words]


def test_muon_dimensions_of_all_weights_of_a_decoder():
    words = axes(abstract(rich_decoder(4, positions=LearnedPositions(max_positions=16))))
    assert {" ".join(each) for each in words.values()} <= KINDS.keys()


STACKED = {
    "a.query": ("layers", "embed", "heads", "head_dim"),
    "a.out": ("layers", "heads", "head_dim", "embed"),
    "a.gate_up": ("layers", "embed", "inputs", "mlp"),
}
DIMENSIONS = {"layers": 3, "embed": 6, "heads": 2, "head_dim": 4, "inputs": 2, "mlp": 5}


def test_muon_orthogonalizes_each_layer_and_projection_separately():
    """The update of stacked matrices equals optax's Muon applied to each matrix."""
    config = OptimizerConfig(name="muon", learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.0)
    generator = np.random.default_rng(0)

    def draw():
        return {
            name: generator.normal(size=[DIMENSIONS[word] for word in words]).astype(np.float32)
            for name, words in STACKED.items()
        }

    def matrices(tree):
        query, out, both = (np.asarray(tree[name]) for name in STACKED)
        found = {f"query{layer}": query[layer].reshape(6, 8) for layer in range(3)}
        found |= {f"out{layer}": out[layer].reshape(8, 6) for layer in range(3)}
        return found | {f"in{layer}{part}": both[layer, :, part] for layer in range(3) for part in range(2)}

    weights, gradients = draw(), [draw(), draw()]
    got, _ = run(make_optimizer(config, STACKED, 10), weights, gradients)
    plain = optax.contrib.muon(0.1, beta=0.95, consistent_rms=0.2)
    with jax.numpy_dtype_promotion("standard"):
        want, _ = run(plain, matrices(weights), [matrices(each) for each in gradients])
    got = matrices(got)
    for name, matrix in matrices(weights).items():
        assert_allclose(got[name] - matrix, want[name] - matrix, atol=2e-5, err_msg=name)
        assert np.abs(want[name] - matrix).max() > 1e-2


def test_muon_with_only_matrices_or_without_matrices():
    for kept in (["head.kernel"], [MATRIX]):
        words = {name: WORDS[name] for name in kept}
        weights = {name: some_weights(0)[name] for name in kept}
        got, _ = run(make_optimizer(OptimizerConfig(name="muon", warmup_steps=0), words, 10), weights, [weights])
        assert got.keys() == set(kept)
        assert all(np.any(np.asarray(got[name]) != weights[name]) for name in kept)


def test_optimizer_state_holds_two_moments_per_weight():
    weights = eqx.filter(filled(rich_decoder(2)), eqx.is_array)
    size = sum(leaf.size for leaf in jax.tree.leaves(weights))
    flat = dict(zip(axes(weights), jax.tree.leaves(weights), strict=True))
    for name, moments in (("adamw", 2), ("lion", 1)):
        state = jax.eval_shape(make_optimizer(OptimizerConfig(name=name), axes(weights), 10).init, flat)
        assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == moments * size


@pytest.mark.slow(fast=("lion",))
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_lr_multipliers_equal_optimizers_with_scaled_rates(name):
    """Weights of a group are updated and decayed as by an optimizer with the scaled rate. The first match counts."""
    config = OptimizerConfig(name=name, learning_rate=0.1, warmup_steps=2, weight_decay=0.5)
    pairs = (("*.mlp.up", 0.25), ("*.mlp.*", 3.0), ("head.*", 3.0))
    weights, gradients = some_weights(0), [some_weights(seed) for seed in (1, 2, 3)]

    def moved(config):
        return run(make_optimizer(config, WORDS, 4), weights, gradients)[0]

    got, plain = moved(dataclasses.replace(config, lr_multipliers=pairs)), moved(config)
    tripled, quarter = (moved(dataclasses.replace(config, learning_rate=0.1 * factor)) for factor in (3.0, 0.25))
    for key in WORDS:
        want = quarter if key == MATRIX else tripled if "mlp." in key or "head" in key else plain
        assert_allclose(got[key] - weights[key], want[key] - weights[key], rtol=2e-4, atol=1e-6, err_msg=key)
        assert (want is plain) or np.abs(want[key] - plain[key]).max() > 1e-3


def test_lr_multiplier_without_a_match_is_refused_with_examples():
    config = OptimizerConfig(lr_multipliers=(("head.*", 2.0), ("heads.*", 2.0)))
    with refused(ConfigError, "OptimizerConfig.lr_multipliers", "'heads.*'", "embedding"):
        make_optimizer(config, WORDS, 4)


@pytest.mark.slow(fast=("adamw-2",))
@pytest.mark.parametrize("name, moments", [("adamw", 2), ("lion", 1), ("muon", 1)])
def test_bfloat16_moments_round_only_the_moments(name, moments):
    """Two steps equal two float32 steps with moments that are rounded between the steps."""
    config = OptimizerConfig(name=name, learning_rate=0.1, warmup_steps=0)
    half = dataclasses.replace(config, moments_dtype="bfloat16")
    words = {MATRIX: WORDS[MATRIX]}
    weights, *gradients = ({MATRIX: jnp.asarray(some_weights(seed)[MATRIX])} for seed in range(3))
    plain, rounding = make_optimizer(config, words, 4), make_optimizer(half, words, 4)
    update, cast = (
        jax.jit(plain.update),
        functools.partial(jax.tree.map, lambda x: x.astype("bfloat16").astype(x.dtype)),
    )
    first, state = update(gradients[0], plain.init(weights), weights)
    kept = jax.tree.map(lambda x: cast(x) if x.shape == weights[MATRIX].shape else x, state)
    second, _ = update(gradients[1], kept, weights)
    got, small = jax.jit(rounding.update)(gradients[0], rounding.init(weights), weights)
    again, _ = jax.jit(rounding.update)(gradients[1], small, weights)
    assert_allclose(got[MATRIX], first[MATRIX], rtol=1e-5)
    assert_allclose(again[MATRIX], second[MATRIX], rtol=1e-4, atol=1e-6)
    assert got[MATRIX].dtype == jnp.float32
    halves = [leaf for leaf in jax.tree.leaves(small) if leaf.dtype == jnp.bfloat16]
    assert [leaf.shape for leaf in halves] == [weights[MATRIX].shape] * moments
    others = [(one, other) for one, other in zip(*map(jax.tree.leaves, (small, state)), strict=True) if one.ndim < 3]
    assert all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in others)


@pytest.mark.slow(fast=("adamw",))
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_updates_of_bfloat16_weights_are_computed_in_float32(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.1, warmup_steps=0), WORDS, 4)
    half = {key: jnp.asarray(w, "bfloat16") for key, w in some_weights(0).items()}
    full, gradient = {key: w.astype("float32") for key, w in half.items()}, some_weights(1)
    got, want = (jax.jit(optimizer.update)(gradient, optimizer.init(w), w) for w in (half, full))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.dtype != jnp.bfloat16
        assert_allclose(one, other, rtol=1e-5, atol=1e-7)
