"""Flags of settings: their names, types, help texts and groups, all derived from dataclasses.

`--optimizer.learning-rate` is the field `learning_rate` of the group `optimizer`. Its help text is the docstring of the
field, or the entry of the field in the docstring of its class.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from eqx_decoders.cli.plugins import HELP
from eqx_decoders.context import ExecutionConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.training.settings.flags import flag, long_flag
from eqx_decoders.training.settings.values import field_types, flat_settings, with_settings


T = TypeVar("T")

# Names of settings in other libraries, for errors about unknown flags.
_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "learning-rate": "optimizer.learning_rate",
    "warmup": "optimizer.warmup_steps",
    "warmup-steps": "optimizer.warmup_steps",
    "wd": "optimizer.weight_decay",
    "weight-decay": "optimizer.weight_decay",
    "optim": "optimizer.name",
    "lr-scheduler-type": "optimizer.schedule",
    "grad-clip": "optimizer.max_grad_norm",
    "max-grad-norm": "optimizer.max_grad_norm",
    "bs": "data.batch_size",
    "per-device-train-batch-size": "data.batch_size",
    "grad-accum": "step.gradient_accumulation_steps",
    "gradient-accumulation-steps": "step.gradient_accumulation_steps",
    "max-steps": "steps",
    "num-steps": "steps",
    "num-train-epochs": "epochs",
    "num-epochs": "epochs",
    "max-length": "data.seq_len",
    "max-seq-length": "data.seq_len",
    "block-size": "data.seq_len",
    "dataset": "data.path",
    "train-data": "data.path",
    "output-dir": "run_dir",
    "model-name-or-path": "init_from",
    "save-steps": "checkpoint_every",
    "save-every": "checkpoint_every",
    "eval-steps": "eval_every",
    "lora-rank": "lora.rank",
    "lora-r": "lora.rank",
    "lora-alpha": "lora.alpha",
    "max-tokens": "max_new_tokens",
}

HELP_ALL = "--help-all"

# Classes in the error messages of groups of settings, and of settings whose names start with a prefix, if the class
# differs from that of the settings.
_GROUP_CLASSES = {"mesh": "Layout", "pipeline": "Pipeline", "low_precision": "LowPrecision", "lora": "LoRAConfig"}
_PREFIX_CLASSES = {"remat_": "Remat."}


def parse_flags(
    default: T,
    *,
    titles: Mapping[type, str],
    first: Sequence[str] = (),
    types: Mapping[str, Any] | None = None,
    required: Sequence[str] = (),
    hidden: Collection[str] = (),
    args: Sequence[str] | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> T:
    """Return the settings `default` with the values of a command line. Exits with code 2 for unknown flags.

    **Arguments:**

    - `titles`: title of the group of flags for the fields of each class.
    - `first`: dotted names of the settings in the first group, "basic".
    - `types`: types that tyro uses in place of the types of the fields, by dotted name.
    - `required`: dotted names of the settings without a default. They are positional arguments, in this order.
    - `hidden`: dotted names of the settings that `--help` omits. `--help-all` shows them.
    - `args`, `prog`, `description`: the command line, the name of the program and its description; see `argparse`.

    Raises ConfigError for an unknown flag that has the name of a setting in another library, such as `--lr`.
    """
    import tyro

    args = sys.argv[1:] if args is None else args
    if HELP_ALL in args:
        args, hidden = ["--help"], ()
    elif "--help" not in args and "-h" not in args:
        hidden = ()  # only the help omits them

    _check_names(args, flat_settings(default))
    groups = _grouped(default, titles, first)
    hints = field_types(type(default)) | dict(types or {})
    defaults, texts = flat_settings(default), help_texts(type(default))
    parts: list[tuple[str, Any, Any]] = []
    for title, names in groups.items():
        fields: list[tuple[str, Any, Any]] = []
        for name in names:
            if name in hidden:
                continue
            shown = tyro.conf.arg(
                name=flag(name)[2:],
                help=texts.get(name, ""),
                metavar=name.upper() if name in required else None,
                aliases=None if flag(name) == long_flag(name) else (long_flag(name),),
            )
            marked = Annotated[hints[name], shown]
            marked = Annotated[marked, tyro.conf.Positional] if name in required else marked
            value = dataclasses.field() if name in required else dataclasses.field(default=defaults[name])
            fields.append((name.replace(".", "__"), marked, value))
        group = dataclasses.make_dataclass(title, fields, kw_only=True)
        whole = dataclasses.field() if set(required) & set(names) else dataclasses.field(default_factory=group)
        parts.append((title, Annotated[group, tyro.conf.OmitArgPrefixes], whole))
    flags = dataclasses.make_dataclass("Flags", parts, kw_only=True)
    flags.__module__ = "builtins"  # tyro does not search its source for comments, which would take half of the time
    parsed = tyro.cli(
        flags,
        args=args,
        prog=prog,
        description="\n\n".join(filter(None, (description, HELP))),
    )
    values = {
        name: getattr(getattr(parsed, title), name.replace(".", "__"))
        for title, names in groups.items()
        for name in names
    }
    return with_settings(default, values)


def _check_names(args: Sequence[str], names: Collection[str]) -> None:
    """Raise ConfigError for a flag that has the name of a setting in another library. `names`: the settings."""
    known = {flag(name) for name in names} | {long_flag(name) for name in names}
    for word in args:
        given = word.partition("=")[0].replace("_", "-")
        name = _OTHER_NAMES.get(given.removeprefix("--"), "")
        if given.startswith("--") and given not in known and name in names:
            raise ConfigError(f"{given} is not a flag of this program. Use {flag(name)}.")


def _grouped(default: Any, titles: Mapping[type, str], first: Sequence[str]) -> dict[str, list[str]]:
    """Return the dotted names of the settings in each group, by title, in the order of the help."""
    kind, groups = type(default), {"basic": list(first)} if first else {}
    groups |= {title: [] for title in titles.values()}
    for name in flat_settings(default):
        group, dot, _ = name.partition(".")
        title = group if dot else titles[next(cls for cls in kind.__mro__ if name in inspect.get_annotations(cls))]
        if name not in first:
            groups.setdefault(title, []).append(name)
    return {title: names for title, names in groups.items() if names}


@functools.cache
def help_texts(kind: type[Any], prefix: str = "") -> dict[str, str]:
    """Return the help texts of the settings of a class and of its nested classes, by dotted name."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if dataclasses.is_dataclass(cls):
            texts |= _documented(cls)
    texts = {prefix + name: text for name, text in texts.items()}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            texts |= help_texts(typing.cast(type, hint), f"{prefix}{name}.")
    return texts


