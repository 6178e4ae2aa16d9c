"""Environments: a user's class in worker processes, and episodes in which a model takes turns with its instances."""

import collections
import concurrent.futures
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.sources.documents import template_variables
from eqx_decoders.errors import DataError, EqxDecodersError, check
from eqx_decoders.io.function_workers import CallResult, FunctionWorkers, is_number
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.rl.completions import Completion, Episode, Groups, Segment
from eqx_decoders.rl.rewards import rewards_by_name, weighted_reward
from eqx_decoders.rl.rollouts import Sampler
from eqx_decoders.rl.turns import CompletionParser, ConversationEncoder, ParsedTurn, Renderings
from eqx_decoders.serving.engine.request import RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.serving.rollouts import Rollout, request_with_log_probs, sample_seed, try_submit
from eqx_decoders.training.settings.rl import RLConfig


Message = Mapping[str, Any]


# --- environments -----------------------------------------------------------------------------------------------------


@runtime_checkable
class Environment(Protocol):
    """Interface of a user's environment class. An instance is one episode. An optional method `close` ends it."""

    def reset(self, task: dict, seed: int) -> Sequence[Message] | dict:
        """Return the first messages of a task, a record of the data, or `{"messages": ..., "tools": ...}`."""
        ...

    def step(self, completion: dict) -> dict:
        """Return the turn after a completion: `{"messages": ..., "reward": ..., "done": ..., "metrics": ...}`.

        All keys are optional. A reward is a number, numbers by name, or None if the episode cannot be judged.

        **Arguments:**

        - `completion`: `text`; `message`, the text as a message of the conversation, with `tool_calls` if the episode
            has tools and the text calls them; `malformed_calls`, `id` and `error` of each call that cannot be parsed;
            `finish_reason`, `"stop"` or `"length"`; `tokens_left` and `turns_left` of the episode.
        """
        ...


