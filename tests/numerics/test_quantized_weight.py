"""Weights in few bits: everything is as with the arrays that they stand for, and nothing moves them."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.quantize import GROUPED, QUANTIZATIONS, group_sizes, quantized
from eqx_decoders.numerics import quantized_weight
from eqx_decoders.numerics.affine_weight import QuantizedWeight, _decoded
from eqx_decoders.numerics.einsum import einsum, grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from eqx_decoders.numerics.low_precision import LowPrecision
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.quantized_weight import matrix_product, quantized_weights, whole_weights
from eqx_decoders.numerics.rounded_weight import round_weights
from eqx_decoders.sharding.axes import axes, frozen, named_leaves, replaced
from eqx_decoders.sharding.layout import WEIGHTS
from eqx_decoders.training.lora import add_lora, merge_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.lora import LORA_WEIGHTS, LoRAConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_close
from tests.errors import refused
from tests.models import draw, layout_of
from tests.numerics.test_grouped_matmul import RAGGED_DOT, TRITON


FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS = ("llama_rope", "mixtral_window", "deepseek3_groups")
LORA = LoRAConfig(rank=2, targets=("*.query", "*.out", "*.down"))


@pytest.fixture(scope="module")
def models() -> dict[str, ed.Decoder]:
    return {name: ed.load_hf(FIXTURES / name) for name in MODELS}


def tokens(model, rows=2, length=7) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, model.config.vocab_size, (rows, length)), jnp.int32)


@eqx.filter_jit
def logits(model, ids):
    return model(ids).logits


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


def same(one, other) -> bool:
    """Whether two trees hold the same bits at the same paths."""
    a, b = named_leaves(one), named_leaves(other)
    return a.keys() == b.keys() and all(a[p].dtype == b[p].dtype and bits(a[p]) == bits(b[p]) for p in a)


# --- the numbers ---


def by_hand(node: QuantizedWeight) -> np.ndarray:
    """The weight, number by number."""
    values, scales = np.asarray(node.values), np.asarray(node.scales)
    values = values.view(jnp.float8_e4m3fn) if values.dtype == np.uint8 else values
    values = values.astype(np.float32)
    lead, outer = values.shape[: node.lead], values.shape[node.lead + node.inner :]
    flat = values.reshape(*lead, node.rows, node.columns)
    scales = scales.reshape(*lead, scales.shape[node.lead], -1)
    zeros = None if node.zeros is None else np.asarray(node.zeros).reshape(scales.shape).astype(np.float32)
    found = np.empty_like(flat)
    for place in np.ndindex(flat.shape):
        *index, row, column = place
        group = row // node.block[0] if scales.shape[-2] > 1 else 0
        where = (*index, group, column // node.block[1])
        found[place] = (flat[place] - (0 if zeros is None else zeros[where])) * scales[where]
    return found.reshape(*lead, *values.shape[node.lead : node.lead + node.inner], *outer)


SHAPES = {  # with how many dimensions it contracts and makes
    "plain": ((12, 10), 1, 1),
    "heads": ((12, 2, 5), 1, 2),
    "out": ((3, 4, 10), 2, 1),
    "experts": ((3, 12, 10), 1, 1),
    "layers": ((2, 3, 4, 10), 2, 1),
}
BLOCKS = {"int8": (99, 1), "int4": (4, 1), "fp8": (12, 1), "fp8_block": (5, 4)}
ERRORS = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 2**-4, "fp8_block": 2**-4}


@pytest.mark.slow(fast=("int8",))
@pytest.mark.parametrize("mode", ["int8", "int4", "fp8", "fp8_block"])
def test_numbers_are_the_nearest_ones(mode):
    """Values times scales are within half a step of the weight, in every block; and rounded again they don't change."""

    @jax.jit
    def run(weights):
        nodes = {n: quantized(w, QUANTIZATIONS[mode], BLOCKS[mode], *SHAPES[n][1:]) for n, w in weights.items()}
        wide = {name: node.dequantized() for name, node in nodes.items()}
        again = {n: quantized(x, QUANTIZATIONS[mode], BLOCKS[mode], *SHAPES[n][1:]) for n, x in wide.items()}
        return nodes, wide, again

    weights = {name: draw(0, shape) for name, (shape, *_) in SHAPES.items()}
    nodes, wide, again = run(weights)
    for name, node in nodes.items():
        assert_close(wide[name], by_hand(node), units=1)
        largest = by_hand(QuantizedWeight(jnp.ones(node.shape), node.scales, None, *SHAPES_OF(node)))
        limit = ERRORS[mode] * largest * QUANTIZATIONS[mode].largest
        assert np.all(np.abs(wide[name] - weights[name]) <= limit * 1.001), name
        stored = {"int8": jnp.int8, "int4": jnp.int4}.get(mode, jnp.uint8)
        assert node.values.dtype == stored and node.scales.dtype == jnp.float32
        assert_close(again[name].dequantized(), wide[name], units=4)
    assert bits(again["plain"].values) == bits(nodes["plain"].values)


