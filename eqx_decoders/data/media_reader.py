"""Interface of readers of the images, videos and audio that documents refer to (see `documents.reference`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


Span = tuple[int, int]
MaskedTokens = tuple[np.ndarray, np.ndarray]  # tokens, and a mask of the targets


@runtime_checkable
class MediaReader(Protocol):
    """Read the images, videos and audio that documents refer to, and expand their placeholders in texts and tokens.

    **Attributes:**

    - `token`: id of the placeholder token of images.
    - `reads_files`: whether references are paths of files.
    """

    @property
    def token(self) -> int: ...

    @property
    def reads_files(self) -> bool: ...

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        """Return references with absolute paths. Relative paths start at `folder`.

        Raises DataError if a path is relative and `folder` is None. `where`: location of the document.
        """
        ...

    def expand_text(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        """Replace each placeholder in a text by the processor's text for the file; return the text and moved spans."""
        ...

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        """Expand the placeholders in the tokens of such a text, and exclude the placeholders from the targets."""
        ...

    def with_digests(self, references: Sequence[str]) -> tuple[str, ...]:
        """Add hashes of the files to the references, so that `arrays` detects files that have changed."""
        ...

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        """Read files; return arguments of `Media.create`. Raises DataError if a file is unreadable or has changed."""
        ...

    def pixels(self, name: str) -> np.ndarray | None:
        """Return an image, `[height, width, 3]`, from 0 to 255; None if the reference is not an image."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `reader_from_json` creates an equal reader."""
        ...

    def digest(self) -> str:
        """Return a hash of everything that determines the placeholders in texts and tokens."""
        ...
