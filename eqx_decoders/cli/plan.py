"""Plan memory, communication and time of a training or decoding step on TPUs or GPUs that this machine does not have.

    python scripts/plan.py llama3-8b --topology v5p:2x2x4 --mesh.fsdp 16 --batch-size 16 --remat save_qkv_proj
    python scripts/plan.py llama3-8b --topology v5p:4x4x4 --mesh fsdp=16 tensor=4 --json
    python scripts/plan.py llama3-8b --topology v5p:4x4x4 --search 3
    python scripts/plan.py llama3-8b --topology h100:4x8 --mesh data=4 fsdp=8
    python scripts/plan.py llama3-8b --topology h100:1x8 --mesh tensor=8 --decoding --batch-size 64 --page-size 64

The step is compiled for these chips, which needs libtpu (extra aot) or the extra aot-gpu, and no chip. Memory and
collectives are the compiler's; times are estimates from published figures.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from eqx_decoders.cli import program, require
from eqx_decoders.cli.setting_flags import flag_names, parse_flags
from eqx_decoders.cli.xla_flags import options
from eqx_decoders.context import Execution, ExecutionConfig
from eqx_decoders.errors import AtLeast, ConfigError, NonNegativeInt, PositiveInt, check, check_option, missing_package
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import abstract, with_mtp
from eqx_decoders.planning.advice import advice
from eqx_decoders.planning.compile import Until, abandoned
from eqx_decoders.planning.decoding_step import DecodingPlan, decoding_data, decoding_report, plan_decoding
from eqx_decoders.planning.gpus import GPU_OPTIONS, gpu_devices, gpus_of, on_gpus, tracing_for
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Plan
from eqx_decoders.planning.report import as_data, report
from eqx_decoders.planning.search import estimate, meshes
from eqx_decoders.planning.step_plan import make_plan
from eqx_decoders.planning.traced_memory import abstract_media, counted_memory, predicted_bytes
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.sharding.offload import Offload
from eqx_decoders.sharding.replication import check_replicated
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.mesh_config import MeshConfig, describe_devices
from eqx_decoders.training.run.directory import model_config
from eqx_decoders.training.step.balance import expert_configs
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step_settings import ModelSettings, StepSettings


BASIC = ("model", "topology", "mesh.fsdp", "batch_size", "seq_len", "remat", "search")

_POLICIES = ("none", "minimal_with_context", "save_qkv_proj", "full")  # a search tries them from `remat` on


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(StepSettings, ModelSettings):
    """Compile a training step for TPUs or GPUs that are not here."""

    topology: str = "v5p:2x2x1"
    """Chips: generation and shape of a TPU slice, such as v4:2x2x1, v5e:4x4, v5p:4x4x4, v6e:8x8 or tpu7x:4x4x4; or
    nodes of GPUs, such as h100:4x8 (four nodes of eight). Without the GPU compiler (extra aot-gpu), memory is
    computed and collectives are those of a step compiled for the same number of TPUs."""
    slices: PositiveInt = 1
    """Number of TPU slices. mesh.data crosses the slower network between slices."""
    batch_size: PositiveInt = 16
    """Global batch size: sequences per step."""
    seq_len: Annotated[int, AtLeast(2)] = 2048
    """Sequence length in tokens."""
    images: NonNegativeInt = 0
    """Number of images per sequence, for vision-language models."""
    image_side: PositiveInt = 896
    """Height and width of images in pixels, for models that take images of any size."""
    decoding: bool = False
    """Plan a decoding step of the serving engine: batch_size sequences with a cache of seq_len tokens each, with
    weights and cache in the compute dtype."""
    page_size: PositiveInt | None = None
    """Page size of the KV cache in tokens, with --decoding. None: no pages."""
    search: NonNegativeInt = 0
    """Search for a mesh: compile the N meshes that an estimate ranks first, each with the first remat policy from
    `remat` on that fits. 0: plan the given mesh."""
    until: Until = "code"
    """Last stage of the compilation. code: machine code; memory: memory assignment, which takes a fraction of the
    time but does not find later errors, such as a kernel without enough memory. For GPUs the compilation is
    always complete."""
    rows: NonNegativeInt = 12
    """Number of collectives to print."""
    json: bool = False
    """Print JSON instead of text."""

    def __post_init__(self):
        super().__post_init__()
        if self.search:
            check_option("search: remat", self.remat, _POLICIES)
        check(self.page_size is None or self.decoding, f"page_size={self.page_size} is of a cache: add decoding.")
        if self.decoding:
            check(not self.search, f"search={self.search} is of training steps: give decoding a mesh.")
            check(not self.images, f"images={self.images} are of training steps: leave them out for decoding.")
        else:
            self.check_rows(self.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the run of which one is planned."""
        return max(TrainConfig.steps, 1 + (self.optimizer.warmup_steps or 0))

    def execution(self, devices: Sequence[Any]) -> Execution:
        """Make layout, dtypes and remat of these devices."""
        return self.step_execution(self.batch_size, devices)


