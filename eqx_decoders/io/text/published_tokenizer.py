"""The small files of a published tokenizer, merged as in transformers.

A tokenizer consists of a vocabulary (`tokenizer.json`, `tokenizer.model`, …) and up to four small files that name its
special tokens and add tokens to the vocabulary:

- `tokenizer_config.json`: the tokenizer's class, named special tokens (such as `eos_token`) and, in newer directories,
  `added_tokens_decoder`, which lists all added tokens by id. If it does, the next two files are ignored.
- `special_tokens_map.json`: named special tokens.
- `added_tokens.json`: ids of added tokens.
- `config.json`: the tokenizer's class, if `tokenizer_config.json` does not name it.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.io.huggingface.directory import MAX_CONFIG_BYTES, Directory


# Named special tokens of transformers, which chat templates can use as variables.
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MAX_GAP = 1 << 18  # maximum ids between the vocabulary and an added token: a model has an embedding for every id
_NEVER = -1e9  # score of a Unigram piece that no text contains after tokenization
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")

_END_OF_TEXT = "<|endoftext|>"
_GPT2: dict[str, str | None] = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
_QWEN = {"bos_token": None, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT}
_LLAMA: dict[str, str | None] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

# Default special tokens of transformers' tokenizer classes; used if the files do not define special tokens.
CLASS_TOKENS: dict[str, dict[str, str | None]] = {
    "CodeGenTokenizer": dict(_GPT2),
    "CodeLlamaTokenizer": dict(_LLAMA),
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": dict(_GPT2),
    "GPTNeoXTokenizer": _GPT2 | {"pad_token": "<|padding|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "LlamaTokenizer": dict(_LLAMA),
    "Qwen2Tokenizer": dict(_QWEN),
    "Qwen3_5Tokenizer": dict(_QWEN),
}

# Tokenizer class of each model type; used if tokenizer_config.json does not define a class.
_MODEL_TYPES = {
    "CohereTokenizer": "cohere cohere2",
    "GPT2Tokenizer": "gpt2 gpt_neo gptj opt starcoder2 codegen dbrx phi",
    "GPTNeoXTokenizer": "gpt_neox mamba mamba2 falcon_mamba mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma",
    "LlamaTokenizer": "llama",
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe internvl",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp",
}
_CLASS_OF_MODEL = {model: name for name, models in _MODEL_TYPES.items() for model in models.split()}


class AddedToken(NamedTuple):
    """A token that is found in a text before it is split into pieces, with the flags of `tokenizers.AddedToken`."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @classmethod
    def parse(cls, value: Any, where: str, *, special: bool | None = None) -> "AddedToken":
        """Return the token that a string or an object with `content` and flags describes. Raises DataError.

        `where`: name of the value in error messages. `special`: default of the flag `special`; None: false.
        """
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str):
            raise DataError(f"{where}={str(value)[:60]} must be a string, or an object with a string as content.")
        flags = {key: value[key] for key in _FLAGS if key in value} if isinstance(value, dict) else {}
        invalid = [key for key, flag in flags.items() if not isinstance(flag, bool)]
        if invalid:
            raise DataError(f"{where}={str(value)[:60]}: {', '.join(invalid)} must be true or false.")
        if special is not None:
            flags = {"special": special} | flags
        return cls(content, **({"normalized": not flags.get("special", False)} | flags))


