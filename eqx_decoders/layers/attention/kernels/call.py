"""Arguments of one call of attention: arrays, static options, and the description by which kernels are chosen."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.kernels.common import Scales
from eqx_decoders.layers.attention.kernels.selection import Selected, Selection
from eqx_decoders.layers.mask import AttentionPositions, Mask
from eqx_decoders.sharding.backend import Backend, backend_of


class AttentionInputs(NamedTuple):
    """Arrays of one call of attention.

    **Arguments:**

    - `query`, `key`, `value`: query head h uses key head h // (heads // kv_heads); queries are scaled already.
    - `positions`: positions, segments and spans of queries and keys.
    - `selected`: of the keys that a query may see, those that count, for all heads alike or for each; None: all.
    - `scales`: multiply stored keys and values; None where these are as they are.
    - `slopes`: of the linear biases of these heads; None: there are no biases, or these are all heads.
    """

    query: Float[Array, "batch length heads head_dim"]
    key: Num[Array, "batch kv_length kv_heads head_dim"]
    value: Num[Array, "batch kv_length kv_heads value_dim"]
    positions: AttentionPositions
    selected: Selected | None = None
    scales: Scales | None = None
    slopes: Float32[Array, "heads"] | None = None

    def with_slopes(self, options: "AttentionOptions") -> "AttentionInputs":
        """Fill in the slopes of linear biases."""
        if options.alibi is None or self.slopes is not None:
            return self
        return self._replace(slopes=options.alibi.slopes(self.query.shape[2]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Static options of one call of attention.

    **Arguments:**

    - `mask`: which keys a query may see.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`; None for none.
    - `alibi`: linear biases, which are added to scores before the soft cap; None for none.
    - `aligned`: the caller's promise that queries and keys are the same tokens in the same order, with positions that
        increase strictly within a segment.
    - `dense_positions`: the promise, besides, that each row is one document at positions 0, 1, 2, …, without padding.
    - `needs_lse`: whether anything reads the log-sum-exp, which may otherwise be NaN.
    - `local`: whether the arrays are one device's own: inside `shard_map`, or without a mesh.
    - `platform`: of the devices that compute it.
    - `compute_capability`: of these, where they are NVIDIA's.
    """

    mask: Mask
    soft_cap: float | None = None
    alibi: Alibi | None = None
    aligned: bool = False
    dense_positions: bool = False
    needs_lse: bool = True
    local: bool = False
    platform: str = "cpu"
    compute_capability: tuple[int, int] | None = None

    @property
    def backend(self) -> Backend:
        """Choices that suit the platform."""
        return backend_of(self.platform)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall(AttentionOptions):
    """Static description of one call of attention: options, and the shapes and dtypes of its arrays.

    **Arguments:**

    - `batch`, `length`, `kv_length`, `head_dim`, `value_dim`: sizes.
    - `dtypes`: of queries, keys and values.
    - `segments`, `spans`: whether there are any.
    - `selected_heads`: number of heads for which keys are selected; 0: all keys count.
    - `group_words`: words of 32 bits in which a query's choice of groups of keys is given; 0: a mask of keys.
    """

    batch: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int
    dtypes: tuple[Any, ...]
    segments: bool = False
    spans: bool = False
    selected_heads: int = 0
    group_words: int = 0

    @classmethod
    def of(cls, inputs: AttentionInputs, options: AttentionOptions) -> "AttentionCall":
        """Describe a call with these arrays and options."""
        query, key, value, positions, selected, *_ = inputs
        bits, groups = selected if isinstance(selected, Selection) else (selected, None)
        return cls(
            **{field.name: getattr(options, field.name) for field in dataclasses.fields(options)},
            batch=query.shape[0],
            length=query.shape[1],
            kv_length=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            dtypes=(query.dtype, key.dtype, value.dtype),
            segments=positions.query_segments is not None,
            spans=positions.query_spans is not None,
            selected_heads=0 if bits is None else bits.shape[1],
            group_words=bits.shape[3] if bits is not None and groups is not None else 0,
        )

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that not every kernel has and that this call needs, by the names of `Kernel`'s fields."""
        needed = {
            "soft_cap": self.soft_cap is not None,
            "alibi": self.alibi is not None,
            "segments": self.segments,
            "spans": self.spans,
            "selection": self.selected_heads > 0,
            "unequal_value_dim": self.head_dim != self.value_dim,
            "float16": jnp.dtype(jnp.float16) in map(jnp.dtype, self.dtypes),
            "lse": self.needs_lse,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)


def group_arguments(
    query: Array, key: Array, value: Array, **keywords: Any
) -> tuple[AttentionInputs, AttentionOptions]:
    """Group the keyword arguments of `attend`, all but `kernel`, into arrays and static options.

    Raises TypeError for a keyword that is missing or unknown.
    """
    positions = {name: keywords.pop(name) for name in AttentionPositions._fields if name in keywords}
    selected, scales = (keywords.pop(name, None) for name in ("selected", "scales"))
    inputs = AttentionInputs(query, key, value, AttentionPositions(**positions), selected, scales)
    return inputs, AttentionOptions(**keywords)
