"""The optimizer's update layer by layer, where weights, gradients or states are in the host's memory."""

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


def check_offload(offload: Offload, words: Mapping[str, Axes], optimizer: OptimizerConfig) -> None:
    """Raise ConfigError for patterns that match nothing, and for optimizers that see more than one layer."""
    if offload == Offload():
        return
    able = tuple(name for name, axis_names in words.items() if can_offload(name, axis_names))
    matching(able, offload.weights, "Offload.weights")
    matching(able, offload.optimizer, "Offload.optimizer")
    rule = f"can't move one layer at a time, as {offload} asks for"
    able = optimizer.name in ("adamw", "lion")
    check(able, f"OptimizerConfig.name={optimizer.name!r} {rule}. Take adamw or lion, or leave it on the device.")
    rule = f"OptimizerConfig.moments_dtype='int8' {rule}: it draws for all layers at once"
    check(optimizer.moments_dtype != "int8", f"{rule}. Take bfloat16, or leave it on the device.")


def square_sum(tree: dict[str, Array]) -> Float32[Array, ""]:
    """Sum all squares in float32; of arrays on the host layer by layer."""

    def one(leaf: Array) -> Array:
        if not is_on_host(leaf):
            return _squares(leaf)
        return jax.lax.fori_loop(
            0, leaf.shape[0], lambda layer, total: total + _squares(_layer(leaf, layer)), jnp.float32(0)
        )

    return sum((one(leaf) for leaf in tree.values()), jnp.float32(0))


def by_layer(
    update: Update,
    groups: Mapping[int, tuple[str, ...]],
    names: tuple[str, ...],
    finite: Array,
    weights: dict[str, Array],
    gradient: dict[str, Array],
    optimizer: PyTree,
    ema: dict[str, Array] | None,
) -> tuple[dict[str, Array], PyTree, dict[str, Array] | None]:
    """Compute new weights, states and means; return the old ones if not `finite`.

    **Arguments:**

    - `update`: `(weights, gradient, optimizer, ema) -> (weights, optimizer, ema)` of any of the weights, each for
        itself: it may not look at one layer's weight to move another's.
    - `groups`: the weights that are moved layer by layer, by their number of layers.
    - `names`: all other weights, which are moved at once, and decide what else is in the optimizer's state.
    """
    every = frozenset(weights)

    def pick(tree: PyTree, names: tuple[str, ...]) -> PyTree:
        return _parts(lambda part: {name: part[name] for name in names}, every, tree)

    def some(names: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(pick(tree, names) for tree in (weights, optimizer, ema))

    rest, slopes = some(names), pick(gradient, names)
    done = [jax.lax.cond(finite, lambda w, o, e: update(w, slopes, o, e), lambda *same: same, *rest)]
    for layers, group in groups.items():
        done.append(_group(update, layers, finite, pick(gradient, group), some(group)))

    def joined(first: PyTree, *others: PyTree) -> PyTree:
        """Join the dictionaries of weights; all other nodes are those of the weights that are moved at once."""
        return _parts(lambda part, *more: {name: x for each in (part, *more) for name, x in each.items()},
                      frozenset(names), first, *others)  # fmt: skip

    return tuple(joined(*trees) for trees in zip(*done, strict=True))


def _group(update: Update, layers: int, finite: Array, gradient: dict[str, Array], old: Any) -> Any:
    """Update one layer after another, each written where it was read: the host holds no second copy."""
    leaves, tree = jax.tree.flatten(old)
    stacked = [leaf.ndim > 0 for leaf in leaves]  # counters have no layers

    def body(layer: Array, leaves: list[Array]) -> list[Array]:
        before = [_layer(leaf, layer) if cut else leaf for leaf, cut in zip(leaves, stacked, strict=True)]
        slopes = {name: _layer(leaf, layer) for name, leaf in gradient.items()}
        weights, optimizer, ema = jax.tree.unflatten(tree, before)
        after = jax.tree.leaves(update(weights, slopes, optimizer, ema))
        results = (jnp.where(finite, new, old) for new, old in zip(after, before, strict=True))
        return [
            jax.lax.dynamic_update_index_in_dim(leaf, to_memory_of(result, leaf), layer, 0) if cut else leaf
            for leaf, result, cut in zip(leaves, results, stacked, strict=True)
        ]

    return jax.tree.unflatten(tree, jax.lax.fori_loop(0, layers, body, leaves))


def _parts(change: Callable[..., Any], names: frozenset[str], tree: PyTree, *others: PyTree) -> PyTree:
    """Change every dictionary of these weights in a tree."""

    def of_weights(part: Any) -> bool:
        return isinstance(part, dict) and frozenset(part) == names

    return jax.tree.map(
        lambda part, *more: change(part, *more) if of_weights(part) else part, tree, *others, is_leaf=of_weights
    )


def _layer(leaf: Array, layer: Array) -> Array:
    return to_device(jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False))


def _squares(x: Array) -> Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))
