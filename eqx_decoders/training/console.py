"""What a person sees of a run: progress on the terminal, rows in a file, a picture of the losses."""

import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.errors import DataError, check_integer, need_extra


Row = dict[str, Any]
_log = logging.getLogger("eqx_decoders")


@runtime_checkable
class Tracker(Protocol):
    """Anything that takes the row of a step: `{"step": 7, "loss": 2.5, …}`."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, handed to the system at once, so that a killed process loses no row.

    start: the first step that will be written. Rows of this and later steps, written by a process that was killed
    before it saved them, are dropped, and so is a line that a kill cut short; the file is replaced in one move.
    Numbers that JSON lacks become the strings "NaN", "Infinity" and "-Infinity", which `float` reads.
    """

    def __init__(self, path: str | Path, *, start: int = 0):
        check_integer("start", start, minimum=0)
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _repair(self.path, start)
        self._file = io.FileIO(self.path, "a")  # unbuffered
        self._torn = False

    def write(self, row: Row) -> None:
        """Append one row; values may be numbers, strings, arrays, or lists and dictionaries of them."""
        line = json.dumps(_plain(row), allow_nan=False).encode() + b"\n"
        if self._torn:  # a full disk cut the last row short
            line = b"\n" + line
        self._torn = True
        self._torn = self._file.write(line) != len(line)
        if self._torn:
            raise OSError(f"{self.path}: the row of step {row.get('step')} was written in part only")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Row]:
    """The rows of a metrics file; lines that are no JSON object (cut short by a kill) are left out."""
    return [row for _, row in _rows(Path(path)) if row is not None]


