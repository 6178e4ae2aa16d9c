"""Token ids of a prompt, and text of ids as they come."""

import numpy as np
from jaxtyping import Int

from eqx_decoders.io.text.tokenizer import Ids, Tokenizer


def prompt_ids(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, "length"]:
    """Return the ids of a prompt as the beginning of a document, as in training: a start token, then the text."""
    first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return np.asarray([*([] if first is None else [first]), *tokenizer.encode(text).tolist()], np.int32)


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
