"""Layout: a device mesh and two tables that say which mesh axes split which logical axes.

Weights and activations need a table each: `embed` of a weight and `batch` of an activation both want `fsdp`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, cast

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    reshard,
)
from jaxtyping import Array, PyTree

from eqx_decoders.errors import ConfigError, check, check_word
from eqx_decoders.sharding.axes import Axes, axes, check_axes, checked_table, names_of, output_axes, path_name
from eqx_decoders.sharding.backend import Backend, backend_of
from eqx_decoders.sharding.explicit import declared, in_auto_mode, is_explicit, with_auto_axes, works_in_auto_mode
from eqx_decoders.sharding.mesh import device_grid, resolve_sizes
from eqx_decoders.sharding.offload import HOST, Offload
from eqx_decoders.sharding.rules import (
    ACTIVATIONS as ACTIVATIONS,
    MESH_AXES as MESH_AXES,
    WEIGHTS as WEIGHTS,
    Table,
    dividing,
    split_dimensions,
    without_uneven_layers,
)


P = ParamSpec("P")
T = TypeVar("T")


class MeshSizes(TypedDict, total=False):
    """Devices along each mesh axis."""

    data: int
    stage: int
    fsdp: int
    fsdp_transpose: int
    context: int
    tensor: int
    tensor_sequence: int
    expert: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of arrays: `Layout()` is one device; `Layout.create(data=2, fsdp=4)` makes a mesh.

    **Arguments:**

    - `mesh`: a `jax.sharding.Mesh` (or `AbstractMesh`, for shapes alone) whose axes are named as in `MESH_AXES`, all of
        type Auto or all of type Explicit; None for one device.
    - `weights`, `activations`: which mesh axes split which logical axis, most important row first. Pass, for example,
        `WEIGHTS | {"embed": ("fsdp",)}`. A logical axis without a row is replicated.
    - `gradients_over_data`: whether gradients of weights are split over `data`, too, as `state_spec` says. A `Trainer`
        sets it for its gradients where `OptimizerConfig.shard_over_data` asks for it.
    - `offload`: which weights, and which weights' optimizer states, are in the memory of the host.
    """

    mesh: Any = None
    weights: Any = tuple(WEIGHTS.items())
    activations: Any = tuple(ACTIVATIONS.items())
    gradients_over_data: bool = False
    offload: Offload = Offload()

    def __post_init__(self):
        object.__setattr__(self, "weights", checked_table("weights", self.weights))
        object.__setattr__(self, "activations", checked_table("activations", self.activations))
        if self.mesh is not None:
            for name in self.mesh.axis_names:
                check_word("Layout.mesh axis", str(name), MESH_AXES)
            if {*self.mesh.axis_types} not in ({AxisType.Auto}, {AxisType.Explicit}):
                raise ConfigError(
                    f"Layout.mesh has axis_types={self.mesh.axis_types}: they must be all Auto, or all Explicit. "
                    "Use Layout.create(...) or make_mesh(..., axis_types=(AxisType.Auto,) * n)."
                )
            able = not self.explicit or self.offload == Offload()
            rule = "needs a mesh of Auto axes: types of explicit ones say nothing of the memory of the host"
            check(able, f"{self.offload} {rule}. Leave out explicit=True.")

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults. Layouts that differ have different representations."""
        tables = {"weights": (self.weights, checked_table("weights", WEIGHTS))}
        tables["activations"] = (self.activations, checked_table("activations", ACTIVATIONS))
        shown = {name: dict(rows) for name, (rows, default) in tables.items() if rows != default}
        mesh = {} if self.mesh is None else {"mesh": self.mesh}
        shown |= {"gradients_over_data": True} if self.gradients_over_data else {}
        shown |= {} if self.offload == Offload() else {"offload": self.offload}
        return f"Layout({', '.join(f'{name}={value!r}' for name, value in (mesh | shown).items())})"

    @classmethod
    def create(
        cls,
        *,
        devices: Sequence[Any] | None = None,
        abstract: bool = False,
        explicit: bool = False,
        offload: Offload = Offload(),
        weights: Mapping[str, str | Sequence[str]] | Table = tuple(WEIGHTS.items()),
        activations: Mapping[str, str | Sequence[str]] | Table = tuple(ACTIVATIONS.items()),
        **sizes: Unpack[MeshSizes],
    ) -> "Layout":
        """Return a layout over `devices` (default: all), with `sizes` of mesh axes: `data`, `fsdp`, `tensor`, ….

        The default of a size is 1. One may be -1: all devices that the others leave.
        An `abstract` one has shapes and shardings on any machine, but no arrays: as many devices as the sizes ask for.
        With `explicit` the types of arrays say how they are split (`jax.typeof(x).sharding`), and JAX checks what is
        done with them. The library gives the same results by the same programs: `automatically`.
        """
        for name in sizes:
            check_word("Layout.create size", name, MESH_AXES)
        mesh_sizes = dict.fromkeys(MESH_AXES, 1) | cast(dict[str, int], sizes)
        devices = list(jax.devices() if devices is None else devices)
        taken = math.prod(size for size in mesh_sizes.values() if size != -1)
        count = len(devices)
        if abstract and (count % taken != 0 or -1 not in mesh_sizes.values()):
            count = taken
        mesh_sizes = resolve_sizes(mesh_sizes, count, devices[0].platform)
        names, shape = tuple(mesh_sizes), tuple(mesh_sizes.values())
        kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * len(mesh_sizes)
        if abstract:
            return cls(AbstractMesh(shape, names, axis_types=kinds), weights, activations, offload=offload)
        mesh = Mesh(device_grid(mesh_sizes, devices), names, axis_types=kinds)
        return cls(mesh, weights, activations, offload=offload)

    @property
    def device(self) -> Any:
        """First device of the mesh, which may be one to compile for; of this process where the mesh has none."""
        return self.mesh.devices.flat[0] if isinstance(self.mesh, Mesh) else jax.devices()[0]

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices, not of the default device: `"cpu"`, `"gpu"` or `"tpu"`."""
        return self.device.platform

    @property
    def backend(self) -> Backend:
        """Choices that suit the mesh's devices."""
        return backend_of(self.platform, single=self.single)

    @property
    def single(self) -> bool:
        """Return whether there is only one device."""
        return self.mesh is None or self.mesh.size == 1

    @property
    def explicit(self) -> bool:
        """Return whether arrays have their partitions in their types."""
        return is_explicit(self.mesh)

    def automatically(self, function: Callable[P, T], out_specs: Callable[[T], PyTree] | None = None) -> Callable[P, T]:
        """Return the function; on an explicit mesh it runs in Auto mode, as constraints of a layout need it.

        **Arguments:**

        - `out_specs`: the partitions of the arrays in its result, as a tree like it. Default: by the axis names in its
            return annotation; those with a batch are split as activations, all others not at all.
        """

        def declared_specs(result: T) -> PyTree:
            words = output_axes(result, declared(function))
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: self._output_spec(words.get(path_name(path), ()), leaf), result
            )

        return in_auto_mode(self.mesh, function, out_specs or declared_specs)

    def _output_spec(self, words: Axes, leaf: Any) -> PartitionSpec:
        if "batch" not in words:
            return PartitionSpec()
        stacked = leaf.ndim - len(words)
        return PartitionSpec(*(None,) * stacked, *self._activation_spec(words, leaf.shape[stacked:]))

    def weight_spec(self, words: str | Axes, shape: Sequence[int] | None = None, name: str = "weight") -> PartitionSpec:
        """Return the partition of a weight. Raise ConfigError if `shape` is given and the mesh does not divide it.

        If `stage` does not divide the layers, they stay together, and `stage` splits the dimension that `fsdp` splits,
        if it can.
        """
        words = check_axes(name, words)
        split = split_dimensions(self.weights, words, self.sizes)
        if shape is not None:
            split = without_uneven_layers(self.weights, words, shape, split, self.sizes)
            if "groups" in words:  # scales of a weight, whose dimensions a mesh need not divide
                split = [dividing(names, size, self.sizes) for names, size in zip(split, shape, strict=True)]
        for word, size, names in zip(words, shape or (), split, strict=shape is not None):
            parts = math.prod(self.sizes[axis] for axis in names)
            text = " x ".join(f"Layout.{n}={self.sizes[n]}" for n in names)
            check(
                size % parts == 0,
                f"{name}: {word}={size} must be a multiple of {text}. "
                "Choose another mesh or replace that row of Layout.weights.",
            )
        return PartitionSpec(*(names or None for names in split))

    def state_spec(self, words: str | Axes, shape: Sequence[int], name: str = "weight") -> PartitionSpec:
        """Return the partition of a weight's optimizer state: also over `data`, whose devices have the same weight
        (ZeRO-1).

        `data` splits a dimension that axes of the batch already split, so that one reduce-scatter serves both; else the
        first one that it divides. Stacked layers come last: their gradients come one layer at a time, and each would be
        on some devices only. Without such a dimension it is `weight_spec`.
        """
        words = check_axes(name, words)
        split = [names_of(group) for group in self.weight_spec(words, shape, name)]
        if self.sizes.get("data", 1) > 1 and "data" not in {axis for names in split for axis in names}:
            rows = set(dict(self.activations).get("batch", ()))
            preferred = lambda index: (words[index] == "layers", rows.isdisjoint(split[index]))  # noqa: E731
            for index in sorted(range(len(words)), key=preferred):
                if shape[index] % math.prod(self.sizes[axis] for axis in (*split[index], "data")) == 0:
                    split[index] += ("data",)
                    break
        return PartitionSpec(*(names or None for names in split))

    def gradient_spec(self, words: str | Axes, shape: Sequence[int]) -> PartitionSpec:
        """Return the partition of a weight's gradient: `state_spec` if `gradients_over_data`, else `weight_spec`."""
        return self.state_spec(words, shape) if self.gradients_over_data else self.weight_spec(words)

    def activation_spec(self, words: str | Axes, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return the partition of an activation. Mesh axes that do not divide `shape` are left out: it is a hint."""
        words = check_axes("activation", words)
        if shape is not None:
            check(len(shape) == len(words), f"An activation of shape {tuple(shape)} can't be {' '.join(words)!r}.")
        return self._activation_spec(words, shape)

    def _activation_spec(self, words: Axes, shape: Sequence[int] | None) -> PartitionSpec:
        split = split_dimensions(self.activations, words, self.sizes)
        if shape is not None:
            split = [dividing(names, size, self.sizes) for names, size in zip(split, shape, strict=True)]
        return PartitionSpec(*(names or None for names in split))

    def activation_sharding(self, words: str | Axes, shape: Sequence[int] | None = None) -> Sharding:
        """Return `activation_spec` on the mesh, for batches and caches."""
        return self._sharding(self.activation_spec(words, shape))

    def weight_sharding(self, words: str | Axes, shape: Sequence[int], name: str = "weight") -> Sharding:
        """Return `weight_spec` on the mesh."""
        return self._sharding(self.weight_spec(words, shape, name))

    def replicated(self) -> Sharding:
        """Return the sharding of an array that every device holds whole."""
        return self._sharding(PartitionSpec())

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        return SingleDeviceSharding(self.device) if self.mesh is None else NamedSharding(self._mesh, spec)

    def without_stage(self) -> "Layout":
        """Return the layout of one stage, for programs in a `jax.shard_map` over `stage`."""

        def without(table: Table) -> Table:
            return tuple((word, tuple(name for name in names if name != "stage")) for word, names in table)

        return dataclasses.replace(self, weights=without(self.weights), activations=without(self.activations))

    def constrain(self, x: Array, words: str) -> Array:
        """Tell XLA how to split an activation: `layout.constrain(x, "batch length embed")`."""
        return self._constrained(x, self.activation_spec(words, x.shape))

    def replicate(self, x: Array) -> Array:
        """Tell XLA to give every device the whole array, so that each process can read it."""
        return self._constrained(x, PartitionSpec())

    def constrain_weight(self, x: Array, words: str) -> Array:
        """Tell XLA how to split an array by the table of weights: a gradient."""
        return x if self.single else self._constrained(x, self.weight_spec(words))

    def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
        if self.mesh is None or self.single:
            return x
        if self.explicit and not works_in_auto_mode():
            return reshard(x, NamedSharding(self.mesh, spec))  # a type is no hint
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh_here, spec))

    def used_spec(self, words: str | Axes) -> PartitionSpec:
        """Return the partition of a weight in products with activations: gathered along the axes that split their
        tokens.

        Axes that also split the same dimension of activations stay, as for experts and heads; so do stacked layers.
        """
        rows = dict(self.activations)
        tokens = {*rows.get("batch", ()), *rows.get("length", ())}

        def staying(word: str, names: tuple[str, ...]) -> tuple[str, ...] | None:
            stays = (name for name in names if word == "layers" or name not in tokens or name in rows.get(word, ()))
            return tuple(stays) or None

        return PartitionSpec(
            *(
                staying(word, names_of(group))
                for word, group in zip(check_axes("weight", words), self.weight_spec(words), strict=True)
            )
        )

    def gather_weight(self, x: Array, words: str | Axes) -> Array:
        """Tell XLA to gather a weight for its products: split as activations are, whole where they are not.

        Its gradient is split like the weight: devices add theirs up and keep their parts (reduce-scatter). Left alone,
        XLA may send a large weight round in a ring of small pieces, twice as many bytes, and more programs.
        """
        shardings = self.gather_places(words, x.shape)
        return x if shardings is None else _gather(*shardings, x)

    def gather_places(self, words: str | Axes, shape: Sequence[int]) -> tuple[NamedSharding, NamedSharding] | None:
        """Return the shardings of a weight in products and of its gradient; None if they are equal."""
        if self.mesh is None or self.single:
            return None
        stored, whole = self.gradient_spec(words, shape), self.used_spec(words)
        if whole == stored:
            return None
        return NamedSharding(self.mesh_here, whole), NamedSharding(self.mesh_here, stored)

    def activation_parts(self, words: str, shape: Sequence[int]) -> int:
        """Return the number of parts into which an activation is split."""
        spec = self.activation_spec(words, shape)
        return math.prod(self.sizes[name] for group in spec for name in names_of(group))

    def shardings(self, tree: PyTree) -> PyTree:
        """Return the sharding of every weight in a tree of modules (arrays or `ShapeDtypeStruct`s), as a tree.

        Weights that `offload.weights` names are in the memory of the host.
        """
        return self._shardings(tree, self.weight_spec, "weights")

    def state_shardings(self, tree: PyTree, *, over_data: bool) -> PyTree:
        """Return `shardings` for the optimizer state of these weights: on the host if `offload.optimizer` says so.

        `over_data` splits it over copies of the weights, also, as `state_spec` says.
        """
        return self._shardings(tree, self.state_spec if over_data else self.weight_spec, "optimizer")

    @property
    def on_device(self) -> "Layout":
        """Return the layout without `offload`."""
        return dataclasses.replace(self, offload=Offload())

    def activation_shardings(self, tree: PyTree) -> PyTree:
        """Return shardings by the table of activations, for caches."""
        return self._shardings(tree, lambda words, shape, name: self.activation_spec(words, shape))

    def _shardings(
        self, tree: PyTree, spec: Callable[[Axes, Sequence[int], str], PartitionSpec], kind: str | None = None
    ) -> PyTree:
        words = axes(tree)

        def one(path, leaf):
            name = path_name(path)
            sharding = self._sharding(spec(words[name], leaf.shape, name))
            host = kind is not None and self.offload.holds(kind, name, words[name])
            return sharding.with_memory_kind(HOST) if host else sharding

        return jax.tree_util.tree_map_with_path(one, tree)

    @property
    def mesh_here(self) -> Any:
        """Mesh for constraints and `jax.shard_map`, also inside of a `jax.shard_map` over some of its axes."""
        rule = "on an explicit mesh only inside of layout.automatically, where the calls of a model are already"
        check(not self.explicit or works_in_auto_mode(), f"Layers and constraints work {rule}.")
        return jax.sharding.get_abstract_mesh() if self._mapped else self._mesh

    @property
    def _mesh(self) -> Any:
        """Mesh with axes of the current type."""
        return with_auto_axes(self.mesh) if self.explicit and works_in_auto_mode() else self.mesh

    @property
    def axes_here(self) -> frozenset[str]:
        """Mesh axes that a `jax.shard_map` may map here: those that none around it does."""
        return frozenset(str(name) for name in self.mesh.axis_names) - self._mapped

    @property
    def _mapped(self) -> frozenset[str]:
        """Mesh axes of the `jax.shard_map`s around this point of a program."""
        if self.mesh is None:
            return frozenset()
        return frozenset(jax.sharding.get_abstract_mesh().manual_axes) & frozenset(self.mesh.axis_names)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Call `jax.shard_map` over all mesh axes that none around it maps already.

        Unchecked, since types do not show that all devices of an axis have gathered the same values.
        """
        where: dict[str, Any] = dict(mesh=self.mesh_here, axis_names=self.axes_here, check_vma=False)
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **where)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each mesh axis; empty without a mesh."""
        return {} if self.mesh is None else {str(name): size for name, size in self.mesh.shape.items()}

    def with_batch_over_stage(self) -> "Layout":
        """Return the layout whose batch is split over `stage` as well, for what runs outside of a pipeline."""
        if self.sizes.get("stage", 1) == 1 or "stage" in dict(self.activations).get("batch", ()):
            return self
        rows = {word: (*names, "stage") if word == "batch" else names for word, names in self.activations}
        return dataclasses.replace(self, activations=rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole: NamedSharding, stored: NamedSharding, x: Array) -> Array:
    """Return `x` split as `whole`; its gradient is split as `stored`."""
    return jax.lax.with_sharding_constraint(x, whole)


def _gather_forward(whole, stored, x):
    return _gather(whole, stored, x), None


def _gather_backward(whole, stored, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gather.defvjp(_gather_forward, _gather_backward)


def out_shardings(shapes: PyTree) -> PyTree:
    """Return shardings of arrays or shapes for `jax.jit`; None if all are on one device.

    There arrays stay uncommitted, as the results of `optimizer.init` do. Next to a committed weight these would come
    out of a step committed, and the second step would be compiled again.
    """
    leaves = jax.tree.leaves(shapes)
    single = all(isinstance(x.sharding, SingleDeviceSharding) and x.sharding.memory_kind != HOST for x in leaves)
    return None if single else jax.tree.map(lambda leaf: leaf.sharding, shapes)


def partitions(shapes: PyTree) -> PyTree:
    """Return the `PartitionSpec`s of arrays or shapes on a mesh, for `Layout.automatically`."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)


def device_bytes(array: Any) -> int:
    """Return the bytes of the largest piece of an array or `ShapeDtypeStruct` on one device."""
    shape = array.shape if getattr(array, "sharding", None) is None else array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
