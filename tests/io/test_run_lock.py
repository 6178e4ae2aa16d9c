"""One writer per run directory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eqx_decoders.errors import CheckpointError, ConfigError
from eqx_decoders.io import run_lock
from eqx_decoders.io.exit_codes import exit_code
from eqx_decoders.io.run_lock import RunLock, check_run_dir
from tests.errors import refused


# Loads the package without its __init__, so that the other process does not import JAX.
PACKAGE = """
import sys, types
package = types.ModuleType("eqx_decoders"); package.__path__ = [sys.argv[1]]; sys.modules["eqx_decoders"] = package
"""
HOLDER = f"""{PACKAGE}
from eqx_decoders.io.run_lock import RunLock
with RunLock(sys.argv[2]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    package = Path(run_lock.__file__).parents[1]
    command = [sys.executable, "-c", HOLDER, str(package), str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path, holder):
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/run.*\b{holder.pid}\b.*20\d\d-") as caught:
        RunLock(tmp_path / "run").acquire()
    assert exit_code(caught.value) == 4
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert str(holder.pid) in (tmp_path / "run/.lock").read_text(), "the dead process left its lock file"
    with RunLock(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run/.lock").read_text()


def test_lock_holds_within_one_process_and_is_released(tmp_path):
    with RunLock(tmp_path):
        with refused(CheckpointError, tmp_path, os.getpid()):
            RunLock(tmp_path).acquire()
        (tmp_path / ".lock").write_text("")
        with refused(CheckpointError, tmp_path):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with refused(CheckpointError, tmp_path / "file" / "run"):
        RunLock(tmp_path / "file" / "run").acquire()


def test_undo_deletes_only_what_the_run_wrote(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("x")
    for run in (tmp_path / "new" / "run", tmp_path / "there"):
        with RunLock(run) as lock:
            (run / "data" / "part").mkdir(parents=True)
            (run / "settings.json").write_text("{}")
            if run.name == "there":
                (run / "of another program").write_text("x")
            lock.undo()
            with RunLock(run):  # the other process does not use the deleted file
                assert (run / ".lock").exists()
        assert {path.name for path in run.iterdir()} - {"mine", "of another program"} == {".lock"}
    with RunLock(tmp_path / "there") as lock:
        lock.undo()
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"mine", "of another program", ".lock"}


def test_undo_keeps_files_of_others_in_a_new_directory(tmp_path):
    with RunLock(tmp_path / "run") as lock:
        (tmp_path / "run" / "notes.txt").write_text("mine")
        (tmp_path / "run" / "settings.json").write_text("{}")
        lock.undo()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


OWN_SETTINGS = '{"run_dir": "a", "model": "tiny", "steps": 3}'


def test_a_run_directory_is_recognized_by_the_content_of_its_files(tmp_path):
    """Other programs may use the same names. Names that no run writes are ignored."""
    (tmp_path / "train.log").write_text("")
    (tmp_path / ".lock").write_text("")  # of a process that is about to write the file
    check_run_dir(tmp_path)
    check_run_dir(tmp_path / "new")
    (tmp_path / "loss.png").write_text("mine")
    (tmp_path / "source").symlink_to("nowhere")
    for name, foreign, own in (
        ("settings.json", '{"editor": {"steps": 3}}', OWN_SETTINGS),
        (".lock", "mine", None),
        ("owner.json", "[" * 100_000, None),
    ):
        (tmp_path / name).write_text(foreign)
        with refused(ConfigError, f"run_dir='{tmp_path}'", name, "loss.png", "source") as caught:
            check_run_dir(tmp_path)
        assert "train.log" not in str(caught.value)
        if own is not None:
            (tmp_path / name).write_text(own)
            check_run_dir(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("mark", [".lock", "owner.json"])
def test_lock_file_alone_does_not_make_a_run_directory(tmp_path, mark):
    """`rm -r runs/x/*` leaves the hidden lock of a run."""
    (tmp_path / mark).write_text('{"id": "a", "pid": 1, "host": "a", "since": "then"}')
    check_run_dir(tmp_path)
    (tmp_path / "model.json").write_text("mine")
    with refused(ConfigError, f"run_dir='{tmp_path}'", "model.json"):
        check_run_dir(tmp_path)


def test_a_lock_file_of_another_program_is_not_overwritten(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with refused(CheckpointError, tmp_path / ".lock"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / ".lock").read_text() == "mine"
