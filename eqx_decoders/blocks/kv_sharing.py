"""Checks of layers that use the keys and values of earlier ones."""

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import ConfigError, check, check_word
from eqx_decoders.layers.attention.attention import AttentionConfig


def check_kv_sharing(blocks: tuple[BlockConfig, ...]) -> None:
    """Raise ConfigError for layers that share keys and values with no earlier layer of the same sizes and mask."""
    known: dict[str, tuple] = {}
    for index, block in enumerate(blocks):
        mixer, where = block.mixer, f"DecoderConfig.blocks[{index}].mixer.kv_shared_from"
        if isinstance(mixer, AttentionConfig) and mixer.kv_shared_from is not None:
            check_word(where, mixer.kv_shared_from, known)
            rule = "has another num_kv_heads, head_dim or mask than the layer that publishes it"
            check(
                _lent(mixer) == known[mixer.kv_shared_from], f"{where}={mixer.kv_shared_from!r} {rule}: {_lent(mixer)}."
            )
        if block.shares_kv_as is not None:
            if not isinstance(mixer, AttentionConfig) or mixer.kv_shared_from is not None:
                where = f"DecoderConfig.blocks[{index}].shares_kv_as={block.shares_kv_as!r}"
                raise ConfigError(f"{where} needs attention with keys and values of its own as mixer.")
            known[block.shares_kv_as] = _lent(mixer)


def _lent(mixer: AttentionConfig) -> tuple:
    """Return the properties that both layers must have in common."""
    return mixer.num_kv_heads, mixer.head_dim, mixer.mask
