"""Episodes of environments: many at once, those that wait for their environment beside those that are answered."""

import collections
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.sources.documents import template_variables
from eqx_decoders.errors import DataError, EqxDecodersError, check
from eqx_decoders.io.function_workers import CallResult
from eqx_decoders.io.text.chat_template import ChatTemplate, Rendered
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.rl.drawn_answers import JudgedAnswer
from eqx_decoders.rl.environments import Environments, checked_beginning, checked_turn
from eqx_decoders.rl.open_episode import OpenEpisode
from eqx_decoders.rl.sampler_engine import Drawer
from eqx_decoders.rl.tools.tool_reader import ToolReader
from eqx_decoders.rl.turn_writer import TurnWriter, Written
from eqx_decoders.serving.engine.request import Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.serving.rollouts import Rollout, answer_seed, scored_request, submitted
from eqx_decoders.training.methods.rl_config import RLConfig


RESTARTS = 3  # of an episode whose process was killed for another


class EpisodeAnswerer(Drawer):
    """Engine on the weights of a run, which plays episodes of an environment.

    **Arguments:**

    - `limit`: most tokens of an episode.
    - `stop_ids`, `engine`: as of `Answerer`.
    """

    def __init__(
        self,
        config: RLConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        limit: int,
        stop_ids: Sequence[int],
        engine: Any,
    ):
        super().__init__(engine)
        self._config, self._tokenizer, self._limit, self._stop_ids = config, tokenizer, limit, tuple(stop_ids)
        self._environments, self._writer = Environments(config), TurnWriter(tokenizer, template)
        self._reader = ToolReader(tokenizer, template, config.tool_call_parser)

    def close(self) -> None:
        """End the processes of environments."""
        self._environments.close()
        self._writer.close()

    def answer(
        self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str
    ) -> list[list[JudgedAnswer]]:
        """Play episodes of each task; the groups are in the order of the tasks.

        All episodes of a task have one seed of their environment, a hash as those of the draws are, so that they differ
        by what the model says alone.
        """
        started, groups = time.perf_counter(), list[list[OpenEpisode]]()
        for prompt in prompts:
            start = answer_seed(f"{seed}/environment", prompt.number, 0) % 2**31
            new: Callable[[], int] = self._environments.new_number
            groups.append(
                [OpenEpisode(prompt=prompt, sample=each, seed=start, number=new()) for each in range(samples)]
            )
        self._play([episode for group in groups for episode in group], temperature, seed)
        judged = [[episode.judged(self._config.weights()) for episode in group] for group in groups]
        self.seconds = time.perf_counter() - started
        self.tokens = sum(answer.length for group in judged for answer in group)
        return judged

    def _play(self, episodes: Sequence[OpenEpisode], temperature: float, seed: str) -> None:
        """Play episodes to their ends. What comes first changes no result: nothing depends on another episode."""
        waiting, table = collections.deque(episodes), _Table()
        try:
            while waiting or table.open:
                while waiting and len(table.open) < 2 * self._config.slots:
                    self._start(waiting.popleft(), table)
                for episode, result in table.results():
                    self._heard(episode, result, table)
                for episode, rendered, before in table.texts(self._writer):
                    self._written(episode, rendered, before, table)
                while table.ready and self._submit(table.ready[0], temperature, seed, table):
                    table.ready.popleft()
                if table.running:
                    for episode, rollout in table.step(self.engine):
                        self._drawn(episode, rollout, table)
                else:
                    table.wait()
        finally:
            for episode in table.open:
                self._environments.end(episode.number)

    def _start(self, episode: OpenEpisode, table: "_Table") -> None:
        """Begin an episode, or, where its object was lost, take another to the same point."""
        table.open[episode] = None
        calls = [self._environments.reset(episode.number, episode.prompt.record, episode.seed)]
        calls += [self._environments.step(episode.number, answer) for answer in episode.calls]
        table.calls[episode] = calls

    def _heard(self, episode: OpenEpisode, result: CallResult, table: "_Table") -> None:
        """Go on behind what an environment returned."""
        episode.seconds += result.seconds
        if result.lost and episode.restarts < RESTARTS:
            episode.restarts += 1
            self._start(episode, table)
            return
        try:
            check(result.error is None, result.error or "", DataError)
            if episode.turns == 0:
                record = template_variables(episode.prompt.record, f"task {episode.prompt.number}")
                messages, variables = checked_beginning(result.value)
                episode.messages, episode.variables, done = [*messages], {**record, **variables}, False
            else:
                turn = checked_turn(result.value)
                episode.take(turn.messages, turn.columns, turn.metrics)
                done = turn.done
        except DataError as error:
            self._end(episode, "error", table, f"rl.environment, turn {episode.turns}: {error}")
            return
        ends = {"done": done, "turns": episode.turns >= self._config.max_turns, "tokens": self._left(episode) < 1}
        end = next((name for name, ended in ends.items() if ended), None)
        if end is None:
            table.unwritten.append(episode)
        else:
            self._end(episode, end, table)

    def _written(
        self, episode: OpenEpisode, rendered: Rendered | EqxDecodersError, before: Any, table: "_Table"
    ) -> None:
        """Go on behind the text of the messages: with the tokens that it adds, or in a new part if it is another.

        `before`: the text up to the last answer, if its calls are a field of it.
        """
        if not isinstance(rendered, Rendered):
            self._end(episode, "error", table, str(rendered))
            return
        added = None
        if episode.turns:
            content: str | None = str(episode.calls[-1]["text"])
            if before is not None:
                content = self._writer.written(episode.text, episode.stop_id, before)
            if content is not None:
                added = self._writer.go_on(episode.text, content, episode.stop_id, rendered)
            name = f"rl.strict_prefix: task {episode.prompt.number}, turn {episode.turns + 1}"
            rule = "the chat template writes earlier turns another way than they were"
            check(added is not None or not self._config.strict_prefix, f"{name}: {rule}.", DataError)
        ids = self._writer.begin(rendered) if added is None else added
        if len(ids) >= self._left(episode):
            few = None if episode.turns else f"the first {len(ids)} tokens leave no room for an answer in {self._limit}"
            self._end(episode, "tokens" if episode.turns else "error", table, few)
            return
        if added is None:
            episode.begin(ids)
        else:
            episode.hear(ids)
        episode.text = rendered.text
        table.ready.append(episode)

    def _submit(self, episode: OpenEpisode, temperature: float, seed: str, table: "_Table") -> bool:
        """Queue the request for an episode's next answer; False while the engine's queue is full."""
        name, most = f"{seed}/{episode.turns}", min(self._config.max_new_tokens, self._left(episode))
        draws = answer_seed(name, episode.prompt.number, episode.sample)
        sampling = SamplingParams(temperature=temperature, seed=draws)
        request: Request = scored_request(episode.tokens, sampling, max_new_tokens=most, stop_ids=self._stop_ids)
        number = submitted(self.engine, request)
        if number is not None:
            table.running[number] = (episode, [])
        return number is not None

    def _drawn(self, episode: OpenEpisode, rollout: Rollout, table: "_Table") -> None:
        """Give an environment the model's answer."""
        left = {"tokens_left": self._left(episode) - len(rollout.tokens)}
        left |= {"turns_left": self._config.max_turns - episode.turns - 1}
        read = self._reader.read(rollout, episode.variables.get("tools") or (), episode.tool_calls)
        answer = episode.say(rollout, read, **left)
        table.calls[episode] = [self._environments.step(episode.number, answer)]

    def _left(self, episode: OpenEpisode) -> int:
        return self._limit - episode.size

    def _end(self, episode: OpenEpisode, end: str, table: "_Table", error: str | None = None) -> None:
        episode.end, episode.error = end, error
        del table.open[episode]
        self._environments.end(episode.number)


