"""Prompts with images, videos and audio: their files, and the expansion of placeholders."""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.tokenizer import Span, hidden


# Keys under which a part of each kind may contain its file, as in transformers.
KINDS = {
    "image": ("image", "path", "url"),
    "video": ("video", "path", "url"),
    "audio": ("audio", "path", "url"),
}
ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}  # arguments of `Processor.__call__`


class PromptFiles(NamedTuple):
    """Files of one kind in a prompt: the kind, its placeholder, and the text of each file."""

    kind: str
    placeholder: str
    texts: Sequence[str]


def message(text: str, *, images: int = 0, videos: int = 0, audio: int = 0) -> list[dict[str, Any]]:
    """Return a conversation of one user message with parts for the numbers of images, videos and audio clips."""
    counts = {"image": images, "video": videos, "audio": audio}
    parts: list[dict[str, Any]] = [{"type": kind} for kind, count in counts.items() for _ in range(count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def check_parts(messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return messages in the format of the chat template, and the files in the messages by kind.

    The content of a message is a string or a list of parts: `{"type": "text", "text": ...}`, or a part of type "image",
    "video" or "audio". Such a part may contain its file. For each kind, either all parts or no part must contain files.
    Raises DataError for other formats.
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"messages={str(messages)[:60]} must be a list with at least one message.")
    files: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    counts = dict.fromkeys(KINDS, 0)
    text_messages = []  # messages whose lists of parts are replaced by an empty string
    contents = []
    for index, item in enumerate(messages):
        parts = item.get("content") if isinstance(item, Mapping) else None
        if isinstance(parts, list | tuple):
            where = f"messages[{index}]: content"
            contents.append([_check_part(f"{where}[{i}]", part, files, counts) for i, part in enumerate(parts)])
            text_messages.append({**item, "content": ""})
        else:
            contents.append(None)
            text_messages.append(item)
    for kind, sources in files.items():
        if len(sources) not in (0, counts[kind]):
            raise DataError(
                f"messages contain files in {len(sources)} of {counts[kind]} parts of type {kind!r}. Put the files of "
                f"all these parts in messages, or pass all of them in {ARGUMENTS[kind]}."
            )
    checked = [
        item if parts is None else {**item, "content": parts}
        for item, parts in zip(check_messages(text_messages), contents, strict=True)
    ]
    return checked, files


def _check_part(where: str, part: Any, files: dict[str, list[Any]], counts: dict[str, int]) -> dict[str, Any]:
    """Return a part without its file, which chat templates do not use. Adds the file to `files` and `counts`."""
    if not isinstance(part, Mapping) or part.get("type") not in ("text", *KINDS):
        raise DataError(
            f"{where}={str(part)[:60]} must be an object with type text, {', '.join(KINDS)}, such as "
            "{'type': 'image', 'image': 'cat.png'}."
        )
    kind = part["type"]
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"{where}: text={str(part.get('text'))[:60]} must be a string.")
        return dict(part)
    counts[kind] += 1
    files[kind] += [part[key] for key in KINDS[kind] if part.get(key) is not None][:1]
    return {key: value for key, value in part.items() if key not in KINDS[kind]}


def render(template: ChatTemplate, messages: Sequence[Any], variables: Mapping[str, Any], *, answer: bool) -> Rendered:
    """Render a conversation that `check_parts` has checked.

    `variables`: additional variables of the template. `answer`: whether to add the generation prompt.
    """
    (text,) = template.render_many([Conversation(messages, variables, answer)])
    if isinstance(text, Exception):
        raise text
    return text


def in_order(text: str, files: Sequence[PromptFiles]) -> list[str]:
    """Return the kinds of the files in a text, in the order of their placeholders."""
    kinds = {placeholder: kind for kind, placeholder, texts in files if texts}
    if not kinds:
        return []
    return [kinds[placeholder] for placeholder in re.findall("|".join(map(re.escape, kinds)), text)]


def expand(text: str, files: Sequence[PromptFiles], literal: Sequence[Span] = ()) -> tuple[str, list[Span]]:
    """Replace placeholders, in order, by the texts of their files.

    `literal`: spans of the text in which placeholders are not replaced. Returns the new text and the literal spans in
    it. Raises DataError if the numbers of placeholders and files differ.
    """
    visible = hidden(text, literal)
    for kind, placeholder, texts in files:
        count = visible.count(placeholder)
        if count != len(texts):
            raise DataError(
                f"the prompt has {count} placeholders {placeholder!r}, but {ARGUMENTS[kind]} has {len(texts)} files. "
                "Write one placeholder for each file, or pass messages with parts."
            )
    remaining = {placeholder: iter(texts) for _, placeholder, texts in files if texts}
    if not remaining:
        return text, list(literal)
    pieces = []
    ends = [0]  # ends of the placeholders in `text`
    shifts = [0]  # the number of characters by which the text after each placeholder moves
    for match in re.finditer("|".join(map(re.escape, remaining)), visible):
        replacement = next(remaining[match.group()])
        pieces += text[ends[-1] : match.start()], replacement
        ends.append(match.end())
        shifts.append(shifts[-1] + len(replacement) - len(match.group()))
    pieces.append(text[ends[-1] :])
    spans = []
    for start, stop in literal:
        shift = shifts[bisect.bisect_right(ends, start) - 1]
        spans.append((start + shift, stop + shift))
    return "".join(pieces), spans
