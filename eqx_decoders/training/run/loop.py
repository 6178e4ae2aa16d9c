"""The training loop: `train` starts or resumes a run, takes its steps, and finishes it."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.host_rows import place_read_only
from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.exit_codes import EXIT_SIGTERM
from eqx_decoders.io.interrupt import Interrupt
from eqx_decoders.io.processes import LONG_TIMEOUT, MAX_IN_FLIGHT_STEPS, Stop, all_gather_json, wait_for_failure
from eqx_decoders.io.run_lock import RunLock, check_run_dir
from eqx_decoders.io.status import StatusLine, showing
from eqx_decoders.training.flops import device_flops, flops_per_token
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.evaluate import (
    HeldOutEvaluation,
    SampleEvaluation,
    TaskEvaluation,
    errors_as_warnings,
    evaluates_after,
)
from eqx_decoders.training.run.load_export import write_exports
from eqx_decoders.training.run.log import (
    Goodput,
    MetricsRow,
    Progress,
    WallTime,
    diverged,
    last_finite_step,
    out_of_memory,
    plot_loads,
    plot_losses,
    print_status,
    read_metrics,
    run_start,
    summary,
)
from eqx_decoders.training.run.start import Methods, Run
from eqx_decoders.training.run.trackers import Trackers, open_trackers
from eqx_decoders.training.settings.files import settings_json
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.values import flat_settings
from eqx_decoders.training.step.step_log import StepLog
from eqx_decoders.training.step.train_state import TrainState


def train(config: TrainConfig, methods: Methods) -> int:
    """Train as `rl.methods.train` describes, which passes all methods."""
    started = run_start()
    wall_time = WallTime("starting", started)
    if config.checkpoint_dir is not None and "://" not in config.checkpoint_dir:
        config = dataclasses.replace(config, checkpoint_dir=os.path.abspath(config.checkpoint_dir))
    execution = config.execution()
    directory = RunDirectory(config)
    interrupt = Interrupt(at_once=True)  # before the first step, there is nothing to save after a signal
    is_writer = jax.process_index() == 0
    if is_writer:
        check_run_dir(directory.path)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(RunLock(directory.path)) if is_writer else None
        stack.enter_context(interrupt)
        if is_writer:
            stack.enter_context(showing())
        with directory.undo_on_failure(lock):
            run = Run.open(directory, execution, methods, stack)
            stack.enter_context(_out_of_memory_advice(run))
            state, start = run.first_state()
            loop = TrainingLoop(run, stack, start=start, started=started, wall_time=wall_time, interrupt=interrupt)
            all_gather_json("started", seconds=LONG_TIMEOUT)
        run.back_up_metrics()
        try:
            exit_code = loop.run_to_end(state, start)
        except jax.errors.JaxRuntimeError:
            wait_for_failure()  # the error may be the consequence of an error in another process
            raise
        if is_writer and not exit_code:
            loop.print_summary()
    return exit_code


@contextlib.contextmanager
def _out_of_memory_advice(run: Run) -> Iterator[None]:
    """Replace XLA's out-of-memory error by one that names the settings to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise EqxDecodersError(out_of_memory(run.config, run.target, str(error))) from error


