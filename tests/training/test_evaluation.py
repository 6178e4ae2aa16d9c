"""Test held-out losses and their description."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import eqx_decoders as ed
from eqx_decoders.data.store.corpus import CorpusStats
from eqx_decoders.training.evaluation import _held_out
from eqx_decoders.training.held_out import HeldOut, describe_held_out
from eqx_decoders.training.run.evaluate import HeldOutEvaluation
from eqx_decoders.training.step.train_state import TrainState
from tests.errors import assert_names


def test_loss_without_tokens_is_nan():
    assert np.isnan(_held_out(np.zeros(2), 0).loss) and _held_out(np.asarray([6.0, 3.0]), 0).loss == 2.0


def test_failed_evaluation_is_treated_as_non_finite_loss():
    """Older checkpoints are kept. Without held-out sets, nothing is evaluated."""
    outcomes: dict[str, Any] = {
        "none": {},
        "good": {"": HeldOut(loss=2.0, tokens=3, nats=6.0), "b": HeldOut(loss=1.0, tokens=1, nats=1.0)},
        "nan": {"": HeldOut(loss=2.0, tokens=3, nats=6.0), "b": HeldOut(loss=np.nan, tokens=0, nats=0.0)},
        "error": MemoryError("a copy of the weights"),
    }
    warnings: list[str] = []
    evaluation: Any = object.__new__(HeldOutEvaluation)  # without a run
    evaluation.run, evaluation.show = SimpleNamespace(method=None), warnings.append
    counts: Any = dict(step=np.asarray(4, np.int32), skipped=np.asarray(0, np.int32))
    model = ed.abstract(ed.get_config("tiny"))
    state = TrainState(model=model, optimizer=None, key=jax.random.key(0), **counts)
    found = {}
    for name, outcome in outcomes.items():

        def losses(step, state, outcome=outcome):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        evaluation._losses = losses
        evaluation.evaluate(4, state)
        found[name] = evaluation.is_finite
    assert found == {"none": True, "good": True, "nan": False, "error": False} and len(warnings) == 1


def test_held_out_loss_with_total_weight_below_one():
    found = _held_out(np.asarray([0.5, 0.25, 0.1, 0.0, 0.2, 0.0]), 2)
    assert found == HeldOut(loss=2.0, tokens=0, nats=0.5, acceptance=(0.5, 0.0))


def test_description_names_the_set_and_the_compressor():
    result = HeldOut(loss=1.0, tokens=30, nats=30.0)
    whole, part = CorpusStats(1, 20, 20, 100, 2.0, 100), CorpusStats(1, 12, 10, 300, 1.0, 60)
    evaluated = result._replace(tokens=20)
    assert_names(describe_held_out("web", evaluated, [whole])[-1], "gzip -9", "web", "2.0000")
    assert_names(describe_held_out("", result, [whole, part])[-1], "gzip -9", "1.2500", "160")
    old = whole._replace(gzip_bytes=None)
    assert_names(describe_held_out("", evaluated, [old])[-1], "gzip -9", "2.0000")
    assert len(describe_held_out("", evaluated, [whole, part])) == 1  # only a part of the set was evaluated
