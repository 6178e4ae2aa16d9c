"""Run the training program in this process: settings have an effect, and execution options keep the losses."""

import contextlib
import json
import os
import re
import shutil
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.dataset import make_dataset
from eqx_decoders.errors import ConfigError, DataError, EqxDecodersError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.io.processes import LONG_TIMEOUT, Stop
from eqx_decoders.io.run_lock import RunLock
from eqx_decoders.io.status import takes_time
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.training.evaluation import evaluate
from eqx_decoders.training.methods import sft
from eqx_decoders.training.run import evaluate as evaluate_module, loop as run_module, start
from eqx_decoders.training.run.evaluate import HeldOutEvaluation, SampleEvaluation, errors_as_warnings
from eqx_decoders.training.run.load_export import load_run
from eqx_decoders.training.run.log import Progress, WallTime, read_metrics
from eqx_decoders.training.run.loop import CheckpointSaver, MetricsReporter
from eqx_decoders.training.run.start import Run
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.settings.files import load_settings, save_settings
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step import loss as loss_module, step as step_module
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_log import StepLog
from eqx_decoders.training.step.train_state import TrainState
from tests.commands import ROOT, call, flags, steps_of, write_corpus
from tests.compare import assert_allclose
from tests.errors import assert_names, refused
from tests.training.run.starts import first_step, resumed, run_at


OPTIONS = {
    "--model": "gpt3-52k",
    "--tokenizer": "bytes",
    "--steps": 4,
    "--batch-size": 8,
    "--seq-len": 16,
    "--sample-tokens": 4,
    "--prompt": "the",
    "--eval-every": 2,
    "--checkpoint-every": 2,
    "--held-out-fraction": 0.2,
}
QUICK = {"--held-out-fraction": 0, "--sample-tokens": 0, "--eval-every": 0}  # only the step is compiled


