"""Distance of a student's hidden states from a teacher's, layer by layer."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from eqx_decoders.errors import CheckedFields, NonNegativeFloat, check


HiddenDistance = Literal["cosine", "mse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStates(CheckedFields):
    """Distance of hidden states, which is added to the loss of a student for each target; models of one width.

    It is the mean over pairs of layers, of the stream behind each, at the token before the target (Romero et al. 2015).
    """

    weight: NonNegativeFloat = 0.0
    """Weight of the distance in the loss; 0: hidden states are not compared."""
    distance: HiddenDistance = "cosine"
    """cosine: 1 - cos(student, teacher); mse: mean over features of (student - teacher)^2."""
    layers: tuple[str, ...] = ()
    """Layers that are compared, counted from 0, "student:teacher" each, such as 3:7 5:11; none named: all of the
    student's, spread over the teacher's, last with last."""

    def __post_init__(self):
        super().__post_init__()
        for pair in self.layers:
            words = pair.split(":")
            rule = f"distill.hidden.layers={pair!r} must be two numbers of layers, student:teacher, such as 3:7"
            check(len(words) == 2 and all(word.isdecimal() for word in words), f"{rule}, counted from 0.")
        plain = self.weight > 0 or (self.distance, self.layers) == ("cosine", ())
        check(plain, "distill.hidden.distance and layers are read with distill.hidden.weight above 0: give it, too.")

    def pairs(self, student: Any, teacher: Any) -> tuple[tuple[int, int], ...]:
        """Return the numbers of the layers of two models that are compared.

        Raises ConfigError for models of different widths, and for layers that they don't have.
        """
        configs = student.config, teacher.config
        widths, counts = [each.embed_dim for each in configs], [len(each.blocks) for each in configs]
        rule = f"distill.hidden.weight={self.weight} needs a teacher of the student's width {widths[0]}"
        check(widths[0] == widths[1], f"{rule}, not {widths[1]}: leave it out.")
        if not self.layers:
            return tuple((index, max(0, (index + 1) * counts[1] // counts[0] - 1)) for index in range(counts[0]))
        pairs = [tuple(map(int, pair.split(":"))) for pair in self.layers]
        for index, other in pairs:
            rule = f"distill.hidden.layers={index}:{other}: the student has {counts[0]} layers, the teacher {counts[1]}"
            check(index < counts[0] and other < counts[1], f"{rule}, counted from 0.")
        return tuple((index, other) for index, other in pairs)

    def distances(
        self,
        student: Float[Array, "pairs batch length *streams embed"],
        teacher: Float[Array, "pairs batch length *streams embed"],
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
