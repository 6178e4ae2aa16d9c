"""Normal form of raw records (JSON objects, rows of tables), the same for every source and every use.

A record is read as one of these forms:

- a text in the text field;
- a conversation in `messages`, in `conversations` (ShareGPT) or, as a list, in the text field;
- a `prompt` with a `completion`, with `chosen` and `rejected`, or alone; texts or messages;
- `instruction`, `input` and `output` (Alpaca);
- `input.messages`, `preferred_output` and `non_preferred_output` (OpenAI).

`normalize_record` converts the last two rows, JSON strings, columns of lists, names of roles and keys, and flags that
exclude a message from the loss. It refuses keys that change what is learned and that this library does not support.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eqx_decoders.errors import DataError


# Roles by the names that public datasets give them, in lower case.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "usr"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "ai", "chatgpt", "chatbot", "bard", "bing"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),  # the server renders developer messages as system messages
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),  # becomes an assistant message with tool_calls
}

ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
TRAIN = "train"  # in normalized messages: False for messages that are not trained on

# Flags of messages that say whether they are trained on: OpenAI, Mistral and Together (weight), axolotl (train,
# training), ms-swift and XTuner (loss), verl (trainable, loss_mask), torchtune (masked, inverted).
TRAIN_FLAGS = ("weight", TRAIN, "training", "trainable", "train_on_turn", "loss", "loss_mask")
INVERTED_FLAGS = ("masked",)

# Keys of messages and records that change what is learned, and that have no counterpart here.
UNSUPPORTED_MESSAGE_KEYS = {
    "train_detail": "flags for parts of a message",
    "training_detail": "flags for parts of a message",
    "loss_scale": "a weight of the loss",
    "loss_weight": "a weight of the loss",
    "mask": "a mask of the loss",
    "audio": "audio of an answer",
    "refusal": "a refusal apart from the content",
}
UNSUPPORTED_RECORD_KEYS = {
    "input_ids": "tokens of a record",
    "loss_mask": "a mask of tokens",
    "assistant_masks": "a mask of tokens",
    "completion_mask": "a mask of tokens",
    "loss_weight": "a weight of a record",
    "sample_weight": "a weight of a record",
}
# Other columns may have these names in records of plain text.
UNSUPPORTED_CHAT_KEYS = {
    "weight": "a weight of a record",
    "train": "a flag of a record",
    "training": "a flag of a record",
    "chat_template": "a chat template of a record",
}

# Variables of chat templates, with the names of TRL's conversational formats.
VARIABLES = ("tools", "documents", "chat_template_kwargs")
MESSAGE_FIELDS = ("messages", "prompt", "completion", "chosen", "rejected")
ALPACA = ("instruction", "input", "output", "system", "history")
OPENAI_PAIRS = {"preferred_output": "chosen", "non_preferred_output": "rejected"}

# Columns of a table that `normalize_record` reads.
COLUMNS = (*MESSAGE_FIELDS, "conversations", *ALPACA, *OPENAI_PAIRS, *VARIABLES, "functions", "label")
COLUMNS += (*UNSUPPORTED_RECORD_KEYS, *UNSUPPORTED_CHAT_KEYS)

_PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(?:role|from|content|value)'\s*:")


def normalize_record(record: Any, where: str, field: str = "text") -> dict[str, Any]:
    """Return a record in normal form: messages are lists of `{"role", "content", …}`, `tools` a list of objects.

    Keys that belong to no known form keep their values. Null values are left out of messages and variables, since a
    column of a table gives every row all keys. Raises DataError that begins with `where`.

    field: text field of the records; messages in it are normalized, texts stay as they are.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} must hold a JSON object, not {type(record).__name__}: write one object in each line.")
    result = {key: value for key, value in record.items() if value is not None}
    _convert_openai_pair(result, where)
    _convert_sharegpt(result, where, field)
    for name in dict.fromkeys((*MESSAGE_FIELDS, field)):
        if name in result:
            strings = name != field or name in MESSAGE_FIELDS  # a text field that is no known one may hold any text
            result[name] = _texts_or_messages(result[name], name, where, parse=strings or field != "text")
    _convert_alpaca(result, where, field)
    _convert_variables(result, where)
    _add_system(result, where, field)
    for name in dict.fromkeys((*MESSAGE_FIELDS, *VARIABLES, field)):
        if name in result:
            check_unicode(result[name], name, where)
    _refuse_keys(result, where, field)
    return result


