"""Reading of the headers of GGUF files, llama.cpp's format. Counts are compared with the file's size before their use.

A file consists of a magic number, a version, metadata (typed values by name), descriptions of tensors, and the tensors.
All numbers are little-endian.
"""

import dataclasses
import math
import mmap
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.errors import ConversionError, missing_package
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.huggingface.directory import MAX_TENSORS


MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 10_000
MAX_VALUES = 5_000_000  # in all arrays; the largest vocabularies have about 300,000 tokens and as many merges
MAX_STRING_BYTES = 10_000_000
MAX_FILES = 1000

# Types of metadata values: the format character of `struct` for numbers, and other types.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9
FLOAT32 = 6


@dataclasses.dataclass(frozen=True)
class Description:
    """Tensor in a file.

    **Arguments:**

    - `file`, `name`: the file, and the tensor's name in it.
    - `shape`: its shape in the order of NumPy.
    - `ggml_type`: name of its type, such as "Q4_K".
    - `offset`: position of its first byte in the file.
    - `row_bytes`: bytes of a row.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    row_bytes: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a model, which may be stored in several files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Description]

    @property
    def architecture(self) -> str:
        """Name of the model's architecture."""
        return str(self.metadata.get("general.architecture"))


def is_gguf(path: str | Path) -> bool:
    """Return whether a path is the name of a GGUF file."""
    return str(path).lower().endswith(".gguf")


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file, or the headers of all files if it is the first of several.

    Raises ConversionError for invalid files.
    """
    path = Path(expanded(path))
    metadata, tensors = _Reader(path).read()
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 < count <= MAX_FILES:
        raise ConversionError(f"{path}: split.count={str(count)[:40]} must be between 1 and {MAX_FILES}.")
    for number, other in enumerate(_other_files(path, count), 2):
        other_metadata, other_tensors = _Reader(other).read()
        if (other_metadata.get("split.no"), other_metadata.get("split.count")) != (number - 1, count):
            raise ConversionError(
                f"{other} must be file {number} of {count}, according to the first file. Download the files again."
            )
        duplicates = sorted(tensors.keys() & other_tensors.keys())
        if duplicates:
            raise ConversionError(f"{other}: {duplicates[0]} is in another file, too. Download the files again.")
        tensors |= other_tensors
    return GGUFFile(path, metadata, tensors)


def _other_files(path: Path, count: int) -> Iterator[Path]:
    """Yield the other files of a model with the first file `path`: `…-00002-of-00003.gguf` and so on."""
    if count == 1:
        return
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name, re.DOTALL)
    if match is None or int(match[2]) != count:
        raise ConversionError(
            f"{path} is one of {count} files. Give the first file, whose name ends with -00001-of-{count:05d}.gguf."
        )
    for number in range(2, count + 1):
        yield path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf")


def shortest_float(number: float) -> float:
    """Return the decimal number with the fewest digits that float32 rounds to the same value.

    Files store settings such as 1e-5 in float32.
    """
    return float(str(np.float32(number)))


def type_sizes(type_id: int, tensor: str) -> tuple[str, int, int]:
    """Return the name of a tensor type, the number of values of a block, and the number of bytes of a block.

    `tensor`: name of the tensor in error messages.
    """
    constants = gguf_package().constants
    known = {ggml_type.value: ggml_type for ggml_type in constants.GGMLQuantizationType}
    if type_id not in known:
        raise ConversionError(
            f"{tensor} has the unknown tensor type {type_id}. The installed package gguf knows {len(known)} types. "
            "Update it, or use another file."
        )
    return known[type_id].name, *constants.GGML_QUANT_SIZES[known[type_id]]


def gguf_package() -> Any:
    """Import the package gguf. Raises MissingPackage."""
    try:
        import gguf
    except ImportError as error:
        raise missing_package("gguf", "gguf") from error
    return gguf


class _Reader:
    """Reader of the header of one file. Raises ConversionError for invalid content."""

    def __init__(self, path: Path):
        self.path = path
        try:
            mode, self.size = path.stat().st_mode, path.stat().st_size
        except (OSError, ValueError) as error:
            raise ConversionError(f"{str(path)[:200]} does not exist. Give a GGUF file.") from error
        if not stat.S_ISREG(mode):
            raise ConversionError(f"{path} is not a regular file. Give a GGUF file.")
        if self.size < 24:
            raise ConversionError(f"{path} has only {self.size} bytes, so it is not a GGUF file.")
        self._position = 0
        self._num_values = 0  # in all arrays so far
        self._key = ""  # of the value that is being read; empty outside of the metadata

    def read(self) -> tuple[dict[str, Any], dict[str, Description]]:
        """Return the metadata and the tensors."""
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
            return self._read()

    def _read(self) -> tuple[dict[str, Any], dict[str, Description]]:
        self._check(self._take(4) == MAGIC, "the file does not start with GGUF, so it is not a GGUF file")
        version = self._number("I")
        self._check(
            version in (2, 3),
            f"version {version} of the format is not supported: the file must be little-endian, of version 2 or 3",
        )
        num_tensors = self._number("Q")
        num_keys = self._number("Q")
        self._check(
            num_tensors <= MAX_TENSORS,
            f"the header claims {num_tensors:,} tensors, but at most {MAX_TENSORS:,} are supported",
        )
        self._check(
            num_keys <= MAX_KEYS, f"the header claims {num_keys:,} keys, but at most {MAX_KEYS:,} are supported"
        )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self._check(key not in metadata, f"the metadata has the key {key[:80]!r} twice")
            self._key = key
            metadata[key] = self._value(self._number("I"))
        self._key = ""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_power = type(alignment) is int and 0 < alignment <= 2**20 and alignment & (alignment - 1) == 0
        self._check(is_power, f"general.alignment={str(alignment)[:40]} must be a power of two")
        described = [self._description() for _ in range(num_tensors)]
        return metadata, self._with_offsets(described, alignment)

    def _with_offsets(self, described: list[tuple[Description, int]], alignment: int) -> dict[str, Description]:
        """Return the tensors with their positions in the file.

        `described`: tensors, each with its offset from the first tensor. They must be stored in this order without
        gaps.
        """
        tensors: dict[str, Description] = {}
        start = next_offset = self._position + -self._position % alignment
        for tensor, offset in described:
            name = tensor.name[:80]
            self._check(tensor.name not in tensors, f"the file has the tensor {name!r} twice")
            self._check(
                start + offset == next_offset,
                f"the tensor {name} has the offset {offset:,}, but {next_offset - start:,} follows from the tensors "
                "before it",
            )
            end = next_offset + tensor.size
            self._check(
                end <= self.size, f"the tensor {name} ends at byte {end:,}, but the file has {self.size:,} bytes"
            )
            tensors[tensor.name] = dataclasses.replace(tensor, offset=next_offset)
            next_offset = end + -end % alignment
        return tensors

    def _description(self) -> tuple[Description, int]:
        """Return a tensor without its position, and its offset from the first tensor."""
        name = self._string()
        num_dimensions = self._number("I")
        self._check(
            1 <= num_dimensions <= 4, f"the tensor {name[:80]} has {num_dimensions} dimensions, but must have 1 to 4"
        )
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        self._check(
            0 < math.prod(shape) < 2**60,
            f"the tensor {name[:80]} has the shape {shape}, but must have between 1 and 2^60 elements",
        )
        ggml_type, block, block_bytes = type_sizes(self._number("I"), f"{self.path}: the tensor {name[:80]!r}")
        offset = self._number("Q")
        self._check(
            shape[-1] % block == 0,
            f"the tensor {name[:80]} has rows of {shape[-1]} elements, but must have a multiple of {block}, the block "
            f"size of {ggml_type}",
        )
        return Description(self.path, name, shape, ggml_type, 0, shape[-1] // block * block_bytes), offset

    def _value(self, value_type: int) -> Any:
        if value_type == STRING:
            return self._string()
        if value_type == ARRAY:
            return self._array()
        self._check(value_type in NUMBERS, f"the key {self._key[:80]!r} has a value of the unknown type {value_type}")
        value = self._number(NUMBERS[value_type])
        return shortest_float(value) if value_type == FLOAT32 else value

    def _array(self) -> list[Any]:
        value_type = self._number("I")
        count = self._number("Q")
        self._num_values += count
        self._check(
            self._num_values <= MAX_VALUES,
            f"the arrays of the metadata have {self._num_values:,} values, but at most {MAX_VALUES:,} are supported",
        )
        if value_type == STRING:
            return self._strings(count)
        self._check(
            value_type in NUMBERS, f"the key {self._key[:80]!r} has an array of the unsupported type {value_type}"
        )
        dtype = np.dtype(f"<{NUMBERS[value_type]}")
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return [shortest_float(value) for value in values] if value_type == FLOAT32 else values

    def _strings(self, count: int) -> list[str]:
        """Read an array of strings, without calls per string: a vocabulary and its merges have up to a million."""
        strings = []
        position = self._position
        content = self._bytes
        for _ in range(count):
            length = int.from_bytes(content[position : position + 8], "little")
            start = position + 8
            position = start + length
            self._check(position <= self.size, f"a string of the metadata key {self._key[:80]!r} ends after the file")
            strings.append(content[start:position])
        self._position = position
        try:
            return [string.decode("utf-8") for string in strings]
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error

    def _string(self) -> str:
        length = self._number("Q")
        self._check(
            length <= MAX_STRING_BYTES,
            f"a string has {length:,} bytes, but at most {MAX_STRING_BYTES:,} are supported",
        )
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error

    def _not_utf8(self, error: UnicodeDecodeError) -> ConversionError:
        where = f"a string of the metadata key {self._key[:80]!r}" if self._key else "a name in the header"
        return ConversionError(f"{self.path}: {where} is not UTF-8: {error}. Download the file again.")

    def _number(self, character: str) -> Any:
        """Read a number; `character`: its type in the notation of `struct`."""
        (value,) = struct.unpack(f"<{character}", self._take(struct.calcsize(f"<{character}")))
        return value

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self._check(self._position + count <= self.size, f"the file ends in its header, after {self.size:,} bytes")
        self._position += count
        return self._bytes[self._position - count : self._position]

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise ConversionError(f"{self.path}: {message}. Download the file again.")
