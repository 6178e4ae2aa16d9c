"""Which token ids an Engram takes for the same: those whose texts differ only in case, accents and white space."""

from typing import Any

from eqx_decoders.errors import need_extra
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.layers.embedding.engram import TokenClasses


def token_classes(tokenizer: JsonTokenizer) -> TokenClasses:
    """Equal classes for ids whose decoded texts are equal once normalised, in the order in which they come first.

    An id that is no whole text, such as a part of a character, counts by its name in the vocabulary.
    """
    normalise = _normaliser().normalize_str
    known: dict[str, int] = {}

    def key(index: int) -> str:
        text = tokenizer.decode([index], special=True)
        return (tokenizer.name_of(index) or text) if "\ufffd" in text else normalise(text) or text

    return TokenClasses.of([known.setdefault(key(index), len(known)) for index in range(tokenizer.vocab_size)])


def _normaliser() -> Any:
    try:
        from tokenizers import Regex, normalizers
    except ImportError as error:
        raise need_extra("tokenizers", "train") from error
    blank = "\ue000"  # keeps a single space from being stripped
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), blank),
            normalizers.Strip(),
            normalizers.Replace(blank, " "),
        ]
    )
