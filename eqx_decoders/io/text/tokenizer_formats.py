"""Other formats of tokenizers, converted to the `tokenizers` package: tekken, tiktoken, SentencePiece, vocab.json.

tekken is JSON, tiktoken has lines of base64 with a rank, and SentencePiece is a protocol buffer, which the package
sentencepiece reads (the extra of that name). `vocab.json` comes with `merges.txt`; the tokenizer's class defines how a
text is split into words. The converted tokenizers give the same ids as mistral-common, tiktoken, sentencepiece and
transformers.
"""

import base64
import dataclasses
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, check, missing_package
from eqx_decoders.io.text.published_tokenizer import PublishedTokenizer, with_published_tokens


TEKKEN = "tekken.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
FILES = (TEKKEN, "tokenizer.model", "tiktoken.model")  # in a directory without tokenizer.json
PATTERNS = (
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "tokenizer.model.v*",
    "*.model.v*",
)  # in order of preference

_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
QWEN_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
QWEN35_WORDS = QWEN_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def _cased(more: str) -> str:
    """Return the pattern of words of capital letters, then small ones, with endings; `more` narrows the letters."""
    first = rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}{more}]*{_SMALL}{more}]+{ENDINGS}?"
    return rf"{first}|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}{more}]+{_SMALL}{more}]*{ENDINGS}?|\p{{N}}{{1,3}}"


O200K_WORDS = _cased("") + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
KIMI_WORDS = r"[\p{Han}]+|" + _cased(r"&&[^\p{Han}]") + _REST
_FIM = tuple(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix"))


class Words(NamedTuple):
    """Settings that files of ranks lack: the pattern that cuts a text into words, and special tokens by name."""

    pattern: str
    special: Mapping[str, int] = {}


def _behind(first: int, names: Iterable[str]) -> dict[str, int]:
    return {name: first + number for number, name in enumerate(names)}


_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(2)),
           "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
           "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(2, 247)))  # fmt: skip
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))

