"""Writing of tokenizers and chat templates to the metadata of GGUF files; the inverse of `gguf_tokenizer.py`.

The metadata are read again and compared with the tokenizer. A tokenizer that llama.cpp cannot express is refused.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eqx_decoders.errors import ConversionError
from eqx_decoders.io.gguf.gguf_header import is_gguf, read_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import (
    BYTE,
    CONTROL,
    END_OF_MESSAGE,
    END_OF_TURN,
    IDS,
    KEYS,
    NAME,
    NORMAL,
    NOT_STRIPPING,
    PRE_TOKENIZERS,
    TEMPLATE,
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


# Words, whitespace, digits, punctuation and several scripts. Pre-tokenizers that split this text equally are considered
# equal.
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
    """Return the metadata of a tokenizer and its chat template, and the name of the model.

    Without a tokenizer, the metadata only contain the ids of special tokens, and llama.cpp accepts only ids. Raises
    ConversionError for a tokenizer that llama.cpp cannot express.

    **Arguments:**

    - `source`: directory or file of the tokenizer; None: no tokenizer.
    - `config`: content of the model's `config.json`.
    - `vocab_size`: number of rows of the embedding.
    - `name`: name of the model.
    """
    if source is not None and is_gguf(source) and Path(source).is_file():
        source_metadata = read_gguf(source).metadata
        copied = {key: value for key, value in source_metadata.items() if key.startswith("tokenizer.")}
        return copied | {NAME: _model_name(name, is_phi3(str(source_metadata.get(NAME))))}
    if source is None or not _has_tokenizer(Path(source)):
        without_tokenizer = {KEYS + "model": "none", NAME: name}
        return without_tokenizer | _special_ids(config, None, without_tokenizer)
    folder = Path(source)
    tokenizer = load_tokenizer(folder)
    if not isinstance(tokenizer, JsonTokenizer):
        raise ConversionError(
            f"save_gguf: tokenizer={str(folder)!r} uses bytes as tokens, which llama.cpp does not support. Give "
            "another tokenizer, or a directory without a tokenizer."
        )
    content = json.loads(tokenizer.to_json())
    model_type = content["model"]["type"]
    if model_type != "BPE":
        raise ConversionError(
            f"save_gguf: tokenizer={str(folder)!r} is of type {model_type}, but only BPE can be written. Give another "
            "tokenizer, or a directory without a tokenizer."
        )
    metadata = _vocabulary(content, vocab_size) | {NAME: _model_name(name, _strips_like_phi3(content))}
    if content["model"].get("byte_fallback"):
        metadata |= _sentencepiece(content, metadata)
    else:
        metadata |= _byte_level(content, tokenizer, metadata)
    metadata |= _special_ids(config, tokenizer, metadata)
    text = tokenizer.encode("a")
    prompt = tokenizer.encode_prompt("a")
    adds_bos = len(prompt) > len(text) and prompt[0] == metadata.get(KEYS + "bos_token_id")
    metadata[KEYS + "add_bos_token"] = bool(adds_bos)
    template = load_chat_template(folder if folder.is_dir() else folder.parent)
    if template is not None:
        metadata[TEMPLATE] = template.source
    written, _ = make_tokenizer(metadata)
    if written.encode(_SAMPLE, add_special_tokens=False).ids != tokenizer.encode(_SAMPLE, special=True).tolist():
        raise ConversionError(
            f"save_gguf: tokenizer={str(folder)!r} would give other ids in llama.cpp. Give another tokenizer, or a "
            "directory without a tokenizer."
        )
    return metadata


def _has_tokenizer(path: Path) -> bool:
    """Return whether a path is a file or a directory with a tokenizer. Raises ConversionError if it does not exist."""
    if not path.exists():
        raise ConversionError(f"save_gguf: tokenizer={str(path)!r} does not exist. Give a directory or a file.")
    return not path.is_dir() or (path / "tokenizer.json").exists() or find_tokenizer_file(path) is not None


def _strips_like_phi3(content: Mapping[str, Any]) -> bool:
    """Return whether the same special tokens as in Phi-3 strip the whitespace after them."""
    stripping = {token["content"] for token in content["added_tokens"] if token["rstrip"]}
    stripping_in_phi3 = {token["content"] for token in content["added_tokens"]} - NOT_STRIPPING
    return bool(stripping) and stripping <= stripping_in_phi3 <= stripping | {"</s>"}


def _model_name(name: str, phi3: bool) -> str:
    """Return the name of the model, changed if necessary, so that llama.cpp treats it as Phi-3 or not."""
    if is_phi3(name) == phi3:
        return name
    return f"phi-3 {name}" if phi3 else re.sub("(?i)(phi)-?3", r"\1 3", name)


def _vocabulary(content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the tokens in the order of their ids, and their types. Unused ids get the names `[PAD0]` and so on."""
    model = content["model"]
    tokens = {token_id: (token, NORMAL) for token, token_id in model["vocab"].items()}
    if model.get("byte_fallback"):
        tokens |= {token_id: (token, BYTE) for token, token_id in model["vocab"].items() if token in _BYTE_NAMES}
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    unknown_id = model["vocab"].get(model.get("unk_token"))
    if unknown_id is not None:
        tokens[unknown_id] = model["unk_token"], UNKNOWN
    if max(tokens, default=0) >= vocab_size:
        raise ConversionError(
            f"save_gguf: the tokenizer has ids up to {max(tokens)}, but the model has {vocab_size} token ids. Give "
            "another tokenizer, or a directory without a tokenizer."
        )
    rows = [tokens.get(token_id, (f"[PAD{token_id}]", UNUSED)) for token_id in range(vocab_size)]
    return {KEYS + "tokens": [token for token, _ in rows], KEYS + "token_type": [kind for _, kind in rows]}


