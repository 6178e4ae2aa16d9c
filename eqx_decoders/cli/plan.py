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
from eqx_decoders.errors import (
    AtLeast,
    ConfigError,
    NonNegativeInt,
    PositiveInt,
    check,
    check_option,
    install_command,
    missing_package,
)
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
from eqx_decoders.training.describe import describe_devices
from eqx_decoders.training.run.directory import model_config
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.step import MeshConfig, ModelSettings, StepSettings
from eqx_decoders.training.step.balance import expert_configs
from eqx_decoders.training.step.step import Trainer


BASIC = ("model", "topology", "mesh.fsdp", "batch_size", "seq_len", "remat", "search")

_POLICIES = (
    "none",
    "minimal_with_context",
    "save_qkv_proj",
    "full",
)  # a search tries `remat` and the policies after it


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(StepSettings, ModelSettings):
    """Plan a training or decoding step for TPUs or GPUs that need not be attached."""

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
        check(
            self.page_size is None or self.decoding,
            f"page_size={self.page_size} applies only to decoding: set decoding=True, or leave it out.",
        )
        if self.decoding:
            check(not self.search, f"search={self.search} does not support decoding: leave it out, and set a mesh.")
            check(not self.images, f"images={self.images} does not support decoding: leave it out.")
        else:
            self.check_rows(self.batch_size)

    @property
    def steps(self) -> int:
        """Number of steps of the learning rate schedule."""
        return max(TrainConfig.steps, 1 + (self.optimizer.warmup_steps or 0))

    def execution(self, devices: Sequence[Any]) -> Execution:
        """Return the execution options for these devices."""
        return self.step_execution(self.batch_size, devices)


TITLES = {PlanConfig: "plan", ModelSettings: "model", StepSettings: "step", ExecutionConfig: "execution"}


