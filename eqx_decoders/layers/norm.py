"""Normalization in float32: RMSNorm (Zhang & Sennrich 2019), LayerNorm (Ba et al. 2016), and LayerScale."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_decoders.errors import CheckedFields, FiniteFloat, PositiveFloat, check, check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNormConfig(CheckedFields):
    """Configuration of `x / sqrt(mean(x²) + eps) * (offset + scale)`.

    **Arguments:**

    - `eps`: added to the mean square.
    - `scale`: whether there is a learned scale.
    - `offset`: added to the stored scale: 1 in Gemma, where the stored scale is initialized to 0; else 0, and the scale
        is initialized to 1.
    - `clip`: x is first clipped to `[-clip, clip]` and to the range of its dtype (Gemma 4's audio encoder); None: no
        clipping.
    """

    eps: PositiveFloat = 1e-6
    scale: bool = True
    offset: FiniteFloat = 0.0
    clip: PositiveFloat | None = None

    def __post_init__(self):
        super().__post_init__()
        _check_offset(self)

    def build(self, size: int) -> "RMSNorm":
        check_integer("RMSNorm size", size)
        return RMSNorm(scale=jnp.full((size,), 1.0 - self.offset) if self.scale else None, config=self)


class RMSNorm(eqx.Module):
    """Normalization `x / sqrt(mean(x²) + eps) * (offset + scale)` over the last axis, in float32."""

    scale: Float[Array, "norm"] | None
    config: RMSNormConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*dims norm"]) -> Float[Array, "*dims norm"]:
        if self.config.clip is not None:
            bound = min(self.config.clip, float(jnp.finfo(x.dtype).max))
            x = jnp.clip(x, -bound, bound)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.eps)
        return _apply_scale(y, self.scale, self.config.offset).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig(CheckedFields):
    """Configuration of `(x - mean) / sqrt(var + eps) * (offset + scale) + bias`.

    **Arguments:**

    - `eps`: added to the variance.
    - `scale`, `bias`: whether there are a learned scale and a learned bias (OLMo: neither).
    - `offset`: added to the stored scale: 1 in MaxText's GPT-3, where the stored scale is initialized to 0; else 0.
    """

    eps: PositiveFloat = 1e-5
    scale: bool = True
    bias: bool = True
    offset: FiniteFloat = 0.0

    def __post_init__(self):
        super().__post_init__()
        _check_offset(self)

    def build(self, size: int) -> "LayerNorm":
        check_integer("LayerNorm size", size)
        bias = jnp.zeros((size,)) if self.bias else None
        return LayerNorm(scale=jnp.full((size,), 1.0 - self.offset) if self.scale else None, bias=bias, config=self)


class LayerNorm(eqx.Module):
    """Normalization `(x - mean) / sqrt(var + eps) * (offset + scale) + bias` over the last axis, in float32."""

    scale: Float[Array, "norm"] | None
    bias: Float[Array, "norm"] | None
    config: LayerNormConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*dims norm"]) -> Float[Array, "*dims norm"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.eps)
        y = _apply_scale(y, self.scale, self.config.offset)
        if self.bias is not None:
            y = y + _broadcast_to_last(self.bias, y)
        return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerScaleConfig(CheckedFields):
    """Configuration of `scale * x` (LayerScale, Touvron et al. 2021), used in place of a post-norm.

    **Arguments:**

    - `start`: initial value of the scale.
    """

    start: PositiveFloat = 1.0

    def build(self, size: int) -> "LayerScale":
        check_integer("LayerScale size", size)
        return LayerScale(scale=jnp.full((size,), self.start), config=self)


class LayerScale(eqx.Module):
    """Learned scale of the last axis, `scale * x`, without normalization."""

    scale: Float[Array, "norm"]
    config: LayerScaleConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*dims norm"]) -> Float[Array, "*dims norm"]:
        y = x.astype(jnp.float32)
        return (y * _broadcast_to_last(self.scale, y)).astype(x.dtype)


NormConfig = RMSNormConfig | LayerNormConfig
Norm = RMSNorm | LayerNorm


class ExpertNorms(eqx.Module):
    """Separate pre- and post-norms of the shared experts and of the routed experts."""

    pre_shared: Norm
    post_shared: Norm
    pre_routed: Norm
    post_routed: Norm


def normalize_streams(
    x: Float[Array, "batch length streams embed"], scale: Float[Array, "streams norm"], config: RMSNormConfig
) -> Float[Array, "batch length streams embed"]:
    """Apply RMSNorm to each residual stream, with a separate scale per stream."""
    y = RMSNormConfig(eps=config.eps, scale=False).build(x.shape[-1])(x).astype(jnp.float32)
    return (y * (config.offset + scale.astype(jnp.float32))[None, None]).astype(x.dtype)


def _apply_scale(y: Array, scale: Array | None, offset: float) -> Array:
    return y if scale is None else y * (offset + _broadcast_to_last(scale, y))


def _broadcast_to_last(vector: Array, y: Array) -> Array:
    return vector.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


def _check_offset(config: RMSNormConfig | LayerNormConfig) -> None:
    check(
        config.scale or config.offset == 0,
        f"{type(config).__name__}.offset={config.offset} needs scale=True: the offset is added to the scale.",
    )
