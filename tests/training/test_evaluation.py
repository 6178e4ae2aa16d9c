"""What is said of held-out losses."""

import numpy as np

from eqx_decoders.data.store.corpus_stats import CorpusStats
from eqx_decoders.training.evaluation import _held_out
from eqx_decoders.training.held_out import HeldOut, describe_held_out


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
