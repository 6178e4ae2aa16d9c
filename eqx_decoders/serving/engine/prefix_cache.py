"""Prefix cache: prompts that begin alike are prefilled once, in blocks that are found by their content.

A block has as many tokens as a prefill chunk, and is named by a hash of its tokens and of all tokens before it. Chunks
begin where blocks do, so a prompt with a cached prefix is prefilled in the same pieces as one without: its answer has
the same bits. Recurrent states, which have no entry per token, are saved after some of the blocks, and only such a
block can end a cached prefix of models that have them.
"""

import collections
import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.serving.engine.page_pool import Pages
from eqx_decoders.serving.engine.programs import CacheSnapshot


@dataclasses.dataclass
class CachedBlock:
    """Block of a cached prefix.

    **Arguments:**

    - `snapshot`: cache entries of its tokens.
    - `state`: recurrent and convolution states after its last token; None: not saved.
    - `pages`: pages that hold its tokens, with a reference each; None without a paged cache.
    """

    snapshot: CacheSnapshot
    state: Any = None
    pages: Pages | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.snapshot.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))


class PrefixCache:
    """Cached blocks by the hash of their content; the least recently used ones are evicted.

    **Arguments:**

    - `block_size`: tokens of a block.
    - `capacity`: bytes that all blocks may take; 0 caches nothing.
    - `needs_state`: whether the model has states that have no entry per token.
    - `on_evict`: called with each block that is evicted.
    """

    def __init__(
        self,
        block_size: int,
        capacity: int,
        needs_state: bool,
        on_evict: Callable[[CachedBlock], None] = lambda _: None,
    ):
        self.block_size, self.capacity, self.nbytes, self._needs_state = block_size, capacity, 0, needs_state
        self._on_evict = on_evict
        self._blocks: collections.OrderedDict[bytes, CachedBlock] = collections.OrderedDict()
        self._secret = secrets.token_bytes(16)  # clients, who don't know it, can't make hashes collide

    def __len__(self) -> int:
        return len(self._blocks)

    def hash_blocks(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Return the hashes of the whole blocks of a prompt."""
        hashes, digest = [], hashlib.blake2b(salt.encode(), key=self._secret, digest_size=16).digest()
        if self.capacity == 0:
            return hashes
        ids = np.asarray(tokens, np.int32)
        for begin in range(0, len(ids) - self.block_size + 1, self.block_size):
            content = digest + ids[begin : begin + self.block_size].tobytes()
            digest = hashlib.blake2b(content, key=self._secret, digest_size=16).digest()
            hashes.append(digest)
        return hashes

    def find(self, hashes: Sequence[bytes], length: int) -> list[CachedBlock]:
        """Return the blocks of the longest cached prefix that leaves at least one of `length` tokens to compute."""
        blocks: list[CachedBlock] = []
        for block_hash in hashes[: (length - 1) // self.block_size]:
            if block_hash not in self._blocks:
                break
            blocks.append(self._blocks[block_hash])
        self._touch(hashes[: len(blocks)])
        while blocks and self._needs_state and blocks[-1].state is None:
            blocks.pop()
        return blocks

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks of a prompt that are cached."""
        return next((index for index, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    def lacks(self, block_hash: bytes, *, state: bool) -> bool:
        """Return whether a block is missing, or, with `state`, has no saved state."""
        block = self._blocks.get(block_hash)
        return block is None or (state and self._needs_state and block.state is None)

    def add(self, hashes: Sequence[bytes], block: CachedBlock) -> None:
        """Cache the block with the last of `hashes`, and evict others for it.

        It is released at once if one of the blocks before it is missing: it could not be found.
        """
        if self.count_cached(hashes[:-1]) < len(hashes) - 1 or block.nbytes > self.capacity:
            self._on_evict(block)
            return
        if hashes[-1] in self._blocks:
            self._drop(hashes[-1])
        self._blocks[hashes[-1]] = block
        self.nbytes += block.nbytes
        self._touch(hashes)
        while self.nbytes > self.capacity:
            self.evict_one()

    def evict_one(self) -> bool:
        """Evict the least recently used block; False if there is none."""
        if self._blocks:
            self._drop(next(iter(self._blocks)))
            return True
        return False

    def clear(self) -> None:
        """Evict all blocks."""
        while self.evict_one():
            pass

    def renew(self) -> None:
        """Evict all blocks, and give all others new names: what other weights compute is never found."""
        self.clear()
        self._secret = secrets.token_bytes(16)

    def _drop(self, block_hash: bytes) -> None:
        block = self._blocks.pop(block_hash)
        self.nbytes -= block.nbytes
        self._on_evict(block)

    def _touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as used, the last one first: no block outlives those before it."""
        for block_hash in reversed(tuple(hashes)):
            self._blocks.move_to_end(block_hash)


def count_shared_blocks(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Count the leading blocks that two prompts share, by bisection: a hash is of all blocks before it, too."""
    least, most = 0, min(len(first), len(second))
    while least < most:
        middle = (least + most + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