def _rows(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield line, row if isinstance(row, dict) and line.endswith(b"\n") else None


def _repair(path: Path, start: int) -> None:
    if not path.exists():
        return
    copy, dropped = path.with_name(path.name + ".tmp"), 0
    with open(copy, "wb") as file:
        for line, row in _rows(path):
            step = row.get("step", -1) if row is not None else None
            if isinstance(step, int) and step < start:
                file.write(line)
            else:
                dropped += 1
        file.flush()
        os.fsync(file.fileno())
    if dropped:
        os.replace(copy, path)
    else:
        copy.unlink()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays of NumPy and JAX
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class TensorBoard:
    """Writes event files for TensorBoard into `directory`, through tensorboardX (extra "tensorboard")."""

    def __init__(self, directory: str | Path):
        try:
            from tensorboardX import SummaryWriter  # imported here: it takes two seconds
        except ImportError as error:
            raise need_extra("tensorboardX", "tensorboard") from error
        self._writer = SummaryWriter(str(directory))

    def write(self, row: Row) -> None:
        for name, value in row.items():
            number = np.asarray(value)
            if name != "step" and number.ndim == 0 and number.dtype.kind not in "USO":
                self._writer.add_scalar(name, float(number), row["step"])

    def close(self) -> None:
        self._writer.close()


class Trackers:
    """Several trackers as one. One that fails is reported once and tried again with each row; training goes on."""

    def __init__(self, *trackers: Tracker, say: Callable[[str], None] = _log.warning):
        self._trackers = trackers
        self._say = say
        self._failed: set[int] = set()

    def write(self, row: Row) -> None:
        for tracker in self._trackers:
            self._try(tracker, lambda tracker=tracker: tracker.write(row))

    def close(self) -> None:
        for tracker in self._trackers:
            self._try(tracker, tracker.close)

    def _try(self, tracker: Tracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if id(tracker) not in self._failed:
                self._failed.add(id(tracker))
                name = type(tracker).__name__
                self._say(f"{name} failed and may miss rows, training goes on: {type(error).__name__}: {error}")


class Progress:
    """How far a run is: a bar on a terminal (with rich, extra "train"), otherwise a line every few seconds.

    total: steps of the whole run. start: steps done already. every: seconds between two lines when there is no bar.
    stream: where to show it, by default the standard error.
    `update` reads `loss`, `tokens` and `step_seconds` of a row, and where they are present `mfu` (a fraction) and
    `load` (of layers with experts, the largest load over the mean), of which it shows the worst.
    """

    def __init__(self, total: int, *, start: int = 0, every: int | float = 10, stream: Any = None):
        check_integer("total", total)
        self._total, self._start, self._done, self._every = total, start, start, every
        self._stream = stream if stream is not None else sys.stderr
        self._begun = self._shown = None
        self._bar = self._task = None
        self._columns: dict[str, int] | None = None

    def __enter__(self) -> "Progress":
        self._begun = time.monotonic()
        if self._stream.isatty():
            self._bar = _rich_bar(self._stream)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start, text="compiling …")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, metrics: Row) -> None:
        """Show that `step` steps are done and what the last of them brought."""
        self._done = step
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=_bar_text(metrics))
        elif self._shown is None or step >= self._total or now - self._shown >= self._every:
            self._shown = now
            self._print(step, metrics, self.seconds_left(now))

    def message(self, text: str) -> None:
        """One line above the bar, or among the lines."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def seconds_left(self, now: float | None = None) -> float | None:
        """Time per step so far x steps to go; None before the first step of this process."""
        done = self._done - self._start
        if self._begun is None or done <= 0:
            return None
        spent = (time.monotonic() if now is None else now) - self._begun
        return spent / done * (self._total - self._done)

    def _print(self, step: int, metrics: Row, left: float | None) -> None:
        if self._columns is None:
            self._columns = {name: width for name, width in _COLUMNS.items() if name != "load" or name in metrics}
            self._line({name: name for name in self._columns})
        time_left = "-" if left is None else duration(left)
        self._line({"step": f"{step}/{self._total}", "left": time_left} | _cells(metrics))

    def _line(self, cells: dict[str, str]) -> None:
        assert self._columns is not None
        self.message(" ".join(f"{cells[name]:>{width}}" for name, width in self._columns.items()))


_COLUMNS = {"step": 17, "loss": 9, "tokens/s": 10, "MFU": 7, "load": 7, "left": 9}


def _bar_text(metrics: Row) -> str:
    cells = _cells(metrics)
    named = [f"{name} {cells[name]}" for name in ("MFU", "load") if cells[name] != "-"]
    return "  ".join((f"loss {cells['loss']}", f"{cells['tokens/s']} tokens/s", *named))


def _cells(metrics: Row) -> dict[str, str]:
    seconds = float(metrics.get("step_seconds", 0))
    return {
        "loss": f"{float(metrics['loss']):.4f}" if "loss" in metrics else "-",
        "tokens/s": f"{float(metrics['tokens']) / seconds:,.0f}" if "tokens" in metrics and seconds > 0 else "-",
        "MFU": f"{100 * float(metrics['mfu']):.1f}%" if metrics.get("mfu") is not None else "-",
        "load": f"{float(np.max(metrics['load'])):.2f}" if metrics.get("load") is not None else "-",
    }


def duration(seconds: int | float) -> str:
    """45 -> "45s", 200 -> "3m20s", 7500 -> "2h05m", 180000 -> "2d02h"."""
    whole = round(seconds)
    for unit, size, below, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02d}{below}"
    return f"{whole}s"


def _rich_bar(stream: Any) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn
    except ImportError:
        return None  # plain lines serve as well
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(file=stream), speed_estimate_period=120, expand=True)


def _figure(width: int | float, height: int | float) -> tuple[Any, Callable[[str | Path], None]]:
    """An empty figure, and a function that writes it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, no global state
        from matplotlib.figure import Figure
    except ImportError as error:
        raise need_extra("matplotlib", "train") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, lambda path: FigureCanvasAgg(figure).print_figure(str(path), dpi=150)


