"""Learned teacher initialization (LTI): attention kernels computed from a frozen teacher (MaxText's LLAMA2LTI).

The student may have another number of heads and features per head than the teacher. Its kernels are the teacher's
kernels multiplied by small matrices ("maps"), and only these maps are trained.
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
from eqx_decoders.layers.attention.variant import AttentionVariant
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import Past
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import FROZEN
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedInitConfig(AttentionVariant, MixerConfig):
    """Configuration of attention with kernels `K[b,u,v] = sum_xy C[b,x,y] A[x,u] B[y,v]` for query, key and value.

    C is the teacher's frozen kernel. b is `embed`; x and y are heads and features of the teacher; u and v are heads and
    features of the student. The output projection is `K[u,v,b] = sum_xy C[x,y,b] A[x,u] B[v,y]`. With `general` a
    single map `W[x,y,u,v]` replaces the product of A and B.

    **Arguments:**

    - `attention`: the student's attention. Fused and shared projections are not supported.
    - `teacher_heads`, `teacher_kv_heads`, `teacher_head_dim`: sizes of the teacher's kernels.
    - `general`: whether to use general maps instead of products of a map of heads and a map of features.
    """

    attention: AttentionConfig
    teacher_heads: PositiveInt
    teacher_kv_heads: PositiveInt
    teacher_head_dim: PositiveInt
    general: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.check_unsupported(
            *("fused_qkv", "shared_kv", "kv_shared_from", "selection", "value_dim", "out_dim"),
            reason="learned initialization needs separate kernels for query, key and value, and out_dim = embed_dim",
        )

    @property
    def num_heads(self) -> int:
        """Query heads of the student."""
        return self.attention.num_heads

    @property
    def head_dim(self) -> int:
        """Features per head of the student."""
        return self.attention.head_dim

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LearnedInit":
        """Build the layer with random teacher kernels of the usual variance, to be replaced by a teacher's kernels."""
        teacher_key, map_key, attention_key = jax.random.split(key, 3)
        return LearnedInit(
            teacher=_new_teacher(self, embed_dim, teacher_key),
            maps=_new_general_maps(self, map_key) if self.general else _new_factored_maps(self, map_key),
            attention=eqx.tree_at(projection_weights, self.attention.build(embed_dim, key=attention_key), (None,) * 4),
            config=self,
        )


class TeacherKernels(eqx.Module):
    """Attention kernels of the teacher's layer."""

    query: Float[Array, "embed teacher_heads teacher_head_dim"]
    key: Float[Array, "embed teacher_kv_heads teacher_head_dim"]
    value: Float[Array, "embed teacher_kv_heads teacher_head_dim"]
    out: Float[Array, "teacher_heads teacher_head_dim embed"]


class FactoredMaps(eqx.Module):
    """Maps of heads `A[x,u]` and of features `B[y,v]` for each kernel; `out_features` is transposed, `B[v,y]`."""

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
    """Joint maps of heads and features, `W[x,y,u,v]`, for each kernel."""

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
    """Attention that computes its kernels from the teacher's kernels in each call.

    This costs little compared with the tokens of a training step, but much compared with the single token of a decoding
    step. Compute the kernels once with `training.llama_lti.materialize` before decoding.
    """

    teacher: TeacherKernels = eqx.field(metadata=FROZEN)
    maps: FactoredMaps | GeneralMaps
    attention: Attention  # its query, key, value and out kernels are None
    config: LearnedInitConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: Past | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """Return the attention's output, and the new keys and values to be written to the cache."""
        return self.materialized(ctx.execution.layout)(x, ctx, past)

    def branch(self, x: Array, ctx: ForwardContext, past: Past | None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(*self(x, ctx, past))

    def materialized(self, layout: Layout) -> Attention:
        """Return the attention with kernels computed in float32. The teacher's kernels get no gradient."""
        kernels = self.maps.kernels(jax.lax.stop_gradient(self.teacher))
        axes = "embed heads head_dim", "embed kv_heads head_dim", "embed kv_heads head_dim", "heads head_dim embed"
        sharded = tuple(
            layout.constrain_weight(kernel, axis_names) for kernel, axis_names in zip(kernels, axes, strict=True)
        )
        return eqx.tree_at(projection_weights, self.attention, sharded, is_leaf=lambda leaf: leaf is None)


def projection_weights(layer: Any) -> tuple[Any, ...]:
    """Return query, key, value and output kernels of an attention or of a teacher, for `eqx.tree_at`."""
    return layer.query, layer.key, layer.value, layer.out


def _product(pattern: str, *arrays: Array) -> Array:
    """Multiply in float32 with the highest precision: kernels are weights, so the compute dtype does not apply."""
    upcast = (array.astype(jnp.float32) for array in arrays)
    return jnp.einsum(pattern, *upcast, precision=jax.lax.Precision.HIGHEST)


def _new_teacher(config: LearnedInitConfig, embed_dim: int, key: PRNGKeyArray) -> TeacherKernels:
    heads = config.teacher_heads
    kv_heads = config.teacher_kv_heads
    head_dim = config.teacher_head_dim
    keys = jax.random.split(key, 4)

    def new_kernel(key, count):
        return fan_in(key, (embed_dim, count, head_dim), jnp.float32, embed_dim, "normal")

    return TeacherKernels(
        query=new_kernel(keys[0], heads),
        key=new_kernel(keys[1], kv_heads),
        value=new_kernel(keys[2], kv_heads),
        out=fan_in(keys[3], (heads, head_dim, embed_dim), jnp.float32, heads * head_dim, "normal"),
    )


# MaxText initializes each map by the fan-in of its second last axis, which is not the contracted axis for
# `out_features` and for the general maps. Here the variance is always 1 / (size of the contracted axes), so that new
# kernels have the variance of the teacher's kernels.


def _head_counts(config: LearnedInitConfig) -> tuple[tuple[int, int], ...]:
    """Return (teacher's, student's) number of heads for the query, key, value and output kernels."""
    heads = (config.teacher_heads, config.attention.num_heads)
    kv_heads = (config.teacher_kv_heads, config.attention.num_kv_heads)
    return heads, kv_heads, kv_heads, heads


def _new_factored_maps(config: LearnedInitConfig, key: PRNGKeyArray) -> FactoredMaps:
    features = (config.teacher_head_dim, config.head_dim)
    shapes = [shape for heads in _head_counts(config) for shape in (heads, features)]
    maps = [
        fan_in(key, shape, jnp.float32, shape[0]) for key, shape in zip(jax.random.split(key, 8), shapes, strict=True)
    ]
    return FactoredMaps(*maps[:-1], out_features=maps[-1].T)


def _new_general_maps(config: LearnedInitConfig, key: PRNGKeyArray) -> GeneralMaps:
    teacher_features = config.teacher_head_dim
    maps = [
        fan_in(
            map_key,
            (teacher_heads, teacher_features, heads, config.head_dim),
            jnp.float32,
            teacher_heads * teacher_features,
        )
        for map_key, (teacher_heads, heads) in zip(jax.random.split(key, 4), _head_counts(config), strict=True)
    ]
    return GeneralMaps(*maps)
