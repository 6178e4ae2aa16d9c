"""Models and caches whose layers are arrays of their own, for inference on CPU.

A scan over layers cuts each one's weights out of the arrays of all. TPUs and GPUs read them where they stand; XLA's CPU
backend copies them first (and widens 16-bit ones, those of all layers at once), which takes longer than the products
of a few tokens. Of arrays of their own nothing is copied. They are views: on CPU they take no memory of their own.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from eqx_decoders.blocks.stack import Segment, segments
from eqx_decoders.context import Execution
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import LayerCache, is_memory
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import init_cache
from eqx_decoders.sharding.axes import axes, named_leaves, replaced


WORTH = 2**25  # bytes of a model's layers: fewer are in the processor's caches, and a scan is compiled sooner
MOST = 64  # layers: a program grows with those that are not scanned


def unstack_layers(model: Decoder) -> Decoder:
    """The same model with a `Segment` for each repeat of a unit, whose arrays are views of the stacked ones.

    For one CPU device and layers of some size; any other model, and one that is traced, is returned as it is. While a
    view lives, a donated array is copied instead of overwritten: keep the result no longer than it is needed.
    """
    execution, arrays = model.execution, jax.tree.leaves(eqx.filter(model.segments, eqx.is_array))
    plain = execution.layout.single and execution.layout.platform == "cpu" and not execution.layout.offload.weights
    known = all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in arrays)
    if not (plain and known and execution.scan and len(model.config.blocks) <= MOST):
        return model
    if sum(leaf.nbytes for leaf in arrays) < WORTH or all(segment.repeats == 1 for segment in model.segments):
        return model
    return dataclasses.replace(model, segments=tuple(each for segment in model.segments for each in _cut(segment)))


def _cut(segment: Segment) -> list[Segment]:
    """One segment for each repeat."""
    stacked, static = eqx.partition(segment.unit, eqx.is_array)
    leaves, form = jax.tree.flatten(stacked)
    # of an array's data, since an array itself would keep what NumPy is shown
    shown = [np.asarray(leaf.addressable_data(0)) for leaf in leaves]
    views = [[whole[index : index + 1] for whole in shown] for index in range(segment.repeats)]
    # numbers of four bits without a place: compiled programs (jax 0.10.2) take the layout of others for a wrong one
    places = [None if leaf.dtype in (jnp.int4, jnp.uint4) else leaf.sharding for leaf in leaves]
    made = [[jax.device_put(*one) for one in zip(each, places, strict=True)] for each in views]
    return [Segment(unit=eqx.combine(jax.tree.unflatten(form, each), static), repeats=1) for each in made]


def inference_cache(
    model: Decoder,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    *,
    pages: PageConfig | None = None,
) -> Cache:
    """`init_cache` for a model, whose layers may be apart."""
    layout = model.execution.layout
    cache = init_cache(model.config, batch_size, max_length, dtype=dtype, layout=layout, pages=pages)
    units = segments(model.config.blocks)
    if len(model.segments) == len(units):
        return cache
    parts = tuple(
        jax.tree.map(lambda each, index=index: _layer(each, index), memories, is_leaf=is_memory)
        for memories, (_, repeats) in zip(cache.segments, units, strict=True)
        for index in range(repeats)
    )
    return dataclasses.replace(cache, segments=parts)


def _layer(memory: LayerCache, index: int) -> Any:
    """What one of the layers remembers, as a memory of a stack of one."""
    words, leaves = axes(memory), named_leaves(memory)
    return replaced(memory, {n: x[index : index + 1] if "layers" in words[n] else x for n, x in leaves.items()})


def default_cache_format(execution: Execution) -> CacheFormat:
    """How a cache stores keys and values where nothing is said: in the dtype of activations, but on CPU in float32.

    There 16-bit numbers are moved and multiplied as float32, so XLA would widen the whole cache at every token.
    """
    dtype = np.dtype(execution.precision.compute)
    widened = execution.layout.platform == "cpu" and dtype.itemsize == 2
    return CacheFormat(dtype=np.dtype(np.float32) if widened else dtype)
