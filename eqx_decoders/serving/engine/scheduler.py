"""`Scheduler`: decides which sequences have slots, and which tokens each step computes.

`PrefixWarmup` prefills finished conversations in idle steps, because the next turn of a conversation starts with them.
The keys and values computed by decoding steps are not added to the prefix cache: they differ in rounding from those of
a chunked prefill, so the completion of the next turn could differ. Recurrent states and keys outside of an attention
window could not be reused at all.
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


MAX_WARMUPS = 64  # waiting warm-ups; the oldest one is dropped first


class PrefixWarmup:
    """Queue of finished conversations to be prefilled in idle steps. `current`: the one that has a slot."""

    def __init__(self, slot_manager: SlotManager):
        self._slot_manager = slot_manager
        # sequences, each with the number of blocks that its original prompt has
        self._waiting: collections.deque[tuple[SequenceState, int]] = collections.deque(maxlen=MAX_WARMUPS)
        self.current: SequenceState | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self, adapter: Adapter | None = None) -> None:
        """Remove the waiting sequences of an adapter. None: all waiting sequences."""
        remaining = [] if adapter is None else [entry for entry in self._waiting if entry[0].adapter is not adapter]
        self._waiting = collections.deque(remaining, maxlen=MAX_WARMUPS)

    def add(self, sequence: SequenceState) -> None:
        """Queue the complete blocks of a prompt and its completion, if the completion adds any."""
        request, block_size = sequence.request, self._slot_manager.block_size
        num_prompt_blocks = len(request.prompt) // block_size
        tokens = (*request.prompt, *sequence.output_tokens)
        tokens = tokens[: len(tokens) // block_size * block_size]
        prefix_cache = self._slot_manager.prefix_cache
        hashes = prefix_cache.hash_blocks(tokens, sequence.salt) if request.media is None else []
        if len(hashes) > num_prompt_blocks:
            prompt = Request(prompt=tokens, max_new_tokens=1)
            warmup = SequenceState(-1, prompt, hashes, is_warmup=True, adapter=sequence.adapter)
            self._waiting.append((warmup, num_prompt_blocks))

    def next(self) -> tuple[SequenceState, int] | None:
        """Remove and return the next useful sequence, with a free slot.

        None: no sequence waits, or there is no room.
        """
        manager = self._slot_manager
        while self._waiting and self.current is None:
            sequence, num_prompt_blocks = self._waiting[0]
            slot, has_room = manager.free_slot, manager.has_room(sequence)
            if manager.sequences and (slot is None or not has_room):
                return None
            self._waiting.popleft()
            # skip if the prompt itself was evicted in the meantime: prefilling it again would cost too much
            num_cached = manager.prefix_cache.count_cached(sequence.block_hashes)
            if slot is not None and has_room and num_prompt_blocks <= num_cached < len(sequence.block_hashes):
                self.current = sequence
                return sequence, slot
        return None


class Scheduler:
    """Scheduler of an engine: admission, preemption, and the tokens of each step.

    `prefilling`: sequences with incomplete prompts, in the order in which they get their next chunk.

    **Arguments:**

    - `drain`: reads the results of all dispatched steps, and returns whether there were any. It is called before a
        request is preempted, because the saved state must include all results, and the request may have finished.
    """

    def __init__(self, slot_manager: SlotManager, config: EngineConfig, drain: Callable[[], bool]):
        self.config = config
        self.preemptions = 0
        self._slot_manager = slot_manager
        self._drain = drain
        self.queue: RequestQueue[SequenceState] = RequestQueue(config.max_waiting, config.max_waiting_tokens)
        self.prefilling: list[SequenceState] = []
        self.prefix_warmup = PrefixWarmup(slot_manager)

    # --- slots ---

    def enqueue(self, sequence: SequenceState) -> None:
        """Add a sequence to the waiting queue."""
        self.queue.add(sequence, {running.request.client for running in self._slot_manager.sequences.values()})

    def admit_next(self) -> SequenceState | None:
        """Assign a slot to the next waiting sequence that is ready and return the sequence.

        If no slot is free, a sequence of lower priority is preempted. Returns None if no sequence is ready, or if there
        is no room for it.
        """
        while (sequence := self.queue.first(SequenceState.is_ready)) is not None:
            slot = self._slot_manager.free_slot
            if slot is not None and self._slot_manager.has_room(sequence):
                self.queue.remove(sequence.request_id)
                was_preempted = sequence.saved is not None or sequence.is_replaying
                if not was_preempted:
                    sequence.queue_seconds = time.monotonic() - sequence.arrival_time
                self._slot_manager.assign(sequence, slot)
                return sequence
            victim = self.prefix_warmup.current or self._slot_manager.preemption_victim()
            if victim is None:
                break
            if not victim.is_warmup and victim.request.priority >= sequence.request.priority:
                break
            if victim.is_warmup or not self._drain():
                self.preempt(victim)
        return None

    def admit_warmup(self) -> SequenceState | None:
        """Assign a slot to the next warm-up, if no request is ready to be admitted, and return its sequence."""
        if self.queue.first(SequenceState.is_ready) is not None:
            return None
        warmup = self.prefix_warmup.next()
        if warmup is None:
            return None
        sequence, slot = warmup
        self._slot_manager.assign(sequence, slot)
        return sequence

    def preempt(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence and queue it again. It later resumes from its saved cache, or is recomputed."""
        if sequence.is_warmup:
            self.release(sequence)
            return
        assert sequence.num_pending == 0
        self._stop_prefill(sequence)
        saved_bytes = sum(waiting.saved_bytes for waiting in self.queue)
        self._slot_manager.preempt(sequence, self.config.preempted_bytes - saved_bytes)
        if sequence.request.media is not None and sequence.saved is None:
            sequence.join(SharedPrompt(features_bytes=sequence.shared.features_bytes))
        self.preemptions += 1
        self.enqueue(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a finished or cancelled sequence."""
        self._stop_prefill(sequence)
        self._slot_manager.release(sequence)
        if sequence.is_warmup:
            self.prefix_warmup.current = None

    def drop_warmups(self, adapter: Adapter) -> None:
        """Remove the warm-ups of an adapter."""
        self.prefix_warmup.clear(adapter)
        current = self.prefix_warmup.current
        if current is not None and current.adapter is adapter:
            self.release(current)

    def renew(self, *, recompute: bool) -> None:
        """Discard results that the previous weights computed for waiting prompts.

        `recompute`: also discard the caches of running and preempted requests, which are then recomputed.
        """
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

    def schedule_prefill(self, budget: int, *, decodes: bool) -> list[tuple[SequenceState, int, int]]:
        """Return the prefill chunks of a step as `(sequence, first token, number of tokens)`, round-robin over prompts.

        The chunks fit into the token budget, except that a step has at least one chunk.

        **Arguments:**

        - `decodes`: whether the step also decodes. If it does not, and no prompt can get pages, a running sequence is
            preempted.
        """
        chunks: list[tuple[SequenceState, int, int]] = []
        scheduled_end: dict[int, int] = {}
        skipped: list[SequenceState] = []
        self.prefilling.sort(key=lambda sequence: sequence.is_warmup and not sequence.is_leader)
        while self.prefilling and (budget > 0 or not chunks):
            sequence = self.prefilling.pop(0)
            is_busy = decodes or any(not chunk[0].is_warmup for chunk in chunks)
            if (sequence.is_warmup and not sequence.is_leader and is_busy) or not sequence.prefill_started:
                skipped.append(sequence)
                continue
            begin = scheduled_end.get(sequence.request_id, sequence.num_computed)
            count = min(self._slot_manager.block_size, len(sequence.request.prompt) - begin)
            if not self._slot_manager.reserve(sequence, begin, begin + count):
                victim = self.prefix_warmup.current
                if victim is None and not decodes and not chunks:
                    victim = self._slot_manager.preemption_victim(exclude=[sequence])
                if victim is None:
                    skipped.append(sequence)
                    continue
                self.prefilling.insert(0, sequence)
                if victim.is_warmup or not self._drain():
                    skipped = [other for other in skipped if other is not victim]
                    self.preempt(victim)  # the victim can be `sequence` itself, if that is a warm-up
                continue
            chunks.append((sequence, begin, count))
            scheduled_end[sequence.request_id] = begin + count
            if begin + count < len(sequence.request.prompt):
                # a paged cache frees the pages outside of a window after each chunk, so only one chunk can be scheduled
                (self.prefilling if self._slot_manager.block_manager is None else skipped).append(sequence)
            budget -= count
        self.prefilling += skipped
        return chunks

    def schedule_decode(self) -> dict[SequenceState, list[int]]:
        """Return the sequences that decode in the next step, with their draft tokens.

        If there are not enough pages, sequences are preempted, the last arrivals of the lowest priority first.
        """
        scheduled: dict[SequenceState, list[int]] = {}
        drafter = self.config.drafts
        decoding = [sequence for sequence in self._slot_manager.sequences.values() if sequence.is_decoding]
        decoding.sort(key=lambda sequence: (-sequence.request.priority, sequence.request_id))
        for sequence in decoding:
            if sequence.needs_results(drafts=drafter is not None):
                continue
            drafts, begin = sequence.draft_tokens(drafter), sequence.num_computed
            while sequence.slot >= 0 and not self._slot_manager.reserve(sequence, begin, begin + 1 + len(drafts)):
                victim = self.prefix_warmup.current or self._slot_manager.preemption_victim(exclude=scheduled)
                assert victim is not None
                if not victim.is_warmup and self._drain():
                    return self.schedule_decode()  # sequences may have finished
                self.preempt(victim)
            if sequence.slot >= 0:
                scheduled[sequence] = drafts
        return scheduled
