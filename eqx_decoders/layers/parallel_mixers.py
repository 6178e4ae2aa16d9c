"""Several mixers that read one input and whose outputs are added (Falcon-H1): `sum of output_scale * mixer(input_scale
* x)`.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveFloat, check
from eqx_decoders.layers.base import BranchLayer, BranchResult, MixerConfig
from eqx_decoders.numerics.einsum import scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedMixer(CheckedFields):
    """One of several mixers.

    **Arguments:**

    - `name`: a word by which its weights and its cache are found.
    - `mixer`: attention, with keys and values of its own, or a recurrence.
    - `input_scale`, `output_scale`: multiply its input and its output.
    """

    name: str
    mixer: MixerConfig
    input_scale: PositiveFloat = 1.0
    output_scale: PositiveFloat = 1.0

    def __post_init__(self):
        super().__post_init__()
        check(self.name.isidentifier(), f"NamedMixer.name={self.name!r} must be a word of letters, digits and _.")
        for field in ("kv_shared_from", "shares_as", "out_dim"):
            value = getattr(self.mixer, field, None)
            rule = "must be None: outputs of several mixers are added, and each has keys and values of its own"
            check(value is None, f"NamedMixer.mixer.{field}={value!r} {rule}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelMixersConfig(MixerConfig):
    """Configuration of `sum of output_scale * mixer(input_scale * x)`.

    **Arguments:**

    - `mixers`: in the order in which their outputs are added.
    """

    mixers: Annotated[tuple[NamedMixer, ...], NonEmpty("mixer")]

    def __post_init__(self):
        super().__post_init__()
        names = [each.name for each in self.mixers]
        check(len(set(names)) == len(names), f"ParallelMixersConfig.mixers: names must differ: {', '.join(names)}.")

    def inner_mixers(self) -> tuple[MixerConfig, ...]:
        """Return the parallel mixers."""
        return tuple(parallel.mixer for parallel in self.mixers)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the mixers' caches, by name."""
        return {each.name: each.mixer.cache_shape(max_length) for each in self.mixers}

    def token_products(self, length: int) -> int:
        """Count multiplications per token besides those of weights."""
        return sum(each.mixer.token_products(length) for each in self.mixers)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "ParallelMixers":
        keys = jax.random.split(key, len(self.mixers))
        built = (each.mixer.build(embed_dim, key=one) for each, one in zip(self.mixers, keys, strict=True))
        return ParallelMixers({each.name: mixer for each, mixer in zip(self.mixers, built, strict=True)}, config=self)


class ParallelMixers(eqx.Module):
    """Mixers `sum of output_scale * mixer(input_scale * x)`."""

    mixers: dict[str, BranchLayer]
    config: ParallelMixersConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the sum of the outputs, and the new entries of all caches by name."""
        total, entries = None, {}
        for each in self.config.mixers:
            mine = None if past is None else past[each.name]
            result = self.mixers[each.name].branch(scale(x, each.input_scale), ctx, mine, None)
            check(
                not result.stats,
                f"NamedMixer {each.name!r}: a block reports the statistics of one mixer, and "
                f"{type(each.mixer).__name__} has some ({', '.join(result.stats)}). Use it as BlockConfig.mixer.",
            )
            out, entries[each.name] = scale(result.out, each.output_scale), result.entries
            total = out if total is None else total + out
        assert total is not None
        return total, entries

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))
