"""Images of a run: its losses over the steps, and the loads of its experts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.errors import DataError, missing_package
from eqx_decoders.training.run.metrics import MetricsRow, read_metrics


def new_figure(width: int | float, height: int | float) -> tuple[Any, Callable[[str | Path], None]]:
    """Return an empty figure, and a function that writes it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, no global state
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("matplotlib", "train") from error
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
    figure, write = new_figure(min(16.0, max(6.0, 0.25 * columns)), min(12.0, max(3.0, 1.2 + 0.25 * rows)))
    axes = figure.subplots()
    axes.set_facecolor("0.8")  # where there is no such expert
    image = axes.imshow(table, cmap="RdBu_r", vmin=0.0, vmax=2.0, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, extend="max", label="load / mean load")
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
    figure, write = new_figure(8, 5)
    rows = read_metrics(metrics_path)
    steps, losses = series_of(rows, "loss")
    if not len(steps):
        raise DataError(f"{metrics_path} has no row with step and loss yet: there is nothing to draw.")
    rated, rates = series_of(rows, "learning_rate")
    panels = figure.subplots(2 if len(rates) else 1, sharex=True, height_ratios=[5, 1][: 2 if len(rates) else 1])
    axes = np.atleast_1d(panels)
    _draw_train(axes[0], steps, losses)
    for number, name in enumerate(sorted({name for row in rows for name in row if name.startswith("eval_loss")})):
        which = name.removeprefix("eval_loss").strip("/_ ")
        style = {"color": f"C{number + 1}", "markersize": 4, "linewidth": 1.2, "zorder": 3}
        axes[0].plot(*series_of(rows, name), "o-", label=f"held-out loss {which and f'({which})'}".strip(), **style)
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


def series_of(rows: list[MetricsRow], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a figure, of the rows that have it."""
    points = [(row["step"], float(row[name])) for row in rows if "step" in row and row.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def _draw_train(axes: Any, steps: np.ndarray, losses: np.ndarray) -> None:
    """Draw the training loss; many noisy steps become pale, under their running mean."""
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


def plot_answers(
    images: Sequence[np.ndarray], titles: Sequence[str], right: Sequence[bool], out_png: str | Path
) -> None:
    """Draw images, `[rows, columns, 3]` of bytes, six in a row, each under its title; wrong ones red."""
    columns = min(6, len(images))
    rows = -(-len(images) // columns)
    figure, write = new_figure(2.2 * columns, 2.5 * rows)
    for number, (pixels, title, good) in enumerate(zip(images, titles, right, strict=True), 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(pixels, interpolation="nearest")
        axes.set_title(title, fontsize=7, parse_math=False, color="black" if good else "red")
        axes.axis("off")
    write(out_png)
