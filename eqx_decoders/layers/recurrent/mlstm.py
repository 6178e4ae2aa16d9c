"""mLSTM (Beck et al. 2024): a linear recurrence with exponential gates per head, and a normalizer.

    S_t = sigmoid(f_t) S_{t-1} + e^{i_t} k_t [v_t, 1]^T,    [a_t, n_t] = S_t^T q_t / sqrt(key_dim)
    h_t = a_t / (max(|n_t|, 1) + eps e^{m_t}),              m_t = max(m_{t-1} + log sigmoid(f_t), i_t)

f and i are the logits of the forget gate and the input gate. The normalizer n is computed as an additional feature of
the values. The paper stores S e^{-m} to allow gates of any size. Here gate logits are capped, so S itself is finite in
float32, and m only scales `eps`. At the start of a document m is 0.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import InRange, PositiveFloat, PositiveInt
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ConvInputs, ConvShape, NewConvInputs, StateShape
from eqx_decoders.layers.documents import document_starts, zero_padding
from eqx_decoders.layers.recurrent.common import (
    RecurrentLayer,
    last_value_update,
    read_cache,
    state_update,
)
from eqx_decoders.layers.recurrent.scans.log_scan import DECAYING_MAX, LOG_ZERO, log_scan_on_mesh
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


_MAX_GATE_CAP = 40.0  # exp(40)^2 is finite in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLSTMConfig(MixerConfig):
    """Configuration of the mLSTM layer `out(sigmoid(gate x) * norm(h))`, where h is the recurrence's output.

    **Arguments:**

    - `num_heads`, `key_dim`, `value_dim`: number of heads, and features of a key and of a value per head.
    - `gate_cap`: soft cap c of the gate logits x: `c tanh(x / c)`.
    - `eps`: epsilon added to the normalizer.
    - `norm_eps`: epsilon of the layer norm of each head.
    """

    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    gate_cap: Annotated[float, InRange(above=0, maximum=_MAX_GATE_CAP)] = 15.0
    eps: PositiveFloat = 1e-6
    norm_eps: PositiveFloat = 1e-6

    @property
    def state(self) -> StateShape:
        """Shape of the recurrent state; the normalizer is its last value feature."""
        return StateShape(heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim + 1)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name: the state S, and m as `level`; they do not depend on `max_length`."""
        return {"state": self.state, "level": ConvShape(taps=1, channels=self.num_heads, dtype="float32")}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the recurrence, which reads and writes its state once."""
        return 2 * self.num_heads * self.key_dim * (self.value_dim + 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MLSTM":
        keys = jax.random.split(key, 7)
        heads = self.num_heads

        def projection(key: PRNGKeyArray, *shape: int) -> Array:
            return fan_in(key, (embed_dim, heads, *shape), jnp.float32, embed_dim, "normal")

        inner = heads, self.value_dim
        return MLSTM(
            query=projection(keys[0], self.key_dim),
            key=projection(keys[1], self.key_dim),
            value=projection(keys[2], self.value_dim),
            gate=projection(keys[3], self.value_dim),
            input_gate=projection(keys[4]),
            input_gate_bias=jnp.full((heads,), -10.0),
            forget_gate=projection(keys[5]),
            forget_gate_bias=jnp.linspace(3.0, 6.0, heads),
            norm_scale=jnp.ones(inner),
            out=fan_in(keys[6], (*inner, embed_dim), jnp.float32, inner[0] * inner[1], "normal"),
            config=self,
        )


class MLSTM(RecurrentLayer):
    """mLSTM layer `out(sigmoid(gate x) * norm(h))`, where h is the recurrence's output."""

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
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""

        def project(weight: Array, axes: str, name: str) -> Array:
            projected = ctx.einsum(f"batch length embed, embed {axes} -> batch length {axes}", x, weight)
            return save(ctx.constrain(projected, f"batch length {axes}"), name).astype(jnp.float32)

        query = project(self.query, "heads key_dim", "query_proj") * self.config.key_dim**-0.5
        key = project(self.key, "heads key_dim", "key_proj")
        value = project(self.value, "heads value_dim", "value_proj")
        log_input, log_forget = self._gates(x, ctx)
        level, level_update = self._level(log_input, log_forget, cache, ctx)
        input_gate = zero_padding(jnp.exp(log_input), ctx.positions)[..., None]
        written = input_gate * jnp.concatenate([value, jnp.ones_like(input_gate)], -1)
        log_decay = log_forget[..., None]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        state = read_cache(cache, "state")
        scan_out, _, state = recur_on_mesh(query, key, written, log_decay, None, state, starts, execution=ctx.execution)
        updates = {
            "state": state_update(self.config.state, log_decay, key, written, state, ctx),
            "level": level_update,
        }
        normalizer = jnp.maximum(jnp.abs(scan_out[..., -1:]), 1.0) + self.config.eps * jnp.exp(level)[..., None]
        hidden = ctx.constrain((scan_out[..., :-1] / normalizer).astype(x.dtype), "batch length heads value_dim")
        gate = jax.nn.sigmoid(project(self.gate, "heads value_dim", "qkv_proj"))
        gated = (gate * self._normalize(save(hidden, "attention_out"))).astype(x.dtype)
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", gated, self.out)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), updates

    def _gates(
        self, x: Array, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads"], Float32[Array, "batch length heads"]]:
        """Compute the logarithms of the input gate and of the forget gate; the forget gate is 1 at padding."""
        pattern = "batch length embed, embed heads -> batch length heads"
        cap = self.config.gate_cap

        def capped_logits(weight: Array, bias: Array) -> Array:
            logits = ctx.einsum(pattern, x, weight).astype(jnp.float32) + bias.astype(jnp.float32)[None, None]
            return ctx.constrain(cap * jnp.tanh(logits / cap), "batch length heads")

        log_forget = jax.nn.log_sigmoid(capped_logits(self.forget_gate, self.forget_gate_bias))
        log_input = capped_logits(self.input_gate, self.input_gate_bias)
        return log_input, zero_padding(log_forget, ctx.positions)

    def _level(
        self, log_input: Array, log_forget: Array, cache: dict[str, Any] | None, ctx: ForwardContext
    ) -> tuple[Float32[Array, "batch length heads"], ConvInputs | NewConvInputs]:
        """Compute m for each token, and the proposed update of its cache."""
        level = jnp.zeros_like(log_input[:, 0]) if cache is None else cache["level"][:, 0]
        starts = document_starts(ctx.positions, ctx.segment_ids)
        tokens = log_forget, jnp.where((ctx.positions >= 0)[:, :, None], log_input, LOG_ZERO)
        if starts is not None:  # m is 0 before a document's first token
            is_start = starts[:, :, None]
            decay, log_input = tokens
            log_input = jnp.maximum(log_input, jnp.where(is_start, log_forget, LOG_ZERO))
            tokens = jnp.where(is_start, LOG_ZERO, decay), log_input
        before, (end,) = log_scan_on_mesh(DECAYING_MAX, tokens, (level,), execution=ctx.execution)
        (after,) = DECAYING_MAX.advance(before, tokens)
        return after, last_value_update(after, end, ctx)

    def _normalize(self, hidden: Array) -> Float32[Array, "batch length heads value_dim"]:
        """Apply layer norm to each head."""
        y = hidden.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.norm_eps)
        return y * self.norm_scale.astype(jnp.float32)[None, None]
