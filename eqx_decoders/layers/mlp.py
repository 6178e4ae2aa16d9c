"""Feed-forward layers: gated (Shazeer 2020), plain, and a single matrix."""

import dataclasses
from collections.abc import Callable
from statistics import NormalDist
from typing import Annotated, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import FiniteFloat, OneOf, PositiveFloat, PositiveInt, Rate, check
from eqx_decoders.layers.base import BranchResult, ChannelConfig, ExtraConfig
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.layers.xielu import XIELU
from eqx_decoders.numerics.einsum import add_bias, scale
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
}

ActivationName = Annotated[str, OneOf(tuple(ACTIVATIONS))]
MLPActivationName = Annotated[str, OneOf((*ACTIVATIONS, "xielu"))]


@runtime_checkable
class Gating(Protocol):
    """Fields of an MLP and of experts that say how gates and up projections are joined."""

    @property
    def activation_scale(self) -> float: ...
    @property
    def up_offset(self) -> float: ...
    @property
    def limit(self) -> float | None: ...


def join_gate(gating: Gating, act: Callable[[Array], Array], gate: Array | None, up: Array) -> Array:
    """Compute `act(beta * gate) / beta * (up + up_offset)` of clipped projections, or `act(up)` without a gate."""
    beta, limit = gating.activation_scale, gating.limit
    if gate is not None and limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    active = up if gate is None else gate
    active = act(active) if beta == 1.0 else act(active * beta) / beta
    return active if gate is None else active * (up + gating.up_offset if gating.up_offset else up)


