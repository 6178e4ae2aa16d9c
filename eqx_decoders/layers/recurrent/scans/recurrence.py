"""Linear recurrence and gated delta rule, whose state is one matrix per head.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

The log decay g is a scalar per head, or a vector with an element for each key channel. In the linear recurrence
(Mamba-2: Dao & Gu, 2024) the written value u is an input. In the gated delta rule (Yang et al., 2025; with a decay per
channel: Kimi Linear, 2025) u corrects the value that the state returns for the key:

    u_t = beta_t (v_t - (Diag(exp(g_t)) S_{t-1})^T k_t)

A token with key 0, beta 0 and log decay 0 leaves the state unchanged. Value head h uses key head h // (heads //
key_heads). There are four implementations with equal results: token by token (the definition); chunkwise, in XLA;
chunkwise, in a Pallas kernel for TPUs; and chunkwise with a Pallas kernel for GPUs that carries the state from chunk to
chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.errors import check
from eqx_decoders.layers.recurrent.kernels import pallas_carry, pallas_scan
from eqx_decoders.layers.recurrent.scans.chunked_scan import MIN_CHUNK, run_chunks
from eqx_decoders.sharding.backend import backend_of


def delta_rule(
    query: Float[Array, "batch length key_heads key_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
    beta: Float[Array, "batch length heads"] | None,
    state: Float32[Array, "batch heads key_dim value_dim"] | None = None,
    resets: Bool[Array, "batch length"] | None = None,
    chunk: int | None = 64,
    platform: str = "cpu",
    compute_capability: tuple[int, int] | None = None,
) -> tuple[
    Float[Array, "batch length heads value_dim"],
    Float32[Array, "batch length heads value_dim"],
    Float32[Array, "batch heads key_dim value_dim"],
]:
    """Run the gated delta rule, or, without `beta`, the linear recurrence.

    Return the outputs in the dtype of `value`, the written values u, and the state after the last token. The gradient
    stores one state per chunk, not one per token.

    **Arguments:**

    - `log_decay`: g, at most 0; `decay_dim` is 1 or `key_dim`.
    - `beta`: factor of the correction; None: `value` is written without a correction.
    - `state`: state before the first token; None means zeros.
    - `resets`: True for the first token of each document; the state is zeroed before these tokens.
    - `chunk`: tokens per chunk, 16 times a power of two; with a decay per channel, a chunk that is not a power of four
        is halved. None: token by token. The TPU kernel ignores it and uses `pallas_scan.CHUNK`.
    - `platform`: platform of the devices. It selects the kernel for many tokens and how a single token reads the
        state. Where a kernel may run, the arrays must be local to one device.
    - `compute_capability`: compute capability of NVIDIA GPUs; None for other devices.
    """
    heads, key_heads = value.shape[2], key.shape[2]
    check(heads % key_heads == 0, f"value heads={heads} must be a multiple of key heads={key_heads}.")
    check(
        chunk is None or (chunk >= MIN_CHUNK and chunk & (chunk - 1) == 0),
        f"chunk={chunk} must be {MIN_CHUNK} times a power of two.",
    )
    inputs = query, key, value, log_decay, beta, state, resets
    if chunk is None or value.shape[1] == 1:
        out, written, end = _run_tokens(*inputs, platform)
    elif backend_of(platform).pallas_tpu and pallas_scan.fits(key, value, log_decay):
        out, written, end = pallas_scan.run_kernel(*inputs)
    elif backend_of(platform).pallas_gpu and pallas_carry.fits(key, value, chunk, compute_capability):
        out, written, end = run_chunks(*inputs, chunk, pallas_carry.carry)
    else:
        out, written, end = run_chunks(*inputs, chunk)
    return out.astype(value.dtype), written, end


def linear_recurrence(
    query: Float[Array, "batch length key_heads key_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
    state: Float32[Array, "batch heads key_dim value_dim"] | None = None,
    resets: Bool[Array, "batch length"] | None = None,
    chunk: int | None = 64,
    platform: str = "cpu",
    compute_capability: tuple[int, int] | None = None,
) -> tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch heads key_dim value_dim"]]:
    """Return the outputs and the last state of the linear recurrence, which writes `value`; see `delta_rule`."""
    out, _, end = delta_rule(query, key, value, log_decay, None, state, resets, chunk, platform, compute_capability)
    return out, end


def _run_tokens(query, key, value, log_decay, beta, state, resets, platform) -> tuple[Array, Array, Array]:
    batch, length, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    resets = jnp.zeros((batch, length), bool) if resets is None else resets
    decay = jnp.where(resets[:, :, None, None], 0.0, jnp.exp(log_decay.astype(jnp.float32)))
    query_key = jnp.stack([query, key], 3).astype(jnp.float32)
    split = (batch, length, key_heads, heads // key_heads)
    value, decay = (x.astype(jnp.float32).reshape(*split, x.shape[3]) for x in (value, decay))
    beta = None if beta is None else beta.astype(jnp.float32).reshape(*split, 1)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, *split[2:], key_dim, value_dim)

    def step(state, token):
        query_key, value, decay, beta = token
        # The decay is applied to query and key instead of the state, and both are multiplied in one product: decoding
        # then reads the state once, unmodified.
        decayed = query_key[:, :, None] * decay[..., None, :]
        if backend_of(platform).reads_state_by_sums:  # a matrix product would copy the state into another layout
            from_query, from_key = ((decayed[:, :, :, x, :, None] * state).sum(-2) for x in (0, 1))
        else:
            from_query, from_key = jnp.moveaxis(jnp.einsum("bhrxk,bhrkv->bhrxv", decayed, state), 3, 0)
        written = value if beta is None else beta * (value - from_key)
        out = from_query + (query_key[:, :, 0] * query_key[:, :, 1]).sum(-1)[:, :, None, None] * written
        end = state * decay[..., None] + query_key[:, :, None, 1, :, None] * written[..., None, :]
        return end, (out, written)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (query_key, value, decay, beta))
    if length == 1:  # without a loop, XLA reads this layer's slice of the stacked states without copying it
        end, results = step(start, jax.tree.map(lambda x: x[0], tokens))
        results = jax.tree.map(lambda x: x[None], results)
    else:
        end, results = jax.lax.scan(step, start, tokens)
    out, written = (jnp.moveaxis(x, 0, 1).reshape(batch, length, heads, value_dim) for x in results)
    return out, written, end.reshape(batch, heads, key_dim, value_dim)
