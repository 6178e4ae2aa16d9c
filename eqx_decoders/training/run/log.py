"""What a run reports: `metrics.jsonl`, goodput, the progress bar, plots, and messages on standard error."""

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.context import Execution
from eqx_decoders.data.store.corpus import CorpusStats
from eqx_decoders.errors import DataError, check_integer, missing_package
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.status import duration
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.describe import describe_devices, describe_low_precision, describe_pipeline
from eqx_decoders.training.held_out import HeldOut, describe_held_out
from eqx_decoders.training.settings.run import TrainConfig


MetricsRow = dict[str, Any]


# --- metrics.jsonl ---


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, written unbuffered, so that a killed process loses no row.

    The strings "NaN", "Infinity" and "-Infinity" stand for numbers that JSON does not have. `float` parses them.

    **Arguments:**

    - `start`: the first step that will be written. Existing rows of this step and later ones are deleted: a killed
        process wrote them after its last checkpoint, and the resumed run computes these steps again. Incomplete lines
        are deleted as well. The file is replaced atomically.
    """

    def __init__(self, path: str | Path, *, start: int = 0):
        check_integer("start", start, minimum=0)
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_rows(self.path, start)
        self._file = io.FileIO(self.path, "a")  # unbuffered
        self._is_incomplete = False

    def write(self, row: MetricsRow) -> None:
        """Append one row. Values may be numbers, strings, arrays, and lists and dictionaries of them."""
        line = json.dumps(_to_json(row), allow_nan=False).encode() + b"\n"
        if self._is_incomplete:
            line = b"\n" + line
        self._is_incomplete = True
        self._is_incomplete = self._file.write(line) != len(line)
        if self._is_incomplete:
            raise OSError(f"{self.path}: the row of step {row.get('step')} was only partly written. Is the disk full?")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[MetricsRow]:
    """Read the rows of a metrics file, except incomplete lines of a killed process."""
    return [row for _, row in _read_lines(Path(path)) if row is not None]


def _read_lines(path: Path) -> Iterator[tuple[bytes, MetricsRow | None]]:
    """Yield each line with its row; the row of an incomplete line is None."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield line, row if isinstance(row, dict) and line.endswith(b"\n") else None


