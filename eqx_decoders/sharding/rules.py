"""Default sharding rules: the mesh axes that split each logical axis of weights and of activations."""

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
