"""What tests ask of token stores."""

import numpy as np


def documents(store, split: str) -> np.ndarray:
    """The numbers of the documents of `split`."""
    return np.flatnonzero(store.is_held_out(0, len(store)) == (split == "held_out"))