def read_object(folder: Directory, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory; empty if the file does not exist. Raises DataError."""
    if not folder.has(name):
        return {}
    path = folder.file(name)
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes, but must have at most {MAX_CONFIG_BYTES:,} bytes. Download the file again."
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {str(error)[:200]}. Download it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must contain a JSON object, not {type(content).__name__}. Download it again.")
    return content


def _merged(settings: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> Mapping[str, Any]:
    return settings if "added_tokens_decoder" in settings else {**settings, **special_tokens_map}


def special_tokens(settings: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the named special tokens (such as `eos_token`); None for a token that the tokenizer does not have.

    As in transformers, `special_tokens_map.json` takes precedence over `tokenizer_config.json` (`settings`), but it is
    ignored if `tokenizer_config.json` has `added_tokens_decoder`.
    """
    merged = _merged(settings, special_tokens_map)
    values = {token: merged[token] for token in NAMED_TOKENS if token in merged}
    texts = {token: value.get("content") if isinstance(value, dict) else value for token, value in values.items()}
    for token, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise ConversionError(
                f"{token}={str(values[token])[:60]} must be a string, or an object with a string as content."
            )
    return texts


@dataclasses.dataclass(frozen=True)
class PublishedTokenizer:
    """The settings and added tokens of a tokenizer's directory.

    - `settings`: `tokenizer_config.json`, or the same content from a GGUF file.
    - `special_tokens_map`: `special_tokens_map.json`.
    - `added_ids`: `added_tokens.json`.
    - `model_config`: `config.json`; only `tokenizer_class` and `model_type` are read.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    added_ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Directory) -> "PublishedTokenizer":
        """Read the files that exist in a directory. Raises DataError for malformed files."""
        settings = read_object(folder, "tokenizer_config.json")
        is_named = isinstance(settings.get("tokenizer_class"), str)
        return cls(
            settings,
            read_object(folder, "special_tokens_map.json"),
            read_object(folder, "added_tokens.json"),
            {} if is_named else read_object(folder, "config.json"),
        )

    @functools.cached_property
    def class_name(self) -> str | None:
        """Name of the tokenizer's class in transformers, without "Fast"; None if no file names it."""
        for name in (self.settings.get("tokenizer_class"), self.model_config.get("tokenizer_class")):
            if isinstance(name, str) and name:
                return name.removesuffix("Fast") if name != "PreTrainedTokenizerFast" else name
        return _CLASS_OF_MODEL.get(str(self.model_config.get("model_type")))

    @functools.cached_property
    def named(self) -> dict[str, str | None]:
        """Special tokens by name, as given in the files; None for a token that the tokenizer does not have."""
        return special_tokens(self.settings, self.special_tokens_map)

    @property
    def class_tokens(self) -> dict[str, str | None]:
        """Special tokens of the class by name, which are used if the files do not name them."""
        return CLASS_TOKENS.get(self.class_name or "", {})

    @property
    def variables(self) -> dict[str, str]:
        """Variables of chat templates: named special tokens, and other tokens such as `image_token`."""
        texts: dict[str, Any] = {}
        for table in (self.settings.get("model_specific_special_tokens"), self.settings.get("extra_special_tokens")):
            texts |= table if isinstance(table, dict) else {}
        texts |= {name: value for name, value in self.settings.items() if name.endswith("_token")}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in texts.items()}
        texts = self.class_tokens | texts | self.named
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @functools.cached_property
    def added(self) -> dict[int, AddedToken]:
        """Added tokens by id. Raises DataError for malformed tokens."""
        if "added_tokens_decoder" in self.settings:
            rows = self.settings["added_tokens_decoder"]
            where = "tokenizer_config.json: added_tokens_decoder"
            if not isinstance(rows, dict):
                raise DataError(f"{where}={str(rows)[:60]} must be an object with an added token for each id.")
            tokens = {_token_id(key, where): AddedToken.parse(value, f"{where}[{key}]") for key, value in rows.items()}
        else:
            special = {token.content for token in self._named_special_tokens()}
            tokens = {
                _token_id(index, f"added_tokens.json: {content!r}"): AddedToken(
                    content, special=content in special, normalized=content not in special
                )
                for content, index in self.added_ids.items()
            }
        named = set(self.named.values())
        tokens = {
            index: token._replace(special=token.special or token.content in named) for index, token in tokens.items()
        }
        return dict(sorted(tokens.items()))

    def special_without_ids(self, class_tokens: Mapping[str, str | None]) -> list[AddedToken]:
        """Return the special tokens without an id in the files: they are in the vocabulary, or get the next free ids.

        `class_tokens`: named special tokens that are used if the files do not name them.
        """
        known = {token.content for token in self.added.values()}
        return [token for token in self._named_special_tokens(class_tokens) if token.content not in known]

    def _named_special_tokens(self, class_tokens: Mapping[str, str | None] = {}) -> Iterator[AddedToken]:
        merged = {**class_tokens, **_merged(self.settings, self.special_tokens_map)}
        for name in NAMED_TOKENS:
            if merged.get(name) is not None:
                yield AddedToken.parse(merged[name], name, special=True)
        for name in ("extra_special_tokens", "additional_special_tokens"):
            values = merged.get(name)
            if isinstance(values, dict):
                values = list(values.values())
            for value in values if isinstance(values, Sequence) and not isinstance(values, str) else ():
                yield AddedToken.parse(value, name, special=True)


def _token_id(value: Any, where: str) -> int:
    is_digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9
    token_id: Any = int(value) if is_digits else value
    if type(token_id) is not int or not 0 <= token_id < 1_000_000_000:
        raise DataError(f"{where}: {str(value)[:40]} must be a token id, an integer from 0 to 999,999,999.")
    return token_id


