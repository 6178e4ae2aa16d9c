"""Claims: one holder at a time, and those of the dead are taken over, whoever asks first."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from eqx_decoders.data.sources import leases
from eqx_decoders.data.sources.leases import Leases
from tests.commands import ROOT


def test_a_claim_has_one_holder(tmp_path):
    with Leases(tmp_path) as one, Leases(tmp_path) as other:
        assert one.take("a") and not other.take("a") and not one.take("a") and other.take("b")
        one.release("a")
        assert other.take("a") and not one.take("a")
        one.release("a")  # not its own: nothing happens
        assert not one.take("a")
    assert {file.name for file in tmp_path.iterdir()} <= {"claims.lock"}


def test_what_is_unfinished_goes_with_the_claim(tmp_path):
    with Leases(tmp_path) as one:
        one.take("a")
        one.partial("a").write_bytes(b"half")
        leases.copy_path(one.partial("a")).write_bytes(b"a copy")
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import os, pathlib, sys
from eqx_decoders.data.sources.leases import Leases, copy_path
claims = Leases(pathlib.Path(sys.argv[1])).__enter__()
assert claims.take("a")
claims.partial("a").write_bytes(b"half")
copy_path(claims.partial("a")).write_bytes(b"a copy")
print("taken", flush=True)
sys.stdin.read()
"""


def test_the_claim_of_a_killed_process_is_taken_at_once(tmp_path):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], **pipes) as process, Leases(tmp_path) as own:
        assert process.stdout.readline() == b"taken\n"
        assert not own.take("a") and len(list(tmp_path.glob("a.*"))) == 3
        process.kill()
        process.wait()
        assert own.take("a") and [file.suffix for file in tmp_path.glob("a.*")] == [".claim"]
        own.release("a")


@pytest.mark.parametrize("who", [{"machine": "another", "pid": 1, "word": "x"}, {}])
def test_a_claim_of_another_machine_ends_with_its_lease(tmp_path, who):
    (tmp_path / "a.claim").write_text(json.dumps(who) if who else "")
    (tmp_path / "a.x.partial").write_bytes(b"half")
    with Leases(tmp_path) as own:
        assert not own.take("a")
        own.sweep()
        os.utime(tmp_path / "a.claim", (time.time() - leases.LEASE - 5,) * 2)
        own.sweep()
        assert not (tmp_path / "a.claim").exists() and (tmp_path / "a.x.partial").exists() == (not who)
        assert own.take("a")


def test_held_claims_are_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "RENEWED", 0.02)
    with Leases(tmp_path) as own:
        own.take("a")
        os.utime(tmp_path / "a.claim", (1, 1))
        end = time.monotonic() + 10
        while (tmp_path / "a.claim").stat().st_mtime < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert (tmp_path / "a.claim").stat().st_mtime > 2


def test_of_many_that_see_a_dead_claim_one_gets_it(tmp_path):
    for name in map(str, range(20)):
        (tmp_path / f"{name}.claim").write_text("{}")
        os.utime(tmp_path / f"{name}.claim", (1, 1))
    taken, barrier = [], threading.Barrier(6)

    def work():
        with Leases(tmp_path) as own:
            barrier.wait()
            taken.extend(name for name in map(str, range(20)) if own.take(name))
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken, key=int) == list(map(str, range(20)))


def test_who_finds_a_dead_claim_looks_again_before_taking_it(tmp_path):
    path = tmp_path / "a.claim"
    path.write_text("{}")
    os.utime(path, (1, 1))
    with Leases(tmp_path) as one, Leases(tmp_path) as other:
        assert one._is_dead(path) and other._is_dead(path)
        assert one._take_over(path) and not other._take_over(path)


def test_a_number_that_another_process_got_is_no_sign_of_life(tmp_path):
    own = leases._own_process()
    if own["started"] is None:
        pytest.skip("this system does not tell when a process began")
    (tmp_path / "a.claim").write_text(json.dumps(own | {"word": "x", "started": "earlier"}))
    (tmp_path / "b.claim").write_text(json.dumps(own | {"word": "x"}))
    with Leases(tmp_path) as new:
        assert new.take("a") and not new.take("b")


def test_a_holder_that_lives_here_keeps_its_claim_however_long_it_sleeps(tmp_path):
    own = leases._own_process()
    if own["started"] is None:
        pytest.skip("this system does not tell when a process began")
    for name, who in (("a", own | {"word": "x"}), ("b", own | {"word": "x", "started": None})):
        (tmp_path / f"{name}.claim").write_text(json.dumps(who))
        os.utime(tmp_path / f"{name}.claim", (1, 1))
    with Leases(tmp_path) as new:
        assert not new.take("a") and new.take("b"), "of b it cannot be told"
