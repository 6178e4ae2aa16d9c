"""Reading of untrusted checkpoint directories: only JSON and safetensors files inside the directory are opened."""

import collections
import dataclasses
import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eqx_decoders.errors import ConversionError, missing_package
from eqx_decoders.io.atomic_files import expanded


MAX_CONFIG_BYTES = 10_000_000
MAX_TENSORS = 300_000
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # NumPy's names by safetensors'

_MAX_INDEX_BYTES = 30_000_000
_MAX_MAPPED_BYTES = 64_000_000  # bytes of a file that are memory-mapped at a time
_MAX_LISTED = 500  # tensors that an error message lists
_INTEGERS = ("I64", "I32")
_MATCHES_NOTHING = "(?!)"
# 8-bit floats, for which the safetensors package returns no NumPy arrays
_FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
# Formats of weights that can run code when they are read.
_UNSAFE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")


class Directory:
    """Directory of a checkpoint. Only regular files inside it are read: links to files outside are refused.

    Exception: in the cache of huggingface_hub, links may lead to the `blobs` of the same repository.
    """

    def __init__(self, path: str | Path):
        self.path = Path(expanded(path))
        if not exists(self.path):
            raise ConversionError(f"{str(path)[:200]} does not exist. Give the directory of a checkpoint.")
        if not self.path.is_dir():
            raise ConversionError(f"{self.path} is not a directory. Give the directory that contains config.json.")
        self._root = _allowed_root(self.path)

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return (self.path / name).exists() or (self.path / name).is_symlink()

    def file(self, name: str) -> Path:
        """Return the path of the file `name`. Raises ConversionError if it is absent or outside of the directory."""
        if not re.fullmatch(r"[\w.+\-]+", name) or name in (".", ".."):
            raise ConversionError(
                f"{name[:80]!r} is not a plain file name. Files of a checkpoint must be in the directory of "
                "config.json."
            )
        path = self.path / name
        if not self.has(name):
            raise ConversionError(f"{path} does not exist, so the checkpoint is incomplete. Download the file.")
        self._check_inside(path)
        return path

    def files(self, folder: str, suffix: str) -> list[Path]:
        """Return the sorted paths of the files in the subfolder `folder` whose names end with `suffix`.

        Raises ConversionError if the subfolder or a file is a link that leads out of the directory.
        """
        paths = sorted(path for path in (self.path / folder).glob("*") if path.name.endswith(suffix))
        for path in paths:
            self._check_inside(path)
        return paths

    def _check_inside(self, path: Path) -> None:
        target = path.resolve()
        if not target.is_relative_to(self._root):
            raise ConversionError(
                f"{path} is a link to a file outside of its directory. Replace the link by a copy of the file."
            )
        if not target.exists() or not stat.S_ISREG(target.stat().st_mode):
            raise ConversionError(f"{path} is not a regular file. Replace it by a regular file.")

    def json(self, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
        """Read the JSON object in the file `name`. Raises ConversionError."""
        path = self.file(name)
        size = path.stat().st_size
        if size > max_bytes:
            raise ConversionError(
                f"{path} has {size:,} bytes, but a file of settings must have at most {max_bytes:,} bytes. Download "
                "the file again."
            )
        return parse_json(path.read_bytes(), str(path))

    def tensors(self) -> "dict[str, StoredTensor]":
        """Return the tensors of the checkpoint by name."""
        return stored_tensors(self)


def exists(path: Path) -> bool:
    """Return whether a file or directory exists; False for strings that cannot be paths."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or contains a null character
        return False


def _allowed_root(path: Path) -> Path:
    """Return the directory in which all files must be.

    This is the directory itself or, in the cache of huggingface_hub, its repository, which contains `blobs`.
    """
    resolved = path.resolve()
    in_cache = resolved.parent.name == "snapshots" and resolved.parents[1].name.startswith("models--")
    return resolved.parents[1] if in_cache else resolved


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ConversionError for other content, and for an object with a repeated key.

    `where`: name of the content in error messages.
    """

    def unique_keys(pairs):
        members = dict(pairs)
        if len(members) != len(pairs):
            duplicate, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            raise ConversionError(f"{where}: an object has the key {duplicate[:80]!r} twice. Keep one of them.")
        return members

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{where} is not valid JSON: {str(error)[:200]}. Download it again.") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{where} must contain a JSON object, not {type(value).__name__}. Download it again.")
    return value


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file, as described by the file's header.

    **Arguments:**

    - `file`, `name`: the file, and the tensor's name in it.
    - `shape`, `dtype`: the tensor's shape, and its dtype in the notation of safetensors, such as "BF16".
    - `offset`: position of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor, one slice for each dimension.

        The file is mapped again for every chunk of rows, because the pages of a mapped file stay in memory until it is
        closed.
        """
        if self.dtype in _FLOAT8:
            return np.memmap(self.file, np.uint8, "r", self.offset, self.shape)[part].view(_FLOAT8[self.dtype])
        if not part:
            with _opened(self.file) as file:
                return file.get_tensor(self.name)
        rows = range(*part[0].indices(self.shape[0]))
        result = None
        step = max(1, _MAX_MAPPED_BYTES // max(1, 8 * math.prod(self.shape[1:])))
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            with _opened(self.file) as file:
                piece = file.get_slice(self.name)[(slice(chunk.start, chunk.stop), *part[1:])]
            if len(rows) <= step:
                return piece
            result = np.empty((len(rows), *piece.shape[1:]), piece.dtype) if result is None else result
            result[start : start + step] = piece
        if result is None:
            raise ConversionError(
                f"{self.file}: {self.name} of shape {self.shape} is empty, but a weight must have at least one element."
            )
        return result

    def read_all(self) -> np.ndarray:
        """Read the complete tensor."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    @property
    def description(self) -> str:
        """Dtype and shape, for error messages."""
        return f"{self.dtype} of shape {self.shape}"


