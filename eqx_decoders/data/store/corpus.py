"""A corpus as a stream of documents, and which of them are held out."""

from collections.abc import Callable, Iterable, Iterator

from eqx_decoders.data.sources.documents import Document
from eqx_decoders.data.sources.readers import ReadOptions, read_source
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.io.text.tokenizer import Tokenizer


def read_documents(
    path: Paths, *, text_field: str = "text", tokenizer: Tokenizer | None = None, flag: str = DATA
) -> Iterator[Document]:
    """Every document at `path` in a fixed order, read lazily (see `find_sources` and `read_source`).

    Raises DataError with file and line for what cannot be read.
    """
    for source in find_sources(path, flag):
        yield from read_source(source, ReadOptions(text_field, tokenizer))


def held_out_rule(documents: Iterable[Document], fraction: float) -> Callable[[Document], bool]:
    """Which documents are held out: those whose hash draws a number below `fraction`.

    Equal documents fall on the same side, so no text is in both. Where that would leave one side empty (a few
    documents only), the one with the smallest number is held out; a single document is never.
    """
    smallest, largest = 1.0, 0.0
    for draw in (document.draw() for document in documents) if fraction > 0 else ():
        smallest, largest = min(smallest, draw), max(largest, draw)
        if smallest < fraction <= largest:  # as a rule after a few documents
            break
    below, equal = held_out_draws(fraction, smallest, largest)
    return lambda one: one.draw() < below or one.draw() == equal


def held_out_draws(fraction: float, smallest: float, largest: float) -> tuple[float, float | None]:
    """Of documents whose draws are between these: held out are those that draw less than the first, or the second.

    Of a fraction of 1 that is all, also of few.
    """
    if fraction <= 0 or fraction >= 1 or smallest < fraction <= largest:
        return fraction, None
    return 0.0, None if smallest >= largest else smallest
