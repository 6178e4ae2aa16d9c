"""Tokenizers: bytes, any `tokenizer.json`, or a byte-pair encoding (BPE) that is trained on the run's text.

A tokenizer does not add special tokens: the token store marks the start and end of documents. By default, the name of a
special token in a text, such as `<|endoftext|>`, is encoded as ordinary text.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from eqx_decoders.errors import DataError, EqxDecodersError, check_integer, missing_package
from eqx_decoders.io.atomic_files import write_atomically, write_json
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import read_tokenizer
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.published_tokenizer import PublishedTokenizer, with_published_tokens
from eqx_decoders.io.text.special_names import SpecialNames
from eqx_decoders.io.text.tokenizer_formats import FILES, TEKKEN, VOCAB, find_tokenizer_file, read_tokenizer_file


@runtime_checkable
class _Array(Protocol):
    """Array of NumPy or JAX. JAX is not imported here, so that processes that only read texts start faster."""

    def __array__(self) -> np.ndarray: ...


Ids = Sequence[int] | _Array
Span = Sequence[int]  # start and stop of a range of characters

END_OF_TEXT = "<|endoftext|>"
MAX_FILE_BYTES = 200_000_000  # the largest published tokenizer.json has about 35 MB

# Common names of bos and eos; used if the directory of a tokenizer.json does not define these names.
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", END_OF_TEXT)
EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", END_OF_TEXT, "<|im_end|>", "<｜end▁of▁sentence｜>")


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of tokenizers for training and generation.

    All ids are below `vocab_size`. `content_hash` changes if any setting of the tokenizer changes.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def content_hash(self) -> str: ...

    def encode(self, text: str) -> Int[np.ndarray, "length"]: ...
    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def decode(self, ids: Ids) -> str: ...
    def save(self, directory: str | Path) -> None: ...


class ByteTokenizer:
    """Byte tokenizer without dependencies. Ids 0 to 255 are UTF-8 bytes; ids 256 to 258 are bos, eos and pad."""

    vocab_size: int = 259
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id: int = 258
    content_hash: str = "bytes-1"

    def encode(self, text: str) -> Int[np.ndarray, "length"]:
        """Return the bytes of the text in UTF-8."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, without special tokens. Bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(i for i in np.asarray(ids).tolist() if 0 <= i < 256).decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        """Write the files that `load_tokenizer(directory)` reads."""
        write_json(Path(directory) / "tokenizer_config.json", {"tokenizer_class": "ByteTokenizer"})


class JsonTokenizer:
    """Tokenizer of the `tokenizers` package (extra "train"), as stored in a `tokenizer.json`.

    All ids are below `vocab_size`. Ids of the model's vocabulary are below `plain_size`; added tokens may have larger
    ids.
    """

    def __init__(self, inner: Any, *, bos: str | None = None, eos: str | None = None):
        inner.no_truncation()  # some files set a limit of 512 tokens, which would silently drop text
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self._bos, self._eos = bos, eos
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.plain_size: int = max(inner.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        self.bos_id: int | None = self._id(bos)
        self.eos_id: int | None = self._id(eos)
        self.content_hash: str = hashlib.blake2b(
            json.dumps([inner.to_str(), bos, eos]).encode(), digest_size=16
        ).hexdigest()

    def _id(self, token: str | None) -> int | None:
        if token is None:
            return None
        index = self._inner.token_to_id(token)
        if index is None:
            raise DataError(
                f"the special token {token!r} is not in the vocabulary of tokenizer.json. Correct the name, or add the "
                "token to the tokenizer."
            )
        return index

    @functools.cached_property
    def special_names(self) -> tuple[str, ...]:
        """Names of the special tokens, which `encode(text, special=True)` finds in a text."""
        added = self._inner.get_added_tokens_decoder().values()
        return tuple(sorted(token.content for token in added if token.special and token.content))

    @functools.cached_property
    def special_ids(self) -> Mapping[int, str]:
        """Names of special tokens by id."""
        added = self._inner.get_added_tokens_decoder()
        return {index: token.content for index, token in added.items() if token.special and token.content}

    @functools.cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that the post-processor in tokenizer.json adds before a text: usually bos, or nothing."""
        text_ids = self.encode("a", special=True).tolist()
        ids = self.encode_prompt("a").tolist()
        starts = range(len(ids) - len(text_ids) + 1)
        start = next((start for start in starts if ids[start : start + len(text_ids)] == text_ids), 0)
        return tuple(ids[:start])

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of all added tokens, special or not, which are found in a text before it is pre-tokenized."""
        return frozenset(self._inner.get_added_tokens_decoder())

    @functools.cached_property
    def renamed(self) -> "RenamedTokens":
        """Tokenizer for texts in which some names of special tokens are ordinary text."""
        return RenamedTokens(self._inner.to_str(), self.special_names)

    def encode(self, text: str, *, special: bool = False, literal: Sequence[Span] = ()) -> Int[np.ndarray, "length"]:
        """Return the ids of a text.

        **Arguments:**

        - `text`: the text.
        - `special`: whether names of special tokens, as chat templates write them, become special tokens.
        - `literal`: spans of the text in which names of special tokens remain ordinary text.
        """
        return self._encode(text, literal, special=special, add=False)

    def encode_prompt(self, text: str, *, literal: Sequence[Span] = ()) -> Int[np.ndarray, "length"]:
        """Return the ids of a prompt, like `tokenizer(text)` in transformers.

        Names of special tokens become special tokens, except in the spans `literal`. The post-processor in
        tokenizer.json may add others, such as bos at the start.
        """
        return self._encode(text, literal, special=True, add=True)

    def _encode(self, text: str, literal: Sequence[Span], *, special: bool, add: bool) -> Int[np.ndarray, "length"]:
        _utf8(text)
        if special and len(literal) > 0:
            renamed = self.renamed
            (encoding,) = renamed.inner.encode_batch_fast([renamed.text(text, literal)], add_special_tokens=add)
            return np.asarray(encoding.ids, np.int32)
        self._inner.encode_special_tokens = not special
        try:
            # Unlike `encode`, this releases Python's global interpreter lock.
            (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add)
            return np.asarray(encoding.ids, np.int32)
        finally:
            self._inner.encode_special_tokens = True

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text. Uses all cores."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encodings(self, texts: Sequence[str], literal: Sequence[Sequence[Span]]) -> list[Any]:
        """Return the `tokenizers.Encoding` of each text, encoded with `special=True`. Uses all cores.

        `literal`: spans of each text in which names of special tokens remain ordinary text.
        """
        self._inner.encode_special_tokens = False
        try:
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        for number, (text, names) in enumerate(zip(texts, literal, strict=True)):
            if len(names) > 0:
                encodings[number] = self.renamed.inner.encode(self.renamed.text(text, names), add_special_tokens=False)
        return encodings

    def decode(self, ids: Ids, *, special: bool = False) -> str:
        """Return the text of ids. Special tokens are omitted, or with `special` written as their names."""
        return self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=not special)

    def name_of(self, index: int) -> str | None:
        """Return the name of an id in the vocabulary; None if the id has no name."""
        return self._inner.id_to_token(index)

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`."""
        return self._inner.to_str()

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": self._bos, "eos_token": self._eos}
        write_json(Path(directory) / "tokenizer_config.json", config)
        write_atomically(Path(directory) / "tokenizer.json", self._inner.to_str(pretty=True).encode())


