"""Test the training step: results, unchanged state, donation and compilation."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step import step as step_module
from eqx_decoders.training.step.loss import next_token_loss, token_loss_sum
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from eqx_decoders.training.step.train_state import TrainState
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import filled, packed, rich_decoder, some_tokens


ROWS, LENGTH, POISONED = 8, 13, 31
RICH = rich_decoder(2)
CONFIG = dataclasses.replace(  # cheap to compile, with attention, an MLP and every kind of weight
    RICH, blocks=(dataclasses.replace(RICH.blocks[1], pre_mlp_norm=None, mlp=MLPConfig(mlp_dim=24, gated=False)),)
)
NOTHING = BlockConfig(mixer=None, mlp=None)
BARE = dataclasses.replace(CONFIG, blocks=(NOTHING,))  # only embedding, norm and head
OPTIMIZERS = ("adamw", "lion", "adafactor", "muon")
# With eps = 1 the first update of AdamW is proportional to the gradient, so that a wrong gradient scale is detected.
PLAIN = OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=4, eps=1.0, max_grad_norm=0.5)
ANY = dataclasses.replace(PLAIN, eps=OptimizerConfig().eps)  # valid for all optimizers: only AdamW reads eps


def batch_of(poison: bool = False, rows: int = ROWS) -> Batch:
    """Return packed documents with 0 to 12 targets per row. Token `POISONED` occurs only if `poison` is set."""
    tokens, segments = (np.array(x) for x in packed(rows, LENGTH))
    tokens[tokens == POISONED] = 1
    if poison:
        tokens[0, 0] = POISONED
    shares = np.linspace(0, 1, rows)[:, None] ** 2
    mask = np.random.default_rng(0).random((rows, LENGTH)) < shares
    return Batch(tokens=tokens, segment_ids=segments, loss_mask=mask)


def trainer_of(model, optimizer=PLAIN, **step) -> Trainer:
    return Trainer.create(optimizer, model, steps=10, config=StepConfig(**step))


def first_state(trainer: Trainer, model, seed: int = 0) -> TrainState:
    """Return a new state with copies of the weights, because the step donates its state."""
    return trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(seed))


def advanced(trainer: Trainer, state: TrainState, batches) -> tuple[TrainState, list]:
    rows = []
    for batch in batches:
        state, metrics = trainer.step(state, place(batch, state.model.execution.layout, batch.tokens.shape[0]))
        rows.append(jax.device_get(metrics))
    return state, rows


def host(tree):
    """Return NumPy copies of all arrays and of key data."""

    def one(leaf):
        return np.array(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return jax.tree.map(one, tree)


def same_bits(one, other) -> bool:
    pairs = zip(jax.tree.leaves(host(one)), jax.tree.leaves(host(other)), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def no_stats(metrics):
    return eqx.tree_at(lambda m: m.stats, metrics, None, is_leaf=lambda leaf: leaf is None)


class Case:
    """A model and a trainer. The step is compiled once for all tests of this file."""

    def __init__(self):
        self.model = filled(CONFIG, layer_stats=True)
        self.trainer = trainer_of(self.model)

    def start(self) -> TrainState:
        return first_state(self.trainer, self.model)

    @functools.cached_property
    def two_steps(self) -> tuple[TrainState, list]:
        return advanced(self.trainer, self.start(), [batch_of()] * 2)


@pytest.fixture(scope="module")
def case():
    return Case()


@pytest.fixture
def compilations():
    """Return a list that collects the names of compilation events."""
    events: list[str] = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_step_is_dispatched_asynchronously(case):
    """The step returns while its batch is still being computed."""
    slow = jax.jit(lambda tokens, x: tokens + (jax.lax.fori_loop(0, 30, lambda _, x: x @ x, x)[0, 0] > 1).astype(int))
    zeros, batch = jnp.zeros((1500, 1500)), batch_of()
    state, _ = advanced(case.trainer, case.start(), [batch])
    tokens = slow(batch.tokens, zeros)
    assert not tokens.is_ready()
    _, metrics = case.trainer.step(state, dataclasses.replace(batch, tokens=tokens))
    assert not metrics.loss.is_ready() and jax.device_get(metrics.loss) > 0


@pytest.mark.slow
def test_two_steps_equal_clipped_adamw_in_numpy(case):
    """NumPy reference: the gradient of the mean loss, clipping by global norm, and AdamW."""
    gradient_of = eqx.filter_jit(eqx.filter_value_and_grad(next_token_loss, has_aux=True))
    model, batch = case.model.replace(layer_stats=False), batch_of()
    weights = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(model).items()}
    first, second = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    state, rows = case.two_steps
    for step, row in enumerate(rows, 1):
        leaves = [jnp.asarray(w, jnp.float32) for w in weights.values()]
        now = jax.tree.unflatten(jax.tree.structure(model), leaves)
        (loss, sums), gradient = gradient_of(now, batch, fused=False)
        gradient = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(gradient).items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        assert norm > 1  # clipping has an effect
        rate = 0.1 * step / 4
        for name, g in gradient.items():
            g = g * min(1.0, 0.5 / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
            decay = 0.1 * weights[name] if _decayed(name) else 0.0
            weights[name] = weights[name] - rate * (mean / (np.sqrt(square) + 1.0) + decay)
        assert float(row.loss) == pytest.approx(float(loss), rel=1e-5)
        assert float(row.grad_norm) == pytest.approx(norm, rel=1e-4)
        assert float(row.learning_rate) == pytest.approx(rate)
        assert float(row.tokens) == float(sums.tokens)
        assert float(row.nll) == pytest.approx(float(sums.nll / sums.tokens), rel=1e-5)
        assert float(row.accuracy) == pytest.approx(float(sums.correct / sums.tokens))
    moved = host(named_leaves(state.model))
    start = host(named_leaves(case.model))
    for name, want in weights.items():
        assert np.abs(want - start[name]).max() > 1e-6, name
        assert_allclose(moved[name], want, rtol=0, atol=2e-6, err_msg=name)
    assert int(state.step) == 2 and int(state.skipped) == 0


def _decayed(name: str) -> bool:
    last = name.split(".")[-1]
    return "norm" not in name and "bias" not in last and last not in ("sink", "table")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulated_microbatches_equal_one_batch(case, count):
    """Microbatches have different numbers of targets."""
    trainer = trainer_of(case.model, gradient_accumulation_steps=count)
    got, rows = advanced(trainer, first_state(trainer, case.model), [batch_of()] * 2)
    want, whole = case.two_steps
    assert_close(got.model, want.model, units=32)
    assert_close(got.optimizer, want.optimizer, units=32)
    for one, other in zip(rows, whole, strict=True):
        assert_close(no_stats(one), no_stats(other), units=128)
        for name in ("mean", "zero_fraction"):
            mine, theirs = (getattr(row.stats.activations, name) for row in (one, other))
            assert mine.shape == (1,)
            assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow
def test_steps_do_not_depend_on_the_scale_of_the_weights(case):
    """This also holds if the sum of weights is below 1, and with microbatches."""
    batch = batch_of()
    small = dataclasses.replace(batch, loss_mask=batch.loss_mask.astype(np.float32) * 2.0**-10)
    want, (row,) = advanced(case.trainer, case.start(), [batch])
    for count in (1, 2):
        trainer = trainer_of(case.model, gradient_accumulation_steps=count)
        got, (own,) = advanced(trainer, first_state(trainer, case.model), [small])
        assert own.tokens == row.tokens * 2.0**-10 < 1
        assert_close(got.model, want.model, units=32)
        for name in ("loss", "nll", "accuracy", "grad_norm"):
            assert getattr(own, name) == pytest.approx(getattr(row, name), rel=1e-5), name


def test_batch_size_must_be_a_multiple_of_the_microbatches(case):
    trainer = trainer_of(case.model, gradient_accumulation_steps=3)
    state = TrainState(model=case.model, optimizer=None, step=jnp.int32(0), skipped=jnp.int32(0), key=jax.random.key(0))
    with refused(ConfigError, "8", "StepConfig.gradient_accumulation_steps=3"):
        trainer.step(state, batch_of())


@pytest.mark.parametrize(
    ("field", "value"), [("gradient_accumulation_steps", 0), ("gradient_accumulation_steps", -1), ("z_loss", -1.0)]
)
def test_invalid_step_settings_are_refused(field, value):
    with refused(ConfigError, f"StepConfig.{field}={value}"):
        StepConfig(**{field: value})


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_step_changes_nothing(case, poison):
    table = case.model.embedding.table.at[POISONED].set(poison)
    model = eqx.tree_at(lambda m: m.embedding.table, case.model, table)
    good, bad = batch_of(), batch_of(poison=True)
    before, (first,) = advanced(case.trainer, first_state(case.trainer, model), [good])
    kept = host(before)
    after, (skipped,) = advanced(case.trainer, before, [bad])
    assert not first.skipped and skipped.skipped and not np.isfinite(skipped.loss)
    assert same_bits(after.model, kept.model) and same_bits(after.optimizer, kept.optimizer)
    assert (int(after.step), int(after.skipped)) == (2, 1)
    assert float(skipped.learning_rate) == pytest.approx(0.05)

    went_on, (last,) = advanced(case.trainer, after, [good])
    never, (_, want) = advanced(case.trainer, first_state(case.trainer, model), [good, good])
    assert same_bits(went_on.model, never.model) and same_bits(went_on.optimizer, never.optimizer)
    assert (
        float(last.learning_rate) == float(want.learning_rate) == pytest.approx(0.05)
    )  # the rate of the third step is not used
    assert not last.skipped and float(last.loss) == float(want.loss)
    assert (int(went_on.step), int(went_on.skipped)) == (3, 1)


def test_non_finite_loss_or_gradient_skips_the_step(case):
    """A target outside the vocabulary gives a NaN loss and a finite gradient; huge logits give the opposite."""
    good, tokens = batch_of(), batch_of().tokens.copy()
    row, column = np.argwhere((good.segment_ids[:, 1:] == good.segment_ids[:, :-1]) & good.loss_mask[:, 1:])[0]
    tokens[row, column + 1] = 32
    outside = dataclasses.replace(good, tokens=tokens)
    huge = eqx.tree_at(lambda m: m.head.kernel, case.model, 1e25 * case.model.head.kernel)
    for model, batch, finite in ((case.model, outside, "grad_norm"), (huge, good, "loss")):
        before = first_state(case.trainer, model)
        kept = host(before)
        after, (metrics,) = advanced(case.trainer, before, [batch])
        assert np.isfinite(getattr(metrics, finite))
        assert np.isfinite(metrics.loss) != np.isfinite(metrics.grad_norm)
        assert metrics.skipped and (int(after.step), int(after.skipped)) == (1, 1)
        assert same_bits(after.model, kept.model) and same_bits(after.optimizer, kept.optimizer)


def test_empty_batch_gives_zero_loss_and_gradient(case):
    batch = batch_of()
    empty = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    state, (row,) = advanced(case.trainer, case.start(), [empty])
    assert not row.skipped and float(row.loss) == float(row.tokens) == float(row.grad_norm) == 0.0
    before = named_leaves(case.model)
    for name, leaf in named_leaves(state.model).items():
        decay = 1 - 0.025 * 0.1 * _decayed(name)
        assert_allclose(leaf, decay * np.asarray(before[name]), rtol=1e-6, err_msg=name)


def test_state_is_donated_and_batch_is_not(case):
    state, batch = case.start(), jax.tree.map(jnp.asarray, batch_of())
    new, _ = case.trainer.step(state, batch)
    for name, leaf in named_leaves((state.model, state.optimizer)).items():
        assert leaf.is_deleted(), name
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, batch)))


def test_steps_are_compiled_once(case, compilations):
    """This also holds for unsharded weights: shardings, weak types and counters do not change."""
    trainer = trainer_of(case.model, dataclasses.replace(PLAIN, trainable=("final_norm.*", "*.out")))
    state, batch = first_state(trainer, case.model), place(batch_of(), ed.Layout(), ROWS)
    compilations.clear()
    size = trainer.compile(state, batch)
    assert len(compilations) == 1  # the listener works
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state.model))
    assert weights < size < 100 * weights
    state, _ = advanced(trainer, state, [batch_of()])
    assert len(compilations) == 1
    compilations.clear()
    advanced(trainer, state, [batch_of(), batch_of(poison=True), batch_of()])
    assert not compilations


def test_equal_seeds_give_equal_bits(case):
    state, rows = advanced(case.trainer, case.start(), [batch_of()] * 2)
    want, others = case.two_steps
    assert same_bits(state, want) and same_bits(rows, others)


@pytest.mark.slow(fast=("1",))
@pytest.mark.parametrize("count", [1, 2])
def test_sharded_steps_equal_single_device(case, compilations, count):
    """Batches have packed documents, also with microbatches. The step is compiled once."""
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = case.model.place(layout)
    trainer = trainer_of(model, gradient_accumulation_steps=count)
    state, first = advanced(trainer, first_state(trainer, model), [batch_of()])
    compilations.clear()
    state, second = advanced(trainer, state, [batch_of()])
    assert not compilations
    want, others = case.two_steps
    assert_close(state.model, want.model, units=128)
    assert_close(state.optimizer, want.optimizer, units=128)
    for one, other in zip(first + second, others, strict=True):
        assert_close(*((one, other) if count == 1 else (no_stats(one), no_stats(other))), units=128)
    for (name, leaf), sharding in zip(
        named_leaves(state.model).items(), jax.tree.leaves(layout.shardings(state.model)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name


def test_optimizer_state_is_sharded_like_its_weights():
    model = filled(CONFIG).place(ed.Layout.create(fsdp=4, tensor=2))
    state = trainer_of(model).init(model, key=jax.random.key(0))
    weights = named_leaves(model)
    moments = {name: leaf for name, leaf in named_leaves(state.optimizer).items() if leaf.ndim}
    assert len(moments) == 2 * len(weights)
    for name, leaf in moments.items():
        owner = next(weights[path] for path in weights if name.endswith(f".{path}"))
        assert leaf.sharding.is_equivalent_to(owner.sharding, leaf.ndim), name
    whole = sum(leaf.nbytes for leaf in moments.values())
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in moments.values()) < whole / 4


@pytest.mark.slow(fast=("adamw-None", "adafactor-fsdp=4 tensor=2"))
@pytest.mark.parametrize("mesh", [None, dict(fsdp=4, tensor=2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_abstract_state_has_the_structure_of_init(name, mesh):
    """With 128 features Adafactor factorizes its second moments; their shapes differ from those of the weights."""
    config = dataclasses.replace(rich_decoder(1), embed_dim=128, vocab_size=256)
    layout = ed.Layout() if mesh is None else ed.Layout.create(**mesh)
    target = ed.abstract(config, layout=layout)
    trainer = trainer_of(target, dataclasses.replace(ANY, name=name))
    key = jax.random.key(0)
    model = filled(config).place(layout)
    state, shapes = trainer.init(model, key=key), trainer.abstract(target, key=key)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    for (path, leaf), shape in zip(named_leaves(state).items(), jax.tree.leaves(shapes), strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), path
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim), path


@pytest.mark.slow(fast=("adamw-bfloat16", "muon-float32"))
@pytest.mark.parametrize("params", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_preserves_structure_shapes_and_dtypes(name, params):
    """This also holds with bfloat16 weights and microbatches. The test does not compile the step."""
    model = ed.abstract(CONFIG, precision=ed.Precision(params=params, compute=jnp.bfloat16))
    for count in (1, 2):
        trainer = trainer_of(model, dataclasses.replace(ANY, name=name), gradient_accumulation_steps=count)
        state = trainer.abstract(model, key=jax.random.key(0))
        new, metrics = eqx.filter_eval_shape(trainer.advance, state, batch_of())
        assert jax.tree.structure(new) == jax.tree.structure(state)
        for (path, leaf), old in zip(named_leaves(new).items(), jax.tree.leaves(state), strict=True):
            assert (leaf.shape, leaf.dtype) == (old.shape, old.dtype), path
        assert metrics.loss.dtype == metrics.grad_norm.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [("muon", CONFIG)] + [(name, RICH) for name in OPTIMIZERS],
    ids=lambda value: value if isinstance(value, str) else f"{len(value.blocks)}-blocks",
)
def test_every_optimizer_lowers_the_loss(name, config):
    model = filled(config)
    rate = 0.003 if name == "lion" else 0.01
    trainer = trainer_of(model, OptimizerConfig(name=name, learning_rate=rate, schedule="constant", warmup_steps=0))
    state, rows = advanced(trainer, first_state(trainer, model), [batch_of()] * 6)
    losses = [float(row.loss) for row in rows]
    assert losses[-1] < losses[0] - 0.1 and not any(row.skipped for row in rows)
    start = named_leaves(model)
    for path, leaf in named_leaves(state.model).items():
        assert (leaf.shape, leaf.dtype) == (start[path].shape, start[path].dtype)
        assert np.any(np.asarray(leaf) != np.asarray(start[path])), path
        assert np.all(np.isfinite(leaf)), path


def test_frozen_weights_do_not_change_and_have_no_optimizer_state():
    model = filled(CONFIG)
    config = dataclasses.replace(PLAIN, trainable=("*.mixer.qkv", "final_norm.*"))
    trainer = trainer_of(model, config)
    names = {"scanned_layers.0.unit.0.mixer.qkv", "final_norm.scale"}
    assert trainer.trainable == names
    state = first_state(trainer, model)
    weights = named_leaves(model)
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sum(leaf.nbytes for leaf in moments) == 2 * sum(weights[name].nbytes for name in names)
    assert len(moments) == 4
    state, _ = advanced(trainer, state, [batch_of()] * 2)
    for path, leaf in named_leaves(state.model).items():
        assert same_bits(leaf, weights[path]) == (path not in names), path


def in_dtype(config, params) -> ed.Decoder:
    model = jax.tree.map(lambda leaf: leaf.astype(params), filled(config))
    return model.replace(precision=ed.Precision(params=params))


@pytest.mark.slow(fast=("float32",))
@pytest.mark.parametrize("params", [jnp.float32, jnp.bfloat16])
def test_weight_averages_equal_a_python_loop(params):
    """Only trained weights are averaged, in float32 with the sharding of the weights. Non-finite steps are skipped."""
    layout, model = ed.Layout.create(fsdp=4, tensor=2), in_dtype(BARE, params)
    model = eqx.tree_at(lambda m: m.embedding.table, model, model.embedding.table.at[POISONED].set(np.nan)).place(
        layout
    )
    trainer = trainer_of(model, dataclasses.replace(PLAIN, trainable=("final_norm.*", "head.*"), ema_decay=0.75))
    state, want = first_state(trainer, model), {}
    assert jax.tree.structure(state) == jax.tree.structure(trainer.abstract(model, key=jax.random.key(0)))
    weights = named_leaves(host(state.model))
    for number, poison in enumerate((False, False, True, False)):
        state, (row,) = advanced(trainer, state, [batch_of(poison)])
        now = named_leaves(host(state.model))
        for name in ("final_norm.scale", "head.kernel"):
            old = want.get(name, weights[name].astype(np.float32))
            want[name] = old if poison else 0.75 * old + 0.25 * now[name].astype(np.float32)
            assert poison or np.abs(want[name] - old).max() > 1e-5, number
        assert bool(row.skipped) == poison
    assert state.ema.keys() == want.keys()
    averaged, leaves = named_leaves(state.averaged), named_leaves(state.model)
    for name, leaf in leaves.items():
        if name not in want:
            assert averaged[name] is leaf
            continue
        assert state.ema[name].dtype == jnp.float32 and averaged[name].dtype == params
        assert state.ema[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        assert_allclose(state.ema[name], want[name], rtol=1e-6)
        assert_array_equal(averaged[name], state.ema[name].astype(params))
    assert not trainer_of(model).init(model, key=jax.random.key(0)).ema


@pytest.mark.slow
def test_bfloat16_state_is_restored_exactly(tmp_path):
    model = in_dtype(BARE, jnp.bfloat16)
    trainer = trainer_of(model, dataclasses.replace(PLAIN, moments_dtype="bfloat16", ema_decay=0.5))
    state, _ = advanced(trainer, first_state(trainer, model), [batch_of()] * 2)
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves((state.model, state.optimizer)) if leaf.ndim}
    assert kinds == {"bfloat16"} and {leaf.dtype.name for leaf in state.ema.values()} == {"float32"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, data_state={}, config="", wait=True)
        back, _, _ = checkpoints.restore(trainer.abstract(model, key=jax.random.key(0)))
    assert same_bits(back, state)
    (one, _), (other, _) = (advanced(trainer, each, [batch_of()]) for each in (back, state))
    assert same_bits(one, other)


@pytest.mark.slow
def test_bfloat16_halves_the_memory_of_weights_and_moments():
    """The sizes are XLA's argument sizes, for two weights of shape 4096 x 64."""
    config = dataclasses.replace(BARE, vocab_size=4096, embed_dim=64)
    sizes = []
    for params, moments in (("float32", "float32"), ("bfloat16", "bfloat16")):
        model = in_dtype(config, params)
        trainer = trainer_of(model, dataclasses.replace(PLAIN, moments_dtype=moments))
        state = first_state(trainer, model)
        memory = step_module._compiled_step.lower((trainer, batch_of()), state).compile().memory_analysis()
        sizes.append(memory.argument_size_in_bytes)
    assert 3 * 2 * 4096 * 64 * 4 < sizes[0] < 1.01 * 3 * 2 * 4096 * 64 * 4
    assert 0.5 < sizes[1] / sizes[0] < 0.51