def stored_tensors(directory: Directory, single: str = "model.safetensors") -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name, from the headers of its files.

    `single`: name of the safetensors file if there is only one. If there are several, `<single>.index.json` lists them.
    """
    tensors: dict[str, StoredTensor] = {}
    for file, indexed in _shards(directory, single).items():
        stored = _read_header(directory.file(file))
        if indexed is not None and indexed != stored.keys():
            missing = ", ".join(sorted(indexed - stored.keys())[:5]) or "none"
            unlisted = ", ".join(sorted(stored.keys() - indexed)[:5]) or "none"
            raise ConversionError(
                f"{directory.path / file} does not have the tensors that {single}.index.json lists for it. Missing: "
                f"{missing}. Not listed: {unlisted}. Download the files again."
            )
        tensors |= stored
    return tensors


def tensor_shapes(directory: Directory, single: str = "model.safetensors") -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of all tensors of a checkpoint by name. Only headers are read.

    The shape is None for a tensor whose file does not exist.
    """
    shapes: dict[str, tuple[int, ...] | None] = {}
    for file, indexed in _shards(directory, single).items():
        if indexed is not None and not directory.has(file):
            shapes |= dict.fromkeys(indexed)
        else:
            shapes |= {name: stored.shape for name, stored in _read_header(directory.file(file)).items()}
    return shapes


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with _opened(path) as file:  # the package checks that the header describes the file
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        described = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # The package accepts two tensors with the same name and takes the last one; parse_json refuses them.
        header = parse_json(file.read(length), f"{path}: the header")
    starts = {name: 8 + length + header[name]["data_offsets"][0] for name in described}
    return {name: StoredTensor(path, name, *described[name], starts[name]) for name in described}


def check_dtypes(tensors: Mapping[str, StoredTensor], integers: str = _MATCHES_NOTHING) -> None:
    """Raise ConversionError for tensors that are not floating-point numbers of at least 16 bits.

    `integers`: regular expression of the names of tensors that may contain integers.
    """
    for name, stored in tensors.items():
        if stored.dtype in _INTEGERS and re.fullmatch(integers, name):
            continue
        if stored.dtype not in FLOATS:
            raise ConversionError(
                f"{stored.file}: {name} has the dtype {stored.dtype}, but quantization_config of config.json does not "
                "describe it. Load a checkpoint in float32, bfloat16 or float16."
            )


