"""Samples of a run: texts of the model, or its answers about held-out images."""

from collections.abc import Callable

from eqx_decoders.data.batches import Batches
from eqx_decoders.io.coordination import Stop
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.evaluation import sample_text
from eqx_decoders.training.run.goodput import WallTime
from eqx_decoders.training.run.hooks.base import Hook, evaluates_after, failures_as_warnings
from eqx_decoders.training.run.media_eval import answers, describe_answers, draw_answers
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.step.train_state import TrainState


DRAWN_ANSWERS = 24  # images with answers in the run directory


class SampleHook(Hook):
    """A sample after each evaluation, which is shown, and one at the end.

    **Arguments:**

    - `text`: the last sample; empty if none is wanted, it failed, or a signal came meanwhile.
    """

    def __init__(self, run: PreparedRun, show: Callable[[str], None], time: WallTime, stop: Stop):
        self.run, self.show, self.time, self.stop = run, show, time, stop
        self.text = ""

    def is_due(self, step: int) -> bool:
        return evaluates_after(self.run.config, step)

    def after_step(self, step: int, state: TrainState) -> None:
        if self.is_due(step):
            with self.time.doing("evaluating"):
                self._sample(step, state)
                if self.text and self.run.writes:
                    self.show(self.text)

    def finish(self, step: int, state: TrainState) -> None:
        self._sample(step, state, draw=self.run.writes)

    def _sample(self, step: int, state: TrainState, *, draw: bool = False) -> None:
        self.text = ""
        with failures_as_warnings("the sample", step, self.show):
            self.text = self.sample(state.averaged, draw=draw)

    def sample(self, model: Decoder, *, draw: bool = False) -> str:
        """Return a text of the model or, for one with encoders, its answers to held-out questions, if there are any.

        `draw`: whether images with their answers are drawn into the run directory.
        """
        run, config = self.run, self.run.config
        if config.sample_tokens == 0 or model.config.scores is not None or self.stop.agreed:
            return ""
        if run.reader is not None and run.held_out:
            stores = [batches.store for batches in run.held_out.values() if isinstance(batches, Batches)]
            sizes = {"most_new": config.sample_tokens, "at_once": config.dataset.batch_size * config.dataset.seq_len}
            answered = answers(model, run.reader, run.tokenizer, stores, **sizes)
            if draw and answered:
                draw_answers(run.reader, answered[:DRAWN_ANSWERS], run.directory.path / "answers.png")
            if answered:
                return describe_answers(answered)
        new, seed = config.sample_tokens, config.dataset.seed
        return sample_text(
            model, run.tokenizer, config.prompt, max_new_tokens=new, seed=seed, stop_ids=run.directory.stop_ids
        )
