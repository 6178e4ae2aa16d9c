"""`PrefixCache`: caches the keys and values of prompts in blocks, so that a shared prefix is prefilled once.

A block has as many tokens as a prefill chunk. Its key is a hash of its tokens and of all tokens before it. Blocks and
chunks have the same boundaries, so a prompt with a cached prefix is prefilled in the same chunks as without, and its
completion is the same bit for bit. Recurrent states do not have an entry per token: they are saved after some of the
blocks, and in a model with recurrent layers a cached prefix must end with such a block.
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

    - `snapshot`: keys and values of its tokens.
    - `state`: recurrent and convolution states after its last token. None: not saved.
    - `pages`: pages of its tokens, each with a reference. None: the cache is not paged.
    """

    snapshot: CacheSnapshot
    state: Any = None
    pages: Pages | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.snapshot.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))


class PrefixCache:
    """LRU cache of blocks by hash.

    **Arguments:**

    - `block_size`: number of tokens per block.
    - `capacity`: size in bytes. 0: no prefix cache.
    - `needs_state`: whether the model has recurrent or convolution states.
    - `on_evict`: called with each evicted block.
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
        self._secret = secrets.token_bytes(16)  # clients do not know the key, so they cannot construct collisions

    def __len__(self) -> int:
        return len(self._blocks)

    def hash_blocks(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Return the hashes of the complete blocks of a prompt."""
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
        """Return the blocks of the longest cached prefix with fewer than `length` tokens."""
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
        """Return the number of leading blocks of a prompt that are cached."""
        missing = (index for index, block_hash in enumerate(hashes) if block_hash not in self._blocks)
        return next(missing, len(hashes))

    def lacks(self, block_hash: bytes, *, state: bool) -> bool:
        """Return whether a block is not cached. With `state`: or is cached without a recurrent state."""
        block = self._blocks.get(block_hash)
        return block is None or (state and self._needs_state and block.state is None)

    def add(self, hashes: Sequence[bytes], block: CachedBlock) -> None:
        """Add the block whose hash is the last of `hashes`, and evict other blocks beyond the capacity.

        The block is evicted right away if an earlier block of the prompt is missing, because it could not be found.
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
        """Evict the least recently used block. Returns False if the cache is empty."""
        if self._blocks:
            self._drop(next(iter(self._blocks)))
            return True
        return False

    def clear(self) -> None:
        """Evict all blocks."""
        while self.evict_one():
            pass

    def renew(self) -> None:
        """Evict all blocks and change all hashes, so that blocks computed by previous weights are never found."""
        self.clear()
        self._secret = secrets.token_bytes(16)

    def _drop(self, block_hash: bytes) -> None:
        block = self._blocks.pop(block_hash)
        self.nbytes -= block.nbytes
        self._on_evict(block)

    def _touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as used, the last block first, so that a block is never evicted before the blocks after it."""
        for block_hash in reversed(tuple(hashes)):
            self._blocks.move_to_end(block_hash)


def count_shared_blocks(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return the number of leading blocks that two prompts share.

    Uses bisection: two blocks have equal hashes only if all blocks before them are equal, too.
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
