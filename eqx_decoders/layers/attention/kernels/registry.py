"""Registry of attention kernels, which share one signature.

For each query with scaled scores s_j = q . k_j over the keys that it sees, a kernel returns

    out = sum_j exp(s_j - lse) v_j,    lse = log sum_j exp(s_j).

With the log-sum-exp (lse), partial results over disjoint keys (a cache and the current tokens) can be merged, and
attention sinks can be added, outside the kernel. Scores, soft cap and softmax are computed in float32. A query that
sees no key has out = 0 and lse = EMPTY.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num

from eqx_decoders.errors import ConfigError, check, check_number, check_option
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.kernels import cudnn, pallas_flash_gpu, pallas_flash_tpu, splash
from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs, AttentionOptions, group_arguments
from eqx_decoders.layers.attention.kernels.chunked import blockwise, blockwise_gradients, blockwise_max
from eqx_decoders.layers.attention.kernels.common import EMPTY as EMPTY, Cotangents, Gradients, Result, Scales
from eqx_decoders.layers.attention.kernels.dot import dot, dot_gradients
from eqx_decoders.layers.attention.kernels.pallas_flash import flash_attention, flash_gradients
from eqx_decoders.layers.attention.kernels.quantized_kv import dequantize
from eqx_decoders.layers.attention.kernels.selection import Selected
from eqx_decoders.layers.mask import Mask, Spans, check_segments


# --- results over different keys ---


def merge(parts: Sequence[Result]) -> Result:
    """Merge results of the same queries over disjoint keys, as in flash decoding (Dao et al., 2023).

    out = sum_i out_i exp(lse_i - lse) and lse = logsumexp_i lse_i, computed in float32. A part in which a query sees no
    key has weight 0.
    """
    check(len(parts) > 0, "parts=[] must contain at least one pair (out, lse).")
    logs = jnp.stack([lse for _, lse in parts])
    weights = jax.nn.softmax(logs, axis=0)[..., None]
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts])
    return (weights * outs).sum(0).astype(parts[0][0].dtype), jax.nn.logsumexp(logs, axis=0)


def with_sink(
    out: Float[Array, "batch length heads value_dim"],
    lse: Float32[Array, "batch length heads"],
    sink: Float[Array, "heads"],
) -> Float[Array, "batch length heads value_dim"]:
    """Apply an attention sink, a learned logit per head in the softmax without a value: out * sigmoid(lse - sink)."""
    share = jax.nn.sigmoid(lse - sink.astype(jnp.float32)[None, None, :])
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


# --- the registry ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """An attention kernel, and the features that it supports.

    **Arguments:**

    - `name`: name for the option `attention`.
    - `function`: `(inputs, call) -> (out, lse)`, as defined by `attend`.
    - `gradients`: `(inputs, call, cotangents) -> gradients`, as defined by `attend_gradients`. None: the kernel cannot
        compute gradients from a given log-sum-exp.
    - `masks`: supported classes of masks.
    - `soft_cap`, `alibi`, `segments`, `spans`, `selection`, `unequal_value_dim`, `float16`, `lse`: whether the feature
        is supported.
    - `scales`: whether the kernel reads quantized keys and values; otherwise they are dequantized before the call.
    - `unsupported`: `(call) -> str | None`, names a further property of the call that is not supported. None: there
        are no further limits.
    - `platforms`: supported platforms.
    """

    name: str
    function: Callable[..., Result]
    gradients: Callable[..., Gradients] | None = None
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
    unsupported: Callable[[AttentionCall], str | None] | None = None
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")

    @property
    def scope(self) -> str:
        """Name scope of the kernel's operations in HLO and profiles."""
        return f"{self.name}_attention"

    def lacks(self, call: AttentionCall) -> str | None:
        """Return a noun phrase for the first property of a call that this kernel does not support, or None."""
        if not isinstance(call.mask, self.masks):
            return f"the mask {call.mask}"
        for field, feature in _FEATURES.items():
            if field in call.needs and not getattr(self, field):
                return feature
        if call.platform not in self.platforms:
            return f"the platform {call.platform!r}"
        return None if self.unsupported is None else self.unsupported(call)


_FEATURES = {
    "soft_cap": "a soft cap",
    "alibi": "ALiBi biases",
    "segments": "segments",
    "spans": "spans",
    "selection": "a selection of keys",
    "unequal_value_dim": "a value_dim that differs from head_dim",
    "float16": "float16",
    "lse": "a log-sum-exp that is merged or differentiated",
}


class AttendKeywords(TypedDict, total=False):
    """Optional keywords of `attend`; see `AttentionInputs` and `AttentionOptions`."""

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
    """Compute softmax attention; return (out in the query's dtype, log-sum-exp of the scores in float32).

    Queries are already scaled. Negative positions are padding. A query that sees no key has out = 0 and lse = EMPTY.
    With `query_spans`, tokens also see later tokens of their span. `kernel` is a name in KERNELS, or "auto", see
    `select_kernel`. Raises ConfigError if the kernel does not support the call.

    This function is for direct calls. Layers call `run_attention`, which calls `run_kernel` on the mesh of the model.
    """
    positions = dict(query_positions=query_positions, key_positions=key_positions)
    inputs, options = group_arguments(query, key, value, mask=mask, **positions, **keywords)
    return run_kernel(inputs, options, kernel)