class _Table:
    """Episodes that are open, by what they wait for: a call, a text, a place in the engine, an answer of it."""

    def __init__(self):
        self.open: dict[OpenEpisode, None] = {}
        self.calls: dict[OpenEpisode, list[concurrent.futures.Future[CallResult]]] = {}
        self.unwritten: list[OpenEpisode] = []
        self.ready: collections.deque[OpenEpisode] = collections.deque()
        self.running: dict[int, tuple[OpenEpisode, list[RequestOutput]]] = {}
        self._rendering: tuple[list[OpenEpisode], concurrent.futures.Future[Written]] | None = None

    def results(self) -> list[tuple[OpenEpisode, CallResult]]:
        """Return the results of calls that are there: of several calls the first that failed, otherwise the last."""
        there = [(each, calls) for each, calls in self.calls.items() if calls[-1].done()]
        for episode, _ in there:
            del self.calls[episode]
        pairs = [(episode, [call.result() for call in calls]) for episode, calls in there]
        return [(episode, next((each for each in every if each.error), every[-1])) for episode, every in pairs]

    def texts(self, writer: TurnWriter) -> list[tuple[OpenEpisode, Any, Any]]:
        """Return the texts that are there, and have others written: all at once, since a process costs 0.1 s.

        Each comes with that up to the last answer, or None.
        """
        texts = []
        if self._rendering is not None and self._rendering[1].done():
            results = iter(self._rendering[1].result())
            pairs = [(each, [next(results) for _ in each.conversations()]) for each in self._rendering[0]]
            texts = [(each, pair[0], pair[1] if pair[1:] else None) for each, pair in pairs]
            self._rendering = None
        if self.unwritten and self._rendering is None:
            conversations = [each for episode in self.unwritten for each in episode.conversations()]
            self._rendering, self.unwritten = (self.unwritten, writer.render(conversations)), []
        return texts

    def step(self, engine: Any) -> list[tuple[OpenEpisode, Rollout]]:
        """Compute a step of the engine; return the answers that are complete."""
        done = []
        for output in engine.step():
            episode, outputs = self.running[output.request_id]
            outputs.append(output)
            if output.finish_reason is not None:
                del self.running[output.request_id]
                done.append((episode, Rollout.of(outputs)))
        return done

    def wait(self) -> None:
        """Wait for an environment or a text, when the engine has nothing to do."""
        futures: list[concurrent.futures.Future[Any]] = [calls[-1] for calls in self.calls.values()]
        futures += [] if self._rendering is None else [self._rendering[1]]
        if futures and not self.ready:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
