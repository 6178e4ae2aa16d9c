"""Settings of a training step."""

import dataclasses

from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(CheckedFields):
    """Settings of a training step."""

    gradient_accumulation_steps: PositiveInt = 1
    """Number of microbatches of a batch. Their gradients are added, weighted by the number of tokens."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the z-loss log(Z)^2. 1e-4 is common. 0: none."""
    fused_loss: bool = True
    """Compute output head and loss in tiles, so that the logits of the entire batch are never stored."""
    qk_clip_threshold: PositiveFloat | None = None
    """QK-clip threshold: after a step in which an attention score of a latent-attention head exceeded it, the weights
    of the head are scaled down. 100 is common. None: never."""
