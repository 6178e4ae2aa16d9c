"""Synthetic images with questions and answers: a small task for training vision-language models.

The number of an image determines the image. It shows shapes of the same kind, color and size, or a digit, at random
positions on a plain background with noise. The question asks for the shape, the color, the number of shapes, or the
digit.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import write_atomically


SCHEME = "drawn:"  # references are "drawn:<number>" instead of a path
SIZE = 32  # height and width in pixels
COLORS = {
    "red": (0.9, 0.15, 0.15),
    "green": (0.1, 0.75, 0.2),
    "blue": (0.15, 0.3, 0.95),
    "yellow": (0.95, 0.9, 0.1),
    "white": (0.97, 0.97, 0.97),
    "purple": (0.65, 0.15, 0.8),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
NUMBERS = ("one", "two", "three", "four", "five")
DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SyntheticImage:
    """An image with a question and its answer.

    **Arguments:**

    - `pixels`: RGB values from 0 to 1, `[3, SIZE, SIZE]`.
    """

    pixels: np.ndarray
    question: str
    answer: str


def draw(number: int) -> SyntheticImage:
    """Generate the image with this number."""
    generator = np.random.default_rng([7, number])
    names = list(COLORS)
    background = generator.uniform(0.02, 0.3, 3)
    pixels = np.broadcast_to(background[:, None, None], (3, SIZE, SIZE)).copy()
    color, kind = names[generator.integers(len(names))], generator.integers(3)
    if kind == 0:
        digit = int(generator.integers(10))
        _paint(pixels, _digit(digit, generator), COLORS[color])
        questions = ("Which digit is it?", str(digit)), ("What colour is the digit?", color)
    else:
        shape, count = SHAPES[generator.integers(len(SHAPES))], 1 if kind == 1 else int(generator.integers(1, 6))
        for mask in _shapes(shape, count, generator):
            _paint(pixels, mask, COLORS[color])
        noun = shape if count == 1 else "crosses" if shape == "cross" else f"{shape}s"
        if kind == 1:
            questions = ("Which shape is it?", shape), ("What colour is the shape?", color)
        else:
            questions = (
                ("How many shapes are there?", f"{NUMBERS[count - 1]} {noun}"),
                ("What is there?", f"{color} {noun}"),
            )
    pixels = np.clip(pixels + generator.normal(0, 0.03, pixels.shape), 0, 1).astype(np.float32)
    question, answer = questions[generator.integers(2)]
    return SyntheticImage(pixels, question, answer)


def drawn_pixels(references: Sequence[str]) -> np.ndarray:
    """Return the pixels of the images with these references, `[images, 3, SIZE, SIZE]`, from -1 to 1."""
    numbers = []
    for reference in references:
        digits = reference.removeprefix(SCHEME)
        check(
            reference.startswith(SCHEME) and digits.isdigit() and len(digits) < 16,
            f"{reference[:60]!r} must be {SCHEME} followed by a non-negative integer, because the data is synthetic.",
            DataError,
        )
        numbers.append(int(digits))
    if not numbers:
        return np.zeros((0, 3, SIZE, SIZE), np.float32)
    return 2 * np.stack([draw(number).pixels for number in numbers]) - 1


def write_questions(path: Path, count: int) -> Path:
    """Write a JSONL file with questions about the first `count` images, unless the file exists; return `path`."""
    if not path.exists():
        records = (
            {"prompt": f"{image.question}\n", "completion": image.answer, "images": [f"{SCHEME}{number}"]}
            for number, image in enumerate(map(draw, range(count)))
        )
        write_atomically(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())
    return path


def _paint(pixels: np.ndarray, mask: np.ndarray, color: tuple[float, float, float]) -> None:
    pixels[:, mask] = np.asarray(color)[:, None]


def _digit(digit: int, generator: np.random.Generator) -> np.ndarray:
    """Return the mask of a digit of random size and position, `[SIZE, SIZE]`."""
    small = np.array([[cell == "1" for cell in row] for row in DIGITS[digit].split()])
    scale = int(generator.integers(2, 4))
    large = np.kron(small, np.ones((scale, scale), bool))
    rows, columns = (int(generator.integers(0, SIZE - side + 1)) for side in large.shape)
    mask = np.zeros((SIZE, SIZE), bool)
    mask[rows : rows + large.shape[0], columns : columns + large.shape[1]] = large
    return mask


def _shapes(shape: str, count: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Return the masks of shapes at random positions that do not touch, `[SIZE, SIZE]` each."""
    radius = float(generator.uniform(5, 9)) if count == 1 else float(generator.uniform(3, 4.2))
    centers: list[np.ndarray] = []
    while len(centers) < count:
        center = generator.uniform(radius, SIZE - 1 - radius, 2)
        if all(np.abs(center - other).max() > 2 * radius + 1 for other in centers):
            centers.append(center)
        elif generator.random() < 0.02:  # there may be no space for another shape: start again
            centers.clear()
    return [_shape(shape, center, radius) for center in centers]


def _shape(shape: str, center: np.ndarray, radius: float) -> np.ndarray:
    rows, columns = np.meshgrid(np.arange(SIZE) - center[0], np.arange(SIZE) - center[1], indexing="ij")
    distance = np.hypot(rows, columns)
    if shape == "circle":
        return distance <= radius
    if shape == "ring":
        return (distance <= radius) & (distance >= 0.55 * radius)
    inside = (np.abs(rows) <= radius) & (np.abs(columns) <= radius)
    if shape == "square":
        return (np.abs(rows) <= 0.85 * radius) & (np.abs(columns) <= 0.85 * radius)
    if shape == "triangle":
        return inside & (2 * np.abs(columns) <= rows + radius)
    return inside & ((np.abs(rows) <= radius / 3) | (np.abs(columns) <= radius / 3))
