"""Messages of rings on the links of tori."""

import dataclasses
import itertools

import numpy as np
import pytest
from jax.sharding import Mesh

import eqx_decoders as ed
from eqx_decoders.numerics.rings.links import ring_load, ring_pairs
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.sharding.links import busiest_link


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


@dataclasses.dataclass(frozen=True)
class FakeChip:
    """What a mesh and `ring_load` ask of a TPU."""

    id: int
    coords: tuple[int, ...]
    device_kind: str = "TPU v6 lite"
    slice_index: int = 0
    platform: str = "tpu"
    process_index: int = 0


def fake_mesh(extents, names, slices=1, kind="TPU v6 lite", copies=1):
    """Slices, one after the other, of chips in rows; the last axis of the mesh has devices of a chip, if there are."""
    places = [(part, place) for part in range(slices) for place in itertools.product(*map(range, extents))]
    chips = [
        FakeChip(index, (*place, 0), kind, part) for index, (part, place) in enumerate(places) for _ in range(copies)
    ]
    chips = [dataclasses.replace(chip, id=index) for index, chip in enumerate(chips)]
    sizes = ([slices] if slices > 1 else []) + list(extents) + ([copies] if copies > 1 else [])
    return Mesh(np.array(chips, object).reshape(sizes), names)


def test_rings_along_axes_of_a_mesh():
    """Of 8 x 4 chips: along one axis, the other, and both in either order; other slices have links of their own."""
    mesh = fake_mesh((8, 4), ("fsdp", "tensor"))
    assert ring_load(mesh, ("fsdp",), 8, 1) == ring_load(mesh, ("tensor",), 4, 1) == 2  # open lines
    assert ring_load(mesh, ("fsdp",), 2, 4) == 8  # four pass a link, and both halves of a ring of two go the same way
    assert ring_load(mesh, ("fsdp", "tensor"), 8, 4) == ring_load(mesh, ("tensor", "fsdp"), 8, 1) == 2
    assert ring_load(mesh, ("tensor", "fsdp"), 4, 8) == 2
    two = fake_mesh((8, 4), ("data", "fsdp", "tensor"), slices=2)
    assert ring_load(two, ("fsdp",), 8, 1) == 2


def test_devices_of_a_chip_share_its_links():
    mesh = fake_mesh((4, 2), ("fsdp", "tensor", "expert"), kind="TPU7x", copies=2)
    assert ring_load(mesh, ("expert",), 2, 1) == 1  # none is used
    assert ring_load(mesh, ("fsdp",), 4, 1) == 2 * 2


def test_devices_without_links_share_none():
    assert ring_load(ed.Layout.create(fsdp=8).mesh, ("fsdp",), 4, 2) == 1
    assert ring_load(ed.Layout.create(fsdp=8, abstract=True).mesh, ("fsdp",), 4, 2) == 1
