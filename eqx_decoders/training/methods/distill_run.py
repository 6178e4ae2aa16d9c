"""What a run that learns from a teacher needs beside one on texts: the teacher, and its loss."""

from collections.abc import Iterable

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.errors import check
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.held_out_figures import held_out_figures
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod
from eqx_decoders.training.methods.texts import open_texts
from eqx_decoders.training.objectives.distillation import DistillObjective
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.step.train_state import TrainState


class DistillRun:
    """Loss of a run that learns from a teacher."""

    def __init__(self, start: MethodStart):
        settings, self._layout = start.config.distill, start.execution.layout
        self.loss = DistillObjective(
            teacher=load_teacher(start),
            divergence=settings.divergence_of(),
            temperature=settings.temperature,
            alpha=settings.alpha,
        )

    def prepare(self, batch: Batch, state: TrainState) -> Batch:
        """Return the batch: the step computes what the teacher says of it."""
        return batch

    def evaluate(self, state: TrainState, batches: Iterable[Batch], rows: int) -> dict[str, float]:
        """Compute the loss and the divergence of held-out targets, with the means of the weights if there are any."""
        return held_out_figures(self.loss, state.averaged, batches, lambda batch: hand_over(batch, self._layout, rows))

    def note(self, row: MetricsRow) -> str | None:
        """Return nothing."""
        return None


def open_distillation(start: MethodStart) -> OpenedMethod:
    """Open the texts of a run, and its teacher."""
    start.check_text_alone()
    run = DistillRun(start)  # a wrong teacher is known before tokens are made
    return open_texts(start)._replace(method=run)


def load_teacher(start: MethodStart) -> Decoder:
    """Load the teacher of a run. Raises ConfigError for one with another vocabulary."""
    source = str(start.config.distill.teacher)
    with StatusLine(f"loading the teacher {source}", remains="what was downloaded is kept"):
        check_same_tokens(start.tokenizer, load_tokenizer(resolve(source).path), source)
        return load_hf(source, **vars(start.execution))


def check_same_tokens(tokenizer: Tokenizer, teachers: Tokenizer, source: str) -> None:
    """Raise ConfigError unless both tokenizers give every id the same token; their rules to cut texts may differ."""
    if tokenizer.content_hash == teachers.content_hash:
        return
    rule = f"distill.teacher={source!r} has another vocabulary"
    remedy = (
        "Its distributions are over other tokens: take a teacher with the student's tokenizer, or train on its texts"
    )
    named = isinstance(tokenizer, JsonTokenizer) and isinstance(teachers, JsonTokenizer)
    check(named, f"{rule}: a {type(teachers).__name__}, and not a {type(tokenizer).__name__}. {remedy}.")
    assert isinstance(tokenizer, JsonTokenizer) and isinstance(teachers, JsonTokenizer)
    for index in range(max(tokenizer.vocab_size, teachers.vocab_size)):
        one, other = tokenizer.name_of(index), teachers.name_of(index)
        check(one == other, f"{rule}: id {index} is {other!r}, and the student's {one!r}. {remedy}.")
