"""Safetensors files, written with NumPy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqx_decoders.errors import missing_package
from eqx_decoders.io.huggingface.directory import FLOATS


_OTHER_DTYPES = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64"}


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file."""
    if any(x.dtype == jnp.float8_e4m3fn for x in tensors.values()):
        _save_with_fp8(tensors, path)
    else:
        safetensors().save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 asks for this word


def _save_with_fp8(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file with FP8, which the package does not write: a header in JSON, and the numbers' bytes."""
    words = {name: word for word, name in FLOATS.items()} | _OTHER_DTYPES
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, end = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)), 0
    for name in ordered:
        x, begin, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": words[x.dtype.name], "shape": list(x.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in ordered:
            file.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data)


def safetensors() -> Any:
    """Import the module that writes safetensors files. Raises MissingPackage."""
    try:
        import safetensors.numpy as module
    except ImportError as error:
        raise missing_package("safetensors", "hf") from error
    return module
