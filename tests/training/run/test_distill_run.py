"""Test distillation runs: losses, exact resuming, saved and served teachers, and refused teachers."""

import contextlib
import dataclasses
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError, EqxDecodersError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.http.config import ApiConfig
from eqx_decoders.serving.http.server import bind, run_in_thread
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.methods.teachers import TeacherServer
from eqx_decoders.training.run.load_export import load_run
from eqx_decoders.training.run.log import read_metrics
from eqx_decoders.training.settings.distill import DistillConfig
from tests.commands import ROOT, call, steps_of
from tests.compare import assert_allclose
from tests.errors import assert_names, refused
from tests.serving.servers import chat_frontend


STUDENT = ROOT / "tests" / "fixtures" / "chat_llama"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "many", "birds", "sing", "in", "old", "green", "trees", "at", "noon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with conversations and a teacher that differs from the student only in its weights."""
    folder, draws = tmp_path_factory.mktemp("distill"), np.random.default_rng(0)
    text = lambda count: " ".join(draws.choice(WORDS, count))  # noqa: E731
    talks = [{"prompt": text(3), "completion": text(4)} for _ in range(24)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    student = ed.load_hf(STUDENT)
    fresh = ed.init(student.config, key=jax.random.key(5))
    louder = jax.tree.map(lambda new: 3 * new if new.ndim > 2 else new, fresh)
    ed.save_hf(jax.tree.unflatten(jax.tree.structure(student), jax.tree.leaves(louder)), folder / "teacher")
    return folder


def train(folder, name, *more, code=0, devices=1, **changes):
    wanted = {
        "run-dir": folder / name,
        "method": "distill",
        "init-from": STUDENT,
        "distill.teacher": folder / "teacher",
        "data": folder / "talks.jsonl",
        "held-out": folder / "talks.jsonl",
        "final-eval-batches": 1,
        "steps": 4,
        "batch-size": 4,
        "seq-len": 48,
        "sample-tokens": 0,
        "eval-every": 0,
        "optimizer.learning-rate": "3e-3",
        "optimizer.warmup-steps": 0,
        "optimizer.schedule": "constant",
        "cache-dir": folder / "cache",
    }
    changes = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words = [str(word) for key, value in (wanted | changes).items() for word in (f"--{key}", value)]
    return call("train", *words, *more, code=code, devices=devices)


def metrics_of(folder, name):
    return [[row[each] for each in ("loss", "nll", "grad_norm", "divergence")] for row in steps_of(folder / name)]


@pytest.mark.slow
def test_distillation_reduces_the_loss_and_resumes_exactly(folder):
    _, err = train(folder, "whole")
    rows = steps_of(folder / "whole")
    (loss,) = (row["eval_loss"] for row in read_metrics(folder / "whole" / "metrics.jsonl") if "eval_loss" in row)
    assert_names(err, f"{loss:.4f}", "divergence")
    assert rows[-1]["divergence"] < rows[0]["divergence"] and rows[0]["loss"] == rows[0]["divergence"]
    train(folder, "broken", steps=2)
    train(folder, "broken", steps=4)
    assert metrics_of(folder, "broken") == metrics_of(folder, "whole")
    one, other = (named_leaves(load_run(folder / name)) for name in ("broken", "whole"))
    assert all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_teacher_equal_to_the_student_gives_zero_gradient(folder):
    for kind in ("forward", "reverse", "jsd", "jsd_scaled"):
        train(folder, f"same {kind}", steps=1, distill__teacher=STUDENT, distill__divergence=kind)
        [row] = steps_of(folder / f"same {kind}")
        assert abs(row["loss"]) < 1e-6 and row["grad_norm"] < 1e-5


@pytest.mark.slow
def test_distance_of_hidden_states_decreases(folder):
    train(folder, "hidden", distill__alpha=0.5, distill__hidden__weight=2, distill__hidden__distance="mse")
    rows = [(row["hidden_distance"], row["divergence"]) for row in steps_of(folder / "hidden")]
    assert rows[-1][0] < rows[0][0] and rows[-1][1] > 0
    _, err = train(folder, "far", code=2, distill__hidden__weight=1, distill__hidden__layers="0:9")
    assert_names(err, "--distill.hidden.layers=0:9")
    _, err = train(folder, "top", code=2, distill__hidden__weight=1, distill__top=4)
    assert_names(err, "--distill.top=4")


@pytest.mark.slow
def test_projection_to_a_wider_teacher(folder):
    """Checkpoints contain the projection, its moments and averages; exported models do not. Resuming is exact."""
    student = ed.load_hf(STUDENT).config
    ed.save_hf(ed.init(dataclasses.replace(student, embed_dim=48), key=jax.random.key(5)), folder / "wide")
    for file in STUDENT.glob("*token*"):
        shutil.copy(file, folder / "wide")
    hidden = {"distill.hidden.weight": 2, "distill.teacher": folder / "wide", "optimizer.ema-decay": 0.9}
    options: dict[str, Any] = hidden | {"distill.hidden.distance": "mse"}
    _, err = train(folder, "narrow", code=2, **options)
    assert_names(err, student.embed_dim, "48", "--distill.hidden.projection")
    more = ("--distill.hidden.projection", "--optimizer.lr-multipliers", "loss_weights.*=10")
    _, err = train(folder, "wider", *more, **options, export=folder / "exported")
    assert_names(err, f"{48 * student.embed_dim:,}")
    rows = [row["hidden_distance"] for row in steps_of(folder / "wider")]
    assert rows[-1] < rows[0]
    for steps in (2, 4):
        train(folder, "wider broken", *more, **options, steps=steps)
    one, other = (Checkpoints(folder / name / "checkpoints").manifest()["arrays"] for name in ("wider broken", "wider"))
    assert one == other and {"loss_weights.kernel", "ema.loss_weights.kernel"} <= other.keys()
    trained, exported = named_leaves(load_run(folder / "wider")), named_leaves(ed.load_hf(folder / "exported"))
    assert trained.keys() == exported.keys() == named_leaves(ed.load_hf(STUDENT)).keys()
    assert all(np.array_equal(trained[name], exported[name]) for name in trained)
    twice = ("--distill.hidden.layers", "0:0", "0:0", "--allow-changes")
    _, err = train(folder, "wider", *more, *twice, code=2, **options, steps=5, export="None")
    assert_names(err, "loss_weights.kernel", f"(1, {student.embed_dim}, 48)", f"(2, {student.embed_dim}, 48)")
    train(folder, "wider mesh", *more, "--mesh.fsdp", "2", "--mesh.context", "2", devices=4, **options)
    assert_allclose(metrics_of(folder, "wider mesh"), metrics_of(folder, "wider"), rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_top_tokens_are_saved_and_reused(folder):
    """All tokens except one equal the full teacher up to float16. A run with saved top tokens needs no teacher."""
    size = ed.load_hf(STUDENT).config.vocab_size
    kept = {"distill.saved": folder / "kept", "distill.temperature": 2}
    train(folder, "exact", **{"distill.temperature": 2})
    train(folder, "top", **kept, **{"distill.top": size - 1})
    want, found = (np.array(metrics_of(folder, name)) for name in ("exact", "top"))
    assert_allclose(found, want, rtol=0.01, atol=1e-3)
    train(folder, "again", **kept, **{"distill.top": size - 1, "distill.teacher": "None"})
    assert metrics_of(folder, "again") == metrics_of(folder, "top")
    _, err = train(folder, "fewer", code=3, **kept, **{"distill.top": 4})
    assert_names(err, folder / "kept", "columns=")
    train(folder, "few", **{"distill.top": 4})
    assert steps_of(folder / "few")[-1]["divergence"] < steps_of(folder / "few")[0]["divergence"]
    train(folder, "others", code=3, **kept, **{"distill.top": size - 1, "distill.teacher": "None", "seq-len": 24})


@contextlib.contextmanager
def served(teacher):
    """Serve a teacher in this process and return the URL."""
    sock, model = bind("127.0.0.1", 0), ed.load_hf(teacher)
    config = ApiConfig(name="teacher", max_length=64, vocab_size=model.config.vocab_size)
    engine = Engine(model, EngineConfig(max_batch_size=4, max_length=64))
    stop = run_in_thread(frontend=chat_frontend(), engine=engine, config=config, sock=sock)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    finally:
        stop()
        engine.close()


@pytest.mark.slow
def test_teacher_from_a_server_equals_loaded_teacher(folder):
    """Saved responses need no server. A different vocabulary and too many top tokens are refused."""
    top = {"distill.top": 6}
    train(folder, "near", **top)
    with served(folder / "teacher") as address:
        train(folder, "served", **top, **{"distill.teacher": address, "distill.saved": folder / "answers"})
        _, err = train(folder, "many", code=1, **{"distill.teacher": address, "distill.top": 60})
        assert "logprobs" in err or "--distill.top=60" in err
        server = TeacherServer(address, top=2, vocab_size=10)
        with refused(EqxDecodersError, address, "10"):
            server.top_tokens(np.arange(20, 30, dtype=np.int32))
        with refused(ConfigError, f"distill.teacher={address!r}"):
            server.check_tokens(ByteTokenizer())
    assert_allclose(metrics_of(folder, "served"), metrics_of(folder, "near"), rtol=1e-3, atol=1e-4)
    train(folder, "alone", **top, **{"distill.teacher": "None", "distill.saved": folder / "answers"})
    assert metrics_of(folder, "alone") == metrics_of(folder, "served")


@pytest.mark.slow
def test_distillation_settings_with_a_mesh(folder):
    options = {"distill.divergence": "jsd", "distill.beta": 0.3, "distill.temperature": 2, "distill.alpha": 0.5}
    train(folder, "mixed", **options)
    rows = steps_of(folder / "mixed")
    assert rows[0]["loss"] == pytest.approx(2 * rows[0]["divergence"] + rows[0]["nll"] / 2, rel=1e-5)
    train(folder, "mesh", "--mesh.fsdp", "2", "--mesh.context", "2", devices=4, **options)
    assert_allclose(metrics_of(folder, "mesh"), metrics_of(folder, "mixed"), rtol=2e-4, atol=1e-5)
    train(folder, "adapted", lora__rank=4, optimizer__ema_decay=0.9, optimizer__learning_rate=0.03)
    assert steps_of(folder / "adapted")[-1]["divergence"] < steps_of(folder / "adapted")[0]["divergence"]


@pytest.mark.slow(fast=("saved-without-top", "top-above-vocabulary"))
@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        pytest.param({"method": "sft"}, 2, ["--distill.teacher=", "--method='sft'"], id="sft"),
        pytest.param({"distill__beta": 0.3}, 2, ["--distill.beta=0.3", "divergence="], id="beta"),
        pytest.param({"distill__teacher": "None"}, 2, ["--distill.teacher"], id="no-teacher"),
        pytest.param(
            {"distill__teacher": "http://localhost:1/v1"},
            2,
            ["http://localhost:1/v1", "--distill.top"],
            id="server-without-top",
        ),
        pytest.param(
            {"distill__teacher": "http://x/v1", "distill__top": 4, "distill__temperature": 2},
            2,
            ["http://x/v1", "--distill.temperature=2"],
            id="server-temperature",
        ),
        pytest.param(
            {"distill__saved": "kept"}, 2, ["--distill.saved='kept'", "--distill.top"], id="saved-without-top"
        ),
        pytest.param({"distill__top": 10**6}, 2, ["--distill.top=1000000"], id="top-above-vocabulary"),
        pytest.param({"preference__beta": 0.3}, 2, ["--preference.beta=0.3", "--method='distill'"], id="preference"),
        pytest.param({"distill__teacher": "bytes"}, 2, ["ByteTokenizer"], id="bytes"),
        pytest.param({"distill__teacher": "other"}, 2, ["id 5", "'x5x'"], id="other-token"),
    ],
)
def test_bad_settings_are_refused(folder, changes, code, names):
    teacher = changes.get("distill__teacher")
    if teacher in ("bytes", "other"):
        changes = changes | {"distill__teacher": _teacher_of_others(folder, teacher)}
    _, err = train(folder, "bad", code=code, **changes)
    assert_names(err, *names)
    assert not (folder / "bad" / "checkpoints").exists()


def _teacher_of_others(folder, name):
    """Return a copy of the teacher with another tokenizer."""
    copy = folder / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "teacher", copy)
    if name == "bytes":
        for file in copy.glob("tokenizer*"):
            file.unlink()
        ByteTokenizer().save(copy)
        return copy
    content = json.loads((copy / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    old = next(token for token, index in vocab.items() if index == 5)
    vocab["x5x"] = vocab.pop(old)
    content["model"]["merges"] = []
    (copy / "tokenizer.json").write_text(json.dumps(content))
    return copy


def test_top_is_refused_with_on_policy_distillation():
    with refused(ConfigError, "distill.top=4"):
        DistillConfig(on_policy=True, top=4)
