"""Prompt results that several requests share: the most recently used results are stored for waiting requests."""

import pytest

from eqx_decoders.serving.engine.request import Request
from tests.serving.engines import engine_for


@pytest.mark.slow
def test_a_restored_prompt_counts_as_used():
    engine = engine_for("llama_rope")
    submitted = [
        ((9,) * 9, 2, 40),  # occupies one of three slots
        ((20,) * 9, 2, 8), ((20,) * 9, 1, 1), ((20,) * 9, 0, 1),
        ((30,) * 9, 2, 40), ((30,) * 9, 0, 1),
    ]  # fmt: skip
    for prompt, priority, count in submitted:
        engine.submit(Request(prompt=prompt, max_new_tokens=count, priority=priority))
    first, second = (engine._reader.unfinished[number].shared for number in (1, 4))
    orders = []
    while engine.has_work:
        engine.step()
        orders.append(list(engine._shared_prompts._sizes))
    assert [second, first] in orders and orders.index([first, second]) < orders.index([second, first])
