"""Other formats of tokenizers, converted to the `tokenizers` package: tekken, tiktoken, SentencePiece, vocab.json.

tekken is JSON, tiktoken has lines of base64 with a rank, and SentencePiece is a protocol buffer (extra
"sentencepiece"). `vocab.json` comes with `merges.txt`; the tokenizer's class defines how a text is split into words.
The converted tokenizers give the same ids as mistral-common, tiktoken, sentencepiece and transformers.

To add a format, extend `find_tokenizer_file` and `read_tokenizer_file`.
"""

import base64
import dataclasses
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, missing_package
from eqx_decoders.io.text.published_tokenizer import PublishedTokenizer, with_published_tokens


TEKKEN = "tekken.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
# Files in a directory without tokenizer.json, in order of preference: names, and patterns of names.
FILES = (TEKKEN, "tokenizer.model", "tiktoken.model")
PATTERNS = ("*.tiktoken", "spiece.model", "sentencepiece*.model", "tokenizer.model.v*", "*.model.v*")

_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
QWEN_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
QWEN35_WORDS = QWEN_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def _cased(more: str) -> str:
    """Return the pattern of words of uppercase letters, then lowercase letters, with endings, and of numbers.

    `more`: end of the character classes, which excludes letters.
    """
    first = rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}{more}]*{_SMALL}{more}]+{ENDINGS}?"
    return rf"{first}|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}{more}]+{_SMALL}{more}]*{ENDINGS}?|\p{{N}}{{1,3}}"


O200K_WORDS = _cased("") + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
KIMI_WORDS = r"[\p{Han}]+|" + _cased(r"&&[^\p{Han}]") + _REST
_FIM = tuple(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix"))


class TiktokenSettings(NamedTuple):
    """Settings that tiktoken files do not contain: the pattern of words, and the ids of special tokens by name."""

    pattern: str
    special: Mapping[str, int] = {}


def _numbered(first: int, names: Iterable[str]) -> dict[str, int]:
    return {name: first + number for number, name in enumerate(names)}


_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(2)),
           "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
           "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(2, 247)))  # fmt: skip
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))

