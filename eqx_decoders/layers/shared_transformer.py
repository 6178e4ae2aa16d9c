"""Transformer blocks whose weights several layers share (Zamba 2; Glorioso et al. 2024).

    t = linear(mlp(norm(attention(norm([x | embedding])))),  out = mixer(norm(x + t))

The weights of attention and MLP are shared. Each layer that uses them has a separate `linear`, `norm` and `mixer`, a
LoRA update of the shared weights, and a separate key/value cache.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveInt, check
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.mlp import MLP, MLPConfig
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.numerics.low_rank import LowRank


SHARED = "shared transformer"  # key of `SharedInputs` in `ForwardContext.shared`


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedTransformerConfig(CheckedFields):
    """Configuration of shared transformer blocks, `mlp(norm(attention(norm([x | embedding]))))`.

    **Arguments:**

    - `attention`: attention whose input is the concatenation of the residual stream and the token embeddings. Its
        output has the features of the residual stream.
    - `mlp`: a gated MLP with `fused=True`.
    - `norm`: norm of the inputs of attention and MLP.
    - `count`: number of shared blocks with separate weights.
    """

    attention: AttentionConfig
    mlp: MLPConfig
    norm: RMSNormConfig = RMSNormConfig()
    count: PositiveInt = 1

    def __post_init__(self):
        super().__post_init__()
        check(
            self.mlp.fused,
            "SharedTransformerConfig.mlp.fused=False must be True: a layer has one LoRA update for gate and up.",
        )
        for field in ("out_dim", "value_dim", "kv_shared_from", "fused_qkv", "shared_kv"):
            value = getattr(self.attention, field)
            check(
                value is None or value is False,
                f"SharedTransformerConfig.attention has {field}={value!r}, which is not supported: it needs separate "
                f"projections for queries, keys and values with equal head_dim. Leave {field} out.",
            )

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "SharedTransformers":
        def build_block(key: PRNGKeyArray) -> dict[str, Any]:
            attention_key, mlp_key = jax.random.split(key)
            attention = dataclasses.replace(self.attention, out_dim=embed_dim)
            return dict(
                input_norm=self.norm.build(2 * embed_dim),
                attention=attention.build(2 * embed_dim, key=attention_key),
                mlp_norm=self.norm.build(embed_dim),
                mlp=self.mlp.build(embed_dim, key=mlp_key),
            )

        return SharedTransformers(**eqx.filter_vmap(build_block)(jax.random.split(key, self.count)))


class SharedTransformers(eqx.Module):
    """Weights of all `count` shared blocks, stacked along a leading axis."""

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP


class SharedInputs(NamedTuple):
    """Inputs of all layers with a shared transformer: its weights, and the token embeddings."""

    weights: SharedTransformers
    embeddings: Array


def share(
    ctx: ForwardContext, weights: SharedTransformers | None, x: Float[Array, "batch length *streams embed"]
) -> ForwardContext:
    """Add the shared weights and the token embeddings to `ctx.shared`; without weights return `ctx` unchanged.

    `x`: input of the first layer, which is the token embeddings. Raises ConfigError with a pipeline or a `batch_split`.
    """
    if weights is None:
        return ctx
    execution = ctx.execution
    check(
        execution.pipeline is None and execution.batch_split == 1,
        f"Execution.pipeline={execution.pipeline} and Execution.batch_split={execution.batch_split} must be None and "
        "1: layers with a shared transformer do not support splitting the batch.",
    )
    embeddings = x if x.ndim == 3 else x[:, :, 0]  # all residual streams start with the same values
    return dataclasses.replace(ctx, shared={**ctx.shared, SHARED: SharedInputs(weights, embeddings)})


class TrainedLowRank(LowRank):
    """Weight with a low-rank update; unlike in `LowRank`, the base is trained, too."""

    def base_and_pair(self) -> tuple[Array | AbstractWeight, LowRankPair]:
        return self.base, LowRankPair(self.scale, self.lora_a, self.lora_b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AidedMixerConfig(MixerConfig):
    """Configuration of a mixer with a shared transformer block, `mixer(norm(x + linear(shared([x | embedding]))))`.

    **Arguments:**

    - `mixer`, `norm`: the layer's mixer and its input norm, which are not shared.
    - `transformer`: configuration of the shared blocks; it must be the same in all layers of a decoder.
    - `number`: index of the shared block that this layer uses, from 0 to `transformer.count - 1`.
    - `mlp_rank`: rank of this layer's LoRA update of the MLP's gate and up projections; None for no update.
    - `attention_rank`: rank of this layer's LoRA updates of the query, key and value projections; None for no update.
    """

    mixer: MixerConfig
    transformer: SharedTransformerConfig
    norm: RMSNormConfig = RMSNormConfig()
    number: NonNegativeInt = 0
    mlp_rank: PositiveInt | None = None
    attention_rank: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()
        check(
            self.number < self.transformer.count,
            f"AidedMixerConfig.number={self.number} must be less than "
            f"SharedTransformerConfig.count={self.transformer.count}.",
        )

    def inner_mixers(self) -> tuple[MixerConfig, ...]:
        """Return the attention of the shared transformer block, and the mixer."""
        return self.transformer.attention, self.mixer

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the layer's two caches: of the shared attention and of the mixer."""
        return {
            "attention": self.transformer.attention.cache_shape(max_length),
            "mixer": self.mixer.cache_shape(max_length),
        }

    def token_products(self, length: int) -> int:
        """Count multiplications per token without those of weights."""
        return self.transformer.attention.token_products(length) + self.mixer.token_products(length)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "AidedMixer":
        keys = jax.random.split(key, 10)
        attention = self.transformer.attention
        query_shape = (attention.num_heads, attention.head_dim)
        kv_shape = (attention.num_kv_heads, attention.head_dim)

        def new_pair(kind: Any, pair_key: PRNGKeyArray, rank: int | None, inner: int, outer: tuple[int, ...]) -> Any:
            if rank is None:
                return None
            return kind(down=fan_in(pair_key, (inner, rank), jnp.float32, inner), up=jnp.zeros((rank, *outer)))

        return AidedMixer(
            linear=fan_in(keys[0], (embed_dim, embed_dim), jnp.float32, embed_dim),
            norm=self.norm.build(embed_dim),
            mixer=self.mixer.build(embed_dim, key=keys[1]),
            mlp_pair=new_pair(MLPPair, keys[2], self.mlp_rank, embed_dim, (2, self.transformer.mlp.mlp_dim)),
            query_pair=new_pair(QueryPair, keys[3], self.attention_rank, 2 * embed_dim, query_shape),
            key_pair=new_pair(KeyPair, keys[4], self.attention_rank, 2 * embed_dim, kv_shape),
            value_pair=new_pair(KeyPair, keys[5], self.attention_rank, 2 * embed_dim, kv_shape),
            config=self,
        )


