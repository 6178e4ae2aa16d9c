"""What is said of held-out losses."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import eqx_decoders as ed
from eqx_decoders.data.store.corpus_stats import CorpusStats
from eqx_decoders.training.evaluation import _held_out
from eqx_decoders.training.held_out import HeldOut, describe_held_out
from eqx_decoders.training.run.hooks.evaluation_hook import EvaluationHook
from eqx_decoders.training.step.train_state import TrainState


def test_the_loss_of_no_tokens_is_nan():
    assert np.isnan(_held_out(np.zeros(2), 0).loss) and _held_out(np.asarray([6.0, 3.0]), 0).loss == 2.0


def test_a_failed_evaluation_is_treated_as_a_loss_that_is_not_finite():
    """Older checkpoints are then kept. Without held-out sets, nothing is evaluated and nothing can fail."""
    outcomes: dict[str, Any] = {
        "none": {},
        "good": {"": HeldOut(loss=2.0, tokens=3, nats=6.0), "b": HeldOut(loss=1.0, tokens=1, nats=1.0)},
        "nan": {"": HeldOut(loss=2.0, tokens=3, nats=6.0), "b": HeldOut(loss=np.nan, tokens=0, nats=0.0)},
        "error": MemoryError("a copy of the weights"),
    }
    said: list[str] = []
    hook: Any = object.__new__(EvaluationHook)  # without a run
    hook.run, hook.show, hook.results, hook.failed = SimpleNamespace(method=None), said.append, {}, False
    counts: Any = dict(step=np.asarray(4, np.int32), skipped=np.asarray(0, np.int32))
    model = ed.abstract(ed.get_config("tiny"))
    state = TrainState(model=model, optimizer=None, key=jax.random.key(0), **counts)
    found = {}
    for name, outcome in outcomes.items():

        def evaluate(model, step, outcome=outcome):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        hook.evaluate = evaluate
        hook.finish(4, state)
        found[name] = hook.is_finite
    assert found == {"none": True, "good": True, "nan": False, "error": False} and len(said) == 1


def test_shares_of_weights_below_one_in_sum_are_shares():
    found = _held_out(np.asarray([0.5, 0.25, 0.1, 0.0, 0.2, 0.0]), 2)
    assert found == HeldOut(loss=2.0, tokens=0, nats=0.5, acceptance=(0.5, 0.0))


def test_the_baseline_is_named_with_its_set_and_with_what_it_is_of():
    result = HeldOut(loss=1.0, tokens=30, nats=30.0)
    whole, part = CorpusStats(1, 20, 20, 100, 2.0, 100), CorpusStats(1, 12, 10, 300, 1.0, 60)
    assert describe_held_out("web", result._replace(tokens=20), [whole])[-1] == (
        "gzip -9 needs of web: 2.0000 nats per byte, for the same text"
    )
    assert describe_held_out("", result, [whole, part])[-1] == (
        "gzip -9 needs: 1.2500 nats per byte, for 160 bytes of the same text"
    )
    old = whole._replace(gzip_bytes=None)
    assert describe_held_out("", result._replace(tokens=20), [old])[-1].endswith("for the same text")
    assert len(describe_held_out("", result._replace(tokens=20), [whole, part])) == 1, "not all was evaluated"
