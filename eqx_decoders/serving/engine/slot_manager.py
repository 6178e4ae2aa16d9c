"""Who has which slot, and what stands in it: what is known of a prompt, pages, and what was interrupted."""

from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from eqx_decoders.inference.unstack import default_cache_format
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.batch_sizes import row_counts
from eqx_decoders.serving.engine.block_manager import BlockManager, Pages
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.drafters import DraftModel, device_drafting
from eqx_decoders.serving.engine.model_runner import CacheSnapshot, ModelRunner
from eqx_decoders.serving.engine.page_pool import OutOfPages
from eqx_decoders.serving.engine.prefix_cache import CachedBlock, PrefixCache, shared_blocks
from eqx_decoders.serving.engine.sequence import SequenceState


class SlotManager:
    """The slots and who has them.

    **Arguments:**

    - `slots`: the state on the device.
    - `pages`: how its cache is in pages; None: it is not.
    - `prefix_bytes`: memory for prompts that begin alike.
    """

    def __init__(self, slots: ModelRunner, pages: PageConfig | None, prefix_bytes: int):
        self.slots, windows = slots, slots.windows
        self.paging = None if pages is None or not windows else BlockManager(pages, windows, slots.count)
        self.prefixes = PrefixCache(slots.block, prefix_bytes, slots.keeps_rest, self._release)
        self.jobs: dict[int, SequenceState] = {}  # by slot

    @classmethod
    def create(cls, model: Decoder, config: EngineConfig) -> "SlotManager":
        """Empty slots for a model."""
        # the last chunk of a prompt is rounded up to one of few sizes, which depends on its length alone
        sizes = {size for size in (16, config.prefill_chunk // 2) if 16 <= size < config.prefill_chunk}
        layout, drafts = model.execution.layout, config.drafts
        apart = not config.batch_invariant and drafts is None and layout.single and layout.platform == "cpu"
        slots = ModelRunner(
            model,
            count=config.max_batch_size,
            length=config.max_length,
            chunks=(*sorted(sizes), config.prefill_chunk),
            rows=row_counts(config.max_batch_size) if apart else (config.max_batch_size,),
            columns=(1,) if drafts is None else (1, 1 + drafts.num_tokens),
            biases=config.max_logit_bias,
            top=config.max_logprobs,
            kind=default_cache_format(model.execution)
            if config.cache_dtype is None
            else CacheFormat.of(config.cache_dtype),
            pages=config.pages,
            small=drafts.model if isinstance(drafts, DraftModel) else None,
            drafting=device_drafting(drafts),
        )
        return cls(slots, config.pages, config.prefix_cache_bytes)

    @property
    def block(self) -> int:
        """Tokens of a chunk of a prompt, and of a block of the prefix cache."""
        return self.slots.block

    @property
    def free(self) -> int | None:
        """A slot that nobody has."""
        return next((slot for slot in range(self.slots.count) if slot not in self.jobs), None)

    @property
    def usage(self) -> float:
        """Share of all room that is in use, from 0 to 1."""
        if self.paging is not None:
            return self.paging.usage
        return sum(job.done for job in self.jobs.values()) / (self.slots.count * self.slots.length)

    def last(self, besides: Collection[SequenceState] = ()) -> SequenceState | None:
        """Who has to give way first: of the lowest priority the one that came last; None where there is no request."""
        jobs = (job for job in self.jobs.values() if job not in besides and not job.idle)
        return min(jobs, key=lambda job: (job.request.priority, -job.request_id), default=None)

    # --- coming and going ---

    def enter(self, job: SequenceState, slot: int) -> None:
        """Give a request a slot, with what it held where it had one before."""
        job.slot, self.jobs[slot] = slot, job
        self.slots.empty(slot)
        if job.saved is not None:
            self._return(job, *job.saved)

    def leave(self, job: SequenceState) -> None:
        """Free a slot."""
        del self.jobs[job.slot]
        if self.paging is not None:
            self.paging.release(job.slot)
        job.slot, job.drafted = -1, False

    def interrupt(self, job: SequenceState, room: int) -> None:
        """Free a slot, and keep what stands in it for when the request goes on.

        That is at most `room` bytes: a request with more is computed from its beginning again.
        """
        size = self.slots.kept_bytes(job.done)
        if size > room or job.done == 0:
            job.restart()
        else:
            blocks = [self.slots.keep(job.slot, begin) for begin in range(0, job.done, self.block)]
            job.saved, job.saved_bytes = (blocks, self.slots.keep_rest(job.slot)), size
            if self.paging is not None:  # memory of the device is what is short
                job.saved = jax.device_get(job.saved)
        self.leave(job)

    def _return(self, job: SequenceState, blocks: Iterable[Any], rest: Any) -> None:
        job.saved, job.saved_bytes = None, 0
        self._reserve_seen(job)
        for index, kept in enumerate(blocks):
            self.slots.restore(job.slot, index * self.block, kept)
        self.slots.restore_rest(job.slot, job.done, rest)

    def take_whole(self, job: SequenceState, cache: Cache, prompt: np.ndarray) -> None:
        """Put a prompt's cache, made elsewhere, into a slot."""
        job.done = len(prompt)
        self._reserve_seen(job)
        self.slots.take_whole(job.slot, cache, prompt)

    # --- prompts that begin alike ---

    def leader(self, job: SequenceState) -> SequenceState | None:
        """Who computes now what a request will need, which waits for it: the same prompt, or one that begins alike."""
        for other in self.jobs.values():
            if other is job or not other.begun or other.decodes:
                continue
            if other.shared is job.shared and (job.wants_scores or job.names or self._last_block(job) == 0):
                return other
            if job.wants_scores:
                continue
            count = min(shared_blocks(other.names, job.names), self._last_block(job) // self.block)
            if other.done < count * self.block and self.prefixes.known(job.names[:count]) < count:
                other.branches.add(count)
                return other
        return None

    def begin(self, job: SequenceState) -> None:
        """Put what is known of a prompt into its slot, unless it has to be computed for the scores of its tokens."""
        job.begun = True
        job.wait_no_more()
        if job.wants_scores:
            return
        known, block = self.prefixes.find(job.names, len(job.request.prompt)), self.block
        while known and self.paging is not None and not self.paging.sees_all(_pages(known), len(known) * block):
            known = [] if self.slots.keeps_rest else known[:-1]
        job.branches.add(self.prefixes.known(job.names))
        job.done = job.cached = len(known) * block
        if not known:
            return
        if self.paging is not None:
            self.paging.adopt(job.slot, _pages(known), job.done)
        for index, each in enumerate(known):
            self.slots.restore(job.slot, index * block, each.kept, pages=False)
        self.slots.restore_rest(job.slot, job.done, known[-1].rest)

    def _last_block(self, job: SequenceState) -> int:
        """Where the last block of a prompt begins, of which a token is left to compute at least."""
        return (len(job.request.prompt) - 1) // self.block * self.block

    def keep_end(self, job: SequenceState) -> tuple[CacheSnapshot, Any]:
        """What a slot remembers of the last block of a prompt, complete or not, and of all of it."""
        return self.slots.keep(job.slot, self._last_block(job)), self.slots.keep_rest(job.slot)

    def take_end(self, job: SequenceState, kept: CacheSnapshot, rest: Any) -> bool:
        """Put the last block of a prompt behind what is known of it; False where more is missing, or room for it."""
        begin, end = job.done, len(job.request.prompt)
        if begin != self._last_block(job) or not self.reserve(job, begin, end):
            return False
        job.done = end
        self.set_tables()
        self.slots.restore(job.slot, begin, kept)
        self.slots.restore_rest(job.slot, end, rest)
        return True

    def remember(self, job: SequenceState) -> None:
        """Keep the last block of a prompt for others, if it is complete."""
        index = job.done // self.block
        if job.done % self.block > 0 or index > len(job.names):
            return
        names, count, begin = job.names[:index], len(job.request.prompt), job.done - self.block
        # where the same prompt, a longer one, or one that parts from a known one here, would go on
        wanted = self.slots.keeps_rest and index in {(count - 1) // self.block, count // self.block, *job.branches}
        if self.prefixes.lacks(names[-1], rest=wanted):
            pages = None if self.paging is None else self.paging.pages(job.slot, begin, job.done)
            kept = self.slots.keep(job.slot, begin, pages=False)
            rest = self.slots.keep_rest(job.slot) if wanted else None
            self.prefixes.add(names, CachedBlock(kept, rest, pages))

    def _release(self, block: CachedBlock) -> None:
        """A block of the prefix cache goes."""
        if self.paging is not None and block.pages is not None:
            self.paging.free(block.pages)

    # --- pages ---

    def has_room(self, job: SequenceState) -> bool:
        """Whether there are pages for what a request begins with, once those have gone that nobody uses."""
        while self.paging is not None:
            known = self.prefixes.known(job.names) * self.block if job.saved is None else 0
            length = max(job.done, len(job.request.prompt)) + 1
            if self.paging.has_room(length - min(known, length - 1)):
                break
            if job.idle or not self.prefixes.forget_one():
                return False
        return True

    def reserve(self, job: SequenceState, begin: int, end: int) -> bool:
        """Pages for tokens that are about to be computed; False if there are none.

        Prompts that nobody uses go for them, but not for one that is computed to be such a prompt.
        """
        while self.paging is not None:
            try:
                self.paging.reserve(job.slot, begin, end)
                break
            except OutOfPages:
                if job.idle or not self.prefixes.forget_one():
                    return False
        return True

    def set_tables(self) -> None:
        """Tell the device who has which pages, before it computes."""
        if self.paging is not None:
            lengths = np.zeros(self.slots.count, np.int32)
            for job in self.jobs.values():
                lengths[job.slot] = job.done
            self.slots.set_tables(self.paging.arrays, lengths)

    def _reserve_seen(self, job: SequenceState) -> None:
        """Pages for what comes at once into a slot; `has_room` has seen to it that there are."""
        if self.paging is not None:
            self.paging.reserve_seen(job.slot, job.done)
            self.set_tables()


def _pages(blocks: list[CachedBlock]) -> list[Pages]:
    return [block.pages or {} for block in blocks]
