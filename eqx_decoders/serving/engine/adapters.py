"""Adapters of one model that an engine serves at once: low-rank pairs in places of one size, for each row its own.

A weight stands beside the pairs of all places, and every row of a batch reads those of its adapter (as in S-LoRA, Sheng
et al. 2024, and Punica, Chen et al. 2024). Place 0 is the model itself: its pairs are zeros.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair, ProductOptions, as_weight, contract
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights, pair_axes, pair_plans
from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.numerics.quantized_weight import whole_weights
from eqx_decoders.sharding.axes import AnyArray, Axes, matching, path_name, product_axes, replaced


class AdapterPairs(NamedTuple):
    """Pairs of one weight, stacked by layer and then by adapter, or those of one adapter.

    **Arguments:**

    - `lora_a`, `lora_b`: the factors, the second one with their scale; adapters stand before the rank.
    - `factor`: factors of the columns of the sum (DoRA), or ones.
    """

    lora_a: Any
    lora_b: Any
    factor: Any


class AdaptedByRow(AbstractWeight):
    """Weight beside the pairs of several adapters: `(x base + (x lora_a[row]) lora_b[row]) factor[row]`.

    Every row is multiplied by all first factors, which are few columns together, and what is not of its adapter becomes
    0 before the second ones: two plain products instead of one for each row.

    **Arguments:**

    - `base`: the weight, of any kind.
    - `lora_a`, `lora_b`, `factor`: see `AdapterPairs`.
    - `rows`: adapter of each row of a batch.
    """

    base: Float[AnyArray, "..."] | AbstractWeight
    lora_a: Float[AnyArray, "..."]
    lora_b: Float[AnyArray, "..."]
    factor: Float[AnyArray, "..."]
    rows: Int[AnyArray, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the base."""
        return as_weight(self.base).shape

    @property
    def dtype(self) -> np.dtype | None:
        """Dtype of the base."""
        return as_weight(self.base).dtype

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of all arrays, given the axes of the weight."""
        return {"base": weight_axes} | place_axes(weight_axes) | {"rows": ("batch",)}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """No array stands for it: raise ConfigError."""
        raise ConfigError("A weight with several adapters is none: no array stands for it. Merge one of them.")

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply each row of an activation by the base and by its pair, and scale the sum of both products."""
        into, out_of = pair_plans(plan, ("adapters", "rank"))
        low = contract(into, x, self.lora_a, options._replace(dtype=x.dtype))
        mine = self.rows[:, None] == jnp.arange(len(self.factor), dtype=self.rows.dtype)[None]
        low = jnp.where(mine.reshape(len(mine), *(1,) * (low.ndim - 3), -1, 1), low, jnp.zeros((), low.dtype))
        y = contract(plan, x, self.base, options) + contract(out_of, low, self.lora_b, options)
        left, right, out = plan.spelled(x.ndim)
        words = (left[0], *(word for word in right if word in out))
        factor = self.factor[self.rows]
        sizes = dict(zip(words, factor.shape, strict=True))
        factor = factor.transpose([words.index(word) for word in out if word in words])
        return (y * factor.reshape([sizes.get(word, 1) for word in out])).astype(y.dtype)

    def base_and_pair(self) -> tuple[Any, LowRankPair]:
        """Return the weight, and the pair of each row of the batch."""
        first = jnp.moveaxis(jnp.take(self.lora_a, self.rows, axis=-2), -2, 0)
        return self.base, LowRankPair(1.0, first, self.lora_b[self.rows], self.factor[self.rows])


def place_axes(words: Axes) -> dict[str, Axes]:
    """Return the axes of the parts of a weight's `AdapterPairs`, given the axes of the weight without `layers`."""
    pair = pair_axes(words)
    columns = tuple(word for word in pair["lora_b"] if word != "rank")
    inner = {"lora_a": (*pair["lora_a"][:-1], "adapters", "rank")}
    return inner | {name: ("adapters", *part) for name, part in (("lora_b", pair["lora_b"]), ("factor", columns))}


