"""Base class for the configurations of attention variants, which wrap an `AttentionConfig`."""

from typing import Any

from eqx_decoders.errors import check
from eqx_decoders.layers.cache.kv_cache import KVShape
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope


class AttentionVariant:
    """Mixin that delegates to the field `attention` of a configuration. A subclass defines its fields and `build`."""

    attention: Any  # subclasses declare it as a dataclass field

    @property
    def mask(self) -> Mask:
        """Mask of the attention."""
        return self.attention.mask

    @property
    def rope(self) -> Rope | None:
        """Rotary embedding of the attention."""
        return self.attention.rope

    @property
    def depends_on_token_order(self) -> bool:
        return self.attention.depends_on_token_order

    def cache_shape(self, max_length: int) -> KVShape | dict[str, KVShape] | None:
        """Return the shape of the attention's cache."""
        return self.attention.cache_shape(max_length)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the attention."""
        return self.attention.token_products(length)

    def check_unsupported(self, *fields: str, reason: str) -> None:
        """Raise ConfigError if any of these fields of `attention` is set; `reason` becomes part of the message."""
        for field in fields:
            value = getattr(self.attention, field)
            check(
                not value,
                f"{type(self).__name__}.attention has {field}={value!r}, which is not supported: {reason}. "
                f"Leave {field} out.",
            )