def tpu_devices(topology: str, slices: int = 1) -> list[Any]:
    """Return the devices of a TPU topology, which need not be attached."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise missing_package("libtpu", "aot") from error
    import jax
    from jax.experimental import topologies

    jax.devices()  # XLA:CPU reads XLA_FLAGS here; libtpu would exit at an unknown flag
    os.environ.pop("XLA_FLAGS", None)
    topology_options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    name, _, extents = topology.partition(":")
    chip = next((chip for chip in CHIPS if chip.name == name.replace("tpu7x", "v7x")), None)
    if chip is not None and re.fullmatch(r"\d+(x\d+){1,2}", extents):
        wraparound = chip.closed([int(extent) for extent in extents.split("x")])  # libtpu's default is no wraparound
        topology_options["wrap"] = (*wraparound, False, False)[:3]
    if topology.startswith("v4"):  # the two cores of a v4 chip are one JAX device
        topology_options["chip_config_name"] = "megacore"
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu", **topology_options).devices
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"topology={topology!r} is not supported by libtpu ({str(error).splitlines()[0]}). Give a generation and "
            f"the number of chips along each axis, such as v5p:2x2x4, v5e:4x4 or tpu7x:2x2x1."
        ) from None


def plan(config: PlanConfig, devices: Sequence[Any] | None = None) -> tuple[Plan, list[str], Execution]:
    """Plan a training step, and return the plan, the advice, and the execution options.

    `devices`: devices of the topology. None: create them.
    """
    devices = planned_devices(config) if devices is None else devices
    gpus, compiled = gpus_of(config.topology), devices[0].platform == "gpu"
    model, trainer, machine = _parts(config, devices)
    compiler_options = options(machine.chip.name) if gpus is None else gpus.options
    compiler_options = GPU_OPTIONS if compiled else {} if config.xla_flags == "none" else compiler_options
    shape = dict(batch_size=config.batch_size, seq_len=config.seq_len)
    images = dict(images=config.images, side=config.image_side)
    media = abstract_media(model.config, model.execution.layout, **shape, **images) if config.images else None
    until: Until = "code" if compiled else config.until
    with tracing_for(list(devices)):
        step_plan = make_plan(model, trainer, machine, **shape, media=media, options=compiler_options, until=until)
    if compiled and model.execution.layout.offload != Offload():
        note = "The GPU compiler does not support host memory without a GPU: this is the plan without offload."
        step_plan = dataclasses.replace(step_plan, note=note)
    if gpus is not None and not compiled:
        step_plan = on_gpus(step_plan, counted_memory(model, trainer, machine, **shape), gpus)
    return step_plan, advice(step_plan, model.execution), model.execution


def decoding(config: PlanConfig) -> tuple[DecodingPlan, Execution]:
    """Plan a decoding step, and return the plan and the execution options."""
    devices, gpus = planned_devices(config), gpus_of(config.topology)
    compiled = devices[0].platform == "gpu"
    check(
        gpus is None or compiled,
        f"topology={config.topology!r} with decoding needs the GPU compiler: {install_command('aot-gpu')}.",
    )
    execution = config.execution(devices)
    precision = dataclasses.replace(execution.precision, params=execution.precision.compute)
    execution = dataclasses.replace(execution, precision=precision, remat="none")
    model, layout = abstract(model_config(config), **vars(execution)), execution.layout
    machine = Machine.of(list(layout.mesh.devices.flat))
    compiler_options = GPU_OPTIONS if compiled else {} if config.xla_flags == "none" else options(machine.chip.name)
    sizes: dict[str, Any] = dict(rows=config.batch_size, length=config.seq_len, page_size=config.page_size)
    until: Until = "code" if compiled else config.until
    with tracing_for(list(devices)):
        return plan_decoding(model, machine, **sizes, options=compiler_options, until=until), execution


def planned_devices(config: PlanConfig) -> list[Any]:
    """Return the devices to compile for: of the topology, or the same number of TPUs without the GPU compiler."""
    gpus = gpus_of(config.topology)
    if gpus is None:
        return tpu_devices(config.topology, config.slices)
    check(
        config.slices == 1,
        f"slices={config.slices} applies only to TPUs: leave it out. For GPUs the topology has the number of nodes, "
        f"such as {gpus.chip.name}:4x8 for four nodes.",
    )
    return gpu_devices(gpus) or tpu_devices(gpus.proxy_topology, 1)


def _parts(config: PlanConfig, devices: Sequence[Any]) -> tuple[Decoder, Trainer, Machine]:
    """Return the model with shapes on a mesh of these devices, its trainer, and the machine."""
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
    """Compile the meshes that the estimate ranks first, and return the fastest plan that fits. `say`: prints a line."""
    devices = planned_devices(config)
    with tracing_for(devices):
        return _best(config, devices, say)


def _best(config: PlanConfig, devices: Sequence[Any], say: Callable[[str], None]) -> PlannedConfig:
    ranked = _ranked(config, devices)
    say(f"{len(ranked)} meshes have enough memory for the state; compiling {min(config.search, len(ranked))}\n")
    fitting = [
        planned
        for _, candidate in ranked[: config.search]
        if (planned := _first_that_fits(candidate, devices)) is not None
    ]
    check(
        bool(fitting),
        f"search={config.search}: the step does not fit on any compiled mesh. Use more devices, a smaller batch_size, "
        f"or increase search.",
    )
    fitting.sort(key=lambda item: item[1].roofline.one_by_one)
    say(f"{'mesh':30} {'remat':21} {'peak':>9} {'sent':>9} {'full overlap':>13} {'no overlap':>13}")
    for tried, step_plan, *_ in fitting:
        line, sent = step_plan.roofline, sum(candidate.total for candidate in step_plan.collectives or ())
        say(
            f"{_mesh(tried):30} {tried.remat:21} {(step_plan.memory.peak or 0) / 1e9:6.1f} GB {sent / 1e9:6.1f} GB "
            f"{line.overlapped:11.3g} s {line.one_by_one:11.3g} s"
        )
    say("")
    return fitting[0]


def _first_that_fits(config: PlanConfig, devices: Sequence[Any]) -> PlannedConfig | None:
    """Return the plan with the first remat policy, starting with the given one, whose step fits; or None.

    Policies whose predicted memory is too large are not compiled, except the last one.
    """
    *others, last = (dataclasses.replace(config, remat=remat) for remat in _POLICIES[_POLICIES.index(config.remat) :])
    for tried in [*filter(lambda candidate: _may_fit(candidate, devices), others), last]:
        step_plan, advised, execution = plan(tried, devices)
        if step_plan.memory.fits:
            return tried, step_plan, advised, execution
    return None


def _may_fit(config: PlanConfig, devices: Sequence[Any]) -> bool:
    model, trainer, machine = _parts(config, devices)
    needed = predicted_bytes(model, trainer, machine, batch_size=config.batch_size, seq_len=config.seq_len)
    return needed <= machine.memory


def _ranked(config: PlanConfig, devices: Sequence[Any]) -> list[tuple[float, PlanConfig]]:
    """Return the meshes that divide model and batch and have memory for the state, the fastest one first."""
    experts = bool(expert_configs(model_config(config)))
    axes = ("data", "fsdp", "tensor", *["expert"] * experts)
    ranked = []
    for sizes in meshes(len(devices), config.slices, axes):
        candidate = dataclasses.replace(config, mesh=MeshConfig(**sizes))
        try:
            model, trainer, machine = _parts(candidate, devices)
            guess = estimate(model, trainer, machine, batch_size=candidate.batch_size, seq_len=candidate.seq_len)
        except ConfigError:  # the mesh does not divide the model, or does not fit the torus
            continue
        if guess.state <= machine.memory:
            ranked.append((guess.seconds, candidate))
    return sorted(ranked, key=lambda item: item[0])


def _mesh(config: PlanConfig) -> str:
    sizes = dataclasses.asdict(config.mesh)
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"


def _devices(config: PlanConfig, execution: Execution) -> str:
    gpus = gpus_of(config.topology)
    return (
        describe_devices(execution.layout)
        if gpus is None
        else f"{gpus.nodes * gpus.gpus_per_node} GPUs, {_mesh(config)}"
    )


def _settings(config: PlanConfig, execution: Execution) -> dict[str, Any]:
    """Return the settings of the plan as plain JSON values."""
    settings = {name: getattr(config, name) for name in ("model", "topology", "batch_size", "seq_len", "remat")}
    return settings | {"mesh": {name: size for name, size in execution.layout.sizes.items() if size > 1}}


@program(lambda: flag_names(PlanConfig))
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the program with command line arguments; return the exit code, which is 1 if the step does not fit."""
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
    if abandoned:  # compilations are still running, and cannot be stopped otherwise
        sys.stdout.flush()
        os._exit(code)
    return code


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> PlanConfig:
    """Parse the arguments of a command line; exit with 2 for unknown ones."""
    import tyro

    types = {"set": Annotated[tuple[str, ...], tyro.conf.UseAppendAction]}
    arguments = single_flags(sys.argv[1:] if args is None else args)
    return parse_flags(
        PlanConfig(),
        titles=TITLES,
        first=BASIC,
        types=types,
        required=("model",),
        args=arguments,
        prog=prog,
        description=__doc__,
    )


def single_flags(args: Sequence[str]) -> list[str]:
    """Replace `--mesh fsdp=16 tensor=4` by `--mesh.fsdp 16 --mesh.tensor 4`."""
    arguments: list[str] = []
    after_mesh = False
    for argument in args:
        name, equals, size = argument.partition("=")
        if argument == "--mesh":
            after_mesh = True
        elif after_mesh and equals and not argument.startswith("-"):
            arguments += [f"--mesh.{name.replace('_', '-')}", size]
        else:
            after_mesh = False
            arguments.append(argument)
    return arguments
