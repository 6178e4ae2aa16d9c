"""GPUs: their nodes and networks, devices to compile for, or the stand-in, for which memory is counted."""

import json
import math
import types

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.cli import plan as program
from eqx_decoders.cli.plan import parse
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.gpus import GPU_OPTIONS, gpu_devices, gpus_of, tracing_for
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.report import as_data, report
from eqx_decoders.planning.roofline import ACROSS, collective_seconds
from eqx_decoders.planning.step_plan import make_plan
from eqx_decoders.planning.traced_memory import counted_memory, saved_activation_bytes
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from tests.commands import run
from tests.errors import assert_names, refused


def test_nodes_and_gpus_of_a_node():
    """Eight GPUs of a node meet over NVLink, those of four nodes each over its card."""
    gpus = gpus_of("h100:4x8")
    machine = gpus.machine
    assert (gpus.chip.name, len(machine.positions), machine.memory) == ("h100", 32, 80e9)
    inside = machine.route(tuple(range(8)))
    assert (inside.bandwidth, inside.hops, inside.members, inside.parts) == (450e9, 1.0, 8, 1)
    assert machine.route((0, 8, 16, 24)).parts == 4 and machine.route((0, 8, 16, 24)).members == 1
    whole = Collective(
        kind="all-gather", bytes=8 * 10**9, times=1, groups=(tuple(range(32)),), axes=("fsdp",), shape="", phase="",
        cause="", unknown=False,
    )  # fmt: skip
    found = collective_seconds(whole, machine)
    assert found["fsdp"] == pytest.approx(8e9 * 7 / 8 / 450e9)
    assert found[ACROSS] == pytest.approx(8e9 / 8 * 3 / 4 / 50e9)


def devices_of(topology):
    """GPUs in the attributes that are read of them, node by node."""
    gpus = gpus_of(topology)
    return [
        types.SimpleNamespace(
            platform="gpu", device_kind=gpus.chip.kinds[0], process_index=node, compute_capability="9.0"
        )
        for node in range(gpus.nodes)
        for _ in range(gpus.gpus_per_node)
    ]


def test_a_machine_of_devices_equals_that_of_its_topology():
    """In any order of the mesh: what counts is the node."""
    devices = devices_of("h100:2x4")
    assert Machine.of(devices) == gpus_of("h100:2x4").machine
    turned = Machine.of([*devices[::2], *devices[1::2]])
    assert turned.route((0, 1, 4, 5)).members == 4 and turned.route((0, 2)).parts == 2


def test_each_kind_of_gpu_is_described_to_the_compiler():
    for name in ("h100", "h200", "b200"):
        gpus = gpus_of(f"{name}:1x8")
        assert f'name: "{gpus.chip.kinds[0]}"' in gpus.target and gpus.target.count("{") == gpus.target.count("}") == 5
        memory = int(gpus.target.split("device_memory_size: ")[1].split()[0])
        assert memory == pytest.approx(gpus.chip.memory, rel=0.08)


def test_a_missing_cudnn_names_its_package_and_other_errors_are_unchanged():
    devices = devices_of("h100:1x1")
    with refused(ed.ConfigError, "nvidia-cudnn-cu13"), tracing_for(devices):
        raise RuntimeError("cuDNN not found.")
    with refused(RuntimeError, "other"), tracing_for(devices):
        raise RuntimeError("other")


def test_gpus_are_compiled_for_if_their_compiler_is_installed(monkeypatch):
    """Otherwise as many TPUs. `until` applies to TPUs only."""
    asked = []
    words = ("tiny", "--topology", "h100:1x4", "--mesh.fsdp", "4", "--batch-size", "4", "--xla-flags", "none")

    class Asked(Exception):
        pass

    def make_plan(model, trainer, machine, **given):
        asked.append((machine.chip.name, given["options"], given["until"]))
        raise Asked

    stand_in = [types.SimpleNamespace(platform="tpu")]
    monkeypatch.setattr(program, "tpu_devices", lambda topology, slices: stand_in)
    config = parse([*words, "--until", "memory"])
    monkeypatch.setattr(program, "gpu_devices", lambda gpus: None)
    assert program.planned_devices(config) == stand_in
    monkeypatch.setattr(program, "gpu_devices", lambda gpus: devices_of("h100:1x4"))
    devices = program.planned_devices(config)
    monkeypatch.setattr(program, "make_plan", make_plan)
    model, machine = types.SimpleNamespace(), Machine.of(devices)
    monkeypatch.setattr(program, "_parts", lambda config, devices: (model, None, machine))
    with pytest.raises(Asked):
        program.plan(config)
    assert asked == [("h100", GPU_OPTIONS, "code")]
    with refused(ed.ConfigError, "slices=2", "h100:4x8"):
        program.planned_devices(parse([*words, "--slices", "2"]))


