"""Corpus as a stream of documents, and the rule by which some of them are held out."""

from collections.abc import Callable, Iterable, Iterator

from eqx_decoders.data.sources.documents import Document, ReadReport
from eqx_decoders.data.sources.readers import ReadOptions, read_source
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.io.text.tokenizer import Tokenizer


def read_documents(
    path: Paths,
    *,
    text_field: str = "text",
    tokenizer: Tokenizer | None = None,
    flag: str = DATA,
    report: ReadReport | None = None,
) -> Iterator[Document]:
    """Yield every document at `path` in a fixed order, read lazily (see `find_sources` and `read_source`).

    Raises DataError with file and line for what cannot be read.
    """
    for source in find_sources(path, flag):
        yield from read_source(source, ReadOptions(text_field, tokenizer, report=report))


def held_out_rule(documents: Iterable[Document], fraction: float) -> Callable[[Document], bool]:
    """Return the function that says whether a document is held out: its hash draws a number below `fraction`.

    Equal documents are in the same split, so no text is in both. Where that would leave one split empty (a few
    documents only), the one with the smallest number is held out; a single document is never.
    """
    smallest, largest = 1.0, 0.0
    for draw in (document.draw() for document in documents) if fraction > 0 else ():
        smallest, largest = min(smallest, draw), max(largest, draw)
        if smallest < fraction <= largest:  # as a rule after a few documents
            break
    below, equal = held_out_draws(fraction, smallest, largest)
    return lambda document: document.draw() < below or document.draw() == equal


def held_out_draws(fraction: float, smallest: float, largest: float) -> tuple[float, float | None]:
    """Return `below` and `equal`: documents are held out that draw a number below the first, or equal to the second.

    `smallest` and `largest` are the extremes of the documents' draws. A fraction of 1 holds all of them out.
    """
    if fraction <= 0 or fraction >= 1 or smallest < fraction <= largest:
        return fraction, None
    return 0.0, None if smallest >= largest else smallest
