"""Normalize records (JSON objects, rows of tables), in the same way for all kinds of sources and all training methods.

A record has one of these forms:

- a text in the text field;
- a conversation in `messages`, in `conversations` (ShareGPT) or, as a list, in the text field;
- a `prompt`, optionally with a `completion`, or with `chosen` and `rejected`; each is a text or a list of messages;
- `instruction`, `input` and `output` (Alpaca);
- `input.messages`, `preferred_output` and `non_preferred_output` (OpenAI).

`normalize_record` converts the last two forms to the other forms. It parses JSON strings, converts columns of lists to
lists of messages, and unifies the names of roles and keys, and the keys that exclude a message from the loss. It raises
DataError for keys that are not supported and would change the training targets.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import object_arguments


# Role names of public datasets, in lower case, and the normalized roles.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "usr"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "ai", "chatgpt", "chatbot", "bard", "bing"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),  # the server renders developer messages as system messages
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),  # becomes an assistant message with tool_calls
}

ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
TRAIN = "train"  # key of normalized messages: False if the message is excluded from training

# Keys of messages that include a message in training or exclude it: OpenAI, Mistral and Together (weight), axolotl
# (train, training), ms-swift and XTuner (loss), verl (trainable, loss_mask), torchtune (masked, which is inverted),
# slime (step_loss_mask). A weight must be 0 or 1. Messages of all roles may have a weight; other keys may be true only
# for assistant messages.
WEIGHTS = ("weight", "loss_scale", "loss_weight")
TRAIN_FLAGS = (*WEIGHTS, TRAIN, "training", "trainable", "train_on_turn", "loss", "loss_mask", "step_loss_mask")
INVERTED_FLAGS = ("masked",)

# Keys of messages and records that would change the training targets, but are not supported: (key, meaning).
UNSUPPORTED_MESSAGE_KEYS = {
    "train_detail": "flags for parts of a message",
    "training_detail": "flags for parts of a message",
    "mask": "loss masks, whose polarity is ambiguous,",
    "audio": "audio completions",
    "refusal": "refusals outside of the content",
}
UNSUPPORTED_RECORD_KEYS = {
    "input_ids": "pre-tokenized records",
    "loss_mask": "token-level loss masks",
    "assistant_masks": "token-level loss masks",
    "completion_mask": "token-level loss masks",
    "loss_weight": "weights of records",
    "sample_weight": "weights of records",
}
# Not supported in conversations and prompts. In records of plain text these may be the names of unrelated columns.
UNSUPPORTED_CHAT_KEYS = {
    "weight": "weights of records",
    "train": "flags of records",
    "training": "flags of records",
    "chat_template": "chat templates of records",
    "kto_tag": "labels with this name (--method kto reads 'label')",
    "mask": "loss masks of records",
}

# Variables of chat templates, with the names of TRL's conversational formats.
VARIABLES = ("tools", "documents", "chat_template_kwargs")
# Fields with lists of media files, in the order of their placeholders, and the kind of file.
MEDIA_FIELDS = {"images": "image", "videos": "video", "audios": "audio"}
MESSAGE_FIELDS = ("messages", "prompt", "completion", "chosen", "rejected")
ALPACA = ("instruction", "input", "output", "system", "history")
OPENAI_PAIRS = {"preferred_output": "chosen", "non_preferred_output": "rejected"}

# Columns of a table that `normalize_record` reads.
COLUMNS = (*MESSAGE_FIELDS, "conversations", *ALPACA, "system_prompt", *OPENAI_PAIRS, *VARIABLES, "functions", "label")
COLUMNS += (*MEDIA_FIELDS, *MEDIA_FIELDS.values(), *UNSUPPORTED_RECORD_KEYS, *UNSUPPORTED_CHAT_KEYS)

_PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(?:role|from|content|value)'\s*:")
_PYTHON_ROLE = re.compile(r"'(?:role|from)'\s*:\s*'([^']*)'")


def normalize_record(record: Any, where: str, field: str = "text") -> dict[str, Any]:
    """Normalize a record: messages become lists of `{"role", "content", …}`, and `tools` a list of objects.

    Other fields are unchanged. Null values are removed from messages and template variables, because every row of a
    table has the keys of all rows.

    **Arguments:**

    - `where`: location of the record, with which error messages start.
    - `field`: name of the text field. Messages in this field are normalized; a text is unchanged.

    Raises DataError if the record is invalid or not supported.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} must be a JSON object, not {type(record).__name__}. Write one object per line.")
    result = {key: value for key, value in record.items() if value is not None}
    if field in result and field not in MESSAGE_FIELDS:
        # The field "text" may contain any text, even JSON, and is not parsed.
        result[field] = _texts_or_messages(result[field], field, where, parse=field != "text")
        if _is_plain_text(result, field):  # no other field is read
            check_unicode(result[field], field, where)
            _check_keys(result, where, field)
            return result
    _convert_openai_pair(result, where)
    _convert_sharegpt(result, where, field)
    for name in MESSAGE_FIELDS:
        if name in result:
            result[name] = _texts_or_messages(result[name], name, where, parse=True)
    _convert_alpaca(result, where, field)
    if is_chat(result, field):
        _convert_variables(result, where)
    if is_chat(result, field) or "prompt" in result:
        _convert_files(result)
    _add_system(result, where, field)
    variables = VARIABLES if is_chat(result, field) else ()
    for name in dict.fromkeys((*MESSAGE_FIELDS, *variables, field)):
        if name in result:
            check_unicode(result[name], name, where)
    _check_keys(result, where, field)
    return result


