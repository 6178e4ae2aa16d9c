"""`SlotManager`: assigns slots to sequences, and restores slots from the prefix cache or after preemption.

A slot is one row of the cache and of the sampling inputs.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.inference.unstack import default_cache_format
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.model_runner import ModelRunner, RunnerConfig
from eqx_decoders.serving.engine.page_pool import BlockManager, OutOfPages, Pages
from eqx_decoders.serving.engine.prefix_cache import CachedBlock, PrefixCache, count_shared_blocks
from eqx_decoders.serving.engine.programs import CacheSnapshot
from eqx_decoders.serving.engine.sequence import SequenceState


class SlotManager:
    """Slots of an engine, the sequences that occupy them (`sequences`), and their sampling inputs (`sampling`).

    **Arguments:**

    - `runner`: runner with the device state.
    - `pages`: configuration of a paged cache. None: the cache is not paged.
    - `prefix_cache_bytes`: size of the prefix cache.
    """

    def __init__(self, runner: ModelRunner, pages: PageConfig | None, prefix_cache_bytes: int):
        self.runner = runner
        self.block_manager: BlockManager | None = None
        if pages is not None and runner.windows:
            self.block_manager = BlockManager(pages, runner.windows, runner.num_slots)
        self.prefix_cache = PrefixCache(runner.block_size, prefix_cache_bytes, runner.has_state, self._free_pages)
        self.sequences: dict[int, SequenceState] = {}  # by slot
        self.sampling = runner.sampling_table(runner.num_slots)

    @classmethod
    def create(cls, model: Decoder, config: EngineConfig) -> "SlotManager":
        """Create empty slots for a model."""
        # the last chunk of a prompt is padded to one of three sizes
        sizes = {size for size in (16, config.prefill_chunk // 2) if 16 <= size < config.prefill_chunk}
        layout = model.execution.layout
        drafts = config.drafts
        dtype = config.cache_dtype
        active_rows_only = not config.batch_invariant and drafts is None and layout.backend.active_rows_only
        runner_config = RunnerConfig(
            num_slots=config.max_batch_size,
            length=config.max_length,
            chunk_sizes=(*sorted(sizes), config.prefill_chunk),
            batch_sizes=batch_sizes(config.max_batch_size) if active_rows_only else (config.max_batch_size,),
            columns=(1,) if drafts is None else (1, 1 + drafts.num_tokens),
            max_biases=config.max_logit_bias,
            max_logprobs=config.max_logprobs,
            cache_format=default_cache_format(model.execution) if dtype is None else CacheFormat.of(dtype),
            pages=config.pages,
            expert_choices=config.expert_choices,
            max_adapters=config.max_adapters,
            max_adapter_rank=config.max_adapter_rank,
            adapter_targets=config.adapter_targets,
        )
        return cls(ModelRunner(model, runner_config, drafts), config.pages, config.prefix_cache_bytes)

    @property
    def block_size(self) -> int:
        """Number of tokens of a prefill chunk and of a block of the prefix cache."""
        return self.runner.block_size

    @property
    def free_slot(self) -> int | None:
        """The first free slot, or None."""
        return next((slot for slot in range(self.runner.num_slots) if slot not in self.sequences), None)

    @property
    def usage(self) -> float:
        """Fraction of the cache in use, from 0 to 1."""
        if self.block_manager is not None:
            return self.block_manager.usage
        num_tokens = sum(sequence.num_computed for sequence in self.sequences.values())
        return num_tokens / (self.runner.num_slots * self.runner.length)

    def preemption_victim(self, exclude: Collection[SequenceState] = ()) -> SequenceState | None:
        """Return the running request of the lowest priority that arrived last, or None."""
        candidates = [seq for seq in self.sequences.values() if seq not in exclude and not seq.is_warmup]
        return min(candidates, key=lambda sequence: (sequence.request.priority, -sequence.request_id), default=None)

    # --- assignment ---

    def assign(self, sequence: SequenceState, slot: int) -> None:
        """Assign a slot to a sequence. If the sequence was preempted, its saved cache is restored."""
        sequence.slot = slot
        self.sequences[slot] = sequence
        request = sequence.request
        self.sampling.set(
            slot,
            request.sampling,
            prompt_length=len(request.prompt),
            adapter=0 if sequence.adapter is None else sequence.adapter.index,
            processed_scores=request.logprobs_mode == "processed",
        )
        self.runner.empty(slot)
        if sequence.saved is not None:
            self._restore_saved(sequence, *sequence.saved)

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence."""
        del self.sequences[sequence.slot]
        self.sampling.rows.masked[sequence.slot] = False
        if self.block_manager is not None:
            self.block_manager.release(sequence.slot)
        sequence.slot, sequence.has_drafts = -1, False

    def preempt(self, sequence: SequenceState, capacity: int) -> None:
        """Save the cache of a sequence and free its slot.

        A cache of more than `capacity` bytes is not saved: the sequence is recomputed from its start.
        """
        size = self.runner.saved_bytes(sequence.num_computed)
        if size > capacity or sequence.num_computed == 0:
            sequence.restart()
        else:
            starts = range(0, sequence.num_computed, self.block_size)
            blocks = [self.runner.save(sequence.slot, begin) for begin in starts]
            sequence.saved, sequence.saved_bytes = (blocks, self.runner.save_state(sequence.slot)), size
            if self.block_manager is not None:  # the device is out of pages, so save on the host
                sequence.saved = jax.device_get(sequence.saved)
        self.release(sequence)

    def _restore_saved(self, sequence: SequenceState, blocks: Iterable[CacheSnapshot], state: Any) -> None:
        sequence.saved, sequence.saved_bytes = None, 0
        self._reserve_visible(sequence)
        for index, snapshot in enumerate(blocks):
            self.runner.restore([sequence.slot], index * self.block_size, sequence.num_computed, snapshot)
        self.runner.restore_state(sequence.slot, state)

    def insert_cache(self, sequence: SequenceState, cache: Cache, prompt: np.ndarray) -> None:
        """Write the cache of a separately prefilled prompt into the slot of a sequence."""
        sequence.num_computed = len(prompt)
        self._reserve_visible(sequence)
        self.runner.insert_cache(sequence.slot, cache, prompt)

    # --- shared prefixes ---

    def find_leader(self, sequence: SequenceState) -> SequenceState | None:
        """Return a sequence that `sequence` should wait for, because it is prefilling a shared prefix, or None."""
        last_block = self._last_block_start(sequence)
        for other in self.sequences.values():
            if other is sequence or not other.prefill_started or other.is_decoding:
                continue
            same_prompt = other.shared is sequence.shared
            if same_prompt and (sequence.needs_prompt_scores or sequence.block_hashes or last_block == 0):
                return other
            count = count_shared_blocks(other.block_hashes, sequence.block_hashes)
            count = min(count, sequence.reusable_tokens // self.block_size)
            pending = other.num_computed < count * self.block_size
            if pending and self.prefix_cache.count_cached(sequence.block_hashes[:count]) < count:
                other.branch_points.add(count)
                return other
        return None

    def start(self, sequences: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Restore the cached prefix of sequences with the same prompt, and mark their prefill as started.

        Returns the started sequences. If some blocks of the prompt are not cached, only the first sequence starts, and
        the other sequences should wait for it.
        """
        sequence, size, manager = sequences[0], self.block_size, self.block_manager
        hashes = sequence.block_hashes
        blocks = self.prefix_cache.find(hashes, sequence.reusable_tokens + 1)
        while blocks and manager is not None and not manager.has_visible_pages(_pages(blocks), len(blocks) * size):
            blocks = [] if self.runner.has_state else blocks[:-1]
        count, end = self.prefix_cache.count_cached(hashes), len(blocks) * size
        if end < self._last_block_start(sequence):
            sequences = sequences[:1]
        for started in sequences:
            started.prefill_started = True
            started.stop_waiting()
            started.branch_points.add(count)
            started.num_computed = started.num_cached = end
            if blocks and manager is not None:
                manager.adopt(started.slot, _pages(blocks), end)
        for index, block in enumerate(blocks):
            self.runner.restore(_slots(sequences), index * size, end, block.snapshot, pages=False)
        for started in sequences if blocks else ():
            self.runner.restore_state(started.slot, blocks[-1].state)
        return sequences

    def _last_block_start(self, sequence: SequenceState) -> int:
        """Return the first position of the block with the prompt's last token, which is always computed."""
        return (len(sequence.request.prompt) - 1) // self.block_size * self.block_size

    def save_prompt_end(self, sequence: SequenceState) -> tuple[CacheSnapshot, Any]:
        """Copy the last block of a prompt (complete or not) and the recurrent states after the prompt."""
        snapshot = self.runner.save(sequence.slot, self._last_block_start(sequence))
        return snapshot, self.runner.save_state(sequence.slot)

    def restore_prompt_end(
        self, sequences: Sequence[SequenceState], snapshot: CacheSnapshot, state: Any
    ) -> list[SequenceState]:
        """Restore the result of `save_prompt_end` in the slots of sequences with that prompt.

        Returns the restored sequences. A sequence is left out if earlier tokens are not computed, or if it cannot get
        pages.
        """
        begin, end = self._last_block_start(sequences[0]), len(sequences[0].request.prompt)
        restored = [
            sequence for sequence in sequences if sequence.num_computed == begin and self.reserve(sequence, begin, end)
        ]
        for sequence in restored:
            sequence.num_computed = end
        if restored:
            self.set_page_tables()
            self.runner.restore(_slots(restored), begin, end, snapshot)
        for sequence in restored:
            self.runner.restore_state(sequence.slot, state)
        return restored

    def cache_block(self, sequence: SequenceState) -> None:
        """Add the last computed block of a prompt to the prefix cache, if the block is complete."""
        end, size = sequence.num_computed, self.block_size
        index = end // size
        if end % size > 0 or index > len(sequence.block_hashes):
            return
        hashes, count = sequence.block_hashes[:index], len(sequence.request.prompt)
        # where a later prompt can resume: the same prompt, a longer one, or one that diverges from a cached prompt here
        resume_points = {(count - 1) // size, count // size, *sequence.branch_points}
        with_state = self.runner.has_state and index in resume_points
        if self.prefix_cache.lacks(hashes[-1], state=with_state):
            manager = self.block_manager
            pages = None if manager is None else manager.share(sequence.slot, end - size, end)
            snapshot = self.runner.save(sequence.slot, end - size, pages=False)
            state = self.runner.save_state(sequence.slot) if with_state else None
            self.prefix_cache.add(hashes, CachedBlock(snapshot, state, pages))

    def _free_pages(self, block: CachedBlock) -> None:
        if self.block_manager is not None and block.pages is not None:
            self.block_manager.free(block.pages)

    # --- pages ---

    def has_room(self, sequence: SequenceState) -> bool:
        """Return whether enough pages are free for the known tokens of a sequence. Evicts cached blocks if needed."""
        while self.block_manager is not None:
            num_blocks = self.prefix_cache.count_cached(sequence.block_hashes) if sequence.saved is None else 0
            length = max(sequence.num_computed, len(sequence.request.prompt)) + 1
            if self.block_manager.has_room(length - min(num_blocks * self.block_size, length - 1)):
                break
            if sequence.is_warmup or not self.prefix_cache.evict_one():
                return False
        return True

    def reserve(self, sequence: SequenceState, begin: int, end: int) -> bool:
        """Allocate pages for the tokens `begin:end` of a sequence. Returns False if there are not enough.

        Cached blocks are evicted if needed, but not for a warm-up.
        """
        while self.block_manager is not None:
            try:
                self.block_manager.reserve(sequence.slot, begin, end)
                break
            except OutOfPages:
                if sequence.is_warmup or not self.prefix_cache.evict_one():
                    return False
        return True

    def set_page_tables(self) -> None:
        """Copy the page tables and lengths to the device."""
        if self.block_manager is not None:
            lengths = np.zeros(self.runner.num_slots, np.int32)
            for sequence in self.sequences.values():
                lengths[sequence.slot] = sequence.num_computed
            self.runner.set_page_tables(self.block_manager.arrays, lengths)

    def _reserve_visible(self, sequence: SequenceState) -> None:
        """Allocate the pages of restored tokens that the next token can attend to. `has_room` ensures their number."""
        if self.block_manager is not None:
            self.block_manager.reserve_visible(sequence.slot, sequence.num_computed)
            self.set_page_tables()


def batch_sizes(num_slots: int) -> tuple[int, ...]:
    """Return the batch sizes to compile: the powers of two below `num_slots`, and `num_slots`."""
    sizes = [1]
    while sizes[-1] < num_slots:
        sizes.append(min(2 * sizes[-1], num_slots))
    return tuple(sizes)


def padded_slots(slots: Collection[int], sizes: Sequence[int]) -> list[int]:
    """Return the slots in increasing order, padded with idle slots to the smallest batch size in `sizes`."""
    num_rows = next(size for size in sizes if size >= len(slots))
    idle = (slot for slot in range(sizes[-1]) if slot not in slots)
    return sorted([*slots, *itertools.islice(idle, num_rows - len(slots))])


def _pages(blocks: list[CachedBlock]) -> list[Pages]:
    return [block.pages or {} for block in blocks]


def _slots(sequences: Iterable[SequenceState]) -> list[int]:
    return [sequence.slot for sequence in sequences]
