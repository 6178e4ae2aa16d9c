"""Unstacking: models and caches with separate arrays for each layer, for inference on CPUs and GPUs.

A scan over layers slices the weights of each layer from stacked arrays. TPUs read the slices in place. XLA's CPU
backend copies them first (and upcasts 16-bit weights of all layers at once), which takes longer than the matrix
products of a few tokens. XLA's GPU backend copies the slices of the weights and of the cache. Separate arrays are not
copied.

On a CPU, the arrays of the layers are views of the stacked arrays and need no further memory (`unstack_layers`). On
GPUs, they are copies that replace the stacked arrays; this is possible only if the caller owns the model
(`unstack_in_place`). Otherwise, GPU programs run without a scan, so that matrix products read the slices of stacked
arrays in place. Kernels would still copy their slices, so models with experts keep the scan: kernels read most of
their weights.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.stack import ScannedLayers
from eqx_decoders.context import Execution
from eqx_decoders.layers.cache.base import LayerCache, is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.caches import init_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import axes, named_leaves, replaced
from eqx_decoders.sharding.explicit import untyped, with_auto_axes


MIN_BYTES = 2**25  # size of all layers; smaller models fit into the processor's caches, and a scan compiles faster
MAX_LAYERS = 128  # program size and compile time grow with the number of unscanned layers


def unstack_layers(model: Decoder) -> Decoder:
    """Return the same model in the form whose weights a decoding step reads with the fewest copies.

    On a single CPU device, each layer of a `ScannedLayers` becomes a separate `ScannedLayers` with views of the stacked
    arrays, unless the arrays are traced. As long as a view exists, donating the stacked array copies it instead of
    reusing its memory, so drop the returned model as soon as possible. On GPUs, the model runs without a scan, unless
    it has experts. Models smaller than `MIN_BYTES`, or with more than `MAX_LAYERS` layers, are returned unchanged.
    """
    backend = model.execution.layout.backend
    if not _should_unstack(model):
        return model
    if backend.separate_layers and _is_concrete(model):
        return _map_scanned_layers(model, _view_layers)
    has_experts = any("experts" in axis_names for axis_names in axes(model).values())
    return model.replace(scan=False) if backend.unrolled_layers and not has_experts else model


def unstack_in_place(model: Decoder, shared: Sequence[Any] = ()) -> Decoder:
    """Return the same model with separate arrays for each layer; on GPUs, the stacked arrays are deleted.

    The stacked arrays are split one at a time, so at most one of them is in memory twice. A model of
    `jax.ShapeDtypeStruct`s is converted in the same way. On other platforms the model is returned unchanged.

    **Arguments:**

    - `shared`: arrays that are not deleted, because another model uses them.
    """
    if not (model.execution.layout.backend.unrolled_layers and _should_unstack(model)):
        return model
    if isinstance(_arrays(model)[0], jax.ShapeDtypeStruct):
        return _map_scanned_layers(model, _split_shapes)
    split = partial(_split_and_delete, shared={id(leaf) for leaf in shared})
    return _map_scanned_layers(model, split) if _is_concrete(model) else model


def _should_unstack(model: Decoder) -> bool:
    execution = model.execution
    layout = execution.layout
    is_scanned = execution.scan and layout.sizes.get("stage", 1) == 1 and not layout.offload.weights
    is_stacked = any(layers.repeats > 1 for layers in model.scanned_layers)
    if not is_scanned or not is_stacked or len(model.config.blocks) > MAX_LAYERS:
        return False
    return sum(leaf.size * leaf.dtype.itemsize for leaf in _arrays(model)) >= MIN_BYTES


def _arrays(model: Decoder) -> list[Any]:
    return [
        leaf for leaf in jax.tree.leaves(model.scanned_layers) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    ]


def _is_concrete(model: Decoder) -> bool:
    return all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in _arrays(model))


def _map_scanned_layers(model: Decoder, split: Callable[[ScannedLayers], list[ScannedLayers]]) -> Decoder:
    new_layers = [single for layers in model.scanned_layers for single in split(layers)]
    return dataclasses.replace(model, scanned_layers=tuple(new_layers))


def _split_shapes(layers: ScannedLayers) -> list[ScannedLayers]:
    """Return one `ScannedLayers` of `jax.ShapeDtypeStruct`s per repeat."""
    unit = jax.tree.map(
        lambda leaf: _slice_layer(leaf, 0) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, layers.unit
    )
    return [ScannedLayers(unit=unit, repeats=1)] * layers.repeats


def _slice_layer(stacked: Any, index: int) -> Any:
    """Return one layer of a stacked array or `jax.ShapeDtypeStruct`; the leading axis stays, with size 1."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *stacked.shape[1:]), stacked.dtype, sharding=stacked.sharding)
    return stacked[index : index + 1]


def _split_and_delete(layers: ScannedLayers, shared: set[int]) -> list[ScannedLayers]:
    """Return one `ScannedLayers` per repeat, with copies of the slices, and delete the stacked arrays.

    Arrays whose `id` is in `shared` are not deleted.
    """
    stacked_arrays, build_layer = _arrays_and_builder(layers)
    arrays_by_repeat: list[list[Any]] = [[] for _ in range(layers.repeats)]
    for stacked in stacked_arrays:
        slices = jax.block_until_ready(_split_program(layers.repeats, stacked.sharding)(stacked))
        if id(stacked) not in shared:
            stacked.delete()
        for arrays, array in zip(arrays_by_repeat, slices, strict=True):
            arrays.append(array)
    return [build_layer(arrays) for arrays in arrays_by_repeat]


