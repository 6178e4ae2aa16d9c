"""Lines that describe the devices, the pipeline and the 8-bit products of a run."""

from eqx_decoders.context import Execution
from eqx_decoders.sharding.chips import chip_of
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline_config import AXIS


def describe_devices(layout: Layout) -> str:
    """Describe the devices of a layout: `"cpu, data=2 x fsdp=4"`."""
    if layout.mesh is None:
        return f"{layout.device.device_kind}, one device"
    axes = " x ".join(f"{name}={size}" for name, size in layout.mesh.shape.items() if size > 1) or "one device"
    return f"{layout.device.device_kind}, {axes}"


def describe_pipeline(execution: Execution) -> str | None:
    """Describe a pipeline: `"pipeline: 2 stages x 2 repeats, 4 microbatches, 11.1 % bubbles"`.

    Returns None if the execution has no pipeline.
    """
    setup, stages = execution.pipeline, execution.layout.sizes.get(AXIS, 1)
    if setup is None:
        return None
    text = f"pipeline: {stages} stages x {setup.repeats} repeats, {setup.microbatches} microbatches"
    return f"{text}, {setup.bubble_share(stages):.1%} bubbles".replace("%", " %")


def describe_low_precision(execution: Execution) -> str | None:
    """Describe 8-bit matrix products: `"int8 products of scanned_layers.*; cpu does not support int8: no speedup"`.

    Returns None if the execution has no 8-bit products.
    """
    rounding, layout = execution.low_precision, execution.layout
    if rounding is None:
        return None
    text = f"{rounding.mode} products of {', '.join(rounding.weights)}"
    chip = chip_of(layout.device.device_kind)
    slower = not layout.backend.native_int8 or (chip is not None and rounding.format not in chip.formats)
    return text + f"; {layout.device.device_kind} does not support {rounding.format}: no speedup" * slower