def SHAPES_OF(node: QuantizedWeight):
    return node.block, node.inner, node.outer


@pytest.mark.slow
def test_zeros_and_nothing():
    node = quantized(draw(0, (8, 6)), QUANTIZATIONS["int4"], (4, 1), 1, 1)
    zeros = jnp.asarray(np.random.default_rng(1).integers(-8, 9, node.scales.shape), jnp.int8)
    node = QuantizedWeight(node.values, node.scales, zeros, node.block, 1, 1)
    assert_close(node.dequantized(), by_hand(node), units=1)
    for mode in BLOCKS:
        nothing = quantized(jnp.zeros((8, 6)), QUANTIZATIONS[mode], BLOCKS[mode], 1, 1)
        assert not np.any(nothing.dequantized()) and np.isfinite(nothing.scales).all()


def test_bits_match_xlas_dtypes():
    """All of them; NaN, too. E8M0's least is no normal number, and devices may count it as 0."""
    for dtype, bits in ((jnp.float8_e4m3fn, jnp.uint8), (jnp.float4_e2m1fn, jnp.uint4)):
        every = np.arange(2 ** jnp.iinfo(bits).bits, dtype=np.uint8)
        got = jax.jit(lambda x: _decoded(x, jnp.float32))(jnp.asarray(every.astype(bits)))
        want = every.view(dtype).astype(np.float32)
        assert np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(want))
    every = np.arange(1, 256, dtype=np.uint8)
    node = QuantizedWeight(jnp.ones((1, 255), jnp.int8), jnp.asarray(every)[None], None, (1, 1), 1, 1)
    assert np.array_equal(node.dequantized()[0], every.view(jnp.float8_e8m0fnu).astype(np.float32), equal_nan=True)


# --- products ---

PRODUCTS = {  # pattern, shapes of both, and dimensions that the weight contracts and makes
    "up": ("b l d, d f -> b l f", (2, 5, 12), (12, 10), 1, 1),
    "query": ("... d, d h k -> ... h k", (2, 5, 12), (12, 2, 5), 1, 2),
    "out": ("b l h k, h k d -> b l d", (2, 5, 3, 4), (3, 4, 10), 2, 1),
    "back": ("b l f, d f -> b l d", (2, 5, 10), (12, 10), 1, 1),
    "experts": ("e b t d, e d f -> e b t f", (3, 2, 4, 12), (3, 12, 10), 1, 1),
    "few": ("b l d, e d f -> b l e f", (2, 5, 12), (3, 12, 10), 1, 1),
    "fewer": ("b l e f, e f d -> b l d", (2, 5, 3, 12), (3, 12, 10), 1, 1),
}


