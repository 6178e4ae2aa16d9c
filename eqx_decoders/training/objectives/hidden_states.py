"""Distance of a student's hidden states from a teacher's, layer by layer."""

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
    """Matrices by which hidden states of a student are compared with those of a teacher, one for each pair of layers.

    They are in float32, whatever the weights are in: there are few of them.
    """

    kernel: Float[AnyArray, "layer_pairs embed teacher_embed"]

    def __call__(
        self, streams: Float[Array, "layer_pairs batch length *streams embed"], layout: Layout
    ) -> Float32[Array, "layer_pairs batch length *streams teacher_embed"]:
        """Compute `x W` of each pair, added up in float32."""
        kernel = layout.gather_weight(self.kernel, "layer_pairs embed teacher_embed").astype(streams.dtype)
        return jnp.einsum("pbl...e,pef->pbl...f", streams, kernel, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStates(CheckedFields):
    """Distance of hidden states, which is added to the loss of a student for each target.

    It is the mean over pairs of layers, of the stream behind each, at the token before the target (Romero et al. 2015).
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
            words = pair.split(":")
            rule = f"distill.hidden.layers={pair!r} must be two numbers of layers, student:teacher, such as 3:7"
            check(len(words) == 2 and all(word.isdecimal() for word in words), f"{rule}, counted from 0.")
        plain = self.weight > 0 or dataclasses.replace(self, weight=1.0) == HiddenStates(weight=1.0)
        rule = "distill.hidden.distance, layers and projection are read with distill.hidden.weight above 0"
        check(plain, f"{rule}: give it, too.")

    def pairs(self, student: Any, teacher: Any) -> tuple[tuple[int, int], ...]:
        """Return the numbers of the layers of two models that are compared.

        Raises ConfigError for models of different widths without a projection, and for layers that they don't have.
        """
        configs = student.config, teacher.config
        widths, counts = [each.embed_dim for each in configs], [len(each.blocks) for each in configs]
        rule = f"distill.hidden.projection={self.projection} needs a teacher of the student's width {widths[0]}"
        check(self.projection or widths[0] == widths[1], f"{rule}, not {widths[1]}: give distill.hidden.projection.")
        if not self.layers:
            return tuple((index, max(0, (index + 1) * counts[1] // counts[0] - 1)) for index in range(counts[0]))
        pairs = [tuple(map(int, pair.split(":"))) for pair in self.layers]
        for index, other in pairs:
            rule = f"distill.hidden.layers={index}:{other}: the student has {counts[0]} layers, the teacher {counts[1]}"
            check(index < counts[0] and other < counts[1], f"{rule}, counted from 0.")
        return tuple((index, other) for index, other in pairs)

    def new_projection(self, student: Any, teacher: Any, *, key: PRNGKeyArray) -> "HiddenProjection | None":
        """Make the projection of a student's hidden states, which keeps their variance; None without one."""
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
        one, other = (x.astype(jnp.float32) for x in (student, teacher))
        if self.distance == "mse":
            each = jnp.mean(jnp.square(one - other), axis=-1)
        else:
            each = 1.0 - jnp.sum(one * other, axis=-1) / jnp.maximum(_norm(one) * _norm(other), 1e-12)
        return jnp.mean(each, axis=(0, *range(3, each.ndim)))


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1), 1e-24))  # a gradient at 0, too
