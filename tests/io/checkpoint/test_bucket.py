"""Checkpoints in a bucket of a local server are saved, retained and restored as on a disk."""

import random
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest
from etils import epath

from eqx_decoders.errors import CheckpointError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints, load_weights
from eqx_decoders.io.checkpoint.steps import COMMITTED, SET_ASIDE, TEMPORARY
from tests.buckets import bucket
from tests.commands import ROOT
from tests.errors import assert_names, refused
from tests.io.checkpoint.test_checkpoints import SAVER, abstract, assert_same, make_state


@pytest.fixture
def directory(request):
    """A separate directory for each test."""
    return f"{bucket()}/{request.node.originalname}/checkpoints"


def names(directory):
    return {path.name for path in epath.Path(directory).iterdir()}


@pytest.mark.slow
def test_save_retention_and_restore(directory):
    with Checkpoints(directory, max_checkpoints=2) as checkpoints:
        assert checkpoints.steps == ()
        with refused(CheckpointError, "gs://bucket"):
            checkpoints.restore(make_state())
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), data_state={"next": step}, config={"layers": 2})
            assert step not in checkpoints.steps or checkpoints._pending is not None
    assert checkpoints.steps == (2, 3) and names(directory) == {"2", "3"}
    tree, data_state, step = Checkpoints(directory).restore(abstract(make_state()))
    assert_same(tree, make_state(3))
    assert (data_state, step) == ({"next": 3}, 3)
    assert_same(load_weights(directory + "/", make_state().model, 2).tree, make_state(2).model)


@pytest.mark.slow
def test_damaged_step_is_set_aside_and_saved_again(directory):
    with Checkpoints(directory) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, make_state(step), data_state={}, config={})
    files = [path / name for path, _, files in epath.Path(f"{directory}/20/arrays").walk() for name in files]
    largest = max(
        (epath.Path(f"gs://{str(file).removeprefix('gs://')}") for file in files), key=lambda f: f.stat().length
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    reports = []
    with Checkpoints(directory, warn=reports.append) as checkpoints:
        assert checkpoints.restore(make_state()).step == 10
        assert_names(reports[0], "20", "step 10")
        assert checkpoints.steps == (10,) and SET_ASIDE in names(f"{directory}/20")
        checkpoints.save(20, make_state(20), data_state={}, config={})
    assert SET_ASIDE not in names(f"{directory}/20")
    assert_same(Checkpoints(directory, warn=pytest.fail).restore(make_state()).tree, make_state(20))


@pytest.mark.slow
def test_changes_by_other_processes_are_seen(directory):
    """gcsfs caches listings by default."""
    writer, reader = Checkpoints(directory), Checkpoints(directory)
    with writer:
        assert reader.steps == ()
        writer.save(1, make_state(1), data_state={}, config={}, wait=True)
    program = f"from etils import epath; epath.Path({f'{directory}/1/{COMMITTED}'!r}).unlink()"
    program += f"; epath.Path({f'{directory}/1{TEMPORARY}'!r}).write_text('')"
    assert reader.steps == (1,)
    subprocess.run([sys.executable, "-c", program], check=True)
    assert reader.steps == ()


def test_missing_bucket_is_refused():
    bucket()
    with refused(CheckpointError, "directory=gs://nobody/run"):
        Checkpoints("gs://nobody/run").save(1, make_state(), data_state={}, config={})


@pytest.mark.slow
def test_sigkill_while_saving_or_deleting_leaves_a_loadable_step(directory):
    pick, template, before = random.Random(2), {"x": jnp.zeros(1 << 20), "n": jnp.int32(0)}, 0
    for _ in range(12):
        command = [sys.executable, "-c", SAVER, directory, "bucket"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        with subprocess.Popen(command, **pipes) as process:
            assert process.stdout and process.stderr
            assert process.stdout.readline() == f"restored {before}\n", process.stderr.read()
            begun = [process.stdout.readline().split() for _ in range(4)][-1]
            time.sleep(pick.random() * 0.3)
            process.send_signal(signal.SIGKILL)
        checkpoints = Checkpoints(directory, max_checkpoints=2, warn=pytest.fail)
        tree, data_state, step = checkpoints.restore(template)
        assert step >= int(begun[1]) - 1, "all but the save under way must be committed"
        assert data_state == {"next": step} and (tree["x"] == step).all() and tree["n"] == step
        before = step + 1
        with checkpoints:
            tree = {"x": jnp.full(1 << 20, before, jnp.float32), "n": jnp.int32(before)}
            checkpoints.save(before, tree, data_state={"next": before}, config={})
        assert names(directory) == set(map(str, checkpoints.steps)), "leftovers are removed"
