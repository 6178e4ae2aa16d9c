"""Making models and caches: as shapes that take no memory, or as arrays on the devices where they belong."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.stack import segments
from eqx_decoders.context import Execution, RunOptions
from eqx_decoders.core.prng import fast_key
from eqx_decoders.errors import check, check_integer
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import KVShape
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder import Decoder, DecoderConfig
from eqx_decoders.model.mtp import MTPConfig
from eqx_decoders.numerics.matmul import Precision
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


T = TypeVar("T")


def abstract(
    config: DecoderConfig,
    *,
    layout: Layout = Layout(),
    precision: Precision = Precision(),
    **execution: Unpack[RunOptions],
) -> Decoder:
    """The model as a tree of `jax.ShapeDtypeStruct` with shardings: takes no memory."""
    run = Execution(layout=layout, precision=precision, **execution)
    tree = eqx.filter_eval_shape(lambda key: config.build(key=key, execution=run), jax.random.key(0))
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, precision.params, sharding=sharding),
        arrays,
        layout.shardings(arrays),
    )
    return eqx.combine(placed, static)


def init(
    config: DecoderConfig,
    *,
    key: PRNGKeyArray,
    layout: Layout = Layout(),
    precision: Precision = Precision(),
    **execution: Unpack[RunOptions],
) -> Decoder:
    """A new model, sharded from the start: no device ever holds more than its part.

    **Arguments:**

    - `config`: what to build.
    - `key`: the same key gives the same weights on every mesh.
    - `layout`: where the weights live.
    - `precision`: their dtype, and that of the activations.
    - `execution`: further fields of `Execution`, such as `remat="full"`.
    """
    target = abstract(config, layout=layout, precision=precision, **execution)
    return _materialize(target, lambda key: config.build(key=key, execution=target.execution), key, layout)


def _materialize(target: T, build: Callable[[PRNGKeyArray], T], key: PRNGKeyArray, layout: Layout) -> T:
    """The result of `build(key)` with the dtypes and shardings of `target`."""
    shapes, static = eqx.partition(target, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def arrays(key):
        built = eqx.filter(build(fast_key(key)), eqx.is_array)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), built, shapes)

    made = layout.automatically(arrays, lambda _: partitions(shapes))
    return eqx.combine(jax.jit(made, out_shardings=out_shardings(shapes))(key), static)


def abstract_cache(
    config: DecoderConfig,
    batch_size: int,
    max_length: int,
    *,
    dtype: DTypeLike | CacheFormat = jnp.bfloat16,
    layout: Layout = Layout(),
    pages: PageConfig | None = None,
) -> Cache:
    """`init_cache` as a tree of `jax.ShapeDtypeStruct` with shardings."""
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
    """An empty cache for `batch_size` rows of up to `max_length` tokens, created sharded.

    `dtype` may be "int8", "int4" or "float8_e4m3fn": keys and values are then stored in so few bits, with a scale for
    each token and head, or as a `CacheFormat` says. The tokens of a call see each other as they are, and earlier ones
    as they are stored. With `pages` these keys and values are in pages, of which rows have as many as they need.
    """
    target = abstract_cache(config, batch_size, max_length, dtype=dtype, layout=layout, pages=pages)
    made = layout.automatically(
        lambda: _build_cache(config, batch_size, max_length, dtype, pages), lambda _: partitions(target)
    )
    return jax.jit(made, out_shardings=out_shardings(target))()


def _build_cache(
    config: DecoderConfig, batch_size: int, max_length: int, dtype: DTypeLike | CacheFormat, pages: PageConfig | None
) -> Cache:
    memories = tuple(
        tuple(block_memory(block, repeats, batch_size, max_length, dtype, pages) for block in unit)
        for unit, repeats in segments(config.blocks)
    )
    offset = jnp.zeros((batch_size,), jnp.float32) if config.has_grid_positions else None
    return Cache(segments=memories, length=jnp.zeros((batch_size,), jnp.int32), rope_offset=offset)


def block_memory(
    block: BlockConfig,
    layers: int,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    pages: PageConfig | None = None,
) -> dict[str, Any]:
    """What the layers of so many equal blocks remember, empty, by the names of the branches."""
    kind = CacheFormat.of(dtype)

    def build(shape: Any) -> Any:
        if pages is not None and isinstance(shape, KVShape):
            return build_pages(shape, layers, batch_size, max_length, kind, pages)
        return shape.build(layers, batch_size, kind)

    return jax.tree.map(build, block.memory(max_length))


def count_parameters(config: DecoderConfig) -> int:
    """How many weights a model has; tied ones count once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(config)))


def with_mtp(config: DecoderConfig, num_depths: int, *, loss_weight: float = 0.1) -> DecoderConfig:
    """The configuration with multi-token prediction: so many depths of blocks and norms like its last ones.

    The block is the last one that mixes tokens with keys and values, or a state, of its own; without further branches.
    """
    return dataclasses.replace(config, mtp=_mtp_like(config, num_depths, loss_weight))


def _mtp_like(config: DecoderConfig, num_depths: int, loss_weight: float) -> MTPConfig:
    norm = RMSNormConfig() if config.final_norm is None else config.final_norm
    # the last that mixes tokens and stands by itself
    able = [
        block for block in config.blocks if block.mixer is not None and not getattr(block.mixer, "kv_shared_from", None)
    ]
    alone = dataclasses.replace((able or config.blocks)[-1], pre_layers=(), post_layers=(), shares_kv_as=None)
    if alone.mlp is None:  # layers of one branch: both kinds together
        fed = next((block for block in reversed(config.blocks) if block.mlp is not None), alone)
        norms = dict(pre_mlp_norm=fed.pre_mlp_norm, post_mlp_norm=fed.post_mlp_norm)
        alone = dataclasses.replace(alone, mlp=fed.mlp, **norms)
    return MTPConfig(num_depths=num_depths, block=alone, norm=norm, loss_weight=loss_weight)


def add_mtp(model: Decoder, num_depths: int, *, loss_weight: float = 0.1, key: PRNGKeyArray) -> Decoder:
    """The model with new depths of multi-token prediction, as `with_mtp` describes them, created sharded like the rest.

    A model of `jax.ShapeDtypeStruct`s gets such.
    """
    check(model.mtp is None, "add_mtp: the model has multi-token prediction already.")
    mtp = _mtp_like(model.config, num_depths, loss_weight)
    config = dataclasses.replace(model.config, mtp=mtp)
    depths = abstract(config, **vars(model.execution)).mtp
    if not isinstance(model.embedding.table, jax.ShapeDtypeStruct):
        depths = _materialize(depths, lambda key: mtp.build(config.embed_dim, key=key), key, model.execution.layout)
    return dataclasses.replace(model, mtp=depths, config=config)
