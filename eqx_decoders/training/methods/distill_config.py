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
    """Teacher: a directory in Hugging Face's format or "org/name", with the same tokenizer. With `top`, also the
    address of an OpenAI-compatible server that returns log-probs of prompts, such as http://host:8000/v1."""
    top: PositiveInt | None = None
    """Number of the teacher's most likely tokens to compare; all other tokens are one class. They are computed once per
    text and stored. None: compare all tokens, computed in each step."""
    saved: str | None = None
    """Directory of the teacher's stored tokens. Other runs can read it and then need no teacher. None:
    `<run-dir>/teacher`."""
    divergence: DivergenceName = "forward"
    """Divergence, with teacher q and student p. forward: KL(q || p); reverse: KL(p || q); jsd: mean of the KLs to beta
    q + (1 - beta) p; jsd_scaled: jsd / (beta (1 - beta)), whose limits are forward and reverse."""
    beta: Annotated[float, InRange(above=0, below=1)] = 0.5
    """Share of the teacher in the mixture, with jsd and jsd_scaled."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions."""
    alpha: Annotated[float, InRange(minimum=0, maximum=1)] = 1.0
    """Weight of the divergence, times the squared temperature. The cross-entropy of the next tokens has the weight 1 -
    alpha."""

    hidden: HiddenStates = dataclasses.field(default_factory=HiddenStates)
    """Hidden states that are compared, too."""
    on_policy: bool = False
    """On-policy distillation: compare with the teacher on completions that the student samples. The data are prompts,
    and `rl.prompts`, `rl.samples`, `rl.max_new_tokens`, `rl.temperature` and `rl.max_staleness` apply. Use the
    reverse divergence."""

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
