"""An episode that is being played: its conversation, its tokens, its rewards so far."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.io.text.chat_template import Conversation
from eqx_decoders.rl.drawn_answers import AnswerPart, Episode, JudgedAnswer
from eqx_decoders.rl.rewards import weighted_reward
from eqx_decoders.serving.rollouts import Rollout


class ReadAnswer(NamedTuple):
    """Answer of a model: what its environment gets, and the message of the conversation.

    `structured`: whether the calls are a field of that message, since the template does not take them in a text.
    """

    answer: dict[str, Any]
    message: Mapping[str, Any]
    structured: bool = False


class OpenEpisode:
    """Episode that is being played.

    **Arguments:**

    - `prompt`: its task; `sample`: its number among the episodes of the task; `seed`: that of the environment.
    - `number`: number of the environment's object.
    - `messages`, `variables`: the conversation so far, as the chat template takes it.
    - `text`: what the template wrote before the last answer.
    - `calls`: the answers that the environment was given, for another object in place of one that was lost.
    - `tool_calls`: number of the model's calls of tools.
    - `restarts`: number of these; `seconds`: time of all calls; `end`, `error`: as of `Episode` and `JudgedAnswer`.
    """

    def __init__(self, *, prompt: Prompt, sample: int, seed: int, number: int):
        self.prompt, self.sample, self.seed, self.number = prompt, sample, seed, number
        self.messages: list[Mapping[str, Any]] = []
        self.variables: Mapping[str, Any] = {}
        self.calls: list[dict[str, Any]] = []
        self.tool_calls, self._before = 0, None
        self.text, self.end = "", ""
        self.error: str | None = None
        self.restarts, self.seconds = 0, 0.0
        self._context: tuple[int, ...] = ()
        self._pieces = list[tuple[Rollout, bool]]()
        self._parts, self._columns = list[AnswerPart](), dict[str, float]()
        self._metrics, self._judged = dict[str, float](), True
        self._lengths, self._rewards = list[int](), list[Mapping[str, float]]()  # of turns

    @property
    def turns(self) -> int:
        """Number of the model's answers."""
        return len(self.calls)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the next answer goes on from: exactly those so far."""
        return (*self._context, *(token for piece, _ in self._pieces for token in piece.tokens.tolist()))

    @property
    def size(self) -> int:
        """Number of tokens of all parts."""
        return sum(part.size for part in self._parts) + len(self.tokens)

    @property
    def stop_id(self) -> int | None:
        """Token that ended the last answer; None if it was cut."""
        last, _ = self._pieces[-1]
        return int(last.tokens[-1]) if last.finish_reason == "stop" else None

    def begin(self, context: tuple[int, ...]) -> None:
        """Go on in a new part, behind a context."""
        if self._context:
            self._parts.append(self._part())
        self._context, self._pieces = context, []

    def hear(self, ids: Sequence[int]) -> None:
        """Add tokens that the model did not draw."""
        self._pieces.append((_not_drawn(ids), False))

    def say(self, rollout: Rollout, read: ReadAnswer, *, tokens_left: int, turns_left: int) -> dict[str, Any]:
        """Add an answer of the model; return it as the environment gets it."""
        self._pieces.append((rollout, True))
        self._lengths.append(len(rollout.tokens))
        self.messages.append(read.message)
        self._before = len(self.messages) if read.structured else None
        heard = read.answer
        self.tool_calls += len(heard["message"].get("tool_calls", [])) + len(heard.get("malformed_calls", []))
        self.calls.append({**heard, "tokens_left": tokens_left, "turns_left": turns_left})
        return self.calls[-1]

    def conversations(self) -> list[Conversation]:
        """Return the conversation to be written; behind it that up to the last answer, if its calls are a field."""
        up_to = [] if self._before is None else [Conversation(self.messages[: self._before], self.variables)]
        return [Conversation(self.messages, self.variables, True), *up_to]

    def take(
        self, messages: Sequence[Mapping[str, Any]], columns: Mapping[str, float] | None, metrics: Mapping[str, float]
    ) -> None:
        """Add what the environment answered: its rewards are added up, of its metrics the last count."""
        self.messages += messages
        self._judged &= columns is not None
        self._rewards.append(columns or {})
        for name, value in (columns or {}).items():
            self._columns[name] = self._columns.get(name, 0.0) + value
        self._metrics |= metrics

    def _part(self) -> AnswerPart:
        pieces = [(_not_drawn(()), False), *self._pieces]
        rollouts: list[Any] = [piece for piece, _ in pieces]
        tokens, log_probs, versions = (np.concatenate([piece[field] for piece in rollouts]) for field in range(3))
        drawn = np.concatenate([np.full(len(piece.tokens), by_model) for piece, by_model in pieces])
        reason = "length" if self.end == "tokens" else "stop"
        rollout = Rollout(tokens, log_probs, versions, reason, self._experts())
        return AnswerPart(self._context, rollout, drawn)

    def _experts(self) -> np.ndarray | None:
        """Return the experts of all tokens of the part: as of each turn, when it was drawn, and of what was before it.

        The last token of a turn, which it did not read itself, has those of the next.
        """
        experts = None
        for piece, _ in self._pieces:
            if piece.experts is not None:
                before = piece.experts[:0] if experts is None else experts[:-1]
                experts = np.concatenate([before, piece.experts[len(before) :]])
        if experts is None:
            return None
        unread = len(self.tokens) - len(experts)
        return np.pad(experts, ((0, unread), (0, 0), (0, 0)), constant_values=-1)

    def judged(self, weights: Mapping[str, float]) -> JudgedAnswer:
        """Return the episode that has ended; an episode that failed, or that can't be judged, has no reward."""
        judged = self.error is None and self._judged
        columns = dict(self._columns) if judged else {}
        parts, turns = (*self._parts, self._part()), (*self._rewards, *({},) * (self.turns - len(self._rewards)))
        rewards = tuple(weighted_reward(turn, weights) if turn else 0.0 for turn in turns)
        episode = Episode(parts, self.turns, self.end, self._metrics, tuple(self._lengths), rewards)
        prompt = self.prompt._replace(tokens=episode.parts[0].context)
        texts = (message.get("content") or message.get("tool_calls") or "" for message in self.messages)
        text = "\n".join(f"{message['role']}: {each}" for message, each in zip(self.messages, texts, strict=True))
        reward = weighted_reward(columns, weights) if columns or not judged else 0.0
        return JudgedAnswer(prompt, episode.rollout, text, reward, columns, self.error, self.seconds, episode)


def _not_drawn(ids: Sequence[int]) -> Rollout:
    count = len(ids)
    return Rollout(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")
