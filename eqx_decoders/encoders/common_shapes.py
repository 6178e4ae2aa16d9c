"""Common array shapes for packed images and audio in a run of several processes.

Each process packs the images and audio of its own sequences, but all processes must run the same compiled program. The
processes therefore exchange the shapes of their arrays (`array_shapes`), compute the maximum (`merge_shapes`), and pad
their arrays to it (`pad_to_shapes`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.packed_rows import AudioRows, PackedChunks, PackedFrames, PackedPatches


# JSON: `Media` field -> array name -> (shape of one group, dtype); and the class and `group` of the packed sequences
Shapes = dict[str, dict[str, Any]]

_KINDS = {kind.__name__: kind for kind in (PackedPatches, PackedChunks, PackedFrames)}


def array_shapes(media: Media) -> Shapes:
    """Return the shape of each array of one group of sequences, and its dtype."""
    groups = media.order.shape[0]
    shapes_by_name: Shapes = {"order": {"order": [list(media.order.shape[1:]), "int32"]}}
    for name in ("images", "audio"):
        rows = getattr(media, name)
        if rows is not None:
            arrays = _arrays(rows)
            shapes = {key: [[len(x) // groups, *x.shape[1:]], x.dtype.name] for key, x in arrays.items()}
            shapes_by_name[name] = {"kind": type(rows).__name__, "group": rows.group, **shapes}
    return shapes_by_name


def merge_shapes(all_shapes: Sequence[Shapes]) -> Shapes:
    """Return the smallest shapes that fit the arrays of all processes."""
    result: Shapes = {}
    for name in sorted({name for shapes in all_shapes for name in shapes}):
        candidates = [shapes[name] for shapes in all_shapes if name in shapes]
        merged: dict[str, Any] = {}
        for key in sorted({key for candidate in candidates for key in candidate}):
            values = [candidate[key] for candidate in candidates if key in candidate]
            if isinstance(values[0], list):  # (shape, dtype) of an array
                merged[key] = [np.max([shape for shape, _ in values], axis=0).tolist(), values[0][1]]
            else:
                merged[key] = values[0]
        if "segment_ids" in merged:  # processes without segment ids have not contributed to its shape
            merged["segment_ids"] = merged["positions"]
        result[name] = merged
    return result


def pad_to_shapes(media: Media, shapes: Shapes) -> Media:
    """Return `media` with its arrays padded to `shapes`, in NumPy."""
    groups = media.order.shape[0]
    order = np.asarray(media.order)
    padded = {name: _pad_rows(getattr(media, name), shapes.get(name), groups) for name in ("images", "audio")}
    indices = [
        _feature_index(media.images, padded["images"], groups),
        _feature_index(media.audio, padded["audio"], groups),
    ]
    # `order` indexes the image features followed by the audio features.
    images = padded["images"]
    num_image_features = 0 if images is None else images.positions.size // images.group // groups
    new_order = np.concatenate([indices[0], indices[1] + num_image_features, [0]])[order].astype(np.int32)
    new_order = np.where(order < 0, order, new_order)
    (width,), _ = shapes["order"]["order"]
    new_order = np.pad(new_order, ((0, 0), (0, width - new_order.shape[1])))
    return dataclasses.replace(media, order=new_order, **padded)


def _arrays(rows: PackedPatches | AudioRows) -> dict[str, np.ndarray]:
    values = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    return {name: np.asarray(value) for name, value in values.items() if isinstance(value, np.ndarray | jax.Array)}


def _feature_index(
    old: PackedPatches | AudioRows | None, new: PackedPatches | AudioRows | None, groups: int
) -> np.ndarray:
    """Return the index of each feature of a group after padding the sequences from `old` to `new`."""
    if old is None or new is None:
        return np.zeros(0, int)
    rows = len(old.positions) // groups
    length = old.positions.shape[1] // old.group
    return (np.arange(rows)[:, None] * (new.positions.shape[1] // new.group) + np.arange(length)).reshape(-1)


def _pad_rows(
    rows: PackedPatches | AudioRows | None, shapes: dict[str, Any] | None, groups: int
) -> PackedPatches | AudioRows | None:
    if shapes is None:
        return None
    arrays = {} if rows is None else _arrays(rows)
    if "positions" in arrays and "segment_ids" in shapes:  # without segment ids, each sequence is one image
        arrays.setdefault("segment_ids", (arrays["positions"] >= 0).astype(np.int32))
    padded: dict[str, Any] = {}
    for name, shape_and_dtype in shapes.items():
        if name in ("kind", "group"):
            continue
        (rows_per_group, *shape), dtype = shape_and_dtype
        array = np.full((groups, rows_per_group, *shape), -1 if name == "positions" else 0, dtype)
        if name in arrays:
            values = arrays[name].reshape(groups, -1, *arrays[name].shape[1:])
            array[tuple(map(slice, values.shape))] = values
        padded[name] = array.reshape(groups * rows_per_group, *shape)
    kind: Any = _KINDS[shapes["kind"]]
    fields = {field.name: padded.get(field.name) for field in dataclasses.fields(kind)}
    return kind(**fields | {"group": shapes["group"]})
