"""What to change where a step does not fit, or where something else than products decides its time."""

from collections.abc import Iterator

from eqx_decoders.context import Execution
from eqx_decoders.planning.roofline import ACROSS
from eqx_decoders.planning.step_plan import Plan
from eqx_decoders.remat import POLICIES


# from what keeps most to what keeps least
_KEEPING = (
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
_AGAIN = 0.1  # and so much recomputation
_MUCH = 0.2  # and such a share of state and gradients


def advice(plan: Plan, execution: Execution) -> list[str]:
    """Sentences, the most urgent first; none where a step fits and is bound by its products."""
    return [*_memory(plan, execution), *_time(plan, execution), *_unread(plan)]


def _memory(plan: Plan, execution: Execution) -> Iterator[str]:
    memory, fsdp, data = plan.memory, execution.layout.sizes["fsdp"], execution.layout.sizes["data"]
    state = memory.state + memory.gradients
    if memory.fits:
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
    stronger = _neighbour(execution, 1)
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
    again, weaker = plan.operations.computed / plan.operations.model - 1, _neighbour(execution, -1)
    free = memory.capacity - (memory.capacity if memory.peak is None else memory.peak)
    if free > _ROOM * memory.capacity and again > _AGAIN and weaker:
        yield (
            f"{_gb(free)} are free, and {again:.0%} are computed beside the model's own operations: remat={weaker} "
            "keeps more."
        )
    elif free > _ROOM * memory.capacity and line.bound != "compute":
        yield f"{_gb(free)} are free: a larger batch_size fits."


def _network(plan: Plan, execution: Execution) -> str:
    line, sizes, axes = plan.roofline, execution.layout.sizes, plan.roofline.bound.split(" x ")
    beside = f"{line.networks[line.bound]:.3g} s, beside {line.compute:.3g} s of products"
    if line.bound == ACROSS:
        return (
            f"The network {ACROSS} is the bound: {beside}. What crosses it does not grow with the batch: give "
            "more tokens a step."
        )
    begin = f"The links along {line.bound} are the bound: {beside}."
    found = {one.kind for one in plan.collectives or () if one.axes == tuple(axes)}
    if any(axis in _HEADS for axis in axes):
        smaller = " and ".join(f"mesh.{axis} (now {sizes[axis]})" for axis in axes if axis in _HEADS)
        return f"{begin} All layers add activations along it: make {smaller} smaller, mesh.fsdp larger."
    if found & {"all-to-all", "ragged-all-to-all"} and "expert" in axes:
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
            f"(XLA: {plan.told[:200]}). As a rule libtpu is newer than jaxlib: take the pair that belongs together, "
            "pip install --upgrade 'jax[tpu]'."
        )
    unknown = [one for one in plan.collectives or () if one.unknown]
    if unknown:
        yield f"{len(unknown)} collectives are in loops of which the program does not say how long: each counts once."


def _tokens(plan: Plan) -> int:
    return plan.tokens // len(plan.machine.places)


def _neighbour(execution: Execution, step: int) -> str | None:
    """The policy that keeps a little less (1) or more (-1) than this one."""
    names = [name for name in _KEEPING if POLICIES[name] == execution.remat]
    if not names:
        return "full" if step > 0 else None
    place = _KEEPING.index(names[0]) + step
    return _KEEPING[place] if 0 <= place < len(_KEEPING) else None


def _gb(size: int | float) -> str:
    return f"{size / 1e9:,.1f} GB"
