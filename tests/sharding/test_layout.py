"""Meshes, tables, born-sharded models, and what is refused."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.model.weight_table import describe
from eqx_decoders.numerics.rings.links import ring_load
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import ACTIVATIONS, WEIGHTS, device_bytes
from eqx_decoders.sharding.mesh import _factorizations
from eqx_decoders.training import host_rows
from tests.compare import assert_array_equal
from tests.errors import refused
from tests.models import filled, rich_decoder, some_tokens
from tests.programs import tpu_devices


def test_tables_split_weights_and_activations():
    layout = ed.Layout.create(fsdp=2, tensor=2, fsdp_transpose=2)
    assert layout.weight_spec("layers embed mlp") == P(None, ("fsdp",), ("fsdp_transpose", "tensor"))
    assert layout.weight_spec("embed heads head_dim") == P(("fsdp", "fsdp_transpose"), ("tensor",), None)
    assert layout.weight_spec("vocab embed") == P(("tensor",), ("fsdp", "fsdp_transpose"))
    assert layout.weight_spec("norm") == P(None)
    assert layout.activation_spec("batch length embed") == P(("fsdp", "fsdp_transpose"), None, None)
    assert layout.activation_spec("batch length mlp") == P(("fsdp", "fsdp_transpose"), None, ("tensor",))


def test_gradients_and_states_may_live_elsewhere_than_weights():
    layout = ed.Layout.create(data=2, fsdp=4)
    split = dataclasses.replace(layout, gradients_over_data=True)
    assert layout.gradient_spec("embed mlp", (16, 24)) == layout.weight_spec("embed mlp") == P(("fsdp",), None)
    assert split.gradient_spec("embed mlp", (16, 24)) == P(("fsdp", "data"), None)
    assert split.gradient_spec("norm", (3,)) == P(None)  # what `data` does not divide
    away = ed.Layout.create(fsdp=8, offload=ed.Offload(weights=("*.mlp.up",), optimizer=("*",)))
    model = ed.abstract(rich_decoder(2), layout=away)
    kinds = {name: leaf.sharding.memory_kind for name, leaf in named_leaves(model).items()}
    assert {name for name, kind in kinds.items() if kind == "pinned_host"} == {"scanned_layers.0.unit.0.mlp.up"}
    assert "pinned_host" in {leaf.memory_kind for leaf in jax.tree.leaves(away.state_shardings(model, over_data=False))}


def test_a_mesh_axis_serves_one_dimension():
    for sizes in (dict(data=8), dict(fsdp=8), dict(context=2, tensor=2, expert=2), dict(tensor_sequence=4, fsdp=2)):
        layout = ed.Layout.create(**sizes)
        for words in ("layers embed mlp", "embed vocab", "embed qkv_heads head_dim", "embed inputs mlp"):
            used = [name for names in layout.weight_spec(words) for name in np.atleast_1d(names) if name]
            assert len(used) == len(set(used))


def test_activations_that_do_not_divide_stay_whole():
    layout = ed.Layout.create(data=4, tensor=2)
    assert layout.activation_spec("batch length mlp", (3, 7, 10)) == P(None, None, ("tensor",))
    assert layout.activation_spec("batch length mlp", (4, 1, 11)) == P(("data",), None, None)


OTHER_MESH = pytest.param(dict(expert=2, fsdp_transpose=2, data=2), marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(fsdp=4, tensor=2), OTHER_MESH])
def test_init_is_born_sharded_and_the_same_on_every_mesh(sizes):
    layout = ed.Layout.create(**sizes)
    config = rich_decoder(1)
    single, placed = ed.init(config, key=jax.random.key(0)), ed.init(config, key=jax.random.key(0), layout=layout)
    shapes = named_leaves(ed.abstract(config, layout=layout))
    split = 0
    for name, leaf in named_leaves(placed).items():
        # equal up to the last bit: XLA's inverse error function can round differently at the end of a shard
        np.testing.assert_array_max_ulp(np.asarray(leaf), np.asarray(named_leaves(single)[name]), maxulp=4)
        assert leaf.sharding == shapes[name].sharding and leaf.shape == shapes[name].shape
        split += leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    assert split >= 8


def test_abstract_takes_no_memory():
    config = ed.get_config("llama3.1-405b")
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = ed.abstract(config, layout=layout, precision=ed.Precision(params=jnp.bfloat16))
    leaves = jax.tree.leaves(model)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.bfloat16 for leaf in leaves)
    share = sum(device_bytes(leaf) for leaf in leaves) / (2 * ed.count_parameters(config))
    assert 1 / 8 <= share < 1.001 / 8


def test_cache_is_split_over_batch_and_heads():
    layout = ed.Layout.create(data=4, tensor=2)
    cache = ed.init_cache(rich_decoder(), 4, 16, layout=layout)
    keys = cache.layer_caches[0][1]["mixer"].key
    assert keys.sharding.spec == P(None, ("data",), ("tensor",), None, None)
    abstract = ed.abstract_cache(rich_decoder(), 4, 16, layout=layout)
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), cache) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), abstract
    )


def test_weights_are_gathered_along_what_splits_their_tokens():
    layout = ed.Layout.create(expert=2, fsdp=2, tensor=2)
    assert layout.gathered_spec("embed mlp") == P(None, "tensor")
    assert layout.gathered_spec("experts embed mlp") == P("expert", None, "tensor")  # tokens travel
    assert layout.gathered_spec("ngram_features embed") == P("tensor", None)  # sums of parts
    long = ed.Layout.create(stage=2, fsdp_transpose=2, tensor_sequence=2)
    assert long.gathered_spec("layers embed heads head_dim") == P("stage", None, "tensor_sequence", None)
    assert long.gathered_spec("mlp embed") == P("tensor_sequence", None)


@pytest.mark.parametrize("length, gathered", [(64, True), (1, False)])
def test_a_weight_is_gathered_by_many_tokens(length, gathered):
    """And its gradient comes back split; for a few tokens XLA decides."""
    layout = ed.Layout.create(fsdp=4, tensor=2)
    ctx = ed.ForwardContext(positions=jnp.zeros((4, length), jnp.int32), execution=ed.Execution(layout=layout))

    def loss(x, weight):
        return ctx.einsum("batch length embed, embed mlp -> batch length mlp", x, weight).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, length, 8), (8, 16))]
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(*shapes))
    assert ("P(None, 'tensor')" in text) == ("P('fsdp', 'tensor')" in text) == gathered


def test_tables_can_be_replaced():
    table = WEIGHTS | {"embed": "data"}
    layout = ed.Layout.create(data=4, tensor=2, weights=table, activations=ACTIVATIONS | {"batch": ()})
    assert layout.weight_spec("embed mlp") == P(("data",), ("tensor",))
    assert layout.activation_spec("batch length embed") == P(None, None, None)
    hash(layout)


def test_minus_one_takes_the_rest():
    assert ed.Layout.create(data=-1, tensor=2).mesh.shape["data"] == 4
    devices = jax.devices()[:6]
    assert ed.Layout.create(fsdp=-1, data=3, devices=devices).mesh.shape["fsdp"] == 2


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: ed.Layout.create(data=3), ["data=3", "3 devices", "8", "-1"]),
        (lambda: ed.Layout.create(data=-1, fsdp=-1), ["-1", "data, fsdp"]),
        (lambda: ed.Layout.create(data=-1, fsdp=3), ["8", "3"]),
        (lambda: ed.Layout.create(data=0), ["Layout.data=0", "or -1"]),
        (lambda: ed.Layout.create(fsdp=0, abstract=True), ["Layout.fsdp=0", "or -1"]),
        (lambda: ed.Layout.create(devices=[]), ["devices=[]"]),
        (lambda: ed.Layout(weights={"hed": "fsdp"}), ["'hed'", "'heads'"]),
        (lambda: ed.Layout(weights={"heads": "tensr"}), ["'tensr'", "'tensor'"]),
        (lambda: ed.Layout().constrain(jnp.zeros((2, 3)), "batch lenght"), ["'lenght'", "'length'"]),
        (lambda: ed.Layout().constrain(jnp.zeros((2, 3)), "batch length embed"), ["(2, 3)", "batch length embed"]),
        (
            lambda: ed.Layout(jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Explicit, AxisType.Auto))),
            ["Explicit", "Auto", "Layout.create"],
        ),
        (
            lambda: ed.abstract(rich_decoder(), layout=ed.Layout.create(tensor=8)),
            ["mixer.query", "heads=4", "tensor=8"],
        ),
    ],
    ids=[
        *(
            "few devices",
            "two rests",
            "rest",
            "zero",
            "abstract zero",
            "no devices",
            "weight axis",
            "mesh axis",
            "activation axis",
            "rank",
        ),
        *("axis types", "heads"),
    ],
)
def test_wrong_layouts_are_refused(make, names):
    with refused(ed.ConfigError, *names):
        make()


@pytest.mark.slow
def test_generation_runs_sharded():
    model = filled(rich_decoder(2))
    prompt = some_tokens(4, 5)
    layout = ed.Layout.create(data=2, fsdp=2, tensor=2)
    want = ed.generate(model, prompt, max_new_tokens=8)
    assert_array_equal(ed.generate(model.place(layout), prompt, max_new_tokens=8), want)


def test_an_abstract_mesh_has_the_shapes_of_a_real_one_and_any_size():
    real, mesh = (ed.Layout.create(data=-1, fsdp=2, tensor=2, abstract=abstract) for abstract in (False, True))
    assert mesh.sizes == real.sizes and mesh.platform == real.platform
    texts = [describe(ed.abstract(rich_decoder(), layout=layout)) for layout in (real, mesh)]
    assert texts[0] == texts[1]
    assert ed.Layout.create(fsdp=4, abstract=True).mesh.size == 4  # of eight
    assert ed.Layout.create(data=-1, fsdp=np.int64(2)).sizes == ed.Layout.create(data=4, fsdp=2).sizes
    for sizes in (dict(fsdp=16, data=-1), dict(fsdp=16)):
        large = ed.Layout.create(**sizes, abstract=True)
        assert large.sizes["fsdp"] == 16 and large.mesh.size == 16
        assert ed.abstract(rich_decoder(), layout=large).embedding.table.sharding.shard_shape((32, 16)) == (32, 1)


def test_too_few_devices_of_a_cpu_are_met_with_how_to_get_more():
    with refused(ed.ConfigError, "16 devices", "8", "JAX_NUM_CPU_DEVICES=16"):
        ed.Layout.create(data=-1, fsdp=16)
    with pytest.raises(ed.ConfigError) as caught:
        ed.Layout.create(data=2, fsdp=2)
    assert "JAX_NUM_CPU_DEVICES" not in str(caught.value)


def test_factorizations_are_complete_and_unique():
    assert sorted(_factorizations(12, 2)) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    shapes = list(_factorizations(256, 8))
    assert len(shapes) == len(set(shapes)) == math.comb(8 + 7, 7) and {math.prod(shape) for shape in shapes} == {256}


@pytest.mark.slow
def test_describe_lists_every_weight():
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = ed.abstract(rich_decoder(), layout=layout)
    text = describe(model)
    for name in named_leaves(model):
        assert name in text
    line = next(line for line in text.splitlines() if line.startswith("scanned_layers.0.unit.0.mlp.gate "))
    assert line.split("  ")[0] and "2 x 16 x 24" in line and "layers embed mlp" in line and "-, fsdp, tensor" in line
    assert f"{ed.count_parameters(rich_decoder()):,} weights" in text
    assert eqx.is_array(ed.init(rich_decoder(1), key=jax.random.key(0)).embedding.table)


def test_layout_prints_non_default_fields():
    assert repr(ed.Layout()) == "Layout()"
    assert repr(ed.Layout(weights={"embed": "fsdp"})) == "Layout(weights={'embed': ('fsdp',)})"
    split = repr(ed.Layout.create(fsdp=8))
    assert split.startswith("Layout(mesh=Mesh(") and "weights" not in split


def test_unequal_layouts_print_differently():
    """Changes one field at a time. A new field must be added to `others`, and to `__repr__`."""
    layout = ed.Layout.create(fsdp=8)
    others = dict(
        mesh=ed.Layout.create(tensor=8).mesh,
        weights={"embed": "tensor"},
        activations={"batch": "data"},
        gradients_over_data=True,
        offload=ed.Offload(weights=("*",)),
    )
    assert set(others) == {field.name for field in dataclasses.fields(layout)}
    texts = [repr(dataclasses.replace(layout, **{name: value})) for name, value in others.items()]
    assert len({repr(layout), *texts}) == 1 + len(others)


# The mesh follows the torus: the rows of a host are rarely one run, and `tensor=2` splits an axis of the torus.
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, rows, first",
    [
        (dict(fsdp=64), 128, (0, 1, 8, 9, 32, 33, 40, 41)),
        (dict(fsdp=16, tensor=4), 128, (*range(8), *range(32, 40))),
        (dict(data=2, fsdp=32), 128, (0, 1, 4, 5, 16, 17, 20, 21)),
        (dict(fsdp=32, tensor=2), 64, None),
        (dict(data=2, fsdp=4, tensor=8), 64, None),
    ],
)
def test_the_hosts_of_a_slice_hold_every_row_of_a_batch(sizes, rows, first):
    layout = ed.Layout.create(**sizes, devices=tpu_devices("v5p:4x4x4"))
    held = [tuple(host_rows(layout, rows, host)) for host in range(16)]
    assert sorted(set().union(*held)) == list(range(rows))
    assert first is None or held[0] == first
    copies = 16 * len(held[0]) // rows  # of each row
    assert {sum(row in each for each in held) for row in range(rows)} == {copies}
    for device, (place,) in layout.activation_sharding("batch", (rows,)).devices_indices_map((rows,)).items():
        assert set(range(rows)[place]) <= set(held[device.process_index])


@pytest.mark.slow
def test_between_slices_there_are_only_copies_or_stages():
    devices = tpu_devices("v5p:2x2x4", slices=2)
    for sizes in (dict(data=2, fsdp=16), dict(data=4, fsdp=4, tensor=2), dict(stage=2, fsdp=16)):
        layout = ed.Layout.create(**sizes, devices=devices)
        name = "data" if "data" in sizes else "stage"
        outer = np.moveaxis(layout.mesh.devices, layout.mesh.axis_names.index(name), 0)
        of_slice = np.vectorize(lambda device: device.slice_index)(outer.reshape(sizes[name], -1))
        assert (of_slice == of_slice[:, :1]).all() and set(of_slice[:, 0].tolist()) == {0, 1}
    with refused(ed.ConfigError, "fsdp=32", "data=2", "fsdp=16"):
        ed.Layout.create(fsdp=32, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, slices, ring",
    [
        *(("v5e:4x4", 1, 16), ("v5e:4x8", 1, 16), ("v5e:8x8", 1, 16), ("v5e:8x16", 2, 16), ("v5e:16x16", 1, 16)),
        *(("v6e:2x2", 1, 4), ("v6e:2x4", 1, 8), ("v6e:4x4", 1, 8), ("v6e:8x8", 2, 8), ("v6e:16x16", 1, 16)),
        *(("v5p:2x2x1", 1, 4), ("v5p:2x2x4", 2, 16), ("v5p:2x4x4", 1, 16), ("v5p:4x4x4", 1, 4), ("v5p:8x8x8", 1, 8)),
    ],
)
def test_rings_of_a_slice_send_to_neighbors_alone(topology, slices, ring):
    """Around blocks of an open slice, of v5e of 16 chips; 16x16 and cubes of v5p are closed, and stay as they are."""
    layout = ed.Layout.create(data=slices, fsdp=-1, devices=tpu_devices(topology, slices))
    extents = [int(extent) for extent in topology.split(":")[1].split("x")]
    closed = topology in ("v5e:16x16", "v6e:16x16", "v5p:4x4x4", "v5p:8x8x8")
    for devices in layout.mesh.devices.reshape(slices, ring, -1):
        assert len({tuple(device.coords) for device in devices.flat}) == devices.size
        for one, other in zip(devices.flat, np.roll(devices, -1, 0).flat, strict=True):
            steps = np.abs(np.subtract(one.coords, other.coords))[: len(extents)]
            assert np.minimum(steps, np.subtract(extents, steps) if closed else steps).sum() == 1
    assert ring_load(layout.mesh, ("fsdp",), ring, layout.sizes["fsdp"] // ring) == 1


@pytest.mark.slow
def test_other_axes_of_a_slice_keep_their_order():
    """What goes from each device to the next one would go further between blocks."""
    devices = tpu_devices("v6e:4x8")
    places = [device.coords for device in ed.Layout.create(context=-1, devices=devices).mesh.devices.flat]
    assert places == sorted(places)
