"""Settings of a training step."""

import dataclasses

from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(CheckedFields):
    """Settings of a training step."""

    gradient_accumulation_steps: PositiveInt = 1
    """Microbatches into which a batch is cut; their gradients are added, weighted by tokens."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 in the loss; 1e-4 is usual."""
    fused_loss: bool = True
    """Compute head and loss tile by tile, so that all logits never exist at once."""
    qk_clip_threshold: PositiveFloat | None = None
    """Scale the weights of a head of latent attention down after a step in which one of its scores was above this (100
    is usual); None: never."""