class TrainingLoop:
    """The steps of a prepared run. Between the steps it reports metrics, saves checkpoints and evaluates the model.

    **Arguments:**

    - `stack`: closes what is opened here.
    - `start`: the number of steps that were already taken.
    - `started`: Unix time at which this start of the run began.
    - `interrupt`: the handler of signals.
    """

    def __init__(
        self,
        run: Run,
        stack: contextlib.ExitStack,
        *,
        start: int,
        started: float,
        wall_time: WallTime,
        interrupt: Interrupt,
    ):
        config = run.config
        self.run = run
        self.wall_time = wall_time
        self.interrupt = interrupt
        self.stop = Stop(lambda: interrupt.requested)
        self.data_state: Any = None  # position in the data after the newest step, which checkpoints save
        self.step_log = _open_step_log(run, start=start, started=started)
        stack.callback(self.step_log.close)
        trackers = Trackers()
        if run.is_writer:
            trackers = open_trackers(
                config.trackers,
                run.directory.path,
                flat_settings(config),
                start=start + 1 if start else 0,
                warn=print_status,
            )
        stack.enter_context(contextlib.closing(trackers))
        self.progress = Progress(config.steps, start=start)
        show = self.progress.message
        self.metrics = MetricsReporter(
            run.directory.metrics_file,
            run.checkpoints,
            config.max_skipped,
            self.step_log,
            trackers,
            self.progress,
            note=(lambda row: None) if run.method is None else run.method.describe_step,
        )
        self.profiler = Profiler(run, self.metrics)
        self.saver = CheckpointSaver(run, self.metrics, wall_time)
        self.held_out = HeldOutEvaluation(run, trackers, show, self.stop)
        self.tasks = TaskEvaluation(run, trackers, show, self.stop)
        self.samples = SampleEvaluation(run, show, self.stop)

    def run_to_end(self, state: TrainState, start: int) -> int:
        """Take the steps after `start` and finish the run; return the exit code."""
        run = self.run
        with self.progress:
            if start == 0 and run.method is not None and run.method.evaluates_start:
                with self.wall_time.measure("evaluating"):
                    self.held_out.evaluate(0, state)
            with self.wall_time.measure("steps"), self.profiler:
                state, step, is_stopped = self.take_steps(state, start)
            self.wall_time.switch("ending")
            if not is_stopped:
                self.evaluate(step, state, is_last=True)
        exit_codes = all_gather_json("stopped", self.interrupt.exit_code)
        if self.stop.agreed or any(exit_codes):
            self.saver.save_and_stop(step, state, self.data_state)
            return next(filter(None, exit_codes), EXIT_SIGTERM)
        run.back_up_metrics()
        write_exports(state.averaged, run.target, run.directory)
        skipped = self.metrics.skipped_in_a_row
        if skipped:
            print_status(
                f"warning: the last {skipped} steps were not finite: the weights are those of step {step - skipped}"
            )
        run.checkpoints.wait(drop=not skipped and self.held_out.is_finite)
        return 0

    def take_steps(self, state: TrainState, step: int) -> tuple[TrainState, int, bool]:
        """Take steps until the last step or a signal; return the state, its step, and whether a signal arrived.

        The host runs ahead of the devices: while they compute a step, the host transfers the next batch, dispatches the
        next step, and reads the metrics of the step before the last.
        """
        run = self.run
        config = run.config
        batch = None
        self.data_state = run.data.get_state()
        while step < config.steps:
            if self.stop():
                self.metrics.read(step)
                return state, step, True
            started = time.perf_counter()
            batch = batch or self.next_batch(state)
            self.profiler.before_step(step + 1)
            if self.interrupt.at_once:
                self._compile(state, batch)
                started = time.perf_counter()
                self.step_log.forget_waiting()
            state, metrics = run.step(state, batch)
            self.interrupt.at_once = False
            step += 1
            self.data_state = run.data.get_state()  # before the batch of the next step is read
            self.step_log.add(step, metrics, run.batch_metrics(), started)

            is_evaluated = evaluates_after(config, step)
            is_synchronized = (
                self.saver.is_due(step) or is_evaluated or (run.method is not None and run.method.needs_current_weights)
            )
            # reading the next batch may raise an error: save and evaluate first
            batch = None if is_synchronized else self.next_batch(state)
            self.metrics.read(step, ahead=0 if is_synchronized else MAX_IN_FLIGHT_STEPS)
            self.profiler.before_step(step + 1)
            self.saver.after_step(step, state, self.data_state)  # before the evaluation, which may fail
            if is_evaluated:
                with self.wall_time.measure("evaluating"):
                    self.evaluate(step, state)
        return state, step, False

    def next_batch(self, state: TrainState) -> Batch:
        """Read the next batch, transfer it to the devices, and add what the method computes before the step."""
        run = self.run
        with self.step_log.waiting(), self.wall_time.measure("waiting for data"):
            rows: Any = next(run.data)
        if run.method is not None:
            return run.method.prepare(rows, state)
        return place_read_only(rows, run.execution.layout, run.config.data.batch_size)

    def _compile(self, state: TrainState, batch: Batch) -> None:
        remains = self.run.describe_progress()
        status = StatusLine("compiling the first step", remains=remains, show=self.progress.status)
        with self.wall_time.measure("compiling"), status:
            self.step_log.step_bytes = self.run.compile(state, batch)

    def evaluate(self, step: int, state: TrainState, *, is_last: bool = False) -> None:
        """Evaluate the model after a step: held-out losses, tasks, and a sample."""
        self.held_out.evaluate(step, state)
        self.tasks.evaluate(step, state, is_last=is_last)
        self.samples.evaluate(step, state, is_last=is_last)

    def print_summary(self) -> None:
        """Plot the losses and the loads of experts; print the files, held-out losses, task scores and a sample."""
        run = self.run
        loads, load_steps = self.step_log.loads()
        with errors_as_warnings("plotting the losses", run.config.steps, self.progress.message, local=True):
            plot_losses(run.directory.metrics_file, run.directory.path / "loss.png")
            if run.method is not None:
                run.method.plot()
            if loads:
                plot_loads(loads, run.directory.path / "expert_load.png")
        last = self.step_log.last
        goodput = f"; goodput of the run {last['goodput']:.0%}" if last else ""
        print_status(f"time of this process: {self.wall_time.text()}{goodput}")
        held_out = {name: batches for name, batches in run.held_out.items() if isinstance(batches, Batches)}
        corpus_stats = {name: batches.parts[0].counts for name, batches in held_out.items()}
        lines = summary(run.config, run.directory.path, loads, load_steps, self.held_out.results, corpus_stats)
        print("\n".join(lines))
        for line in self.tasks.lines:
            print(f"task {line}")
        if self.samples.text:
            print(f"sample:\n{self.samples.text}")


