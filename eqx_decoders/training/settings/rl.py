"""Settings of method rl, and presets of published methods."""

import dataclasses
import math
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
from eqx_decoders.io.text.output_parsing.formats import ToolFormatName
from eqx_decoders.training.objectives.advantages import Aggregation, Scale
from eqx_decoders.training.objectives.policy_loss import Correction, PolicyLoss


SYMMETRIC = PolicyLoss(low=0.2, high=0.2)
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": dict(scale="group", aggregation="sequence", policy=SYMMETRIC),
    "dr_grpo": dict(aggregation="constant", policy=SYMMETRIC),
    "rloo": dict(baseline="leave_one_out", aggregation="sequence_sum", policy=PolicyLoss(kind="reinforce")),
    "dapo": dict(scale="group", dynamic_sampling=True, policy=PolicyLoss(low=0.2, high=0.28)),
    "gspo": dict(scale="group", aggregation="sequence", policy=PolicyLoss(kind="gspo", low=3e-4, high=4e-4)),
    "cispo": dict(scale="group", policy=PolicyLoss(kind="cispo")),
    "reinforce++": dict(baseline="none", whiten=True, policy=SYMMETRIC),
    "ppo": dict(baseline="critic", whiten=True, kl_in="reward", policy=SYMMETRIC),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig(CheckedFields):
    """Settings of a critic, which learns the values of tokens (`baseline="critic"`)."""

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
class RLConfig(CheckedFields):
    """Settings of reinforcement learning (`method="rl"`).

    A preset sets the fields that are not passed: `RLConfig(preset="ppo", whiten=False)` does not whiten.
    `dataclasses.replace` passes all fields, so it does not apply a preset; `with_settings` does.
    """

    checked_name = "rl."
    preset: Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "reinforce++", "ppo"] | None = None
    """Published method. It sets baseline, scale, aggregation, policy and others, unless they are set explicitly."""
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

    environment: str | None = None
    """Environment class, file.py:Class, used instead of a reward function. An instance is an episode: reset(task, seed)
    returns the first messages, and step(completion) returns the next messages and a reward. The rewards of an
    episode are added."""
    max_turns: PositiveInt = 8
    """Maximum number of completions in an episode."""
    episode_tokens: PositiveInt | None = None
    """Maximum number of tokens of an episode, including those of the environment. None: seq_len."""
    tool_call_parser: Literal["auto"] | ToolFormatName = "auto"
    """Format of the model's tool calls in an environment. auto: the format of its chat template."""
    returns: Literal["episode", "turn"] = "episode"
    """Credit assignment. episode: the rewards of an episode count for all of its tokens; turn: the reward of a turn
    counts for the tokens up to this turn, compared with the same turn in other episodes of the prompt."""
    strict_prefix: bool = False
    """Raise an error if the chat template renders earlier turns differently later. Otherwise the episode continues in
    another segment, whose context is the new rendering."""

    prompts: PositiveInt = 16
    """Number of prompts per step."""
    samples: PositiveInt = 8
    """Number of completions per prompt (group size)."""
    max_new_tokens: PositiveInt = 128
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
    """Aggregation of the loss. token: mean over all tokens; sequence: mean over completions of the mean over their
    tokens; constant: mean over completions of the sum over their tokens, divided by max_new_tokens; prompt: mean over
    prompts of the mean over the tokens of their group; sequence_sum: mean over completions of the sum over their
    tokens."""
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
    max_sampling_rounds: PositiveInt = 4
    """Maximum number of sampled prompts per step with dynamic sampling, as a multiple of `prompts`."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions that reached max_new_tokens, and episodes that reached episode_tokens. keep: train on them; mask: no
    loss."""
    completions_per_row: PositiveInt = 16
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
        """Record which fields are passed, including those that are passed their default."""
        config = super().__new__(cls)
        if settings:  # `copy.copy` and `pickle` pass no fields, and do not call `__post_init__` afterwards
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
        check(
            self.samples > 1 or self.baseline in ("none", "critic"),
            f"rl.samples=1 with rl.baseline={self.baseline!r}: a completion needs others to be compared with. Raise "
            "rl.samples, or set rl.baseline to 'none' or 'critic'.",
        )
        self._check_critic()
        check(
            self.overlong_buffer < self.max_new_tokens,
            f"rl.overlong_buffer={self.overlong_buffer} must be less than rl.max_new_tokens={self.max_new_tokens}.",
        )
        self._check_environment()

    def _check_environment(self) -> None:
        """Raise ConfigError for settings of environments without one, and for settings of rewards with one."""
        names, word = ("episode_tokens", "max_turns", "tool_call_parser", "returns", "strict_prefix"), "without"
        if self.environment is not None:
            names, word = ("overlong_buffer",), "with"
        fields = type(self).__dataclass_fields__
        unread = [f"rl.{name}" for name in names if getattr(self, name) != fields[name].default]
        check(not unread, f"{', '.join(unread)} is not read {word} rl.environment: leave it out.")

    def _check_critic(self) -> None:
        """Raise ConfigError for settings of a critic without one, and for settings of groups with one."""
        if self.baseline == "critic":
            check(
                self.scale == "none",
                f"rl.scale={self.scale!r} is not read with rl.baseline='critic', whose advantages are not those of "
                "groups: leave it out.",
            )
            return
        default = CriticConfig()
        for name, value in vars(self.critic).items():
            check(
                value == getattr(default, name),
                f"rl.critic.{name}={value!r} is not read with rl.baseline={self.baseline!r}: leave it out, or set "
                "rl.preset='ppo'.",
            )

    def weights(self) -> dict[str, float]:
        """Return the weights of rewards by name. Raises ConfigError."""
        weights = {}
        for entry in self.reward_weights:
            name, equals, number = entry.partition("=")
            try:
                weights[name] = float(number)
            except ValueError:
                weights[name] = math.nan
            is_valid = bool(name and equals) and not math.isnan(weights[name])
            check(is_valid, f"rl.reward_weights={entry!r} must be name=weight, such as format=0.2.")
        return weights

    def of_preset(self, preset: str | None) -> dict[str, Any]:
        """Return the fields that another preset changes: those with their default, or with this preset's value."""
        current, new, changed = PRESETS.get(self.preset or "", {}), PRESETS.get(preset or "", {}), {}
        for name in (*current, *new):
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) in (default, current.get(name, default)):
                changed[name] = new.get(name, default)
        return changed

    def describe_preset(self) -> str:
        """Return the settings that `preset` has set, as text."""
        lines = list[str]()
        for name in PRESETS.get(self.preset or "", {}):
            value = getattr(self, name)
            if name != "policy":
                lines.append(f"rl.{name}={value}")
                continue
            for field, part in vars(value).items():
                if field == "kind" or part != getattr(PolicyLoss(), field):
                    lines.append(f"rl.policy.{field}={part}")
        return ", ".join(lines)

    @property
    def max_completion_tokens(self) -> int:
        """Maximum number of sampled tokens of a completion, over all its turns."""
        return self.max_new_tokens * (1 if self.environment is None else self.max_turns)

    @property
    def max_segments(self) -> int:
        """Maximum number of segments of a completion: one per turn if a chat template rewrites earlier turns."""
        return 1 if self.environment is None or self.strict_prefix else self.max_turns