def plot_loads(loads: Mapping[str, np.ndarray], out_png: str | Path) -> None:
    """Draw a heat map of experts' loads over their mean: a row for each layer, by its name, a column for each expert.

    White is the mean, red more, blue less. Layers may have different numbers of experts.
    """
    if not loads:
        raise DataError("No layer has experts: there is no load to draw.")
    table = np.full((len(loads), max(map(len, loads.values()))), np.nan)
    for row, load in zip(table, loads.values(), strict=True):
        row[: len(load)] = load
    rows, columns = table.shape
    figure, write = _figure(min(16.0, max(6.0, 0.25 * columns)), min(12.0, max(3.0, 1.2 + 0.25 * rows)))
    axes = figure.subplots()
    axes.set_facecolor("0.8")  # where there is no such expert
    picture = axes.imshow(table, cmap="RdBu_r", vmin=0.0, vmax=2.0, aspect="auto", interpolation="nearest")
    figure.colorbar(picture, ax=axes, extend="max", label="load / mean load")
    axes.set_yticks(range(rows), labels=list(loads))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    worst = {name: float(load.max()) for name, load in loads.items()}
    name = max(worst, key=worst.__getitem__)
    axes.set_title(f"largest load: {worst[name]:.2f} times the mean, in layer {name}", fontsize="medium")
    write(out_png)


def plot_losses(metrics_path: str | Path, out_png: str | Path) -> None:
    """Draw `loss`, every held-out loss (`eval_loss`, or keys that begin so) and `learning_rate` over the steps."""
    figure, write = _figure(8, 5)
    rows = read_metrics(metrics_path)
    steps, losses = _series(rows, "loss")
    if not len(steps):
        raise DataError(f"{metrics_path} has no row with step and loss yet: there is nothing to draw.")
    rated, rates = _series(rows, "learning_rate")
    panels = figure.subplots(2 if len(rates) else 1, sharex=True, height_ratios=[5, 1][: 2 if len(rates) else 1])
    axes = np.atleast_1d(panels)
    _draw_train(axes[0], steps, losses)
    for number, name in enumerate(sorted({name for row in rows for name in row if name.startswith("eval_loss")})):
        which = name.removeprefix("eval_loss").strip("/_ ")
        style = {"color": f"C{number + 1}", "markersize": 4, "linewidth": 1.2, "zorder": 3}
        axes[0].plot(*_series(rows, name), "o-", label=f"held-out loss {which and f'({which})'}".strip(), **style)
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend(loc="upper right")
    if len(rates):
        axes[1].plot(rated, rates, color="0.35", linewidth=1.2)
        axes[1].set_ylabel("learning rate")
        axes[1].set_ylim(bottom=0)
        axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    for each in axes:
        each.grid(alpha=0.25)
        each.margins(x=0.01)
    axes[-1].set_xlabel("step (updates of the weights)")
    write(out_png)


def _series(rows: list[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["step"], float(row[name])) for row in rows if "step" in row and row.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def _draw_train(axes: Any, steps: np.ndarray, losses: np.ndarray) -> None:
    """Many steps are noisy: they become pale, under their running mean."""
    finite = np.isfinite(losses)
    if finite.sum() < 100:
        axes.plot(steps, losses, ".-" if len(steps) < 20 else "-", color="C0", linewidth=1.4, label="training loss")
        return
    steps, losses = steps[finite], losses[finite]
    window = max(5, len(steps) // 50)
    padded = np.pad(losses, (window // 2, window - 1 - window // 2), mode="edge")
    mean = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    axes.plot(steps, losses, color="C0", alpha=0.35, linewidth=0.6)
    axes.plot(steps, mean, color="C0", linewidth=1.6, label=f"training loss, mean of {window} steps")


# Dense bf16 products of one JAX device, from the vendors' data sheets (without sparsity).
_TPU_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
_GPU_FLOPS = (  # the first that begins the name; SXM where nothing else is said
    ("NVIDIA A100", 312e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA B200", 2250e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device, by its `jax.Device.device_kind`; None where no data sheet says it."""
    if device_kind in _TPU_FLOPS:
        return _TPU_FLOPS[device_kind]
    return next((flops for name, flops in _GPU_FLOPS if device_kind.startswith(name)), None)
