"""Settings of meshes, and lines about the devices of a run."""

import dataclasses

from eqx_decoders.context import Execution
from eqx_decoders.sharding.chips import chip_of
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline_config import AXIS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; one of them may be -1: all that the others leave."""

    data: int = -1
    """Data-parallel degree: number of replicas of the weights. -1: all remaining devices."""
    stage: int = 1
    """Pipeline-parallel degree: the layers are split into this number of stages. Without `pipeline`, the weights of a
    stage are gathered where they are used."""
    fsdp: int = 1
    """FSDP degree: weights and batch are split; weights are gathered where they are used. -1: all remaining devices."""
    fsdp_transpose: int = 1
    """FSDP degree along the MLP dimension of the weights."""
    context: int = 1
    """Context-parallel degree: sequences are split."""
    tensor: int = 1
    """Tensor-parallel degree: heads, MLP and vocabulary are split."""
    tensor_sequence: int = 1
    """Tensor-parallel degree with sequence parallelism: between layers, the sequence is split."""
    expert: int = 1
    """Expert-parallel degree: experts are split."""


def describe_devices(layout: Layout) -> str:
    """Describe the devices of a layout: `"cpu, data=2 x fsdp=4"`."""
    if layout.mesh is None:
        return f"{layout.device.device_kind}, one device"
    axes = " x ".join(f"{name}={size}" for name, size in layout.mesh.shape.items() if size > 1) or "one device"
    return f"{layout.device.device_kind}, {axes}"


def describe_pipeline(execution: Execution) -> str | None:
    """Describe a pipeline: `"pipeline: 2 stages x 2 repeats, 4 microbatches, 11.1 % bubbles"`; None for none."""
    setup, stages = execution.pipeline, execution.layout.sizes.get(AXIS, 1)
    if setup is None:
        return None
    text = f"pipeline: {stages} stages x {setup.repeats} repeats, {setup.microbatches} microbatches"
    return f"{text}, {setup.bubble_share(stages):.1%} bubbles".replace("%", " %")


def describe_low_precision(execution: Execution) -> str | None:
    """Describe 8-bit products: `"int8 products of scanned_layers.*; cpu multiplies no int8: …"`; None for none."""
    rounding, layout = execution.low_precision, execution.layout
    if rounding is None:
        return None
    text = f"{rounding.mode} products of {', '.join(rounding.weights)}"
    chip = chip_of(layout.device.device_kind)
    slower = not layout.backend.native_int8 or (chip is not None and rounding.format not in chip.formats)
    return text + f"; {layout.device.device_kind} multiplies no {rounding.format}: right, but not faster" * slower
