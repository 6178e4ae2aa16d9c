"""Tables of the mesh axes that split each logical axis, and the rules by which they are read."""

import math
from collections.abc import Mapping, Sequence


MESH_AXES: dict[str, str] = {
    "data": "the batch; weights are replicated",
    "stage": "layers: stages of a pipeline",
    "fsdp": "the batch and the weights' embed axis: gathered where they are used (ZeRO-3)",
    "fsdp_transpose": "the batch and the weights' mlp axis",
    "context": "the length of sequences, and the slots of caches",
    "tensor": "heads, mlp and vocab of weights and activations (Megatron)",
    "tensor_sequence": "like tensor for weights; between the layers the length is split instead",
    "expert": "experts; for all other weights like fsdp",
}

# A mesh axis serves one dimension of an array: if two dimensions want it, the earlier row has it.
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


def split_dimensions(table: Table, words: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the mesh axes of every dimension; each mesh axis at most once, earlier rows of the table first."""
    used: set[str] = set()
    split: list[tuple[str, ...]] = [()] * len(words)
    for word, names in table:
        for index, dimension in enumerate(words):
            if dimension == word:
                split[index] = tuple(n for n in names if sizes.get(n, 1) > 1 and n not in used)
                used.update(split[index])
    return split


def without_uneven_layers(
    table: Table, words: tuple[str, ...], shape: Sequence[int], split: list[tuple[str, ...]], sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Return `split` without `stage` on layers that it does not divide; another dimension may have it."""
    stages, rows = sizes.get("stage", 1), dict(table)
    for index, (word, size, names) in enumerate(zip(words, shape, split, strict=True)):
        if word == "layers" and "stage" in names and size % stages:
            split[index] = tuple(name for name in names if name != "stage")
            for other, (other_word, room) in enumerate(zip(words, shape, strict=True)):
                parts = stages * math.prod(sizes[name] for name in split[other])
                if "fsdp" in rows.get(other_word, ()) and room % parts == 0:
                    split[other] += ("stage",)
                    break
    return split


def dividing(names: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes, in their order, that divide a dimension together."""
    accepted: tuple[str, ...] = ()
    for name in names:
        if size % math.prod(sizes[n] for n in (*accepted, name)) == 0:
            accepted += (name,)
    return accepted
