"""Products in 8 bits are those of a NumPy reference, and how they are run changes nothing."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.numerics.einsum import einsum, grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from eqx_decoders.numerics.low_precision import LowPrecision, quantize_array, seeds_of
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.rounded_weight import Rounded, round_weights
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.lora import LoRAConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_allclose, assert_close
from tests.errors import refused
from tests.laws import check_pieces, forward
from tests.models import draw, filled, layout_of, packed, rich_decoder, run, some_tokens
from tests.numerics.test_grouped_matmul import RAGGED_DOT, TRITON


MLP = "batch length embed, embed mlp -> batch length mlp"
# pattern, shapes of x and weight, and the same for NumPy
KINDS = {
    "in": ("b l embed, embed h k -> b l h k", (2, 7, 24), (24, 2, 5), "bld,dhk->blhk"),
    "out": ("b l h k, h k embed -> b l embed", (2, 7, 2, 5), (2, 5, 24), "blhk,hkd->bld"),
    "experts": ("e t d, e d f -> e t f", (3, 7, 24), (3, 24, 5), "etd,edf->etf"),
    "transposed": ("b l h n, k h n -> b l h k", (2, 7, 3, 6), (5, 3, 6), "blhn,khn->blhk"),
    "one token": ("... d, d f -> ... f", (1, 24), (24, 5), "ld,df->lf"),
}
NUMBERS = {
    "int8": ((127, None), (127, None), (127, None)),
    "w4a8": ((127, None), (7, None), (127, None)),
    "fp8": ((448, ml_dtypes.float8_e4m3fn), (448, ml_dtypes.float8_e4m3fn), (57344, ml_dtypes.float8_e5m2)),
}


def rounded(x, letters, summed, number):
    """`x` rounded to so many steps of the largest number, or to a dtype, and the scale, in NumPy."""
    largest, dtype = number
    over = tuple(letters.index(letter) for letter in summed)
    scale = np.abs(x).max(over, keepdims=True) / np.float32(largest)
    ratio = x * (1 / np.where(scale == 0, 1, scale))
    ratio = np.round(ratio) if dtype is None else ratio.astype(dtype)
    return ratio.astype(np.float64), scale


def aligned(scale, letters, out):
    return np.einsum(f"{letters}->{''.join(c for c in out if c in letters)}", scale).reshape(
        [scale.shape[letters.index(c)] if c in letters else 1 for c in out]
    )


def reference(pattern, mode, x, w, g, *, float_weight=False):
    """The product and both gradients, its sums in f64."""
    (left, right), out = pattern.split("->")[0].split(","), pattern.split("->")[1]
    summed, made, rows = (
        [c for c in a if c in b and c not in d]
        for a, b, d in ((left, right, out), (right, right, left), (left, left, right))
    )
    of_x, of_w, of_g = NUMBERS[mode]
    X, a = rounded(x, left, summed, of_x)
    W, b = rounded(w, right, summed, of_w)
    a, b = aligned(a, left, out), aligned(b, right, out)
    y = np.einsum(pattern, X, W) * a * b
    G, c = rounded(g * b, out, made, of_g)
    to_x = np.einsum(f"{out},{right}->{left}", G, W) * aligned(c, out, left)
    if float_weight:
        return y, to_x, np.einsum(f"{left},{out}->{right}", x.astype(np.float64), g)
    G, c = rounded(g * a, out, rows, of_g)
    return y, to_x, np.einsum(f"{left},{out}->{right}", X, G) * aligned(c, out, right)


@pytest.mark.slow(fast=("one token",))
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_match_numpy(kind):
    """Plain and flattened, all modes, in f32 and bf16; gradients of weights rounded or not."""
    pattern, *shapes, letters = KINDS[kind]
    x, w = (draw(seed, shape) for seed, shape in enumerate(shapes))
    x = x.at[..., 0, :].set(0) if kind != "one token" else x  # rows of zeros
    g = draw(2, jax.eval_shape(lambda: einsum(pattern, x, w)).shape)
    cases = [(mode, same, dtype) for mode in NUMBERS for same in ("same", "float") for dtype in ("float32", "bfloat16")]
    cases = cases if kind == "in" else [("int8", "same", "float32"), ("fp8", "same", "bfloat16")]

    @jax.jit  # one compilation for all
    def run(x, w, g):
        found = {}
        for mode, same, dtype in cases:
            config = LowPrecision(mode=mode, weight_gradient=same)
            for flatten in (False, True):
                layout = layout_of(flatten=flatten)
                product = lambda x, w: einsum(pattern, x, Rounded(w, None, config), layout=layout)  # noqa: B023, E731
                y, back = jax.vjp(product, x.astype(dtype), w)
                found[mode, same, dtype, flatten] = (y, *back(g.astype(dtype)))
        return found

    for (mode, same, dtype, _), got in run(x, w, g).items():
        given = (np.asarray(each.astype(dtype), np.float32) for each in (x, g))
        x_, g_ = given
        want = reference(letters, mode, x_, np.asarray(w), g_, float_weight=same == "float")
        assert [each.dtype for each in got] == [dtype, dtype, "float32"]
        for one, other in zip(got, want, strict=True):
            assert_close(
                np.asarray(one, np.float32), other.astype(np.float32), units=8 if dtype == "float32" else 1, dtype=dtype
            )


# Of normal numbers. Values, gradients of x, and of w: root mean squares
ERRORS = {"int8": (0.0105, 0.0105, 0.0105), "w4a8": (0.135, 0.135, 0.0105), "fp8": (0.04, 0.06, 0.06)}


def test_rounding_error_is_bounded():
    x, w, g = draw(0, (64, 256)), draw(1, (256, 128)), draw(2, (64, 128))

    @jax.jit
    def run(x, w, g):
        found = {}
        for mode in ERRORS:
            config = LowPrecision(mode=mode)
            y, back = jax.vjp(lambda x, w: einsum("r i, i o -> r o", x, Rounded(w, None, config)), x, w)  # noqa: B023
            found[mode] = (y, *back(g))
        return found

    exact = [np.asarray(a) @ np.asarray(b) for a, b in ((x, w), (g, w.T), (x.T, g))]
    for mode, found in run(x, w, g).items():
        for got, want, most in zip(found, exact, ERRORS[mode], strict=True):
            assert most / 2 < np.linalg.norm(got - want) / np.linalg.norm(want) < most


@pytest.mark.slow
def test_zeros_and_non_finite_values():
    """Zeros are zeros; an infinity or NaN makes its row and all gradients that it reaches not finite."""
    config = LowPrecision()

    @jax.jit
    def run(x, w, g):
        y, back = jax.vjp(lambda x, w: einsum("r i, i o -> r o", x, Rounded(w, None, config)), x, w)
        return y, *back(g)

    x, w, g = draw(0, (4, 8)), draw(1, (8, 6)), draw(2, (4, 6))
    for zero in (run(0 * x, w, g), run(x, 0 * w, g), run(x, w, 0 * g)):
        assert all(np.isfinite(each).all() for each in zero)
    assert not run(0 * x, w, g)[0].any() and not run(x, w, 0 * g)[2].any()
    tiny = run(1e-38 * x, w, g)
    assert all(np.isfinite(each).all() for each in tiny)
    for bad in (np.inf, np.nan):
        y, _, to_w = run(x.at[1, 2].set(bad), w, g)
        assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any() and not np.isfinite(to_w).any()
        assert not np.isfinite(run(x, w.at[1, 2].set(bad), g)[0][:, 2]).any()
        _, to_x, to_w = run(x, w, g.at[1, 2].set(bad))
        assert np.isfinite(to_x[0]).all() and not np.isfinite(to_x[1]).any() and not np.isfinite(to_w[:, 2]).any()


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased_and_only_for_gradients():
    config = LowPrecision(gradient_rounding="stochastic")
    x, w, g = draw(0, (32, 16)), draw(1, (16, 8)), draw(2, (32, 8))

    @jax.jit
    @jax.vmap
    def run(seed):
        y, back = jax.vjp(lambda x, w: einsum("r i, i o -> r o", x, Rounded(w, seed, config)), x, w)
        return y, *back(g)

    ys, *gradients = run(jnp.arange(1024, dtype=jnp.float32))
    assert (ys == ys[:1]).all()
    # straight through: gradients of the rounded numbers, not of the exact ones
    X, a = quantize_array(x, (1,), config.formats.activation)
    W, b = quantize_array(w, (0,), config.formats.weight)
    X, W = X.astype(jnp.float32) * a, W.astype(jnp.float32) * b
    for drawn, want in zip(gradients, (g @ W.T, X.T @ g), strict=True):
        error = jnp.abs(jnp.mean(drawn, axis=0) - want)
        assert (jnp.std(drawn, axis=0) > 0).mean() > 0.99
        assert float(jnp.max(error / jnp.std(drawn, axis=0))) < 5 / 32  # five standard deviations of a mean of 1024


@pytest.mark.slow
def test_both_gradients_of_a_product_use_different_random_values():
    """Else their errors would go together."""
    form, x = LowPrecision().formats.gradient, draw(0, (4, 64))
    one, two = (quantize_array(x, (1,), form, seed)[0] for seed in seeds_of(jnp.float32(3)))
    assert 0.1 < (one != two).mean() < 0.9
    assert seeds_of(None) == (None, None)


@pytest.mark.slow
def test_under_vmap():
    x, w = draw(0, (3, 5, 8)), draw(1, (3, 8, 6))

    def one(x, w):
        y, back = jax.vjp(lambda x, w: einsum("l d, d f -> l f", x, Rounded(w, None, LowPrecision())), x, w)
        return y, back(y)

    @jax.jit
    def run(x, w):
        alone = [one(x[index], w[index]) for index in range(3)]
        return jax.vmap(one)(x, w), jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)

    assert_close(*run(x, w), units=4)


# --- grouped products ---


@pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_grouped_products_equal_products_of_each_group(mode):
    """In all forms; but columns of gradients have one scale for all groups."""
    counts, rows = (9, 0, 4, 3), 24
    x, w, g = draw(0, (rows, 16)), draw(1, (4, 16, 6)), draw(2, (rows, 6))

    @jax.jit
    def run(x, w, g):
        found = []
        for form in (RAGGED_DOT, GroupedForm("blocks", 8), TRITON, GroupedForm("megablox", interpret=True)):
            weight = lambda w: (Rounded(w, None, LowPrecision(mode=mode)),)  # noqa: E731
            product = lambda x, w: grouped_products(x, weight(w), jnp.asarray(counts), form=form)[0]  # noqa: B023, E731
            y, back = jax.vjp(product, x, w)
            found.append((y, *back(g)))
        return found

    ends = np.cumsum(counts)
    slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    x_, w_, g_ = (np.asarray(each) for each in (x, w, g))
    parts = [reference("ri,io->ro", mode, x_[s], w_[e], g_[s]) for e, s in enumerate(slices) if s.start < s.stop]
    X, a = rounded(x_, "ri", "i", NUMBERS[mode][0])
    G, c = rounded(a[: ends[-1]] * g_[: ends[-1]], "ro", "r", NUMBERS[mode][2])
    for y, to_x, to_w in run(x, w, g):
        for got, index in ((y, 0), (to_x, 1)):
            assert_close(got[: ends[-1]], np.concatenate([part[index] for part in parts]).astype(np.float32), units=8)
        want = np.stack([X[s].T @ G[s] * c for s in slices]).astype(np.float32)
        assert_close(to_w, want, units=8)


def test_grouped_products_with_megablox_never_use_ragged_dot():
    """On the TPUs that use megablox, XLA multiplies all rows by all weights. Nothing is compiled."""
    x, w, counts = draw(0, (24, 16)), draw(1, (4, 16, 6)), jnp.asarray((9, 0, 4, 3))
    form = GroupedForm("megablox", interpret=True)

    def product(x, w):
        weight = Rounded(w, None, LowPrecision(mode="int8"))
        return grouped_products(x, (weight,), counts, form=form)[0]

    def gradients(x, w):
        y, back = jax.vjp(product, x, w)
        return back(y)

    assert "ragged_dot" not in str(jax.make_jaxpr(gradients)(x, w))


# --- models ---


INT8, FLOAT_GRADIENT = LowPrecision(), LowPrecision(weight_gradient="float")
RMS = RMSNormConfig()


@pytest.fixture(scope="module")
def model():
    return filled(rich_decoder(), low_precision=INT8)


def assert_same(got, want, *, most=0.02):
    """Up to a few numbers that, an ulp apart, are rounded to neighbors. Rounding itself costs three times as much."""
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        gap, size = (np.linalg.norm(np.ravel(each)) for each in (one - np.asarray(other), other))
        assert gap <= most * size


@pytest.mark.slow
def test_loop_remat_and_mesh_change_nothing(model):
    """All together; `packed` has rows of padding."""
    tokens, segments = packed(4)
    other = model.place(ed.Layout.create(data=2, fsdp=2, tensor=2)).replace(scan=False, remat="full")
    assert_same(*(run(each, tokens, segments) for each in (other, model)))


@pytest.mark.slow
def test_each_alone_changes_nothing(model):
    tokens, segments = packed(4)
    want = run(model, tokens, segments)
    meshes: list[dict[str, Any]] = [dict(fsdp=8), dict(fsdp_transpose=2, context=4), dict(tensor_sequence=2, data=4)]
    others = [model.replace(scan=False), model.replace(remat="minimal_with_quantization")]
    for other in (*others, *(model.place(ed.Layout.create(**sizes)) for sizes in meshes)):
        assert_same(run(other, tokens, segments), want)


@pytest.mark.slow
def test_packed_documents_and_decoding(model):
    """Every token's row has a scale of its own: what else is in the batch changes none."""
    check_pieces(model, (3, 1))