def normalize_prompt(record: Any, where: str) -> dict[str, Any]:
    """Return a record with its `prompt`, a text or normalized messages without flags, for a model that answers it.

    The prompt is `prompt`, else the conversation in `messages` or `conversations`, else Alpaca's `instruction` and
    `input`. Other columns, which rewards and graders read, keep their values. Raises DataError without a prompt.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} must hold a JSON object, not {type(record).__name__}: write one object in each line.")
    sources = (("prompt",), ("messages",), ("conversations",), ("instruction", "input", "history"))
    source = next((names for names in sources if record.get(names[0]) is not None), ())
    names = (*source, "system", "functions", *VARIABLES)
    found = normalize_record({name: record[name] for name in names if name in record}, where, "prompt")
    prompt = found.get("prompt", found.get("messages"))
    if prompt is None:
        raise DataError(f"{where} has no field 'prompt' or 'messages': its fields are {', '.join(record) or 'none'}.")
    prompt = split_flags(prompt)[0] if isinstance(prompt, list) else prompt
    variables = {name: found[name] for name in VARIABLES if name in found}
    return {**record, **variables, "prompt": prompt}


def check_unicode(value: Any, name: str, where: str) -> None:
    """Raise DataError if a string in a JSON value cannot be encoded as UTF-8 (half of a surrogate pair)."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: field {name!r} is not valid Unicode: character {error.start} is half of a surrogate pair. "
                "Write the complete character, or leave the record out."
            ) from error
    elif isinstance(value, Mapping):
        for key, member in value.items():
            check_unicode(key, f"{name}.{key!a}", where)
            check_unicode(member, f"{name}.{key}", where)
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            check_unicode(member, f"{name}[{number}]", where)


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null, at any depth. Members of lists stay."""
    if isinstance(value, list | tuple):
        return [without_nulls(member) for member in value]
    if isinstance(value, Mapping):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    return value


def is_chat(record: Mapping[str, Any], field: str = "text") -> bool:
    """Return whether a normalized record holds messages."""
    return any(isinstance(record.get(name), list) for name in (*MESSAGE_FIELDS, field))


def text_of_parts(content: Any) -> Any:
    """Return the content of a message as a text if it is a list of text parts only, joined by line ends.

    The server joins them in the same way. Other contents are returned unchanged.
    """
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def as_texts(messages: Sequence[Any]) -> list[Any]:
    """Return messages with lists of text parts as texts (see `text_of_parts`)."""
    return [
        {**message, "content": text_of_parts(message["content"])} if _has_parts(message) else message
        for message in messages
    ]


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


# --- messages ---------------------------------------------------------------------------------------------------------


def _texts_or_messages(value: Any, name: str, where: str, *, parse: bool) -> Any:
    """Return a text unchanged, and messages in normal form; a string that is a JSON list of messages is parsed."""
    if isinstance(value, str):
        messages = _parsed_messages(value, name, where) if parse else None
        if messages is None and name == "messages":
            raise DataError(
                f"{where}: field {name!r} must be a list of messages, or its JSON, not the text {value[:40]!r}. "
                "Rename the column, or name it with --text-field if it holds plain texts."
            )
        return value if messages is None else normalize_messages(messages, name, where)
    return normalize_messages(value, name, where) if isinstance(value, list | tuple | Mapping) else value


def _parsed_messages(text: str, name: str, where: str) -> Any:
    """Return the messages in a string of JSON; None for any other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if _PYTHON_MESSAGES.match(text):
            raise DataError(
                f"{where}: field {name!r} holds messages as Python writes them, {text[:40]!r}, which is not JSON. "
                "Write the column with json.dumps, or as a list."
            ) from None
        return None
    messages = [value] if isinstance(value, dict) else value
    return messages if messages and all(map(_is_message, messages)) else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    has_content = any(key in value for key in (*CONTENT_KEYS, "tool_calls", "function_call"))
    return has_content and any(isinstance(value.get(key), str) for key in ROLE_KEYS)


def normalize_messages(value: Any, name: str, where: str) -> list[Any]:
    """Return messages in normal form: objects with `role`, `content` and so on, without nulls, and `train` if False.

    value: a list of messages, a single message, or (as `datasets` stores sequences of objects) an object of lists.
    """
    if isinstance(value, Mapping):
        columns = [key for key in (*ROLE_KEYS, *CONTENT_KEYS) if isinstance(value.get(key), list)]
        if len(columns) >= 2:
            lengths = {len(value[key]) for key in value if isinstance(value[key], list)}
            if len(lengths) != 1:
                raise DataError(f"{where}: field {name!r} has lists of different lengths for the keys of its messages.")
            keys = [key for key in value if isinstance(value[key], list)]
            value = [dict(zip(keys, row, strict=True)) for row in zip(*(value[key] for key in keys), strict=True)]
        else:
            value = [value]
    return [_message(message, f"{name}[{number}]", where) for number, message in enumerate(value)]