def of_rows(model: Decoder, rows: Int[AnyArray, "rows"]) -> Decoder:
    """Return the model for a batch, given the adapter of each of its rows."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, AdaptedByRow))
    changed: dict[str, Any] = {}
    for path, node in nodes:
        if isinstance(node, AdaptedByRow):
            each = jnp.broadcast_to(jnp.asarray(rows)[None], (len(node.factor), len(rows)))
            changed[path_name(path)] = eqx.tree_at(lambda node: node.rows, node, each)
    return replaced(model, changed) if changed else model


def adapter_parts(adapted: Decoder) -> dict[str, AdapterPairs]:
    """Return the pairs of a model as they stand beside the original weights, on the host, by their paths.

    Pairs that were taken out of their weights (PiSSA) have the double rank, and lengths of columns (DoRA) become
    factors, which are right beside these weights alone.
    """
    nodes = low_rank_weights(adapted)
    check(bool(nodes), "Engine.load_adapter: the model has no low-rank pairs. Load some by load_peft.")
    return {path: jax.device_get(_for_originals(node)) for path, node in nodes.items()}


def _for_originals(node: LowRank) -> AdapterPairs:
    factor = node.factor if node.lora_magnitude is None else jax.jit(LowRank.column_factor)(node)
    a, b = node.lora_a, node.scale * node.lora_b
    if node.start_a is not None and node.start_b is not None:
        a = jnp.concatenate([a, node.start_a], axis=-1)
        b = jnp.concatenate([b, -node.scale * node.start_b], axis=node.rank_axis)
    return AdapterPairs(a, b, factor)


@dataclasses.dataclass(eq=False)
class Adapter:
    """An adapter that is served.

    **Arguments:**

    - `name`: by which requests ask for it.
    - `place`: where its pairs are.
    - `key`: part of the salt of cached prefixes: what another adapter of this name has computed is not found.
    - `has_lengths`: whether it is right beside the present weights alone.
    - `dropped`: new requests are refused; its place is free when the last one has ended.
    """

    name: str
    place: int
    key: str
    has_lengths: bool = False
    dropped: bool = False


class EngineAdapters:
    """AdapterPairs of an engine's adapters, and who is in them.

    **Arguments:**

    - `model`: the model, as programs read it, of arrays or shapes: its layers may be unstacked.
    - `count`: places for adapters.
    - `rank`: largest rank.
    - `targets`: patterns of the paths of the weights that have places.
    """

    def __init__(self, model: Decoder, count: int, rank: int, targets: tuple[str, ...]):
        self.count, self.rank, self._model = count, rank, model
        self._keys, self._served = itertools.count(), list[Adapter]()
        self._places = self._empty(_targets(model, targets)) if count > 0 else dict[str, AdapterPairs]()
        self._program: Any = None

    @property
    def arrays(self) -> dict[str, AdapterPairs]:
        """Pairs by the paths of their weights, as programs take them."""
        return self._places

    @property
    def served(self) -> tuple[Adapter, ...]:
        """The adapters, without dropped ones."""
        return tuple(each for each in self._served if not each.dropped)

    def find(self, name: str | None) -> Adapter | None:
        """Return an adapter by its name; None for the model itself. Raises ConfigError for an unknown one."""
        if name is None:
            return None
        known = {each.name: each for each in self.served}
        check(name in known, f"adapter={name!r} is not loaded: {', '.join(map(repr, known)) or 'none'} is.")
        return known[name]

    def with_pairs(self, model: Decoder, pairs: Mapping[str, AdapterPairs]) -> Decoder:
        """Return a model with pairs beside its weights, without the adapters of rows (`of_rows`)."""
        if not pairs:
            return model
        leaves, nothing = whole_weights(model)[1], np.zeros((0,), np.int32)
        return replaced(model, {path: AdaptedByRow(leaves[path], *each, nothing) for path, each in pairs.items()})

    def compile(self) -> None:
        """Compile the program that fills a place."""
        if self._program is None and self._places:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self._places)
            program = jax.jit(_set_place, donate_argnums=0, out_shardings=shardings)
            self._program = program.lower(self._places, self._values({}), np.int32(0)).compile()

    def load(self, name: str, parts: Mapping[str, AdapterPairs], users: Iterable[Adapter | None]) -> None:
        """Give an adapter a free place.

        **Arguments:**

        - `parts`: its pairs, as `adapter_parts` returns them.
        - `users`: adapters of all requests that have no complete answer.

        Raises ConfigError for a name that is taken, where no place is free, and for pairs that have none.
        """
        where = f"Engine.load_adapter({name!r})"
        check(self.count > 0, f"{where}: the engine has no places for adapters: give EngineConfig.max_adapters.")
        check(len(name) > 0, f"{where}: a name must not be empty.")
        check(all(each.name != name for each in self.served), f"{where}: it is loaded already. Drop it first.")
        users = set(users)
        self._served = [each for each in self._served if not each.dropped or each in users]
        free = set(range(1, self.count + 1)) - {each.place for each in self._served}
        names = ", ".join(repr(each.name) for each in self._served)
        rule = f"all places of max_adapters={self.count} are taken, by {names}: drop one, or let its requests end"
        check(bool(free), f"{where}: {rule}.")
        values = self._values(self._fitting(where, parts))
        self.compile()
        self._places = self._program(self._places, values, np.int32(min(free)))
        has_lengths = any(each.factor is not None for each in parts.values())
        self._served.append(Adapter(name, min(free), f"{name}\0{next(self._keys)}", has_lengths))

    def drop(self, name: str) -> Adapter:
        """Refuse new requests for an adapter; its place is free when the others have ended."""
        adapter = self.find(name)
        assert adapter is not None
        adapter.dropped = True
        return adapter

    def check_new_weights(self) -> None:
        """Raise ConfigError where an adapter is not right beside other weights."""
        bound = [each.name for each in self.served if each.has_lengths]
        rule = "have lengths of columns (DoRA) of the present weights: drop them, and load them again for the new ones"
        check(not bound, f"Engine.load: the adapters {', '.join(map(repr, bound))} {rule}.")

    # --- arrays ---

    def _empty(self, targets: Mapping[str, Axes]) -> dict[str, AdapterPairs]:
        """Make places of zeros, with factors of 1, sharded by the layout's table."""
        layout, dtype = self._model.execution.layout, self._model.execution.precision.compute
        leaves, dtypes, pairs = whole_weights(self._model)[1], (dtype, dtype, np.float32), {}
        for path, words in targets.items():
            sizes = dict(zip(words, leaves[path].shape, strict=True)) | {"rank": self.rank, "adapters": self.count + 1}
            parts = [(*words[:1], *part) for part in place_axes(words[1:]).values()]
            shapes = [tuple(sizes[word] for word in part) for part in parts]
            shardings = [layout.weight_sharding(part, shape, path) for part, shape in zip(parts, shapes, strict=True)]
            fills = (np.zeros, np.zeros, np.ones)
            pairs[path] = AdapterPairs(
                *(jax.device_put(fill(shape, kind), sharding)
                  for fill, shape, kind, sharding in zip(fills, shapes, dtypes, shardings, strict=True))
            )  # fmt: skip
        return pairs

    def _fitting(self, where: str, parts: Mapping[str, AdapterPairs]) -> dict[str, AdapterPairs]:
        """Return pairs by the paths of weights as programs read them, filled up to the largest rank."""
        by_layer = {place: each for path, pair in parts.items() for place, each in _by_layer(self._model, path, pair)}
        lost = sorted(path for path in by_layer if path not in self._places)
        check(not lost, f"{where}: {', '.join(lost[:1])} has no place: see EngineConfig.adapter_targets.")
        for path, pair in by_layer.items():
            rank = pair.lora_a.shape[-1]
            rule = f"{path} has the rank {rank}, and places have max_adapter_rank={self.rank}"
            check(rank <= self.rank, f"{where}: {rule}.")
            by_layer[path] = _widened(pair, self.rank - rank)
            for mine, place in zip(by_layer[path], _shapes_of_one(self._places[path]), strict=True):
                same = mine is None or mine.shape == place
                check(same, f"{where}: {path} is of another shape: this is an adapter of another model.")
        return by_layer

    def _values(self, parts: Mapping[str, AdapterPairs]) -> dict[str, AdapterPairs]:
        """Return what is written into a place: zeros and ones where an adapter has nothing."""
        values = {}
        for path, place in self._places.items():
            pair, shapes = parts.get(path, AdapterPairs(None, None, None)), _shapes_of_one(place)
            nothing = (np.zeros, np.zeros, np.ones)
            values[path] = AdapterPairs(
                *(np.asarray(make(shape) if each is None else each).astype(slot.dtype)
                  for make, shape, slot, each in zip(nothing, shapes, place, pair, strict=True))
            )  # fmt: skip
        return values