@pytest.mark.parametrize("text, shape", [("h100:1x4", "2x2x1"), ("h100:1x8", "2x2x2"), ("b200:4x8", "2x4x4"),
                                         ("h200:16x8", "4x4x8"), ("h100:128x8", "8x8x16")])  # fmt: skip
def test_the_tpu_stand_in_has_the_same_number_of_devices(text, shape):
    gpus = gpus_of(text)
    assert (
        gpus.proxy_topology == f"v5p:{shape}"
        and math.prod(map(int, shape.split("x"))) == gpus.nodes * gpus.gpus_per_node
    )


def test_malformed_topologies_are_refused():
    assert gpus_of("v5p:2x2x1") is None and gpus_of("tpu7x:2x2x1") is None
    for wrong in ("h100:8", "h100:2x16", "h100:0x8", "h100"):
        with refused(ed.ConfigError, f"topology='{wrong}'", "h100:4x8"):
            gpus_of(wrong)
    with refused(ed.ConfigError, "topology", "24 GPUs"):
        _ = gpus_of("h100:3x8").proxy_topology


@pytest.mark.slow
def test_a_plan_by_the_stand_in_has_the_memory_and_rates_of_the_gpu(monkeypatch):
    """State, gradients and activations are those of the compiled step of this mesh."""
    monkeypatch.setattr(program, "tpu_devices", lambda topology, slices: jax.devices())
    monkeypatch.setattr(program, "gpu_devices", lambda gpus: None)
    asked = {}

    def compiled(*args, options, **given):
        asked.update(options)
        return make_plan(*args, **given)

    monkeypatch.setattr(program, "make_plan", compiled)
    words = ("--topology", "h100:2x4", "--mesh", "data=2", "fsdp=4", "--batch-size", "8", "--seq-len", "32")
    config = parse(["gpt3-52k", *words, "--remat", "full", "--set", "num_layers=3", "--dtype", "bfloat16"])
    plan, _, execution = program.plan(config)
    assert plan.machine.chip.name == "h100" and asked["xla_tpu_max_hbm_size_mib"] == str(80 * 10**9 // 2**20)
    memory = plan.memory
    assert memory.capacity == 80e9 and memory.total == memory.peak and memory.fits
    assert memory.state + memory.gradients + memory.saved_activations < memory.peak
    assert ACROSS in plan.roofline.networks and "fsdp" in plan.roofline.networks
    assert_names(report(plan, []), "h100", "[aot-gpu]'")
    assert json.loads(json.dumps(as_data(plan, [])))["note"] == plan.note
    other = ed.Precision(compute=jnp.bfloat16)
    described = with_fields(ed.get_config("gpt3-52k"), ("num_layers=3",))
    model = ed.abstract(described, layout=execution.layout, precision=other, remat="full")
    trainer = Trainer.create(OptimizerConfig(), model, steps=10)
    shape = dict(batch_size=8, seq_len=32)
    assert counted_memory(model, trainer, plan.machine, **shape) == memory
    assert saved_activation_bytes(model, trainer, **shape) == memory.saved_activations > 0


@pytest.mark.slow
def test_llama_1b_is_planned_for_gpus():
    """By their compiler, or by that of the stand-in, which sends as many bytes."""
    words = ("llama3.2-1b", "--topology", "h100:2x8", "--mesh", "data=2", "fsdp=8", "--seq-len", 2048, "--json")
    if gpu_devices(gpus_of("h100:2x8")) is None:
        pytest.importorskip("libtpu")
    data = json.loads(run("plan.py", *words, "--remat", "full", "--until", "memory")[0])
    assert data["chip"]["name"] == "h100" and data["devices"] == 16
    assert ("2x2x4" in data["note"]) == (data["attention"] != ["cudnn"])
    assert {axis for row in data["collectives"] for axis in row["axes"]} == {"data", "fsdp"}
    assert not [row for row in data["collectives"] if row["kind"] == "collective-permute"]
