"""The text of a draft: the file of the nearest family without its sizes, and with what differs."""

import ast
import builtins
import importlib.machinery
import keyword
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.families.draft.changes import Change
from eqx_decoders.families.draft.comparison import Comparison
from eqx_decoders.families.draft.notes import Note, Notes, literal, printable


_WIDTH = 120
_PLACES = {  # of the names that a draft may need besides those of the nearest family's file
    "Any": "typing",
    "BlockConfig": "eqx_decoders.blocks.block",
    "DecoderConfig": "eqx_decoders.model.decoder_config",
    "Family": "eqx_decoders.families.hf_table",
    "Fields": "eqx_decoders.core.config_reader",
    "LayerNormConfig": "eqx_decoders.layers.norm",
    "Mask": "eqx_decoders.layers.mask",
    "Only": "eqx_decoders.families.settings_table",
    "Parallel": "eqx_decoders.blocks.residual.residual",
    "QKNorm": "eqx_decoders.layers.attention.attention",
    "Renamed": "eqx_decoders.families.settings_table",
    "Rule": "eqx_decoders.families.settings_table",
    "Values": "eqx_decoders.families.settings_table",
    "Weight": "eqx_decoders.families.weight_rows",
    "dataclasses": "",
    "map_blocks": "eqx_decoders.families.common",
    "read_masks": "eqx_decoders.families.common",
    "renamed": "eqx_decoders.families.common",
    "with_masks": "eqx_decoders.families.common",
    "write_masks": "eqx_decoders.families.common",
}
_READ_MASKS = '''\
def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...]:
    """Read which layers have windows, from `layer_types`."""
    return read_masks(fields, values, fields.integer("sliding_window", None))
'''


def python_name(model_type: str, taken: Collection[str] = ()) -> str:
    """Return a name of Python for a `model_type`, for a file and a function: none that stands for something else.

    taken: names that it may not be, besides those of a draft's imports.
    """
    name = re.sub(r"\W", "_", model_type.lower(), flags=re.ASCII)[:60]
    plain = name.isidentifier() and not keyword.iskeyword(name) and not hasattr(builtins, name)
    return name if plain and name not in {*_PLACES, *taken} and not _is_module(name) else f"family_{name}"


def _is_module(name: str) -> bool:
    """Return whether Python imports a module of this name, which a file in the working directory would hide."""
    places = [place for place in sys.path if Path(place).resolve() != Path.cwd()]
    return name in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(name, places) is not None


def draft_source(comparison: Comparison, notes: Notes, source: str) -> str:
    """Return the text of a draft.

    **Arguments:**

    - `comparison`: with the nearest family.
    - `notes`: what it says besides.
    - `source`: the text of that family's file.
    """
    table = _FamilyFile(source)
    name = python_name(comparison.content["model_type"], {*table.imports, *table.definitions})
    build = table.arguments["build"]
    own_build = bool(comparison.changes or comparison.windows)
    arguments = {
        **table.arguments,
        "model_type": literal(comparison.content["model_type"]),
        "architecture": literal(_architecture(comparison.content)),
        "settings": _settings(comparison, table.arguments["settings"], notes.keys),
        "build": name if own_build else build,
        "weights": _weights(comparison, table.arguments["weights"], notes.tensors),
        **_other_arguments(comparison, table.arguments, notes.harmless),
    }
    others = ("aliases", "other_architectures")  # names of published files of the nearest family
    arguments = {key: text for key, text in arguments.items() if key not in others}
    comments = "".join(f"{line}\n" for note in notes.model for line in _comment(note, ""))
    written = "".join(f"    {key}={text},\n" for key, text in arguments.items())
    body = f"{comments}FAMILY = Family(\n{written})\n"
    functions = [_READ_MASKS] if comparison.windows else []
    functions += _build(name, build, comparison) if own_build else []
    needed = table.needed("\n".join((body, *functions)))
    if not own_build and build in table.definitions:  # its function bears the name of the new family
        needed, body = ([re.sub(rf"\b{build}\b(?=\()", name, text) for text in needed], body)
        body = body.replace(f"    build={build},\n", f"    build={name},\n")
    title = _title(name, comparison.family.model_type)
    imports = _imports("\n".join((*needed, *functions, body)), table.imports)
    models = "MODELS = {}  # sizes by name, for get_config\n"
    return title + "\n" + "\n\n".join([imports + "\n", *needed, *functions, body + "\n" + models])


def _title(name: str, nearest: str) -> str:
    return f'"""{name}: a draft from the table of `{nearest}`. Say here who published it, and what is special."""\n'


def _architecture(content: Mapping[str, Any]) -> str:
    named = content.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    words = python_name(content["model_type"]).split("_")
    return "".join(map(str.capitalize, words)) + "ForCausalLM"


