"""Test episodes of environments: independence of event order and of failed episodes, tokens, rows and files."""

import dataclasses
import hashlib
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.rl.completions import EPISODE_ENDS, CompletionFiles, StepCompletions
from eqx_decoders.rl.environments import Environment, EpisodeSampler, parse_reset_result, parse_step_result
from eqx_decoders.rl.packing import pack_completions, step_advantages
from eqx_decoders.rl.rewards import reward_metrics
from eqx_decoders.serving.engine.request import QueueFull, RequestOutput
from eqx_decoders.serving.engine.sampler import TokenScore
from eqx_decoders.training.settings.rl import RLConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import assert_names, refused
from tests.rl.test_turns import TRIMS


GAMES = """
import os, random, time

class Sums:
    def reset(self, task, seed):
        self.task, self.sum, self.completions = task, random.Random(seed).randrange(5), 0
        with open(__file__ + ".begun", "a") as file:
            file.write("begun\\n")
        messages = [{"role": "user", "content": f"{self.sum}+"}]
        return {"messages": messages, "tools": [{"type": "function"}]} if task.get("tools_of_game") else messages
    def step(self, completion):
        time.sleep(random.random() * self.task.get("slow", 0))
        self.completions += 1
        last = self.completions == 2
        if last and self.task.get("kind") == "raise":
            raise ValueError("no more")
        if last and self.task.get("kind") == "hang":
            time.sleep(100)
        if last and self.task.get("kind") == "exit":
            os._exit(3)
        assert completion["message"] == {"role": "assistant", "content": completion["text"]}
        self.sum += int(completion["text"])
        reward = {"none": None, "sum": {"sum": self.sum}}[self.task.get("reward", "sum")]
        done = self.completions == self.task.get("done", 3)
        messages = [{"role": self.task.get("role", "user"), "content": f"={self.sum}+"}]
        return dict(messages=messages, reward=reward, done=done, metrics={"left": completion["tokens_left"]})
    def close(self):
        with open(__file__ + ".closed", "a") as file:
            file.write("closed\\n")

class NoStep:
    def reset(self, task, seed):
        return []

def function(task):
    return task
"""


class Digits:
    """Fake engine that completes prompts with digits, derived from hashes of prompt and seed, in random order."""

    config: Any = None

    def __init__(self, order: int, room: int = 3, end: bool = True):
        self._order, self._room, self._end, self._open, self.prompts = random.Random(order), room, end, {}, []

    def submit(self, request):
        if len(self._open) >= self._room:
            raise QueueFull("full")
        self._open[len(self.prompts)] = request
        self.prompts.append(request.prompt)
        return len(self.prompts) - 1

    def step(self):
        number = self._order.choice(list(self._open))
        request = self._open.pop(number)
        digest = hashlib.blake2b(f"{request.prompt}{request.sampling.seed}".encode()).digest()
        tokens = (*(48 + each % 10 for each in digest[: 1 + digest[9] % 2]), *([257] if self._end else []))
        tokens = tokens[: request.max_new_tokens]
        scores = tuple(TokenScore(token, -0.01 * token) for token in tokens)
        reason = "stop" if tokens[-1] == 257 else "length"
        return [RequestOutput(request_id=number, tokens=tokens, scores=scores, finish_reason=reason, version=7)]

    def release(self):
        """Do nothing."""


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path


# This template renders the first message differently if the conversation has five messages.
FORKS = ChatTemplate(source=TRIMS.replace("{{ m.c", "{% if loop.first and messages | length == 5 %}!{% endif %}{{ m.c"))


def play(games, tasks, *, order=0, samples=2, limit=60, template=None, end=True, **settings: Any):
    closed = Path(f"{games}.closed")
    closed.unlink(missing_ok=True)
    Path(f"{games}.begun").unlink(missing_ok=True)
    settings.setdefault("slots", 2)
    config = RLConfig(environment=f"{games}:Sums", reward_seconds=0.5, **settings)
    engine = Digits(order, end=end)
    sampler = EpisodeSampler(config, ByteTokenizer(), template, max_tokens=limit, stop_ids=(257,), engine=engine)
    prompts = [Prompt(number, (), task) for number, task in enumerate(tasks)]
    groups = sampler.sample(prompts, samples=samples, temperature=1.0, seed="1/1")
    sampler.close()
    assert sampler.tokens == sum(each.num_tokens for group in groups for each in group)
    return config, groups, closed.read_text().count("closed")


