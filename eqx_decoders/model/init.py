"""Creation of models: as shapes that take no memory, or as arrays on their devices."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from eqx_decoders.context import Execution, RunOptions
from eqx_decoders.core.input_checks import as_key
from eqx_decoders.errors import check
from eqx_decoders.layers.embedding.embedding import build_head
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig, with_scores
from eqx_decoders.model.mtp import MTP
from eqx_decoders.model.mtp_config import MTPConfig, depends_on_model
from eqx_decoders.numerics.initializers import shapes_only
from eqx_decoders.numerics.precision import Precision, as_precision
from eqx_decoders.sharding.axes import computed, named_leaves, stored_leaves
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


T = TypeVar("T")


def abstract(
    config: DecoderConfig,
    *,
    layout: Layout | None = None,
    precision: Precision | DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    **execution: Unpack[RunOptions],
) -> Decoder:
    """Return the model as a tree of `jax.ShapeDtypeStruct` with shardings, which takes no memory; see `init`."""
    layout = Layout() if layout is None else layout
    check(
        dtype is None or precision is None,
        f"dtype={dtype!r} and precision={precision!r} exclude each other: set only one of them.",
    )
    precision = as_precision(dtype if precision is None else precision)
    run = Execution(layout=layout, precision=precision, **execution)
    with shapes_only():
        tree = eqx.filter_eval_shape(lambda key: Decoder.build(config, key=key, execution=run), jax.random.key(0))
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def stored_dtype(dtype: Any) -> Any:
        return dtype if jnp.issubdtype(dtype, jnp.integer) else precision.params  # integer buffers keep their dtype

    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, stored_dtype(leaf.dtype), sharding=sharding),
        arrays,
        layout.shardings(arrays),
    )
    return eqx.combine(placed, static)


def init(
    config: DecoderConfig,
    *,
    key: PRNGKeyArray | int,
    layout: Layout | None = None,
    precision: Precision | DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    **execution: Unpack[RunOptions],
) -> Decoder:
    """Return a new model. Weights are created sharded: each device allocates only its shard.

    **Arguments:**

    - `config`: configuration of the decoder.
    - `key`: random key or seed; it gives the same weights on every mesh (up to the last bit of float32).
    - `layout`: mesh and sharding of the weights. None: one device.
    - `precision`: dtypes of weights and activations, or one dtype for both. None: float32.
    - `dtype`: dtype of weights and activations, in place of `precision`.
    - `execution`: other fields of `Execution`, such as `remat="full"`.
    """
    target = abstract(config, layout=layout, precision=precision, dtype=dtype, **execution)
    build = functools.partial(Decoder.build, config, execution=target.execution)
    return _materialize(target, lambda key: build(key=key), key, target.execution.layout)


def _materialize(target: T, build: Callable[[PRNGKeyArray], T], key: PRNGKeyArray | int, layout: Layout) -> T:
    """Return the result of `build(key)` with the dtypes and shardings of `target`."""
    shapes, static = eqx.partition(target, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def arrays(key):
        built = eqx.filter(build(key), eqx.is_array)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), built, shapes)

    build_arrays = layout.automatically(arrays, lambda _: partitions(shapes))
    return eqx.combine(jax.jit(build_arrays, out_shardings=out_shardings(shapes))(as_key(key)), static)


def count_parameters(config: DecoderConfig) -> int:
    """Return the number of weights of a model. Tied weights count once; computed buffers do not count."""
    return sum(math.prod(leaf.shape) for leaf in stored_leaves(abstract(config)).values())


def computed_buffers(target: Decoder) -> dict[str, Array]:
    """Return the buffers that are computed from the configuration, by path, with the dtypes and shardings of `target`.

    The weights of the model are not computed.
    """
    buffer_paths = computed(target)
    shapes = {path: leaf for path, leaf in named_leaves(target).items() if path in buffer_paths}

    def build(key: PRNGKeyArray) -> dict[str, Array]:
        leaves = named_leaves(Decoder.build(target.config, key=key, execution=target.execution))
        return {path: leaves[path] for path in shapes}

    return _materialize(shapes, build, jax.random.key(0), target.execution.layout) if shapes else {}


def with_mtp(config: DecoderConfig, num_depths: int, *, loss_weight: float = 0.1) -> DecoderConfig:
    """Return the configuration with `num_depths` depths of multi-token prediction (MTP).

    The depths use the final norm's configuration, and that of the last block that can run without other layers (it
    must not reuse the keys and values of an earlier layer), without the block's extra layers. If that block has no MLP,
    they use the MLP of the last block that has one. Experts with a shortcut return their sum in a depth. Depths that
    `config` already has are replaced.
    """
    return dataclasses.replace(config, mtp=_mtp_like(config, num_depths, loss_weight))


def _mtp_like(config: DecoderConfig, num_depths: int, loss_weight: float) -> MTPConfig:
    norm = RMSNormConfig() if config.final_norm is None else config.final_norm
    candidates = [block for block in config.blocks if block.mixer is not None and not depends_on_model(block)]
    block = dataclasses.replace(
        (candidates or config.blocks)[-1], pre_layers=(), post_layers=(), shares_kv_as=None, shortcut_from=None
    )
    if block.mlp is None:  # models whose blocks have either a mixer or an MLP: a depth gets both
        mlp_block = next((other for other in reversed(config.blocks) if other.mlp is not None), block)
        block = dataclasses.replace(
            block, mlp=mlp_block.mlp, pre_mlp_norm=mlp_block.pre_mlp_norm, post_mlp_norm=mlp_block.post_mlp_norm
        )
    if isinstance(block.mlp, ExpertsConfig):
        block = dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, shortcut=None))
    return MTPConfig(
        num_depths=num_depths,
        block=block,
        norm=norm,
        all_streams=block.residual_config.weighted_sum,
        loss_weight=loss_weight,
    )


def add_mtp(model: Decoder, num_depths: int, *, loss_weight: float = 0.1, key: PRNGKeyArray | int) -> Decoder:
    """Return the model with newly initialized depths of multi-token prediction, configured as in `with_mtp`.

    The new weights are created with the model's sharding. For a model of `jax.ShapeDtypeStruct`s they are also
    `jax.ShapeDtypeStruct`s. Raises ConfigError if the model already has multi-token prediction.
    """
    check(model.mtp is None, "add_mtp: the model already has multi-token prediction. Call model.without_mtp() first.")
    mtp = _mtp_like(model.config, num_depths, loss_weight)
    config = dataclasses.replace(model.config, mtp=mtp)
    depths = abstract(config, **vars(model.execution)).mtp
    if not isinstance(model.embedding.table, jax.ShapeDtypeStruct):
        depths = _materialize(
            depths, lambda key: MTP.build(mtp, config.embed_dim, key=key), key, model.execution.layout
        )
    return dataclasses.replace(model, mtp=depths, config=config)


def add_score_head(model: Decoder, *, scores: int = 1, key: PRNGKeyArray | int) -> Decoder:
    """Return the model with a newly initialized head of `scores` scores per token in place of the head of logits.

    The new weights are created with the model's sharding. For a model of `jax.ShapeDtypeStruct`s they are also
    `jax.ShapeDtypeStruct`s. Multi-token prediction is removed.
    """
    config = with_scores(model.config, scores)
    head = abstract(config, **vars(model.execution)).head
    if not isinstance(model.embedding.table, jax.ShapeDtypeStruct):
        build = functools.partial(build_head, config.head_features, *config.head_sizes)
        head = _materialize(head, lambda key: build(key=key), key, model.execution.layout)
    scored = dataclasses.replace(model, head=head, head_bias=None, mtp=None, config=config)
    paths = named_leaves(scored)
    return dataclasses.replace(scored, saved_modules=tuple(path for path in model.saved_modules if path in paths))