# By the name of the file without its ending, or by its number of ranks.
KNOWN: dict[str | int, Words] = {
    "gpt2": Words(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "r50k_base": Words(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "p50k_base": Words(GPT2_WORDS, {"<|endoftext|>": 50256}),
    "cl100k_base": Words(CL100K_WORDS, {"<|endoftext|>": 100257, **_behind(100258, _FIM), "<|endofprompt|>": 100276}),
    "o200k_base": Words(O200K_WORDS, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "qwen": Words(QWEN_WORDS, _behind(151643, _QWEN_SPECIAL)),
    128000: Words(CL100K_WORDS, _behind(128000, _LLAMA3)),  # Llama 3's tokenizer.model
    "TikTokenTokenizer": Words(KIMI_WORDS),  # Kimi's tokenizer_class: tokenizer_config.json has its special tokens
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
    """Return the name of a tokenizer's file of these formats in a directory; None if it has none."""
    names = [*FILES, *(name for pattern in PATTERNS for name in sorted(file.name for file in folder.glob(pattern)))]
    return next((name for name in (*names, VOCAB, MERGES) if (folder / name).exists()), None)


def read_tokenizer_file(path: Path, settings: Mapping[str, Any], files: PublishedTokenizer | None = None) -> Any:
    """Read a tokenizer in the format of tekken, tiktoken, SentencePiece, or `vocab.json` with `merges.txt`.

    Raises DataError for a file in none of these formats, MissingPackage where the extra sentencepiece is needed.

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
                files = dataclasses.replace(files, settings={"tokenizer_class": "GPT2Tokenizer"})  # has no other files
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
    _add_ends(inner, files, bos_names, by_default=is_sentencepiece or path.name == TEKKEN)
    return inner


def _add_ends(inner: Any, files: PublishedTokenizer, bos_names: Sequence[str], *, by_default: bool) -> None:
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
    is_wanted = files.settings.get("add_bos_token", by_default or common is not None)
    bos = named.get("bos_token", common) if is_wanted else None
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
        check(
            (folder / name).exists(),
            f"tokenizer={str(folder)!r} has {other}, but {name} is missing: a BPE needs both. Download {name}, or "
            "tokenizer.json.",
            DataError,
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
    check(len(ranks) == len(rows), f"tekken.json of version {version} has the same bytes twice.", DataError)
    return _from_ranks(ranks, Words(config["pattern"], _behind(0, names)), shift=count)


def _tiktoken(path: Path, content: bytes, files: PublishedTokenizer) -> Any:
    pairs = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}
    keys = (path.name.partition(".")[0], len(ranks), files.settings.get("tokenizer_class"))
    words = next((KNOWN[key] for key in keys if key in KNOWN), None)
    if words is None:
        names = ", ".join(f"{key}.tiktoken" for key in KNOWN if isinstance(key, str) and key.islower())
        message = f"tokenizer={str(path)!r} has ranks alone, and not how a text is cut into words"
        raise DataError(f"{message}. Known are {names}, and the files of Llama 3 and Kimi: give a tokenizer.json.")
    taken = {token.content for token in files.added.values()}
    special = {name: index for name, index in words.special.items() if index not in files.added and name not in taken}
    special |= {token.content: index for index, token in files.added.items()}
    return _from_ranks(ranks, words._replace(special=special))


def _from_ranks(ranks: Mapping[bytes, int], words: Words, shift: int = 0) -> Any:
    """Make a byte-level BPE that merges pairs in the order of the ranks of the merged pieces."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    vocab = {spelled[piece]: rank + shift for piece, rank in ranks.items()}
    twice = next((name for name in words.special if vocab.get(name, words.special[name]) != words.special[name]), None)
    check(twice is None, f"the special token {twice!r} is a piece of text as well.", DataError)
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        parts = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [(spelled[left], spelled[right]) for _, _, left, right in sorted(parts)]
    vocab = {**vocab, **words.special}
    inner: Any = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(words.pattern), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in words.special])
    return inner


def byte_letters() -> list[str]:
    """Return the letter by which GPT-2's byte-level BPE writes each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


# --- SentencePiece ----------------------------------------------------------------------------------------------------

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"
_BREAK = "\ufdd0"  # noncharacter, which occurs in no text; separates graphemes


def _sentencepiece(content: bytes, settings: Mapping[str, Any]) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise missing_package("sentencepiece", "sentencepiece") from error
    formats: Any = sentencepiece_model_pb2  # made when it is imported, which type checkers do not see
    model = formats.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ValueError("it is none of tekken.json, a .tiktoken and a SentencePiece model") from error
    check(len(model.pieces) > 0, "a SentencePiece model without pieces is no tokenizer.", DataError)
    kind = model.trainer_spec.model_type
    spec = model.normalizer_spec
    remedy = "give a tokenizer.json, which transformers' AutoTokenizer can make of it"
    check(kind in (UNIGRAM, BPE), f"SentencePiece models of kind {kind} are not read: {remedy}.", DataError)
    for field, value, known in (
        ("normalizer_spec.escape_whitespaces", spec.escape_whitespaces, True),
        ("trainer_spec.treat_whitespace_as_suffix", model.trainer_spec.treat_whitespace_as_suffix, False),
    ):
        check(value == known, f"SentencePiece models with {field}={value} are not read: {remedy}.", DataError)
    if settings.get("add_prefix_space") is False:
        spec.add_dummy_prefix = False
    return from_pieces(model, kind == BPE, prefix_once=settings.get("legacy") is False)


def from_pieces(model: Any, is_bpe: bool, *, stripping: Collection[str] = (), prefix_once: bool = False) -> Any:
    """Make a tokenizer of the pieces of a SentencePiece model.

    **Arguments:**

    - `stripping`: special tokens that include the whitespace after them.
    - `prefix_once`: add the space of `add_dummy_prefix` only at the start of a text, and not after added tokens
        (`"legacy": false` in transformers).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces, has_bytes = model.pieces, model.trainer_spec.byte_fallback
    unknown = next(number for number, one in enumerate(pieces) if one.type == UNKNOWN)
    if is_bpe:
        vocab = {one.piece: number for number, one in enumerate(pieces)}
        check(len(vocab) == len(pieces), "a SentencePiece model has the same piece twice.", DataError)
        bpe_or_unigram = models.BPE(
            vocab, _merges(pieces), unk_token=pieces[unknown].piece, fuse_unk=True, byte_fallback=has_bytes
        )
    else:
        low = min(one.score for one in pieces) - 1e6  # no text is cut into such pieces
        scores = [(one.piece, low if one.type in (UNKNOWN, CONTROL, UNUSED, BYTE) else one.score) for one in pieces]
        bpe_or_unigram = models.Unigram(scores, unknown, has_bytes)
    inner: Any = Tokenizer(bpe_or_unigram)
    spec = model.normalizer_spec
    inner.normalizer = _normalizer(spec, prefix=spec.add_dummy_prefix and not prefix_once)
    if spec.add_dummy_prefix and prefix_once:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix)
    for one in pieces:
        if one.type in (UNKNOWN, CONTROL, USER_DEFINED):
            strips = one.piece in stripping
            token = AddedToken(one.piece, special=one.type != USER_DEFINED, normalized=False, rstrip=strips)
            (inner.add_tokens if one.type == USER_DEFINED else inner.add_special_tokens)([token])
    return inner


def _normalizer(spec: Any, prefix: bool) -> Any:
    """Make the normalizer: character rules, then `▁` for spaces.

    prefix: add `▁` before a text and after added tokens.
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
    """Make the normalizers for the character rules in a SentencePiece model.

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
    """Return the pairs that make each piece, in the order of their scores."""
    scores = {one.piece: one.score for one in pieces if one.type not in (UNKNOWN, CONTROL, BYTE)}
    numbers = {one.piece: number for number, one in enumerate(pieces)}
    merges = []
    for piece, score in scores.items():
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in scores and pair[1] in scores]
        merges += [(-score, numbers[piece], numbers[left], numbers[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]
