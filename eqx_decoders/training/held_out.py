"""Held-out losses and their description."""

from collections.abc import Sequence
from typing import NamedTuple

from eqx_decoders.data.store.corpus import CorpusStats


class HeldOut(NamedTuple):
    """Held-out loss: nats per target token, target tokens, and the sum of nats.

    `acceptance`: the share of draft tokens that the head confirms, for each depth of multi-token prediction.
    """

    loss: float
    tokens: int
    nats: float
    acceptance: tuple[float, ...] = ()

    def nats_per_byte(self, count: int) -> float:
        """Return the sum per byte of the text: comparable between tokenizers, and with compressors."""
        return self.nats / max(count, 1)


def describe_held_out(name: str, result: HeldOut, counts: Sequence[CorpusStats]) -> list[str]:
    """Describe the loss of a set: per token and, where all of it was evaluated, per byte, with that of gzip."""
    what = f"held-out loss{name and f' of {name}'}"
    whole = result.tokens == sum(one.targets for one in counts)
    lines = [f"{what}: {result.loss:.4f} nats per token, of {'all' if whole else 'the first'} {result.tokens:,} tokens"]
    sizes = [one.bytes or 0 for one in counts]
    if whole and all(sizes):
        size = sum(sizes)
        lines.append(f"{what}: {result.nats_per_byte(size):.4f} nats per byte, of {size:,} bytes")
        rates = [one.gzip_nats_per_byte for one in counts]
        if None not in rates:
            rate = sum(count * (rate or 0) for count, rate in zip(sizes, rates, strict=True)) / size
            parts = [one.gzip_bytes for one in counts]
            read = sum(size if part is None else part for size, part in zip(sizes, parts, strict=True))
            text = "the same text" if read == size else f"{read:,} bytes of the same text"
            lines.append(f"gzip -9 needs{name and f' of {name}'}: {rate:.4f} nats per byte, for {text}")
    return lines
