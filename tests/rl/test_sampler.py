"""Test samplers with a different layout or different devices than the trainer: completions and resuming."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.sources.data_files import zstd_module
from eqx_decoders.errors import ConfigError
from eqx_decoders.inference import unstack
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.model.init import add_score_head
from eqx_decoders.rl.completions import CompletionFiles
from eqx_decoders.rl.rollouts import SamplerEngine
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.training.run.load_export import load_run
from eqx_decoders.training.settings.distill import DistillConfig
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.sampler import SamplerConfig, split_devices
from tests.commands import ENVIRONMENT, ROOT, call, steps_of
from tests.compare import assert_allclose
from tests.errors import assert_names, refused
from tests.programs import compilations
from tests.rl.test_run import BASE, arguments_of, completions_of, folder, train  # noqa: F401


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a checkpoint with heads that can be sharded."""
    config, _ = read_config(BASE)
    model = ed.init(with_fields(config, ["num_kv_heads=2", "num_layers=2"]), key=jax.random.key(1))
    ed.save_hf(model, tmp_path_factory.mktemp("base") / "model", family="llama", tokenizer=BASE)
    return tmp_path_factory.getbasetemp() / "base0" / "model"


class Recorder:
    """Fake engine that stores the loaded model."""

    def __init__(self, model, config):
        self.model, self.version = model, 0

    def warm_up(self): ...

    def load(self, model, *, version):
        self.model, self.version = model, version

    def release(self):
        self.model = None


@pytest.mark.slow
def test_loading_places_the_weights_with_one_plan(base, monkeypatch):
    """All loads use a single plan without compiling again, and there are never two copies of the weights."""
    devices = jax.devices()[:4]
    base = ed.load_hf(base, layout=ed.Layout.create(fsdp=4, devices=devices))
    layout = SamplerConfig(tensor=2).layout(devices, base)
    engine = SamplerEngine(Recorder, EngineConfig(), layout)
    engine.load(base, version=3)
    held = engine._engine
    assert isinstance(held, Recorder) and held.version == 3 and held.model is not None
    first, words = named_leaves(held.model), axes(held.model)
    assert all(leaf.sharding == layout.weight_sharding(words[name], leaf.shape) for name, leaf in first.items())
    assert all(np.array_equal(leaf, named_leaves(base)[name]) for name, leaf in first.items())
    name = next(name for name, leaf in first.items() if leaf.sharding.spec != named_leaves(base)[name].sharding.spec)
    old, alive = weakref.ref(first.pop(name)), []
    first.clear()
    other = jax.tree.map(lambda leaf: leaf + 1 if isinstance(leaf, jax.Array) else leaf, base)
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: alive.append(old() is not None) or put(*args))
    with compilations() as compiled:
        engine.load(other, version=4)
    assert alive == [False] and not compiled and held.version == 4
    assert np.array_equal(named_leaves(held.model)[name], named_leaves(other)[name])
    assert held.model.execution.layout == layout


@pytest.mark.slow
def test_copies_in_the_compute_dtype_are_unstacked_on_gpus(base, monkeypatch):
    """Trainer weights are kept, stacked copies are deleted, and a second load compiles nothing."""
    monkeypatch.setattr(unstack, "MIN_BYTES", 0)
    monkeypatch.setattr(ed.Layout, "backend", backend_of("gpu"))
    layout = ed.Layout.create(devices=jax.devices()[:1])
    trained = ed.load_hf(base, layout=layout, precision=ed.Precision(compute="bfloat16"))
    engine = SamplerEngine(Recorder, EngineConfig(), compute_dtype=True)
    engine.load(trained, version=0)
    with compilations() as compiled:
        engine.load(trained, version=1)
    assert not compiled and [segment.repeats for segment in engine._engine.model.scanned_layers] == [1, 1]
    first, stacked = (model.scanned_layers[0].unit[0] for model in (engine._engine.model, trained))
    assert first.mixer.out.dtype == "bfloat16" and np.array_equal(
        first.mixer.out[0], stacked.mixer.out[0].astype("bfloat16")
    )
    assert first.pre_mlp_norm.scale.dtype == "float32" and not any(
        leaf.is_deleted() for leaf in jax.tree.leaves(trained) if isinstance(leaf, jax.Array)
    )
    plain = SamplerEngine(Recorder, EngineConfig())
    plain.load(trained, version=0)
    assert plain._engine.model is trained


