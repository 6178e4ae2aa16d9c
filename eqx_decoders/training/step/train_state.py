"""State of a training run, and metrics of a step."""

import equinox as eqx
from jaxtyping import Array, Bool, Float32, Int32, Key, PyTree

from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray, named_leaves, replaced


class TrainState(eqx.Module):
    """State of a training run between two steps.

    **Arguments:**

    - `model`: the decoder.
    - `optimizer`: state of the optimizer, for the trained weights only.
    - `step`: number of steps.
    - `skipped`: number of steps that did not change the weights, because the loss or gradient was not finite or only
        the critic was trained.
    - `key`: key of the run. The key of a step is derived from it.
    - `ema`: moving averages of the trained weights by path, in float32; None without averages.
    - `loss_weights`: trainable weights of the loss, a tree of modules; None if it has no weights.
    - `critic`: state of a second model that is trained on the same batches; None without a critic.
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
        """Return the model with the moving averages of its weights, in their dtype; without averages, the model."""
        weights = named_leaves(self.model)
        means = {name: mean for name, mean in (self.ema or {}).items() if name in weights}
        return replaced(self.model, {name: mean.astype(weights[name].dtype) for name, mean in means.items()})


class StepMetrics(eqx.Module):
    """Metrics of one step.

    **Arguments:**

    - `loss`, `nll`: loss and negative log-likelihood per target token in nats, before the update.
    - `accuracy`: share of targets with the highest logit.
    - `tokens`: number of target tokens.
    - `grad_norm`: global norm of the gradient, before clipping.
    - `learning_rate`: learning rate of this step.
    - `skipped`: whether the loss or gradient was not finite.
    - `mtp_nll`: negative log-likelihood per target of each depth of multi-token prediction, or None.
    - `stats`: statistics of the layers, or None: of activations if requested, of routing with experts.
    - `objective`: metrics of the loss, by name; None for the loss of next tokens.
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
