"""Messages of rings on the links of tori."""

import itertools

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.sharding.links import busiest_link, ring_load, ring_pairs


CHIP = {chip.name: chip for chip in CHIPS}


def test_rings_of_a_mesh():
    """Of twelve devices, rings of three at distance two: 0, 2, 4 and 1, 3, 5, and so on."""
    forth, back = (dict(ring_pairs(12, 3, 2, step)) for step in (1, -1))
    assert [forth[device] for device in (0, 2, 4, 1, 3, 5)] == [2, 4, 0, 3, 5, 1]
    assert [forth[device] for device in (6, 8, 10, 11)] == [8, 10, 6, 7]
    assert {target: source for source, target in forth.items()} == back


def load(name, extents, size, distance):
    chips = np.array(list(itertools.product(*map(range, extents))))
    pairs = np.array([*ring_pairs(len(chips), size, distance, 1), *ring_pairs(len(chips), size, distance, -1)])
    return busiest_link(CHIP[name], extents, *(chips[pairs[:, end]] for end in (0, 1)))


@pytest.mark.parametrize(
    "name, extents, size, distance, want",
    [
        ("v5p", (4, 4, 4), 4, 1, 1),  # along an axis of a closed torus
        ("v5p", (4, 4, 4), 4, 16, 1),
        ("v5p", (4, 4, 4), 16, 4, 1),  # a plane, line by line: one step is two hops
        ("v5p", (4, 4, 4), 8, 8, 4),  # two chips further, both ways
        ("v5p", (8, 8, 8), 8, 64, 1),
        ("v5p", (8, 8, 8), 16, 32, 8),  # four rows further, or as many back, of eight rings that are beside each other
        ("v6e", (8, 8), 8, 8, 2),  # an open line: the last chip's message passes all
        ("v6e", (16, 16), 16, 16, 1),
        ("v6e", (2, 2), 4, 1, 2),
    ],
)
def test_messages_that_share_a_link(name, extents, size, distance, want):
    assert load(name, extents, size, distance) == want


def test_messages_go_the_shorter_way():
    torus, far = (8, 8, 8), np.array([[0, 0, 0]])
    for target in ([0, 0, 7], [0, 1, 0], [3, 5, 4]):
        assert busiest_link(CHIP["v5p"], torus, far, np.array([target])) == 1
    both = np.array([[0, 0, 0], [0, 0, 1]])
    assert busiest_link(CHIP["v5p"], torus, both, np.array([[0, 0, 2], [0, 0, 2]])) == 2
    assert busiest_link(CHIP["v5p"], torus, both, np.array([[0, 0, 6], [0, 0, 2]])) == 1


def test_devices_without_links_share_none():
    assert ring_load(ed.Layout.create(fsdp=8).mesh, ("fsdp",), 4, 2) == 1
