"""Test preference runs: pairs and labels, references, exact resuming, and meshes."""

import json
import math

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.methods.preference import FALLING_STEPS, PreferenceRun
from eqx_decoders.training.run.load_export import load_run
from eqx_decoders.training.run.log import read_metrics
from tests.commands import ROOT, call, steps_of
from tests.compare import assert_allclose
from tests.errors import assert_names


BASE = ROOT / "tests" / "fixtures" / "chat_llama"
TEXT = "the cat sat on the mat a dog ran in the park many birds sing at noon"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, draws = tmp_path_factory.mktemp("preferences"), np.random.default_rng(0)
    text = lambda count: " ".join(draws.choice(TEXT.split(), count))  # noqa: E731
    pairs, labels = [], []
    for number in range(24):
        prompt = [{"role": "user", "content": text(3)}]
        pairs.append({"prompt": prompt, "chosen": text(4), "rejected": text(2 + number % 3)})
        labels.append({"prompt": text(3), "completion": text(4), "label": bool(number % 3)})
    for name, rows in {"pairs": pairs, "labels": labels}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def train(folder, name, *more, code=0, devices=1, **changes):
    wanted = {
        "run-dir": folder / name,
        "method": "dpo",
        "init-from": BASE,
        "data": folder / "pairs.jsonl",
        "steps": 4,
        "batch-size": 4,
        "seq-len": 96,
        "sample-tokens": 0,
        "eval-every": 0,
        "optimizer.learning-rate": "1e-2",
        "optimizer.warmup-steps": 0,
    }
    changes = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words = [str(word) for key, value in (wanted | changes).items() for word in (f"--{key}", value)]
    return call("train", *words, *more, code=code, devices=devices)


NAMES = ("loss", "nll", "grad_norm", "reward_margin", "chosen_reward")


def metrics_of(folder, name):
    return [[row[each] for each in NAMES if each in row] for row in steps_of(folder / name)]


@pytest.fixture(scope="module")
def adapted(folder):
    """Return a LoRA run; its reference is the base model."""
    _, err = train(folder, "adapted", lora__rank=4, held_out=folder / "pairs.jsonl", final_eval_batches=1)
    (loss,) = (row["eval_loss"] for row in read_metrics(folder / "adapted" / "metrics.jsonl") if "eval_loss" in row)
    assert_names(err, "24 pairs", f"{loss:.4f}")
    return folder


@pytest.mark.slow
def test_first_dpo_loss_is_log_2(adapted):
    """Initially the model equals its reference; then the rewards of chosen answers rise."""
    rows = steps_of(adapted / "adapted")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["reward_margin"] > 0


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_run(adapted):
    train(adapted, "broken", lora__rank=4, steps=2, optimizer__schedule="constant")
    train(adapted, "broken", lora__rank=4, steps=4, optimizer__schedule="constant")
    train(adapted, "whole", lora__rank=4, steps=4, optimizer__schedule="constant")
    assert metrics_of(adapted, "broken") == metrics_of(adapted, "whole")
    one, other = (named_leaves(load_run(adapted / name)) for name in ("broken", "whole"))
    assert all(np.array_equal(one[name], other[name]) for name in other)
    before = named_leaves(ed.load_hf(BASE))
    assert any(not np.array_equal(other[name], before[name]) for name in other)