def decode(tokenizer: Tokenizer, ids: Ids, *, special: bool = False) -> str:
    """Return the text of ids; with `special`, special tokens are written as their names."""
    if special and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.decode(ids, special=True)
    return tokenizer.decode(ids)


def start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that are added before a text, in training and at inference: usually bos, or nothing."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.start_ids
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)


def prompt_ids(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, "length"]:
    """Return the ids of a text to be continued. Names of special tokens become special tokens.

    `start_ids` are added unless the text already starts with them.
    """
    ids = tokenizer.encode(text, special=True) if isinstance(tokenizer, JsonTokenizer) else tokenizer.encode(text)
    start = start_ids(tokenizer)
    return np.asarray([*(() if tuple(ids[: len(start)].tolist()) == start else start), *ids.tolist()], np.int32)


def with_special_tokens_as_text(template: ChatTemplate | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template such that names of special tokens in messages remain text (see `ChatTemplate.literal`)."""
    if template is None or not isinstance(tokenizer, JsonTokenizer):
        return template
    return dataclasses.replace(template, literal=tokenizer.special_names)


class RenamedTokens:
    """Tokenizer with the same ids, in which the special tokens `names` have random names of the same lengths.

    The original names are ordinary text for this tokenizer.
    """

    def __init__(self, source: str, names: Sequence[str]):
        from tokenizers import Tokenizer as Inner

        self._names = SpecialNames(names)
        random = secrets.SystemRandom()
        self._renamed = {name: "".join(chr(random.randrange(0xF0000, 0xFFFFE)) for _ in name) for name in names}
        content = json.loads(source)
        for token in content["added_tokens"]:
            if token["content"] in self._renamed:
                token["content"] = self._renamed[token["content"]]
                token["special"] = True
        model = content["model"]
        vocab = model["vocab"]  # also contains special tokens, which Unigram would find in ordinary text
        if isinstance(vocab, dict):
            model["vocab"] = {self._renamed.get(piece, piece): index for piece, index in vocab.items()}
        else:
            model["vocab"] = [[self._renamed.get(piece, piece), score] for piece, score in vocab]
        if model.get("unk_token") in self._renamed:
            model["unk_token"] = self._renamed[model["unk_token"]]
        self.inner: Any = Inner.from_str(json.dumps(content, ensure_ascii=False))
        self.inner.no_truncation()
        self.inner.no_padding()

    def text(self, text: str, literal: Sequence[Span]) -> str:
        """Return the text with renamed special tokens, except in the spans `literal`. Its length does not change."""
        return _replaced(text, self._names.spans(hidden(text, literal)), self._renamed.__getitem__)


def hidden(text: str, spans: Iterable[Span]) -> str:
    """Return the text with each character of the spans replaced by a null character, so that names are not found."""
    return _replaced(text, spans, lambda span: "\0" * len(span))


def _replaced(text: str, spans: Iterable[Span], replacement: Callable[[str], str]) -> str:
    """Replace the spans of a text, which are in ascending order, by the results of `replacement`."""
    pieces: list[str] = []
    end = 0
    for start, stop in spans:
        pieces += text[end:start], replacement(text[start:stop])
        end = stop
    return "".join([*pieces, text[end:]])


def token_mask(encoding: Any, spans: Sequence[Span]) -> np.ndarray:
    """Return the mask of the tokens of a `tokenizers.Encoding` that have characters in the spans."""
    mask = np.zeros(len(encoding.ids), bool)
    for start, stop in spans:
        tokens = (encoding.char_to_token(index) for index in range(start, stop))
        first = next((token for token in tokens if token is not None), None)  # some characters belong to no token
        tokens = (encoding.char_to_token(index) for index in reversed(range(start, stop)))
        if first is not None:
            mask[first : next(token for token in tokens if token is not None) + 1] = True
    return mask


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> JsonTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016) with the byte alphabet and the word pattern of GPT-2.

    All 256 bytes are tokens, so decoding returns the exact text. The only special token, `<|endoftext|>`, is both bos
    and eos. The same texts in the same order give the same tokenizer.

    **Arguments:**

    - `texts`: the training documents, without held-out documents.
    - `vocab_size`: maximum number of ids, at least 257.
    - `min_frequency`: minimum number of occurrences of a pair that becomes a token.
    """
    check_integer("vocab_size", vocab_size, 257)
    try:
        from tokenizers import Tokenizer as Inner, decoders, models, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise missing_package("tokenizers", "train") from error
    inner: Any = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    start = (END_OF_TEXT, inner.token_to_id(END_OF_TEXT))
    inner.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[start])
    return JsonTokenizer(inner, bos=END_OF_TEXT, eos=END_OF_TEXT)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load a tokenizer.

    As in transformers, added and special tokens are read from `tokenizer_config.json`, `special_tokens_map.json` and
    `added_tokens.json` in the directory. Raises DataError for malformed files, and ConversionError for links to files
    outside of the directory.

    `spec`: "bytes"; a directory; or a file: `tokenizer.json`, `tekken.json`, `.tiktoken`, `tokenizer.model` (extra
    "sentencepiece"), `vocab.json` with `merges.txt`, or a GGUF file (extra "gguf").
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if not path.exists():
        raise DataError(
            f"tokenizer={str(spec)!r} does not exist. Give 'bytes', a tokenizer.json or a directory with a tokenizer."
        )
    if is_gguf(path):
        return _gguf_tokenizer(path)
    folder = Directory(path if path.is_dir() else path.parent)
    files = PublishedTokenizer.read(folder)
    if path.is_dir():
        if files.settings.get("tokenizer_class") == "ByteTokenizer":
            return ByteTokenizer()
        name = "tokenizer.json" if folder.has("tokenizer.json") else find_tokenizer_file(folder.path)
        if name is None:
            raise DataError(
                f"tokenizer={str(spec)!r} contains none of the files tokenizer.json, {', '.join(FILES)}, *.tiktoken, "
                "and vocab.json with merges.txt. Download one of them, or give another tokenizer."
            )
        path = folder.file(name)
    return _load_json_tokenizer(path, files)