@pytest.mark.slow
def test_only_the_named_weights_are_rounded(model):
    words = axes(model)
    names = {"query", "key", "value", "out", "gate", "up", "down", "qkv", "gate_up"}
    assert {path.rpartition(".")[2] for path in INT8.chosen(words)} == names
    some = round_weights(model, LowPrecision(weights=("*.mlp.up", "*.unit.1.mixer.*")), below="scanned_layers")
    found = {path for path, leaf in _nodes(some) if isinstance(leaf, Rounded)}
    assert found == {
        "scanned_layers.0.unit.0.mlp.up",
        "scanned_layers.0.unit.1.mixer.qkv",
        "scanned_layers.0.unit.1.mixer.out",
    }
    tokens, segments = packed(2)
    plain = forward(model.replace(low_precision=None), tokens, None, segments)
    value = LowPrecision(weights=("scanned_layers.0.unit.1.mlp.down",), weight_gradient="float")
    some = model.replace(low_precision=value)
    got = forward(some, tokens, None, segments)
    assert 1e-4 < float(jnp.linalg.norm(got - plain) / jnp.linalg.norm(plain)) < 0.02
    gradients, exact = named_leaves(eqx.filter_eval_shape(run, some, tokens, segments)[1]), named_leaves(model)
    assert all(gradients[path].dtype == exact[path].dtype for path in exact)


