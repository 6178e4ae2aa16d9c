"""Rows of a family's table of weights, and the tensors of a checkpoint that hold one weight."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eqx_decoders.sharding.axes import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Position of a weight among several that share a tensor, one after another along one of its dimensions.

    **Arguments:**

    - `index`, `count`: the weight's index, from 0, and the number of weights.
    - `axis`: the dimension.
    - `within`: an axis of the layer whose size is the number of blocks of the dimension, each with a share of every
        weight in turn, as where each query head is followed by its gate; None for one block.
    """

    index: int
    count: int
    axis: int = 0
    within: str | None = None


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a family's table: a tensor and the weight that it holds.

    **Arguments:**

    - `name`: the tensor's name in a checkpoint; `{layer}`, `{expert}`, `{head}`, `{kv_head}` and `{table_part}` stand
        for numbers, `{depth}` for that of a layer of multi-token prediction where these are counted by themselves, and
        `{stage}` and `{block}` for those of a layer in a network of stages.
    - `path`: the weight's path, within a block if `name` has a layer, else within the decoder. In a block of an encoder
        it begins with the encoder's name: `vision.mixer.query`.
    - `pattern`: from the tensor's dimensions to the weight's, for `einops.rearrange`. For a part of a tensor it is
        written as if this were the whole.
    - `part`: the part of a tensor that several weights share.
    - `needs`: path of another weight of the same block, without which the row does not count; empty for none. Of two
        rows that count the later one does, so this one names a tensor that another weight's presence renames.
    """

    name: str
    path: str
    pattern: str
    part: Part | None = None
    needs: str = ""

    def fits(self, words: Axes) -> bool:
        """Return True for a weight with these axes: an MLP's and its experts' gates have the same path."""
        stacked = ["layers"] * (self.of_layers or self.is_mtp)
        stacked += self.numbered.values()
        return (*stacked, *self.pattern.split("->")[1].split()) == words

    @property
    def numbered(self) -> dict[str, str]:
        """Numbers in the name beside the layer's, and the weight's axes that have as many tensors."""
        return {number: axis for number, axis in _NUMBERED.items() if f"{{{number}}}" in self.name}

    @property
    def of_layers(self) -> bool:
        """True for a row of layers, one tensor for each."""
        return any(word in self.name for word in ("{layer}", "{owner}", "{stage}"))

    @property
    def is_mtp(self) -> bool:
        """True for a row of layers of multi-token prediction."""
        return self.path.startswith(_DEPTHS)

    @property
    def owner(self) -> str:
        """Encoder that the weight belongs to; empty for the decoder."""
        first = self.path.split(".")[0]
        return first if first in ENCODERS else ""

    def inside(self, stack: str) -> str:
        """Return the path in a block of a stack, or in the model where that is empty."""
        inner = self.path.removeprefix(f"{self.owner}.") if stack and self.owner else self.path
        return f"{stack}.{inner}".strip(".")


_NUMBERED = {"expert": "experts", "head": "heads", "kv_head": "kv_heads", "table_part": "table_parts"}
ENCODERS = ("vision", "audio")
_DEPTHS = "mtp.depth."


def mtp_rows(weights: Iterable[Weight], layer: str, depth: str) -> tuple[Weight, ...]:
    """Return the rows with prefix `layer` for layers of multi-token prediction, with prefix `depth`."""
    return tuple(
        dataclasses.replace(weight, name=weight.name.replace(layer, depth), path=f"{_DEPTHS}block.{weight.path}")
        for weight in weights
        if weight.name.startswith(layer)
    )


def joined_kernels(name: str, path: str = "", *, stream_first: bool = False) -> tuple[Weight, ...]:
    """Return the rows of a depth's kernels where one tensor holds them side by side, the embedding's first."""
    rows = [(f"{path}{kind}_kernel", "embed joined -> joined embed") for kind in ("embed", "stream")]
    return sharing(name, *(reversed(rows) if stream_first else rows), axis=1)


def depth_rows(
    depth: str, *, embed_norm: str, stream_norm: str, kernels: str, final_norm: str = "", stream_first: bool = False
) -> tuple[Weight, ...]:
    """Return the rows of layers of multi-token prediction besides those of their blocks; `depth` is their prefix.

    The others are names of modules, `kernels` that of both matrices, the embedding's first or the stream's; without
    `final_norm` none is a depth's own.
    """
    norms = {"embed_norm": embed_norm, "stream_norm": stream_norm, "final_norm": final_norm}
    return (
        *joined_kernels(f"{depth}{kernels}.weight", _DEPTHS, stream_first=stream_first),
        *(
            Weight(f"{depth}{name}.weight", f"{_DEPTHS}{path}.scale", "norm -> norm")
            for path, name in norms.items()
            if name
        ),
    )


def sharing(name: str, *rows: tuple[str, str], axis: int = 0, within: str | None = None) -> tuple[Weight, ...]:
    """Return the rows of weights that share the tensor `name`, in order, each with its path and its pattern."""
    return tuple(
        Weight(name, path, pattern, Part(index=index, count=len(rows), axis=axis, within=within))
        for index, (path, pattern) in enumerate(rows)
    )


def norm(name: str, path: str, *, needs: str = "") -> tuple[Weight, ...]:
    """Return the rows of a norm, which count only where the block has the weight `needs` unless that is empty."""
    return (
        Weight(f"{name}.weight", f"{path}.scale", "norm -> norm", needs=needs),
        Weight(f"{name}.bias", f"{path}.bias", "norm -> norm", needs=needs),
    )


def norm_weights(prefix: str, **names: str) -> tuple[Weight, ...]:
    """Return the rows of norms with these names: `pre_mixer_norm="input_layernorm"`."""
    return tuple(row for path, name in names.items() for row in norm(prefix + name, path))


def self_attention(prefix: str, name: str = "self_attn.") -> tuple[Weight, ...]:
    """Return the rows of attention, which is called `name` in a layer."""
    attention = prefix + name
    into = {"q_proj": ("query", "heads"), "k_proj": ("key", "kv_heads"), "v_proj": ("value", "kv_heads")}
    rows: list[Weight] = []
    for tensor, (path, heads) in into.items():
        pattern = f"({heads} head_dim) embed -> embed {heads} head_dim"
        rows.append(Weight(f"{attention}{tensor}.weight", f"mixer.{path}", pattern))
        rows.append(
            Weight(f"{attention}{tensor}.bias", f"mixer.{path}_bias", f"({heads} head_dim) -> {heads} head_dim")
        )
    return (
        *rows,
        Weight(attention + "o_proj.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        Weight(attention + "o_proj.bias", "mixer.out_bias", "embed -> embed"),
        *norm(attention + "q_norm", "mixer.query_norm"),
        *norm(attention + "k_norm", "mixer.key_norm"),
        Weight(attention + "q_norm.weight", "mixer.query_norm_scale", "heads head_dim -> heads head_dim"),
        Weight(attention + "k_norm.weight", "mixer.key_norm_scale", "kv_heads head_dim -> kv_heads head_dim"),
    )


def gated_mlp(prefix: str, path: str = "mlp.") -> tuple[Weight, ...]:
    """Return the rows of a gated MLP."""
    return (
        Weight(prefix + "gate_proj.weight", path + "gate", "mlp embed -> embed mlp"),
        Weight(prefix + "gate_proj.bias", path + "gate_bias", "mlp -> mlp"),
        Weight(prefix + "up_proj.weight", path + "up", "mlp embed -> embed mlp"),
        Weight(prefix + "up_proj.bias", path + "up_bias", "mlp -> mlp"),
        Weight(prefix + "down_proj.weight", path + "down", "embed mlp -> mlp embed"),
        Weight(prefix + "down_proj.bias", path + "down_bias", "embed -> embed"),
    )


def are_transposed(tensors: Mapping[str, Any]) -> bool:
    """Return True if fused experts are stored as matrices `[in, out]`, not `[out, in]`, by their shapes."""
    for name, down in tensors.items():
        gate_up = tensors.get(name.removesuffix("down_proj") + "gate_up_proj")
        if gate_up is not None and len(down.shape) == 3:
            return gate_up.shape[1:] == (down.shape[2], 2 * down.shape[1])
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Section of a tensor's dimension that is one weight's: the same rows of each of its equal blocks.

    **Arguments:**

    - `index`: the weight's index among those that share the tensor.
    - `axis`: the dimension.
    - `blocks`: number of its blocks.
    - `begin`, `size`: the weight's rows in each block of `block_size` rows.
    """

    index: int
    axis: int
    blocks: int
    begin: int
    size: int
    block_size: int

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return the weight's rows of some whole blocks, without a copy: `[..., blocks, size, ...]`."""
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        rows = slice(self.begin, self.begin + self.size)
        return x.reshape(*before, -1, self.block_size, *after)[(*[slice(None)] * (self.axis + 1), rows)]


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """Tensors of a checkpoint that hold one weight of a model.

    **Arguments:**

    - `names`: the tensors, in the order of the weight's leading axes.
    - `stack`: the sizes of these axes: none, the layers, or the layers and the experts.
    - `pattern`: of one of the tensors, or of its section.
    - `sizes`: size of every axis in `pattern`, 1 included.
    - `section`: the weight's part of each tensor; None for all of it.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    pattern: str
    sizes: Mapping[str, int]
    section: Section | None = None

    def name(self, place: tuple[int, ...]) -> str:
        """Return the tensor at an index of the leading axes."""
        return self.names[sum(i * math.prod(self.stack[axis + 1 :]) for axis, i in enumerate(place))]

    @property
    def stacked(self) -> bool:
        """True for a weight that several tensors hold."""
        return bool(self.stack)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the checkpoint."""
        shape, section = self.own_shape, self.section
        if section is None:
            return shape
        return (*shape[: section.axis], section.blocks * section.block_size, *shape[section.axis + 1 :])

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape that each tensor would have without the other weights in it."""
        return tuple(math.prod(self.sizes[word] for word in group) for group in self.groups)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Axis names of each dimension in the checkpoint."""
        left = self.pattern.split("->")[0]
        return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", left))

    @property
    def words(self) -> tuple[str, ...]:
        """Axis names of the weight's dimensions, without those of `stack`."""
        return tuple(self.pattern.split("->")[1].split())
