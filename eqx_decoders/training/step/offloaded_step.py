"""Update of offloaded weights and optimizer states, layer by layer, so that the device holds one layer at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, PyTree

from eqx_decoders.errors import check
from eqx_decoders.sharding.axes import Axes
from eqx_decoders.sharding.offload import Offload, can_offload, is_on_host, to_device, to_memory_of
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, matching


Update = Callable[[dict[str, Array], dict[str, Array], PyTree, PyTree], tuple[dict[str, Array], PyTree, PyTree]]


def check_offload(offload: Offload, axis_names: Mapping[str, Axes], optimizer: OptimizerConfig) -> None:
    """Raise ConfigError for patterns without a match, and for optimizers that cannot update layers separately.

    `axis_names`: axes of each weight, by path.
    """
    if offload == Offload():
        return
    paths = tuple(path for path, names in axis_names.items() if can_offload(path, names))
    matching(paths, offload.weights, "Offload.weights")
    matching(paths, offload.optimizer, "Offload.optimizer")
    check(
        optimizer.name in ("adamw", "lion"),
        f"OptimizerConfig.name={optimizer.name!r} cannot update layers separately, which {offload} needs. Use adamw or "
        "lion, or do not offload.",
    )
    check(
        optimizer.moments_dtype != "int8",
        f"OptimizerConfig.moments_dtype='int8' cannot update layers separately, which {offload} needs: it draws random "
        "numbers for all layers at once. Use bfloat16, or do not offload.",
    )


def square_sum(tree: dict[str, Array]) -> Float32[Array, ""]:
    """Return the sum of the squares of all elements, in float32. Arrays in host memory are summed layer by layer."""

    def sum_of(leaf: Array) -> Array:
        if not is_on_host(leaf):
            return _squares(leaf)
        return jax.lax.fori_loop(
            0, leaf.shape[0], lambda layer, total: total + _squares(_layer(leaf, layer)), jnp.float32(0)
        )

    return sum((sum_of(leaf) for leaf in tree.values()), jnp.float32(0))


def update_by_layer(
    update: Update,
    groups: Mapping[int, tuple[str, ...]],
    names: tuple[str, ...],
    finite: Array,
    weights: dict[str, Array],
    gradient: dict[str, Array],
    optimizer: PyTree,
    ema: dict[str, Array] | None,
) -> tuple[dict[str, Array], PyTree, dict[str, Array] | None]:
    """Return new weights, optimizer states and moving averages; the old ones if the step is not `finite`.

    **Arguments:**

    - `update`: `(weights, gradient, optimizer, ema) -> (weights, optimizer, ema)` for a subset of the weights. The
        update of a weight must not depend on other weights or layers.
    - `groups`: paths of the weights that are updated layer by layer, by their number of layers.
    - `names`: paths of all other weights. They are updated at once, together with the parts of the optimizer state that
        do not belong to a weight.
    - `finite`: whether the step changes anything.
    - `weights`, `gradient`, `optimizer`, `ema`: the values before the step.
    """
    all_names = frozenset(weights)

    def pick(tree: PyTree, names: tuple[str, ...]) -> PyTree:
        return _parts(lambda part: {name: part[name] for name in names}, all_names, tree)

    def state_of(names: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(pick(tree, names) for tree in (weights, optimizer, ema))

    state, gradients = state_of(names), pick(gradient, names)
    results = [jax.lax.cond(finite, lambda w, o, e: update(w, gradients, o, e), lambda *old: old, *state)]
    for layers, group in groups.items():
        results.append(_update_group(update, layers, finite, pick(gradient, group), state_of(group)))

    def joined(first: PyTree, *others: PyTree) -> PyTree:
        """Merge the dictionaries of weights. All other nodes are those of the first tree."""
        return _parts(lambda part, *more: {name: x for each in (part, *more) for name, x in each.items()},
                      frozenset(names), first, *others)  # fmt: skip

    return tuple(joined(*trees) for trees in zip(*results, strict=True))


def _update_group(update: Update, layers: int, finite: Array, gradient: dict[str, Array], old: Any) -> Any:
    """Update one layer after another in place, so that the host needs no second copy."""
    leaves, tree = jax.tree.flatten(old)
    stacked = [leaf.ndim > 0 for leaf in leaves]  # counters have no layers

    def body(layer: Array, leaves: list[Array]) -> list[Array]:
        before = [_layer(leaf, layer) if has_layers else leaf for leaf, has_layers in zip(leaves, stacked, strict=True)]
        gradients = {name: _layer(leaf, layer) for name, leaf in gradient.items()}
        weights, optimizer, ema = jax.tree.unflatten(tree, before)
        after = jax.tree.leaves(update(weights, gradients, optimizer, ema))
        results = (jnp.where(finite, new, old) for new, old in zip(after, before, strict=True))
        return [
            jax.lax.dynamic_update_index_in_dim(leaf, to_memory_of(result, leaf), layer, 0) if has_layers else leaf
            for leaf, result, has_layers in zip(leaves, results, stacked, strict=True)
        ]

    return jax.tree.unflatten(tree, jax.lax.fori_loop(0, layers, body, leaves))


def _parts(change: Callable[..., Any], names: frozenset[str], tree: PyTree, *others: PyTree) -> PyTree:
    """Apply `change` to each dictionary in a tree whose keys are `names`."""

    def of_weights(part: Any) -> bool:
        return isinstance(part, dict) and frozenset(part) == names

    return jax.tree.map(
        lambda part, *more: change(part, *more) if of_weights(part) else part, tree, *others, is_leaf=of_weights
    )


def _layer(leaf: Array, layer: Array) -> Array:
    return to_device(jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False))


def _squares(x: Array) -> Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))
