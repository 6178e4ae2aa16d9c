"""Models and caches whose layers are arrays of their own, for inference on CPUs and GPUs.

A scan over layers slices each one's weights from stacked arrays. TPUs read them in place; XLA's CPU backend copies them
first (and widens 16-bit ones, those of all layers at once), which takes longer than the products of a few tokens. XLA's
GPU backend copies them, too, and the cache with them. Separate arrays are not copied.

On a CPU they are views, which take no memory of their own. On GPUs they are copies, in place of the stacked ones,
where these are not needed any more (`unstack_in_place`). Else programs slice stacked arrays without a scan, so that
products read them where they stand; but kernels read copies, so that models with experts, most of whose weights are
those of kernels, are scanned.
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


WORTH = 2**25  # bytes of a model's layers: fewer fit into the processor's caches, and a scan compiles faster
MOST = 128  # layers: a program grows with unscanned ones


def unstack_layers(model: Decoder) -> Decoder:
    """Return the same model, whose layers programs for one token read in place as far as they can.

    On one CPU device, each repeat of a unit becomes one `ScannedLayers`, whose arrays are views of the stacked ones,
    unless these are traced. While a view lives, a donated array is copied instead of overwritten: so drop the result as
    soon as possible. On GPUs without a scan, if it has no experts. Small models and those of many layers are returned
    as they are.
    """
    backend = model.execution.layout.backend
    if not _is_worth_it(model):
        return model
    if backend.separate_layers and _are_known(model):
        return _map_scanned_layers(model, _cut)
    has_experts = any("experts" in words for words in axes(model).values())
    return model.replace(scan=False) if backend.unrolled_layers and not has_experts else model


def unstack_in_place(model: Decoder, shared: Sequence[Any] = ()) -> Decoder:
    """Return the same model with a `ScannedLayers` for each repeat of a unit; on GPUs its stacked arrays are deleted.

    They are cut one after the other, so that never more than one of them is there twice. Of a model of shapes these are
    cut. On other platforms the model is returned as it is.

    **Arguments:**

    - `shared`: arrays that are not deleted, since another model has them, too.
    """
    if not (model.execution.layout.backend.unrolled_layers and _is_worth_it(model)):
        return model
    if isinstance(_arrays(model)[0], jax.ShapeDtypeStruct):
        return _map_scanned_layers(model, _cut_shapes)
    cut = partial(_cut_and_delete, shared={id(leaf) for leaf in shared})
    return _map_scanned_layers(model, cut) if _are_known(model) else model


def _is_worth_it(model: Decoder) -> bool:
    execution, layout = model.execution, model.execution.layout
    plain = execution.scan and layout.sizes.get("stage", 1) == 1 and not layout.offload.weights
    stacked = any(layers.repeats > 1 for layers in model.scanned_layers) and len(model.config.blocks) <= MOST
    return plain and stacked and sum(leaf.size * leaf.dtype.itemsize for leaf in _arrays(model)) >= WORTH


def _arrays(model: Decoder) -> list[Any]:
    return [
        leaf for leaf in jax.tree.leaves(model.scanned_layers) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    ]


def _are_known(model: Decoder) -> bool:
    return all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in _arrays(model))


def _map_scanned_layers(model: Decoder, cut: Callable[[ScannedLayers], list[ScannedLayers]]) -> Decoder:
    return dataclasses.replace(
        model, scanned_layers=tuple(each for layers in model.scanned_layers for each in cut(layers))
    )


def _cut_shapes(layers: ScannedLayers) -> list[ScannedLayers]:
    """Return `ScannedLayers` of shapes for each repeat."""
    unit = jax.tree.map(lambda leaf: _piece(leaf, 0) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, layers.unit)
    return [ScannedLayers(unit=unit, repeats=1)] * layers.repeats


def _piece(stacked: Any, index: int) -> Any:
    """Return one layer of a stacked array, as a stack of one; or its shape."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *stacked.shape[1:]), stacked.dtype, sharding=stacked.sharding)
    return stacked[index : index + 1]


def _cut_and_delete(layers: ScannedLayers, shared: set[int]) -> list[ScannedLayers]:
    """Return `ScannedLayers` for each repeat, with copies of the stacked arrays, and delete the stacked arrays.

    Arrays whose `id` is in `shared` are not deleted.
    """
    leaves, with_arrays = _parts(layers)
    arrays: list[list[Any]] = [[] for _ in range(layers.repeats)]
    for leaf in leaves:
        pieces = jax.block_until_ready(_split(layers.repeats, leaf.sharding)(leaf))
        if id(leaf) not in shared:
            leaf.delete()
        for arrays_of_repeat, piece in zip(arrays, pieces, strict=True):
            arrays_of_repeat.append(piece)
    return [with_arrays(arrays_of_repeat) for arrays_of_repeat in arrays]


