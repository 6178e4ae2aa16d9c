"""Options and inputs of one forward pass: its execution, and the positions of its tokens."""

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
    """Fields of `Execution` other than devices and dtypes, as keywords of functions."""

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
    """Fields of `Execution` but its layout."""

    precision: Precision


class ExecutionOptions(PrecisionOptions, total=False):
    """All fields of `Execution`."""

    layout: Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig(CheckedFields):
    """Options of an `Execution` that need no devices: flags and files of settings have them, too.

    **Arguments:**

    - `attention`: name of the attention kernel: `"dot"`, all scores at once; `"chunked"`, block by block; for TPU
        `"interval"`, a Pallas kernel of this library, or `"splash"`, JAX's, which supports less; for NVIDIA's GPUs
        `"cudnn"`, fused kernels for 16-bit numbers, without soft caps, sinks and a past, or `"triton"`, a Pallas kernel
        of this library; or `"auto"`, by platform and shapes: `dot` for a few tokens, else `interval` on TPU, on GPU
        `cudnn` where it is exact and `triton` where that can do it, and `chunked` everywhere else.
    - `experts`: algorithm of experts: `"dense"`, all on all tokens; `"dropless"`, sorted by expert; `"capacity"`, which
        drops tokens beyond `ExpertsConfig.capacity_factor`; `"auto"`, capacity where there is such a factor, else
        dropless. The first two ignore the factor.
    - `expert_exchange`: communication of dropless experts that a mesh splits: `"gather"`, each device gathers the
        tokens of all devices among which the experts are split, and results are reduced and scattered; `"all_to_all"`,
        tokens are sent to the devices that have their experts, and back: on TPU ragged, elsewhere in pieces with room
        for the worst case; `"auto"`, the latter on TPU if these devices are at least twice as many as a token has
        experts, since it then moves less, else the former. Tokens that are not split among these devices (a batch that
        they do not divide) are not sent, and results are added.
    - `scan`: one `lax.scan` over equal layers; False runs them one by one.
    - `layer_stats`: whether `Output.stats` describes each layer's activations.
    - `lookup`: lookup of embeddings: `"gather"`, or `"one_hot"`, a product of the table with one-hot rows.
        The product suits tables that are split over the vocabulary: each device multiplies its own rows and the results
        are added, no table is gathered. It costs as many operations as the head.
    - `head_bytes`: bytes that a device of a mesh may use for the head's gathered kernel and its gradient in the fused
        loss. If both need more, the vocabulary is processed in parts, each gathered beside the products of the one
        before it. That costs four products of the size of the head instead of three, and nearly another gather. None: a
        tenth of the device's memory, 2 GB where that is not known.
    - `exchange_bytes`: bytes that a device of a mesh may use for the tokens of its experts. If they need more, they are
        sent in several rounds.
    - `context_order`: order of the tokens of rows that a mesh splits, in losses: `"plain"`, or `"zigzag"`, where each
        device has a piece from the front and one from the end. Causal attention takes the last device nearly twice the
        average in the first order; it is balanced in the second, which needs layers that depend on positions alone: no
        recurrence, convolution, n-grams, selected blocks or capacities.
    - `context_form`: communication among devices that split a row: `"gather"`, each has the keys and values of all
        tokens; `"all_to_all"`, queries, keys and values of all tokens, but of fewer heads, whose results are sent back.
        That moves less if fewer than three query heads share a head of keys, and causal work is balanced; if these
        devices do not divide the heads of keys, it is `"gather"`. `"ring"`, keys and values of one other device at a
        time, sent while those before are attended to: no device ever has a whole row, and with a window only close
        devices send. `"ring_all_to_all"`, both: adjacent devices, as many as divide the heads of keys, exchange heads,
        and keys and values rotate among these groups.
    - `batch_split`: number of parts of a batch that are run staggered, without a cache, so that communication of one
        overlaps with computation of another (`blocks/batch_overlap.py`). Weights are gathered once for all parts. Each
        device needs a multiple of so many rows, also of each microbatch of a pipeline. Each part has its own dropout
        and capacities.
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
    """Options that choose how a model runs, not what it computes: devices, dtypes, and those of `ExecutionConfig`.

    Results differ by no more than rounding, with `low_precision` that to 8 bits; but `experts` decides whether there is
    a capacity.

    **Arguments:**

    - `layout`: where weights and activations live.
    - `precision`: dtypes of weights and activations.
    - `remat`: a policy's name, a `Remat`, or None (= `"none"`).
    - `attention_maxima`: whether `Output.stats` has the largest attention score of each head of latent attention, which
        QK-clip needs. They cost the products of the scores once more.
    - `layer_streams`: whether `Output.stats` has the residual stream behind each layer: its hidden states.
    - `expert_choices`: whether `Output.stats` has the experts that each token was sent to.
    - `pipeline`: pipeline of layers over the mesh axis `stage`, without a cache; before and after it `stage` splits the
        batch. None: `stage` splits the weights of layers, and each device gathers them all. Each microbatch has its own
        dropout.
    - `low_precision`: weights that are multiplied in 8 bits, and their format; None for none.
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
        rule = "exclude each other: a pipeline's stages hold their weights"
        check(
            self.pipeline is None or not offloaded,
            f"Offload.weights={offloaded} and Execution.pipeline {rule}. Leave one out.",
        )
        if self.pipeline is not None:
            object.__setattr__(self, "layout", self.layout.with_batch_over_stage())