def content(completion):
    return {**completion.to_json(), "seconds": 0}


@pytest.mark.slow
def test_episodes_do_not_depend_on_the_order_of_events(games):
    plain = [{}, {"done": 1}, {"slow": 0.02}, {"reward": "none"}]
    _, first, closed = play(games, plain, order=1)
    assert closed == 8 and [[each.prompt.number for each in group] for group in first] == [[n, n] for n in range(4)]
    _, second, _ = play(games, plain, order=2, reward_workers=3)
    assert [[content(each) for each in group] for group in first] == [[content(e) for e in group] for group in second]
    (one, other), ended = first[0], first[1]
    assert one.prompt.tokens == other.prompt.tokens and one.rollout.tokens.tolist() != other.rollout.tokens.tolist()
    assert [(each.episode.turns, each.episode.end) for each in ended if each.episode] == [(1, "done")] * 2
    assert all(math.isnan(each.reward) and each.error is None for each in first[3])


def test_tokens_of_an_episode(games):
    _, ((completion,),), _ = play(games, [{}], samples=1)
    part = completion.segments[0]
    text = bytes(each for each in (*part.context[1:], *part.rollout.tokens) if each < 256).decode()
    numbers = [int(each.partition("=")[0]) for each in text.split("+")]
    start, sampled = numbers[0], numbers[1:]
    sums = [start + sum(sampled[: count + 1]) for count in range(3)]
    assert text == f"{start}+{sampled[0]}={sums[0]}+{sampled[1]}={sums[1]}+{sampled[2]}"
    digits = part.rollout.tokens[part.sampled & (part.rollout.tokens < 256)].tolist()
    assert bytes(digits).decode() == "".join(map(str, sampled))
    assert (part.rollout.tokens == 257).sum() == 3 and part.sampled[part.rollout.tokens == 257].all()
    assert_allclose(part.rollout.log_probs, np.where(part.sampled, -0.01 * part.rollout.tokens, 0))
    assert (
        completion.reward == sum(sums)
        and completion.rewards == {"sum": sum(sums)}
        and completion.num_tokens == part.sampled.sum()
    )
    assert completion.episode is not None and completion.episode.turn_rewards == tuple(sums)
    ends = np.flatnonzero(part.rollout.tokens[part.sampled] == 257) + 1
    assert completion.episode.turn_tokens == tuple(np.diff(ends, prepend=0))
    left = 60 - len(part.context) - len(part.rollout.tokens)
    assert (
        completion.episode is not None
        and completion.episode.metrics == {"left": left}
        and completion.episode.end == "done"
    )


def test_end_reasons_of_episodes(games):
    ends = []
    each: Any
    for each in (dict(max_turns=2), dict(limit=20)):
        _, ((completion,),), _ = play(games, [{"done": 9}], samples=1, **each)
        assert (
            completion.episode is not None and completion.segments[-1].sampled[-1]
        )  # the last completion is in the last segment
        ends.append((completion.episode.end, completion.rollout.finish_reason))
        assert sum(part.size for part in completion.segments) <= each.get("limit", 60)
    assert ends == [("turns", "stop"), ("tokens", "length")]
    config, ((completion,),), _ = play(games, [{}], samples=1, limit=3)
    assert "3 tokens" in str(completion.error) and completion.num_tokens == 0
    assert (
        config.max_completion_tokens == 8 * config.max_new_tokens
        and RLConfig(strict_prefix=True, environment="a.py:A").max_segments == 1
    )


def test_failures_do_not_affect_other_episodes(games):
    """Environments of a killed worker process are recreated and replay their completions."""
    kinds = ["raise", "hang", "exit"]
    long: Any = {"done": 6}
    more: Any = dict(limit=120, slots=8)
    _, groups, closed = play(games, [long, *({"kind": kind} for kind in kinds), {}], reward_workers=1, **more)
    assert Path(f"{games}.begun").read_text().count("begun") > 10  # some environments were started again
    _, alone, _ = play(games, [long], samples=2, **more)
    assert [content(each) for each in groups[0]] == [content(each) for each in alone[0]]
    assert closed >= 4 and all(each.error is None and each.reward > 0 for each in (*groups[0], *groups[4]))
    names = (["turn 2", "ValueError: no more", "games.py, line 16"], ["0.5 s"], ["3"])
    for group, expected in zip(groups[1:4], names, strict=True):
        for each in group:
            assert_names(str(each.error), *expected)
            assert math.isnan(each.reward) and not each.rewards
        assert {each.episode.end for each in group if each.episode} == {"error"}


