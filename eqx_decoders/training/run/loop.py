"""A training run: steps, evaluations, checkpoints and metrics in one run directory."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from eqx_decoders.data.batches import Batch, Batches
from eqx_decoders.data.dataset import make_dataset, make_held_out_sets, prepare_tokenizer
from eqx_decoders.data.host_rows import host_rows, place
from eqx_decoders.errors import CheckpointError, DataError, EqxDecodersError, check
from eqx_decoders.inference.text_model import prompt_ids
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import GROWING, RunBackup
from eqx_decoders.io.coordination import (
    AHEAD,
    LONG,
    ON_FAILURE,
    Stop,
    first_then_all,
    from_first,
    gather,
    wait_for,
    wait_for_verdict,
)
from eqx_decoders.io.huggingface.load import abstract_hf
from eqx_decoders.io.run_lock import EXIT_SIGTERM, Interrupt, RunLock, check_run_dir
from eqx_decoders.io.status import StatusLine, showing
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.replication import check_replicated
from eqx_decoders.training.config import TrainConfig, flag, is_new, save_settings, settings_json
from eqx_decoders.training.config_file import flat_settings
from eqx_decoders.training.evaluation import HeldOut, evaluate_sets, sample_text
from eqx_decoders.training.flops import device_flops, flops_per_token
from eqx_decoders.training.run.goodput import Goodput, WallTime, run_start
from eqx_decoders.training.run.media_eval import answers, describe_answers, draw_answers, placeholders, with_images
from eqx_decoders.training.run.metrics import MetricsRow, read_metrics
from eqx_decoders.training.run.plots import plot_loads, plot_losses
from eqx_decoders.training.run.progress import Progress
from eqx_decoders.training.run.report import (
    describe_model,
    diverged,
    last_finite,
    out_of_memory,
    print_status,
    shown,
    summary,
)
from eqx_decoders.training.run.run_directory import (
    MODEL,
    SOURCE,
    abstract_run,
    check_exports,
    check_found,
    checkpoints_of,
    export_adapter,
    export_run,
    is_begun,
    is_imported,
    keep_config,
    keep_source,
    keep_template,
    new_model,
    restore_state,
    resume_settings,
    run_template,
)
from eqx_decoders.training.run.trackers import Trackers, open_trackers
from eqx_decoders.training.step.step import Trainer, TrainState
from eqx_decoders.training.step.step_metrics import StepLog


ANSWERS_DRAWN = 24  # images with answers in the run directory


def train(config: TrainConfig) -> int:
    """Train to the last step, or until a signal asks to stop; the exit code of the program.

    In a run of several processes all of them must call this. Raises the errors of `eqx_decoders.errors`, and `Stopped`,
    a KeyboardInterrupt, for a signal before the first step.
    """
    run = TrainingLoop(config)
    try:
        return run.train()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise EqxDecodersError(out_of_memory(run.config, run.target, str(error))) from error


class TrainingLoop:
    """One process's part of a run. `train` prepares everything, takes the steps and finishes the run."""

    def __init__(self, config: TrainConfig):
        if config.checkpoint_dir is not None and "://" not in config.checkpoint_dir:
            config = dataclasses.replace(config, checkpoint_dir=os.path.abspath(config.checkpoint_dir))
        self.config = config
        self.dir = Path(config.run_dir)
        self.execution = config.execution()
        self.layout = self.execution.layout
        self.writes = jax.process_index() == 0  # the one process that writes settings, metrics and images
        self.interrupt = Interrupt(at_once=True)  # until there are steps to be saved
        self.stop = Stop(lambda: self.interrupt.requested)
        self.skipped_in_a_row = 0
        self.tracing = False
        self.begun = run_start()
        self.time = WallTime("starting", self.begun)

    def train(self) -> int:
        """The whole run; the exit code."""
        if self.writes:
            check_run_dir(self.dir)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(RunLock(self.dir)) if self.writes else None
            stack.enter_context(self.interrupt)
            if self.writes:
                stack.enter_context(showing())
            files = (self.dir / "settings.json", self.dir / MODEL)
            before = {file: file.read_bytes() for file in files if self.writes and file.is_file()}

            def undo() -> None:
                """A start that fails leaves nothing behind."""
                if lock is not None:
                    lock.undo()
                    for file, content in before.items():
                        file.write_bytes(content)

            ON_FAILURE.append(undo)  # of another process
            try:
                self._open_model_and_data(stack)
                state, start = self._first_state()
                self.log = self._step_log(start + 1)
                self.metrics = stack.enter_context(contextlib.closing(self._trackers(start + 1)))
                gather("started", seconds=LONG)
            except Exception:
                undo()
                raise
            finally:
                ON_FAILURE.remove(undo)
            self._copy()
            try:
                with Progress(self.config.steps, start=start) as self.progress:
                    with self.time.doing("steps"), self._traces():
                        state, step, stopped = self._steps(state, start)
                    self.time.switch("ending")
                    results, sample = ({}, "") if stopped else self._judge(state, step, last=True)
                codes = gather("stopped", self.interrupt.exit_code)
                if self.stop.agreed or any(codes):
                    self._stop(step, state)
                    return next(filter(None, codes), EXIT_SIGTERM)
                self._copy()
                self._export(state.averaged)
                stuck = self.skipped_in_a_row
                if stuck:
                    print_status(f"warning: the last {stuck} steps were not finite: weights are of step {step - stuck}")
                finite = not stuck and all(math.isfinite(each.loss) for each in results.values())
                self.checkpoints.wait(drop=finite)
            except jax.errors.JaxRuntimeError:
                wait_for_verdict()
                raise
            if self.writes:
                self._summarise(results, sample)
        return 0

    # --- before the first step ----------------------------------------------------------------------------------------

    def _open_model_and_data(self, stack: contextlib.ExitStack) -> None:
        self.copies = RunBackup(self.dir, self.config.checkpoint_dir)
        if self.writes:
            self.copies.try_out()
        if self.writes and (not is_begun(self.dir) or self.copies.taken_over):
            self.copies.bring_back()
        gather("brought back", seconds=LONG)
        self.config, self.changes = resume_settings(self.config, self.dir)
        if self.writes:
            check_found(self.config, self.changes, self.dir)
        config = self.config
        for name, (was, now) in self.changes.items():
            print_status(f"changed: {flag(name)} {shown(was)} -> {shown(now)}")
        self._check_same()
        if self.writes:  # settings now: they say what the tokenizer and the tokens are made with
            keep_config(config, self.dir, save=not self.changes and not checkpoints_of(config, self.dir).steps)
            self._keep_source()
        gather("source", seconds=LONG)
        self.target = abstract_run(config, self.dir, self.execution)
        check_replicated(self.target, self.layout, config.replicated_tolerance)
        check_exports(self.target, config, self.dir)
        self.dataset, self.reader = with_images(config.dataset, self.target.config, self.dir / SOURCE)
        self.tokenizer = first_then_all("tokenizer", self._tokenizer, self.dir / "tokenizer")
        self.data = stack.enter_context(self._batches())  # whose tokens all processes make together
        self.held_out = self._held_out_sets()
        for batches in self.held_out.values():
            stack.enter_context(batches)
        alone = jax.process_count() == 1
        with contextlib.nullcontext() if alone else StatusLine("waiting for the other processes (tokens)"):
            gather("tokens", seconds=LONG)
        parts = [part for batches in (self.data, *self.held_out.values()) for part in batches.parts]
        if self.tokenizer.vocab_size > self.target.config.vocab_size:
            for store in {id(part.store): part.store for part in parts}.values():
                store.check_ids(self.target.config.vocab_size, placeholders(self.target.config))
        made = [self.tokenizer.content_hash, *(part.store.content_hash for part in parts)]
        rule = f"tokenizer and tokens of process {jax.process_index()} are others than those of the first"
        check(made == from_first("made", made), f"{rule}: run_dir must be a directory that they share.", DataError)
        directory = config.checkpoint_dir or self.dir / "checkpoints"
        self.checkpoints = stack.enter_context(Checkpoints(directory, max_checkpoints=config.max_checkpoints))
        self.trainer = Trainer.create(config.optimizer_config(), self.target, steps=config.steps, config=config.step)

    def _keep_source(self) -> None:
        """Keep the description of the model that the run starts from, which may have to be downloaded first."""
        source, kept = self.config.init_from, (self.dir / SOURCE).exists()
        begun = is_begun(self.dir) or bool(checkpoints_of(self.config, self.dir).steps)
        rule = f"{self.dir / SOURCE} is there, but init_from={source}: of a start or an import that did not come to"
        check(source is not None or not kept, f"{rule} its end. Give init_from, or choose another run_dir.")
        if source is not None and not (kept and begun):  # else it may be another one's
            with StatusLine(f"fetching {source}", kept="what was downloaded is kept"):
                keep_source(abstract_hf(source), self.dir)

    def _check_same(self) -> None:
        """All processes must have been started with the same settings, on one run directory."""
        config = dataclasses.replace(self.config, run_dir="", distributed_timeout=1)
        own = json.loads(json.dumps(flat_settings(config)))
        first = from_first("settings", own)
        others = [flag(name) for name in first if own.get(name) != first[name]]
        rule = "must be the same in all processes, started with one command and one version of this library"
        check(own.keys() == first.keys() and not others, f"{', '.join(others) or 'the settings'} {rule}.")
        if jax.process_count() > 1:
            lock, holder = self.dir / ".lock", (self.dir / ".lock").read_text() if self.writes else ""
            holder = from_first("lock", holder)
            seen = f"run_dir={self.config.run_dir!r} is another directory for process {jax.process_index()}"
            wait_for(lambda: lock.exists() and lock.read_text() == holder, seen)

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the run, of the checkpoint that it starts from, or a new one."""
        config, size = self.config, self.target.config.vocab_size
        spec = config.tokenizer or ("bpe" if config.init_from is None else str(self.dir / SOURCE))
        limit = min(size, config.bpe_vocab_size or size, *placeholders(self.target.config))
        tokenizer = prepare_tokenizer(self.dir / "tokenizer", spec, self.dataset, limit)
        if self.writes:
            keep_template(config, self.dir)
        length = config.dataset.seq_len
        rows = getattr(self.target.config.positions, "max_positions", length)
        check(length <= rows, f"seq_len={length}, but the model has {rows} learned positions: lower it.")
        trained = self.target.trained_positions
        if self.writes and trained is not None and length > trained:
            print_status(f"warning: seq_len={length} is beyond the {trained} positions that the model was trained on")
        rule = f"but the model only {size}. Choose a smaller tokenizer or another model"
        count = getattr(tokenizer, "plain_size", tokenizer.vocab_size)  # the data may have none of the added tokens
        check(count <= size, f"tokenizer={spec!r} has {count} ids, {rule}.")
        self._check_sample(tokenizer)
        return tokenizer

    def _check_sample(self, tokenizer: Tokenizer) -> None:
        """A sample that can't be written is told of now, not after hours."""
        new, rows = self.config.sample_tokens, getattr(self.target.config.positions, "max_positions", None)
        if new == 0 or rows is None or (self.reader is not None and self.config.dataset.evaluates):
            return
        prompt = len(prompt_ids(tokenizer, self.config.prompt))
        rule = f"exceed the model's {rows} learned positions with the {prompt} tokens of prompt={self.config.prompt!r}"
        check(prompt + new <= rows, f"sample_tokens={new} {rule}: lower sample_tokens, or shorten the prompt.")

    def _batches(self) -> Batches:
        return make_dataset(self.dataset, self.tokenizer, **self._of_data())

    def _held_out_sets(self) -> dict[str, Batches]:
        return make_held_out_sets(self.dataset, self.tokenizer, **self._of_data())

    def _of_data(self) -> dict[str, Any]:
        """Where tokens are, which rows of a batch are of this process, and what writes conversations as texts."""
        rows = host_rows(self.layout, self.config.dataset.batch_size)
        given = {"folder": self.dir / "data", "rows": rows, "template": run_template(self.config, self.dir)}
        if self.reader is None:
            return given
        apart = self.config.step.gradient_accumulation_steps > 1 or not self.layout.single
        groups = len(rows) if apart else 1
        return given | {"media": (self.target.config, self.reader), "groups": groups}

    def _first_state(self) -> tuple[TrainState, int]:
        """The state of the newest checkpoint, or a new one, and the steps that it has taken."""
        config, key = self.config, jax.random.key(self.config.dataset.seed)
        print_status("\n".join(describe_model(config, self.target, self.trainer, self.execution)))
        if from_first("new", self.writes and (self.checkpoints.latest is None or is_imported(config, self.dir))):
            with StatusLine("making the model", kept=self._kept()):
                model = new_model(config, self.dir, self.execution)
                state, start = self.trainer.init(model, key=jax.random.fold_in(key, 1)), 0
        else:
            with StatusLine("loading the checkpoint", kept=self._kept()):
                state, data_state, start = restore_state(
                    self.checkpoints, self.trainer, self.target, key, say=print_status
                )
            self.data.set_state(data_state)
            print_status(f"resumed at step {start}")
        print_status(self.data.describe(start, config.steps))
        check(start <= config.steps, f"steps={config.steps}, but {self.dir} has done {start} already: ask for more.")
        for field in ("export", "export_adapter"):  # checked before the training, not after it
            directory = getattr(config, field)
            free = directory is None or start == config.steps or is_new(directory)
            free = from_first(field, free, seconds=LONG)  # behind the loading of the model
            check(free, f"{field}={directory!r} is not empty: give a new directory.")
        if self.writes:
            save_settings(config, self.dir / "settings.json", changes=self.changes, step=start)
            self.copies.claim()
            self.copies.keep()
        return state, start

    def _kept(self) -> str:
        """What there is of the run before its first step."""
        step = self.checkpoints.latest
        return f"the run is as it was saved at step {step}" if step else "the tokenizer and the tokens are kept"

    def _step_log(self, first_step: int) -> StepLog:
        config, length, path = self.config, self.config.dataset.seq_len, self.dir / "metrics.jsonl"
        rows = read_metrics(path) if self.writes and path.exists() else ()
        flops = flops_per_token(self.target, length, trainable=self.trainer.trainable)
        return StepLog(
            self.target.config,
            step_flops=config.dataset.batch_size * length * flops,
            peak_flops=device_flops(self.layout, self.execution.precision.compute, config.peak_tflops),
            goodput=Goodput(rows, start=first_step, begun=self.begun),
        )

    def _trackers(self, first_step: int) -> Trackers:
        if not self.writes:
            return Trackers()
        config = self.config
        return open_trackers(config.trackers, self.dir, flat_settings(config), start=first_step, warn=print_status)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _steps(self, state: TrainState, step: int) -> tuple[TrainState, int, bool]:
        """Steps until the last one or a signal: the state, the steps taken, and whether it was a signal.

        The devices never wait for the host: while they compute a step, the next batch is put there, the next step
        follows, and the metrics of the one before the last are read.
        """
        config, batch, due = self.config, None, False
        self.data_state = self.data.get_state()
        while step < config.steps:
            if self.stop():
                self._read(step)
                return state, step, True
            begun = time.perf_counter()
            batch = batch or self._next_batch()
            self._trace(step + 1)
            if self.interrupt.at_once:
                self._compile(state, batch)
                begun = time.perf_counter()
                self.log.forget_waiting()
            state, metrics = self.trainer.step(state, batch)
            self.interrupt.at_once = False
            step += 1
            self.data_state = self.data.get_state()  # before the batch of the next step is taken
            epochs = {f"epochs/{name}": passes for name, passes in self.data.source_epochs().items()}
            epochs["epochs"] = self.data.epochs
            self.log.take(step, metrics, epochs, begun)
            evaluates = config.eval_every and step % config.eval_every == 0 and step < config.steps
            due = due or step % config.checkpoint_every == 0 or step == config.steps
            due = due or bool(evaluates and jax.process_count() > 1)  # see `_judge`
            # where a checkpoint is due, it comes first: the next batch may be an error
            batch = None if evaluates or due else self._next_batch()
            self._read(step, behind=0 if evaluates or due else AHEAD)
            self._trace(step + 1)
            if due and (not self.skipped_in_a_row or step == config.steps):  # else at the next step that is finite
                self._save(step, state)
                due = False
            if evaluates:
                with self.time.doing("evaluating"):
                    _, sample = self._judge(state, step)
                    if sample and self.writes:
                        self.progress.message(sample)
        return state, step, False

    def _next_batch(self) -> Batch:
        """The next batch, on the devices."""
        with self.log.waiting(), self.time.doing("waiting for data"):
            rows = next(self.data)
        return place(rows, self.layout, self.config.dataset.batch_size)

    def _compile(self, state: TrainState, batch: Batch) -> None:
        waiting = StatusLine("compiling the first step", kept=self._kept(), show=self.progress.wait)
        with self.time.doing("compiling"), waiting:
            self.log.step_bytes = self.trainer.compile(state, batch)

    def _read(self, step: int, *, behind: int = 0) -> None:
        """Read the metrics of all steps but so many; end the run after too many steps that were not finite."""
        while len(self.log) > behind:
            self._report(self.log.read())
            if self.skipped_in_a_row >= self.config.max_skipped:
                behind = 0  # if one of those under way is finite, the run goes on
        if self.skipped_in_a_row >= self.config.max_skipped:
            self.checkpoints.wait(drop=False)
            finite = last_finite(self.dir / "metrics.jsonl", step - self.skipped_in_a_row)
            raise EqxDecodersError(diverged(self.log.last, self.checkpoints, finite, self.skipped_in_a_row))

    def _stop(self, step: int, state: TrainState) -> None:
        """Save, for a signal that asked to stop."""
        stuck = self.skipped_in_a_row
        if not stuck:
            self._save(step, state)
        self.checkpoints.wait(drop=False)
        last = self.checkpoints.latest
        left = f": the last {stuck} steps were not finite, and are not saved" * (stuck > 0)
        print_status(f"stopped, {'nothing is saved' if last is None else f'saved at step {last}'}{left}")

    def _report(self, row: MetricsRow) -> None:
        """Write and show the metrics of a step."""
        self.metrics.write(row)
        self.progress.update(row["step"], row)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row["skipped"] else 0

    def _judge(self, state: TrainState, step: int, *, last: bool = False) -> tuple[dict[str, HeldOut], str]:
        """The held-out losses and a sample. What fails there is told, and the run goes on.

        Not so in a run of several processes: where one fails in the middle of what they compute together, the others
        wait for it, and can't be told before they are lost. There the run ends, and goes on from the checkpoint that is
        made before each evaluation.
        """
        results, sample = {}, ""
        with self._going_on("the evaluation", step):
            results = self._evaluate(state.averaged, step)  # a copy of the weights, which may not fit
        with self._going_on("the sample", step):
            sample = self._sample(state.averaged, last=last)
        return results, sample

    @contextlib.contextmanager
    def _going_on(self, what: str, step: int, *, alone: bool = False) -> Iterator[None]:
        """Around what a run can do without. alone: no other process takes part in it, nor waits for it."""
        try:
            yield
        except Exception as error:
            if jax.process_count() > 1 and not alone:
                raise
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self.progress.message(f"warning: {what} at step {step} failed, the run goes on: {told}")

    def _evaluate(self, model: Decoder, step: int) -> dict[str, HeldOut]:
        """The held-out loss of all as "", and of each set with a name; nothing if a signal came meanwhile.

        It is that of some batches of each set during the run, and of all in the end unless the settings limit them.
        """
        config = self.config
        most = config.eval_batches if step < config.steps else config.final_eval_batches
        sets = {name: itertools.islice(batches.rewind(), most) for name, batches in self.held_out.items()}
        try:
            result, named = evaluate_sets(model, sets, config.dataset.batch_size, stop=self.stop)
        finally:
            for batches in self.held_out.values():
                batches.close()
        if self.stop.agreed or not sets:
            return {}
        named = {name: each for name, each in named.items() if name}
        row: dict[str, Any] = {"step": step, "eval_loss": result.loss}
        row |= {f"eval_loss/{name}": each.loss for name, each in named.items()}
        message = f"step {step}: held-out loss {result.loss:.4f} nats per token"
        message += f" ({', '.join(f'{name} {each.loss:.4f}' for name, each in named.items())})" if named else ""
        if result.acceptance:
            row["mtp_acceptance"] = result.acceptance
            message += f", draft tokens accepted {', '.join(f'{rate:.1%}' for rate in result.acceptance)}"
        self.metrics.write(row)
        self.progress.message(message)
        return {"": result, **named}

    def _sample(self, model: Decoder, *, last: bool = False) -> str:
        """What the model writes; of one that sees, what it says to held-out images, if there are any."""
        config = self.config
        if config.sample_tokens == 0 or self.stop.agreed:
            return ""
        if self.reader is not None and self.held_out:
            stores = [batches.store for batches in self.held_out.values()]
            sizes = {"most_new": config.sample_tokens, "at_once": config.dataset.batch_size * config.dataset.seq_len}
            found = answers(model, self.reader, self.tokenizer, stores, **sizes)
            if last and self.writes and found:
                draw_answers(self.reader, found[:ANSWERS_DRAWN], self.dir / "answers.png")
            if found:
                return describe_answers(found)
        new, seed = config.sample_tokens, config.dataset.seed
        return sample_text(model, self.tokenizer, config.prompt, max_new_tokens=new, seed=seed)

    def _save(self, step: int, state: TrainState) -> None:
        with self.time.doing("saving"):
            if self.writes:
                self.copies.check_owner()
            self._copy()
            config, good = settings_json(self.config), self.skipped_in_a_row == 0
            self.checkpoints.save(step, state, data_state=self.data_state, config=config, drop=good)

    @contextlib.contextmanager
    def _traces(self) -> Iterator[None]:
        """Around the steps: a trace that is under way where they end is written."""
        try:
            yield
        finally:
            if self.tracing:
                jax.profiler.stop_trace()
                self.tracing = False

    def _copy(self) -> None:
        """Copy what grows beside checkpoints that are elsewhere: a convenience, which the checkpoint is not."""
        try:
            if self.writes:
                self.copies.keep(GROWING)
        except CheckpointError as error:
            print_status(f"warning: {error}")

    def _trace(self, step: int) -> None:
        """Start the profiler before the first step of `profile`, and stop it after the last."""
        wanted = self.config.profile is not None and self.config.profile[0] <= step <= self.config.profile[1]
        if wanted == self.tracing:
            return
        self._read(step - 1)  # nothing is under way where a trace begins and ends
        if wanted:
            jax.profiler.start_trace(str(self.dir / "profile"))
        else:
            jax.profiler.stop_trace()
        self.tracing = wanted

    # --- after the last step ------------------------------------------------------------------------------------------

    def _export(self, model: Decoder) -> None:
        """Write the directories asked for, for transformers and PEFT; all processes take part."""
        config = self.config
        model = dataclasses.replace(model, origin=self.target.origin)
        if config.export_adapter is not None and from_first("is_new", is_new(config.export_adapter)):
            export_adapter(model, config, config.export_adapter)
        if config.export is not None and from_first("is_new", is_new(config.export)):
            export_run(model, config, self.dir, config.export)

    def _summarise(self, results: dict[str, HeldOut], sample: str) -> None:
        """Draw the images, print the held-out losses and a sample."""
        loads, steps = self.log.loads()
        with self._going_on("drawing the losses", self.config.steps, alone=True):
            plot_losses(self.dir / "metrics.jsonl", self.dir / "loss.png")
            if loads:
                plot_loads(loads, self.dir / "expert_load.png")
        goodput = f"; goodput of the run {self.log.last['goodput']:.0%}" if self.log.last else ""
        print_status(f"time of this process: {self.time.text()}{goodput}")
        sets = {name: batches.parts[0].counts for name, batches in self.held_out.items()}
        print("\n".join(summary(self.config, self.dir, loads, steps, results, sets)))
        if sample:
            print(f"sample:\n{sample}")
