"""Creation of caches: as shapes that take no memory, or as arrays on their devices."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.errors import check_integer
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


def abstract_cache(
    config: DecoderConfig,
    batch_size: int,
    max_length: int,
    *,
    dtype: DTypeLike | CacheFormat = jnp.bfloat16,
    layout: Layout = Layout(),
    pages: PageConfig | None = None,
) -> Cache:
    """Return the result of `init_cache` as a tree of `jax.ShapeDtypeStruct` with shardings."""
    check_integer("init_cache batch_size", batch_size)
    check_integer("init_cache max_length", max_length)
    shapes = eqx.filter_eval_shape(lambda: _build_cache(config, batch_size, max_length, dtype, pages))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        layout.activation_shardings(shapes),
    )


def init_cache(
    config: DecoderConfig,
    batch_size: int,
    max_length: int,
    *,
    dtype: DTypeLike | CacheFormat = jnp.bfloat16,
    layout: Layout = Layout(),
    pages: PageConfig | None = None,
) -> Cache:
    """Return an empty cache for `batch_size` sequences of up to `max_length` tokens. It is created sharded.

    **Arguments:**

    - `dtype`: dtype of keys and values. "int8", "int4" and "float8_e4m3fn" store them quantized, with one scale for
        each token and head; a `CacheFormat` selects other scales. Within a call, tokens attend to each other's
        unquantized keys and values, and to the quantized keys and values of earlier calls.
    - `pages`: store keys and values in pages (paged attention), so that each sequence takes the pages that it needs;
        None for a contiguous cache.
    """
    target = abstract_cache(config, batch_size, max_length, dtype=dtype, layout=layout, pages=pages)
    build = layout.automatically(
        lambda: _build_cache(config, batch_size, max_length, dtype, pages), lambda _: partitions(target)
    )
    return jax.jit(build, out_shardings=out_shardings(target))()


def _build_cache(
    config: DecoderConfig, batch_size: int, max_length: int, dtype: DTypeLike | CacheFormat, pages: PageConfig | None
) -> Cache:
    caches = tuple(
        tuple(block_cache(block, repeats, batch_size, max_length, dtype, pages) for block in unit)
        for unit, repeats in find_repeats(config.blocks)
    )
    offset = jnp.zeros((batch_size,), jnp.float32) if config.has_grid_positions else None
    return Cache(layer_caches=caches, length=jnp.zeros((batch_size,), jnp.int32), rope_offset=offset)


def block_cache(
    block: BlockConfig,
    layers: int,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    pages: PageConfig | None = None,
) -> dict[str, Any]:
    """Return empty caches for the layers of `layers` equal blocks, by layer name (see `BlockConfig.branches`)."""
    cache_format = CacheFormat.of(dtype)

    def build(shape: Any) -> Any:
        if pages is not None and shape.by_token:
            return build_pages(shape, layers, batch_size, max_length, cache_format, pages)
        return shape.build(layers, batch_size, cache_format)

    return jax.tree.map(build, block.cache_shape(max_length))
