"""Train a decoder on text.

    python scripts/train.py --run-dir runs/tiny --model tiny

Started again on the same run directory, it goes on where it was. SIGTERM saves and exits with 143.
"""

import collections
import contextlib
import dataclasses
import itertools
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eqx_decoders import list_models
from eqx_decoders.axes import named_leaves
from eqx_decoders.describe import describe
from eqx_decoders.errors import EqxDecodersError, check, need_extra
from eqx_decoders.io.checkpoint import Checkpoints
from eqx_decoders.io.huggingface import abstract_hf
from eqx_decoders.io.peft import save_peft
from eqx_decoders.io.rundir import EXIT_SIGTERM, Interrupt, RunLock, exit_code
from eqx_decoders.training.balance import relative_loads, routing_report
from eqx_decoders.training.console import (
    MetricsFile,
    Progress,
    TensorBoard,
    Tracker,
    Trackers,
    plot_loads,
    plot_losses,
)
from eqx_decoders.training.data import make_dataset, prepare_tokenizer
from eqx_decoders.training.evaluate import HeldOut, evaluate, sample_text
from eqx_decoders.training.flops import device_flops, flops_per_token
from eqx_decoders.training.memory import keep_memory
from eqx_decoders.training.runs import SOURCE, abstract_run, continued, export_run, is_imported, keep_source, new_model
from eqx_decoders.training.settings import (
    TrainConfig,
    describe_devices,
    is_new,
    save_settings,
    settings_json,
)
from eqx_decoders.training.step import Trainer, any_process, batch_share, place
from eqx_decoders.training.tokenizer import Tokenizer


LOAD_STEPS = 50  # at the end of a run, of which the loads of experts are drawn
_routing_report = jax.jit(routing_report, static_argnums=0)


def main() -> int:
    try:
        for package in ("tyro", "grain", "tokenizers", "matplotlib"):  # now, not after hours of training
            if find_spec(package) is None:
                raise need_extra(package, "train")
        import tyro

        config = tyro.cli(TrainConfig, description=__doc__)
        if config.list_models:
            print("\n".join(list_models()))
            return 0
        if config.distributed:
            jax.distributed.initialize()
        if jax.default_backend() == "cpu":
            keep_memory()
        if config.describe:
            print(describe(abstract_run(config, config.run_dir, config.execution())))
            return 0
        return Run(config).main()
    except EqxDecodersError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)


