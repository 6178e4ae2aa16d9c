"""Test RL runs with rewards: on-policy sampling, resuming after a kill, references and meshes."""

import json
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.sources.data_files import zstd_module
from eqx_decoders.model.weights_fingerprint import weights_fingerprint
from eqx_decoders.rl.completions import CompletionFiles
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.run.load_export import load_run
from tests.commands import ROOT, call, steps_of
from tests.compare import assert_allclose
from tests.errors import assert_names


BASE = ROOT / "tests" / "fixtures" / "chat_llama"
REWARDS = """
import os
def length(prompt, completion):
    assert not os.path.exists(__file__ + ".closed"), "rewards are not to be computed again"
    return {"short": 1.0 / (1 + len(completion.strip())), "number": prompt["number"]}
def hangs(prompt, completion):
    import time
    if prompt["number"] % 2:
        time.sleep(60)
    return len(completion)
def same(prompt, completion):
    return 1.0 if prompt["number"] % 2 else len(completion)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("rl"))


def write_task(folder):
    """Write prompts and their reward functions."""
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"the cat {number}", "number": number} for number in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def arguments_of(folder, name, *more, reward="length", **changes):
    """Return the command-line arguments of a short run."""
    wanted = {
        "run-dir": folder / name,
        "method": "rl",
        "init-from": BASE,
        "data": folder / "prompts.jsonl",
        "rl.reward": f"{folder / 'rewards.py'}:{reward}" if reward else None,
        "rl.prompts": 3,
        "rl.samples": 4,
        "rl.max-new-tokens": 6,
        "rl.slots": 4,
        "steps": 4,
        "batch-size": 4,
        "seq-len": 96,
        "sample-tokens": 0,
        "eval-every": 0,
        "checkpoint-every": 2,
        "optimizer.learning-rate": "1e-2",
        "optimizer.warmup-steps": 0,
    }
    changes = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    pairs = {key: value for key, value in (wanted | changes).items() if value is not None}
    return [*(str(word) for key, value in pairs.items() for word in (f"--{key}", value)), *map(str, more)]


def train(folder, name, *more, code=0, devices=1, **changes):
    return call("train", *arguments_of(folder, name, *more, **changes), code=code, devices=devices)


def completions_of(folder, name, step):
    files = CompletionFiles(folder / name / "rollouts")
    (key,) = {json.loads(line)["key"] for line in _lines(files.path(step))[:1]}
    found = files.read(step, key)
    assert found is not None
    return found


def _lines(path):
    return zstd_module().decompress(path.read_bytes()).splitlines()


NAMES = ("loss", "nll", "grad_norm", "reward", "entropy", "log_prob_gap")


def metrics_of(folder, name):
    return [[row[each] for each in NAMES] for row in steps_of(folder / name)]


@pytest.fixture(scope="module")
def whole(folder):
    _, err = train(folder, "whole", held_out=folder / "prompts.jsonl", rl__eval_samples=2)
    assert (folder / "whole" / "rewards.png").stat().st_size > 10_000
    assert_names(err, "10 prompts")
    assert re.search(r"step 0\b.*reward_greedy", err) and re.search(r"step 4\b.*reward_greedy", err)
    return folder


@pytest.mark.slow
def test_completions_are_on_policy(whole):
    rows = steps_of(whole / "whole")
    assert len(rows) == 4
    for row in rows:
        assert row["ratio"] == 1.0 and row["log_prob_gap"] <= 1e-5 and abs(row["importance"] - 1) < 1e-4
        assert row["reward"] > 0 and row["reward/number"] >= 0 and row["reward_failures"] == 0
        assert row["zero_variance_groups"] < 1 and row["grad_norm"] > 0 and row["completion_tokens_max"] <= 6
    steps = [completions_of(whole, "whole", step).completions for step in range(1, 5)]
    prompts = [[each.prompt.number for each in completions[::4]] for completions in steps]
    assert prompts == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    versions = [{int(version) for each in completions for version in each.rollout.versions} for completions in steps]
    assert all(len(each) == 1 for each in versions) and versions == sorted(versions, key=min)
    assert len(set.union(*versions)) == 4


@pytest.mark.slow
def test_killed_run_reuses_its_completions(whole):
    """The resumed run has the same weights at step 3 and computes no reward twice."""
    shutil.copytree(whole / "whole", whole / "killed")
    (newest,) = (each for each in (whole / "killed" / "checkpoints").iterdir() if each.name.endswith("4"))
    shutil.rmtree(newest)
    closed = whole / "rewards.py.closed"
    closed.write_text("")
    train(whole, "killed", held_out=whole / "prompts.jsonl", rl__eval_samples=2)
    closed.unlink()
    assert metrics_of(whole, "killed") == metrics_of(whole, "whole")
    one, other = (named_leaves(load_run(whole / name)) for name in ("killed", "whole"))
    assert all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_killed_run_without_files_samples_equal_completions(whole):
    train(whole, "two", steps=2, optimizer__schedule="constant", held_out=whole / "prompts.jsonl")
    shutil.rmtree(whole / "two" / "rollouts")
    train(whole, "two", steps=3, optimizer__schedule="constant", held_out=whole / "prompts.jsonl")
    train(whole, "three", steps=3, optimizer__schedule="constant")  # evaluations do not change training
    assert metrics_of(whole, "two") == metrics_of(whole, "three")


@pytest.mark.slow
def test_run_with_a_mesh_microbatches_and_a_reference(folder):
    more: dict[str, Any] = dict(rl__kl=0.1, steps=3)
    train(folder, "one", **more)
    train(folder, "mesh", "--mesh.fsdp", 2, devices=4, **more)
    train(folder, "parts", "--step.gradient-accumulation-steps", 2, **more)
    for name in ("mesh", "parts"):
        assert_allclose(metrics_of(folder, name), metrics_of(folder, "one"), atol=1e-4)
    rows = steps_of(folder / "one")
    assert abs(rows[0]["k1"]) < 1e-6 and rows[-1]["k3"] > 0  # computed by two different programs
    train(folder, "pairs", lora__rank=2, rl__kl_in="reward", **more)
    assert abs(steps_of(folder / "pairs")[0]["k1"]) < 1e-6


@pytest.mark.slow
def test_reward_timeouts_and_groups_with_equal_rewards(folder):
    _, err = train(folder, "hangs", reward="hangs", steps=1, rl__reward_seconds=0.3)
    (row,) = steps_of(folder / "hangs")
    assert 0 < row["reward_failures"] < 1
    assert_names(err, "step 1", "0.3 s")
    train(folder, "same", "--rl.dynamic-sampling", reward="same", steps=2)
    for step in (1, 2):
        found = completions_of(folder, "same", step)
        assert {each.prompt.record["number"] % 2 for each in found.completions} == {0}
        assert found.num_prompts == 3 + found.filtered_groups and len(found.completions) == 12
    assert steps_of(folder / "same")[0]["zero_variance_groups"] == 0
    shutil.rmtree(folder / "same" / "checkpoints")
    train(folder, "same", "--rl.dynamic-sampling", reward="same", steps=2)  # the cursor continues after all prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--rl.preset rloo --rl.temperature 0.8 --rl.kl 0.1 --rl.kl-in reward --rl.reference start --rl.eval-samples 2",
        "--rl.aggregation prompt --rl.baseline leave_one_out --rl.scale batch --rl.entropy 0.01 --rl.whiten",
        "--rl.truncated mask --rl.completions-per-row 2 --rl.dynamic-sampling --rl.max-sampling-rounds 2",
        "--rl.policy.kind gspo --rl.policy.correction.kind tis --rl.overlong-buffer 2 --rl.reward-weights short=2",
        "--lora.rank 2 --rl.kl 0.1 --rl.kl-in reward --rl.reference base --rl.reward-workers 1",
    ],
)
def test_settings_take_effect(whole, flags):
    train(whole, "plain", steps=2) if not (whole / "plain").exists() else None
    name = "".join(re.findall(r"\w+", flags))
    train(whole, name, *flags.split(), steps=2, batch_size=8)
    rows = steps_of(whole / name)
    assert all(np.isfinite(row["loss"]) and row["log_prob_gap"] <= 1e-5 for row in rows)
    assert [row["loss"] for row in rows] != [row["loss"] for row in steps_of(whole / "plain")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({"rl__reward": "none.py:f"}, ["--rl.reward='", "none.py:f'"], id="reward"),
        pytest.param(
            {"rl__prompts": 100}, ["--rl.prompts=100", "--rl.samples=4", "--batch-size=67", "4"], id="prompts"
        ),
        pytest.param({"rl__max_new_tokens": 96}, ["--rl.max-new-tokens=96"], id="max-new-tokens"),
        pytest.param({"rl__max_staleness": 1}, ["--rl.max-staleness=1", "--sampler.devices"], id="max-staleness"),
        pytest.param({"rl__critic__lam": 0.5}, ["--rl.critic.lam=0.5", "--rl.baseline='mean'"], id="critic"),
        pytest.param({"method": "sft"}, ["--rl.reward=", "--method='sft'"], id="method"),
    ],
)
def test_invalid_settings_are_refused(folder, changes, names):
    _, err = train(folder, "refused", code=2, **changes)
    assert_names(err, *names)


@pytest.mark.slow
def test_routing_replay_without_experts_is_refused(folder):
    _, err = train(folder, "refused", "--rl.routing-replay", code=2)
    assert_names(err, "--rl.routing-replay=True")


@pytest.mark.slow
def test_fingerprint_depends_on_every_bit():
    model = ed.load_hf(BASE)
    first = int(weights_fingerprint(model))
    assert first == int(weights_fingerprint(jax.tree.map(lambda leaf: leaf + 0, model)))
    leaves = named_leaves(model)
    name, leaf = next((name, leaf) for name, leaf in leaves.items() if leaf.ndim >= 2 and leaf.shape[0] > 1)
    for changed in (leaf.at[(-1,) * leaf.ndim].multiply(1 + 2**-22), leaf[::-1]):
        assert int(weights_fingerprint(replaced(model, {name: changed}))) != first
    split = model.place(ed.Layout.create(fsdp=2, devices=jax.devices()[:2]))
    assert int(weights_fingerprint(split)) == first


@pytest.mark.slow
def test_on_policy_distillation_from_a_teacher(folder):
    """The divergence of an equal teacher is 0; that of another teacher decreases, with and without rewards."""
    more: dict[str, Any] = dict(steps=2)
    train(folder, "same-teacher", "--rl.teacher", BASE, "--rl.teacher-weight", 2, reward="same", **more)
    first = steps_of(folder / "same-teacher")[0]
    plain = folder / "no-teacher"
    train(folder, "no-teacher", reward="same", **more)
    assert first["loss"] == pytest.approx(steps_of(plain)[0]["loss"], abs=1e-5)
    flags = f"--method distill --distill.on-policy --distill.divergence reverse --distill.teacher {BASE} --rl.prompts 3"
    flags += " --rl.samples 4 --rl.max-new-tokens 6 --rl.slots 4 --steps 2 --batch-size 4 --seq-len 96 --eval-every 0"
    words = ["--run-dir", folder / "on-policy", "--init-from", BASE, "--data", folder / "prompts.jsonl"]
    words += ["--held-out", folder / "prompts.jsonl", "--sample-tokens", 0]
    _, err = call("train", *map(str, words), *flags.split())
    assert re.search(r"step 0\b.*loss", err) and abs(steps_of(folder / "on-policy")[0]["divergence"]) < 1e-5
    words[1] = folder / "off-policy"
    _, err = call("train", *map(str, words), *flags.replace("--distill.on-policy ", "").split(), code=2)
    assert_names(err, "--distill.on-policy")
