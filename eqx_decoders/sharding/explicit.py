"""Support of meshes with axes of type Explicit, where the types of arrays include their shardings.

Internally the library runs with Auto axes, so that programs are the same as on a mesh of Auto axes. Functions of the
library that are called with arrays on an explicit mesh convert the types of their arguments and results. This moves no
data.
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
    """Return whether the axes of a mesh are of type Explicit."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def works_in_auto_mode() -> bool:
    """Return whether there is a current mesh (`jax.sharding.get_abstract_mesh`) without Explicit axes."""
    current = get_abstract_mesh()
    return not current.empty and AxisType.Explicit not in current.axis_types


@functools.lru_cache(maxsize=64)
def with_auto_axes(mesh: Any) -> Any:
    """Return the same mesh, concrete or abstract, with axes of type Auto."""
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=axis_types)


def in_auto_mode(mesh: Any, function: Callable[P, T], out_specs: Callable[[T], PyTree]) -> Callable[P, T]:
    """Return `function`; if `mesh` is explicit, wrap it to run with Auto axes.

    The wrapper removes the shardings from the types of the arguments and adds shardings to the types of the results.

    **Arguments:**

    - `out_specs`: function from the result to the `PartitionSpec`s of its arrays, as a tree of the same structure.
    """
    if not is_explicit(mesh):
        return function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if works_in_auto_mode():
            return function(*args, **kwargs)
        _check_current_mesh(mesh)
        with use_abstract_mesh(with_auto_axes(mesh).abstract_mesh):
            args, kwargs = jax.tree.map(lambda x: _resharded(x, PartitionSpec()), (args, kwargs))
            result = function(*args, **kwargs)
            specs = out_specs(result)
        return jax.tree.map(lambda x, spec: _resharded(x, NamedSharding(mesh, spec)), result, specs)

    return call


def _resharded(x: Any, sharding: Any) -> Any:
    return reshard(x, sharding) if isinstance(x, jax.Array) else x


def _check_current_mesh(mesh: Any) -> None:
    current = get_abstract_mesh()
    check(
        current.empty or current == mesh.abstract_mesh,
        f"Layout.mesh={mesh.abstract_mesh} differs from the current mesh {current}. Pass the mesh of the layout to "
        "jax.set_mesh, or do not call jax.set_mesh.",
    )


def spec_of(x: Any) -> PartitionSpec:
    """Return the `PartitionSpec` in the type of an array. With Auto axes it is empty."""
    return jax.typeof(x).sharding.spec


def untyped(x: jax.Array) -> jax.Array:
    """Return an array on an explicit mesh as an array on the same mesh with Auto axes. The buffers are shared."""
    if not isinstance(x.sharding, NamedSharding) or not is_explicit(x.sharding.mesh):
        return x
    sharding = NamedSharding(with_auto_axes(x.sharding.mesh), x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard.data for shard in x.addressable_shards])


def mesh_of(tree: PyTree) -> Any:
    """Return the mesh in the type of a tree's first array. It is empty if the type has no sharding."""
    return jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh


def run_with_auto_axes(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function whose first argument is a decoder, so that it runs with Auto axes on an explicit mesh.

    The return annotation determines the shardings of the results, see `Layout.automatically`.
    """
    name = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        decoder: Any = args[0] if args else kwargs[name]
        return decoder.execution.layout.automatically(function)(*args, **kwargs)

    return call


def keeping_types(method: Callable[..., T]) -> Callable[..., T]:
    """Wrap a method that returns a tree with the structure of `self`, so that its arrays keep their types."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return in_auto_mode(mesh_of(self), method, lambda _: jax.tree.map(spec_of, self))(self, *args, **kwargs)

    return call


def declared(function: Callable[..., Any]) -> Any:
    """Return the return annotation of a function."""
    return typing.get_type_hints(inspect.unwrap(function)).get("return")


def at_layer(tree: Any, index: int) -> Any:
    """Return layer `index` of a stacked tree."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf[index]
        if not eqx.is_array(leaf):
            return leaf
        getitem = in_auto_mode(mesh_of(leaf), operator.getitem, lambda _: PartitionSpec(*spec_of(leaf)[1:]))
        return getitem(leaf, index)

    return jax.tree.map(take, tree)
