"""Default sharding rules: the mesh axes that split each logical axis of weights and of activations."""

import math
from collections.abc import Mapping, Sequence


MESH_AXES: dict[str, str] = {
    "data": "splits the batch; weights are replicated (data parallelism)",
    "stage": "splits layers (pipeline parallelism)",
    "fsdp": "splits the batch and the embed axis of weights, which are gathered where they are used (FSDP, ZeRO-3)",
    "fsdp_transpose": "like fsdp, for the mlp axis of weights",
    "context": "splits the length of sequences and the slots of caches (context parallelism)",
    "tensor": "splits heads, mlp and vocab of weights and activations (tensor parallelism)",
    "tensor_sequence": "like tensor for weights; between layers, splits the length (Megatron's sequence parallelism)",
    "expert": "splits experts (expert parallelism); for all other weights like fsdp",
}

# A mesh axis can split only one dimension of an array. If several dimensions list it, the earliest row has precedence.
WEIGHTS: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor", "tensor_sequence"),
    "heads": ("tensor", "tensor_sequence"),
    "kv_heads": ("tensor", "tensor_sequence"),
    "qkv_heads": ("tensor", "tensor_sequence"),
    "key_heads": ("tensor", "tensor_sequence"),
    "teacher_heads": ("tensor", "tensor_sequence"),
    "teacher_kv_heads": ("tensor", "tensor_sequence"),
    "experts": ("expert",),
    "mlp": ("fsdp_transpose", "tensor", "tensor_sequence"),
    "embed": ("fsdp", "fsdp_transpose", "context", "expert"),
    "outer": ("tensor", "tensor_sequence"),
    "out_groups": ("tensor", "tensor_sequence"),
    "inner": ("fsdp", "fsdp_transpose", "context", "expert"),
    "stream_embed": ("fsdp", "fsdp_transpose", "context", "expert"),
    "row_dim": ("fsdp", "fsdp_transpose", "context", "expert"),
    "ngram_features": ("tensor", "tensor_sequence"),
    "q_rank": ("fsdp", "fsdp_transpose", "context", "expert"),
    "kv_rank": ("fsdp", "fsdp_transpose", "context", "expert"),
    "gate_rank": ("fsdp", "fsdp_transpose", "context", "expert"),
    "latent": ("fsdp", "fsdp_transpose", "context", "expert"),
    "layers": ("stage",),
}
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "experts": ("expert",),
    "batch": ("data", "fsdp", "fsdp_transpose", "expert"),
    "heads": ("tensor", "tensor_sequence"),
    "kv_heads": ("tensor", "tensor_sequence"),
    "scale_heads": ("tensor", "tensor_sequence"),
    "qkv_heads": ("tensor", "tensor_sequence"),
    "key_heads": ("tensor", "tensor_sequence"),
    "mlp": ("tensor", "tensor_sequence"),
    "channels": ("tensor", "tensor_sequence"),
    "vocab": ("tensor", "tensor_sequence"),
    "length": ("context", "tensor_sequence"),
    "slots": ("context",),
}

Table = tuple[tuple[str, tuple[str, ...]], ...]


def split_dimensions(table: Table, axis_names: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each dimension of an array.

    A mesh axis splits at most one dimension. Earlier rows of the table have precedence.

    **Arguments:**

    - `axis_names`: logical axes of the array.
    - `sizes`: number of devices along each mesh axis.
    """
    used: set[str] = set()
    split: list[tuple[str, ...]] = [()] * len(axis_names)
    for axis, mesh_axes in table:
        for index, axis_name in enumerate(axis_names):
            if axis_name == axis:
                split[index] = tuple(name for name in mesh_axes if sizes.get(name, 1) > 1 and name not in used)
                used.update(split[index])
    return split


def without_uneven_layers(
    table: Table,
    axis_names: tuple[str, ...],
    shape: Sequence[int],
    split: list[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> list[tuple[str, ...]]:
    """Return the result of `split_dimensions`, adapted to a number of layers that is not a multiple of `stage`.

    `stage` then splits the first dimension that `fsdp` may split and that it divides, if there is one.
    """
    stages = sizes.get("stage", 1)
    rows = dict(table)
    for index, (axis, size, mesh_axes) in enumerate(zip(axis_names, shape, split, strict=True)):
        if axis == "layers" and "stage" in mesh_axes and size % stages:
            split[index] = tuple(name for name in mesh_axes if name != "stage")
            for other_index, (other_axis, other_size) in enumerate(zip(axis_names, shape, strict=True)):
                shards = stages * math.prod(sizes[name] for name in split[other_index])
                if "fsdp" in rows.get(other_axis, ()) and other_size % shards == 0:
                    split[other_index] += ("stage",)
                    break
    return split


def dividing(mesh_axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes, in order, without those that cannot also divide a dimension of this `size`."""
    accepted: tuple[str, ...] = ()
    for mesh_axis in mesh_axes:
        if size % math.prod(sizes[name] for name in (*accepted, mesh_axis)) == 0:
            accepted += (mesh_axis,)
    return accepted
