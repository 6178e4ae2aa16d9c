"""The training program in this process: every setting has an effect, and all ways to compute give the same losses."""

import contextlib
import json
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
from eqx_decoders.io.coordination import LONG, Stop
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.io.run_lock import RunLock
from eqx_decoders.io.status import takes_time
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.evaluation import evaluate
from eqx_decoders.training.methods import texts
from eqx_decoders.training.run import loop as run_module, setup
from eqx_decoders.training.run.goodput import WallTime
from eqx_decoders.training.run.hooks import evaluation_hook, sample_hook
from eqx_decoders.training.run.hooks.base import failures_as_warnings
from eqx_decoders.training.run.hooks.checkpoint_hook import CheckpointHook
from eqx_decoders.training.run.hooks.metrics_reporter import MetricsReporter
from eqx_decoders.training.run.metrics import read_metrics
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.run.progress import Progress
from eqx_decoders.training.run.run_loading import load_run
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.settings_file import load_settings, save_settings
from eqx_decoders.training.step import loss as loss_module, step as step_module
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_log import StepLog
from eqx_decoders.training.step.train_state import TrainState
from tests.commands import ROOT, call, flags, steps_of, write_corpus
from tests.compare import assert_allclose
from tests.training.run.starts import resumed, run_at


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
QUICK = {"--held-out-fraction": 0, "--sample-tokens": 0, "--eval-every": 0}  # nothing but steps is compiled


class Trained:
    """A run from its first to its last step: its directory, output, metrics and the program of its first step."""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts of some 200 bytes, and others of 5 in records with a field `body`."""
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
    """Another way to compute the same: all losses must be those of `base`."""
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
    """Everything that changes what is computed, as far as one run can show it."""
    options = dict(seed=1, dtype="bfloat16", step__z_loss=0.1, text_field="body", held_out=folder / "held_out")
    options |= dict(optimizer__schedule="wsd", optimizer__warmup_steps=1, optimizer__decay_fraction=0.5)
    options |= dict(optimizer__min_lr_ratio=0.2, optimizer__learning_rate=1e-2, mesh__data=4, mesh__context=2)
    options |= dict(context_order="zigzag", context_form="all_to_all")
    (folder / "held_out.jsonl").write_text(json.dumps({"body": "x" * 100}))
    options |= dict(held_out=folder / "held_out.jsonl", sample_tokens=0)
    return Trained(folder / "other", "--no-pack", devices=8, data=folder / "short.jsonl", **options)


@pytest.mark.slow
def test_a_run_trains_to_its_end_and_reports_how_good_it_is(base):
    assert all(0 < share <= 1 for share in base.column("mfu"))
    state = 52_464 * 4 * 3 / 1e9  # weights and two moments
    assert len(set(base.column("peak_memory_gb"))) == 1 and state < base.column("peak_memory_gb")[0] < 50 * state
    assert "52,464 weights on" in base.err and "documents" in base.err
    assert base.column("step") == [1, 2, 3, 4] and not any(base.column("skipped"))
    assert all(8 * 10 < tokens <= 8 * 15 for tokens in base.column("tokens"))
    assert base.column("loss") == base.column("nll") and base.column("loss")[-1] < base.column("loss")[0]
    assert all(seconds > 0 for seconds in base.column("step_seconds"))
    assert Checkpoints(base.dir / "checkpoints").steps == (2, 4)
    assert list(base.held_out) == [2, 4]
    assert load_tokenizer(base.dir / "tokenizer").vocab_size == 259
    assert (base.dir / "loss.png").read_bytes().startswith(b"\x89PNG") and str(base.dir) in base.out
    per_token, per_byte = (float(re.search(rf"loss: ([\d.]+) nats per {of}", base.out)[1]) for of in ("token", "byte"))
    assert per_token == pytest.approx(base.held_out[4], abs=1e-3)
    assert per_byte == pytest.approx(per_token, rel=0.01)  # of bytes, each a token; and an end for each document
    assert 0.5 < float(re.search(r"gzip -9 needs: ([\d.]+)", base.out)[1]) < 3
    assert re.search(r"sample:\nthe.", base.out)


@pytest.mark.slow
def test_every_way_to_compute_gives_the_same_losses(base, sharded):
    for name in ("loss", "grad_norm", "accuracy", "tokens", "learning_rate", "epochs"):
        assert_allclose(sharded.column(name), base.column(name), rtol=2e-5, err_msg=name)
    assert "fsdp=4 x tensor=2" in sharded.err and "one device" in base.err
    assert "remat" in sharded.program and "remat" not in base.program
    assert "4,16,1024]" in sharded.program and "4,16,1024]" not in base.program  # half of the rows at a time
    assert sharded.plain_loss.called and not base.plain_loss.called
    assert [len(row["activations/mean"]) for row in sharded.rows] == [1] * 4
    assert not any("activations/mean" in row for row in base.rows)
    assert Checkpoints(sharded.dir / "checkpoints").steps == (4,)
    assert abs(sharded.held_out[2] / base.held_out[2] - 1) > 1e-5, "of one batch, not of sixteen"
    assert sharded.held_out[4] == pytest.approx(base.held_out[4], rel=1e-5), "at the end of all"


@pytest.mark.slow
def test_other_settings_compute_something_else(base, other):
    assert "bf16[" in other.program and "bf16[" not in base.program
    assert all(row["loss"] > row["nll"] + 1 for row in other.rows)  # 0.1 log(Z)^2 with Z of 1024 logits near zero
    assert "data=4 x context=2" in other.err
    assert "sizes=(4, 4, 4, 4)" in other.program and "sizes=(4, 4, 4, 4)" not in base.program  # rows of sixteen tokens
    assert " all_to_all[" in other.program and " all_to_all[" not in base.program
    assert "50 documents" in other.err and "50 sequences an epoch" in other.err  # 9 tokens each, and none together
    assert set(other.column("tokens")) == {8 * 8.0}
    assert_allclose(other.column("learning_rate"), [1e-2, 1e-2, 1e-2, 6e-3], rtol=1e-6)
    assert "of all 101 tokens" in other.out and "sample:" not in other.out
    assert load_settings(other.dir / "settings.json").dataset.seed == 1
    assert other.column("nll")[0] != pytest.approx(base.column("nll")[0], abs=1e-4), "other weights"


def test_bounds_of_memory_reach_the_model():
    execution = TrainConfig(head_bytes=5, exchange_bytes=7, batch_split=3).execution()
    assert (execution.head_bytes, execution.exchange_bytes, execution.batch_split) == (5, 7, 3)
    with pytest.raises(ed.ConfigError, match="exchange_bytes=0"):
        TrainConfig(exchange_bytes=0)


@pytest.mark.slow
def test_optimizers_move_the_weights_as_asked(base, folder):
    """With eps = 1 AdamW's step is nearly the gradient, so that its norm shows."""

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
def test_too_little_memory_is_met_with_the_sizes_and_what_to_turn(folder):
    """The state of the last checkpoint is there, so that it can go on with a smaller batch."""

    def exhausted(kept, state):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.\n\nstack")

    exhausted.lower = step_module._compiled_step.lower
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": folder / "exhausted"})
    with mock.patch.object(step_module, "_compiled_step", exhausted):
        _, err = call("train", *words, code=1)
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    parts = ("--batch-size=8 x --seq-len=16", "52,464 weights", "allocating 12884901888 bytes. Lower --batch-size or")
    for part in (*parts, "--step.gradient-accumulation-steps", "--remat='full'", "--mesh.fsdp"):
        assert part in line, part