@pytest.mark.slow(fast=("back",))
@pytest.mark.parametrize(
    "kind",
    PRODUCTS,
)
def test_products_match_the_array(kind):
    """And their gradients, plain and flattened, in f32 and bf16, for every kind of scales."""
    pattern, left, right, inner, outer = PRODUCTS[kind]
    x, w = draw(0, left), draw(1, right)
    nodes = {
        mode: quantized(w, QUANTIZATIONS[mode], BLOCKS[mode], inner, outer) for mode in ("int8", "int4", "fp8_block")
    }
    nodes["divided"] = quantized(w, QUANTIZATIONS["fp8_block"], (4, 4), inner, outer)
    zeros = jnp.asarray(np.random.default_rng(2).integers(-8, 9, nodes["int4"].scales.shape), jnp.int8)
    nodes["zeros"] = QuantizedWeight(nodes["int4"].values, nodes["int4"].scales, zeros, *SHAPES_OF(nodes["int4"]))

    def both(x, node, flatten, dtype):
        y, back = jax.vjp(
            lambda x: einsum(pattern, x.astype(dtype), node, layout=layout_of(flatten=flatten), out_dtype=jnp.float32),
            x,
        )
        return y, back(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))[0]

    @jax.jit
    def run(x, nodes):
        want = {mode: both(x, node.dequantized(), False, "float32") for mode, node in nodes.items()}
        got = {
            (flatten, dtype): {mode: both(x, node, flatten, dtype) for mode, node in nodes.items()}
            for flatten in (False, True)
            for dtype in ("float32", "bfloat16")
        }
        return want, got

    want, got = run(x, nodes)
    for (_, dtype), found in got.items():
        assert_close(found, want, units=16 if dtype == "float32" else 2, dtype=dtype)


