"""Test runs of two processes: losses on every kind of mesh, and resuming after a kill."""

import json
import random
import time

import pytest

from eqx_decoders.training.run.log import read_metrics
from tests.commands import call, flags, steps_of
from tests.compare import assert_allclose
from tests.data.test_host_rows import finish, launch, settings


pytestmark = pytest.mark.slow

GPT3 = {"--init-from": None, "--model": "gpt3-52k", "--tokenizer": "bytes"}  # its heads can be sharded
CASES = {
    "fsdp x tensor, accumulated": {"--mesh.fsdp": 2, "--mesh.tensor": 2, "--step.gradient-accumulation-steps": 2}
    | GPT3,
    "tensor over both processes": GPT3
    | {"--model": "tiny", "--mesh.data": 1, "--mesh.tensor": 4, "--set": "num_kv_heads=4"},
    "data x context": {"--mesh.data": 2, "--mesh.context": 2},
    "context over both processes": {"--mesh.data": 1, "--mesh.context": 4},
    "fsdp, pairs of low rank": {"--mesh.fsdp": 4, "--lora.rank": 2, "--eval-every": 1},
    "fsdp, half precision and running means": {
        "--mesh.fsdp": 4,
        "--dtype": "bfloat16",
        "--optimizer.ema-decay": 0.5,
    },
    "experts": GPT3 | {"--model": "tiny-moe", "--mesh.data": 1, "--mesh.expert": 2, "--mesh.fsdp": 2},
}

# Arguments of a process: folder, arguments of all runs as JSON, arguments of each run by name.
WORKER = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
from eqx_decoders.training import connected
from eqx_decoders.cli import train as program
with connected(60):
    for name, words in json.loads((folder / "cases.json").read_text()).items():
        assert program.main(["--distributed", "--run-dir", str(folder / name), *words]) == 0, name
        print("done", name, flush=True)
"""


def words_of(folder, options):
    return list(map(str, flags(settings(folder) | options)))


def metrics_of(run):
    """Return losses and gradient norms of each step, and held-out losses."""
    rows = steps_of(run)
    held_out = [row["eval_loss"] for row in read_metrics(run / "metrics.jsonl") if "eval_loss" in row]
    return [[row["loss"] for row in rows], [row["grad_norm"] for row in rows], held_out]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which two processes have trained on every mesh."""
    folder = tmp_path_factory.mktemp("meshes")
    cases = {name: words_of(folder, options) for name, options in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    both = launch(folder, {}, worker=WORKER)
    for process, output in zip(both, finish(both, 900), strict=True):
        assert process.returncode == 0, output[-4000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_process_on_every_mesh(folder, name):
    call("train", "--run-dir", folder / f"{name}, alone", *words_of(folder, CASES[name]), devices=4)
    found, alone = metrics_of(folder / name), metrics_of(folder / f"{name}, alone")
    assert [len(each) for each in found] == [len(each) for each in alone] and len(found[0]) == 3
    for one, other in zip(found, alone, strict=True):
        assert_allclose(one, other, rtol=1e-2 if "half" in name else 1e-5)


def test_run_resumes_with_another_number_of_processes(folder):
    """The run uses one process, then two, then one."""
    options = settings(folder) | {"--checkpoint-every": 1, "--eval-every": 0, "--mesh.fsdp": 4, "--sample-tokens": 0}
    options |= {"--optimizer.schedule": "constant", "--optimizer.warmup-steps": 0}
    for steps, count in ((2, 1), (4, 2), (6, 1)):
        now = options | {"--run-dir": folder / "changing", "--steps": steps}
        if count == 1:
            call("train", *flags(now), devices=4)
            continue
        both = launch(folder, now)
        outputs = finish(both, 200)
        assert [process.returncode for process in both] == [0, 0], outputs
    call("train", *flags(options | {"--run-dir": folder / "unchanged", "--steps": 6}), devices=4)
    losses = [[row["loss"] for row in steps_of(folder / name)] for name in ("changing", "unchanged")]
    assert len(losses[0]) == 6
    assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_killed_processes_lose_and_repeat_no_step(tmp_path, seed):
    """One process is killed at the start, in a step or in a save. The other process exits, and both resume."""
    pick = random.Random(seed)
    options = settings(tmp_path) | {"--steps": 40, "--checkpoint-every": 3, "--eval-every": 7}
    options |= {
        "--distributed-timeout": 30
    }  # a process waits for a process that was killed before the cluster was set up
    begun = time.monotonic()
    both = launch(tmp_path, options | {"--run-dir": tmp_path / "whole"})
    outputs = finish(both, 300)
    assert [process.returncode for process in both] == [0, 0], outputs
    whole, run = time.monotonic() - begun, tmp_path / "killed"
    for _ in range(4):
        both = launch(tmp_path, options | {"--run-dir": run})
        time.sleep(pick.uniform(0.1, 1.0) * whole)
        pick.choice(both).kill()
        finish(both, 120)
        assert all(process.returncode is not None for process in both)
    both = launch(tmp_path, options | {"--run-dir": run})
    outputs = finish(both, 300)
    assert [process.returncode for process in both] == [0, 0], outputs
    rows, unbroken = steps_of(run), steps_of(tmp_path / "whole")
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in unbroken]
