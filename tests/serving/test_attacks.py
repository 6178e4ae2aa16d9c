"""Ordinary clients get all their answers during each attack, and the server's memory does not grow."""

import pytest

from tests.serving.attacks import ATTACKS, run_attack


# Allowed growth of the server's memory in MB: bodies and answers in flight, and image programs.
MORE = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_one_client_does_not_stop_the_others(name):
    if name in ("A8", "A9", "A10", "A2"):
        pytest.importorskip("av")
        pytest.importorskip("PIL.Image")
    seen = run_attack(name)
    before, most, _ = seen.memory
    assert seen.refused == 0 and most < before + MORE, seen