@pytest.mark.slow(fast=("int8",))
@pytest.mark.parametrize("mode", [*BLOCKS, "zeros"])
def test_long_products_are_computed_chunk_by_chunk(mode, monkeypatch):
    """The loop of a CPU: few rows of the weight at a time, whole groups of them."""
    monkeypatch.setattr(quantized_weight, "_CHUNK_ELEMENTS", 60)
    kind = "int4" if mode == "zeros" else mode
    node = quantized(draw(0, (24, 10)), QUANTIZATIONS[kind], BLOCKS[kind], 1, 1)
    if mode == "zeros":
        node = QuantizedWeight(node.values, node.scales, jnp.ones(node.scales.shape, jnp.int8), *SHAPES_OF(node))
    steps = {"int8": 6, "int4": 4, "fp8": 12, "fp8_block": 24, "zeros": 4}  # five rows do not divide 24
    assert quantized_weight._chunk_rows(node) == steps[mode]
    x = draw(1, (3, 24))
    got = jax.jit(lambda x, node: matrix_product(np.dtype("float32"), x, node))(x, node)
    assert_close(got, x @ node.dequantized(), units=8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int4", "int8", "fp8"])
def test_grouped_products_are_those_of_the_arrays(mode):
    """Of sorted rows with experts, in all forms, with gradients of the rows; also below a low-rank pair."""
    counts, rows = jnp.asarray((9, 0, 4, 3)), 24
    x, w, g = draw(0, (rows, 12)), draw(1, (4, 12, 6)), draw(2, (rows, 6))
    node = quantized(w, QUANTIZATIONS[mode], BLOCKS[mode], 1, 1)
    pair = LowRank(base=node, lora_a=draw(3, (4, 12, 2)), lora_b=draw(4, (4, 2, 6)), scale=0.5)

    @jax.jit
    def run(x, g, node, pair):
        array, added = node.dequantized(), LowRank(node.dequantized(), pair.lora_a, pair.lora_b, pair.scale)
        found = []
        for form in (RAGGED_DOT, GroupedForm("blocks", 8), TRITON):
            run = lambda x, w: grouped_products(x, (w,), counts, form=form)[0][:16]  # noqa: B023, E731
            for one, other in ((node, array), (pair, added)):
                results = [jax.vjp(lambda x, w=w: run(x, w), x) for w in (one, other)]  # noqa: B023
                found.append([(y, back(g[:16])[0][:16]) for y, back in results])
        return found

    for got, want in run(x, g, node, pair):
        assert_close(got, want, units=32)


# --- models ---


def quantize_groups(model: ed.Decoder, mode: str, group_size: int) -> ed.Decoder:
    """Quantize all matrices, with `group_size` if the mode has groups."""
    return ed.quantize(model, mode, group_size=group_size if mode in GROUPED else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_arrays(name, models):
    """One pass, and one token after the other with a cache (latent attention then uses weights in another way)."""
    mode = {"llama_rope": "int4", "mixtral_window": "int8", "deepseek3_groups": "fp8"}[name]
    model = quantize_groups(models[name], mode, 4)
    plain, ids = ed.dequantize(model), tokens(model)
    assert_close(logits(model, ids), logits(plain, ids), units=512)
    assert not quantized_weights(plain) and len(quantized_weights(model)) > 6
    assert {leaf.dtype for leaf in jax.tree.leaves(plain)} == {np.dtype("float32")}

    @eqx.filter_jit
    def pieces(model, ids):
        cache, found = ed.init_cache(model.config, 2, 16, dtype=jnp.float32), []
        for begin, end in ((0, 4), (4, 5)):
            out = model(ids[:, begin:end], cache=cache)
            found, cache = [*found, out.logits], out.cache
        return jnp.concatenate(found, axis=1)

    assert_close(pieces(model, ids), logits(plain, ids)[:, :5], units=512)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["int8", "int4", "fp8_block"])
def test_loops_and_meshes_change_nothing(name, mode, models):
    """Weights that are quantized on a mesh are the same bits; sums differ by rounding."""
    model = quantize_groups(models[name], mode, 2)
    ids = tokens(model, rows=4, length=8)
    want = logits(model, ids)
    assert_close(logits(model.replace(scan=False), ids), want, units=512)
    latent = name == "deepseek3_groups"  # its ranks allow for less
    sizes: list[dict[str, Any]] = [
        dict(data=2, fsdp=2, tensor=2),
        dict(fsdp=1 if latent else 2, tensor=2, fsdp_transpose=2, data=-1),
    ]
    sizes += [dict(expert=2, tensor=4), dict(expert=4, tensor=2, weights=WEIGHTS | {"q_rank": ()})] if latent else []
    for size in sizes:
        layout = ed.Layout.create(**size)
        placed = model.place(layout)
        assert_close(logits(placed, ids), want, units=1024)
        made = quantize_groups(models[name].place(layout), mode, 2)
        assert same(made, model)
        assert all(x.sharding == y.sharding for x, y in zip(*map(jax.tree.leaves, (made, placed)), strict=True))


@pytest.mark.slow
def test_values_are_split_like_weights(models):
    layout = ed.Layout.create(data=2, fsdp=2, tensor=2)
    model = ed.quantize(
        ed.abstract(models["llama_rope"].config, layout=layout), {"*.gate": "int8", "*.out": "int4"}, group_size=4
    )
    gate, out = model.scanned_layers[0].unit[0].mlp.gate, model.scanned_layers[0].unit[0].mixer.out
    assert isinstance(gate.values, jax.ShapeDtypeStruct) and gate.values.dtype == jnp.int8
    assert (
        gate.values.sharding.spec
        == ed.abstract(models["llama_rope"].config, layout=layout).scanned_layers[0].unit[0].mlp.gate.sharding.spec
    )
    assert gate.scales.shape == (2, 1, 40) and "tensor" in gate.scales.sharding.spec[2]
    assert out.values.shape == (2, 4, 16, 24) and out.scales.shape == (2, 16, 24)
    assert axes(model)["scanned_layers.0.unit.0.mixer.out.scales"] == ("layers", "groups", "embed")
    plain = ed.dequantize(model)
    assert plain.scanned_layers[0].unit[0].mlp.gate.sharding == gate.values.sharding


@pytest.mark.slow
def test_a_quantized_model_writes(models):
    """The tokens are those of the arrays."""
    model = ed.quantize(models["llama_rope"], "int8")
    prompt = np.asarray([[5, 9, 3, 7]])
    one, other = (ed.generate(m, prompt, max_new_tokens=6) for m in (model, ed.dequantize(model)))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


# --- which weights ---


@pytest.mark.slow
def test_which_weights_are_quantized(models):
    model = models["deepseek3_groups"]
    chosen = set(quantized_weights(ed.quantize(ed.abstract(model.config), "int8")))
    names = {"query_down", "query_up", "kv_down", "kv_up", "out", "gate", "up", "down"}
    assert {path.rpartition(".")[2] for path in chosen} == names
    modes = {"*.mlp.*": "int4", "*.shared.*": "fp8", "*.kv_up": None, "head.kernel": "fp8", "*": "int8"}
    nodes = quantized_weights(ed.quantize(ed.abstract(model.config), modes, group_size=4))
    kinds = {path: node.values.dtype for path, node in nodes.items()}
    assert all((kind == jnp.int4) == (".mlp." in path) for path, kind in kinds.items())  # the first pattern counts
    assert kinds["head.kernel"] == jnp.uint8 and not any("kv_up" in path for path in kinds)
    parts = {f"{path}.{part}" for path in chosen for part in ("values", "scales")}
    assert frozen(ed.quantize(ed.abstract(model.config), "int8")) - frozen(model) == parts


@pytest.mark.parametrize(
    ("modes", "options", "names"),
    [
        ("int3", {}, ["'int3'", "int4"]),
        ({"*": "w8a8"}, {}, ["'w8a8'", "int8"]),
        ({}, {}, ["modes={}"]),
        ({"*.qkv": "int8"}, {}, ["'*.qkv'"]),
        ({"*.table": "int8"}, {}, ["modes['*.table']", "embedding.table"]),
        ({"*norm*": "int8"}, {}, ["modes['*norm*']"]),
        ("int4", {}, ["group_size=128", "64", "32", "24 rows", "scanned_layers.0.unit.0.mixer.query"]),
        ("int4", dict(group_size=7), ["group_size=7", "24 rows", "scanned_layers.0.unit.0.mixer.query"]),
        ("int4", dict(group_size=0), ["group_size=0"]),
        ("int8", dict(group_size=4), ["group_size=4", "int4", "nf4", "'int8'"]),
    ],
    ids=[
        "int3",
        "w8a8",
        "no modes",
        "no match",
        "table",
        "norms",
        "large groups",
        "odd groups",
        "empty groups",
        "unused groups",
    ],
)
def test_wrong_modes_and_groups_are_refused(modes, options, names, models):
    with refused(ConfigError, *names):
        ed.quantize(models["llama_rope"], modes, **options)


def test_uses_the_largest_group_size_that_divides_the_rows():
    """As in SmolLM2, whose 576 columns are no multiple of 128."""
    mlp = MLPConfig(mlp_dim=128)
    blocks = tuple(ed.BlockConfig(mixer=None, mlp=mlp, pre_mlp_norm=RMSNormConfig()) for _ in range(2))
    model = ed.abstract(ed.DecoderConfig(vocab_size=8, embed_dim=96, blocks=blocks, final_norm=RMSNormConfig()))
    sizes = {
        path.rpartition(".")[2]: node.block for path, node in quantized_weights(ed.quantize(model, "int4")).items()
    }
    assert sizes == {"gate": (32, 1), "up": (32, 1), "down": (128, 1)}
    assert group_sizes(ed.quantize(model, "int4")) == {128: 1, 32: 2}
    assert group_sizes(ed.quantize(model, "int4", group_size=16)) == {16: 3}
    assert group_sizes(ed.quantize(model, "int8")) == {}


def test_quantized_weights_are_not_quantized_again(models):
    model = ed.quantize(ed.abstract(models["llama_rope"].config), {"*.mlp.*": "int8"})
    with refused(ConfigError, "mlp", "dequantize"):
        ed.quantize(model, {"*.out": "int8"})
    rounded = round_weights(model, LowPrecision(), below="scanned_layers")
    assert isinstance(rounded.scanned_layers[0].unit[0].mlp.up, QuantizedWeight)
    assert not isinstance(rounded.scanned_layers[0].unit[0].mixer.out, jax.ShapeDtypeStruct)


# --- low-rank pairs on top ---


@pytest.mark.slow
def test_pairs_are_trained_and_bases_are_not(models):
    """QLoRA: gradients are those beside the arrays, a step moves pairs alone, and merging gives plain weights."""
    base = ed.quantize(models["llama_rope"], {"*.mlp.*": "int4", "*": "int8"}, group_size=4)
    model = add_lora(base, LORA, key=jax.random.key(0))
    noise = lambda path, x: x + 0.1 * draw(5, x.shape) if ".lora_" in jax.tree_util.keystr(path) else x  # noqa: E731
    model = jax.tree_util.tree_map_with_path(noise, model)
    plain = eqx.tree_at(lambda m: m, model, ed.dequantize(model))
    assert isinstance(model.scanned_layers[0].unit[0].mixer.out, LowRank)
    assert isinstance(model.scanned_layers[0].unit[0].mixer.out.base, QuantizedWeight)
    batch = ed.Batch(tokens=tokens(model, 2, 8))

    @eqx.filter_jit
    def gradients(model):
        own = {name: leaf for name, leaf in named_leaves(model).items() if ".lora_" in name}
        loss = lambda own: ed.next_token_loss(replaced(model, own), batch)[0]  # noqa: E731
        return jax.value_and_grad(loss)(own)

    assert_close(gradients(model), gradients(plain), units=512)
    trainer = Trainer.create(OptimizerConfig(trainable=LORA_WEIGHTS, learning_rate=0.1), model, steps=2)
    copied = jax.tree.map(jnp.copy, model)  # a step takes its state's arrays
    state, _ = trainer.step(trainer.init(copied, key=jax.random.key(1)), batch)
    before, after = named_leaves(model), named_leaves(state.model)
    assert all((bits(before[p]) == bits(after[p])) == (".lora_" not in p) for p in before)
    merged = merge_lora(model)
    out = merged.scanned_layers[0].unit[0].mixer.out
    assert out.dtype == jnp.float32 and isinstance(merged.scanned_layers[0].unit[0].mlp.up, QuantizedWeight)
    assert_close(out, merge_lora(plain).scanned_layers[0].unit[0].mixer.out, units=4)
    shapes = merge_lora(add_lora(ed.quantize(ed.abstract(base.config), "int8"), LORA, key=jax.random.key(0)))
    assert shapes.scanned_layers[0].unit[0].mixer.out.shape == out.shape


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
def test_pairs_of_experts_on_a_mesh(mode, models):
    """Few experts on each device, whose rows come in pieces: gradients are those of one device, and of the arrays."""
    base = quantize_groups(models["deepseek3_groups"], mode, 2)
    lora = LoRAConfig(rank=2, targets=("*.mlp.gate", "*.mlp.down", "*.kv_up"), dora=True)
    model = add_lora(base, lora, key=jax.random.key(0))
    batch = ed.Batch(tokens=tokens(model, 4, 32))

    @eqx.filter_jit
    def gradients(model):
        own = {name: leaf + 0.1 for name, leaf in named_leaves(model).items() if ".lora_" in name}
        return jax.value_and_grad(lambda own: ed.next_token_loss(replaced(model, own), batch)[0])(own)

    want = gradients(ed.dequantize(model))
    placed = model.place(ed.Layout.create(expert=4, tensor=2, weights=WEIGHTS | {"q_rank": ()})).replace(remat="full")
    for got in (gradients(model), gradients(placed)):
        assert_close(got, want, units=2048)


def test_the_bases_of_pairs_are_quantized(models):
    model = add_lora(ed.abstract(models["llama_rope"].config), LORA, key=jax.random.key(0))
    model = ed.quantize(model, {"*.out.base": "int4", "*": "int8"}, group_size=4)
    out = model.scanned_layers[0].unit[0].mixer.out
    assert isinstance(out, LowRank) and out.base.values.dtype == jnp.int4
    assert out.lora_a.dtype == jnp.float32
    assert len(quantized_weights(model)) == 7


def test_whole_weights_has_one_leaf_for_a_quantized_weight(models):
    model = ed.quantize(models["llama_rope"], {"*.out": "int8"})
    words, leaves = whole_weights(model)
    assert words == axes(models["llama_rope"]) and list(leaves) == list(named_leaves(models["llama_rope"]))
    assert isinstance(leaves["scanned_layers.0.unit.0.mixer.out"], QuantizedWeight)


# --- checkpoints ---


@pytest.mark.slow
def test_checkpoints_keep_the_bits(models, tmp_path):
    model = ed.quantize(models["llama_rope"], {"*.mlp.*": "int4", "*.out": "fp8", "*": "int8"}, group_size=4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, data_state={}, config={}, wait=True)
        again, _, _ = checkpoints.restore(model)
        assert same(again, model)
        other = ed.quantize(models["llama_rope"], "int8")
        with refused(ed.CheckpointError, "int4"):
            checkpoints.restore(other)
