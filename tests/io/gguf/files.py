"""GGUF files of tests, written by the package gguf."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


FIXTURES = Path(__file__).parents[2] / "fixtures" / "gguf"
SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 256}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
VOCAB = 8


def write(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a file; a tensor is an array, or the name of a type and an array that is rounded to it."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        kind, sub = _types(value)
        writer.add_key_value(key, value, kind, sub)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            kind = gguf.GGMLQuantizationType[tensor[0]]
            rows = tensor[1] if tensor[1].dtype == np.uint8 else gguf.quants.quantize(tensor[1], kind)
            writer.add_tensor(name, rows, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(value: Any) -> tuple[Any, Any]:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType["INT32" if type(value[0]) is int else kinds[type(value[0])]]
    return gguf.GGUFValueType[kinds[type(value)]], None


def tiny(path: Path, kind: str = "F32", metadata: Mapping[str, Any] = {}, **more: Any) -> Path:
    """Write a Llama of one layer whose matrices are of one type."""
    keys = {f"llama.{key}": value for key, value in (SIZES | HEADS).items()}
    return write(path, "llama", keys | dict(metadata), tiny_tensors(kind) | more)


def tiny_tensors(kind: str = "F32") -> dict[str, Any]:
    """Return the tensors of the Llama of `tiny`."""
    rng = np.random.default_rng(0)
    rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}
    rows |= {"ffn_gate": 256, "ffn_up": 256, "ffn_down": 256}
    tensors: dict[str, Any] = {f"blk.0.{name}.weight": matrix(rng, count, kind) for name, count in rows.items()}
    norms = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    tensors |= {name: rng.normal(1, 0.1, 256).astype(np.float32) for name in norms}
    return tensors | {"token_embd.weight": rng.normal(size=(VOCAB, 256)).astype(np.float32)}


def matrix(rng: np.random.Generator, rows: int, kind: str) -> Any:
    """Return a matrix of 256 columns; of types that the package does not write, random bytes with small scales."""
    numbers = rng.normal(0, 0.05, (rows, 256)).astype(np.float32)
    if kind == "F32":
        return numbers
    each, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    try:
        return kind, gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        octets = rng.integers(0, 256, (rows, 256 // each, size), dtype=np.uint8)
        scales = rng.normal(0, 0.001, (*octets.shape[:2], 2)).astype(np.float16).view(np.uint8)
        place = slice(size - 2, size) if kind == "Q6_K" else slice(0, 4)
        octets[..., place] = scales[..., : place.stop - place.start]
        return kind, octets.reshape(rows, -1)