def _documented(cls: type) -> dict[str, str]:
    """Return the help texts of the fields of a class: the docstrings below fields, or the list in its docstring."""
    listed = re.findall(r"^- ((?:`\w+`,? ?)+): (.*?)(?=\n- `|\Z)", inspect.getdoc(cls) or "", re.S | re.M)
    texts = {name: _capitalized(text) for names, text in listed for name in re.findall(r"`(\w+)`", names)}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # the package is installed without sources: there are no help texts
        tree = ast.Module([], [])
    body = [node for each in tree.body if isinstance(each, ast.ClassDef) for node in each.body]
    for field, below in itertools.pairwise(body):
        documented = below.value if isinstance(below, ast.Expr) else None
        if isinstance(documented, ast.Constant) and isinstance(field, ast.AnnAssign):
            texts[ast.unparse(field.target)] = str(documented.value)
    return {name: " ".join(text.split()) for name, text in texts.items()}


def _capitalized(text: str) -> str:
    """Capitalize a text, unless its first word is a value: `adamw, lion or muon`, `none: all of them`."""
    return text if re.match(r"\S+[:,]", text) else text[:1].upper() + text[1:]


def flag_names(kind: type[Any]) -> dict[str, str]:
    """Return the flag of each setting, by its dotted name, by its names in error messages, and without `data.`."""
    required = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    names = [name for name in field_types(kind) if name not in required]  # required settings are positional arguments
    by_name = {name: flag(name) for name in names}
    by_name |= {name.removeprefix("data."): value for name, value in by_name.items()}
    for group, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            owner = _GROUP_CLASSES.get(group, typing.cast(type, hint).__name__)
            inside = [name for name in names if name.startswith(f"{group}.")]
            by_name |= {f"{owner}.{name.partition('.')[2]}": flag(name) for name in inside}
    for prefix, owner in _PREFIX_CLASSES.items():
        inside = [name for name in names if name.startswith(prefix)]
        by_name |= {owner + name.removeprefix(prefix): flag(name) for name in inside}
    options = {field.name for field in dataclasses.fields(ExecutionConfig)}
    return by_name | {f"Execution.{name}": flag(name) for name in names if name in options}
