"""Weights that a mesh could split and does not: how many they are, and what to do about them."""

import math

from jaxtyping import PyTree

from eqx_decoders.errors import check
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.rules import names_of


FEW = 10**7  # weights of a model that fits anywhere: of so few, norms and positions may be a large share


def splitting_axes(layout: Layout) -> tuple[str, ...]:
    """The mesh axes of several devices that the table of weights names, but `stage`, which splits layers alone."""
    named = {axis for word, names in layout.weights for axis in names if word != "layers"}
    return tuple(axis for axis, size in layout.sizes.items() if size > 1 and axis in named)


def replicated_weights(model: PyTree, layout: Layout) -> dict[str, int]:
    """The weights that are not split along all `splitting_axes`, by path: how many numbers each has, most first."""
    wanted = math.prod(layout.sizes[axis] for axis in splitting_axes(layout))
    words, found = axes(model), {}
    for name, leaf in named_leaves(model).items():
        split = {axis for group in layout.weight_spec(words[name], leaf.shape, name) for axis in names_of(group)}
        if math.prod(layout.sizes[axis] for axis in splitting_axes(layout) if axis in split) < wanted:
            found[name] = leaf.size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def replicated_fraction(model: PyTree, layout: Layout) -> float:
    """The share of a model's weights that is not split along every mesh axis that is there to split weights.

    Norms and biases always belong to it, small as they are. 0 where the mesh splits no weights.
    """
    return sum(replicated_weights(model, layout).values()) / sum(leaf.size for leaf in named_leaves(model).values())


def check_replicated(model: PyTree, layout: Layout, tolerance: float) -> None:
    """Raise ConfigError if `replicated_fraction` is above `tolerance`, with the weights that it is made of.

    Models of less than ten million weights pass: there is no memory to be won.
    """
    if sum(leaf.size for leaf in named_leaves(model).values()) < FEW:
        return
    share = replicated_fraction(model, layout)
    if share <= tolerance:
        return
    words, found = axes(model), list(replicated_weights(model, layout).items())
    largest = ", ".join(f"{name} ({' '.join(words[name])}: {size:,})" for name, size in found[:3])
    along = " and ".join(f"Layout.{axis}={layout.sizes[axis]}" for axis in splitting_axes(layout))
    check(
        False,
        f"replicated_tolerance={tolerance}: {share:.1%} of the weights are not split along all of {along}, so that "
        f"devices hold more than their part. The largest: {largest}. Give these axes rows in Layout.weights, choose "
        "another mesh, or raise the tolerance.",
    )