def _message(value: Any, name: str, where: str) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parse_json(value, name, where)
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {name}={str(value)[:60]} must be an object with role and content.")
    message = without_nulls(value)
    for ours, theirs in (ROLE_KEYS, CONTENT_KEYS):
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    _convert_calls(message, name, where)
    if isinstance(message.get("role"), str):
        role = message["role"].strip()
        message["role"] = ROLES.get(role.lower(), role)
    if message.get("role") == "function_call":
        content = message.pop("content", "")
        calls = _parse_json(content, f"{name}.content", where) if isinstance(content, str) else content
        message |= {"role": "assistant", "tool_calls": [_call(call, name, where) for call in _as_list(calls)]}
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part) for part in message["content"]]
    if "tool_calls" in message and "content" not in message:
        message["content"] = None  # as the OpenAI API returns it
    for key, meaning in UNSUPPORTED_MESSAGE_KEYS.items():
        if message.get(key):
            raise DataError(
                f"{where}: {name}.{key}={str(message[key])[:60]} is {meaning}, which is not supported. Remove the key, "
                "or leave the record out."
            )
        message.pop(key, None)
    _convert_flags(message, name, where)
    return message


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _part(part: Any) -> Any:
    """Return a part of a content with the type "text" if it is a text under another name."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    return {**part, "type": "text"} if part.get("type") in (None, "input_text", "output_text") else part


def _convert_calls(message: dict[str, Any], name: str, where: str) -> None:
    """Convert JSON strings in `tool_calls`, and the older `function_call` of OpenAI, to a list of calls."""
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parse_json(message["tool_calls"], f"{name}.tool_calls", where)
    if isinstance(message.get("tool_calls"), list):
        calls = [_parse_json(call, name, where) if isinstance(call, str) else call for call in message["tool_calls"]]
        message["tool_calls"] = calls
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "function_call" in message:
        call = message.pop("function_call")
        call = _parse_json(call, f"{name}.function_call", where) if isinstance(call, str) else call
        message["tool_calls"] = [*message.get("tool_calls", ()), _call(call, name, where)]


def _call(call: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise DataError(f"{where}: {name}: the call {str(call)[:60]} must be an object with name and arguments.")
    return {"type": "function", "function": {"arguments": {}, **call}}


def _convert_flags(message: dict[str, Any], name: str, where: str) -> None:
    """Replace the flags that say whether a message is trained on by `train`: False, or none."""
    flags: dict[str, bool] = {}
    for key in (*TRAIN_FLAGS, *INVERTED_FLAGS):
        if key in message:
            value = message.pop(key)
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise DataError(
                    f"{where}: {name}.{key}={str(value)[:60]} must be 0, 1, true or false: a message is trained on, "
                    "or it is not."
                )
            flags[key] = bool(value) != (key in INVERTED_FLAGS)
    if len(set(flags.values())) > 1:
        raise DataError(f"{where}: {name} has flags that contradict each other: {', '.join(flags)}. Keep one of them.")
    trained = next(iter(flags.values()), None)
    others = [key for key in flags if key not in ("weight", *INVERTED_FLAGS)]
    if trained and others and message.get("role") != "assistant":
        raise DataError(
            f"{where}: {name}.{others[0]}={trained} marks a message of the role {message.get('role')!r}: only messages "
            "of the assistant are trained on. Remove the flag."
        )
    if trained is False:
        message[TRAIN] = False


def split_flags(messages: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return normalized messages without `train`, and the numbers of those of the assistant that are not trained on."""
    excluded = [
        number
        for number, message in enumerate(messages)
        if isinstance(message, Mapping) and message.get("role") == "assistant" and message.get(TRAIN) is False
    ]
    plain = [
        {key: value for key, value in message.items() if key != TRAIN} if isinstance(message, Mapping) else message
        for message in messages
    ]
    return plain, tuple(excluded)


# --- other formats ----------------------------------------------------------------------------------------------------


def _convert_sharegpt(record: dict[str, Any], where: str, field: str) -> None:
    if "conversations" in record and field != "conversations" and not _is_plain(record, field):
        value = record["conversations"]
        parsed = _parsed_messages(value, "conversations", where) if isinstance(value, str) else value
        if isinstance(parsed, list | Mapping):
            if isinstance(parsed, list) and not all(isinstance(each, Mapping | str) for each in parsed):
                return
            del record["conversations"]
            record.setdefault("messages", parsed)


