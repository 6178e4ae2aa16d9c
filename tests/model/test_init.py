"""Initialization: equal weights with and without a scan or a mesh, little temporary memory, few random arrays."""

import collections
import dataclasses

import equinox as eqx
import jax
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.stack import ScannedLayers
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import out_shardings, partitions
from tests.compare import assert_allclose, assert_close
from tests.models import rich_decoder


CONFIG = rich_decoder(1)
LOCAL, FULL = rich_decoder(2).blocks
# Blocks with few arrays: the initialization of each array takes long to compile.
DENSE = dataclasses.replace(LOCAL, mixer=None, pre_mixer_norm=None)
FUSED = dataclasses.replace(FULL, mlp=None, pre_mlp_norm=None)


def random_arrays(build) -> collections.Counter:
    """Count the arrays of random bits in a program, by shape."""
    counts: collections.Counter = collections.Counter()

    def walk(jaxpr) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "random_bits":
                counts[equation.outvars[0].aval.shape] += 1
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(build)(jax.random.key(0)).jaxpr)
    return counts


@eqx.filter_jit
def build(config, key):
    return eqx.filter(config.build(16, key=key), eqx.is_array)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit, repeats",
    [((LOCAL,), 3), ((DENSE, DENSE, FUSED, DENSE), 2), ((FULL, LOCAL), 1)],
    ids=["one kind", "two kinds", "no repetition"],
)
def test_each_layer_is_built_from_its_own_key(unit, repeats):
    keys = jax.random.split(jax.random.key(1), len(unit) * repeats)
    layers = jax.jit(lambda: eqx.filter(ScannedLayers.build(unit, 16, keys=keys).unstacked(), eqx.is_array))()
    for layer, config, key in zip(layers, unit * repeats, keys, strict=True):
        expected = build(config, key)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-6, atol=0), layer, expected)


def test_equal_blocks_of_a_unit_share_random_operations():
    """A unit of five local blocks and one global block (Gemma 3) has the random operations of two blocks."""

    def build(unit, repeats):
        def arrays(key):
            keys = jax.random.split(key, len(unit) * repeats)
            return eqx.filter(ScannedLayers.build(unit, 16, keys=keys), eqx.is_array)

        return random_arrays(arrays).total()

    assert build((LOCAL,) * 5 + (FULL,), 4) == build((LOCAL,), 1) + build((FULL,), 1)


def test_weights_are_equal_on_a_mesh():
    config = dataclasses.replace(CONFIG, blocks=(DENSE, FUSED) * 2 + (DENSE,))
    assert len(find_repeats(config.blocks)) == 2
    layout = ed.Layout.create(fsdp=4, tensor=2)
    expected = named_leaves(ed.init(config, key=jax.random.key(0)))
    placed = named_leaves(ed.init(config, key=jax.random.key(0), layout=layout))
    assert_close(placed, expected, units=4)  # XLA rounds a vector and the remainder of one differently


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, dict(fsdp=4, tensor=2)], ids=["one device", "mesh"])
def test_temporary_memory_is_bounded_by_the_size_of_a_few_layers(sizes):
    config = dataclasses.replace(ed.get_config("llama3.2-1b"), vocab_size=128)
    layout = ed.Layout.create(**sizes) if sizes else ed.Layout()
    target = ed.abstract(config, layout=layout)
    shapes = eqx.filter(target, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    build = layout.automatically(
        lambda key: eqx.filter(Decoder.build(config, key=key, execution=target.execution), eqx.is_array),
        lambda _: partitions(shapes),
    )
    program = jax.jit(build, out_shardings=out_shardings(shapes)).lower(jax.random.key(0)).compile()
    memory = program.memory_analysis()
    devices = 8 if sizes else 1
    stored = sum(leaf.size for leaf in named_leaves(target).values()) * 4 / devices
    assert memory.output_size_in_bytes < 1.2 * stored
    # on CPUs, Threefry needs several copies of the array that it creates, here of at most half of a layer
    assert memory.temp_size_in_bytes < 4 * stored / len(config.blocks)
