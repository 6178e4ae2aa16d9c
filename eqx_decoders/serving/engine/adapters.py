"""Multi-LoRA serving: requests with different adapters run in one batch.

For each adapted weight, the low-rank pairs of all adapters are stacked in one array, and every row of a batch uses the
pair of its adapter (as in S-LoRA, Sheng et al. 2024, and Punica, Chen et al. 2024). The number of adapters and their
rank are fixed, so that loading an adapter compiles nothing. Index 0 is the base model: its pairs are zero.
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
    """Low-rank pairs of one weight: of one adapter, or of all adapters, stacked by layer and then by adapter.

    **Arguments:**

    - `lora_a`, `lora_b`: the low-rank factors; `lora_b` includes the scale. The adapter axis comes before the rank.
    - `factor`: column factors (DoRA), or ones.
    """

    lora_a: Any
    lora_b: Any
    factor: Any


class MultiAdapterWeight(AbstractWeight):
    """Weight with the pairs of several adapters: `(x base + (x lora_a[row]) lora_b[row]) factor[row]`.

    Every row is multiplied by the `lora_a` of all adapters (adapters x rank columns). The results of other adapters are
    set to 0, and multiplied by `lora_b`. These are two plain matrix products, instead of one product per row.

    **Arguments:**

    - `base`: the weight, of any kind.
    - `lora_a`, `lora_b`, `factor`: see `AdapterPairs`.
    - `rows`: adapter index of each row of the batch.
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
        return {"base": weight_axes} | adapter_axes(weight_axes) | {"rows": ("batch",)}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Raise ConfigError: there is no single array for several adapters."""
        raise ConfigError(
            "A weight with several adapters cannot be converted to one array: merge one adapter into the weight "
            "instead."
        )

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply each row of an activation by the base weight and by the pair of its adapter."""
        into_rank, out_of_rank = pair_plans(plan, ("adapters", "rank"))
        low = contract(into_rank, x, self.lora_a, options._replace(dtype=x.dtype))
        is_own = self.rows[:, None] == jnp.arange(len(self.factor), dtype=self.rows.dtype)[None]
        low = jnp.where(is_own.reshape(len(is_own), *(1,) * (low.ndim - 3), -1, 1), low, jnp.zeros((), low.dtype))
        y = contract(plan, x, self.base, options) + contract(out_of_rank, low, self.lora_b, options)
        left, right, out = plan.spelled(x.ndim)
        names = (left[0], *(name for name in right if name in out))
        factor = self.factor[self.rows]
        sizes = dict(zip(names, factor.shape, strict=True))
        factor = factor.transpose([names.index(name) for name in out if name in names])
        return (y * factor.reshape([sizes.get(name, 1) for name in out])).astype(y.dtype)

    def base_and_pair(self) -> tuple[Any, LowRankPair]:
        """Return the base weight, and the pair of each row of the batch."""
        lora_a = jnp.moveaxis(jnp.take(self.lora_a, self.rows, axis=-2), -2, 0)
        return self.base, LowRankPair(1.0, lora_a, self.lora_b[self.rows], self.factor[self.rows])


def adapter_axes(axis_names: Axes) -> dict[str, Axes]:
    """Return the axes of the arrays in `AdapterPairs`, given the axes of the weight without `layers`."""
    pair = pair_axes(axis_names)
    return {
        "lora_a": (*pair["lora_a"][:-1], "adapters", "rank"),
        "lora_b": ("adapters", *pair["lora_b"]),
        "factor": ("adapters", *(name for name in pair["lora_b"] if name != "rank")),
    }


