"""Method distill on texts: a student learns from the distributions of a teacher."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.host_rows import place_read_only
from eqx_decoders.data.store.signal_cache import Column, SignalCache
from eqx_decoders.errors import check
from eqx_decoders.io.huggingface.hub import fingerprint
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.method import BatchMethod, MethodStart, OpenedMethod
from eqx_decoders.training.methods.saved_signals import RowSegment, SavedSignals, Scorer, rows_of_process
from eqx_decoders.training.methods.sft import open_texts
from eqx_decoders.training.methods.teachers import TeacherServer, is_server, load_teacher
from eqx_decoders.training.objectives.distillation import DistillObjective, top_tokens


def open_distillation(start: MethodStart) -> OpenedMethod:
    """Open a run that learns from a teacher on texts."""
    start.check_text_only()
    run = DistillRun(start)  # before the texts are tokenized, so that errors come early
    saved = None if start.config.distill.top is None else saved_top_tokens(start)
    opened = open_texts(start)
    for batches in (opened.data, *opened.held_out.values()):
        if saved is not None and isinstance(batches, Batches):
            batches.complete = saved
    return opened._replace(method=run)


class DistillRun(BatchMethod):
    """Method of a run that learns from a teacher on texts."""

    def __init__(self, start: MethodStart):
        super().__init__(start.execution, start.config.data.batch_size)
        settings = start.config.distill
        teacher = _load_teacher(start) if settings.top is None else None
        self.loss = DistillObjective(teacher, **settings.loss_options())


def _load_teacher(start: MethodStart) -> Decoder:
    return load_teacher(str(start.config.distill.teacher), start.tokenizer, start.execution)


def saved_top_tokens(start: MethodStart) -> SavedSignals:
    """Open the directory of the teacher's most likely tokens. Without a teacher, all tokens must be stored."""
    settings, vocab_size = start.config.distill, start.target.config.vocab_size
    top = settings.top or 0
    check(
        top < vocab_size,
        f"distill.top={top} must be less than the vocabulary size {vocab_size}: lower it, or leave it out to compare "
        "all tokens.",
    )
    folder = start.run.path / "teacher" if settings.saved is None else Path(settings.saved)
    computed_by: dict[str, Any] = {"tokenizer": start.tokenizer.content_hash, "temperature": settings.temperature}
    compute: Scorer | None = None
    if settings.teacher is not None and is_server(settings.teacher):
        server = TeacherServer(settings.teacher, top=top, vocab_size=vocab_size)
        server.check_tokens(start.tokenizer)
        computed_by |= {"weights": server.name}
        compute = server
    elif settings.teacher is not None:
        computed_by |= {"weights": fingerprint(settings.teacher), "precision": repr(start.execution.precision)}
        compute = _top_tokens_of(start, _load_teacher(start), top)
    columns = {"top_ids": Column("<i4", top), "top_log_probs": Column("<f2", top)}
    return SavedSignals(SignalCache(folder, columns, computed_by, jax.process_index()), compute)


def _top_tokens_of(start: MethodStart, teacher: Decoder, top: int) -> Scorer:
    layout, rows = start.execution.layout, start.config.data.batch_size
    temperature = start.config.distill.temperature

    def compute(batch: Batch, segments: Sequence[RowSegment]) -> dict[str, np.ndarray]:
        found = top_tokens(teacher, place_read_only(batch, layout, rows), top=top, temperature=temperature)
        arrays = {"top_ids": found.ids, "top_log_probs": found.log_probs}
        return {name: rows_of_process(array, layout, start.options["rows"]) for name, array in arrays.items()}

    return compute
