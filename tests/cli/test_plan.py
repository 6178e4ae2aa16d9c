"""Test the plan program: flags, XLA options, and plans for TPUs."""

import dataclasses
import json
import sys
import types
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqx_decoders as ed
from eqx_decoders.cli import plan as program
from eqx_decoders.cli.plan import parse, single_flags
from eqx_decoders.cli.xla_flags import OPTIONS, generation, options, set_options
from eqx_decoders.planning.decoding_step import DecodingPlan
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Operations, Plan
from eqx_decoders.planning.roofline import Roofline
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.training.settings.step import MeshConfig
from tests.commands import call, run
from tests.errors import assert_names, refused


@pytest.fixture
def planned_arguments(monkeypatch):
    """Run the program for eight v5p chips and return the arguments of `make_plan`."""
    asked = []

    class Asked(Exception):
        pass

    def make_plan(model, trainer, machine, **given):
        asked.append((model, trainer, machine, given))
        raise Asked

    chip = {chip.name: chip for chip in CHIPS}["v5p"]
    monkeypatch.setattr(
        program, "tpu_devices", lambda topology, slices: asked.append((topology, slices)) or jax.devices()
    )
    places = tuple((0, (i,), 0) for i in range(8))
    monkeypatch.setattr(Machine, "of", classmethod(lambda cls, devices: cls(chip, places, (8,))))
    monkeypatch.setattr(program, "make_plan", make_plan)

    def ask(*words):
        asked.clear()
        with pytest.raises(Asked):
            program.plan(parse([str(word) for word in words]))
        return asked

    return ask


@pytest.mark.parametrize(
    "topology, wrap",
    [
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x2x4", (False, False, False)),
        ("v6e:8x16", (False, True, False)),
        ("tpu7x:4x4x4", (True, True, True)),
    ],
)
def test_wraparound_links_of_real_slices(monkeypatch, topology, wrap):
    asked = Mock()
    asked.return_value.devices = []
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    monkeypatch.setattr(topologies, "get_topology_desc", asked)
    program.tpu_devices(topology)
    assert asked.call_args.kwargs["wrap"] == wrap


def test_flags_become_a_plan(planned_arguments):
    words = ("--topology", "v5p:2x2x2", "--slices", 2, "--mesh", "fsdp=4", "tensor=2", "--batch-size", 4)
    more = ("--seq-len", 64, "--remat", "custom", "--remat-save", "out_proj", "--remat-offload", "context")
    assert planned_arguments("tiny", "--until", "memory")[1][3]["until"] == "memory"
    others = ("--optimizer.moments-dtype", "bfloat16", "--step.gradient-accumulation-steps", 1, "--head-bytes", 5)
    last = ("--exchange-bytes", 6, "--batch-split", 2)
    (topology, slices), (model, trainer, machine, given) = planned_arguments("tiny", *words, *more, *others, *last)
    assert (topology, slices, machine.chip.name) == ("v5p:2x2x2", 2, "v5p")
    execution = model.execution
    assert execution.layout.sizes["fsdp"] == 4 and execution.layout.sizes["tensor"] == 2
    assert (execution.head_bytes, execution.exchange_bytes, execution.batch_split) == (5, 6, 2)
    assert execution.remat.save == ("out_proj",) and execution.remat.offload == ("context",)
    assert given == {"batch_size": 4, "seq_len": 64, "media": None, "options": options("v5p"), "until": "code"}
    *_, seen = planned_arguments("tiny-vision", *words[:-1], 8, "--seq-len", 64, "--images", 2, "--image-side", 64)[1]
    assert seen["media"].images.patches.shape == (16, 64, 48) and seen["media"].index.shape == (8, 64)
    assert parse(["tiny", "--image-side", "64"]).image_side == 64
    _, (*_, seen) = planned_arguments("qwen3-vl-2b", *words, "--seq-len", 64, "--images", 2, "--image-side", 64)
    assert seen["media"].images.patches.shape == (8, 16, 1536) and seen["media"].order.shape[0] == 4
    state = trainer.abstract(model, key=jax.random.key(0))
    assert any(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(state.optimizer))


def test_low_precision_flags_are_planned(planned_arguments):
    words = ("--low-precision.mode", "int8", "--low-precision.weights", "*.mlp.*", "--mesh.fsdp", 8, "--batch-size", 8)
    model = planned_arguments("tiny", *words)[1][0]
    assert model.execution.low_precision == ed.LowPrecision(mode="int8", weights=("*.mlp.*",))


