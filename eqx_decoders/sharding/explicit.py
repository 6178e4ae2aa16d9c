"""Meshes with axes of type Explicit: arrays' types say how they are split, and JAX checks what is done with them.

The library itself computes in Auto mode, by the same programs as on a mesh of Auto axes; on the way in and out arrays
change their types and nothing else. So a program may be explicit before and after it.
"""

import functools
import inspect
import operator
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)
from jaxtyping import PyTree

from eqx_decoders.errors import check


P = ParamSpec("P")
T = TypeVar("T")


def is_explicit(mesh: Any) -> bool:
    """Return whether a mesh's axes are of type Explicit."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def works_in_auto_mode() -> bool:
    """Return whether no axis of the current mesh is Explicit."""
    current = get_abstract_mesh()
    return not current.empty and AxisType.Explicit not in current.axis_types


@functools.lru_cache(maxsize=64)
def with_auto_axes(mesh: Any) -> Any:
    """Return the same mesh, of devices or abstract, with axes of type Auto."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def in_auto_mode(mesh: Any, function: Callable[P, T], out_specs: Callable[[T], PyTree]) -> Callable[P, T]:
    """Return the function, run in Auto mode if `mesh` is explicit: its arguments lose the sharding in their types.

    `out_specs` returns the partitions (`PartitionSpec`) of all arrays in the result, as a tree like it.
    """
    if not is_explicit(mesh):
        return function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if works_in_auto_mode():
            return function(*args, **kwargs)
        _check_surroundings(mesh)
        with use_abstract_mesh(with_auto_axes(mesh).abstract_mesh):
            args, kwargs = jax.tree.map(lambda x: _placed(x, PartitionSpec()), (args, kwargs))
            result = function(*args, **kwargs)
            specs = out_specs(result)
        return jax.tree.map(lambda x, spec: _placed(x, NamedSharding(mesh, spec)), result, specs)

    return call


def _placed(x: Any, sharding: Any) -> Any:
    return reshard(x, sharding) if isinstance(x, jax.Array) else x


def _check_surroundings(mesh: Any) -> None:
    current = get_abstract_mesh()
    rule = f"Layout.mesh={mesh.abstract_mesh} can't be used in a program on the mesh {current}"
    check(current.empty or current == mesh.abstract_mesh, f"{rule}: give jax.set_mesh the mesh of the layout, or none.")


def spec_of(x: Any) -> PartitionSpec:
    """Return the partition in the type of an array; in Auto mode types have none."""
    return jax.typeof(x).sharding.spec


def untyped(x: jax.Array) -> jax.Array:
    """Return the same array in the same memory, on its mesh with Auto axes."""
    if not isinstance(x.sharding, NamedSharding) or not is_explicit(x.sharding.mesh):
        return x
    sharding = NamedSharding(with_auto_axes(x.sharding.mesh), x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [part.data for part in x.addressable_shards])


def mesh_of(tree: PyTree) -> Any:
    """Return the mesh in the types of a tree's arrays; an empty one if they have none."""
    return jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function of a decoder (its first argument), so that it runs in Auto mode on an explicit mesh.

    Arrays that it returns are split by the words of their types: those with a batch as the layout's activations, all
    others not at all.
    """
    name = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        first: Any = args[0] if args else kwargs[name]
        return first.execution.layout.automatically(function)(*args, **kwargs)

    return call


def keeping_types(method: Callable[..., T]) -> Callable[..., T]:
    """Wrap a method that returns a tree like `self`, so that its arrays keep their types."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return in_auto_mode(mesh_of(self), method, lambda _: jax.tree.map(spec_of, self))(self, *args, **kwargs)

    return call


def declared(function: Callable[..., Any]) -> Any:
    """Return the return annotation of a function."""
    return typing.get_type_hints(inspect.unwrap(function)).get("return")


def at_layer(tree: Any, index: int) -> Any:
    """Return layer `index` of a stacked tree."""

    def of_device_array(leaf: Any) -> Any:
        take = in_auto_mode(mesh_of(leaf), operator.getitem, lambda _: PartitionSpec(*spec_of(leaf)[1:]))
        return take(leaf, index)

    def of_leaf(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, np.ndarray) else of_device_array(leaf) if eqx.is_array(leaf) else leaf

    return jax.tree.map(of_leaf, tree)