def with_row_adapters(model: Decoder, rows: Int[AnyArray, "rows"]) -> Decoder:
    """Return the model for a batch, given the adapter index of each row."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, MultiAdapterWeight))
    changed: dict[str, Any] = {}
    for path, node in nodes:
        if isinstance(node, MultiAdapterWeight):
            repeated = jnp.broadcast_to(jnp.asarray(rows)[None], (len(node.factor), len(rows)))  # for each layer
            changed[path_name(path)] = eqx.tree_at(lambda node: node.rows, node, repeated)
    return replaced(model, changed) if changed else model


def adapter_pairs(adapted: Decoder) -> dict[str, AdapterPairs]:
    """Return the low-rank pairs of a model by path, as host arrays relative to the original weights.

    PiSSA subtracts the initial pair from the weights, so its pairs get twice the rank here. The column norms of DoRA
    become column factors, which are valid only for the current base weights.
    """
    nodes = low_rank_weights(adapted)
    check(
        bool(nodes),
        "Engine.load_adapter: the model has no low-rank pairs. Load an adapter with load_peft, or add one with "
        "add_lora.",
    )
    return {path: jax.device_get(_relative_to_original(node)) for path, node in nodes.items()}


def _relative_to_original(node: LowRank) -> AdapterPairs:
    factor = node.factor if node.lora_magnitude is None else jax.jit(LowRank.column_factor)(node)
    a, b = node.lora_a, node.scale * node.lora_b
    if node.start_a is not None and node.start_b is not None:
        a = jnp.concatenate([a, node.start_a], axis=-1)
        b = jnp.concatenate([b, -node.scale * node.start_b], axis=node.rank_axis)
    return AdapterPairs(a, b, factor)


@dataclasses.dataclass(eq=False)
class Adapter:
    """A loaded adapter.

    **Arguments:**

    - `name`: name in `Request.adapter`.
    - `index`: index of its pairs in the stacked arrays.
    - `key`: part of the salt of cached prefixes. It is unique, even if another adapter had the same name before.
    - `needs_current_weights`: whether its column factors (DoRA) are valid only for the current base weights.
    - `dropped`: whether new requests are refused. The index is reused when the last request has finished.
    """

    name: str
    index: int
    key: str
    needs_current_weights: bool = False
    dropped: bool = False


class EngineAdapters:
    """The adapters of an engine, and the stacked arrays of their pairs.

    **Arguments:**

    - `model`: the model as the programs read it, with arrays or shapes. Its layers can be unstacked.
    - `max_adapters`: maximum number of adapters. 0: no adapters.
    - `rank`: maximum rank.
    - `targets`: path patterns of the weights that adapters may change.
    """

    def __init__(self, model: Decoder, max_adapters: int, rank: int, targets: tuple[str, ...]):
        self.max_adapters = max_adapters
        self.rank = rank
        self._model = model
        self._keys = itertools.count()
        self._adapters: list[Adapter] = []  # including dropped adapters that requests still use
        self._arrays: dict[str, AdapterPairs] = {}
        if max_adapters > 0:
            self._arrays = self._zeros(_targets(model, targets))
        self._program: Any = None

    @property
    def arrays(self) -> dict[str, AdapterPairs]:
        """Stacked pairs of all adapters by the path of the weight, as inputs of the programs."""
        return self._arrays

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The loaded adapters, without dropped adapters."""
        return tuple(adapter for adapter in self._adapters if not adapter.dropped)

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter with a name. None: the base model. Raises ConfigError for an unknown name."""
        if name is None:
            return None
        by_name = {adapter.name: adapter for adapter in self.loaded}
        check(
            name in by_name,
            f"adapter={name!r} is not loaded. Loaded adapters: {', '.join(map(repr, by_name)) or 'none'}.",
        )
        return by_name[name]

    def with_pairs(self, model: Decoder, arrays: Mapping[str, AdapterPairs]) -> Decoder:
        """Return a model with the pairs of all adapters. `with_row_adapters` then sets the adapter of each row."""
        if not arrays:
            return model
        weights = whole_weights(model)[1]
        no_rows = np.zeros((0,), np.int32)
        return replaced(
            model, {path: MultiAdapterWeight(weights[path], *pairs, no_rows) for path, pairs in arrays.items()}
        )

    def compile(self) -> None:
        """Compile the program that writes the pairs of one adapter."""
        if self._program is None and self._arrays:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self._arrays)
            program = jax.jit(_set_adapter, donate_argnums=0, out_shardings=shardings)
            self._program = program.lower(self._arrays, self._complete({}), np.int32(0)).compile()

    def load(self, name: str, pairs: Mapping[str, AdapterPairs], in_use: Iterable[Adapter | None]) -> None:
        """Load an adapter.

        **Arguments:**

        - `pairs`: result of `adapter_pairs`.
        - `in_use`: adapters of all unfinished requests.

        Raises ConfigError if the name is loaded already, if there is no free index, or if the pairs do not fit.
        """
        call = f"Engine.load_adapter({name!r})"
        check(self.max_adapters > 0, f"{call}: EngineConfig.max_adapters=0: set it to the number of adapters.")
        check(len(name) > 0, f"{call}: the name of an adapter must not be empty.")
        check(
            all(adapter.name != name for adapter in self.loaded),
            f"{call}: an adapter with this name is loaded already. Drop it first.",
        )
        in_use = set(in_use)
        self._adapters = [adapter for adapter in self._adapters if not adapter.dropped or adapter in in_use]
        free = set(range(1, self.max_adapters + 1)) - {adapter.index for adapter in self._adapters}
        check(
            bool(free),
            f"{call}: max_adapters={self.max_adapters} adapters are loaded or still used by requests: "
            f"{', '.join(repr(adapter.name) for adapter in self._adapters)}. Drop one, and wait for its requests.",
        )
        values = self._complete(self._padded(call, pairs))
        self.compile()
        self._arrays = self._program(self._arrays, values, np.int32(min(free)))
        has_column_factors = any(pair.factor is not None for pair in pairs.values())
        self._adapters.append(Adapter(name, min(free), f"{name}\0{next(self._keys)}", has_column_factors))

    def drop(self, name: str) -> Adapter:
        """Refuse new requests for an adapter. Its index is reused when its last request has finished."""
        adapter = self.find(name)
        assert adapter is not None
        adapter.dropped = True
        return adapter

    def check_new_weights(self) -> None:
        """Raise ConfigError if a loaded adapter is valid only for the current weights."""
        bound = [adapter.name for adapter in self.loaded if adapter.needs_current_weights]
        check(
            not bound,
            f"Engine.load: the adapters {', '.join(map(repr, bound))} have column norms (DoRA) that are valid only for "
            f"the current weights. Drop them first, and load them again after the new weights.",
        )

    # --- arrays ---

    def _zeros(self, targets: Mapping[str, Axes]) -> dict[str, AdapterPairs]:
        """Return stacked pairs of zeros, with column factors 1, sharded by the layout."""
        layout, dtype = self._model.execution.layout, self._model.execution.precision.compute
        weights = whole_weights(self._model)[1]
        arrays = {}
        for path, (layers, *weight_axes) in targets.items():
            sizes = dict(zip((layers, *weight_axes), weights[path].shape, strict=True))
            sizes |= {"rank": self.rank, "adapters": self.max_adapters + 1}
            fills = {"lora_a": (np.zeros, dtype), "lora_b": (np.zeros, dtype), "factor": (np.ones, np.float32)}
            parts = {}
            for part, part_axes in adapter_axes(tuple(weight_axes)).items():
                axes = (layers, *part_axes)
                shape = tuple(sizes[axis] for axis in axes)
                fill, part_dtype = fills[part]
                parts[part] = jax.device_put(fill(shape, part_dtype), layout.weight_sharding(axes, shape, path))
            arrays[path] = AdapterPairs(**parts)
        return arrays

    def _padded(self, call: str, pairs: Mapping[str, AdapterPairs]) -> dict[str, AdapterPairs]:
        """Return the pairs of an adapter, padded to the maximum rank, by the paths of the weights in the programs."""
        by_layer = {
            layer_path: layer_pair
            for path, pair in pairs.items()
            for layer_path, layer_pair in _by_layer(self._model, path, pair)
        }
        for path, pair in by_layer.items():
            check(
                path in self._arrays,
                f"{call}: the adapter changes {path}, which does not match EngineConfig.adapter_targets or is of a "
                f"kind "
                f"that adapters cannot change (experts, routers, embeddings).",
            )
            rank = pair.lora_a.shape[-1]
            check(
                rank <= self.rank,
                f"{call}: the pair of {path} has rank {rank}, which is more than max_adapter_rank={self.rank}.",
            )
            by_layer[path] = _pad_rank(pair, self.rank - rank)
            for array, shape in zip(by_layer[path], _one_adapter_shapes(self._arrays[path]), strict=True):
                check(
                    array is None or array.shape == shape,
                    f"{call}: the pair of {path} has an array of shape {None if array is None else array.shape}, but "
                    f"this model needs {shape}. The adapter belongs to another model.",
                )
        return by_layer

    def _complete(self, pairs: Mapping[str, AdapterPairs]) -> dict[str, AdapterPairs]:
        """Return arrays for all weights: zeros (and factors 1) for weights that the adapter does not change."""
        values = {}
        for path, stacked in self._arrays.items():
            pair = pairs.get(path, AdapterPairs(None, None, None))
            shapes = _one_adapter_shapes(stacked)
            defaults = (np.zeros, np.zeros, np.ones)
            values[path] = AdapterPairs(
                *(
                    np.asarray(default(shape) if array is None else array).astype(target.dtype)
                    for default, shape, target, array in zip(defaults, shapes, stacked, pair, strict=True)
                )
            )
        return values


def _adapter_dimensions(pairs: AdapterPairs) -> AdapterPairs:
    """Return the index of the adapter dimension of each array."""
    return AdapterPairs(pairs.lora_a.ndim - 2, 1, 1)


def _one_adapter_shapes(pairs: AdapterPairs) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays without the adapter dimension."""
    dimensions = zip(pairs, _adapter_dimensions(pairs), strict=True)
    return [(*array.shape[:axis], *array.shape[axis + 1 :]) for array, axis in dimensions]