class Trained:
    """Result of a training run: directory, output, metrics and the compiled step."""

    def __init__(self, folder: Path, *words: object, devices: int = 1, code: int = 0, **options: object):
        self.dir = folder
        self.program = ""
        real = step_module._compiled_step

        def recorded(kept, state):
            if not self.program:
                self.program = str(eqx.filter_make_jaxpr(kept[0].advance)(state, kept[1])[0])
            return real(kept, state)

        recorded.lower = real.lower
        plain = mock.patch.object(loss_module, "cross_entropy", wraps=loss_module.cross_entropy)
        with mock.patch.object(step_module, "_compiled_step", recorded), plain as self.plain_loss:
            named = {f"--{name.replace('__', '.').replace('_', '-')}": value for name, value in options.items()}
            given = flags(OPTIONS | named)
            self.out, self.err = call("train", "--run-dir", folder, *given, *words, devices=devices, code=code)

    @property
    def rows(self) -> list[dict]:
        return steps_of(self.dir)

    def column(self, name: str) -> list:
        return [row[name] for row in self.rows]

    @property
    def held_out(self) -> dict[int, float]:
        rows = read_metrics(self.dir / "metrics.jsonl")
        return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def error_of(err: str) -> str:
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with texts of about 200 bytes, and texts of 5 bytes in records with a field `body`."""
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder / "texts", 20, 40)
    (folder / "short.jsonl").write_text("\n".join(json.dumps({"body": f"{n} cat"}) for n in range(100, 150)))
    write_corpus(folder / "held_out", 1, 100)
    return folder


@pytest.fixture(scope="module")
def base(folder):
    return Trained(folder / "base", data=folder / "texts")


@pytest.fixture(scope="module")
def sharded(folder):
    """Return a run with the losses of `base` on a mesh and with other execution options."""
    writer = types.SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)
    fake = types.SimpleNamespace(SummaryWriter=mock.Mock(return_value=writer), __spec__="found")
    words = ("--layer-stats", "--step.no-fused-loss", "--trackers", "tensorboard")
    options = dict(mesh__data=1, mesh__fsdp=4, mesh__tensor=2, step__gradient_accumulation_steps=2)
    options |= dict(remat="full", max_checkpoints=1, eval_batches=1)
    with mock.patch.dict(sys.modules, tensorboardX=fake):
        run = Trained(folder / "sharded", *words, devices=8, data=folder / "texts", **options)
    fake.SummaryWriter.assert_called_once_with(str(folder / "sharded" / "tensorboard"), purge_step=1)
    return run


@pytest.fixture(scope="module")
def other(folder):
    """Return a run with settings that change the computation."""
    options = dict(seed=1, dtype="bfloat16", step__z_loss=0.1, text_field="body", held_out=folder / "held_out")
    options |= dict(optimizer__schedule="wsd", optimizer__warmup_steps=1, optimizer__decay_fraction=0.5)
    options |= dict(optimizer__min_lr_ratio=0.2, optimizer__learning_rate=1e-2, mesh__data=4, mesh__context=2)
    options |= dict(context_order="zigzag", context_form="all_to_all")
    (folder / "held_out.jsonl").write_text(json.dumps({"body": "x" * 100}))
    options |= dict(held_out=folder / "held_out.jsonl", sample_tokens=0)
    return Trained(folder / "other", "--no-pack", devices=8, data=folder / "short.jsonl", **options)


@pytest.mark.slow
def test_run_reports_metrics_losses_and_a_sample(base):
    assert all(0 < share <= 1 for share in base.column("mfu"))
    state = 52_464 * 4 * 3 / 1e9  # weights and two moments
    assert len(set(base.column("peak_memory_gb"))) == 1 and state < base.column("peak_memory_gb")[0] < 50 * state
    assert_names(base.err, "52,464", "15", "2,958")  # weights, documents and tokens
    assert base.column("step") == [1, 2, 3, 4] and not any(base.column("skipped"))
    assert all(8 * 10 < tokens <= 8 * 15 for tokens in base.column("tokens"))
    assert base.column("loss") == base.column("nll") and base.column("loss")[-1] < base.column("loss")[0]
    assert all(seconds > 0 for seconds in base.column("step_seconds"))
    assert Checkpoints(base.dir / "checkpoints").steps == (2, 4)
    assert list(base.held_out) == [2, 4]
    assert load_tokenizer(base.dir / "tokenizer").vocab_size == 259
    assert (base.dir / "loss.png").read_bytes().startswith(b"\x89PNG") and str(base.dir) in base.out
    loss, tokens, size = base.held_out[4], 1007, 1002  # a byte is a token, and each document has an end token
    assert_names(base.out, f"{loss:.4f}", f"{tokens:,}", f"{loss * tokens / size:.4f}", f"{size:,}")
    assert 0.5 < float(re.search(r"gzip -9\D+([\d.]+)", base.out)[1]) < 3
    assert re.search(r"^the.", base.out, re.MULTILINE)


@pytest.mark.slow
def test_sharded_run_equals_single_device(base, sharded):
    for name in ("loss", "grad_norm", "accuracy", "tokens", "learning_rate", "epochs"):
        assert_allclose(sharded.column(name), base.column(name), rtol=2e-5, err_msg=name)
    assert_names(sharded.err, "fsdp=4", "tensor=2")
    assert "fsdp=" not in base.err
    assert "remat" in sharded.program and "remat" not in base.program
    assert "4,16,1024]" in sharded.program and "4,16,1024]" not in base.program  # a microbatch has half of the rows
    assert sharded.plain_loss.called and not base.plain_loss.called
    assert [len(row["activations/mean"]) for row in sharded.rows] == [1] * 4
    assert not any("activations/mean" in row for row in base.rows)
    assert Checkpoints(sharded.dir / "checkpoints").steps == (4,)
    assert abs(sharded.held_out[2] / base.held_out[2] - 1) > 1e-5, "of one batch, not of sixteen"
    assert sharded.held_out[4] == pytest.approx(base.held_out[4], rel=1e-5), "at the end of all"


@pytest.mark.slow
def test_settings_change_the_computation(base, other):
    assert "bf16[" in other.program and "bf16[" not in base.program
    assert all(row["loss"] > row["nll"] + 1 for row in other.rows)  # the z-loss 0.1 log(Z)^2 of 1024 logits near zero
    assert_names(other.err, "data=4", "context=2")
    assert "sizes=(4, 4, 4, 4)" in other.program and "sizes=(4, 4, 4, 4)" not in base.program  # rows of sixteen tokens
    assert " all_to_all[" in other.program and " all_to_all[" not in base.program
    assert re.search(r"\b50\b.*\b450\b.*\b50\b", other.err)  # documents, tokens and unpacked sequences
    assert set(other.column("tokens")) == {8 * 8.0}
    assert_allclose(other.column("learning_rate"), [1e-2, 1e-2, 1e-2, 6e-3], rtol=1e-6)
    assert_names(other.out, "101")
    assert not re.search(r"^the", other.out, re.MULTILINE)
    assert load_settings(other.dir / "settings.json").data.seed == 1
    assert other.column("nll")[0] != pytest.approx(base.column("nll")[0], abs=1e-4), "other weights"


def test_memory_limits_are_passed_to_the_model():
    execution = TrainConfig(head_bytes=5, exchange_bytes=7, batch_split=3).execution()
    assert (execution.head_bytes, execution.exchange_bytes, execution.batch_split) == (5, 7, 3)
    with refused(ConfigError, "exchange_bytes=0"):
        TrainConfig(exchange_bytes=0)


@pytest.mark.slow
def test_optimizer_settings_take_effect(base, folder):
    """With eps = 1 the update of AdamW is proportional to the gradient, so that the gradient norm has an effect."""

    def losses(name: str, **options: object) -> list[float]:
        rate = {"optimizer__learning_rate": 0.1, "optimizer__schedule": "constant"}
        return Trained(folder / name, data=folder / "texts", **quick, **rate, **options).column("loss")

    quick = {name[2:].replace("-", "_"): value for name, value in QUICK.items()} | {"steps": 3}
    unclipped = losses("unclipped", optimizer__eps=1.0, optimizer__max_grad_norm=None)
    clipped = losses("clipped", optimizer__eps=1.0, optimizer__max_grad_norm=0.1)
    assert unclipped[0] == clipped[0] and unclipped[2] < clipped[2] - 1e-3
    heavy, light = (losses(f"muon{m}", optimizer__name="muon", optimizer__momentum=m) for m in (0.95, 0.0))
    assert heavy[:2] == pytest.approx(light[:2], rel=1e-6) and abs(heavy[2] - light[2]) > 1e-4
    assert abs(heavy[1] - clipped[1]) > 1e-3


@pytest.mark.slow
def test_out_of_memory_error_names_sizes_and_flags(folder):
    def exhausted(kept, state):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.\n\nstack")

    exhausted.lower = step_module._compiled_step.lower
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": folder / "exhausted"})
    with mock.patch.object(step_module, "_compiled_step", exhausted):
        _, err = call("train", *words, code=1)
    settings = ("--batch-size=8", "--seq-len=16", "--step.gradient-accumulation-steps", "--remat='full'", "--mesh.fsdp")
    assert_names(error_of(err), *settings, "52,464", "12884901888")


@pytest.mark.slow
def test_mfu_is_at_most_one(folder):
    """If the peak is too low, the fastest step so far counts as the peak."""
    for peak, shares in ((1e6, lambda share: 0 < share < 1e-3), (1e-9, lambda share: 0 < share <= 1)):
        run = Trained(folder / f"peak{peak}", data=folder / "texts", peak_tflops=peak, held_out_fraction=0, steps=3)
        assert all(map(shares, run.column("mfu")))
    assert max(run.column("mfu")) == 1


@pytest.mark.slow
def test_mixture_reports_sources_and_resumes_with_other_weights(folder):
    options = dict(steps=2, eval_every=0, sample_tokens=0)
    (folder / "numbers.txt").write_text("\n".join(str(number) for number in range(90_000)))  # many documents
    words = ("--data", f"{folder / 'texts'}=0.75", f"{folder / 'numbers.txt'}=0.25")
    run = Trained(folder / "mixture", *words, final_eval_batches=1, **options)
    assert re.search(rf"texts.* 0\.75.* {run.rows[1]['epochs/texts']:.3g} ", run.err)
    assert re.search(r"numbers.* 0\.25", run.err)
    rows = read_metrics(run.dir / "metrics.jsonl")
    (losses,) = (
        {name: row[name] for name in row if name.startswith("eval_loss")} for row in rows if "eval_loss" in row
    )
    assert list(losses) == ["eval_loss", "eval_loss/texts", "eval_loss/numbers"]
    assert min(losses.values()) < losses["eval_loss"] < max(losses.values())
    printed = [f"{loss:.4f}" for loss in losses.values()]
    assert_names(run.err, *printed)
    assert_names(run.out, *printed, "numbers", "240", "120")  # tokens of both batches and of one batch
    assert "gzip" not in run.out
    assert set(run.rows[0]) >= {"epochs", "epochs/texts", "epochs/numbers"}
    assert run.rows[1]["epochs/texts"] == 2 * run.rows[0]["epochs/texts"] > 0
    other = ("train", "--run-dir", run.dir, "--steps", 4, "--data", words[1], words[2].replace("0.25", "2.25"))
    _, err = call(*other, code=2)
    assert_names(err, "--data=", "--allow-changes")
    _, err = call(*other, "--allow-changes", "--final-eval-batches", "None")
    assert first_step(err) == 2
    assert_names(err, "--data")
    before, after = (run.rows[step]["epochs/numbers"] for step in (1, 3))
    assert after - before == pytest.approx(3 * before)
    last = read_metrics(run.dir / "metrics.jsonl")[-1]
    assert last["step"] == 4 and abs(last["eval_loss/texts"] - losses["eval_loss/texts"]) > 1e-4


@pytest.mark.slow
def test_bfloat16_run_has_float32_weight_averages(folder):
    """Averages that are added on resume are evaluated and saved."""
    dtypes = dict(params_dtype="bfloat16", optimizer__moments_dtype="bfloat16", eval_every=0, sample_tokens=0)
    run = Trained(folder / "half", data=folder / "texts", optimizer__learning_rate=1e-2, steps=2, **dtypes)
    assert "bf16[" in run.program
    change = ("train", "--run-dir", run.dir, "--steps", 4, "--optimizer.ema-decay", 0.5)
    _, err = call(*change, code=2)
    assert_names(err, "--optimizer.ema-decay=0.5", "None", "--allow-changes")
    _, err = call(*change, "--allow-changes")
    assert_names(err, "--optimizer.ema-decay None -> 0.5")
    assert run.column("step") == [1, 2, 3, 4]
    checkpoints = Checkpoints(run.dir / "checkpoints")
    assert not any(name.startswith("ema.") for name in checkpoints.manifest(2)["arrays"])
    arrays = {name: array["dtype"] for name, array in checkpoints.manifest()["arrays"].items() if array["shape"]}
    assert {dtype for name, dtype in arrays.items() if not name.startswith("ema.")} == {"bfloat16"}
    assert {dtype for name, dtype in arrays.items() if name.startswith("ema.")} == {"float32"}
    config, tokenizer = load_settings(run.dir / "settings.json"), load_tokenizer(run.dir / "tokenizer")
    with make_dataset(config.data, tokenizer, folder=run.dir / "data", split="held_out") as data:
        models = [load_run(run.dir), load_run(run.dir, ema=False)]
        losses = [evaluate(model, data.rewind(), config.data.batch_size).loss for model in models]
    assert losses[0] == pytest.approx(run.held_out[4], rel=1e-5) and abs(losses[1] - losses[0]) > 1e-4
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(models))
    assert np.array_equal(*(jax.tree.leaves(load_run(run.dir, 2, ema=ema))[0] for ema in (True, False)))


@pytest.mark.slow
def test_diverged_run_keeps_good_checkpoints_after_restarts(base, folder):
    """The checkpoint before the last finite step is kept until a finite step follows the last checkpoint."""
    run = shutil.copytree(base.dir, folder / "diverged")
    options = dict(optimizer__learning_rate=1e30, max_skipped=2, steps=12, eval_every=0)
    options |= dict(checkpoint_every=1, max_checkpoints=1, data=folder / "texts")
    for found in ([False, True, True], [True, True]):
        again = Trained(run, "--allow-changes", code=1, **options)
        assert again.column("skipped")[len(again.rows) - len(found) :] == found
        names = ("2 steps", "loss=nan", "step 5", "step 4", run / "checkpoints", "--optimizer.learning-rate")
        assert_names(error_of(again.err), *names)
        assert Checkpoints(run / "checkpoints").steps == (4, 5)


def test_checkpoint_is_good_only_if_a_finite_step_follows(tmp_path):
    """Checkpoint 10 was saved before the restart, and no step after step 8 was finite."""
    rows = [{"step": step, "skipped": step > 8} for step in range(1, 13)] + [{"step": 12, "eval_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    checkpoints = mock.MagicMock(spec=Checkpoints, steps=(8, 10), directory="there")
    log = mock.MagicMock(spec=StepLog, last={"loss": float("nan"), "grad_norm": 1.0})
    log.__len__.return_value = 0
    shown = mock.MagicMock(spec=Trackers), mock.MagicMock(spec=Progress)
    reporter = MetricsReporter(tmp_path / "metrics.jsonl", checkpoints, 2, log, *shown)
    reporter.skipped_in_a_row = 2
    with refused(EqxDecodersError, "optimizer.learning_rate") as caught:
        reporter.read(12)
    assert re.findall(r"step (\d+)", str(caught.value)) == ["10"]  # no good checkpoint exists
    checkpoints.steps = (6, 8, 10)
    with refused(EqxDecodersError, "step 10", "step 6", "8, 10"):
        reporter.read(12)


@pytest.mark.slow
def test_in_flight_steps_of_a_diverged_run_are_reported(folder):
    options = dict(optimizer__learning_rate=1e30, max_skipped=2, steps=9, held_out_fraction=0, sample_tokens=0)
    run = Trained(folder / "skipped", data=folder / "texts", code=1, **options, checkpoint_every=9, eval_every=0)
    assert run.column("skipped") == [False, True, True, True, True]
    assert_names(error_of(run.err), "4 steps", "--optimizer.learning-rate")
    assert Checkpoints(run.dir / "checkpoints").latest is None


@pytest.mark.slow
def test_checkpoint_is_saved_before_a_failing_evaluation(folder):
    """Evaluation, sample and plot fail. Steps 2 and 5 are not finite: checkpoint 2 is delayed to step 3, checkpoint 5
    replaces no other checkpoint. Before the first step, the timeout between processes is long."""
    seen, limits = [], {}
    save, report, gather = CheckpointSaver.save, MetricsReporter.report, run_module.all_gather_json

    def saved(self, step, *rest):
        seen.append(("save", step))
        save(self, step, *rest)

    def reported(self, row):
        report(self, row | {"skipped": row["step"] in (2, 5)})

    def failing(name):
        def fail(*_, **__):
            seen.append(name)
            raise ValueError(f"no {name}")

        return fail

    def gathered(name, value=None, seconds=0):
        limits[name] = seconds
        return gather(name, value)

    names = {"evaluate_sets": evaluate_module, "sample_text": evaluate_module, "plot_losses": run_module}
    patches = [mock.patch.object(module, name, failing(name)) for name, module in names.items()]
    patches += [mock.patch.object(module, "all_gather_json", gathered) for module in (run_module, start, sft)]
    patches += [
        mock.patch.object(CheckpointSaver, "save", saved),
        mock.patch.object(MetricsReporter, "report", reported),
    ]
    options = {"--data": folder / "texts", "--steps": 5, "--eval-every": 4, "--run-dir": folder / "failing"}
    options |= {"--max-checkpoints": 1}
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        out, err = call("train", *flags(OPTIONS | options))
    fails = ["evaluate_sets", "sample_text"]
    assert seen == [("save", 3), ("save", 4), *fails, ("save", 5), *fails, "plot_losses"]
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    for step, name in ((4, fails[0]), (4, fails[1]), (5, fails[0]), (5, fails[1]), (5, "plot_losses")):
        assert any(re.search(rf"step {step}\b.*ValueError: no {name}", line) for line in warnings), (step, name)
    assert any(
        re.search(r"\b1 step.*step 4\b", line) for line in warnings
    )  # number of non-finite steps, and the step of the weights
    assert_names(out, "checkpoints, metrics.jsonl")
    assert Checkpoints(folder / "failing" / "checkpoints").steps == (3, 4, 5)
    assert all(limits[name] == LONG_TIMEOUT for name in ("backup", "source", "tokens", "started"))


def test_failing_evaluation_ends_a_run_of_several_processes(monkeypatch):
    """Other processes may wait for the failed process, unless the work is local."""
    warnings = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError), errors_as_warnings("the evaluation", 3, warnings.append):
        raise ValueError
    with errors_as_warnings("drawing", 3, warnings.append, local=True):
        raise ValueError
    assert len(warnings) == 1


def test_out_of_memory_for_averaged_weights_is_a_warning(monkeypatch):
    def fail(state):
        raise MemoryError

    warnings = []
    monkeypatch.setattr(TrainState, "averaged", property(fail))
    run, stop = mock.MagicMock(spec=Run), mock.MagicMock(spec=Stop)
    run.is_writer, run.method = True, None
    evaluation = HeldOutEvaluation(run, mock.MagicMock(spec=Trackers), warnings.append, stop)
    sample = SampleEvaluation(run, warnings.append, stop)
    for part in (evaluation, sample):
        part.evaluate(3, object.__new__(TrainState))
    assert (evaluation.results, sample.text) == ({}, "")
    assert [line.count("MemoryError") for line in warnings] == [1, 1]


def test_signal_after_non_finite_steps_saves_no_checkpoint(capsys):
    saved = []
    steps = types.SimpleNamespace(wait=lambda drop: saved.append(drop), latest=7)
    run = mock.MagicMock(spec=Run, checkpoints=steps)
    reporter = mock.MagicMock(spec=MetricsReporter, skipped_in_a_row=2)
    saver = CheckpointSaver(run, reporter, mock.MagicMock(spec=WallTime))
    with mock.patch.object(CheckpointSaver, "save", lambda self, *step: saved.append(step)):
        saver.save_and_stop(9, object.__new__(TrainState), None)
    assert saved == [False]
    assert_names(capsys.readouterr().err, "step 7", "2 steps")


def test_other_processes_wait_while_the_initial_model_is_fetched(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(start, "abstract_hf", lambda source: found.append((source, takes_time())))
    monkeypatch.setattr(start, "write_source", lambda model, run: None)
    config = TrainConfig(init_from="org/name")
    start.fetch_source(run_at(config, tmp_path))
    assert found == [("org/name", True)]
    (tmp_path / "source").mkdir()
    start.fetch_source(run_at(config, tmp_path))
    assert len(found) == 2  # the source may be that of another start as long as no run was made from it
    (tmp_path / "tokenizer").mkdir()
    save_settings(config, tmp_path / "settings.json")
    start.fetch_source(run_at(config, tmp_path))
    assert len(found) == 2
    config = TrainConfig()
    with refused(ConfigError, "init_from=None"):
        start.fetch_source(run_at(config, tmp_path))
    assert len(found) == 2


@pytest.mark.slow
def test_steps_are_dispatched_ahead_of_their_metrics(folder):
    """The loop dispatches two steps ahead. Before a checkpoint, all metrics are read, in order."""
    seen = []
    step, report, save = Trainer.step, MetricsReporter.report, CheckpointSaver.save

    def begun(self, state, batch):
        seen.append("step")
        assert isinstance(batch.tokens, jax.Array)
        return step(self, state, batch)

    def read(self, row):
        seen.append(row["step"])
        report(self, row)

    def saved(self, *args):
        seen.append("save")
        save(self, *args)

    options = QUICK | {"--steps": 6, "--checkpoint-every": 4, "--data": folder / "texts"}
    patches = mock.patch.object(MetricsReporter, "report", read), mock.patch.object(CheckpointSaver, "save", saved)
    with patches[0], patches[1], mock.patch.object(Trainer, "step", begun):
        call("train", "--run-dir", folder / "ahead", *flags(OPTIONS | options), devices=2)  # one would read NumPy's
    assert seen == [*("step", "step", "step", 1, "step", 2, 3, 4, "save"), *("step", "step", 5, 6, "save")]


@pytest.mark.slow
def test_data_wait_is_reported_for_a_slow_reader(folder):
    real = Batches.__next__

    def slow(self):
        time.sleep(0.3)
        return real(self)

    options = QUICK | {"--steps": 6, "--checkpoint-every": 9, "--data": folder / "texts"}
    with mock.patch.object(Batches, "__next__", slow):
        call("train", "--run-dir", folder / "slow", *flags(OPTIONS | options))
    rows = steps_of(folder / "slow")
    waits = [row["data_wait"] * row["step_seconds"] for row in rows]
    assert 0.3 < sum(waits) < 2.5 and all(row["data_wait"] <= 1 for row in rows)
    assert sum(waits) > 0.5 * sum(row["step_seconds"] for row in rows), waits


@pytest.mark.slow
def test_due_checkpoint_is_saved_before_a_data_error(folder):
    real = Batches.__next__

    def torn(self):
        if self._row >= 4 * 8:
            raise DataError("row 32 is torn")
        return real(self)

    options = QUICK | {"--steps": 6, "--data": folder / "texts"}
    with mock.patch.object(Batches, "__next__", torn):
        _, err = call("train", "--run-dir", folder / "torn", *flags(OPTIONS | options), code=3)
    assert "row 32 is torn" in err and Checkpoints(folder / "torn" / "checkpoints").latest == 4
    assert [row["step"] for row in steps_of(folder / "torn")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_goodput_over_two_starts(folder):
    """Steps that were computed twice are counted once."""
    options = QUICK | {"--checkpoint-every": 2, "--data": folder / "texts"}
    run, words = folder / "time", flags(OPTIONS | options)
    save = CheckpointSaver.save

    def killed(self, step, *rest):
        assert step < 4
        save(self, step, *rest)

    with mock.patch.object(CheckpointSaver, "save", killed), pytest.raises(AssertionError):
        call("train", "--run-dir", run, *words)
    before = steps_of(run)
    assert [row["step"] for row in before] == [1, 2, 3, 4]
    _, err = call("train", "--run-dir", run, *words)
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[:2] == before[:2]
    assert rows[2]["run_seconds"] > before[3]["run_seconds"]
    productive = sum(row["step_seconds"] * (1 - row["data_wait"]) for row in rows)
    assert rows[3]["goodput"] == pytest.approx(productive / rows[3]["run_seconds"], rel=1e-6)
    assert all(0 <= row["data_wait"] <= 1 for row in rows)
    share = round(100 * rows[3]["goodput"])
    assert re.search(rf"goodput\D*{share}%", err), err


@pytest.mark.slow
def test_expert_and_draft_token_metrics(folder):
    """Each row of the metrics has a value for each layer with experts."""
    options = dict(model="tiny-moe", steps=2, sample_tokens=0, eval_every=0, mtp_depths=1)
    options |= dict(tokenizer="bpe", bpe_vocab_size=300)
    run = Trained(folder / "moe", data=folder / "texts", **options)
    assert load_tokenizer(run.dir / "tokenizer").vocab_size == 300
    assert len(run.rows) == 2 and "load" in run.err
    for row in run.rows:
        for name in ("load", "dropped", "balance_loss", "router_z_loss", "router_entropy"):
            assert len(row[name]) == 6, name  # the MTP depth has experts, too
        assert all(1 <= load <= 2 for load in row["load"]) and row["dropped"] == [0.0] * 6
        assert all(0 < entropy < 1.39 for entropy in row["router_entropy"])
        assert len(row["mtp_nll"]) == 1 and row["loss"] > row["nll"] + 0.09 * row["mtp_nll"][0]
    assert (run.dir / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    assert "expert_load.png" in run.out and re.search(r"(\d\.\d\d(, )?){6}", run.out)
    rows = read_metrics(run.dir / "metrics.jsonl")
    (acceptance,) = [row["mtp_acceptance"] for row in rows if "mtp_acceptance" in row]
    assert len(acceptance) == 1 and 0 <= acceptance[0] <= 1
    assert_names(run.err, f"{acceptance[0]:.1%}")


@pytest.mark.slow
def test_finished_run_continues_with_more_steps(folder):
    constant = dict(optimizer__schedule="constant", optimizer__warmup_steps=0, held_out_fraction=0, sample_tokens=0)
    long = Trained(folder / "long", data=folder / "texts", **constant)
    short = Trained(folder / "short", data=folder / "texts", **constant, steps=2)
    again = Trained(folder / "short", data=folder / "texts", **constant)
    assert first_step(again.err) == 2 and short.column("loss") == long.column("loss")
    assert load_settings(again.dir / "settings.json").steps == 4
    words = flags(OPTIONS | QUICK | {"--steps": 1, "--data": folder / "texts"})
    _, err = call("train", "--run-dir", again.dir, *words, code=2)
    assert re.search(r"--steps=1\b.*\b4\b", err)


@pytest.mark.slow
def test_resumed_run_keeps_its_settings_and_reports_changes(folder):
    rate = dict(optimizer__learning_rate=1e-2, held_out_fraction=0, sample_tokens=0)
    begun = Trained(folder / "kept", data=folder / "texts", **rate)
    before = (begun.dir / "settings.json").read_bytes()
    (folder / "kept.yaml").write_text("steps: 6\noptimizer: {weight-decay: 3e-2}")
    changed = ("train", "--run-dir", begun.dir, "--config", folder / "kept.yaml")
    _, err = call(*changed, code=2)
    assert "--optimizer.weight-decay 0.1 -> 0.03" not in err
    assert_names(err, "--optimizer.weight-decay=0.03", "0.1", "--allow-changes")
    assert (begun.dir / "settings.json").read_bytes() == before and len(begun.rows) == 4
    _, err = call(*changed, "--allow-changes")
    assert_names(err, "--steps 4 -> 6", "--optimizer.weight-decay 0.1 -> 0.03")
    assert err.count(" -> ") == 2
    assert first_step(err) == 4 and begun.column("step") == [1, 2, 3, 4, 5, 6]
    assert begun.column("learning_rate")[4] > 2e-3  # six steps starting at 1e-2; the default peak is 3e-4
    (entry,) = json.loads((begun.dir / "settings.json").read_text())["history"]
    assert entry["step"] == 4 and entry["changes"]["optimizer.weight_decay"] == [0.1, 0.03]
    _, err = call("train", "--run-dir", begun.dir)
    assert " -> " not in err and load_settings(begun.dir / "settings.json").optimizer.weight_decay == 0.03


@pytest.mark.slow
@pytest.mark.parametrize("there", [(), ("notes.txt",)], ids=["new", "there"])
@pytest.mark.parametrize(
    "options, code",
    [
        pytest.param({"--data": "no/where"}, 3, id="data"),
        pytest.param({"--tokenizer": "no/where"}, 3, id="tokenizer"),
        pytest.param({"--export": "tests"}, 2, id="export-exists"),
        pytest.param({"--export": "README.md/out"}, 4, id="export-under-a-file"),
        pytest.param({"--seq-len": 4096}, 2, id="seq-len"),
        pytest.param({}, 2, id="trackers"),
    ],
)
def test_failed_start_leaves_no_files(folder, tmp_path, options, code, there):
    run = tmp_path / "run"
    for name in there:
        run.mkdir()
        (run / name).write_text("mine")
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": run} | options)
    with mock.patch.object(run_module, "open_trackers", side_effect=ConfigError("it cannot be opened")):
        call("train", *words, code=code)
    assert [path.name for path in run.iterdir()] == list(there) if there else not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, field",
    [
        pytest.param({"--set": "logit_soft_cap=3.0"}, "DecoderConfig.logit_soft_cap=3.0", id="logit-soft-cap"),
        pytest.param({"--mtp-depths": 1}, None, id="mtp"),  # draft layers are not exported
        pytest.param({"--lora.rank": 2, "--lora.targets": "*.mlp.*"}, None, id="lora"),
    ],
)
def test_unsupported_exports_are_refused_before_data_are_read(tmp_path, options, field):
    options = {"--model": "tiny"} | options
    words = flags(OPTIONS | QUICK | {"--data": "no/where", "--run-dir": tmp_path / "run"} | options)
    names = ["export"] + ["export-adapter"] * ("--lora.rank" in options or field is not None)
    for name in names:
        adapted = ["--lora.rank", 2, "--lora.targets", "*.mlp.*"] if name == "export-adapter" else []
        _, err = call("train", *words, *adapted, f"--{name}", tmp_path / "out", code=3 if field is None else 4)
        assert_names(err, *(["no/where"] if field is None else [f"--{name}='{tmp_path}/out'", field]))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_exports_need_safetensors_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    words = flags(OPTIONS | QUICK | {"--data": "no/where", "--run-dir": tmp_path / "run", "--model": "tiny"})
    for more in (["--export"], ["--lora.rank", 2, "--lora.targets", "*.mlp.*", "--export-adapter"]):
        _, err = call("train", *words, *more, tmp_path / "out", code=1)
        assert_names(error_of(err), "'safetensors'")


@pytest.mark.slow
def test_run_keeps_the_sizes_of_model_config_and_set(folder, tmp_path):
    """Resuming, sampling and export need neither the flags nor the file. The file is a Hugging Face or JSON config."""
    source = tmp_path / "config.json"
    source.write_text((ROOT / "tests/fixtures/chat_llama/config.json").read_text())
    read = read_config(ROOT / "tests/fixtures/chat_llama")[0]
    words = flags({key: value for key, value in (OPTIONS | QUICK).items() if key != "--model"} | {"--steps": 2})
    words += ["--run-dir", tmp_path / "run", "--data", folder / "texts"]
    own = ("--model-config", source, "--set", "num_layers=3", "--set", "mlp_dim=20")
    _, err = call("train", *words, *own)
    config = with_fields(read, ("num_layers=3", "mlp_dim=20"))
    assert_names(err, "config.json", "num_layers=3", "mlp_dim=20", f"{ed.count_parameters(config):,}")
    assert ed.DecoderConfig.from_json((tmp_path / "run" / "model.json").read_text()) == config
    assert call("train", *words, *own, "--steps", 3)[1].count(" -> ") == 1  # only the number of steps changes
    source.unlink()
    _, err = call("train", "--run-dir", tmp_path / "run", "--steps", 4, "--export", tmp_path / "out")
    assert first_step(err) == 3 and ed.abstract_hf(tmp_path / "out").config == config
    out, _ = call("generate", "--run-dir", tmp_path / "run", "--prompt", "the", "--max-new-tokens", 2)
    assert out.startswith("the")
    _, err = call("train", "--run-dir", tmp_path / "run", "--set", "mlp_dim=24", code=2)
    assert_names(err, "'mlp_dim=24'", "('num_layers=3', 'mlp_dim=20')", "--run-dir")
    saved = tmp_path / "own.json"
    saved.write_text(config.to_json())
    run = load_settings(tmp_path / "run" / "settings.json")
    same = replace(run, model_config=str(saved), set=())
    assert run.set == own[3::2] and resumed(same, run.run_dir)[0] == run
    with refused(ConfigError, "set=('mlp_dim=24',)"):
        resumed(replace(run, model_config=str(saved), set=("mlp_dim=24",)), run.run_dir)


@pytest.mark.slow
def test_describe_prints_all_weights():
    out, _ = call("train", "--describe", "--model", "tiny", "--batch-size", 4)
    assert_names(out, "embedding.table", "4096 x 256", "vocab embed", "4,737,792")
    out, _ = call("train", "--describe", "--model", "llama3-70b", "--batch-size", 4, "--mesh.fsdp", 64)
    assert "fsdp, -" in out and re.search(r"70,553,706,496\D+4,4\d\d\.\d\d", out)
    for axis in ("fsdp_transpose", "tensor_sequence", "expert"):
        out, _ = call("train", "--describe", f"--mesh.{axis.replace('_', '-')}", 2, devices=2)
        assert re.search(rf"-, {axis}\b|{axis}, -", out), axis


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.slow
def test_run_on_conversations_with_a_chat_template(folder):
    """Each conversation has 6 + 1 + 11 + 3 bytes, of which 3 are targets. The template is saved."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]
    lines = "".join(json.dumps({"messages": chat, "id": number}) + "\n" for number in range(16))
    (folder / "chats.jsonl").write_text(lines)
    (folder / "chatml.jinja").write_text(CHATML)
    options = dict(data=folder / "chats.jsonl", held_out=folder / "chats.jsonl", seq_len=24, sample_tokens=0, steps=2)
    run = Trained(folder / "chats", chat_template=folder / "chatml.jinja", **options)
    assert run.column("tokens") == [8 * 3.0] * 2
    assert re.search(r"\b16\b.*\b336\b.*\b48\b.*\b16\b", run.err)  # documents, tokens, targets and sequences
    assert len(re.findall(r"\b48\b", run.out)) == 2  # held-out tokens and bytes
    kept = run.dir / "tokenizer" / "chat_template.jinja"
    assert kept.read_text() == CHATML
    (folder / "chatml.jinja").unlink()
    again = Trained(run.dir, chat_template=folder / "chatml.jinja", **options | {"steps": 3})
    assert first_step(again.err) == 2
    words = flags(OPTIONS | {"--run-dir": run.dir, "--data": folder / "chats.jsonl"})
    out, _ = call("train", *words, "--held-out", folder / "chats.jsonl", "--chat-template", kept, "--describe-data")
    assert_names(out, "<user>?<assistant>⟦abc⟧", "48", "14.3%")
    _, err = call("train", *flags(OPTIONS | {"--run-dir": folder / "none", "--data": folder / "chats.jsonl"}), code=3)
    assert_names(err, "--chat-template")


