"""Parallel mixers with a common input, whose outputs are added (Falcon-H1).

out = sum over mixers of output_scale * mixer(input_scale * x)
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
    """One of several parallel mixers.

    **Arguments:**

    - `name`: identifier of the mixer in parameter paths and caches.
    - `mixer`: attention (without `kv_shared_from`) or a recurrent mixer.
    - `input_scale`, `output_scale`: multiply the mixer's input and output.
    """

    name: str
    mixer: MixerConfig
    input_scale: PositiveFloat = 1.0
    output_scale: PositiveFloat = 1.0

    def __post_init__(self):
        super().__post_init__()
        check(
            self.name.isidentifier(),
            f"NamedMixer.name={self.name!r} must be an identifier of letters, digits and _, which does not start with "
            "a digit.",
        )
        for field in ("kv_shared_from", "shares_as", "out_dim"):
            value = getattr(self.mixer, field, None)
            check(
                value is None,
                f"NamedMixer.mixer.{field}={value!r} must be None: parallel mixers compute their own keys and values, "
                "and their outputs are added.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelMixersConfig(MixerConfig):
    """Configuration of parallel mixers, `sum over mixers of output_scale * mixer(input_scale * x)`.

    **Arguments:**

    - `mixers`: the mixers, in the order in which their outputs are added.
    """

    mixers: Annotated[tuple[NamedMixer, ...], NonEmpty("mixer")]

    def __post_init__(self):
        super().__post_init__()
        names = [named.name for named in self.mixers]
        check(
            len(set(names)) == len(names),
            f"ParallelMixersConfig.mixers: names must differ, but they are {', '.join(names)}.",
        )

    def inner_mixers(self) -> tuple[MixerConfig, ...]:
        """Return the parallel mixers."""
        return tuple(parallel.mixer for parallel in self.mixers)

    @property
    def depends_on_token_order(self) -> bool:
        return any(named.mixer.depends_on_token_order for named in self.mixers)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the mixers' caches, by name."""
        return {named.name: named.mixer.cache_shape(max_length) for named in self.mixers}

    def token_products(self, length: int) -> int:
        """Count multiplications per token without those of weights."""
        return sum(named.mixer.token_products(length) for named in self.mixers)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "ParallelMixers":
        keys = jax.random.split(key, len(self.mixers))
        mixers = {
            named.name: named.mixer.build(embed_dim, key=mixer_key)
            for named, mixer_key in zip(self.mixers, keys, strict=True)
        }
        return ParallelMixers(mixers, config=self)


class ParallelMixers(eqx.Module):
    """Parallel mixers, `sum over mixers of output_scale * mixer(input_scale * x)`."""

    mixers: dict[str, BranchLayer]
    config: ParallelMixersConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the sum of the outputs, and the new entries of the mixers' caches by name.

        `past`: the mixers' caches by name; None without a cache.
        """
        total = None
        entries = {}
        for named in self.config.mixers:
            mixer_past = None if past is None else past[named.name]
            result = self.mixers[named.name].branch(scale(x, named.input_scale), ctx, mixer_past, None)
            check(
                not result.stats,
                f"NamedMixer.name={named.name!r}: {type(named.mixer).__name__} reports statistics "
                f"({', '.join(result.stats)}), and a block reports those of one mixer. Use it as BlockConfig.mixer.",
            )
            out = scale(result.out, named.output_scale)
            total = out if total is None else total + out
            entries[named.name] = result.entries
        assert total is not None
        return total, entries

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(*self(x, ctx, past))