def _convert_alpaca(record: dict[str, Any], where: str, field: str) -> None:
    """Convert `instruction`, `input` and `output` to `prompt`, `completion` and `messages`."""
    others = (field, "messages", "prompt", "completion")
    if not isinstance(record.get("instruction"), str) or any(name in record for name in others):
        return
    instruction, more, output = record["instruction"], record.get("input", ""), record.get("output")
    if not isinstance(more, str) or (output is not None and not isinstance(output, str)):
        raise DataError(f"{where}: fields 'input' and 'output' must be texts, as in Alpaca's records.")
    prompt: list[Any] = []
    for pair in record.pop("history", None) or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"{where}: field 'history' must be a list of pairs: an instruction and its answer.")
        roles = zip(("user", "assistant"), pair, strict=True)
        prompt += [{"role": role, "content": text} for role, text in roles]
    content = f"{instruction}\n{more}" if more.strip() else instruction
    record["prompt"] = [*prompt, {"role": "user", "content": content}]
    if output is not None:
        record["completion"] = [{"role": "assistant", "content": output}]
        record["messages"] = record["prompt"] + record["completion"]


def _convert_openai_pair(record: dict[str, Any], where: str) -> None:
    """Convert OpenAI's preferences: `input.messages`, `preferred_output` and `non_preferred_output`."""
    if not all(isinstance(record.get(name), list) for name in OPENAI_PAIRS):
        return
    value = record.get("input")
    if not isinstance(value, Mapping) or "messages" not in value:
        raise DataError(f"{where}: field 'input' must be an object with 'messages', as in OpenAI's preferences.")
    record["prompt"] = value["messages"]
    if value.get("tools"):
        record["tools"] = value["tools"]
    for name, ours in OPENAI_PAIRS.items():
        record[ours] = record.pop(name)


def _convert_variables(record: dict[str, Any], where: str) -> None:
    """Parse JSON strings of template variables, and convert OpenAI's older `functions` to `tools`."""
    for name in (*VARIABLES, "functions"):
        if isinstance(record.get(name), str):
            record[name] = _parse_json(record[name], name, where) if record[name].strip() else None
        if isinstance(record.get(name), list):
            is_json = name in ("tools", "functions")
            record[name] = [
                _parse_json(member, f"{name}[{number}]", where) if is_json and isinstance(member, str) else member
                for number, member in enumerate(record[name])
            ]
        if name in record:
            record[name] = without_nulls(record[name])
    if isinstance(record.get("functions"), list) and not record.get("tools"):
        record["tools"] = [{"type": "function", "function": function} for function in record.pop("functions")]


def _add_system(record: dict[str, Any], where: str, field: str) -> None:
    """Put the text of a column `system` before the messages."""
    system = record.get("system")
    if not isinstance(system, str) or not system.strip() or _is_plain(record, field):
        return
    names = [name for name in (field, "messages", "prompt") if isinstance(record.get(name), list)]
    if not names:
        if "prompt" in record:
            raise DataError(
                f"{where}: field 'system' belongs to a conversation, and 'prompt' is a text without a chat template. "
                "Give 'messages', or write the system message into the prompt."
            )
        return
    message = {"role": "system", "content": system}
    for name in names:
        first = record[name][0] if record[name] else None
        if isinstance(first, Mapping) and first.get("role") == "system":
            if first.get("content") != system:
                raise DataError(f"{where}: field 'system' and the first of {name!r} are two system messages: keep one.")
            continue
        record[name] = [message, *record[name]]


def _is_plain(record: Mapping[str, Any], field: str) -> bool:
    """Return whether a record is a text without a prompt."""
    return field not in MESSAGE_FIELDS and isinstance(record.get(field), str)


def _refuse_keys(record: Mapping[str, Any], where: str, field: str) -> None:
    chat, is_plain = is_chat(record, field), _is_plain(record, field)
    refused = UNSUPPORTED_RECORD_KEYS | (UNSUPPORTED_CHAT_KEYS if (chat or "prompt" in record) and not is_plain else {})
    for key, meaning in refused.items():
        if key in record and record[key] is not True and record[key] != 1:
            raise DataError(
                f"{where}: {key}={str(record[key])[:60]} is {meaning}, which is not supported. Remove the field, or "
                "leave the record out."
            )
    if not chat and not is_plain and "prompt" in record and record.get("tools"):
        raise DataError(
            f"{where}: field 'tools' belongs to a conversation, and 'prompt' is a text without a chat template. "
            "Give messages."
        )


def _parse_json(text: Any, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: field {name!r} is not valid JSON: {error}.") from error