def test_list_models_prints_model_names():
    assert {"tiny", "tiny-moe", "llama3-8b"} <= set(call("train", "--list-models")[0].split())


@pytest.mark.slow(fast=("train-model.json", "describe-model.json"))
@pytest.mark.parametrize("foreign", ["model.json", "metrics.jsonl", "settings.json", "data/tokens.bin", "tokenizer/a"])
@pytest.mark.parametrize("how", [(), ("--describe-data",), ("--describe",)], ids=["train", "describe-data", "describe"])
def test_directory_with_unrelated_files_is_not_changed(folder, tmp_path, foreign, how):
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text('{"step": 5, "mine": 1}\n')
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": tmp_path})
    _, err = call("train", *words, *how, code=2)
    assert_names(error_of(err), f"--run-dir='{tmp_path}'", foreign.partition("/")[0])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [foreign]
    assert (tmp_path / foreign).read_text() == '{"step": 5, "mine": 1}\n'


def test_run_directory_in_use_is_not_changed(folder, tmp_path):
    with RunLock(tmp_path):
        _, err = call("train", "--run-dir", tmp_path, *flags(OPTIONS | {"--data": folder / "texts"}), code=4)
    assert_names(error_of(err), tmp_path, f"pid {os.getpid()}")
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.slow(fast=("model",))
@pytest.mark.parametrize(
    "options, names",
    [
        pytest.param({"--model": "tinny"}, ["--model='tinny'", "'tiny'"], id="model"),
        pytest.param({"--data": "no/where"}, ["no/where"], id="data"),
        pytest.param({"--seq-len": 4096}, ["--seq-len=4096", "2048"], id="seq-len-above-positions"),
        pytest.param({"--sample-tokens": 2048}, ["--sample-tokens=2048", "--prompt"], id="sample-tokens"),
        pytest.param({"--seq-len": 1}, ["--seq-len=1", "2"], id="seq-len"),
        pytest.param({"--tokenizer": "tests/fixtures/chat_llama", "--steps": 0}, ["--steps=0"], id="steps"),
        pytest.param({"--optimizer.eps": -1}, ["--optimizer.eps=-1.0"], id="eps"),
        pytest.param(
            {"--model-config": "no/where"}, ["--model='gpt3-52k'", "--model-config='no/where'"], id="model-config"
        ),
        pytest.param({"--set": "num_head=3"}, ["--set='num_head'", "'num_heads'"], id="set-name"),
        pytest.param({"--set": "num_kv_heads=3"}, ["AttentionConfig.num_heads=2", "num_kv_heads=3"], id="set-value"),
        pytest.param({"--mesh.fsdp": 3}, ["--mesh.fsdp=3", "--mesh.data=-1", "1"], id="mesh"),
    ],
)
def test_invalid_flags_are_named_with_an_exit_code(folder, tmp_path, options, names):
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": tmp_path / "run"} | options)
    _, err = call("train", *words, code=3 if "--data" in options else 2)
    assert_names(error_of(err), *names)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_mesh_that_replicates_too_many_weights_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("eqx_decoders.sharding.replication.MIN_WEIGHTS", 0)
    given = OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": tmp_path / "run"}
    _, err = call("train", *flags(given | {"--mesh.fsdp": 2, "--replicated-tolerance": 0.0}), devices=2, code=2)
    assert_names(err, "--replicated-tolerance=0.0", "--mesh.fsdp=2", "norm")
    assert not (tmp_path / "run" / "tokenizer").exists()
