"""Tokenizers and chat templates as the metadata of GGUF files: what `gguf_tokenizer.py` reads, written.

What is written is read again: a tokenizer that llama.cpp's forms cannot express is refused.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eqx_decoders.errors import ConversionError, check
from eqx_decoders.io.gguf.gguf_header import is_gguf, read_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import (
    BYTE,
    CONTROL,
    IDS,
    KEYS,
    MESSAGES,
    NAME,
    NORMAL,
    NOT_STRIPPING,
    PRE_TOKENIZERS,
    TEMPLATE,
    TURNS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    is_phi3,
    make_tokenizer,
    stop_ids,
)
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, load_tokenizer
from eqx_decoders.io.text.tokenizer_formats import find_tokenizer_file


_REMEDY = "Give another one as tokenizer, or a directory without any"
# Words, blanks, digits, marks and several scripts: two tokenizers that cut it in the same way are the same.
_SAMPLE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 "
    "33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български "
    "'''''```````\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you "
    "like some tea? We'Ve a'lL HelloWORLD fooBar x = a/b // c\r\n\r\n\tif (a==b) { return; }   नमस्ते ١٢٣ "
    "end;\n\nnext.\r\n/path//\n 12345 x²³ 一二三 한국어 カタカナ e\u0301cole don't stop… 你好，世界。 <=> $1,234| a  b"
)
_BYTE_NAMES = {f"<0x{byte:02X}>" for byte in range(256)}


def tokenizer_metadata(
    source: str | Path | None, config: Mapping[str, Any], vocab_size: int, name: str = ""
) -> dict[str, Any]:
    """Return the metadata of the tokenizer in a directory or file, of its chat template, and the model's name.

    Without a tokenizer llama.cpp takes ids alone. Raises ConversionError for a tokenizer that it cannot have.
    """
    if source is not None and is_gguf(source) and Path(source).is_file():
        theirs = read_gguf(source).metadata
        own = {key: value for key, value in theirs.items() if key.startswith("tokenizer.")}
        return own | {NAME: _named(name, is_phi3(str(theirs.get(NAME))))}
    if source is None or not _has_tokenizer(Path(source)):
        none = {KEYS + "model": "none", NAME: name}
        return none | _ids(config, None, none)
    folder = Path(source)
    tokenizer = load_tokenizer(folder)
    if not isinstance(tokenizer, JsonTokenizer):
        raise ConversionError(f"{folder}: llama.cpp has no tokenizer of bytes. {_REMEDY}.")
    content = json.loads(tokenizer.to_json())
    check(content["model"]["type"] == "BPE", f"{folder}: llama.cpp reads BPE alone. {_REMEDY}.", ConversionError)
    metadata = _pieces(content, vocab_size) | {NAME: _named(name, _strips_like_phi3(content))}
    is_spm = bool(content["model"].get("byte_fallback"))
    metadata |= _sentencepiece(content, metadata) if is_spm else _byte_level(content, tokenizer, metadata)
    metadata |= _ids(config, tokenizer, metadata)
    plain, begun = tokenizer.encode("a"), tokenizer.encode_prompt("a")
    begins = len(begun) > len(plain) and begun[0] == metadata.get(KEYS + "bos_token_id")
    metadata[KEYS + "add_bos_token"] = bool(begins)
    template = load_chat_template(folder if folder.is_dir() else folder.parent)
    metadata |= {} if template is None else {TEMPLATE: template.source}
    again, _ = make_tokenizer(metadata)
    same = again.encode(_SAMPLE, add_special_tokens=False).ids == tokenizer.encode(_SAMPLE, special=True).tolist()
    check(same, f"{folder}: llama.cpp's tokenizers would give other ids. {_REMEDY}.", ConversionError)
    return metadata


def _has_tokenizer(path: Path) -> bool:
    """Return whether a path is a file, or a directory with a tokenizer. Raises ConversionError where it is neither."""
    check(path.exists(), f"tokenizer={str(path)!r} does not exist. {_REMEDY}.", ConversionError)
    return not path.is_dir() or (path / "tokenizer.json").exists() or find_tokenizer_file(path) is not None


def _strips_like_phi3(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer's special tokens take the blanks behind them, all that do in Phi-3's."""
    stripping = {token["content"] for token in content["added_tokens"] if token["rstrip"]}
    theirs = {token["content"] for token in content["added_tokens"]} - NOT_STRIPPING
    return bool(stripping) and stripping <= theirs <= stripping | {"</s>"}