class ResetResult(NamedTuple):
    """First messages of an episode, and variables of the chat template, such as `tools`."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]


class StepResult(NamedTuple):
    """Turn of an environment: messages, rewards by name (None: no reward), whether the episode ends, and metrics."""

    messages: Sequence[Message]
    rewards: Mapping[str, float] | None
    done: bool
    metrics: Mapping[str, float]


class EnvironmentWorkers:
    """Worker processes that hold instances of the environment class, which are numbered.

    If a process is killed because one of its instances exceeded the time limit, the next call of each of its other
    instances returns a `CallResult` that is `lost`.

    Raises ConfigError if the class cannot be imported or lacks `reset` or `step`.
    """

    def __init__(self, config: RLConfig):
        self._workers = FunctionWorkers(
            str(config.environment),
            workers=config.reward_workers,
            seconds=config.reward_seconds,
            flag="rl.environment",
            methods=("reset", "step"),
        )
        self._numbers = itertools.count()

    def new_number(self) -> int:
        """Return a number that no instance has had."""
        return next(self._numbers)

    def reset(self, number: int, task: Mapping[str, Any], seed: int) -> "Future[CallResult]":
        """Create an instance and call its `reset`."""
        return self._workers.call_method(number, "reset", dict(task), seed)

    def step(self, number: int, completion: Mapping[str, Any]) -> "Future[CallResult]":
        """Call `step` of an instance."""
        return self._workers.call_method(number, "step", dict(completion), new=False)

    def end(self, number: int) -> None:
        """Call `close` of an instance, if it still exists."""
        self._workers.call_method(number, "close")

    def close(self) -> None:
        """Stop the processes."""
        self._workers.close()


def parse_reset_result(value: Any) -> ResetResult:
    """Check and return the result of `reset`. Raises DataError."""
    is_dict = isinstance(value, dict) and "messages" in value and value.keys() <= {"messages", "tools"}
    check(
        isinstance(value, list) or is_dict,
        f"reset returned {_short(value)}: it must return messages, or a dict of messages and tools",
        DataError,
    )
    messages, tools = (value, None) if isinstance(value, list) else (value["messages"], value.get("tools"))
    return ResetResult(_checked_messages(messages, "reset"), {"tools": tools} if tools else {})


def parse_step_result(value: Any) -> StepResult:
    """Check and return the result of `step`. Raises DataError."""
    keys = ("messages", "reward", "done", "metrics")
    check(
        isinstance(value, dict) and value.keys() <= set(keys),
        f"step returned {_short(value)}: it must return a dict with keys of {', '.join(keys)}",
        DataError,
    )
    done, metrics = value.get("done", False), value.get("metrics") or {}
    check(isinstance(done, bool), f"step: done={_short(done)} must be True or False", DataError)
    check(
        isinstance(metrics, dict) and all(map(is_number, metrics.values())),
        f"step: metrics={_short(metrics)} must be numbers by name",
        DataError,
    )
    rewards = value.get("reward", {})
    if rewards is not None and rewards != {}:
        rewards, error = rewards_by_name(CallResult(rewards))
        check(error is None, f"step: {error}", DataError)
    messages = value.get("messages") or []
    if messages or not done:
        messages = _checked_messages(messages, "step")
    return StepResult(messages, rewards, done, {name: float(number) for name, number in metrics.items()})


def _checked_messages(messages: Any, where: str) -> Sequence[Message]:
    messages = check_messages(messages, f"{where}: messages")
    check(
        messages[-1]["role"] != "assistant",
        f"{where}: the last message must not be the assistant's, because the model continues after it.",
        DataError,
    )
    return messages


def _short(value: Any) -> str:
    return str(value)[:80]


# --- an episode -------------------------------------------------------------------------------------------------------


class OpenEpisode:
    """Episode in progress: its conversation, tokens and rewards so far.

    **Arguments:**

    - `prompt`: the task; `sample`: index of the episode in the task's group; `seed`: seed of the environment.
    - `number`: number of the environment's instance.
    - `messages`, `variables`: the conversation, as arguments of the chat template.
    - `text`: rendering of the conversation before the last completion.
    - `completions`: completions that were passed to the environment. A new instance replays them if the first is lost.
    - `num_tool_calls`: number of the model's tool calls.
    - `restarts`: number of lost instances; `seconds`: duration of all calls.
    - `end`, `error`: see `Episode` and `Completion`.
    """

    def __init__(self, *, prompt: Prompt, sample: int, seed: int, number: int):
        self.prompt, self.sample, self.seed, self.number = prompt, sample, seed, number
        self.messages: list[Message] = []
        self.variables: Mapping[str, Any] = {}
        self.text = ""
        self.completions: list[dict[str, Any]] = []
        self.num_tool_calls = 0
        self.restarts, self.seconds = 0, 0.0
        self.end = ""
        self.error: str | None = None
        self._context: tuple[int, ...] = ()
        self._pieces = list[tuple[Rollout, bool]]()  # of the current segment, and whether the model sampled them
        self._segments = list[Segment]()  # earlier segments
        self._rewards, self._metrics = dict[str, float](), dict[str, float]()
        self._has_reward = True
        self._turn_tokens, self._turn_rewards = list[int](), list[Mapping[str, float]]()
        # number of messages up to the last completion, if its tool calls are a field of its message
        self._structured_messages: int | None = None

    @property
    def turns(self) -> int:
        """Number of completions."""
        return len(self.completions)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt of the next completion: exactly the tokens so far."""
        return (*self._context, *(token for piece, _ in self._pieces for token in piece.tokens.tolist()))

    @property
    def size(self) -> int:
        """Number of tokens of all segments."""
        return sum(segment.size for segment in self._segments) + len(self.tokens)

    @property
    def stop_id(self) -> int | None:
        """End token of the last completion; None if it was truncated."""
        last, _ = self._pieces[-1]
        return int(last.tokens[-1]) if last.finish_reason == "stop" else None

    def start_segment(self, context: tuple[int, ...]) -> None:
        """Continue in a new segment with this context."""
        if self._context:
            self._segments.append(self._segment())
        self._context, self._pieces = context, []

    def add_environment_tokens(self, ids: Sequence[int]) -> None:
        """Add tokens that the model did not sample."""
        self._pieces.append((_environment_tokens(ids), False))

    def add_completion(
        self, rollout: Rollout, parsed: ParsedTurn, *, tokens_left: int, turns_left: int
    ) -> dict[str, Any]:
        """Add a completion of the model; return the argument of the environment's `step`."""
        self._pieces.append((rollout, True))
        self._turn_tokens.append(len(rollout.tokens))
        self.messages.append(parsed.message)
        self._structured_messages = len(self.messages) if parsed.structured else None
        completion = {**parsed.completion, "tokens_left": tokens_left, "turns_left": turns_left}
        self.num_tool_calls += len(completion["message"].get("tool_calls", []))
        self.num_tool_calls += len(completion.get("malformed_calls", []))
        self.completions.append(completion)
        return completion

    def add_step_result(self, result: StepResult) -> None:
        """Add a turn of the environment. Rewards are added; later metrics replace earlier ones."""
        rewards = result.rewards or {}
        self.messages += result.messages
        self._has_reward &= result.rewards is not None
        self._turn_rewards.append(rewards)
        for name, value in rewards.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        self._metrics |= result.metrics

    def conversations(self) -> list[Conversation]:
        """Return the conversation to render, and if its tool calls are a field, the one up to the last completion."""
        conversation = Conversation(self.messages, self.variables, True)
        if self._structured_messages is None:
            return [conversation]
        return [conversation, Conversation(self.messages[: self._structured_messages], self.variables)]

    def completion(self, weights: Mapping[str, float]) -> Completion:
        """Return the episode as a completion. A failed episode, or one that cannot be judged, has no reward."""
        has_reward = self.error is None and self._has_reward
        rewards = dict(self._rewards) if has_reward else {}
        missing_turns = self.turns - len(self._turn_rewards)
        turn_rewards = [*self._turn_rewards, *({} for _ in range(missing_turns))]
        episode = Episode(
            segments=(*self._segments, self._segment()),
            turns=self.turns,
            end=self.end,
            metrics=self._metrics,
            turn_tokens=tuple(self._turn_tokens),
            turn_rewards=tuple(weighted_reward(turn, weights) if turn else 0.0 for turn in turn_rewards),
        )
        contents = [message.get("content") or message.get("tool_calls") or "" for message in self.messages]
        lines = [f"{message['role']}: {text}" for message, text in zip(self.messages, contents, strict=True)]
        return Completion(
            prompt=self.prompt._replace(tokens=episode.segments[0].context),
            rollout=episode.rollout,
            text="\n".join(lines),
            reward=weighted_reward(rewards, weights) if rewards or not has_reward else 0.0,
            rewards=rewards,
            error=self.error,
            seconds=self.seconds,
            episode=episode,
        )

    def _segment(self) -> Segment:
        pieces = [(_environment_tokens(()), False), *self._pieces]
        rollout = Rollout(
            tokens=np.concatenate([piece.tokens for piece, _ in pieces]),
            log_probs=np.concatenate([piece.log_probs for piece, _ in pieces]),
            versions=np.concatenate([piece.versions for piece, _ in pieces]),
            finish_reason="length" if self.end == "tokens" else "stop",
            experts=self._experts(),
        )
        sampled = np.concatenate([np.full(len(piece.tokens), is_sampled) for piece, is_sampled in pieces])
        return Segment(self._context, rollout, sampled)

    def _experts(self) -> np.ndarray | None:
        """Return the experts of all tokens of the segment: for each token, those of the first turn that read it.

        A turn does not read its last sampled token; the next turn does.
        """
        experts = None
        for piece, _ in self._pieces:
            if piece.experts is not None:
                earlier = piece.experts[:0] if experts is None else experts[:-1]
                experts = np.concatenate([earlier, piece.experts[len(earlier) :]])
        if experts is None:
            return None
        unread = len(self.tokens) - len(experts)
        return np.pad(experts, ((0, unread), (0, 0), (0, 0)), constant_values=-1)