class Inputs(eqx.Module):
    """Inputs of layers besides the residual stream; None or absent: no such input.

    **Arguments:**

    - `spans`: number of each token's span (an image, say), all of whose tokens see each other; 0 for none.
    - `rotary_positions`: positions of several dimensions, for rotary embeddings that have them.
    - `by_layer`: inputs of single layers, by name: an array for each of the layers that take it, in their order.
    """

    spans: Integer[AnyArray, "batch length"] | None = None
    rotary_positions: Num[AnyArray, "batch length dimensions"] | None = None
    by_layer: dict[str, Any] = eqx.field(default_factory=dict)


class Promises(NamedTuple):
    """Guarantees of the caller that save computation: the fields of `ForwardContext` with the same names."""

    cache_is_empty: bool = False
    accept_all: bool = False
    contiguous: bool = False


class ForwardContext(eqx.Module):
    """Positions, documents and execution of one forward pass; every layer receives it.

    **Arguments:**

    - `positions`: position of each token in its document; -1 where there is no token (padding). Within a document
        they increase along the row.
    - `segment_ids`: document of each token in its row; None when each row is one document.
    - `execution`: options of the run.
    - `cache_is_empty`: caches are known to be empty, so that no past is read.
    - `accept_all`: none of the tokens will be rejected, so that a recurrent layer may propose its state.
    - `dense_positions`: each row is known to be one document at positions 0, 1, 2, …, without padding.
    - `contiguous`: each document is known to be contiguous: adjacent tokens at adjacent positions, without padding in
        between. Then rings with windows need not look back beyond them, and blocks of keys are numbered within each.
    - `tokens`: their ids; None where embeddings were given.
    - `spans`: last position of each token's span, -1 for none; None if there are none.
    - `rotary_positions`: positions of several dimensions; None if they are those of `positions`.
    - `unseen`: True for tokens that attend to others, and that none attends to; None if there are none.
    - `layer_inputs`: inputs of this layer alone, by name.
    - `shared`: what earlier layers share, by its name: see `BlockConfig.lent`.
    """

    positions: Int[Array, "batch length"]
    segment_ids: Int[Array, "batch length"] | None = None
    execution: Execution = eqx.field(static=True, default=Execution())
    cache_is_empty: bool = eqx.field(static=True, default=False)
    accept_all: bool = eqx.field(static=True, default=False)
    dense_positions: bool = eqx.field(static=True, default=False)
    contiguous: bool = eqx.field(static=True, default=False)
    tokens: Int[Array, "batch length"] | None = None
    spans: Any = None
    rotary_positions: Num[Array, "batch length dimensions"] | None = None
    unseen: Bool[Array, "batch length"] | None = None
    layer_inputs: dict[str, Any] = eqx.field(default_factory=dict)
    shared: dict[str, Any] = eqx.field(default_factory=dict)

    def constrain(self, x: Array, words: str) -> Array:
        """Tell XLA how an activation is split over the mesh (`layout.constrain`)."""
        return self.execution.layout.constrain(x, words)

    def einsum(self, pattern: str, x: Array, weight: Array | AbstractWeight, **options: Any) -> Array:
        """Call `numerics.einsum` in the form that suits the layout's devices.

        Flattened products are faster on one CPU; elsewhere XLA lays products out itself, and flattening dimensions that
        are split over different mesh axes would cost communication.
        """
        layout = self.execution.layout
        return einsum(pattern, x, weight, layout=layout, flatten=layout.backend.flat_products, **options)
