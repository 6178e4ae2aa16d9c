"""Lookups in sharded tables: rows and gradients equal those of one device, without gathering the table."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.sharding.layout import WEIGHTS
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused


TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(300, 3, 8)), jnp.float32)
WORDS = "rows per_layer row_dim"


def found(layout, rows, table=TABLE):
    ctx = ed.ForwardContext(positions=jnp.zeros(rows.shape[:2], jnp.int32), execution=ed.Execution(layout=layout))
    return look_up(table, rows, WORDS, ctx)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, 305, shape), jnp.int32)


MESHES = {
    "fsdp": dict(data=2, fsdp=4),
    "two axes": dict(fsdp=2, expert=2, data=2),
    "lengths": dict(fsdp=2, context=2, tensor=2),
    "no features": dict(data=4, tensor=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [(8, 4, 2), (8, 4), (1, 3)])
def test_rows_and_gradients_equal_one_device(mesh, shape):
    """Also for a batch that the mesh does not divide."""
    rows, layout = drawn(*shape), ed.Layout.create(**MESHES[mesh])
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(*shape, 3, 8)), jnp.float32)

    def loss(table, layout):
        out = found(layout, rows, table)
        return jnp.sum(out * weight), out

    run = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    assert_array_equal(run(TABLE, ed.Layout())[1], TABLE[jnp.minimum(rows, 299)])
    placed = jax.device_put(TABLE, jax.NamedSharding(layout.mesh, layout.weight_spec(WORDS)))
    assert_close(run(placed, layout), run(TABLE, ed.Layout()))


ROWS = WEIGHTS | {"rows": ("tensor", "expert"), "row_dim": ("fsdp", "context")}


@pytest.mark.slow(fast=("fsdp=4 tensor=2",))
@pytest.mark.parametrize("mesh", [dict(fsdp=4, tensor=2), dict(data=2, tensor=2, expert=2), dict(context=2, expert=4)])
def test_sharded_rows_equal_one_device(mesh):
    """Each device has some of the rows; tokens may be sharded over the same axis."""
    rows, layout = drawn(8, 4), ed.Layout.create(**mesh, weights=ROWS)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(8, 4, 3, 8)), jnp.float32)
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda table, layout: jnp.sum(found(layout, rows, table) * weight)))
    assert_close(run(TABLE, layout), run(TABLE, ed.Layout()))


def test_only_rows_and_features_are_sharded():
    layout = ed.Layout.create(fsdp=4, tensor=2, weights=WEIGHTS | {"per_layer": ("tensor",)})
    table = jnp.zeros((300, 8, 8))
    with refused(ed.ConfigError, "'per_layer'"):
        found(layout, drawn(8, 4), table)


def test_table_is_not_gathered():
    layout = ed.Layout.create(data=2, fsdp=4)
    table = jax.device_put(TABLE, jax.NamedSharding(layout.mesh, layout.weight_spec(WORDS)))
    rows = jax.device_put(drawn(8, 4), layout.activation_sharding("batch length", (8, 4)))
    program = jax.jit(lambda table, rows: found(layout, rows, table)).lower(table, rows).compile().as_text()
    assert "f32[300,3,8]" not in program
    assert "all-to-all" in program