def run_kernel(inputs: AttentionInputs, options: AttentionOptions, kernel: str = "auto") -> Result:
    """Compute attention as `attend` does, for arrays and static options in two separate arguments."""
    check(
        options.aligned or not options.dense_positions,
        "dense_positions=True needs aligned=True: it describes calls whose queries and keys are the same tokens.",
    )
    call = _describe_call(inputs, options)
    inputs = inputs.with_slopes(options)
    implementation = _find(kernel, call)
    with jax.named_scope(implementation.scope):
        if inputs.scales is None or implementation.scales:
            return implementation.function(inputs, call)
        key, value = (
            dequantize(x, scale, inputs.query.dtype)
            for x, scale in zip((inputs.key, inputs.value), inputs.scales, strict=True)
        )
        return implementation.function(inputs._replace(key=key, value=value, scales=None), call)


def attend_gradients(
    inputs: AttentionInputs, options: AttentionOptions, cotangents: Cotangents, kernel: str = "auto"
) -> Gradients:
    """Compute the float32 gradients of queries, keys and values for a part of the keys that the queries see.

    `cotangents` belong to the results over all keys. The gradient of the queries is the sum over all parts. Raises
    ConfigError for kernels without log-sum-exp.
    """
    call = _describe_call(inputs, options)
    implementation = _find(kernel, call)
    if implementation.gradients is None:
        raise ConfigError(
            f"kernel={implementation.name!r} cannot compute gradients from a given log-sum-exp. Use 'chunked' or 'dot'."
        )
    return implementation.gradients(inputs.with_slopes(options), call, cotangents)


def run_max_scores(inputs: AttentionInputs, options: AttentionOptions) -> Float32[Array, "batch heads"]:
    """Return the largest score of each sequence and head, over all keys that its queries see; EMPTY if they see none.

    The result has no gradient, and values are ignored. Scores are computed tile by tile, so that only one tile is in
    memory at a time.
    """
    call = _describe_call(inputs, options)
    query, key = jax.lax.stop_gradient((inputs.query, inputs.key))
    key = key if inputs.scales is None else dequantize(key, inputs.scales.key, query.dtype)
    return blockwise_max(inputs.with_slopes(options)._replace(query=query, key=key), call)


def _describe_call(inputs: AttentionInputs, options: AttentionOptions) -> AttentionCall:
    """Describe a call. Raises ConfigError for inconsistent arrays and options."""
    call = AttentionCall.of(inputs, options)
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    check(heads % kv_heads == 0, f"heads={heads} must be a multiple of kv_heads={kv_heads}.")
    check(
        not call.aligned or call.length == call.kv_length,
        f"aligned=True needs equal numbers of queries and keys, not {call.length} and {call.kv_length}. Omit aligned.",
    )
    check_segments(inputs.positions.query_segments, inputs.positions.key_segments)
    if call.soft_cap is not None:
        check_number("soft_cap", call.soft_cap, above=0.0)
    if inputs.selected is not None:
        check(
            call.selected_heads in (1, heads),
            f"selected has {call.selected_heads} heads; it must have 1 (for all heads) or heads={heads}.",
        )
    return call


def _find(kernel: str, call: AttentionCall) -> Kernel:
    """Return the kernel with this name, or the selected one for "auto". Raises ConfigError for unsupported calls."""
    name = select_kernel(call) if kernel == "auto" else kernel
    check_option("kernel", name, (*KERNELS, "auto"))
    unsupported = KERNELS[name].lacks(call)
    if unsupported is not None:
        supporting = ", ".join(other.name for other in KERNELS.values() if other.lacks(call) is None)
        raise ConfigError(
            f"kernel={name!r} does not support {unsupported} (mask={call.mask}). Kernels that support the call: "
            f"{supporting}."
        )
    return KERNELS[name]


def select_kernel(call: AttentionCall) -> str:
    """Return the name of the kernel for "auto", which supports the call.

    Short calls use "dot", because tiling pays off only if the scores of a head take much memory. Otherwise this is the
    first of the platform's fused kernels that supports the call. Fused kernels need arrays that are local to one
    device, because XLA cannot partition them. "chunked" supports every call.
    """
    if min(call.length, call.kv_length) < call.backend.min_blockwise_attention:
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
        unsupported=pallas_flash_tpu.unsupported,
        float16=False,
        platforms=("tpu",),
    ),
    "triton": Kernel(
        name="triton",
        function=functools.partial(flash_attention, pallas_flash_gpu.GPU),
        gradients=functools.partial(flash_gradients, pallas_flash_gpu.GPU),
        selection=False,
        unsupported=pallas_flash_gpu.unsupported,
        platforms=("gpu",),
    ),
    "splash": Kernel(
        name="splash",
        function=splash.splash_attention,
        spans=False,
        selection=False,
        float16=False,
        lse=False,
        unsupported=splash.unsupported,
        platforms=("tpu",),
    ),
    "cudnn": Kernel(
        name="cudnn",
        function=cudnn.cudnn_attention,
        soft_cap=False,
        unequal_value_dim=False,
        lse=False,
        unsupported=cudnn.unsupported,
        platforms=("gpu",),
    ),
}
