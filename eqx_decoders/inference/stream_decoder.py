"""Incremental decoding of token ids to text."""

import numpy as np

from eqx_decoders.io.text.tokenizer import Ids, Tokenizer


class StreamDecoder:
    """Incremental decoder of token ids, which returns only complete characters.

    An incomplete UTF-8 sequence decodes to U+FFFD at the end of the text. Such characters are buffered until more ids
    complete them, or until `flush`. The returned texts concatenated equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_returned = 0  # number of characters of decode(self._ids) that were returned

    def push(self, ids: int | np.integer | Ids) -> str:
        """Add the next id or ids; return the newly completed text."""
        self._ids += np.atleast_1d(np.asarray(ids)).tolist()
        text = self._tokenizer.decode(self._ids)
        complete = text.rstrip("\ufffd")  # several: decoders with byte fallback return one U+FFFD per byte
        new = complete[self._num_returned :]
        self._num_returned += len(new)
        if complete == text and len(self._ids) > 32:
            # Drop old ids so that each call stays cheap; keep some, since some decoders treat the first id specially.
            self._ids = self._ids[-8:]
            self._num_returned = len(self._tokenizer.decode(self._ids))
        return new

    def flush(self) -> str:
        """Return the buffered text, and reset the decoder."""
        buffered = self._tokenizer.decode(self._ids)[self._num_returned :]
        self._ids = []
        self._num_returned = 0
        return buffered
