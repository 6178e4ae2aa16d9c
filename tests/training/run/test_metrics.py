"""Test the metrics file: exact numbers, and repair after a kill."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.io import atomic_files
from eqx_decoders.training.run.log import MetricsFile, read_metrics
from tests.errors import refused


def row(step, loss: object = 2.5):
    return {"step": step, "loss": loss, "tokens": 1024, "step_seconds": 0.5}


def test_rows_are_written_immediately_and_read_exactly(tmp_path):
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
    "tail",
    [b"", b'{"step": 6, "lo', b'{"step": 3, "loss": 1}', b"\x00\x00\xff", b"[1]\n", b'{"step": "x"}\n'],
    ids=["none", "half-line", "no-newline", "binary", "list", "text-step"],
)
def test_resuming_drops_lost_steps_and_damaged_lines(tmp_path, tail):
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
        assert path.read_bytes().splitlines(keepends=True) == [*whole[:5], whole[-1]]
        file.write(row(4))
    assert [r["step"] for r in read_metrics(path) if "loss" in r] == [0, 1, 2, 3, 4]
    before = path.stat().st_ino
    MetricsFile(path, start=5).close()
    assert path.stat().st_ino == before  # no row is dropped, so the file is not replaced
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_repair_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(3):
            file.write(row(step))
    old = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(atomic_files.os, "replace", killed)
        MetricsFile(path, start=1)
    assert path.read_bytes() == old
    MetricsFile(path, start=1).close()
    assert [r["step"] for r in read_metrics(path)] == [0]


def test_row_truncated_by_a_full_disk_damages_no_other_row(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(row(0))
    real = file._file

    class Full:
        def write(self, data):
            return real.write(data[:9])

    file._file = Full()  # pyright: ignore[reportAttributeAccessIssue]
    with refused(OSError, "step 1"):
        file.write(row(1))
    file._file = real
    file.write(row(2))
    file.close()
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [0, 2]