# By the name of the file without its ending, by its number of ranks, or by the tokenizer's class.
KNOWN: dict[str | int, TiktokenSettings] = {
    "gpt2": TiktokenSettings(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "r50k_base": TiktokenSettings(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "p50k_base": TiktokenSettings(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "cl100k_base": TiktokenSettings(
        CL100K_WORDS, {"<|endoftext|>": 100257, **_numbered(100258, _FIM), "<|endofprompt|>": 100276}
    ),
    "o200k_base": TiktokenSettings(O200K_WORDS, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "qwen": TiktokenSettings(QWEN_WORDS, _numbered(151643, _QWEN_SPECIAL)),
    128000: TiktokenSettings(CL100K_WORDS, _numbered(128000, _LLAMA3)),  # Llama 3's tokenizer.model
    # Kimi's tokenizer_class. Its special tokens are in tokenizer_config.json.
    "TikTokenTokenizer": TiktokenSettings(KIMI_WORDS),
}
# Unicode normal form and split patterns of tokenizer classes with vocab.json and merges.txt. GPT-2's pattern is applied
# afterwards if the split patterns do not find words.
_BYTE_LEVEL: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "CodeGenTokenizer": (None, ()),
    "CohereTokenizer": ("NFC", (r"\p{N}",)),
    "GPT2Tokenizer": (None, ()),
    "GPTNeoXTokenizer": ("NFC", ()),
    "Qwen2Tokenizer": ("NFC", (QWEN_WORDS,)),
    "Qwen3_5Tokenizer": ("NFC", (QWEN35_WORDS,)),
}
_TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip


def find_tokenizer_file(folder: Path) -> str | None:
    """Return the name of the tokenizer file of these formats in a directory; None if there is none."""
    names = [*FILES, *(name for pattern in PATTERNS for name in sorted(file.name for file in folder.glob(pattern)))]
    return next((name for name in (*names, VOCAB, MERGES) if (folder / name).exists()), None)


def read_tokenizer_file(path: Path, settings: Mapping[str, Any], files: PublishedTokenizer | None = None) -> Any:
    """Read a tokenizer in the format of tekken, tiktoken, SentencePiece, or `vocab.json` with `merges.txt`.

    Raises DataError for a file in another format, and MissingPackage if the extra "sentencepiece" is not installed.

    **Arguments:**

    - `path`: path of the file; `vocab.json` and `merges.txt` must be in one directory.
    - `settings`: content of `tokenizer_config.json`.
    - `files`: small files of the tokenizer's directory; if given, they replace `settings`.
    """
    files = PublishedTokenizer(settings) if files is None else files
    content = path.read_bytes()
    is_sentencepiece = is_class = False
    try:
        if path.name in (VOCAB, MERGES):
            vocab, merges = _read_vocab_and_merges(path.parent)
            if files.class_name is None and not files.settings and "<|endoftext|>" in vocab:
                # GPT-2's tokenizer has no other files.
                files = dataclasses.replace(files, settings={"tokenizer_class": "GPT2Tokenizer"})
            inner, bos_names, is_class = _vocab_and_merges(path.parent, vocab, merges, files), (), True
        elif content[:1] == b"{":
            inner, bos_names = _tekken(json.loads(content)), ("<s>",)
        elif re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", content):
            inner, bos_names = _tiktoken(path, content, files), ("<|begin_of_text|>",)
        else:
            inner, bos_names, is_sentencepiece = _sentencepiece(content, files.settings), ("<s>", "<bos>"), True
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
        raise DataError(f"tokenizer={str(path)!r} cannot be read: {type(error).__name__}: {error}.") from error
    inner = with_published_tokens(inner, files, match_raw_text=is_sentencepiece, add_class_tokens=is_class)
    _add_bos_and_eos(inner, files, bos_names, by_default=is_sentencepiece or path.name == TEKKEN)
    return inner


def _add_bos_and_eos(inner: Any, files: PublishedTokenizer, bos_names: Sequence[str], *, by_default: bool) -> None:
    """Set a post-processor that adds bos or eos to a text, if the settings or the defaults of the format say so.

    **Arguments:**

    - `bos_names`: common names of bos in the format.
    - `by_default`: value of `add_bos_token` if it is missing and the vocabulary has none of `bos_names`; with one of
        them, bos is added.
    """
    common = next((name for name in bos_names if inner.token_to_id(name) is not None), None)
    named = {
        name: text
        for name, text in (files.class_tokens | files.named).items()
        if text is None or inner.token_to_id(text) is not None
    }
    adds_bos = files.settings.get("add_bos_token", by_default or common is not None)
    bos = named.get("bos_token", common) if adds_bos else None
    eos = named.get("eos_token") if files.settings.get("add_eos_token", False) else None
    if bos is None and eos is None:
        return
    from tokenizers import processors

    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    tokens = [(token, inner.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    inner.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=tokens
    )


def _read_vocab_and_merges(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import models

    for name, other in ((VOCAB, MERGES), (MERGES, VOCAB)):
        if not (folder / name).exists():
            raise DataError(
                f"tokenizer={str(folder)!r} has {other}, but {name} is missing: a BPE needs both. Download {name}, or "
                "tokenizer.json."
            )
    return models.BPE.read_file(str(folder / VOCAB), str(folder / MERGES))


def _vocab_and_merges(
    folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]], files: PublishedTokenizer
) -> Any:
    """Make the byte-level BPE of `vocab.json` and `merges.txt` as the tokenizer's class in transformers does."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = files.class_name
    if kind is None or kind not in _BYTE_LEVEL:
        raise DataError(
            f"tokenizer={str(folder)!r} has {VOCAB} and {MERGES}, but it is unknown how tokenizer_class={kind!r} "
            f"splits a text into words. Supported classes: {', '.join(sorted(_BYTE_LEVEL))}. Download tokenizer.json, "
            "or tokenizer_config.json (or config.json) if it is missing."
        )
    form, splits = _BYTE_LEVEL[kind]
    space = bool(files.settings.get("add_prefix_space", False))
    inner: Any = Tokenizer(models.BPE(vocab, merges))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not splits or splits == (r"\p{N}",)))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.normalizer = None if form is None else getattr(normalizers, form)()
    inner.decoder = decoders.ByteLevel()
    return inner


def _tekken(content: Any) -> Any:
    config = content["config"]
    count, version = int(config["default_num_special_tokens"]), str(config["version"])
    rows = content["vocab"][: int(config["default_vocab_size"]) - count]
    ranks = {base64.b64decode(row["token_bytes"]): number for number, row in enumerate(rows)}
    special = content.get("special_tokens")
    names = _TEKKEN if special is None else [row["token_str"] for row in sorted(special, key=lambda row: row["rank"])]
    names = [*names, *(f"<SPECIAL_{number}>" for number in range(len(names), count))]
    if len(ranks) < len(rows):
        raise DataError(f"tekken.json of version {version} has the same bytes twice. Download it again.")
    return _from_ranks(ranks, TiktokenSettings(config["pattern"], _numbered(0, names)), shift=count)


def _tiktoken(path: Path, content: bytes, files: PublishedTokenizer) -> Any:
    pairs = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}
    keys = (path.name.partition(".")[0], len(ranks), files.settings.get("tokenizer_class"))
    settings = next((KNOWN[key] for key in keys if key in KNOWN), None)
    if settings is None:
        names = ", ".join(f"{key}.tiktoken" for key in KNOWN if isinstance(key, str) and key.islower())
        raise DataError(
            f"tokenizer={str(path)!r} is unknown: a tiktoken file does not contain the pattern that splits a text into "
            f"words. Known: {names}, and the files of Llama 3 and Kimi. Give a tokenizer.json."
        )
    added_names = {token.content for token in files.added.values()}
    special = {
        name: token_id
        for name, token_id in settings.special.items()
        if token_id not in files.added and name not in added_names
    }
    special |= {token.content: token_id for token_id, token in files.added.items()}
    return _from_ranks(ranks, settings._replace(special=special))


def _from_ranks(ranks: Mapping[bytes, int], settings: TiktokenSettings, shift: int = 0) -> Any:
    """Make a byte-level BPE that merges pairs in the order of the ranks of the merged pieces.

    `shift`: id of the piece with rank 0.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = byte_characters()
    names = {piece: "".join(characters[byte] for byte in piece) for piece in ranks}
    vocab = {names[piece]: rank + shift for piece, rank in ranks.items()}
    for name, token_id in settings.special.items():
        if vocab.get(name, token_id) != token_id:
            raise DataError(f"the special token {name!r} is also a token of ordinary text. Give a tokenizer.json.")
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        splits = ((piece[:position], piece[position:]) for position in range(1, len(piece)))
        pairs = [(ranks[left], ranks[right], left, right) for left, right in splits if left in ranks and right in ranks]
        merges += [(names[left], names[right]) for _, _, left, right in sorted(pairs)]
    vocab = {**vocab, **settings.special}
    inner: Any = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(settings.pattern), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in settings.special])
    return inner


def byte_characters() -> list[str]:
    """Return the character that represents each byte in GPT-2's byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# --- SentencePiece ----------------------------------------------------------------------------------------------------

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"
_BREAK = "\ufdd0"  # separates graphemes; a Unicode noncharacter, which texts do not contain


def _sentencepiece(content: bytes, settings: Mapping[str, Any]) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise missing_package("sentencepiece", "sentencepiece") from error
    formats: Any = sentencepiece_model_pb2  # its classes are created at run time
    model = formats.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ValueError("it is neither a tekken.json, nor a .tiktoken, nor a SentencePiece model") from error
    if not model.pieces:
        raise DataError("the SentencePiece model has no pieces. Download the file again.")
    kind = model.trainer_spec.model_type
    spec = model.normalizer_spec
    if kind not in (UNIGRAM, BPE):
        raise DataError(
            f"SentencePiece models with trainer_spec.model_type={kind} are not supported: it must be {UNIGRAM} "
            f"(unigram) or {BPE} (BPE). Convert the model to tokenizer.json with AutoTokenizer of transformers."
        )
    for field, value, supported in (
        ("normalizer_spec.escape_whitespaces", spec.escape_whitespaces, True),
        ("trainer_spec.treat_whitespace_as_suffix", model.trainer_spec.treat_whitespace_as_suffix, False),
    ):
        if value != supported:
            raise DataError(
                f"SentencePiece models with {field}={value} are not supported. Convert the model to tokenizer.json "
                "with AutoTokenizer of transformers."
            )
    if settings.get("add_prefix_space") is False:
        spec.add_dummy_prefix = False
    return from_pieces(model, kind == BPE, prefix_once=settings.get("legacy") is False)


def from_pieces(model: Any, is_bpe: bool, *, stripping: Collection[str] = (), prefix_once: bool = False) -> Any:
    """Return a tokenizer with the pieces of a SentencePiece model.

    **Arguments:**

    - `model`: a SentencePiece `ModelProto`, or an object with the same fields.
    - `is_bpe`: whether it is a BPE model; otherwise it is a unigram model.
    - `stripping`: special tokens that include the whitespace after them.
    - `prefix_once`: add the space of `add_dummy_prefix` only at the start of a text, and not after added tokens
        (`"legacy": false` in transformers).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = model.pieces
    has_bytes = model.trainer_spec.byte_fallback
    unknown = next(index for index, piece in enumerate(pieces) if piece.type == UNKNOWN)
    if is_bpe:
        vocab = {piece.piece: index for index, piece in enumerate(pieces)}
        if len(vocab) < len(pieces):
            raise DataError("the SentencePiece model has the same piece twice. Download the file again.")
        bpe_or_unigram = models.BPE(
            vocab, _merges(pieces), unk_token=pieces[unknown].piece, fuse_unk=True, byte_fallback=has_bytes
        )
    else:
        excluded = (UNKNOWN, CONTROL, UNUSED, BYTE)
        low = min(piece.score for piece in pieces) - 1e6  # so that no text is split into excluded pieces
        scores = [(piece.piece, low if piece.type in excluded else piece.score) for piece in pieces]
        bpe_or_unigram = models.Unigram(scores, unknown, has_bytes)
    inner: Any = Tokenizer(bpe_or_unigram)
    spec = model.normalizer_spec
    inner.normalizer = _normalizer(spec, prefix=spec.add_dummy_prefix and not prefix_once)
    if spec.add_dummy_prefix and prefix_once:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix)
    for piece in pieces:
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED):
            is_special = piece.type != USER_DEFINED
            strips = piece.piece in stripping
            token = AddedToken(piece.piece, special=is_special, normalized=False, rstrip=strips)
            (inner.add_special_tokens if is_special else inner.add_tokens)([token])
    return inner