@pytest.mark.slow
def test_completions_do_not_depend_on_the_sampler_layout(folder, base):  # noqa: F811
    """With FSDP training and tensor-parallel sampling, tokens are equal and log-probs equal up to rounding."""
    both: Any = dict(devices=4, batch_size=8, init_from=base)
    train(folder, "fsdp", "--mesh.fsdp", 4, steps=3, **both)
    more = ("--mesh.fsdp", 4, "--sampler.tensor", 2, "--sampler.data", 2)
    _, err = train(folder, "tensor", *more, steps=3, **both)
    assert_names(err, "4 devices", "data=2", "tensor=2")
    for step in (1, 2, 3):
        one, other = (completions_of(folder, name, step).completions for name in ("fsdp", "tensor"))
        for mine, theirs in zip(one, other, strict=True):
            assert np.array_equal(mine.rollout.tokens, theirs.rollout.tokens)
            assert_allclose(mine.rollout.log_probs, theirs.rollout.log_probs, atol=2e-5)
    rows = steps_of(folder / "tensor")
    assert all(row["log_prob_gap"] <= 1e-5 for row in rows)
    train(folder, "again", *more, "--optimizer.schedule", "constant", steps=2, **both)
    train(folder, "again", *more, "--optimizer.schedule", "constant", steps=3, **both)
    train(folder, "through", *more, "--optimizer.schedule", "constant", steps=3, **both)
    losses = [[row["loss"] for row in steps_of(folder / name)] for name in ("again", "through")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_copies_in_the_compute_dtype_sample_equal_tokens(folder):  # noqa: F811
    for name in ("compute-dtype", "no-compute-dtype"):
        train(folder, name, f"--sampler.{name}", "--dtype", "bfloat16", steps=3)
    rows = [
        [(row["loss"], row["reward"]) for row in steps_of(folder / name)]
        for name in ("compute-dtype", "no-compute-dtype")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3


DEVICES = "--xla_force_host_platform_device_count=4"
AHEAD = ("--sampler.devices", 2, "--sampler.tensor", 2, "--mesh.fsdp", 2, "--rl.max-staleness", 1)


def start_ahead(folder, name, base, **changes):  # noqa: F811
    """Start a run in a separate process: two devices train with FSDP, two sample one step ahead with tensor."""
    environment = ENVIRONMENT | {"XLA_FLAGS": f"{ENVIRONMENT.get('XLA_FLAGS', '')} {DEVICES}"}
    more: Any = dict(
        steps=9, checkpoint_every=3, rl__max_new_tokens=24, held_out=folder / "prompts.jsonl", eval_every=4
    )
    more |= dict(held_out=folder / "prompts.jsonl")
    command = [sys.executable, str(ROOT / "scripts" / "train.py")]
    words = arguments_of(folder, name, *AHEAD, init_from=base, **(more | changes))
    return subprocess.Popen([*command, *words], env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE)


def rows_of(path):
    return steps_of(path) if (path / "metrics.jsonl").exists() else []


NAMES = ("step", "loss", "reward", "log_prob_gap", "importance", "staleness", "staleness_max", "grad_norm")


def results_of(path):
    """Return the metrics, completions and weights of a run."""
    figures = {row["step"]: [row[name] for name in NAMES] for row in rows_of(path)}
    files = CompletionFiles(path / "rollouts")
    lines = [zstd_module().decompress(files.path(step).read_bytes()).splitlines() for step in sorted(figures)]
    completions = [[{**json.loads(line), "seconds": 0} for line in each] for each in lines]
    return figures, completions, {name: np.asarray(leaf) for name, leaf in named_leaves(load_run(path)).items()}


@pytest.mark.slow
def test_asynchronous_run_resumes_exactly_after_kills(folder, base):  # noqa: F811
    """After `kill -9` at random times and Ctrl-C, metrics, tokens, rewards and weights equal an uninterrupted run."""
    process = start_ahead(folder, "ahead", base)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    figures, completions, weights = results_of(folder / "ahead")
    assert [row[5] for row in figures.values()] == [row[6] for row in figures.values()] == [0.0, *[1.0] * 8]
    assert figures[1][3] <= 1e-5 < figures[2][3] and any(row[4] != 1.0 for row in figures.values())
    generator, path = random.Random(int(os.environ.get("FRESH_SEED", 0))), folder / "often"
    for number, last in ((signal.SIGKILL, 2), (signal.SIGKILL, 4), (signal.SIGINT, 5), (signal.SIGKILL, 8)):
        process = start_ahead(folder, "often", base)
        while process.poll() is None and (not rows_of(path) or rows_of(path)[-1]["step"] < last):
            time.sleep(0.01)
        time.sleep(generator.random() * 0.3)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        assert process.returncode in (0, -number, 128 + number), err[-2000:]
    process = start_ahead(folder, "often", base)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    again, their_answers, their_weights = results_of(path)
    assert again == figures and their_answers == completions
    assert all(np.array_equal(leaf, their_weights[name]) for name, leaf in weights.items())


@pytest.mark.slow
def test_separate_sampler_devices_are_on_policy_without_staleness(folder, base):  # noqa: F811
    """Tokens equal those of a run in which all devices train and sample. A failing reward function stops both runs."""
    both: Any = dict(devices=2, steps=2, init_from=base)
    train(folder, "do-both", "--mesh.fsdp", 2, **both)
    train(folder, "apart", "--mesh.fsdp", 2, "--sampler.devices", 6, "--sampler.tensor", 2, **both)
    for step in (1, 2):
        one, other = (completions_of(folder, name, step).completions for name in ("do-both", "apart"))
        assert [each.rollout.tokens.tolist() for each in one] == [each.rollout.tokens.tolist() for each in other]
    assert all(row["staleness_max"] == 0 and row["log_prob_gap"] <= 1e-5 for row in steps_of(folder / "apart"))


@pytest.mark.slow
def test_reward_model_is_placed_on_the_sampler_devices(folder, base):  # noqa: F811
    judge = folder / "judge"
    ed.save_hf(add_score_head(ed.load_hf(base), key=jax.random.key(1)), judge, tokenizer=BASE)
    more: Any = dict(steps=4, init_from=base, rl__reward_model=judge)
    train(folder, "judged", "--mesh.fsdp", 2, devices=2, **more)
    train(folder, "judged-ahead", "--mesh.fsdp", 2, "--sampler.devices", 4, "--rl.max-staleness", 1, **more)
    one, other = (steps_of(folder / name) for name in ("judged", "judged-ahead"))
    assert one[0]["reward/reward_model"] == pytest.approx(other[0]["reward/reward_model"], abs=1e-5)
    assert [row["staleness"] for row in other] == [0, 1, 1, 1]


def test_invalid_devices_are_refused(folder, monkeypatch):  # noqa: F811
    with refused(ConfigError, "kv_heads=1", "sampler.tensor=2"):
        SamplerConfig(tensor=2).layout(jax.devices()[:2], ed.load_hf(BASE))
    with refused(ConfigError, "sampler.tensor=3"):
        SamplerConfig(tensor=3).layout(jax.devices()[:4], None)
    with refused(ConfigError, "sampler.devices=-1"):
        SamplerConfig(devices=-1)
    _, err = train(folder, "refused", "--sampler.devices", 99, code=2)
    assert_names(err, "--sampler.devices=99", "8 devices")
    with monkeypatch.context() as patched:
        patched.setattr(jax, "process_count", lambda: 2)
        with refused(ConfigError, "sampler.devices=2"):
            split_devices(2)
    with refused(ConfigError, "sampler.fsdp=2", "method='sft'"):
        TrainConfig(sampler=SamplerConfig(fsdp=2))
    teacher = DistillConfig(teacher="b")
    with refused(ConfigError, "sampler.devices", "distill.on_policy"):
        TrainConfig(method="distill", init_from="a", distill=teacher, sampler=SamplerConfig(devices=2))


def test_sampler_placement_settings():
    devices, shown = jax.devices()[:4], set()
    for changes in ({}, {"data": 4}, {"fsdp": 4}, {"tensor": 4}, {"expert": 4}):
        layout = dataclasses.replace(SamplerConfig(), **changes).layout(devices, None)
        shown.add(tuple(name for name, size in layout.sizes.items() if size == 4))
    assert shown == {("data",), ("fsdp",), ("tensor",), ("expert",)}
    assert (
        not SamplerConfig().is_separate and SamplerConfig(data=1).is_separate and SamplerConfig(devices=1).is_separate
    )


@pytest.mark.slow
def test_on_policy_distillation_with_sampling_one_step_ahead(folder, base):  # noqa: F811
    """Resuming is exact."""
    plain: Any = {"method": "distill", "distill.divergence": "reverse", "distill.teacher": BASE, "rl.prompts": 3}
    plain |= {"rl.samples": 4, "rl.max-new-tokens": 6, "rl.slots": 4, "batch-size": 8, "seq-len": 96, "eval-every": 0}
    plain |= {"init-from": base, "data": folder / "prompts.jsonl", "sample-tokens": 0, "checkpoint-every": 1}
    plain |= {"optimizer.schedule": "constant", "cache-dir": folder / "cache"}
    plain |= {"max-checkpoints": 5, "steps": 4}
    ahead = ("--mesh.fsdp", 2, "--sampler.devices", 4, "--sampler.tensor", 2, "--rl.max-staleness", 1)
    words = ["--distill.on-policy", *ahead, *(word for key, value in plain.items() for word in (f"--{key}", value))]
    call("train", "--run-dir", folder / "student", *words)
    shutil.copytree(folder / "student", folder / "killed-student")
    for step in (3, 4):
        shutil.rmtree(folder / "killed-student" / "checkpoints" / str(step))
        (folder / "killed-student" / "rollouts" / f"step-{step + 1:06d}.jsonl.zst").unlink(missing_ok=True)
    call("train", "--run-dir", folder / "killed-student", *words)
    rows = [steps_of(folder / name) for name in ("student", "killed-student")]
    one, other = ([(row["loss"], row["grad_norm"], row["staleness"]) for row in each] for each in rows)
    assert one == other and [staleness for _, _, staleness in one] == [0, 1, 1, 1]
    assert all(np.isfinite(row["loss"]) and row["divergence"] == row["loss"] for row in rows[0])
