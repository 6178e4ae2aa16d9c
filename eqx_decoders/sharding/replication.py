"""Weights that a mesh could split and does not: their number, and an error where there are too many."""

import math

from jaxtyping import PyTree

from eqx_decoders.errors import check
from eqx_decoders.sharding.axes import axes, named_leaves, names_of
from eqx_decoders.sharding.layout import Layout


FEW = 10**7  # weights of a model that fits anywhere, of which norms and positions may be a large fraction


def splitting_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes of several devices in the table of weights, but `stage`, which splits only layers."""
    named = {axis for word, names in layout.weights for axis in names if word != "layers"}
    return tuple(axis for axis, size in layout.sizes.items() if size > 1 and axis in named)


def replicated_weights(model: PyTree, layout: Layout) -> dict[str, int]:
    """Return the size of each weight that is not split along all `splitting_axes`, by path, largest first."""
    wanted = math.prod(layout.sizes[axis] for axis in splitting_axes(layout))
    words, sizes = axes(model), {}
    for name, leaf in named_leaves(model).items():
        split = {axis for group in layout.weight_spec(words[name], leaf.shape, name) for axis in names_of(group)}
        if math.prod(layout.sizes[axis] for axis in splitting_axes(layout) if axis in split) < wanted:
            sizes[name] = leaf.size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def replicated_fraction(model: PyTree, layout: Layout) -> float:
    """Return the fraction of a model's weights that is not split along every axis that splits weights.

    Norms and biases always count, small as they are. 0 if the mesh splits no weights.
    """
    return sum(replicated_weights(model, layout).values()) / sum(leaf.size for leaf in named_leaves(model).values())


def check_replicated(model: PyTree, layout: Layout, tolerance: float) -> None:
    """Raise ConfigError, with the weights, if `replicated_fraction` is above `tolerance`.

    Models of less than ten million weights pass: there is no memory to save.
    """
    if sum(leaf.size for leaf in named_leaves(model).values()) < FEW:
        return
    share = replicated_fraction(model, layout)
    if share <= tolerance:
        return
    words, replicated = axes(model), list(replicated_weights(model, layout).items())
    largest = ", ".join(f"{name} ({' '.join(words[name])}: {size:,})" for name, size in replicated[:3])
    along = " and ".join(f"Layout.{axis}={layout.sizes[axis]}" for axis in splitting_axes(layout))
    check(
        False,
        f"replicated_tolerance={tolerance}: {share:.1%} of the weights are not split along all of {along}, so that "
        f"devices hold more than their part. The largest: {largest}. Give these axes rows in Layout.weights, choose "
        "another mesh, or raise the tolerance.",
    )