class _FamilyFile:
    """File of a family: the arguments of its `Family(...)`, its other definitions, and its imports."""

    def __init__(self, source: str):
        self.source = source
        self.imports: dict[str, str] = {}  # by name: the module that it comes from, empty for a module itself
        self.definitions: dict[str, ast.stmt] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom):
                self.imports |= {alias.name: str(node.module) for alias in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {alias.name: "" for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.definitions |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        family = self.definitions.pop("FAMILY")
        call = family.value if isinstance(family, ast.Assign) else None
        assert isinstance(call, ast.Call)  # a table of settings and weights, as of all text families
        self.arguments = {str(each.arg): self._text(each.value) for each in call.keywords}

    def _text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def needed(self, code: str) -> list[str]:
        """Return the definitions that `code` needs, and those that these need, in their order."""
        found: set[str] = set()
        names = _names(code)
        while new := {name for name in names if name in self.definitions} - found:
            found |= new
            names = set().union(*(_names(self._text(self.definitions[name])) for name in new))
        nodes = dict.fromkeys(node for name, node in self.definitions.items() if name in found)
        return [self._text(node) + "\n" for node in nodes]


def _names(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def _imports(code: str, known: Mapping[str, str]) -> str:
    """Return the imports of the names in `code`."""
    places = {**_PLACES, **known}
    modules: dict[str, list[str]] = {}
    for name in sorted(_names(code) & places.keys()):
        modules.setdefault(places[name] or name, []).append(name if places[name] else "")
    standard = [module for module in sorted(modules) if module.partition(".")[0] in sys.stdlib_module_names]
    lines = [_import(module, modules[module]) for module in standard]
    lines.sort(key=lambda line: line.startswith("from"))
    return "\n".join(
        lines + [""] * bool(lines) + [_import(m, modules[m]) for m in sorted(modules) if m not in standard]
    )


def _import(module: str, names: Sequence[str]) -> str:
    if names == [""]:
        return f"import {module}"
    names = sorted(names, key=lambda name: (not name.isupper(), name.islower() or name.startswith("_"), name))
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _comment(note: Note, indent: str) -> list[str]:
    """Return the comment of a note, in lines."""
    text = f"QUESTION: {note.question}" if note.question else note.reason
    lines = textwrap.wrap(printable(text), _WIDTH - len(indent) - 4)
    return [f"{indent}# {'  ' * bool(number)}{line}" for number, line in enumerate(lines)]


def _rows(notes: Iterable[Note]) -> list[str]:
    lines: list[str] = []
    for note in notes:
        if note.question or not note.code:
            lines += _comment(note, " " * 8)
        if note.code:
            lines.append(f"        {note.code},{f'  # {note.reason}' if note.reason and not note.question else ''}")
    return lines


def _settings(comparison: Comparison, settings: str, keys: list[Note]) -> str:
    """Return the table of settings with rows before and after those of the nearest family."""
    renamed, fraction = comparison.reading.renamed, comparison.reading.fraction
    if fraction is not None and settings.count("rope_settings(") == 1 and "fraction=" not in settings:
        settings = settings.replace("rope_settings(", f"rope_settings(fraction={fraction}, ").replace(", )", ")")
    elif fraction is not None:
        question = f"partial_rotary_factor={fraction}: a row `rope_settings(fraction={fraction})` reads it."
        keys = [*keys, Note(question=question)]
    first = [Note(f"Renamed({_dictionary(renamed, ' ' * 8)})")] if renamed else []
    last = [Note('Rule("masks", _read_masks, write_masks)')] if comparison.windows else []
    return _tuple(settings, _rows(first), _rows(last + keys))


def _tuple(rows: str, before: list[str], after: list[str]) -> str:
    """Return a tuple of rows with other lines before and after them."""
    if not before and not after:
        return rows
    inner = [f"        *{rows},"]
    if rows.startswith("(\n") and rows.rstrip(") \n").endswith(",") and isinstance(ast.parse(rows).body[0], ast.Expr):
        tree = ast.parse(rows, mode="eval").body
        if isinstance(tree, ast.Tuple):
            inner = rows[2:].rstrip()[:-1].rstrip().split("\n")
    return "\n".join(["(", *before, *inner, *after, "    )"])


def _dictionary(words: Mapping[str, str], indent: str) -> str:
    """Return the code of a dictionary, behind `indent`, on one line if it is short."""
    line = literal(dict(words))
    if len(line) < _WIDTH - 40:
        return line
    return (
        "{\n" + "".join(f"{indent}    {literal(old)}: {literal(new)},\n" for old, new in words.items()) + indent + "}"
    )


def _renamed(rows: str, names: Mapping[str, str], indent: str = "    ") -> str:
    """Return the code of rows with other words in their names, whose first line stands behind `indent`."""
    line = f"renamed({rows}, {literal(dict(names))})"
    if not names or ("\n" not in line and len(line) < _WIDTH - 30):
        return line if names else rows
    rows, words = textwrap.indent(rows, indent).lstrip(), _dictionary(names, f"{indent}    ")
    return f"renamed(\n{indent}    {rows},\n{indent}    {words},\n{indent})"


def _weights(comparison: Comparison, weights: str, notes: list[Note]) -> str:
    names = comparison.replaced_words
    if not notes:
        return _renamed(weights, names)
    rows = f"        *{_renamed(weights, names, ' ' * 8)},"
    return "\n".join(["(", *_rows(note for note in notes if note.question), rows, *_rows(_coded(notes)), "    )"])


def _coded(notes: Iterable[Note]) -> list[Note]:
    return [note for note in notes if not note.question]


def _other_arguments(
    comparison: Comparison, arguments: Mapping[str, str], harmless: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments for renamed experts, prefixes, and keys without effect."""
    found: dict[str, str] = {}
    if comparison.replaced_words:
        rows = {name: arguments[name] for name in ("fused", "transposed") if name in arguments}
        found |= {name: _renamed(text, comparison.replaced_words) for name, text in rows.items()}
    if comparison.prefix and comparison.prefix[0].startswith(comparison.family.prefix):
        found["prefix"] = literal(comparison.prefix[1].partition(".")[0] + ".")
    if harmless:
        old = arguments.get("ignored_keys", "")
        known = [f"        **({old})," if "|" in old else f"        **{old},"] if old else []
        new = [f"        {literal(key)}: {literal(reason)}," for key, reason in harmless.items()]
        found["ignored_keys"] = "\n".join(["{", *known, *new, "    }"])
    return found


def _build(name: str, build: str, comparison: Comparison) -> list[str]:
    """Return the functions that build the nearest family's decoder, and change it."""
    changes = comparison.changes
    inner = [change for change in changes if change.owner != "decoder"]
    outer = ", ".join(f"{change.field}={change.code}" for change in changes if change.owner == "decoder")
    nearest = comparison.family.model_type
    masks = "masks: tuple[Mask, ...], " if comparison.windows else ""
    lines = [
        f"def {name}({masks}**values: Any) -> DecoderConfig:",
        f'    """Return a decoder of `{nearest}` with what differs here."""',
        f"    config = {build}(**values)",
    ]
    if outer:
        lines.append(_wrapped(f"    config = dataclasses.replace(config, {outer})"))
    if comparison.windows:
        lines.append("    config = with_masks(config, masks)")
    lines.append("    return map_blocks(config, _changed)" if inner else "    return config")
    if lines[-2:] == ["    config = with_masks(config, masks)", "    return config"]:
        lines[-2:] = ["    return with_masks(config, masks)"]
    return ([_changed(nearest, inner)] if inner else []) + ["\n".join(lines) + "\n"]


def _changed(nearest: str, changes: Sequence[Change]) -> str:
    fields = {owner: [change for change in changes if change.owner == owner] for owner in ("mixer", "mlp", "block")}
    lines = [
        "def _changed(block: BlockConfig) -> BlockConfig:",
        f'    """Return a block of `{nearest}` with what differs here."""',
    ]
    whole = []
    for owner in ("mixer", "mlp"):
        if fields[owner]:
            inner = ", ".join(f"{change.field}={change.code}" for change in fields[owner])
            lines.append(_wrapped(f"    {owner}: Any = dataclasses.replace(block.{owner}, {inner})"))
            whole.append(f"{owner}={owner}")
    whole += [f"{change.field}={change.code}" for change in fields["block"]]
    return "\n".join([*lines, _wrapped(f"    return dataclasses.replace(block, {', '.join(whole)})")]) + "\n"


def _wrapped(line: str) -> str:
    """Return a call on one line, or its arguments on lines of their own."""
    if len(line) <= _WIDTH:
        return line
    call = ast.parse(line.strip() if "return" not in line else line.strip().removeprefix("return ")).body[0]
    value = call.value if isinstance(call, ast.Expr | ast.Assign | ast.AnnAssign) else None
    assert isinstance(value, ast.Call)
    arguments = [*map(ast.unparse, value.args), *(f"{each.arg}={ast.unparse(each.value)}" for each in value.keywords)]
    indent = " " * (len(line) - len(line.lstrip()))
    begin = line[: line.index("dataclasses.replace(") + len("dataclasses.replace(")]
    inner = "".join(f"{indent}    {argument},\n".replace("'", '"') for argument in arguments)
    return f"{begin}\n{inner}{indent})"
