"""Attention kernels: one signature, a registry, and the plainest of them.

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
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int

from eqx_decoders.errors import ConfigError, check, check_number, check_word
from eqx_decoders.layers import cudnn_attention, splash_attention
from eqx_decoders.layers.attention_call import Call
from eqx_decoders.layers.blockwise import blockwise, blockwise_max
from eqx_decoders.layers.interval_kernel import interval_attention
from eqx_decoders.layers.mask import AttentionPositions, Mask, Spans, check_segments, visible
from eqx_decoders.layers.scores import EMPTY, Result, cap_scores


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention, and what it can do.

    `function(query, key, value, places, *, mask, selected, soft_cap, aligned, gapless, platform) -> (out, lse)` with
    `attend`'s meaning; `places` are the positions, segments and spans. `refusal` says what else it cannot do.
    """

    name: str
    function: Callable[..., Result]
    masks: tuple[type, ...] = get_args(Mask)
    soft_cap: bool = True
    segments: bool = True
    spans: bool = True
    selection: bool = True
    unequal_value_dim: bool = True
    float16: bool = True
    lse: bool = True
    refusal: Callable[[Call], str | None] = lambda call: None
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")

    def lacks(self, call: Call) -> str | None:
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
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
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
    gapless: bool = False,
    needs_lse: bool = True,
    local: bool = False,
    kernel: str = "auto",
    platform: str = "cpu",
) -> tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]:
    """Softmax attention of scaled queries: (out in the query's dtype, log-sum-exp of the scores in f32).

    Query head h uses key head h // (heads // kv_heads). Positions below 0 are no tokens; a query that sees nothing has
    out = 0 and lse = EMPTY. The tokens of one of `query_spans` see each other whatever the mask. Of what a query sees
    only the keys that are `selected` count, for all heads alike or for each. `aligned` is the caller's promise that
    queries and keys are the same tokens in the same order, with positions that increase strictly within a segment;
    `gapless` promises, beside that, that each row is one document at positions 0, 1, 2, …, without padding. Without
    `needs_lse` nothing reads lse, which may then be NaN. `local` says that the arrays are one device's own: inside
    `shard_map`, or without a mesh. `kernel` is a name in KERNELS or "auto": see `choose`. Raises ConfigError where the
    kernel cannot do it.
    """
    places = AttentionPositions(query_positions, key_positions, query_segments, key_segments, query_spans)
    _check(query, key, places, selected, soft_cap, aligned)
    check(aligned or not gapless, "gapless=True needs aligned=True: it is about queries that are the keys.")
    call = Call(
        mask=mask,
        platform=platform,
        batch=query.shape[0],
        length=query.shape[1],
        kv_length=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        dtypes=(query.dtype, key.dtype, value.dtype),
        soft_cap=soft_cap is not None,
        segments=query_segments is not None,
        spans=query_spans is not None,
        selected_heads=0 if selected is None else selected.shape[1],
        aligned=aligned,
        gapless=gapless,
        local=local,
        needs_lse=needs_lse,
    )
    chosen = choose(call) if kernel == "auto" else kernel
    check_word("kernel", chosen, (*KERNELS, "auto"))
    lacking = KERNELS[chosen].lacks(call)
    if lacking is not None:
        able = ", ".join(name for name, other in KERNELS.items() if other.lacks(call) is None)
        raise ConfigError(f"kernel={chosen!r} cannot do {lacking} (mask={mask}). These can: {able}.")
    options = dict(mask=mask, selected=selected, soft_cap=soft_cap, aligned=aligned, gapless=gapless, platform=platform)
    return KERNELS[chosen].function(query, key, value, places, **options)


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
    _check(query, key, places, selected, soft_cap, aligned)
    options: dict[str, Any] = dict(selected=selected, soft_cap=soft_cap, aligned=aligned, platform=platform)
    return blockwise_max(*jax.lax.stop_gradient((query, key)), places, mask=mask, **options)


def _check(
    query: Array,
    key: Array,
    places: AttentionPositions,
    selected: Array | None,
    soft_cap: float | None,
    aligned: bool,
) -> None:
    heads, kv_heads = query.shape[2], key.shape[2]
    check(heads % kv_heads == 0, f"heads={heads} must be a multiple of kv_heads={kv_heads}.")
    same = not aligned or query.shape[1] == key.shape[1]
    check(same, f"aligned=True needs as many queries as keys, not {query.shape[1]} and {key.shape[1]}: leave it out.")
    check_segments(places.query_segments, places.key_segments)
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, above=0.0)
    if selected is not None:
        count = selected.shape[1]
        check(count in (1, heads), f"selected has {count} heads: give one for all heads, or each of heads={heads}.")


FUSED = {"tpu": "interval", "gpu": "cudnn"}  # by platform: what "auto" takes before "chunked"


def choose(call: Call) -> str:
    """The kernel that "auto" takes: one that can do all of this call.

    Blocks pay once the scores of a head are too many to keep. A platform's own kernel needs arrays of one device: XLA
    cannot split it.
    """
    if min(call.length, call.kv_length) < (32 if call.platform == "cpu" else 512):
        return "dot"
    fused = FUSED.get(call.platform)
    return fused if fused is not None and call.local and KERNELS[fused].lacks(call) is None else "chunked"


# --- dot: the plain one ---


def _dot(
    query: Array,
    key: Array,
    value: Array,
    places: AttentionPositions,
    *,
    mask: Mask,
    selected: Array | None,
    soft_cap: float | None,
    aligned: bool,
    gapless: bool,
    platform: str,
) -> Result:
    """All scores at once: the definition, and the fastest for a few queries. Memory grows with length x kv_length."""
    groups = query.shape[2] // key.shape[2]
    batch, length, heads, head_dim = query.shape
    seen = visible(mask, *places)[:, None, None]
    if selected is not None:
        split = (1, 1) if selected.shape[1] == 1 else (heads // groups, groups)
        seen &= selected.reshape(batch, *split, *selected.shape[2:])
    split = query.reshape(batch, length, heads // groups, groups, head_dim)
    scores = jnp.einsum("btngd,bsnd->bngts", split, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, cap_scores(scores, soft_cap), -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=EMPTY))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bngts,bsnv->btngv", (weights / safe).astype(value.dtype), value)
    lse = jnp.where(total > 0, top + jnp.log(safe), EMPTY)
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(batch, length, heads)
    out = out.reshape(batch, length, heads, -1).astype(query.dtype)
    return checkpoint_name(out, "context"), checkpoint_name(lse, "context")


KERNELS: dict[str, Kernel] = {
    "dot": Kernel(name="dot", function=_dot),
    "chunked": Kernel(name="chunked", function=blockwise),
    "interval": Kernel(
        name="interval", function=interval_attention, selection=False, float16=False, platforms=("tpu",)
    ),
    "splash": Kernel(
        name="splash",
        function=splash_attention.splash_attention,
        spans=False,
        selection=False,
        float16=False,
        lse=False,
        refusal=splash_attention.refusal,
        platforms=("tpu",),
    ),
    "cudnn": Kernel(
        name="cudnn",
        function=cudnn_attention.cudnn_attention,
        soft_cap=False,
        unequal_value_dim=False,
        lse=False,
        refusal=cudnn_attention.refusal,
        platforms=("gpu",),
    ),
}