def check_staleness(config: Any) -> None:
    """Raise ConfigError for a run (a `TrainConfig`) that samples ahead on the devices that train."""
    check(
        config.rl.max_staleness == 0 or config.sampler.devices > 0,
        f"rl.max_staleness={config.rl.max_staleness} needs sampler.devices: completions are sampled on separate "
        "devices during training.",
    )


def check_rl(config: Any) -> None:
    """Raise ConfigError unless a run (a `TrainConfig`) has a source of rewards and what its other settings require."""
    rl = config.rl
    check(
        any((rl.reward, rl.environment, rl.reward_model, rl.teacher)),
        "method='rl' needs rl.reward (file.py:function, such as rewards.py:exact), rl.reward_model, rl.environment "
        "(file.py:Class) or rl.teacher.",
    )
    check(
        rl.reward is None or rl.environment is None,
        f"rl.reward={rl.reward!r} and rl.environment={rl.environment!r} exclude each other: leave one out.",
    )
    check(
        rl.max_new_tokens < config.data.seq_len,
        f"rl.max_new_tokens={rl.max_new_tokens} must be less than data.seq_len={config.data.seq_len}, which "
        "includes the prompt.",
    )
    check_staleness(config)
    check(
        rl.critic.warmup_steps < config.steps,
        f"rl.critic.warmup_steps={rl.critic.warmup_steps} must be less than steps={config.steps}: only the critic is "
        "trained in these steps.",
    )
    check(
        rl.reference != "base" or config.lora.rank is not None,
        "rl.reference='base' needs lora.rank: it is the model without its adapters.",
    )
