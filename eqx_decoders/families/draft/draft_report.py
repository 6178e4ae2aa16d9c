"""The report of a draft: the nearest families, what differs, what is open, and what to do next."""

import textwrap
from collections.abc import Mapping, Sequence

from eqx_decoders.core.config_reader import abbreviate
from eqx_decoders.families.draft.comparison import Comparison
from eqx_decoders.families.draft.notes import Notes, printable


_SHOWN = 3
_SUSPECTS = 5
_WIDTH = 118


def report(
    shares: Sequence[tuple[str, float, float]],
    suspects: Mapping[str, Sequence[str]],
    comparison: Comparison,
    notes: Notes,
    draft: str,
) -> str:
    """Return the report of the text of a draft.

    **Arguments:**

    - `shares`: of tensors and of keys that each family has, the nearest first.
    - `suspects`: what families with the same names have that no name shows.
    """
    nearest = comparison.family.model_type
    layers = {layer for group in comparison.groups.values() for layer in group.layers}
    lines = [f"{len(comparison.groups)} kinds of tensors in {len(layers)} layers, {len(comparison.content)} keys", ""]
    lines += [f"{'nearest families':24}{'tensors':>10}{'keys':>8}   by their names"]
    for name, tensors, keys in shares[:_SHOWN]:
        lines.append(f"  {name:22}{_percent(tensors):>10}{_percent(keys):>8}")
    differences = _differences(comparison) + _keys(notes)
    if differences:
        lines += ["", f"what differs from {nearest}:", *(f"  {line}" for line in differences)]
    elif "# QUESTION:" not in draft:
        lines += ["", f"nothing differs from {nearest} but its name"]
    for title, word in (("what is assumed", "assumed: "), ("what is open", "QUESTION: ")):
        found = comments(draft, word)
        lines += ["", f"{title} ({len(found)}):", *(f"  {line}" for line in found)] if found else []
    lines += ["", "names, shapes and keys don't show all: compare the logits."]
    if suspects:
        lines.append("Should they differ, these are what families with the same names have besides:")
        lines += [f"  {habit} ({', '.join(names[:_SHOWN])})" for habit, names in list(suspects.items())[:_SUSPECTS]]
    wrap = textwrap.TextWrapper(_WIDTH, subsequent_indent="    ", drop_whitespace=True)
    return "\n".join(part for line in lines for part in wrap.wrap(printable(line)) or [""])


def comments(draft: str, word: str) -> list[str]:
    """Return the comments in the text of a draft that begin with a word."""
    found: list[str] = []
    going_on = False
    for line in draft.split("\n"):
        text = line.strip()
        if text.startswith(f"# {word}"):
            found.append(text.removeprefix(f"# {word}"))
            going_on = True
        elif going_on and text.startswith("#   "):
            found[-1] += f" {text.removeprefix('#   ')}"
        else:
            going_on = False
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _differences(comparison: Comparison) -> list[str]:
    lines: list[str] = []
    if comparison.prefix:
        lines.append(f"layers are called {comparison.prefix[1]}, not {comparison.prefix[0]}")
    for old, new in dict.fromkeys((rename.old, rename.new) for rename in comparison.renames):
        lines.append(f"{_word(new)} is what {_word(old)} is called")
    for old, new in comparison.reading.renamed.items():
        lines.append(f"{abbreviate(old)} is read as {new}")
    if comparison.reading.fraction is not None:
        lines.append(f"a part of each head is rotated, {comparison.reading.fraction}")
    for row in comparison.added:
        lines.append(f"{row.name} is {row.path}")
    for change in comparison.changes:
        owner = {"block": "of a block", "decoder": "of the decoder"}.get(change.owner, f"of the {change.owner}")
        value = change.code.replace("block.pre_mixer_norm or block.post_mixer_norm", "the block's")
        lines.append(f"{change.field} {owner}: {value}")
    if comparison.windows:
        lines.append("layer_types says which layers have windows")
    return lines


def _keys(notes: Notes) -> list[str]:
    """Return the keys without a question that the nearest family does not read."""
    rows = {note.code.removeprefix("Only(").removesuffix(", written=True)"): note.reason for note in notes.keys}
    said = [f"{row.replace(', ', ' = ', 1)}: {reason}" for row, reason in rows.items() if reason]
    return said + [f"{abbreviate(key)}: {reason}" for key, reason in notes.harmless.items()]


def _word(name: str) -> str:
    return name.strip(".")
