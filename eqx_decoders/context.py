"""Execution options and inputs of a forward pass, and the `ForwardContext` that every layer receives."""

import dataclasses
from typing import Any, Literal, NamedTuple, TypedDict

import equinox as eqx
from jaxtyping import Array, Bool, Int, Integer, Num

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.numerics.einsum import AbstractWeight, einsum
from eqx_decoders.numerics.low_precision import LowPrecision
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.remat import Remat, RematName, get_remat
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline_config import Pipeline


AttentionName = Literal["auto", "dot", "chunked", "interval", "splash", "cudnn", "triton"]
ExpertsName = Literal["auto", "dense", "dropless", "capacity"]
ExchangeName = Literal["auto", "gather", "all_to_all"]
LookupName = Literal["gather", "one_hot"]
ContextOrder = Literal["plain", "zigzag"]
ContextForm = Literal["gather", "all_to_all", "ring", "ring_all_to_all"]


class RunOptions(TypedDict, total=False):
    """Keyword arguments of functions: all fields of `Execution` except `layout` and `precision`."""

    remat: RematName | Remat | None
    attention: AttentionName
    experts: ExpertsName
    expert_exchange: ExchangeName
    scan: bool
    layer_stats: bool
    attention_maxima: bool
    layer_streams: bool
    expert_choices: bool
    lookup: LookupName
    head_bytes: int | None
    exchange_bytes: int
    context_order: ContextOrder
    context_form: ContextForm
    batch_split: int
    pipeline: Pipeline | None
    low_precision: LowPrecision | None


class PrecisionOptions(RunOptions, total=False):
    """Keyword arguments of functions: all fields of `Execution` except `layout`."""

    precision: Precision