def _set_adapter(
    arrays: dict[str, AdapterPairs], values: dict[str, AdapterPairs], index: Int[Array, ""]
) -> dict[str, AdapterPairs]:
    """Write the pairs of one adapter at an index of the stacked arrays."""
    changed = {}
    for path, pairs in arrays.items():
        parts = zip(pairs, values[path], _adapter_dimensions(pairs), strict=True)
        changed[path] = AdapterPairs(*(lax.dynamic_update_index_in_dim(x, new, index, axis) for x, new, axis in parts))
    return changed


def _targets(model: Decoder, patterns: tuple[str, ...]) -> dict[str, Axes]:
    """Return the axes of the weights that adapters may change: matrices of blocks, except routers and experts."""
    matrices = {
        path: axes
        for path, axes in whole_weights(model)[0].items()
        if path.startswith("scanned_layers.")
        and axes[:1] == ("layers",)
        and not {"experts", "rank"} & set(axes)
        and product_axes(axes)
    }
    matched = matching(matrices, patterns, "EngineConfig.adapter_targets")
    return {path: axes for path, axes in matrices.items() if path in matched}


def _pad_rank(pair: AdapterPairs, count: int) -> AdapterPairs:
    """Append `count` zeros to the rank dimension."""
    lora_a = np.pad(pair.lora_a, [(0, 0)] * (pair.lora_a.ndim - 1) + [(0, count)])
    lora_b = np.pad(pair.lora_b, [(0, 0), (0, count)] + [(0, 0)] * (pair.lora_b.ndim - 2))
    return AdapterPairs(lora_a, lora_b, pair.factor)


def _by_layer(model: Decoder, path: str, pair: AdapterPairs) -> Iterable[tuple[str, AdapterPairs]]:
    """Return the pairs of scanned layers by their paths in `model`, whose layers can be unstacked."""
    units = find_repeats(model.config.blocks)
    if len(model.scanned_layers) == len(units) or not path.startswith("scanned_layers."):
        return [(path, pair)]
    _, number, rest = path.split(".", 2)
    first_layer = sum(repeats for _, repeats in units[: int(number)])
    layers = []
    for index in range(units[int(number)][1]):
        layer_pair = AdapterPairs(*(None if array is None else array[index : index + 1] for array in pair))
        layers.append((f"scanned_layers.{first_layer + index}.{rest}", layer_pair))
    return layers
