"""Common array shapes for the images and audio of several processes, each of which packs those of its own rows.

A program that XLA compiles has one shape everywhere. Each process sends the shapes of its arrays for a group of rows,
and all pad theirs to the largest.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.packed_rows import AudioRows, ChunkRows, FrameRows, PatchRows


Shapes = dict[str, dict[str, Any]]  # of each array of each kind of rows, as JSON

_KINDS = {kind.__name__: kind for kind in (PatchRows, ChunkRows, FrameRows)}


def array_shapes(media: Media) -> Shapes:
    """Return the shape of each array for one group, and its dtype."""
    groups = media.order.shape[0]
    shapes_by_name: Shapes = {"order": {"order": [list(media.order.shape[1:]), "int32"]}}
    for name in ("images", "audio"):
        rows = getattr(media, name)
        if rows is not None:
            arrays = _arrays(rows)
            shapes = {key: [[len(x) // groups, *x.shape[1:]], x.dtype.name] for key, x in arrays.items()}
            shapes_by_name[name] = {"kind": type(rows).__name__, "group": rows.group, **shapes}
    return shapes_by_name


def merge_shapes(every: Sequence[Shapes]) -> Shapes:
    """Return the shapes into which the arrays of all processes fit."""
    result: Shapes = {}
    for name in sorted({name for each in every for name in each}):
        candidates = [each[name] for each in every if name in each]
        merged: dict[str, Any] = {}
        for key in sorted({key for each in candidates for key in each}):
            values = [each[key] for each in candidates if key in each]
            sized = isinstance(values[0], list)
            merged[key] = (
                [np.max([shape for shape, _ in values], axis=0).tolist(), values[0][1]] if sized else values[0]
            )
        if "segment_ids" in merged:  # some have none
            merged["segment_ids"] = merged["positions"]
        result[name] = merged
    return result


def pad_to_shapes(media: Media, shapes: Shapes) -> Media:
    """Pad the arrays of `media` to these shapes, in NumPy."""
    groups, order = media.order.shape[0], np.asarray(media.order)
    padded = {name: _pad_rows(getattr(media, name), shapes.get(name), groups) for name in ("images", "audio")}
    indices = [
        _feature_index(media.images, padded["images"], groups),
        _feature_index(media.audio, padded["audio"], groups),
    ]
    # the features of audio stand behind those of images
    begin = 0 if padded["images"] is None else padded["images"].positions.size // padded["images"].group // groups
    moved = np.concatenate([indices[0], indices[1] + begin, [0]])[order].astype(np.int32)
    moved = np.where(order < 0, order, moved)
    (width,), _ = shapes["order"]["order"]
    moved = np.pad(moved, ((0, 0), (0, width - moved.shape[1])))
    return dataclasses.replace(media, order=moved, **padded)


def _arrays(rows: PatchRows | AudioRows) -> dict[str, np.ndarray]:
    named = ((field.name, getattr(rows, field.name)) for field in dataclasses.fields(rows))
    return {name: np.asarray(x) for name, x in named if isinstance(x, np.ndarray | jax.Array)}


def _feature_index(old: PatchRows | AudioRows | None, new: PatchRows | AudioRows | None, groups: int) -> np.ndarray:
    """Return the index of each feature of a group in longer rows."""
    if old is None or new is None:
        return np.zeros(0, int)
    rows, length = len(old.positions) // groups, old.positions.shape[1] // old.group
    return (np.arange(rows)[:, None] * (new.positions.shape[1] // new.group) + np.arange(length)).reshape(-1)


def _pad_rows(
    rows: PatchRows | AudioRows | None, shapes: dict[str, Any] | None, groups: int
) -> PatchRows | AudioRows | None:
    if shapes is None:
        return None
    arrays = {} if rows is None else _arrays(rows)
    if "positions" in arrays and "segment_ids" in shapes:  # a row without them is one image
        arrays.setdefault("segment_ids", (arrays["positions"] >= 0).astype(np.int32))
    padded: dict[str, Any] = {}
    for name, sized in shapes.items():
        if name in ("kind", "group"):
            continue
        (each, *shape), dtype = sized
        whole = np.full((groups, each, *shape), -1 if name == "positions" else 0, dtype)
        if name in arrays:
            values = arrays[name].reshape(groups, -1, *arrays[name].shape[1:])
            whole[tuple(map(slice, values.shape))] = values
        padded[name] = whole.reshape(groups * each, *shape)
    kind: Any = _KINDS[shapes["kind"]]
    fields = {field.name: padded.get(field.name) for field in dataclasses.fields(kind)}
    return kind(**fields | {"group": shapes["group"]})
