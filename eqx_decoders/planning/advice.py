"""Advice on a planned step: changes that make it fit, or make it faster if it is not bound by compute."""

from collections.abc import Iterator

from eqx_decoders.context import Execution
from eqx_decoders.planning.planned_step import Plan
from eqx_decoders.planning.roofline import ACROSS
from eqx_decoders.remat import POLICIES


# remat policies, from the most to the fewest saved activations
_SAVING = (
    "none",
    "minimal_with_context",
    "minimal",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "full",
)
_WEIGHTS = ("fsdp", "fsdp_transpose", "expert", "context")  # axes along which weights are gathered
_HEADS = ("tensor", "tensor_sequence")  # axes along which activations are reduced
# minimum fractions that are mentioned
_FREE_MEMORY = 0.4  # free memory of a device
_RECOMPUTATION = 0.1  # recomputed FLOPs
_STATE = 0.2  # state and gradients in the memory of a device
_PREALLOCATED = 0.75  # fraction of a GPU's memory that JAX preallocates by default


def advice(plan: Plan, execution: Execution) -> list[str]:
    """Return sentences of advice, the most important first. Empty if the step fits and is bound by compute."""
    return [*_memory(plan, execution), *_time(plan, execution), *_unread(plan)]


def _memory(plan: Plan, execution: Execution) -> Iterator[str]:
    memory, fsdp, data = plan.memory, execution.layout.sizes["fsdp"], execution.layout.sizes["data"]
    state = memory.state + memory.gradients
    if memory.fits:
        if plan.machine.chip.node and (memory.peak or 0) > _PREALLOCATED * memory.capacity:
            yield (
                f"JAX preallocates {_PREALLOCATED:.0%} of the memory of a GPU by default: set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 to use more."
            )
        return
    if memory.needed is None:
        yield f"The step does not fit: its peak is {_gb(memory.peak or 0)}, and a device has {_gb(memory.capacity)}."
    else:
        yield f"The step does not fit: it needs {_gb(memory.needed)}, and a device has {_gb(memory.capacity)}."
    if state > memory.capacity:
        yield (
            f"State and gradients have {_gb(state)} per device: increase mesh.fsdp (now {fsdp}) or use more devices. "
            "params_dtype=bfloat16 and optimizer.moments_dtype=bfloat16 halve them"
            + (", and optimizer.shard_over_data shards the optimizer state over mesh.data." if data > 1 else ".")
        )
        return
    stronger = _neighbor(execution, 1)
    if stronger:
        yield f"Save fewer activations for the backward pass: remat={stronger}."
    yield (
        "Compute fewer tokens at a time: a smaller batch_size, more step.gradient_accumulation_steps, or a larger "
        "mesh.context, which shards the sequences."
    )
    if state > _STATE * memory.capacity:
        yield f"State and gradients have {_gb(state)} per device: a larger mesh.fsdp (now {fsdp}) shards them further."


def _time(plan: Plan, execution: Execution) -> Iterator[str]:
    line, memory = plan.roofline, plan.memory
    if line.bound in line.networks:
        yield _network(plan, execution)
    elif line.bound == "memory":
        yield (
            f"Bound by memory bandwidth: {line.memory:.3g} s, compared with {line.compute:.3g} s of products. "
            f"Weights and "
            f"state are read for {_tokens(plan):,} tokens per device: increase batch_size."
        )
    recomputed, weaker = plan.operations.computed / plan.operations.model - 1, _neighbor(execution, -1)
    free = memory.capacity - (memory.capacity if memory.peak is None else memory.peak)
    if free > _FREE_MEMORY * memory.capacity and recomputed > _RECOMPUTATION and weaker:
        yield (
            f"{_gb(free)} per device are free, and {recomputed:.0%} more FLOPs than the model needs are computed: "
            f"remat={weaker} saves more activations and recomputes less."
        )
    elif free > _FREE_MEMORY * memory.capacity and line.bound != "compute":
        yield f"{_gb(free)} per device are free: increase batch_size."


def _network(plan: Plan, execution: Execution) -> str:
    line, sizes, axes = plan.roofline, execution.layout.sizes, plan.roofline.bound.split(" x ")
    times = f"{line.networks[line.bound]:.3g} s, compared with {line.compute:.3g} s of products"
    if line.bound == ACROSS:
        return (
            f"Bound by the network {ACROSS}: {times}. Its traffic does not depend on the batch size: increase "
            f"batch_size."
        )
    bound = f"Bound by the links along {line.bound}: {times}."
    kinds = {collective.kind for collective in plan.collectives or () if collective.axes == tuple(axes)}
    if any(axis in _HEADS for axis in axes):
        smaller = " and ".join(f"mesh.{axis} (now {sizes[axis]})" for axis in axes if axis in _HEADS)
        return f"{bound} All layers reduce activations along these axes: decrease {smaller}, and increase mesh.fsdp."
    if kinds & {"all-to-all", "ragged-all-to-all"} and "expert" in axes:
        return (
            f"{bound} Tokens are sent to their experts: decrease mesh.expert (now {sizes['expert']}), and increase "
            "mesh.fsdp. exchange_bytes changes only the number of rounds."
        )
    if any(axis in _WEIGHTS for axis in axes):
        return (
            f"{bound} Weights are gathered for {_tokens(plan):,} tokens per device. The traffic does not depend on "
            f"their "
            "number: increase batch_size, or decrease step.gradient_accumulation_steps."
        )
    return f"{bound} Gradients are reduced once per step: increase batch_size."


def _unread(plan: Plan) -> Iterator[str]:
    if plan.collectives is None and plan.memory.needed is None:
        yield (
            "The compiled program cannot be printed, so collectives are unknown and missing in the time estimate "
            f"(XLA: {plan.compiler_message[:200]}). The usual reason is a libtpu that is newer than jaxlib: install "
            "matching versions, pip install --upgrade 'jax[tpu]'."
        )
    unknown = [collective for collective in plan.collectives or () if collective.unknown]
    if unknown:
        yield f"{len(unknown)} collectives are in loops with unknown trip counts, and are counted once."


def _tokens(plan: Plan) -> int:
    return plan.tokens // len(plan.machine.positions)


def _neighbor(execution: Execution, step: int) -> str | None:
    """Return the policy that saves the next fewer (`step=1`) or more (`step=-1`) activations, or None."""
    names = [name for name in _SAVING if POLICIES[name] == execution.remat]
    if not names:
        return "full" if step > 0 else None
    index = _SAVING.index(names[0]) + step
    return _SAVING[index] if 0 <= index < len(_SAVING) else None


def _gb(size: int | float) -> str:
    return f"{size / 1e9:,.1f} GB"
