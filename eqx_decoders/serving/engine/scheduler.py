"""`Scheduler`: decides which sequences have slots, and which tokens each step computes.

Finished conversations are queued to be prefilled for the prefix cache, since a next turn begins with them. Cache
entries of decoding steps are not reused for that: their last bits differ from those of a prefill in chunks, and so
would the answer of the next turn. Recurrent states, and entries outside of windows, could not be reused at all.
"""

import collections
import time
from collections.abc import Callable

from eqx_decoders.serving.engine.adapters import Adapter
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.request_queue import RequestQueue
from eqx_decoders.serving.engine.sequence import SequenceState, SharedPrompt
from eqx_decoders.serving.engine.slot_manager import SlotManager


MAX_TEXTS = 64  # that wait; the oldest are dropped


class PrefixWarmup:
    """Queue of finished texts that wait for idle steps; `current` is the one that has a slot."""

    def __init__(self, slot_manager: SlotManager):
        self._slot_manager = slot_manager
        self._texts: collections.deque[tuple[SequenceState, int]] = collections.deque(maxlen=MAX_TEXTS)
        self.current: SequenceState | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def clear(self, adapter: Adapter | None = None) -> None:
        """Drop all waiting texts, or those of an adapter."""
        kept = [] if adapter is None else [each for each in self._texts if each[0].adapter is not adapter]
        self._texts = collections.deque(kept, maxlen=MAX_TEXTS)

    def add(self, sequence: SequenceState) -> None:
        """Queue the whole blocks of a prompt and its answer, if they are more than those of the prompt."""
        request, block_size = sequence.request, self._slot_manager.block_size
        num_prompt_blocks, text = len(request.prompt) // block_size, (*request.prompt, *sequence.answer)
        count, salt = len(text) // block_size * block_size, sequence.salt
        prefix_cache = self._slot_manager.prefix_cache
        hashes = prefix_cache.hash_blocks(text[:count], salt) if request.media is None else []
        if len(hashes) > num_prompt_blocks:
            prompt, adapter = Request(prompt=text[:count], max_new_tokens=1), sequence.adapter
            background = SequenceState(-1, prompt, hashes, background=True, adapter=adapter)
            self._texts.append((background, num_prompt_blocks))

    def next(self) -> tuple[SequenceState, int] | None:
        """Take the next useful text and a slot for it; None where no text waits, or there is no room."""
        manager = self._slot_manager
        while self._texts and self.current is None:
            sequence, num_prompt_blocks = self._texts[0]
            slot, has_room = manager.free_slot, manager.has_room(sequence)
            if manager.sequences and (slot is None or not has_room):
                return None
            self._texts.popleft()
            # the prompt must still be cached: it is not prefilled again for the sake of its answer
            num_cached = manager.prefix_cache.count_cached(sequence.block_hashes)
            if slot is not None and has_room and num_prompt_blocks <= num_cached < len(sequence.block_hashes):
                self.current = sequence
                return sequence, slot
        return None