@pytest.mark.slow
def test_the_share_of_the_peak_is_at_most_all_of_it(folder):
    """Of a peak that is beyond all, and of one that is too low: then the fastest step so far is taken for it."""
    for peak, shares in ((1e6, lambda share: 0 < share < 1e-3), (1e-9, lambda share: 0 < share <= 1)):
        run = Trained(folder / f"peak{peak}", data=folder / "texts", peak_tflops=peak, held_out_fraction=0, steps=3)
        assert all(map(shares, run.column("mfu")))
    assert max(run.column("mfu")) == 1


@pytest.mark.slow
def test_a_run_on_a_mixture_tells_of_each_source_and_goes_on_with_other_weights(folder):
    """Each has a held-out set; of how many batches of them the last loss is can be set."""
    options = dict(steps=2, eval_every=0, sample_tokens=0)
    (folder / "numbers.txt").write_text("\n".join(str(number) for number in range(90_000)))  # many documents
    words = ("--data", f"{folder / 'texts'}=0.75", f"{folder / 'numbers.txt'}=0.25")
    run = Trained(folder / "mixture", *words, final_eval_batches=1, **options)
    for part in (r"texts: \d+ documents, .* weight 0.75, [\d.e-]+ epochs in 2 steps", "numbers: .* weight 0.25, "):
        assert re.search(part, run.err), part
    rows = read_metrics(run.dir / "metrics.jsonl")
    (losses,) = (
        {name: row[name] for name in row if name.startswith("eval_loss")} for row in rows if "eval_loss" in row
    )
    assert list(losses) == ["eval_loss", "eval_loss/texts", "eval_loss/numbers"]
    assert min(losses.values()) < losses["eval_loss"] < max(losses.values())
    shown = ", ".join(f"{name} {losses[f'eval_loss/{name}']:.4f}" for name in ("texts", "numbers"))
    assert f"held-out loss {losses['eval_loss']:.4f} nats per token ({shown})" in run.err
    assert re.search(r"held-out loss: [\d.]+ nats per token, of the first \d+ tokens", run.out)
    assert "held-out loss of numbers:" in run.out and "per byte" not in run.out
    assert set(run.rows[0]) >= {"epochs", "epochs/texts", "epochs/numbers"}
    assert run.rows[1]["epochs/texts"] == 2 * run.rows[0]["epochs/texts"] > 0
    other = ("train", "--run-dir", run.dir, "--steps", 4, "--data", words[1], words[2].replace("0.25", "2.25"))
    _, err = call(*other, code=2)
    assert "--data=" in err and "was trained with" in err and "give --allow-changes" in err
    _, err = call(*other, "--allow-changes", "--final-eval-batches", "None")
    assert "resumed at step 2" in err and "changed: --data" in err
    assert run.rows[3]["epochs/numbers"] - run.rows[1]["epochs/numbers"] == pytest.approx(
        3 * run.rows[1]["epochs/numbers"]
    )
    last = read_metrics(run.dir / "metrics.jsonl")[-1]
    assert last["step"] == 4 and abs(last["eval_loss/texts"] - losses["eval_loss/texts"]) > 1e-4


