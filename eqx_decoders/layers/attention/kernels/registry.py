"""Registry of attention kernels, which have one signature.

For each query with scaled scores s_j = q . k_j over the keys that it sees,

    out = sum_j exp(s_j - lse) v_j,    lse = log sum_j exp(s_j).

Both come back, so that partial results over different keys (a cache and the present call) can be merged, and sinks
added, outside. Scores, soft cap and softmax are in f32. A query that sees nothing has out = 0 and lse = EMPTY.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num

from eqx_decoders.errors import ConfigError, check, check_number, check_word
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.kernels import cudnn, pallas_flash_gpu, pallas_flash_tpu, splash
from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs, AttentionOptions, group_arguments
from eqx_decoders.layers.attention.kernels.chunked import blockwise, blockwise_gradients, blockwise_max
from eqx_decoders.layers.attention.kernels.common import EMPTY as EMPTY, Cotangents, Gradients, Result, Scales
from eqx_decoders.layers.attention.kernels.dot import dot, dot_gradients
from eqx_decoders.layers.attention.kernels.pallas_flash import flash_attention, flash_gradients
from eqx_decoders.layers.attention.kernels.selection import Selected
from eqx_decoders.layers.cache.format import decode
from eqx_decoders.layers.mask import Mask, Spans, check_segments


# --- results over different keys ---


def merge(parts: Sequence[Result]) -> Result:
    """Join results of the same queries over disjoint keys: out = sum_i out_i exp(lse_i - lse), lse = logsumexp_i lse_i.

    Flash decoding's rule (Dao et al., 2023). Parts in which a query sees nothing count for nothing; f32 inside.
    """
    check(len(parts) > 0, "parts=[] must hold at least one (out, lse).")
    logs = jnp.stack([lse for _, lse in parts])
    weights = jax.nn.softmax(logs, axis=0)[..., None]
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts])
    return (weights * outs).sum(0).astype(parts[0][0].dtype), jax.nn.logsumexp(logs, axis=0)


def with_sink(
    out: Float[Array, "batch length heads value_dim"],
    lse: Float32[Array, "batch length heads"],
    sink: Float[Array, "heads"],
) -> Float[Array, "batch length heads value_dim"]:
    """Add a learned logit per head that takes part in the softmax and has no value: out * sigmoid(lse - sink)."""
    share = jax.nn.sigmoid(lse - sink.astype(jnp.float32)[None, None, :])
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


# --- the registry ---


def no_gradients(*args: Any) -> Gradients:
    """Raise ConfigError, as the gradients of kernels without lse."""
    raise ConfigError("This kernel has no gradients under a log-sum-exp that is given.")


def no_refusal(call: AttentionCall) -> None:
    """Refuse no call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention, and its abilities.

    `function(inputs, call) -> (out, lse)` does what `attend` says; `gradients(inputs, call, make_cotangents)` does what
    `attend_gradients` says, and kernels without lse have none. `refusal` says what else a kernel cannot do. A kernel
    with `scales` takes stored keys and values; for others these are multiplied by their scales first.
    """

    name: str
    function: Callable[..., Result]
    gradients: Callable[..., Gradients] = no_gradients
    masks: tuple[type, ...] = get_args(Mask)
    soft_cap: bool = True
    alibi: bool = False
    segments: bool = True
    spans: bool = True
    selection: bool = True
    unequal_value_dim: bool = True
    float16: bool = True
    lse: bool = True
    scales: bool = False
    refusal: Callable[[AttentionCall], str | None] = no_refusal
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")

    @property
    def scope(self) -> str:
        """Name of its operations in programs and profiles."""
        return f"{self.name}_attention"

    def lacks(self, call: AttentionCall) -> str | None:
        """Return the first thing in a call that this kernel cannot do, in words, or None."""
        if not isinstance(call.mask, self.masks):
            return f"the mask {call.mask}"
        lacking = next(
            (words for field, words in _ABILITIES.items() if field in call.needs and not getattr(self, field)), None
        )
        if lacking is None and call.platform not in self.platforms:
            lacking = f"the platform {call.platform!r}"
        return lacking or self.refusal(call)


_ABILITIES = {
    "soft_cap": "a soft cap",
    "alibi": "linear biases",
    "segments": "segments",
    "spans": "spans",
    "selection": "a selection of keys",
    "unequal_value_dim": "value_dim unlike head_dim",
    "float16": "float16",
    "lse": "a log-sum-exp that is merged or has a gradient",
}


class AttendKeywords(TypedDict, total=False):
    """Optional keywords of `attend`, with the meaning that `AttentionInputs` and `AttentionOptions` give them."""

    query_segments: Int[Array, "batch length"] | None
    key_segments: Int[Array, "batch kv_length"] | None
    query_spans: Spans | None
    selected: Selected | None
    scales: Scales | None
    soft_cap: float | None
    alibi: Alibi | None
    aligned: bool
    dense_positions: bool
    needs_lse: bool
    local: bool
    platform: str
    compute_capability: tuple[int, int] | None


def attend(
    query: Float[Array, "batch length heads head_dim"],
    key: Num[Array, "batch kv_length kv_heads head_dim"],
    value: Num[Array, "batch kv_length kv_heads value_dim"],
    *,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    kernel: str = "auto",
    **keywords: Unpack[AttendKeywords],
) -> tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]:
    """Compute softmax attention of scaled queries: (out in the query's dtype, log-sum-exp of the scores in f32).

    Positions below 0 are no tokens; a query that sees nothing has out = 0 and lse = EMPTY. The tokens of one of
    `query_spans` also see the later tokens of their span. `kernel` is a name in KERNELS or "auto": see `choose`.
    Raises ConfigError where the kernel cannot do it.
    """
    positions = dict(query_positions=query_positions, key_positions=key_positions)
    inputs, options = group_arguments(query, key, value, mask=mask, **positions, **keywords)
    return run_kernel(inputs, options, kernel)


def run_kernel(inputs: AttentionInputs, options: AttentionOptions, kernel: str = "auto") -> Result:
    """Compute what `attend` defines, from grouped arguments."""
    check(
        options.aligned or not options.dense_positions,
        "dense_positions=True needs aligned=True: it is about queries that are the keys.",
    )
    call, inputs = _describe_call(inputs, options), inputs.with_slopes(options)
    chosen = _find(kernel, call)
    with jax.named_scope(chosen.scope):
        if inputs.scales is None or chosen.scales:
            return chosen.function(inputs, call)
        key, value = (
            decode(x, scale, inputs.query.dtype)
            for x, scale in zip((inputs.key, inputs.value), inputs.scales, strict=True)
        )
        return chosen.function(inputs._replace(key=key, value=value, scales=None), call)


def attend_gradients(
    inputs: AttentionInputs, options: AttentionOptions, cotangents: Cotangents, kernel: str = "auto"
) -> Gradients:
    """Compute gradients of queries, keys and values, in f32, where these keys are a part of all visible ones.

    With `cotangents` of the results over all keys, the gradients of queries are the sum over all parts. Kernels that
    can't give lse can't do this.
    """
    call = _describe_call(inputs, options)
    return _find(kernel, call).gradients(inputs.with_slopes(options), call, cotangents)


def max_scores(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    *,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    **keywords: Unpack[AttendKeywords],
) -> Float32[Array, "batch heads"]:
    """Return the largest score of each row and head among all that `attend` would use; EMPTY where it would use none.

    It has no gradient, and runs block by block: no more than a tile of scores exists at a time.
    """
    positions = dict(query_positions=query_positions, key_positions=key_positions)
    return run_max_scores(*group_arguments(query, key, key, mask=mask, **positions, **keywords))


def run_max_scores(inputs: AttentionInputs, options: AttentionOptions) -> Float32[Array, "batch heads"]:
    """Compute what `max_scores` defines, from grouped arguments; values are ignored."""
    call = _describe_call(inputs, options)
    query, key = jax.lax.stop_gradient((inputs.query, inputs.key))
    return blockwise_max(inputs.with_slopes(options)._replace(query=query, key=key), call)


def _describe_call(inputs: AttentionInputs, options: AttentionOptions) -> AttentionCall:
    """Describe a call; raise ConfigError for arrays and options that do not fit one another."""
    call, heads, kv_heads = AttentionCall.of(inputs, options), inputs.query.shape[2], inputs.key.shape[2]
    check(heads % kv_heads == 0, f"heads={heads} must be a multiple of kv_heads={kv_heads}.")
    lengths = f"{call.length} and {call.kv_length}"
    same = not call.aligned or call.length == call.kv_length
    check(same, f"aligned=True needs as many queries as keys, not {lengths}: leave it out.")
    check_segments(inputs.positions.query_segments, inputs.positions.key_segments)
    if call.soft_cap is not None:
        check_number("soft_cap", call.soft_cap, above=0.0)
    if inputs.selected is not None:
        count = call.selected_heads
        check(count in (1, heads), f"selected has {count} heads: give one for all heads, or each of heads={heads}.")
    return call


def _find(kernel: str, call: AttentionCall) -> Kernel:
    """Return the kernel of this name, or the one that suits ("auto"); raise ConfigError if it cannot do the call."""
    chosen = choose(call) if kernel == "auto" else kernel
    check_word("kernel", chosen, (*KERNELS, "auto"))
    lacking = KERNELS[chosen].lacks(call)
    if lacking is not None:
        able = ", ".join(name for name, other in KERNELS.items() if other.lacks(call) is None)
        raise ConfigError(f"kernel={chosen!r} cannot do {lacking} (mask={call.mask}). These can: {able}.")
    return KERNELS[chosen]


def choose(call: AttentionCall) -> str:
    """Choose the kernel for "auto": one that can do all of this call.

    Blocks pay once the scores of a head are too many to hold. A platform's own kernels need arrays of one device: XLA
    cannot split them. The first that can do the call is taken.
    """
    if min(call.length, call.kv_length) < call.backend.short_attention:
        return "dot"
    fused = call.backend.attention_kernels if call.local else ()
    return next((name for name in fused if KERNELS[name].lacks(call) is None), "chunked")


KERNELS: dict[str, Kernel] = {
    "dot": Kernel(name="dot", function=dot, gradients=dot_gradients, alibi=True, scales=True),
    "chunked": Kernel(name="chunked", function=blockwise, gradients=blockwise_gradients, alibi=True),
    "interval": Kernel(
        name="interval",
        function=functools.partial(flash_attention, pallas_flash_tpu.TPU),
        gradients=functools.partial(flash_gradients, pallas_flash_tpu.TPU),
        refusal=pallas_flash_tpu.refusal,
        float16=False,
        platforms=("tpu",),
    ),
    "triton": Kernel(
        name="triton",
        function=functools.partial(flash_attention, pallas_flash_gpu.GPU),
        gradients=functools.partial(flash_gradients, pallas_flash_gpu.GPU),
        selection=False,
        refusal=pallas_flash_gpu.refusal,
        platforms=("gpu",),
    ),
    "splash": Kernel(
        name="splash",
        function=splash.splash_attention,
        spans=False,
        selection=False,
        float16=False,
        lse=False,
        refusal=splash.refusal,
        platforms=("tpu",),
    ),
    "cudnn": Kernel(
        name="cudnn",
        function=cudnn.cudnn_attention,
        soft_cap=False,
        unequal_value_dim=False,
        lse=False,
        refusal=cudnn.refusal,
        platforms=("gpu",),
    ),
}
