"""Tokenizers and chat templates in the metadata of GGUF files, for the `tokenizers` package.

llama.cpp knows the words of a byte-level BPE by the name of a pre-tokenizer: the patterns are those of the published
`tokenizer.json` files. Pieces of SentencePiece have scores, which tell the order of merges.
"""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, check, need_extra
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.gguf.gguf_header import read_gguf
from eqx_decoders.io.text import tokenizer_formats as formats


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEYS = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NAME = "general.name"
NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}  # special tokens of Phi-3 that leave the blanks behind them

# Names of ids in the metadata, and transformers' names.
IDS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Names of tokens that end a turn, or a message to a tool, whether or not a file has their ids.
TURNS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>")
MESSAGES = ("<|eom_id|>", "<|call|>", "<|calls|>", "<|flush|>")


class PreTokenizer(NamedTuple):
    """How a text is cut into words.

    - `patterns`: of words, each of which cuts what the one before it leaves.
    - `whole_words`: whether words that are pieces are not merged from their letters.
    - `begins`: whether a text begins with `bos` where the file does not say it.
    - `form`: Unicode's normal form of texts.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    form: str | None = None


_GPT2, _CL100K, _QWEN, _O200K = formats.GPT2_WORDS, formats.CL100K_WORDS, formats.QWEN_WORDS, formats.O200K_WORDS
_TEKKEN = _O200K.replace(formats.ENDINGS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_DIGITS = (r"\p{N}", _GPT2)
_LLAMA3 = PreTokenizer((_CL100K,), whole_words=True, begins=True)

_BY_WORDS: dict[str, PreTokenizer] = {
    "gpt-2 phi-2 mpt olmo exaone4 trillion gigachat mellum jais": PreTokenizer((_GPT2,)),
    "smollm command-r starcoder refact codeshell exaone minerva-7b": PreTokenizer(_DIGITS),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2": _LLAMA3,
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_CL100K,)),
    "glm4": PreTokenizer((_CL100K,), whole_words=True),
    "qwen2 deepseek-r1-qwen megrez": PreTokenizer((_QWEN,), form="NFC"),
    "stablelm2 hunyuan solar-open": PreTokenizer((_QWEN,)),
    "gpt-4o llama4": PreTokenizer((_O200K,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, begins=True),
    "deepseek-v3 hunyuan-dense": PreTokenizer(_DEEPSEEK),
}
PRE_TOKENIZERS = {word: row for words, row in _BY_WORDS.items() for word in words.split()}


def read_tokenizer(path: str | Path) -> tuple[Any, dict[str, Any]]:
    """Read the tokenizer of a GGUF file, and the content of a `tokenizer_config.json`. Raises DataError."""
    return make_tokenizer(read_gguf(path).metadata)


def make_tokenizer(metadata: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the tokenizer that metadata describe, and the content of a `tokenizer_config.json`. Raises DataError."""
    settings, kind = tokenizer_settings(metadata), metadata.get(KEYS + "model")
    if kind not in ("gpt2", "llama"):
        rule = "must be gpt2 or llama. Give another tokenizer"
        raise DataError(f"{KEYS}model={str(kind)[:40]!r} is not read: {rule}.")
    inner = _byte_level(metadata) if kind == "gpt2" else _pieces(metadata)
    _add_ends(inner, settings)
    return inner, settings