def with_published_tokens(
    inner: Any, files: PublishedTokenizer, *, match_raw_text: bool = False, add_class_tokens: bool = False
) -> Any:
    """Return a tokenizer of the `tokenizers` package with the added tokens of the small files and their ids.

    Special tokens without an id get the next free ids, as in transformers, except `bos_token` and `eos_token`: the
    caller raises an error if they are not in the vocabulary. Raises DataError for a token with two different ids.

    **Arguments:**

    - `match_raw_text`: find added tokens in the text before normalization, as SentencePiece does, even if their flag
        `normalized` is true.
    - `add_class_tokens`: also add the default special tokens of the tokenizer's class, for tokenizers that are not in
        a `tokenizer.json`.
    """
    inner = _with_ids(inner, files.added)
    present = {token.content: token for token in map(_flags_of, inner.get_added_tokens_decoder().values())}
    for token in files.added.values():
        changed = "added_tokens_decoder" not in files.settings and _is_changed(inner, token.content)
        token = token._replace(normalized=token.normalized and not (match_raw_text or changed))
        if token.content and present.get(token.content) != token:
            _add(inner, token)
            present[token.content] = token
    required = {files.named.get("bos_token"), files.named.get("eos_token")}
    class_tokens = files.class_tokens if add_class_tokens else {}
    for token in files.special_without_ids(class_tokens):
        is_defined = token.content not in required or inner.token_to_id(token.content) is not None
        if token.content and token.content not in present and is_defined:
            _add(inner, token)
            present[token.content] = token
    return inner


def _flags_of(token: Any) -> AddedToken:
    return AddedToken(token.content, **{name: getattr(token, name) for name in _FLAGS})


def _is_changed(inner: Any, content: str) -> bool:
    """Return whether the normalizer changes the name of a token, which would then not be found in normalized text."""
    return inner.normalizer is not None and inner.normalizer.normalize_str(content) != content


def _add(inner: Any, token: AddedToken) -> None:
    from tokenizers import AddedToken as Inner

    flags = {name: getattr(token, name) for name in _FLAGS}
    (inner.add_special_tokens if token.special else inner.add_tokens)([Inner(token.content, **flags)])


def _with_ids(inner: Any, added: Mapping[int, AddedToken]) -> Any:
    """Return a tokenizer with a vocabulary that contains the added tokens with their ids.

    A token replaces the piece with the same id (such as `<unused0>`). Tokens whose ids directly follow the vocabulary
    are left to the caller: they get these ids when they are added.
    """
    size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    new: dict[int, str] = {}
    for index, token in added.items():
        if index >= size + MAX_GAP:
            raise DataError(
                f"The added token {token.content!r} has the id {index} in added_tokens_decoder of "
                f"tokenizer_config.json or in added_tokens.json, but the vocabulary has only {size} ids: an id may be "
                f"at most {size + MAX_GAP - 1}. Download the files again, or correct the id."
            )
        found = inner.token_to_id(token.content)
        if found is None:
            new[index] = token.content
        elif found != index:
            raise DataError(
                f"The added token {token.content!r} has the id {index} in added_tokens_decoder of "
                f"tokenizer_config.json or in added_tokens.json, but {found} in the vocabulary: the files belong to "
                "different tokenizers. Download all of them again."
            )
    after = [index for index in new if index >= size]
    is_contiguous = after == [*range(size, size + len(after))]
    explicit = {index: name for index, name in new.items() if index < size or not is_contiguous}
    return _rewritten(inner, explicit) if explicit else inner


def _rewritten(inner: Any, names: Mapping[int, str]) -> Any:
    """Return a tokenizer in which ids have the given names. The ids may be beyond the vocabulary."""
    from tokenizers import Tokenizer as Inner

    content = json.loads(inner.to_str())
    model, listed = content["model"], {token["id"]: token for token in content["added_tokens"]}
    vocab = model["vocab"]
    for index, name in names.items():
        old = inner.id_to_token(index)
        if index in listed:
            listed[index]["content"] = name
        if isinstance(vocab, dict):
            vocab.pop(old, None)
            vocab[name] = index
            merges = model.get("merges") or []
            model["merges"] = [pair for pair in merges if old not in (*_pair(pair), "".join(_pair(pair)))]
            if model.get("unk_token") == old:
                model["unk_token"] = name
        else:
            vocab += [[f"\0{number}", _NEVER] for number in range(len(vocab), index + 1)]
            vocab[index] = [name, _NEVER]
    return Inner.from_str(json.dumps(content, ensure_ascii=False))


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
