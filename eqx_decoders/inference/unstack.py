"""Models and caches whose layers are arrays of their own, for inference on CPU.

A scan over layers slices each one's weights from stacked arrays. TPUs read them in place; XLA's CPU backend copies them
first (and widens 16-bit ones, those of all layers at once), which takes longer than the products of a few tokens. XLA's
GPU backend copies them for cuBLAS, too, with the cache, and doesn't where `scan=False` (by programs compiled for an
H100 without one, whose products are not tuned). Separate arrays are not copied. They are views: on CPU they take no
memory of their own.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from eqx_decoders.blocks.segmentation import segments
from eqx_decoders.blocks.stack import Segment
from eqx_decoders.context import Execution
from eqx_decoders.layers.cache.base import LayerCache, is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.caches import init_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import axes, named_leaves, replaced


WORTH = 2**25  # bytes of a model's layers: fewer fit into the processor's caches, and a scan compiles faster
MOST = 64  # layers: a program grows with unscanned ones


def unstack_layers(model: Decoder) -> Decoder:
    """Return the same model with a `Segment` for each repeat of a unit, whose arrays are views of the stacked ones.

    For one CPU device and layers of some size; any other model, and one that is traced, is returned as it is. While a
    view lives, a donated array is copied instead of overwritten: so drop the result as soon as possible.
    """
    execution, arrays = model.execution, jax.tree.leaves(eqx.filter(model.segments, eqx.is_array))
    plain = execution.layout.backend.separate_layers and not execution.layout.offload.weights
    known = all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in arrays)
    if not (plain and known and execution.scan and len(model.config.blocks) <= MOST):
        return model
    if sum(leaf.nbytes for leaf in arrays) < WORTH or all(segment.repeats == 1 for segment in model.segments):
        return model
    return dataclasses.replace(model, segments=tuple(each for segment in model.segments for each in _cut(segment)))


def _cut(segment: Segment) -> list[Segment]:
    """Return one segment for each repeat."""
    stacked, static = eqx.partition(segment.unit, eqx.is_array)
    leaves, form = jax.tree.flatten(stacked)
    # views of an array's data: the array itself would hold on to its NumPy view
    shown = [np.asarray(leaf.addressable_data(0)) for leaf in leaves]
    views = [[whole[index : index + 1] for whole in shown] for index in range(segment.repeats)]
    # 4-bit numbers without a sharding: compiled programs (jax 0.10.2) misread the layout of others
    shardings = [None if leaf.dtype in (jnp.int4, jnp.uint4) else leaf.sharding for leaf in leaves]
    layers = [[jax.device_put(*one) for one in zip(each, shardings, strict=True)] for each in views]
    return [Segment(unit=eqx.combine(jax.tree.unflatten(form, each), static), repeats=1) for each in layers]


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
    cache = init_cache(model.config, batch_size, max_length, dtype=dtype, layout=layout, pages=pages)
    units = segments(model.config.blocks)
    if len(model.segments) == len(units):
        return cache
    parts = tuple(
        jax.tree.map(
            lambda cache_of_layers, index=index: _layer(cache_of_layers, index), caches, is_leaf=is_layer_cache
        )
        for caches, (_, repeats) in zip(cache.segments, units, strict=True)
        for index in range(repeats)
    )
    return dataclasses.replace(cache, segments=parts)


def _layer(cache: LayerCache, index: int) -> Any:
    """Return the cache of one of the layers, as one of a stack of one."""
    words, leaves = axes(cache), named_leaves(cache)
    return replaced(cache, {n: x[index : index + 1] if "layers" in words[n] else x for n, x in leaves.items()})


def default_cache_format(execution: Execution) -> CacheFormat:
    """Return the default format of keys and values in a cache: the dtype of activations, or float32.

    Where 16-bit numbers are multiplied as float32 (CPUs), XLA would widen the whole cache at every token.
    """
    dtype = np.dtype(execution.precision.compute)
    widened = execution.layout.backend.widens_half and dtype.itemsize == 2
    return CacheFormat(dtype=np.dtype(np.float32) if widened else dtype)
