"""Settings of low-rank adaptation."""

import dataclasses
import fnmatch
import math
from typing import Annotated, Any, Literal

from eqx_decoders.errors import CheckedFields, ConfigError, NonEmpty, PositiveFloat, PositiveInt, check


LORA_WEIGHTS = ("*.lora_*",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig(CheckedFields):
    """Settings of low-rank adapters (LoRA, Hu et al. 2021): the weights that get an adapter, and its size.

    An adapter of a weight `W` has two factors: the layer computes `x W + scale x A B`.
    """

    rank: PositiveInt = 8
    """Rank of the adapters: the number of columns of `A`."""
    alpha: PositiveFloat = 16.0
    """The scale of an adapter is alpha / rank."""
    targets: Annotated[tuple[str, ...], NonEmpty("pattern, such as '*.mlp.up'")] = ("*.mixer.query", "*.mixer.value")
    """Path patterns of the weights that get an adapter. Only matrices inside blocks get one."""
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Ranks for path patterns, such as '*.mlp.*=16'. The first matching pattern counts."""
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    """Values of alpha for path patterns. The first matching pattern counts."""
    rank_stabilized: bool = False
    """Use the scale alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Also train the norms of the columns of the weights (DoRA, Liu et al. 2024)."""
    init: Literal["zeros", "pissa"] = "zeros"
    """Initial adapters. zeros: `B` is zero; pissa: the largest singular values of the weight, with their vectors, which
    are subtracted from the weight (PiSSA, Meng et al. 2024)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the adapters. None: the dtype of the model's weights."""

    def __post_init__(self):
        super().__post_init__()
        for name, rule in (("rank_pattern", "a positive integer"), ("alpha_pattern", "a positive number")):
            for pattern, value in getattr(self, name):
                check(
                    not isinstance(value, bool) and 0 < value < math.inf,
                    f"LoRAConfig.{name}={getattr(self, name)!r}: the value of {pattern!r} must be {rule}. To train "
                    "weights without an adapter, remove them from targets.",
                )

    def rank_of(self, path: str) -> int:
        """Return the rank of the adapter of a weight."""
        return _first_match(path, self.rank_pattern, self.rank)

    def scale_of(self, path: str) -> float:
        """Return the scale of the adapter of a weight."""
        return self._scale(self.rank_of(path), _first_match(path, self.alpha_pattern, self.alpha))

    @property
    def scale(self) -> float:
        """Return the scale of an adapter that no pattern matches."""
        return self._scale(self.rank, self.alpha)

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _first_match(path: str, patterns: tuple[tuple[str, Any], ...], otherwise: Any) -> Any:
    return next((value for pattern, value in patterns if fnmatch.fnmatchcase(path, pattern)), otherwise)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRASettings(CheckedFields):
    """LoRA settings of a run. Without a rank the run trains the weights."""

    checked_name = "lora"
    rank: int | None = None
    """LoRA rank: only low-rank adapters of the weights in `lora.targets` are trained. None: train the weights."""
    alpha: float = 16.0
    """LoRA alpha. The output of an adapter is multiplied by lora.alpha / lora.rank."""
    targets: tuple[str, ...] = ("*.mixer.query", "*.mixer.value")
    """Path patterns of the weights that get an adapter."""
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Ranks for path patterns, such as '*.mlp.*=16'. The first matching pattern counts."""
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    """Values of lora.alpha for path patterns. The first matching pattern counts."""
    rank_stabilized: bool = False
    """Multiply the output of an adapter by lora.alpha / sqrt(lora.rank) (rsLoRA)."""
    dora: bool = False
    """Also train the column norms of the weights (DoRA)."""
    init: Literal["zeros", "pissa"] = "zeros"
    """Initial adapters. zeros: the product is zero; pissa: the largest singular values of the weight, which are
    subtracted from it (PiSSA)."""

    def __post_init__(self):
        super().__post_init__()
        self.config()

    def config(self) -> LoRAConfig | None:
        """Return the configuration of the adapters, which are in float32; None for a run without adapters."""
        if self.rank is not None:
            options: dict[str, Any] = vars(self)
            return LoRAConfig(**options, dtype="float32")
        for name in ("rank_pattern", "alpha_pattern", "rank_stabilized", "dora", "init"):
            value = getattr(self, name)
            if value != getattr(LoRAConfig, name):
                raise ConfigError(f"lora.{name}={value!r} needs lora.rank: without a rank there are no adapters.")
        return None
