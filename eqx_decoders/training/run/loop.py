"""The training loop: steps, and between them checkpoints, evaluations, samples and metrics in one run directory."""

import contextlib
import dataclasses
import os
import time
from typing import Any

import jax

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.io.coordination import AHEAD, LONG, Stop, all_gather_json
from eqx_decoders.io.exit_codes import EXIT_SIGTERM
from eqx_decoders.io.heartbeat import wait_for_verdict
from eqx_decoders.io.interrupt import Interrupt
from eqx_decoders.io.run_lock import RunLock, check_run_dir
from eqx_decoders.io.status import StatusLine, showing
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.config_file import flat_settings
from eqx_decoders.training.flops import device_flops, flops_per_token
from eqx_decoders.training.run.goodput import Goodput, WallTime, run_start
from eqx_decoders.training.run.hooks.base import Hook, failures_as_warnings
from eqx_decoders.training.run.hooks.checkpoint_hook import CheckpointHook
from eqx_decoders.training.run.hooks.evaluation_hook import EvaluationHook
from eqx_decoders.training.run.hooks.metrics_reporter import MetricsReporter
from eqx_decoders.training.run.hooks.sample_hook import SampleHook
from eqx_decoders.training.run.hooks.task_hook import TaskHook
from eqx_decoders.training.run.hooks.trace_hook import TraceHook
from eqx_decoders.training.run.messages import out_of_memory, print_status, summary
from eqx_decoders.training.run.metrics import read_metrics
from eqx_decoders.training.run.plots import plot_loads, plot_losses
from eqx_decoders.training.run.progress import Progress
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.run.run_export import write_exports
from eqx_decoders.training.run.setup import first_state, prepare_run
from eqx_decoders.training.run.trackers import Trackers, open_trackers
from eqx_decoders.training.step.step_log import StepLog
from eqx_decoders.training.step.train_state import TrainState


def train(config: TrainConfig) -> int:
    """Train to the last step, or until a signal asks to stop; return the exit code of the program.

    In a run of several processes all of them must call this. Raises the errors of `eqx_decoders.errors`, and `Stopped`,
    a KeyboardInterrupt, for a signal before the first step.
    """
    loop = TrainingLoop(config)
    try:
        return loop.train()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or not hasattr(loop, "run"):  # nothing is prepared yet
            raise
        raise EqxDecodersError(out_of_memory(loop.run.config, loop.run.target, str(error))) from error


