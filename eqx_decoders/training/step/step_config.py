"""Settings of a training step."""

import dataclasses

from eqx_decoders.errors import check_integer, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of a training step."""

    gradient_accumulation_steps: int = 1
    """Microbatches into which a batch is cut; their gradients are added, weighted by tokens."""
    z_loss: float = 0.0
    """Weight of log(Z)^2 in the loss; 1e-4 is usual."""
    fused_loss: bool = True
    """Compute head and loss tile by tile, so that all logits never exist at once."""
    qk_clip_threshold: float | None = None
    """Scale the weights of a head of latent attention down after a step in which one of its scores was above this (100
    is usual); None: never."""

    def __post_init__(self):
        check_integer("StepConfig.gradient_accumulation_steps", self.gradient_accumulation_steps)
        check_number("StepConfig.z_loss", self.z_loss, least=0)
        if self.qk_clip_threshold is not None:
            check_number("StepConfig.qk_clip_threshold", self.qk_clip_threshold, above=0)
