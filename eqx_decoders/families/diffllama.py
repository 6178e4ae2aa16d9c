"""DiffLlama (Matsumoto 2024): Llama with differential attention (Ye et al. 2024).

Differential attention is the difference of the outputs of two attention heads:

    o = softmax(q_1 K_1^T) V - lambda softmax(q_2 K_2^T) V,
    lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_0,    lambda_0 = 0.8 - 0.6 e^(-0.3 layer), the first layer being 0

V has as many features as K_1 and K_2 together. So [K_1 | K_2] and V are stored as one ordinary key/value head with
twice the features, and the queries become [q_1 | 0] and [0 | q_2]. This reuses the kernels, caches and sharding of
`Attention`, at the cost of a third more multiplications.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import check
from eqx_decoders.families.common import ENDS, GATED_MLP, LAYER, PRE_NORMS, DecoderSizes, decoder_sizes
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig, AttentionPast
from eqx_decoders.layers.attention.variant import AttentionVariant
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, kv_shape
from eqx_decoders.layers.norm import Norm, RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import COMPUTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifferentialAttentionConfig(AttentionVariant, MixerConfig):
    """Configuration of differential attention: the head output `(1 - lambda_0) norm(o)` enters the output projection.

    **Arguments:**

    - `attention`: the underlying attention. Each differential head uses two of its query heads and two of its key
        heads, so there are half as many differential heads.
    - `norm`: normalization of the difference.
    """

    built_by_layer: ClassVar[bool] = True

    attention: AttentionConfig
    norm: RMSNormConfig = RMSNormConfig(scale=False)

    def __post_init__(self):
        super().__post_init__()
        num_kv_heads = self.attention.num_kv_heads
        check(
            num_kv_heads % 2 == 0,
            f"DifferentialAttentionConfig.attention has num_kv_heads={num_kv_heads}, which must be even: a "
            "differential head uses two key heads.",
        )
        unsupported = ("fused_qkv", "shared_kv", "sinks", "output_gate", "inner_norm", "out_dim", "kv_shared_from")
        unsupported += ("value_dim", "value_norm", "selection", "alibi")
        self.check_unsupported(*unsupported, reason="differential attention does not implement it")
        over = "head" if self.attention.qk_norm is None else self.attention.qk_norm.over
        check(over == "head", f"DifferentialAttentionConfig.attention has qk_norm.over={over!r}, which must be 'head'.")

    def cache_shape(self, max_length: int) -> KVShape:
        """Return the shape of the cache: `[K_1 | K_2]` and V of each differential head."""
        kv_heads = self.attention.num_kv_heads // 2
        return kv_shape(self.mask, max_length, kv_heads=kv_heads, head_dim=2 * self.attention.head_dim)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the scores and of the weighted sum of values, with doubled head_dim."""
        return 2 * self.attention.token_products(length)

    def build(self, embed_dim: int, *, key: PRNGKeyArray, layer: int | Int[Array, ""] = 0) -> "DifferentialAttention":
        """Build the layer. `layer`: index of the layer in the decoder, which determines lambda_0."""
        config = self.attention
        keys = jax.random.split(key, 8)
        heads = config.num_heads // 2
        kv_heads = config.num_kv_heads // 2
        attention = config.build(embed_dim, key=key)
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        counts = (heads, kv_heads, kv_heads)
        for name, count, kernel_key in zip(("query", "key", "value"), counts, keys[:3], strict=True):
            shape = (count, 2, config.head_dim)
            fields[name] = fan_in(kernel_key, (embed_dim, *shape), jnp.float32, embed_dim, "normal")
            fields[f"{name}_bias"] = jnp.zeros(shape) if config.qkv_bias else None
        out_shape = (heads, 2 * config.head_dim, embed_dim)
        fields["out"] = fan_in(keys[3], out_shape, jnp.float32, config.num_heads * config.head_dim, "normal")
        vectors = ("first_query", "first_key", "second_query", "second_key")
        for name, vector_key in zip(vectors, keys[4:], strict=True):
            fields[name] = 0.1 * jax.random.normal(vector_key, (config.head_dim,))
        layer_number = jnp.asarray(layer, jnp.float32)[None]
        return DifferentialAttention(**fields, layer_number=layer_number, norm=self.norm.build(2 * config.head_dim))