def _named(name: str, phi3: bool) -> str:
    """Return a model's name by which llama.cpp knows whether it is one of Phi-3."""
    if is_phi3(name) == phi3:
        return name
    return f"phi-3 {name}" if phi3 else re.sub("(?i)(phi)-?3", r"\1 3", name)


def _pieces(content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the pieces in the order of their ids, and their kinds; ids without one have names of their own."""
    model = content["model"]
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    named = {index: (piece, NORMAL) for piece, index in model["vocab"].items()}
    if model.get("byte_fallback"):
        named |= {index: (piece, BYTE) for piece, index in model["vocab"].items() if piece in _BYTE_NAMES}
    for token in content["added_tokens"]:
        named[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is not None:
        named[unknown] = model["unk_token"], UNKNOWN
    for index, (piece, kind) in named.items():
        check(index < vocab_size, f"the tokenizer has more than {vocab_size} ids. {_REMEDY}.", ConversionError)
        tokens[index], kinds[index] = piece, kind
    return {KEYS + "tokens": tokens, KEYS + "token_type": kinds}


def _merges(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = content["model"]["merges"]
    return [(left, right) for left, right in (each.split(" ") if isinstance(each, str) else each for each in merges)]


def _byte_level(content: Mapping[str, Any], tokenizer: JsonTokenizer, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only a byte-level BPE has: merges, and the name of how a text is cut into words."""
    from tokenizers import Tokenizer as Inner

    found = {KEYS + "model": "gpt2", KEYS + "merges": [" ".join(pair) for pair in _merges(content)]}
    want, whole = _cuts(Inner.from_str(tokenizer.to_json())), bool(content["model"].get("ignore_merges"))
    form = "NFC" if "NFC" in json.dumps(content["normalizer"]) else None
    rows = sorted(PRE_TOKENIZERS.items(), key=lambda item: (item[1].ignore_merges != whole) + (item[1].form != form))
    for name, _ in rows:
        inner, _ = make_tokenizer(dict(metadata) | found | {KEYS + "pre": name})
        if _cuts(inner) == want:
            return found | {KEYS + "pre": name}
    raise ConversionError(f"llama.cpp has no name for the tokenizer's words. {_REMEDY}.")


def _cuts(inner: Any) -> list[str]:
    cutter = inner.pre_tokenizer
    return [] if cutter is None else [piece for piece, _ in cutter.pre_tokenize_str(_SAMPLE)]


def _sentencepiece(content: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only SentencePiece has: a score for each piece, by the order of merges."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(content)):
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks[token]) if token in ranks else 0.0 for token in metadata[KEYS + "tokens"]]
    begins = "Prepend" in json.dumps(content["normalizer"]) or '"prepend_scheme": "first"' in json.dumps(content)
    return {
        KEYS + "model": "llama",
        KEYS + "pre": "default",
        KEYS + "scores": scores,
        KEYS + "add_space_prefix": begins,
    }


def _ids(config: Mapping[str, Any], tokenizer: JsonTokenizer | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens: those of `config.json`, else the tokenizer's.

    Raises ConversionError for an end of texts that no one would read from the file again.
    """
    named = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    found: dict[str, Any] = {}
    for name, word in IDS.items():
        index = config.get(f"{word}_id")
        index = next(iter(index), None) if isinstance(index, list) else index
        index = named.get(name) if index is None else index
        found |= {} if index is None else {KEYS + name: index}
    ends = config.get("eos_token_id")
    if isinstance(ends, list):
        found |= _other_ends(ends[1:], tokenizer)
        lost = sorted(set(ends) - set(stop_ids(dict(metadata) | found)))
        rule = f"a GGUF file has three ends of texts at most, and would lose {lost}. Give others as settings"
        check(not lost, f"save_gguf: eos_token_id={ends}: {rule}.", ConversionError)
    return found


def _other_ends(ends: list[int], tokenizer: JsonTokenizer | None) -> dict[str, int]:
    """Return the end of a turn and that of a message among ends of texts: by names of tokens, others in their order."""
    left, found = {index: None if tokenizer is None else tokenizer.name_of(index) for index in ends}, {}
    for key, names in (("eot_token_id", TURNS), ("eom_token_id", MESSAGES)):
        index = next((index for index, name in left.items() if name in names), None)
        if index is not None:
            found[KEYS + key] = index
            del left[index]
    free = (KEYS + key for key in ("eot_token_id", "eom_token_id") if KEYS + key not in found)
    return found | dict(zip(free, left, strict=False))
