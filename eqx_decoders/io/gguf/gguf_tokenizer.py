"""Reading of tokenizers and chat templates in the metadata of GGUF files, for the `tokenizers` package.

`tokenizer.ggml.pre` is llama.cpp's name of the pre-tokenizer of a BPE, which defines how a text is split into words.
The scores of the pieces of a SentencePiece model define the order of merges.
"""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, missing_package
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.gguf.gguf_header import read_gguf
from eqx_decoders.io.text import tokenizer_formats as formats


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEYS = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NAME = "general.name"
# Special tokens of Phi-3 that do not strip the whitespace after them, unlike its other special tokens.
NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}

# Names of token ids in the metadata, and transformers' names of the tokens.
IDS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
_STOP_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn, or a message to a tool. They stop generation, whether or not the metadata has their ids.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>")
END_OF_MESSAGE = ("<|eom_id|>", "<|call|>", "<|calls|>", "<|flush|>")


class PreTokenizer(NamedTuple):
    """Rules by which llama.cpp splits a text into words before it merges pairs.

    - `patterns`: regular expressions; each one splits the pieces that the previous one left.
    - `ignore_merges`: a word that is a token is not built from merges.
    - `add_bos`: default of `tokenizer.ggml.add_bos_token`.
    - `form`: Unicode normal form.
    - `raw`: merges apply to characters, with `▁` for spaces and byte tokens such as `<0x00>`, as in SentencePiece; else
        to bytes in GPT-2's encoding.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    form: str | None = None
    raw: bool = False


_GPT2, _CL100K, _QWEN, _O200K = formats.GPT2_WORDS, formats.CL100K_WORDS, formats.QWEN_WORDS, formats.O200K_WORDS
_TEKKEN = _O200K.replace(formats.ENDINGS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_DIGIT_TRIPLES = r"\p{N}{1,3}"
_ASCII_PUNCTUATION_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORDS = (
    _ASCII_PUNCTUATION_WORD + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (_DIGIT_TRIPLES, r"[一-龥぀-ゟ゠-ヿ]+", _MARKED_WORDS)
_DEEPSEEK_LLM_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _MARKED_WORDS,
)
_SEED_CODER = _QWEN.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    formats.ENDINGS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _CL100K.replace(
    r"|\s+(?!\S)|\s+", "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_LINES = r"[^\n]+|\n+"
_DIGITS = (r"\p{N}", _GPT2)
_LLAMA3 = PreTokenizer((_CL100K,), ignore_merges=True, add_bos=True)

# The names and rules of llama.cpp (llama_vocab::impl::load and llm_tokenizer_bpe in src/llama-vocab.cpp). An export
# takes the first name that splits texts in the same way.
_BY_NAMES: dict[str, PreTokenizer] = {
    "gpt-2 phi-2 mpt olmo exaone4 trillion gigachat mellum jais granite-docling a.x-4.0 modern-bert": PreTokenizer(
        (_GPT2,)
    ),
    "smollm command-r starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer(_DIGITS),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0": _LLAMA3,
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_CL100K,)),
    "glm4": PreTokenizer((_CL100K,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen megrez kormo": PreTokenizer((_QWEN,), form="NFC"),
    "qwen35": PreTokenizer((formats.QWEN35_WORDS,), form="NFC"),
    "stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "ufakzeka": PreTokenizer((_QWEN.removeprefix(formats.ENDINGS + "|"),)),
    "laguna": PreTokenizer((_LINES, _QWEN)),
    "gpt-4o llama4 kanana2 minimax-m2 talkie": PreTokenizer((_O200K,)),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK_V3),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "kimi-k2": PreTokenizer((formats.KIMI_WORDS,)),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "afmoe": PreTokenizer(_AFMOE),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "minicpm5": PreTokenizer((_DIGIT_TRIPLES, _CL100K.replace("{1,3}", "+")), ignore_merges=True),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "jais-2": PreTokenizer((_JAIS2,)),
    "chameleon": PreTokenizer(_CHAMELEON, add_bos=True),
    "falcon": PreTokenizer(_FALCON),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "gemma4": PreTokenizer((_LINES,), ignore_merges=True, add_bos=True, raw=True),
    "sarvam-moe": PreTokenizer((_LINES,), raw=True),
    "default": PreTokenizer(_DEFAULT),
}
PRE_TOKENIZERS = {name: rules for names, rules in _BY_NAMES.items() for name in names.split()}


def pre_tokenizer_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of the pre-tokenizer; `default` if the file does not name it, as in llama.cpp."""
    if metadata.get(KEYS + "model") == "gemma4":
        return "gemma4"
    return str(metadata.get(KEYS + "pre") or "default")


