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
    - `divergence`: weight of the divergence from a reference or a teacher at a token.
    - `advantages`: advantage of the token; for KTO, 1 for desirable and -1 for undesirable completions.
    - `old`: log-probs of the trainer's weights at sampling time.
    - `sampler`: log-probs of the distribution that the token was sampled from.
    - `reference`: log-probs under the reference model.
    - `teacher`: log-probs under a teacher.
    - `values`: the critic's value before the token, at sampling time.
    - `returns`: return from the token on, which the critic learns.
    - `baseline`: a number taken off: KTO's estimate of the divergence, the margin of a reward model's pair.
    - `completion_ids`: number of the token's completion in its row, 1, 2, ...; 0 for tokens of prompts and tools, and
        for padding. Completions 2k - 1 and 2k are the chosen and the rejected completion of a pair.
    - `top_ids`, `top_log_probs`: a teacher's likeliest tokens and their log-probs.
    - `experts`: the experts that the token is sent to in each layer that has any, in place of the best ones of its
        router (routing replay); -1 for tokens whose router chooses. Only log-probs of targets read it.
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
