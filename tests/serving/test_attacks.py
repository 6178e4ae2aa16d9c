"""Each of the attacks: all ordinary clients are answered, and the server's memory stays what it was."""

import pytest

from tests.serving.attacks import ATTACKS, attacked


# What a server may hold more than before, in MB: bodies and answers that are on their way, and programs for images.
MORE = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_one_client_does_not_stop_the_others(name):
    if name in ("A8", "A9", "A10", "A2"):
        pytest.importorskip("av")
        pytest.importorskip("PIL.Image")
    seen = attacked(name)
    before, most, _ = seen.memory
    assert seen.refused == 0 and most < before + MORE, seen
