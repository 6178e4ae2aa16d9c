"""Creation of models: as shapes that take no memory, or as arrays on their devices."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from eqx_decoders.context import Execution, RunOptions
from eqx_decoders.errors import check
from eqx_decoders.layers.embedding.embedding import build_head
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig, with_scores
from eqx_decoders.model.mtp import MTP
from eqx_decoders.model.mtp_config import MTPConfig, needs_model
from eqx_decoders.numerics.initializers import shapes_alone
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.sharding.axes import computed, named_leaves, stored_leaves
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


T = TypeVar("T")


def abstract(
    config: DecoderConfig,
    *,
    layout: Layout = Layout(),
    precision: Precision = Precision(),
    **execution: Unpack[RunOptions],
) -> Decoder:
    """Return the model as a tree of `jax.ShapeDtypeStruct` with shardings, which takes no memory."""
    run = Execution(layout=layout, precision=precision, **execution)
    with shapes_alone():
        tree = eqx.filter_eval_shape(lambda key: Decoder.build(config, key=key, execution=run), jax.random.key(0))
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def stored(dtype: Any) -> Any:
        return dtype if jnp.issubdtype(dtype, jnp.integer) else precision.params  # tables of numbers stay what they are

    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, stored(leaf.dtype), sharding=sharding),
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
    """Return a new model, sharded from the start: no device ever holds more than its part.

    **Arguments:**

    - `config`: of the decoder.
    - `key`: the same key gives the same weights on every mesh.
    - `layout`: where the weights live.
    - `precision`: dtypes of weights and activations.
    - `execution`: more fields of `Execution`, such as `remat="full"`.
    """
    target = abstract(config, layout=layout, precision=precision, **execution)
    return _materialize(target, lambda key: Decoder.build(config, key=key, execution=target.execution), key, layout)


def _materialize(target: T, build: Callable[[PRNGKeyArray], T], key: PRNGKeyArray, layout: Layout) -> T:
    """Return the result of `build(key)` with the dtypes and shardings of `target`."""
    shapes, static = eqx.partition(target, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def arrays(key):
        built = eqx.filter(build(key), eqx.is_array)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), built, shapes)

    build_arrays = layout.automatically(arrays, lambda _: partitions(shapes))
    return eqx.combine(jax.jit(build_arrays, out_shardings=out_shardings(shapes))(key), static)


def count_parameters(config: DecoderConfig) -> int:
    """Return the number of weights of a model; tied ones count once, buffers that are computed not at all."""
    return sum(math.prod(leaf.shape) for leaf in stored_leaves(abstract(config)).values())


def computed_buffers(target: Decoder) -> dict[str, Array]:
    """Return the buffers that follow from the configuration, by path, with the dtypes and shardings of `target`.

    Nothing else of a new model is made.
    """
    names = computed(target)
    shapes = {path: leaf for path, leaf in named_leaves(target).items() if path in names}

    def build(key: PRNGKeyArray) -> dict[str, Array]:
        leaves = named_leaves(Decoder.build(target.config, key=key, execution=target.execution))
        return {path: leaves[path] for path in shapes}

    return _materialize(shapes, build, jax.random.key(0), target.execution.layout) if shapes else {}


def with_mtp(config: DecoderConfig, num_depths: int, *, loss_weight: float = 0.1) -> DecoderConfig:
    """Return the configuration with multi-token prediction, whose blocks and norms are like its last ones.

    The block is the last one whose mixer has keys and values, or a state, of its own; without extra layers.
    """
    return dataclasses.replace(config, mtp=_mtp_like(config, num_depths, loss_weight))


def _mtp_like(config: DecoderConfig, num_depths: int, loss_weight: float) -> MTPConfig:
    norm = RMSNormConfig() if config.final_norm is None else config.final_norm
    # the last block with a mixer that uses nothing of another layer
    own_kv = [each for each in config.blocks if each.mixer is not None and not needs_model(each)]
    nothing = dict(shares_kv_as=None, shortcut_from=None)
    block = dataclasses.replace((own_kv or config.blocks)[-1], pre_layers=(), post_layers=(), **nothing)
    if block.mlp is None:  # blocks of one layer each: join both kinds
        mlp_block = next((each for each in reversed(config.blocks) if each.mlp is not None), block)
        norms = dict(pre_mlp_norm=mlp_block.pre_mlp_norm, post_mlp_norm=mlp_block.post_mlp_norm)
        block = dataclasses.replace(block, mlp=mlp_block.mlp, **norms)
    streams = block.residual.weighted_sum
    return MTPConfig(num_depths=num_depths, block=block, norm=norm, all_streams=streams, loss_weight=loss_weight)


def add_mtp(model: Decoder, num_depths: int, *, loss_weight: float = 0.1, key: PRNGKeyArray) -> Decoder:
    """Return the model with new depths of multi-token prediction, as in `with_mtp`, created sharded like the rest.

    A model of `jax.ShapeDtypeStruct`s stays one.
    """
    check(model.mtp is None, "add_mtp: the model has multi-token prediction already.")
    mtp = _mtp_like(model.config, num_depths, loss_weight)
    config = dataclasses.replace(model.config, mtp=mtp)
    depths = abstract(config, **vars(model.execution)).mtp
    if not isinstance(model.embedding.table, jax.ShapeDtypeStruct):
        depths = _materialize(
            depths, lambda key: MTP.build(mtp, config.embed_dim, key=key), key, model.execution.layout
        )
    return dataclasses.replace(model, mtp=depths, config=config)


def add_score_head(model: Decoder, *, scores: int = 1, key: PRNGKeyArray) -> Decoder:
    """Return the model with a new head of scores in place of that of logits, created sharded like the rest.

    A model of `jax.ShapeDtypeStruct`s stays one. Multi-token prediction is left out.
    """
    config = with_scores(model.config, scores)
    head = abstract(config, **vars(model.execution)).head
    if not isinstance(model.embedding.table, jax.ShapeDtypeStruct):
        build = functools.partial(build_head, config.head_features, *config.head_sizes)
        head = _materialize(head, lambda key: build(key=key), key, model.execution.layout)
    return dataclasses.replace(model, head=head, head_bias=None, mtp=None, config=config)
