"""What a run that learns from a teacher needs beside one on texts: the teacher, and its loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.data.store.signal_cache import Column, SignalCache
from eqx_decoders.errors import check
from eqx_decoders.io.huggingface.fingerprint import fingerprint
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.method import BatchMethod, MethodStart, OpenedMethod
from eqx_decoders.training.methods.saved_signals import RowSegment, SavedSignals, Scorer, rows_of_process
from eqx_decoders.training.methods.teacher import load_teacher
from eqx_decoders.training.methods.teacher_server import TeacherServer, is_server
from eqx_decoders.training.methods.texts import open_texts
from eqx_decoders.training.objectives.distillation import DistillObjective, top_tokens


class DistillRun(BatchMethod):
    """Loss of a run that learns from a teacher."""

    def __init__(self, start: MethodStart):
        super().__init__(start.execution, start.config.data.batch_size)
        settings = start.config.distill
        teacher = teacher_of(start) if settings.top is None else None
        self.loss = DistillObjective(teacher, **settings.loss_options())


def teacher_of(start: MethodStart) -> Decoder:
    """Load the teacher that the settings of a run name."""
    return load_teacher(str(start.config.distill.teacher), start.tokenizer, start.execution)


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
        compute = _likeliest(start, teacher_of(start), top)
    columns = {"top_ids": Column("<i4", top), "top_log_probs": Column("<f2", top)}
    return SavedSignals(SignalCache(folder, columns, made_by, jax.process_index()), compute)


def _likeliest(start: MethodStart, teacher: Decoder, top: int) -> Scorer:
    layout, rows = start.execution.layout, start.config.data.batch_size
    options: Any = dict(top=top, temperature=start.config.distill.temperature)

    def compute(batch: Batch, places: Sequence[RowSegment]) -> dict[str, np.ndarray]:
        likeliest = top_tokens(teacher, hand_over(batch, layout, rows), **options)
        arrays = {"top_ids": likeliest.ids, "top_log_probs": likeliest.log_probs}
        return {name: rows_of_process(x, layout, start.options["rows"]) for name, x in arrays.items()}

    return compute