def _nodes(tree):
    from eqx_decoders.sharding.axes import path_name

    places = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Rounded))
    return [(path_name(path), node) for path, node in places]


@pytest.mark.parametrize(
    ("weights", "names"),
    [
        (("head.*",), ["LowPrecision.weights='head.*'", "head.kernel"]),
        (("scanned_layers.*", "embedding.table"), ["LowPrecision.weights='embedding.table'"]),
        (("*.pre_mlp_norm.scale",), ["LowPrecision.weights='*.pre_mlp_norm.scale'"]),
        (("*.nothing",), ["'*.nothing'"]),
    ],
    ids=["head", "table", "norm", "no match"],
)
def test_refuses_weights_that_are_not_matrices_of_blocks(model, weights, names):
    with refused(ConfigError, *names):
        LowPrecision(weights=weights).chosen(axes(model))


def test_wrong_settings_are_refused():
    with refused(ConfigError, "LowPrecision.weights=()"):
        LowPrecision(weights=())
    with refused(ConfigError, "LowPrecision.gradient_rounding='stochastic'", "fp8"):
        LowPrecision(mode="fp8", gradient_rounding="stochastic")


@pytest.mark.slow
def test_low_rank_pairs_are_trained_beside_a_rounded_base(model):
    """The base is rounded, the pair is not; no gradient reaches the base."""
    pair = LowRank(base=draw(1, (8, 6)), lora_a=draw(2, (8, 2)), lora_b=draw(3, (2, 6)), scale=1.5)
    x = draw(0, (5, 8))
    rounded_pair = eqx.tree_at(lambda pair: pair.base, pair, Rounded(pair.base, None, INT8))
    got, back = jax.vjp(lambda pair: einsum("l d, d f -> l f", x, pair), rounded_pair)
    alone = einsum("l d, d f -> l f", x, Rounded(pair.base, None, INT8))
    assert_close(got, alone + 1.5 * (x @ pair.lora_a) @ pair.lora_b, units=8)
    (gradient,) = back(got)
    assert not gradient.base.values.any() and gradient.lora_a.any() and gradient.lora_b.any()
    adapted = add_lora(model, LoRAConfig(targets=("*.mixer.query",)), key=jax.random.key(0))
    chosen = INT8.chosen(axes(adapted))
    assert "scanned_layers.0.unit.0.mixer.query.base" in chosen and not any(path.endswith("lora_a") for path in chosen)
    tokens = some_tokens(2, 5)
    logits = eqx.filter_jit(lambda model: model(tokens).logits)
    assert_close(logits(adapted), logits(model), units=8)  # a new pair adds nothing