@lru_cache(64)
def _split_program(repeats: int, sharding: Any) -> Any:
    """Return a jitted function that splits a stacked array; cached, so that equal shapes compile once."""
    return jax.jit(partial(jnp.split, indices_or_sections=repeats), out_shardings=sharding)


def _view_layers(layers: ScannedLayers) -> list[ScannedLayers]:
    """Return one `ScannedLayers` per repeat, with views of the stacked arrays."""
    stacked_arrays, build_layer = _arrays_and_builder(layers)
    # of `addressable_data`, since a `jax.Array` keeps a reference to the NumPy view of itself
    data = [np.asarray(stacked.addressable_data(0)) for stacked in stacked_arrays]
    views_by_repeat = [[array[index : index + 1] for array in data] for index in range(layers.repeats)]
    # 4-bit arrays are put without a sharding: with one, compiled programs misread their memory layout (jax 0.10.2)
    shardings = [None if array.dtype in (jnp.int4, jnp.uint4) else array.sharding for array in stacked_arrays]
    if None in shardings:
        arrays_by_repeat = [
            [jax.device_put(view, sharding) for view, sharding in zip(views, shardings, strict=True)]
            for views in views_by_repeat
        ]
    else:  # one call for all arrays takes a third less time than a call for each array
        arrays_by_repeat = jax.device_put(views_by_repeat, [shardings] * layers.repeats)
    return [build_layer(arrays) for arrays in arrays_by_repeat]


def _arrays_and_builder(layers: ScannedLayers) -> tuple[list[Array], Callable[[list[Array]], ScannedLayers]]:
    """Return the stacked arrays, and a function that builds a single layer from arrays in the same order."""
    leaves, treedef = jax.tree.flatten(layers.unit)
    indices = [index for index, leaf in enumerate(leaves) if eqx.is_array(leaf)]

    def build_layer(arrays: list[Array]) -> ScannedLayers:
        new = dict(zip(indices, arrays, strict=True))
        unit = jax.tree.unflatten(treedef, [new.get(index, leaf) for index, leaf in enumerate(leaves)])
        return ScannedLayers(unit=unit, repeats=1)

    return [leaves[index] for index in indices], build_layer


def inference_cache(
    model: Decoder,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    *,
    pages: PageConfig | None = None,
) -> Cache:
    """Return an empty cache for a model, whose layers may be unstacked. Arguments as in `init_cache`."""
    layout = model.execution.layout
    return unstack_cache(
        model, init_cache(model.config, batch_size, max_length, dtype=dtype, layout=layout, pages=pages)
    )


def unstack_cache(model: Decoder, cache: Cache) -> Cache:
    """Split a cache, or its shapes, by layers if the layers of the model are unstacked; else return it unchanged."""
    units = find_repeats(model.config.blocks)
    if len(model.scanned_layers) == len(units):
        return cache
    layer_caches = tuple(
        jax.tree.map(lambda layer_cache, index=index: _single_layer(layer_cache, index), caches, is_leaf=is_layer_cache)
        for caches, (_, repeats) in zip(cache.layer_caches, units, strict=True)
        for index in range(repeats)
    )
    # `tree_at`, since the constructor of `Cache` rejects shapes
    return eqx.tree_at(lambda cache: cache.layer_caches, cache, layer_caches)


def _single_layer(cache: LayerCache, index: int) -> Any:
    """Return the cache of one layer; its `layers` axis has size 1."""
    axis_names = axes(cache)
    new_leaves = {
        name: _slice_layer(leaf, index) if "layers" in axis_names[name] else leaf
        for name, leaf in named_leaves(cache).items()
    }
    return replaced(cache, new_leaves)


def default_cache_format(execution: Execution) -> CacheFormat:
    """Return the default format of cached keys and values: the compute dtype, but float32 on CPUs for 16-bit dtypes.

    XLA's CPU backend multiplies 16-bit numbers as float32, and would upcast the full cache for every token.
    """
    dtype = np.dtype(execution.precision.compute)
    upcasts = execution.layout.backend.upcasts_16_bit and dtype.itemsize == 2
    return CacheFormat(dtype=np.dtype(np.float32) if upcasts else dtype)


def prepare_for_engine(model: Decoder) -> Decoder:
    """Return the model as the serving engine runs it: with unstacked layers, on a mesh with Auto axes."""
    return unstack_layers(_with_auto_mesh(model))


def _with_auto_mesh(model: Decoder) -> Decoder:
    """Replace Explicit mesh axes by Auto axes: the engine's programs do not use shardings in array types."""
    layout = model.execution.layout
    if not layout.explicit:
        return model
    model = jax.tree.map(lambda leaf: untyped(leaf) if eqx.is_array(leaf) else leaf, model)
    return model.replace(layout=dataclasses.replace(layout, mesh=with_auto_axes(layout.mesh)))
