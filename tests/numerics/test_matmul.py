"""The flattened product is the plain one; weights are cast where used; initializers have the promised variance."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics import matmul
from eqx_decoders.numerics.einsum import einsum
from eqx_decoders.numerics.initializers import fan_in, normal
from eqx_decoders.numerics.matmul import cast_in_loop
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.layout import Layout
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import draw, layout_of


PATTERNS = {
    "batch length embed, embed mlp -> batch length mlp": ((2, 5, 8), (8, 12)),
    "... embed, embed heads head_dim -> ... heads head_dim": ((2, 5, 8), (8, 3, 4)),
    "b l h k, h k d -> b l d": ((2, 5, 3, 4), (3, 4, 8)),
    "b l d, v d -> b l v": ((2, 5, 8), (11, 8)),
    "b l h k, d h k -> b l d": ((2, 5, 3, 4), (8, 3, 4)),
    "b l d, d i f -> b l i f": ((2, 5, 8), (8, 2, 6)),
    "d, d f -> f": ((8,), (8, 12)),
    "rows d, d -> rows": ((5, 8), (8,)),
    # Not flattened: shared dimensions, another order, nothing to contract.
    "e t d, e d f -> e t f": ((3, 5, 8), (3, 8, 6)),
    "b d l, d f -> b l f": ((2, 8, 5), (8, 6)),
    "b l d, d f -> b f l": ((2, 5, 8), (8, 6)),
    "b l, d -> b l d": ((2, 5), (8,)),
}
MLP = "batch length embed, embed mlp -> batch length mlp"


def operands(pattern, dtype, weight_dtype, seed=0):
    shapes = PATTERNS[pattern]
    return draw(seed, shapes[0], dtype), draw(seed + 1, shapes[1], weight_dtype)


def value_and_gradients(pattern, flatten, x, weight):
    def loss(x, weight):
        y = einsum(pattern, x, weight, layout=layout_of(flatten=flatten))
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.tree.leaves(jax.grad(loss, argnums=(0, 1), has_aux=True)(x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flattened_product_equals_einsum(pattern):
    dtypes = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")][: 3 if pattern == MLP else 2]
    cases = [operands(pattern, *pair) for pair in dtypes]

    @jax.jit  # one compilation for all
    def run(cases):
        return [[value_and_gradients(pattern, flatten, *case) for flatten in (True, False)] for case in cases]

    for (dtype, _), (flat, plain) in zip(dtypes, run(cases), strict=True):
        for a, b in zip(flat, plain, strict=True):
            assert_close(a, b, units=128 if dtype == "float32" else 4, dtype=dtype)


@pytest.mark.slow(fast=("1-b l d, d h k -> b l h k", "1-b l h k, h k d -> b l d"))
@pytest.mark.parametrize("pattern", ["b l d, d h k -> b l h k", "b l h k, h k d -> b l d", "b l d, v d -> b l v"])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_row_is_doubled_on_gpus_and_changes_nothing(pattern, rows, monkeypatch):
    sizes = dict(b=1, l=rows, d=8, h=3, k=4, v=11)
    shapes = [[sizes[word] for word in side.split()] for side in pattern.split(" -> ")[0].split(", ")]
    x, weight = (draw(seed, shape, "float32") for seed, shape in enumerate(shapes))

    def run(x, weight):
        y, back = jax.vjp(lambda *args: einsum(pattern, *args, layout=Layout()), x, weight)
        return y, *back(jnp.cos(y))

    want = jax.jit(run)(x, weight)
    monkeypatch.setattr(Layout, "backend", backend_of("gpu"))
    doubled = jax.jit(lambda *args: run(*args))
    assert ("concatenate" in doubled.lower(x, weight).as_text()) == (rows == 1)
    for got, wanted in zip(doubled(x, weight), want, strict=True):
        assert_close(got, wanted, units=8)


@pytest.mark.slow(fast=("True-float32-half", "True-float32-amx", "True-bfloat16-amx"))
@pytest.mark.parametrize("half_width, amx", [(False, False), (True, False), (True, True)], ids=["plain", "half", "amx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_few_and_many_rows_match_numpy(half_width, amx, dtype, transposed, monkeypatch):
    """One row, seven, and as many as are no longer few; odd sizes; values and both gradients, on any version of jax."""
    monkeypatch.setattr(matmul, "_HALF_WIDTH", half_width)
    monkeypatch.setattr(matmul, "_has_amx", lambda: amx)
    monkeypatch.setattr(matmul, "_FEW_ROWS", 9)

    def bars(x, w, bar):
        y, back = jax.vjp(lambda x, w: matmul.product(x, w, transposed=transposed, out_dtype=jnp.float32), x, w)
        return y, *back(bar)

    cases = [
        (draw(rows, (rows, i), dtype), draw(1, (o, i) if transposed else (i, o), dtype), draw(2, (rows, o), "float32"))
        for rows in (1, 7, 9)
        for i, o in ((13, 11), (24, 11), (16, 67))
    ]
    results = jax.jit(lambda cases: [bars(*each) for each in cases])(cases)
    for (x, w, bar), (y, x_bar, w_bar) in zip(cases, results, strict=True):
        x, w, bar = (np.asarray(each, np.float64) for each in (x, w.T if transposed else w, bar.astype(dtype)))
        assert y.dtype == jnp.float32 and x_bar.dtype == w_bar.dtype == dtype
        back = x.T @ bar
        assert_close(y, (x @ w).astype(np.float32), units=64)
        assert_close(x_bar, (bar @ w.T).astype(np.float32), units=4 if dtype == "bfloat16" else 64, dtype=dtype)
        back = (back.T if transposed else back).astype(np.float32)
        assert_close(w_bar, back, units=4 if dtype == "bfloat16" else 64, dtype=dtype)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="there XLA multiplies 16-bit numbers as float32 anyway")
def test_casts_of_weights_are_not_hoisted_out_of_loops():
    """One row times 16-bit weights, again and again: no float32 copy of them is kept."""
    weight, x = draw(0, (256, 256), "bfloat16"), draw(1, (1, 256), "bfloat16")

    def run(x, weight, count):
        return jax.lax.fori_loop(0, count, lambda _, x: matmul.product(jnp.tanh(x), weight), x)

    sizes = jax.jit(run).lower(x, weight, 3).compile().memory_analysis()
    assert sizes.temp_size_in_bytes < weight.nbytes


@pytest.mark.parametrize("flatten", [False, True])
def test_einsum_matches_numpy(flatten):
    x, weight = operands("b l h k, h k d -> b l d", "float32", "float32")
    expected = np.einsum("blhk,hkd->bld", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    assert_close(
        einsum("b l h k, h k d -> b l d", x, weight, layout=layout_of(flatten=flatten)),
        expected.astype(np.float32),
        units=16,
    )


def test_gradient_of_f32_weights_is_not_rounded_to_16_bits():
    x, weight = operands(MLP, "bfloat16", "float32")
    gradient = jax.grad(lambda w: jnp.sum(einsum(MLP, x, w, layout=ed.Layout(), out_dtype=jnp.float32)))(weight)
    expected = np.asarray(x, np.float64).sum((0, 1))[:, None] * np.ones((1, 12))
    assert_close(gradient, expected.astype(np.float32), units=16)


@pytest.mark.parametrize("flatten", [False, True])
def test_sums_are_kept_in_f32(flatten):
    x, weight = jnp.ones((1, 1, 4096), jnp.bfloat16), jnp.full((4096, 1), 1 + 2**-7)
    y = einsum("b l d, d f -> b l f", x, weight, layout=layout_of(flatten=flatten), out_dtype=jnp.float32)
    assert y.dtype == jnp.float32 and y.item() == 4096 + 32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_scan_with_checkpoint(dtype):
    weights, x = draw(1, (3, 8, 8), "float32") / 3, draw(0, (2, 5, 8), dtype)

    def loss(weights, x, flatten, wrap):
        body = wrap(
            lambda x, w: (jnp.tanh(einsum("b l d, d f -> b l f", x, w, layout=layout_of(flatten=flatten))), None)
        )
        return jnp.sum(jax.lax.scan(body, x, weights)[0].astype(jnp.float32))

    policy = jax.checkpoint_policies.save_only_these_names("cast_weight")
    wraps = [lambda f: f, lambda f: jax.checkpoint(f, prevent_cse=False, policy=policy)]

    @jax.jit
    def run(weights, x):
        gradient = jax.grad(loss, argnums=(0, 1))
        return [gradient(weights, x, flatten, wrap) for flatten in (False, True) for wrap in wraps]

    results = run(weights, x)
    for result in results[1:]:
        jax.tree.map(
            lambda a, b: assert_close(a, b, units=128 if dtype == "float32" else 4, dtype=dtype), result, results[0]
        )


@pytest.mark.parametrize("flatten", [False, True])
def test_only_a_real_cast_is_named_and_remat_may_save_it(flatten, capsys):
    def saved(dtype):
        policy = jax.checkpoint_policies.save_only_these_names("cast_weight")
        x, weight = operands(MLP, dtype, "float32")
        body = jax.checkpoint(
            lambda x, w: jnp.sum(jnp.sin(einsum(MLP, x, w, layout=layout_of(flatten=flatten)))), policy=policy
        )
        jax.ad_checkpoint.print_saved_residuals(body, x, weight)
        return capsys.readouterr().out

    assert re.search(r"bf16\[8,12\].*'cast_weight'", saved("bfloat16"))
    assert "cast_weight" not in saved("float32")


def test_forward_mode_in_f32():
    x, weight = operands(MLP, "float32", "float32")
    tangents = operands(MLP, "float32", "float32", seed=1)
    flat, plain = (
        jax.jvp(lambda x, w, f=flatten: einsum(MLP, x, w, layout=layout_of(flatten=f)), (x, weight), tangents)
        for flatten in (True, False)
    )
    jax.tree.map(lambda a, b: assert_close(a, b, units=16), flat, plain)


@pytest.mark.slow(fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_vmap_and_on_a_mesh(dtype):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, weight = draw(0, (3, 4, 5, 8), dtype), draw(1, (3, 8, 12), "float32")

    def loss(x, weight, flatten):
        return jnp.sum(jnp.sin(einsum(MLP, x, weight, layout=layout_of(flatten=flatten)).astype(jnp.float32)))

    def run(x, weight, flatten):
        return jax.jit(jax.vmap(jax.grad(lambda x, w: loss(x, w, flatten), argnums=(0, 1))))(x, weight)

    expected = run(x, weight, False)
    placed = (
        jax.device_put(x, NamedSharding(mesh, P(None, "data"))),
        jax.device_put(weight, NamedSharding(mesh, P(None, "data", "tensor"))),
    )
    for result in (run(x, weight, True), run(*placed, True)):
        jax.tree.map(
            lambda a, b: assert_close(a, b, units=128 if dtype == "float32" else 4, dtype=dtype), result, expected
        )


@pytest.mark.slow(fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_token_and_one_token(dtype):
    weight = jnp.ones((8, 12))
    assert einsum(MLP, jnp.ones((0, 5, 8), dtype), weight, layout=ed.Layout()).shape == (0, 5, 12)
    assert einsum(MLP, jnp.ones((1, 1, 8), dtype), weight, layout=ed.Layout()).tolist() == [[[8.0] * 12]]
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(einsum(MLP, jnp.ones((0, 5, 8), dtype), w, layout=ed.Layout()))))(
        weight
    )
    assert not gradient.any()


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("b d, d f", "->"),
        ("b d -> b", "->"),
        ("b d, d f, f g -> b g", "->"),
        ("b d, d f -> b f -> b", "->"),
        ("b d d, d f -> b f", "'b d d'"),
        ("b d, d f -> b g", "'g'"),
        ("b d, d f -> b", "'f'"),
        ("b d, d f -> f", "'b'"),
        ("b 3d, d f -> b f", "'3d'"),
        ("b d, ... d f -> b f", "'...'"),
        ("... d, d f -> f", "'...'"),
    ],
)
def test_malformed_patterns(pattern, named):
    with refused(ConfigError, repr(pattern), named):
        einsum(pattern, jnp.ones((2, 3)), jnp.ones((3, 4)))


@pytest.mark.parametrize("flatten", [False, True])
def test_shapes_that_do_not_fit(flatten):
    with refused(ConfigError, "h=2", "h=3"):  # the flattened sizes alone would fit
        einsum("b h k, h k d -> b d", jnp.ones((1, 2, 3)), jnp.ones((3, 2, 5)), layout=layout_of(flatten=flatten))
    with refused(ConfigError, "x ", "(1, 2, 3)"):
        einsum("b d, d f -> b f", jnp.ones((1, 2, 3)), jnp.ones((3, 4)), layout=layout_of(flatten=flatten))
    with refused(ConfigError, "weight", "(3,)"):
        einsum("... d, d f -> ... f", jnp.ones((3,)), jnp.ones((3,)), layout=layout_of(flatten=flatten))


def test_precision():
    precision = Precision(params="bfloat16", compute=jnp.bfloat16)
    assert precision.params == precision.compute == jnp.bfloat16
    assert hash(precision) == hash(Precision(params=jnp.dtype("bfloat16"), compute=jnp.bfloat16))
    assert Precision() == Precision(params=jnp.float32, compute="float32")
    with refused(ConfigError, "Precision.compute"):
        Precision(compute=jnp.int8)
    with refused(ConfigError, "no_dtype"):
        Precision(params="no_dtype")


@pytest.mark.slow(fast=("truncated",))
@pytest.mark.parametrize("distribution", ["truncated", "normal"])
def test_fan_in_has_the_variance(distribution, getkey):
    draws = np.asarray(fan_in(getkey(), (400, 500), jnp.float32, 25, distribution))
    assert_allclose(draws.var(), 1 / 25, rtol=0.02)
    assert_allclose(draws.mean(), 0.0, atol=0.002)
    assert (np.abs(draws).max() < 2 / 5 / 0.8796) == (distribution == "truncated")


@pytest.mark.slow
def test_initializers_draw_in_f32(getkey):
    key = getkey()
    for init in (lambda dtype: normal(key, (64,), dtype, 0.02), lambda dtype: fan_in(key, (64,), dtype, 8)):
        assert init(jnp.bfloat16).dtype == jnp.bfloat16
        assert (init(jnp.bfloat16) == init(jnp.float32).astype(jnp.bfloat16)).all()
    assert_allclose(np.std(normal(key, (100, 1000), jnp.float32, 0.02)), 0.02, rtol=0.02)
    with refused(ConfigError, "truncated"):
        fan_in(key, (4,), jnp.float32, 4, "truncate")
    with refused(ConfigError, "fan"):
        fan_in(key, (4,), jnp.float32, 0)


def test_a_cast_in_a_loop_is_a_cast():
    """For all kinds of numbers, and its gradient is not rounded more than once."""
    sizes = np.float32(10.0) ** np.arange(-38, 38, dtype=np.float32)[:, None]
    draws = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * sizes
    odd = np.asarray([0.0, -0.0, np.inf, -np.inf, 1e-45, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    for x in map(jnp.asarray, (draws, odd)):
        got, want = cast_in_loop(x, jnp.dtype("bfloat16")), x.astype(jnp.bfloat16)
        assert_array_equal(got.view(jnp.uint16), want.view(jnp.uint16))
    gradient = jax.grad(lambda x: cast_in_loop(x, jnp.dtype("bfloat16")).astype(jnp.float32).sum() / 3)(jnp.ones(2))
    assert_array_equal(gradient, jnp.float32(1 / 3).astype(jnp.bfloat16))
