"""Signals: numbers for each token that an objective reads, such as weights, advantages and log-probs."""

import equinox as eqx
from jaxtyping import Float, Integer

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.sharding.axes import AnyArray


class Signals(eqx.Module):
    """Numbers for the tokens of a `Batch`, each at the index of its token. None: not used.

    They are computed on the host, over the complete batch of an optimizer step; the compiled step only forms sums. So
    the loss does not depend on microbatches, packing and mesh. Values at tokens of weight 0 are ignored, also NaN.

    **Arguments:**

    - `policy`: weight of a token in the objective's policy loss (`token_weights`). The sum over the batch is the loss;
        it is not divided again.
    - `nll`: weight of `-log p` of a token.
    - `divergence`: weight of the divergence from a reference or teacher model.
    - `advantages`: advantage of the token's completion. In KTO 1 for desirable, -1 for undesirable completions.
    - `old`: log-probs under the trainer's weights when the completion was sampled.
    - `sampler`: log-probs under the distribution from which the completion was sampled.
    - `reference`: log-probs under the reference model.
    - `teacher`: log-probs under the teacher model.
    - `values`: the critic's value at the token when the completion was sampled.
    - `returns`: the observed return from the token, which the critic learns.
    - `baseline`: a number that is subtracted: KTO's estimate of the divergence, or the margin of a reward model's pair.
    - `answers`: index of the token's completion in its row, 1, 2, …; 0 for tokens of prompts and tools, and for
        padding. 2k - 1 and 2k are the chosen and the rejected completion of a pair.
    - `top_ids`, `top_log_probs`: the teacher's most probable tokens and their log-probs.
    - `experts`: experts of the token in each MoE layer, which replace the choice of the router (routing replay); -1 for
        tokens whose experts the router chooses. Only log-probs of targets read it.
    - `most_answers`: maximum index in `answers`.
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
    answers: Integer[AnyArray, "batch length"] | None = None
    top_ids: Integer[AnyArray, "batch length top"] | None = None
    top_log_probs: Float[AnyArray, "batch length top"] | None = None
    experts: Integer[AnyArray, "batch length layers choices"] | None = None
    most_answers: int = eqx.field(static=True, default=1)

    def __post_init__(self):
        for name in ("answers", "top_ids"):
            setattr(self, name, as_int32(f"Signals.{name}", getattr(self, name)))