def test_trainable_pattern_without_a_match_is_refused():
    model = ed.abstract(CONFIG)
    with refused(ConfigError, "OptimizerConfig.trainable", "'embeding.*'", "embedding.table"):
        trainer_of(model, dataclasses.replace(PLAIN, trainable=("embeding.*",)))


HIDDEN = dataclasses.replace(NOTHING, mlp=MLPConfig(mlp_dim=8, dropout=0.3))
ROUTED = ExpertsConfig(num_experts=4, num_experts_per_token=2, mlp_dim=8)
SHARED = dataclasses.replace(ROUTED, shared=HIDDEN.mlp, router=RouterConfig(balance_loss=0.1, z_loss=0.01))
DRAWS = {
    "before and after the blocks": dict(dropout=0.1),
    "a block": dict(blocks=(dataclasses.replace(NOTHING, dropout=0.1),)),
    "an MLP": dict(blocks=(NOTHING, HIDDEN)),
    "shared experts": dict(blocks=(dataclasses.replace(NOTHING, mlp=SHARED),)),
    "multi-token prediction": dict(mtp=MTPConfig(num_depths=1, block=HIDDEN, norm=RMSNormConfig())),
}


@pytest.mark.slow
def test_only_models_with_dropout_use_random_bits():
    """The program contains random bits only with dropout. Each kind of dropout is tested."""

    def draws(config) -> bool:
        model = ed.abstract(config)
        trainer = trainer_of(model)
        state = trainer.abstract(model, key=jax.random.key(0))
        return "random_bits" in str(eqx.filter_make_jaxpr(trainer.advance)(state, batch_of())[0])

    assert not draws(BARE) and not draws(dataclasses.replace(BARE, blocks=(dataclasses.replace(NOTHING, mlp=ROUTED),)))
    for name, changes in DRAWS.items():
        assert draws(dataclasses.replace(BARE, **changes)), name


