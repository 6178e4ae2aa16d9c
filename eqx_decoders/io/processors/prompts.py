"""Prompts with images, videos and audio: which files they ask for, and texts whose placeholders are expanded."""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.tokenizer import Span, hidden


# Of each kind of part the keys under which it may carry its file, as in transformers.
KINDS = {
    "image": ("image", "path", "url"),
    "video": ("video", "path", "url"),
    "audio": ("audio", "path", "url"),
}
ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}


class Kind(NamedTuple):
    """The files of one kind in a prompt: what stands for them in it, and what each becomes."""

    name: str
    placeholder: str
    texts: Sequence[str]


def message(text: str, *, images: int = 0, videos: int = 0, audio: int = 0) -> list[dict[str, Any]]:
    """A conversation of one message of the user: so many images, videos and audio, and then a text."""
    counts = {"image": images, "video": videos, "audio": audio}
    parts: list[dict[str, Any]] = [{"type": kind} for kind, count in counts.items() for _ in range(count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def check_parts(messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """The messages as a template takes them, and the files in them by kind; DataError for other forms.

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
            here = f"messages[{number}]"
            contents.append([_part(f"{here}: content[{at}]", part, files, counts) for at, part in enumerate(parts)])
            plain.append({**one, "content": ""})
        else:
            contents.append(None)
            plain.append(one)
    for kind, found in files.items():
        rule = "give the files of all of them there, or none"
        few = f"{len(found)} of {counts[kind]} parts of type {kind!r} in messages carry a file"
        check(len(found) in (0, counts[kind]), f"{few}: {rule}.", DataError)
    checked = check_messages(plain)
    whole = zip(checked, contents, strict=True)
    return [one if parts is None else {**one, "content": parts} for one, parts in whole], files


def _part(where: str, part: Any, files: dict[str, list[Any]], counts: dict[str, int]) -> dict[str, Any]:
    """A part without its file, which a template has no use for."""
    good = isinstance(part, Mapping) and part.get("type") in ("text", *KINDS)
    rule = f"must be an object whose type is text or one of {', '.join(KINDS)}"
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
    """The text of a conversation whose parts `check_parts` has seen."""
    (found,) = template.render_many([Conversation(messages, variables, answer)])
    if isinstance(found, Exception):
        raise found
    return found


def in_order(text: str, kinds: Sequence[Kind]) -> list[str]:
    """The kinds of the files in a text, in the order of their placeholders."""
    names = {placeholder: name for name, placeholder, texts in kinds if texts}
    return [names[found] for found in re.findall("|".join(map(re.escape, names)), text)] if names else []


def expand(text: str, kinds: Sequence[Kind], literal: Sequence[Span] = ()) -> tuple[str, list[Span]]:
    """The text whose placeholders are replaced, in order, by what the files of their kinds become, and `literal` in it.

    In the spans `literal` of the text are no placeholders. DataError, with both counts, where there are fewer or more
    of them than files.
    """
    seen = hidden(text, literal)
    for name, placeholder, texts in kinds:
        count = seen.count(placeholder)
        remedy = "write one for each file, where it belongs, or give messages with parts"
        rule = f"but {ARGUMENTS[name]} has {len(texts)} files: {remedy}"
        check(count == len(texts), f"the prompt has {count} placeholders {placeholder!r}, {rule}.", DataError)
    left = {placeholder: iter(texts) for _, placeholder, texts in kinds if texts}
    if not left:
        return text, list(literal)
    pieces, ends, growth = [], [0], [0]
    for found in re.finditer("|".join(map(re.escape, left)), seen):
        pieces += text[ends[-1] : found.start()], next(left[found.group()])
        ends.append(found.end())
        growth.append(growth[-1] + len(pieces[-1]) - len(found.group()))
    moved = [(start, stop, growth[bisect.bisect_right(ends, start) - 1]) for start, stop in literal]
    return "".join([*pieces, text[ends[-1] :]]), [(start + more, stop + more) for start, stop, more in moved]
