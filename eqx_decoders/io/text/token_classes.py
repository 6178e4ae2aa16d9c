"""Token classes of an Engram: ids whose texts differ only in case, accents and white space are one class."""

from typing import Any

from eqx_decoders.errors import missing_package
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.layers.embedding.engram import TokenClasses


def token_classes(tokenizer: JsonTokenizer) -> TokenClasses:
    """Return classes of ids whose decoded texts are equal once normalized, numbered in the order of first occurrence.

    An id that is no complete text, such as a part of a character, is classed by its name in the vocabulary.
    """
    normalize = _normalizer().normalize_str
    known: dict[str, int] = {}

    def key(index: int) -> str:
        text = tokenizer.decode([index], special=True)
        return (tokenizer.name_of(index) or text) if "\ufffd" in text else normalize(text) or text

    return TokenClasses.of([known.setdefault(key(index), len(known)) for index in range(tokenizer.vocab_size)])


def _normalizer() -> Any:
    try:
        from tokenizers import Regex, normalizers
    except ImportError as error:
        raise missing_package("tokenizers", "train") from error
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