class MLPPair(eqx.Module):
    """Factors of a LoRA update of the gate and up projections."""

    down: Float[Array, "embed rank"]
    up: Float[Array, "rank inputs mlp"]


class QueryPair(eqx.Module):
    """Factors of a LoRA update of the query projection."""

    down: Float[Array, "embed rank"]
    up: Float[Array, "rank heads head_dim"]


class KeyPair(eqx.Module):
    """Factors of a LoRA update of the key or value projection."""

    down: Float[Array, "embed rank"]
    up: Float[Array, "rank kv_heads head_dim"]


class AidedMixer(eqx.Module):
    """Mixer with a shared transformer block, `mixer(norm(x + linear(shared([x | embedding]))))`."""

    linear: Float[Array, "embed mlp"]
    norm: Norm
    mixer: Any
    mlp_pair: MLPPair | None
    query_pair: QueryPair | None
    key_pair: KeyPair | None
    value_pair: KeyPair | None
    config: AidedMixerConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the new entries of its two caches by name."""
        attention_past, mixer_past = (None if past is None else past[name] for name in ("attention", "mixer"))
        inputs: SharedInputs = ctx.shared[SHARED]
        block = jax.tree.map(lambda leaf: leaf[self.config.number], inputs.weights)
        attention = _add_pairs(block.attention, query=self.query_pair, key=self.key_pair, value=self.value_pair)
        mlp = _add_pairs(block.mlp, gate_up=self.mlp_pair)
        attention_input = block.input_norm(jnp.concatenate([x, inputs.embeddings.astype(x.dtype)], axis=-1))
        attention_out, attention_entries = attention(attention_input, ctx, attention_past)
        block_out = mlp(block.mlp_norm(attention_out), ctx)
        block_out = ctx.einsum("batch length embed, embed mlp -> batch length mlp", block_out, self.linear)
        mixer_input = self.norm(x + ctx.constrain(block_out, "batch length embed"))
        out, mixer_entries = self.mixer(mixer_input, ctx, mixer_past)
        return out, {"attention": attention_entries, "mixer": mixer_entries}

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(*self(x, ctx, past))


def _add_pairs(layer: Any, **pairs: Any) -> Any:
    """Return the layer with low-rank updates of the named weights; a pair of None leaves the weight unchanged."""
    pairs = {name: pair for name, pair in pairs.items() if pair is not None}
    if not pairs:
        return layer
    weights = [
        TrainedLowRank(base=getattr(layer, name), lora_a=pair.down, lora_b=pair.up, scale=1.0)
        for name, pair in pairs.items()
    ]
    return eqx.tree_at(lambda layer: [getattr(layer, name) for name in pairs], layer, weights)
