"""Arguments of one attention call: arrays, static options, and the description from which a kernel is selected."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.kernels.common import Scales
from eqx_decoders.layers.attention.kernels.selection import Selected, Selection
from eqx_decoders.layers.mask import AttentionPositions, Mask
from eqx_decoders.sharding.backend import Backend, backend_of
from eqx_decoders.sharding.chips import compute_capability


class AttentionInputs(NamedTuple):
    """Arrays of one attention call.

    **Arguments:**

    - `query`, `key`, `value`: query head h uses key head h // (heads // kv_heads). Queries are already scaled.
    - `positions`: positions, segments and spans of queries and keys.
    - `selected`: which of the keys that the mask allows are attended to, per head or for all heads; None: all keys.
    - `scales`: scales of quantized keys and values; None: keys and values are not quantized.
    - `slopes`: ALiBi slope of each head of `query`. None: `with_slopes` computes them from `AttentionOptions.alibi`, if
        there is ALiBi. A device that has only some heads of the layer must pass them.
    """

    query: Float[Array, "batch length heads head_dim"]
    key: Num[Array, "batch kv_length kv_heads head_dim"]
    value: Num[Array, "batch kv_length kv_heads value_dim"]
    positions: AttentionPositions
    selected: Selected | None = None
    scales: Scales | None = None
    slopes: Float32[Array, "heads"] | None = None

    def with_slopes(self, options: "AttentionOptions") -> "AttentionInputs":
        """Return these inputs with the ALiBi slopes of all heads, if ALiBi is used and `slopes` is None."""
        if options.alibi is None or self.slopes is not None:
            return self
        return self._replace(slopes=options.alibi.slopes(self.query.shape[2]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Static options of one attention call.

    **Arguments:**

    - `mask`: which keys a query may see.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`; None: no soft cap.
    - `alibi`: ALiBi biases, which are added to scores before the soft cap; None: no biases.
    - `aligned`: the caller guarantees that queries and keys are the same tokens in the same order, with positions that
        increase strictly within a segment.
    - `dense_positions`: the caller also guarantees that each sequence is one document at positions 0, 1, 2, …, without
        padding.
    - `needs_lse`: whether the caller reads the log-sum-exp; otherwise it may be NaN.
    - `local`: whether the arrays are local to one device: inside `shard_map`, or without a mesh.
    - `platform`: platform of the devices; `attend` defaults to JAX's default devices.
    - `compute_capability`: compute capability of NVIDIA GPUs; None for other devices.
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
        """Backend settings of the platform."""
        return backend_of(self.platform)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall(AttentionOptions):
    """Static description of one attention call: options, and the shapes and dtypes of its arrays.

    **Arguments:**

    - `batch`, `length`, `kv_length`, `head_dim`, `value_dim`: sizes.
    - `dtypes`: dtypes of queries, keys and values.
    - `segments`, `spans`: whether the call has segments or spans.
    - `selected_heads`: number of heads for which keys are selected separately: 1 or all heads; 0: no selection.
    - `group_words`: number of uint32 words with one bit per key group, for each query; 0: no selection of key groups.
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
        bits, key_groups = selected if isinstance(selected, Selection) else (selected, None)
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
            group_words=bits.shape[3] if bits is not None and key_groups is not None else 0,
        )

    @property
    def needs(self) -> frozenset[str]:
        """Optional features that this call needs, as names of fields of `registry.Kernel`."""
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
    """Split the keyword arguments of `attend`, except `kernel`, into arrays and static options.

    Without `platform`, the options describe JAX's first default device. Raises TypeError
    for missing or unknown keywords.
    """
    positions = {name: keywords.pop(name) for name in AttentionPositions._fields if name in keywords}
    selected, scales = (keywords.pop(name, None) for name in ("selected", "scales"))
    if "platform" not in keywords:
        device = jax.devices()[0]
        keywords |= dict(platform=device.platform, compute_capability=compute_capability(device))
    inputs = AttentionInputs(query, key, value, AttentionPositions(**positions), selected, scales)
    return inputs, AttentionOptions(**keywords)