def field_names(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that are not null. (Every row of a table has the fields of all rows.)"""
    return [name for name in record if record[name] is not None]


def normalize_prompt(record: Any, where: str) -> dict[str, Any]:
    """Normalize a record for generation: `prompt` becomes a text or a list of normalized messages.

    The prompt is read from `prompt`, or from the conversation in `messages` or `conversations`, or from Alpaca's
    `instruction` and `input`. Other fields are unchanged, because reward functions and graders read them. Raises
    DataError if the record has no prompt.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} must be a JSON object, not {type(record).__name__}. Write one object per line.")
    sources = (("prompt",), ("messages",), ("conversations",), ("instruction", "input", "history"))
    source = next((names for names in sources if record.get(names[0]) is not None), ())
    names = (*source, "system", "system_prompt", "functions", *VARIABLES)
    normalized = normalize_record({name: record[name] for name in names if name in record}, where, "prompt")
    prompt = normalized.get("prompt", normalized.get("messages"))
    if prompt is None:
        names = ", ".join(field_names(record)) or "none"
        raise DataError(
            f"{where} has no field 'prompt' or 'messages'. It has the fields: {names}. Rename the column with the "
            "question to 'prompt', or remove the record if the prompt is null."
        )
    prompt = split_flags(prompt)[0] if isinstance(prompt, list) else prompt
    variables = {name: normalized[name] for name in VARIABLES if name in normalized}
    return {**record, **variables, "prompt": prompt}


