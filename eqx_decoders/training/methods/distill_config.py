"""Settings of learning from a teacher."""

import dataclasses
from typing import Annotated, Any, Literal

from eqx_decoders.errors import CheckedFields, InRange, PositiveFloat, PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.head.divergence import Divergence
from eqx_decoders.training.methods.rl_config import check_staleness
from eqx_decoders.training.objectives.hidden_states import HiddenStates


DivergenceName = Literal["forward", "reverse", "jsd", "jsd_scaled"]
BETAS = ("jsd", "jsd_scaled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedFields):
    """Settings of learning from a teacher's distributions, `alpha T^2 divergence + (1 - alpha) cross-entropy`."""

    teacher: str | None = None
    """Directory of a Hugging Face checkpoint, or "org/name", of a model with the same tokenizer; or, with `top`, the
    address of a server that has OpenAI's API and returns log-probs of prompts, http://host:8000/v1."""
    top: PositiveInt | None = None
    """Compare this many of the teacher's likeliest tokens, and one cell for all others, which are computed once for
    the tokens of a text and kept; None: all tokens, computed in each step."""
    saved: str | None = None
    """Directory where a teacher's likeliest tokens are kept, and read by other runs, which then need no teacher; None:
    `<run-dir>/teacher`."""
    divergence: DivergenceName = "forward"
    """forward: sum of q (log q - log p), q the teacher's; reverse: of p (log p - log q); jsd: the mean of both to
    beta q + (1 - beta) p; jsd_scaled: that divided by beta (1 - beta), whose limits are forward and reverse."""
    beta: Annotated[float, InRange(above=0, below=1)] = 0.5
    """Share of the teacher in the mixture of jsd and jsd_scaled."""
    temperature: PositiveFloat = 1.0
    """Temperature that softens both distributions."""
    alpha: Annotated[float, InRange(minimum=0, maximum=1)] = 1.0
    """Weight of the divergence, times the temperature's square; the rest is that of the next tokens' cross-entropy."""

    hidden: HiddenStates = dataclasses.field(default_factory=HiddenStates)
    """Hidden states that are compared, too."""
    on_policy: bool = False
    """Compare with the teacher on answers that the student draws, as in runs with rewards: the data are prompts, and
    `rl.prompts`, `rl.samples`, `rl.max_new_tokens`, `rl.temperature` and `rl.max_staleness` are read. Take the reverse
    divergence."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "teacher", "saved")
        live = not self.on_policy or self.top is None
        check(live, f"distill.top={self.top} is of texts that are there before: leave it out with on_policy.")
        kept = self.saved is None or self.top is not None
        check(kept, f"distill.saved={self.saved!r} needs distill.top: only a teacher's likeliest tokens are kept.")
        rule = f"distill.hidden.weight={self.hidden.weight} needs all of a teacher's layers, computed in each step"
        check(self.top is None or self.hidden.weight == 0, f"{rule}: leave distill.top={self.top} out.")
        plain = self.beta == 0.5 or self.divergence in BETAS
        check(plain, f"distill.beta={self.beta} is read with divergence={' or '.join(map(repr, BETAS))}: leave it out.")

    def loss_options(self) -> dict[str, Any]:
        """Return the options of a `DistillObjective`, but for its teacher."""
        kind: Any = self.divergence.removesuffix("_scaled")
        divergence = Divergence(kind, self.beta, scaled=self.divergence == "jsd_scaled")
        options = dict(temperature=self.temperature, alpha=self.alpha, hidden=self.hidden)
        return {"divergence": divergence, **options}


def check_teacher(config: Any) -> None:
    """Raise ConfigError unless a run, a `TrainConfig`, names its teacher, or what one has said."""
    known = config.distill.teacher is not None or config.distill.saved is not None
    check(known, "method='distill' needs distill.teacher: the model to learn from, or distill.saved, what it said.")
    settings = config.distill
    if settings.teacher is not None and settings.teacher.startswith(("http://", "https://")):
        rule = f"distill.teacher={settings.teacher!r} is a server, which"
        check(settings.top is not None, f"{rule} gives its likeliest tokens alone: give distill.top.")
        rule = f"{rule} gives log-probs at temperature 1: leave distill.temperature={settings.temperature} out."
        check(settings.temperature == 1.0, rule)
    drawn = settings.on_policy or (config.rl == type(config.rl)() and not config.sampler.is_separate)
    check_staleness(config)
    check(
        drawn, "rl.prompts, sampler.devices and other settings of draws are read with distill.on_policy: give it, too."
    )
