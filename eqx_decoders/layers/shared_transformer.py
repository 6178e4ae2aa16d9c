"""A transformer block whose weights several layers share, beside mixers of their own (Zamba 2; Glorioso et al. 2024).

    t = linear(mlp(norm(attention(norm([x | embedding])))),  out = mixer(norm(x + t))

Attention and MLP are shared, and have a low-rank addition for each layer that uses them; keys and values are a layer's.
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
from eqx_decoders.layers.recurrent.mamba2 import Mamba2, Mamba2Config
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.numerics.low_rank import LowRank


SHARED = "shared transformer"  # under which layers find its weights, and the embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedTransformerConfig(CheckedFields):
    """Configuration of `mlp(norm(attention(norm([x | embedding]))))`.

    **Arguments:**

    - `attention`: reads the stream and the embeddings side by side; its output has the features of the stream.
    - `mlp`: gated, with one product for gate and up.
    - `norm`: of both inputs.
    - `count`: such blocks, each with weights of its own.
    """

    attention: AttentionConfig
    mlp: MLPConfig
    norm: RMSNormConfig = RMSNormConfig()
    count: PositiveInt = 1

    def __post_init__(self):
        super().__post_init__()
        check(self.mlp.fused, "SharedTransformerConfig.mlp.fused=False must be True: layers add to one product.")
        plain = all(getattr(self.attention, name) is None for name in ("out_dim", "value_dim", "kv_shared_from"))
        plain = plain and not self.attention.fused_qkv and not self.attention.shared_kv
        rule = "must have projections of its own for queries, keys and values, and no out_dim or value_dim"
        check(plain, f"SharedTransformerConfig.attention {rule}.")

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "SharedTransformers":
        def one(key: PRNGKeyArray) -> dict[str, Any]:
            attention_key, mlp_key = jax.random.split(key)
            attention = dataclasses.replace(self.attention, out_dim=embed_dim)
            return dict(
                input_norm=self.norm.build(2 * embed_dim),
                attention=attention.build(2 * embed_dim, key=attention_key),
                mlp_norm=self.norm.build(embed_dim),
                mlp=self.mlp.build(embed_dim, key=mlp_key),
            )

        return SharedTransformers(**eqx.filter_vmap(one)(jax.random.split(key, self.count)))


class SharedTransformers(eqx.Module):
    """Weights of all `count` blocks, stacked."""

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP


class Shared(NamedTuple):
    """What layers find under `SHARED`: the weights, and the embeddings of the tokens."""

    weights: SharedTransformers
    embeddings: Array


def share(
    ctx: ForwardContext, weights: SharedTransformers | None, x: Float[Array, "batch length *streams embed"]
) -> ForwardContext:
    """Return the context with what layers find under `SHARED`; `x` is the first layer's input. None adds nothing."""
    if weights is None:
        return ctx
    run = ctx.execution
    rule = "can't run layers that share a transformer block: they cut by rows what layers are given"
    check(run.pipeline is None and run.batch_split == 1, f"Execution.pipeline and Execution.batch_split {rule}.")
    embeddings = x if x.ndim == 3 else x[:, :, 0]  # all residual streams begin as the same
    return dataclasses.replace(ctx, shared={**ctx.shared, SHARED: Shared(weights, embeddings)})


