"""Doge (Shi et al. 2025): dynamic mask attention, and residual connections with gains.

In dynamic mask attention, queries attend to the keys with the largest learned biases:

    b_s = exp(r softplus(W v_s)) for each key head; v_s are the values of all key heads
    o_t = softmax(q_t . k_s + b_s) v_s, over the `top_k` visible keys s with the largest b_s

The bias is stored as an additional feature of the key, and queries have a 1 in this feature, so that kernels and caches
are those of `Attention`. Among equal biases the later keys are selected: a new layer, whose biases are all 1, attends
to a sliding window. The selection has no gradient; the biases get gradients through the scores.

Models with experts are not implemented, because their router mixes tokens.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.residual.residual import Weighted
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Integer, Only
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.attention.block_indexer import SelectionInputs
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_lanes
from eqx_decoders.layers.attention.topk import SelectedKeys, map_queries, top_k_mask
from eqx_decoders.layers.attention.variant import AttentionVariant
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, Past, kv_shape
from eqx_decoders.layers.mask import Causal, seen_keys, visible
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicMaskConfig(AttentionVariant, MixerConfig):
    """Configuration of dynamic mask attention.

    **Arguments:**

    - `attention`: the underlying attention.
    - `top_k`: number of keys that a query attends to.
    """

    attention: AttentionConfig
    top_k: PositiveInt = 2048

    def __post_init__(self):
        super().__post_init__()
        self.check_unsupported(
            *("spans", "out_dim", "value_dim", "kv_shared_from", "selection"),
            reason="keys are selected among earlier tokens by the layer's own values",
        )
        mask = self.attention.mask
        check(isinstance(mask, Causal), f"DynamicMaskConfig.attention has mask={mask}, which must be Causal().")

    @property
    def depends_on_token_order(self) -> bool:
        return True

    def cache_shape(self, max_length: int) -> KVShape:
        """Return the shape of the cache, in which the last feature of a key is its bias."""
        kv_heads = self.attention.num_kv_heads
        head_dim = self.attention.head_dim
        return kv_shape(self.mask, max_length, kv_heads=kv_heads, head_dim=head_dim + 1, value_dim=head_dim)

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the scores and of the weighted sum of values."""
        keys = min(seen_keys(self.mask, length), self.top_k)
        return self.attention.num_heads * keys * (2 * self.attention.head_dim + 1)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "DynamicMaskAttention":
        config = self.attention
        attention_key, step_key = jax.random.split(key)
        attention = config.build(embed_dim, key=attention_key)
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        kv_heads = config.num_kv_heads
        step_shape = (kv_heads, config.head_dim, kv_heads)
        return DynamicMaskAttention(
            **fields,
            step=fan_in(step_key, step_shape, jnp.float32, kv_heads * config.head_dim, "normal"),
            step_bias=jnp.zeros((kv_heads,)) if config.qkv_bias else None,
            rate=jnp.zeros((kv_heads,)),
            top_k=self.top_k,
        )