@pytest.mark.slow
def test_replicated_weights_above_the_tolerance_are_refused(planned_arguments):
    planned_arguments("llama3-8b", "--mesh", "tensor=8", "--batch-size", 8)
    with refused(ed.ConfigError, "replicated_tolerance=0.0", "Layout.tensor=8"):
        program.plan(parse(["llama3-8b", "--mesh", "tensor=8", "--batch-size", "8", "--replicated-tolerance", "0"]))


def test_context_and_pipeline_flags_are_planned(planned_arguments):
    words = ("--context-order", "zigzag", "--context-form", "all_to_all", "--pipeline.microbatches", 4)
    model = planned_arguments("tiny", "--mesh", "context=2", "stage=2", "data=2", "--batch-size", 8, *words)[1][0]
    execution = model.execution
    assert (execution.context_order, execution.context_form) == ("zigzag", "all_to_all")
    assert execution.pipeline is not None and execution.pipeline.microbatches == 4


def test_steps_exceed_the_warmup_of_the_planned_run():
    assert parse(["tiny", "--optimizer.warmup-steps", "2000"]).steps > 2000


@pytest.mark.slow
def test_model_flags_are_planned(planned_arguments, tmp_path):
    def config(*words):
        return planned_arguments(*words, "--batch-size", 8, "--xla-flags", "none")[1][0]

    assert len(config("tiny", "--set", "num_layers=2").config.blocks) == 2
    assert config("tiny", "--mtp-depths", 1).config.mtp.num_depths == 1
    file = tmp_path / "config.json"
    file.write_text(config("gpt3-52k").config.to_json())
    assert config("any", "--model-config", file).config == config("gpt3-52k").config
    other = config("tiny", "--dtype", "bfloat16", "--params-dtype", "bfloat16", "--attention", "dot").execution
    assert (other.attention, other.precision.params, other.precision.compute) == ("dot", "bfloat16", "bfloat16")
    assert planned_arguments("tiny", "--batch-size", 8, "--xla-flags", "none")[1][3]["options"] == {}


def test_both_spellings_of_a_mesh():
    assert single_flags(["m", "--mesh", "fsdp=16", "tensor_sequence=4", "--remat", "full"]) == [
        "m", "--mesh.fsdp", "16", "--mesh.tensor-sequence", "4", "--remat", "full",
    ]  # fmt: skip
    assert parse(["tiny", "--mesh", "fsdp=2"]).mesh == parse(["tiny", "--mesh.fsdp", "2"]).mesh == MeshConfig(fsdp=2)
    assert parse(["--set", "a=b", "--rows", "3", "tiny", "--json"]).rows == 3


@pytest.mark.slow
def test_search_compiles_the_best_meshes_with_remat_until_they_fit(monkeypatch):
    """No mesh fits without remat."""
    chip = {chip.name: chip for chip in CHIPS}["v5p"]
    places = tuple((0, (i,), 0) for i in range(8))
    monkeypatch.setattr(program, "tpu_devices", lambda topology, slices: jax.devices())
    monkeypatch.setattr(Machine, "of", classmethod(lambda cls, devices: cls(chip, places, (8,))))
    made, lines = [], []

    def make_plan(model, trainer, machine, **given):
        made.append((model.execution.layout.sizes, model.execution.remat))
        line = Roofline(compute=1.0, memory=1.0, networks={"fsdp": 9.0 / len(made)}, model_flops_seconds=1.0)
        known = DeviceMemory(parameters=1, optimizer=2, means=0, gradients=1, capacity=10, peak=5)
        memory = dataclasses.replace(known, needed=20 if model.execution.remat is None else None)
        done = Operations(model=1.0, attention=0.0, computed=1.0, six_nd=1.0)
        return Plan(
            machine=machine, memory=memory, operations=done, collectives=(), roofline=line, seconds=1.0, tokens=8,
            compiler_message="",
        )  # fmt: skip

    monkeypatch.setattr(program, "make_plan", make_plan)
    config = parse(["tiny", "--search", "2", "--batch-size", "8", "--mesh.data", "1", "--seq-len", "64"])
    best, plan, _, execution = program.search(config, lines.append)
    assert [remat is None for _, remat in made] == [True, False, True, False]
    assert best.remat == "minimal_with_context"
    assert plan.roofline.networks == {"fsdp": 9 / 4}  # the last mesh is the fastest
    assert execution.layout.sizes == made[-1][0] and made[0][0] != made[-1][0]
    assert_names(lines[0], "2")
    assert len(lines) == 5


def test_invalid_arguments_are_refused():
    assert_names(call("plan", "tinny", code=2)[1], "model='tinny'", "'tiny'")
    assert_names(call("plan", "tiny", "--batch-size", "0", code=2)[1], "--batch-size=0")


