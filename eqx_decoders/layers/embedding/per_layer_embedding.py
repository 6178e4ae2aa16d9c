"""Per-layer embeddings (Gemma 3n, Gemma 4): each layer reads a separate small embedding of every token."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, ConfigError, NonNegativeInt, PositiveFloat, PositiveInt
from eqx_decoders.layers.base import BranchResult, ExtraConfig
from eqx_decoders.layers.embedding.sharded_lookup import look_up
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in, normal


INPUT = "per_layer_embedding"  # name of this input in `ForwardContext.layer_inputs`


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerEmbeddingConfig(CheckedFields):
    """Configuration of per-layer embeddings. For layer l and a token with embedding x they are

        (norm(project_l(x) / sqrt(embed)) + sqrt(features) table_l[token]) / sqrt(2)

    The embeddings of all layers with a `PerLayerInputConfig` are computed together, before the first layer.

    **Arguments:**

    - `features`: features of an embedding.
    - `vocab_size`: number of token ids in the table.
    - `unknown_token`: token id that replaces ids outside of the table; None: the last id of the table.
    - `norm`: norm of the projection.
    - `init_std`: standard deviation of a new table.
    """

    features: PositiveInt
    vocab_size: PositiveInt
    unknown_token: NonNegativeInt | None = None
    norm: NormConfig = RMSNormConfig()
    init_std: PositiveFloat = 0.02

    def build(self, embed_dim: int, layers: int, *, key: PRNGKeyArray) -> "PerLayerEmbedding":
        """Build the embeddings of `layers` layers."""
        table_key, projection_key = jax.random.split(key)
        return PerLayerEmbedding(
            table=normal(table_key, (self.vocab_size, layers, self.features), jnp.float32, self.init_std),
            projection=fan_in(projection_key, (embed_dim, layers, self.features), jnp.float32, embed_dim),
            norm=self.norm.build(self.features),
            config=self,
        )


class PerLayerEmbedding(eqx.Module):
    """Per-layer embeddings of all layers; see `PerLayerEmbeddingConfig`."""

    table: Float[Array, "rows per_layer row_dim"]
    projection: Float[Array, "embed per_layer per_layer_input"]
    norm: Norm
    config: PerLayerEmbeddingConfig = eqx.field(static=True)

    def __call__(
        self, tokens: Int[Array, "batch length"] | None, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "per_layer batch length per_layer_input"]:
        """Compute the embedding of each token for each layer."""
        if tokens is None:
            raise ConfigError("Per-layer embeddings need token ids: call the model with tokens, not only with embeds.")
        if self.config.unknown_token is not None:
            tokens = jnp.where(tokens < self.config.vocab_size, tokens, self.config.unknown_token)
        embedded = look_up(self.table, tokens, "rows per_layer row_dim", ctx)
        embedded = embedded * jnp.asarray(self.config.features**0.5, x.dtype)
        pattern = "batch length embed, embed per_layer per_layer_input -> batch length per_layer per_layer_input"
        projected = self.norm(ctx.einsum(pattern, x, self.projection) * x.shape[-1] ** -0.5)
        return jnp.moveaxis((projected + embedded) * 2**-0.5, 2, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerInputConfig(ExtraConfig):
    """Configuration of a layer that reads a per-layer embedding e: `out(act(gate x) * e)`. It is placed after the MLP.

    **Arguments:**

    - `features`: features of the per-layer embedding.
    - `activation`: one of `ACTIVATIONS`.
    """

    takes: ClassVar[tuple[str, ...]] = (INPUT,)
    features: PositiveInt
    activation: ActivationName = "gelu_tanh"

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "PerLayerInput":
        gate_key, out_key = jax.random.split(key)
        return PerLayerInput(
            gate=fan_in(gate_key, (embed_dim, self.features), jnp.float32, embed_dim),
            out=fan_in(out_key, (self.features, embed_dim), jnp.float32, self.features),
            config=self,
        )


class PerLayerInput(eqx.Module):
    """Layer `out(act(gate x) * e)`, where e is the per-layer embedding of the token."""

    gate: Float[Array, "embed per_layer_input"]
    out: Float[Array, "per_layer_input embed"]
    config: PerLayerInputConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        embedded = ctx.layer_inputs.get(INPUT)
        if embedded is None:
            raise ConfigError("PerLayerInputConfig needs per-layer embeddings: set DecoderConfig.per_layer_embedding.")
        gate = ctx.einsum("batch length embed, embed per_layer_input -> batch length per_layer_input", x, self.gate)
        hidden = ACTIVATIONS[self.config.activation](gate) * embedded.astype(x.dtype)
        out = ctx.einsum("batch length per_layer_input, per_layer_input embed -> batch length embed", hidden, self.out)
        return ctx.constrain(out, "batch length embed")

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx))
