"""Test reward models: scores at the end of answers, training on pairs, and the file format of transformers."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import ConfigError
from eqx_decoders.model.decoder_config import with_scores
from eqx_decoders.model.init import add_score_head
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.objectives.preference_loss import reward_loss
from eqx_decoders.training.objectives.scores import RewardObjective, reward_scores
from eqx_decoders.training.run.load_export import load_run
from eqx_decoders.training.run.log import read_metrics
from tests.commands import ROOT, call, steps_of
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import assert_names, refused
from tests.models import VOCAB, filled, rich_decoder


FIXTURES = ROOT / "tests" / "fixtures"
BASE = FIXTURES / "chat_llama"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "many", "birds", "sing", "in", "old", "green", "trees", "at", "noon"]


# --- scores ---


def scorer(seed=0):
    return filled(dataclasses.replace(with_scores(rich_decoder(1), 1)), seed)


ANSWERS = np.array([[0, 1, 1, 0, 2, 2, 2, 0, 3, 0, 3, 0, 4, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0]])


def batch_of(margins=False):
    """Return a row with two pairs and a row with one pair. An answer contains tool output; rows end with padding."""
    draws = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 0, 0], [1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0]])
    baseline = np.where(ANSWERS > 0, np.where(ANSWERS > 2, 0.5, 0.25), 0).astype(np.float32) if margins else None
    weights = np.where(ANSWERS > 0, 1 / 3, 0).astype(np.float32)
    signals = Signals(completion_ids=ANSWERS, policy=weights, baseline=baseline, max_completions=4)
    tokens = np.where(segments > 0, draws.integers(0, VOCAB, ANSWERS.shape), 0)
    return Batch(tokens=tokens, segment_ids=segments, signals=signals)


EPISODE_ENDS = {
    (0, 1): 2,
    (0, 2): 6,
    (0, 3): 10,
    (0, 4): 12,
    (1, 1): 5,
    (1, 2): 8,
}  # (row, number): index of the last token


def test_score_is_read_at_the_last_token_of_an_answer():
    """This also holds if tool output splits the answer. The score head is computed in float32."""
    model, batch = scorer(), batch_of(margins=True)
    found = reward_scores(model, batch)
    every = model(batch.tokens, segment_ids=batch.segment_ids)
    want = np.zeros((2, 4), np.float32)
    for (row, number), place in EPISODE_ENDS.items():
        want[row, number - 1] = every.logits[row, place, 0]
    assert found.shape == (2, 4) and found.dtype == jnp.float32
    assert_close(found, want)
    assert_close(every.logits, model.head_input(every.hidden) @ jnp.asarray(model.head_kernel))
    loss, metrics = jax.jit(lambda m: RewardObjective(centering=0.5)(m, batch, key=None, full_batch=batch))(model)
    chosen, rejected = (want[[0, 0, 1], places] for places in ([0, 2, 0], [1, 3, 1]))
    losses, _ = reward_loss(
        jnp.asarray(chosen), jnp.asarray(rejected), margins=jnp.array([0.25, 0.5, 0.25]), centering=0.5
    )
    assert_close(loss, jnp.mean(losses))
    assert metrics.sums["pairs"] == 3 and float(metrics.tokens) == np.sum(ANSWERS > 0)


@pytest.mark.slow
def test_scores_on_a_mesh():
    model, batch = scorer(), batch_of()
    rows = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 1))), batch)
    want = reward_scores(model, rows)
    layout = ed.Layout.create(fsdp=2, tensor=2, devices=jax.devices()[:4])
    assert_close(reward_scores(model.place(layout), rows), want)
    layout = ed.Layout.create(data=2, context=2, devices=jax.devices()[:4])
    assert_close(reward_scores(model.place(layout).replace(context_order="zigzag"), rows), want)


TEXTS = ed.Batch(tokens=np.ones((1, 4), np.int32))


@pytest.mark.slow(fast=("generate",))
@pytest.mark.parametrize(
    ("use", "names"),
    [
        pytest.param(
            lambda model: ed.generate(model, [[1, 2]], max_new_tokens=1),
            ["DecoderConfig.scores=1", "generate()"],
            id="generate",
        ),
        pytest.param(lambda model: ed.next_token_loss(model, TEXTS), ["DecoderConfig.scores=1"], id="loss"),
        pytest.param(
            lambda model: reward_scores(filled(rich_decoder(1)), batch_of()), ["DecoderConfig.scores=None"], id="logits"
        ),
        pytest.param(lambda model: reward_scores(model, TEXTS), ["Batch.signals=None", "reward_scores"], id="answers"),
        pytest.param(
            lambda model: dataclasses.replace(model.config, tied=True),
            ["DecoderConfig.scores=1", "tied=True"],
            id="tied",
        ),
    ],
)
def test_scores_require_a_score_head_and_logits_a_vocabulary_head(use, names):
    with refused(ConfigError, *names):
        use(scorer())


# --- files ---


@pytest.mark.slow(fast=("llama_rope-LlamaForSequenceClassification",))
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama_rope", "LlamaForSequenceClassification"),
        ("qwen2_mixed", "Qwen2ForSequenceClassification"),
        ("qwen3_f16", "Qwen3ForSequenceClassification"),
        ("gemma2_odd", "Gemma2ForSequenceClassification"),
        ("gemma3_pattern", "Gemma3TextForSequenceClassification"),
        ("gpt2", "GPT2ForSequenceClassification"),
    ],
)
def test_saved_reward_models_are_loaded_exactly(name, architecture, tmp_path):
    """`score.weight` replaces the LM head, and the architecture has the name that transformers uses."""
    model = add_score_head(ed.load_hf(FIXTURES / name), key=jax.random.key(0))
    ed.save_hf(model, tmp_path / "scorer", settings={"id2label": {"0": "good"}})
    config = json.loads((tmp_path / "scorer" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert config["num_labels"] == 1 and config["id2label"] == {"0": "good"}
    again = ed.load_hf(tmp_path / "scorer")
    assert again.config == model.config and again.config.scores == 1
    one, other = named_leaves(model), named_leaves(again)
    jax.tree.map(assert_array_equal, one, other)
    ed.save_hf(again, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["id2label"] == {"0": "good"}


def test_family_without_reward_models_is_refused(tmp_path):
    model = add_score_head(ed.load_hf(FIXTURES / "granite"), key=jax.random.key(0))
    with refused(ed.ConversionError, "ForSequenceClassification", "model_type='granite'"):
        ed.save_hf(model, tmp_path / "scorer")


# --- runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with pairs; chosen answers end in "birds", and some pairs have a margin."""
    folder, draws = tmp_path_factory.mktemp("rewards"), np.random.default_rng(0)
    text = lambda count: " ".join(draws.choice(WORDS, count))  # noqa: E731
    for name, margins in {"pairs": [None], "margins": [0.0, 1.5]}.items():
        rows = []
        for number in range(32):
            answers = {"chosen": f"{text(3)} birds", "rejected": f"{text(3)} mat"}
            rows.append({"prompt": [{"role": "user", "content": text(3)}], **answers})
            rows[-1] |= {} if margins == [None] else {"margin": margins[number % 2]}
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "bad.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"}))
    return folder


