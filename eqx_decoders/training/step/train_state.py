"""The state of a training run, and the metrics that each of its steps reports."""

import equinox as eqx
from jaxtyping import Array, Bool, Float32, Int32, Key, PyTree

from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray, named_leaves, replaced


class TrainState(eqx.Module):
    """Everything that a run carries from step to step; the rest is configuration.

    **Arguments:**

    - `model`: the decoder.
    - `optimizer`: the optimizer's state, of the trainable weights only.
    - `step`: steps taken.
    - `skipped`: steps that changed nothing: loss or gradient was not finite, or a critic learned alone.
    - `key`: the run's key; each step uses its own, derived from it.
    - `ema`: running means of everything that is trained by path, in float32; None without means.
    - `loss_weights`: the loss's own weights, a tree of modules, which the model's optimizer trains; None without any.
    - `critic`: the state of a second model that learns from the same batches; None without one.
    """

    model: Decoder
    optimizer: PyTree
    step: Int32[AnyArray, ""]
    skipped: Int32[AnyArray, ""]
    key: Key[AnyArray, ""]
    ema: dict[str, AnyArray] | None = None
    loss_weights: PyTree = None
    critic: "TrainState | None" = None

    @property
    def averaged(self) -> Decoder:
        """Return the model with the running means of its weights, in their dtype; without means, the model."""
        weights = named_leaves(self.model)
        means = {name: mean for name, mean in (self.ema or {}).items() if name in weights}
        return replaced(self.model, {name: mean.astype(weights[name].dtype) for name, mean in means.items()})


class StepMetrics(eqx.Module):
    """Metrics of one step.

    **Arguments:**

    - `loss`, `nll`: per target token, in nats, before the step.
    - `accuracy`: share of targets with the highest logit.
    - `tokens`: target tokens.
    - `grad_norm`: global norm of the gradient, before clipping.
    - `learning_rate`: of this step.
    - `skipped`: whether the step changed nothing.
    - `mtp_nll`: of each depth of multi-token prediction, per target token of its own; None where there is none.
    - `stats`: of the layers: of their activations if requested, of routing where there are experts; None for neither.
    - `objective`: figures of the loss, by name; None of the loss of next tokens.
    """

    loss: Float32[Array, ""]
    nll: Float32[Array, ""]
    accuracy: Float32[Array, ""]
    tokens: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    learning_rate: Float32[Array, ""]
    skipped: Bool[Array, ""]
    mtp_nll: Float32[Array, "depths"] | None = None
    stats: BlockStats | None = None
    objective: dict[str, Float32[Array, ""]] | None = None
