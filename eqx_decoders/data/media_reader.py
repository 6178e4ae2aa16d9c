"""Interface of what reads the images, videos and audio that documents refer to (see `documents.reference`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


Span = tuple[int, int]
MaskedTokens = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are targets


@runtime_checkable
class MediaReader(Protocol):
    """Reader of the files that documents refer to, which also writes their placeholders into texts and tokens.

    **Attributes:**

    - `token`: the placeholder of images.
    - `reads_files`: whether references are paths.
    """

    @property
    def token(self) -> int: ...

    @property
    def reads_files(self) -> bool: ...

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        """Return references that do not depend on where they are read: relative paths begin in `folder`.

        Raises DataError, beginning with `where`, for relative paths without a folder.
        """
        ...

    def expand_text(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        """Replace each placeholder in a text by what the family writes for its file, and move the spans with it."""
        ...

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        """Return the tokens of that text with as many placeholders as its files have; none of these is a target."""
        ...

    def with_digests(self, references: Sequence[str]) -> tuple[str, ...]:
        """Add digests of the files to references, by which `arrays` recognizes files that have changed since."""
        ...

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        """Read files as keywords of `Media.create`. Raises DataError for those that are unreadable or have changed."""
        ...

    def pixels(self, name: str) -> np.ndarray | None:
        """Return the image of a reference, `[height, width, 3]`, 0 to 255; None for a reference to no image."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of which `reader_from_json` makes an equal reader."""
        ...

    def digest(self) -> str:
        """Return a hash that is equal for readers which give documents the same placeholders."""
        ...
