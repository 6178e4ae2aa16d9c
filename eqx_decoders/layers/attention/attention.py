"""Grouped-query attention (Ainslie et al. 2023) with the options that the decoder families need."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check, check_option
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.attend import run_attention
from eqx_decoders.layers.attention.block_indexer import BlockIndexer, BlockIndexerConfig, SelectionInputs
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import with_sink
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.attention.topk import SelectedKeys
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, Past, Queries, kv_shape
from eqx_decoders.layers.mask import AttentionPositions, Causal, Mask, seen_keys
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotary_positions, rotate
from eqx_decoders.numerics.einsum import add_bias, scale
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.axes import FROZEN


AttentionPast = Past | dict[str, Past]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNorm(CheckedFields):
    """Normalization of queries and keys.

    **Arguments:**

    - `norm`: configuration of the norm.
    - `over`: `"head"` normalizes each head and uses the same scale for all heads; `"each_head"` normalizes each head
        and has a separate scale per head (Cohere); `"heads"` normalizes the features of all heads jointly (OLMo).
    - `when`: `"before_rope"` or `"after_rope"` (Llama 4).
    """

    norm: NormConfig = RMSNormConfig()
    over: Literal["head", "each_head", "heads"] = "head"
    when: Literal["before_rope", "after_rope"] = "before_rope"

    def __post_init__(self):
        super().__post_init__()
        scale_only = self.norm.scale and not self.norm.offset and not getattr(self.norm, "bias", False)
        check(
            self.over != "each_head" or scale_only,
            f"QKNorm.over='each_head' needs a norm with scale=True, offset=0 and no bias, not {self.norm}.",
        )

    @property
    def norm_config(self) -> NormConfig:
        """Norm that the layer builds; without a scale for `over="each_head"`, as `Attention` stores per-head scales."""
        return dataclasses.replace(self.norm, scale=False) if self.over == "each_head" else self.norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTemperature(CheckedFields):
    """Position-dependent query scale `1 + scale ln(1 + floor((p + offset) / length))` at position p.

    As in Nakanishi 2025 and Llama 4.

    **Arguments:**

    - `scale`: growth rate of the factor.
    - `length`: number of consecutive positions that have the same factor.
    - `offset`: 1 for Llama 4, 0 for Ministral 3.
    """

    scale: PositiveFloat = 0.1
    length: PositiveInt = 8192
    offset: NonNegativeInt = 1

    def __call__(
        self, query: Float[Array, "batch length heads head_dim"], positions: Int[Array, "batch length"]
    ) -> Float[Array, "batch length heads head_dim"]:
        """Scale the queries by their positions. Padding (negative positions) is unchanged."""
        steps = jnp.floor((positions.astype(jnp.float32) + self.offset) / self.length)
        factor = 1.0 + self.scale * jnp.log1p(jnp.maximum(steps, 0.0))
        return (query.astype(jnp.float32) * factor[:, :, None, None]).astype(query.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Configuration of multi-head attention `softmax(scale * q k^T + mask) v` with an output projection.

    **Arguments:**

    - `num_heads`, `num_kv_heads`: number of query heads and of key/value heads; `num_kv_heads` divides `num_heads`.
    - `head_dim`: features per head.
    - `mask`: which keys a query sees.
    - `selection`: restricts each query head to the keys of `top_k` key blocks. Blocks are scored by their mean keys
        (`BlockSelection`, MoBA) or by an indexer (`BlockIndexerConfig`, MiniMax M3; `PooledIndexerConfig`, Qwen 4).
        None: all keys that the mask allows.
    - `spans`: whether a token also sees the later tokens of its span (for example of its image). The mask decides about
        all other tokens.
    - `rope`: rotary embedding; None for none.
    - `query_scale`: multiplies queries; None for `head_dim ** -0.5`.
    - `key_scale`: multiplies keys right after their projection (Falcon-H1).
    - `temperature`: scales queries by a factor that grows with their position; None for no such factor.
    - `alibi`: linear position biases, added to scores before the soft cap; None for none.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`; None for no cap.
    - `sinks`: whether each head has an attention sink, a learned logit in the softmax without a value (GPT-OSS).
    - `qk_norm`: normalization of queries and keys; None for none.
    - `qkv_clip`: queries, keys and values are clipped to `[-qkv_clip, qkv_clip]`, before rope and after a `qk_norm`
        that precedes rope (OLMo); None for no clipping.
    - `qkv_bias`, `out_bias`: whether the projections have biases.
    - `fused_qkv`: whether queries, keys and values are computed by one fused projection.
    - `shared_kv`: whether values are the raw key projection; there is then no value projection.
    - `value_norm`: normalization of each head's values; None for none.
    - `value_dim`: features per head of values; None for `head_dim` (MiMo-V2).
    - `value_scale`: multiplies values.
    - `kv_shared_from`: name under which an earlier layer shares its keys and values: the latest layer whose
        `BlockConfig.shares_kv_as` is this name (Gemma 4). This layer then has no key/value projections and no cache.
        None: the layer computes its own keys and values.
    - `output_gate`: whether each head's output is multiplied by `sigmoid(gate x)` (Qwen3-Next).
    - `inner_norm`: joint normalization of all heads' outputs before the output projection (BitNet); None for none.
    - `out_dim`: output features; None for the input's features. A different value needs a block without a residual
        connection.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    mask: Mask = Causal()
    spans: bool = False
    rope: Rope | None = Rope()
    query_scale: PositiveFloat | None = None
    key_scale: PositiveFloat = 1.0
    temperature: QueryTemperature | None = None
    alibi: Alibi | None = None
    soft_cap: PositiveFloat | None = None
    sinks: bool = False
    qk_norm: QKNorm | None = None
    qkv_clip: PositiveFloat | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    shared_kv: bool = False
    output_gate: bool = False
    inner_norm: NormConfig | None = None
    out_dim: PositiveInt | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in MixerConfig
    value_norm: NormConfig | None = None
    value_dim: PositiveInt | None = None
    value_scale: PositiveFloat = 1.0
    selection: BlockSelection | None = None
    kv_shared_from: str | None = None

    def __post_init__(self):
        super().__post_init__()
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"AttentionConfig.num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.",
        )
        check(
            not (self.fused_qkv and self.shared_kv),
            "AttentionConfig.fused_qkv=True and shared_kv=True exclude each other: there is no value projection to "
            "fuse. Leave one out.",
        )
        for field in ("fused_qkv", "shared_kv", "value_norm", "key_scale", "value_scale"):
            value = getattr(self, field)
            check(
                self.kv_shared_from is None or value == getattr(AttentionConfig, field),
                f"AttentionConfig.kv_shared_from={self.kv_shared_from!r} excludes {field}={value}: the keys and values "
                f"of another layer are used as they are. Leave {field} out.",
            )
        for field in ("fused_qkv", "shared_kv", "out_dim"):
            value = getattr(self, field)
            check(
                self.value_dim is None or not value,
                f"AttentionConfig.value_dim={self.value_dim} excludes {field}={value}: leave one out.",
            )
        check(
            self.selection is None or (isinstance(self.mask, Causal) and not self.spans),
            f"AttentionConfig.selection needs mask=Causal() and spans=False, not mask={self.mask} and "
            f"spans={self.spans}: key blocks are selected among earlier tokens only.",
        )
        if self.rope is not None:
            self.rope.rotated(self.head_dim)  # raises ConfigError if it cannot rotate heads of this size
        if self.block_indexer is not None:
            self._check_indexer(self.block_indexer)

    def _check_indexer(self, indexer: BlockIndexerConfig) -> None:
        rotated_dim = 0 if self.rope is None else self.rope.rotated(self.head_dim)
        check(
            self.num_heads % indexer.num_selections(indexer.num_heads) == 0,
            f"AttentionConfig.selection.num_heads={indexer.num_heads} must be a divisor of num_heads={self.num_heads}: "
            "each indexer head selects keys for an equal number of query heads.",
        )
        check(
            indexer.head_dim >= rotated_dim,
            f"AttentionConfig.selection.head_dim={indexer.head_dim} must be at least {rotated_dim}, the number of "
            "features per head that rope rotates.",
        )
        check(
            self.kv_shared_from is None,
            f"AttentionConfig.selection with an indexer excludes kv_shared_from={self.kv_shared_from!r}: the indexer "
            "needs a cache for its own keys. Leave one out.",
        )

    @property
    def block_indexer(self) -> BlockIndexerConfig | None:
        """Configuration of the indexer that selects key blocks; None without an indexer."""
        return self.selection if isinstance(self.selection, BlockIndexerConfig) else None

    @property
    def depends_on_token_order(self) -> bool:
        return self.selection is not None

    def cache_shape(self, max_length: int) -> KVShape | dict[str, KVShape] | None:
        """Return the shape of the key/value cache; None if an earlier layer's keys and values are used.

        With a sliding window or chunks the cache is a rolling cache of `size` slots, else it has `max_length` slots.
        With an indexer the result is a dict: `"kv"` for keys and values, `"index"` for the indexer's keys.
        """
        if self.kv_shared_from is not None:
            return None
        shape = kv_shape(
            self.mask, max_length, kv_heads=self.num_kv_heads, head_dim=self.head_dim, value_dim=self.value_dim
        )
        if self.block_indexer is None:
            return shape
        index = kv_shape(self.mask, max_length, kv_heads=1, head_dim=self.block_indexer.head_dim, values=False)
        return {"kv": shape, "index": index}

    @property
    def shared_from(self) -> str | None:
        """Name of the keys and values of an earlier layer that this layer uses."""
        return self.kv_shared_from

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the scores and of the weighted sum of values, without weights.

        `length`: number of tokens of the document.
        """
        keys = seen_keys(self.mask, length)
        selection_products = 0
        if self.selection is not None:
            selection_products = self.selection.token_products(keys)
            keys = min(keys, self.selection.size * self.selection.top_k)
        value_dim = self.value_dim or self.head_dim
        return self.num_heads * keys * (self.head_dim + value_dim) + selection_products

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Attention":
        keys = jax.random.split(key, 5)
        heads = self.num_heads
        kv_heads = self.num_kv_heads
        head_dim = self.head_dim
        value_dim = self.value_dim or head_dim
        out_dim = self.out_dim or embed_dim

        def new_kernel(key, count, exists=True, dim=head_dim):
            return fan_in(key, (embed_dim, count, dim), jnp.float32, embed_dim, "normal") if exists else None

        def new_bias(count, exists=True, dim=head_dim):
            return jnp.zeros((count, dim)) if self.qkv_bias and exists else None

        has_query = not self.fused_qkv
        has_kv = self.kv_shared_from is None
        has_key = has_query and has_kv
        has_value = has_key and not self.shared_kv
        norm = self.qk_norm
        joint_norm = norm is not None and norm.over == "heads"
        per_head_scales = norm is not None and norm.over == "each_head"
        layer_class = Attention
        if self.out_dim is not None:
            layer_class = NarrowAttention
        elif self.value_dim is not None:
            layer_class = UnequalAttention
        return layer_class(
            query=new_kernel(keys[0], heads, has_query),
            key=new_kernel(keys[1], kv_heads, has_key),
            value=new_kernel(keys[2], kv_heads, has_value, value_dim),
            qkv=new_kernel(keys[0], heads + 2 * kv_heads, self.fused_qkv),
            gate=new_kernel(keys[3], heads, self.output_gate, value_dim),
            out=fan_in(keys[4], (heads, value_dim, out_dim), jnp.float32, heads * value_dim, "normal"),
            query_bias=new_bias(heads, has_query),
            key_bias=new_bias(kv_heads, has_key),
            value_bias=new_bias(kv_heads, has_value, value_dim),
            qkv_bias=new_bias(heads + 2 * kv_heads, self.fused_qkv),
            out_bias=jnp.zeros((out_dim,)) if self.out_bias else None,
            query_norm=norm.norm_config.build(heads * head_dim if joint_norm else head_dim) if norm else None,
            key_norm=norm.norm_config.build(kv_heads * head_dim if joint_norm else head_dim)
            if norm and has_kv
            else None,
            query_norm_scale=jnp.ones((heads, head_dim)) if per_head_scales else None,
            key_norm_scale=jnp.ones((kv_heads, head_dim)) if per_head_scales and has_kv else None,
            value_norm=self.value_norm.build(value_dim) if self.value_norm else None,
            inner_norm=self.inner_norm.build(heads * value_dim) if self.inner_norm else None,
            sink=jnp.zeros((heads,)) if self.sinks else None,
            indexer=self.block_indexer.build(embed_dim, key=jax.random.fold_in(key, 5)) if self.block_indexer else None,
            config=self,
        )