def write_tokenizer(path: str | Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, and the ids that end a text, as the files of a directory.

    Nothing where it has none.
    """
    metadata = read_gguf(path).metadata
    if KEYS + "tokens" not in metadata:
        return
    inner, settings = make_tokenizer(metadata)
    write_json(folder / "generation_config.json", token_ids(metadata) | {"eos_token_id": stop_ids(metadata)})
    inner.save(str(folder / "tokenizer.json"))
    named = {name: value for name, value in settings.items() if value not in (None, [])}
    write_json(folder / "tokenizer_config.json", named)


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`: special tokens by name, and the chat template."""
    tokens = _strings(metadata, "tokens")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, ours in IDS.items():
        index = _index(metadata, name)
        settings[ours] = tokens[index] if index is not None and index < len(tokens) else None
    pre = PRE_TOKENIZERS.get(str(metadata.get(KEYS + "pre")), PreTokenizer(()))
    begins = pre.begins or metadata.get(KEYS + "model") == "llama"
    settings["add_bos_token"] = bool(metadata.get(KEYS + "add_bos_token", begins))
    settings["add_eos_token"] = bool(metadata.get(KEYS + "add_eos_token", False))
    templates = {"default": metadata.get(TEMPLATE)}
    names = metadata.get(f"{TEMPLATE}s", [])
    templates |= {str(name): metadata.get(f"{TEMPLATE}.{name}") for name in (names if isinstance(names, list) else [])}
    rows = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    settings["chat_template"] = rows
    return settings


def token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids in a `config.json`."""
    ours = {name: f"{word}_id" for name, word in IDS.items()}
    found = {ours[name]: _index(metadata, name) for name in IDS}
    return {name: index for name, index in found.items() if index is not None}


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text: of its end, of a turn's and of a message's."""
    found = {index for name in _ENDS if (index := _index(metadata, name)) is not None}
    kinds = metadata.get(KEYS + "token_type")
    ids = {token: index for index, token in enumerate(_strings(metadata, "tokens"))}
    places = (ids[name] for name in (*TURNS, *MESSAGES) if name in ids)
    found |= {at for at in places if isinstance(kinds, list) and len(kinds) > at and kinds[at] == CONTROL}
    if ids.keys() & {"<|call|>", "<|calls|>"} and ids.keys() & {"<|return|>", "<|flush|>"}:
        found -= {ids.get("<|end|>")}  # ends a message of a turn that goes on, as in llama.cpp
    return sorted(found)


def _index(metadata: Mapping[str, Any], name: str) -> int | None:
    index = metadata.get(KEYS + name)
    return index if type(index) is int and 0 <= index < 2**31 else None


def _strings(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    values = metadata.get(KEYS + name, [])
    valid = isinstance(values, list) and all(isinstance(value, str) for value in values)
    check(valid, f"{KEYS}{name} must be a list of texts.", DataError)
    return values


def _numbers(metadata: Mapping[str, Any], name: str, count: int, default: Any) -> Sequence[Any]:
    values = metadata.get(KEYS + name, [default] * count)
    valid = isinstance(values, list) and len(values) == count and not any(isinstance(each, str) for each in values)
    check(valid, f"{KEYS}{name} must be a list of {count} numbers, one for each token.", DataError)
    return values


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    """Return all pieces, which must be different, and their kinds."""
    tokens = _strings(metadata, "tokens")
    check(len(tokens) > 0, f"{KEYS}tokens is missing: the file has no tokenizer. Give another one.", DataError)
    twice = len(set(tokens)) < len(tokens)
    check(not twice, f"{KEYS}tokens has the same piece twice: give another tokenizer.", DataError)
    return tokens, _numbers(metadata, "token_type", len(tokens), NORMAL)


def is_phi3(name: str) -> bool:
    """Return whether a model of this name is one of Phi-3 for llama.cpp."""
    return "phi-3" in name.lower() or "phi3" in name.lower()


def _stripping(metadata: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that take the blanks behind them: llama.cpp knows Phi-3's by the model's name."""
    if not is_phi3(str(metadata.get(NAME))):
        return set()
    pairs = zip(*_vocabulary(metadata), strict=True)
    special = {token for token, kind in pairs if kind in (CONTROL, UNKNOWN, USER_DEFINED)}
    return special - NOT_STRIPPING


def _byte_level(metadata: Mapping[str, Any]) -> Any:
    """Make a byte-level BPE."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise need_extra("tokenizers", "hf") from error
    name = metadata.get(KEYS + "pre")
    if name not in PRE_TOKENIZERS:
        known = f"Known: {', '.join(PRE_TOKENIZERS)}. Give another tokenizer"
        raise DataError(f"{KEYS}pre={str(name)[:40]!r} does not say how a text is cut into words. {known}.")
    pre = PRE_TOKENIZERS[name]
    tokens, kinds = _vocabulary(metadata)
    merges = [merge.split(" ") for merge in _strings(metadata, "merges")]
    check(all(len(pair) == 2 for pair in merges), f"{KEYS}merges must be pairs with a blank in between.", DataError)
    pairs = [(pair[0], pair[1]) for pair in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    inner: Any = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if pre.form is not None:
        inner.normalizer = getattr(normalizers, pre.form)()
    inner.decoder = decoders.ByteLevel()
    stripping = _stripping(metadata)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            strips = token in stripping
            special = AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=strips)
            (inner.add_special_tokens if special.special else inner.add_tokens)([special])
    return inner


def _pieces(metadata: Mapping[str, Any]) -> Any:
    """Make a BPE of SentencePiece."""
    try:
        import tokenizers  # noqa: F401 - an error that names the extra
    except ImportError as error:
        raise need_extra("tokenizers", "hf") from error
    tokens, kinds = _vocabulary(metadata)
    scores = _numbers(metadata, "scores", len(tokens), 0.0)
    rows = zip(tokens, scores, kinds, strict=True)
    pieces = [types.SimpleNamespace(piece=piece, score=score, type=kind) for piece, score, kind in rows]
    check(UNKNOWN in kinds, f"{KEYS}token_type has no unknown token (2): give another tokenizer.", DataError)
    spec = types.SimpleNamespace(
        add_dummy_prefix=bool(metadata.get(KEYS + "add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get(KEYS + "remove_extra_whitespaces", False)),
    )
    trainer = types.SimpleNamespace(byte_fallback=BYTE in kinds)
    model = types.SimpleNamespace(pieces=pieces, normalizer_spec=spec, trainer_spec=trainer)
    return formats.from_pieces(model, is_bpe=True, stripping=_stripping(metadata))


def _add_ends(inner: Any, settings: Mapping[str, Any]) -> None:
    """Let texts begin and end as the file says."""
    from tokenizers import processors

    bos = settings["bos_token"] if settings["add_bos_token"] else None
    eos = settings["eos_token"] if settings["add_eos_token"] else None
    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        return
    form = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    inner.post_processor = processors.TemplateProcessing(
        single=form,
        pair=[*form, *(part.replace("$A", "$B") for part in form)],
        special_tokens=[(token, inner.token_to_id(token)) for token in dict.fromkeys(tokens)],
    )