class Run:
    """One process's part of a run, from its start to its end."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.dir = Path(config.run_dir)
        self.execution = config.execution()
        self.layout = self.execution.layout
        self.writer = jax.process_index() == 0
        self.interrupt = Interrupt()
        self.peak = device_flops(self.layout, self.execution.precision.compute)
        self.skips = 0
        self.counts = collections.deque(maxlen=LOAD_STEPS)
        self.tracing = False

    def main(self) -> int:
        """Prepare, train, evaluate; the exit code."""
        config, folder = self.config, self.dir
        with contextlib.ExitStack() as stack:
            if self.writer:
                stack.enter_context(RunLock(folder))
            stack.enter_context(self.interrupt)
            self.config = config = continued(config, folder)
            if self.writer and config.init_from is not None and not (folder / SOURCE).exists():
                keep_source(abstract_hf(config.init_from), folder)
            self.target = abstract_run(config, folder, self.execution)
            self.tokenizer = self._tokenizer()
            self.data = stack.enter_context(self._data("train"))
            self.held_out = stack.enter_context(self._data("held_out")) if config.evaluates else None
            self.checkpoints = stack.enter_context(
                Checkpoints(folder / "checkpoints", max_checkpoints=config.max_checkpoints)
            )
            state, start = self._begin()
            self.metrics = stack.enter_context(contextlib.closing(self._trackers(start + 1)))
            with Progress(config.steps, start=start) as self.progress:
                state, step, stopped = self._loop(state, start)
                result = None if stopped else self._evaluate(state.model, step)
                sample = "" if stopped else self._sample(state.model)
            if any_process(self.interrupt.requested):
                self._save(step, state)
                say(f"stopped, saved at step {step}")
                return self.interrupt.exit_code or EXIT_SIGTERM
            self._export(state.model)
            if self.writer:
                self._finish(result, sample)
        return 0

    def _tokenizer(self) -> Tokenizer:
        """That of the run, of the checkpoint that it starts from, or a new one."""
        config, size = self.config, self.target.config.vocab_size
        spec = config.tokenizer or ("bpe" if config.init_from is None else str(self.dir / SOURCE))
        limit = min(size, config.bpe_vocab_size or size)
        tokenizer = prepare_tokenizer(self.dir / "tokenizer", spec, config.data_config(), limit, write=self.writer)
        rows = getattr(self.target.config.positions, "max_positions", config.seq_len)
        check(
            config.seq_len <= rows, f"seq_len={config.seq_len}, but the model has {rows} learned positions: lower it."
        )
        rule = f"but the model only {size}. Choose a smaller tokenizer or another model"
        check(tokenizer.vocab_size <= size, f"tokenizer={spec!r} has {tokenizer.vocab_size} ids, {rule}.")
        return tokenizer

    def _data(self, split: str):
        index, count = batch_share(self.layout, self.config.batch_size)
        return make_dataset(
            self.config.data_config(),
            self.tokenizer,
            cache_dir=self.dir / "data",
            split=split,
            process_index=index,
            process_count=count,
        )

    def _begin(self):
        """The state of the newest checkpoint, or a new one."""
        config, key, target = self.config, jax.random.key(self.config.seed), self.target
        self.flops = config.batch_size * config.seq_len * flops_per_token(target.config, config.seq_len)
        self.trainer = Trainer.create(config.optimizer_config(), target, steps=config.steps, config=config.step)
        counts, epoch = self.data.store.counts("train"), self.data.rows_per_epoch
        weights = sum(leaf.size for leaf in jax.tree.leaves(target))
        trained = sum(leaf.size for name, leaf in named_leaves(target).items() if name in self.trainer.trainable)
        part = f" ({trained:,} of them trained)" if trained < weights else ""
        say(f"{config.init_from or config.model}: {weights:,} weights{part} on {describe_devices(self.layout)}")
        say(f"{counts.documents:,} documents, {counts.tokens:,} tokens, {epoch:,} sequences an epoch")
        if self.checkpoints.latest is None or is_imported(self.dir):
            model = new_model(config, self.dir, self.execution)
            state, start = self.trainer.init(model, key=jax.random.fold_in(key, 1)), 0
        else:
            state, data_state, start = self.checkpoints.restore(self.trainer.abstract(target, key=key))
            self.data.set_state(data_state)
            say(f"resumed at step {start}")
        check(start <= config.steps, f"steps={config.steps}, but {self.dir} has done {start} already: ask for more.")
        for field in ("export", "export_adapter"):  # it is better to know before the training
            wanted = getattr(config, field)
            free = wanted is None or start == config.steps or is_new(wanted)
            check(free, f"{field}={wanted!r} is not empty: give a new directory.")
        if self.writer:
            save_settings(config, self.dir / "settings.json")
        return state, start

    def _loop(self, state, step: int):
        """Steps until the last one or a signal: the state, the steps done, and whether it was a signal."""
        config = self.config
        while step < config.steps:
            if any_process(self.interrupt.requested):
                return state, step, True
            begun = time.perf_counter()
            batch = place(next(self.data), self.layout, config.batch_size)
            self._trace(step + 1)
            state, metrics = self.trainer.step(state, batch)
            step += 1
            self._report(step, state, jax.device_get(metrics), time.perf_counter() - begun)
            self._trace(step + 1)
            if config.eval_every and step % config.eval_every == 0 and step < config.steps:
                self._evaluate(state.model, step)
                self.progress.message(self._sample(state.model))
            if step % config.checkpoint_every == 0 or step == config.steps:
                self._save(step, state)
        return state, step, False

    def _report(self, step: int, state, metrics, seconds: float) -> None:
        """Write and show a step's row; give up after too many steps that were not finite."""
        names = ("loss", "nll", "accuracy", "tokens", "grad_norm", "learning_rate", "skipped")
        row = {"step": step} | {name: getattr(metrics, name) for name in names}
        row |= {"step_seconds": seconds, "epochs": self.data.epochs}
        if self.peak is not None:
            row["mfu"] = self.flops / seconds / self.peak
        if metrics.mtp_nll is not None:
            row["mtp_nll"] = metrics.mtp_nll
        if metrics.stats is not None and metrics.stats.activations is not None:
            row |= {f"activations/{name}": value for name, value in vars(metrics.stats.activations).items()}
        if metrics.stats is not None and metrics.stats.routing is not None:
            row |= jax.device_get(_routing_report(state.model.config, metrics.stats.routing))
            self.counts.append(metrics.stats.routing.counts)
        self.metrics.write(row)
        self.progress.update(step, row)
        self.skips = self.skips + 1 if metrics.skipped else 0
        if self.skips >= self.config.max_skipped:
            self._save(step, state)
            raise EqxDecodersError(
                f"{self.skips} steps in a row were not finite (loss={row['loss']}, grad_norm={row['grad_norm']}). The "
                f"weights are still those of step {step - self.skips}, saved as step {step}. Lower "
                "optimizer.learning_rate or look at the data, and start again."
            )

    def _evaluate(self, model, step: int) -> HeldOut | None:
        """The held-out loss, of some batches on the way and of all at the end; None if a signal came meanwhile."""
        if self.held_out is None:
            return None
        batches = self.held_out.rewind()
        if step < self.config.steps:
            batches = itertools.islice(batches, self.config.eval_batches)
        result = evaluate(model, batches, self.config.batch_size, stop=lambda: self.interrupt.requested)
        if any_process(self.interrupt.requested):
            return None
        row: dict[str, Any] = {"step": step, "eval_loss": result.loss}
        told = f"step {step}: held-out loss {result.loss:.4f} nats per token"
        if result.acceptance:
            row["mtp_acceptance"] = result.acceptance
            told += f", guesses ahead accepted {', '.join(f'{rate:.1%}' for rate in result.acceptance)}"
        self.metrics.write(row)
        self.progress.message(told)
        return result

    def _sample(self, model) -> str:
        config = self.config
        if config.sample_tokens == 0 or jax.process_count() > 1:  # each process would need all of the weights
            return ""
        return sample_text(model, self.tokenizer, config.prompt, max_new_tokens=config.sample_tokens, seed=config.seed)

    def _save(self, step: int, state) -> None:
        self.checkpoints.save(step, state, data_state=self.data.get_state(), config=settings_json(self.config))

    def _trackers(self, start: int) -> Trackers:
        if not self.writer:
            return Trackers()
        trackers: list[Tracker] = [MetricsFile(self.dir / "metrics.jsonl", start=start)]
        if self.config.tensorboard or (self.config.tensorboard is None and find_spec("tensorboardX")):
            trackers.append(TensorBoard(self.dir / "tensorboard"))
        return Trackers(*trackers, say=say)

    def _trace(self, step: int) -> None:
        """Have the profiler write a trace while the steps asked for are run."""
        wanted = self.config.profile is not None and self.config.profile[0] <= step <= self.config.profile[1]
        if wanted and not self.tracing:
            jax.profiler.start_trace(str(self.dir / "profile"))
        elif self.tracing and not wanted:
            jax.profiler.stop_trace()
        self.tracing = wanted

    def _export(self, model) -> None:
        """Write what was asked for, for transformers and PEFT; all processes take part."""
        config = self.config
        model = dataclasses.replace(model, origin=self.target.origin)
        if config.export_adapter is not None and is_new(config.export_adapter):
            save_peft(model, config.export_adapter, base_model=config.init_from or "")
        if config.export is not None and is_new(config.export):
            export_run(model, config, self.dir, config.export)

    def _finish(self, result: HeldOut | None, sample: str) -> None:
        """The picture, and the figures that a person wants to see."""
        plot_losses(self.dir / "metrics.jsonl", self.dir / "loss.png")
        loads = relative_loads(self.target.config, np.sum(self.counts, axis=0)) if self.counts else {}
        if loads:
            plot_loads(loads, self.dir / "expert_load.png")
        print(f"\ncheckpoints, metrics.jsonl, loss.png{' and expert_load.png' * bool(loads)} are in {self.dir}")
        if loads:
            worst = ", ".join(f"{load.max():.2f}" for load in loads.values())
            print(f"largest load of an expert over the mean, layer by layer, last {len(self.counts)} steps: {worst}")
        if result is not None and self.held_out is not None:
            counts = self.held_out.store.counts("held_out")
            print(f"held-out loss: {result.loss:.4f} nats per token, of all {result.tokens:,} tokens")
            if counts.bytes is not None:  # unknown for data that came as tokens
                per_byte = result.nats_per_byte(counts.bytes)
                print(f"held-out loss: {per_byte:.4f} nats per byte, of {counts.bytes:,} bytes")
                print(f"gzip -9 needs: {counts.gzip_nats_per_byte:.4f} nats per byte, for the same text")
        if sample:
            print(f"sample:\n{sample}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