@pytest.mark.slow
def test_a_run_in_half_precision_gets_running_means_with_which_it_is_evaluated(folder):
    """Weights and moments are kept in bfloat16, the means in float32; they begin where that is asked for."""
    dtypes = dict(params_dtype="bfloat16", optimizer__moments_dtype="bfloat16", eval_every=0, sample_tokens=0)
    run = Trained(folder / "half", data=folder / "texts", optimizer__learning_rate=1e-2, steps=2, **dtypes)
    assert "bf16[" in run.program
    change = ("train", "--run-dir", run.dir, "--steps", 4, "--optimizer.ema-decay", 0.5)
    _, err = call(*change, code=2)
    assert "--optimizer.ema-decay=0.5, but" in err and "was trained with None" in err and "give --allow-changes" in err
    _, err = call(*change, "--allow-changes")
    assert "changed: --optimizer.ema-decay None -> 0.5" in err and run.column("step") == [1, 2, 3, 4]
    checkpoints = Checkpoints(run.dir / "checkpoints")
    assert not any(name.startswith("ema.") for name in checkpoints.manifest(2)["arrays"])
    arrays = {name: array["dtype"] for name, array in checkpoints.manifest()["arrays"].items() if array["shape"]}
    assert {dtype for name, dtype in arrays.items() if not name.startswith("ema.")} == {"bfloat16"}
    assert {dtype for name, dtype in arrays.items() if name.startswith("ema.")} == {"float32"}
    config, tokenizer = load_settings(run.dir / "settings.json"), load_tokenizer(run.dir / "tokenizer")
    with make_dataset(config.dataset, tokenizer, folder=run.dir / "data", split="held_out") as data:
        models = [load_run(run.dir), load_run(run.dir, ema=False)]
        losses = [evaluate(model, data.rewind(), config.dataset.batch_size).loss for model in models]
    assert losses[0] == pytest.approx(run.held_out[4], rel=1e-5) and abs(losses[1] - losses[0]) > 1e-4
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(models))
    assert np.array_equal(*(jax.tree.leaves(load_run(run.dir, 2, ema=ema))[0] for ema in (True, False)))


@pytest.mark.slow
def test_a_run_that_diverges_keeps_its_good_checkpoints_however_often_it_is_started(base, folder):
    """What the last finite step made may be of no use already: one more is kept until a finite step follows it."""
    run = shutil.copytree(base.dir, folder / "diverged")
    options = dict(optimizer__learning_rate=1e30, max_skipped=2, steps=12, eval_every=0)
    options |= dict(checkpoint_every=1, max_checkpoints=1, data=folder / "texts")
    for found in ([False, True, True], [True, True]):
        again = Trained(run, "--allow-changes", code=1, **options)
        assert again.column("skipped")[len(again.rows) - len(found) :] == found
        sentence = (
            r"error: 2 steps in a row were not finite \(loss=nan, .*\), and nothing of them is saved\. A new start "
            r"goes on from step 5: to go back to step 4, the newest with a finite step after it, move 5 out of .*diver"
        )
        assert re.search(sentence, again.err), again.err
        assert Checkpoints(run / "checkpoints").steps == (4, 5)


