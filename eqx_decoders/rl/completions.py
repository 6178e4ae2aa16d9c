"""Sampled completions with their rewards, and the files in which the completions of each step are stored."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int16

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.sources.data_files import zstd_module
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.text.tokenizer import Tokenizer, decode
from eqx_decoders.serving.rollouts import Rollout


EPISODE_ENDS = ("done", "turns", "tokens", "error")


class Segment(NamedTuple):
    """Consecutive tokens of a completion: a context and the tokens that follow it. It is one segment of a packed row.

    **Arguments:**

    - `rollout`: the tokens after the context. Tokens of the environment have a log-probability of 0.
    - `sampled`: which tokens of `rollout` the model sampled; the other tokens are the environment's.
    """

    context: tuple[int, ...]
    rollout: Rollout
    sampled: Bool[np.ndarray, "length"]

    @property
    def size(self) -> int:
        """Number of tokens, including the context."""
        return len(self.context) + len(self.rollout.tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the segment as plain JSON."""
        return {"context": self.context, "sampled": self.sampled.astype(int).tolist(), **_rollout_json(self.rollout)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Segment":
        """Read the result of `to_json`."""
        return cls(tuple(row["context"]), _rollout_from_json(row), np.asarray(row["sampled"], bool))


class Episode(NamedTuple):
    """Turns of a completion in an environment.

    **Arguments:**

    - `segments`: the tokens. There are several segments if the chat template rendered earlier turns differently later;
        each segment then holds the tokens that were sampled after its own context.
    - `turns`: number of turns of the model.
    - `end`: `"done"` if the environment ended the episode, `"turns"` or `"tokens"` for a limit, or `"error"`.
    - `metrics`: metrics of the environment, which are not rewards.
    - `turn_tokens`, `turn_rewards`: number of sampled tokens and reward of each turn.
    """

    segments: tuple[Segment, ...]
    turns: int
    end: str
    metrics: Mapping[str, float] = {}
    turn_tokens: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()

    @property
    def rollout(self) -> Rollout:
        """Tokens after the first context."""
        return self.segments[0].rollout

    def to_json(self) -> dict[str, Any]:
        """Return the episode as plain JSON."""
        segments = [segment.to_json() for segment in self.segments]
        return {**self._asdict(), "segments": segments, "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Episode":
        """Read the result of `to_json`."""
        segments = tuple(Segment.from_json(segment) for segment in row["segments"])
        turns = {name: tuple(row[name]) for name in ("turn_tokens", "turn_rewards")}
        return cls(**{**row, **turns, "segments": segments})


def _rollout_json(rollout: Rollout) -> dict[str, Any]:
    arrays = {name: getattr(rollout, name).tolist() for name in ("tokens", "log_probs", "versions")}
    experts = {} if rollout.experts is None else {"experts": _encoded_experts(rollout.experts)}
    return arrays | {"finish_reason": rollout.finish_reason} | experts


def _rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    return Rollout(
        tokens=np.asarray(row["tokens"], np.int32),
        log_probs=np.asarray(row["log_probs"], np.float32),
        versions=np.asarray(row["versions"], np.int32),
        finish_reason=row["finish_reason"],
        experts=_decoded_experts(row["experts"]) if "experts" in row else None,
    )


def _encoded_experts(experts: Int16[np.ndarray, "tokens layers choices"]) -> dict[str, Any]:
    """Return expert indices as JSON in base64, with one byte for each index, or two for more than 128 experts."""
    dtype = "int8" if experts.max(initial=0) < 128 else "int16"
    data = base64.b64encode(experts.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
    return {"shape": experts.shape, "dtype": dtype, "data": data}


def _decoded_experts(encoded: Mapping[str, Any]) -> Int16[np.ndarray, "tokens layers choices"]:
    flat = np.frombuffer(base64.b64decode(encoded["data"]), np.dtype(encoded["dtype"]).newbyteorder("<"))
    return flat.reshape(encoded["shape"]).astype(np.int16)


class Completion(NamedTuple):
    """Completion that a model sampled for a prompt, with its reward.

    **Arguments:**

    - `rollout`: the sampled tokens. In an environment, the tokens of the turns after the first context (of the
        first segment, if the episode has several).
    - `text`: the text that the reward function reads, without the token that ended it. In an environment, all turns.
    - `reward`: weighted sum of `rewards`; NaN if there is no reward.
    - `rewards`: rewards by name.
    - `error`: why there is no reward.
    - `seconds`: duration of the reward computation.
    - `episode`: turns of a completion in an environment.
    """

    prompt: Prompt
    rollout: Rollout
    text: str
    reward: float
    rewards: Mapping[str, float] = {}
    error: str | None = None
    seconds: float = 0.0
    episode: Episode | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Prompt and sampled tokens; of an episode, its segments."""
        if self.episode is not None:
            return self.episode.segments
        return (Segment(self.prompt.tokens, self.rollout, np.ones(len(self.rollout.tokens), bool)),)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(int(segment.sampled.sum()) for segment in self.segments)

    @property
    def reached_token_limit(self) -> bool:
        """Whether a limit of tokens ended the completion; in an environment, the episode."""
        if self.episode is None:
            return self.rollout.finish_reason == "length"
        return self.episode.end == "tokens"

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of tokens or turns ended the completion, rather than the model or its environment."""
        return self.reached_token_limit or (self.episode is not None and self.episode.end == "turns")

    def to_json(self) -> dict[str, Any]:
        """Return the completion as plain JSON, from which `from_json` restores an equal completion."""
        row = {"number": self.prompt.number, "prompt": self.prompt.record, "prompt_tokens": self.prompt.tokens}
        row |= {"completion": self.text, "reward": None if np.isnan(self.reward) else self.reward}
        row |= {"rewards": dict(self.rewards), "error": self.error, "seconds": self.seconds}
        return row | (_rollout_json(self.rollout) if self.episode is None else {"episode": self.episode.to_json()})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Completion":
        """Read the result of `to_json`."""
        episode = Episode.from_json(row["episode"]) if "episode" in row else None
        return cls(
            prompt=Prompt(row["number"], tuple(row["prompt_tokens"]), row["prompt"]),
            rollout=_rollout_from_json(row) if episode is None else episode.rollout,
            text=row["completion"],
            reward=float("nan") if row["reward"] is None else float(row["reward"]),
            rewards=row["rewards"],
            error=row["error"],
            seconds=row["seconds"],
            episode=episode,
        )


Groups = list[list[Completion]]  # the completions of each prompt


def completion_text(tokenizer: Tokenizer, rollout: Rollout, *, special: bool = False) -> str:
    """Return the text of sampled tokens without the token that ended them; `special`: with names of special tokens."""
    ids = rollout.tokens[:-1] if rollout.finish_reason == "stop" else rollout.tokens
    return decode(tokenizer, ids, special=special)


class StepCompletions(NamedTuple):
    """Completions that a step trains on.

    **Arguments:**

    - `num_prompts`: number of prompts that were taken from the data.
    - `filtered_groups`: number of groups that dynamic sampling dropped because all their rewards were equal.
    - `seconds`, `tokens`: duration of the sampling and number of sampled tokens; 0 if the completions were read from
        a file.
    - `wait_seconds`: time for which the step waited for completions that were still being sampled.
    """

    completions: Sequence[Completion]
    num_prompts: int
    filtered_groups: int = 0
    seconds: float = 0.0
    tokens: int = 0
    wait_seconds: float = 0.0


class CompletionFiles:
    """Files of the completions of each step, `step-000123.jsonl.zst`: a header, then one completion per line.

    The header holds a key of everything that the completions depend on: the weights that learn from them, the settings
    and the prompts. A run that was killed between two checkpoints reaches the same weights again and finds the
    completions of the step: nothing is sampled twice, and no reward is computed twice. `sampled_by` is the key of the
    weights that sampled the completions.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, step: int) -> Path:
        """Return the path of the file of a step."""
        return self._folder / f"step-{step:06d}.jsonl.zst"

    def write(self, step: int, key: str, found: StepCompletions, *, sampled_by: str = "") -> None:
        """Write the completions of a step."""
        header = {"step": step, "key": key, "sampled_by": sampled_by or key}
        header |= {"num_prompts": found.num_prompts, "filtered_groups": found.filtered_groups}
        rows = [header, *(completion.to_json() for completion in found.completions)]
        self._folder.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        write_atomically(self.path(step), zstd_module().compress(content))

    def read(self, step: int, key: str, *, field: Literal["key", "sampled_by"] = "key") -> StepCompletions | None:
        """Read the completions of a step; None if there is no file, or if its key differs."""
        if not self.path(step).exists():
            return None
        content = zstd_module().decompress(self.path(step).read_bytes())
        header, *rows = (json.loads(line) for line in content.splitlines())
        if header.get(field) != key:
            return None
        completions = [Completion.from_json(row) for row in rows]
        return StepCompletions(completions, header["num_prompts"], header["filtered_groups"])
