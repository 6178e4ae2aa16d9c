"""Low-rank adaptation (Hu et al. 2021): frozen weights with small trained pairs.

    model = add_lora(model, LoRAConfig(rank=8), key=key)
    trainer = Trainer.create(OptimizerConfig(trainable=LORA_WEIGHTS), model, steps=1000)

`io.huggingface.peft` reads and writes the pairs as adapter directories.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from eqx_decoders.core.input_checks import as_key
from eqx_decoders.errors import check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.pissa import check_split, init_pissa
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights, pair_axes
from eqx_decoders.numerics.quantized_weight import plain_shapes, whole_weights
from eqx_decoders.sharding.axes import Axes, axes, frozen, matching, named_leaves, product_axes, replaced
from eqx_decoders.sharding.layout import out_shardings, partitions
from eqx_decoders.training.settings.lora import LoRAConfig


_NEW = ("lora_a", "lora_b", "lora_magnitude", "start_a", "start_b")


def add_lora(model: Decoder, config: LoRAConfig, *, key: PRNGKeyArray | int) -> Decoder:
    """Add a low-rank pair to every weight that matches; until it is trained the model computes the same.

    Weights in few bits (`quantize`) get pairs like others, and stay as they are (QLoRA, Dettmers et al. 2023).
    `lora_a` is uniform within `1 / sqrt(fan_in)`, `lora_b` zero, as in PEFT. The pairs are created sharded; the other
    weights are shared with `model`. A model of `jax.ShapeDtypeStruct`s gets such pairs.

    With `config.init="pissa"` a pair is the part of a weight with its largest singular values, and the base is what
    remains, rounded as the weight is. `quantize` after `add_lora` rounds the remainder alone, which loses less than
    rounding the weight before.

    Raises ConfigError for a pattern that matches nothing or no matrix of a block, for a model with pairs, and for a
    weight that PiSSA can't split.
    """
    present = sorted(low_rank_weights(model))[:1]
    check(
        not present, f"add_lora: the model has pairs already, beside {present}. Call merge_lora, or start without them."
    )
    words, leaves = whole_weights(model)
    dtype = model.execution.precision.params if config.dtype is None else jnp.dtype(config.dtype)
    fixed, nodes = frozen(plain_shapes(model)), {}
    for path in _targets(config, {name: axis_names for name, axis_names in words.items() if name not in fixed}):
        parts = _parts(config, path, words[path], leaves[path], dtype)
        nodes[path] = LowRank(base=leaves[path], scale=config.scale_of(path), **parts)
    target = replaced(model, nodes)
    shardings, new = named_leaves(model.execution.layout.shardings(target)), {}
    for path, node in nodes.items():
        parts = {f"{path}.{name}": getattr(node, name) for name in _NEW}
        parts = {name: leaf for name, leaf in parts.items() if leaf is not None}
        new |= {name: leaf.update(sharding=shardings[name]) for name, leaf in parts.items()}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in named_leaves(model).values()):
        return replaced(target, new)
    if config.init == "pissa":
        layout, shaped = model.execution.layout, low_rank_weights(replaced(target, new))
        return replaced(target, {path: init_pissa(layout, shaped[path], config.rank_of(path)) for path in nodes})
    inner = axes(target)

    def draw(key):
        keys = dict(zip(new, jax.random.split(key, len(new)), strict=True))
        return {name: _draw(keys[name], inner[name], leaf) for name, leaf in new.items()}

    return replaced(target, jax.jit(draw, out_shardings=out_shardings(new))(as_key(key)))


def merge_lora(model: Decoder) -> Decoder:
    """Add every pair to its weight, in f32 and then in the weight's dtype; other weights do not change.

    A weight in few bits becomes a plain one in the dtype of its pair.
    """
    nodes = low_rank_weights(model)
    if model.saved_modules:
        model = dataclasses.replace(model, saved_modules=())  # ordinary weights of the merged model
    plain = _merged_shapes(model, nodes)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nodes)):
        return replaced(model, plain)
    like = out_shardings(plain)
    merged = model.execution.layout.automatically(
        lambda nodes: {path: node.array() for path, node in nodes.items()}, lambda _: partitions(plain)
    )
    return replaced(model, jax.jit(merged, out_shardings=like)(nodes)) if nodes else model


def without_lora(model: Decoder) -> Decoder:
    """Return the model before any pair was trained, of the same arrays: nothing is merged or copied.

    A pair that began at zero is left out. One that was taken out of its weight (PiSSA) is put back as it was, as a pair
    beside what remained of the weight: bit by bit the model at the start, and the original weights to rounding, which
    `merge_lora` makes of it.
    """
    return replaced(model, {path: node.first() for path, node in low_rank_weights(model).items()})


def _merged_shapes(model: Decoder, nodes: Mapping[str, LowRank]) -> dict[str, Any]:
    """Return an array or shape like each merged weight: a plain one stays where it is."""
    plain = {path: node.base for path, node in nodes.items() if not isinstance(node.base, eqx.Module)}
    shapes = {path: jax.ShapeDtypeStruct(nodes[path].shape, nodes[path].dtype) for path in nodes.keys() - plain.keys()}
    shardings = named_leaves(model.execution.layout.shardings(replaced(model, shapes))) if shapes else {}
    return plain | {path: shape.update(sharding=shardings[path]) for path, shape in shapes.items()}


def _targets(config: LoRAConfig, words: Mapping[str, Axes]) -> list[str]:
    """Return the paths of the weights that get a pair."""
    paths = []
    for pattern in config.targets:
        matched = matching(words, (pattern,), "LoRAConfig.targets")
        matrices = [path for path in words if path in matched and product_axes(words[path]) is not None]
        matrices = [path for path in matrices if "rank" not in words[path]]  # pairs that a layer has already
        check(
            bool(matrices),
            f"LoRAConfig.targets={pattern!r} matches {min(matched)}, which is no matrix of a block: tables, heads, "
            "norms and biases have no pairs. Write another pattern.",
        )
        paths += [path for path in matrices if path not in paths]
    for name in ("rank_pattern", "alpha_pattern"):
        matching(paths, [pattern for pattern, _ in getattr(config, name)], f"LoRAConfig.{name}")
    return paths


def _parts(config: LoRAConfig, path: str, words: Axes, leaf: Any, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of what stands beside a weight."""
    stack, rank = words[: words.count("layers")], config.rank_of(path)
    sizes = dict(zip(words, leaf.shape, strict=True)) | {"rank": rank}
    parts = pair_axes(words[len(stack) :])
    if config.dora:
        parts["lora_magnitude"] = tuple(word for word in parts["lora_b"] if word != "rank")
    if config.init == "pissa":
        check_split(path, words, leaf, rank)
        parts |= {"start_a": parts["lora_a"], "start_b": parts["lora_b"]}
    shapes = {name: tuple(sizes[word] for word in (*stack, *part)) for name, part in parts.items()}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _draw(key: PRNGKeyArray, words: Axes, leaf: jax.ShapeDtypeStruct) -> Array:
    """Draw a first factor, `... rank`; a second one, `rank ...`, and magnitudes are zero."""
    if words[-1] != "rank":
        return jnp.zeros(leaf.shape, leaf.dtype)
    others = ("layers", "experts", "rank")
    fan = math.prod(size for word, size in zip(words, leaf.shape, strict=True) if word not in others)
    return jax.random.uniform(key, leaf.shape, jnp.float32, -(fan**-0.5), fan**-0.5).astype(leaf.dtype)
