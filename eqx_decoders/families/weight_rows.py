"""Rows of a family's table of weights, and the mapping from a weight to the tensors of a checkpoint."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eqx_decoders.sharding.axes import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Position of a weight in a tensor that holds several weights, concatenated along one dimension.

    **Arguments:**

    - `index`, `count`: index of the weight, from 0, and number of weights in the tensor.
    - `axis`: the dimension along which the weights are concatenated.
    - `within`: name of an axis of some weight in the same module, such as `"heads"`. Along `axis`, the tensor has one
        block per index of this axis, and each block concatenates a slice of every weight; for example, the query of a
        head is followed by the gate of this head. None: there is one block.
    """

    index: int
    count: int
    axis: int = 0
    within: str | None = None


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a family's table of weights: a tensor of a checkpoint, and the weight that it holds.

    If several rows match a weight, the last one is used.

    **Arguments:**

    - `name`: name of the tensor. `{layer}`, `{expert}`, `{head}`, `{kv_head}` and `{table_part}` stand for indices.
        `{depth}` is the index of a layer of multi-token prediction, if a checkpoint counts these layers separately.
        `{stage}` and `{block}` are the indices of a layer in an encoder with stages. `{part}` is the index of a block
        in its layer, if a checkpoint counts several blocks as one layer (see `Family.blocks_per_layer`). If layers
        share weights, `{owner}` is the layer that stores these weights, and `{use}` is the index of a layer among the
        layers that use them.
    - `path`: path of the weight: in its block if `name` contains the index of a layer, otherwise in the decoder. Paths
        in a block of an encoder start with the name of the encoder: `vision.mixer.query`.
    - `pattern`: pattern for `einops.rearrange`, from the dimensions of the tensor to those of the weight. If the tensor
        holds several weights, the pattern describes the section of this weight.
    - `part`: position of the weight in a tensor that holds several weights; None: the tensor holds one weight.
    - `needs`: path of another weight of the same block. The row is ignored if the block does not have that weight.
        Empty: the row is always used.
    """

    name: str
    path: str
    pattern: str
    part: Part | None = None
    needs: str = ""

    def fits(self, axes: Axes) -> bool:
        """Return whether the row describes a weight with these axes.

        The path is not sufficient: the gates of an MLP and of experts have the same path, but different axes.
        """
        leading_axes = ["layers"] if self.of_layers or self.is_mtp else []
        leading_axes += self.numbered.values()
        return (*leading_axes, *self.pattern.split("->")[1].split()) == axes

    @property
    def numbered(self) -> dict[str, str]:
        """Indices in the name other than the layer's, with the axes of the weight over which they run."""
        return {field: axis for field, axis in _INDEXED_AXES.items() if f"{{{field}}}" in self.name}

    @property
    def of_layers(self) -> bool:
        """Whether the row describes weights of layers, with one tensor per layer."""
        return any(field in self.name for field in ("{layer}", "{owner}", "{stage}"))

    @property
    def is_mtp(self) -> bool:
        """Whether the row describes weights of layers of multi-token prediction."""
        return self.path.startswith(_DEPTHS)

    @property
    def owner(self) -> str:
        """Name of the encoder that has the weight; empty for the decoder."""
        first = self.path.split(".")[0]
        return first if first in ENCODERS else ""

    def inside(self, stack: str) -> str:
        """Return the path of the weight in the model, for a block of `stack`; empty `stack`: outside of blocks."""
        inner = self.path.removeprefix(f"{self.owner}.") if stack and self.owner else self.path
        return f"{stack}.{inner}".strip(".")


_INDEXED_AXES = {"expert": "experts", "head": "heads", "kv_head": "kv_heads", "table_part": "table_parts"}
ENCODERS = ("vision", "audio")
_DEPTHS = "mtp.depth."


def mtp_rows(weights: Iterable[Weight], layer: str, depth: str) -> tuple[Weight, ...]:
    """Return rows for the blocks of layers of multi-token prediction, from the rows of decoder layers.

    `layer` and `depth` are the prefixes of tensors of decoder layers and of layers of multi-token prediction.
    """
    return tuple(
        dataclasses.replace(weight, name=weight.name.replace(layer, depth), path=f"{_DEPTHS}block.{weight.path}")
        for weight in weights
        if weight.name.startswith(layer)
    )


def joined_kernels(name: str, path: str = "", *, stream_first: bool = False) -> tuple[Weight, ...]:
    """Return the rows of the two input projections of a layer of multi-token prediction, which share a tensor.

    The tensor holds the projection of the embedding, then that of the residual stream; reversed with `stream_first`.
    """
    kinds = ("stream", "embed") if stream_first else ("embed", "stream")
    rows = [(f"{path}{kind}_kernel", "embed joined -> joined embed") for kind in kinds]
    return sharing(name, *rows, axis=1)


