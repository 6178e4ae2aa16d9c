"""Meshes with axes of type Explicit: arrays' types say how they are split, and JAX checks what is done with them.

The library itself computes in Auto mode, by the same programs as on a mesh of Auto axes; on the way in and out arrays
change their types and nothing else. So a program may be explicit before and after it.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
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
    """Whether a mesh's axes are of type Explicit."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def works_in_auto_mode() -> bool:
    """Whether no axis is Explicit of the mesh in which operations are done here."""
    here = get_abstract_mesh()
    return not here.empty and AxisType.Explicit not in here.axis_types


@functools.lru_cache(maxsize=64)
def with_auto_axes(mesh: Any) -> Any:
    """The same mesh, of devices or abstract, with axes of type Auto."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def in_auto_mode(mesh: Any, function: Callable[P, T], places: Callable[[T], PyTree]) -> Callable[P, T]:
    """The function, done in Auto mode where `mesh` is explicit: its arguments become arrays whose types say nothing.

    `places` gives the partitions (`PartitionSpec`) of all arrays in the result, as a tree like it.
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
            specs = places(result)
        return jax.tree.map(lambda x, spec: _placed(x, NamedSharding(mesh, spec)), result, specs)

    return call


def _placed(x: Any, place: Any) -> Any:
    return reshard(x, place) if isinstance(x, jax.Array) else x


def _check_surroundings(mesh: Any) -> None:
    here = get_abstract_mesh()
    rule = f"Layout.mesh={mesh.abstract_mesh} can't be used in a program on the mesh {here}"
    check(here.empty or here == mesh.abstract_mesh, f"{rule}: give jax.set_mesh the mesh of the layout, or none.")


def spec_of(x: Any) -> PartitionSpec:
    """How the type of an array says that it is split; in Auto mode it says nothing."""
    return jax.typeof(x).sharding.spec


def untyped(x: jax.Array) -> jax.Array:
    """The same array in the same memory, on its mesh with Auto axes."""
    if not isinstance(x.sharding, NamedSharding) or not is_explicit(x.sharding.mesh):
        return x
    place = NamedSharding(with_auto_axes(x.sharding.mesh), x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, place, [part.data for part in x.addressable_shards])


def mesh_of(tree: PyTree) -> Any:
    """The mesh that the types of a tree's arrays name; an empty one where they name none."""
    return jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """For functions of a decoder (their first argument): on an explicit mesh they are done in Auto mode.

    Arrays that they return are split by the words of their types: those with a batch as the layout's activations, all
    others not at all.
    """
    name = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        first: Any = args[0] if args else kwargs[name]
        return first.execution.layout.automatically(function)(*args, **kwargs)

    return call


def keeping_types(method: Callable[..., T]) -> Callable[..., T]:
    """For methods that return a tree like the one (`self`) whose they are: its arrays keep their types."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return in_auto_mode(mesh_of(self), method, lambda _: jax.tree.map(spec_of, self))(self, *args, **kwargs)

    return call


def declared(function: Callable[..., Any]) -> Any:
    """The type that a function says it returns."""
    return typing.get_type_hints(inspect.unwrap(function)).get("return")
