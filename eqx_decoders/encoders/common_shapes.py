"""Images and audio of several processes in arrays of the same shapes: each process packs those of its own rows.

What XLA compiles has one shape everywhere. Each process tells how large its arrays are for a group of rows, and all
fill theirs up to the largest.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.packed_rows import AudioRows, ChunkRows, FrameRows, PatchRows


Shapes = dict[str, dict[str, Any]]  # of each array of each kind of rows; as JSON has it

_KINDS = {kind.__name__: kind for kind in (PatchRows, ChunkRows, FrameRows)}


def shapes_of(media: Media) -> Shapes:
    """The shape that each array has for one group, and the type of its numbers."""
    groups = media.order.shape[0]
    found: Shapes = {"order": {"order": [list(media.order.shape[1:]), "int32"]}}
    for name in ("images", "audio"):
        rows = getattr(media, name)
        if rows is not None:
            arrays = _arrays(rows)
            shapes = {key: [[len(x) // groups, *x.shape[1:]], x.dtype.name] for key, x in arrays.items()}
            found[name] = {"kind": type(rows).__name__, "group": rows.group, **shapes}
    return found


def largest(every: Sequence[Shapes]) -> Shapes:
    """The shapes into which the arrays of all fit."""
    found: Shapes = {}
    for name in sorted({name for each in every for name in each}):
        own = [each[name] for each in every if name in each]
        merged: dict[str, Any] = {}
        for key in sorted({key for each in own for key in each}):
            values = [each[key] for each in own if key in each]
            sized = isinstance(values[0], list)
            merged[key] = (
                [np.max([shape for shape, _ in values], axis=0).tolist(), values[0][1]] if sized else values[0]
            )
        if "segment_ids" in merged:  # some have none
            merged["segment_ids"] = merged["positions"]
        found[name] = merged
    return found


def in_shapes(media: Media, shapes: Shapes) -> Media:
    """The same images and audio in arrays of these shapes, in NumPy: what is more is empty."""
    groups, order = media.order.shape[0], np.asarray(media.order)
    grown = {name: _grown_rows(getattr(media, name), shapes.get(name), groups) for name in ("images", "audio")}
    places = [_places(media.images, grown["images"], groups), _places(media.audio, grown["audio"], groups)]
    # behind those of images stand those of audio
    begin = 0 if grown["images"] is None else grown["images"].positions.size // grown["images"].group // groups
    moved = np.concatenate([places[0], places[1] + begin, [0]])[order].astype(np.int32)
    (width,), _ = shapes["order"]["order"]
    moved = np.pad(moved, ((0, 0), (0, width - moved.shape[1])))
    return dataclasses.replace(media, order=moved, **grown)


def _arrays(rows: PatchRows | AudioRows) -> dict[str, np.ndarray]:
    named = ((field.name, getattr(rows, field.name)) for field in dataclasses.fields(rows))
    return {name: np.asarray(x) for name, x in named if isinstance(x, np.ndarray | jax.Array)}


def _places(old: PatchRows | AudioRows | None, new: PatchRows | AudioRows | None, groups: int) -> np.ndarray:
    """Where each feature of a group is in longer rows."""
    if old is None or new is None:
        return np.zeros(0, int)
    rows, length = len(old.positions) // groups, old.positions.shape[1] // old.group
    return (np.arange(rows)[:, None] * (new.positions.shape[1] // new.group) + np.arange(length)).reshape(-1)


def _grown_rows(
    rows: PatchRows | AudioRows | None, shapes: dict[str, Any] | None, groups: int
) -> PatchRows | AudioRows | None:
    if shapes is None:
        return None
    arrays = {} if rows is None else _arrays(rows)
    if "positions" in arrays and "segment_ids" in shapes:  # a row without them is one image
        arrays.setdefault("segment_ids", (arrays["positions"] >= 0).astype(np.int32))
    made: dict[str, Any] = {}
    for name, sized in shapes.items():
        if name in ("kind", "group"):
            continue
        (each, *shape), dtype = sized
        whole = np.full((groups, each, *shape), -1 if name == "positions" else 0, dtype)
        if name in arrays:
            own = arrays[name].reshape(groups, -1, *arrays[name].shape[1:])
            whole[tuple(map(slice, own.shape))] = own
        made[name] = whole.reshape(groups * each, *shape)
    kind: Any = _KINDS[shapes["kind"]]
    given = {field.name: made.get(field.name) for field in dataclasses.fields(kind)}
    return kind(**given | {"group": shapes["group"]})
