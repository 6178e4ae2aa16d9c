"""Checks of values that layers share with later layers: keys and values, selected keys, and outputs of experts."""

from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import ConfigError, check, check_option
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig


def check_shared_values(blocks: tuple[BlockConfig, ...]) -> None:
    """Raise ConfigError unless every shared value that a layer uses is computed by a compatible earlier layer."""
    properties_by_name: dict[str, tuple] = {}
    for index, block in enumerate(blocks):
        where = f"DecoderConfig.blocks[{index}]"
        shared_from = block.shared_from
        if shared_from is not None:
            field = "kv_shared_from" if isinstance(block.mixer, AttentionConfig) else "indexer.shared_from"
            name = check_option(f"{where}.mixer.{field}", shared_from, properties_by_name)
            properties = _sharing_properties(block)
            check(
                properties == properties_by_name[name],
                f"{where}.mixer.{field}={name!r}: this layer has {properties}, but the layer that shares the value has "
                f"{properties_by_name[name]}. Both layers must have the same sizes and mask.",
            )
        can_share_kv = (
            isinstance(block.mixer, AttentionConfig) and block.mixer.block_indexer is None and shared_from is None
        )
        if block.shares_kv_as is not None and not can_share_kv:
            raise ConfigError(
                f"{where}.shares_kv_as={block.shares_kv_as!r} needs an AttentionConfig as mixer that computes its own "
                "keys and values and has no block_indexer."
            )
        properties_by_name |= dict.fromkeys(block.shared_names, _sharing_properties(block))
    _check_shortcuts(blocks)


def _check_shortcuts(blocks: tuple[BlockConfig, ...]) -> None:
    """Raise ConfigError unless the output of experts with a shortcut is added to the stream exactly once."""
    pending: dict[str, str] = {}  # shortcuts that no block has added yet, and the blocks of their experts
    for index, block in enumerate(blocks):
        where = f"DecoderConfig.blocks[{index}]"
        if block.shortcut_from is not None:
            pending.pop(check_option(f"{where}.shortcut_from", block.shortcut_from, pending))
        shortcut = None if block.mlp is None else block.mlp.shares_as
        if shortcut is not None:
            check(
                shortcut not in pending,
                f"{where}.mlp.shortcut={shortcut!r} is also the shortcut of {pending.get(shortcut)}, whose output no "
                "block has added yet. Use another name, or set shortcut_from in a block between them.",
            )
            pending[shortcut] = where
    for shortcut, where in pending.items():
        raise ConfigError(
            f"{where}.mlp.shortcut={shortcut!r} needs a later block with shortcut_from={shortcut!r}: "
            "otherwise the output of these experts is not used."
        )


def _sharing_properties(block: BlockConfig) -> tuple:
    """Return the properties that must be equal in layers that share a value."""
    mixer: Any = block.mixer
    if isinstance(mixer, AttentionConfig):
        return mixer.num_kv_heads, mixer.head_dim, mixer.value_dim, mixer.mask
    indexer = mixer.indexer if isinstance(mixer, LatentAttentionConfig) else None
    return () if indexer is None else (indexer.without_sharing, mixer.mask)
