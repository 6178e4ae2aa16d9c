"""Runs that learn from a teacher on answers that the student draws (arXiv 2306.13649)."""

from collections.abc import Iterable

from eqx_decoders.data.prompt_batches import Prompt, PromptBatches
from eqx_decoders.rl.rl_run import RLRun
from eqx_decoders.rl.sampler_engine import Drawer
from eqx_decoders.training.methods.held_out_figures import held_out_figures
from eqx_decoders.training.methods.method import MethodStart
from eqx_decoders.training.methods.teacher import load_teacher
from eqx_decoders.training.objectives.distillation import DistillObjective
from eqx_decoders.training.step.train_state import TrainState


class OnPolicyRun(RLRun):
    """Answers of a student, and the divergence of its distributions over them from those of a teacher."""

    def __init__(self, start: MethodStart, prompts: PromptBatches, answerer: Drawer):
        super().__init__(start, prompts, answerer)
        settings = start.config.distill
        teacher = load_teacher(str(settings.teacher), start.tokenizer, start.execution)
        self.loss = DistillObjective(teacher, **settings.loss_options())

    def evaluate(self, state: TrainState, batches: Iterable[list[Prompt]]) -> dict[str, float]:
        """Compute the loss and the divergence of answers drawn to held-out prompts."""
        self._draws.wait()
        self._answerer.engine.load(state.averaged, version=int(state.step))
        drawn = [self._draw_held_out(prompts) for prompts in batches]
        self._answerer.engine.release()
        packed = (self._packed(answers).batch for answers in drawn)
        return held_out_figures(self.loss, state, packed, lambda batch: batch)
