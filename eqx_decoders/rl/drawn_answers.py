"""Answers of a step with their rewards, and their files, which people read and a run that was killed goes on with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.sources.data_files import zstd_module
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.serving.rollouts import Rollout


class JudgedAnswer(NamedTuple):
    """Answer to a prompt with what a reward said of it.

    **Arguments:**

    - `text`: the answer without the token that ended it, as the reward reads it.
    - `reward`: the weighted sum; NaN for an answer that was not judged.
    - `columns`: the numbers of the reward by name.
    - `error`: why the answer was not judged.
    - `seconds`: how long the reward took.
    """

    prompt: Prompt
    rollout: Rollout
    text: str
    reward: float
    columns: Mapping[str, float] = {}
    error: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON, from which `from_json` makes the same."""
        lists = {name: getattr(self.rollout, name).tolist() for name in ("tokens", "log_probs", "versions")}
        ends = {"finish_reason": self.rollout.finish_reason, "error": self.error, "seconds": self.seconds}
        prompt = {"number": self.prompt.number, "prompt": self.prompt.record, "prompt_tokens": self.prompt.tokens}
        reward = None if np.isnan(self.reward) else self.reward
        return prompt | {"answer": self.text, "reward": reward, "columns": dict(self.columns)} | ends | lists

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "JudgedAnswer":
        """Read what `to_json` returned."""
        prompt = Prompt(row["number"], tuple(row["prompt_tokens"]), row["prompt"])
        tokens, versions = (np.asarray(row[name], np.int32) for name in ("tokens", "versions"))
        rollout = Rollout(tokens, np.asarray(row["log_probs"], np.float32), versions, row["finish_reason"])
        reward = float("nan") if row["reward"] is None else float(row["reward"])
        return cls(prompt, rollout, row["answer"], reward, row["columns"], row["error"], row["seconds"])


class StepAnswers(NamedTuple):
    """Answers that a step trains on.

    **Arguments:**

    - `prompts`: number of prompts that were dealt out for them.
    - `constant`: groups that were left out, since all answers had the same reward.
    """

    answers: Sequence[JudgedAnswer]
    prompts: int
    constant: int = 0


class AnswerFiles:
    """Files of the answers of each step, `step-000123.jsonl.zst`: a header, and an answer a line.

    The header has a key of everything that the answers follow from: the weights, the settings, the prompts. A run that
    was killed between two checkpoints comes again to the weights that it had, and finds its answers: nothing is drawn,
    and no reward is computed, a second time.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self._folder / f"step-{step:06d}.jsonl.zst"

    def write(self, step: int, key: str, found: StepAnswers) -> None:
        """Write the answers of a step."""
        header = {"step": step, "key": key, "prompts": found.prompts, "constant": found.constant}
        rows = [header, *(each.to_json() for each in found.answers)]
        self._folder.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        write_atomically(self.path(step), zstd_module().compress(content))

    def read(self, step: int, key: str) -> StepAnswers | None:
        """Read the answers of a step; None if there are none, or they follow from something else."""
        if not self.path(step).exists():
            return None
        content = zstd_module().decompress(self.path(step).read_bytes())
        header, *rows = (json.loads(line) for line in content.splitlines())
        if header["key"] != key:
            return None
        return StepAnswers([JudgedAnswer.from_json(row) for row in rows], header["prompts"], header["constant"])
