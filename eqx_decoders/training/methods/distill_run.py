"""What a run that learns from a teacher needs beside one on texts: the teacher, and its loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.data.store.segment_numbers import Column, SegmentNumbers
from eqx_decoders.errors import check
from eqx_decoders.io.huggingface.fingerprint import fingerprint
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.method import BatchMethod, MethodStart, OpenedMethod
from eqx_decoders.training.methods.saved_signals import RowSegment, SavedSignals, Scorer, rows_of_process
from eqx_decoders.training.methods.teacher_server import TeacherServer, is_server
from eqx_decoders.training.methods.texts import open_texts
from eqx_decoders.training.objectives.distillation import DistillObjective, top_tokens


class DistillRun(BatchMethod):
    """Loss of a run that learns from a teacher."""

    def __init__(self, start: MethodStart):
        super().__init__(start.execution, start.config.dataset.batch_size)
        settings = start.config.distill
        self.loss = DistillObjective(
            teacher=load_teacher(start) if settings.top is None else None,
            divergence=settings.divergence_of(),
            temperature=settings.temperature,
            alpha=settings.alpha,
        )


def open_distillation(start: MethodStart) -> OpenedMethod:
    """Open the texts of a run, and its teacher."""
    start.check_text_alone()
    run = DistillRun(start)  # a wrong teacher is known before tokens are made
    saved = None if start.config.distill.top is None else saved_teacher(start)
    opened = open_texts(start)
    for batches in (opened.data, *opened.held_out.values()):
        if saved is not None and isinstance(batches, Batches):
            batches.complete = saved
    return opened._replace(method=run)


def saved_teacher(start: MethodStart) -> SavedSignals:
    """Open the directory of a teacher's likeliest tokens. Without a teacher all must be there."""
    settings, size = start.config.distill, start.target.config.vocab_size
    top = settings.top or 0
    check(top < size, f"distill.top={top} must be below the vocabulary of {size}: leave it out.")
    folder = start.run.path / "teacher" if settings.saved is None else Path(settings.saved)
    made_by: dict[str, Any] = {"tokenizer": start.tokenizer.content_hash, "temperature": settings.temperature}
    compute: Scorer | None = None
    if settings.teacher is not None and is_server(settings.teacher):
        server = TeacherServer(settings.teacher, top=top, vocab_size=size)
        server.check_tokens(start.tokenizer)
        made_by, compute = made_by | {"weights": server.name}, server
    elif settings.teacher is not None:
        made_by |= {"weights": fingerprint(settings.teacher), "precision": repr(start.execution.precision)}
        compute = _likeliest(start, load_teacher(start), top)
    columns = {"top_ids": Column("<i4", top), "top_log_probs": Column("<f2", top)}
    return SavedSignals(SegmentNumbers(folder, columns, made_by, jax.process_index()), compute)


def _likeliest(start: MethodStart, teacher: Decoder, top: int) -> Scorer:
    layout, rows = start.execution.layout, start.config.dataset.batch_size
    options: Any = dict(top=top, temperature=start.config.distill.temperature)

    def compute(batch: Batch, places: Sequence[RowSegment]) -> dict[str, np.ndarray]:
        likeliest = top_tokens(teacher, hand_over(batch, layout, rows), **options)
        arrays = {"top_ids": likeliest.ids, "top_log_probs": likeliest.log_probs}
        return {name: rows_of_process(x, layout, start.options["rows"]) for name, x in arrays.items()}

    return compute


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