# --- XLA options ---


def test_every_xla_option_has_a_reason_and_known_chips():
    names = {chip.name for chip in CHIPS}
    assert all(option.reason and option.source and set(option.chips) <= names for option in OPTIONS)
    for chip in (*names, None):
        mine = [option.name for option in OPTIONS if not option.chips or chip in option.chips]
        assert len(mine) == len(set(mine)) == len(options(chip))
    assert options(None).items() <= options("v5p").items() and "xla_enable_async_all_gather" in options("v5p")
    wrong = ("offload_reduce_scatter", "offload_all_reduce")  # wrong losses were reported with these options
    assert not [option.name for option in OPTIONS if option.name.endswith(wrong)]


def test_user_xla_options_take_precedence(monkeypatch):
    monkeypatch.setattr("eqx_decoders.cli.xla_flags.find_spec", lambda name: name)
    own = {"LIBTPU_INIT_ARGS": "--xla_enable_async_all_gather=false --a=1", "TPU_ACCELERATOR_TYPE": "v5p-8"}
    own["XLA_FLAGS"] = "--xla_tpu_overlap_compute_collective_tc=false"
    added = set_options("auto", own)
    assert added.keys() == options("v5p").keys() - {
        "xla_enable_async_all_gather", "xla_tpu_overlap_compute_collective_tc",
    }  # fmt: skip
    words = own["LIBTPU_INIT_ARGS"].split()
    assert words[:2] == ["--xla_enable_async_all_gather=false", "--a=1"]
    assert words[2:] == [f"--{name}={value}" for name, value in added.items()]
    assert set_options("auto", own) == {}  # options are set only once
    for other in ({"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cuda,cpu"}):
        assert set_options("auto", other) == {} and "LIBTPU_INIT_ARGS" not in other
    own = {}
    assert set_options("none", own) == {} == own
    monkeypatch.setattr("eqx_decoders.cli.xla_flags.find_spec", lambda name: None)
    assert set_options("auto", own) == {} == own


@pytest.mark.slow
def test_train_sets_xla_options_before_jax_starts(monkeypatch, tmp_path):
    """With `--xla-flags none`, no options are set."""
    from eqx_decoders.cli import train

    seen = []
    monkeypatch.setattr(train, "set_options", seen.append)
    monkeypatch.setattr(train, "_train", lambda config: seen.append("trains") or 0)
    call("train", "--run-dir", tmp_path)
    call("train", "--run-dir", tmp_path, "--xla-flags", "none")
    assert seen == ["auto", "trains", "none", "trains"]


@pytest.mark.parametrize(
    "name, chip",
    [("v5p-128", "v5p"), ("v5litepod-16", "v5e"), ("v6e-8", "v6e"), ("v4-8", "v4"), ("tpu7x-8", "v7x"), ("v99", None)],
)
def test_tpu_generation_from_the_environment(name, chip, tmp_path):
    for variable in ("TPU_ACCELERATOR_TYPE", "ACCELERATOR_TYPE"):
        assert generation({variable: name}, tmp_path) == chip


def test_tpu_generation_from_the_pci_bus(tmp_path):
    assert generation({}, tmp_path / "nothing") is None
    for name, vendor, device in (("0", "0x8086", "0x0062"), ("1", "0x1ae0", "0x9999"), ("2", "0x1ae0", "0x006f")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    assert generation({}, tmp_path) == "v6e"


# --- TPUs ---

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(TOPOLOGIES))
def test_programs_compile_with_the_xla_options_of_their_chip(chip):
    """Programs with FSDP layers compile with each single option and with all options."""
    pytest.importorskip("libtpu")
    devices = program.tpu_devices(TOPOLOGIES[chip])
    machine = Machine.of(devices)
    assert machine.chip.name == chip and machine.chip.devices * machine.extents[0] * machine.extents[1] == len(devices)
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    whole, split, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "fsdp"), ("fsdp",)))

    def layers(x, weights):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(layer, x, weights)[0]

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=rows)
    lowered = jax.jit(layers).lower(x, jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16, sharding=split))
    mine = options(chip)
    for some in ({}, mine, *({name: value} for name, value in mine.items())):
        lowered.compile(compiler_options=some)


def plan_of(*words: object, code: int = 0) -> dict:
    """Return the plan of a step on four v5p chips, as JSON data."""
    pytest.importorskip("libtpu")
    common = ("--topology", "v5p:2x2x1", "--mesh", "data=1", "fsdp=2", "tensor=2", "--remat", "save_qkv_proj", "--json")
    return json.loads(run("plan.py", *words, *common, code=code)[0])


