"""What rides along one forward pass: how it is executed, and where its tokens stand."""

import dataclasses
from typing import Any, Literal, TypedDict, get_args

import equinox as eqx
from jaxtyping import Array, Int, Integer, Num

from eqx_decoders.errors import check, check_integer, check_word
from eqx_decoders.numerics.int8_matmul import LowPrecision, Rounded
from eqx_decoders.numerics.matmul import ClippedWeight, LowRank, Precision, einsum
from eqx_decoders.numerics.quantized_weight import QuantizedWeight
from eqx_decoders.remat import Remat, RematName, get_remat
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import Pipeline


AttentionName = Literal["auto", "dot", "chunked", "interval", "splash", "cudnn"]
ExpertsName = Literal["auto", "dense", "dropless", "capacity"]
ExchangeName = Literal["auto", "gather", "all_to_all"]
LookupName = Literal["gather", "one_hot"]
ContextOrder = Literal["plain", "zigzag"]
ContextForm = Literal["gather", "all_to_all", "ring", "ring_all_to_all"]
_WORDS = {
    "attention": AttentionName,
    "experts": ExpertsName,
    "expert_exchange": ExchangeName,
    "lookup": LookupName,
    "context_order": ContextOrder,
    "context_form": ContextForm,
}


class RunOptions(TypedDict, total=False):
    """The fields of `Execution` that say nothing of devices and dtypes, as keywords of functions."""

    remat: RematName | Remat | None
    attention: AttentionName
    experts: ExpertsName
    expert_exchange: ExchangeName
    scan: bool
    layer_stats: bool
    attention_maxima: bool
    lookup: LookupName
    head_bytes: int
    exchange_bytes: int
    context_order: ContextOrder
    context_form: ContextForm
    batch_split: int
    pipeline: Pipeline | None
    low_precision: LowPrecision | None


class PrecisionOptions(RunOptions, total=False):
    """The fields of `Execution` but its layout."""

    precision: Precision


