"""The metrics file loses nothing, the terminal shows what is so, and a failing tracker stops nobody."""

import builtins
import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.training import console
from eqx_decoders.training.console import (
    MetricsFile,
    Progress,
    TensorBoard,
    Trackers,
    duration,
    peak_flops,
    plot_loads,
    plot_losses,
    read_metrics,
)


def row(step, loss: object = 2.5):
    return {"step": step, "loss": loss, "tokens": 1024, "step_seconds": 0.5}


def test_rows_are_there_at_once_and_come_back_exactly(tmp_path):
    loss = np.float32(1 / 3)
    file = MetricsFile(tmp_path / "new/metrics.jsonl")
    file.write({**row(0), "loss": jnp.asarray(loss), "rate": jnp.bfloat16(0.1), "per_layer": np.arange(3), "on": True})
    file.write(row(1, float("nan")))
    file.write(row(2, [float("inf"), -math.inf]))
    rows = read_metrics(tmp_path / "new/metrics.jsonl")  # the file is still open
    assert np.float32(rows[0]["loss"]).tobytes() == loss.tobytes()
    assert rows[0]["per_layer"] == [0, 1, 2] and rows[0]["on"] is True and rows[0]["rate"] == float(jnp.bfloat16(0.1))
    for line in (tmp_path / "new/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(float(rows[1]["loss"]))
    assert [float(value) for value in rows[2]["loss"]] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "tail", [b"", b'{"step": 6, "lo', b'{"step": 3, "loss": 1}', b"\x00\x00\xff", b"[1]\n", b'{"step": "x"}\n']
)
def test_resuming_drops_lost_steps_and_half_a_line(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(6):
            file.write(row(step))
            if step == 2:
                file.write({"step": 2, "eval_loss": 3.0})
        file.write({"note": "a row without a step stays"})
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes() + tail)
    with MetricsFile(path, start=4) as file:
        assert path.read_bytes().splitlines(keepends=True) == [*whole[:5], whole[-1]], "bytes of kept rows are kept"
        file.write(row(4))
    assert [r["step"] for r in read_metrics(path) if "loss" in r] == [0, 1, 2, 3, 4]
    before = path.stat().st_ino
    MetricsFile(path, start=5).close()
    assert path.stat().st_ino == before, "nothing to drop: the file is left alone"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_repair_replaces_the_file_in_one_move(tmp_path, monkeypatch):
    """A kill in the middle of the repair must leave the old file."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(3):
            file.write(row(step))
    old = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(console.os, "replace", killed)
        MetricsFile(path, start=1)
    assert path.read_bytes() == old
    MetricsFile(path, start=1).close()
    assert [r["step"] for r in read_metrics(path)] == [0]


def test_a_row_cut_by_a_full_disk_spoils_no_other(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(row(0))
    real = file._file

    class Full:
        def write(self, data):
            return real.write(data[:9])

    file._file = Full()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OSError, match="step 1 was written in part"):
        file.write(row(1))
    file._file = real
    file.write(row(2))
    file.close()
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [0, 2]


def test_a_failing_tracker_is_reported_once(tmp_path):
    class Broken:
        def write(self, row):
            raise OSError("no route")

        def close(self):
            raise OSError("no route")

    said = []
    file = MetricsFile(tmp_path / "m.jsonl")
    trackers = Trackers(Broken(), file, say=said.append)
    for step in range(3):
        trackers.write(row(step))
    trackers.close()
    assert said == ["Broken failed and may miss rows, training goes on: OSError: no route"]
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [0, 1, 2]


def test_optional_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.split(".")[0] in ("tensorboardX", "matplotlib", "rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'eqx_decoders\[tensorboard\]'"):
        TensorBoard(tmp_path)
    with pytest.raises(ImportError, match=r"pip install 'eqx_decoders\[train\]'"):
        plot_losses(tmp_path / "m", tmp_path / "p")
    terminal = Terminal()
    with Progress(2, stream=terminal) as progress:
        progress.update(1, row(1))
    assert "1/2" in terminal.getvalue() and "\x1b" not in terminal.getvalue(), "without rich: plain lines"


def test_tensorboard_gets_the_scalars(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("tensorboardX")
    seen = []

    class Writer:
        def __init__(self, directory):
            seen.append(directory)

        def add_scalar(self, *args):
            seen.append(args)

        def close(self):
            seen.append("closed")

    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer)
    tracker = TensorBoard(tmp_path)
    tracker.write({"step": 3, "loss": jnp.float32(2), "name": "x", "per_layer": np.ones(2), "rate": 0.5})
    tracker.close()
    assert seen == [str(tmp_path), ("loss", 2.0, 3), ("rate", 0.5, 3), "closed"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


def test_plain_lines_come_at_times_and_in_columns(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(1000, start=500, every=10, stream=stream) as progress:
        assert progress.seconds_left() is None
        for step in range(501, 531):
            clock.now += 2
            progress.update(step, {**row(step), "mfu": 0.456} if step > 510 else {"loss": 123.456})
        progress.message("saved")
        progress.update(1000, {})
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["step", "loss", "tokens/s", "MFU", "left"]
    assert [line.split()[0] for line in lines[1:-2]] == [f"{step}/1000" for step in range(501, 531, 5)]
    assert lines[-3].split() == ["526/1000", "2.5000", "2,048", "45.6%", "15m48s"]
    assert lines[1].split() == ["501/1000", "123.4560", "-", "-", "16m38s"]
    assert lines[-2] == "saved" and lines[-1].split() == ["1000/1000", "-", "-", "-", "0s"]
    ends = [len(line) for line in lines if line != "saved"]
    assert len(set(ends)) == 1, "columns are aligned"


def test_lines_and_bar_show_the_worst_load_where_there_are_experts(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(100, stream=stream) as progress:
        clock.now += 2
        progress.update(1, {**row(1), "load": [1.2, np.float32(3.456), 1.0]})
        clock.now += 20
        progress.update(2, row(2))
    head, first, second = (line.split() for line in stream.getvalue().splitlines())
    assert head == ["step", "loss", "tokens/s", "MFU", "load", "left"]
    assert first == ["1/100", "2.5000", "2,048", "-", "3.46", "3m18s"] and second[4] == "-"
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    pytest.importorskip("rich")
    terminal = Terminal()
    with Progress(20, stream=terminal) as progress:
        progress.update(7, {**row(7), "load": np.array([1.5, 1.25])})
    assert "2,048 tokens/s  load 1.50" in terminal.getvalue()


def test_the_bar_shows_step_loss_speed_and_messages(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(20, start=4, stream=terminal) as progress:
        progress.message("[not markup] resumed")
        progress.update(7, {**row(7), "mfu": 0.5})
    text = terminal.getvalue()
    assert "[not markup] resumed" in text and "7/20" in text
    assert "loss 2.5000  2,048 tokens/s  MFU 50.0%" in text


def test_duration_and_bad_totals():
    assert [duration(s) for s in (0, 59.4, 59.6, 200, 7500, 180000)] == [
        "0s",
        "59s",
        "1m00s",
        "3m20s",
        "2h05m",
        "2d02h",
    ]
    with pytest.raises(ConfigError, match="total=0"):
        Progress(0)


def test_peak_flops():
    want = {
        "TPU v4": 275e12,
        "TPU v5 lite": 197e12,
        "TPU v5p": 459e12,
        "TPU v6 lite": 918e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA B200": 2250e12,
        "TPU v4 lite": None,
        "cpu": None,
        "": None,
    }
    assert {kind: peak_flops(kind) for kind in want} == want


@pytest.mark.parametrize("steps", [1, 300])
def test_a_picture_is_drawn(tmp_path, steps):
    pytest.importorskip("matplotlib")
    with MetricsFile(tmp_path / "m.jsonl") as file:
        for step in range(steps):
            file.write({**row(step, 3.0 if step != 7 else float("nan")), "learning_rate": 1e-3})
        file.write({"step": 0, "eval_loss": 3.5, "eval_loss/code": 2.0})
    plot_losses(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "empty.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(DataError, match="nothing to draw"):
        plot_losses(tmp_path / "empty.jsonl", tmp_path / "no.png")


def test_a_heat_map_of_loads_is_drawn(tmp_path):
    """A field for each layer and expert: red where there is much, blue where there is little, grey beyond the last."""
    image = pytest.importorskip("matplotlib.image")
    loads = {"0": np.array([1.0, 1.0, 2.0, 0.0]), "3": np.array([0.0, 2.0])}
    plot_loads(loads, tmp_path / "load.png")
    pixels = image.imread(tmp_path / "load.png")[..., :3]
    red = (pixels[..., 0] > 0.3) & (pixels[..., 1:].max(-1) < 0.2)  # of a load of two
    columns = np.flatnonzero(red[: len(red) // 2].sum(0) > 20), np.flatnonzero(red[len(red) // 2 :].sum(0) > 20)
    width = pixels.shape[1]
    assert columns[0].size and columns[1].size
    assert np.median(columns[0][columns[0] < 0.85 * width]) > np.median(columns[1][columns[1] < 0.85 * width])
    with pytest.raises(DataError, match="no load to draw"):
        plot_loads({}, tmp_path / "no.png")
