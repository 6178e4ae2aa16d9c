"""Attention kernels: one signature, and a registry.

For each query with scaled scores s_j = q . k_j over the keys that it sees,

    out = sum_j exp(s_j - lse) v_j,    lse = log sum_j exp(s_j).

Both come back, so that partial results over different keys (a cached past and the present) can be merged, and sinks
added, outside. Scores, soft cap and softmax are in f32. A query that sees nothing has out = 0 and lse = EMPTY.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from eqx_decoders.errors import ConfigError, check, check_number, check_word
from eqx_decoders.layers.attention.kernels import cudnn, splash
from eqx_decoders.layers.attention.kernels.call import AttentionCall
from eqx_decoders.layers.attention.kernels.chunked import blockwise, blockwise_gradients, blockwise_max
from eqx_decoders.layers.attention.kernels.common import EMPTY as EMPTY, Cotangents, Gradients, Result, Scales
from eqx_decoders.layers.attention.kernels.dot import dot, dot_gradients
from eqx_decoders.layers.attention.kernels.pallas_flash import interval_attention, interval_gradients
from eqx_decoders.layers.cache.format import decode
from eqx_decoders.layers.mask import AttentionPositions, Mask, Spans, check_segments


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
    """A learned logit per head that takes part in the softmax and has no value: out * sigmoid(lse - sink)."""
    share = jax.nn.sigmoid(lse - sink.astype(jnp.float32)[None, None, :])
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


# --- the registry ---


def no_gradients(*args: Any) -> Gradients:
    """Of kernels without lse."""
    raise ConfigError("This kernel has no gradients under a log-sum-exp that is given.")


def no_refusal(call: AttentionCall) -> None:
    """Of kernels that can do all that they say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention, and what it can do.

    `function(query, key, value, places, selected, call) -> (out, lse)` with `attend`'s meaning; `places` are the
    positions, segments and spans, `call` is all that is static. `gradients` is called alike, with `Cotangents` behind,
    and does what `attend_gradients` says; kernels without lse have none. `refusal` says what else a kernel cannot do.
    A kernel with `scales` takes `Scales` as the last argument; before others keys and values are multiplied by them.
    """

    name: str
    function: Callable[..., Result]
    gradients: Callable[..., Gradients] = no_gradients
    masks: tuple[type, ...] = get_args(Mask)
    soft_cap: bool = True
    segments: bool = True
    spans: bool = True
    selection: bool = True
    unequal_value_dim: bool = True
    float16: bool = True
    lse: bool = True
    scales: bool = False
    refusal: Callable[[AttentionCall], str | None] = no_refusal
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")

    def lacks(self, call: AttentionCall) -> str | None:
        """The first thing about a call that this kernel cannot do, in words, or None."""
        if not isinstance(call.mask, self.masks):
            return f"the mask {call.mask}"
        asks = call.asks
        lacking = next(
            (words for field, words in _ABILITIES.items() if field in asks and not getattr(self, field)), None
        )
        if lacking is None and call.platform not in self.platforms:
            lacking = f"the platform {call.platform!r}"
        return lacking or self.refusal(call)


_ABILITIES = {
    "soft_cap": "a soft cap",
    "segments": "segments",
    "spans": "spans",
    "selection": "a selection of keys",
    "unequal_value_dim": "value_dim unlike head_dim",
    "float16": "float16",
    "lse": "a log-sum-exp that is merged or has a gradient",
}


def attend(
    query: Float[Array, "batch length heads head_dim"],
    key: Num[Array, "batch kv_length kv_heads head_dim"],
    value: Num[Array, "batch kv_length kv_heads value_dim"],
    *,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    query_spans: Spans | None = None,
    selected: Bool[Array, "batch selected_heads length kv_length"] | None = None,
    soft_cap: float | None = None,
    aligned: bool = False,
    dense_positions: bool = False,
    needs_lse: bool = True,
    local: bool = False,
    kernel: str = "auto",
    platform: str = "cpu",
    scales: Scales | None = None,
) -> tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]:
    """Softmax attention of scaled queries: (out in the query's dtype, log-sum-exp of the scores in f32).

    Query head h uses key head h // (heads // kv_heads). Positions below 0 are no tokens; a query that sees nothing has
    out = 0 and lse = EMPTY. The tokens of one of `query_spans` also see the ones of their span after them. Of what a
    query sees only the keys that are `selected` count, for all heads alike or for each. `aligned` is the caller's
    promise that queries and keys are the same tokens in the same order, with positions that increase strictly within a
    segment; `dense_positions` promises, beside that, that each row is one document at positions 0, 1, 2, …, without
    padding. Without `needs_lse` nothing reads lse, which may then be NaN. `local` says that the arrays are one device's
    own: inside `shard_map`, or without a mesh. `kernel` is a name in KERNELS or "auto": see `choose`. `scales` multiply keys
    and values. Raises ConfigError where the kernel cannot do it.
    """
    places = AttentionPositions(query_positions, key_positions, query_segments, key_segments, query_spans)
    check(
        aligned or not dense_positions,
        "dense_positions=True needs aligned=True: it is about queries that are the keys.",
    )
    call = _checked_call(
        *(query, key, value, places, selected),
        mask=mask,
        soft_cap=soft_cap,
        aligned=aligned,
        dense_positions=dense_positions,
        needs_lse=needs_lse,
        local=local,
        platform=platform,
    )
    found = _find(kernel, call)
    if scales is None:
        return found.function(query, key, value, places, selected, call)
    if found.scales:
        return found.function(query, key, value, places, selected, call, scales)
    key, value = (decode(x, scale, query.dtype) for x, scale in zip((key, value), scales, strict=True))
    return found.function(query, key, value, places, selected, call)


def attend_gradients(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    known: Cotangents,
    places: AttentionPositions,
    selected: Bool[Array, "batch selected_heads length kv_length"] | None = None,
    *,
    kernel: str = "auto",
    **options: Any,
) -> Gradients:
    """Of queries, keys and values, in f32, where these keys are a part of those that queries see.

    With `known` of the results over all keys, the gradients of queries are the sum of those of all parts. Options are
    those of `attend`; kernels that can't give lse can't do this.
    """
    call = _checked_call(query, key, value, places, selected, **options)
    return _find(kernel, call).gradients(query, key, value, places, selected, call, known)


def max_scores(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    *,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    query_spans: Spans | None = None,
    selected: Bool[Array, "batch selected_heads length kv_length"] | None = None,
    soft_cap: float | None = None,
    aligned: bool = False,
    platform: str = "cpu",
) -> Float32[Array, "batch heads"]:
    """The largest score of each row and head among those that `attend` would use; EMPTY where it would use none.

    Without gradient, and block by block: no more than a tile of scores exists at a time.
    """
    places = AttentionPositions(query_positions, key_positions, query_segments, key_segments, query_spans)
    options: dict[str, Any] = dict(mask=mask, soft_cap=soft_cap, aligned=aligned, platform=platform)
    call = _checked_call(query, key, key, places, selected, **options)
    return blockwise_max(*jax.lax.stop_gradient((query, key)), places, selected, call)


def _checked_call(
    query: Array, key: Array, value: Array, places: AttentionPositions, selected: Array | None, **given: Any
) -> AttentionCall:
    """What is static about a call; raises ConfigError for arrays and options that do not fit one another."""
    call, heads, kv_heads = AttentionCall.of(query, key, value, places, selected, **given), query.shape[2], key.shape[2]
    check(heads % kv_heads == 0, f"heads={heads} must be a multiple of kv_heads={kv_heads}.")
    lengths = f"{call.length} and {call.kv_length}"
    same = not call.aligned or call.length == call.kv_length
    check(same, f"aligned=True needs as many queries as keys, not {lengths}: leave it out.")
    check_segments(places.query_segments, places.key_segments)
    if call.soft_cap is not None:
        check_number("soft_cap", call.soft_cap, above=0.0)
    if selected is not None:
        count = call.selected_heads
        check(count in (1, heads), f"selected has {count} heads: give one for all heads, or each of heads={heads}.")
    return call


def _find(kernel: str, call: AttentionCall) -> Kernel:
    """The kernel of this name, or for "auto" the one that suits; raises ConfigError where it cannot do it."""
    chosen = choose(call) if kernel == "auto" else kernel
    check_word("kernel", chosen, (*KERNELS, "auto"))
    lacking = KERNELS[chosen].lacks(call)
    if lacking is not None:
        able = ", ".join(name for name, other in KERNELS.items() if other.lacks(call) is None)
        raise ConfigError(f"kernel={chosen!r} cannot do {lacking} (mask={call.mask}). These can: {able}.")
    return KERNELS[chosen]


FUSED = {"tpu": "interval", "gpu": "cudnn"}  # by platform: what "auto" takes before "chunked"


def choose(call: AttentionCall) -> str:
    """The kernel that "auto" takes: one that can do all of this call.

    Blocks pay once the scores of a head are too many to keep. A platform's own kernel needs arrays of one device: XLA
    cannot split it.
    """
    if min(call.length, call.kv_length) < (32 if call.platform == "cpu" else 512):
        return "dot"
    fused = FUSED.get(call.platform)
    return fused if fused is not None and call.local and KERNELS[fused].lacks(call) is None else "chunked"


KERNELS: dict[str, Kernel] = {
    "dot": Kernel(name="dot", function=dot, gradients=dot_gradients, scales=True),
    "chunked": Kernel(name="chunked", function=blockwise, gradients=blockwise_gradients),
    "interval": Kernel(
        name="interval",
        function=interval_attention,
        gradients=interval_gradients,
        selection=False,
        float16=False,
        platforms=("tpu",),
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