MIXER = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
EXPERTS = ExpertsConfig(num_experts=4, num_experts_per_token=2, mlp_dim=8, router=RouterConfig(), capacity_factor=4.0)


def experts_decoder(**changes):
    block = ed.BlockConfig(
        mixer=MIXER, mlp=dataclasses.replace(EXPERTS, **changes), pre_mixer_norm=RMS, pre_mlp_norm=RMS
    )
    return ed.DecoderConfig(vocab_size=32, embed_dim=16, blocks=(block,) * 2, final_norm=RMS)


@pytest.mark.slow
def test_all_implementations_of_experts_round_equally():
    """Rows have scales of their own. Gradients of weights have those of all rows of a product, which differ."""
    model, (tokens, segments) = filled(experts_decoder(), low_precision=FLOAT_GRADIENT), packed(2)
    dense = run(model.replace(experts="dense"), tokens, segments)
    for form in ("dropless", "capacity"):
        assert_same(run(model.replace(experts=form), tokens, segments), dense)


@pytest.mark.slow
def test_experts_on_a_mesh():
    config = experts_decoder(capacity_factor=None)
    model, (tokens, segments) = filled(config, low_precision=FLOAT_GRADIENT), packed(4)
    want = run(model, tokens, segments)
    meshes: list[dict[str, Any]] = [dict(fsdp=2, expert=4), dict(data=2, fsdp=2, tensor=2)]
    for sizes in meshes:
        # a device has a part of an expert's hidden features: rows of the last product have a scale on each
        most = 0.02 if "expert" in sizes else 0.1
        assert_same(run(model.place(ed.Layout.create(**sizes)), tokens, segments), want, most=most)