def test_a_checkpoint_of_an_earlier_start_that_was_stuck_says_nothing_of_those_before_it(tmp_path):
    """That of the last step is saved in any case: after 8 no step was finite, in that start or in this one."""
    rows = [{"step": step, "skipped": step > 8} for step in range(1, 13)] + [{"step": 12, "eval_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    checkpoints = mock.MagicMock(spec=Checkpoints, steps=(8, 10), directory="there")
    log = mock.MagicMock(spec=StepLog, last={"loss": float("nan"), "grad_norm": 1.0})
    log.__len__.return_value = 0
    shown = mock.MagicMock(spec=Trackers), mock.MagicMock(spec=Progress)
    reporter = MetricsReporter(tmp_path / "metrics.jsonl", checkpoints, 2, log, *shown)
    reporter.skipped_in_a_row = 2
    with pytest.raises(EqxDecodersError, match=r"goes on from step 10, after which no step was finite\. Lower"):
        reporter.read(12)
    checkpoints.steps = (6, 8, 10)
    with pytest.raises(EqxDecodersError, match=r"go back to step 6, the newest .*, move 8, 10 out of there"):
        reporter.read(12)


@pytest.mark.slow
def test_steps_that_were_begun_before_it_was_known_end_too(folder):
    options = dict(optimizer__learning_rate=1e30, max_skipped=2, steps=9, held_out_fraction=0, sample_tokens=0)
    run = Trained(folder / "skipped", data=folder / "texts", code=1, **options, checkpoint_every=9, eval_every=0)
    assert run.column("skipped") == [False, True, True, True, True]
    assert "error: 4 steps in a row were not finite" in run.err and "There is no checkpoint yet. Lower" in run.err
    assert Checkpoints(run.dir / "checkpoints").latest is None


@pytest.mark.slow
def test_the_checkpoint_comes_first_and_what_fails_after_it_is_told(folder):
    """Evaluations and samples at step 4 and in the end, and the drawing. Two steps are not finite: the checkpoint of
    the first is made at the next one, and that of the last takes the place of no other. No process is given up for
    what it does before the first step."""
    seen, limits = [], {}
    save, report, gather = CheckpointHook.save, MetricsReporter.report, run_module.all_gather_json

    def saved(self, step, state):
        seen.append(("save", step))
        save(self, step, state)

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

    names = {"evaluate_sets": evaluation_hook, "sample_text": sample_hook, "plot_losses": run_module}
    patches = [mock.patch.object(module, name, failing(name)) for name, module in names.items()]
    patches += [mock.patch.object(module, "all_gather_json", gathered) for module in (run_module, setup, texts)]
    patches += [
        mock.patch.object(CheckpointHook, "save", saved),
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
    for step in (4, 5):
        assert f"warning: the evaluation at step {step} failed, the run goes on: ValueError: no evaluate_sets" in err
        assert f"warning: the sample at step {step} failed, the run goes on: ValueError: no sample_text" in err
    assert "warning: drawing the losses at step 5 failed" in err and "checkpoints, metrics.jsonl" in out
    assert "warning: the last 1 steps were not finite: weights are of step 4" in err
    assert Checkpoints(folder / "failing" / "checkpoints").steps == (3, 4, 5)
    assert all(limits[name] == LONG for name in ("brought back", "source", "tokens", "started"))


def test_of_several_processes_a_failing_evaluation_ends_all(monkeypatch):
    """The others may wait for this one in the middle of it; but not where one works alone."""
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError), failures_as_warnings("the evaluation", 3, told.append):
        raise ValueError
    with failures_as_warnings("drawing", 3, told.append, local=True):
        raise ValueError
    assert len(told) == 1


def test_means_of_the_weights_that_do_not_fit_end_no_run(monkeypatch):
    def fail(state):
        raise MemoryError

    told = []
    monkeypatch.setattr(TrainState, "averaged", property(fail))
    run, stop, time = (mock.MagicMock(spec=kind) for kind in (PreparedRun, Stop, WallTime))
    run.writes, run.method = True, None
    evaluation = evaluation_hook.EvaluationHook(run, mock.MagicMock(spec=Trackers), told.append, time, stop)
    sample = sample_hook.SampleHook(run, told.append, time, stop)
    for hook in (evaluation, sample):
        hook.finish(3, object.__new__(TrainState))
    assert (evaluation.results, sample.text) == ({}, "")
    assert [each.count("failed, the run goes on: MemoryError") for each in told] == [1, 1]


def test_a_signal_saves_no_state_that_is_stuck(capsys):
    saved = []
    steps = types.SimpleNamespace(wait=lambda drop: saved.append(drop), latest=7)
    run = mock.MagicMock(spec=PreparedRun, checkpoints=steps)
    reporter = mock.MagicMock(spec=MetricsReporter, skipped_in_a_row=2)
    hook = CheckpointHook(run, reporter, mock.MagicMock(spec=WallTime))
    with mock.patch.object(CheckpointHook, "save", lambda self, *step: saved.append(step)):
        hook.save_and_stop(9, object.__new__(TrainState))
    assert saved == [False]
    assert "stopped, saved at step 7: the last 2 steps were not finite, and are not saved" in capsys.readouterr().err


def test_what_the_model_starts_from_is_fetched_in_something_that_takes_time(tmp_path, monkeypatch):
    """So that other processes wait for a download of hours."""
    found = []
    monkeypatch.setattr(setup, "abstract_hf", lambda source: found.append((source, takes_time())))
    monkeypatch.setattr(setup, "write_source", lambda model, run: None)
    config = TrainConfig(init_from="org/name")
    setup.fetch_source(run_at(config, tmp_path))
    assert found == [("org/name", True)]
    (tmp_path / "source").mkdir()
    setup.fetch_source(run_at(config, tmp_path))
    assert len(found) == 2, "nothing was made yet of what is there: it may be that of another start"
    (tmp_path / "tokenizer").mkdir()
    save_settings(config, tmp_path / "settings.json")
    setup.fetch_source(run_at(config, tmp_path))
    assert len(found) == 2
    config = TrainConfig()
    with pytest.raises(ConfigError, match="init_from=None"):
        setup.fetch_source(run_at(config, tmp_path))
    assert len(found) == 2


@pytest.mark.slow
def test_the_devices_do_not_wait_for_the_host(folder):
    """A step is begun before the metrics of the last two are read; all are read before a checkpoint, in order."""
    seen = []
    step, report, save = Trainer.step, MetricsReporter.report, CheckpointHook.save

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
    patches = mock.patch.object(MetricsReporter, "report", read), mock.patch.object(CheckpointHook, "save", saved)
    with patches[0], patches[1], mock.patch.object(Trainer, "step", begun):
        call("train", "--run-dir", folder / "ahead", *flags(OPTIONS | options), devices=2)  # one would read NumPy's
    assert seen == [*("step", "step", "step", 1, "step", 2, 3, 4, "save"), *("step", "step", 5, 6, "save")]


@pytest.mark.slow
def test_waiting_for_data_is_the_time_in_which_the_devices_have_nothing_to_do(folder):
    """A slow reader: most of a step's time, in the row of the step within which it was; before the first, too."""
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
def test_an_error_of_the_data_comes_after_the_checkpoint_that_is_due(folder):
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
def test_a_run_tells_where_its_time_goes(folder):
    """Of both starts; what was computed twice counts once."""
    options = QUICK | {"--checkpoint-every": 2, "--data": folder / "texts"}
    run, words = folder / "time", flags(OPTIONS | options)
    save = CheckpointHook.save

    def killed(self, step, state):
        assert step < 4
        save(self, step, state)

    with mock.patch.object(CheckpointHook, "save", killed), pytest.raises(AssertionError):
        call("train", "--run-dir", run, *words)
    before = steps_of(run)
    assert [row["step"] for row in before] == [1, 2, 3, 4]
    _, err = call("train", "--run-dir", run, *words)
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[:2] == before[:2]
    assert rows[2]["run_seconds"] > before[3]["run_seconds"], "of both starts"
    productive = sum(row["step_seconds"] * (1 - row["data_wait"]) for row in rows)
    assert rows[3]["goodput"] == pytest.approx(productive / rows[3]["run_seconds"], rel=1e-6)
    assert all(0 <= row["data_wait"] <= 1 for row in rows)
    share = round(100 * rows[3]["goodput"])
    assert re.search(rf"time of this process: .*starting \d+%.*; goodput of the run {share}%", err), err


@pytest.mark.slow
def test_a_run_with_experts_and_draft_tokens_reports_both(folder):
    """Each row has a figure for each layer with experts; the image and the last loads come at the end."""
    options = dict(model="tiny-moe", steps=2, sample_tokens=0, eval_every=0, mtp_depths=1)
    options |= dict(tokenizer="bpe", bpe_vocab_size=300)
    run = Trained(folder / "moe", data=folder / "texts", **options)
    assert load_tokenizer(run.dir / "tokenizer").vocab_size == 300
    assert len(run.rows) == 2 and "load" in run.err
    for row in run.rows:
        for name in ("load", "dropped", "balance_loss", "router_z_loss", "router_entropy"):
            assert len(row[name]) == 6, name  # the depth has experts, too
        assert all(1 <= load <= 2 for load in row["load"]) and row["dropped"] == [0.0] * 6
        assert all(0 < entropy < 1.39 for entropy in row["router_entropy"])
        assert len(row["mtp_nll"]) == 1 and row["loss"] > row["nll"] + 0.09 * row["mtp_nll"][0]
    assert (run.dir / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    assert "expert_load.png" in run.out and re.search(r"last 2 steps: (\d\.\d\d(, )?){6}", run.out)
    rows = read_metrics(run.dir / "metrics.jsonl")
    (acceptance,) = [row["mtp_acceptance"] for row in rows if "mtp_acceptance" in row]
    assert len(acceptance) == 1 and 0 <= acceptance[0] <= 1 and "draft tokens accepted" in run.err


@pytest.mark.slow
def test_more_steps_on_a_finished_run_go_on(folder):
    """With a constant rate a run of two steps, made longer, is the run of four."""
    constant = dict(optimizer__schedule="constant", optimizer__warmup_steps=0, held_out_fraction=0, sample_tokens=0)
    long = Trained(folder / "long", data=folder / "texts", **constant)
    short = Trained(folder / "short", data=folder / "texts", **constant, steps=2)
    again = Trained(folder / "short", data=folder / "texts", **constant)
    assert "resumed at step 2" in again.err and short.column("loss") == long.column("loss")
    assert load_settings(again.dir / "settings.json").steps == 4
    words = flags(OPTIONS | QUICK | {"--steps": 1, "--data": folder / "texts"})
    _, err = call("train", "--run-dir", again.dir, *words, code=2)
    assert "steps=1, but" in err and "has done 4 already" in err


@pytest.mark.slow
def test_a_resumed_run_keeps_what_is_not_given_and_tells_what_changes(folder):
    """Its model, data, tokenizer and rates; a changed optimizer is asked for, and stays in the settings' history."""
    rate = dict(optimizer__learning_rate=1e-2, held_out_fraction=0, sample_tokens=0)
    begun = Trained(folder / "kept", data=folder / "texts", **rate)
    before = (begun.dir / "settings.json").read_bytes()
    (folder / "kept.yaml").write_text("steps: 6\noptimizer: {weight-decay: 3e-2}")
    changed = ("train", "--run-dir", begun.dir, "--config", folder / "kept.yaml")
    _, err = call(*changed, code=2)
    assert "--optimizer.weight-decay 0.1 -> 0.03" not in err and "--optimizer.weight-decay=0.03, but" in err
    assert "was trained with 0.1: leave it out to keep the run's, or give --allow-changes" in err
    assert (begun.dir / "settings.json").read_bytes() == before and len(begun.rows) == 4
    _, err = call(*changed, "--allow-changes")
    assert "changed: --steps 4 -> 6\nchanged: --optimizer.weight-decay 0.1 -> 0.03\n" in err
    assert "resumed at step 4" in err and begun.column("step") == [1, 2, 3, 4, 5, 6]
    assert begun.column("learning_rate")[4] > 2e-3  # of six steps from 1e-2; the default's peak is 3e-4
    (entry,) = json.loads((begun.dir / "settings.json").read_text())["history"]
    assert entry["step"] == 4 and entry["changes"]["optimizer.weight_decay"] == [0.1, 0.03]
    _, err = call("train", "--run-dir", begun.dir)
    assert "changed" not in err and load_settings(begun.dir / "settings.json").optimizer.weight_decay == 0.03


@pytest.mark.slow
@pytest.mark.parametrize("there", [(), ("notes.txt",)], ids=["new", "there"])
@pytest.mark.parametrize(
    "options, code",
    [
        ({"--data": "no/where"}, 3),
        ({"--tokenizer": "no/where"}, 3),
        ({"--export": "tests"}, 2),
        ({"--export": "README.md/out"}, 4),
        ({"--seq-len": 4096}, 2),
        ({}, 2),  # its trackers
    ],
    ids=lambda value: str(value),
)
def test_a_start_that_fails_leaves_nothing_behind(folder, tmp_path, options, code, there):
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
    "options, says",
    [
        ({"--model": "tiny", "--set": "logit_soft_cap=3.0"}, "DecoderConfig.logit_soft_cap=3.0 would have to be None"),
        ({"--model": "tiny", "--mtp-depths": 1}, None),  # which is left out
        ({"--model": "tiny", "--lora-rank": 2, "--lora-targets": "*.mlp.*"}, None),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_exported_is_found_before_its_data_are_read(tmp_path, options, says):
    """Merged, and as an adapter."""
    words = flags(OPTIONS | QUICK | {"--data": "no/where", "--run-dir": tmp_path / "run"} | options)
    names = ["export"] + ["export-adapter"] * ("--lora-rank" in options or says is not None)
    for name in names:
        adapted = ["--lora-rank", 2, "--lora-targets", "*.mlp.*"] if name == "export-adapter" else []
        _, err = call("train", *words, *adapted, f"--{name}", tmp_path / "out", code=3 if says is None else 4)
        assert (f"--{name}='{tmp_path}/out' would fail after the last step. No family" in err) == (says is not None)
        assert "no/where" in err if says is None else says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_writes_exports_must_be_installed_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    words = flags(OPTIONS | QUICK | {"--data": "no/where", "--run-dir": tmp_path / "run", "--model": "tiny"})
    for more in (["--export"], ["--lora-rank", 2, "--lora-targets", "*.mlp.*", "--export-adapter"]):
        _, err = call("train", *words, *more, tmp_path / "out", code=1)
        assert "This needs the package 'safetensors'" in err


@pytest.mark.slow
def test_a_run_of_own_sizes_keeps_them(folder, tmp_path):
    """From a file of Hugging Face or of `to_json`; resumed, written from and exported without these flags and files."""
    source = tmp_path / "config.json"
    source.write_text((ROOT / "tests/fixtures/chat_llama/config.json").read_text())
    read = read_config(ROOT / "tests/fixtures/chat_llama")[0]
    words = flags({key: value for key, value in (OPTIONS | QUICK).items() if key != "--model"} | {"--steps": 2})
    words += ["--run-dir", tmp_path / "run", "--data", folder / "texts"]
    own = ("--model-config", source, "--set", "num_layers=3", "--set", "mlp_dim=20")
    _, err = call("train", *words, *own)
    config = with_fields(read, ("num_layers=3", "mlp_dim=20"))
    assert f"config.json num_layers=3 mlp_dim=20: {ed.count_parameters(config):,} weights on" in err
    assert ed.DecoderConfig.from_json((tmp_path / "run" / "model.json").read_text()) == config
    assert call("train", *words, *own, "--steps", 3)[1].count("changed: ") == 1  # the same sizes once more
    source.unlink()
    _, err = call("train", "--run-dir", tmp_path / "run", "--steps", 4, "--export", tmp_path / "out")
    assert "resumed at step 3" in err and ed.abstract_hf(tmp_path / "out").config == config
    out, _ = call("generate", "--run-dir", tmp_path / "run", "--prompt", "the", "--max-new-tokens", 2)
    assert out.startswith("the")
    _, err = call("train", "--run-dir", tmp_path / "run", "--set", "mlp_dim=24", code=2)
    assert "'mlp_dim=24'), but" in err and "was begun with ('num_layers=3', 'mlp_dim=20'): choose another" in err
    saved = tmp_path / "own.json"
    saved.write_text(config.to_json())
    run = load_settings(tmp_path / "run" / "settings.json")
    same = replace(run, model_config=str(saved), set=())
    assert run.set == own[3::2] and resumed(same, run.run_dir)[0] == run
    with pytest.raises(ConfigError, match=r"set=\('mlp_dim=24',\)"):
        resumed(replace(run, model_config=str(saved), set=("mlp_dim=24",)), run.run_dir)


@pytest.mark.slow
def test_describe_prints_the_weights():
    out, _ = call("train", "--describe", "--model", "tiny", "--batch-size", 4)
    assert "embedding.table" in out and "4096 x 256" in out and "vocab embed" in out and "4,737,792 weights" in out
    out, _ = call("train", "--describe", "--model", "llama3-70b", "--batch-size", 4, "--mesh.fsdp", 64)
    assert "fsdp, -" in out and re.search(r"70,553,706,496 weights +4,4\d\d\.\d\d", out)
    for axis in ("fsdp_transpose", "tensor_sequence", "expert"):
        out, _ = call("train", "--describe", f"--mesh.{axis.replace('_', '-')}", 2, devices=2)
        assert re.search(rf"-, {axis}\b|{axis}, -", out), axis


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.slow
def test_a_run_on_conversations_with_a_template_of_its_own(folder):
    """Each has 6 + 1 + 11 + 3 bytes, of which 3 are trained on; the template is kept."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]
    lines = "".join(json.dumps({"messages": chat, "id": number}) + "\n" for number in range(16))
    (folder / "chats.jsonl").write_text(lines)
    (folder / "chatml.jinja").write_text(CHATML)
    options = dict(data=folder / "chats.jsonl", held_out=folder / "chats.jsonl", seq_len=24, sample_tokens=0, steps=2)
    run = Trained(folder / "chats", chat_template=folder / "chatml.jinja", **options)
    assert (
        run.column("tokens") == [8 * 3.0] * 2
        and "16 documents, 336 tokens, 48 of them targets, 16 sequences an epoch" in run.err
    )
    assert "of all 48 tokens" in run.out and "of 48 bytes" in run.out
    kept = run.dir / "tokenizer" / "chat_template.jinja"
    assert kept.read_text() == CHATML
    (folder / "chatml.jinja").unlink()
    again = Trained(run.dir, chat_template=folder / "chatml.jinja", **options | {"steps": 3})
    assert "resumed at step 2" in again.err
    words = flags(OPTIONS | {"--run-dir": run.dir, "--data": folder / "chats.jsonl"})
    out, _ = call("train", *words, "--held-out", folder / "chats.jsonl", "--chat-template", kept, "--describe-data")
    assert "<user>?<assistant>⟦abc⟧" in out and "48 of them targets (14.3%)" in out
    _, err = call("train", *flags(OPTIONS | {"--run-dir": folder / "none", "--data": folder / "chats.jsonl"}), code=3)
    assert "there is no chat template" in err and "--chat-template" in err


def test_models_are_listed():
    assert {"tiny", "tiny-moe", "llama3-8b"} <= set(call("train", "--list-models")[0].split())


@pytest.mark.slow(fast=("()-model.json", "('--describe',)-model.json"))
@pytest.mark.parametrize("foreign", ["model.json", "metrics.jsonl", "settings.json", "data/tokens.bin", "tokenizer/a"])
@pytest.mark.parametrize("how", [(), ("--describe-data",), ("--describe",)], ids=str)
def test_a_directory_with_files_of_others_is_left_alone(folder, tmp_path, foreign, how):
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text('{"step": 5, "mine": 1}\n')
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": tmp_path})
    _, err = call("train", *words, *how, code=2)
    name = foreign.partition("/")[0]
    assert f"error: --run-dir='{tmp_path}' has {name} in {tmp_path}, but not from a run" in err
    assert "Choose another --run-dir, a new or empty one" in err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [foreign]
    assert (tmp_path / foreign).read_text() == '{"step": 5, "mine": 1}\n'


def test_a_run_directory_in_use_is_left_alone(folder, tmp_path):
    with RunLock(tmp_path):
        _, err = call("train", "--run-dir", tmp_path, *flags(OPTIONS | {"--data": folder / "texts"}), code=4)
    assert "is in use by pid" in err
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.slow(fast=("options0-Did you mean 'tiny'",))
@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"--model": "tinny"}, "Did you mean 'tiny'"),
        ({"--data": "no/where"}, "no/where' does not exist"),
        ({"--seq-len": 4096}, "error: --seq-len=4096, but the model has 2048 learned positions"),
        ({"--sample-tokens": 2048}, "error: --sample-tokens=2048 exceed the model's 2048 learned positions with the 4"),
        ({"--seq-len": 1}, "error: --seq-len=1 must be an integer of at least 2."),
        ({"--tokenizer": "tests/fixtures/chat_llama", "--steps": 0}, "error: --steps=0 must be"),
        ({"--optimizer.eps": -1}, "error: --optimizer.eps=-1.0 must be"),
        ({"--model-config": "no/where"}, "error: --model='gpt3-52k' and --model-config='no/where' exclude each other"),
        ({"--set": "num_head=3"}, "error: --set='num_head' is not known. Did you mean 'num_heads'?"),
        ({"--set": "num_kv_heads=3"}, "error: AttentionConfig.num_heads=2 must be a multiple of num_kv_heads=3"),
        ({"--mesh.fsdp": 3}, "error: --mesh.fsdp=3 needs 3 devices or a multiple of it for --mesh.data=-1, but 1"),
    ],
)
def test_mistakes_have_a_sentence_and_a_code(folder, tmp_path, options, sentence):
    words = flags(OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": tmp_path / "run"} | options)
    _, err = call("train", *words, code=3 if "--data" in options else 2)
    assert sentence in " ".join(err.replace("│", "").split())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_mesh_that_leaves_weights_whole_is_refused_at_once(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("eqx_decoders.sharding.replication.FEW", 0)
    given = OPTIONS | QUICK | {"--data": folder / "texts", "--run-dir": tmp_path / "run"}
    _, err = call("train", *flags(given | {"--mesh.fsdp": 2, "--replicated-tolerance": 0.0}), devices=2, code=2)
    assert "--replicated-tolerance=0.0: 0." in err and "--mesh.fsdp=2" in err and "norm" in err
    assert not (tmp_path / "run" / "tokenizer").exists()
