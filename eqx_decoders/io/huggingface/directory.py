"""Untrusted checkpoint directories, read as data: JSON and safetensors files inside of them, and nothing else."""

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

from eqx_decoders.errors import ConversionError, check, missing_package
from eqx_decoders.io.atomic_files import expanded


CONFIG_BYTES = 10_000_000
INDEX_BYTES = 30_000_000
MOST_TENSORS = 300_000
MAPPED_BYTES = 64_000_000
MOST_LISTED = 500  # wrong tensors in an error message
INTEGERS = ("I64", "I32")
NONE = "(?!)"  # a pattern that nothing matches
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# safetensors has no NumPy types for them
EIGHT_BITS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}

# Formats of weights that run code when they are read.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")


class Directory:
    """Directory of a checkpoint. Its files must be regular files inside: links that lead out are refused."""

    def __init__(self, path: str | Path):
        self.path = Path(expanded(path))
        is_present = exists(self.path)
        check(is_present, f"{str(path)[:200]} does not exist: give the directory of a checkpoint.", ConversionError)
        check(self.path.is_dir(), f"{self.path} is no directory: give the one that holds config.json.", ConversionError)
        self._root = _allowed_root(self.path)

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return (self.path / name).exists() or (self.path / name).is_symlink()

    def file(self, name: str) -> Path:
        """Return the path of the file `name`. Raises ConversionError."""
        plain = bool(re.fullmatch(r"[\w.+\-]+", name)) and name not in (".", "..")
        check(
            plain,
            f"{name[:80]!r} is no plain file name: files of a checkpoint stand beside config.json.",
            ConversionError,
        )
        path = self.path / name
        check(self.has(name), f"{path} does not exist: the checkpoint is incomplete.", ConversionError)
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
        real = path.resolve()
        inside = real.is_relative_to(self._root)
        check(inside, f"{path} leads out of its directory: copy the file itself there.", ConversionError)
        regular = real.exists() and stat.S_ISREG(real.stat().st_mode)
        check(regular, f"{path} is no regular file: replace it by one.", ConversionError)

    def json(self, name: str, limit: int = CONFIG_BYTES) -> dict[str, Any]:
        """Read the JSON object in the file `name`. Raises ConversionError."""
        path = self.file(name)
        size = path.stat().st_size
        check(size <= limit, f"{path} has {size:,} bytes: more than {limit:,} are no settings.", ConversionError)
        return parse_json(path.read_bytes(), str(path))

    def tensors(self) -> "dict[str, StoredTensor]":
        """Find the tensors of the checkpoint by name."""
        return stored_tensors(self)