@pytest.mark.slow
def test_template_that_rewrites_earlier_turns_splits_the_episode(games):
    _, groups, _ = play(games, [{}, {"done": 1}], template=FORKS, limit=400, end=False, max_new_tokens=2)
    three, one = groups[0][0], groups[1][0]
    assert [len(each.segments) for each in (three, one)] == [2, 1]
    first, second = three.segments
    assert 2 <= first.sampled.sum() < len(first.sampled) and first.sampled[-1] and second.sampled.all()
    assert bytes(second.context).startswith(b"<u>!")
    found = reward_metrics([*groups[0], *groups[1]])
    assert found["forked_segments"] == 2 and found["turns"] == 2 and found["turns_max"] == 3 and found["truncated"] == 0
    assert [found[f"ended_{end}"] for end in EPISODE_ENDS] == [1, 0, 0, 0] and "ended_tokens" in found
    assert found["metric/left"] > 0 and found["completion_tokens"] < 6
    with refused(DataError, "rl.strict_prefix", "task 0", "turn 3"):
        play(games, [{}], template=FORKS, limit=400, end=False, strict_prefix=True)


@pytest.mark.slow
def test_templates_list_tools(games):
    template = ChatTemplate(source="{% if tools %}{{ tools | length }} tools{% endif %}" + TRIMS)
    tasks = [{"tools_of_game": 1, "role": "tool"}, {"tools": [{"name": "a"}, {"name": "b"}]}]
    _, ((first,), (second,)), _ = play(games, tasks, samples=1, template=template, limit=200, max_new_tokens=3)
    assert bytes(first.prompt.tokens).startswith(b"1 tools<u>") and bytes(second.prompt.tokens).startswith(b"2 tools")
    between = first.rollout.tokens[~first.segments[0].sampled]
    assert bytes(between.tolist()).count(b"</><t>=") == 2 and len(first.segments) == 1 and "tool: =" in first.text


