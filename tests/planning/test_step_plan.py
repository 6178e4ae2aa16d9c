"""Estimates by numbers worked out by hand, counts of products, advice, and a whole plan on the CPU's devices."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.kernels.registry import attend
from eqx_decoders.layers.mask import Causal
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.numerics.grouped_matmul import GroupedForm, grouped_arrays
from eqx_decoders.numerics.megablox import kernel_product
from eqx_decoders.planning.advice import advice
from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.device_memory import DeviceMemory, needed_bytes
from eqx_decoders.planning.flop_count import MatmulFlops, products
from eqx_decoders.planning.gpus import gpus_of
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Operations, Plan
from eqx_decoders.planning.report import as_data, by_kind, report
from eqx_decoders.planning.roofline import ACROSS, Roofline, collective_seconds
from eqx_decoders.planning.step_plan import make_plan, operations
from eqx_decoders.sharding.chips import CHIPS, chip_of
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from tests.errors import assert_names


V5P = dataclasses.replace({chip.name: chip for chip in CHIPS}["v5p"], links=4)  # a torus of two axes


def torus(x: int, y: int, slices: int = 1, chip=V5P) -> Machine:
    """Chips in rows, slice after slice."""
    places = [(part, (i, j), 0) for part in range(slices) for i in range(x) for j in range(y)]
    return Machine(chip, tuple(places), (x, y))


def collective(kind: str, group: tuple[int, ...], size: float = 8e9, **changes) -> Collective:
    default: dict = dict(times=1, axes=("fsdp",), shape="", phase="forward", cause="", unknown=False)
    return Collective(kind=kind, bytes=int(size), groups=(group,), **default | changes)


CONFIG = with_fields(ed.get_config("gpt3-52k"), ("num_layers=3",))


# --- machine and time ---


def test_chips_are_found_by_device_kind():
    assert chip_of("TPU v5 lite").name == "v5e" and chip_of("TPU v5").name == "v5p" and chip_of("TPU v9") is None
    assert all(chip.source and chip.eight_bit >= chip.bf16 > 1e14 > chip.memory_bandwidth > 0 for chip in CHIPS)


def test_links_of_a_group_follow_from_its_axes():
    """v5p: 100 GB/s a link; four chips in a row close a ring and send both ways, two or six do not."""
    machine = torus(4, 2)
    assert machine.route((0, 2, 4, 6)).bandwidth == 200e9  # x: a ring of four
    assert machine.route((0, 1)).bandwidth == 100e9  # y: a line of two
    assert machine.route(tuple(range(8))).bandwidth == 300e9
    assert machine.route((0, 2)).bandwidth == 100e9  # half of the ring is a line
    assert torus(6, 1).route(tuple(range(6))).bandwidth == 100e9
    assert machine.route((0, 2, 4, 6)).hops == 2 and torus(6, 1).route(tuple(range(6))).hops == 5


@pytest.mark.parametrize(
    "name, extents, closed",
    [
        ("v5p", (4, 4, 8), (True, True, True)),
        ("v5p", (2, 4, 4), (False, False, False)),
        ("v6e", (8, 16), (False, True)),
        ("v6e", (8, 8), (False, False)),
    ],
)
def test_slices_have_wraparound_links_along_complete_rings(name, extents, closed):
    """v5p: cubes of 4 x 4 x 4 and multiples of them; v6e: an axis of sixteen, whatever the other one is."""
    (chip,) = (chip for chip in CHIPS if chip.name == name)
    assert chip.closed(extents) == closed


@pytest.mark.parametrize(
    "kind, seconds",
    [
        ("all-gather", 8e9 * 3 / 4 / 200e9),
        ("reduce-scatter", 8e9 * 3 / 4 / 200e9),
        ("all-reduce", 2 * 8e9 * 3 / 4 / 200e9),
        ("all-to-all", 4 * 8e9 / 4 / 200e9),
    ],
)
def test_seconds_on_a_ring_of_four(kind, seconds):
    """8 GB on each device over links of 200 GB/s both ways; what all-to-all exchanges are 8 GB of each of four."""
    assert collective_seconds(collective(kind, (0, 1, 2, 3)), torus(4, 1)) == {"fsdp": pytest.approx(seconds)}


def test_permutations_use_one_link_and_small_messages_take_a_hop():
    pairs = collective("collective-permute", (0, 1))
    pairs = dataclasses.replace(pairs, groups=((0, 1), (1, 2), (2, 3), (3, 0)))
    assert collective_seconds(pairs, torus(4, 1)) == {"fsdp": pytest.approx(0.08, rel=1e-3)}
    far = dataclasses.replace(pairs, groups=((0, 2), (1, 3), (2, 0), (3, 1)))  # each link has two messages
    assert collective_seconds(far, torus(4, 1)) == {"fsdp": pytest.approx(0.16, rel=1e-3)}
    still = dataclasses.replace(pairs, groups=tuple((device, device) for device in range(4)))
    assert collective_seconds(still, torus(4, 1)) == {}
    assert collective_seconds(collective("all-reduce", (0, 1, 2, 3), 4), torus(4, 1)) == {"fsdp": 2e-6}


def test_traffic_between_slices_is_what_links_within_slices_leave():
    """Two slices of four chips: a sum of 8 GB leaves 2 GB for each chip, of which one half crosses, there and back."""
    found = collective_seconds(collective("all-reduce", tuple(range(8))), torus(4, 1, slices=2))
    assert found[ACROSS] == pytest.approx(2 * 8e9 / 4 / 2 / 6.25e9) and found["fsdp"] == pytest.approx(0.06)
    exchanged = collective_seconds(collective("all-to-all", tuple(range(8))), torus(4, 1, slices=2))
    assert exchanged[ACROSS] == pytest.approx(8e9 / 2 / 6.25e9)  # of each device's 8 GB one half goes to the others
    alone = collective_seconds(collective("all-gather", (0, 4)), torus(4, 1, slices=2))
    assert alone == {ACROSS: pytest.approx(8e9 / 2 / 6.25e9)}


def test_devices_of_one_chip_share_its_rates():
    v7x = {chip.name: chip for chip in CHIPS}["v7x"]
    machine = Machine(v7x, tuple((0, (i,), core) for i in range(2) for core in range(2)), (2,))
    assert machine.flops == 2307e12 / 2 and machine.memory == 96e9
    assert machine.product_flops("fp8") == 2307e12 and machine.product_flops("int8") == machine.flops
    assert machine.route((0, 1)).bandwidth > machine.route((0, 2)).bandwidth == 50e9


def test_step_time_with_and_without_overlap():
    line = Roofline(compute=2.0, memory=1.0, networks={"fsdp": 3.0, "tensor": 1.0}, model_flops_seconds=1.5)
    assert (line.bound, line.overlapped, line.one_by_one, line.mfu) == ("fsdp", 3.0, 6.0, (0.25, 0.5))


# --- operations ---


def test_products_of_loops_branches_and_devices(monkeypatch):
    """2 m k n each; a scan of five; the larger branch; recomputed ones; loops that data decide are only noted."""
    x, w = jnp.zeros((2, 3)), jnp.zeros((3, 3))
    one = 2 * 2 * 3 * 3

    def count(f):
        return products(jax.make_jaxpr(f)(x, w))

    assert count(lambda x, w: x @ w) == MatmulFlops(one, False)
    assert count(lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]) == MatmulFlops(5 * one, False)
    either = count(lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w))
    assert either == MatmulFlops(2 * one, False)
    assert count(lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)) == MatmulFlops(0, True)

    def loss(f):
        return lambda x, w: jax.grad(lambda x: f(jnp.sin(f(x, w)), w).sum())(x)

    plain, again = count(loss(lambda x, w: x @ w)), count(loss(jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w)))
    assert plain.counted == 4 * one  # two products, there and back
    assert again.counted == 10 * one  # four products, there and back, and of each pair the first again
    grouped = jax.make_jaxpr(jax.lax.ragged_dot)(jnp.zeros((4, 3)), jnp.zeros((2, 3, 5)), jnp.array([1, 3]))
    assert products(grouped) == MatmulFlops(2 * 4 * 3 * 5, False, grouped=2 * 4 * 3 * 5)
    bytes_ = jnp.zeros((2, 3), jnp.int8)
    assert count(lambda x, w: bytes_ @ bytes_.T + (x @ w)[:, :2].astype(jnp.int8)) == MatmulFlops(one + 24, False, 24)

    looped = jax.make_jaxpr(lambda x, w, n: jax.lax.fori_loop(0, n[0], lambda _, x: jax.lax.ragged_dot(x, w, n), x))(
        jnp.zeros((4, 3)), jnp.zeros((2, 3, 3)), jnp.array([1, 3])
    )
    assert products(looped) == MatmulFlops(0, False, has_uncounted_grouped=True)
    kernel = jax.make_jaxpr(lambda x, w, n: kernel_product(False, x, w, n))
    assert products(kernel(jnp.zeros((128, 128)), jnp.zeros((2, 128, 128)), jnp.array([64, 64]))).has_uncounted_grouped
    arrays = jnp.zeros((64, 8)), jnp.zeros((2, 8, 8)), jnp.array([40, 24])
    for form in (GroupedForm("blocks", 8), GroupedForm("triton")):
        product = lambda x, w, n, form=form: grouped_arrays(x, (w,), n, form)[0].sum()  # noqa: E731
        gradient = jax.grad(product, (0, 1))
        for run in (gradient, jax.checkpoint(jax.jit(gradient))):
            assert products(jax.make_jaxpr(run)(*arrays)) == MatmulFlops(0, False, has_uncounted_grouped=True)
    places = jnp.broadcast_to(jnp.arange(512)[None], (1, 512))
    own = dict(query_positions=places, key_positions=places, kernel="interval", platform="tpu", local=True)
    q = jnp.zeros((1, 512, 1, 128), jnp.bfloat16)
    assert products(jax.make_jaxpr(lambda q: attend(q, q, q, mask=Causal(), **own))(q)) == MatmulFlops(0, True)

    # over one of two mesh axes, and inside over the other one: shapes are those of a device
    layout = ed.Layout.create(stage=2, fsdp=4)
    inside = jax.shard_map(
        lambda x, w: layout.shard_map(lambda x, w: x @ w, (P("fsdp"), P()), P("fsdp"))(x, w),
        mesh=layout.mesh, axis_names={"stage"}, in_specs=(P(), P()), out_specs=P(), check_vma=False,
    )  # fmt: skip
    found = products(jax.make_jaxpr(jax.jit(inside))(jnp.zeros((8, 3)), w))
    assert found == MatmulFlops(2 * 2 * 8 * 3 * 3, False)  # each stage multiplies all of them


@pytest.mark.slow(fast=("none-1",))
@pytest.mark.parametrize("remat, again", [("none", 1), ("full", 4 / 3)])
def test_experts_count_products_of_their_tokens(remat, again, monkeypatch):
    """However much room their rows have, and in loops that data decide, too: three products of each of its experts."""
    config = ed.get_config("tiny-moe")
    model, mlp = ed.abstract(config, remat=remat), config.blocks[-1].mlp
    trainer = Trainer.create(OptimizerConfig(), model, steps=10)
    weights = len(config.blocks) * mlp.num_experts_per_token * 3 * config.embed_dim * mlp.mlp_dim
    needed = again * 6 * 8 * 64 * weights

    def computed(found: MatmulFlops) -> float:
        monkeypatch.setattr("eqx_decoders.planning.step_plan.products", lambda _: found)
        return operations(model, trainer, None, 8, 64).computed

    def eight_bit(found: MatmulFlops) -> float:
        monkeypatch.setattr("eqx_decoders.planning.step_plan.products", lambda _: found)
        return operations(model, trainer, None, 8, 64).eight_bit

    assert computed(MatmulFlops(1e12 + 7, False, grouped=1e12)) == pytest.approx(7 + needed)
    assert computed(MatmulFlops(20.0, False, grouped=5.0)) == 20.0  # fewer than that are all there are
    assert computed(MatmulFlops(7.0, False, has_uncounted_grouped=True)) == pytest.approx(7 + needed)
    # 8-bit experts count with what their tokens need, too, and kernels that convert their operands do not count
    assert eight_bit(MatmulFlops(1e12 + 7, False, 1e12 + 7, 1e12, 1e12)) == pytest.approx(7 + needed)
    assert eight_bit(MatmulFlops(1e12 + 7, False, 7.0, 1e12)) == 7.0
    assert eight_bit(MatmulFlops(7.0, False, 7.0, has_uncounted_grouped=True)) == 7.0


# --- memory and advice ---


def test_needed_bytes_of_compiler_messages():
    message = "Ran out of memory, the total memory required for HLO temporaries (36.24G) exceeds available HBM (15.75G)"
    assert needed_bytes(message) == int(36.24 * 2**30)
    assert needed_bytes("Used 120.5G of 95.74G hbm. Exceeded hbm capacity by 24.76G.") == int(120.5 * 2**30)
    assert needed_bytes("something else") is None


def planned(
    line: Roofline | None = None, collectives: tuple[Collective, ...] | None = (), message="", **memory
) -> Plan:
    known: dict = dict(parameters=10e9, optimizer=20e9, means=0, gradients=10e9, capacity=95e9, peak=90e9)
    return Plan(
        machine=torus(4, 2),
        memory=DeviceMemory(**{name: None if size is None else int(size) for name, size in (known | memory).items()}),
        operations=Operations(model=6.0, attention=1.0, computed=8.0, six_nd=5.0),
        collectives=collectives,
        roofline=line or Roofline(compute=2.0, memory=1.0, networks={}, model_flops_seconds=1.5),
        seconds=1.0,
        compiler_message=message,
        tokens=4096,
    )


def bound_by(name: str, kind: str = "all-gather") -> Plan:
    axes = tuple(name.split(" x "))
    line = Roofline(compute=2.0, memory=1.0, networks={name: 3.0}, model_flops_seconds=1.5)
    return planned(line, (collective(kind, (0, 1), axes=axes),))


def on_h100(plan: Plan) -> Plan:
    return dataclasses.replace(plan, machine=gpus_of("h100:1x8").machine)


@pytest.mark.parametrize(
    "plan, remat, names",
    [
        (planned(needed=120e9, peak=None), "minimal", ["120.0 GB", "remat=save_dot_except_mlpwi", "batch"]),
        (planned(needed=120e9, peak=None, optimizer=90e9), "full", ["110.0 GB", "mesh.fsdp"]),
        (planned(peak=100e9), "full", ["100.0 GB", "95.0 GB", "mesh.context"]),
        (on_h100(planned(peak=70e9, capacity=80e9)), "full", ["XLA_PYTHON_CLIENT_MEM_FRACTION"]),
        (on_h100(planned(peak=90e9, capacity=80e9)), "full", ["90.0 GB", "80.0 GB"]),
        (planned(peak=20e9), "full", ["75.0 GB", "33%", "remat=save_qkv_proj"]),
        (bound_by("fsdp"), "full", ["fsdp", "3 s", "512 tokens", "batch_size"]),
        (bound_by("tensor", "all-reduce"), "full", ["mesh.tensor", "2"]),
        (bound_by("expert", "ragged-all-to-all"), "full", ["mesh.expert", "1"]),
        (bound_by("data", "all-reduce"), "full", ["data", "Gradient", "batch_size"]),
        (bound_by(ACROSS, "all-reduce"), "full", [ACROSS]),
        (planned(collectives=None, message="INTERNAL: no"), "full", ["INTERNAL: no", "jax[tpu]"]),
        (planned(collectives=(collective("all-gather", (0, 1), unknown=True),)), "full", ["1 collectives"]),
    ],
    ids=["needed", "state", "peak", "memory fraction", "peak of a GPU", "free memory", "fsdp", "tensor", "expert",
         "data", "across", "no text", "unknown loop"],
)  # fmt: skip
def test_advice_names_what_to_change(plan, remat, names):
    lines = advice(plan, Execution(layout=ed.Layout.create(fsdp=4, tensor=2), remat=remat))
    assert_names(" ".join(lines), *names)


def test_no_advice_for_a_compute_bound_step_that_fits():
    for plan in (planned(), on_h100(planned(peak=59e9, capacity=80e9))):
        assert advice(plan, Execution(layout=ed.Layout.create(fsdp=8), remat="full")) == []


# --- all of it ---


@pytest.fixture(scope="module")
def tiny() -> tuple[Plan, Execution]:
    """A step of a small model, compiled for the CPU's eight devices as if they were eight chips."""
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = ed.abstract(CONFIG, layout=layout, remat="full")
    trainer = Trainer.create(OptimizerConfig(), model, steps=10)
    return make_plan(model, trainer, torus(4, 2), batch_size=8, seq_len=32), model.execution


