"""Feed-forward layers: gated (Shazeer 2020), plain, and a single matrix."""

import dataclasses
from collections.abc import Callable
from statistics import NormalDist
from typing import Annotated

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


def join_gate(
    act: Callable[[Array], Array],
    gate: Array | None,
    up: Array,
    *,
    activation_scale: float,
    up_offset: float,
    limit: float | None,
) -> Array:
    """Compute `act(beta * gate) / beta * (up + up_offset)`; without a gate `act(beta * up) / beta`.

    beta is `activation_scale`. Gate and up projections are first clipped to `limit` as described in `MLPConfig`.
    """
    beta = activation_scale
    if gate is not None and limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    activated = up if gate is None else gate
    activated = act(activated) if beta == 1.0 else act(activated * beta) / beta
    return activated if gate is None else activated * (up + up_offset if up_offset else up)


def check_gating(name: str, *, gated: bool, up_offset: float, limit: float | None) -> None:
    """Raise ConfigError if fields are set that need a gate, but there is none. `name`: name of the configuration."""
    gate_fields = [field for field, value in (("up_offset", up_offset), ("limit", limit)) if value]
    check(
        gated or not gate_fields,
        f"{name}.gated=False excludes {' and '.join(gate_fields)}: without a gate they have no effect. Leave them out.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(ChannelConfig, ExtraConfig):
    """Configuration of `down(act(gate x) * up x)`, or `down(act(up x))` when not gated.

    **Arguments:**

    - `mlp_dim`: hidden features.
    - `activation`: name in `ACTIVATIONS` (`"gelu"` is exact, `"gelu_tanh"` is the tanh approximation), or `"xielu"`,
        an activation with parameters that each layer learns (`XIELU`; Apertus).
    - `activation_scale`: the activation becomes `act(scale * x) / scale`. With `"silu"` this is Swish with this beta
        (Ramachandran et al. 2017).
    - `gated`: whether there is a gate projection (GLU).
    - `up_offset`: added to the up projection (GPT-OSS).
    - `limit`: gate projections are clipped to at most `limit`, up projections to `[-limit, limit]`; None: no clipping.
    - `bias`: whether all projections have a bias.
    - `fused`: whether gate and up are computed by one fused projection.
    - `inner_norm`: normalization of the hidden features (BitNet); None for none.
    - `gate_sparsity`: fraction of gate features that are set to 0 (Gemma 3n). The gate becomes `relu(gate - cut)` with
        `cut = mean + icdf(gate_sparsity) std` over the features of a token; the fraction holds for normally
        distributed features.
    - `dropout`: dropout rate of the hidden features.
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
        check(
            self.gated or self.gate_scale == 1.0,
            f"MLPConfig.gate_scale={self.gate_scale} needs gated=True: without a gate there is nothing to scale.",
        )
        check_gating("MLPConfig", gated=self.gated, up_offset=self.up_offset, limit=self.limit)
        check(
            self.gated or not self.gate_sparsity,
            f"MLPConfig.gate_sparsity={self.gate_sparsity} needs gated=True: it applies to the gate.",
        )
        check(
            self.gated or not self.fused,
            "MLPConfig.fused=True needs gated=True: without a gate there is only one projection.",
        )

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MLP":
        keys = jax.random.split(key, 3)
        mlp_dim = self.mlp_dim
        gate = fan_in(keys[0], (embed_dim, mlp_dim), jnp.float32, embed_dim) if self.gated else None
        up = fan_in(keys[1], (embed_dim, mlp_dim), jnp.float32, embed_dim)
        return MLP(
            gate=None if self.fused else gate,
            up=None if self.fused else up,
            gate_up=jnp.stack([gate, up], axis=1) if self.fused and gate is not None else None,
            down=fan_in(keys[2], (mlp_dim, embed_dim), jnp.float32, mlp_dim),
            gate_bias=jnp.zeros((mlp_dim,)) if self.bias and self.gated else None,
            up_bias=jnp.zeros((mlp_dim,)) if self.bias else None,
            down_bias=jnp.zeros((embed_dim,)) if self.bias else None,
            inner_norm=self.inner_norm.build(mlp_dim) if self.inner_norm else None,
            xielu=XIELU.build() if self.activation == "xielu" else None,
            config=self,
        )


class MLP(eqx.Module):
    """Feed-forward layer `down(act(gate x) * up x)`, or `down(act(up x))` without a gate."""

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
        gate, up = self._project(x, ctx)
        gate = None if gate is None else cut_gate(scale(gate, self.config.gate_scale), self.config.gate_sparsity)
        hidden = join_gate(
            act,
            gate,
            up,
            activation_scale=self.config.activation_scale,
            up_offset=self.config.up_offset,
            limit=self.config.limit,
        )
        hidden = hidden if self.inner_norm is None else self.inner_norm(hidden)
        hidden = dropout(ctx.constrain(hidden, "batch length mlp"), self.config.dropout, key)
        out = ctx.einsum("batch length mlp, mlp embed -> batch length embed", hidden, self.down)
        out = scale(add_bias(out, self.down_bias), self.config.out_scale)
        return save(ctx.constrain(out, "batch length embed"), "mlpwo")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx, key=key))

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array | None, Array]:
        """Return the gate projection (None if not gated) and the up projection, before the activation."""
        if self.gate_up is not None:
            fused_pattern = "batch length embed, embed inputs mlp -> batch length inputs mlp"
            gate_up = save(ctx.einsum(fused_pattern, x, self.gate_up), "mlpwi")
            return add_bias(gate_up[:, :, 0], self.gate_bias), add_bias(gate_up[:, :, 1], self.up_bias)
        assert self.up is not None
        pattern = "batch length embed, embed mlp -> batch length mlp"
        up = add_bias(ctx.einsum(pattern, x, self.up), self.up_bias)
        if self.gate is None:
            return None, save(up, "mlpwi")
        gate = add_bias(ctx.einsum(pattern, x, self.gate), self.gate_bias)
        return save(gate, "mlpwi_0"), save(up, "mlpwi_1")


def cut_gate(gate: Float[Array, "batch length mlp"], sparsity: float) -> Float[Array, "batch length mlp"]:
    """Compute `relu(gate - mean - icdf(sparsity) std)` over the features, in float32; `gate` itself for sparsity 0."""
    if sparsity == 0.0:
        return gate
    centered = gate.astype(jnp.float32)
    centered = centered - jnp.mean(centered, axis=-1, keepdims=True)
    # the lower bound keeps the gradient of the square root finite
    variance = jnp.maximum(jnp.mean(centered * centered, axis=-1, keepdims=True), 1e-30)
    return jax.nn.relu(centered - NormalDist().inv_cdf(sparsity) * jnp.sqrt(variance)).astype(gate.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(ChannelConfig, ExtraConfig):
    """Configuration of `kernel^T x`: one matrix from the residual stream to itself (MaxText's `simple` block)."""

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Linear":
        return Linear(kernel=fan_in(key, (embed_dim, embed_dim), jnp.float32, embed_dim))


class Linear(eqx.Module):
    """Single matrix `kernel^T x`. The output axis is named `mlp`, so that both axes of the matrix are sharded."""

    kernel: Float[Array, "embed mlp"]

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "batch length embed"]:
        out = ctx.einsum("batch length embed, embed mlp -> batch length mlp", x, self.kernel)
        return save(ctx.constrain(out, "batch length embed"), "mlpwo")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx, key=key))
