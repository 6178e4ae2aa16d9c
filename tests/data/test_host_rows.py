"""Test training with two processes with two CPU devices each: batches, losses, errors, and resuming."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.errors import ConfigError, EqxDecodersError
from eqx_decoders.io import processes
from eqx_decoders.io.checkpoint.steps import COMMITTED
from eqx_decoders.io.processes import VARIABLES, find_cluster, rendezvous
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training import host_rows
from eqx_decoders.training.run.log import read_metrics
from tests.commands import ENVIRONMENT, ROOT, call, flags, steps_of, write_corpus
from tests.compare import assert_allclose
from tests.encoders.directories import save_image, vision_directory
from tests.errors import assert_names, refused


# Arguments of a process: folder, arguments of the training program as JSON.
COMMON = """
import gc, json, os, pathlib, sys, time
from unittest import mock
gc.disable()  # a tenth of the processor time
folder, words, number = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["JAX_PROCESS_ID"])
import jax
from eqx_decoders.training import connected
import numpy as np
from eqx_decoders.cli import train as program
from eqx_decoders.errors import DataError
from eqx_decoders.io import processes
from eqx_decoders.io.checkpoint import reading
from eqx_decoders.io.processes import first_then_all, broadcast_json, all_gather_json, local_process_count
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training import Batch, flops, host_rows, place
from eqx_decoders.data.batches import Batches
from eqx_decoders.io.interrupt import Interrupt
from eqx_decoders.training.run.loop import MetricsReporter
from tests.compare import assert_array_equal
from tests.programs import no_renames
processes.GRACE = 1.0  # seconds to come to the error of the other one
flops.measured_flops = lambda dtype: 1e11  # the speed of the CPU is not measured

