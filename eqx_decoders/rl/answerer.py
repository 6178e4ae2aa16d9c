"""Answers of the model in training: its engine, the ends of answers, and their rewards."""

import time
from collections.abc import Sequence
from typing import Any

from eqx_decoders.data.end_of_turn import end_of_turn_ids
from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.store.shards import separators
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer, decode
from eqx_decoders.rl.rewards import Rewards
from eqx_decoders.rl.sampler_engine import Drawer, Groups
from eqx_decoders.serving.rollouts import Rollout, rollout
from eqx_decoders.training.methods.rl_config import RLConfig


class Answerer(Drawer):
    """Engine on the weights of a run, which draws answers and has them judged meanwhile.

    **Arguments:**

    - `stop_ids`: tokens that end answers.
    - `engine`: as of `Drawer`.
    """

    def __init__(self, config: RLConfig, tokenizer: Tokenizer, *, stop_ids: Sequence[int], engine: Any):
        super().__init__(engine)
        self._config, self._tokenizer, self._stop_ids = config, tokenizer, tuple(stop_ids)
        self._rewards = Rewards(config)

    def close(self) -> None:
        """End the processes of rewards."""
        self._rewards.close()

    def answer(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Draw answers to each prompt, and have them judged; the groups are in the order of the prompts."""
        started, waiting = time.perf_counter(), {}
        drawn = rollout(
            self.engine,
            [prompt.tokens for prompt in prompts],
            samples=samples,
            max_new_tokens=self._config.max_new_tokens,
            temperature=temperature,
            stop_ids=self._stop_ids,
            seed=seed,
            ids=[prompt.number for prompt in prompts],
        )
        for group in drawn:
            prompt = prompts[group.number]
            texts = [answer_text(self._tokenizer, each) for each in group.rollouts]
            calls = [self._rewards.start(prompt, text) for text in texts]
            waiting[group.number] = [*zip(group.rollouts, texts, calls, strict=True)]
        self.seconds = time.perf_counter() - started
        self.tokens = sum(len(each.tokens) for group in waiting.values() for each, _, _ in group)
        return [
            [self._rewards.judged(prompt, each, text, call.result()) for each, text, call in waiting[number]]
            for number, prompt in enumerate(prompts)
        ]


def answer_text(tokenizer: Tokenizer, answer: Rollout, *, special: bool = False) -> str:
    """Return the text of an answer without the token that ended it; with `special` the names of special tokens, too."""
    ids = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
    return decode(tokenizer, ids, special=special)


def ends_of_answers(tokenizer: Tokenizer, template: ChatTemplate | None, known: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end completions: `known`, the end of documents, and the end of an assistant's turn."""
    _, end = separators(tokenizer)
    ends = {*known, *([] if end is None else [end]), *end_of_turn_ids(tokenizer, template)}
    return tuple(sorted(ends))