@pytest.fixture(scope="module")
def mixed(games):
    """Return a step with plain episodes, a failed episode without tokens, and two episodes of several segments."""
    config, groups, _ = play(games, [{}], template=FORKS, limit=400, end=False, max_new_tokens=2)
    _, (short, failed), _ = play(games, [{}, {"kind": "raise"}])
    nothing = play(games, [{}], samples=1, limit=3)[1][0][0]
    completions = [*groups[0], *short, *failed, nothing]
    numbered = [each._replace(prompt=each.prompt._replace(number=n // 2)) for n, each in enumerate(completions)]
    return config, numbered


def test_packed_rows_of_episodes(mixed):
    """Sampled tokens of all segments have advantages and weights. Tokens between completions have neither."""
    config, completions = mixed
    rewards = np.asarray([each.reward for each in completions])
    numbers = step_advantages(config, completions)
    lengths = np.asarray([each.num_tokens for each in completions])
    known = ~np.isnan(rewards)
    assert_allclose(numbers.weights[known], 1 / lengths[known].sum())
    assert numbers.advantages[0][0] == -numbers.advantages[1][0] != 0 and not numbers.weights[~known].any()
    packed = pack_completions(completions, numbers, row_counts=[2, 4, 8], seq_len=256, completions_per_row=8)
    batch: Any = packed.batch
    marks, signals = np.asarray(batch.signals.completion_ids), batch.signals
    assert_array_equal(batch.loss_mask, marks > 0)
    assert not signals.policy[marks == 0].any() and not signals.sampler[marks == 0].any()
    assert signals.policy.sum() == pytest.approx(1) and (marks > 0).sum() == lengths.sum()
    for completion, places, advantage in zip(completions, packed.sampled, numbers.advantages, strict=True):
        sampled = np.concatenate([part.rollout.tokens[part.sampled] for part in completion.segments])
        scores = np.concatenate([part.rollout.log_probs[part.sampled] for part in completion.segments])
        assert_array_equal(batch.tokens[places], sampled)
        assert_array_equal(signals.sampler[places], scores)
        assert signals.advantages[places].tolist() == advantage.tolist()
        assert len(sampled) == 0 or len(np.unique(marks[places])) == 1  # ratios are computed over complete episodes
        for part, number in zip(completion.segments, np.unique(batch.segment_ids[places]), strict=len(sampled) > 0):
            row = places[0][0]
            segment = batch.tokens[row][batch.segment_ids[row] == number]
            assert_array_equal(segment, [*part.context, *part.rollout.tokens])
            positions = batch.positions[row][batch.segment_ids[row] == number]
            assert_array_equal(positions, np.arange(part.size))
    by_turn = step_advantages(dataclasses.replace(config, returns="turn"), completions)
    assert [len(each) for each in by_turn.advantages] == lengths.tolist()
    first, other = (
        each.episode.turn_rewards for each in completions[:2] if each.episode
    )  # an episode with two segments
    assert by_turn.advantages[0][-1] == pytest.approx((first[-1] - other[-1]) / 2)
    row_sums = step_advantages(RLConfig(samples=2, aggregation="sequence"), completions)
    assert_allclose(row_sums.weights[known] * lengths[known], 1 / known.sum())  # an episode is counted once


def test_episodes_survive_saving_and_loading(mixed, tmp_path):
    _, completions = mixed
    files = CompletionFiles(tmp_path)
    files.write(1, "key", StepCompletions(completions, num_prompts=3))
    again = files.read(1, "key")
    assert again is not None and [each.to_json() for each in again.completions] == [
        each.to_json() for each in completions
    ]
    for one, other in zip(completions, again.completions, strict=True):
        for mine, theirs in zip(one.segments, other.segments, strict=True):
            assert mine.context == theirs.context and mine.sampled.dtype == theirs.sampled.dtype == bool
            assert_array_equal(mine.rollout.log_probs, theirs.rollout.log_probs)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param("text", ["text", "messages"], id="text"),
        pytest.param({"message": []}, ["messages"], id="key"),
        pytest.param([], ["messages=[]"], id="empty"),
        pytest.param([{"role": "user"}], ["messages[0]", "content", "role"], id="no-content"),
        pytest.param([{"role": "assistant", "content": "1"}], ["assistant"], id="assistant"),
    ],
)
def test_invalid_results_of_reset_are_refused(value, names):
    with refused(DataError, "reset", *names):
        parse_reset_result(value)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param(None, ["None", "messages, reward, done, metrics"], id="none"),
        pytest.param({"rewards": 1}, ["rewards", "messages, reward, done, metrics"], id="key"),
        pytest.param({"done": 1}, ["done=1"], id="done"),
        pytest.param({"done": True, "metrics": {"a": "b"}}, ["metrics=", "'a': 'b'"], id="metrics"),
        pytest.param({"done": True, "reward": "nan"}, ["reward", "nan"], id="reward"),
        pytest.param({}, ["messages"], id="no-messages"),
        pytest.param({"messages": ["no"]}, ["messages[0]=no"], id="message"),
    ],
)
def test_invalid_results_of_step_are_refused(value, names):
    with refused(DataError, "step", *names):
        parse_step_result(value)


def test_results_of_reset_and_step_are_parsed():
    user, tools = {"role": "user", "content": "1"}, [{"type": "function"}]
    assert parse_reset_result({"messages": [user], "tools": tools}) == ([user], {"tools": tools})
    assert parse_step_result({"done": True, "reward": 2}) == ([], {"reward": 2.0}, True, {})
    assert parse_step_result({"messages": [user], "reward": None, "metrics": {"a": 1}}) == (
        [user],
        None,
        False,
        {"a": 1.0},
    )
    assert isinstance(type("Game", (), {"reset": print, "step": print})(), Environment)


@pytest.mark.parametrize(
    ("name", "names"), [("NoStep", ["TypeError: ", "step"]), ("function", ["reset", "step"])], ids=["class", "function"]
)
def test_invalid_environment_classes_are_refused(games, name, names):
    config = RLConfig(environment=f"{games}:{name}")
    with refused(ConfigError, f"rl.environment='{games}:{name}'", *names):
        EpisodeSampler(config, ByteTokenizer(), None, max_tokens=9, stop_ids=(), engine=None)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param(dict(max_turns=3, reward="a.py:f"), ["rl.max_turns"], id="max_turns"),
        pytest.param(
            dict(strict_prefix=True, episode_tokens=3), ["rl.episode_tokens", "rl.strict_prefix"], id="strict_prefix"
        ),
        pytest.param(dict(tool_call_parser="hermes", reward="a.py:f"), ["rl.tool_call_parser"], id="tool_call_parser"),
        pytest.param(dict(environment="a.py:A", overlong_buffer=8), ["rl.overlong_buffer"], id="overlong_buffer"),
    ],
)
def test_invalid_settings_are_refused(settings, names):
    with refused(ConfigError, *names, "rl.environment"):
        RLConfig(**settings)
