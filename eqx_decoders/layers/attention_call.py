"""What is static about one call of attention: by it a kernel says what it cannot do, and "auto" chooses."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from eqx_decoders.layers.mask import Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of `attend`, without its arrays.

    **Arguments:**

    - `mask`, `platform`, `aligned`, `gapless`, `local`, `needs_lse`: as `attend` has them.
    - `batch`, `length`, `kv_length`, `head_dim`, `value_dim`: sizes.
    - `dtypes`: of queries, keys and values.
    - `soft_cap`, `segments`, `spans`: whether there are any.
    - `selected_heads`: for how many heads keys are selected; 0: all keys count.
    """

    mask: Mask
    platform: str
    batch: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int
    dtypes: tuple[Any, ...]
    soft_cap: bool = False
    segments: bool = False
    spans: bool = False
    selected_heads: int = 0
    aligned: bool = False
    gapless: bool = False
    local: bool = True
    needs_lse: bool = True

    @property
    def asks(self) -> frozenset[str]:
        """What not every kernel can do, by the names of `Kernel`'s fields."""
        asked = {
            "soft_cap": self.soft_cap,
            "segments": self.segments,
            "spans": self.spans,
            "selection": self.selected_heads > 0,
            "unequal_value_dim": self.head_dim != self.value_dim,
            "float16": jnp.dtype(jnp.float16) in map(jnp.dtype, self.dtypes),
            "lse": self.needs_lse,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)
