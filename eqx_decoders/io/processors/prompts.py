"""Prompts with images, videos and audio: the files that they carry, and the expansion of placeholders."""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.tokenizer import Span, hidden


# Keys under which a part of each kind may carry its file, as in transformers.
KINDS = {
    "image": ("image", "path", "url"),
    "video": ("video", "path", "url"),
    "audio": ("audio", "path", "url"),
}
ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}


class PromptFiles(NamedTuple):
    """Files of one kind in a prompt: their placeholder, and the text of each."""

    name: str
    placeholder: str
    texts: Sequence[str]


def message(text: str, *, images: int = 0, videos: int = 0, audio: int = 0) -> list[dict[str, Any]]:
    """Return a conversation of one message of the user: parts for images, videos and audio, and then a text."""
    counts = {"image": images, "video": videos, "audio": audio}
    parts: list[dict[str, Any]] = [{"type": kind} for kind, count in counts.items() for _ in range(count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def check_parts(messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return the messages in the template's form, and their files by kind; DataError for other forms.

    The content of a message is a text, or a list of parts: `{"type": "text", "text": ...}`, and `{"type": "image"}`,
    "video" or "audio", each of which may carry its file, or leave it to the argument of `Processor.__call__`.
    """
    files: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    counts = dict.fromkeys(KINDS, 0)
    plain, contents = [], []
    good = isinstance(messages, list | tuple)
    check(good, f"messages={str(messages)[:60]} must be a list with at least one message.", DataError)
    for number, one in enumerate(messages):
        parts = one.get("content") if isinstance(one, Mapping) else None
        if isinstance(parts, list | tuple):
            where = f"messages[{number}]"
            contents.append([_part(f"{where}: content[{at}]", part, files, counts) for at, part in enumerate(parts)])
            plain.append({**one, "content": ""})
        else:
            contents.append(None)
            plain.append(one)
    for kind, sources in files.items():
        rule = "give the files of all of them there, or none"
        few = f"{len(sources)} of {counts[kind]} parts of type {kind!r} in messages carry a file"
        check(len(sources) in (0, counts[kind]), f"{few}: {rule}.", DataError)
    checked = check_messages(plain)
    whole = zip(checked, contents, strict=True)
    return [one if parts is None else {**one, "content": parts} for one, parts in whole], files


def _part(where: str, part: Any, files: dict[str, list[Any]], counts: dict[str, int]) -> dict[str, Any]:
    """Return a part without its file, which a template does not use."""
    good = isinstance(part, Mapping) and part.get("type") in ("text", *KINDS)
    example = "{'type': 'image', 'image': 'cat.png'}"
    rule = f"must be an object whose type is text or one of {', '.join(KINDS)}, such as {example}"
    check(good, f"{where}={str(part)[:60]} {rule}.", DataError)
    kind = part["type"]
    if kind == "text":
        check(
            isinstance(part.get("text"), str), f"{where}: text={str(part.get('text'))[:60]} must be a text.", DataError
        )
        return dict(part)
    counts[kind] += 1
    files[kind] += [part[key] for key in KINDS[kind] if part.get(key) is not None][:1]
    return {key: value for key, value in part.items() if key not in KINDS[kind]}


def render(template: ChatTemplate, messages: Sequence[Any], variables: Mapping[str, Any], *, answer: bool) -> Rendered:
    """Return the text of a conversation that `check_parts` has checked."""
    (text,) = template.render_many([Conversation(messages, variables, answer)])
    if isinstance(text, Exception):
        raise text
    return text


def in_order(text: str, kinds: Sequence[PromptFiles]) -> list[str]:
    """Return the kinds of the files in a text, in the order of their placeholders."""
    names = {placeholder: name for name, placeholder, texts in kinds if texts}
    return (
        [names[placeholder_found] for placeholder_found in re.findall("|".join(map(re.escape, names)), text)]
        if names
        else []
    )


def expand(text: str, kinds: Sequence[PromptFiles], literal: Sequence[Span] = ()) -> tuple[str, list[Span]]:
    """Replace placeholders, in order, by the texts of their files; return also the spans `literal` in the new text.

    The spans `literal` of the text hold no placeholders. DataError, with both counts, where there are fewer or more
    placeholders than files.
    """
    visible = hidden(text, literal)
    for name, placeholder, texts in kinds:
        count = visible.count(placeholder)
        remedy = "write one for each file, where it belongs, or give messages with parts"
        rule = f"but {ARGUMENTS[name]} has {len(texts)} files: {remedy}"
        check(count == len(texts), f"the prompt has {count} placeholders {placeholder!r}, {rule}.", DataError)
    left = {placeholder: iter(texts) for _, placeholder, texts in kinds if texts}
    if not left:
        return text, list(literal)
    pieces, ends, growth = [], [0], [0]
    for match in re.finditer("|".join(map(re.escape, left)), visible):
        pieces += text[ends[-1] : match.start()], next(left[match.group()])
        ends.append(match.end())
        growth.append(growth[-1] + len(pieces[-1]) - len(match.group()))
    moved = [(start, stop, growth[bisect.bisect_right(ends, start) - 1]) for start, stop in literal]
    return "".join([*pieces, text[ends[-1] :]]), [(start + more, stop + more) for start, stop, more in moved]
