"""Settings of low-rank adaptation."""

import dataclasses
import math
from typing import Annotated, Literal

from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveFloat, PositiveInt


LORA_WEIGHTS = ("*.lora_a", "*.lora_b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig(CheckedFields):
    """Settings of low-rank pairs: their weights and sizes."""

    rank: PositiveInt = 8
    """Features between the two factors of a pair."""
    alpha: PositiveFloat = 16.0
    """The product of a pair is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], NonEmpty("pattern, such as '*.mlp.up'")] = ("*.mixer.query", "*.mixer.value")
    """Patterns of the paths of weights that get a pair; of what they match, the matrices inside the blocks."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the pairs; None: that in which the model keeps its weights."""

    @property
    def scale(self) -> float:
        """Return the factor of the product of a pair."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
