"""A training run: steps, evaluations, checkpoints and metrics in one run directory."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from eqx_decoders.axes import named_leaves
from eqx_decoders.decoder import Decoder
from eqx_decoders.errors import CheckpointError, DataError, EqxDecodersError, check
from eqx_decoders.io.checkpoint import Checkpoints
from eqx_decoders.io.huggingface import abstract_hf
from eqx_decoders.io.processes import (
    AHEAD,
    ON_FAILURE,
    Stop,
    first_then_all,
    from_first,
    gather,
    wait_for,
    wait_for_verdict,
)
from eqx_decoders.io.run_copies import GROWING, RunCopies
from eqx_decoders.io.rundir import EXIT_SIGTERM, Interrupt, RunLock
from eqx_decoders.io.tokenizer import Tokenizer
from eqx_decoders.io.waiting import Waiting, showing
from eqx_decoders.layout import device_bytes
from eqx_decoders.replication import check_replicated
from eqx_decoders.training.batches import Batch, Batches
from eqx_decoders.training.data import make_dataset, make_held_out_sets, prepare_tokenizer
from eqx_decoders.training.evaluation import HeldOut, describe_held_out, evaluate_sets, sample_text
from eqx_decoders.training.flops import device_flops, flops_per_token
from eqx_decoders.training.goodput import Goodput, WallTime, run_start
from eqx_decoders.training.media_run import answers, describe_answers, draw_answers, placeholders, with_pictures
from eqx_decoders.training.mesh_settings import describe_devices, describe_low_precision, describe_pipeline
from eqx_decoders.training.metrics import MetricsRow, read_metrics
from eqx_decoders.training.plots import plot_loads, plot_losses
from eqx_decoders.training.processes import host_rows, place
from eqx_decoders.training.progress import Progress
from eqx_decoders.training.runs import (
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
from eqx_decoders.training.settings import (
    TrainConfig,
    flag,
    is_new,
    save_settings,
    settings_json,
)
from eqx_decoders.training.settings_file import flat_settings
from eqx_decoders.training.step import Trainer, TrainState
from eqx_decoders.training.step_log import StepLog
from eqx_decoders.training.trackers import Trackers, open_trackers


ANSWERS_DRAWN = 24  # pictures with answers in the run directory


def train(config: TrainConfig) -> int:
    """Train to the last step, or until a signal asks to stop; the exit code of the program.

    In a run of several processes all of them must call this. Raises the errors of `eqx_decoders.errors`, and `Stopped`,
    a KeyboardInterrupt, for a signal before the first step.
    """
    run = Run(config)
    try:
        return run.train()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise EqxDecodersError(run.out_of_memory(str(error))) from error


class Run:
    """One process's part of a run. `train` prepares everything, takes the steps and finishes the run."""

    def __init__(self, config: TrainConfig):
        if config.checkpoint_dir is not None and "://" not in config.checkpoint_dir:
            config = dataclasses.replace(config, checkpoint_dir=os.path.abspath(config.checkpoint_dir))
        self.config = config
        self.dir = Path(config.run_dir)
        self.execution = config.execution()
        self.layout = self.execution.layout
        self.writes = jax.process_index() == 0  # the one process that writes settings, metrics and pictures
        self.interrupt = Interrupt(at_once=True)  # until there are steps to be saved
        self.stop = Stop(lambda: self.interrupt.requested)
        self.skipped_in_a_row = 0
        self.tracing = False
        self.begun = run_start()
        self.time = WallTime("starting", self.begun)

    def train(self) -> int:
        """The whole run; the exit code."""
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(RunLock(self.dir)) if self.writes else None
            stack.enter_context(self.interrupt)
            if self.writes:
                stack.enter_context(showing())
            settings = self.dir / "settings.json"
            before = settings.read_bytes() if settings.is_file() else None

            def undo() -> None:
                """A start that fails leaves nothing behind."""
                if lock is not None:
                    lock.undo()
                    if before is not None:
                        settings.write_bytes(before)

            ON_FAILURE.append(undo)  # of another process
            try:
                self._open_model_and_data(stack)
                state, start = self._first_state()
                gather("started")
            except Exception:
                undo()
                raise
            finally:
                ON_FAILURE.remove(undo)
            self.log = self._step_log(start + 1)
            self.metrics = stack.enter_context(contextlib.closing(self._trackers(start + 1)))
            self._copy()
            try:
                with Progress(self.config.steps, start=start) as self.progress:
                    with self.time.doing("steps"), self._traces():
                        state, step, stopped = self._steps(state, start)
                    self.time.switch("ending")
                    results = {} if stopped else self._evaluate(state.averaged, step)
                    sample = "" if stopped else self._sample(state.averaged, last=True)
                codes = gather("stopped", self.interrupt.exit_code)
                if self.stop.agreed or any(codes):
                    self._save(step, state)
                    self.checkpoints.wait()
                    print_status(f"stopped, saved at step {step}")
                    return next(filter(None, codes), EXIT_SIGTERM)
                self._copy()
                self._export(state.averaged)
                self.checkpoints.wait()
            except jax.errors.JaxRuntimeError:
                wait_for_verdict()
                raise
            if self.writes:
                self._summarise(results, sample)
        return 0

    def out_of_memory(self, told: str) -> str:
        """What to do about XLA's error of this text."""
        config, weights = self.config, named_leaves(self.target).values()
        sizes = f"batch_size={config.dataset.batch_size} x seq_len={config.dataset.seq_len} tokens"
        sizes += f", {sum(leaf.size for leaf in weights):,} weights of {sum(map(device_bytes, weights)) / 1e9:.2f} GB"
        asked = next((line for line in told.splitlines() if "RESOURCE_EXHAUSTED" in line), told)
        asked = asked.split("RESOURCE_EXHAUSTED:")[-1].strip().rstrip(".")[:300]
        return (
            f"the memory of a device does not suffice for {sizes}, and what a step makes of them. XLA: {asked}. Lower "
            "batch_size or raise step.gradient_accumulation_steps, give remat='full', or cut the weights by mesh.fsdp."
        )

    # --- before the first step ----------------------------------------------------------------------------------------

    def _open_model_and_data(self, stack: contextlib.ExitStack) -> None:
        self.copies = RunCopies(self.dir, self.config.checkpoint_dir)
        if self.writes:
            self.copies.try_out()
        if self.writes and (not is_begun(self.dir) or self.copies.taken_over):
            self.copies.bring_back()
        gather("brought back")
        self.config, self.changes = resume_settings(self.config, self.dir)
        if self.writes:
            check_found(self.config, self.changes, self.dir)
        config, settings = self.config, self.dir / "settings.json"
        for name, (was, now) in self.changes.items():
            print_status(f"changed: {flag(name)} {_shown(was)} -> {_shown(now)}")
        self._check_same()
        if self.writes:
            keep_config(config, self.dir)
        if self.writes and not self.changes and not checkpoints_of(config, self.dir).steps:
            save_settings(config, settings)  # now: they say what the tokenizer and the tokens are made with
        if self.writes and config.init_from is not None and not (self.dir / SOURCE).exists():
            keep_source(abstract_hf(config.init_from), self.dir)
        gather("source")
        self.target = abstract_run(config, self.dir, self.execution)
        check_replicated(self.target, self.layout, config.replicated_tolerance)
        check_exports(self.target, config, self.dir)
        self.dataset, self.reader = with_pictures(config.dataset, self.target.config, self.dir / SOURCE)
        self.tokenizer = first_then_all("tokenizer", self._tokenizer, self.dir / "tokenizer")
        self.data = stack.enter_context(self._batches())  # whose tokens all processes make together
        self.held_out = self._held_out_sets()
        for batches in self.held_out.values():
            stack.enter_context(batches)
        alone = jax.process_count() == 1
        with contextlib.nullcontext() if alone else Waiting("waiting for the other processes (tokens)"):
            gather("tokens", seconds=1e6)
        parts = [part for batches in (self.data, *self.held_out.values()) for part in batches.parts]
        if self.tokenizer.vocab_size > self.target.config.vocab_size:
            for store in {id(part.store): part.store for part in parts}.values():
                store.check_ids(self.target.config.vocab_size)
        made = [self.tokenizer.content_hash, *(part.store.content_hash for part in parts)]
        rule = f"tokenizer and tokens of process {jax.process_index()} are others than those of the first"
        check(made == from_first("made", made), f"{rule}: run_dir must be a directory that they share.", DataError)
        directory = config.checkpoint_dir or self.dir / "checkpoints"
        self.checkpoints = stack.enter_context(Checkpoints(directory, max_checkpoints=config.max_checkpoints))
        self.trainer = Trainer.create(config.optimizer_config(), self.target, steps=config.steps, config=config.step)

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
        return tokenizer

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
        self._describe()
        if from_first("new", self.writes and (self.checkpoints.latest is None or is_imported(config, self.dir))):
            with Waiting("making the model", kept=self._kept()):
                model = new_model(config, self.dir, self.execution)
                state, start = self.trainer.init(model, key=jax.random.fold_in(key, 1)), 0
        else:
            with Waiting("loading the checkpoint", kept=self._kept()):
                state, data_state, start = restore_state(self.checkpoints, self.trainer, self.target, key)
            self.data.set_state(data_state)
            print_status(f"resumed at step {start}")
        print_status(self.data.describe(start, config.steps))
        check(start <= config.steps, f"steps={config.steps}, but {self.dir} has done {start} already: ask for more.")
        for field in ("export", "export_adapter"):  # checked before the training, not after it
            directory = getattr(config, field)
            free = directory is None or start == config.steps or is_new(directory)
            check(from_first(field, free), f"{field}={directory!r} is not empty: give a new directory.")
        if self.writes:
            save_settings(config, self.dir / "settings.json", changes=self.changes, step=start)
            self.copies.keep()
            self.copies.claim()
        return state, start

    def _kept(self) -> str:
        """What there is of the run before its first step."""
        step = self.checkpoints.latest
        return f"the run is as it was saved at step {step}" if step else "the tokenizer and the tokens are kept"

    def _describe(self) -> None:
        leaves = named_leaves(self.target)
        weights = sum(leaf.size for leaf in leaves.values())
        trained = sum(leaf.size for name, leaf in leaves.items() if name in self.trainer.trainable)
        part = f" ({trained:,} of them trained)" if trained < weights else ""
        name, devices = self.config.init_from or self.config.model_config, describe_devices(self.layout)
        name = " ".join((name or self.config.model, *self.config.set))
        print_status(f"{name}: {weights:,} weights{part} on {devices}")
        if (pipeline := describe_pipeline(self.execution)) is not None:
            print_status(pipeline)
        if (rounding := describe_low_precision(self.execution)) is not None:
            print_status(rounding)

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
        config, batch = self.config, None
        self.data_state = self.data.get_state()
        while step < config.steps:
            if self.stop():
                self._read(state, step)
                return state, step, True
            begun = time.perf_counter()
            batch = batch or self._next_batch()
            self._trace(state, step + 1)
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
            saves = step % config.checkpoint_every == 0 or step == config.steps
            # where a checkpoint is due, it comes first: the next batch may be an error
            batch = None if evaluates or saves else self._next_batch()
            self._read(state, step, behind=0 if evaluates or saves else AHEAD)
            self._trace(state, step + 1)
            if evaluates:
                with self.time.doing("evaluating"):
                    self._evaluate(state.averaged, step)
                    if (sample := self._sample(state.averaged)) and self.writes:
                        self.progress.message(sample)
            if saves:
                self._save(step, state)
        return state, step, False

    def _next_batch(self) -> Batch:
        """The next batch, on the devices."""
        with self.log.waiting(), self.time.doing("waiting for data"):
            rows = next(self.data)
        return place(rows, self.layout, self.config.dataset.batch_size)

    def _compile(self, state: TrainState, batch: Batch) -> None:
        waiting = Waiting("compiling the first step", kept=self._kept(), show=self.progress.wait)
        with self.time.doing("compiling"), waiting:
            self.log.step_bytes = self.trainer.compile(state, batch)

    def _read(self, state: TrainState, step: int, *, behind: int = 0) -> None:
        """Read the metrics of all steps but so many; end the run after too many steps that were not finite."""
        while len(self.log) > behind:
            self._report(self.log.read())
            if self.skipped_in_a_row >= self.config.max_skipped:
                behind = 0  # if one of those under way is finite, the run goes on
        if self.skipped_in_a_row >= self.config.max_skipped:
            self._save(step, state)
            raise EqxDecodersError(
                f"{self.skipped_in_a_row} steps in a row were not finite (loss={self.log.last['loss']}, "
                f"grad_norm={self.log.last['grad_norm']}). The weights are still those of step "
                f"{step - self.skipped_in_a_row}, saved as step {step}. Lower optimizer.learning_rate or look at the "
                "data, and start again."
            )

    def _report(self, row: MetricsRow) -> None:
        """Write and show the metrics of a step."""
        self.metrics.write(row)
        self.progress.update(row["step"], row)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row["skipped"] else 0

    def _evaluate(self, model: Decoder, step: int) -> dict[str, HeldOut]:
        """The held-out loss of all as "", and of each set with a name; nothing if a signal came meanwhile.

        It is that of some batches of each set during the run, and of all in the end unless the settings limit them.
        """
        config = self.config
        most = config.eval_batches if step < config.steps else config.final_eval_batches
        sets = {name: itertools.islice(batches.rewind(), most) for name, batches in self.held_out.items()}
        result, named = evaluate_sets(model, sets, config.dataset.batch_size, stop=self.stop)
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
        """What the model writes; of one that sees, what it says to held-out pictures."""
        config = self.config
        if config.sample_tokens == 0 or self.stop.agreed:
            return ""
        if self.reader is not None and self.held_out:
            found = answers(model, self.reader, self.tokenizer, next(iter(self.held_out.values())))
            if last and self.writes and found:
                draw_answers(self.reader, found[:ANSWERS_DRAWN], self.dir / "answers.png")
            return describe_answers(found)
        new, seed = config.sample_tokens, config.dataset.seed
        return sample_text(model, self.tokenizer, config.prompt, max_new_tokens=new, seed=seed)

    def _save(self, step: int, state: TrainState) -> None:
        with self.time.doing("saving"):
            if self.writes:
                self.copies.check_owner()
            self._copy()
            self.checkpoints.save(step, state, data_state=self.data_state, config=settings_json(self.config))

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

    def _trace(self, state: TrainState, step: int) -> None:
        """Start the profiler before the first step of `profile`, and stop it after the last."""
        wanted = self.config.profile is not None and self.config.profile[0] <= step <= self.config.profile[1]
        if wanted == self.tracing:
            return
        self._read(state, step - 1)  # nothing is under way where a trace begins and ends
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
        """Draw the pictures, print the held-out losses and a sample."""
        plot_losses(self.dir / "metrics.jsonl", self.dir / "loss.png")
        loads, steps = self.log.loads()
        if loads:
            plot_loads(loads, self.dir / "expert_load.png")
        goodput = f"; goodput of the run {self.log.last['goodput']:.0%}" if self.log.last else ""
        print_status(f"time of this process: {self.time.text()}{goodput}")
        files = f"metrics.jsonl, loss.png{' and expert_load.png' * bool(loads)} are in {self.dir}"
        elsewhere = self.config.checkpoint_dir
        print(f"\ncheckpoints, {files}" if elsewhere is None else f"\ncheckpoints are in {elsewhere}; {files}")
        if loads:
            worst = ", ".join(f"{load.max():.2f}" for load in loads.values())
            print(f"largest load of an expert over the mean, layer by layer, last {steps} steps: {worst}")
        sets = {name: batches.parts[0] for name, batches in self.held_out.items()}
        for name, result in results.items():
            counts = [part.counts for part in ([sets[name]] if name else sets.values())]
            print("\n".join(describe_held_out(name, result, counts)))
        if sample:
            print(f"sample:\n{sample}")


def _shown(value: Any) -> str:
    """A setting as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def print_status(text: str) -> None:
    """A line on the standard error, where the progress is."""
    print(text, file=sys.stderr, flush=True)
