"""Answers of a step with their rewards, and their files, which people read and a run that was killed goes on with."""

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
from eqx_decoders.serving.rollouts import Rollout


ENDS = ("done", "turns", "tokens", "error")  # of episodes


class AnswerPart(NamedTuple):
    """Tokens of an answer that lie together: a context, and what follows it, of which the model drew some.

    **Arguments:**

    - `rollout`: the tokens behind the context; those that were not drawn have a log-probability of 0.
    - `drawn`: which of them the model drew.
    """

    context: tuple[int, ...]
    rollout: Rollout
    drawn: Bool[np.ndarray, "length"]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.context) + len(self.rollout.tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the part as plain JSON."""
        return {"context": self.context, "drawn": self.drawn.astype(int).tolist(), **_rollout_json(self.rollout)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "AnswerPart":
        """Read what `to_json` returned."""
        return cls(tuple(row["context"]), _rollout_of(row), np.asarray(row["drawn"], bool))


class Episode(NamedTuple):
    """What an answer in several turns is, beside its first tokens.

    **Arguments:**

    - `parts`: its tokens; there are several where the chat template rewrote earlier turns, and each has those that were
        drawn behind its own context.
    - `turns`: number of the model's answers.
    - `end`: `"done"`, as the environment said, `"turns"` or `"tokens"` for the limits, or `"error"`.
    - `metrics`: the environment's numbers, which are no rewards.
    - `turn_tokens`, `turn_rewards`: of each turn the number of tokens that were drawn, and its reward.
    """

    parts: tuple[AnswerPart, ...]
    turns: int
    end: str
    metrics: Mapping[str, float] = {}
    turn_tokens: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()

    @property
    def rollout(self) -> Rollout:
        """Tokens behind the first context."""
        return self.parts[0].rollout

    def to_json(self) -> dict[str, Any]:
        """Return the episode as plain JSON."""
        return {**self._asdict(), "parts": [part.to_json() for part in self.parts], "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Episode":
        """Read what `to_json` returned."""
        turns = {name: tuple(row.get(name, ())) for name in ("turn_tokens", "turn_rewards")}
        return cls(**{**row, **turns, "parts": tuple(AnswerPart.from_json(part) for part in row["parts"])})


def _rollout_json(rollout: Rollout) -> dict[str, Any]:
    lists = {name: getattr(rollout, name).tolist() for name in ("tokens", "log_probs", "versions")}
    experts = {} if rollout.experts is None else {"experts": _packed(rollout.experts)}
    return lists | {"finish_reason": rollout.finish_reason} | experts


def _rollout_of(row: Mapping[str, Any]) -> Rollout:
    tokens, versions = (np.asarray(row[name], np.int32) for name in ("tokens", "versions"))
    experts = _unpacked(row["experts"]) if "experts" in row else None
    return Rollout(tokens, np.asarray(row["log_probs"], np.float32), versions, row["finish_reason"], experts)


def _packed(experts: Int16[np.ndarray, "tokens layers choices"]) -> dict[str, Any]:
    """Return numbers of experts as JSON: one byte each, or two where there are more than 128, in base64."""
    dtype = "int8" if experts.max(initial=0) < 128 else "int16"
    data = base64.b64encode(experts.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
    return {"shape": experts.shape, "dtype": dtype, "data": data}


def _unpacked(packed: Mapping[str, Any]) -> Int16[np.ndarray, "tokens layers choices"]:
    """Read what `_packed` returned."""
    flat = np.frombuffer(base64.b64decode(packed["data"]), np.dtype(packed["dtype"]).newbyteorder("<"))
    return flat.reshape(packed["shape"]).astype(np.int16)


class JudgedAnswer(NamedTuple):
    """Answer to a prompt with what a reward said of it.

    **Arguments:**

    - `text`: the answer without the token that ended it, as the reward reads it.
    - `reward`: the weighted sum; NaN for an answer that was not judged.
    - `columns`: the numbers of the reward by name.
    - `error`: why the answer was not judged.
    - `seconds`: how long the reward took.
    - `episode`: of an environment: `rollout` has the tokens of all turns behind the prompt then, and `text` all turns.
    """

    prompt: Prompt
    rollout: Rollout
    text: str
    reward: float
    columns: Mapping[str, float] = {}
    error: str | None = None
    seconds: float = 0.0
    episode: Episode | None = None

    @property
    def parts(self) -> tuple[AnswerPart, ...]:
        """Its tokens, which lie together, or of an episode in several parts."""
        if self.episode is not None:
            return self.episode.parts
        return (AnswerPart(self.prompt.tokens, self.rollout, np.ones(len(self.rollout.tokens), bool)),)

    @property
    def length(self) -> int:
        """Number of tokens that the model drew."""
        return sum(int(part.drawn.sum()) for part in self.parts)

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it, and not the model or its environment."""
        if self.episode is None:
            return self.rollout.finish_reason == "length"
        return self.episode.end in ("turns", "tokens")

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON, from which `from_json` makes the same."""
        rest: dict[str, Any] = {"error": self.error, "seconds": self.seconds}
        if self.episode is None:
            rest |= _rollout_json(self.rollout)
        else:
            rest["episode"] = self.episode.to_json()
        prompt = {"number": self.prompt.number, "prompt": self.prompt.record, "prompt_tokens": self.prompt.tokens}
        reward = None if np.isnan(self.reward) else self.reward
        return prompt | {"answer": self.text, "reward": reward, "columns": dict(self.columns)} | rest

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "JudgedAnswer":
        """Read what `to_json` returned."""
        prompt = Prompt(row["number"], tuple(row["prompt_tokens"]), row["prompt"])
        episode = None if row.get("episode") is None else Episode.from_json(row["episode"])
        rollout = _rollout_of(row) if episode is None else episode.rollout
        reward = float("nan") if row["reward"] is None else float(row["reward"])
        return cls(prompt, rollout, row["answer"], reward, row["columns"], row["error"], row["seconds"], episode)


class StepAnswers(NamedTuple):
    """Answers that a step trains on.

    **Arguments:**

    - `prompts`: number of prompts that were dealt out for them.
    - `constant`: groups that were left out, since all answers had the same reward.
    - `seconds`, `tokens`: how long they were drawn, and how many tokens; 0 for those that were read.
    - `waited`: seconds in which a step waited for those that were being drawn.
    """

    answers: Sequence[JudgedAnswer]
    prompts: int
    constant: int = 0
    seconds: float = 0.0
    tokens: int = 0
    waited: float = 0.0


class AnswerFiles:
    """Files of the answers of each step, `step-000123.jsonl.zst`: a header, and an answer a line.

    The header has a key of everything that the answers follow from: the weights that learn from them, the settings, the
    prompts. A run that was killed between two checkpoints comes again to the weights that it had, and finds its
    answers: nothing is drawn, and no reward is computed, a second time. `drawn_by` is the same of the weights that drew
    them.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self._folder / f"step-{step:06d}.jsonl.zst"

    def write(self, step: int, key: str, found: StepAnswers, *, drawn_by: str = "") -> None:
        """Write the answers of a step."""
        header = {"step": step, "key": key, "drawn_by": drawn_by or key}
        header |= {"prompts": found.prompts, "constant": found.constant}
        rows = [header, *(each.to_json() for each in found.answers)]
        self._folder.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        write_atomically(self.path(step), zstd_module().compress(content))

    def read(self, step: int, key: str, *, field: Literal["key", "drawn_by"] = "key") -> StepAnswers | None:
        """Read the answers of a step; None if there are none, or they follow from something else."""
        if not self.path(step).exists():
            return None
        content = zstd_module().decompress(self.path(step).read_bytes())
        header, *rows = (json.loads(line) for line in content.splitlines())
        if header.get(field) != key:
            return None
        return StepAnswers([JudgedAnswer.from_json(row) for row in rows], header["prompts"], header["constant"])