@lru_cache(64)
def _split(repeats: int, sharding: Any) -> Any:
    """Return a program that cuts a stacked array, which later calls find again."""
    return jax.jit(partial(jnp.split, indices_or_sections=repeats), out_shardings=sharding)


def _cut(layers: ScannedLayers) -> list[ScannedLayers]:
    """Return `ScannedLayers` for each repeat, with views of the stacked arrays."""
    leaves, with_arrays = _parts(layers)
    # views of an array's data: the array itself would hold on to its NumPy view
    shown = [np.asarray(leaf.addressable_data(0)) for leaf in leaves]
    views = [[whole[index : index + 1] for whole in shown] for index in range(layers.repeats)]
    # 4-bit numbers without a sharding: compiled programs (jax 0.10.2) misread the layout of others
    shardings = [None if leaf.dtype in (jnp.int4, jnp.uint4) else leaf.sharding for leaf in leaves]
    if None in shardings:
        arrays = [[jax.device_put(*pair) for pair in zip(row, shardings, strict=True)] for row in views]
    else:  # one call takes a third less time than one for each
        arrays = jax.device_put(views, [shardings] * layers.repeats)
    return [with_arrays(arrays_of_repeat) for arrays_of_repeat in arrays]


def _parts(layers: ScannedLayers) -> tuple[list[Array], Callable[[list[Array]], ScannedLayers]]:
    """Return the stacked arrays, and a function that returns one repeat with other arrays in their places."""
    leaves, form = jax.tree.flatten(layers.unit)
    places = [place for place, leaf in enumerate(leaves) if eqx.is_array(leaf)]

    def with_arrays(arrays: list[Array]) -> ScannedLayers:
        new = dict(zip(places, arrays, strict=True))
        unit = jax.tree.unflatten(form, [new.get(place, leaf) for place, leaf in enumerate(leaves)])
        return ScannedLayers(unit=unit, repeats=1)

    return [leaves[place] for place in places], with_arrays


def inference_cache(
    model: Decoder,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    *,
    pages: PageConfig | None = None,
) -> Cache:
    """Return `init_cache` for a model, whose layers may be unstacked."""
    layout = model.execution.layout
    return cut_cache(model, init_cache(model.config, batch_size, max_length, dtype=dtype, layout=layout, pages=pages))


def cut_cache(model: Decoder, cache: Cache) -> Cache:
    """Return a cache, or its shapes, that is cut like the layers of a model, which may be unstacked."""
    units = find_repeats(model.config.blocks)
    if len(model.scanned_layers) == len(units):
        return cache
    parts = tuple(
        jax.tree.map(
            lambda cache_of_layers, index=index: _layer(cache_of_layers, index), caches, is_leaf=is_layer_cache
        )
        for caches, (_, repeats) in zip(cache.layer_caches, units, strict=True)
        for index in range(repeats)
    )
    return eqx.tree_at(lambda cache: cache.layer_caches, cache, parts)  # also of shapes, which its types refuse


def _layer(cache: LayerCache, index: int) -> Any:
    """Return the cache of one of the layers, as one of a stack of one."""
    words, leaves = axes(cache), named_leaves(cache)
    return replaced(cache, {n: _piece(x, index) if "layers" in words[n] else x for n, x in leaves.items()})


def default_cache_format(execution: Execution) -> CacheFormat:
    """Return the default format of keys and values in a cache: the dtype of activations, or float32.

    Where 16-bit numbers are multiplied as float32 (CPUs), XLA would widen the whole cache at every token.
    """
    dtype = np.dtype(execution.precision.compute)
    widened = execution.layout.backend.widens_half and dtype.itemsize == 2
    return CacheFormat(dtype=np.dtype(np.float32) if widened else dtype)


def placed(model: Decoder) -> Decoder:
    """Return a model as programs of an engine read it: layers apart, on a mesh of Auto axes."""
    return unstack_layers(_with_auto_mesh(model))


def _with_auto_mesh(model: Decoder) -> Decoder:
    """Move the weights to a mesh of Auto axes: nothing in an engine reads the types of arrays."""
    layout = model.execution.layout
    if not layout.explicit:
        return model
    model = jax.tree.map(lambda leaf: untyped(leaf) if eqx.is_array(leaf) else leaf, model)
    return model.replace(layout=dataclasses.replace(layout, mesh=with_auto_axes(layout.mesh)))
