"""Interface of readers of the images, videos and audio that documents refer to (see `documents.reference`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


Span = tuple[int, int]
MaskedTokens = tuple[np.ndarray, np.ndarray]  # tokens, and a mask of the targets


@runtime_checkable
class MediaReader(Protocol):
    """Reader of the files that documents refer to. It also writes their placeholders into texts and tokens.

    **Attributes:**

    - `token`: placeholder token of images.
    - `reads_files`: True if references are paths.
    """

    @property
    def token(self) -> int: ...

    @property
    def reads_files(self) -> bool: ...

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        """Return references with absolute paths. Relative paths start at `folder`.

        Raises DataError, beginning with `where`, for relative paths without a folder.
        """
        ...

    def expand_text(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        """Replace each placeholder in a text by the text that the family writes for its file, and adjust the spans."""
        ...

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        """Return the tokens of that text with the placeholders of its files, which are not targets."""
        ...

    def with_digests(self, references: Sequence[str]) -> tuple[str, ...]:
        """Add digests of the files to the references, so that `arrays` recognizes files that have changed."""
        ...

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        """Read files; return arguments of `Media.create`. Raises DataError for unreadable or changed files."""
        ...

    def pixels(self, name: str) -> np.ndarray | None:
        """Return an image, `[height, width, 3]`, from 0 to 255; None if the reference is not an image."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `reader_from_json` makes an equal reader."""
        ...

    def digest(self) -> str:
        """Return a hash, which is equal for readers that give documents the same placeholders."""
        ...