class DynamicMaskAttention(Attention):
    """Dynamic mask attention with the key biases `exp(rate * softplus(step v))`."""

    step: Float[Array, "kv_heads head_dim mask_heads"]
    step_bias: Float[Array, "mask_heads"] | None
    rate: Float[Array, "mask_heads"]
    top_k: int = eqx.field(static=True)

    def _normalize_and_rotate(
        self, query: Array, key: Array | None, value: Array | None, ctx: ForwardContext
    ) -> tuple[Array, NewKV]:
        """Return queries with a 1, and keys with their bias, as an additional last feature."""
        query, new_kv = super()._normalize_and_rotate(query, key, value, ctx)
        assert new_kv is not None and new_kv.value is not None
        bias = self._biases(new_kv.value, ctx).astype(new_kv.key.dtype)
        query = jnp.concatenate([query, jnp.ones((*query.shape[:3], 1), query.dtype)], axis=-1)
        key = jnp.concatenate([new_kv.key, bias[..., None]], axis=-1)
        return (
            ctx.constrain(query, "batch length heads head_dim"),
            NewKV(key=ctx.constrain(key, "batch length kv_heads head_dim"), value=new_kv.value),
        )

    def _biases(self, value: Array, ctx: ForwardContext) -> Float32[Array, "batch length mask_heads"]:
        pattern = "batch length kv_heads head_dim, kv_heads head_dim mask_heads -> batch length mask_heads"
        with jax.default_matmul_precision("highest"):  # rounding could change the selection, and there are few columns
            step = add_bias(ctx.einsum(pattern, value.astype(jnp.float32), self.step), self.step_bias)
        return jnp.exp(self.rate.astype(jnp.float32)[None, None] * jax.nn.softplus(step))

    def _select_keys(self, inputs: SelectionInputs, past: Past | None, ctx: ForwardContext) -> SelectedKeys:
        """Select the keys of this call and of the cache that have the largest biases."""
        bias = jax.lax.stop_gradient(inputs.key[..., -1]).astype(jnp.float32).swapaxes(1, 2)
        selected = SelectedKeys(self._select_new(bias, ctx)) if past is None else self._select_cached(bias, past, ctx)
        return selected.repeated(self.config.num_heads // self.config.num_kv_heads)

    def _select_new(self, bias: Float32[Array, "batch kv_heads length"], ctx: ForwardContext) -> Selection | None:
        """Select among the tokens of a call without a cache; None: all visible keys."""
        length = bias.shape[2]
        if length <= self.top_k:
            return None

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def select_tile(queries):
            positions, segments = queries
            seen = visible(self.config.mask, positions, ctx.positions, segments, ctx.segment_ids)
            return pack_lanes(self._largest(bias, seen))

        words = map_queries(select_tile, (ctx.positions, ctx.segment_ids), length, bias.shape[1])
        words = jnp.moveaxis(words, 0, 2)
        return Selection(words.reshape(*words.shape[:2], -1, words.shape[4])[:, :, :length])

    def _select_cached(
        self, bias: Float32[Array, "batch kv_heads length"], past: Past, ctx: ForwardContext
    ) -> SelectedKeys:
        """Select among the tokens of a call and of the cache."""
        cache = past.whole()
        slots = cache.positions.shape[1]
        if slots + bias.shape[2] <= self.top_k:
            return SelectedKeys()
        cached_bias = cache.keys(jnp.float32)[..., -1]
        seen = [visible(self.config.mask, ctx.positions, positions) for positions in (cache.positions, ctx.positions)]
        selected = self._largest(jnp.concatenate([cached_bias, bias], axis=-1), jnp.concatenate(seen, axis=-1))
        return SelectedKeys(new=selected[..., slots:], cached=selected[..., :slots])

    def _largest(
        self, bias: Float32[Array, "batch kv_heads keys"], seen: Bool[Array, "batch length keys"]
    ) -> Bool[Array, "batch kv_heads length keys"]:
        """Return a mask of the `top_k` visible keys with the largest biases, among equal biases the later keys."""
        scores = jnp.where(seen[:, None], bias[:, :, None], -jnp.inf)
        return top_k_mask(scores[..., ::-1], self.top_k)[..., ::-1] & seen[:, None]


def doge(shape: DecoderSizes, *, top_k: int = 2048, mlp_bias: bool = False, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of Doge blocks; each query attends to `top_k` keys."""
    attention = shape.attention(rope=rope, qk_norm=shape.qk_norm)
    mixer = DynamicMaskConfig(attention=attention, top_k=top_k)
    return shape.decoder(shape.block(mixer, shape.mlp(bias=mlp_bias), residual=Weighted(gains=True)))


_ATTENTION = LAYER + "self_attn."
_HEADS = "blocks.0.mixer.attention."
_PATHS = {
    "num_attention_heads": _HEADS + "num_heads",
    "num_key_value_heads": _HEADS + "num_kv_heads",
    "head_dim": _HEADS + "head_dim",
    "attention_bias": _HEADS + "qkv_bias",
}
FAMILY = Family(
    model_type="doge",
    architecture="DogeForCausalLM",
    settings=(
        decoder_sizes(paths=_PATHS),
        Integer("keep_window_size", "blocks.0.mixer.top_k", 2048, name="top_k"),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        Only("sliding_window", written=True),
        Only("is_moe", False, written=True),
        rope_settings(),
    ),
    build=doge,
    weights=(
        *llama_weights(),
        Weight(
            _ATTENTION + "dt_proj.weight", "mixer.step",
            "mask_heads (kv_heads head_dim) -> kv_heads head_dim mask_heads",
        ),
        Weight(_ATTENTION + "dt_proj.bias", "mixer.step_bias", "mask_heads -> mask_heads"),
        Weight(_ATTENTION + "A", "mixer.rate", "mask_heads -> mask_heads"),
        Weight(LAYER + "input_residual", "residual.gains.0.scale", "embed -> embed"),
        Weight(LAYER + "post_attention_residual", "residual.gains.1.scale", "embed -> embed"),
    ),
    ignored_keys={
        "hidden_dropout": "dropout is used in training only",
        "num_experts num_experts_per_tok norm_topk_prob output_router_logits "
        "router_aux_loss_coef": "there are no experts",
    },
)  # fmt: skip


_BASE = dict(
    model_type="doge",
    vocab_size=32_768,
    max_position_embeddings=2048,
    rope_scaling=dict(factor=4.0, rope_type="dynamic"),
    tie_word_embeddings=True,
)

MODELS = {
    "doge-20m": _BASE | dict(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=512,
    ),
    "doge-60m": _BASE | dict(
        hidden_size=512, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024,
    ),
    "doge-160m": _BASE | dict(
        hidden_size=768, num_hidden_layers=24, num_attention_heads=6, num_key_value_heads=3, intermediate_size=1536,
    ),
    "doge-320m": _BASE | dict(
        hidden_size=1024, num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=4, intermediate_size=2048,
    ),
}  # fmt: skip
