"""Recurrences over a matrix per head, whose size does not depend on the number of tokens.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

g has one number a head or one for each channel of a key. u is an input of the linear recurrence (Mamba-2: Dao & Gu,
2024). The gated delta rule writes a correction of the answer to a key (Yang et al., 2025; by channel: Kimi Linear,
2025):

    u_t = beta_t (v_t - (Diag(exp(g_t)) S_{t-1})^T k_t)

A token with key 0, beta 0 and log decay 0 leaves the state as it is. Value head h uses key head h // (heads //
key_heads). Each has forms with equal results: token by token; in chunks, for more than one token; chunks in a
kernel, on TPUs; and states from chunk to chunk in a kernel, on GPUs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.errors import check
from eqx_decoders.layers.recurrent.kernels import pallas_carry, pallas_scan
from eqx_decoders.layers.recurrent.scans.chunked_scan import LEAST, run_chunks
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
    """Return outputs in the dtype of `value`, the written values u, and the state after the last token.

    Memory, for gradients too, grows with the length: a state is held for each chunk, none for a token.

    **Arguments:**

    - `log_decay`: g, at most 0; `decay_dim` is 1 or `key_dim`.
    - `beta`: the written share of the correction; None: `value` itself is written, and nothing is corrected.
    - `state`: before the first token; None for zeros.
    - `resets`: the first tokens of documents: what came before them is forgotten.
    - `chunk`: tokens that are computed at once, 16 times a power of two (with a decay for each channel half of it, if
        it is no power of four); None: one by one, the definition. The kernel for TPUs has a size of its own.
    - `platform`: of the devices, which decides how one token reads a state, and whether there is a kernel for many:
        then arrays are a device's own.
    - `compute_capability`: of the devices, where they are NVIDIA's.
    """
    heads, key_heads = value.shape[2], key.shape[2]
    check(heads % key_heads == 0, f"value heads={heads} must be a multiple of key heads={key_heads}.")
    rule = f"must be {LEAST} times a power of two"
    check(chunk is None or (chunk >= LEAST and chunk & (chunk - 1) == 0), f"chunk={chunk} {rule}.")
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
    """Return outputs and the last state, with `value` as what is written: `delta_rule` without a correction."""
    device = platform, compute_capability
    out, _, end = delta_rule(query, key, value, log_decay, None, state, resets, chunk, *device)
    return out, end


def _run_tokens(query, key, value, log_decay, beta, state, resets, platform) -> tuple[Array, Array, Array]:
    batch, length, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    resets = jnp.zeros((batch, length), bool) if resets is None else resets
    fade = jnp.where(resets[:, :, None, None], 0.0, jnp.exp(log_decay.astype(jnp.float32)))
    shared = jnp.stack([query, key], 3).astype(jnp.float32)
    split = (batch, length, key_heads, heads // key_heads)
    value, fade = (x.astype(jnp.float32).reshape(*split, x.shape[3]) for x in (value, fade))
    beta = None if beta is None else beta.astype(jnp.float32).reshape(*split, 1)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, *split[2:], key_dim, value_dim)

    def step(state, token):
        pair, value, fade, beta = token
        # the decay goes with the questions, and both are one product: decoding reads the state as it stands, and once
        readout = pair[:, :, None] * fade[..., None, :]
        if backend_of(platform).sums_state_reads:  # a product would want a copy of the state in another order
            reads, answer = ((readout[:, :, :, x, :, None] * state).sum(-2) for x in (0, 1))
        else:
            reads, answer = jnp.moveaxis(jnp.einsum("bhrxk,bhrkv->bhrxv", readout, state), 3, 0)
        written = value if beta is None else beta * (value - answer)
        out = reads + (pair[:, :, 0] * pair[:, :, 1]).sum(-1)[:, :, None, None] * written
        end = state * fade[..., None] + pair[:, :, None, 1, :, None] * written[..., None, :]
        return end, (out, written)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (shared, value, fade, beta))
    if length == 1:  # without a loop, so that a slice of all layers' states is read where it is
        end, results = step(start, jax.tree.map(lambda x: x[0], tokens))
        results = jax.tree.map(lambda x: x[None], results)
    else:
        end, results = jax.lax.scan(step, start, tokens)
    out, written = (jnp.moveaxis(x, 0, 1).reshape(batch, length, heads, value_dim) for x in results)
    return out, written, end.reshape(batch, heads, key_dim, value_dim)
