"""Texts that were written, to be computed as prompts: a conversation's next turn begins with them.

The prefix cache takes nothing of what was remembered step by step: its last bits are others than those of a prompt, in
pieces, and so would be the next turn's answer. What is not by token, or behind windows, could not be taken at all.
"""

import collections

from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sequence import SequenceState
from eqx_decoders.serving.engine.slot_manager import SlotManager


TEXTS = 64  # that wait; the oldest go


class FinishedTexts:
    """The texts that wait for an idle moment; `current` is the one that has a slot."""

    def __init__(self, seats: SlotManager):
        self._seats = seats
        self._texts: collections.deque[tuple[SequenceState, int]] = collections.deque(maxlen=TEXTS)
        self.current: SequenceState | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def clear(self) -> None:
        """Forget those that wait."""
        self._texts.clear()

    def add(self, job: SequenceState) -> None:
        """Let a prompt and its answer wait, as far as these are whole blocks, and more of them than the prompt has."""
        request, size, prefixes = job.request, self._seats.block, self._seats.prefixes
        least, text = len(request.prompt) // size, (*request.prompt, *job.answer)
        count = len(text) // size * size
        names = prefixes.names(text[:count], request.cache_salt) if request.media is None else []
        if len(names) > least:
            whole = Request(prompt=text[:count], max_new_tokens=1, cache_salt=request.cache_salt)
            self._texts.append((SequenceState(request_id=-1, request=whole, names=names, idle=True), least))

    def next(self) -> tuple[SequenceState, int] | None:
        """The next text and a slot for it; None where there is no text, or no room. What is of no use goes."""
        while self._texts and self.current is None:
            job, least = self._texts[0]
            free, room = self._seats.free, self._seats.has_room(job)
            if self._seats.jobs and (free is None or not room):
                return None
            self._texts.popleft()
            # what it begins with must be there still: it is not computed again for the sake of its end
            if free is not None and room and least <= self._seats.prefixes.known(job.names) < len(job.names):
                self.current = job
                return job, free
        return None
