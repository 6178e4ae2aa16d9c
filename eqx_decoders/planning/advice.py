"""What to change where a step does not fit, or where something else than products decides its time."""

from collections.abc import Iterator

from eqx_decoders.context import Execution
from eqx_decoders.planning.plan import Plan
from eqx_decoders.planning.roofline import ACROSS
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
_ROOM = 0.6  # of a device's memory: below it there is room for more
_LARGE = 1.1  # recomputation worth a word


def advice(plan: Plan, execution: Execution) -> list[str]:
    """Sentences, the most urgent first; none where a step fits and is bound by its products."""
    return [*_memory(plan, execution), *_time(plan, execution), *_unread(plan)]


def _memory(plan: Plan, execution: Execution) -> Iterator[str]:
    memory = plan.memory
    sizes = execution.layout.sizes
    if memory.fits:
        return
    if memory.needed is None:
        yield f"The step was compiled, but its peak of {_gb(memory.peak or 0)} is above the {_gb(memory.capacity)} of the data sheet."
    else:
        yield f"It does not fit: the compiler needs {_gb(memory.needed)} of {_gb(memory.capacity)} for a part of it or all."
    if memory.state + memory.gradients > memory.capacity:
        yield (
            f"State and gradients alone are {_gb(memory.state + memory.gradients)} a device: cut them further (mesh.fsdp is "
            f"{sizes['fsdp']}) or take more devices; params_dtype=bfloat16 and optimizer.moments_dtype=bfloat16 halve them."
        )
        return
    stronger = _neighbour(execution, 1)
    if stronger:
        yield f"Keep less for the backward pass: remat={stronger}."
    yield (
        "Fewer tokens at a time need less: a smaller batch_size, more step.gradient_accumulation_steps, or mesh.context, "
        "which cuts the sequences."
    )
    if memory.gradients > 0.05 * memory.capacity:
        yield f"State and gradients are {_gb(memory.state + memory.gradients)} a device: a larger mesh.fsdp cuts them."


def _time(plan: Plan, execution: Execution) -> Iterator[str]:
    line, sizes = plan.roofline, execution.layout.sizes
    devices = len(plan.machine.places)
    if line.bound == ACROSS:
        yield (
            f"The network between slices is the bound: {line.networks[ACROSS]:.3f} s beside {line.compute:.3f} s of products. "
            "What crosses it does not grow with the batch: give more tokens a step."
        )
    elif line.bound in line.networks:
        axes, seconds = line.bound.split(" x "), line.networks[line.bound]
        begin = f"The links along {line.bound} are the bound: {seconds:.3f} s beside {line.compute:.3f} s of products."
        if any(axis in _HEADS for axis in axes):
            smaller = " and ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes if axis in _HEADS)
            yield f"{begin} Activations are added up there in every layer: {smaller} smaller, mesh.fsdp larger."
        elif any(axis in _WEIGHTS for axis in axes):
            exchanged = any("all-to-all" in one.kind for one in (plan.collectives or ()) if one.total > 1e8)
            yield (
                f"{begin} Weights are gathered there for {plan.tokens // devices:,} tokens a device; what is sent does not grow "
                "with them: give a larger batch_size, or fewer step.gradient_accumulation_steps."
                + (" Of experts, tokens travel, too: a smaller mesh.expert sends less." if exchanged else "")
            )
        else:
            yield f"{begin} Gradients are added up there once a step: a larger batch_size hides it."
    elif line.bound == "memory":
        yield (
            f"Memory is the bound: {line.memory:.3f} s beside {line.compute:.3f} s of products. Weights and state are read for "
            f"{plan.tokens // devices:,} tokens a device: give more of them."
        )
    again = plan.operations.computed / plan.operations.model
    weaker = _neighbour(execution, -1)
    free = plan.memory.fits and (plan.memory.peak or plan.memory.capacity) < _ROOM * plan.memory.capacity
    if free and again > _LARGE and weaker:
        yield (
            f"{_gb(plan.memory.capacity - (plan.memory.peak or 0))} are free, and {again - 1:.0%} of the products are computed "
            f"beside the model's own: remat={weaker} keeps more."
        )
    elif free and line.bound not in ("compute",):
        yield f"{_gb(plan.memory.capacity - (plan.memory.peak or 0))} are free: a larger batch_size fits."
    if execution.head_bytes < 10**9 and any("head" in one.cause for one in (plan.collectives or ())[:3]):
        yield f"The head is gone through in parts, head_bytes={execution.head_bytes:,}: more needs fewer of them."


def _unread(plan: Plan) -> Iterator[str]:
    if plan.collectives is None and plan.memory.needed is None:
        yield (
            f"The compiled program cannot be printed, so its collectives are not known and the estimate lacks them ({plan.told}). "
            "As a rule jaxlib is older than libtpu: install the pair that belongs together, pip install 'jax[tpu]'."
        )
    unknown = [one for one in plan.collectives or () if one.unknown]
    if unknown:
        yield f"{len(unknown)} collectives are in loops whose number of trips the program does not say: each counts once."


def _neighbour(execution: Execution, step: int) -> str | None:
    """The policy that keeps a little less (1) or more (-1) than this one."""
    names = [name for name in _KEEPING if POLICIES[name] == execution.remat]
    if not names:
        return "full" if step > 0 else None
    place = _KEEPING.index(names[0]) + step
    return _KEEPING[place] if 0 <= place < len(_KEEPING) else None


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
