"""Numbers of tokens that an objective reads: weights, advantages, other models' log-probs."""

import equinox as eqx
from jaxtyping import Float, Integer

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.sharding.axes import AnyArray


class Signals(eqx.Module):
    """Numbers of the tokens of a `Batch`, each at the index of the token that it is about; None: not used.

    Whatever an algorithm decides about a token is made on the host, over the whole batch of an optimizer step, and
    stands here; the compiled step only forms sums. So a loss is the same for any microbatches, packing and mesh.
    What stands at tokens of weight 0 may be anything, also NaN.

    **Arguments:**

    - `policy`: weight of the objective's own loss of a token (`token_weights`: its sum is the loss of the batch, not to
        be divided again).
    - `nll`: weight of `-log p` of a token.
    - `divergence`: weight of the divergence from a reference or a teacher at a token.
    - `advantages`: how much better than expected the token's answer was; of KTO 1 for desirable, -1 for undesirable.
    - `old`: log-probs under the trainer's own weights when the answer was drawn.
    - `sampler`: log-probs of the distribution that the answer was really drawn from.
    - `reference`: log-probs under the reference model.
    - `teacher`: log-probs under a teacher.
    - `values`: what a critic expected of the return from the token on, when the answer was drawn.
    - `returns`: what came of it, which the critic learns.
    - `baseline`: a number taken off: KTO's estimate of the divergence, the margin of a reward model's pair.
    - `answers`: number of the answer within its row, 1, 2, …, of which the token is one; 0 for tokens of prompts, of
        tools and for padding. Numbers 2k - 1 and 2k are the chosen and the rejected answer of a pair.
    - `top_ids`, `top_log_probs`: a teacher's likeliest tokens and their log-probs.
    - `experts`: the experts that the token is sent to in each layer that has any, in place of the best ones of its
        router (routing replay); -1 for tokens whose router chooses. Only log-probs of targets read it.
    - `most_answers`: the largest number that an answer may have.
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