def depth_rows(
    depth: str, *, embed_norm: str, stream_norm: str, kernels: str, final_norm: str = "", stream_first: bool = False
) -> tuple[Weight, ...]:
    """Return the rows of layers of multi-token prediction, except the rows of their blocks (see `mtp_rows`).

    **Arguments:**

    - `depth`: prefix of the tensors of a layer.
    - `embed_norm`, `stream_norm`, `final_norm`: names of norms. Empty `final_norm`: layers have no separate final norm.
    - `kernels`, `stream_first`: name of the module with both input projections, and their order; see `joined_kernels`.
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
    """Return the rows of weights that share the tensor `name`.

    `rows`: path and pattern of each weight, in the order in which the tensor holds them. `axis`, `within`: see `Part`.
    """
    return tuple(
        Weight(name, path, pattern, Part(index=index, count=len(rows), axis=axis, within=within))
        for index, (path, pattern) in enumerate(rows)
    )


def norm(name: str, path: str, *, needs: str = "") -> tuple[Weight, ...]:
    """Return the rows of a norm. `needs`: see `Weight`."""
    return (
        Weight(f"{name}.weight", f"{path}.scale", "norm -> norm", needs=needs),
        Weight(f"{name}.bias", f"{path}.bias", "norm -> norm", needs=needs),
    )


def norm_weights(prefix: str, **names: str) -> tuple[Weight, ...]:
    """Return the rows of norms. `names`: names of their modules, by path: `pre_mixer_norm="input_layernorm"`."""
    return tuple(row for path, name in names.items() for row in norm(prefix + name, path))


def self_attention(prefix: str, name: str = "self_attn.") -> tuple[Weight, ...]:
    """Return the rows of attention. `name`: name of its module in a layer."""
    attention = prefix + name
    projections = {"q_proj": ("query", "heads"), "k_proj": ("key", "kv_heads"), "v_proj": ("value", "kv_heads")}
    rows: list[Weight] = []
    for module, (path, heads) in projections.items():
        kernel_pattern = f"({heads} head_dim) embed -> embed {heads} head_dim"
        bias_pattern = f"({heads} head_dim) -> {heads} head_dim"
        rows.append(Weight(f"{attention}{module}.weight", f"mixer.{path}", kernel_pattern))
        rows.append(Weight(f"{attention}{module}.bias", f"mixer.{path}_bias", bias_pattern))
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
    """Return whether fused experts are stored as `[in, out]` instead of `[out, in]`, judged by their shapes."""
    for name, down in tensors.items():
        gate_up = tensors.get(name.removesuffix("down_proj") + "gate_up_proj")
        if gate_up is not None and len(down.shape) == 3:
            return gate_up.shape[1:] == (down.shape[2], 2 * down.shape[1])
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Rows of a tensor that hold one weight: the same range of rows in each of several blocks of equal size.

    **Arguments:**

    - `index`: index of the weight among the weights that share the tensor.
    - `axis`: the dimension that is divided into blocks; its entries are called rows.
    - `blocks`: number of blocks.
    - `begin`, `size`: first row and number of rows of the weight in each block.
    - `block_size`: number of rows of a block.
    """

    index: int
    axis: int
    blocks: int
    begin: int
    size: int
    block_size: int

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return the rows of the weight in `x`, as a view `[..., blocks, size, ...]`.

        `x` is the tensor, or a slice of the tensor that contains complete blocks.
        """
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        rows = slice(self.begin, self.begin + self.size)
        return x.reshape(*before, -1, self.block_size, *after)[(*[slice(None)] * (self.axis + 1), rows)]


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """Tensors of a checkpoint that hold one weight of a model.

    **Arguments:**

    - `names`: names of the tensors, in the order of the weight's leading axes.
    - `stack`: sizes of the leading axes that separate tensors: `()`, `(layers,)` or `(layers, experts)`.
    - `pattern`: einops pattern from the dimensions of a tensor, or of its section, to those of the weight.
    - `sizes`: size of every axis in `pattern`, including the axis `1`.
    - `section`: the part of each tensor that holds the weight; None: all of it.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    pattern: str
    sizes: Mapping[str, int]
    section: Section | None = None

    def name(self, index: tuple[int, ...]) -> str:
        """Return the name of the tensor at an index of the leading axes."""
        return self.names[sum(i * math.prod(self.stack[axis + 1 :]) for axis, i in enumerate(index))]

    @property
    def stacked(self) -> bool:
        """Whether the weight has leading axes that separate tensors."""
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
        """Shape of the weight's part of each tensor in the checkpoint."""
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.groups)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Axis names of each dimension of a tensor in the checkpoint."""
        left = self.pattern.split("->")[0]
        return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", left))

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names of the weight, without the leading axes of `stack`."""
        return tuple(self.pattern.split("->")[1].split())
