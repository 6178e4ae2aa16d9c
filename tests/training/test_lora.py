"""Test LoRA: products, initialization, training and merging of low-rank factors."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckpointError, ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.weight_table import describe
from eqx_decoders.numerics.einsum import einsum
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights, pair_axes
from eqx_decoders.sharding.axes import axes, matching, named_leaves, product_axes, replaced
from eqx_decoders.training.lora import add_lora, merge_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, muon_dimensions
from eqx_decoders.training.settings.lora import LORA_WEIGHTS, LoRAConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.adapters import CONFIG, RICH, pairs, shapes, trained
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import filled, layout_of, some_tokens


BLOCK = ed.BlockConfig(
    mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
    mlp=MLPConfig(mlp_dim=24),
    pre_mlp_norm=RMSNormConfig(),
)
SPLIT, FUSED = (dataclasses.replace(RICH, blocks=(block,) * 2) for block in (BLOCK, RICH.blocks[1]))
SPLIT_PAIRS = dataclasses.replace(CONFIG, targets=("*.query", "*.key", "*.value", "*.out", "*.gate", "*.up", "*.down"))
FEW_PAIRS = dataclasses.replace(CONFIG, targets=("*.query", "*.out", "*.down"))  # one target for each kind of fan-in
FUSED_PAIRS = dataclasses.replace(CONFIG, targets=("*.qkv", "*.out", "*.gate_up", "*.down"))


@eqx.filter_jit
def logits(model, tokens):
    return model(tokens).logits


# --- the product ---

# axis pattern, and the shapes of x, base, lora_a and lora_b
KINDS = {
    "query": ("... embed, embed heads head_dim -> ... heads head_dim", (2, 5, 8), (8, 3, 4), (8, 2), (2, 3, 4)),
    "out": ("b l heads head_dim, heads head_dim embed -> b l embed", (2, 5, 3, 4), (3, 4, 8), (3, 4, 2), (2, 8)),
    "gate_up": ("b l embed, embed inputs mlp -> b l inputs mlp", (2, 5, 8), (8, 2, 6), (8, 2), (2, 2, 6)),
    "down": ("b l mlp, mlp embed -> b l embed", (2, 5, 12), (12, 8), (12, 2), (2, 8)),
    "transposed": ("b l embed, heads head_dim embed -> b l heads head_dim", (2, 5, 8), (3, 4, 8), (8, 2), (2, 3, 4)),
    "batched": ("e t embed, e embed mlp -> e t mlp", (3, 5, 8), (3, 8, 6), (3, 8, 2), (3, 2, 6)),
}
UPDATES = {
    "query": "dr,rhk->dhk",
    "out": "hkr,rd->hkd",
    "gate_up": "dr,rif->dif",
    "down": "fr,rd->fd",
    "transposed": "dr,rhk->hkd",
    "batched": "edr,erf->edf",
}


@pytest.mark.slow(fast=("gate_up", "transposed", "batched"))
@pytest.mark.parametrize("kind", KINDS)
def test_low_rank_product_equals_product_with_merged_weight(kind):
    """Values and gradients with respect to x and both factors are compared, in float32 and bfloat16."""
    pattern, *sizes = KINDS[kind]
    generator = np.random.default_rng(0)
    x, base, a, b = (jnp.asarray(generator.normal(size=size), jnp.float32) for size in sizes)

    def loss(y):
        return jnp.sum(jnp.linspace(-1, 1, y.size).reshape(y.shape) * y.astype(jnp.float32)), y

    def merged(x, base, a, b):
        return loss(einsum(pattern, x, base + 1.5 * jnp.einsum(UPDATES[kind], a, b)))

    def parts(x, base, a, b, **options):
        return loss(einsum(pattern, x, LowRank(base=base, lora_a=a, lora_b=b, scale=1.5), **options))

    @jax.jit  # compile once for all cases
    def run(x, *weights):
        want = jax.grad(merged, argnums=(0, 2, 3), has_aux=True)(x, *weights)
        got = {}
        for flatten in (False, True):
            for dtype in ("float32", "bfloat16"):
                gradient = jax.grad(parts, argnums=(0, 1, 2, 3), has_aux=True)
                got[flatten, dtype] = gradient(x.astype(dtype), *weights, layout=layout_of(flatten=flatten))
        return want, got

    ((want_x, want_a, want_b), want_y), results = run(x, base, a, b)
    for (_, dtype), ((to_x, to_base, to_a, to_b), y) in results.items():
        rules = dict(units=128 if dtype == "float32" else 4, dtype=dtype)
        assert_close(y, want_y.astype(dtype), **rules)
        assert_close(to_x, want_x.astype(dtype), **rules)
        assert_close(to_a, want_a, **rules)  # in the dtype of the weights
        assert_close(to_b, want_b, **rules)
        assert not np.any(to_base)


def test_merged_weight_equals_its_formula():
    for kind, (_, _, *sizes) in KINDS.items():
        if kind == "transposed":  # models store no weight with this layout
            continue
        base, a, b = (np.random.default_rng(1).normal(size=size) for size in sizes)
        want = base + 0.5 * np.einsum(UPDATES[kind], a, b)
        for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2**-8)):
            node = LowRank(base=jnp.asarray(base, dtype), lora_a=jnp.asarray(a), lora_b=jnp.asarray(b), scale=0.5)
            assert node.array().dtype == dtype
            assert_allclose(np.asarray(node.array(), np.float64), want, rtol=tolerance, atol=2 * tolerance)


def test_merging_is_computed_in_float32():
    a = jnp.full((1, 1), 1 + 2**-10)  # 1 in bfloat16
    node = LowRank(base=-jnp.ones((1, 1), jnp.bfloat16), lora_a=a, lora_b=jnp.ones((1, 1)), scale=1.0)
    assert node.array().item() == 2**-10


def test_incompatible_shapes_are_refused():
    node = LowRank(base=jnp.zeros((8, 6)), lora_a=jnp.zeros((8, 2)), lora_b=jnp.zeros((3, 6)), scale=1.0)
    with refused(ConfigError, "rank=2", "rank=3"):
        einsum("l embed, embed mlp -> l mlp", jnp.zeros((5, 8)), node)


# --- initialization ---


@pytest.fixture(scope="module")
def plain():
    return filled(SPLIT)


@pytest.fixture(scope="module")
def adapted(plain):
    return trained(plain, SPLIT_PAIRS)


@pytest.fixture(scope="module")
def initialized(plain):
    return add_lora(plain, FEW_PAIRS, key=jax.random.key(0))


@pytest.mark.slow
def test_new_factors_change_no_logits(plain, initialized):
    tokens = some_tokens(4, 8)
    assert_array_equal(logits(initialized, tokens), logits(plain, tokens))
    kept = named_leaves(plain)
    for name, leaf in named_leaves(initialized).items():
        assert name in pairs(initialized) or leaf is kept[name.removesuffix(".base")]


def test_factors_are_initialized_as_in_peft(initialized):
    """A is uniform within 1 / sqrt(fan_in), with a different key for each weight, and B is zero."""
    words, drawn = axes(initialized), {}
    fans = {"embed": 16, "heads head_dim": 32, "mlp": 24}
    for name, leaf in pairs(initialized).items():
        if name.endswith(".lora_b"):
            assert not np.any(leaf)
        else:
            drawn[name] = np.asarray(leaf).ravel() * fans[" ".join(words[name][1:-1])] ** 0.5
            assert 0.9 < np.max(drawn[name]) <= 1 and -1 <= np.min(drawn[name]) < -0.9
    assert np.std(np.concatenate(list(drawn.values()))) == pytest.approx(3**-0.5, rel=0.05)
    assert len({round(float(each[0]), 5) for each in drawn.values()}) == len(drawn)


def test_axis_names_of_factors():
    words = axes(shapes())
    own = {name.removeprefix("scanned_layers.0."): " ".join(here) for name, here in words.items()}
    assert own["unit.0.mixer.query.base"] == "layers embed heads head_dim"
    assert own["unit.0.mixer.query.lora_a"] == "layers embed rank"
    assert own["unit.0.mixer.query.lora_b"] == "layers rank heads head_dim"
    assert own["unit.0.mixer.out.lora_a"] == "layers heads head_dim rank"
    assert own["unit.0.mixer.out.lora_b"] == "layers rank embed"
    assert own["unit.1.mixer.qkv.lora_b"] == "layers rank qkv_heads head_dim"
    assert own["unit.1.mlp.gate_up.lora_b"] == "layers rank inputs mlp"
    assert own["unit.1.mlp.down.lora_a"] == "layers mlp rank"


def test_abstract_models_get_abstract_factors(initialized):
    layout = ed.Layout.create(fsdp=4, tensor=2)
    placed = dict(layout=layout, precision=ed.Precision(params=jnp.bfloat16))
    model = shapes(FEW_PAIRS, SPLIT, **placed)
    leaves, real = named_leaves(model), named_leaves(initialized)
    for name, leaf in leaves.items():
        assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.mesh == layout.mesh
        assert leaf.shape == real[name].shape and leaf.dtype == jnp.bfloat16
    assert leaves["scanned_layers.0.unit.0.mixer.query.lora_a"].sharding.spec == P(None, "fsdp", None)
    assert leaves["scanned_layers.0.unit.0.mixer.query.lora_b"].sharding.spec == P(None, None, "tensor", None)
    assert leaves["scanned_layers.0.unit.0.mlp.down.lora_a"].sharding.spec == P(None, "tensor", None)
    assert "scanned_layers.0.unit.0.mixer.query.lora_b" in describe(model)
    assert jax.tree.structure(merge_lora(model)) == jax.tree.structure(ed.abstract(SPLIT, **placed))


OTHERS = dict(
    rank=2, alpha=3.0, targets=("*.mlp.down",), rank_stabilized=True, dtype="bfloat16", dora=True, init="pissa",
    rank_pattern=(("*.down", 2),), alpha_pattern=(("*.query", 2.0),),
)  # fmt: skip


@pytest.mark.slow(fast=("rank",))
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LoRAConfig)])
def test_every_lora_setting_takes_effect(field):
    def described(config):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes(config))

    assert not eqx.tree_equal(described(CONFIG), described(dataclasses.replace(CONFIG, **{field: OTHERS[field]})))


def test_lora_scales():
    assert LoRAConfig(rank=8, alpha=4.0).scale == 0.5
    assert LoRAConfig(rank=16, alpha=4.0, rank_stabilized=True).scale == 1.0


def test_ranks_and_alphas_by_pattern():
    """The first matching pattern is used. Each pattern must match a weight with factors."""
    lora = LoRAConfig(
        rank=8, alpha=4.0, targets=("*.query", "*.up", "*.down"), rank_stabilized=True,
        rank_pattern=(("*.mlp.down", 1), ("*.mlp.*", 2)), alpha_pattern=(("*.up", 3.0),),
    )  # fmt: skip
    nodes = low_rank_weights(shapes(lora, SPLIT))
    kinds = {path.rpartition(".")[2]: (node.lora_a.shape[-1], node.scale) for path, node in nodes.items()}
    assert kinds == {"query": (8, 4 / 8**0.5), "up": (2, 3 / 2**0.5), "down": (1, 4.0)}
    for field, pattern, value in (
        ("rank_pattern", "*.out", 2),
        ("alpha_pattern", "*.gate", 2.0),
        ("rank_pattern", "*.up", 0),
        ("alpha_pattern", "*.up", -1.0),
    ):
        with refused(ConfigError, f"LoRAConfig.{field}", f"'{pattern}'"):
            shapes(dataclasses.replace(lora, **{field: ((pattern, value),)}), SPLIT)


# --- invariants ---


def gradient_of_pairs(model, tokens):
    """Return the logits, and gradients of a function of the logits by factor path."""

    @jax.jit
    def run(weights, model, tokens):
        def loss(weights):
            logits = replaced(model, weights)(tokens).logits
            return jnp.sum(jnp.sin(logits)), logits

        return jax.grad(loss, has_aux=True)(weights)

    gradient, logits = run(pairs(model), model, tokens)
    return logits, gradient


@pytest.fixture(scope="module")
def expected(adapted):
    return gradient_of_pairs(adapted, some_tokens(4, 8))


@pytest.mark.slow
def test_scan_equals_loop_with_remat(adapted, expected):
    changed = gradient_of_pairs(adapted.replace(scan=False, remat="full"), some_tokens(4, 8))
    jax.tree.map(lambda a, b: assert_close(a, b, units=256), changed, expected)


@pytest.mark.slow
def test_sharded_equals_single_device(plain, initialized, adapted, expected):
    layout = ed.Layout.create(fsdp=4, tensor=2)
    placed = plain.place(layout)
    model = trained(placed, SPLIT_PAIRS)
    here = pairs(add_lora(placed, FEW_PAIRS, key=jax.random.key(0)))
    for name, leaf in here.items():
        assert leaf.sharding == pairs(model)[name].sharding
    jax.tree.map(assert_array_equal, here, pairs(initialized))
    jax.tree.map(lambda a, b: assert_close(a, b, units=512), gradient_of_pairs(model, some_tokens(4, 8)), expected)
    merged, whole = named_leaves(merge_lora(model)), named_leaves(merge_lora(adapted))
    for name, leaf in merged.items():
        assert leaf.sharding == named_leaves(placed)[name].sharding
        assert_allclose(leaf, whole[name], rtol=0, atol=1e-6, err_msg=name)


def test_merging_removes_factors_and_changes_no_logits(plain, adapted, expected):
    merged = merge_lora(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(plain)
    assert_close(logits(merged, some_tokens(4, 8)), expected[0], units=128)
    assert np.abs(logits(plain, some_tokens(4, 8)) - expected[0]).max() > 0.1
    assert merge_lora(merged) is merged


@pytest.mark.slow
def test_generation_through_a_cache():
    prompt, model = some_tokens(2, 5), trained(filled(FUSED), FUSED_PAIRS)
    got = ed.generate(model, prompt, max_new_tokens=4, sampler=ed.Greedy())
    want = np.argmax(logits(merge_lora(model), jnp.concatenate([prompt, got], axis=1)), axis=-1)
    assert_array_equal(got, want[:, 4:-1])


# --- training ---


def batch() -> Batch:
    return Batch(tokens=some_tokens(4, 8))


def optimizer(**changes) -> OptimizerConfig:
    settings = dict(trainable=LORA_WEIGHTS, learning_rate=0.02, schedule="constant", warmup_steps=0)
    return OptimizerConfig(**(settings | changes))


@pytest.fixture(scope="module")
def run():
    """Return the trainer, the initial weights, the state after three steps and the losses."""
    model = add_lora(filled(FUSED), FUSED_PAIRS, key=jax.random.key(0))
    first, losses = jax.device_get(named_leaves(model)), []
    trainer = Trainer.create(optimizer(), model, steps=10, config=StepConfig(fused_loss=False))
    state = trainer.init(model, key=jax.random.key(1))
    for _ in range(3):
        state, metrics = trainer.step(state, batch())
        losses.append(float(metrics.loss))
    return trainer, first, state, losses


@pytest.mark.slow
def test_training_changes_only_the_factors(run):
    _, before, state, losses = run
    after = named_leaves(state.model)
    assert before.keys() == after.keys()
    moved = {name for name in before if np.any(before[name] != np.asarray(after[name]))}
    assert moved == set(pairs(state.model))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_frozen_weights_have_no_optimizer_state(run):
    _, _, state, _ = run
    size = sum(leaf.size for leaf in pairs(state.model).values())
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim) == 2 * size


@pytest.mark.slow
def test_base_weights_are_never_trained(run):
    model = run[2].model
    everything = Trainer.create(optimizer(trainable=("*",)), model, steps=10).trainable
    assert everything == {name for name in axes(model) if not name.endswith(".base")}
    with refused(ConfigError, "trainable", "'*.base'"):
        Trainer.create(optimizer(trainable=("*.base",)), model, steps=10)


@pytest.mark.slow
def test_factors_are_restored_from_checkpoints(run, tmp_path):
    trainer, _, state, _ = run
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, data_state={}, config={}, wait=True)
        back = checkpoints.restore(trainer.abstract(shapes(FUSED_PAIRS, FUSED), key=jax.random.key(1))).tree
        assert jax.tree.structure(back.optimizer) == jax.tree.structure(state.optimizer)
        jax.tree.map(assert_array_equal, named_leaves(back.model), named_leaves(state.model))
        with refused(CheckpointError, "qkv.lora_a: float32[2, 16, 4]"):
            checkpoints.restore(dataclasses.replace(back, model=ed.abstract(FUSED)))


def test_muon_treats_factors_as_matrices():
    words = axes(shapes())
    expected = {
        "layers embed rank": ((1,), (2,)),
        "layers heads head_dim rank": ((1, 2), (3,)),
        "layers mlp rank": ((1,), (2,)),
        "layers rank heads head_dim": ((1,), (2, 3)),
        "layers rank kv_heads head_dim": ((1,), (2, 3)),
        "layers rank qkv_heads head_dim": ((1,), (2, 3)),
        "layers rank mlp": ((1,), (2,)),
        "layers rank inputs mlp": ((1,), (3,)),
        "layers rank embed": ((1,), (2,)),
    }
    found = {" ".join(words[name]): muon_dimensions(words[name]) for name in matching(words, LORA_WEIGHTS, "")}
    assert {name: (each.reduction_axis, each.output_axis) for name, each in found.items()} == expected


# --- refused settings ---


@pytest.mark.slow(fast=("embedding.table",))
@pytest.mark.parametrize(
    "pattern, path",
    [
        pytest.param("embedding.*", "embedding.table", id="embedding.table"),
        pytest.param("head.kernel", "head.kernel", id="head.kernel"),
        pytest.param("*norm*", "norm.scale", id="norm.scale"),
        pytest.param("*.qkv_bias", "qkv_bias", id="qkv_bias"),
        pytest.param("*.sink", "sink", id="sink"),
    ],
)
def test_only_matrices_of_blocks_can_be_targets(pattern, path):
    with refused(ConfigError, "LoRAConfig.targets=", repr(pattern), path):
        shapes(LoRAConfig(targets=("*.query", pattern)))


def test_wildcard_target_matches_only_matrices():
    found = low_rank_weights(shapes(LoRAConfig(targets=("*",))))
    assert found.keys() == low_rank_weights(shapes(LoRAConfig(targets=("*.mixer.*", "*.mlp.*")))).keys()
    assert not any(word in name for name in found for word in ("norm", "bias", "embedding", "head.", "sink"))


def test_unmatched_patterns_and_repeated_factors_are_refused(plain, adapted):
    with refused(ConfigError, "LoRAConfig.targets", "'*.q_proj'"):
        add_lora(plain, LoRAConfig(targets=("*.query", "*.q_proj")), key=jax.random.key(0))
    with refused(ConfigError, "'scanned_layers.0.unit.0.mixer.key'"):
        add_lora(adapted, LoRAConfig(targets=("*.unit.0.mixer.out",)), key=jax.random.key(0))


@pytest.mark.parametrize(
    "field, value",
    [("rank", 0), ("rank", 2.0), ("alpha", 0.0), ("alpha", float("nan")), ("targets", ()), ("dtype", "int8")],
)
def test_bad_settings_are_refused_by_name(field, value):
    config = LoRAConfig()
    object.__setattr__(config, field, value)  # bypass the type checks, which are active only in tests
    with refused(ConfigError, f"LoRAConfig.{field}="):
        config.__post_init__()


@pytest.mark.slow
def test_product_axes_of_weights():
    assert product_axes(("layers", "embed", "heads", "head_dim")) == (("embed",), ("heads", "head_dim"))
    assert product_axes(("heads", "head_dim", "embed")) == (("heads", "head_dim"), ("embed",))
    assert product_axes(("ngram_features", "streams", "embed")) == (("ngram_features",), ("streams", "embed"))
    assert product_axes(("streams", "embed")) is None  # biases of residual streams
    assert product_axes(("embed", "inputs", "mlp")) == (("embed",), ("inputs", "mlp"))
    for words in ("vocab embed", "embed vocab", "layers norm", "layers heads head_dim", "layers embed"):
        assert product_axes(tuple(words.split())) is None
    with refused(ConfigError, "'vocab embed'"):
        pair_axes(("vocab", "embed"))