@pytest.mark.slow
def test_reference_with_pissa_and_dora_is_the_initial_model(folder):
    """The reference includes the initial factors, so that the initial margin is 0."""
    train(folder, "values", "--lora.dora", lora__rank=4, lora__init="pissa", optimizer__learning_rate="1e-3")
    rows = steps_of(folder / "values")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(rows[0]["reward_margin"]) < 1e-5
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_losses_with_meshes_microbatches_and_a_reference_path(folder):
    train(folder, "start", preference__beta=0.3)
    reference = {"preference__beta": 0.3, "preference__reference": BASE}
    train(folder, "mesh", "--mesh.fsdp", "2", "--mesh.context", "2", devices=4, **reference)
    train(folder, "parts", "--step.gradient-accumulation-steps", "2", **reference)
    want = np.array(metrics_of(folder, "start"))
    assert want[0][0] == pytest.approx(math.log(2), abs=1e-6)
    for name in ("mesh", "parts"):
        assert_allclose(metrics_of(folder, name), want, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_kto_on_labelled_answers(folder):
    """The initial KTO loss is 0.5; then the rewards of desirable answers rise."""
    train(folder, "kto", method="kto", data=folder / "labels.jsonl", kto__desirable_weight=0.5, steps=6)
    rows = steps_of(folder / "kto")
    assert rows[-1]["desirable_reward"] > rows[-1]["undesirable_reward"]
    train(folder, "even", method="kto", data=folder / "labels.jsonl", steps=1)
    assert steps_of(folder / "even")[0]["loss"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"), [("dpo", {"lora__rank": 4}), ("dpo", {}), ("kto", {})], ids=["lora", "dpo", "kto"]
)
def test_saved_reference_equals_reference_in_memory(folder, method, options, monkeypatch):
    """Results are equal to the bit in the first epoch, and up to rounding later. A resumed run loads no reference."""
    options = options | {
        "method": method,
        "steps": 10,
        "optimizer.schedule": "constant",
        "held_out": folder / "pairs.jsonl",
        "final_eval_batches": 1,
    }
    if method == "kto":
        options |= {"data": folder / "labels.jsonl", "held_out": folder / "labels.jsonl"}
    train(folder, f"{method} {len(options)} held", **options)
    saving = dict(options)  # save_reference is a flag without a value
    run = f"{method} {len(options)} saved"
    train(folder, run, "--preference.save-reference", **(saving | {"steps": 6}))
    monkeypatch.setattr("eqx_decoders.training.methods.preference.load_reference", lambda *_: 1 / 0)
    if method == "dpo":  # later KTO steps combine other prompts and answers
        train(folder, run, "--preference.save-reference", **saving)
    held, saved = (np.array(metrics_of(folder, name)) for name in (f"{method} {len(options)} held", run))
    first = 24 // 8  # a batch has at most eight examples
    assert np.array_equal(held[:first], saved[:first])
    assert_allclose(saved, held[: len(saved)], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_changed_reference_is_recomputed(folder):
    """An increased number of steps does not recompute the reference."""
    train(folder, "other", "--preference.save-reference", steps=1)
    base = ed.load_hf(BASE)
    ed.save_hf(jax.tree.map(lambda leaf: leaf * 1.01, base), folder / "another")
    changed = {"preference__reference": folder / "another", "steps": 2}
    _, err = train(folder, "other", "--preference.save-reference", "--allow-changes", **changed)
    assert_names(err, "weights=")  # the message says how the saved reference was computed
    _, err = train(folder, "other", "--preference.save-reference", **(changed | {"steps": 3}))
    assert "weights=" not in err


@pytest.mark.slow
def test_averaged_weights_as_reference(folder):
    train(folder, "ema", optimizer__ema_decay=0.9, preference__reference="ema", **{"preference.examples_per_row": 1})
    rows = steps_of(folder / "ema")
    assert rows[0]["reward_margin"] == 0 < rows[-1]["reward_margin"] and rows[0]["pairs"] == 4


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        pytest.param(
            {"method": "sft", "preference__beta": 0.3}, 2, ["--preference.beta=0.3", "--method='sft'"], id="sft"
        ),
        pytest.param({"kto__beta": 0.3}, 2, ["--kto.beta=0.3", "--method='dpo'"], id="kto-beta"),
        pytest.param(
            {"method": "kto", "preference__smoothing": 0.1}, 2, ["--preference.smoothing=0.1"], id="smoothing"
        ),
        pytest.param({"preference__kind": "ipo"}, 2, ["over='sums'"], id="ipo"),
        pytest.param({"preference__reference": "base"}, 2, ["--lora.rank"], id="base-without-lora"),
        pytest.param({"preference__reference": "ema"}, 2, ["--optimizer.ema-decay"], id="ema-without-decay"),
        pytest.param(
            {"preference__kind": "simpo", "more": "--preference.save-reference"},
            2,
            ["--preference.save-reference=True", "--preference.kind='simpo'"],
            id="save-reference",
        ),
        pytest.param({"step__z_loss": 0.1}, 2, ["--step.z-loss=0.1", "--method='dpo'"], id="z_loss"),
        pytest.param({"data": "labels"}, 3, ["'chosen', 'rejected'"], id="data"),
        pytest.param({"preference__reference": "nowhere/at-all"}, 4, ["nowhere/at-all"], id="reference"),
    ],
)
def test_bad_settings_are_refused(folder, changes, code, names):
    more = [changes[name] for name in changes if name == "more"]
    changes = {name: folder / f"{x}.jsonl" if name == "data" else x for name, x in changes.items() if name != "more"}
    _, err = train(folder, "bad", *more, code=code, **changes)
    assert_names(err, *names)
    assert not (folder / "bad").exists()


def test_falling_chosen_rewards_give_a_warning():
    run = PreferenceRun.__new__(PreferenceRun)
    run._kind, run._falling_steps = "base", 0
    rewards = [-1.0] * (FALLING_STEPS - 1) + [1.0] + [-1.0] * (2 * FALLING_STEPS)
    warnings = [run.describe_step({"chosen_reward": reward}) for reward in rewards]
    assert [number for number, text in enumerate(warnings) if text] == [2 * FALLING_STEPS - 1]
