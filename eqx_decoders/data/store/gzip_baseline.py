"""`gzip -9` as a baseline for a model's loss."""

import math
import zlib


class Gzip:
    """Compressor `gzip -9` of one text after another, which keeps only the size."""

    def __init__(self):
        self._compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
        self.read = self._written = 0  # bytes

    def add(self, content: bytes) -> None:
        """Compress the next bytes."""
        self.read += len(content)
        self._written += len(self._compressor.compress(content))

    def nats_per_byte(self) -> float | None:
        """End the stream and return `8 ln 2 · compressed bytes / bytes`, or None if there were no bytes."""
        self._written += len(self._compressor.flush())
        return 8 * math.log(2) * self._written / self.read if self.read else None