def _open_step_log(run: Run, *, start: int, started: float) -> StepLog:
    config = run.config
    path = run.directory.metrics_file
    rows = read_metrics(path) if run.is_writer and path.exists() else ()
    flops = flops_per_token(run.target, config.data.seq_len, trainable=run.trainer.trainable)
    return StepLog(
        run.target.config,
        step_flops=config.data.batch_size * config.data.seq_len * flops,
        peak_flops=device_flops(run.execution.layout, run.execution.precision.compute, config.peak_tflops),
        goodput=Goodput(rows, start=start + 1, started=started),
    )


class MetricsReporter:
    """Writes the metrics of finished steps to the trackers and the progress, and ends a run that diverges.

    **Arguments:**

    - `file`: `metrics.jsonl` of the run.
    - `max_skipped`: maximum number of consecutive steps that are not finite.
    - `note`: returns a line to print about a row, or None.

    **Attributes:**

    - `skipped_in_a_row`: number of newest steps that were not finite.
    """

    def __init__(
        self,
        file: Path,
        checkpoints: Checkpoints,
        max_skipped: int,
        step_log: StepLog,
        trackers: Trackers,
        progress: Progress,
        note: Callable[[MetricsRow], str | None] = lambda row: None,
    ):
        self.file = file
        self.checkpoints = checkpoints
        self.max_skipped = max_skipped
        self.step_log = step_log
        self.trackers = trackers
        self.progress = progress
        self.note = note
        self.skipped_in_a_row = 0

    def read(self, step: int, *, ahead: int = 0) -> None:
        """Report the metrics of the steps up to `step`, except the newest `ahead` steps, which are still in flight.

        Raises EqxDecodersError after `max_skipped` consecutive steps that were not finite.
        """
        while len(self.step_log) > ahead:
            self.report(self.step_log.read())
            if self.skipped_in_a_row >= self.max_skipped:
                ahead = 0  # the run continues if one of the steps in flight is finite
        if self.skipped_in_a_row >= self.max_skipped:
            self.checkpoints.wait(drop=False)
            finite = last_finite_step(self.file, default=step - self.skipped_in_a_row)
            raise EqxDecodersError(diverged(self.step_log.last, self.checkpoints, finite, self.skipped_in_a_row))

    def report(self, row: MetricsRow) -> None:
        """Write and show the metrics of one step."""
        self.trackers.write(row)
        self.progress.update(row["step"], row)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row["skipped"] else 0
        text = self.note(row)
        if text is not None:
            self.progress.message(text)