@pytest.mark.slow
def test_stages_of_a_pipeline():
    rounding = dataclasses.replace(FLOAT_GRADIENT, gradient_rounding="stochastic")
    model, (tokens, segments) = filled(rich_decoder(), low_precision=rounding), packed(4)
    layout = ed.Layout.create(stage=2, fsdp=2, data=2)
    piped = model.place(layout).replace(pipeline=ed.Pipeline(microbatches=2))
    assert_same(*(run(each, tokens, segments) for each in (piped, model)))
    assert np.isfinite(run(piped, tokens, segments, jax.random.key(0))[1].head.kernel).all()  # seeds go along


@pytest.mark.slow
def test_latents_are_read_with_the_same_weights():
    """What a cache holds is multiplied by the rounded weight, too, but not rounded itself: the rest is equal."""
    mixer = LatentAttentionConfig(
        num_heads=4, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4, rope=Rope(theta=100.0)
    )
    block = ed.BlockConfig(mixer=mixer, mlp=None, pre_mixer_norm=RMS)
    config = ed.DecoderConfig(vocab_size=32, embed_dim=16, blocks=(block,) * 2, final_norm=RMS)
    tokens, model = some_tokens(2, 6), filled(config, low_precision=INT8)
    whole, plain = (eqx.filter_jit(lambda m: m(tokens).logits)(m) for m in (model, model.replace(low_precision=None)))
    cache = ed.init_cache(config, 2, 6, dtype=jnp.float32)
    step = eqx.filter_jit(lambda m, tokens, cache: m(tokens, cache=cache))
    cache = step(model, tokens[:, :5], cache).cache
    last = step(model, tokens[:, 5:], cache).logits[:, 0]
    size, cost = (float(jnp.linalg.norm(each)) for each in (plain[:, 5], whole[:, 5] - plain[:, 5]))
    assert float(jnp.linalg.norm(last - whole[:, 5])) < 2 * cost < 0.1 * size


