"""Settings of training with rewards, and the names that people know for some of them."""

import dataclasses
from typing import Annotated, Any, Literal

from eqx_decoders.errors import (
    CheckedFields,
    InRange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.io.text.answers.formats import ToolFormat
from eqx_decoders.training.objectives.advantages import Scale
from eqx_decoders.training.objectives.policy_loss import Correction, PolicyLoss
from eqx_decoders.training.objectives.token_weights import Aggregation


SYMMETRIC = PolicyLoss(low=0.2, high=0.2)
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": dict(scale="group", aggregation="row", policy=SYMMETRIC),
    "dr_grpo": dict(aggregation="constant", policy=SYMMETRIC),
    "rloo": dict(baseline="leave_one_out", aggregation="row_sum", policy=PolicyLoss(kind="reinforce")),
    "dapo": dict(scale="group", dynamic_sampling=True, policy=PolicyLoss(low=0.2, high=0.28)),
    "gspo": dict(scale="group", aggregation="row", policy=PolicyLoss(kind="gspo", low=3e-4, high=4e-4)),
    "cispo": dict(scale="group", policy=PolicyLoss(kind="cispo")),
    "reinforce++": dict(baseline="none", whiten=True, policy=SYMMETRIC),
    "ppo": dict(baseline="critic", whiten=True, kl_in="reward", policy=SYMMETRIC),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig(CheckedFields):
    """Settings of a critic, which learns what each token of an answer is worth (`baseline="critic"`)."""

    checked_name = "rl.critic"
    init_from: str | None = None
    """Where its weights come from: a reward model, or any model with the policy's tokenizer, as a run directory, a
    directory of a Hugging Face checkpoint or "org/name"; None: the weights that the policy begins with."""
    learning_rate: PositiveFloat | None = None
    """Its peak learning rate; None: that of the policy."""
    warmup_steps: NonNegativeInt = 0
    """First steps, in which it learns alone, and the policy stays as it is."""
    updates: PositiveInt = 1
    """Its updates on the answers of a step."""
    clip: PositiveFloat = 0.2
    """How far a value may move from that at the time of the draws before its loss has no gradient."""
    gamma: Annotated[float, InRange(minimum=0, maximum=1)] = 1.0
    """What the return of the next token counts."""
    lam: Annotated[float, InRange(minimum=0, maximum=1)] = 0.95
    """Lambda of generalized advantages. 1: rewards that came, less the value; 0: one step, and the next value."""
    bootstrap: bool = True
    """Whether the return of an answer that a limit cut goes on with the value of what would have come; otherwise it
    ends there, as where the limit belongs to the task."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "init_from")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSettings(CheckedFields):
    """Where rewards come from."""

    checked_name = ""
    reward: str | None = None
    """Function of a Python file, file.py:function. It gets the record of a prompt and the text of an answer, and
    returns a number, numbers by name, which are added up, or None for an answer that it can't judge."""
    reward_model: str | None = None
    """Model that scores answers, as method="reward" trains it: a run directory, a directory of a Hugging Face
    checkpoint, or "org/name". Its score is added to the reward, by the name reward_model; there need be no function."""
    reward_weights: tuple[str, ...] = ()
    """Weights of the numbers of rewards, as name=weight, such as reward_model=0.5; 1 for others."""
    reward_workers: PositiveInt = 2
    """Processes that compute rewards, or hold the objects of an environment, while other answers are drawn."""
    reward_seconds: PositiveFloat = 10.0
    """Longest time for a reward, or a call of an environment; the process is killed then, and the answer has none."""
    overlong_buffer: NonNegativeInt = 0
    """Last tokens up to max_new_tokens over which a penalty grows from 0 to 1 (DAPO); 0: none."""

    def weights(self) -> dict[str, float]:
        """Return the weights of the reward's numbers by name. Raises ConfigError."""
        weights = {}
        for each in self.reward_weights:
            name, equals, number = each.partition("=")
            try:
                weights[name] = float(number)
            except ValueError:
                weights[name] = float("nan")
            good = bool(name and equals) and weights[name] == weights[name]
            check(good, f"rl.reward_weights={each!r} must be name=weight, such as format=0.2.")
        return weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(CheckedFields):
    """Where conversations come from whose rewards an environment gives."""

    checked_name = ""
    environment: str | None = None
    """Class of a Python file, file.py:Class, instead of a reward. An object of it is an episode: reset(task, seed)
    begins a conversation, and step(answer) answers to the model, with rewards that are added up."""
    max_turns: PositiveInt = 8
    """Most answers of the model in an episode."""
    episode_tokens: PositiveInt | None = None
    """Most tokens of an episode, with those of its environment; None: seq_len."""
    tool_call_parser: Literal["auto"] | ToolFormat = "auto"
    """Format of the model's tool calls in an environment. auto: the format of its chat template."""
    returns: Literal["episode", "turn"] = "episode"
    """What rewards are credited to. episode: all of its tokens; turn: the tokens of the turn and of those before it,
    compared with the same turn of the prompt's other episodes."""
    strict_prefix: bool = False
    """Whether a chat template that writes earlier turns another way is an error; otherwise the episode goes on in a row
    of its own."""

    def check_environment(self, rest: Any) -> None:
        """Raise ConfigError for settings of an environment without one, and of rewards with one."""
        fields, word = ("episode_tokens", "max_turns", "tool_call_parser", "returns", "strict_prefix"), "without"
        if self.environment is not None:
            fields, word = ("overlong_buffer",), "with"
        unread = [name for name in fields if getattr(rest, name) != type(rest).__dataclass_fields__[name].default]
        check(not unread, f"rl.{', rl.'.join(unread)} is not read {word} rl.environment: leave it out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(RewardSettings, EnvironmentSettings):
    """Settings of training with rewards (`method="rl"`).

    A preset sets what is not given: `RLConfig(preset="ppo", whiten=False)` does not whiten. `dataclasses.replace` gives
    all; `with_settings` changes the preset of settings that are there.
    """

    checked_name = "rl."
    preset: Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce++", "ppo"] | None = None
    """Published settings by their name, for what is not given: baseline, scale, aggregation, policy and so on."""
    prompts: PositiveInt = 16
    """Prompts of a step."""
    samples: PositiveInt = 8
    """Answers to each prompt."""
    max_new_tokens: PositiveInt = 256
    """Most tokens of an answer; of an environment, of each turn's."""
    temperature: PositiveFloat = 1.0
    """Temperature of the draws, and of the policy that is trained."""
    policy: PolicyLoss = PolicyLoss()
    """Loss of a token."""
    baseline: Literal["mean", "leave_one_out", "none", "critic"] = "mean"
    """What is taken off a reward. mean: of the prompt's answers; leave_one_out: of the others; none; critic: what a
    second model expects at each token (generalized advantages, as in PPO)."""
    critic: CriticConfig = CriticConfig()
    scale: Scale = "none"
    """What advantages are divided by. group: std of the prompt's rewards; batch: of all; mean: of the prompt's mean."""
    whiten: bool = False
    """Whether advantages get mean 0 and std 1 over all tokens of a step."""
    aggregation: Aggregation = "token"
    """What counts the same. token: each token; row: each answer; constant: each answer, by tokens over max_new_tokens;
    prompt: each prompt; row_sum: each answer, by the sum of its tokens."""
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference; 0: no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: (log p - log reference)^2 / 2 of each token (k2); reward: log p - log reference is taken off rewards (k1),
    with a critic off that of each token."""
    reference: Literal["auto", "base", "start"] = "auto"
    """Model of the divergence. base: this one without its low-rank pairs; start: the weights that the run began with,
    held beside; auto: base with lora_rank, otherwise start."""
    teacher: str | None = None
    """Directory of a Hugging Face checkpoint, or "org/name": each token's advantage gets what this model's log-prob of
    it is above that of the draw (on-policy distillation by one sample); then there need not be a reward."""
    teacher_weight: PositiveFloat = 1.0
    """Weight of that."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy, which the loss makes larger."""
    dynamic_sampling: bool = False
    """Draw more prompts in place of those whose answers all have the same reward (DAPO)."""
    most_draws: PositiveInt = 4
    """Most prompts of a step with dynamic sampling, in multiples of prompts."""
    truncated: Literal["keep", "mask"] = "keep"
    """Answers that reached max_new_tokens. keep: they count with their reward; mask: they have no loss."""
    answers_per_row: PositiveInt = 16
    """Most answers in one sequence of a batch."""
    slots: PositiveInt = 32
    """Answers that are drawn at once."""
    routing_replay: bool = False
    """Send tokens to the experts that they were sent to when they were drawn (R3): routers of trainer and sampler can
    choose others where scores are almost equal. Weights and gradients are those of the trainer's own scores."""
    max_staleness: Annotated[int, InRange(minimum=0, maximum=1)] = 0
    """Steps that the weights may be old which draw a step's answers. 0: they are those that learn from them; 1, with
    sampler.devices: answers are drawn while the step before is trained, and policy.correction is tis if not set."""
    eval_samples: PositiveInt = 1
    """Answers drawn to each held-out prompt, beside the most likely one."""

    def __new__(cls, **settings: Any) -> "RLConfig":
        """Note which settings are given, also those that are given their default."""
        config = super().__new__(cls)
        if settings:  # `copy.copy` and `pickle` pass no settings, and do not call `__post_init__` afterwards
            object.__setattr__(config, "_given", settings.keys())
        return config

    def __post_init__(self):
        given = vars(self).pop("_given", ())
        for name, value in PRESETS.get(self.preset or "", {}).items():
            if name not in given:
                object.__setattr__(self, name, value)
        if self.max_staleness and self.policy.correction == Correction():
            corrected = dataclasses.replace(self.policy, correction=Correction(kind="tis"))
            object.__setattr__(self, "policy", corrected)
        super().__post_init__()
        expand_paths(self, "reward", "reward_model", "environment", "teacher")
        self.weights()
        alone = self.samples > 1 or self.baseline in ("none", "critic")
        rule = (
            f"rl.samples={self.samples} with rl.baseline={self.baseline!r}: an answer needs others to be compared with"
        )
        check(alone, f"{rule}. Draw more, or take baseline='none' or 'critic'.")
        self._check_critic()
        rule = f"rl.overlong_buffer={self.overlong_buffer} must be less than rl.max_new_tokens={self.max_new_tokens}"
        check(self.overlong_buffer < self.max_new_tokens, f"{rule}.")
        self.check_environment(self)

    def _check_critic(self) -> None:
        """Raise ConfigError for settings of a critic without one, and of groups with one."""
        plain, rule = CriticConfig(), f"is not read with rl.baseline={self.baseline!r}"
        for name, value in vars(self.critic).items():
            free = self.baseline == "critic" or value == getattr(plain, name)
            check(free, f"rl.critic.{name}={value!r} {rule}: leave it out, or take rl.preset='ppo'.")
        free = self.baseline != "critic" or self.scale == "none"
        check(free, f"rl.scale={self.scale!r} {rule}: advantages are not those of groups. Leave it out.")

    def of_preset(self, preset: str | None) -> dict[str, Any]:
        """Return the settings that another preset changes: those that have their default, or the value of this one."""
        mine, others, changed = PRESETS.get(self.preset or "", {}), PRESETS.get(preset or "", {}), {}
        for name in (*mine, *others):
            plain = type(self).__dataclass_fields__[name].default
            if getattr(self, name) in (plain, mine.get(name, plain)):
                changed[name] = others.get(name, plain)
        return changed

    def describe_preset(self) -> str:
        """Describe what `preset` has set, in the names of settings."""
        words = list[str]()
        for name in PRESETS.get(self.preset or "", {}):
            value = getattr(self, name)
            parts = {f"{name}.{field}": part for field, part in vars(value).items()} if name == "policy" else {}
            plain = {f"policy.{field}": part for field, part in vars(PolicyLoss()).items()}
            parts = {key: part for key, part in parts.items() if part != plain[key] or key == "policy.kind"}
            words += [f"rl.{key}={part}" for key, part in (parts or {name: value}).items()]
        return ", ".join(words)

    @property
    def longest_answer(self) -> int:
        """Most tokens that the model may draw in an answer, over all its turns."""
        return self.max_new_tokens * (1 if self.environment is None else self.max_turns)

    @property
    def most_rows(self) -> int:
        """Most rows that an answer may have: each turn begins one where a chat template rewrites those before it."""
        return 1 if self.environment is None or self.strict_prefix else self.max_turns


def check_staleness(config: Any) -> None:
    """Raise ConfigError for answers of a run that are to be drawn ahead, but on the devices that train."""
    rule = (
        f"rl.max_staleness={config.rl.max_staleness} needs sampler.devices: answers are drawn on devices of their own"
    )
    check(config.rl.max_staleness == 0 or config.sampler.devices > 0, f"{rule}, while the others train.")


def check_rl(config: Any) -> None:
    """Raise ConfigError unless a run, a `TrainConfig`, has a reward or an environment, and the reference it names."""
    rl, adapted = config.rl, config.lora_rank is not None
    sources = [rl.reward, rl.environment]
    remedy = "or rl.reward_model, or rl.environment, file.py:Class, or rl.teacher"
    taught = any((*sources, rl.reward_model, rl.teacher))
    check(taught, f"method='rl' needs rl.reward, file.py:function, such as rewards.py:exact, {remedy}.")
    rule = f"rl.reward={rl.reward!r} and rl.environment={rl.environment!r}: rewards come from one of them"
    check(not all(sources), f"{rule}. Leave out the other.")
    rule = (
        f"rl.max_new_tokens={rl.max_new_tokens} leaves no room for a prompt in dataset.seq_len={config.dataset.seq_len}"
    )
    check(rl.max_new_tokens < config.dataset.seq_len, f"{rule}.")
    check_staleness(config)
    warmup = rl.critic.warmup_steps
    rule = f"rl.critic.warmup_steps={warmup} must be less than steps={config.steps}: the policy would learn nothing"
    check(warmup < config.steps, f"{rule}.")
    rule = f"rl.reference={rl.reference!r} needs lora_rank: without pairs there is no base beside the model."
    check(rl.reference != "base" or adapted, rule)
