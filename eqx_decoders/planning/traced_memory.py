"""Memory of a step without compilation, from shardings and tracing, and batches of a step as shapes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.encoders.geometry import TilesConfig, grid_of, token_order
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig, WholeImageStem
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.flop_count import inner_programs
from eqx_decoders.planning.machine import Machine
from eqx_decoders.sharding.axes import axes, named_leaves, names_of
from eqx_decoders.sharding.layout import Layout, device_bytes
from eqx_decoders.sharding.offload import HOST
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import TrainState


FEATURES = ("tensor", "tensor_sequence")  # mesh axes that shard heads and mlp
_VALUES_AND_GRADIENTS = 2


def abstract_batch(layout: Layout, batch_size: int, seq_len: int) -> Batch:
    """Return a training batch as shapes, with the shardings of a training run."""
    shape = (batch_size, seq_len)
    split = layout.activation_sharding("batch length", shape)

    def like(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    ids = dict.fromkeys(("tokens", "segment_ids", "positions"), like(jnp.int32))
    return Batch(**ids, loss_mask=like(bool), contiguous=True)


def abstract_media(
    config: DecoderConfig, layout: Layout, batch_size: int, seq_len: int, *, images: int, side: int
) -> Media:
    """Return the media of a batch as shapes: each sequence starts with `images` images of `side` x `side` pixels.

    If the model supports only one image size, that size is used instead of `side`.
    """
    media = config.media
    stem = None if media is None or media.vision is None else media.vision.stem
    if media is None or media.image_token is None or not isinstance(stem, PatchStemConfig | WholeImageStem):
        raise ConfigError(f"images={images} needs a vision-language model, but this model has no image encoder.")
    if isinstance(stem, WholeImageStem):
        arrays, tokens = _whole_images(stem, images, side)
    else:
        tiles = media.tiles
        cut = _image_patches(stem, images, side) if tiles is None else _image_tiles(stem, tiles, images, side)
        arrays, tokens = cut
    check(
        0 < tokens < seq_len,
        f"images={images} of {side} x {side} pixels have {tokens} tokens, which must be fewer than seq_len={seq_len}: "
        f"increase seq_len.",
    )
    ids = np.zeros((1, seq_len), np.int32)
    ids[0, :tokens] = media.image_token
    sequence_media = Media.create(config, ids, **arrays, segment_ids=np.ones_like(ids))

    def repeat(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (leaf.shape[0] * batch_size, *leaf.shape[1:])
        sharding = layout.activation_sharding("batch", shape[:1])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)

    return jax.tree.map(repeat, sequence_media)


def _image_patches(stem: PatchStemConfig, images: int, side: int) -> tuple[dict[str, Any], int]:
    """Return the arrays of images, and their number of tokens."""
    fixed = isinstance(stem.positions, LearnedGrid) and stem.positions.resample == "none"
    rows = stem.positions.side if fixed and isinstance(stem.positions, LearnedGrid) else side // stem.size
    rows -= rows % stem.merge
    patches = np.zeros((images * rows * rows, int(np.prod(stem.shape))), np.float32)
    grids = np.asarray([[1, rows, rows]] * images)
    return dict(pixel_values=patches, image_grid_thw=grids), images * (rows // stem.merge) ** 2


def _image_tiles(stem: PatchStemConfig, tiles: TilesConfig, images: int, side: int) -> tuple[dict[str, Any], int]:
    order = token_order(tiles, side, side, tiles.side // stem.size // stem.merge)
    count = 1 + math.prod(grid_of(tiles, side, side))
    pixels = np.zeros((images * count, stem.channels, tiles.side, tiles.side), np.float32)
    return dict(pixel_values=pixels, image_sizes=np.full((images, 2), side)), images * len(order)


def _whole_images(stem: WholeImageStem, images: int, side: int) -> tuple[dict[str, Any], int]:
    side = max(1, side // stem.multiple) * stem.multiple
    return dict(pixel_values=np.zeros((images, stem.channels, side, side), np.float32)), images * stem.side**2


def state_memory(trainer: Trainer, state: TrainState, capacity: int | float) -> DeviceMemory:
    """Return the memory of the state and the gradients on a device, from their shardings."""
    weights, shardings = named_leaves(state.model), trainer.state_shardings(state.model)
    return DeviceMemory(
        parameters=_bytes(state.model),
        optimizer=_bytes(state.optimizer),
        means=_bytes(state.ema),
        gradients=_bytes([_like_gradient(weights[name], sharding) for name, sharding in shardings.items()]),
        host=_host_bytes(state),
        capacity=int(capacity),
    )


def predicted_bytes(model: Decoder, trainer: Trainer, machine: Machine, *, batch_size: int, seq_len: int) -> int:
    """Predict the peak memory of a device: state, gradients, saved activations, and all activations of one layer."""
    memory = state_memory(trainer, trainer.abstract(model, key=jax.random.key(0)), machine.memory)
    shape = dict(batch_size=batch_size, seq_len=seq_len)
    saved = saved_activation_bytes(model, trainer, **shape)
    layer = saved_activation_bytes(model.replace(remat=None), trainer, **shape) // len(model.config.blocks)
    return memory.state + memory.gradients + saved + _VALUES_AND_GRADIENTS * layer


def saved_activation_bytes(model: Decoder, trainer: Trainer, *, batch_size: int, seq_len: int) -> int:
    """Return the bytes on a device that the loops over layers save for the backward pass."""
    layout, sizes = model.execution.layout, model.execution.layout.sizes
    state, batch = trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, batch_size, seq_len)
    arrays = saved_arrays(jax.jit(trainer.advance).trace(state, batch).jaxpr)
    tokens = layout.activation_shards("batch length embed", (batch_size, seq_len, model.config.embed_dim))
    features = math.prod(sizes[name] for name in FEATURES)
    return device_share(arrays, model.config.embed_dim, tokens=tokens, features=features)


def saved_arrays(jaxpr: Any) -> list[Any]:
    """Return the stacked outputs of a scan that a later scan reads slice by slice. Shapes are global."""
    written: dict[Any, Any] = {}
    saved: dict[Any, Any] = {}
    deeper: list[Any] = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "scan":
            inside = eqn.params["jaxpr"].jaxpr
            read = _stacked(eqn.invars, inside.invars)
            saved |= {var: written[var] for var in read if var in written}
            written |= {var: var.aval for var in _stacked(eqn.outvars, inside.outvars)}
        else:
            deeper += [array for part in inner_programs(eqn) for array in saved_arrays(part)]
    return [*saved.values(), *deeper]


def _stacked(outside: list[Any], inside: list[Any]) -> list[Any]:
    """Return the arrays that a scan reads or writes slice by slice: inside of the scan they have one dimension less."""
    pairs = zip(outside, inside, strict=True)
    return [array for array, part in pairs if array.aval.ndim > part.aval.ndim and not hasattr(array, "val")]


def device_share(arrays: list[Any], embed_dim: int, *, tokens: int, features: int) -> int:
    """Return the bytes per device if tokens are sharded with degree `tokens`, and heads and mlp with degree `features`.

    Arrays whose last dimension is `embed_dim`, such as the residual stream, are not sharded along features.
    """
    return sum(
        math.prod(array.shape) * array.dtype.itemsize // tokens // (1 if array.shape[-1:] == (embed_dim,) else features)
        for array in arrays
    )


def counted_memory(
    model: Decoder, trainer: Trainer, machine: Machine, *, batch_size: int, seq_len: int
) -> DeviceMemory:
    """Return the memory of a device without compilation: state and gradients from shardings, the rest from tracing."""
    shape = dict(batch_size=batch_size, seq_len=seq_len)
    known = state_memory(trainer, trainer.abstract(model, key=jax.random.key(0)), machine.memory)
    peak = predicted_bytes(model, trainer, machine, **shape)
    saved, temporaries = saved_activation_bytes(model, trainer, **shape), peak - known.state
    return dataclasses.replace(known, batch=0, saved_activations=saved, temporaries=temporaries, outputs=0, peak=peak)


def moved_bytes(model: Decoder, memory: DeviceMemory) -> int:
    """Return a lower bound of the memory traffic of a device in a step, in bytes.

    The state is read and written. Gradients and saved activations are written and read. Weights, in the compute dtype,
    are read in the forward pass, in the backward pass, and once more for recomputation.
    """
    layout, dtype, axis_names = model.execution.layout, jnp.dtype(model.execution.precision.compute), axes(model)
    weights = 0
    for name, leaf in named_leaves(model).items():
        mesh_axes = [axis for group in layout.gathered_spec(axis_names[name]) for axis in names_of(group)]
        weights += leaf.size * dtype.itemsize // math.prod(layout.sizes[axis] for axis in mesh_axes)
    passes = 2 if model.execution.remat is None else 3
    return 2 * memory.state + 2 * memory.gradients + 2 * (memory.saved_activations or 0) + passes * weights


def _like_gradient(weight: Any, sharding: Any) -> Any:
    """Return the shape of a weight's gradient. It is in host memory if the weight is."""
    return weight.update(sharding=sharding.with_memory_kind(weight.sharding.memory_kind))


def _bytes(tree: Any) -> int:
    return sum(device_bytes(leaf) for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST)


def _host_bytes(tree: Any) -> int:
    return sum(device_bytes(leaf) for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == HOST)
