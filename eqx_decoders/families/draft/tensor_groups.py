"""Names of tensors without the numbers of layers and experts, and what shapes can mean."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from eqx_decoders.families.weight_rows import Weight


Shape = tuple[int, ...] | None  # None: only the name is known

_NUMBER = re.compile(r"(?<![^.])(?:\d+|\{\w+\})(?![^.])")
LAYER, EXPERT = "{layer}", "{expert}"


def pattern_of(name: str) -> str:
    """Return a tensor's name, or a row's, with `{layer}` and `{expert}` for its first number and the others."""
    words = iter((LAYER,))
    return _NUMBER.sub(lambda _: next(words, EXPERT), name)


def inner_name(pattern: str) -> str:
    """Return the part of a pattern inside of its layer; without a layer its last two words."""
    _, layer, inner = pattern.partition(f"{LAYER}.")
    return f"{LAYER}.{inner}" if layer else ".".join(pattern.split(".")[-2:])


def layer_prefix(patterns: Iterable[str]) -> str:
    """Return what stands before the number of the layer in most patterns; empty where none has one."""
    prefixes = [pattern.partition(LAYER)[0] for pattern in patterns if LAYER in pattern]
    return max(sorted(set(prefixes)), key=prefixes.count, default="")


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """Tensors of a checkpoint whose names differ in numbers alone.

    **Arguments:**

    - `pattern`: their name.
    - `layers`: the first number of each.
    - `shapes`: their shapes, in order, each once; empty where only names are known.
    """

    pattern: str
    layers: frozenset[int]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> Shape:
        """The shape of all; None where they differ or are unknown."""
        return self.shapes[0] if len(self.shapes) == 1 else None

    @property
    def text(self) -> str:
        """The name for messages, with the shapes."""
        return " ".join((self.pattern, " or ".join(str(list(shape)) for shape in self.shapes))).strip()


def grouped(tensors: Mapping[str, Shape]) -> dict[str, TensorGroup]:
    """Return the groups of tensors by their patterns."""
    names: dict[str, list[str]] = {}
    for name in tensors:
        names.setdefault(pattern_of(name), []).append(name)
    groups: dict[str, TensorGroup] = {}
    for pattern, members in sorted(names.items()):
        layers = frozenset(int(found[0]) for name in members if (found := re.findall(r"(?<![^.])\d+(?![^.])", name)))
        shapes = {shape for name in members if (shape := tensors[name]) is not None}
        groups[pattern] = TensorGroup(pattern, layers, tuple(sorted(shapes)))
    return groups


def table_of(rows: Iterable[Weight]) -> dict[str, list[Weight]]:
    """Return the rows of a table of weights by the patterns of their names."""
    table: dict[str, list[Weight]] = {}
    for row in rows:
        table.setdefault(pattern_of(row.name), []).append(row)
    return table


def meanings(shape: Shape, sizes: Mapping[str, int]) -> list[str]:
    """Return what a tensor of this shape may be, the likeliest first; `sizes` are those of `config.json` by axis."""
    if shape is None:
        return []
    embed, mlp = sizes.get("embed", 0), sizes.get("mlp", 0)
    heads, kv_heads, head_dim = (sizes.get(word, 0) for word in ("heads", "kv_heads", "head_dim"))
    queries, keys, experts = heads * head_dim, kv_heads * head_dim, sizes.get("experts", 0)
    known: list[tuple[tuple[int, ...], str]] = [
        ((), "one number"),
        ((1,), "one number"),
        ((head_dim,), "the scale of a norm of single heads (qk_norm)"),
        ((embed,), "the scale of a norm of the stream, or the bias of an output"),
        ((queries,), "a bias of queries, or the scale of a norm over all heads"),
        ((keys,), "a bias of keys or values, or the scale of a norm over all of them"),
        ((queries + 2 * keys,), "the bias of queries, keys and values in one matrix"),
        ((mlp,), "a bias inside of the MLP"),
        ((2 * mlp,), "the bias of gate and up projection in one matrix"),
        ((heads,), "one number for each head: sinks, slopes or decays"),
        ((experts,), "one number for each expert: a bias of the router"),
        ((queries + 2 * keys, embed), "queries, keys and values in one matrix"),
        ((2 * mlp, embed), "gate and up projection in one matrix"),
        ((mlp, embed), "a gate or an up projection"),
        ((embed, mlp), "a down projection"),
        ((experts, embed), "a router"),
        ((experts * mlp, embed), "a projection of all experts, one under another"),
        ((sizes.get("vocab", 0), embed), "an embedding, or a head"),
    ]
    return list(dict.fromkeys(text for size, text in known if size == shape and (not size or min(size) > 0)))