def check_gating(config: Gating, name: str, gated: bool) -> None:
    """Raise ConfigError for fields that need a gate, and have none."""
    idle = [field for field in ("up_offset", "limit") if getattr(config, field)]
    check(gated or not idle, f"{name}.gated=False excludes {' and '.join(idle)}: they are about gates.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(ChannelConfig, ExtraConfig):
    """Configuration of `down(act(gate x) * up x)`, or `down(act(up x))` when not gated.

    **Arguments:**

    - `mlp_dim`: hidden features.
    - `activation`: one of `ACTIVATIONS`, of which `"gelu"` is exact and `"gelu_tanh"` its tanh approximation; or
        `"xielu"`, which each layer learns for itself (`XIELU`; Apertus).
    - `activation_scale`: the activation becomes `act(scale * x) / scale`: with `"silu"` Swish with this beta
        (Ramachandran et al. 2017).
    - `gated`: whether a second input projection is multiplied in.
    - `up_offset`: added to the up projection (GPT-OSS).
    - `limit`: gate projections are clipped above it, up projections beyond it on both sides; None for no limit.
    - `bias`: whether all projections have a bias.
    - `fused`: whether gate and up are one product.
    - `inner_norm`: normalization of the hidden features (BitNet); None for none.
    - `gate_sparsity`: fraction of the gate's features that are cut off (Gemma 3n): of normal ones so many are below
        `cut = mean + icdf(gate_sparsity) std`, and the gate becomes `relu(gate - cut)`, over the features of a token.
    - `dropout`: rate on the hidden features.
    - `gate_scale`, `out_scale`: multiply the gate before its activation, and the output (Falcon-H1).
    """

    mlp_dim: PositiveInt
    activation: MLPActivationName = "silu"
    activation_scale: PositiveFloat = 1.0
    gated: bool = True
    up_offset: FiniteFloat = 0.0
    limit: PositiveFloat | None = None
    bias: bool = False
    fused: bool = False
    inner_norm: NormConfig | None = None
    gate_sparsity: Rate = 0.0
    dropout: Rate = 0.0
    gate_scale: PositiveFloat = 1.0
    out_scale: PositiveFloat = 1.0

    def __post_init__(self):
        super().__post_init__()
        rule = f"MLPConfig.gate_scale={self.gate_scale} needs gated=True: there is no gate."
        check(self.gated or self.gate_scale == 1.0, rule)
        check_gating(self, "MLPConfig", self.gated)
        rule = f"MLPConfig.gate_sparsity={self.gate_sparsity} needs gated=True: there is no gate."
        check(self.gated or not self.gate_sparsity, rule)
        check(self.gated or not self.fused, "MLPConfig.fused=True needs gated=True: there is one projection only.")

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MLP":
        keys = jax.random.split(key, 3)
        wide, mlp = (embed_dim, self.mlp_dim), self.mlp_dim
        gate = fan_in(keys[0], wide, jnp.float32, embed_dim) if self.gated else None
        up = fan_in(keys[1], wide, jnp.float32, embed_dim)
        fused = jnp.stack([gate, up], axis=1) if self.fused and gate is not None else None
        zeros = {"gate_bias": (mlp,) if self.gated else None, "up_bias": (mlp,), "down_bias": (embed_dim,)}
        biases = {name: jnp.zeros(shape) if self.bias and shape else None for name, shape in zeros.items()}
        return MLP(
            gate=None if self.fused else gate,
            up=None if self.fused else up,
            gate_up=fused,
            down=fan_in(keys[2], (mlp, embed_dim), jnp.float32, mlp),
            inner_norm=self.inner_norm.build(mlp) if self.inner_norm else None,
            xielu=XIELU.build() if self.activation == "xielu" else None,
            config=self,
            **biases,
        )


class MLP(eqx.Module):
    """Feed-forward layer `down(act(gate x) * up x)`."""

    gate: Float[Array, "embed mlp"] | None
    up: Float[Array, "embed mlp"] | None
    gate_up: Float[Array, "embed inputs mlp"] | None
    down: Float[Array, "mlp embed"]
    gate_bias: Float[Array, "mlp"] | None
    up_bias: Float[Array, "mlp"] | None
    down_bias: Float[Array, "embed"] | None
    inner_norm: Norm | None
    xielu: XIELU | None
    config: MLPConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "batch length embed"]:
        act = ACTIVATIONS[self.config.activation] if self.xielu is None else self.xielu
        gate, up = self._inputs(x, ctx)
        gate = None if gate is None else cut_gate(scale(gate, self.config.gate_scale), self.config.gate_sparsity)
        hidden = join_gate(self.config, act, gate, up)
        hidden = hidden if self.inner_norm is None else self.inner_norm(hidden)
        hidden = dropout(ctx.constrain(hidden, "batch length mlp"), self.config.dropout, key)
        out = ctx.einsum("batch length mlp, mlp embed -> batch length embed", hidden, self.down)
        out = scale(add_bias(out, self.down_bias), self.config.out_scale)
        return save(ctx.constrain(out, "batch length embed"), "mlpwo")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(self(x, ctx, key=key))

    def _inputs(self, x: Array, ctx: ForwardContext) -> tuple[Array | None, Array]:
        """Return the gate (None when not gated) and up projections, before the activation."""
        pattern = "batch length embed, embed mlp -> batch length mlp"
        if self.gate_up is not None:
            fused = "batch length embed, embed inputs mlp -> batch length inputs mlp"
            both = save(ctx.einsum(fused, x, self.gate_up), "mlpwi")
            return add_bias(both[:, :, 0], self.gate_bias), add_bias(both[:, :, 1], self.up_bias)
        assert self.up is not None
        up = add_bias(ctx.einsum(pattern, x, self.up), self.up_bias)
        if self.gate is None:
            return None, save(up, "mlpwi")
        gate = add_bias(ctx.einsum(pattern, x, self.gate), self.gate_bias)
        return save(gate, "mlpwi_0"), save(up, "mlpwi_1")


def cut_gate(gate: Float[Array, "batch length mlp"], sparsity: float) -> Float[Array, "batch length mlp"]:
    """Compute `relu(gate - mean - icdf(sparsity) std)` over the features, in float32; the gate itself for 0."""
    if sparsity == 0.0:
        return gate
    wide = gate.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(wide * wide, axis=-1, keepdims=True), 1e-30)  # the slope of its root has a bound
    return jax.nn.relu(wide - NormalDist().inv_cdf(sparsity) * jnp.sqrt(variance)).astype(gate.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(ChannelConfig, ExtraConfig):
    """Configuration of `kernel^T x`: one matrix from the residual stream to itself (MaxText's `simple` block)."""

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Linear":
        return Linear(kernel=fan_in(key, (embed_dim, embed_dim), jnp.float32, embed_dim))


class Linear(eqx.Module):
    """Single matrix `kernel^T x`. The columns are called `mlp`, so that a mesh splits both sides of the matrix."""

    kernel: Float[Array, "embed mlp"]

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "batch length embed"]:
        out = ctx.einsum("batch length embed, embed mlp -> batch length mlp", x, self.kernel)
        return save(ctx.constrain(out, "batch length embed"), "mlpwo")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(self(x, ctx, key=key))
