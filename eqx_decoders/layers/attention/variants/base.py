"""What layers have in common that are an attention with something changed."""

from typing import Any

from eqx_decoders.errors import check
from eqx_decoders.layers.cache.kv_cache import KVShape
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope


class AttentionVariant:
    """What a configuration takes over from its field `attention`; it has its own fields and `build`."""

    attention: Any  # which each declares as a field of its own

    @property
    def mask(self) -> Mask:
        """Mask of the attention."""
        return self.attention.mask

    @property
    def rope(self) -> Rope | None:
        """Rotary embedding of the attention."""
        return self.attention.rope

    def cache_shape(self, max_length: int) -> KVShape | dict[str, KVShape] | None:
        """Return the shape of the attention's cache."""
        return self.attention.cache_shape(max_length)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the attention."""
        return self.attention.token_products(length)

    def refuse(self, *fields: str, rule: str) -> None:
        """Raise ConfigError if the attention has any of these options, which cannot stand here."""
        for field in fields:
            value = getattr(self.attention, field)
            check(not value, f"{type(self).__name__}.attention has {field}={value!r}: {rule}. Leave it out.")
