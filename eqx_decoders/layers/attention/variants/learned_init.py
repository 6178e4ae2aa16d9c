"""Learned initialization: attention whose kernels are computed from a frozen teacher's (MaxText's LLAMA2LTI).

The student may have other heads than its teacher: it reads the teacher's kernels through small maps, and trains these.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.attention.variants.base import AttentionVariant
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import Past
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import FROZEN
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedInitConfig(AttentionVariant, MixerConfig):
    """Configuration of attention with kernels `K[b,u,v] = sum_xy C[b,x,y] A[x,u] B[y,v]` for query, key and value.

    b is `embed`, x and y are heads and features of the teacher's kernel C, u and v of the student's. The output
    projection is `K[u,v,b] = sum_xy C[x,y,b] A[x,u] B[v,y]`. With `general` one map `W[x,y,u,v]` stands for A and B.
    C is never trained.

    **Arguments:**

    - `attention`: the student's attention, with biases, norms, sinks and gate; fused or shared projections are refused.
    - `teacher_heads`, `teacher_kv_heads`, `teacher_head_dim`: sizes of the teacher's kernels.
    - `general`: whether one map acts on heads and features together.
    """

    attention: AttentionConfig
    teacher_heads: PositiveInt
    teacher_kv_heads: PositiveInt
    teacher_head_dim: PositiveInt
    general: bool = False

    def __post_init__(self):
        super().__post_init__()
        rule = "the kernels of query, key and value are computed one by one"
        self.refuse("fused_qkv", "shared_kv", "kv_shared_from", "block_indexer", "value_dim", rule=rule)

    @property
    def num_heads(self) -> int:
        """Query heads of the student."""
        return self.attention.num_heads

    @property
    def head_dim(self) -> int:
        """Features of one of the student's heads."""
        return self.attention.head_dim

    @property
    def features(self) -> tuple[int, int]:
        """Features of one of the teacher's heads and of one of the student's."""
        return self.teacher_head_dim, self.head_dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LearnedInit":
        """Build the layer; until it is given a teacher, the teacher's kernels are random ones of the usual variance."""
        teacher_key, map_key, own_key = jax.random.split(key, 3)
        return LearnedInit(
            teacher=_new_teacher(self, embed_dim, teacher_key),
            maps=_new_general(self, map_key) if self.general else _new_factored(self, map_key),
            attention=eqx.tree_at(kernels_of, self.attention.build(embed_dim, key=own_key), (None,) * 4),
            config=self,
        )


class TeacherKernels(eqx.Module):
    """Attention kernels of a teacher's layer."""

    query: Float[Array, "embed teacher_heads teacher_head_dim"]
    key: Float[Array, "embed teacher_kv_heads teacher_head_dim"]
    value: Float[Array, "embed teacher_kv_heads teacher_head_dim"]
    out: Float[Array, "teacher_heads teacher_head_dim embed"]


class FactoredMaps(eqx.Module):
    """Maps of heads, `A[x,u]`, and of features, `B[y,v]`, for each kernel; for `out` the latter is `B[v,y]`."""

    query_heads: Float[Array, "teacher_heads heads"]
    query_features: Float[Array, "teacher_head_dim head_dim"]
    key_heads: Float[Array, "teacher_kv_heads kv_heads"]
    key_features: Float[Array, "teacher_head_dim head_dim"]
    value_heads: Float[Array, "teacher_kv_heads kv_heads"]
    value_features: Float[Array, "teacher_head_dim head_dim"]
    out_heads: Float[Array, "teacher_heads heads"]
    out_features: Float[Array, "head_dim teacher_head_dim"]

    def kernels(self, teacher: TeacherKernels) -> tuple[Array, Array, Array, Array]:
        """Compute query, key, value and output kernels, in float32."""
        return (
            _product("bxy,xu,yv->buv", teacher.query, self.query_heads, self.query_features),
            _product("bxy,xu,yv->buv", teacher.key, self.key_heads, self.key_features),
            _product("bxy,xu,yv->buv", teacher.value, self.value_heads, self.value_features),
            _product("xyb,xu,vy->uvb", teacher.out, self.out_heads, self.out_features),
        )