# --- training ---


def steps(model, config=StepConfig()):
    """The metrics of one step."""
    trainer = Trainer.create(OptimizerConfig(), model, steps=4, config=config)
    model = jax.tree.map(jnp.copy, model)  # the step takes its arrays
    return trainer.step(trainer.init(model, key=jax.random.key(0)), Batch(tokens=some_tokens(4, 12)))[1]


@pytest.mark.slow
def test_gradients_of_microbatches_add_up(model):
    """Rows have scales of their own, and gradients of weights are not rounded here: as of the whole batch."""
    model = model.replace(low_precision=LowPrecision(weight_gradient="float"))
    one, two = steps(model), steps(model, StepConfig(gradient_accumulation_steps=2))
    assert_allclose((two.loss, two.grad_norm), (one.loss, one.grad_norm), rtol=1e-3)


@pytest.mark.slow
def test_each_step_uses_new_random_values_for_stochastic_rounding(model):
    rounding = LowPrecision(gradient_rounding="stochastic")
    first, nearest = steps(model.replace(low_precision=rounding)), steps(model)
    assert first.loss == nearest.loss and first.grad_norm != nearest.grad_norm
    keyed = [
        round_weights(model, rounding, below="scanned_layers", key=jax.random.key(seed))
        .scanned_layers[0]
        .unit[0]
        .mlp.up.seed
        for seed in (0, 1)
    ]
    assert keyed[0].shape == (2,) and len({float(seed) for each in keyed for seed in each}) == 4
    assert round_weights(model, rounding, below="scanned_layers").scanned_layers[0].unit[0].mlp.up.seed is None


def test_chips_with_8_bit_formats_are_faster_in_8_bits():
    for chip in CHIPS:
        assert set(chip.formats) <= {"int8", "fp8"} and bool(chip.formats) == (chip.eight_bit > 1.5 * chip.bf16)


def test_weights_that_are_replicated_over_data_are_not_gathered_over_data():
    layout = dataclasses.replace(ed.Layout.create(data=8), gradients_over_data=True)
    pattern, config = "batch length embed, embed mlp -> batch length mlp", LowPrecision()
    x = jax.device_put(draw(0, (16, 8, 64)), layout.activation_sharding("batch length embed", (16, 8, 64)))
    w = jax.device_put(draw(1, (64, 128)), layout.weight_sharding("embed mlp", (64, 128)))
    product = jax.jit(lambda x, w: einsum(pattern, x, Rounded(w, None, config), layout=layout))
    assert "all-gather" not in product.lower(x, w).compile().as_text()