TITLES = {PlanConfig: "plan", ModelSettings: "model", StepSettings: "step", ExecutionConfig: "execution"}


def tpu_devices(topology: str, slices: int = 1) -> list[Any]:
    """Return the devices of a TPU topology, which need not be here."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise missing_package("libtpu", "aot") from error
    import jax
    from jax.experimental import topologies

    jax.devices()  # XLA:CPU has read XLA_FLAGS now; libtpu ends the process at one that it does not know
    os.environ.pop("XLA_FLAGS", None)
    more: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    name, _, extents = topology.partition(":")
    chip = next((chip for chip in CHIPS if chip.name == name.replace("tpu7x", "v7x")), None)
    if chip is not None and re.fullmatch(r"\d+(x\d+){1,2}", extents):
        closed = chip.closed([int(extent) for extent in extents.split("x")])  # libtpu joins no ends by itself
        more["wrap"] = (*closed, False, False)[:3]
    if topology.startswith("v4"):  # whose chips are two cores each, which JAX takes as one device
        more["chip_config_name"] = "megacore"
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu", **more).devices
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        known = "Give a generation and the chips along its axes, such as v5p:2x2x4, v5e:4x4 or tpu7x:2x2x1"
        raise ConfigError(
            f"topology={topology!r} is none that libtpu knows ({str(error).splitlines()[0]}). {known}."
        ) from None


def plan(config: PlanConfig, devices: Sequence[Any] | None = None) -> tuple[Plan, list[str], Execution]:
    """Plan a step; return the plan, advice, and the execution. devices: those of the topology, if known."""
    devices = planned_devices(config) if devices is None else devices
    gpus, compiled = gpus_of(config.topology), devices[0].platform == "gpu"
    model, trainer, machine = _parts(config, devices)
    flags = options(machine.chip.name) if gpus is None else gpus.options
    flags = GPU_OPTIONS if compiled else {} if config.xla_flags == "none" else flags
    shape = dict(batch_size=config.batch_size, seq_len=config.seq_len)
    images = dict(images=config.images, side=config.image_side)
    media = abstract_media(model.config, model.execution.layout, **shape, **images) if config.images else None
    until: Until = "code" if compiled else config.until
    with tracing_for(list(devices)):
        step_plan = make_plan(model, trainer, machine, **shape, media=media, options=flags, until=until)
    if compiled and model.execution.layout.offload != Offload():
        note = "Devices of this compiler have no memory of a host: the plan is that without offload."
        step_plan = dataclasses.replace(step_plan, note=note)
    if gpus is not None and not compiled:
        step_plan = on_gpus(step_plan, counted_memory(model, trainer, machine, **shape), gpus)
    return step_plan, advice(step_plan, model.execution), model.execution


def decoding(config: PlanConfig) -> tuple[DecodingPlan, Execution]:
    """Plan a decoding step; return the plan, and the execution."""
    devices, gpus = planned_devices(config), gpus_of(config.topology)
    compiled = devices[0].platform == "gpu"
    check(gpus is None or compiled, "There is no compiler for GPUs here: pip install 'eqx_decoders[aot-gpu]'.")
    execution = config.execution(devices)
    precision = dataclasses.replace(execution.precision, params=execution.precision.compute)
    execution = dataclasses.replace(execution, precision=precision, remat="none")
    model, layout = abstract(model_config(config), **vars(execution)), execution.layout
    machine = Machine.of(list(layout.mesh.devices.flat))
    flags = GPU_OPTIONS if compiled else {} if config.xla_flags == "none" else options(machine.chip.name)
    sizes: dict[str, Any] = dict(rows=config.batch_size, length=config.seq_len, page_size=config.page_size)
    until: Until = "code" if compiled else config.until
    with tracing_for(list(devices)):
        return plan_decoding(model, machine, **sizes, options=flags, until=until), execution


def planned_devices(config: PlanConfig) -> list[Any]:
    """Return the devices that a step is compiled for: of the topology, or as many TPUs where GPUs have no compiler."""
    gpus = gpus_of(config.topology)
    if gpus is None:
        return tpu_devices(config.topology, config.slices)
    check(config.slices == 1, f"slices={config.slices} are of TPUs: {gpus.chip.name}:4x8 are four nodes.")
    return gpu_devices(gpus) or tpu_devices(gpus.stand_in, 1)


def _parts(config: PlanConfig, devices: Sequence[Any]) -> tuple[Decoder, Trainer, Machine]:
    """Make the model as shapes on a mesh of these devices, its trainer, and the machine."""
    execution = config.execution(devices)
    described = model_config(config)
    if config.mtp_depths:
        described = with_mtp(described, config.mtp_depths)
    model = abstract(described, **vars(execution))
    check_replicated(model, execution.layout, config.replicated_tolerance)
    trainer = Trainer.create(config.optimizer, model, steps=config.steps, config=config.step)
    gpus = gpus_of(config.topology)
    in_mesh = list(execution.layout.mesh.devices.flat)
    machine = Machine.of(in_mesh) if gpus is None or in_mesh[0].platform == "gpu" else gpus.machine
    return model, trainer, machine


PlannedConfig = tuple[PlanConfig, Plan, list[str], Execution]


def search(config: PlanConfig, say: Callable[[str], None]) -> PlannedConfig:
    """Compile the meshes and policies that an estimate ranks first; return the shortest step that fits."""
    devices = planned_devices(config)
    with tracing_for(devices):
        return _best(config, devices, say)


def _best(config: PlanConfig, devices: Sequence[Any], say: Callable[[str], None]) -> PlannedConfig:
    ranked = _ranked(config, devices)
    say(f"{len(ranked)} meshes can hold the state; {min(config.search, len(ranked))} are compiled\n")
    fitting = [planned for _, one in ranked[: config.search] if (planned := _first_that_fits(one, devices)) is not None]
    check(bool(fitting), "None of the meshes that were compiled fits: take more devices, or a smaller batch_size.")
    fitting.sort(key=lambda each: each[1].roofline.one_by_one)
    say(f"{'mesh':30} {'remat':21} {'peak':>9} {'sent':>9} {'all overlaps':>13} {'nothing does':>13}")
    for tried, step_plan, *_ in fitting:
        line, sent = step_plan.roofline, sum(one.total for one in step_plan.collectives or ())
        say(
            f"{_mesh(tried):30} {tried.remat:21} {(step_plan.memory.peak or 0) / 1e9:6.1f} GB {sent / 1e9:6.1f} GB "
            f"{line.overlapped:11.3g} s {line.one_by_one:11.3g} s"
        )
    say("")
    return fitting[0]


def _first_that_fits(config: PlanConfig, devices: Sequence[Any]) -> PlannedConfig | None:
    """Plan with the first policy, from the given one on, whose step fits.

    Policies whose saved activations leave too little room, by counting, are not compiled; the last one always is.
    """
    *others, last = (dataclasses.replace(config, remat=remat) for remat in _POLICIES[_POLICIES.index(config.remat) :])
    for tried in [*filter(lambda one: _may_fit(one, devices), others), last]:
        step_plan, advised, execution = plan(tried, devices)
        if step_plan.memory.fits:
            return tried, step_plan, advised, execution
    return None


def _may_fit(config: PlanConfig, devices: Sequence[Any]) -> bool:
    model, trainer, machine = _parts(config, devices)
    needed = predicted_bytes(model, trainer, machine, batch_size=config.batch_size, seq_len=config.seq_len)
    return needed <= machine.memory


def _ranked(config: PlanConfig, devices: Sequence[Any]) -> list[tuple[float, PlanConfig]]:
    """Return the meshes of these devices that divide model and batch and can hold the state, fastest first."""
    experts = bool(expert_configs(model_config(config)))
    axes = ("data", "fsdp", "tensor", *["expert"] * experts)
    ranked = []
    for sizes in meshes(len(devices), config.slices, axes):
        one = dataclasses.replace(config, mesh=MeshConfig(**sizes))
        try:
            model, trainer, machine = _parts(one, devices)
            guess = estimate(model, trainer, machine, batch_size=one.batch_size, seq_len=one.seq_len)
        except ConfigError:  # sizes that do not divide, or a mesh that the torus cannot be
            continue
        if guess.state <= machine.memory:
            ranked.append((guess.seconds, one))
    return sorted(ranked, key=lambda each: each[0])


def _mesh(config: PlanConfig) -> str:
    sizes = dataclasses.asdict(config.mesh)
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"


def _devices(config: PlanConfig, execution: Execution) -> str:
    gpus = gpus_of(config.topology)
    return describe_devices(execution.layout) if gpus is None else f"{gpus.nodes * gpus.each} GPUs, {_mesh(config)}"


def _settings(config: PlanConfig, execution: Execution) -> dict[str, Any]:
    """Return the planned settings as plain values."""
    settings = {name: getattr(config, name) for name in ("model", "topology", "batch_size", "seq_len", "remat")}
    return settings | {"mesh": {name: size for name, size in execution.layout.sizes.items() if size > 1}}


@program(lambda: flag_names(PlanConfig))
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Plan as the command line says; return the exit code: 1 where the step does not fit."""
    require("tyro")
    config = parse(args, prog)
    with contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext():
        if config.decoding:
            step_plan, execution = decoding(config)
            about, data, text = "decoding", decoding_data(step_plan), decoding_report(step_plan, rows=config.rows)
        else:
            if config.search:
                config, step_plan, advised, execution = search(config, print)
            else:
                step_plan, advised, execution = plan(config)
            about = f"remat {config.remat}"
            data, text = as_data(step_plan, advised), report(step_plan, advised, rows=config.rows)
    if config.json:
        print(json.dumps({"settings": _settings(config, execution)} | data, indent=1))
    else:
        tokens = f"{config.batch_size} x {config.seq_len:,} tokens"
        print(
            f"{config.model_config or config.model} on {config.topology} ({_devices(config, execution)}), "
            f"{tokens}, {about}; compiled in {step_plan.seconds:.0f} s\n\n{text}"
        )
    code = 0 if step_plan.memory.fits else 1
    if abandoned:  # the compiler goes on, and cannot be ended otherwise
        sys.stdout.flush()
        os._exit(code)
    return code


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> PlanConfig:
    """Parse the arguments of a command line; exit with 2 for unknown ones."""
    import tyro

    types = {"set": Annotated[tuple[str, ...], tyro.conf.UseAppendAction]}
    words = single_flags(sys.argv[1:] if args is None else args)
    return parse_flags(
        PlanConfig(),
        titles=TITLES,
        first=BASIC,
        types=types,
        required=("model",),
        args=words,
        prog=prog,
        description=__doc__,
    )


def single_flags(args: Sequence[str]) -> list[str]:
    """Rewrite `--mesh fsdp=16 tensor=4` as `--mesh.fsdp 16 --mesh.tensor 4`; the other arguments stay."""
    words: list[str] = []
    inside = False
    for word in args:
        name, equals, size = word.partition("=")
        if word == "--mesh":
            inside = True
        elif inside and equals and not word.startswith("-"):
            words += [f"--mesh.{name.replace('_', '-')}", size]
        else:
            inside = False
            words.append(word)
    return words