def check_tensors(
    where: Path,
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    rule: str,
    source: str,
    unexpected: str,
) -> None:
    """Raise ConversionError, which lists the differences, unless the tensors have the expected names and shapes.

    **Arguments:**

    - `where`: directory or file in error messages.
    - `expected`: expected shapes by name.
    - `rule`: sentence about the expected tensors.
    - `source`: noun phrase for the origin of the expected shapes.
    - `unexpected`: predicate of the message about an unexpected tensor, such as "belongs to no weight".
    """
    differences = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    differences += [f"{name} {unexpected}" for name in sorted(tensors.keys() - expected.keys())]
    differences += [
        f"{name} has the shape {tensors[name].shape}, but {shape} follows from {source}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if not differences:
        return
    prefix = _shared_prefix(tensors, expected)
    if prefix:
        rule = f"{prefix} Rename them. {rule}"
    omitted = len(differences) - _MAX_LISTED
    listed = differences[:_MAX_LISTED] + ([f"and {omitted} more"] if omitted > 0 else [])
    raise ConversionError(f"{where}: {len(differences)} tensors are not as expected. {rule}:\n  " + "\n  ".join(listed))


def _shared_prefix(tensors: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> str:
    """Return a sentence if all tensor names have an additional prefix or lack a prefix, else an empty string."""
    if not tensors.keys() - expected.keys():
        return ""
    files = {tensor.name for tensor in tensors.values()}
    for names in (files, tensors.keys()):
        unknown = sorted(names - expected.keys())
        if len(unknown) < 2:
            continue
        for name in expected:
            added = unknown[0].removesuffix(name) if unknown[0].endswith(name) else ""
            if added and all(other.startswith(added) and other.removeprefix(added) in expected for other in names):
                return f"All tensors have the prefix {added!r}, which is not part of the expected names."
            missing = name.removesuffix(unknown[0]) if name.endswith(unknown[0]) else ""
            if missing and all(missing + other in expected for other in names):
                return f"All tensors lack the prefix {missing!r} of the expected names."
    return ""


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise missing_package("safetensors", "hf") from error
    try:
        return safe_open(path, framework="np")
    except Exception as error:  # the package raises its own exceptions and OSError
        raise ConversionError(
            f"{path} is not a valid safetensors file: {str(error)[:200]}. Download it again."
        ) from error


def _shards(directory: Directory, single: str) -> dict[str, set[str] | None]:
    """Return the safetensors files of a checkpoint, each with its tensors according to the index.

    Without an index, there is one file, with None instead of tensors.
    """
    index = f"{single}.index.json"
    if directory.has(single) and directory.has(index):
        raise ConversionError(
            f"{directory.path} has {single} and {index}, but must have only one of them. Remove the one that belongs "
            "to another checkpoint."
        )
    if directory.has(single):
        return {single: None}
    if not directory.has(index):
        raise _missing_weights(directory, single, index)
    where = directory.path / index
    file_names = directory.json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(file_names, dict) or not file_names:
        raise ConversionError(
            f"{where}: weight_map must be an object with the file name of each tensor. Download the index again."
        )
    if len(file_names) > MAX_TENSORS:
        raise ConversionError(f"{where} lists {len(file_names):,} tensors: must be at most {MAX_TENSORS:,}.")
    shards: dict[str, set[str]] = {}
    for name, file in file_names.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.\-]+\.safetensors", file):
            raise ConversionError(
                f"{where}: weight_map[{name[:80]!r}]={str(file)[:80]!r} must be the name of a .safetensors file in the "
                "same directory. Download the index again."
            )
        shards.setdefault(file, set()).add(name)
    return dict(shards)


def _missing_weights(directory: Directory, single: str, index: str) -> ConversionError:
    stem = single.removesuffix(".safetensors")
    parts = sorted(path.name for path in directory.path.glob(f"{stem}*-of-*.safetensors"))
    unsafe = sorted(path.name for pattern in _UNSAFE_PATTERNS for path in directory.path.glob(pattern))
    if parts:
        return ConversionError(
            f"{directory.path} has {parts[0]}, but no {index}, which lists the tensors of each file. Download the "
            "index."
        )
    if unsafe:
        return ConversionError(
            f"{directory.path} has no {single}. {unsafe[0]} is not read, because files of this kind can run code. "
            "Convert it to safetensors."
        )
    return ConversionError(f"{directory.path} has no {single}. Download the weights, too.")