def _drop_rows(path: Path, start: int) -> None:
    """Delete the rows of step `start` and later steps, and incomplete lines."""
    if not path.exists():
        return
    lines = list(_read_lines(path))
    steps = [None if row is None else row.get("step", -1) for _, row in lines]
    valid = [line for (line, _), step in zip(lines, steps, strict=True) if isinstance(step, int) and step < start]
    if len(valid) < len(lines):
        write_atomically(path, b"".join(valid))


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # arrays of NumPy and JAX
        return _to_json(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# --- time ---


class Goodput:
    """The share of a run's time that was productive: seconds of steps divided by seconds of its processes.

    A step that is computed twice, because a process was killed after its last checkpoint, counts once. The time before
    this start of the run is read from `run_seconds` in the rows of `metrics.jsonl`. The time between two starts does
    not count, nor does a start that was killed before its first step.

    **Arguments:**

    - `rows`: rows of earlier starts.
    - `start`: the first step of this start. Rows of this step and later ones are not productive.
    - `started`: Unix time at which this start began.
    """

    def __init__(self, rows: Iterable[MetricsRow] = (), *, start: int = 0, started: float):
        rows = [row for row in rows if "step_seconds" in row]
        self.productive_seconds = sum(_productive_seconds(row) for row in rows if row["step"] < start)
        logged = (row.get("run_seconds", 0.0) for row in rows)
        self._earlier_seconds = max((*logged, self.productive_seconds))
        self._started = started

    @property
    def run_seconds(self) -> float:
        """Return the total time of all starts of the run."""
        return self._earlier_seconds + time.time() - self._started

    def add(self, row: MetricsRow) -> dict[str, float]:
        """Count the row of a step; return `run_seconds` and `goodput`."""
        self.productive_seconds += _productive_seconds(row)
        seconds = max(self.run_seconds, self.productive_seconds)
        return {"run_seconds": seconds, "goodput": self.productive_seconds / seconds if seconds > 0 else 1.0}


def _productive_seconds(row: MetricsRow) -> float:
    return row["step_seconds"] * (1.0 - row.get("data_wait", 0.0))


class WallTime:
    """Seconds that this process spends on each activity. An activity does not include activities nested in it."""

    def __init__(self, activity: str, started: float):
        self.seconds: dict[str, float] = {}
        self._activity = activity
        self._since = started

    def switch(self, activity: str) -> str:
        """Start another activity; return the previous one."""
        now = time.time()
        previous = self._activity
        self.seconds[previous] = self.seconds.get(previous, 0.0) + now - self._since
        self._activity = activity
        self._since = now
        return previous

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Count the time inside the context for an activity."""
        previous = self.switch(activity)
        try:
            yield
        finally:
            self.switch(previous)

    def text(self) -> str:
        """Format the shares of at least 0.5 %, largest first: `"steps 81%, compiling 12%, starting 7%"`."""
        self.switch(self._activity)
        total = sum(self.seconds.values())
        shares = sorted(((seconds / total, activity) for activity, seconds in self.seconds.items()), reverse=True)
        return ", ".join(f"{activity} {share:.0%}" for share, activity in shares if share >= 0.005)


_is_first_run = True  # in this process


def run_start() -> float:
    """Return the Unix time at which a run starts: the start of the process, or now for further runs in a process."""
    global _is_first_run
    started = process_start() if _is_first_run else time.time()
    _is_first_run = False
    return started


def process_start() -> float:
    """Return the Unix time at which this process started, or the current time if the system does not report it."""
    try:  # field 22 of /proc/self/stat: clock ticks since boot; the name in field 2 may contain spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return time.time()


# --- progress ---


class Progress:
    """Progress of a run: a progress bar on a terminal (needs rich, extra "train"), otherwise a line every few seconds.

    **Arguments:**

    - `total`: number of steps of the run.
    - `start`: number of steps that are already done.
    - `every`: seconds between two lines.
    - `stream`: where to write, standard error by default.

    The rows that `update` gets have `loss`, `tokens`, `step_seconds`, and optionally `mfu` (a fraction) and `load` (for
    each layer with experts, the largest load divided by the mean load; the largest value is shown).
    """

    def __init__(self, total: int, *, start: int = 0, every: int | float = 10, stream: Any = None):
        check_integer("total", total)
        self._total = total
        self._start = start
        self._done = start
        self._every = every
        self._stream = stream if stream is not None else sys.stderr
        self._first: tuple[int, float] | None = None  # the first step that was reported, and when
        self._last_line: float | None = None  # when the last line was written
        self._bar = self._task = None
        self._columns: dict[str, int] | None = None

    def __enter__(self) -> "Progress":
        if self._stream.isatty():
            self._bar = _rich_bar(self._stream)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, metrics: MetricsRow) -> None:
        """Show the number of finished steps, and the metrics of the last one."""
        self._done = step
        now = time.monotonic()
        self._first = self._first or (step, now)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=_bar_text(metrics))
        elif self._last_line is None or step >= self._total or now - self._last_line >= self._every:
            self._last_line = now
            self._print(step, metrics, self.seconds_left(now))

    def message(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def status(self, text: str) -> None:
        """Show what the run is doing before its first step: in the progress bar, or as a line."""
        if self._bar is not None:
            self._bar.update(self._task, text=text, refresh=True)
        else:
            self.message(text)

    def seconds_left(self, now: float | None = None) -> float | None:
        """Estimate the remaining seconds; None before the second step, because the first one includes compilation."""
        if self._first is None or self._done <= self._first[0]:
            return None
        first_step, first_time = self._first
        elapsed = (time.monotonic() if now is None else now) - first_time
        return elapsed / (self._done - first_step) * (self._total - self._done)

    def _print(self, step: int, metrics: MetricsRow, seconds_left: float | None) -> None:
        if self._columns is None:
            self._columns = {name: width for name, width in _COLUMNS.items() if name != "load" or name in metrics}
            self._print_cells({name: name for name in self._columns})
        left = "-" if seconds_left is None else duration(seconds_left)
        self._print_cells({"step": f"{step}/{self._total}", "left": left} | _cells(metrics))

    def _print_cells(self, cells: dict[str, str]) -> None:
        assert self._columns is not None
        self.message(" ".join(f"{cells[name]:>{width}}" for name, width in self._columns.items()))


_COLUMNS = {"step": 17, "loss": 9, "tokens/s": 10, "MFU": 7, "load": 7, "left": 9}


def _bar_text(metrics: MetricsRow) -> str:
    cells = _cells(metrics)
    optional = [f"{name} {cells[name]}" for name in ("MFU", "load") if cells[name] != "-"]
    return "  ".join((f"loss {cells['loss']}", f"{cells['tokens/s']} tokens/s", *optional))


def _cells(metrics: MetricsRow) -> dict[str, str]:
    seconds = float(metrics.get("step_seconds", 0))
    return {
        "loss": f"{float(metrics['loss']):.4f}" if "loss" in metrics else "-",
        "tokens/s": f"{float(metrics['tokens']) / seconds:,.0f}" if "tokens" in metrics and seconds > 0 else "-",
        "MFU": f"{100 * float(metrics['mfu']):.1f}%" if metrics.get("mfu") is not None else "-",
        "load": f"{float(np.max(metrics['load'])):.2f}" if metrics.get("load") is not None else "-",
    }


def _rich_bar(stream: Any) -> Any:
    """Return a progress bar; None without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(file=stream), speed_estimate_period=120, expand=True)