@pytest.mark.slow
def test_microbatches_have_different_dropout():
    """With equal keys, swapping the two microbatches (one row each) would not change the result."""
    model = filled(dataclasses.replace(BARE, dropout=0.5))
    trainer = trainer_of(model, gradient_accumulation_steps=2)
    run = eqx.filter_jit(lambda tokens: trainer._gradient(model, Batch(tokens=tokens), jax.random.key(0))[1].loss)
    tokens = some_tokens(2, LENGTH)
    assert abs(float(run(tokens)) - float(run(tokens[::-1]))) > 1e-3


@pytest.mark.slow
def test_dropout_differs_between_steps_and_microbatches():
    """With every kind of dropout and router losses, the step equals the plain loss with the key of the step."""
    blocks = (dataclasses.replace(HIDDEN, dropout=0.2), dataclasses.replace(NOTHING, mlp=SHARED))
    model = filled(dataclasses.replace(BARE, blocks=blocks, dropout=0.5))
    trainer = trainer_of(model, gradient_accumulation_steps=2)
    tokens = some_tokens(2, LENGTH)

    def step(step: int, seed: int, tokens=tokens) -> tuple[float, float]:
        state = first_state(trainer, model, seed)
        _, (row,) = advanced(trainer, eqx.tree_at(lambda s: s.step, state, jnp.int32(step)), [Batch(tokens=tokens)])
        return float(row.loss), float(row.grad_norm)

    def loss(*arguments) -> float:
        return step(*arguments)[0]

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(2, 0), loss(0, 1)}) == 4
    # with equal keys, swapping the two microbatches (one row each) would not change the result
    assert abs(loss(0, 0) - loss(0, 0, tokens[::-1])) > 1e-3

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def plain(model):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 2), 2)
        rows = [Batch(tokens=tokens[row : row + 1]) for row in range(2)]
        whole = dict(fused=False, full_batch=Batch(tokens=tokens))
        parts = [token_loss_sum(model, row, key=key, **whole)[0] for row, key in zip(rows, keys, strict=True)]
        return sum(parts) / (2 * (LENGTH - 1))

    want, gradient = plain(model)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient)))
    assert_allclose(step(2, 0), (want, norm), rtol=1e-5)


