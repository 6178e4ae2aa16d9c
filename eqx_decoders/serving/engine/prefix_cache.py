"""Prompts that begin alike are computed once: what a model remembers of them is kept in blocks, found by content.

A block is as many tokens as a whole chunk of a prompt, and is known by a hash of its tokens and of all before it.
Chunks begin where blocks do, so a prompt with a prefix from here is computed in the same pieces as one without: its
answer has the same bits. What is not by token, such as the state of a recurrence, is kept behind some of the blocks
(`rest`), and only such a block can end a prefix of models that have it.
"""

import collections
import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.serving.engine.block_manager import Pages
from eqx_decoders.serving.engine.model_runner import CacheSnapshot


@dataclasses.dataclass
class CachedBlock:
    """One block of a prefix.

    **Arguments:**

    - `kept`: what is remembered of its tokens.
    - `rest`: what is remembered behind it of all tokens together; None: not kept.
    - `pages`: those that hold its tokens, with a reference each; None without pages.
    """

    kept: CacheSnapshot
    rest: Any = None
    pages: Pages | None = None

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.kept.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(self.rest))


class PrefixCache:
    """Blocks by their content, those used last within a number of bytes.

    **Arguments:**

    - `block`: tokens of each.
    - `capacity`: bytes that all may take; 0 keeps nothing.
    - `needs_rest`: whether the model remembers what is not by token.
    - `release`: called with each block that goes.
    """

    def __init__(
        self, block: int, capacity: int, needs_rest: bool, release: Callable[[CachedBlock], None] = lambda _: None
    ):
        self.block, self.capacity, self.nbytes, self._needs_rest = block, capacity, 0, needs_rest
        self._release = release
        self._blocks: collections.OrderedDict[bytes, CachedBlock] = collections.OrderedDict()
        self._secret = secrets.token_bytes(16)  # hashes can't be made to meet by who doesn't know it

    def __len__(self) -> int:
        return len(self._blocks)

    def names(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """The names of the whole blocks that a prompt begins with."""
        found, name = [], hashlib.blake2b(salt.encode(), key=self._secret, digest_size=16).digest()
        if self.capacity == 0:
            return found
        ids = np.asarray(tokens, np.int32)
        for begin in range(0, len(ids) - self.block + 1, self.block):
            content = name + ids[begin : begin + self.block].tobytes()
            name = hashlib.blake2b(content, key=self._secret, digest_size=16).digest()
            found.append(name)
        return found

    def find(self, names: Sequence[bytes], length: int) -> list[CachedBlock]:
        """The blocks of the longest known prefix that leaves at least one of the prompt's `length` tokens over."""
        known: list[CachedBlock] = []
        for name in names[: (length - 1) // self.block]:
            if name not in self._blocks:
                break
            known.append(self._blocks[name])
        self._use(names[: len(known)])
        while known and self._needs_rest and known[-1].rest is None:
            known.pop()
        return known

    def known(self, names: Sequence[bytes]) -> int:
        """How many blocks of a prompt are here, one after another."""
        return next((index for index, name in enumerate(names) if name not in self._blocks), len(names))

    def lacks(self, name: bytes, *, rest: bool) -> bool:
        """Whether a block is not here, or is without its `rest` where that is asked for."""
        block = self._blocks.get(name)
        return block is None or (rest and self._needs_rest and block.rest is None)

    def add(self, names: Sequence[bytes], block: CachedBlock) -> None:
        """Keep the block behind all of `names` but the last, which is its own; the ones used longest ago go for it.

        It is not kept if those before it are gone: it could not be found.
        """
        if self.known(names[:-1]) < len(names) - 1 or block.nbytes > self.capacity:
            self._release(block)
            return
        if names[-1] in self._blocks:
            self._drop(names[-1])
        self._blocks[names[-1]] = block
        self.nbytes += block.nbytes
        self._use(names)
        while self.nbytes > self.capacity:
            self.forget_one()

    def forget_one(self) -> bool:
        """Let go of the block that was used longest ago; False if there is none."""
        if self._blocks:
            self._drop(next(iter(self._blocks)))
            return True
        return False

    def clear(self) -> None:
        """Forget all."""
        while self.forget_one():
            pass

    def _drop(self, name: bytes) -> None:
        block = self._blocks.pop(name)
        self.nbytes -= block.nbytes
        self._release(block)

    def _use(self, names: Iterable[bytes]) -> None:
        """The last of a prefix first: so no block is older than what comes behind it, and ends go before beginnings."""
        for name in reversed(tuple(names)):
            self._blocks.move_to_end(name)


def shared_blocks(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many blocks two prompts begin with alike; a name is of all blocks before it, too."""
    least, most = 0, min(len(first), len(second))
    while least < most:
        middle = (least + most + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
