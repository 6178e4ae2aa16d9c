"""Two real processes, two CPU devices each: they agree on flags, share batches, and the first one writes."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from eqx_decoders.layout import Layout
from eqx_decoders.training.data import Batch
from eqx_decoders.training.metrics import read_metrics
from eqx_decoders.training.processes import any_process, batch_share, place
from tests.commands import ENVIRONMENT, ROOT, call, flags, steps_of, write_corpus


# Each process: (number, port, folder, arguments of the training program as JSON).
WORKER = """
import json, pathlib, sys
from unittest import mock
import jax
number, port, folder, words = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), json.loads(sys.argv[4])
initialize = jax.distributed.initialize
initialize(f"localhost:{port}", 2, number)
import numpy as np
from eqx_decoders.cli import train as program
from eqx_decoders.errors import ConfigError
from eqx_decoders.layout import Layout
from eqx_decoders.training.data import Batch
from eqx_decoders.training.processes import any_process, batch_share, place, wait_for_all
from eqx_decoders.training.run import Run

assert jax.process_count() == 2 and len(jax.devices()) == 4
flags = [any_process(flag) for flag in (False, number == 0, number == 1, True)]
assert flags == [False, True, True, True], flags
tokens, found = np.arange(8 * 6, dtype=np.int32).reshape(8, 6), {}
for axes in ({"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 4}, {"data": 2, "context": 2}, {"context": 4}):
    layout = Layout.create(**axes)
    index, count = batch_share(layout, 8)
    rows = tokens[8 * index // count : 8 * (index + 1) // count]
    batch = place(Batch(tokens=rows, loss_mask=rows > 3), layout, 8)
    assert batch.tokens.shape == (8, 6)
    for shard in batch.tokens.addressable_shards:
        np.testing.assert_array_equal(shard.data, tokens[shard.index])
    found[json.dumps(axes)] = [index, count, int(jax.jit(lambda x: x.sum())(batch.tokens))]
devices = jax.devices()
try:
    batch_share(Layout.create(data=4, devices=[devices[i] for i in (0, 2, 1, 3)]), 8)
except ConfigError as error:
    found["interleaved"] = str(error)
(folder / f"shares{number}.json").write_text(json.dumps(found))
wait_for_all("shares")

mock.patch("jax.distributed.initialize", lambda: found.setdefault("initialized", True)).start()
for name in ("steps", "stopped"):
    requested = name == "stopped" and number == 1  # the signal comes to one process alone

    def interrupted(self, step, *rest, report=Run._report):
        report(self, step, *rest)
        if requested and step == 2:
            self.interrupt._handle(15, None)

    with mock.patch.object(Run, "_report", interrupted):
        code = program.main(["--distributed", "--run-dir", str(folder / name), *words])
    assert found["initialized"] and code == (143 if name == "stopped" else 0), code
print("done", number)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two processes have trained, and the options of their runs."""
    folder = tmp_path_factory.mktemp("two")
    options = {
        "--data": write_corpus(folder / "corpus", 12, 40),
        "--init-from": ROOT / "tests" / "fixtures" / "chat_llama",
        "--steps": 3,
        "--batch-size": 8,
        "--seq-len": 16,
        "--eval-every": 2,
        "--checkpoint-every": 2,
        "--held-out-fraction": 0.2,
        "--sample-tokens": 0,
    }
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {"JAX_NUM_CPU_DEVICES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "PYTHONPATH": str(ROOT)}
    settings["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    settings |= {f"JAX_PERSISTENT_CACHE_MIN_{name}": "-1" for name in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES")}
    words = json.dumps([str(word) for word in flags(options)])
    commands = [[sys.executable, "-c", WORKER, str(number), str(port), str(folder), words] for number in (0, 1)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    processes = [subprocess.Popen(command, env=ENVIRONMENT | settings, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and f"done {number}" in output, output[-4000:]
    return folder, options, outputs


def test_rows_are_shared_as_the_mesh_splits_them(two):
    shares = [json.loads((two[0] / f"shares{number}.json").read_text()) for number in (0, 1)]
    total = sum(range(48))
    for number, found in enumerate(shares):
        sentence = found.pop("interleaved")
        assert "the rows" in sentence and "not consecutive" in sentence and "order of their processes" in sentence
        assert {tuple(json.loads(axes).items()): share for axes, share in found.items()} == {
            (("data", 4),): [number, 2, total],
            (("data", 2), ("tensor", 2)): [number, 2, total],
            (("tensor", 4),): [0, 1, total],
            (("data", 2), ("context", 2)): [number, 2, total],
            (("context", 4),): [0, 1, total],
        }


def test_a_run_of_two_processes_is_that_of_one(two):
    """The same losses, each row written once, by the first process; only that one prints the result."""
    folder, options, outputs = two
    call("train", "--run-dir", folder / "alone", *flags(options))
    rows, alone = (steps_of(folder / name) for name in ("steps", "alone"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose([row[name] for row in rows], [row[name] for row in alone], rtol=1e-5)
    held_out = [[row["eval_loss"] for row in read_metrics(folder / name / "metrics.jsonl") if "eval_loss" in row]
                for name in ("steps", "alone")]  # fmt: skip
    np.testing.assert_allclose(*held_out, rtol=1e-5)
    assert "held-out loss" in outputs[0] and "gzip" in outputs[0] and "gzip" not in outputs[1]
    assert (folder / "steps" / "loss.png").exists()


def test_a_signal_to_one_process_stops_both_after_the_same_step(two):
    folder, _, outputs = two
    assert all("stopped, saved at step 2" in output for output in outputs)
    assert [row["step"] for row in steps_of(folder / "stopped")] == [1, 2]
    assert not (folder / "stopped" / "loss.png").exists()


def test_one_process_holds_everything():
    assert any_process(True) and not any_process(False)
    layout = Layout.create(data=4, tensor=2)
    assert batch_share(layout, 8) == batch_share(Layout(), 8) == (0, 1)
    tokens = np.arange(16, dtype=np.int32).reshape(8, 2)
    batch = place(Batch(tokens=tokens), layout, 8)
    assert isinstance(batch.tokens, jax.Array) and np.array_equal(batch.tokens, tokens)
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(2, 2)}
