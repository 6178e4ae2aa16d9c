"""Advice on a planned step: changes that make it fit, or that shorten it where products are not its bound."""

from collections.abc import Iterator

from eqx_decoders.context import Execution
from eqx_decoders.planning.planned_step import Plan
from eqx_decoders.planning.roofline import ACROSS
from eqx_decoders.remat import POLICIES


# from the policy that saves most to that which saves least
_SAVING = (
    "none",
    "minimal_with_context",
    "minimal",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "full",
)
_WEIGHTS = ("fsdp", "fsdp_transpose", "expert", "context")  # along which weights are gathered
_HEADS = ("tensor", "tensor_sequence")  # along which activations are added up
_ROOM = 0.4  # of a device's memory: so much free is worth a word
_RECOMPUTED = 0.1  # and so much recomputation
_MUCH = 0.2  # and such a share of state and gradients
_PREALLOCATED = 0.75  # of a GPU's memory: what JAX takes by itself


def advice(plan: Plan, execution: Execution) -> list[str]:
    """Return sentences, the most urgent first; none where a step fits and is bound by its products."""
    return [*_memory(plan, execution), *_time(plan, execution), *_unread(plan)]


def _memory(plan: Plan, execution: Execution) -> Iterator[str]:
    memory, fsdp, data = plan.memory, execution.layout.sizes["fsdp"], execution.layout.sizes["data"]
    state = memory.state + memory.gradients
    if memory.fits:
        if plan.machine.chip.node and (memory.peak or 0) > _PREALLOCATED * memory.capacity:
            yield f"JAX takes {_PREALLOCATED:.0%} of a GPU by itself: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for more."
        return
    if memory.needed is None:
        yield f"It was compiled, but its peak of {_gb(memory.peak or 0)} is above {_gb(memory.capacity)}."
    else:
        yield f"It does not fit: the compiler asks for {_gb(memory.needed)}, and a device has {_gb(memory.capacity)}."
    if state > memory.capacity:
        yield (
            f"State and gradients alone are {_gb(state)} a device: cut them further (mesh.fsdp is {fsdp}) or take more "
            "devices; params_dtype=bfloat16 and optimizer.moments_dtype=bfloat16 halve them"
            + (", and optimizer.shard_over_data splits the optimizer's over mesh.data." if data > 1 else ".")
        )
        return
    stronger = _neighbor(execution, 1)
    if stronger:
        yield f"Keep less for the backward pass: remat={stronger}."
    yield (
        "Fewer tokens at a time need less: a smaller batch_size, more step.gradient_accumulation_steps, or "
        "mesh.context, which cuts the sequences."
    )
    if state > _MUCH * memory.capacity:
        yield f"State and gradients are {_gb(state)} a device: a larger mesh.fsdp (now {fsdp}) cuts them."


def _time(plan: Plan, execution: Execution) -> Iterator[str]:
    line, memory = plan.roofline, plan.memory
    if line.bound in line.networks:
        yield _network(plan, execution)
    elif line.bound == "memory":
        yield (
            f"Memory is the bound: {line.memory:.3g} s, beside {line.compute:.3g} s of products. Weights and state are "
            f"read for {_tokens(plan):,} tokens a device: give more of them."
        )
    recomputed, weaker = plan.operations.computed / plan.operations.model - 1, _neighbor(execution, -1)
    free = memory.capacity - (memory.capacity if memory.peak is None else memory.peak)
    if free > _ROOM * memory.capacity and recomputed > _RECOMPUTED and weaker:
        yield (
            f"{_gb(free)} are free, and {recomputed:.0%} are computed beside the model's own operations: "
            f"remat={weaker} keeps more."
        )
    elif free > _ROOM * memory.capacity and line.bound != "compute":
        yield f"{_gb(free)} are free: a larger batch_size fits."


def _network(plan: Plan, execution: Execution) -> str:
    line, sizes, axes = plan.roofline, execution.layout.sizes, plan.roofline.bound.split(" x ")
    times = f"{line.networks[line.bound]:.3g} s, beside {line.compute:.3g} s of products"
    if line.bound == ACROSS:
        return (
            f"The network {ACROSS} is the bound: {times}. What crosses it does not grow with the batch: give "
            "more tokens a step."
        )
    begin = f"The links along {line.bound} are the bound: {times}."
    kinds = {one.kind for one in plan.collectives or () if one.axes == tuple(axes)}
    if any(axis in _HEADS for axis in axes):
        smaller = " and ".join(f"mesh.{axis} (now {sizes[axis]})" for axis in axes if axis in _HEADS)
        return f"{begin} All layers add activations along it: make {smaller} smaller, mesh.fsdp larger."
    if kinds & {"all-to-all", "ragged-all-to-all"} and "expert" in axes:
        return (
            f"{begin} Tokens travel to their experts along it: a smaller mesh.expert (now {sizes['expert']}), with a "
            "larger mesh.fsdp, sends fewer; exchange_bytes says only in how many rounds."
        )
    if any(axis in _WEIGHTS for axis in axes):
        return (
            f"{begin} Weights are gathered along it for {_tokens(plan):,} tokens a device, as for more of them: give "
            "a larger batch_size, or fewer step.gradient_accumulation_steps."
        )
    return f"{begin} Gradients are added up along it once a step: a larger batch_size hides it."


def _unread(plan: Plan) -> Iterator[str]:
    if plan.collectives is None and plan.memory.needed is None:
        yield (
            "The compiled program cannot be printed, so its collectives are not known, and the estimate lacks them "
            f"(XLA: {plan.compiler_message[:200]}). As a rule libtpu is newer than jaxlib: take the pair that belongs "
            "together, pip install --upgrade 'jax[tpu]'."
        )
    unknown = [one for one in plan.collectives or () if one.unknown]
    if unknown:
        yield f"{len(unknown)} collectives are in loops of which the program does not say how long: each counts once."


def _tokens(plan: Plan) -> int:
    return plan.tokens // len(plan.machine.positions)


def _neighbor(execution: Execution, step: int) -> str | None:
    """Return the policy that saves a little less (1) or more (-1) than this one."""
    names = [name for name in _SAVING if POLICIES[name] == execution.remat]
    if not names:
        return "full" if step > 0 else None
    place = _SAVING.index(names[0]) + step
    return _SAVING[place] if 0 <= place < len(_SAVING) else None


def _gb(size: int | float) -> str:
    return f"{size / 1e9:,.1f} GB"
