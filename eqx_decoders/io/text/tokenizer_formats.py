"""Other formats of tokenizers, converted to the `tokenizers` package: tekken, tiktoken, SentencePiece.

All three are data: JSON, lines of base64 with a rank, and a protocol buffer, which the package sentencepiece reads (the
extra of that name). The converted tokenizers give the same ids as mistral-common, tiktoken and sentencepiece.
"""

import base64
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, check, need_extra


TEKKEN = "tekken.json"
FILES = (TEKKEN, "tokenizer.model", "tiktoken.model")  # in a directory without tokenizer.json, and *.tiktoken

_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
QWEN_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"


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
_TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip


def find_tokenizer_file(folder: Path) -> str | None:
    """Return the name of a tokenizer's file of these formats in a directory; None if it has none."""
    names = [*FILES, *sorted(file.name for file in folder.glob("*.tiktoken"))]
    return next((name for name in names if (folder / name).exists()), None)


def read_tokenizer_file(path: Path, settings: Mapping[str, Any]) -> Any:
    """Read a tokenizer of tekken, tiktoken or SentencePiece; `settings` is the content of tokenizer_config.json.

    Raises DataError for a file in none of these formats, MissingPackage where the extra sentencepiece is needed.
    """
    content = path.read_bytes()
    try:
        if content[:1] == b"{":
            inner, begins = _tekken(json.loads(content)), ("<s>",)
        elif re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", content):
            inner, begins = _tiktoken(path, content, settings), ("<|begin_of_text|>",)
        else:
            inner, begins = _sentencepiece(content), ("<s>", "<bos>")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
        raise DataError(f"tokenizer={str(path)!r} cannot be read: {type(error).__name__}: {error}.") from error
    first = next((name for name in begins if inner.token_to_id(name) is not None), None)
    if first is not None and settings.get("add_bos_token", True):
        from tokenizers import processors

        token = (first, inner.token_to_id(first))
        inner.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[token]
        )
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


def _tiktoken(path: Path, content: bytes, settings: Mapping[str, Any]) -> Any:
    pairs = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}
    keys = (path.name.partition(".")[0], len(ranks), settings.get("tokenizer_class"))
    words = next((KNOWN[key] for key in keys if key in KNOWN), None)
    if words is None:
        names = ", ".join(f"{key}.tiktoken" for key in KNOWN if isinstance(key, str) and key.islower())
        message = f"tokenizer={str(path)!r} has ranks alone, and not how a text is cut into words"
        raise DataError(f"{message}. Known are {names}, and the files of Llama 3 and Kimi: give a tokenizer.json.")
    added = settings.get("added_tokens_decoder") or {}
    special = {**words.special, **{row["content"]: int(number) for number, row in added.items()}}
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

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # kinds of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"


def _sentencepiece(content: bytes) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise need_extra("sentencepiece", "sentencepiece") from error
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
    plain = not spec.precompiled_charsmap and spec.escape_whitespaces
    plain = plain and not model.trainer_spec.treat_whitespace_as_suffix
    check(plain, f"SentencePiece models that change letters ({spec.name}) are not read: {remedy}.", DataError)
    return from_pieces(model, kind == BPE)


def from_pieces(model: Any, is_bpe: bool, *, stripping: Collection[str] = ()) -> Any:
    """Make a tokenizer of the pieces of a SentencePiece model.

    stripping: special tokens that take the blanks behind them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

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
        scores = [(one.piece, low if one.type in (UNKNOWN, CONTROL, BYTE) else one.score) for one in pieces]
        bpe_or_unigram = models.Unigram(scores, unknown, has_bytes)
    inner: Any = Tokenizer(bpe_or_unigram)
    spec = model.normalizer_spec
    inner.normalizer = _normalizer(spec)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix)
    for one in pieces:
        if one.type in (UNKNOWN, CONTROL, USER_DEFINED):
            strips = one.piece in stripping
            token = AddedToken(one.piece, special=one.type != USER_DEFINED, normalized=False, rstrip=strips)
            (inner.add_tokens if one.type == USER_DEFINED else inner.add_special_tokens)([token])
    return inner


def _normalizer(spec: Any) -> Any:
    """Make the normalizer: blanks become letters, one more before a text and behind special tokens (transformers)."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] * spec.add_dummy_prefix
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _merges(pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """Return the pairs that make each piece, in the order of their scores."""
    scores = {one.piece: one.score for one in pieces if one.type not in (UNKNOWN, CONTROL)}
    numbers = {one.piece: number for number, one in enumerate(pieces)}
    merges = []
    for piece, score in scores.items():
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in scores and pair[1] in scores]
        merges += [(-score, numbers[piece], numbers[left], numbers[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]
