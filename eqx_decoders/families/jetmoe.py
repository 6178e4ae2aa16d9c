"""JetMoe (Shen et al. 2024): a mixture of attention heads, and a mixture of experts instead of MLPs.

In a mixture of attention heads (Zhang et al. 2022), each token is routed to query heads. All heads share keys and
values.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.families import moe
from eqx_decoders.families.common import ENDS, LAYER, PRE_NORMS, DecoderSizes
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check, Flag, Group, Integer, Layers, Number, activation
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig, AttentionPast
from eqx_decoders.layers.attention.variant import AttentionVariant
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.moe.router import Router, RouterConfig
from eqx_decoders.layers.moe.sorted_rows import dispatch, sort_by_expert
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics.einsum import add_bias, grouped_products
from eqx_decoders.numerics.grouped_matmul import choose_form
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadMixtureConfig(AttentionVariant, MixerConfig):
    """Configuration of a mixture of attention heads, in which the query and output projections are experts.

    An expert has `num_kv_heads` query heads, one for each key head; all experts share keys and values. Each token is
    routed to `num_heads / num_kv_heads` experts. The outputs of these experts are summed with weights from a softmax
    over their router logits (JetMoe). The router's statistics are not returned, so no loss balances these experts.

    **Arguments:**

    - `attention`: attention with the heads of one token. Options with parameters per query head are not supported.
    - `num_experts`: number of experts.
    """

    attention: AttentionConfig
    num_experts: PositiveInt

    def __post_init__(self):
        super().__post_init__()
        self.check_unsupported(
            *("fused_qkv", "qkv_bias", "sinks", "output_gate", "inner_norm", "out_dim", "kv_shared_from"),
            *("value_dim", "alibi"),
            reason="the query heads of a token are not fixed",
        )
        over = "head" if self.attention.qk_norm is None else self.attention.qk_norm.over
        check(
            over == "head",
            f"HeadMixtureConfig.attention has qk_norm.over={over!r}, which must be 'head': the query heads of a token "
            "are not fixed.",
        )
        check(
            self.num_experts_per_token <= self.num_experts,
            f"HeadMixtureConfig.num_experts={self.num_experts} is too small: a token is routed to "
            f"{self.num_experts_per_token} experts, num_heads={self.attention.num_heads} divided by "
            f"num_kv_heads={self.attention.num_kv_heads} of the attention.",
        )

    @property
    def num_experts_per_token(self) -> int:
        """Number of experts to which each token is routed."""
        return self.attention.num_heads // self.attention.num_kv_heads

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "HeadMixture":
        attention_key, query_key, out_key, router_key = jax.random.split(key, 4)
        head_shape = self.attention.num_kv_heads, self.attention.head_dim
        attention = self.attention.build(embed_dim, key=attention_key)
        fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
        query_shape = (self.num_experts, embed_dim, *head_shape)
        out_shape = (self.num_experts, *head_shape, embed_dim)
        fields |= {
            "query": fan_in(query_key, query_shape, jnp.float32, embed_dim, "normal"),
            "out": fan_in(out_key, out_shape, jnp.float32, math.prod(head_shape), "normal"),
            "router": RouterConfig().build(embed_dim, self.num_experts, self.num_experts_per_token, key=router_key),
        }
        return HeadMixture(**fields)


class HeadMixture(Attention):
    """Attention with the query heads of the experts to which each token is routed; keys and values are shared.

    In shape annotations `slots` are the experts of one token.
    """

    query: Float[Array, "experts embed kv_heads head_dim"]  # pyright: ignore[reportIncompatibleVariableOverride]
    out: Float[Array, "experts kv_heads head_dim embed"]
    router: Router

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: AttentionPast | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        experts, weights, _ = self.router(x, ctx)
        sort = self._should_sort(ctx)
        query = self._sorted_queries(x, experts, ctx) if sort else self._dense_queries(x, experts, ctx)
        # key heads are the outer axis of query heads, as in grouped-query attention
        query = jnp.swapaxes(query, 2, 3).reshape(*x.shape[:2], self.config.num_heads, -1)
        out, entries = self._attend_projected((query, *self._keys_and_values(x, ctx)), x, ctx, past)
        out = jnp.swapaxes(out.reshape(*x.shape[:2], self.config.num_kv_heads, experts.shape[-1], -1), 2, 3)
        out = (self._sorted_outputs if sort else self._dense_outputs)(out, experts, weights, ctx)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj"), entries

    def _keys_and_values(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        pattern = "batch length embed, embed kv_heads head_dim -> batch length kv_heads head_dim"
        assert self.key is not None
        key = ctx.einsum(pattern, x, self.key)
        return key, key if self.value is None else ctx.einsum(pattern, x, self.value)

    def _should_sort(self, ctx: ForwardContext) -> bool:
        """Return whether to sort tokens by expert, which takes fewer operations but is implemented on one device only.

        It needs plain arrays as weights.
        """
        plain = eqx.is_array(self.query) and eqx.is_array(self.out)
        return plain and ctx.execution.layout.single and ctx.execution.experts in ("auto", "dropless")

    # --- dense: all experts on all tokens ---

    def _dense_queries(
        self, x: Array, experts: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length slots kv_heads head_dim"]:
        """Compute the queries of all experts, and return those of each token's experts."""
        if eqx.is_array(self.query):
            pattern = "batch length embed, experts embed kv_heads head_dim -> batch length experts kv_heads head_dim"
            all_queries = ctx.einsum(pattern, x, self.query)
        else:  # an AbstractWeight needs the experts axis in both operands
            pattern = (
                "experts batch length embed, experts embed kv_heads head_dim -> experts batch length kv_heads head_dim"
            )
            repeated_x = jnp.broadcast_to(x[None], (self._num_experts, *x.shape))
            all_queries = jnp.moveaxis(ctx.einsum(pattern, repeated_x, self.query), 0, 2)
        all_queries = ctx.constrain(all_queries, "batch length experts kv_heads head_dim")
        is_selected = self._one_hot(experts)[..., None, None]
        return jnp.sum(jnp.where(is_selected, all_queries[:, :, None], 0), axis=3)

    def _dense_outputs(
        self, heads: Array, experts: Array, weights: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Apply the output projections of all experts to the weighted heads; heads of other experts are zero."""
        is_selected = self._one_hot(experts)[..., None, None]
        weighted = heads * weights.astype(heads.dtype)[..., None, None]
        by_expert = jnp.sum(jnp.where(is_selected, weighted[:, :, :, None], 0), axis=2)
        by_expert = ctx.constrain(by_expert, "batch length experts kv_heads head_dim")
        if eqx.is_array(self.out):
            pattern = "batch length experts kv_heads head_dim, experts kv_heads head_dim embed -> batch length embed"
            return ctx.einsum(pattern, by_expert, self.out)
        pattern = (
            "experts batch length kv_heads head_dim, experts kv_heads head_dim embed -> experts batch length embed"
        )
        return jnp.sum(ctx.einsum(pattern, jnp.moveaxis(by_expert, 2, 0), self.out), axis=0)

    def _one_hot(self, experts: Int32[Array, "batch length slots"]) -> Bool[Array, "batch length slots experts"]:
        return experts[..., None] == jnp.arange(self._num_experts, dtype=experts.dtype).reshape(1, 1, 1, -1)

    @property
    def _num_experts(self) -> int:
        return self.query.shape[0]

    # --- dropless: tokens sorted by expert ---

    def _sorted_queries(
        self, x: Array, experts: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length slots kv_heads head_dim"]:
        tokens = x.reshape(-1, x.shape[-1])
        token_experts = experts.reshape(-1, experts.shape[-1])
        kernel = self.query.reshape(*self.query.shape[:2], -1)
        return _multiply_by_expert(tokens, token_experts, kernel, ctx).reshape(*experts.shape, *self.query.shape[2:])

    def _sorted_outputs(
        self, heads: Array, experts: Array, weights: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        kernel = self.out.reshape(self._num_experts, -1, self.out.shape[-1])
        out = _multiply_by_expert(heads.reshape(experts.size, -1), experts.reshape(-1, 1), kernel, ctx)
        out = out.reshape(*experts.shape, -1).astype(weights.dtype) * weights[..., None]
        return jnp.sum(out, axis=2).astype(heads.dtype)


def _multiply_by_expert(
    x: Float[Array, "tokens inner"],
    token_experts: Int32[Array, "tokens slots"],
    kernel: Float[Array, "experts inner outer"],
    ctx: ForwardContext,
) -> Float[Array, "choices outer"]:
    """Multiply each token by the matrices of its experts.

    `token_experts`: expert indices of each token. The product with an index outside of the experts is zero.
    """
    layout = ctx.execution.layout
    experts, *features = kernel.shape
    largest = max(token_experts.size * max(features), math.prod(kernel.shape))
    form = choose_form(layout.backend, layout.device, x.dtype, rows=token_experts.size, groups=experts, largest=largest)
    destinations, sources = sort_by_expert(token_experts, experts, form.block)
    one_hot = token_experts.reshape(-1, 1) == jnp.arange(experts, dtype=token_experts.dtype)[None]
    counts = jnp.sum(one_hot, axis=0, dtype=jnp.int32)
    (out,) = grouped_products(dispatch(x, destinations, sources), (kernel,), counts=counts, form=form)
    return dispatch(out, sources[:, None], destinations.reshape(-1))


def jetmoe(shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of JetMoe blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.num_heads` is the number of query heads that a token uses, and `shape.eps`
        applies only to the final norm.
    - `num_experts`, `num_experts_per_token`: number of experts, and number of experts per token. Attention and MLP have
        equal numbers.
    - `rope`: rotary embedding.
    """
    mixer = HeadMixtureConfig(attention=shape.attention(rope=rope, out_bias=True), num_experts=num_experts)
    experts = shape.experts(out_bias=True, num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.decoder(shape.block(mixer, experts, RMSNormConfig(eps=1e-6)))


_HEADS = "blocks.0.mixer.attention."
_SIZES = (
    Integer("num_key_value_heads", _HEADS + "num_kv_heads", 16),
    Integer("", None, lambda values: values["num_kv_heads"] * values["num_experts_per_token"], name="num_heads"),
    Integer("kv_channels", _HEADS + "head_dim", 128),
    Integer("hidden_size", "embed_dim", 2048),
    Integer("vocab_size", "vocab_size", 32_000),
    Layers("num_hidden_layers", "blocks", 12, name="num_layers"),
    Integer("intermediate_size", "experts.mlp_dim", 5632),
    Number("rms_norm_eps", "final_norm.eps", 1e-6),
    Flag("tie_word_embeddings", "tied", True),
    activation("activation_function", "experts.activation", "silu"),
    Number("initializer_range", "init_std", 0.01),
)

_ATTENTION = LAYER + "self_attention."
_HEAD_EXPERTS = _ATTENTION + "experts."
_MLP = LAYER + "mlp."
_KEY_PATTERN = "(kv_heads head_dim) embed -> embed kv_heads head_dim"
_MLP_PATTERN = "experts mlp embed -> experts embed mlp"
_ROUTER_PATTERN = "experts embed -> embed experts"
FAMILY = Family(
    model_type="jetmoe",
    architecture="JetMoeForCausalLM",
    settings=(
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        Group("shape", DecoderSizes, _SIZES),
        Integer("num_attention_heads", _HEADS + "num_heads", lambda values: values["shape"].num_heads, name="_heads"),
        Check(
            lambda values: values["_heads"] == values["shape"].num_heads,
            "num_attention_heads={_heads} must be num_key_value_heads x num_experts_per_tok={shape.num_heads}.",
        ),
        rope_settings(),
    ),
    build=jetmoe,
    weights=(
        *ENDS,
        *PRE_NORMS,
        Weight(_HEAD_EXPERTS + "router.layer.weight", "mixer.router.kernel", _ROUTER_PATTERN),
        Weight(
            _HEAD_EXPERTS + "input_linear.weight", "mixer.query",
            "experts (kv_heads head_dim) embed -> experts embed kv_heads head_dim",
        ),
        Weight(
            _HEAD_EXPERTS + "output_linear.weight", "mixer.out",
            "experts embed (kv_heads head_dim) -> experts kv_heads head_dim embed",
        ),
        Weight(_HEAD_EXPERTS + "bias", "mixer.out_bias", "embed -> embed"),
        *sharing(_ATTENTION + "kv_proj.weight", ("mixer.key", _KEY_PATTERN), ("mixer.value", _KEY_PATTERN)),
        Weight(_MLP + "router.layer.weight", "mlp.router.kernel", _ROUTER_PATTERN),
        *sharing(_MLP + "input_linear.weight", ("mlp.gate", _MLP_PATTERN), ("mlp.up", _MLP_PATTERN), axis=1),
        Weight(_MLP + "output_linear.weight", "mlp.down", "experts embed mlp -> experts mlp embed"),
        Weight(_MLP + "bias", "mlp.out_bias", "embed -> embed"),
    ),
    other_architectures=("JetMoEForCausalLM",),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"aux_loss_coef": "training of routers only"},
)  # fmt: skip


MODELS = {
    "jetmoe-8b-a2b": dict(model_type="jetmoe", num_hidden_layers=24, rms_norm_eps=1e-05),
}  # fmt: skip