class ExecutionOptions(PrecisionOptions, total=False):
    """All fields of `Execution`."""

    layout: Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model runs, apart from what it computes: no choice here changes a value by more than rounding, which with
    `low_precision` is that to 8 bits, except that `experts` decides whether a capacity is kept.

    **Arguments:**

    - `layout`: where weights and activations live.
    - `precision`: dtypes of weights and activations.
    - `remat`: a policy's name, a `Remat`, or None (= `"none"`).
    - `attention`: an attention kernel's name: `"dot"`, all scores at once; `"chunked"`, block by block; for TPU
        `"interval"`, a Pallas kernel of our own, or `"splash"`, JAX's, which can do less; for NVIDIA's GPUs `"cudnn"`,
        fused kernels for 16-bit numbers, without soft caps, sinks and a past; or `"auto"`, the one that suits platform
        and shapes: `dot` for a few tokens, else `interval` on TPU, `cudnn` on GPU where it is exact, and `chunked`
        everywhere else.
    - `experts`: how experts are run: `"dense"`, all on all tokens; `"dropless"`, sorted by expert; `"capacity"`, which
        drops tokens beyond `ExpertsConfig.capacity_factor`; `"auto"`, capacity where there is such a factor, else
        dropless. The first two ignore the factor.
    - `expert_exchange`: how dropless experts that a mesh splits get their tokens: `"gather"`, each device gets those of
        all devices among which the experts are split, and results are added and scattered; `"all_to_all"`, rows travel
        to the devices that have their experts, and back: on TPU as many as there are, elsewhere in pieces with room for
        the worst case; `"auto"`, the latter on TPU if these devices are at least twice as many as a token has experts,
        since it then moves less, else the former. Tokens that are not split among these devices (a batch that they do
        not divide) stay where they are, and results are added.
    - `scan`: one `lax.scan` over equal layers; False runs them one by one.
    - `layer_stats`: whether `Output.stats` describes each layer's activations.
    - `attention_maxima`: whether `Output.stats` has the largest attention score of each head of latent attention, which
        QK-clip needs. They cost the products of the scores once more.
    - `lookup`: how tokens find their embeddings: `"gather"`, or `"one_hot"`, a product of the table with one-hot rows.
        The product suits tables that are split over the vocabulary: each device multiplies its own rows and the results
        are added, no table is gathered. It costs as many operations as the head.
    - `head_bytes`: what a device of a mesh may take for the head's kernel, gathered, and its gradient while the fused
        loss runs. Where both need more, the vocabulary is gone through in parts, which costs a fourth product of the
        size of the head beside three.
    - `exchange_bytes`: what a device of a mesh may take for the tokens that it gathers for its experts, or has room for
        if rows travel. Where these are more, a device's tokens go in several rounds, and experts see fewer at a time.
    - `context_order`: how losses order the tokens of rows that a mesh splits: `"plain"`, or `"zigzag"`, where each
        device has a piece from the front and one from the end. Of causal attention the last device has nearly twice the
        average to do in the first; all have the same in the second. That needs layers that go by positions alone: no
        recurrence, convolution, n-grams, selected blocks or capacities.
    - `context_form`: what devices get that a row is split over: `"gather"`, the keys and values of all its tokens;
        `"all_to_all"`, queries, keys and values of all its tokens, but of fewer heads, whose results travel back. That
        moves less where fewer than three query heads share a head of keys, and causal work is equal, too. Where these
        devices do not divide the heads of keys that each has, it is the former. `"ring"`, keys and values of one other
        device at a time, which are sent while others are attended to: no device ever has a whole row of them, and
        behind a window only the devices send that are that close. `"ring_all_to_all"`, both: devices side by side, as
        many as divide the heads of keys, exchange heads, and keys and values go round among such groups.
    - `batch_split`: into how many parts a batch is cut that pass each layer one behind the other, where there is no
        cache: what one sends to other devices travels while another is multiplied. Weights are gathered once for all
        parts. Each device needs a multiple of so many rows, or of each microbatch of a pipeline. Parts draw dropout
        each for themselves, and have capacities of their own.
    - `pipeline`: how layers run over the mesh axis `stage`, without a cache; what runs before and after then has the
        batch split over `stage`, too. None: `stage` splits the weights of layers, and each device gathers them all.
        Microbatches draw dropout each for themselves.
    - `low_precision`: which weights are multiplied in 8 bits, and how; None for none.
    """

    layout: Layout = dataclasses.field(default_factory=Layout)
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: RematName | Remat | None = None
    attention: AttentionName = "auto"
    experts: ExpertsName = "auto"
    expert_exchange: ExchangeName = "auto"
    scan: bool = True
    layer_stats: bool = False
    attention_maxima: bool = False
    lookup: LookupName = "gather"
    head_bytes: int = 2 * 10**9
    exchange_bytes: int = 10**9
    context_order: ContextOrder = "plain"
    context_form: ContextForm = "gather"
    batch_split: int = 1
    pipeline: Pipeline | None = None
    low_precision: LowPrecision | None = None

    def __post_init__(self):
        for field, known in _WORDS.items():
            check_word(f"Execution.{field}", getattr(self, field), get_args(known))
        for field in ("head_bytes", "exchange_bytes", "batch_split"):
            check_integer(f"Execution.{field}", getattr(self, field))
        object.__setattr__(self, "remat", get_remat(self.remat))
        kept = self.pipeline is None or not self.layout.offload.weights
        rule = "exclude each other: a pipeline's stages hold their weights"
        check(kept, f"Offload.weights={self.layout.offload.weights} and Execution.pipeline {rule}. Leave one out.")
        if self.pipeline is not None:
            object.__setattr__(self, "layout", self.layout.with_batch_over_stage())


class Inputs(eqx.Module):
    """What layers may read beside the residual stream; None or absent: nothing.

    **Arguments:**

    - `spans`: of each token the number of its span (an image, say), whose tokens see each other whole; 0 for none.
    - `rotary_positions`: positions of several dimensions, for rotary embeddings that have them.
    - `by_layer`: what single layers get, by name: an array for each of the layers that take it, in their order.
    """

    spans: Integer[AnyArray, "batch length"] | None = None
    rotary_positions: Num[AnyArray, "batch length dimensions"] | None = None
    by_layer: dict[str, Any] = eqx.field(default_factory=dict)


class Context(eqx.Module):
    """Positions, documents and execution of one forward pass; every layer receives it.

    **Arguments:**

    - `positions`: position of each token in its document; -1 where there is no token (padding). Within a document
        they increase along the row.
    - `segment_ids`: which tokens of a row belong together; None when each row is one document.
    - `execution`: how the pass is run.
    - `cache_is_empty`: whether caches are known to be empty, so that nothing of the past is read.
    - `keeps_all`: whether none of the tokens will be rejected, so that a recurrent layer may propose its state.
    - `dense_positions`: whether each row is known to be one document at positions 0, 1, 2, …, without padding.
    - `contiguous`: whether each document is known to stand in one piece: its tokens side by side, without padding in
        between, at positions one apart. Then rings behind windows need not look further back than windows reach, and
        selected blocks need none where a row has too few.
    - `tokens`: their ids; None where embeddings were given.
    - `spans`: of each token the last position of its span, -1 for none; None where there are none.
    - `rotary_positions`: positions of several dimensions; None where they are those of `positions`.
    - `layer_inputs`: what this layer alone gets, by name.
    - `shared`: what earlier layers remember and propose, by the name under which they publish it.
    """

    positions: Int[Array, "batch length"]
    segment_ids: Int[Array, "batch length"] | None = None
    execution: Execution = eqx.field(static=True, default=Execution())
    cache_is_empty: bool = eqx.field(static=True, default=False)
    keeps_all: bool = eqx.field(static=True, default=False)
    dense_positions: bool = eqx.field(static=True, default=False)
    contiguous: bool = eqx.field(static=True, default=False)
    tokens: Int[Array, "batch length"] | None = None
    spans: Any = None
    rotary_positions: Num[Array, "batch length dimensions"] | None = None
    layer_inputs: dict[str, Any] = eqx.field(default_factory=dict)
    shared: dict[str, Any] = eqx.field(default_factory=dict)

    def constrain(self, x: Array, words: str) -> Array:
        """`layout.constrain`: how an activation is split over the mesh."""
        return self.execution.layout.constrain(x, words)

    def einsum(
        self,
        pattern: str,
        x: Array,
        weight: Array | LowRank | ClippedWeight | Rounded | QuantizedWeight,
        **options: Any,
    ) -> Array:
        """`numerics.einsum` in the form that suits the layout's devices.

        Flattened products are faster on one CPU; elsewhere XLA lays products out itself, and flattening dimensions that
        are split over different mesh axes would cost communication.
        """
        layout = self.execution.layout
        return einsum(pattern, x, weight, layout=layout, flatten=layout.single and layout.platform == "cpu", **options)
