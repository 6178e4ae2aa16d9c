"""Messages of a training run: its model, advice when it can't go on, and its results."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.context import Execution
from eqx_decoders.data.store.corpus_stats import CorpusStats
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.held_out import HeldOut, describe_held_out
from eqx_decoders.training.mesh_config import describe_devices, describe_low_precision, describe_pipeline
from eqx_decoders.training.run.metrics import MetricsRow, read_metrics


def print_status(text: str) -> None:
    """Print a line on the standard error, where the progress is."""
    print(text, file=sys.stderr, flush=True)


def format_setting(value: Any) -> str:
    """Return a setting as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def describe_model(config: TrainConfig, target: Decoder, trainable: Collection[str], execution: Execution) -> list[str]:
    """Describe the model, the share of it that is trained, and the devices, in lines."""
    leaves = named_leaves(target)
    weights = sum(leaf.size for leaf in leaves.values())
    trained = sum(leaf.size for name, leaf in leaves.items() if name in trainable)
    part = f" ({trained:,} of them trained)" if trained < weights else ""
    name, devices = config.init_from or config.model_config, describe_devices(execution.layout)
    name = " ".join((name or config.model, *config.set))
    more = (describe_pipeline(execution), describe_low_precision(execution))
    return [f"{name}: {weights:,} weights{part} on {devices}", *filter(None, more)]


def out_of_memory(config: TrainConfig, target: Decoder, message: str) -> str:
    """Return advice on XLA's error of too little memory."""
    weights = named_leaves(target).values()
    sizes = f"batch_size={config.dataset.batch_size} x seq_len={config.dataset.seq_len} tokens"
    sizes += f", {sum(leaf.size for leaf in weights):,} weights of {sum(map(device_bytes, weights)) / 1e9:.2f} GB"
    line = next((line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line), message)
    request = line.split("RESOURCE_EXHAUSTED:")[-1].strip().rstrip(".")[:300]
    return (
        f"the memory of a device does not suffice for {sizes}, and what a step makes of them. XLA: {request}. Lower "
        "batch_size or raise step.gradient_accumulation_steps, give remat='full', or cut the weights by mesh.fsdp."
    )


def last_finite(path: Path, otherwise: int) -> int:
    """Return the last finite step in a metrics file, of whichever start; `otherwise` where it has none."""
    rows = read_metrics(path) if path.is_file() else []
    return max((row["step"] for row in rows if not row.get("skipped", True)), default=otherwise)


def diverged(last: MetricsRow, checkpoints: Checkpoints, finite: int, skipped: int) -> str:
    """Return advice after `skipped` steps in a row that were not finite; `finite` is the last one that was.

    A checkpoint is known to be good if a step after it was finite: others may hold weights that are of no use.
    """
    steps = checkpoints.steps
    good = [each for each in steps if each < finite]
    later = ", ".join(map(str, steps[len(good) :]))
    way = f"A new start goes on from step {steps[-1]}" if steps else "There is no checkpoint yet"
    if later and good:
        where = checkpoints.directory
        way += f": to go back to step {good[-1]}, the newest with a finite step after it, move {later} out of {where}"
    elif later:
        way += ", after which no step was finite"
    return (
        f"{skipped} steps in a row were not finite (loss={last['loss']}, grad_norm={last['grad_norm']}), and nothing "
        f"of them is saved. {way}. Lower optimizer.learning_rate or look at the data, and start again."
    )


def summary(
    config: TrainConfig,
    run: Path,
    loads: Mapping[Any, np.ndarray],
    steps: int,
    results: Mapping[str, HeldOut],
    sets: Mapping[str, CorpusStats],
) -> list[str]:
    """Return lines about a finished run: its files, the loads of experts, and the held-out losses."""
    files = f"metrics.jsonl, loss.png{' and expert_load.png' * bool(loads)} are in {run}"
    elsewhere = config.checkpoint_dir
    lines = [f"\ncheckpoints, {files}" if elsewhere is None else f"\ncheckpoints are in {elsewhere}; {files}"]
    if loads:
        worst = ", ".join(f"{load.max():.2f}" for load in loads.values())
        lines.append(f"largest load of an expert over the mean, layer by layer, last {steps} steps: {worst}")
    for name, result in results.items():
        counts: Sequence[CorpusStats] = [sets[name]] if name else list(sets.values())
        lines += describe_held_out(name, result, counts)
    return lines