def train(folder, name, *more, code=0, devices=1, **changes):
    wanted = {
        "run-dir": folder / name,
        "method": "reward",
        "init-from": BASE,
        "data": folder / "pairs.jsonl",
        "steps": 12,
        "batch-size": 4,
        "seq-len": 96,
        "eval-every": 0,
        "optimizer.learning-rate": "1e-2",
        "optimizer.warmup-steps": 0,
        "optimizer.schedule": "constant",
    }
    changes = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words = [str(word) for key, value in (wanted | changes).items() for word in (f"--{key}", value)]
    return call("train", *words, *more, code=code, devices=devices)


def metrics_of(folder, name):
    names = ("loss", "grad_norm", "reward_margin", "reward_accuracy", "chosen_reward")
    return [[row[each] for each in names] for row in steps_of(folder / name)]


@pytest.mark.slow
def test_reward_run_learns_resumes_and_exports(folder):
    _, err = train(folder, "whole", held_out=folder / "pairs.jsonl", final_eval_batches=2, export=folder / "out")
    assert steps_of(folder / "whole")[-1]["reward_accuracy"] > 0.9
    (loss,) = (row["eval_loss"] for row in read_metrics(folder / "whole" / "metrics.jsonl") if "eval_loss" in row)
    assert_names(err, f"{loss:.4f}")
    assert math.isfinite(steps_of(folder / "whole")[0]["loss"])
    train(folder, "broken", steps=5)
    train(folder, "broken", steps=12)
    assert metrics_of(folder, "broken") == metrics_of(folder, "whole")
    loaded, trained = ed.load_hf(folder / "out"), load_run(folder / "whole")
    one, other = named_leaves(loaded), named_leaves(trained)
    assert loaded.config.scores == 1 and all(np.array_equal(one[path], other[path]) for path in other)
    train(folder, "more", init_from=folder / "out", steps=1)
    assert steps_of(folder / "more")[0]["loss"] < 0.5


@pytest.mark.slow
def test_reward_run_with_lora_margins_and_meshes(folder):
    """The head is trained together with LoRA factors, margins and centering have an effect, and meshes keep losses."""
    changes = {"data": folder / "margins.jsonl", "reward.centering": 0.01}
    train(folder, "plain", data=folder / "margins.jsonl", lora__rank=4, steps=2)
    train(folder, "adapted", lora__rank=4, **changes)
    assert steps_of(folder / "adapted")[-1]["reward_accuracy"] > 0.9
    rows = [steps_of(folder / name)[0] for name in ("plain", "adapted")]
    assert rows[0]["loss"] < rows[1]["loss"] and rows[0]["reward_margin"] == rows[1]["reward_margin"]
    trained, before = (named_leaves(x) for x in (load_run(folder / "adapted"), ed.load_hf(BASE)))
    assert trained["head.kernel"].shape == (before["embedding.table"].shape[1], 1)
    assert np.array_equal(trained["embedding.table"], before["embedding.table"])
    train(folder, "mesh", "--mesh.fsdp", "2", "--mesh.context", "2", devices=4, lora__rank=4, **changes)
    assert_allclose(metrics_of(folder, "mesh"), metrics_of(folder, "adapted"), rtol=1e-3, atol=1e-4)


@pytest.mark.slow(fast=("margin",))
@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        pytest.param({"preference__beta": 0.3}, 2, ["--preference.beta=0.3", "--method='reward'"], id="beta"),
        pytest.param(
            {"method": "dpo", "reward__centering": 0.1}, 2, ["--reward.centering=0.1", "--method='dpo'"], id="centering"
        ),
        pytest.param(
            {"lora__rank": 2, "export_adapter": "adapter"}, 2, ["--export-adapter='adapter'"], id="export-adapter"
        ),
        pytest.param({"data": "bad"}, 3, ["margin='wide'"], id="margin"),
    ],
)
def test_bad_settings_are_refused(folder, changes, code, names):
    changes = {name: folder / f"{value}.jsonl" if name == "data" else value for name, value in changes.items()}
    _, err = train(folder, "bad", code=code, **changes)
    assert_names(err, *names)
    assert not (folder / "bad").exists()