def check_batches():
    assert jax.process_count() == 2 and len(jax.devices()) == 4
    assert all_gather_json("numbers", number) == [0, 1] and broadcast_json("first", number) == 0
    end = time.monotonic() + 30
    while local_process_count() < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert local_process_count() == 2
    file = folder / "file"
    made = first_then_all("file", lambda: file.read_text() if file.exists() else file.write_text("x"), file)
    assert made == (1, "x")[number]
    devices, tokens, found = jax.devices(), np.arange(8 * 6, dtype=np.int32).reshape(8, 6), {}
    meshes = [{"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 4}, {"data": 2, "context": 2}, {"context": 4}]
    for axes, order in [*((axes, (0, 1, 2, 3)) for axes in meshes), ({"fsdp": 4}, (0, 2, 1, 3))]:
        layout = Layout.create(**axes, devices=[devices[i] for i in order])
        held = host_rows(layout, 8)
        rows = tokens[list(held)]
        batch = place(Batch(tokens=rows, loss_mask=rows > 3), layout, 8)
        for leaf, whole in ((batch.tokens, tokens), (batch.loss_mask, tokens > 3)):
            assert leaf.shape == (8, 6)
            for shard in leaf.addressable_shards:
                assert_array_equal(shard.data, whole[shard.index])
        found[json.dumps([axes, order])] = [list(held), int(jax.jit(lambda x: x.sum())(batch.tokens))]
    (folder / f"rows{number}.json").write_text(json.dumps(found))

QUIET = ("--sample-tokens", "0")  # of runs that are about how they end and go on
RESUMED = (*QUIET, "--eval-every", "0")

def train(name, *more):
    return program.main(["--distributed", "--run-dir", str(folder / name), *words, *more])

def interrupted(self, row, report=MetricsReporter.report):
    report(self, row)
    if number == 1 and row["step"] == 1:  # the signal comes to one process alone
        Interrupt.opened[-1]._handle(15, None)

def torn(steps, step, read=reading.read_manifest):
    if number == 1 and step == 3:
        raise reading.DamagedStepError("torn")
    return read(steps, step)

tries, loads = iter(range(100)), iter(range(100))

def flaky(steps, step, read=reading.read_manifest):
    if number == 1 and next(tries) == 0:
        raise reading.TransientReadError("flaky")
    return read(steps, step)

def flipped(*what, load=reading._load):
    found = load(*what)
    if number == 1 and next(loads) == 0:  # each process has all of an array; one of them has read something else
        name = max(found, key=lambda name: found[name].size)
        parts = [shard.data + 1 for shard in found[name].addressable_shards]
        found[name] = jax.make_array_from_single_device_arrays(found[name].shape, found[name].sharding, parts)
    return found

def broken(self, batch=Batches.__next__):
    if number == 1 and self._row >= 8 * 4:
        raise DataError("row 32 is torn")
    return batch(self)
"""
WORKER = f"""{COMMON}
with connected(60):
    check_batches()
    assert train("steps") == 0
    print("done", number, flush=True)
    with mock.patch.object(Batches, "__next__", broken):
        train("steps", *RESUMED, "--steps", "6")
"""
RESUMING = f"""{COMMON}
with connected(60), no_renames(), mock.patch("eqx_decoders.training.run.loop.plot_losses"):  # as in a bucket
    with mock.patch.object(MetricsReporter, "report", interrupted):
        assert train("stopped", *QUIET) == 143
    again = mock.patch.object(reading, "_load", flipped)
    read = mock.patch.object(reading, "read_manifest", flaky)
    with again, read, mock.patch.object(reading, "PAUSES", (0.1,)):
        assert train("stopped", *RESUMED) == 0  # the step that could not be read at once is not set aside
    with mock.patch.object(reading, "read_manifest", torn):
        assert train("stopped", *RESUMED, "--steps", "4") == 0
"""


def launch(folder, options, worker=None, each=({}, {}), **settings):
    """Start two processes of `worker`, by default the training program. `each`: additional options per process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT), "JAX_NUM_PROCESSES": "2", **settings}
    settings["JAX_COORDINATOR_ADDRESS"] = f"localhost:{port}"
    settings |= {f"JAX_PERSISTENT_CACHE_MIN_{name}": "-1" for name in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES")}
    found = []
    for own in each:
        words = list(map(str, flags(options | own)))
        started = ["scripts/train.py", "--distributed", *words]
        found.append(started if worker is None else ["-c", worker, str(folder), json.dumps(words)])
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    return [
        subprocess.Popen(
            [sys.executable, *words], env=ENVIRONMENT | settings | {"JAX_PROCESS_ID": str(number)}, **pipes
        )
        for number, words in enumerate(found)
    ]


def finish(processes, seconds):
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def settings(folder):
    return {
        "--data": write_corpus(folder / "corpus", 12, 40),
        "--init-from": ROOT / "tests" / "fixtures" / "chat_llama",
        "--steps": 3,
        "--batch-size": 8,
        "--seq-len": 16,
        "--eval-every": 2,
        "--checkpoint-every": 2,
        "--held-out-fraction": 0.2,
        "--sample-tokens": 4,
    }


@pytest.fixture(scope="module")
def trained_by_two_processes(tmp_path_factory):
    """Return the folder in which two processes have trained, the options of the runs, and the output."""
    folder = tmp_path_factory.mktemp("two")
    options = settings(folder)
    both = launch(folder, options, worker=WORKER)
    outputs = finish(both, 400)
    for number, (process, output) in enumerate(zip(both, outputs, strict=True)):
        assert process.returncode == 3 and f"done {number}" in output, output[-4000:]
    return folder, options, outputs


def test_processes_place_the_rows_of_their_devices(trained_by_two_processes):
    total = sum(range(48))
    for number in (0, 1):
        found = json.loads((trained_by_two_processes[0] / f"rows{number}.json").read_text())
        half, whole = list(range(4 * number, 4 * number + 4)), list(range(8))
        scattered = [0, 1, 4, 5] if number == 0 else [2, 3, 6, 7]
        assert [held for held, _ in found.values()] == [half, half, whole, half, whole, scattered]
        assert {sums for _, sums in found.values()} == {total}


def test_two_processes_equal_one_process(trained_by_two_processes):
    """Only the first process writes metrics and prints results and samples."""
    folder, options, outputs = trained_by_two_processes
    _, alone_err = call("train", "--run-dir", folder / "alone", *flags(options))
    rows, alone = (steps_of(folder / name)[:3] for name in ("steps", "alone"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("loss", "grad_norm", "tokens"):
        assert_allclose([row[name] for row in rows], [row[name] for row in alone], rtol=1e-5)
    held_out = [[row["eval_loss"] for row in read_metrics(folder / name / "metrics.jsonl") if "eval_loss" in row][:2]
                for name in ("steps", "alone")]  # fmt: skip
    assert_allclose(*held_out, rtol=1e-5)
    sample = next(line for line in alone_err.splitlines() if line.startswith("class Reader"))
    assert "gzip" in outputs[0] and "gzip" not in outputs[1]
    assert sample in outputs[0] and "class Reader" not in outputs[1]
    assert (folder / "steps" / "loss.png").exists()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the folder of a run that two processes stop and resume, and the output."""
    folder = tmp_path_factory.mktemp("resumed")
    both = launch(folder, settings(folder), worker=RESUMING)
    outputs = finish(both, 400)
    assert all(process.returncode == 0 for process in both), outputs[0][-4000:] + outputs[1][-4000:]
    return folder, outputs


@pytest.mark.slow
def test_signal_to_one_process_stops_both_after_the_same_step(resumed):
    folder, outputs = resumed
    for output in outputs:
        assert_names(output, "saved at step 2")
    assert [row["step"] for row in steps_of(folder / "stopped")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_processes_resume_at_a_step_that_all_processes_can_read(resumed):
    folder, outputs = resumed
    for output in outputs:
        assert len(re.findall(r"resum\w*\D*2\b", output)) == 2
        assert re.search(r"torn.*step 2\b", output)
    steps = folder / "stopped" / "checkpoints"
    assert {path.name for path in steps.iterdir()} == {"2", "3", "4"}
    assert {step for step in "234" if (steps / step / COMMITTED).exists()} == {"2", "4"}


def test_error_in_one_process_stops_both_with_its_exit_code(trained_by_two_processes):
    folder, _, outputs = trained_by_two_processes
    found = {path.name for path in (folder / "steps" / "checkpoints").iterdir() if path.name.isdecimal()}
    assert found in ({"2", "3"}, {"2", "3", "4"})  # the last checkpoint was being written when the error was raised
    assert_names(outputs[1], "error: row 32 is torn")
    assert_names(outputs[0], "error: process 1 (", "row 32 is torn")


@pytest.mark.slow
def test_processes_train_on_images_of_different_sizes_and_counts(tmp_path):
    """The losses equal those of one process. Some rows have no images."""
    model, images = vision_directory(tmp_path / "model"), tmp_path / "images"
    images.mkdir()
    sizes = [(12 + 8 * (n % 3), 24 - 4 * (n % 2)) for n in range(12)]
    names = [save_image(images / f"{n}.png", *size, seed=n).name for n, size in enumerate(sizes)]
    records = [
        {
            "prompt": "<|image_pad|>" * (n % 3) + "What is it? ",
            "completion": f"number {n}",
            "images": names[n : n + n % 3],
        }
        for n in range(10)
    ]
    data = images / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records * 4))
    options = settings(tmp_path) | {"--data": data, "--init-from": model, "--seq-len": 64, "--sample-tokens": 0}
    outputs = finish(launch(tmp_path, options | {"--run-dir": tmp_path / "both"}), 400)
    assert_names(outputs[0], "gzip")
    call("train", "--run-dir", tmp_path / "alone", *flags(options))
    rows, alone = (steps_of(tmp_path / name) for name in ("both", "alone"))
    assert len(rows) == len(alone) == 3
    for name in ("loss", "grad_norm", "tokens"):
        assert_allclose([row[name] for row in rows], [row[name] for row in alone], rtol=2e-5)


def test_processes_that_do_not_start_are_named(monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    found = {}

    def try_to_meet(index):
        try:
            rendezvous(address, 4, index, 2)
        except EqxDecodersError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=try_to_meet, args=(index,)) for index in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all("processes 1, 3 of 4" in text for text in found.values())
    for name, value in zip(VARIABLES, (address, "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    words = ("--run-dir", tmp_path / "run", "--distributed", "--distributed-timeout", 1)
    _, err = call("train", *words, code=1)
    assert_names(err, "error: process 0 of 2", address, "1s")


def test_processes_that_hang_or_do_not_respond_are_named(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(processes, "_suspect", threading.Event())
    seen = {}

    def after(seconds, *points, silent=(), busy=0):
        """Return what is found in the heartbeats `seconds` later."""
        now[0] += seconds
        return processes.find_failure(
            {
                who: [0 if who in silent else now[0], [point, busy], f"host{who}, pid {who}"]
                for who, point in enumerate(points)
            },
            seen,
        )

    assert (
        after(0, 4, 4, 4) is None and after(processes.BARRIER_TIMEOUT + 1, 4, 4, 4) is None
    )  # all processes are at the same point
    assert after(1, 7, 5, 7) is None and after(processes.BARRIER_TIMEOUT, 7, 5, 7) is None
    assert after(1, 8, 5, 8) is None  # other processes still make progress
    assert after(processes.BARRIER_TIMEOUT, 8, 5, 8) is None
    found = after(1, 8, 5, 8)
    assert found["hanging"] == [1]
    assert_names(found["text"], "process 1 (host1, pid 1)", "30m")
    assert after(1, 8, 5, 8, busy=1) is None  # the process is in a long task
    assert after(1, 8, 6, 8) is None
    after(1, 9, 9, 9, silent=(2,))
    assert after(processes.HEARTBEAT_TIMEOUT, 9, 9, 9, silent=(2,)) is None
    found = after(1, 9, 9, 9, silent=(2,))
    assert found["dead"] == 1
    assert_names(found["text"], "process 2 (host2, pid 2)", "30s")


IMPATIENT = """
import json, sys
from eqx_decoders.cli import train
from eqx_decoders.io import processes
processes.GRACE = 1.0  # seconds to come to the error of the other one
sys.exit(train.main(["--distributed", *json.loads(sys.argv[2])]))
"""


@pytest.mark.slow
def test_failed_start_of_another_process_leaves_no_files(tmp_path):
    run = tmp_path / "run"
    both = launch(tmp_path, settings(tmp_path) | {"--run-dir": run}, worker=IMPATIENT, each=({}, {"--seq-len": 32}))
    outputs = finish(both, 100)
    assert [process.returncode for process in both] == [2, 2] and not run.exists(), outputs
    for output in outputs:
        assert_names(output, "--seq-len")


@pytest.mark.parametrize(
    "variables, names",
    [
        pytest.param({"NUM_PROCESSES": "2"}, ["JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"], id="count"),
        pytest.param(
            {"NUM_PROCESSES": "2", "PROCESS_ID": "2", "COORDINATOR_ADDRESS": "a:1"}, ["JAX_PROCESS_ID=2"], id="id"
        ),
        pytest.param({}, VARIABLES, id="none"),
    ],
)
def test_missing_environment_variables_of_a_cluster_are_named(variables, names, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    with refused(ConfigError, *names):
        find_cluster(1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_stops_the_other_and_both_resume(victim, tmp_path):
    options = settings(tmp_path) | {"--run-dir": tmp_path / "run", "--steps": 400, "--eval-every": 0}
    both = launch(tmp_path, options)
    while len(steps_of(tmp_path / "run") if (tmp_path / "run" / "metrics.jsonl").exists() else []) < 5:
        assert all(process.poll() is None for process in both)
        time.sleep(0.1)
    both[victim].send_signal(signal.SIGKILL)
    outputs = finish(both, 60)
    assert both[1 - victim].returncode != 0
    assert victim == 0 or "process 1 (" in outputs[0]
    saved = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal())
    both = launch(tmp_path, options | {"--steps": saved + 3})
    outputs = finish(both, 200)
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [row["step"] for row in steps_of(tmp_path / "run")] == list(range(1, saved + 4))


def test_single_process_has_all_rows():
    layout = Layout.create(data=4, tensor=2)
    assert host_rows(layout, 8) == host_rows(Layout(), 8) == range(8)
    tokens = np.arange(16, dtype=np.int32).reshape(8, 2)
    batch = place(Batch(tokens=tokens), layout, 8)
    assert isinstance(batch.tokens, jax.Array) and np.array_equal(batch.tokens, tokens)
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(2, 2)}