def check_unicode(value: Any, name: str, where: str) -> None:
    """Raise DataError if a string in a JSON value contains half of a surrogate pair, which UTF-8 cannot encode."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: field {name!r} is not valid Unicode: character {error.start} is half of a surrogate pair. "
                "Write the complete character, or remove the record."
            ) from error
    elif isinstance(value, Mapping):
        for key, member in value.items():
            check_unicode(key, f"{name}.{key!a}", where)
            check_unicode(member, f"{name}.{key}", where)
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            check_unicode(member, f"{name}[{number}]", where)


def without_nulls(value: Any) -> Any:
    """Remove keys with the value null from a JSON value, at any depth. Null members of lists are not removed."""
    if isinstance(value, list | tuple):
        return [without_nulls(member) for member in value]
    if isinstance(value, Mapping):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    return value


def json_value(value: Any, name: str, where: str) -> Any:
    """Convert a value of a table to a JSON value: dates, times and decimal numbers become strings.

    Raises DataError for bytes.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [json_value(member, f"{name}[{number}]", where) for number, member in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: json_value(member, f"{name}.{key}", where) for key, member in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        raise DataError(
            f"{where}: {name} contains {len(value)} bytes, but messages must be JSON values. Remove the field, or save "
            "the bytes to a file and replace the field by the name of the file."
        )
    return str(value)


def is_chat(record: Mapping[str, Any], field: str = "text") -> bool:
    """Return whether a normalized record contains messages."""
    return any(isinstance(record.get(name), list) for name in (*MESSAGE_FIELDS, field))


def text_of_parts(content: Any) -> Any:
    """Join the text parts of a message's content with newlines, in the same way as the server.

    An empty list becomes an empty text. Content that is not a list of text parts is returned unchanged.
    """
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def as_texts(messages: Sequence[Any]) -> list[Any]:
    """Join the text parts in the content of each message (see `text_of_parts`)."""
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
    """Return a text unchanged; normalize messages. With `parse=True`, messages may also be a JSON string."""
    if isinstance(value, str):
        messages = _parsed_messages(value, name, where) if parse else None
        if messages is None and name == "messages":
            raise DataError(
                f"{where}: field {name!r} must be a list of messages, or a JSON string of such a list, not the text "
                f"{value[:40]!r}. Rename the column, or set --text-field {name} if it contains plain text."
            )
        return value if messages is None else normalize_messages(messages, name, where)
    return normalize_messages(value, name, where) if isinstance(value, list | tuple | Mapping) else value


def _parsed_messages(text: str, name: str, where: str) -> Any:
    """Parse a JSON string of messages; return None for other texts."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        roles = _PYTHON_ROLE.findall(text) if _PYTHON_MESSAGES.match(text) else []
        if roles and (name in ("messages", "conversations") or all(map(_is_role, roles))):
            raise DataError(
                f"{where}: field {name!r} contains messages in Python's repr format, {text[:40]!r}, which is not JSON. "
                "Write the column with json.dumps, or as a list."
            ) from None
        return None
    messages = [value] if isinstance(value, dict) else value
    any_role = name in ("messages", "conversations")  # these fields contain only messages
    return messages if messages and all(_is_message(message, any_role) for message in messages) else None


def _is_message(value: Any, any_role: bool) -> bool:
    """Return whether a JSON value is a message.

    With `any_role=False` the role must be known, because an object with another role may be a completion in JSON.
    """
    if not isinstance(value, Mapping):
        return False
    has_content = any(key in value for key in (*CONTENT_KEYS, "tool_calls", "function_call"))
    roles = [value[key] for key in ROLE_KEYS if isinstance(value.get(key), str)]
    return has_content and any(any_role or _is_role(role) for role in roles)


def _is_role(name: str) -> bool:
    return name.strip().lower() in ROLES


def normalize_messages(value: Any, name: str, where: str) -> list[Any]:
    """Normalize messages: objects with `role`, `content` and other keys, without null values.

    A normalized message has the key `train` only if the message is excluded from training (`train=False`).

    `value`: a list of messages, a single message, or an object with a list for each key (the form in which the package
    `datasets` stores lists of objects).
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
    messages: list[dict[str, Any]] = []
    for number, member in enumerate(value):
        message, is_call = _message(member, f"{name}[{number}]", where)
        if is_call and messages and messages[-1].get("role") == "assistant":
            messages[-1] = _append_calls(messages[-1], message, f"{name}[{number}]", where)
        else:
            messages.append(message)
    return messages


def _append_calls(message: dict[str, Any], calls: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Append the tool calls in a message of the role `function_call` or `tool_call` to the previous assistant message.

    An assistant message may have a text and several tool calls.
    """
    if message.get(TRAIN) != calls.get(TRAIN):
        raise DataError(
            f"{where}: {name} is a tool call that belongs to the previous assistant message, but only one of the two "
            "messages is trained on. Set weight, train or loss of both messages to the same value."
        )
    return {**message, "tool_calls": [*message.get("tool_calls", ()), *calls["tool_calls"]]}


def _message(value: Any, name: str, where: str) -> tuple[dict[str, Any], bool]:
    """Normalize a message; return also whether the role was `function_call` or `tool_call`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parse_json(value, name, where)
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {name}={str(value)[:60]} must be an object with role and content.")
    message = json_value(without_nulls(value), name, where)
    for key, other_key in (ROLE_KEYS, CONTENT_KEYS):
        if other_key in message and key not in message:
            message[key] = message.pop(other_key)
    _convert_calls(message, name, where)
    if isinstance(message.get("role"), str):
        role = message["role"].strip()
        message["role"] = ROLES.get(role.lower(), role)
    is_call = message.get("role") == "function_call"
    if is_call:
        content = message.pop("content", "")
        calls = _parse_json(content, f"{name}.content", where) if isinstance(content, str) else content
        message |= {"role": "assistant", "tool_calls": [_call(call, name, where) for call in _as_list(calls)]}
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part) for part in message["content"]] or ""
    if "tool_calls" in message and "content" not in message:
        message["content"] = None  # as in responses of the OpenAI API
    for key, meaning in UNSUPPORTED_MESSAGE_KEYS.items():
        if message.get(key) or (key == "mask" and key in message):
            raise DataError(
                f"{where}: {name}.{key}={str(message[key])[:60]}: {meaning} are not supported. Remove the key or "
                "the record."
            )
        message.pop(key, None)
    _convert_flags(message, name, where)
    return message, is_call


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _part(part: Any) -> Any:
    """Normalize a content part.

    Strings and text parts of other types, such as `input_text`, become parts of the type "text". OpenAI's `image_url`
    becomes a part of the type "image".
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image"):
        url = part.get("image_url")
        return {"type": "image", "image": url.get("url") if isinstance(url, Mapping) else url}
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    return {**part, "type": "text"} if part.get("type") in (None, "input_text", "output_text") else part


def _convert_calls(message: dict[str, Any], name: str, where: str) -> None:
    """Parse JSON strings in `tool_calls`, and convert `function_call` (OpenAI's older format) to `tool_calls`."""
    for key in ("tool_calls", "function_call"):
        value = message.get(key, True)
        if not value or (isinstance(value, str) and not value.strip()):  # tables may contain "" instead of null
            del message[key]
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parse_json(message["tool_calls"], f"{name}.tool_calls", where)
    if isinstance(message.get("tool_calls"), Mapping):
        message["tool_calls"] = [message["tool_calls"]]
    if isinstance(message.get("tool_calls"), list):
        calls = [_parse_json(call, name, where) if isinstance(call, str) else call for call in message["tool_calls"]]
        message["tool_calls"] = [_with_parsed_arguments(_with_function(call, name, where)) for call in calls]
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "function_call" in message:
        call = message.pop("function_call")
        call = _parse_json(call, f"{name}.function_call", where) if isinstance(call, str) else call
        message["tool_calls"] = [*message.get("tool_calls", ()), _call(call, name, where)]


def _call(call: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise DataError(f"{where}: {name}: the tool call {str(call)[:60]} must be an object with name and arguments.")
    return _with_parsed_arguments({"type": "function", "function": _with_arguments_key(call, name, where)})


def _with_arguments_key(call: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return a tool call in which the arguments have the key `arguments`. (In Llama's format the key is `parameters`.)

    Raises DataError if the arguments seem to have another key, because the arguments would not be learned.
    """
    if "arguments" in call:
        return dict(call)
    if "parameters" in call:
        return {"arguments" if key == "parameters" else key: value for key, value in call.items()}
    others = [key for key in call if key not in ("name", "id", "type", "index")]
    if others:
        raise DataError(
            f"{where}: {name}: the call of {call['name']!r} has no key 'arguments', but the keys "
            f"{', '.join(map(repr, others))}. Rename the key of the arguments to 'arguments'."
        )
    return dict(call)


def _with_function(call: Any, name: str, where: str) -> Any:
    """Return a tool call with the name and the arguments in `function`, where many chat templates expect them."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping) and isinstance(call["function"].get("name"), str):
        return {**call, "function": _with_arguments_key(call["function"], name, where)}
    if "function" in call or not isinstance(call.get("name"), str):
        return call
    call = _with_arguments_key(call, name, where)
    function = {key: call[key] for key in ("name", "arguments") if key in call}
    return {"type": "function", **{key: call[key] for key in call if key not in function}, "function": function}


def _with_parsed_arguments(call: Any) -> Any:
    """Return a tool call with the arguments parsed, if they are a JSON string of an object. The server does the same.

    In OpenAI's format the arguments are JSON strings. Many chat templates convert the arguments to JSON, and would
    encode a string twice.
    """
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        # In tables, the arguments of a tool without parameters may be null.
        if function.get("arguments") is None and "parameters" not in (*call, *function):
            function = {**function, "arguments": {}}
        return {**call, "function": _with_parsed_arguments(function)}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        value = object_arguments(call["arguments"])
    except ValueError:
        return call
    return {**call, "arguments": value} if isinstance(value, dict) else call


def _convert_flags(message: dict[str, Any], name: str, where: str) -> None:
    """Remove the keys that include or exclude a message; set `train: False` if the message is excluded."""
    flags: dict[str, bool] = {}  # whether the message is trained on, according to each key
    for key in (*TRAIN_FLAGS, *INVERTED_FLAGS):
        if key in message:
            value = message.pop(key)
            if key in WEIGHTS and isinstance(value, int | float) and value not in (0, 1):
                raise DataError(
                    f"{where}: {name}.{key}={value}: loss weights of messages must be 0 or 1. Use `weight: 0` to "
                    "exclude a message from training."
                )
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise DataError(
                    f"{where}: {name}.{key}={str(value)[:60]} must be 0, 1, true or false (whether to train on the "
                    "message)."
                )
            flags[key] = bool(value) != (key in INVERTED_FLAGS)
    if len(set(flags.values())) > 1:
        raise DataError(f"{where}: {name} has contradictory keys: {', '.join(flags)}. Remove all keys but one.")
    trained = next(iter(flags.values()), None)
    train_keys = [key for key in flags if key not in (*WEIGHTS, *INVERTED_FLAGS)]
    if trained and train_keys and message.get("role") != "assistant":
        raise DataError(
            f"{where}: {name}.{train_keys[0]}={trained} selects a message of the role {message.get('role')!r}, but "
            "only assistant messages are trained on. Remove the key."
        )
    if trained is False:
        message[TRAIN] = False


def split_flags(messages: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return normalized messages without the key `train`, and the indices of excluded assistant messages."""
    excluded = [
        index
        for index, message in enumerate(messages)
        if isinstance(message, Mapping) and message.get("role") == "assistant" and message.get(TRAIN) is False
    ]
    without_flags = [
        {key: value for key, value in message.items() if key != TRAIN} if isinstance(message, Mapping) else message
        for message in messages
    ]
    return without_flags, tuple(excluded)


# --- other formats ----------------------------------------------------------------------------------------------------


def _convert_sharegpt(record: dict[str, Any], where: str, field: str) -> None:
    if "conversations" in record and field != "conversations" and not _is_plain_text(record, field):
        value = record["conversations"]
        parsed = _parsed_messages(value, "conversations", where) if isinstance(value, str) else value
        if isinstance(parsed, list | Mapping):
            if isinstance(parsed, list) and not all(isinstance(message, Mapping | str) for message in parsed):
                return
            del record["conversations"]
            record.setdefault("messages", parsed)


def _convert_alpaca(record: dict[str, Any], where: str, field: str) -> None:
    """Convert `instruction`, `input` and `output` to `prompt`, `completion` and `messages`."""
    other_forms = (field, "messages", "prompt", "completion")
    if not isinstance(record.get("instruction"), str) or any(name in record for name in other_forms):
        return
    instruction, context, output = record["instruction"], record.get("input", ""), record.get("output")
    if not isinstance(context, str) or (output is not None and not isinstance(output, str)):
        raise DataError(f"{where}: fields 'input' and 'output' must be texts, as in the Alpaca dataset.")
    prompt: list[Any] = []
    history = record.pop("history", None) or ()
    if isinstance(history, str):
        history = _parse_json(history, "history", where) if history.strip() else ()
    if not isinstance(history, list | tuple):
        history = [history]
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"{where}: field 'history' must be a list of pairs of an instruction and a response.")
        roles = zip(("user", "assistant"), pair, strict=True)
        prompt += [{"role": role, "content": text} for role, text in roles]
    content = "\n".join(text for text in (instruction, context) if text.strip()) or instruction
    record["prompt"] = [*prompt, {"role": "user", "content": content}]
    if output is not None:
        record["completion"] = [{"role": "assistant", "content": output}]
        record["messages"] = record["prompt"] + record["completion"]


def _convert_openai_pair(record: dict[str, Any], where: str) -> None:
    """Convert preference pairs in OpenAI's format: `input.messages`, `preferred_output`, `non_preferred_output`."""
    if not all(isinstance(record.get(name), list) for name in OPENAI_PAIRS):
        return
    value = record.get("input")
    if not isinstance(value, Mapping) or "messages" not in value:
        raise DataError(f"{where}: field 'input' must be an object with 'messages', as in OpenAI's format.")
    record["prompt"] = value["messages"]
    if value.get("tools"):
        record["tools"] = value["tools"]
    for openai_name, name in OPENAI_PAIRS.items():
        record[name] = record.pop(openai_name)


def _convert_variables(record: dict[str, Any], where: str) -> None:
    """Parse JSON strings of template variables, and convert `functions` (OpenAI's older format) to `tools`."""
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
            record[name] = json_value(without_nulls(record[name]), name, where)
    if isinstance(record.get("functions"), list) and not record.get("tools"):
        record["tools"] = record.pop("functions")
    if isinstance(record.get("tools"), list):
        record["tools"] = [_tool(tool) for tool in record["tools"]]


def _tool(value: Any) -> Any:
    """Return the definition of a tool with the name and the parameters in `function`. The server does the same."""
    if not isinstance(value, Mapping) or "function" in value or not isinstance(value.get("name"), str):
        return value
    if value.get("type", "function") != "function":
        return value
    return {"type": "function", "function": {key: value[key] for key in value if key != "type"}}


def _convert_files(record: dict[str, Any]) -> None:
    """Convert the fields `image`, `video` and `audio` (a file or a list) to `images`, `videos` and `audios`."""
    for name, kind in MEDIA_FIELDS.items():
        if record.get(kind, "") != "" and not record.get(name):
            record[name] = _as_list(record.pop(kind))


def _add_system(record: dict[str, Any], where: str, field: str) -> None:
    """Insert the text of the field `system` or `system_prompt` as the first message of each conversation."""
    if is_chat(record, field) and "system" not in record and "system_prompt" in record:
        record["system"] = record.pop("system_prompt")
    system = text_of_parts(record.get("system"))
    if not system or _is_plain_text(record, field):
        return
    if not is_chat(record, field):
        if isinstance(system, str) and system.strip() and "prompt" in record:
            raise DataError(
                f"{where}: field 'system' requires a conversation, but 'prompt' is a plain text, to which no chat "
                "template is applied. Use 'messages', or write the system message into the prompt."
            )
        return
    if not isinstance(system, str):
        raise DataError(
            f"{where}: field 'system'={str(system)[:60]} must be a text. Put a system message into 'messages', or "
            "rename the field if it is not a system message."
        )
    if not system.strip():
        return
    message = {"role": "system", "content": system}
    for name in _conversations(record, field):
        messages = record[name]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        first = messages[0] if messages else None
        if not isinstance(first, Mapping) or first.get("role") != "system":
            record[name] = [message, *messages]
        elif str(text_of_parts(first.get("content"))).strip() != system.strip():
            raise DataError(
                f"{where}: the field 'system' and the first message of {name!r} are different system messages. Remove "
                "one of them."
            )


def _conversations(record: Mapping[str, Any], field: str) -> list[str]:
    """Return the fields with messages that start a conversation. Messages in other fields follow a prompt."""
    names = [name for name in dict.fromkeys((field, "messages", "prompt")) if isinstance(record.get(name), list)]
    prompt = record.get("prompt", record.get("messages"))
    completions = [name for name in ("completion", "chosen", "rejected") if isinstance(record.get(name), list)]
    if isinstance(prompt, list):  # completions may repeat the messages of the prompt
        plain, _ = split_flags(prompt)
        repeating = [name for name in completions if plain and split_flags(record[name])[0][: len(plain)] == plain]
        return list(dict.fromkeys([*names, *repeating]))
    pairs = [name for name in completions if name != "completion"]
    first_roles = {
        str(message.get("role")) for name in pairs for message in record[name][:1] if isinstance(message, Mapping)
    }
    if pairs and "assistant" not in first_roles:
        return [*names, *pairs]
    return [*names, "prompt"] if isinstance(prompt, str) and completions else names


def _is_plain_text(record: Mapping[str, Any], field: str) -> bool:
    """Return whether the text field of a record contains a plain text that is not a prompt."""
    return field not in MESSAGE_FIELDS and isinstance(record.get(field), str)


def _check_keys(record: Mapping[str, Any], where: str, field: str) -> None:
    """Raise DataError if a record has keys that are not supported and would change the training targets."""
    chat, is_plain = is_chat(record, field), _is_plain_text(record, field)
    unsupported = dict(UNSUPPORTED_RECORD_KEYS)
    if (chat or "prompt" in record) and not is_plain:
        unsupported |= UNSUPPORTED_CHAT_KEYS
    for key, meaning in unsupported.items():
        if key in record and not _has_no_effect(key, record[key]):
            raise DataError(
                f"{where}: {key}={str(record[key])[:60]}: {meaning} are not supported. Remove the field or the record."
            )
    if not chat and not is_plain and "prompt" in record and _has_schemas(record.get("tools")):
        raise DataError(
            f"{where}: field 'tools' requires a conversation, but 'prompt' is a plain text, to which no chat template "
            "is applied. Use 'messages', or a list of messages as the prompt."
        )


def _has_no_effect(key: str, value: Any) -> bool:
    """Return whether the value of an unsupported key of a record describes the default behavior."""
    if key == "mask":  # in NeMo's format: the role that is not trained on
        return isinstance(value, str) and ROLES.get(value.strip().lower()) == "user"
    return value is True or value == 1


def _has_schemas(tools: Any) -> bool:
    """Return whether the field `tools` contains tool definitions, and not unrelated data with the same name."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return False
    return isinstance(tools, list) and any(isinstance(tool, Mapping) for tool in tools)


def _parse_json(text: Any, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: field {name!r} is not valid JSON: {error}.") from error
