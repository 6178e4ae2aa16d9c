"""Test plots of losses and of expert loads."""

import sys

import numpy as np
import pytest

from eqx_decoders.errors import DataError, MissingPackage
from eqx_decoders.training.run.log import MetricsFile, plot_loads, plot_losses
from tests.errors import refused


def row(step, loss: object = 2.5):
    return {"step": step, "loss": loss, "tokens": 1024, "step_seconds": 0.5}


@pytest.mark.parametrize("steps", [1, 300])
def test_losses_are_plotted(tmp_path, steps):
    pytest.importorskip("matplotlib")
    with MetricsFile(tmp_path / "m.jsonl") as file:
        for step in range(steps):
            file.write({**row(step, 3.0 if step != 7 else float("nan")), "learning_rate": 1e-3})
        file.write({"step": 0, "eval_loss": 3.5, "eval_loss/code": 2.0})
    plot_losses(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "empty.jsonl").write_text('{"step": 0}\n')
    with refused(DataError, tmp_path / "empty.jsonl"):
        plot_losses(tmp_path / "empty.jsonl", tmp_path / "no.png")


def test_expert_loads_are_plotted_as_a_heat_map(tmp_path):
    """One cell per layer and expert: red for high loads, blue for low loads, grey for no expert."""
    image = pytest.importorskip("matplotlib.image")
    loads = {"0": np.array([1.0, 1.0, 2.0, 0.0]), "3": np.array([0.0, 2.0])}
    plot_loads(loads, tmp_path / "load.png")
    pixels = image.imread(tmp_path / "load.png")[..., :3]
    red = (pixels[..., 0] > 0.3) & (pixels[..., 1:].max(-1) < 0.2)  # the cell of load 2
    columns = np.flatnonzero(red[: len(red) // 2].sum(0) > 20), np.flatnonzero(red[len(red) // 2 :].sum(0) > 20)
    width = pixels.shape[1]
    assert columns[0].size and columns[1].size
    assert np.median(columns[0][columns[0] < 0.85 * width]) > np.median(columns[1][columns[1] < 0.85 * width])
    with refused(DataError, "load"):
        plot_loads({}, tmp_path / "no.png")


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused(MissingPackage, "[train]"):
        plot_losses(tmp_path / "m", tmp_path / "p")
