"""Compiled programs in a folder: whole, few, used again, and never the reason for which a program ends."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax._src.compilation_cache as jax_cache
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import eqx_decoders as ed
from eqx_decoders.io import program_cache
from eqx_decoders.io.program_cache import ProgramCache, keep_programs, processor
from eqx_decoders.training import Batch, OptimizerConfig, Trainer
from tests.commands import ENVIRONMENT, ROOT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory for a process that keeps no programs yet."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(jax_cache, "get_file_cache", jax_cache.get_file_cache)
    monkeypatch.setenv("EQX_DECODERS_CACHE", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def test_a_program_is_whole_or_compiled_anew(tmp_path):
    """Of a file that was cut, or of which a bit flipped, nothing is read; the next program replaces it."""
    cache = ProgramCache(tmp_path, pytest.fail)
    assert cache.get("a") is None
    cache.put("a", b"program")
    (file,) = tmp_path.iterdir()
    assert cache.get("a") == b"program" == ProgramCache(tmp_path, pytest.fail).get("a")
    content = file.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    for damaged in (content[:-1], content[:3], b"", flipped):
        file.write_bytes(damaged)
        assert cache.get("a") is None
        cache.put("a", b"program")
        assert cache.get("a") == b"program"


def test_what_was_not_used_for_longest_makes_room(tmp_path, monkeypatch):
    cache = ProgramCache(tmp_path, pytest.fail, most_bytes=100)
    for age, key in enumerate("abc"):
        cache.put(key, bytes(10))  # 26 bytes in the file
        os.utime(tmp_path / key, (1000 + age, 1000 + age))
    assert cache.get("a") is not None  # the oldest, and now the newest
    cache.put("d", bytes(10))
    assert {file.name for file in tmp_path.iterdir()} == {"a", "c", "d"}
    cache.put("large", bytes(101))
    assert {file.name for file in tmp_path.iterdir()} == {"a", "c", "d"}
    monkeypatch.setattr(program_cache, "MOST_FILES", 1)
    ProgramCache(tmp_path, pytest.fail, most_bytes=100)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_told_once(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    said = []
    cache = ProgramCache(tmp_path, said.append)
    monkeypatch.setattr(program_cache, "write_atomically", full)
    cache.put("a", b"program")
    cache.put("b", b"program")
    assert said == [f"programs cannot be kept in {tmp_path}, the run goes on: No space left on device"]
    assert cache.get("a") is None


@pytest.mark.slow
def test_steps_of_a_program_that_was_read_are_the_same_bit_for_bit(cache):
    """The training step compiled, and the one that a later process reads, with their states."""
    folder, said = keep_programs(), []
    assert folder is not None and folder.parent == cache and folder.stat().st_mode & 0o777 == 0o700
    assert keep_programs(say=said.append) is None and not said, "JAX has a directory by now"
    model = ed.init(ed.get_config("gpt3-52k"), key=jax.random.key(0))
    trainer = Trainer.create(OptimizerConfig(), model, steps=9)
    batch = Batch(tokens=jnp.arange(32).reshape(2, 16))

    def results():
        state = trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(1))
        size = trainer.compile(state, batch)
        for _ in range(3):
            state, metrics = trainer.step(state, batch)
        return size, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.model, state.optimizer, metrics))]

    jax.clear_caches()  # what another test compiled would be written after the clearing below alone
    compiled = results()
    kept = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    (step,) = (name for name in kept if name.startswith("jit__step-"))
    jax.clear_caches()
    assert results() == compiled
    used = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert used.keys() == kept.keys() and used[step] > kept[step], "it was read, and nothing was compiled"


@pytest.mark.parametrize("why", ["others", "read-only", "a file", "elsewhere"])
def test_programs_run_without_a_folder_for_them(cache, monkeypatch, why):
    folder, said = cache / f"programs-{processor()}", []
    if why == "others":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    elif why == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    elif why == "a file":
        cache.write_text("")
    else:
        monkeypatch.setenv("EQX_DECODERS_CACHE", "gs://bucket")
    assert keep_programs(say=said.append) is None
    assert len(said) == 1 and said[0].startswith("compiled programs are not kept: "), said
    assert jax.config.jax_compilation_cache_dir is None


def test_a_program_that_others_may_have_written_is_not_read(tmp_path):
    kept = ProgramCache(tmp_path, pytest.fail)
    kept.put("step", b"code")
    assert kept.get("step") == b"code"
    (tmp_path / "step").chmod(0o666)
    assert kept.get("step") is None


def test_a_file_that_another_process_writes_stays(tmp_path):
    (tmp_path / "step.partial").write_bytes(bytes(100))
    kept = ProgramCache(tmp_path, pytest.fail, most_bytes=50)
    kept.put("step", b"code")
    assert {file.name for file in tmp_path.iterdir()} == {"step", "step.partial"}
    os.utime(tmp_path / "step.partial", (0, 0))  # of a process that was killed
    ProgramCache(tmp_path, pytest.fail, most_bytes=50)
    assert {file.name for file in tmp_path.iterdir()} == {"step"}


def test_several_processes_on_gpus_keep_none(cache, monkeypatch):
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert keep_programs(say=said.append) is None and "JAX_COMPILATION_CACHE_DIR" in said[0] and not cache.exists()


def test_the_variables_of_jax_come_first(cache, monkeypatch):
    for name, value in (
        ("jax_compilation_cache_dir", str(cache / "own")),
        ("jax_enable_compilation_cache", False),
        ("jax_compilation_cache_max_size", 0),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        assert keep_programs(say=pytest.fail) is None and not cache.exists()
        jax.config.update(name, before)


def test_each_kind_of_machine_has_a_folder_of_its_own(monkeypatch):
    names = {processor()}
    monkeypatch.setenv("NPROC", "77")
    names.add(processor())
    monkeypatch.setattr(Path, "read_text", lambda self: "processor : 0\nflags : sse2 avx\n")
    names.add(processor())
    monkeypatch.setattr(Path, "read_text", lambda self: "processor : 0\nFeatures : asimd\n")
    names.add(processor())
    monkeypatch.delenv("NPROC")
    names.add(processor())
    assert len(names) == 5 and processor() in names


@pytest.mark.slow
def test_a_run_with_kept_programs_has_the_losses_of_one_without(tmp_path):
    """Compiled and read, each by a run of its own that is stopped and resumed; the log says where they are."""
    from tests.commands import steps_of, write_corpus

    corpus = write_corpus(tmp_path / "texts")
    plain = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    plain["EQX_DECODERS_CACHE"] = str(tmp_path / "cache")
    losses, logs = {}, {}
    for name, enabled in (("without", "0"), ("compiled", "1"), ("read", "1")):
        for steps in ("2", "4"):
            command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--run-dir", str(tmp_path / name)]
            command += ["--model", "gpt3-52k", "--data", str(corpus), "--tokenizer", "bytes", "--sample-tokens", "0"]
            command += ["--batch-size", "4", "--seq-len", "32", "--steps", steps, "--optimizer.schedule", "constant"]
            environment = plain | {"JAX_ENABLE_COMPILATION_CACHE": enabled}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            logs[name] = done.stderr
        losses[name] = [(row["step"], row["loss"], row["grad_norm"]) for row in steps_of(tmp_path / name)]
    assert losses["without"] == losses["compiled"] == losses["read"] and len(losses["read"]) == 4
    assert "compiled programs are kept in" in logs["read"] and "compiled programs" not in logs["without"]