def exists(path: Path) -> bool:
    """Return whether a file or directory exists: False for names that cannot be paths."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _allowed_root(path: Path) -> Path:
    """Return the directory or, in huggingface_hub's cache, its repository, to whose `blobs` its links lead."""
    real = path.resolve()
    in_cache = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
    return real.parents[1] if in_cache else real


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object whose keys are all different. Raises ConversionError."""

    def unique(pairs):
        members = dict(pairs)
        if len(members) != len(pairs):
            duplicate, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            raise ConversionError(f"{where}: an object has the key {duplicate[:80]!r} twice. Keep one of them.")
        return members

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{where} is no JSON that can be read: {str(error)[:200]}. Download it again.") from error
    check(isinstance(value, dict), f"{where} must hold a JSON object, not {type(value).__name__}.", ConversionError)
    return value


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file, as described by the file's header; `offset` is the position of its first byte."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor, one slice for each dimension.

        The file is mapped for some rows at a time: its pages stay in memory until it is closed.
        """
        if self.dtype in EIGHT_BITS:  # mapped: reading copies nothing
            return np.memmap(self.file, np.uint8, "r", self.offset, self.shape)[part].view(EIGHT_BITS[self.dtype])
        if not part:
            with _opened(self.file) as file:
                return file.get_tensor(self.name)
        rows, whole = range(*part[0].indices(self.shape[0])), None
        step = max(1, MAPPED_BYTES // max(1, 8 * math.prod(self.shape[1:])))
        for begin in range(0, len(rows), step):
            chunk = rows[begin : begin + step]
            with _opened(self.file) as file:
                piece = file.get_slice(self.name)[(slice(chunk.start, chunk.stop), *part[1:])]
            if len(rows) <= step:
                return piece
            whole = np.empty((len(rows), *piece.shape[1:]), piece.dtype) if whole is None else whole
            whole[begin : begin + step] = piece
        if whole is None:
            raise ConversionError(f"{self.file}: {self.name} of shape {self.shape} is empty: a weight must not be.")
        return whole

    def read_all(self) -> np.ndarray:
        """Read the whole tensor."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    @property
    def description(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.dtype} of shape {self.shape}"


def stored_tensors(directory: Directory, single: str = "model.safetensors") -> dict[str, StoredTensor]:
    """Find all tensors of a checkpoint by name, in the headers of `single` or the files in `<single>.index.json`."""
    tensors: dict[str, StoredTensor] = {}
    for file, names in _shards(directory, single).items():
        stored = _read_header(directory.file(file))
        lacking, extra = ([], []) if names is None else (sorted(names - set(stored)), sorted(set(stored) - names))
        wrong = [f"lacks {', '.join(lacking[:5])}"] if lacking else []
        wrong += [f"also holds {', '.join(extra[:5])}"] if extra else []
        remedy = "the index says otherwise. Download the files again."
        check(not wrong, f"{directory.path / file} {' and '.join(wrong)}: {remedy}", ConversionError)
        tensors |= stored
    return tensors


def tensor_shapes(directory: Directory, single: str = "model.safetensors") -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of all tensors of a checkpoint by name; None for those in files that are not there.

    Only headers are read.
    """
    shapes: dict[str, tuple[int, ...] | None] = {}
    for file, names in _shards(directory, single).items():
        if names is not None and not directory.has(file):
            shapes |= dict.fromkeys(names)
        else:
            shapes |= {name: stored.shape for name, stored in _read_header(directory.file(file)).items()}
    return shapes


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with _opened(path) as file:  # the package checks that the header describes the file
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
        kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(
            file.read(length), f"{path}: the header"
        )  # the package takes the last of two tensors with one name
    begins = {name: 8 + length + header[name]["data_offsets"][0] for name in kinds}
    return {name: StoredTensor(path, name, *kinds[name], begins[name]) for name in kinds}


def check_dtypes(tensors: Mapping[str, StoredTensor], integers: str = NONE) -> None:
    """Raise ConversionError for tensors of integers and of eight bits: they are no weights, or quantized ones.

    integers: regular expression of tensors that may hold integers.
    """
    for name, stored in tensors.items():
        if stored.dtype in INTEGERS and re.fullmatch(integers, name):
            continue
        rule = "and quantization_config says nothing of it. Load a checkpoint in float32, bfloat16 or float16"
        known = stored.dtype in FLOATS
        check(known, f"{stored.file}: {name} has the dtype {stored.dtype}, {rule}.", ConversionError)


def check_tensors(
    where: Path,
    tensors: Mapping[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    rule: str,
    source: str,
    owner: str = "",
    verdict: str = "",
) -> None:
    """Raise ConversionError that lists the differences, unless tensors have just the `wanted` names and shapes.

    **Arguments:**

    - `rule`: sentence on the wanted tensors.
    - `source`: noun for the origin of the wanted shapes.
    - `owner`: noun for the owner of a wanted tensor.
    - `verdict`: predicate of the message about an unwanted tensor; empty: "belongs to no `owner`".
    """
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    verdict = verdict or f"belongs to no {owner}"
    wrong += [f"{name} {verdict}" for name in sorted(tensors.keys() - wanted.keys())]
    wrong += [
        f"{name} has the shape {tensors[name].shape}, but {shape} follows from {source}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    prefix = _shared_prefix(tensors, wanted)
    if prefix:
        rule = f"{prefix} Rename them. {rule}"
    more = [f"and {len(wrong) - MOST_LISTED} more"] if len(wrong) > MOST_LISTED else []
    listed = "\n  ".join(wrong[:MOST_LISTED] + more)
    check(not wrong, f"{where}: {len(wrong)} tensors are not as expected. {rule}:\n  {listed}", ConversionError)


def _shared_prefix(tensors: Mapping[str, StoredTensor], wanted: Mapping[str, Any]) -> str:
    """Return a sentence if all tensor names have an additional prefix or lack a prefix, else an empty string."""
    if not tensors.keys() - wanted.keys():
        return ""
    files = {tensor.name for tensor in tensors.values()}
    for names in (files, tensors.keys()):
        unknown = sorted(names - wanted.keys())
        if len(unknown) < 2:
            continue
        for name in wanted:
            added = unknown[0].removesuffix(name) if unknown[0].endswith(name) else ""
            if added and all(other.startswith(added) and other.removeprefix(added) in wanted for other in names):
                return f"All tensors have the prefix {added!r}, which is not part of the expected names."
            lacking = name.removesuffix(unknown[0]) if name.endswith(unknown[0]) else ""
            if lacking and all(lacking + other in wanted for other in names):
                return f"All tensors lack the prefix {lacking!r} of the expected names."
    return ""


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise missing_package("safetensors", "hf") from error
    try:
        return safe_open(path, framework="np")
    except Exception as error:  # the package raises its own kinds and OSError
        raise ConversionError(f"{path} is no sound safetensors file: {str(error)[:200]}. Download it again.") from error


def _shards(directory: Directory, single: str) -> dict[str, set[str] | None]:
    """Return the files to read, each with its tensors by the index (None without an index)."""
    index = f"{single}.index.json"
    where, both = directory.path / index, directory.has(single) and directory.has(index)
    rule = "one of them is left over. Move the wrong one away"
    check(not both, f"{directory.path} has both {single} and {index}: {rule}.", ConversionError)
    if directory.has(single):
        return {single: None}
    if not directory.has(index):
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.path.glob(pattern))
        stem = single.removesuffix(".safetensors")
        files = sorted(path.name for path in directory.path.glob(f"{stem}*-of-*.safetensors"))
        remedy = ": download the weights, too"
        if files:
            remedy = f" and no {index}, which gives the tensors of {files[0]} and other files: download it, too"
        elif pickles:
            remedy = f", and {pickles[0]} is not read: files of this kind can run code. Convert it to safetensors"
        raise ConversionError(f"{directory.path} has no {single}{remedy}.")
    table = directory.json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ConversionError(f"{where}: weight_map must be an object with the file name of each tensor.")
    for name, file in table.items():
        if not isinstance(file, str):
            raise ConversionError(f"{where}: weight_map[{name[:80]!r}]={str(file)[:80]} must be a file name.")
    many = len(table)
    check(many <= MOST_TENSORS, f"{where} lists {many:,} tensors: must be at most {MOST_TENSORS:,}.", ConversionError)
    shards: dict[str, set[str]] = {}
    for name, file in table.items():
        plain = bool(re.fullmatch(r"[\w.\-]+\.safetensors", file))
        rule = "it must be a .safetensors file beside the index"
        check(plain, f"{where}: weight_map sends {name[:80]!r} to {file[:80]!r}: {rule}.", ConversionError)
        shards.setdefault(file, set()).add(name)
    return dict(shards)