def _merges(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = content["model"]["merges"]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return [(left, right) for left, right in pairs]


def _byte_level(content: Mapping[str, Any], tokenizer: JsonTokenizer, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE: its merges, and the name of its pre-tokenizer."""
    from tokenizers import Tokenizer as Inner

    values = {KEYS + "model": "gpt2", KEYS + "merges": [" ".join(pair) for pair in _merges(content)]}
    words = _pre_tokenized(Inner.from_str(tokenizer.to_json()))
    ignore_merges = bool(content["model"].get("ignore_merges"))
    form = "NFC" if "NFC" in json.dumps(content["normalizer"]) else None
    by_similarity = sorted(
        PRE_TOKENIZERS,
        key=lambda name: (PRE_TOKENIZERS[name].ignore_merges != ignore_merges) + (PRE_TOKENIZERS[name].form != form),
    )
    for name in by_similarity:
        inner, _ = make_tokenizer(dict(metadata) | values | {KEYS + "pre": name})
        if _pre_tokenized(inner) == words:
            return values | {KEYS + "pre": name}
    raise ConversionError(
        "save_gguf: llama.cpp has no pre-tokenizer that splits texts into words like this tokenizer. Give another "
        "tokenizer, or a directory without a tokenizer."
    )


def _pre_tokenized(inner: Any) -> list[str]:
    pre_tokenizer = inner.pre_tokenizer
    return [] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(_SAMPLE)]


def _sentencepiece(content: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a SentencePiece BPE: scores of the tokens, from the order of merges."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(content)):
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks[token]) if token in ranks else 0.0 for token in metadata[KEYS + "tokens"]]
    has_prefix = "Prepend" in json.dumps(content["normalizer"]) or '"prepend_scheme": "first"' in json.dumps(content)
    return {
        KEYS + "model": "llama",
        KEYS + "pre": "default",
        KEYS + "scores": scores,
        KEYS + "add_space_prefix": has_prefix,
    }


def _special_ids(
    config: Mapping[str, Any], tokenizer: JsonTokenizer | None, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ids of special tokens in `config.json` or, if they are absent there, of the tokenizer.

    Raises ConversionError if `config.json` has more stop ids than a GGUF file can store.
    """
    defaults = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    values: dict[str, Any] = {}
    for name, token_name in IDS.items():
        token_id = config.get(f"{token_name}_id")
        token_id = next(iter(token_id), None) if isinstance(token_id, list) else token_id
        token_id = defaults.get(name) if token_id is None else token_id
        if token_id is not None:
            values[KEYS + name] = token_id
    stops = config.get("eos_token_id")
    if isinstance(stops, list):
        values |= _turn_and_message_ids(stops[1:], tokenizer)
        lost = sorted(set(stops) - set(stop_ids(dict(metadata) | values)))
        if lost:
            raise ConversionError(
                f"save_gguf: eos_token_id={stops} has more ids than a GGUF file can store, which has one id each for "
                f"the end of a text, a turn and a message. {lost} would be lost. Give settings with fewer ids."
            )
    return values


def _turn_and_message_ids(ids: list[int], tokenizer: JsonTokenizer | None) -> dict[str, int]:
    """Return which stop ids end a turn and a message: by the names of the tokens, else in their order."""
    names = {token_id: None if tokenizer is None else tokenizer.name_of(token_id) for token_id in ids}
    values: dict[str, int] = {}
    for key, known_names in (("eot_token_id", END_OF_TURN), ("eom_token_id", END_OF_MESSAGE)):
        token_id = next((token_id for token_id, name in names.items() if name in known_names), None)
        if token_id is not None:
            values[KEYS + key] = token_id
            del names[token_id]
    free_keys = (KEYS + key for key in ("eot_token_id", "eom_token_id") if KEYS + key not in values)
    return values | dict(zip(free_keys, names, strict=False))