class Added(LowRank):
    """Weight with a low-rank addition, of which both are trained."""

    def base_and_pair(self) -> tuple[Array | AbstractWeight, LowRankPair]:
        return self.base, LowRankPair(self.scale, self.lora_a, self.lora_b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AidedMixerConfig(MixerConfig):
    """Configuration of `mixer(norm(x + linear(shared([x | embedding]))))`.

    **Arguments:**

    - `mixer`, `norm`: what this layer has for itself.
    - `transformer`: the block that it shares with other layers: all have the same configuration.
    - `number`: which of its `count` blocks, from 0.
    - `mlp_rank`, `attention_rank`: ranks of what this layer adds to the MLP's input, and to queries, keys and values;
        None for nothing.
    """

    mixer: Mamba2Config
    transformer: SharedTransformerConfig
    norm: RMSNormConfig = RMSNormConfig()
    number: NonNegativeInt = 0
    mlp_rank: PositiveInt | None = None
    attention_rank: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()
        rule = f"must be less than SharedTransformerConfig.count={self.transformer.count}"
        check(self.number < self.transformer.count, f"AidedMixerConfig.number={self.number} {rule}.")

    def inner_mixers(self) -> tuple[MixerConfig, ...]:
        """Return the attention of the shared transformer block, and the mixer."""
        return self.transformer.attention, self.mixer

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of both caches: of the shared attention as this layer uses it, and of the mixer."""
        return {
            "attention": self.transformer.attention.cache_shape(max_length),
            "mixer": self.mixer.cache_shape(max_length),
        }

    def token_products(self, length: int) -> int:
        """Count multiplications per token besides those of weights."""
        return self.transformer.attention.token_products(length) + self.mixer.token_products(length)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "AidedMixer":
        keys, attention = jax.random.split(key, 10), self.transformer.attention
        heads = (attention.num_heads, attention.head_dim)
        kv_heads = (attention.num_kv_heads, attention.head_dim)

        def pair(number: int, rank: int | None, inner: int, outer: tuple[int, ...]) -> dict[str, Array] | None:
            if rank is None:
                return None
            down = fan_in(keys[number], (inner, rank), jnp.float32, inner)
            return dict(down=down, up=jnp.zeros((rank, *outer)))

        wide = 2 * embed_dim
        return AidedMixer(
            linear=fan_in(keys[0], (embed_dim, embed_dim), jnp.float32, embed_dim),
            norm=self.norm.build(embed_dim),
            mixer=self.mixer.build(embed_dim, key=keys[1]),
            mlp_pair=_pair(MLPPair, pair(2, self.mlp_rank, embed_dim, (2, self.transformer.mlp.mlp_dim))),
            query_pair=_pair(QueryPair, pair(3, self.attention_rank, wide, heads)),
            key_pair=_pair(KeyPair, pair(4, self.attention_rank, wide, kv_heads)),
            value_pair=_pair(KeyPair, pair(5, self.attention_rank, wide, kv_heads)),
            config=self,
        )


class MLPPair(eqx.Module):
    """Low-rank addition to the input of an MLP."""

    down: Float[Array, "embed rank"]
    up: Float[Array, "rank inputs mlp"]


class QueryPair(eqx.Module):
    """Low-rank addition to queries."""

    down: Float[Array, "embed rank"]
    up: Float[Array, "rank heads head_dim"]


class KeyPair(eqx.Module):
    """Low-rank addition to keys or values."""

    down: Float[Array, "embed rank"]
    up: Float[Array, "rank kv_heads head_dim"]


def _pair(kind: Any, parts: dict[str, Array] | None) -> Any:
    return None if parts is None else kind(**parts)


class AidedMixer(eqx.Module):
    """Mixer beside a shared transformer block: `mixer(norm(x + linear(shared([x | embedding]))))`."""

    linear: Float[Array, "embed mlp"]
    norm: Norm
    mixer: Mamba2
    mlp_pair: MLPPair | None
    query_pair: QueryPair | None
    key_pair: KeyPair | None
    value_pair: KeyPair | None
    config: AidedMixerConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the new entries of both caches."""
        attention_past, mixer_past = (None if past is None else past[name] for name in ("attention", "mixer"))
        shared: Shared = ctx.shared[SHARED]
        weights = jax.tree.map(lambda leaf: leaf[self.config.number], shared.weights)
        both = weights.input_norm(jnp.concatenate([x, shared.embeddings.astype(x.dtype)], axis=-1))
        attended, entries = self._with_pairs(weights.attention)(both, ctx, attention_past)
        mlp = _added(weights.mlp, gate_up=self.mlp_pair)
        aid = mlp(weights.mlp_norm(attended), ctx)
        aid = ctx.einsum("batch length embed, embed mlp -> batch length mlp", aid, self.linear)
        out, new = self.mixer(self.norm(x + ctx.constrain(aid, "batch length embed")), ctx, mixer_past)
        return out, {"attention": entries, "mixer": new}

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _with_pairs(self, attention: Attention) -> Attention:
        return _added(attention, query=self.query_pair, key=self.key_pair, value=self.value_pair)


def _added(layer: Any, **pairs: Any) -> Any:
    """Return the layer with additions to these weights."""
    given = {name: pair for name, pair in pairs.items() if pair is not None}
    new = [
        Added(base=getattr(layer, name), lora_a=pair.down, lora_b=pair.up, scale=1.0) for name, pair in given.items()
    ]
    return eqx.tree_at(lambda part: [getattr(part, name) for name in given], layer, new) if given else layer