class GeneralMaps(eqx.Module):
    """Maps of heads and features together, `W[x,y,u,v]`, for each kernel."""

    query: Float[Array, "teacher_heads teacher_head_dim heads head_dim"]
    key: Float[Array, "teacher_kv_heads teacher_head_dim kv_heads head_dim"]
    value: Float[Array, "teacher_kv_heads teacher_head_dim kv_heads head_dim"]
    out: Float[Array, "teacher_heads teacher_head_dim heads head_dim"]

    def kernels(self, teacher: TeacherKernels) -> tuple[Array, Array, Array, Array]:
        """Compute query, key, value and output kernels, in float32."""
        return (
            _product("bxy,xyuv->buv", teacher.query, self.query),
            _product("bxy,xyuv->buv", teacher.key, self.key),
            _product("bxy,xyuv->buv", teacher.value, self.value),
            _product("xyb,xyuv->uvb", teacher.out, self.out),
        )


class LearnedInit(eqx.Module):
    """Attention whose kernels are computed from a teacher's at each call.

    The cost is small next to the tokens of a training step, but large next to the one token of a decoding step: compute
    them once with `training.llama_lti.materialize` before decoding.
    """

    teacher: TeacherKernels = eqx.field(metadata=FROZEN)
    maps: FactoredMaps | GeneralMaps
    attention: Attention  # without its four kernels
    config: LearnedInitConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: Past | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """Return the attention's output, and the new keys and values for a cache."""
        return self.materialized(ctx.execution.layout)(x, ctx, past)

    def branch(self, x: Array, ctx: ForwardContext, past: Past | None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def materialized(self, layout: Layout) -> Attention:
        """Return the attention with its kernels, computed in float32. No gradient reaches the teacher's."""
        new = self.maps.kernels(jax.lax.stop_gradient(self.teacher))
        words = "embed heads head_dim", "embed kv_heads head_dim", "embed kv_heads head_dim", "heads head_dim embed"
        split = tuple(layout.constrain_weight(kernel, axes) for kernel, axes in zip(new, words, strict=True))
        return eqx.tree_at(kernels_of, self.attention, split, is_leaf=lambda leaf: leaf is None)


def kernels_of(layer: Any) -> tuple[Any, ...]:
    """Return query, key, value and output kernels of an attention or of a teacher, for `eqx.tree_at`."""
    return layer.query, layer.key, layer.value, layer.out


def _product(pattern: str, *arrays: Array) -> Array:
    """Multiply in float32: a kernel is a weight, whatever the dtype of activations and the hardware's default."""
    wide = (array.astype(jnp.float32) for array in arrays)
    return jnp.einsum(pattern, *wide, precision=jax.lax.Precision.HIGHEST)


def _new_teacher(config: LearnedInitConfig, embed_dim: int, key: PRNGKeyArray) -> TeacherKernels:
    heads, kv_heads, head_dim = config.teacher_heads, config.teacher_kv_heads, config.teacher_head_dim
    keys = jax.random.split(key, 4)

    def into(key, count):
        return fan_in(key, (embed_dim, count, head_dim), jnp.float32, embed_dim, "normal")

    return TeacherKernels(
        query=into(keys[0], heads),
        key=into(keys[1], kv_heads),
        value=into(keys[2], kv_heads),
        out=fan_in(keys[3], (heads, head_dim, embed_dim), jnp.float32, heads * head_dim, "normal"),
    )


# MaxText draws each map by the fan-in of its second last axis; in `out_features` and in the general maps that is not
# what is contracted. Here the variance is 1 / (what is contracted): new kernels have their teacher's variance.


def _new_factored(config: LearnedInitConfig, key: PRNGKeyArray) -> FactoredMaps:
    student = config.attention
    heads, kv_heads = (config.teacher_heads, student.num_heads), (config.teacher_kv_heads, student.num_kv_heads)
    shapes = [shape for count in (heads, kv_heads, kv_heads, heads) for shape in (count, config.features)]
    maps = [
        fan_in(key, shape, jnp.float32, shape[0]) for key, shape in zip(jax.random.split(key, 8), shapes, strict=True)
    ]
    return FactoredMaps(*maps[:-1], out_features=maps[-1].T)


def _new_general(config: LearnedInitConfig, key: PRNGKeyArray) -> GeneralMaps:
    student, (features, new_features) = config.attention, config.features
    heads, kv_heads = (config.teacher_heads, student.num_heads), (config.teacher_kv_heads, student.num_kv_heads)
    pairs = zip(jax.random.split(key, 4), (heads, kv_heads, kv_heads, heads), strict=True)
    return GeneralMaps(
        *(fan_in(key, (old, features, new, new_features), jnp.float32, old * features) for key, (old, new) in pairs)
    )