@pytest.mark.slow
def test_a_plan_adds_up(tiny):
    plan, _ = tiny
    memory, count = plan.memory, ed.count_parameters(CONFIG)
    assert sum(memory.rows().values()) == memory.total and memory.fits
    assert memory.parameters >= 4 * count / 8 and memory.optimizer == pytest.approx(2 * memory.parameters, rel=0.01)
    assert 0 < memory.saved_activations < memory.temporaries and plan.tokens == 256
    assert {"fsdp", "tensor"} <= {axis for one in plan.collectives for axis in one.axes}
    assert sum(by_kind(plan.collectives).values()) == sum(one.total for one in plan.collectives)
    assert set(plan.roofline.networks) == {" x ".join(one.axes) for one in plan.collectives}
    assert plan.operations.model > plan.operations.attention > 0
    assert plan.operations.computed > plan.operations.model - plan.operations.attention
    text, data = report(plan, ["Do this."], rows=2), json.loads(json.dumps(as_data(plan, ["Do this."])))
    assert_names(text, "parameters", "activations", "peak", "all-gather", "6ND", "Do this.", "0%", "chunked")
    assert data["memory"]["total"] == memory.total and data["seconds"]["bound"] == plan.roofline.bound
    assert len(data["collectives"]) == len(plan.collectives) and data["advice"] == ["Do this."]
    assert data["overlapped"] == 0 and data["attention"] == ["chunked"]


@pytest.mark.slow
def test_a_program_without_a_text_has_a_plan_of_its_memory(tiny, monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: should have 1 operands but sees 3")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
    model = ed.abstract(CONFIG, layout=tiny[1].layout, remat="full")
    trainer = Trainer.create(OptimizerConfig(), model, steps=10)
    plan = make_plan(model, trainer, torus(4, 2), batch_size=8, seq_len=32)
    assert plan.collectives is None and "operands" in plan.compiler_message and plan.memory.peak == tiny[0].memory.peak
    assert report(plan, [])


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_reported_and_not_raised(tiny, monkeypatch):
    def fail(self, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 120.5G of 95.74G hbm.")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    model = ed.abstract(CONFIG, layout=tiny[1].layout, remat="full")
    plan = make_plan(model, Trainer.create(OptimizerConfig(), model, steps=10), torus(4, 2), batch_size=8, seq_len=32)
    assert not plan.memory.fits and plan.memory.needed == int(120.5 * 2**30)
    assert plan.memory.parameters == tiny[0].memory.parameters
    assert_names(report(plan, advice(plan, model.execution)), f"{plan.memory.needed / 1e9:.1f} GB")