# --- plots ---


def new_figure(width: int | float, height: int | float) -> tuple[Any, Callable[[str | Path], None]]:
    """Return an empty figure of matplotlib, and a function that writes it to a file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no window and no global state
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("matplotlib", "train") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, lambda path: FigureCanvasAgg(figure).print_figure(str(path), dpi=150)


def plot_losses(metrics_path: str | Path, out_png: str | Path) -> None:
    """Plot `loss`, each held-out loss (`eval_loss`, `eval_loss/<set>`) and `learning_rate` over the steps."""
    figure, write = new_figure(8, 5)
    rows = read_metrics(metrics_path)
    steps, losses = series_of(rows, "loss")
    if not len(steps):
        raise DataError(f"{metrics_path} has no row with step and loss: there is nothing to plot.")
    rate_steps, rates = series_of(rows, "learning_rate")
    count = 2 if len(rates) else 1
    panels = np.atleast_1d(figure.subplots(count, sharex=True, height_ratios=[5, 1][:count]))
    _plot_training_loss(panels[0], steps, losses)
    for number, name in enumerate(sorted({name for row in rows for name in row if name.startswith("eval_loss")})):
        held_out_set = name.removeprefix("eval_loss").strip("/_ ")
        label = f"held-out loss ({held_out_set})" if held_out_set else "held-out loss"
        style = {"color": f"C{number + 1}", "markersize": 4, "linewidth": 1.2, "zorder": 3}
        panels[0].plot(*series_of(rows, name), "o-", label=label, **style)
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].legend(loc="upper right")
    if len(rates):
        panels[1].plot(rate_steps, rates, color="0.35", linewidth=1.2)
        panels[1].set_ylabel("learning rate")
        panels[1].set_ylim(bottom=0)
        panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.margins(x=0.01)
    panels[-1].set_xlabel("step")
    write(out_png)


def series_of(rows: list[MetricsRow], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a metric, from the rows that have it."""
    points = [(row["step"], float(row[name])) for row in rows if "step" in row and row.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def _plot_training_loss(axes: Any, steps: np.ndarray, losses: np.ndarray) -> None:
    """Plot the training loss; from 100 steps on, plot its running mean on top of the pale curve."""
    is_finite = np.isfinite(losses)
    if is_finite.sum() < 100:
        axes.plot(steps, losses, ".-" if len(steps) < 20 else "-", color="C0", linewidth=1.4, label="training loss")
        return
    steps, losses = steps[is_finite], losses[is_finite]
    window = max(5, len(steps) // 50)
    padded = np.pad(losses, (window // 2, window - 1 - window // 2), mode="edge")
    mean = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    axes.plot(steps, losses, color="C0", alpha=0.35, linewidth=0.6)
    axes.plot(steps, mean, color="C0", linewidth=1.6, label=f"training loss, mean of {window} steps")


def plot_loads(loads: Mapping[str, np.ndarray], out_png: str | Path) -> None:
    """Plot a heat map of expert loads divided by their mean, `loads[layer][expert]`.

    White is the mean, red is above, blue is below. Layers may have different numbers of experts.
    """
    if not loads:
        raise DataError("No layer has experts: there is no load to plot.")
    table = np.full((len(loads), max(map(len, loads.values()))), np.nan)
    for row, load in zip(table, loads.values(), strict=True):
        row[: len(load)] = load
    rows, columns = table.shape
    figure, write = new_figure(min(16.0, max(6.0, 0.25 * columns)), min(12.0, max(3.0, 1.2 + 0.25 * rows)))
    axes = figure.subplots()
    axes.set_facecolor("0.8")  # shown where a layer has fewer experts
    image = axes.imshow(table, cmap="RdBu_r", vmin=0.0, vmax=2.0, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, extend="max", label="load / mean load")
    axes.set_yticks(range(rows), labels=list(loads))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    max_loads = {layer: float(load.max()) for layer, load in loads.items()}
    layer = max(max_loads, key=max_loads.__getitem__)
    axes.set_title(f"largest load: {max_loads[layer]:.2f} times the mean, in layer {layer}", fontsize="medium")
    write(out_png)


def plot_images(
    images: Sequence[np.ndarray], titles: Sequence[str], is_correct: Sequence[bool], out_png: str | Path
) -> None:
    """Plot images `[height, width, 3]` of uint8, six in a row, with titles; titles that are not correct are red."""
    columns = min(6, len(images))
    rows = -(-len(images) // columns)
    figure, write = new_figure(2.2 * columns, 2.5 * rows)
    for number, (pixels, title, correct) in enumerate(zip(images, titles, is_correct, strict=True), 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(pixels, interpolation="nearest")
        axes.set_title(title, fontsize=7, parse_math=False, color="black" if correct else "red")
        axes.axis("off")
    write(out_png)


# --- messages ---


def print_status(text: str) -> None:
    """Print a line on standard error, where the progress is shown."""
    print(text, file=sys.stderr, flush=True)


def describe_model(config: TrainConfig, target: Decoder, trainable: Collection[str], execution: Execution) -> list[str]:
    """Return lines about the model, the number of trained weights, and the devices."""
    leaves = named_leaves(target)
    weights = sum(leaf.size for leaf in leaves.values())
    trained = sum(leaf.size for name, leaf in leaves.items() if name in trainable)
    share = f" ({trained:,} of them trained)" if trained < weights else ""
    name = " ".join((config.init_from or config.model_config or config.model, *config.set))
    lines = [f"{name}: {weights:,} weights{share} on {describe_devices(execution.layout)}"]
    return [*lines, *filter(None, (describe_pipeline(execution), describe_low_precision(execution)))]


def out_of_memory(config: TrainConfig, target: Decoder, xla_message: str) -> str:
    """Return the message for XLA's out-of-memory error: the sizes that need memory, and which settings to change."""
    weights = named_leaves(target).values()
    count, gigabytes = sum(leaf.size for leaf in weights), sum(map(device_bytes, weights)) / 1e9
    line = next((line for line in xla_message.splitlines() if "RESOURCE_EXHAUSTED" in line), xla_message)
    request = line.split("RESOURCE_EXHAUSTED:")[-1].strip().rstrip(".")[:300]
    return (
        f"out of device memory for a step with batch_size={config.data.batch_size}, "
        f"seq_len={config.data.seq_len} and {count:,} weights of {gigabytes:.2f} GB per device. XLA: {request}. "
        "Lower batch_size, raise step.gradient_accumulation_steps, set remat='full', or split the weights with "
        "mesh.fsdp."
    )


def diverged(last: MetricsRow, checkpoints: Checkpoints, last_finite_step: int, skipped: int) -> str:
    """Return the message for a run that ends after `skipped` consecutive steps that were not finite.

    It names the checkpoint to return to. A checkpoint is known to be good if a later step was finite: the weights of
    later checkpoints may already give losses that are not finite.
    """
    steps = checkpoints.steps
    good = [step for step in steps if step < last_finite_step]
    doubtful = ", ".join(map(str, steps[len(good) :]))
    if not steps:
        advice = "There is no checkpoint yet"
    elif doubtful and good:
        advice = (
            f"A new start resumes from step {steps[-1]}: to return to step {good[-1]}, the newest one with a later "
            f"finite step, move {doubtful} out of {checkpoints.directory}"
        )
    elif doubtful:
        advice = f"A new start resumes from step {steps[-1]}, after which no step was finite"
    else:
        advice = f"A new start resumes from step {steps[-1]}"
    return (
        f"{skipped} steps in a row were not finite (loss={last['loss']}, grad_norm={last['grad_norm']}); they "
        f"changed no weights. {advice}. Lower optimizer.learning_rate or check the data, then start again."
    )


def last_finite_step(metrics_path: Path, default: int) -> int:
    """Return the last finite step in a metrics file, including earlier starts; `default` if there is none."""
    rows = read_metrics(metrics_path) if metrics_path.is_file() else []
    return max((row["step"] for row in rows if not row.get("skipped", True)), default=default)


def summary(
    config: TrainConfig,
    run_dir: Path,
    loads: Mapping[Any, np.ndarray],
    load_steps: int,
    results: Mapping[str, HeldOut],
    corpus_stats: Mapping[str, CorpusStats],
) -> list[str]:
    """Return lines about a finished run: its files, the loads of experts, and the held-out losses.

    **Arguments:**

    - `loads`: mean loads of experts over the last `load_steps` steps, by layer.
    - `results`: held-out losses by set; "" is the loss of all sets together.
    - `corpus_stats`: sizes of the held-out sets.
    """
    files = "metrics.jsonl, loss.png and expert_load.png" if loads else "metrics.jsonl, loss.png"
    if config.checkpoint_dir is None:
        lines = [f"\ncheckpoints, {files} are in {run_dir}"]
    else:
        lines = [f"\ncheckpoints are in {config.checkpoint_dir}; {files} are in {run_dir}"]
    if loads:
        max_loads = ", ".join(f"{load.max():.2f}" for load in loads.values())
        lines.append(f"largest load of an expert over the mean, layer by layer, last {load_steps} steps: {max_loads}")
    for name, result in results.items():
        stats: Sequence[CorpusStats] = [corpus_stats[name]] if name else list(corpus_stats.values())
        lines += describe_held_out(name, result, stats)
    return lines