class ExecutionOptions(PrecisionOptions, total=False):
    """Keyword arguments of functions: all fields of `Execution`, with `layout` and `precision`."""

    layout: Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig(CheckedFields):
    """Options of an `Execution` that are also command-line flags and fields of config files, with the same names.

    **Arguments:**

    - `attention`: attention kernel. `"dot"`: compute all scores at once. `"chunked"`: blockwise attention in plain JAX.
        `"interval"`: this library's Pallas kernel for TPU. `"splash"`: JAX's Pallas kernel for TPU, which supports
        fewer options. `"cudnn"`: fused kernels for NVIDIA GPUs, for 16-bit activations without soft caps, sinks or
        cached keys. `"triton"`: this library's Pallas kernel for NVIDIA GPUs. `"auto"`: select by platform and shapes:
        `dot` for short sequences, otherwise `interval` on TPU, `cudnn` or `triton` on GPU if they support the call, and
        `chunked` in all other cases.
    - `experts`: algorithm for mixture-of-experts layers. `"dense"`: compute all experts for all tokens. `"dropless"`:
        sort tokens by expert and use grouped matrix products. `"capacity"`: drop tokens beyond
        `ExpertsConfig.capacity_factor`. `"auto"`: `capacity` if the layer has a capacity factor, otherwise `dropless`;
        on TPU, a single product over all experts for at most 128 tokens and weights that are plain or quantized arrays.
        `dense` and `dropless` ignore the capacity factor.
    - `expert_exchange`: communication of dropless experts under expert parallelism. `"gather"`: all-gather the tokens
        over the devices that split the experts, and reduce-scatter the results. `"all_to_all"`: send each token to the
        devices of its experts and send the results back; on TPU with a ragged all-to-all, on other platforms with
        buffers for the worst case. `"auto"`: `all_to_all` on TPU if the number of these devices is at least twice the
        number of experts per token, because it then sends fewer bytes; otherwise `gather`. If the mesh does not split
        the tokens over these devices (because the batch is not divisible), no tokens are sent and the results are
        summed.
    - `scan`: run equal layers in one `lax.scan`. False: unroll the layers.
    - `layer_stats`: add statistics of each layer's activations to `Output.stats`.
    - `lookup`: embedding lookup. `"gather"`: index the table. `"one_hot"`: multiply one-hot vectors with the table. The
        product suits tables that are split over the vocabulary: each device multiplies its table rows and the results
        are summed, so that the table is not gathered. It costs as many operations as the output head.
    - `head_bytes`: maximum bytes per device of a mesh for the gathered weights of the output head and their gradient in
        the fused loss. If they need more, the vocabulary is processed in parts; the all-gather of the next part
        overlaps with the products of the current part. That costs four matrix products of the head's size instead of
        three, and almost a second all-gather. None: a tenth of the device's memory, or 2 GB if the memory size is
        unknown.
    - `exchange_bytes`: maximum bytes per device of a mesh for the tokens of its experts. If they need more, they are
        exchanged in several rounds.
    - `context_order`: order of tokens in sequences that context parallelism splits, in losses. `"plain"`: the original
        order. `"zigzag"`: each device has a chunk from the start and a chunk from the end of the sequence. With causal
        attention, the last device takes almost twice the average time in plain order; zigzag order balances the work.
        It requires layers that depend only on positions: no recurrence, convolution, n-grams, selected key blocks or
        expert capacities.
    - `context_form`: communication of attention under context parallelism. `"gather"`: all-gather the keys and values.
        `"all_to_all"`: exchange tokens for heads, so that each device has all tokens of fewer heads, and exchange the
        results back (DeepSpeed-Ulysses). It sends fewer bytes than `gather` if fewer than three query heads share a KV
        head, and balances causal attention; if the number of devices does not divide the KV heads, `gather` is used.
        `"ring"`: ring attention. Keys and values pass from device to device, overlapped with attention to the previous
        ones; no device stores a full sequence, and with a sliding window only nearby devices communicate.
        `"ring_all_to_all"`: adjacent devices exchange heads, in device groups whose size divides the KV heads, and keys
        and values pass in a ring over these device groups.
    - `batch_split`: number of parts of a batch that run staggered, without a cache, so that the communication of one
        part overlaps with the computation of another (`blocks/batch_overlap.py`). Weights are gathered once for all
        parts. The sequences per device, also in each microbatch of a pipeline, must be a multiple of this number. Each
        part has separate dropout and expert capacities.
    """

    attention: AttentionName = "auto"
    experts: ExpertsName = "auto"
    expert_exchange: ExchangeName = "auto"
    scan: bool = True
    layer_stats: bool = False
    lookup: LookupName = "gather"
    head_bytes: PositiveInt | None = None
    exchange_bytes: PositiveInt = 10**9
    context_order: ContextOrder = "plain"
    context_form: ContextForm = "gather"
    batch_split: PositiveInt = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution(ExecutionConfig):
    """Options that determine how a model runs, not what it computes: devices, dtypes and those of `ExecutionConfig`.

    Results differ by rounding errors only (with `low_precision`, of 8-bit values). Exception: `experts` determines
    whether expert capacities apply.

    **Arguments:**

    - `layout`: mesh, and the sharding of weights and activations.
    - `precision`: dtypes of weights and activations.
    - `remat`: name of a policy, a `Remat`, or None (like `"none"`).
    - `attention_maxima`: add the maximum attention score of each MLA head to `Output.stats`, for QK-clip. This computes
        the scores a second time.
    - `layer_streams`: add the residual stream after each layer (its hidden states) to `Output.stats`.
    - `expert_choices`: add the indices of each token's experts to `Output.stats`.
    - `pipeline`: schedule of pipeline parallelism over the mesh axis `stage`, for calls without a cache; outside of the
        pipeline, `stage` splits the batch: the constructor adds it to the batch axes of `layout`, where it remains if
        `pipeline` is replaced by None (encoders rely on it). None: `stage` splits the weights of layers, and each
        device gathers them. Each microbatch has separate dropout.
    - `low_precision`: weights that are multiplied in 8 bits, and their format. None: no 8-bit products.
    """

    layout: Layout = dataclasses.field(default_factory=Layout)
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: RematName | Remat | None = None
    attention_maxima: bool = False
    layer_streams: bool = False
    expert_choices: bool = False
    pipeline: Pipeline | None = None
    low_precision: LowPrecision | None = None

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "remat", get_remat(self.remat))
        offloaded = self.layout.offload.weights
        check(
            self.pipeline is None or not offloaded,
            f"Offload.weights={offloaded} cannot be combined with Execution.pipeline, because the devices of a stage "
            "store the weights of its layers. Leave one of them out.",
        )
        if self.pipeline is not None:
            object.__setattr__(self, "layout", self.layout.with_batch_over_stage())


