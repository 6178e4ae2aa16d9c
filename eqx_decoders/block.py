"""A decoder block: a token mixer and a channel mixer wired to the residual stream."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.context import Context
from eqx_decoders.errors import check, check_number, check_word
from eqx_decoders.layers.attention import Attention, AttentionConfig
from eqx_decoders.layers.cache import Entries, Past
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.remat import save


MixerConfig = AttentionConfig | LearnedInitConfig
Mixer = Attention | LearnedInit


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sequential: `x += post(mixer(pre(x)))`, then `x += post(mlp(pre(x)))`. Parallel: both read the same `x`.

    Plain: `x = post(mixer(pre(x)))`, then `x = post(mlp(pre(x)))`: no residual stream (MaxText's `simple` blocks).

    **Arguments:**

    - `mixer`: the token mixer; None for none.
    - `mlp`: the channel mixer; None for none.
    - `pre_mixer_norm`, `post_mixer_norm`, `pre_mlp_norm`, `post_mlp_norm`: norms before a layer and on its output.
        In a parallel block without `pre_mlp_norm` the MLP reads the mixer's normalised input.
    - `wiring`: `"sequential"`, `"parallel"` or `"plain"`.
    - `dropout`: rate; on the sum of a parallel block's branches, on the whole output of any other block (MaxText).
    """

    mixer: MixerConfig | None
    mlp: MLPConfig | LinearConfig | None
    pre_mixer_norm: NormConfig | None = None
    post_mixer_norm: NormConfig | None = None
    pre_mlp_norm: NormConfig | None = None
    post_mlp_norm: NormConfig | None = None
    wiring: Literal["sequential", "parallel", "plain"] = "sequential"
    dropout: float = 0.0

    def __post_init__(self):
        check_word("BlockConfig.wiring", self.wiring, ("sequential", "parallel", "plain"))
        check_number("BlockConfig.dropout", self.dropout, least=0)
        check(self.dropout < 1, f"BlockConfig.dropout={self.dropout} must be below 1.")
        for part in ("mixer", "mlp"):
            idle = [name for name in (f"pre_{part}_norm", f"post_{part}_norm") if getattr(self, name)]
            check(
                getattr(self, part) is not None or not idle,
                f"BlockConfig.{part}=None leaves {' and '.join(idle)} without a layer. Set {part} or leave them out.",
            )

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Block":
        mixer_key, mlp_key = jax.random.split(key)

        def norm(config):
            return None if config is None else config.build(embed_dim)

        return Block(
            mixer=None if self.mixer is None else self.mixer.build(embed_dim, key=mixer_key),
            mlp=None if self.mlp is None else self.mlp.build(embed_dim, key=mlp_key),
            pre_mixer_norm=norm(self.pre_mixer_norm),
            post_mixer_norm=norm(self.post_mixer_norm),
            pre_mlp_norm=norm(self.pre_mlp_norm),
            post_mlp_norm=norm(self.post_mlp_norm),
            config=self,
        )


class ActivationStats(eqx.Module):
    """Mean, standard deviation and fraction of zeros of a block's output; a leading `layers` axis once stacked."""

    mean: Float32[Array, "*layers"]
    std: Float32[Array, "*layers"]
    zero_fraction: Float32[Array, "*layers"]


class BlockStats(eqx.Module):
    """What one block tells about its forward pass; None where it is not asked for."""

    activations: ActivationStats | None = None


class Block(eqx.Module):
    """A token mixer and a channel mixer wired to the residual stream."""

    mixer: Mixer | None
    mlp: MLP | Linear | None
    pre_mixer_norm: Norm | None
    post_mixer_norm: Norm | None
    pre_mlp_norm: Norm | None
    post_mlp_norm: Norm | None
    config: BlockConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        ctx: Context,
        past: Past | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "batch length embed"], Entries | None, BlockStats]:
        """The new residual stream, the entries proposed for a cache, and statistics."""
        mlp_key, out_key = (None, None) if key is None else jax.random.split(key)
        x = save(ctx.constrain(x, "batch length embed"), "decoder_layer_input")
        if self.config.wiring == "parallel":
            mixed, entries, read = self._mixed(x, ctx, past)
            branches = mixed + self._fed(x if self.pre_mlp_norm is not None else read, ctx, mlp_key)
            x = x + dropout(branches, self.config.dropout, out_key)
        else:
            mixed, entries, _ = self._mixed(x, ctx, past)
            x = self._joined(x, mixed, self.mixer)
            x = self._joined(x, self._fed(x, ctx, mlp_key), self.mlp)
            x = dropout(x, self.config.dropout, out_key)
        x = ctx.constrain(x, "batch length embed")
        return x, entries, BlockStats(activations=_describe(x) if ctx.execution.layer_stats else None)

    def _mixed(self, x: Array, ctx: Context, past: Past | None) -> tuple[Array, Entries | None, Array]:
        """The mixer's branch, its entries, and what it read."""
        read = _apply(self.pre_mixer_norm, x)
        if self.mixer is None:
            return jnp.zeros_like(x), None, read
        mixed, entries = self.mixer(read, ctx, past)
        return _apply(self.post_mixer_norm, mixed), entries, read

    def _fed(self, x: Array, ctx: Context, key: PRNGKeyArray | None) -> Array:
        """The MLP's branch."""
        if self.mlp is None:
            return jnp.zeros_like(x)
        return _apply(self.post_mlp_norm, self.mlp(_apply(self.pre_mlp_norm, x), ctx, key=key))

    def _joined(self, x: Array, branch: Array, layer: Mixer | MLP | Linear | None) -> Array:
        """The stream after a branch; where there is no layer it passes through."""
        if self.config.wiring == "plain":
            return x if layer is None else branch
        return x + branch


def _apply(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _describe(x: Array) -> ActivationStats:
    y = x.astype(jnp.float32)
    return ActivationStats(mean=jnp.mean(y), std=jnp.std(y), zero_fraction=jnp.mean((y == 0).astype(jnp.float32)))
