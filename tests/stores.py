"""What tests ask of token stores."""

import numpy as np

from eqx_decoders.data.store.store import TokenStore


def documents_of(store: TokenStore, split: str) -> np.ndarray:
    """The numbers of the documents of `split`."""
    return np.flatnonzero(store.is_held_out(0, len(store)) == (split == "held_out"))


def all_tokens(store: TokenStore) -> list[list[int]]:
    """The tokens of every document."""
    return [store[document].tolist() for document in range(len(store))]
