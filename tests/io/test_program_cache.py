"""The compilation cache has a limited size, is read by later processes, and never makes a process fail."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import eqx_decoders as ed
from eqx_decoders.io.program_cache import delete_oldest, keep_programs, processor
from eqx_decoders.training import Batch, OptimizerConfig, Trainer
from tests.commands import ENVIRONMENT, ROOT
from tests.compare import assert_array_equal
from tests.errors import assert_names


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a new cache directory, in a process that has no compiled programs."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("EQX_DECODERS_CACHE", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def test_least_recently_used_programs_are_deleted(tmp_path):
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    (tmp_path / "autotuning").mkdir()  # XLA creates such a directory
    os.utime(tmp_path / "a", (2000, 1000))  # access time and modification time: written first, but read last
    for limits, left in (({}, "abcd"), (dict(max_bytes=30), "acd"), (dict(max_files=2), "ad"), (dict(max_bytes=9), "")):
        delete_oldest(tmp_path, **limits)
        assert {file.name for file in tmp_path.iterdir()} == {"autotuning", *left}
    delete_oldest(tmp_path / "absent")


@pytest.mark.slow
def test_a_damaged_program_is_compiled_again(cache):
    """A process that is killed while it writes leaves an incomplete file: JAX warns, and compiles the program."""
    folder = keep_programs(say=lambda text: None)
    assert folder is not None

    def results():
        jax.clear_caches()
        reset_cache()
        return np.asarray(jax.jit(lambda x: jnp.sin(x) * 3 + 1)(jnp.arange(5.0)))

    want = results()
    programs = [file for file in folder.iterdir() if file.is_file()]
    assert programs
    for file in programs:
        file.write_bytes(file.read_bytes()[:20])
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        assert_array_equal(results(), want)


@pytest.mark.slow
def test_steps_of_a_cached_program_are_bit_equal(cache):
    folder = keep_programs()
    assert folder is not None and folder.parent == cache and folder.stat().st_mode & 0o777 == 0o700
    assert keep_programs(say=pytest.fail) is None, "JAX has a directory by now"
    model = ed.init(ed.get_config("gpt3-52k"), key=jax.random.key(0))
    trainer = Trainer.create(OptimizerConfig(), model, steps=9)
    batch = Batch(tokens=jnp.arange(32).reshape(2, 16))

    def results():
        state = trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(1))
        size = trainer.compile(state, batch)
        for _ in range(3):
            state, metrics = trainer.step(state, batch)
        return size, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.model, state.optimizer, metrics))]

    jax.clear_caches()  # a program that another test has compiled would not be written again without clearing it here
    compiled = results()
    kept = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert sum(name.startswith("jit__step-") for name in kept) == 1
    jax.clear_caches()
    assert results() == compiled
    used = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert used == kept, "nothing was compiled"


@pytest.mark.parametrize("why", ["others", "read-only", "a file", "elsewhere"])
def test_programs_run_without_a_cache_directory(cache, monkeypatch, why):
    folder, messages = cache / f"programs-{processor()}", []
    if why == "others":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    elif why == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    elif why == "a file":
        cache.write_text("")
    else:
        monkeypatch.setenv("EQX_DECODERS_CACHE", "gs://bucket")
    assert keep_programs(say=messages.append) is None
    (message,) = messages
    assert_names(message, "gs://bucket" if why == "elsewhere" else cache)
    assert jax.config.jax_compilation_cache_dir is None


def test_several_processes_on_gpus_have_no_cache(cache, monkeypatch):
    messages = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert keep_programs(say=messages.append) is None and not cache.exists()
    assert_names(messages[0], "JAX_COMPILATION_CACHE_DIR")


def test_settings_of_jax_take_precedence(cache, monkeypatch):
    for name, value in (
        ("jax_compilation_cache_dir", str(cache / "own")),
        ("jax_enable_compilation_cache", False),
        ("jax_compilation_cache_max_size", 0),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        assert keep_programs(say=pytest.fail) is None and not cache.exists()
        jax.config.update(name, before)


def test_each_kind_of_machine_has_a_separate_directory(monkeypatch):
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
def test_a_resumed_run_has_the_same_losses_with_cached_programs(tmp_path):
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
    kept = str(tmp_path / "cache" / "programs-")
    assert kept in logs["read"] and kept not in logs["without"]