class Profiler:
    """Writes a trace of the steps `profile` with JAX's profiler. The context stops a trace that is still open."""

    def __init__(self, run: Run, metrics: MetricsReporter):
        self.run = run
        self.metrics = metrics
        self.is_tracing = False

    def before_step(self, step: int) -> None:
        """Start the profiler before the first step of the trace, and stop it before the step after the last one."""
        steps = self.run.config.profile
        is_traced = steps is not None and steps[0] <= step <= steps[1]
        if is_traced == self.is_tracing:
            return
        self.metrics.read(step - 1)  # waits until no step is in flight
        if is_traced:
            jax.profiler.start_trace(str(self.run.directory.path / "profile"))
        else:
            jax.profiler.stop_trace()
        self.is_tracing = is_traced

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_tracing:
            jax.profiler.stop_trace()
            self.is_tracing = False


class CheckpointSaver:
    """Saves checkpoints every `checkpoint_every` steps, after the last step, and when a signal stops the run.

    A run of several processes also saves before each evaluation, because an error in an evaluation ends it (see
    `errors_as_warnings`). After a step that was not finite, nothing is saved until the next finite step.
    """

    def __init__(self, run: Run, metrics: MetricsReporter, wall_time: WallTime):
        self.run = run
        self.metrics = metrics
        self.wall_time = wall_time
        self._is_delayed = False

    def is_due(self, step: int) -> bool:
        """Return whether `after_step` saves a checkpoint if the step is finite."""
        config = self.run.config
        if self._is_delayed or step % config.checkpoint_every == 0 or step == config.steps:
            return True
        return evaluates_after(config, step) and jax.process_count() > 1

    def after_step(self, step: int, state: TrainState, data_state: Any) -> None:
        """Save a checkpoint if one is due."""
        is_due = self.is_due(step)
        self._is_delayed = is_due and self.metrics.skipped_in_a_row > 0 and step != self.run.config.steps
        if is_due and not self._is_delayed:
            self.save(step, state, data_state)

    def save(self, step: int, state: TrainState, data_state: Any) -> None:
        """Start to write the checkpoint of a step, with the position in the data."""
        run = self.run
        with self.wall_time.measure("saving"):
            if run.is_writer:
                run.directory.backup.check_owner()
            run.back_up_metrics()
            if run.method is not None:
                run.method.before_checkpoint(state)
            is_finite = self.metrics.skipped_in_a_row == 0
            run.checkpoints.save(step, state, data_state=data_state, config=settings_json(run.config), drop=is_finite)

    def save_and_stop(self, step: int, state: TrainState, data_state: Any) -> None:
        """Save a checkpoint after a signal, unless the last step was not finite; print what is saved."""
        skipped = self.metrics.skipped_in_a_row
        checkpoints = self.run.checkpoints
        if not skipped:
            self.save(step, state, data_state)
        checkpoints.wait(drop=False)
        saved = "nothing is saved" if checkpoints.latest is None else f"saved at step {checkpoints.latest}"
        unsaved = f": the last {skipped} steps were not finite and are not saved" if skipped else ""
        print_status(f"stopped, {saved}{unsaved}")