def _axes_of_places(pairs: AdapterPairs) -> AdapterPairs:
    """Return the dimension of each part that counts adapters."""
    return AdapterPairs(pairs.lora_a.ndim - 2, 1, 1)


def _shapes_of_one(pairs: AdapterPairs) -> list[tuple[int, ...]]:
    """Return the shapes of one adapter's parts."""
    both = zip(pairs, _axes_of_places(pairs), strict=True)
    return [(*each.shape[:axis], *each.shape[axis + 1 :]) for each, axis in both]


def _set_place(
    pairs: dict[str, AdapterPairs], values: dict[str, AdapterPairs], number: Int[Array, ""]
) -> dict[str, AdapterPairs]:
    changed = {}
    for path, slots in pairs.items():
        parts = zip(slots, values[path], _axes_of_places(slots), strict=True)
        changed[path] = AdapterPairs(*(lax.dynamic_update_index_in_dim(x, new, number, axis) for x, new, axis in parts))
    return changed


def _targets(model: Decoder, patterns: tuple[str, ...]) -> dict[str, Axes]:
    """Return the axes of the weights that have places: matrices of blocks, without routers and experts."""
    words = whole_weights(model)[0]
    able = {
        path: axes for path, axes in words.items() if path.startswith("scanned_layers.") and axes[:1] == ("layers",)
    }
    able = {path: axes for path, axes in able.items() if not {"experts", "rank"} & set(axes) and product_axes(axes)}
    return {path: able[path] for path in able if path in matching(able, patterns, "EngineConfig.adapter_targets")}


def _widened(pair: AdapterPairs, more: int) -> AdapterPairs:
    """Fill the pair of a stack with zeros, so that its rank is larger."""
    first = np.pad(pair.lora_a, [(0, 0)] * (pair.lora_a.ndim - 1) + [(0, more)])
    second = np.pad(pair.lora_b, [(0, 0), (0, more)] + [(0, 0)] * (pair.lora_b.ndim - 2))
    return AdapterPairs(first, second, pair.factor)


def _by_layer(model: Decoder, path: str, pair: AdapterPairs) -> Iterable[tuple[str, AdapterPairs]]:
    """Return the pairs of a stack's layers by the paths that these have in a model whose layers may be unstacked."""
    units = find_repeats(model.config.blocks)
    if len(model.scanned_layers) == len(units) or not path.startswith("scanned_layers."):
        return [(path, pair)]
    _, number, rest = path.split(".", 2)
    before, repeats = sum(count for _, count in units[: int(number)]), units[int(number)][1]
    cut = lambda index: AdapterPairs(*(None if each is None else each[index : index + 1] for each in pair))  # noqa: E731
    return [(f"scanned_layers.{before + index}.{rest}", cut(index)) for index in range(repeats)]