def _gguf_tokenizer(path: Path) -> JsonTokenizer:
    with _as_data_error(path):
        inner, settings = read_tokenizer(path)
    return JsonTokenizer(inner, bos=settings["bos_token"], eos=settings["eos_token"])


def _load_json_tokenizer(path: Path, files: PublishedTokenizer) -> JsonTokenizer:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as error:
        raise missing_package("tokenizers", "train") from error
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise DataError(f"tokenizer={str(path)!r} has {size:,} bytes, but must have at most {MAX_FILE_BYTES:,} bytes.")
    with _as_data_error(path):
        if path.suffix == ".json" and path.name not in (TEKKEN, VOCAB):
            inner = with_published_tokens(Inner.from_str(path.read_text("utf-8")), files)
        else:
            inner = read_tokenizer_file(path, files.settings, files)
        inner.encode("a", add_special_tokens=True)  # raises the errors of a post-processor with unknown tokens
    return JsonTokenizer(
        inner,
        bos=_special(files, "bos_token", BOS_NAMES, inner.token_to_id),
        eos=_special(files, "eos_token", EOS_NAMES, inner.token_to_id),
    )


@contextlib.contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # The package raises Exception, and PanicException, which is not a subclass of Exception.
        is_from_package = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, EqxDecodersError) or not is_from_package:
            raise
        raise DataError(
            f"tokenizer={str(path)!r} cannot be read by the package tokenizers: {str(error)[:200]}. Download it again."
        ) from error


def _special(
    files: PublishedTokenizer, field: str, names: Sequence[str], find: Callable[[str], int | None]
) -> str | None:
    """Return a named special token: from the files, else from the tokenizer's class, else the first common name.

    Returns None if the files or the class say that there is no such token, or if no common name is in the vocabulary.
    """
    if field in files.named:
        token = files.named[field]
        if token is not None and find(token) is None:
            raise DataError(
                f"{field}={token!r} is not in the vocabulary, and no file gives its id. Download added_tokens.json, or "
                "a tokenizer_config.json with added_tokens_decoder, from the tokenizer's repository."
            )
        return token
    default = files.class_tokens.get(field, "")
    if default is None or (default and find(default) is not None):
        return default
    return next((name for name in names if find(name) is not None), None)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has a lone surrogate at character {error.start}, so it is not valid Unicode. Remove it."
        ) from error
