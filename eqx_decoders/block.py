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
from eqx_decoders.layers.experts import Experts, ExpertsConfig
from eqx_decoders.layers.latent import LatentAttention, LatentAttentionConfig
from eqx_decoders.layers.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.layers.router import RoutingStats
from eqx_decoders.numerics import fan_in
from eqx_decoders.remat import save


MixerConfig = AttentionConfig | LatentAttentionConfig | LearnedInitConfig
Mixer = Attention | LatentAttention | LearnedInit


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sequential: `x += post(mixer(pre(x)))`, then `x += post(mlp(pre(x)))`. Parallel: both read the same `x`.

    Plain: `x = post(mixer(pre(x)))`, then `x = post(mlp(pre(x)))`: no residual stream (MaxText's `simple` blocks).
    Chained: `x += up(post(mlp(pre(post(mixer(pre(x)))))))`; after the mixer features are its `out_dim`, which the
    matrix `up` turns into those of the stream again (MaxText's `qwen3_custom_moe`).

    **Arguments:**

    - `mixer`: the token mixer; None for none.
    - `mlp`: the channel mixer; None for none.
    - `pre_mixer_norm`, `post_mixer_norm`, `pre_mlp_norm`, `post_mlp_norm`: norms before a layer and on its output.
        In a parallel block without `pre_mlp_norm` the MLP reads the mixer's normalised input.
    - `wiring`: `"sequential"`, `"parallel"`, `"plain"` or `"chained"`.
    - `dropout`: rate; on the sum of a parallel block's branches, on the whole output of any other block (MaxText).
    """

    mixer: MixerConfig | None
    mlp: MLPConfig | LinearConfig | ExpertsConfig | None
    pre_mixer_norm: NormConfig | None = None
    post_mixer_norm: NormConfig | None = None
    pre_mlp_norm: NormConfig | None = None
    post_mlp_norm: NormConfig | None = None
    wiring: Literal["sequential", "parallel", "plain", "chained"] = "sequential"
    dropout: float = 0.0

    def __post_init__(self):
        check_word("BlockConfig.wiring", self.wiring, ("sequential", "parallel", "plain", "chained"))
        check_number("BlockConfig.dropout", self.dropout, least=0)
        check(self.dropout < 1, f"BlockConfig.dropout={self.dropout} must be below 1.")
        for part in ("mixer", "mlp"):
            idle = [name for name in (f"pre_{part}_norm", f"post_{part}_norm") if getattr(self, name)]
            check(
                getattr(self, part) is not None or not idle,
                f"BlockConfig.{part}=None leaves {' and '.join(idle)} without a layer. Set {part} or leave them out.",
            )
        chained = self.wiring == "chained"
        check(
            not chained or (self.mixer is not None and self.mlp is not None),
            "BlockConfig.wiring='chained' needs a mixer and an mlp: one feeds the other.",
        )
        check(
            chained or self._mixer_out is None,
            f"AttentionConfig.out_dim={self._mixer_out} needs BlockConfig.wiring='chained': other blocks add the "
            "output to the stream.",
        )

    @property
    def _mixer_out(self) -> int | None:
        """Features of the mixer's output where they are not those of the stream."""
        return self.mixer.out_dim if isinstance(self.mixer, AttentionConfig) else None

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Block":
        mixer_key, mlp_key = jax.random.split(key)
        inner = self._mixer_out or embed_dim
        up_key = jax.random.fold_in(key, 2)

        def norm(config, size=inner):
            return None if config is None else config.build(size)

        return Block(
            mixer=None if self.mixer is None else self.mixer.build(embed_dim, key=mixer_key),
            mlp=None if self.mlp is None else self.mlp.build(inner, key=mlp_key),
            pre_mixer_norm=norm(self.pre_mixer_norm, embed_dim),
            post_mixer_norm=norm(self.post_mixer_norm),
            pre_mlp_norm=norm(self.pre_mlp_norm),
            post_mlp_norm=norm(self.post_mlp_norm),
            up=fan_in(up_key, (inner, embed_dim), jnp.float32, inner) if self.wiring == "chained" else None,
            config=self,
        )


class ActivationStats(eqx.Module):
    """Mean, standard deviation and fraction of zeros of a block's output; a leading `layers` axis once stacked."""

    mean: Float32[Array, "*layers"]
    std: Float32[Array, "*layers"]
    zero_fraction: Float32[Array, "*layers"]


class BlockStats(eqx.Module):
    """What one block tells about its forward pass; None where it is not asked for, or where there are no experts."""

    activations: ActivationStats | None = None
    routing: RoutingStats | None = None


class Block(eqx.Module):
    """A token mixer and a channel mixer wired to the residual stream."""

    mixer: Mixer | None
    mlp: MLP | Linear | Experts | None
    pre_mixer_norm: Norm | None
    post_mixer_norm: Norm | None
    pre_mlp_norm: Norm | None
    post_mlp_norm: Norm | None
    up: Float[Array, "latent embed"] | None
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
        mixer_out, entries, normed = self._mixer_branch(x, ctx, past)
        if self.config.wiring == "parallel":
            mlp_out, routing = self._mlp_branch(x if self.pre_mlp_norm is not None else normed, ctx, mlp_key)
            x = x + dropout(mixer_out + mlp_out, self.config.dropout, out_key)
        elif self.up is not None:
            mlp_out, routing = self._mlp_branch(mixer_out, ctx, mlp_key)
            mlp_out = ctx.einsum("batch length latent, latent embed -> batch length embed", mlp_out, self.up)
            x = dropout(x + mlp_out, self.config.dropout, out_key)
        else:
            x = self._add_branch(x, mixer_out, self.mixer)
            mlp_out, routing = self._mlp_branch(x, ctx, mlp_key)
            x = self._add_branch(x, mlp_out, self.mlp)
            x = dropout(x, self.config.dropout, out_key)
        x = ctx.constrain(x, "batch length embed")
        activations = _activation_stats(x) if ctx.execution.layer_stats else None
        return x, entries, BlockStats(activations=activations, routing=routing)

    def _mixer_branch(self, x: Array, ctx: Context, past: Past | None) -> tuple[Array, Entries | None, Array]:
        """The mixer's branch, its entries, and what it read."""
        normed = _normalize(self.pre_mixer_norm, x)
        if self.mixer is None:
            return jnp.zeros_like(x), None, normed
        mixer_out, entries = self.mixer(normed, ctx, past)
        return _normalize(self.post_mixer_norm, mixer_out), entries, normed

    def _mlp_branch(self, x: Array, ctx: Context, key: PRNGKeyArray | None) -> tuple[Array, RoutingStats | None]:
        """The MLP's branch, and how experts were used."""
        if self.mlp is None:
            return jnp.zeros_like(x), None
        out, routing = self.mlp(_normalize(self.pre_mlp_norm, x), ctx, key=key), None
        if isinstance(out, tuple):
            out, routing = out
        return _normalize(self.post_mlp_norm, out), routing

    def _add_branch(self, x: Array, branch: Array, layer: eqx.Module | None) -> Array:
        """The stream after a branch; where there is no layer it passes through."""
        if self.config.wiring == "plain":
            return x if layer is None else branch
        return x + branch


def _normalize(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _activation_stats(x: Array) -> ActivationStats:
    y = x.astype(jnp.float32)
    return ActivationStats(mean=jnp.mean(y), std=jnp.std(y), zero_fraction=jnp.mean((y == 0).astype(jnp.float32)))