class Inputs(eqx.Module):
    """Inputs of a forward pass besides tokens and positions; None or missing: no such input.

    **Arguments:**

    - `spans`: id of the span (such as an image) of each token; the tokens of a span attend to one another in both
        directions. 0: not in a span.
    - `rotary_positions`: multi-dimensional positions for rotary embeddings (such as M-RoPE).
    - `by_layer`: inputs of individual layers, by name: arrays `[layers, batch, length, ...]` with an entry for each
        layer that has this input, in order of the layers.
    """

    spans: Integer[AnyArray, "batch length"] | None = None
    rotary_positions: Num[AnyArray, "batch length dimensions"] | None = None
    by_layer: dict[str, Any] = eqx.field(default_factory=dict)


class Promises(NamedTuple):
    """Guarantees of the caller that save computation; see the fields of `ForwardContext` with the same names."""

    cache_is_empty: bool = False
    accept_all: bool = False
    documents_are_contiguous: bool = False


class ForwardContext(eqx.Module):
    """Positions, documents and execution options of a forward pass. Every layer receives it.

    **Arguments:**

    - `positions`: position of each token in its document; -1 for padding. Positions increase within a document.
    - `segment_ids`: document of each token, for packed sequences. None: each sequence is one document.
    - `execution`: execution options.
    - `cache_is_empty`: guarantees that all caches are empty, so that layers do not read them.
    - `accept_all`: guarantees that no token will be rejected, so that a recurrent layer may return its final state
        instead of the updates of each token.
    - `dense_positions`: guarantees that each sequence is one document with positions 0, 1, 2, …, without padding.
    - `documents_are_contiguous`: guarantees that adjacent tokens of a document have adjacent positions, without padding
        between them. Ring attention with a sliding window then needs only the devices that the window reaches, and key
        blocks are numbered within each document.
    - `tokens`: token ids; None if the model was called with embeddings.
    - `span_ends`: last position of each token's span as `layers.mask.Spans`; -1 for tokens outside of spans. None: no
        spans.
    - `rotary_positions`: multi-dimensional positions for rotary embeddings. None: use `positions`.
    - `masked_keys`: True for tokens that no token attends to; they attend to other tokens. None: no such tokens. Only
        `Attention` supports it.
    - `layer_inputs`: inputs of this layer only, by name.
    - `shared`: values that earlier layers share, by name; see `BlockConfig.shared_values`.
    """

    positions: Int[Array, "batch length"]
    segment_ids: Int[Array, "batch length"] | None = None
    execution: Execution = eqx.field(static=True, default=Execution())
    cache_is_empty: bool = eqx.field(static=True, default=False)
    accept_all: bool = eqx.field(static=True, default=False)
    dense_positions: bool = eqx.field(static=True, default=False)
    documents_are_contiguous: bool = eqx.field(static=True, default=False)
    tokens: Int[Array, "batch length"] | None = None
    span_ends: Any = None
    rotary_positions: Num[Array, "batch length dimensions"] | None = None
    masked_keys: Bool[Array, "batch length"] | None = None
    layer_inputs: dict[str, Any] = eqx.field(default_factory=dict)
    shared: dict[str, Any] = eqx.field(default_factory=dict)

    def constrain(self, x: Array, axis_names: str) -> Array:
        """Constrain the sharding of an activation: `ctx.constrain(x, "batch length embed")`. See `Layout.constrain`."""
        return self.execution.layout.constrain(x, axis_names)

    def einsum(self, pattern: str, x: Array, weight: Array | AbstractWeight, **options: Any) -> Array:
        """Call `numerics.einsum` with the layout of the model."""
        return einsum(pattern, x, weight, layout=self.execution.layout, **options)
