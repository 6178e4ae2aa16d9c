"""Headers of GGUF files, llama.cpp's format, read as data: every count is held against the file before it is trusted.

A file is a magic word, a version, metadata (typed values by name), descriptions of tensors, and their bytes. All
numbers are little-endian.
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

from eqx_decoders.errors import ConversionError, check, missing_package
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.huggingface.directory import MOST_TENSORS


MAGIC = b"GGUF"
VERSION = 3  # which is written; 2 has the same form
ALIGNMENT = 32
MOST_KEYS = 10_000
MOST_VALUES = 5_000_000  # in all arrays together: the largest vocabularies have some 300,000 pieces and as many merges
STRING_BYTES = 10_000_000
MOST_FILES = 1000

# Types of values: of numbers the letter in `struct`.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, FLOAT32 = 8, 9, 6


@dataclasses.dataclass(frozen=True)
class Description:
    """Tensor in a file: its shape as in NumPy, the name of its type, and the positions of its bytes."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    row_bytes: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a model, which may be split over several files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Description]

    @property
    def architecture(self) -> str:
        """Name of the model's architecture."""
        return str(self.metadata.get("general.architecture"))


def is_gguf(path: str | Path) -> bool:
    """Return whether a path is one of a GGUF file, by its ending."""
    return str(path).lower().endswith(".gguf")


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file and, where it is the first of several, of all. Raises ConversionError."""
    path = Path(expanded(path))
    metadata, tensors = _Reader(path).read()
    count = metadata.get("split.count", 1)
    valid = type(count) is int and 0 < count <= MOST_FILES
    check(valid, f"{path}: split.count={str(count)[:40]} must be at most {MOST_FILES}.", ConversionError)
    for number, other in enumerate(_others(path, count), 2):
        more, found = _Reader(other).read()
        place = more.get("split.no"), more.get("split.count")
        rule = f"must be file {number} of {count}, as the first one says. Download the files again"
        check(place == (number - 1, count), f"{other} {rule}.", ConversionError)
        twice = sorted(tensors.keys() & found.keys())
        check(not twice, f"{other}: {twice[:1]} is in another of the files, too.", ConversionError)
        tensors |= found
    return GGUFFile(path, metadata, tensors)


def _others(path: Path, count: int) -> Iterator[Path]:
    """Yield the other files of a model whose first is `path`: `…-00002-of-00003.gguf` and so on."""
    if count == 1:
        return
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name, re.DOTALL)
    rule = f"it is one of {count} files: give the first one, which is called …-00001-of-{count:05d}.gguf"
    if found is None or int(found[2]) != count:
        raise ConversionError(f"{path}: {rule}.")
    for number in range(2, count + 1):
        yield path.with_name(f"{found[1]}-{number:05d}-of-{count:05d}.gguf")


def exact(number: float) -> float:
    """Return the shortest decimal number that float32 rounds to the same: files store 1e-5 in float32."""
    return float(str(np.float32(number)))


def type_sizes(kind: int, tensor: str) -> tuple[str, int, int]:
    """Return the name of a tensor's type, the number of values in a block, and the number of bytes of a block."""
    constants = gguf_package().constants
    known = {each.value: each for each in constants.GGMLQuantizationType}
    if kind not in known:
        raise ConversionError(
            f"{tensor} has the unknown tensor type {kind}. The installed package gguf knows {len(known)} types: update "
            "it, or use another file."
        )
    return known[kind].name, *constants.GGML_QUANT_SIZES[known[kind]]


def gguf_package() -> Any:
    """Import the package gguf. Raises MissingPackage."""
    try:
        import gguf
    except ImportError as error:
        raise missing_package("gguf", "gguf") from error
    return gguf


