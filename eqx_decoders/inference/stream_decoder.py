"""Text of token ids as they come."""

import numpy as np

from eqx_decoders.io.text.tokenizer import Ids, Tokenizer, prompt_ids as prompt_ids


class StreamDecoder:
    """Incremental decoder of token ids, which never returns half of a character.

    An unfinished UTF-8 sequence decodes to U+FFFD at the very end: that is held back until more ids complete it, or
    until `flush`. All pieces together are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # characters of decode(self._ids) that were returned

    def push(self, ids: int | np.integer | Ids) -> str:
        """Add the next id or ids; return the text that is complete now."""
        self._ids += np.atleast_1d(np.asarray(ids)).tolist()
        text = self._tokenizer.decode(self._ids)
        certain = text.rstrip("\ufffd")  # all of them: decoders with byte fallback show one for each byte
        new = certain[self._shown :]
        self._shown += len(new)
        if certain == text and len(self._ids) > 32:  # keep a little context: some decoders treat the first id specially
            self._ids = self._ids[-8:]
            self._shown = len(self._tokenizer.decode(self._ids))
        return new

    def flush(self) -> str:
        """Return the text that was held back, and start anew."""
        rest = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._shown = [], 0
        return rest
