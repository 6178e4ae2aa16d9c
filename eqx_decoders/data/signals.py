"""Per-token inputs of training objectives, such as loss weights, advantages and log-probs."""

import equinox as eqx
from jaxtyping import Float, Integer

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.sharding.axes import AnyArray


class Signals(eqx.Module):
    """Per-token inputs of an objective, aligned with `Batch.tokens`. None: the objective does not use the field.

    The values are computed on the host from the complete batch of an optimizer step; the compiled step only computes
    sums. So the loss does not depend on microbatches, packing or mesh. Values at tokens of weight 0 are ignored, even
    if they are NaN.

    **Arguments:**

    - `policy`: weight of a token in the policy loss of the objective (`token_weights`). The loss is the weighted sum
        over the batch, without a further division.
    - `nll`: weight of `-log p` of a token.
    - `divergence`: weight of the divergence from a reference or a teacher at a token.
    - `advantages`: advantage of the token; for KTO, 1 for desirable and -1 for undesirable completions.
    - `old`: log-probs under the trainer's weights at sampling time.
    - `sampler`: log-probs under the distribution from which the token was sampled.
    - `reference`: log-probs under the reference model.
    - `teacher`: log-probs under a teacher.
    - `values`: value estimate of the critic before the token, at sampling time.
    - `returns`: return from the token on; the regression target of the critic.
    - `baseline`: number that is subtracted: KTO's estimate of the divergence, or the margin of a pair in the loss of a
        reward model.
    - `completion_ids`: number of the token's completion in the row, from 1; 0 for tokens of prompts and tools, and for
        padding. Completions 2k - 1 and 2k are the chosen and the rejected completion of a pair.
    - `top_ids`, `top_log_probs`: the most likely tokens under a teacher, and their log-probs.
    - `experts`: indices of the experts of each token in each MoE layer, used instead of the router's top-k choice
        (routing replay); -1: use the router's choice. Only used when log-probs of targets are computed.
    - `max_completions`: maximum number of completions in a row.
    """

    policy: Float[AnyArray, "batch length"] | None = None
    nll: Float[AnyArray, "batch length"] | None = None
    divergence: Float[AnyArray, "batch length"] | None = None
    advantages: Float[AnyArray, "batch length"] | None = None
    old: Float[AnyArray, "batch length"] | None = None
    sampler: Float[AnyArray, "batch length"] | None = None
    reference: Float[AnyArray, "batch length"] | None = None
    teacher: Float[AnyArray, "batch length"] | None = None
    values: Float[AnyArray, "batch length"] | None = None
    returns: Float[AnyArray, "batch length"] | None = None
    baseline: Float[AnyArray, "batch length"] | None = None
    completion_ids: Integer[AnyArray, "batch length"] | None = None
    top_ids: Integer[AnyArray, "batch length top"] | None = None
    top_log_probs: Float[AnyArray, "batch length top"] | None = None
    experts: Integer[AnyArray, "batch length layers choices"] | None = None
    max_completions: int = eqx.field(static=True, default=1)

    def __post_init__(self):
        for name in ("completion_ids", "top_ids"):
            setattr(self, name, as_int32(f"Signals.{name}", getattr(self, name)))
