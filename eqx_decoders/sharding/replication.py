"""Detection of weights that are replicated although the mesh could split them."""

import math

from jaxtyping import PyTree

from eqx_decoders.errors import ConfigError
from eqx_decoders.sharding.axes import axes, named_leaves, names_of
from eqx_decoders.sharding.layout import Layout


# Smaller models fit on any device, and may consist of norms and position embeddings to a large part.
MIN_WEIGHTS = 10**7


def splitting_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes with several devices that split weights, except axes that split only layers (`stage`)."""
    used_axes = {mesh_axis for axis, mesh_axes in layout.weights if axis != "layers" for mesh_axis in mesh_axes}
    return tuple(mesh_axis for mesh_axis, size in layout.sizes.items() if size > 1 and mesh_axis in used_axes)


def replicated_weights(model: PyTree, layout: Layout) -> dict[str, int]:
    """Return the number of elements of each weight that is not split along all `splitting_axes`, largest first."""
    max_shards = math.prod(layout.sizes[mesh_axis] for mesh_axis in splitting_axes(layout))
    axis_names = axes(model)
    sizes = {}
    for name, leaf in named_leaves(model).items():
        spec = layout.weight_spec(axis_names[name], leaf.shape, name)
        split_axes = {mesh_axis for entry in spec for mesh_axis in names_of(entry)}
        shards = math.prod(layout.sizes[axis] for axis in splitting_axes(layout) if axis in split_axes)
        if shards < max_shards:
            sizes[name] = leaf.size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def replicated_fraction(model: PyTree, layout: Layout) -> float:
    """Return the fraction of a model's weights that is not split along all mesh axes that split weights.

    Norms are never split, so they count if the mesh splits weights. Biases are split by the rules of their axes, such
    as `mlp`. Returns 0 if the mesh splits no weights.
    """
    return sum(replicated_weights(model, layout).values()) / sum(leaf.size for leaf in named_leaves(model).values())


def check_replicated(model: PyTree, layout: Layout, tolerance: float) -> None:
    """Raise ConfigError, which names the largest replicated weights, if `replicated_fraction` exceeds `tolerance`.

    Models with fewer than ten million weights are not checked.
    """
    if sum(leaf.size for leaf in named_leaves(model).values()) < MIN_WEIGHTS:
        return
    fraction = replicated_fraction(model, layout)
    if fraction <= tolerance:
        return
    axis_names = axes(model)
    replicated = list(replicated_weights(model, layout).items())
    largest = ", ".join(f"{name} ({' '.join(axis_names[name])}: {size:,})" for name, size in replicated[:3])
    product = " and ".join(f"Layout.{axis}={layout.sizes[axis]}" for axis in splitting_axes(layout))
    raise ConfigError(
        f"replicated_tolerance={tolerance}, but {fraction:.1%} of the weights are not split along all of {product}, so "
        f"that devices store copies of them. The largest replicated weights: {largest}. Add rows for their axes to "
        "Layout.weights, choose another mesh, or raise the tolerance."
    )
