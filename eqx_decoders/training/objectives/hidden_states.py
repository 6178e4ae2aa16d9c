"""Distance between the hidden states of a student and a teacher, layer by layer."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.errors import CheckedFields, NonNegativeFloat, check
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.layout import Layout


HiddenDistance = Literal["cosine", "mse"]


class HiddenProjection(eqx.Module):
    """Projection of a student's hidden states to the teacher's width: a float32 matrix for each pair of layers."""

    kernel: Float[AnyArray, "layer_pairs embed teacher_embed"]

    def __call__(
        self, streams: Float[Array, "layer_pairs batch length *streams embed"], layout: Layout
    ) -> Float32[Array, "layer_pairs batch length *streams teacher_embed"]:
        """Compute `x W` for each pair, accumulated in float32."""
        kernel = layout.gather_weight(self.kernel, "layer_pairs embed teacher_embed").astype(streams.dtype)
        return jnp.einsum("pbl...e,pef->pbl...f", streams, kernel, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStates(CheckedFields):
    """Distance between hidden states, added to the loss of each target (Romero et al. 2015).

    It is the mean over pairs of layers of the distance between their outputs at the token before the target.
    """

    weight: NonNegativeFloat = 0.0
    """Weight of the distance between hidden states. 0: they are not compared."""
    distance: HiddenDistance = "cosine"
    """Distance. cosine: 1 - cos(student, teacher); mse: mean squared error over the features."""
    layers: tuple[str, ...] = ()
    """Layers to compare as "student:teacher", counted from 0, such as 3:7 5:11. Empty: all layers of the student,
    spread evenly over the teacher's layers."""
    projection: bool = False
    """Project the student's hidden states with a trained matrix for each pair of layers (Jiao et al. 2020). It is
    stored in the run's checkpoints only. Required for a teacher with another width."""

    def __post_init__(self):
        super().__post_init__()
        for pair in self.layers:
            indices = pair.split(":")
            check(
                len(indices) == 2 and all(index.isdecimal() for index in indices),
                f"distill.hidden.layers={pair!r} must be two layer indices, student:teacher, such as 3:7.",
            )
        check(
            self.weight > 0 or dataclasses.replace(self, weight=1.0) == HiddenStates(weight=1.0),
            "distill.hidden.distance, layers and projection are only read with distill.hidden.weight above 0: set it, "
            "too.",
        )

    def pairs(self, student: Any, teacher: Any) -> tuple[tuple[int, int], ...]:
        """Return the indices of the layers of student and teacher that are compared.

        Raises ConfigError for models of different widths without a projection, and for layers that they do not have.
        """
        width, teacher_width = student.config.embed_dim, teacher.config.embed_dim
        count, teacher_count = len(student.config.blocks), len(teacher.config.blocks)
        check(
            self.projection or width == teacher_width,
            f"distill.hidden.projection=False needs a teacher of the student's width {width}, not {teacher_width}: set "
            "distill.hidden.projection.",
        )
        if not self.layers:
            return tuple((index, max(0, (index + 1) * teacher_count // count - 1)) for index in range(count))
        pairs = []
        for pair in self.layers:
            index, teacher_index = map(int, pair.split(":"))
            check(
                index < count and teacher_index < teacher_count,
                f"distill.hidden.layers={pair} counts layers from 0, but the student has {count} layers and the "
                f"teacher {teacher_count}.",
            )
            pairs.append((index, teacher_index))
        return tuple(pairs)

    def new_projection(self, student: Any, teacher: Any, *, key: PRNGKeyArray) -> "HiddenProjection | None":
        """Create a random projection that preserves the variance of hidden states; None without a projection."""
        if self.weight == 0 or not self.projection:
            return None
        width = student.config.embed_dim
        shape = len(self.pairs(student, teacher)), width, teacher.config.embed_dim
        return HiddenProjection(kernel=jax.random.normal(key, shape, jnp.float32) / width**0.5)

    def distances(
        self,
        student: Float[Array, "layer_pairs batch length *streams embed"],
        teacher: Float[Array, "layer_pairs batch length *streams embed"],
    ) -> Float32[Array, "batch length"]:
        """Compute the mean distance over pairs of layers, in float32."""
        student, teacher = student.astype(jnp.float32), teacher.astype(jnp.float32)
        if self.distance == "mse":
            distances = jnp.mean(jnp.square(student - teacher), axis=-1)
        else:
            norms = jnp.maximum(_norm(student) * _norm(teacher), 1e-12)
            distances = 1.0 - jnp.sum(student * teacher, axis=-1) / norms
        return jnp.mean(distances, axis=(0, *range(3, distances.ndim)))


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1), 1e-24))  # the gradient at 0 is finite
