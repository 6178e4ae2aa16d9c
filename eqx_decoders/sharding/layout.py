"""`Layout`: a device mesh, and sharding rules from logical axes to mesh axes.

Weights and activations have separate rules: `fsdp` splits the axis `embed` of weights, but `batch` of activations.
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

from eqx_decoders.errors import ConfigError, check, check_option
from eqx_decoders.sharding.axes import Axes, as_sharding_rules, axes, check_axes, names_of, output_axes, path_name
from eqx_decoders.sharding.backend import Backend, backend_of
from eqx_decoders.sharding.explicit import declared, in_auto_mode, is_explicit, with_auto_axes, works_in_auto_mode
from eqx_decoders.sharding.mesh import check_sizes, device_grid, resolve_sizes
from eqx_decoders.sharding.offload import HOST, Offload
from eqx_decoders.sharding.rules import (
    ACTIVATIONS as ACTIVATIONS,
    MESH_AXES as MESH_AXES,
    WEIGHTS as WEIGHTS,
    Table,
)


P = ParamSpec("P")
T = TypeVar("T")


class MeshSizes(TypedDict, total=False):
    """Number of devices along each mesh axis (see `MESH_AXES`); -1: all remaining devices."""

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
    """Placement of arrays: `Layout()` is a single device; `Layout.create(data=2, fsdp=4)` makes a mesh.

    **Arguments:**

    - `mesh`: a `jax.sharding.Mesh`, or an `AbstractMesh` if only shapes are needed. Its axes have names from
        `MESH_AXES`, and are all of type Auto or all of type Explicit. None: a single device.
    - `weights`, `activations`: sharding rules, the mesh axes that split each logical axis, for example
        `WEIGHTS | {"embed": ("fsdp",)}`. Earlier rows have precedence. Logical axes without a row are replicated.
    - `gradients_over_data`: also split gradients of weights over `data`, as in `state_spec`. A `Trainer` sets it for
        its gradients if `OptimizerConfig.shard_over_data` is set.
    - `offload`: weights and optimizer states that are stored in host memory.
    """

    mesh: Any = None
    weights: Any = tuple(WEIGHTS.items())
    activations: Any = tuple(ACTIVATIONS.items())
    gradients_over_data: bool = False
    offload: Offload = Offload()

    def __post_init__(self):
        object.__setattr__(self, "weights", as_sharding_rules("weights", self.weights))
        object.__setattr__(self, "activations", as_sharding_rules("activations", self.activations))
        if self.mesh is not None:
            for name in self.mesh.axis_names:
                check_option("Layout.mesh axis", str(name), MESH_AXES)
            if {*self.mesh.axis_types} not in ({AxisType.Auto}, {AxisType.Explicit}):
                raise ConfigError(
                    f"Layout.mesh has axis_types={self.mesh.axis_types}, which must be all Auto or all Explicit. "
                    "Use Layout.create(...) or make_mesh(..., axis_types=(AxisType.Auto,) * n)."
                )
            check(
                not self.explicit or self.offload == Offload(),
                f"{self.offload} requires mesh axes of type Auto, because the types of arrays on an explicit mesh do "
                "not include the host memory. Leave out explicit=True.",
            )

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults. Unequal layouts have different representations."""
        shown: dict[str, Any] = {}
        if self.mesh is not None:
            shown["mesh"] = self.mesh
        if self.weights != as_sharding_rules("weights", WEIGHTS):
            shown["weights"] = dict(self.weights)
        if self.activations != as_sharding_rules("activations", ACTIVATIONS):
            shown["activations"] = dict(self.activations)
        if self.gradients_over_data:
            shown["gradients_over_data"] = True
        if self.offload != Offload():
            shown["offload"] = self.offload
        return f"Layout({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

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
        """Create a mesh and return its layout: `Layout.create(data=2, fsdp=4)`.

        **Arguments:**

        - `devices`: devices of the mesh. None: all devices.
        - `abstract`: create an `AbstractMesh`, which provides shapes and shardings without the devices. Its number of
            devices is the product of the sizes. A size of -1 becomes 1 if the other sizes do not divide the number of
            `devices`.
        - `explicit`: create mesh axes of type Explicit, so that the types of arrays include their shardings
            (`jax.typeof(x).sharding`) and JAX checks the shardings in operations. The library runs the same programs as
            on a mesh with Auto axes (see `automatically`).
        - `offload`, `weights`, `activations`: fields of the layout.
        - `sizes`: number of devices along each mesh axis (`data`, `fsdp`, `tensor`, …), by default 1. One size may be
            -1: all remaining devices.

        Raises ConfigError if the sizes do not fit the number of devices, or are not positive.
        """
        for name in sizes:
            check_option("Layout.create size", name, MESH_AXES)
        mesh_sizes = check_sizes(dict.fromkeys(MESH_AXES, 1) | cast(dict[str, int], sizes))
        devices = list(jax.devices() if devices is None else devices)
        check(len(devices) > 0, "Layout.create: devices=[] must have a device. Leave it out to use all devices.")
        required = math.prod(size for size in mesh_sizes.values() if size != -1)
        count = len(devices)
        if abstract and (count % required != 0 or -1 not in mesh_sizes.values()):
            count = required
        mesh_sizes = resolve_sizes(mesh_sizes, count, devices[0].platform)
        names = tuple(mesh_sizes)
        shape = tuple(mesh_sizes.values())
        axis_types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(mesh_sizes)
        if abstract:
            return cls(AbstractMesh(shape, names, axis_types=axis_types), weights, activations, offload=offload)
        mesh = Mesh(device_grid(mesh_sizes, devices), names, axis_types=axis_types)
        return cls(mesh, weights, activations, offload=offload)

    @property
    def device(self) -> Any:
        """First device of the mesh, which may belong to a topology for ahead-of-time compilation.

        Without a mesh, or with an abstract one, the first device of JAX.
        """
        return self.mesh.devices.flat[0] if isinstance(self.mesh, Mesh) else jax.devices()[0]

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices: `"cpu"`, `"gpu"` or `"tpu"`. It may differ from JAX's default platform."""
        return self.device.platform

    @property
    def backend(self) -> Backend:
        """Implementation choices for the devices of the mesh."""
        return backend_of(self.platform, single=self.single)

    @property
    def single(self) -> bool:
        """Whether there is only one device."""
        return self.mesh is None or self.mesh.size == 1

    @property
    def explicit(self) -> bool:
        """Whether the mesh axes are of type Explicit, so that the types of arrays include their shardings."""
        return is_explicit(self.mesh)

    def automatically(self, function: Callable[P, T], out_specs: Callable[[T], PyTree] | None = None) -> Callable[P, T]:
        """Return `function`; on an explicit mesh, wrap it to run with Auto axes, as constraints of a layout require.

        **Arguments:**

        - `out_specs`: function from the result to the `PartitionSpec`s of its arrays, as a tree of the same structure.
            None: use the axis names in the return annotation of `function`. Arrays with a batch axis are split by the
            rules for activations; other arrays are replicated.
        """

        def declared_specs(result: T) -> PyTree:
            axis_names = output_axes(result, declared(function))
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: self._output_spec(axis_names.get(path_name(path), ()), leaf), result
            )

        return in_auto_mode(self.mesh, function, out_specs or declared_specs)

    def _output_spec(self, axis_names: Axes, leaf: Any) -> PartitionSpec:
        if "batch" not in axis_names:
            return PartitionSpec()
        num_stacked = leaf.ndim - len(axis_names)
        return PartitionSpec(*(None,) * num_stacked, *self._activation_spec(axis_names, leaf.shape[num_stacked:]))

    def weight_spec(
        self, axis_names: str | Axes, shape: Sequence[int] | None = None, name: str = "weight"
    ) -> PartitionSpec:
        """Return the `PartitionSpec` of a weight.

        If the number of layers is not a multiple of `stage`, layers are not split. `stage` then splits a dimension that
        `fsdp` may split, if it divides that dimension.

        **Arguments:**

        - `axis_names`: logical axes, such as `"embed mlp"`.
        - `shape`: shape of the weight. Raises ConfigError if its dimensions cannot be divided by the mesh axes.
        - `name`: name of the weight in error messages.
        """
        axis_names = check_axes(name, axis_names)
        split = _split_dimensions(self.weights, axis_names, self.sizes)
        if shape is not None:
            split = _without_uneven_layers(self.weights, axis_names, shape, split, self.sizes)
            if "groups" in axis_names:  # scales of a quantized weight: their dimensions need not be divisible
                split = [_dividing(mesh_axes, size, self.sizes) for mesh_axes, size in zip(split, shape, strict=True)]
        for axis, size, mesh_axes in zip(axis_names, shape or (), split, strict=shape is not None):
            product = " x ".join(f"Layout.{mesh_axis}={self.sizes[mesh_axis]}" for mesh_axis in mesh_axes)
            check(
                size % math.prod(self.sizes[mesh_axis] for mesh_axis in mesh_axes) == 0,
                f"{name}: {axis}={size} must be a multiple of {product}. "
                f"Choose another mesh or replace the row {axis!r} of Layout.weights.",
            )
        return PartitionSpec(*(mesh_axes or None for mesh_axes in split))

    def state_spec(self, axis_names: str | Axes, shape: Sequence[int], name: str = "weight") -> PartitionSpec:
        """Return the `PartitionSpec` of a weight's optimizer state, which is also split over `data` (ZeRO-1).

        `data` preferably splits a dimension that other mesh axes of the batch already split, so that the gradient needs
        a single reduce-scatter; otherwise the first dimension that it divides. The axis `layers` is the last choice:
        gradients are computed layer by layer, and the gradient of a layer would be on some of the devices only. If no
        dimension is divisible, the result is `weight_spec`.
        """
        axis_names = check_axes(name, axis_names)
        split = [names_of(entry) for entry in self.weight_spec(axis_names, shape, name)]
        if self.sizes.get("data", 1) > 1 and "data" not in {mesh_axis for entry in split for mesh_axis in entry}:
            batch_axes = set(dict(self.activations).get("batch", ()))

            def preference(index: int) -> tuple[bool, bool]:
                return axis_names[index] == "layers", batch_axes.isdisjoint(split[index])

            for index in sorted(range(len(axis_names)), key=preference):
                if shape[index] % math.prod(self.sizes[mesh_axis] for mesh_axis in (*split[index], "data")) == 0:
                    split[index] += ("data",)
                    break
        return PartitionSpec(*(mesh_axes or None for mesh_axes in split))

    def gradient_spec(self, axis_names: str | Axes, shape: Sequence[int]) -> PartitionSpec:
        """Return the `PartitionSpec` of a gradient: `state_spec` if `gradients_over_data`, otherwise `weight_spec`."""
        return self.state_spec(axis_names, shape) if self.gradients_over_data else self.weight_spec(axis_names)

    def activation_spec(self, axis_names: str | Axes, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return the `PartitionSpec` of an activation.

        Mesh axes that do not divide their dimension of `shape` are left out. Raises ConfigError if `shape` has another
        number of dimensions than `axis_names`.
        """
        axis_names = check_axes("activation", axis_names)
        if shape is not None and len(shape) != len(axis_names):
            raise ConfigError(
                f"An activation of shape {tuple(shape)} must have the {len(axis_names)} axes {' '.join(axis_names)!r}."
            )
        return self._activation_spec(axis_names, shape)

    def _activation_spec(self, axis_names: Axes, shape: Sequence[int] | None) -> PartitionSpec:
        split = _split_dimensions(self.activations, axis_names, self.sizes)
        if shape is not None:
            split = [_dividing(mesh_axes, size, self.sizes) for mesh_axes, size in zip(split, shape, strict=True)]
        return PartitionSpec(*(mesh_axes or None for mesh_axes in split))

    def activation_sharding(self, axis_names: str | Axes, shape: Sequence[int] | None = None) -> Sharding:
        """Return the sharding of a batch, a cache or another activation (see `activation_spec`)."""
        return self._sharding(self.activation_spec(axis_names, shape))

    def weight_sharding(self, axis_names: str | Axes, shape: Sequence[int], name: str = "weight") -> Sharding:
        """Return the sharding of a weight (see `weight_spec`)."""
        return self._sharding(self.weight_spec(axis_names, shape, name))

    def replicated(self) -> Sharding:
        """Return the sharding of a replicated array."""
        return self._sharding(PartitionSpec())

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        return SingleDeviceSharding(self.device) if self.mesh is None else NamedSharding(self._mesh, spec)

    def without_stage(self) -> "Layout":
        """Return the layout of a single stage, for code inside a `jax.shard_map` over `stage`."""

        def remove_stage(table: Table) -> Table:
            return tuple((axis, tuple(name for name in mesh_axes if name != "stage")) for axis, mesh_axes in table)

        return dataclasses.replace(self, weights=remove_stage(self.weights), activations=remove_stage(self.activations))

    def constrain(self, x: Array, axis_names: str) -> Array:
        """Constrain the sharding of an activation: `layout.constrain(x, "batch length embed")`."""
        return self._constrained(x, self.activation_spec(axis_names, x.shape))

    def replicate(self, x: Array) -> Array:
        """Constrain an array to be replicated, so that each process can read it."""
        return self._constrained(x, PartitionSpec())

    def constrain_weight(self, x: Array, axis_names: str) -> Array:
        """Constrain the sharding of an array, such as a gradient, by the rules for weights."""
        return x if self.single else self._constrained(x, self.weight_spec(axis_names))

    def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
        if self.mesh is None or self.single:
            return x
        if self.explicit and not works_in_auto_mode():
            return reshard(x, NamedSharding(self.mesh, spec))  # sharding constraints apply to Auto axes only
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.current_mesh, spec))

    def gathered_spec(self, axis_names: str | Axes) -> PartitionSpec:
        """Return the `PartitionSpec` of a weight in products with activations.

        The weight is gathered along the mesh axes that split tokens. It remains split along mesh axes that split the
        same dimension of activations, such as experts and heads, and along the axis `layers`.
        """
        rules = dict(self.activations)
        token_axes = {*rules.get("batch", ()), *rules.get("length", ())}

        def remaining(axis: str, mesh_axes: tuple[str, ...]) -> tuple[str, ...] | None:
            if axis == "layers":
                return mesh_axes or None
            split_axes = rules.get(axis, ())
            return tuple(name for name in mesh_axes if name not in token_axes or name in split_axes) or None

        names = check_axes("weight", axis_names)
        spec = self.weight_spec(axis_names)
        return PartitionSpec(*(remaining(name, names_of(entry)) for name, entry in zip(names, spec, strict=True)))

    def gather_weight(self, x: Array, axis_names: str | Axes) -> Array:
        """Constrain a weight to be gathered for its products with activations (see `gathered_spec`).

        Its gradient is constrained to be split like the weight (reduce-scatter). Without these constraints, XLA may
        pass a large weight around a ring in small pieces, which sends twice as many bytes and makes larger programs.
        """
        shardings = self.gather_shardings(axis_names, x.shape)
        return x if shardings is None else _gather(*shardings, x)

    def gather_shardings(
        self, axis_names: str | Axes, shape: Sequence[int]
    ) -> tuple[NamedSharding, NamedSharding] | None:
        """Return the sharding of a weight in products and the sharding of its gradient. None: they are equal."""
        if self.mesh is None or self.single:
            return None
        gradient_spec = self.gradient_spec(axis_names, shape)
        gathered_spec = self.gathered_spec(axis_names)
        if gathered_spec == gradient_spec:
            return None
        return NamedSharding(self.current_mesh, gathered_spec), NamedSharding(self.current_mesh, gradient_spec)

    def activation_shards(self, axis_names: str, shape: Sequence[int]) -> int:
        """Return the number of shards of an activation."""
        spec = self.activation_spec(axis_names, shape)
        return math.prod(self.sizes[name] for entry in spec for name in names_of(entry))

    def shardings(self, tree: PyTree) -> PyTree:
        """Return the sharding of every weight in a tree of modules (arrays or `ShapeDtypeStruct`s), as a tree.

        Weights that match `offload.weights` are placed in host memory.
        """
        return self._shardings(tree, self.weight_spec, "weights")

    def state_shardings(self, tree: PyTree, *, over_data: bool) -> PyTree:
        """Return the shardings of the optimizer state of every weight in a tree of modules, as a tree.

        States of weights that match `offload.optimizer` are placed in host memory.

        **Arguments:**

        - `over_data`: also split the state over `data` (see `state_spec`).
        """
        return self._shardings(tree, self.state_spec if over_data else self.weight_spec, "optimizer")

    @property
    def on_device(self) -> "Layout":
        """Layout with all weights and optimizer states in device memory."""
        return dataclasses.replace(self, offload=Offload())

    def activation_shardings(self, tree: PyTree) -> PyTree:
        """Return the shardings of every array in a tree by the rules for activations, for caches."""
        return self._shardings(tree, lambda axis_names, shape, name: self.activation_spec(axis_names, shape))

    def _shardings(
        self, tree: PyTree, spec: Callable[[Axes, Sequence[int], str], PartitionSpec], offload_field: str | None = None
    ) -> PyTree:
        axis_names = axes(tree)

        def leaf_sharding(path, leaf):
            name = path_name(path)
            sharding = self._sharding(spec(axis_names[name], leaf.shape, name))
            on_host = offload_field is not None and self.offload.holds(offload_field, name, axis_names[name])
            return sharding.with_memory_kind(HOST) if on_host else sharding

        return jax.tree_util.tree_map_with_path(leaf_sharding, tree)

    @property
    def current_mesh(self) -> Any:
        """Mesh for sharding constraints and `jax.shard_map`, also inside a `jax.shard_map` over some of its axes.

        Raises ConfigError on an explicit mesh outside of `automatically`.
        """
        check(
            not self.explicit or works_in_auto_mode(),
            "On a mesh with explicit axes, layers and sharding constraints must be called inside a function that is "
            "wrapped by layout.automatically. Calls of a model are wrapped already.",
        )
        return jax.sharding.get_abstract_mesh() if self._mapped else self._mesh

    @property
    def _mesh(self) -> Any:
        """Mesh with the axis type of the surrounding code: Auto inside `automatically`."""
        return with_auto_axes(self.mesh) if self.explicit and works_in_auto_mode() else self.mesh

    @property
    def unmapped_axes(self) -> frozenset[str]:
        """Mesh axes that a `jax.shard_map` may map here: all axes that no surrounding `jax.shard_map` maps."""
        return frozenset(str(name) for name in self.mesh.axis_names) - self._mapped

    @property
    def _mapped(self) -> frozenset[str]:
        """Mesh axes that surrounding `jax.shard_map`s map."""
        if self.mesh is None:
            return frozenset()
        return frozenset(jax.sharding.get_abstract_mesh().manual_axes) & frozenset(self.mesh.axis_names)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Call `jax.shard_map` over all mesh axes that no surrounding `jax.shard_map` maps.

        `check_vma` is off, because the types of gathered arrays do not show that all devices have the same values.
        """
        return jax.shard_map(
            function,
            mesh=self.current_mesh,
            axis_names=self.unmapped_axes,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def with_unit_axes(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return mesh axes, followed by all mesh axes of size 1, for a `PartitionSpec` of `shard_map`.

        Without the axes of size 1, `shard_map` would sum gradients over them: it sums over all axes that no spec names.
        """
        return (*mesh_axes, *(name for name, size in self.sizes.items() if size == 1))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along each mesh axis; empty without a mesh."""
        return {} if self.mesh is None else {str(name): size for name, size in self.mesh.shape.items()}

    def with_batch_over_stage(self) -> "Layout":
        """Return the layout whose batch is also split over `stage`, for computations outside of a pipeline."""
        if self.sizes.get("stage", 1) == 1 or "stage" in dict(self.activations).get("batch", ()):
            return self
        rules = dict(self.activations)
        if "batch" in rules:
            rules["batch"] = (*rules["batch"], "stage")
        return dataclasses.replace(self, activations=rules)


def _split_dimensions(table: Table, axis_names: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each dimension of an array.

    A mesh axis splits at most one dimension. Earlier rows of the table have precedence.

    **Arguments:**

    - `axis_names`: logical axes of the array.
    - `sizes`: number of devices along each mesh axis.
    """
    used: set[str] = set()
    split: list[tuple[str, ...]] = [()] * len(axis_names)
    for axis, mesh_axes in table:
        for index, axis_name in enumerate(axis_names):
            if axis_name == axis:
                split[index] = tuple(name for name in mesh_axes if sizes.get(name, 1) > 1 and name not in used)
                used.update(split[index])
    return split


def _without_uneven_layers(
    table: Table,
    axis_names: tuple[str, ...],
    shape: Sequence[int],
    split: list[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> list[tuple[str, ...]]:
    """Return the result of `_split_dimensions`, adapted to a number of layers that is not a multiple of `stage`.

    `stage` then splits the first dimension that `fsdp` may split and that it divides, if there is one.
    """
    stages = sizes.get("stage", 1)
    rows = dict(table)
    for index, (axis, size, mesh_axes) in enumerate(zip(axis_names, shape, split, strict=True)):
        if axis == "layers" and "stage" in mesh_axes and size % stages:
            split[index] = tuple(name for name in mesh_axes if name != "stage")
            for other_index, (other_axis, other_size) in enumerate(zip(axis_names, shape, strict=True)):
                shards = stages * math.prod(sizes[name] for name in split[other_index])
                if "fsdp" in rows.get(other_axis, ()) and other_size % shards == 0:
                    split[other_index] += ("stage",)
                    break
    return split


def _dividing(mesh_axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes, in order, without those that cannot also divide a dimension of this `size`."""
    accepted: tuple[str, ...] = ()
    for mesh_axis in mesh_axes:
        if size % math.prod(sizes[name] for name in (*accepted, mesh_axis)) == 0:
            accepted += (mesh_axis,)
    return accepted


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(used: NamedSharding, of_gradient: NamedSharding, x: Array) -> Array:
    """Constrain the sharding of `x`, and the sharding of its gradient."""
    return jax.lax.with_sharding_constraint(x, used)


def _gather_forward(used, of_gradient, x):
    return _gather(used, of_gradient, x), None


def _gather_backward(used, of_gradient, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, of_gradient),)


_gather.defvjp(_gather_forward, _gather_backward)


def out_shardings(shapes: PyTree) -> PyTree:
    """Return the shardings of arrays or shapes for `jax.jit`. None if all arrays are on a single device.

    With None, results on a single device stay uncommitted, like the results of `optimizer.init`. If the weights were
    committed, a train step would return a committed optimizer state, and the second step would be compiled again.
    """
    leaves = jax.tree.leaves(shapes)
    single = all(isinstance(x.sharding, SingleDeviceSharding) and x.sharding.memory_kind != HOST for x in leaves)
    return None if single else jax.tree.map(lambda leaf: leaf.sharding, shapes)


def partitions(shapes: PyTree) -> PyTree:
    """Return the `PartitionSpec`s of arrays or shapes on a mesh: the `out_specs` of `Layout.automatically`."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)


def device_bytes(array: Any) -> int:
    """Return the size in bytes of the largest shard of an array or `ShapeDtypeStruct`."""
    shape = array.shape if getattr(array, "sharding", None) is None else array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