@pytest.mark.slow
def test_every_step_setting_takes_effect(monkeypatch):
    """All fields of `StepConfig` (of QK-clip in test_qk_clip.py), and the norm of `OptimizerConfig`; for its other
    fields see test_optimizer.py."""
    model = filled(dataclasses.replace(BARE, dropout=0.5))
    batch = Batch(tokens=some_tokens(4, 5))

    def moved(optimizer=PLAIN, **settings):
        trainer = trainer_of(model, optimizer, **settings)
        return named_leaves(advanced(trainer, first_state(trainer, model), [batch])[0].model)

    plain = moved()
    norm = moved(dataclasses.replace(PLAIN, max_grad_norm=None))
    others = dict(gradient_accumulation_steps=moved(gradient_accumulation_steps=2), z_loss=moved(z_loss=0.5))
    assert others.keys() | {"fused_loss", "qk_clip_threshold"} == {
        field.name for field in dataclasses.fields(StepConfig)
    }
    for other in (norm, *others.values()):  # with microbatches, dropout masks differ
        assert any(float(jnp.abs(plain[name] - other[name]).max()) > 1e-5 for name in plain)

    def refuse(*_, **__):
        raise AssertionError("fused")

    monkeypatch.setattr("eqx_decoders.training.step.loss.linear_cross_entropy", refuse)

    def trace(fused: bool) -> None:
        trainer = trainer_of(model, fused_loss=fused)
        eqx.filter_eval_shape(trainer.advance, trainer.abstract(model, key=jax.random.key(0)), batch)

    trace(fused=False)
    with pytest.raises(AssertionError, match="fused"):
        trace(fused=True)


def test_activation_statistics_of_microbatches_equal_the_batch():
    """This also holds if the microbatches have different means."""
    model = filled(BARE, layer_stats=True)
    batch = batch_of(rows=4)
    tokens = np.where(np.arange(4)[:, None] % 2 == 0, 1, batch.tokens)
    batch = dataclasses.replace(batch, tokens=tokens, segment_ids=None)
    found = []
    for count in (1, 2):
        trainer = trainer_of(model, gradient_accumulation_steps=count)
        metrics = jax.jit(lambda batch, trainer=trainer: trainer._gradient(model, batch, None)[1])(batch)
        found.append(metrics.stats.activations)
    assert_close(found[1], found[0])