class _Reader:
    """Header of one file, read from the begin on. Raises ConversionError."""

    def __init__(self, path: Path):
        self.path = path
        try:
            mode, self.size = path.stat().st_mode, path.stat().st_size
        except (OSError, ValueError) as error:
            raise ConversionError(f"{str(path)[:200]} does not exist: give a GGUF file.") from error
        check(stat.S_ISREG(mode), f"{path} is no regular file: give a GGUF file.", ConversionError)
        check(self.size >= 24, f"{path} has {self.size} bytes: it is no GGUF file.", ConversionError)
        self._at, self._values = 0, 0
        self._key = ""  # of the metadata that is being read

    def read(self) -> tuple[dict[str, Any], dict[str, Description]]:
        """Return the metadata and the tensors."""
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
            return self._read()

    def _read(self) -> tuple[dict[str, Any], dict[str, Description]]:
        self._check(self._take(4) == MAGIC, "it does not begin with GGUF: it is no GGUF file")
        version = self._number("I")
        self._check(version in (2, 3), f"its version is {version}: little-endian files of versions 2 and 3 are read")
        count, keys = self._number("Q"), self._number("Q")
        self._check(count <= MOST_TENSORS, f"it claims {count:,} tensors: must be at most {MOST_TENSORS:,}")
        self._check(keys <= MOST_KEYS, f"it claims {keys:,} keys of metadata: must be at most {MOST_KEYS:,}")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._string()
            self._check(name not in metadata, f"its metadata has the key {name[:80]!r} twice")
            self._key = name
            metadata[name] = self._value(self._number("I"))
        self._key = ""
        alignment = metadata.get("general.alignment", ALIGNMENT)
        power = type(alignment) is int and 0 < alignment <= 2**20 and alignment & (alignment - 1) == 0
        self._check(power, f"general.alignment={str(alignment)[:40]} must be a power of two")
        found = [self._description() for _ in range(count)]
        return metadata, self._placed(found, alignment)

    def _placed(self, found: list[tuple[Description, int]], alignment: int) -> dict[str, Description]:
        """Return the tensors with the positions of their bytes, which stand in the order of their descriptions."""
        tensors: dict[str, Description] = {}
        begin = next_offset = self._at + -self._at % alignment
        for tensor, offset in found:
            self._check(tensor.name not in tensors, f"it has the tensor {tensor.name[:80]!r} twice")
            wrong = f"{tensor.name[:80]} begins at {offset:,}, but {next_offset - begin:,} follows from those before it"
            self._check(begin + offset == next_offset, wrong)
            end = next_offset + tensor.size
            self._check(end <= self.size, f"{tensor.name[:80]} ends at {end:,}, and the file at {self.size:,}")
            tensors[tensor.name] = dataclasses.replace(tensor, offset=next_offset)
            next_offset = end + -end % alignment
        return tensors

    def _description(self) -> tuple[Description, int]:
        name = self._string()
        dimensions = self._number("I")
        self._check(1 <= dimensions <= 4, f"{name[:80]} has {dimensions} dimensions: must be 1 to 4")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        self._check(0 < math.prod(shape) < 2**60, f"{name[:80]} has the shape {shape}: must have some numbers")
        kind, each, bytes_each = type_sizes(self._number("I"), f"{self.path}: the tensor {name[:80]!r}")
        offset = self._number("Q")
        whole = shape[-1] % each == 0
        self._check(whole, f"{name[:80]} has rows of {shape[-1]} numbers: {kind} has blocks of {each}")
        return Description(self.path, name, shape, kind, 0, shape[-1] // each * bytes_each), offset

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        self._check(kind in NUMBERS, f"values of type {kind} are not known")
        value = self._number(NUMBERS[kind])
        return exact(value) if kind == FLOAT32 else value

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        self._values += count
        self._check(self._values <= MOST_VALUES, f"its arrays claim {self._values:,} values: at most {MOST_VALUES:,}")
        if kind == STRING:
            return self._strings(count)
        self._check(kind in NUMBERS, f"arrays of type {kind} are not read")
        letter = NUMBERS[kind]
        values = np.frombuffer(self._take(count * struct.calcsize(f"<{letter}")), np.dtype(f"<{letter}"))
        return [exact(value) for value in values.tolist()] if kind == FLOAT32 else values.tolist()

    def _strings(self, count: int) -> list[str]:
        """Return many texts: a vocabulary has as many as a million, so their lengths are read here."""
        texts, at, content = [], self._at, self._bytes
        for _ in range(count):
            length = int.from_bytes(content[at : at + 8], "little")
            begin = at + 8
            at = begin + length
            self._check(at <= self.size, f"a string of the key {self._key[:80]!r} of its metadata ends after the file")
            texts.append(content[begin:at])
        self._at = at
        try:
            return [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error

    def _string(self) -> str:
        length = self._number("Q")
        self._check(length <= STRING_BYTES, f"it claims a text of {length:,} bytes: at most {STRING_BYTES:,}")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error

    def _not_utf8(self, error: UnicodeDecodeError) -> ConversionError:
        where = f"the key {self._key[:80]!r} of its metadata" if self._key else "a name in its header"
        return ConversionError(f"{self.path}: {where} has a string that is not UTF-8: {error}. Download it again.")

    def _number(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))
        return value

    def _take(self, count: int) -> bytes:
        """Return the next bytes."""
        self._check(self._at + count <= self.size, f"it ends within its header, after {self.size:,} bytes")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _check(self, condition: bool, sentence: str) -> None:
        check(condition, f"{self.path}: {sentence}. Download it again.", ConversionError)