def _environment_tokens(ids: Sequence[int]) -> Rollout:
    count = len(ids)
    return Rollout(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")


# --- sampling of episodes ---------------------------------------------------------------------------------------------


MAX_RESTARTS = 3  # of an episode whose process was killed because of another episode


class EpisodeSampler(Sampler):
    """Sampler of episodes in an environment.

    **Arguments:**

    - `max_tokens`: maximum number of tokens of an episode.
    - `stop_ids`: tokens that end completions.
    """

    def __init__(
        self,
        config: RLConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_tokens: int,
        stop_ids: Sequence[int],
        engine: Any,
    ):
        super().__init__(engine)
        self._config, self._max_tokens, self._stop_ids = config, max_tokens, tuple(stop_ids)
        self._environments = EnvironmentWorkers(config)
        self._encoder = ConversationEncoder(tokenizer, template)
        self._parser = CompletionParser(tokenizer, template, config.tool_call_parser)

    def close(self) -> None:
        """Stop the worker processes."""
        self._environments.close()
        self._encoder.close()

    def sample(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Sample `samples` episodes of each task; groups are in task order.

        All episodes of a task have the same environment seed, so that they differ only by what the model samples.
        """
        started, groups = time.perf_counter(), list[list[OpenEpisode]]()
        for prompt in prompts:
            environment_seed = sample_seed(f"{seed}/environment", prompt.number, 0) % 2**31
            episodes = []
            for sample in range(samples):
                number = self._environments.new_number()
                episodes.append(OpenEpisode(prompt=prompt, sample=sample, seed=environment_seed, number=number))
            groups.append(episodes)
        self._run([episode for group in groups for episode in group], temperature, seed)
        weights = self._config.weights()
        completions = [[episode.completion(weights) for episode in group] for group in groups]
        self.seconds = time.perf_counter() - started
        self.tokens = sum(completion.num_tokens for group in completions for completion in group)
        return completions

    def _run(self, episodes: Sequence[OpenEpisode], temperature: float, seed: str) -> None:
        """Run episodes to their ends. Results do not depend on the order of events, nor on other episodes."""
        waiting, open_episodes = collections.deque(episodes), _OpenEpisodes()
        try:
            while waiting or open_episodes.all:
                while waiting and len(open_episodes.all) < 2 * self._config.slots:
                    self._start(waiting.popleft(), open_episodes)
                for episode, result in open_episodes.call_results():
                    self._after_environment(episode, result, open_episodes)
                for episode, rendered, up_to_completion in open_episodes.renderings(self._encoder):
                    self._after_rendering(episode, rendered, up_to_completion, open_episodes)
                while open_episodes.ready and self._submit(open_episodes.ready[0], temperature, seed, open_episodes):
                    open_episodes.ready.popleft()
                if open_episodes.sampling:
                    for episode, sampled in open_episodes.engine_step(self.engine):
                        self._after_sampling(episode, sampled, open_episodes)
                else:
                    open_episodes.wait()
        finally:
            for episode in open_episodes.all:
                self._environments.end(episode.number)

    def _start(self, episode: OpenEpisode, open_episodes: "_OpenEpisodes") -> None:
        """Start an episode, or replay it with a new instance if its instance was lost."""
        open_episodes.all[episode] = None
        calls = [self._environments.reset(episode.number, episode.prompt.record, episode.seed)]
        calls += [self._environments.step(episode.number, completion) for completion in episode.completions]
        open_episodes.calls[episode] = calls

    def _after_environment(self, episode: OpenEpisode, result: CallResult, open_episodes: "_OpenEpisodes") -> None:
        """Continue with the result of `reset` or `step`."""
        episode.seconds += result.seconds
        if result.lost and episode.restarts < MAX_RESTARTS:
            episode.restarts += 1
            self._start(episode, open_episodes)
            return
        try:
            check(result.error is None, result.error or "", DataError)
            done = False
            if episode.turns == 0:
                record = template_variables(episode.prompt.record, f"task {episode.prompt.number}")
                first = parse_reset_result(result.value)
                episode.messages = [*first.messages]
                episode.variables = {**record, **first.variables}
            else:
                turn = parse_step_result(result.value)
                episode.add_step_result(turn)
                done = turn.done
        except DataError as error:
            self._end(episode, "error", open_episodes, f"rl.environment, turn {episode.turns}: {error}")
            return
        if done:
            self._end(episode, "done", open_episodes)
        elif episode.turns >= self._config.max_turns:
            self._end(episode, "turns", open_episodes)
        elif self._tokens_left(episode) < 1:
            self._end(episode, "tokens", open_episodes)
        else:
            open_episodes.unrendered.append(episode)

    def _after_rendering(
        self,
        episode: OpenEpisode,
        rendered: Rendered | EqxDecodersError,
        up_to_completion: Any,
        open_episodes: "_OpenEpisodes",
    ) -> None:
        """Continue with the tokens that the rendered conversation adds, or in a new segment if its start differs.

        `up_to_completion`: rendering up to the last completion, if its tool calls are a field of its message.
        """
        if not isinstance(rendered, Rendered):
            self._end(episode, "error", open_episodes, str(rendered))
            return
        added = None
        if episode.turns:
            content: str | None = str(episode.completions[-1]["text"])
            if up_to_completion is not None:
                content = self._encoder.rendered_completion(episode.text, episode.stop_id, up_to_completion)
            if content is not None:
                added = self._encoder.encode_added(episode.text, content, episode.stop_id, rendered)
            check(
                added is not None or not self._config.strict_prefix,
                f"rl.strict_prefix: task {episode.prompt.number}, turn {episode.turns + 1}: the chat template renders "
                "earlier turns differently than they were sampled.",
                DataError,
            )
        ids = self._encoder.encode(rendered) if added is None else added
        if len(ids) >= self._tokens_left(episode):
            if episode.turns:
                self._end(episode, "tokens", open_episodes)
            else:
                error = f"the first messages have {len(ids)} tokens: no completion fits into {self._max_tokens} tokens"
                self._end(episode, "error", open_episodes, error)
            return
        if added is None:
            episode.start_segment(ids)
        else:
            episode.add_environment_tokens(ids)
        episode.text = rendered.text
        open_episodes.ready.append(episode)

    def _submit(self, episode: OpenEpisode, temperature: float, seed: str, open_episodes: "_OpenEpisodes") -> bool:
        """Queue the request for the next completion of an episode; False while the engine's queue is full."""
        request_seed = sample_seed(f"{seed}/{episode.turns}", episode.prompt.number, episode.sample)
        request = request_with_log_probs(
            episode.tokens,
            SamplingParams(temperature=temperature, seed=request_seed),
            max_new_tokens=min(self._config.max_new_tokens, self._tokens_left(episode)),
            stop_ids=self._stop_ids,
        )
        request_id = try_submit(self.engine, request)
        if request_id is None:
            return False
        open_episodes.sampling[request_id] = (episode, [])
        return True

    def _after_sampling(self, episode: OpenEpisode, rollout: Rollout, open_episodes: "_OpenEpisodes") -> None:
        """Pass a completion to the environment."""
        tools = episode.variables.get("tools") or ()
        completion = episode.add_completion(
            rollout,
            self._parser.parse(rollout, tools, episode.num_tool_calls),
            tokens_left=self._tokens_left(episode) - len(rollout.tokens),
            turns_left=self._config.max_turns - episode.turns - 1,
        )
        open_episodes.calls[episode] = [self._environments.step(episode.number, completion)]

    def _tokens_left(self, episode: OpenEpisode) -> int:
        return self._max_tokens - episode.size

    def _end(self, episode: OpenEpisode, end: str, open_episodes: "_OpenEpisodes", error: str | None = None) -> None:
        episode.end, episode.error = end, error
        del open_episodes.all[episode]
        self._environments.end(episode.number)


class _OpenEpisodes:
    """Episodes in progress, by what they wait for: environment, rendering, a place in the engine, or a completion."""

    def __init__(self):
        self.all: dict[OpenEpisode, None] = {}
        self.calls: dict[OpenEpisode, list[Future[CallResult]]] = {}
        self.unrendered: list[OpenEpisode] = []
        self.ready: collections.deque[OpenEpisode] = collections.deque()
        self.sampling: dict[int, tuple[OpenEpisode, list[RequestOutput]]] = {}
        self._rendering: tuple[list[OpenEpisode], Future[Renderings]] | None = None

    def call_results(self) -> list[tuple[OpenEpisode, CallResult]]:
        """Return the results of completed calls. Of several calls, the first that failed, otherwise the last."""
        completed = [(episode, calls) for episode, calls in self.calls.items() if calls[-1].done()]
        results = []
        for episode, calls in completed:
            del self.calls[episode]
            of_calls = [call.result() for call in calls]
            results.append((episode, next((result for result in of_calls if result.error), of_calls[-1])))
        return results

    def renderings(self, encoder: ConversationEncoder) -> list[tuple[OpenEpisode, Any, Any]]:
        """Return completed renderings, and start to render all waiting conversations in a thread, unless it is busy.

        Each rendering comes with the rendering up to the last completion, or None.
        """
        completed = []
        if self._rendering is not None and self._rendering[1].done():
            rendered = iter(self._rendering[1].result())
            for episode in self._rendering[0]:
                of_episode = [next(rendered) for _ in episode.conversations()]
                completed.append((episode, of_episode[0], of_episode[1] if of_episode[1:] else None))
            self._rendering = None
        if self.unrendered and self._rendering is None:
            conversations = [conversation for episode in self.unrendered for conversation in episode.conversations()]
            self._rendering = self.unrendered, encoder.render(conversations)
            self.unrendered = []
        return completed

    def engine_step(self, engine: Any) -> list[tuple[OpenEpisode, Rollout]]:
        """Run a step of the engine; return the completions that have ended."""
        ended = []
        for output in engine.step():
            episode, outputs = self.sampling[output.request_id]
            outputs.append(output)
            if output.finish_reason is not None:
                del self.sampling[output.request_id]
                ended.append((episode, Rollout.of(outputs)))
        return ended

    def wait(self) -> None:
        """Wait for an environment or a rendering, when the engine has no requests."""
        futures: list[Future[Any]] = [calls[-1] for calls in self.calls.values()]
        if self._rendering is not None:
            futures.append(self._rendering[1])
        if futures and not self.ready:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
