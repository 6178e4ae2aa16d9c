"""Kinds of weights together: one inside of another, several in one product by groups, and what a kind can't do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.model.quantize import QUANTIZATIONS, quantized
from eqx_decoders.numerics.clipped_weight import ClippedWeight
from eqx_decoders.numerics.einsum import as_weight, einsum, grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from eqx_decoders.numerics.low_precision import LowPrecision
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.rounded_weight import Rounded
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.models import draw, layout_of
from tests.numerics.test_grouped_matmul import RAGGED_DOT


def pair(base, *lead: int) -> LowRank:
    return LowRank(base, lora_a=draw(5, (*lead, 16, 2)), lora_b=draw(6, (*lead, 2, 6)), scale=0.5)


def kinds(*lead: int) -> dict:
    """A weight of 16 x 6 of every kind that has an array."""
    weight = draw(1, (*lead, 16, 6))
    bits = {name: quantized(weight, QUANTIZATIONS[name], (8, 1), 1, 1) for name in ("int4", "nf4")}
    rounded = Rounded(weight, None, LowPrecision())
    pairs = {f"pair over {name}": pair(base, *lead) for name, base in (bits | {"rounded": rounded}).items()}
    return {"array": weight, "other array": -weight, "rounded": rounded, "pair": pair(3 * weight, *lead)} | bits | pairs


@pytest.mark.slow
@pytest.mark.parametrize("flatten", [False, True])
def test_kinds_are_nested(flatten):
    """A clipped weight over a low-rank pair over any base: as written out with arrays."""
    x, (low, high) = draw(0, (5, 16)), (jnp.asarray(-0.5), jnp.asarray(0.75))
    bounds = dict(input_min=low, input_max=high, output_min=2 * low, output_max=2 * high)
    product = jax.jit(
        lambda x, weight: einsum("rows embed, embed mlp -> rows mlp", x, weight, layout=layout_of(flatten=flatten))
    )
    for name, weight in kinds().items():
        want = np.clip(product(np.clip(x, low, high), weight), 2 * low, 2 * high)
        assert_array_equal(product(x, ClippedWeight(weight, **bounds)), want, err_msg=name)
        if "rounded" not in name:  # its product rounds activations, too
            assert_close(product(x, weight), product(x, as_weight(weight).array()), units=64)


@pytest.mark.slow
def test_weights_have_an_equivalent_array():
    for name, weight in kinds(3).items():
        one = as_weight(weight)
        assert one.shape == (3, 16, 6) == one.array(1).shape, name
        assert one.dtype == (None if name in ("int4", "nf4") else jnp.float32), name
    half = pair(kinds()["nf4"])
    half = LowRank(half.base, half.lora_a.astype(jnp.bfloat16), half.lora_b.astype(jnp.bfloat16), half.scale)
    assert half.dtype == half.array().dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("form", [RAGGED_DOT, GroupedForm("blocks", 8)])
def test_several_kinds_in_one_product_keep_their_order(form):
    counts, x, weights = jnp.asarray((9, 0, 7)), draw(0, (24, 16)), kinds(3)
    run = jax.jit(lambda x, weights: grouped_products(x, weights, counts, form=form))
    together = run(x, tuple(weights.values()))
    for (name, weight), out in zip(weights.items(), together, strict=True):
        (alone,) = run(x, (weight,))
        assert_array_equal(out[:16], alone[:16], err_msg=name)
    assert_close(together[1][:16], -together[0][:16], units=1)


def test_unsupported_operations_of_clipped_weights_are_refused():
    zero = jnp.zeros(())
    weight = ClippedWeight(draw(1, (2, 16, 6)), input_min=zero, input_max=zero, output_min=zero, output_max=zero)
    with refused(ConfigError, "ClippedWeight", "experts"):
        grouped_products(draw(0, (8, 16)), (weight,), jnp.asarray((4, 4)), form=RAGGED_DOT)
    with refused(ConfigError, "ClippedWeight", "einsum"):
        weight.array()
