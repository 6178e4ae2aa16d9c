"""What a step minimizes: the interface of losses, and that of next tokens."""

import dataclasses
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float32, PRNGKeyArray

from eqx_decoders.data.batch import Batch
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.step.loss import token_loss_sum
from eqx_decoders.training.step.loss_metrics import LossMetrics


@runtime_checkable
class Loss(Protocol):
    """What a step minimizes: a sum over a batch, of which a microbatch computes its part.

    A loss must be hashable, and equal to others that compute the same: a program is compiled for each.
    """

    @property
    def per_token(self) -> bool:
        """Whether the sum over the batch is to be divided by `LossMetrics.tokens`; otherwise it is final."""
        ...

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the part of `batch`, which is a part of `full_batch`; `key` is for dropout."""
        ...

    def figures(self, sums: dict[str, Float32[Array, ""]]) -> dict[str, Float32[Array, ""]]:
        """Compute the figures that are reported of `LossMetrics.sums` over the whole batch."""
        ...


@dataclasses.dataclass(frozen=True)
class NextTokenLoss:
    """Cross-entropy of next tokens, with the losses of routers, indexers and multi-token prediction."""

    z_loss: float = 0.0
    fused: bool = True
    per_token: bool = dataclasses.field(default=True, init=False)

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute `token_loss_sum`."""
        return token_loss_sum(model, batch, z_loss=self.z_loss, fused=self.fused, key=key, full_batch=full_batch)

    def figures(self, sums: dict[str, Float32[Array, ""]]) -> dict[str, Float32[Array, ""]]:
        """Return none."""
        return {}
