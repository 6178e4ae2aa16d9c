"""mLSTM (Beck et al. 2024): a linear recurrence with exponential gates of each head, and a normalizer.

    S_t = sigmoid(f_t) S_{t-1} + e^{i_t} k_t [v_t, 1]^T,    [a_t, n_t] = S_t^T q_t / sqrt(key_dim)
    h_t = a_t / (max(|n_t|, 1) + eps e^{m_t}),              m_t = max(m_{t-1} + log sigmoid(f_t), i_t)

The normalizer is one more feature of the values. The paper keeps S e^{-m}, m being there for gates of any size; here
they are capped, so that S itself fits into float32 and m is needed beside `eps` alone. In a document m begins with 0.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import InRange, PositiveFloat, PositiveInt
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs, StateShape
from eqx_decoders.layers.recurrent.causal_conv import document_starts
from eqx_decoders.layers.recurrent.common import last_value_update, read_cache, state_update, zero_padding
from eqx_decoders.layers.recurrent.scans.log_scan import EMPTY, MAXIMA, scan_on_mesh
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_CAP = 40.0  # squares of its exponential are finite in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLSTMConfig(MixerConfig):
    """Configuration of `out(sigmoid(gate x) * norm(h))`, h being the recurrence's output.

    **Arguments:**

    - `num_heads`, `key_dim`, `value_dim`: heads, and features of a key and of a value of each.
    - `gate_cap`: bound c of the gates' logarithms: `c tanh(x / c)`.
    - `eps`: beside the normalizer.
    - `norm_eps`: of the norm of each head, which subtracts the mean.
    """

    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    gate_cap: Annotated[float, InRange(above=0, most=_CAP)] = 15.0
    eps: PositiveFloat = 1e-6
    norm_eps: PositiveFloat = 1e-6

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state, with the normalizer beside the values."""
        return StateShape(heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim + 1)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the cache: a state, and the largest gate so far, whatever the length."""
        return {"state": self.state, "level": ConvShape(taps=1, channels=self.num_heads, dtype="float32")}

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the state, which is read once and written once."""
        return 2 * self.num_heads * self.key_dim * (self.value_dim + 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MLSTM":
        keys, heads = jax.random.split(key, 7), self.num_heads

        def into(key: PRNGKeyArray, *shape: int) -> Array:
            return fan_in(key, (embed_dim, heads, *shape), jnp.float32, embed_dim, "normal")

        inner = heads, self.value_dim
        return MLSTM(
            query=into(keys[0], self.key_dim),
            key=into(keys[1], self.key_dim),
            value=into(keys[2], self.value_dim),
            gate=into(keys[3], self.value_dim),
            input_gate=into(keys[4]),
            input_gate_bias=jnp.full((heads,), -10.0),
            forget_gate=into(keys[5]),
            forget_gate_bias=jnp.linspace(3.0, 6.0, heads),
            norm_scale=jnp.ones(inner),
            out=fan_in(keys[6], (*inner, embed_dim), jnp.float32, inner[0] * inner[1], "normal"),
            config=self,
        )


class MLSTM(eqx.Module):
    """mLSTM layer `out(sigmoid(gate x) * norm(h))`, h being the recurrence's output."""

    query: Float[Array, "embed heads key_dim"]
    key: Float[Array, "embed heads key_dim"]
    value: Float[Array, "embed heads value_dim"]
    gate: Float[Array, "embed heads value_dim"]
    input_gate: Float[Array, "embed heads"]
    input_gate_bias: Float[Array, "heads"]
    forget_gate: Float[Array, "embed heads"]
    forget_gate_bias: Float[Array, "heads"]
    norm_scale: Float[Array, "heads value_dim"]
    out: Float[Array, "heads value_dim embed"]
    config: MLSTMConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and new entries for its state and for the largest gate."""

        def projected(weight: Array, words: str, name: str) -> Array:
            made = ctx.einsum(f"batch length embed, embed {words} -> batch length {words}", x, weight)
            return save(ctx.constrain(made, f"batch length {words}"), name).astype(jnp.float32)

        query = projected(self.query, "heads key_dim", "query_proj") * self.config.key_dim**-0.5
        key = projected(self.key, "heads key_dim", "key_proj")
        value = projected(self.value, "heads value_dim", "value_proj")
        log_input, log_forget = self._gates(x, ctx)
        level, entry = self._largest(log_input, log_forget, past, ctx)
        shares = zero_padding(jnp.exp(log_input), ctx.positions)[..., None]
        written = shares * jnp.concatenate([value, jnp.ones_like(shares)], -1)
        log_decay, starts = log_forget[..., None], document_starts(ctx.positions, ctx.segment_ids)
        inputs = query, key, written, log_decay, None, read_cache(past, "state"), starts
        read, _, state = recur_on_mesh(*inputs, execution=ctx.execution)
        entries = {"state": state_update(self.config.state, log_decay, key, written, state, ctx), "level": entry}
        size = jnp.maximum(jnp.abs(read[..., -1:]), 1.0) + self.config.eps * jnp.exp(level)[..., None]
        answer = ctx.constrain((read[..., :-1] / size).astype(x.dtype), "batch length heads value_dim")
        gate = jax.nn.sigmoid(projected(self.gate, "heads value_dim", "qkv_proj"))
        gated = (gate * self._normed(save(answer, "attention_out"))).astype(x.dtype)
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), entries

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _gates(
        self, x: Array, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads"], Float32[Array, "batch length heads"]]:
        """Compute logarithms of the gates: of what is written, and of what is kept, which is all at padding."""
        pattern, cap = "batch length embed, embed heads -> batch length heads", self.config.gate_cap

        def capped(weight: Array, bias: Array) -> Array:
            made = ctx.einsum(pattern, x, weight).astype(jnp.float32) + bias.astype(jnp.float32)[None, None]
            return ctx.constrain(cap * jnp.tanh(made / cap), "batch length heads")

        kept = jax.nn.log_sigmoid(capped(self.forget_gate, self.forget_gate_bias))
        return capped(self.input_gate, self.input_gate_bias), zero_padding(kept, ctx.positions)

    def _largest(
        self, log_input: Array, log_forget: Array, past: dict[str, Any] | None, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads"], ConvInputs | NewConvInputs]:
        """Compute m, and its new entry."""
        level = jnp.zeros_like(log_input[:, 0]) if past is None else past["level"][:, 0]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        tokens = log_forget, jnp.where((ctx.positions >= 0)[:, :, None], log_input, EMPTY)
        if starts is not None:  # a document's first token decays from 0
            fresh = starts[:, :, None]
            tokens = jnp.where(fresh, EMPTY, tokens[0]), jnp.maximum(tokens[1], jnp.where(fresh, log_forget, EMPTY))
        before, (end,) = scan_on_mesh(MAXIMA, tokens, (level,), execution=ctx.execution)
        (after,) = MAXIMA.advance(before, tokens)
        return after, last_value_update(after, end, ctx)

    def _normed(self, answer: Array) -> Float32[Array, "batch length heads value_dim"]:
        """Normalize each head: less its mean, and scaled."""
        y = answer.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.norm_eps)
        return y * self.norm_scale.astype(jnp.float32)[None, None]
