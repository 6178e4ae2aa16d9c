"""What is static about one call of attention: kernels read it, say by it what they cannot do, and "auto" chooses."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from eqx_decoders.layers.mask import AttentionPositions, Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of `attend`, without its arrays.

    **Arguments:**

    - `mask`, `soft_cap`, `platform`, `aligned`, `dense_positions`, `local`, `needs_lse`: as `attend` has them.
    - `batch`, `length`, `kv_length`, `head_dim`, `value_dim`: sizes.
    - `dtypes`: of queries, keys and values.
    - `segments`, `spans`: whether there are any.
    - `selected_heads`: for how many heads keys are selected; 0: all keys count.
    """

    mask: Mask
    platform: str = "cpu"
    batch: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int
    dtypes: tuple[Any, ...]
    soft_cap: float | None = None
    segments: bool = False
    spans: bool = False
    selected_heads: int = 0
    aligned: bool = False
    dense_positions: bool = False
    local: bool = False
    needs_lse: bool = True

    @classmethod
    def of(
        cls, query: Array, key: Array, value: Array, places: AttentionPositions, selected: Array | None, **given: Any
    ) -> "AttentionCall":
        """That of these arrays; `given` are the facts that they do not tell."""
        return cls(
            batch=query.shape[0],
            length=query.shape[1],
            kv_length=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            dtypes=(query.dtype, key.dtype, value.dtype),
            segments=places.query_segments is not None,
            spans=places.query_spans is not None,
            selected_heads=0 if selected is None else selected.shape[1],
            **given,
        )

    @property
    def asks(self) -> frozenset[str]:
        """What not every kernel can do, by the names of `Kernel`'s fields."""
        asked = {
            "soft_cap": self.soft_cap is not None,
            "segments": self.segments,
            "spans": self.spans,
            "selection": self.selected_heads > 0,
            "unequal_value_dim": self.head_dim != self.value_dim,
            "float16": jnp.dtype(jnp.float16) in map(jnp.dtype, self.dtypes),
            "lse": self.needs_lse,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)
