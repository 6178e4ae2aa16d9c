"""Dropout is drawn once for the student: its divergence and its cross-entropy see the same hidden states."""

import dataclasses

import equinox as eqx
import jax

from eqx_decoders.training.head.divergence import Divergence
from eqx_decoders.training.objectives.distillation import DistillObjective
from tests.compare import assert_close
from tests.models import filled, rich_decoder
from tests.training.objectives.test_distillation import ALPHA, T, batch_of, expected, targets_of


def test_both_terms_see_the_dropout_of_the_key():
    student = filled(dataclasses.replace(rich_decoder(1), dropout=0.5))
    teacher, batch, key = filled(rich_decoder(1), 1), batch_of(), jax.random.key(2)
    divergence = Divergence("forward")
    objective = DistillObjective(teacher, divergence, temperature=T, alpha=ALPHA)
    found, _ = eqx.filter_jit(objective)(student, batch, key=key, full_batch=batch)

    def dropped(tokens, positions, segments):
        return student(tokens, positions, segments, key=key)

    def whole(tokens, positions, segments):
        return teacher(tokens, positions, segments)

    want = expected(dropped, whole, batch, divergence)
    assert_close(found, want * float(targets_of(batch).sum()))
