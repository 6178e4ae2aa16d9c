"""Checks of layers that use what earlier ones share: keys and values, the choice of an indexer, outputs of experts."""

from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import ConfigError, check, check_word
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig


def check_sharing(blocks: tuple[BlockConfig, ...]) -> None:
    """Raise ConfigError for layers that use what no earlier layer of the same kind, sizes and mask shares."""
    known: dict[str, tuple] = {}
    for index, block in enumerate(blocks):
        where, borrowed = f"DecoderConfig.blocks[{index}]", block.shared_name
        if borrowed is not None:
            field = "kv_shared_from" if isinstance(block.mixer, AttentionConfig) else "indexer.shared_from"
            name = check_word(f"{where}.mixer.{field}", borrowed, known)
            rule = f"has {_common(block)}, the layer that shares it {known[name]}: they must be alike"
            check(_common(block) == known[name], f"{where}.mixer.{field}={name!r} {rule}.")
        lends = isinstance(block.mixer, AttentionConfig) and block.mixer.block_indexer is None and borrowed is None
        if block.shares_kv_as is not None and not lends:
            rule = "needs attention with keys and values of its own as mixer, and without an indexer"
            raise ConfigError(f"{where}.shares_kv_as={block.shares_kv_as!r} {rule}.")
        known |= dict.fromkeys(block.lent_names, _common(block))
    _check_shortcuts(blocks)


def _check_shortcuts(blocks: tuple[BlockConfig, ...]) -> None:
    """Raise ConfigError unless what experts send to a later block is added to the stream once."""
    sent: dict[str, str] = {}
    for index, block in enumerate(blocks):
        where, name, taken = f"DecoderConfig.blocks[{index}]", getattr(block.mlp, "shortcut", None), block.shortcut_from
        if taken is not None:
            sent.pop(check_word(f"{where}.shortcut_from", taken, sent))
        if name is not None:
            check(name not in sent, f"{where}.mlp.shortcut={name!r}: no block adds that of {sent.get(name)} before.")
            sent[name] = where
    rule = "no later block has it as shortcut_from: what these experts return would be lost"
    check(not sent, f"{''.join(list(sent.values())[:1])}.mlp.shortcut={''.join(list(sent)[:1])!r}: {rule}.")


def _common(block: BlockConfig) -> tuple:
    """Return the properties that layers must have in common to share what they compute."""
    mixer: Any = block.mixer
    if isinstance(mixer, AttentionConfig):
        return mixer.num_kv_heads, mixer.head_dim, mixer.value_dim, mixer.mask
    indexer = mixer.indexer if isinstance(mixer, LatentAttentionConfig) else None
    return () if indexer is None else (indexer.alone, mixer.mask)
