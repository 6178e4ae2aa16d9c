"""Block sizes of the Pallas flash kernel, for each generation of TPUs."""

import dataclasses

from eqx_decoders.sharding.chips import LANES, device_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Block sizes of a kernel that holds one block of sums and streams the blocks of the other side past it.

    **Arguments:**

    - `held`: queries where their results are summed, keys where the gradients of keys and values are. Each streamed
        block is read once per held block, so the memory's speed sets how large it has to be.
    - `streamed`: the other side. A tile of scores is `held x streamed` in f32.
    - `vmem_bytes`: bound of the vector memory that the kernel takes; None for XLA's own limit.
    """

    held: int
    streamed: int
    vmem_bytes: int | None = None

    def fit(self, length: int, whole_words: bool = False) -> "BlockSizes":
        """Return the smallest block sizes that divide `length` into as few blocks as these do.

        With `whole_words` they are powers of two, which divide the bits of a word.
        """
        ratio, count = self.held // self.streamed, max(1, -(-length // self.held))
        streamed = -(-length // (count * ratio * LANES)) * LANES
        streamed = max(LANES, 1 << (streamed - 1).bit_length() if whole_words and streamed > 0 else streamed)
        return dataclasses.replace(self, held=streamed * ratio, streamed=streamed)


MIB = 2**20
SAFE = BlockSizes(held=512, streamed=512)  # within XLA's own limit on every TPU
# By `device_kind`: the faster the products against the memory (v6e, v7x), the more is held. MaxText and Tokamax take
# 1024 to 2048 queries, and compute on 256 to 512 keys at a time. They compile; they have not been timed.
BLOCK_SIZES: dict[str, BlockSizes] = {
    "TPU v5 lite": BlockSizes(held=1024, streamed=512, vmem_bytes=64 * MIB),
    "TPU v5": BlockSizes(held=1024, streamed=512, vmem_bytes=64 * MIB),
    "TPU v6 lite": BlockSizes(held=2048, streamed=512, vmem_bytes=64 * MIB),
    "TPU7x": BlockSizes(held=2048, streamed=512, vmem_bytes=48 * MIB),
}


def block_sizes() -> BlockSizes:
    """Return the sizes for the devices here; SAFE ones for a device that is not in the table."""
    return BLOCK_SIZES.get(device_kind(), SAFE)