class TrainingLoop:
    """One process's part of a run. `train` prepares everything, takes the steps and finishes the run."""

    def __init__(self, config: TrainConfig):
        if config.checkpoint_dir is not None and "://" not in config.checkpoint_dir:
            config = dataclasses.replace(config, checkpoint_dir=os.path.abspath(config.checkpoint_dir))
        self.config, self.execution = config, config.execution()
        self.interrupt = Interrupt(at_once=True)  # until there are steps to be saved
        self.stop = Stop(lambda: self.interrupt.requested)
        self.started = run_start()
        self.time = WallTime("starting", self.started)

    def train(self) -> int:
        """Prepare the run, take its steps and finish it; return the exit code."""
        directory, writes = RunDirectory(self.config), jax.process_index() == 0
        if writes:
            check_run_dir(directory.path)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(RunLock(directory.path)) if writes else None
            stack.enter_context(self.interrupt)
            if writes:
                stack.enter_context(showing())
            with directory.undo_on_failure(lock):
                self.run = prepare_run(directory, self.execution, stack)
                state, start = first_state(self.run)
                self._open_hooks(start, stack)
                all_gather_json("started", seconds=LONG)
            self.run.back_up_metrics()
            try:
                exit_code = self._train_from(state, start)
            except jax.errors.JaxRuntimeError:
                wait_for_verdict()
                raise
            if writes and not exit_code:
                self._summarize()
        return exit_code

    def _open_hooks(self, start: int, stack: contextlib.ExitStack) -> None:
        """Open everything that reports on steps, and the hooks in the order in which they are called."""
        run, config = self.run, self.run.config
        self.log, trackers = self._step_log(start + 1), Trackers()
        stack.callback(self.log.close)
        if run.writes:
            settings = flat_settings(config)
            trackers = open_trackers(
                config.trackers, run.directory.path, settings, start=start and start + 1, warn=print_status
            )
        stack.enter_context(contextlib.closing(trackers))
        self.progress = Progress(config.steps, start=start)
        show = self.progress.message
        file, most = run.directory.metrics, config.max_skipped
        notes = {} if run.method is None else {"note": run.method.note}
        self.metrics = MetricsReporter(file, run.checkpoints, most, self.log, trackers, self.progress, **notes)
        self.trace = TraceHook(run, self.metrics)
        self.checkpoints = CheckpointHook(run, self.metrics, self.time)
        self.evaluation = EvaluationHook(run, trackers, show, self.time, self.stop)
        self.tasks = TaskHook(run, trackers, show, self.time, self.stop)
        self.samples = SampleHook(run, show, self.time, self.stop)
        # a checkpoint comes before what may fail; a sample belongs to the losses above it
        self.hooks: tuple[Hook, ...] = (self.trace, self.checkpoints, self.evaluation, self.tasks, self.samples)

    def _step_log(self, first_step: int) -> StepLog:
        run, length, path = self.run, self.run.config.dataset.seq_len, self.run.directory.metrics
        rows = read_metrics(path) if run.writes and path.exists() else ()
        flops = flops_per_token(run.target, length, trainable=run.trainer.trainable)
        compute = self.execution.precision.compute
        return StepLog(
            run.target.config,
            step_flops=run.config.dataset.batch_size * length * flops,
            peak_flops=device_flops(self.execution.layout, compute, run.config.peak_tflops),
            goodput=Goodput(rows, start=first_step, started=self.started),
        )

    def _train_from(self, state: TrainState, start: int) -> int:
        """Take the steps from `start` on and finish the run; return the exit code."""
        run = self.run
        with self.progress:
            if start == 0:
                self.evaluation.begin(state)
            with self.time.doing("steps"), self.trace:
                state, step, stopped = self._steps(state, start)
            self.time.switch("ending")
            if not stopped:
                for hook in self.hooks:
                    hook.finish(step, state)
        codes = all_gather_json("stopped", self.interrupt.exit_code)
        if self.stop.agreed or any(codes):
            self.checkpoints.save_and_stop(step, state)
            return next(filter(None, codes), EXIT_SIGTERM)
        run.back_up_metrics()
        write_exports(state.averaged, run.target, run.directory)
        stuck = self.metrics.skipped_in_a_row
        if stuck:
            print_status(f"warning: the last {stuck} steps were not finite: weights are of step {step - stuck}")
        run.checkpoints.wait(drop=not stuck and self.evaluation.is_finite)
        return 0

    def _steps(self, state: TrainState, step: int) -> tuple[TrainState, int, bool]:
        """Take steps until the last one or a signal; return the state, the steps taken, and whether a signal came.

        The devices never wait for the host: while they compute a step, the next batch is put there, the next step
        follows, and the metrics of the one before the last are read.
        """
        run, batch = self.run, None
        run.data_state = run.data.get_state()
        while step < run.config.steps:
            if self.stop():
                self.metrics.read(step)
                return state, step, True
            started = time.perf_counter()
            batch = batch or self._next_batch(state)
            self.trace.before_step(step + 1)
            if self.interrupt.at_once:
                self._compile(state, batch)
                started = time.perf_counter()
                self.log.forget_waiting()
            state, metrics = run.step(state, batch)
            self.interrupt.at_once = False
            step += 1
            run.data_state = run.data.get_state()  # before the batch of the next step is taken
            self.log.take(step, metrics, run.figures(), started)
            # where a hook has work it comes first: the next batch may be an error
            due = any(hook.is_due(step) for hook in self.hooks) or (run.method is not None and run.method.waits)
            batch = None if due else self._next_batch(state)
            self.metrics.read(step, ahead=0 if due else AHEAD)
            for hook in self.hooks:
                hook.after_step(step, state)
        return state, step, False

    def _next_batch(self, state: TrainState) -> Batch:
        """Put the next batch on the devices, with what they compute of it before the step."""
        run = self.run
        with self.log.waiting(), self.time.doing("waiting for data"):
            rows: Any = next(run.data)
        if run.method is not None:
            return run.method.prepare(rows, state)
        return hand_over(rows, self.execution.layout, run.config.dataset.batch_size)

    def _compile(self, state: TrainState, batch: Batch) -> None:
        status = StatusLine("compiling the first step", remains=self.run.progress_so_far(), show=self.progress.wait)
        with self.time.doing("compiling"), status:
            self.log.step_bytes = self.run.compile(state, batch)

    def _summarize(self) -> None:
        """Draw the losses and the loads of experts; print held-out losses and a sample."""
        run = self.run
        loads, steps = self.log.loads()
        with failures_as_warnings("drawing the losses", run.config.steps, self.progress.message, local=True):
            plot_losses(run.directory.metrics, run.directory.path / "loss.png")
            if run.method is not None:
                run.method.draw()
            if loads:
                plot_loads(loads, run.directory.path / "expert_load.png")
        goodput = f"; goodput of the run {self.log.last['goodput']:.0%}" if self.log.last else ""
        print_status(f"time of this process: {self.time.text()}{goodput}")
        sets = {name: batches.parts[0].counts for name, batches in run.held_out.items() if isinstance(batches, Batches)}
        print("\n".join(summary(run.config, run.directory.path, loads, steps, self.evaluation.results, sets)))
        for line in self.tasks.lines:
            print(f"task {line}")
        if self.samples.text:
            print(f"sample:\n{self.samples.text}")
