"""Settings of low-rank adaptation."""

import dataclasses
import math
from typing import Literal

from eqx_decoders.errors import check, check_integer, check_number, check_word


LORA_WEIGHTS = ("*.lora_a", "*.lora_b")

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Settings of low-rank pairs: their weights and sizes."""

    rank: int = 8
    """Features between the two factors of a pair."""
    alpha: float = 16.0
    """The product of a pair is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*.mixer.query", "*.mixer.value")
    """Patterns of the paths of weights that get a pair; of what they match, the matrices inside the blocks."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the pairs; None: that in which the model keeps its weights."""

    def __post_init__(self):
        check_integer("LoRAConfig.rank", self.rank)
        check_number("LoRAConfig.alpha", self.alpha, above=0)
        check(len(self.targets) > 0, "LoRAConfig.targets=() must name at least one weight, such as '*.mixer.query'.")
        if self.dtype is not None:
            check_word("LoRAConfig.dtype", self.dtype, _DTYPES)

    @property
    def scale(self) -> float:
        """Return the factor of the product of a pair."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