def read_tokenizer(path: str | Path) -> tuple[Any, dict[str, Any]]:
    """Read the tokenizer of a GGUF file, and the content of a `tokenizer_config.json`. Raises DataError."""
    return make_tokenizer(read_gguf(path).metadata)


def make_tokenizer(metadata: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the tokenizer that metadata describe, and the content of a `tokenizer_config.json`. Raises DataError."""
    settings, kind = tokenizer_settings(metadata), metadata.get(KEYS + "model")
    if kind not in ("gpt2", "gemma4", "llama"):
        raise DataError(
            f"{KEYS}model={str(kind)[:40]!r} is not supported: it must be gpt2 (BPE), gemma4 or llama (SentencePiece "
            "BPE). Give the tokenizer.json of the model's repository as tokenizer."
        )
    inner = _sentencepiece_bpe(metadata) if kind == "llama" else _bpe(metadata)
    _add_bos_and_eos(inner, settings)
    return inner, settings


def write_tokenizer(path: str | Path, folder: Path) -> None:
    """Write the tokenizer and the stop ids of a GGUF file as files of a Hugging Face directory.

    Does nothing if the file has no tokenizer.
    """
    metadata = read_gguf(path).metadata
    if KEYS + "tokens" not in metadata:
        return
    inner, settings = make_tokenizer(metadata)
    write_json(folder / "generation_config.json", token_ids(metadata) | {"eos_token_id": stop_ids(metadata)})
    inner.save(str(folder / "tokenizer.json"))
    present = {name: value for name, value in settings.items() if value not in (None, [])}
    write_json(folder / "tokenizer_config.json", present)


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`: special tokens by name, and the chat template."""
    tokens = _strings(metadata, "tokens")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, token_name in IDS.items():
        index = _token_id(metadata, name)
        settings[token_name] = tokens[index] if index is not None and index < len(tokens) else None
    pre = PRE_TOKENIZERS.get(pre_tokenizer_name(metadata), PreTokenizer(()))
    add_bos = pre.add_bos or metadata.get(KEYS + "model") == "llama"
    settings["add_bos_token"] = bool(metadata.get(KEYS + "add_bos_token", add_bos))
    settings["add_eos_token"] = bool(metadata.get(KEYS + "add_eos_token", False))
    templates = {"default": metadata.get(TEMPLATE)}
    names = metadata.get(f"{TEMPLATE}s", [])
    templates |= {str(name): metadata.get(f"{TEMPLATE}.{name}") for name in (names if isinstance(names, list) else [])}
    rows = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    settings["chat_template"] = rows
    return settings


def token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens by their keys in `config.json`."""
    ids = {f"{token_name}_id": _token_id(metadata, name) for name, token_name in IDS.items()}
    return {key: token_id for key, token_id in ids.items() if token_id is not None}


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that stop generation: the ends of texts, turns and messages."""
    stops = {token_id for name in _STOP_IDS if (token_id := _token_id(metadata, name)) is not None}
    ids = {token: token_id for token_id, token in enumerate(_strings(metadata, "tokens"))}
    token_types = metadata.get(KEYS + "token_type")
    if isinstance(token_types, list):
        named = [ids[name] for name in (*END_OF_TURN, *END_OF_MESSAGE) if name in ids]
        stops |= {token_id for token_id in named if token_id < len(token_types) and token_types[token_id] == CONTROL}
    if ids.keys() & {"<|call|>", "<|calls|>"} and ids.keys() & {"<|return|>", "<|flush|>"}:
        stops -= {ids.get("<|end|>")}  # here, <|end|> ends a message but not the turn, as in llama.cpp
    return sorted(stops)


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    token_id = metadata.get(KEYS + name)
    return token_id if type(token_id) is int and 0 <= token_id < 2**31 else None


def _strings(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    values = metadata.get(KEYS + name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DataError(f"{KEYS}{name} must be a list of strings. Download the GGUF file again.")
    return values


def _numbers(metadata: Mapping[str, Any], name: str, count: int, default: Any) -> Sequence[Any]:
    values = metadata.get(KEYS + name, [default] * count)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or any(isinstance(value, str) for value in values):
        raise DataError(
            f"{KEYS}{name} must be a list of {count} numbers, one for each token. Download the GGUF file again."
        )
    return values


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    """Return the tokens and their types. Raises DataError if two tokens are equal."""
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise DataError(f"{KEYS}tokens is missing, so the GGUF file has no tokenizer. Give another tokenizer.")
    if len(set(tokens)) < len(tokens):
        raise DataError(f"{KEYS}tokens contains the same token twice. Give another tokenizer.")
    return tokens, _numbers(metadata, "token_type", len(tokens), NORMAL)


def is_phi3(name: str) -> bool:
    """Return whether llama.cpp treats a model with this name as Phi-3."""
    return "phi-3" in name.lower() or "phi3" in name.lower()


def _stripping_tokens(metadata: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that strip the whitespace after them. llama.cpp derives them from the model's name."""
    if not is_phi3(str(metadata.get(NAME))):
        return set()
    typed_tokens = zip(*_vocabulary(metadata), strict=True)
    special = {token for token, token_type in typed_tokens if token_type in (CONTROL, UNKNOWN, USER_DEFINED)}
    return special - NOT_STRIPPING


def _bpe(metadata: Mapping[str, Any]) -> Any:
    """Make a byte-level BPE, or a BPE of characters if the pre-tokenizer is `raw`."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise missing_package("tokenizers", "hf") from error
    name = pre_tokenizer_name(metadata)
    if name not in PRE_TOKENIZERS:
        raise DataError(
            f"{KEYS}pre={name[:40]!r} is an unknown pre-tokenizer, which defines how a text is split into words. "
            f"Supported: {', '.join(PRE_TOKENIZERS)}. Give the tokenizer.json of the model's repository as tokenizer."
        )
    pre = PRE_TOKENIZERS[name]
    tokens, kinds = _vocabulary(metadata)
    merges = [_split_merge(merge) for merge in _strings(metadata, "merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise DataError(f"{KEYS}merges must be pairs of tokens, separated by a space. Download the GGUF file again.")
    pairs = [(merge[0], merge[1]) for merge in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    options: dict[str, Any] = dict(unk_token=unknown, fuse_unk=True, byte_fallback=True) if pre.raw else {}
    inner: Any = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.ignore_merges, **options))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.raw:
        inner.normalizer = normalizers.Replace(" ", formats.SPACE)
        steps: list[Any] = [decoders.Replace(formats.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence(steps)
    else:
        splits.append(pre_tokenizers.ByteLevel(False, use_regex=False))
        inner.decoder = decoders.ByteLevel()
    inner.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if pre.form is not None:
        inner.normalizer = getattr(normalizers, pre.form)()
    stripping = _stripping_tokens(metadata)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            added = AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=token in stripping)
            (inner.add_special_tokens if added.special else inner.add_tokens)([added])
    return inner


def _split_merge(merge: str) -> list[str]:
    """Split a merge at the first space after its first character, as llama.cpp does."""
    position = merge.find(" ", 1)
    return [merge] if position < 0 else [merge[:position], merge[position + 1 :]]


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Any:
    """Make a SentencePiece BPE."""
    try:
        import tokenizers  # noqa: F401 - raises an error that names the extra
    except ImportError as error:
        raise missing_package("tokenizers", "hf") from error
    tokens, kinds = _vocabulary(metadata)
    scores = _numbers(metadata, "scores", len(tokens), 0.0)
    rows = zip(tokens, scores, kinds, strict=True)
    pieces = [types.SimpleNamespace(piece=piece, score=score, type=kind) for piece, score, kind in rows]
    if UNKNOWN not in kinds:
        raise DataError(f"{KEYS}token_type must contain an unknown token (type {UNKNOWN}). Give another tokenizer.")
    spec = types.SimpleNamespace(
        add_dummy_prefix=bool(metadata.get(KEYS + "add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get(KEYS + "remove_extra_whitespaces", False)),
    )
    trainer = types.SimpleNamespace(byte_fallback=BYTE in kinds)
    model = types.SimpleNamespace(pieces=pieces, normalizer_spec=spec, trainer_spec=trainer)
    return formats.from_pieces(model, is_bpe=True, stripping=_stripping_tokens(metadata))


def _add_bos_and_eos(inner: Any, settings: Mapping[str, Any]) -> None:
    """Add a post-processor for the tokens at the start and end of texts, according to `add_bos_token` etc."""
    from tokenizers import processors

    bos = settings["bos_token"] if settings["add_bos_token"] else None
    eos = settings["eos_token"] if settings["add_eos_token"] else None
    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        return
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    inner.post_processor = processors.TemplateProcessing(
        single=template,
        pair=[*template, *(part.replace("$A", "$B") for part in template)],
        special_tokens=[(token, inner.token_to_id(token)) for token in dict.fromkeys(tokens)],
    )