def check_sums(data: dict, count: int) -> None:
    memory = data["memory"]
    assert sum(memory["rows"].values()) == memory["total"]
    assert memory["parameters"] == pytest.approx(4 * count / 4, rel=0.01)
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert memory["fits"] and memory["peak"] == pytest.approx(memory["total"], rel=0.3)
    if data["collectives"] is None:  # jaxlib is older than libtpu
        assert data["advice"]
        return
    assert 0 < memory["saved_activations"] < memory["temporaries"]
    assert {axis for row in data["collectives"] for axis in row["axes"]} == {"fsdp", "tensor"}
    networks = [name for name in data["seconds"]["parts"] if name not in ("compute", "memory")]
    assert sum(data["seconds"]["parts"][name] for name in networks) < data["seconds"]["one_by_one"]


@pytest.mark.slow
def test_small_model_is_planned():
    check_sums(plan_of("tiny", "--batch-size", 8, "--seq-len", 256), ed.count_parameters(ed.get_config("tiny")))


@pytest.mark.slow
def test_llama_1b_is_planned():
    """The bytes of the weight all-gathers (bfloat16, in the forward pass and again with remat) are known."""
    data = plan_of("llama3.2-1b", "--batch-size", 8, "--seq-len", 2048)
    check_sums(data, ed.count_parameters(ed.get_config("llama3.2-1b")))
    if data["collectives"] is not None:
        layers = 16 * (2048 * 64 * (32 + 8 + 8) + 32 * 64 * 2048 + 3 * 2048 * 8192) * 2 / 2
        rows = [row for row in data["collectives"] if row["phase"] == "forward" and "head" not in row["cause"]]
        gathered = sum(row["total"] for row in rows if row["kind"] == "all-gather")
        assert gathered == pytest.approx(layers, rel=0.02)


@pytest.mark.slow
def test_plan_until_buffer_assignment_equals_full_compilation():
    words = ("tiny", "--batch-size", 8, "--seq-len", 256)
    whole, early = plan_of(*words), plan_of(*words, "--until", "memory")
    assert early["compile_seconds"] < whole["compile_seconds"]
    assert early["memory"]["temporaries"] == pytest.approx(whole["memory"]["temporaries"], rel=0.01)
    assert early["memory"]["peak"] == pytest.approx(whole["memory"]["total"], rel=0.01)
    if whole["collectives"] is not None:
        sent = [sum(row["total"] for row in data["collectives"]) for data in (early, whole)]
        assert sent[0] == pytest.approx(sent[1], rel=0.01) and sent[0] > 0


@pytest.mark.slow
def test_step_that_does_not_fit_is_reported():
    pytest.importorskip("libtpu")
    words = ("llama3-8b", "--topology", "v5e:2x2", "--mesh.data", 1, "--mesh.fsdp", 4, "--set", "num_layers=2")
    out, _ = run("plan.py", *words, "--batch-size", 64, "--seq-len", 8192, code=1)
    assert_names(out, "does not fit", "GB")


# --- decoding steps ---


def test_flags_become_a_decoding_plan(planned_arguments, monkeypatch):
    asked = []
    result = Mock(spec=DecodingPlan, seconds=1.0, memory=types.SimpleNamespace(fits=True))
    monkeypatch.setattr(program, "plan_decoding", lambda *given, **options: asked.append((*given, options)) or result)
    monkeypatch.setattr(program, "decoding_report", lambda plan, rows: f"{rows} rows")
    monkeypatch.setattr(program, "decoding_data", lambda plan: {})
    words = ("--topology", "v5p:2x2x2", "--mesh", "tensor=2", "data=4", "--batch-size", 8, "--seq-len", 64, "--rows", 7)
    out, _ = call("plan", "tiny", *words, "--decoding", "--page-size", 16, "--dtype", "bfloat16",
                  "--until", "memory")  # fmt: skip
    assert_names(out, "8 x 64 tokens", "1 s")
    assert out.endswith("7 rows\n")
    ((model, _, given),) = asked
    precision = model.execution.precision
    assert precision.params == precision.compute == jnp.bfloat16 and model.execution.layout.sizes["tensor"] == 2
    assert (given.pop("options"), given) == (options("v5p"), dict(rows=8, length=64, page_size=16, until="memory"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(("--page-size", "16"), "page_size=16", id="page_size"),
        pytest.param(("--decoding", "--search", "2"), "search=2", id="search"),
        pytest.param(("--decoding", "--images", "1"), "images=1", id="images"),
    ],
)
def test_training_flags_are_refused_for_decoding_plans(words, named):
    with refused(ed.ConfigError, named, "decoding"):
        parse(["tiny", *words])
