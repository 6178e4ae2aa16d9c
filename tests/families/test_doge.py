"""Doge: what is refused."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, sample


@pytest.mark.parametrize("change", [dict(is_moe=True), dict(sliding_window=4)], ids=str)
def test_experts_and_windows_are_refused(change):
    ((key, value),) = change.items()
    with pytest.raises(ed.ConversionError, match=rf"{key}={str(value).lower() if value is True else value}"):
        decode(sample("doge") | change)