class Attention(eqx.Module):
    """Multi-head attention `softmax(scale * q k^T + mask) v` with an output projection.

    Absent weights are None: either `qkv` or `query`, `key` and `value` exist, see `AttentionConfig`.
    """

    query: Float[Array, "embed heads head_dim"] | None
    key: Float[Array, "embed kv_heads head_dim"] | None
    value: Float[Array, "embed kv_heads head_dim"] | None
    qkv: Float[Array, "embed qkv_heads head_dim"] | None
    gate: Float[Array, "embed heads head_dim"] | None
    out: Float[Array, "heads head_dim embed"]
    query_bias: Float[Array, "heads head_dim"] | None
    key_bias: Float[Array, "kv_heads head_dim"] | None
    value_bias: Float[Array, "kv_heads head_dim"] | None
    qkv_bias: Float[Array, "qkv_heads head_dim"] | None
    out_bias: Float[Array, "embed"] | None
    query_norm: Norm | None
    key_norm: Norm | None
    query_norm_scale: Float[Array, "heads head_dim"] | None
    key_norm_scale: Float[Array, "kv_heads head_dim"] | None
    value_norm: Norm | None
    inner_norm: Norm | None
    sink: Float[Array, "heads"] | None
    indexer: BlockIndexer | None = eqx.field(metadata=FROZEN)
    config: AttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: AttentionPast | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """Return the layer's output, and the new keys and values to be written to the cache.

        `past`: cached keys and values; None without a cache.
        """
        out, entries = self._attend_heads(x, ctx, past)
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", out, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj"), entries

    def branch(
        self, x: Array, ctx: ForwardContext, past: AttentionPast | None, key: PRNGKeyArray | None
    ) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(*self(x, ctx, past))

    def _attend_heads(self, x: Array, ctx: ForwardContext, past: AttentionPast | None) -> tuple[Array, Any]:
        """Return the outputs of all heads before the output projection, and the new keys and values for the cache."""
        return self._attend_projected(self._project(x, ctx), x, ctx, past)

    def _attend_projected(
        self,
        projections: tuple[Array, Array | None, Array | None],
        x: Array,
        ctx: ForwardContext,
        past: AttentionPast | None,
    ) -> tuple[Array, Any]:
        """Return the outputs of all heads and the new keys and values, from raw query, key and value projections."""
        query, own_kv = self._normalize_and_rotate(*projections, ctx)
        indexer_past = None
        if isinstance(past, dict):
            past, indexer_past = past["kv"], past["index"]
        past, new_kv = (past, own_kv) if own_kv is not None else self._shared_kv(ctx)
        indexer_output = self._run_indexer(x, ctx)
        if indexer_output is None:
            selected = self._select_keys(SelectionInputs(query, new_kv.key), past, ctx)
        else:
            selected = self._select_keys(indexer_output, indexer_past, ctx)
        out, entries = self._attend(query, past, new_kv, selected, ctx)
        if indexer_output is not None:
            entries = {"kv": entries, "index": NewKV(indexer_output.key, None)}
        out = save(ctx.constrain(out, "batch length heads head_dim"), "attention_out")
        if self.gate is not None:
            gate = ctx.einsum("batch length embed, embed heads head_dim -> batch length heads head_dim", x, self.gate)
            out = out * jax.nn.sigmoid(gate)
        out = out if self.inner_norm is None else _normalize_jointly(self.inner_norm, out)
        return out, None if own_kv is None else entries

    def _run_indexer(self, x: Array, ctx: ForwardContext) -> SelectionInputs | None:
        if self.indexer is None:
            return None
        rope = self.config.rope
        return self.indexer(x, rope, 0 if rope is None else rope.rotated(self.config.head_dim), ctx)

    def _shared_kv(self, ctx: ForwardContext) -> tuple[Past | None, Any]:
        """Return the cached and the new keys and values of the earlier layer named by `kv_shared_from`."""
        name = self.config.kv_shared_from or ""
        past, entries = ctx.shared[check_option("AttentionConfig.kv_shared_from", name, ctx.shared)]
        return None if past is None else past["mixer"], entries["mixer"]

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array | None, Array | None]:
        """Project to queries, keys and values; keys and values are None if those of an earlier layer are used."""
        config = self.config
        if self.qkv is not None:
            pattern = "batch length embed, embed qkv_heads head_dim -> batch length qkv_heads head_dim"
            qkv = save(add_bias(ctx.einsum(pattern, x, self.qkv), self.qkv_bias), "qkv_proj")
            query, key, value = jnp.split(qkv, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
            return query, key, value
        assert self.query is not None
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        query = add_bias(ctx.einsum(pattern, x, self.query), self.query_bias)
        if self.key is None:
            return query, None, None
        key = add_bias(ctx.einsum(pattern, x, self.key), self.key_bias)
        value = key if self.value is None else add_bias(ctx.einsum(pattern, x, self.value), self.value_bias)
        return query, key, value

    def _normalize_and_rotate(
        self, query: Array, key: Array | None, value: Array | None, ctx: ForwardContext
    ) -> tuple[Array, NewKV | None]:
        """Return scaled queries for the kernel, and keys and values; None if those of an earlier layer are used."""
        config = self.config
        query = self._norm_and_rope(query, self.query_norm, self.query_norm_scale, ctx)
        query = query * (config.head_dim**-0.5 if config.query_scale is None else config.query_scale)
        if config.temperature is not None:
            query = config.temperature(query, ctx.positions)
        query = save(ctx.constrain(query, "batch length heads head_dim"), "query_proj")
        if key is None or value is None:
            return query, None
        key = self._norm_and_rope(scale(key, config.key_scale), self.key_norm, self.key_norm_scale, ctx)
        key = save(ctx.constrain(key, "batch length kv_heads head_dim"), "key_proj")
        value = self._clip(value if self.value_norm is None else self.value_norm(value))
        value = scale(value, config.value_scale)
        value = save(ctx.constrain(value, "batch length kv_heads head_dim"), "value_proj")
        return query, NewKV(key=key, value=value)

    def _norm_and_rope(self, x: Array, norm: Norm | None, scales: Array | None, ctx: ForwardContext) -> Array:
        """Normalize and rotate queries or keys. `scales`: scale of each head and feature, for `over="each_head"`."""
        after_rope = self.config.qk_norm is not None and self.config.qk_norm.when == "after_rope"
        x = self._clip(x if after_rope else self._normalize(x, norm, scales))
        rope = self.config.rope
        x = x if rope is None else rotate(x, rotary_positions(ctx, rope), rope, ctx.segment_ids)
        return self._normalize(x, norm, scales) if after_rope else x

    def _normalize(self, x: Array, norm: Norm | None, scales: Array | None) -> Array:
        if norm is None:
            return x
        if scales is not None:
            return (norm(x.astype(jnp.float32)) * scales.astype(jnp.float32)[None, None]).astype(x.dtype)
        return _normalize_jointly(norm, x) if self.config.qk_norm and self.config.qk_norm.over == "heads" else norm(x)

    def _clip(self, x: Array) -> Array:
        bound = self.config.qkv_clip
        return x if bound is None else jnp.clip(x, -bound, bound)

    def _attend(
        self, query: Array, past: Past | None, entries: Any, selected: SelectedKeys, ctx: ForwardContext
    ) -> tuple[Array, Any]:
        """Attend to the tokens of this call and to cached tokens; return the output and the entries to be cached."""
        config = self.config
        execution = ctx.execution
        spans = ctx.span_ends if config.spans else None
        aligned = execution.context_order == "plain" and ctx.masked_keys is None
        key_positions = ctx.positions if ctx.masked_keys is None else jnp.where(ctx.masked_keys, -1, ctx.positions)
        positions = AttentionPositions(ctx.positions, key_positions, ctx.segment_ids, ctx.segment_ids, spans)
        inputs = AttentionInputs(query, entries.key, entries.value, positions, selected.new)
        options = AttentionOptions(mask=config.mask, soft_cap=config.soft_cap, alibi=config.alibi)
        call_options = dataclasses.replace(
            options,
            aligned=aligned,
            dense_positions=ctx.dense_positions and aligned,
            needs_lse=past is not None or self.sink is not None,
        )

        def attend_to_call() -> Result:
            return run_attention(inputs, call_options, execution, contiguous=ctx.documents_are_contiguous)

        if past is not None:
            queries = Queries(query, ctx.positions, spans, selected.cached)
            return past.attend_with(attend_to_call, entries, queries, options, execution, self.sink)
        out, lse = attend_to_call()
        return out if self.sink is None else with_sink(out, lse, self.sink), entries

    def _select_keys(self, inputs: SelectionInputs, past: Past | None, ctx: ForwardContext) -> SelectedKeys:
        """Select the tokens of this call and of the cache that each query attends to.

        `past`: cached keys that correspond to `inputs.key`: the indexer's cache, or without an indexer the layer's.
        """
        selection = self.config.selection
        query, key, make_block_keys = inputs
        if selection is None:
            return SelectedKeys()
        if past is not None:
            cache = past.whole()
            cached_key = cache.key if cache.key_scale is None else cache.keys(key.dtype)
            selected = selection.select_cached(query, key, ctx.positions, cached_key, cache.positions, make_block_keys)
        else:
            selected = SelectedKeys(
                selection.select(
                    query, key, ctx.positions, ctx.segment_ids, ctx.documents_are_contiguous, make_block_keys
                )
            )
        return selected.repeated(self.config.num_heads // selection.num_selections(query.shape[2]))


def _normalize_jointly(norm: Norm, x: Array) -> Array:
    """Normalize the concatenated features of all heads."""
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


class UnequalAttention(Attention):
    """Attention whose values have `value_dim` features per head instead of `head_dim`."""

    value: Float[Array, "embed kv_heads value_dim"] | None
    value_bias: Float[Array, "kv_heads value_dim"] | None
    gate: Float[Array, "embed heads value_dim"] | None
    out: Float[Array, "heads value_dim embed"]


class NarrowAttention(Attention):
    """Attention whose output has `out_dim` features instead of the input's number of features."""

    out: Float[Array, "heads head_dim latent"]
    out_bias: Float[Array, "latent"] | None

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: AttentionPast | None = None
    ) -> tuple[Float[Array, "batch length latent"], Any]:
        out, entries = self._attend_heads(x, ctx, past)
        out = ctx.einsum("batch length heads head_dim, heads head_dim latent -> batch length latent", out, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length latent"), "out_proj"), entries
