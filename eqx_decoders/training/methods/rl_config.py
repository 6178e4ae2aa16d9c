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
    """Initial weights of the critic: a reward model, or any model with the policy's tokenizer, as a run directory, a
    directory in Hugging Face's format or "org/name". None: the initial weights of the policy."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate of the critic. None: that of the policy."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps in which only the critic is trained."""
    updates: PositiveInt = 1
    """Number of critic updates per step."""
    clip: PositiveFloat = 0.2
    """Value clip range: a value that has moved by more than this since sampling has no gradient."""
    gamma: Annotated[float, InRange(minimum=0, maximum=1)] = 1.0
    """Discount factor γ."""
    lam: Annotated[float, InRange(minimum=0, maximum=1)] = 0.95
    """GAE λ. 1: Monte Carlo return minus the value; 0: one-step TD error."""
    bootstrap: bool = True
    """Whether the return of a truncated completion continues with the critic's value of the next token. Otherwise
    truncation counts as the end of the episode."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "init_from")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSettings(CheckedFields):
    """Where rewards come from."""

    checked_name = ""
    reward: str | None = None
    """Reward function, file.py:function. It takes the record of a prompt and the text of a completion, and returns a
    number; numbers by name, which are added; or None if it cannot judge the completion."""
    reward_model: str | None = None
    """Reward model, trained with method="reward": a run directory, a directory in Hugging Face's format, or "org/name".
    Its score is added to the reward under the name reward_model. A reward function is then optional."""
    reward_weights: tuple[str, ...] = ()
    """Weights of rewards as name=weight, such as reward_model=0.5. Rewards that are not listed have weight 1."""
    reward_workers: PositiveInt = 2
    """Number of processes that compute rewards or run environments while other completions are sampled."""
    reward_seconds: PositiveFloat = 10.0
    """Time limit in seconds for a reward or a call of an environment. After it the process is killed, and the
    completion has no reward."""
    overlong_buffer: NonNegativeInt = 0
    """Length of the soft overlong penalty (DAPO): over the last N tokens before max_new_tokens, a penalty grows from 0
    to 1. 0: none."""

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
    """Environment class, file.py:Class, used instead of a reward function. An instance is an episode: reset(task, seed)
    returns the first messages, and step(completion) returns the next messages and a reward. The rewards of an
    episode are added."""
    max_turns: PositiveInt = 8
    """Maximum number of completions in an episode."""
    episode_tokens: PositiveInt | None = None
    """Maximum number of tokens of an episode, including those of the environment. None: seq_len."""
    tool_call_parser: Literal["auto"] | ToolFormat = "auto"
    """Format of the model's tool calls in an environment. auto: the format of its chat template."""
    returns: Literal["episode", "turn"] = "episode"
    """Credit assignment. episode: the rewards of an episode count for all of its tokens; turn: the reward of a turn
    counts for the tokens up to this turn, compared with the same turn in other episodes of the prompt."""
    strict_prefix: bool = False
    """Raise an error if the chat template formats earlier turns differently later. Otherwise the episode continues in a
    separate sequence."""

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
    """Published method. It sets baseline, scale, aggregation, policy and others, unless they are set explicitly."""
    prompts: PositiveInt = 16
    """Number of prompts per step."""
    samples: PositiveInt = 8
    """Number of completions per prompt (group size)."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens of a completion, in an environment of each turn."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, which the policy's log-probs also use."""
    policy: PolicyLoss = PolicyLoss()
    """Policy loss."""
    baseline: Literal["mean", "leave_one_out", "none", "critic"] = "mean"
    """Baseline that is subtracted from rewards. mean: mean of the group; leave_one_out: mean of the other completions
    of the group; critic: values of a second model (GAE, as in PPO)."""
    critic: CriticConfig = CriticConfig()
    scale: Scale = "none"
    """Divisor of advantages. group: std of the group's rewards; batch: std of all rewards; mean: mean of the group's
    rewards."""
    whiten: bool = False
    """Normalize advantages to mean 0 and std 1 over all tokens of a step."""
    aggregation: Aggregation = "token"
    """Aggregation of the loss. token: equal weight for each token; row: for each completion; constant: for each
    completion, its tokens divided by max_new_tokens; prompt: for each prompt; row_sum: for each completion, its
    tokens added."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model. 0: no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL term. loss: (log p - log p_ref)^2 / 2 per token (k2); reward: log p - log p_ref is subtracted
    from rewards (k1), with a critic from each token's reward."""
    reference: Literal["auto", "base", "start"] = "auto"
    """Reference model. base: this model without its adapters; start: a copy of the initial weights; auto: base with
    lora.rank, otherwise start."""
    teacher: str | None = None
    """Teacher for on-policy distillation: a directory in Hugging Face's format, or "org/name". The difference of its
    log-prob and the sampler's is added to the advantage of each token. A reward is then optional."""
    teacher_weight: PositiveFloat = 1.0
    """Weight of the teacher's term."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    dynamic_sampling: bool = False
    """Replace prompts whose completions all have the same reward by sampling more prompts (DAPO)."""
    most_draws: PositiveInt = 4
    """Maximum number of sampled prompts per step with dynamic sampling, as a multiple of prompts."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions that reached max_new_tokens. keep: train on them; mask: no loss."""
    answers_per_row: PositiveInt = 16
    """Maximum number of completions in one sequence of a batch."""
    slots: PositiveInt = 32
    """Number of completions that are sampled at the same time."""
    routing_replay: bool = False
    """Replay the sampler's choice of experts in training (R3), because routers of trainer and sampler can differ for
    almost equal scores. Gates and gradients use the trainer's scores."""
    max_staleness: Annotated[int, InRange(minimum=0, maximum=1)] = 0
    """Maximum number of updates by which the sampler may lag behind the trainer. 0: on-policy. 1: requires
    sampler.devices; completions are sampled during the previous update, and policy.correction is tis unless it is
    set."""
    eval_samples: PositiveInt = 1
    """Number of sampled completions per held-out prompt, in addition to the greedy completion."""

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
    rl, adapted = config.rl, config.lora.rank is not None
    sources = [rl.reward, rl.environment]
    remedy = "or rl.reward_model, or rl.environment, file.py:Class, or rl.teacher"
    taught = any((*sources, rl.reward_model, rl.teacher))
    check(taught, f"method='rl' needs rl.reward, file.py:function, such as rewards.py:exact, {remedy}.")
    rule = f"rl.reward={rl.reward!r} and rl.environment={rl.environment!r}: rewards come from one of them"
    check(not all(sources), f"{rule}. Leave out the other.")
    rule = f"rl.max_new_tokens={rl.max_new_tokens} leaves no room for a prompt in data.seq_len={config.data.seq_len}"
    check(rl.max_new_tokens < config.data.seq_len, f"{rule}.")
    check_staleness(config)
    warmup = rl.critic.warmup_steps
    rule = f"rl.critic.warmup_steps={warmup} must be less than steps={config.steps}: the policy would learn nothing"
    check(warmup < config.steps, f"{rule}.")
    rule = f"rl.reference={rl.reference!r} needs lora.rank: without pairs there is no base beside the model."
    check(rl.reference != "base" or adapted, rule)
