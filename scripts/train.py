"""Train a decoder on text.

    python scripts/train.py --run-dir runs/tiny --model tiny

Started again on the same run directory, it goes on where it was. SIGTERM saves and exits with 143.
"""

import contextlib
import functools
import itertools
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from eqx_decoders import Sample, abstract, generate, get_config, init, list_models
from eqx_decoders.describe import describe
from eqx_decoders.errors import ConfigError, EqxDecodersError, check, need_extra
from eqx_decoders.io.checkpoint import Checkpoints
from eqx_decoders.io.rundir import Interrupt, RunLock, exit_code
from eqx_decoders.training.console import (
    MetricsFile,
    Progress,
    TensorBoard,
    Tracker,
    Trackers,
    plot_losses,
)
from eqx_decoders.training.data import make_dataset, training_texts
from eqx_decoders.training.evaluate import HeldOut, evaluate
from eqx_decoders.training.flops import device_flops, flops_per_token
from eqx_decoders.training.memory import keep_memory
from eqx_decoders.training.settings import TrainConfig, describe_devices, save_settings, settings_json
from eqx_decoders.training.step import Trainer, place
from eqx_decoders.training.tokenizer import load_tokenizer, prompt_ids, train_bpe


def main() -> int:
    try:
        import tyro
    except ImportError as error:
        raise need_extra("tyro", "train") from error
    try:
        config = tyro.cli(TrainConfig, description=__doc__)
        if config.list_models:
            print("\n".join(list_models()))
            return 0
        keep_memory()
        if config.distributed:
            jax.distributed.initialize()
        if config.describe:
            model = abstract(get_config(config.model), **vars(config.execution()))
            print(describe(model))
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
        self.model_config = get_config(config.model)
        self.writer = jax.process_index() == 0
        self.interrupt = Interrupt()
        self.flops = config.batch_size * config.seq_len * flops_per_token(self.model_config, config.seq_len)
        self.peak = device_flops(self.execution.layout, self.execution.precision.compute)
        self.skips = 0

    def main(self) -> int:
        config = self.config
        lock = RunLock(self.dir) if self.writer else contextlib.nullcontext()
        with lock, self.interrupt:
            self.tokenizer = self._tokenizer()
            data = functools.partial(
                make_dataset,
                config.data_config(),
                self.tokenizer,
                cache_dir=self.dir / "data",
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
            checkpoints = Checkpoints(self.dir / "checkpoints", keep=config.keep)
            with data(split="train") as self.data, data(split="held_out") as self.held_out, checkpoints:
                self.checkpoints = checkpoints
                state, start = self._begin()
                self.metrics = self._trackers(start + 1)
                with Progress(config.steps, start=start) as self.progress:
                    state, step = self._loop(state, start)
                    result = self._evaluate(state.model, step) if step == config.steps else None
                    sample = self._sample(state.model) if result else ""
                if self.interrupt.signal is not None:
                    self._save(step, state)
                    checkpoints.wait()
                    say(f"stopped by {self.interrupt.signal.name}, saved at step {step}")
                    return self.interrupt.exit_code
                self.metrics.close()
                if self.writer and result is not None:
                    self._finish(result, sample)
        return 0

    def _tokenizer(self):
        """That of the run directory; else the one asked for, kept there from now on."""
        config, folder = self.config, self.dir / "tokenizer"
        size = self.model_config.vocab_size
        if folder.exists():
            tokenizer = load_tokenizer(folder)
        elif config.tokenizer == "bpe":
            tokenizer = train_bpe(training_texts(config.data_config()), min(size, config.bpe_vocab_size or size))
        else:
            tokenizer = load_tokenizer(config.tokenizer)
        check(
            tokenizer.vocab_size <= size,
            f"tokenizer={config.tokenizer!r} has {tokenizer.vocab_size} ids, but model={config.model!r} only {size}. "
            "Choose a smaller tokenizer or another model.",
        )
        if self.writer and not folder.exists():
            tokenizer.save(folder.with_suffix(".partial"))
            folder.with_suffix(".partial").rename(folder)  # a kill halfway leaves no half tokenizer
        return tokenizer

    def _begin(self):
        """The state of the newest checkpoint, or a new one."""
        config, key = self.config, jax.random.key(self.config.seed)
        target = abstract(self.model_config, **vars(self.execution))
        self.trainer = Trainer.create(config.optimizer, target, steps=config.steps, config=config.step)
        counts = self.data.store.counts("train")
        weights = sum(leaf.size for leaf in jax.tree.leaves(target))
        say(f"{config.model}: {weights:,} weights on {describe_devices(self.execution.layout)}")
        say(
            f"{counts.documents:,} documents, {counts.tokens:,} tokens, {self.data.rows_per_epoch:,} sequences an epoch"
        )
        if self.checkpoints.latest is None:
            model = init(self.model_config, key=jax.random.fold_in(key, 0), **vars(self.execution))
            state, start = self.trainer.init(model, key=jax.random.fold_in(key, 1)), 0
        else:
            state, data_state, start = self.checkpoints.restore(self.trainer.abstract(target, key=key))
            self.data.set_state(data_state)
            say(f"resumed at step {start}")
        if self.writer:
            save_settings(config, self.dir / "settings.json")
        return state, start

    def _loop(self, state, step: int):
        """Steps until the last one or a signal."""
        config = self.config
        while step < config.steps and not self._stopping(step):
            begun = time.perf_counter()
            batch = place(next(self.data), self.execution.layout)
            self._trace(step + 1, jax.profiler.start_trace, 0)
            state, metrics = self.trainer.step(state, batch)
            step += 1
            self._report(step, jax.device_get(metrics), time.perf_counter() - begun)
            self._trace(step, jax.profiler.stop_trace, 1)
            if config.eval_every and step % config.eval_every == 0 and step < config.steps:
                self._evaluate(state.model, step)
            if step % config.checkpoint_every == 0 or step == config.steps:
                self._save(step, state)
        return state, step

    def _stopping(self, step: int) -> bool:
        """Whether a signal came; several processes agree on the step at which they stop."""
        if jax.process_count() == 1:
            return self.interrupt.requested
        return multihost_utils.reached_preemption_sync_point(step)

    def _report(self, step: int, metrics, seconds: float) -> None:
        """Write and show a step's row; give up after too many steps that were not finite."""
        names = ("loss", "nll", "accuracy", "tokens", "grad_norm", "learning_rate", "skipped")
        row = {"step": step} | {name: getattr(metrics, name) for name in names}
        row |= {"step_seconds": seconds, "epochs": self.data.epochs}
        if self.peak is not None:
            row["mfu"] = self.flops / seconds / self.peak
        if metrics.stats is not None:
            row |= {f"activations/{name}": value for name, value in vars(metrics.stats.activations).items()}
        self.metrics.write(row)
        self.progress.update(step, row)
        self.skips = self.skips + 1 if metrics.skipped else 0
        if self.skips >= self.config.max_skipped:
            raise ConfigError(
                f"{self.skips} steps in a row were not finite (loss={row['loss']}, grad_norm={row['grad_norm']}). The "
                f"weights are still those of step {step - self.skips}. Lower optimizer.learning_rate and start again."
            )

    def _evaluate(self, model, step: int) -> HeldOut | None:
        """The held-out loss, and a sample on the way; None if a signal came meanwhile."""
        batches, last = self.held_out.rewind(), step == self.config.steps
        if not last:  # some of the split while the run goes on, all of it at the end
            batches = itertools.islice(batches, self.config.eval_batches)
        result = evaluate(model, batches, stop=lambda: self.interrupt.requested)
        if self.interrupt.requested:
            return None
        self.metrics.write({"step": step, "eval_loss": result.loss})
        self.progress.message(f"step {step}: held-out loss {result.loss:.4f} nats per token")
        if not last:
            self.progress.message(self._sample(model))
        return result

    def _sample(self, model) -> str:
        if self.config.sample_tokens == 0 or jax.process_count() > 1:
            return ""
        stop = self.tokenizer.eos_id
        new = generate(
            model,
            prompt_ids(self.tokenizer, self.config.prompt)[None],
            max_new_tokens=self.config.sample_tokens,
            sampler=Sample(temperature=0.7, top_p=0.95),
            key=jax.random.key(self.config.seed),
            stop_ids=() if stop is None else (stop,),
            pad_id=stop or 0,
        )
        ids = [token for token in np.asarray(new)[0].tolist() if token != stop]
        return self.config.prompt + self.tokenizer.decode(ids)

    def _save(self, step: int, state) -> None:
        self.checkpoints.save(step, state, data_state=self.data.get_state(), config=settings_json(self.config))

    def _trackers(self, start: int) -> Trackers:
        if not self.writer:
            return Trackers()
        trackers: list[Tracker] = [MetricsFile(self.dir / "metrics.jsonl", start=start)]
        if self.config.tensorboard or (self.config.tensorboard is None and find_spec("tensorboardX")):
            trackers.append(TensorBoard(self.dir / "tensorboard"))
        return Trackers(*trackers, say=say)

    def _trace(self, step: int, action, which: int) -> None:
        """Start the profiler's trace before its first step, stop it after its last."""
        if self.config.profile is not None and step == self.config.profile[which]:
            action(*([str(self.dir / "profile")] if which == 0 else []))

    def _finish(self, result: HeldOut, sample: str) -> None:
        """The picture, and the figures that a person wants to see."""
        plot_losses(self.dir / "metrics.jsonl", self.dir / "loss.png")
        counts = self.held_out.store.counts("held_out")
        print(f"\ncheckpoints, metrics.jsonl and loss.png are in {self.dir}")
        print(f"held-out loss: {result.loss:.4f} nats per token, of all {result.tokens:,} tokens")
        if counts.bytes is not None:  # unknown for data that came as tokens
            print(f"held-out loss: {result.nats_per_byte(counts.bytes):.4f} nats per byte, of {counts.bytes:,} bytes")
            print(f"gzip -9 needs: {counts.gzip_nats_per_byte:.4f} nats per byte, for the same text")
        if sample:
            print(f"sample:\n{sample}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