class DifferentialAttention(Attention):
    """Differential attention.

    The axis `halves` has the two heads of a differential head. `first_query`, `first_key`, `second_query` and
    `second_key` are a_1, b_1, a_2 and b_2 of lambda; `layer_number` counts from 0.
    """

    query: Float[Array, "embed heads halves head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    key: Float[Array, "embed kv_heads halves head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    value: Float[Array, "embed kv_heads halves head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    query_bias: Float[Array, "heads halves head_dim"] | None
    key_bias: Float[Array, "kv_heads halves head_dim"] | None
    value_bias: Float[Array, "kv_heads halves head_dim"] | None
    out: Float[Array, "heads value_dim embed"]
    first_query: Float[Array, "head_dim"]
    first_key: Float[Array, "head_dim"]
    second_query: Float[Array, "head_dim"]
    second_key: Float[Array, "head_dim"]
    layer_number: Float[Array, "one"] = eqx.field(metadata=COMPUTED)
    norm: Norm

    def _attend_heads(self, x: Array, ctx: ForwardContext, past: AttentionPast | None) -> tuple[Array, Any]:
        out, entries = super()._attend_heads(x, ctx, past)
        out = out.reshape(*out.shape[:2], -1, 2, out.shape[-1]).astype(jnp.float32)
        lambda_0 = 0.8 - 0.6 * jnp.exp(-0.3 * self.layer_number.astype(jnp.float32))
        lambda_ = (self._exponential("first") - self._exponential("second") + lambda_0)[:, None, None, None]
        difference = self.norm(out[:, :, :, 0] - lambda_ * out[:, :, :, 1])
        return (difference * (1.0 - lambda_0)[:, None, None, None]).astype(x.dtype), entries

    def _exponential(self, name: str) -> Float32[Array, ""]:
        query, key = (getattr(self, f"{name}_{part}").astype(jnp.float32) for part in ("query", "key"))
        return jnp.exp(jnp.sum(query * key))

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array, Array]:
        """Project to queries, keys and values; the two heads of a differential head are adjacent."""

        def project(name: str) -> Array:
            pattern = "batch length embed, embed heads halves head_dim -> batch length heads halves head_dim"
            pairs = add_bias(ctx.einsum(pattern, x, getattr(self, name)), getattr(self, f"{name}_bias"))
            return pairs.reshape(*x.shape[:2], -1, self.config.head_dim)

        return project("query"), project("key"), project("value")

    def _normalize_and_rotate(
        self, query: Array, key: Array | None, value: Array | None, ctx: ForwardContext
    ) -> tuple[Array, NewKV]:
        """Return the queries `[q_1 | 0]` and `[0 | q_2]`, the keys `[K_1 | K_2]` and the values V."""
        query, new_kv = super()._normalize_and_rotate(query, key, value, ctx)
        assert new_kv is not None and new_kv.value is not None
        batch, length, heads, dim = query.shape
        own_half = jnp.eye(2, dtype=bool)[None, None, None, :, :, None]
        query = jnp.where(own_half, query.reshape(batch, length, -1, 2, 1, dim), 0)
        query = query.reshape(batch, length, heads, 2 * dim)
        key, value = (x.reshape(batch, length, -1, 2 * dim) for x in (new_kv.key, new_kv.value))
        return ctx.constrain(query, "batch length heads head_dim"), NewKV(key=key, value=value)


def diffllama(shape: DecoderSizes, *, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of DiffLlama blocks; a differential head has two of `shape.num_heads` heads."""
    norm = RMSNormConfig(eps=shape.eps, scale=False)
    attention = shape.attention(rope=rope)
    return shape.decoder(shape.block(DifferentialAttentionConfig(attention=attention, norm=norm), shape.mlp()))


_ATTENTION = LAYER + "self_attn."


def _projection(name: str, path: str, heads: str) -> tuple[Weight, ...]:
    """Return the rows of a projection. Checkpoints store the first heads of all pairs, then the second heads."""
    stored = f"(halves {heads} head_dim)"
    loaded = f"{heads} halves head_dim"
    return (
        Weight(f"{_ATTENTION}{name}.weight", path, f"{stored} embed -> embed {loaded}"),
        Weight(f"{_ATTENTION}{name}.bias", f"{path}_bias", f"{stored} -> {loaded}"),
    )


_LAMBDAS = {"q1": "first_query", "k1": "first_key", "q2": "second_query", "k2": "second_key"}
_HEADS = "blocks.0.mixer.attention."
_PATHS = {
    "num_attention_heads": _HEADS + "num_heads",
    "num_key_value_heads": _HEADS + "num_kv_heads",
    "head_dim": _HEADS + "head_dim",
    "attention_bias": _HEADS + "qkv_bias",
}
FAMILY = Family(
    model_type="diffllama",
    architecture="DiffLlamaForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, paths=_PATHS),
        Check(
            lambda values: values["shape"].num_kv_heads % 2 == 0,
            "num_key_value_heads={shape.num_kv_heads} must be even: a differential head has two heads.",
        ),
        rope_settings(),
    ),
    build=diffllama,
    weights=(
        *ENDS,
        *PRE_NORMS,
        *_projection("q_proj", "mixer.query", "heads"),
        *_projection("k_proj", "mixer.key", "kv_heads"),
        *_projection("v_proj", "mixer.value", "kv_heads"),
        Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
        Weight(_ATTENTION + "o_proj.bias", "mixer.out_bias", "embed -> embed"),
        *(Weight(f"{_ATTENTION}lambda_{n}", f"mixer.{path}", "head_dim -> head_dim") for n, path in _LAMBDAS.items()),
        *GATED_MLP,
    ),
    ignored_keys={"lambda_std_dev": "initialization only"},
)


MODELS = {
    "diffllama-1b": dict(
        model_type="diffllama", vocab_size=32_000, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        intermediate_size=8192,
    ),
}  # fmt: skip
