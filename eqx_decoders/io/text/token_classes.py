"""Token classes of an Engram layer: tokens that differ only in case, accents and whitespace have the same class."""

from typing import Any

from eqx_decoders.errors import missing_package
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.layers.embedding.engram import TokenClasses


def token_classes(tokenizer: JsonTokenizer) -> TokenClasses:
    """Return the class of each id. Ids have the same class if their decoded texts are equal after normalization.

    Classes are numbered in the order of their first ids. A token that decodes to an incomplete character is represented
    by its name in the vocabulary.
    """
    normalize = _normalizer().normalize_str
    classes: dict[str, int] = {}

    def class_key(token_id: int) -> str:
        text = tokenizer.decode([token_id], special=True)
        return (tokenizer.name_of(token_id) or text) if "\ufffd" in text else normalize(text) or text

    keys = map(class_key, range(tokenizer.vocab_size))
    return TokenClasses.of([classes.setdefault(key, len(classes)) for key in keys])


def _normalizer() -> Any:
    try:
        from tokenizers import Regex, normalizers
    except ImportError as error:
        raise missing_package("tokenizers", "train") from error
    placeholder = "\ue000"  # protects a single space from being stripped
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), placeholder),
            normalizers.Strip(),
            normalizers.Replace(placeholder, " "),
        ]
    )