def _normalizer(spec: Any, prefix: bool) -> Any:
    """Return the normalizer: it applies the character rules, and replaces spaces by `▁`.

    `prefix`: whether to add `▁` before a text and after added tokens.
    """
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if getattr(spec, "precompiled_charsmap", b""):
        steps += _charsmap(bytes(spec.precompiled_charsmap), composes="nfkc" in spec.name)
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] * prefix
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _charsmap(content: bytes, composes: bool) -> list[Any]:
    """Return the normalizers for the character rules of a SentencePiece model.

    SentencePiece applies a rule to the longest match of characters. `Precompiled` replaces a complete grapheme by the
    rule of its first characters and drops the other characters, such as the line feed in CR LF, or accents without a
    composed form. Therefore every character is made a separate grapheme. NFKC's compositions are made before and after
    the character rules.
    """
    from tokenizers import Regex, normalizers

    later_in_grapheme = Regex("(?<=[\\s\\S])(?=[\\p{M}\n\u200d\uff9e\uff9f\u1160-\u11ff])")
    single: list[Any] = [
        normalizers.Replace(later_in_grapheme, _BREAK),
        normalizers.Precompiled(content),
        normalizers.Replace(_BREAK, ""),
    ]
    if not composes:
        return single
    pairs = [chr(letter) + mark for letter in range(0x30A1, 0x30FB) for mark in "\u3099\u309a"]  # of half-width kana
    composed = {pair: unicodedata.normalize("NFC", pair) for pair in pairs}
    kana = [normalizers.Replace(pair, text) for pair, text in composed.items() if len(text) == 1]
    return [normalizers.NFC(), *single, *kana]


def _merges(pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, in the order of the scores of the formed pieces."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type not in (UNKNOWN, CONTROL, BYTE)}
    ids = {piece.piece: index for index, piece in enumerate(pieces)}
    merges = []
    for text, score in scores.items():
        splits = ((text[:position], text[position:]) for position in range(1, len(text)))
        pairs = [pair for pair in splits if pair[0] in scores and pair[1] in scores]
        merges += [(-score, ids[text], ids[left], ids[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]
