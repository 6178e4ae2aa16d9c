"""Settings of method distill."""

import dataclasses
from typing import Annotated, Any, Literal

from eqx_decoders.errors import CheckedFields, InRange, PositiveFloat, PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.head.divergence import Divergence
from eqx_decoders.training.objectives.hidden_states import HiddenStates
from eqx_decoders.training.settings.rl import check_staleness


DivergenceName = Literal["forward", "reverse", "jsd", "jsd_scaled"]
BETAS = ("jsd", "jsd_scaled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedFields):
    """Settings of distillation; the loss is `alpha T^2 divergence + (1 - alpha) cross-entropy`."""

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
        check(
            not self.on_policy or self.top is None,
            f"distill.top={self.top} is not supported with distill.on_policy, whose completions are new: leave it out.",
        )
        check(
            self.saved is None or self.top is not None,
            f"distill.saved={self.saved!r} needs distill.top: only the teacher's most likely tokens are stored.",
        )
        check(
            self.top is None or self.hidden.weight == 0,
            f"distill.hidden.weight={self.hidden.weight} compares hidden states of the teacher, which are computed in "
            f"each step: leave distill.top={self.top} out.",
        )
        check(
            self.beta == 0.5 or self.divergence in BETAS,
            f"distill.beta={self.beta} is only read with distill.divergence={' or '.join(map(repr, BETAS))}: leave it "
            "out.",
        )

    def loss_options(self) -> dict[str, Any]:
        """Return the arguments of `DistillObjective`, without its teacher."""
        kind: Any = self.divergence.removesuffix("_scaled")
        return {
            "divergence": Divergence(kind, self.beta, scaled=self.divergence == "jsd_scaled"),
            "temperature": self.temperature,
            "alpha": self.alpha,
            "hidden": self.hidden,
        }


def check_teacher(config: Any) -> None:
    """Raise ConfigError if a run (a `TrainConfig`) has no teacher, or settings that its teacher does not support."""
    settings = config.distill
    check(
        settings.teacher is not None or settings.saved is not None,
        "method='distill' needs distill.teacher, the model to learn from, or distill.saved, the stored tokens of one.",
    )
    if settings.teacher is not None and settings.teacher.startswith(("http://", "https://")):
        check(
            settings.top is not None,
            f"distill.teacher={settings.teacher!r} is a server, which returns only the most likely tokens: set "
            "distill.top.",
        )
        check(
            settings.temperature == 1.0,
            f"distill.teacher={settings.teacher!r} is a server, which returns log-probs at temperature 1: leave "
            f"distill.temperature={settings.temperature} out.",
        )
    check_staleness(config)
    check(
        settings.on_policy or (config.rl == type(config.rl)() and not config.sampler.is_separate),
        "rl.prompts, sampler.devices and other settings of sampling are only read with distill.on_policy: set it, too.",
    )