class Scheduler:
    """Queue, slots and prefills of an engine: admission, preemption, and the work of each step.

    `prefilling` has the sequences whose prompts are not complete, the next one first.

    **Arguments:**

    - `settle`: reads the results of all dispatched steps, and returns whether there were any. It is called before a
        request is preempted: what is saved of it must be all that was computed, and perhaps it has ended.
    """

    def __init__(self, slot_manager: SlotManager, config: EngineConfig, settle: Callable[[], bool]):
        self.config, self.preemptions, self._slot_manager, self._settle = config, 0, slot_manager, settle
        self.queue: RequestQueue[SequenceState] = RequestQueue(config.max_waiting, config.max_waiting_tokens)
        self.prefilling: list[SequenceState] = []
        self.prefix_warmup = PrefixWarmup(slot_manager)

    # --- slots ---

    def enqueue(self, sequence: SequenceState) -> None:
        """Let a sequence wait for a slot."""
        self.queue.add(sequence, {each.request.client for each in self._slot_manager.sequences.values()})

    def admit_next(self) -> SequenceState | None:
        """Assign a slot to the next waiting sequence that is ready, preempting lower priorities where none is free.

        Returns None where no sequence is ready, or there is no room for it.
        """
        while (sequence := self.queue.first(SequenceState.is_ready)) is not None:
            slot = self._slot_manager.free_slot
            if slot is not None and self._slot_manager.has_room(sequence):
                self.queue.remove(sequence.request_id)
                if sequence.saved is None and not sequence.is_replaying:  # it was not preempted before
                    sequence.queue_seconds = time.monotonic() - sequence.arrived
                self._slot_manager.assign(sequence, slot)
                return sequence
            victim = self.prefix_warmup.current or self._slot_manager.preemption_victim()
            if victim is None:
                break
            if not victim.background and victim.request.priority >= sequence.request.priority:
                break
            if victim.background or not self._settle():
                self.preempt(victim)
        return None

    def admit_background(self) -> SequenceState | None:
        """Assign a slot to the next finished text, if no request is ready to be admitted."""
        if self.queue.first(SequenceState.is_ready) is not None or (next_text := self.prefix_warmup.next()) is None:
            return None
        self._slot_manager.assign(*next_text)
        return next_text[0]

    def preempt(self, sequence: SequenceState) -> None:
        """Take the slot of a sequence, which resumes later, or restarts."""
        if sequence.background:
            self.release(sequence)
            return
        assert sequence.num_pending == 0
        self._stop_prefill(sequence)
        saved_bytes = sum(each.saved_bytes for each in self.queue)
        self._slot_manager.preempt(sequence, self.config.preempted_bytes - saved_bytes)
        if sequence.request.media is not None and sequence.saved is None:
            sequence.join(SharedPrompt(features_bytes=sequence.shared.features_bytes))
        self.preemptions += 1
        self.enqueue(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a finished or cancelled sequence."""
        self._stop_prefill(sequence)
        self._slot_manager.release(sequence)
        if sequence.background:
            self.prefix_warmup.current = None

    def drop_texts(self, adapter: Adapter) -> None:
        """Prefill no finished texts of an adapter any more."""
        self.prefix_warmup.clear(adapter)
        current = self.prefix_warmup.current
        if current is not None and current.adapter is adapter:
            self.release(current)

    def renew(self, *, recompute: bool) -> None:
        """Forget what other weights computed of waiting prompts and, with `recompute`, of answers, too."""
        if recompute:
            for sequence in list(self._slot_manager.sequences.values()):
                self.preempt(sequence)
        shared: dict[SharedPrompt, SharedPrompt] = {}
        for sequence in self.queue:
            if recompute and sequence.saved is not None:
                sequence.restart()
            if sequence.is_decoding:
                continue
            old, request = sequence.shared, sequence.request
            sequence.stop_waiting()
            sequence.join(shared.setdefault(old, SharedPrompt(features_bytes=old.features_bytes)))
            if request.media is None:
                hash_blocks = self._slot_manager.prefix_cache.hash_blocks
                sequence.block_hashes = hash_blocks(request.prompt, sequence.salt)

    def _stop_prefill(self, sequence: SequenceState) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)

    # --- work of a step ---

    def schedule_prefill(self, budget: int, *, alone: bool) -> list[tuple[SequenceState, int, int]]:
        """Return chunks of prompts within the budget, one of each in turn: sequence, first token, number of tokens.

        There is at least one. If no prompt gets pages and nothing else is computed (`alone`), others are preempted.
        """
        chunks: list[tuple[SequenceState, int, int]] = []
        planned: dict[int, int] = {}
        skipped: list[SequenceState] = []
        self.prefilling.sort(key=lambda each: each.background and not each.awaited)
        while self.prefilling and (budget > 0 or not chunks):
            sequence = self.prefilling.pop(0)
            busy = not alone or any(not each.background for each, _, _ in chunks)
            if (sequence.background and not sequence.awaited and busy) or not sequence.started:
                skipped.append(sequence)
                continue
            begin = planned.get(sequence.request_id, sequence.num_computed)
            count = min(self._slot_manager.block_size, len(sequence.request.prompt) - begin)
            if not self._slot_manager.reserve(sequence, begin, begin + count):
                victim = self.prefix_warmup.current
                if victim is None and alone and not chunks:
                    victim = self._slot_manager.preemption_victim(besides=[sequence])
                if victim is None:
                    skipped.append(sequence)
                    continue
                self.prefilling.insert(0, sequence)
                if victim.background or not self._settle():
                    skipped = [each for each in skipped if each is not victim]
                    self.preempt(victim)  # perhaps itself
                continue
            chunks.append((sequence, begin, count))
            planned[sequence.request_id] = begin + count
            if begin + count < len(sequence.request.prompt):
                # pages outside of windows are given back chunk by chunk, so two can't be planned ahead
                (self.prefilling if self._slot_manager.block_manager is None else skipped).append(sequence)
            budget -= count
        self.prefilling += skipped
        return chunks

    def schedule_decode(self) -> dict[SequenceState, list[int]]:
        """Return the answers that go on, with their drafts; the last ones are preempted where pages are missing."""
        planned: dict[SequenceState, list[int]] = {}
        drafts = self.config.drafts
        sequences = [each for each in self._slot_manager.sequences.values() if each.is_decoding]
        for sequence in sorted(sequences, key=lambda each: (-each.request.priority, each.request_id)):
            if sequence.needs_results(drafts=drafts is not None):
                continue
            inputs, begin = sequence.draft_tokens(drafts), sequence.num_computed
            while sequence.slot >= 0 and not self._slot_manager.reserve(sequence, begin, begin + 1 + len(inputs)):
                victim = self.prefix_warmup.current or self._slot_manager.preemption_victim(besides=planned)
                assert victim is not None
                if not victim.background and self._settle():
                    return self.schedule_decode()  # some may have ended
                self.preempt(victim)
            if sequence.slot >= 0:
                planned[sequence] = inputs
        return planned
