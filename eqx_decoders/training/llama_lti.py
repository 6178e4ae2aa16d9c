"""Learning to initialize a Llama (MaxText's LLAMA2LTI): its attention kernels are learned maps of a frozen teacher's.

A part of the library without a command: a program of one's own makes the configuration and the model.

```python
config = llama_lti(student, teacher_heads=32, teacher_kv_heads=8, teacher_head_dim=128)
model = with_teacher(ed.init(config, key=key), teacher)
...  # train: the maps and all else move, the teacher's kernels do not
llama = materialize(model)  # a plain Llama
```
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from eqx_decoders.blocks.block import Block, BlockConfig
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.blocks.stack import ScannedLayers
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.attention.learned_init import LearnedInit, LearnedInitConfig, projection_weights
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics.low_rank import low_rank_weights
from eqx_decoders.sharding.axes import axes, path_name
from eqx_decoders.sharding.layout import Layout


_SIZES = {"num_heads": "teacher_heads", "num_kv_heads": "teacher_kv_heads", "head_dim": "teacher_head_dim"}


def llama_lti(
    config: DecoderConfig, *, teacher_heads: int, teacher_kv_heads: int, teacher_head_dim: int, general: bool = False
) -> DecoderConfig:
    """Configure a Llama with attention kernels computed from those of a teacher of the same `embed_dim`.

    **Arguments:**

    - `config`: the student; each of its blocks has attention with separate projections, else ConfigError.
    - `teacher_heads`, `teacher_kv_heads`, `teacher_head_dim`: sizes of the teacher's attention.
    - `general`: whether one map acts on heads and features together.
    """
    teacher = dict(teacher_heads=teacher_heads, teacher_kv_heads=teacher_kv_heads, teacher_head_dim=teacher_head_dim)

    def learned(block: BlockConfig) -> BlockConfig:
        if not isinstance(block.mixer, AttentionConfig):
            raise ConfigError(f"llama_lti: mixer={block.mixer!r} must be an AttentionConfig in every block.")
        mixer = LearnedInitConfig(attention=block.mixer, **teacher, general=general)
        return dataclasses.replace(block, mixer=mixer)

    return dataclasses.replace(config, blocks=tuple(map(learned, config.blocks)))


def with_teacher(model: Decoder, teacher: Decoder) -> Decoder:
    """Copy the attention kernels of `teacher` into the model, on its devices and in its dtype.

    The teacher is a Llama with the same `embed_dim` and layers, and heads as the model's configuration says; else
    ConfigError. Weights outside the attention are not copied.
    """
    one, other = model.config, teacher.config
    check(
        any(isinstance(block.mixer, LearnedInitConfig) for block in one.blocks),
        "with_teacher: no mixer of the model is a LearnedInitConfig. Make its configuration with llama_lti.",
    )
    check(
        one.embed_dim == other.embed_dim,
        f"with_teacher: the teacher's embed_dim={other.embed_dim} must be the model's, {one.embed_dim}.",
    )
    check(
        _cut(one) == _cut(other),
        f"with_teacher: the teacher's runs of equal layers, (blocks, repeats)={_cut(other)}, must be the model's, "
        f"{_cut(one)}. Choose a teacher with as many layers, alike where the model's are alike.",
    )
    return dataclasses.replace(model, scanned_layers=_map_blocks(_with_teacher_kernels, model, teacher)).place(
        model.execution.layout
    )


def materialize(model: Decoder) -> Decoder:
    """Make a plain Llama with the kernels that `model` computes: equal logits up to rounding, on the same layout.

    Weights outside the attention are shared, not copied. Where blocks with and without a teacher would become equal
    neighbors, and so one stack of weights, ConfigError.
    """
    config = dataclasses.replace(model.config, blocks=tuple(map(_plain, model.config.blocks)))
    check(
        _cut(config) == _cut(model.config),
        "materialize: some blocks differ in their teachers alone, and their weights are not stacked together. "
        "Give all blocks of one shape the same LearnedInitConfig, as llama_lti does.",
    )
    layout = model.execution.layout

    def computed(block: Block) -> Block:
        if not isinstance(block.mixer, LearnedInit):
            return block
        return dataclasses.replace(block, mixer=_computed(block.mixer, layout), config=_plain(block.config))

    return dataclasses.replace(model, config=config, scanned_layers=_map_blocks(computed, model)).place(layout)


def _map_blocks(function: Callable[..., Block], *models: Decoder) -> tuple[ScannedLayers, ...]:
    """Apply `function` to each stacked block, or to those at the same position in several models."""
    return tuple(
        ScannedLayers(unit=tuple(map(function, *(layers.unit for layers in same))), repeats=same[0].repeats)
        for same in zip(*(model.scanned_layers for model in models), strict=True)
    )


def _cut(config: DecoderConfig) -> tuple[tuple[int, int], ...]:
    return tuple((len(unit), repeats) for unit, repeats in find_repeats(config.blocks))


def _plain(block: BlockConfig) -> BlockConfig:
    if not isinstance(block.mixer, LearnedInitConfig):
        return block
    return dataclasses.replace(block, mixer=block.mixer.attention)


@eqx.filter_jit
def _computed(mixer: LearnedInit, layout: Layout) -> Attention:
    """Compute stacked plain attention, whose kernels have the dtype of the maps."""
    dtype = jax.tree.leaves(mixer.maps)[0].dtype

    def specs(attention: Attention) -> Attention:
        words = axes(attention)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: PartitionSpec(None, *layout.weight_spec(words[path_name(path)])), attention
        )

    compute = layout.automatically(eqx.filter_vmap(lambda layer: layer.materialized(layout)), specs)
    attention = compute(mixer)
    return eqx.tree_at(
        projection_weights, attention, tuple(kernel.astype(dtype) for kernel in projection_weights(attention))
    )


def _with_teacher_kernels(block: Block, source: Block) -> Block:
    """Copy the teacher's kernels into a stacked block; one without a teacher stays as it is."""
    mixer, teacher = block.mixer, source.mixer
    if not isinstance(mixer, LearnedInit):
        return block
    check(not low_rank_weights(source), "with_teacher: the teacher has low-rank pairs. Call merge_lora on it first.")
    if not isinstance(teacher, Attention) or teacher.query is None or teacher.key is None or teacher.value is None:
        raise ConfigError(
            f"with_teacher: the teacher's mixer={source.config.mixer!r} must be an AttentionConfig with "
            "fused_qkv=False and shared_kv=False."
        )
    for field, teacher_field in _SIZES.items():
        has, needs = getattr(teacher.config, field), getattr(mixer.config, teacher_field)
        check(
            has == needs,
            f"with_teacher: the teacher's {field}={has} must be LearnedInitConfig.{teacher_field}={needs}.",
        )

    # copies: a training step gives the student's buffers away, and the teacher may be needed again
    pairs = zip(projection_weights(teacher), projection_weights(mixer.teacher), strict=True)
    copies = tuple(jnp.array(new, old.dtype, copy=True) for new, old in pairs)
    return dataclasses.replace(block, mixer=eqx.tree_at(lambda m: projection_weights(m.teacher), mixer, copies))
