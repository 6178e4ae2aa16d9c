"""Tile sizes of the Pallas flash attention kernel for each TPU generation."""

import dataclasses

from eqx_decoders.sharding.chips import LANES, device_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSizes:
    """Tile sizes of a kernel that keeps one tile with its sums in VMEM and streams the tiles of the other side past it.

    **Arguments:**

    - `held`: size of the resident tile: queries in the forward pass and for the gradients of queries, keys for the
        gradients of keys and values. Each streamed tile is read once per resident tile, so the resident tile must be
        large enough for the memory bandwidth.
    - `streamed`: size of the streamed tiles of the other side. A tile of scores is `held x streamed` in float32.
    - `vmem_bytes`: limit of the kernel's VMEM; None for XLA's default limit.
    """

    held: int
    streamed: int
    vmem_bytes: int | None = None

    def fit(self, length: int, whole_words: bool = False) -> "TileSizes":
        """Return the smallest tile sizes that need no more tiles for `length` than these sizes.

        With `whole_words` the streamed size is a power of two, so that it divides the packed bits of a selection.
        """
        ratio, count = self.held // self.streamed, max(1, -(-length // self.held))
        streamed = -(-length // (count * ratio * LANES)) * LANES
        streamed = max(LANES, 1 << (streamed - 1).bit_length() if whole_words and streamed > 0 else streamed)
        return dataclasses.replace(self, held=streamed * ratio, streamed=streamed)


MIB = 2**20
SAFE = TileSizes(held=512, streamed=512)  # within XLA's default VMEM limit on every TPU
# By `device_kind`: devices with more FLOPs per byte of bandwidth (v6e, v7x) have larger resident tiles. MaxText and
# Tokamax use 1024 to 2048 queries and 256 to 512 keys. These sizes compile; they have not been timed.
TILE_SIZES: dict[str, TileSizes] = {
    "TPU v5 lite": TileSizes(held=1024, streamed=512, vmem_bytes=64 * MIB),
    "TPU v5": TileSizes(held=1024, streamed=512, vmem_bytes=64 * MIB),
    "TPU v6 lite": TileSizes(held=2048, streamed=512, vmem_bytes=64 * MIB),
    "TPU7x": TileSizes(held=2048, streamed=512, vmem_bytes=48 * MIB),
}


def tile_sizes() -> TileSizes:
    """Return the tile sizes for the current devices; SAFE for a device that is not in TILE_SIZES."""
    return TILE_SIZES.get(device_kind(), SAFE)
