"""Episodes of environments: independent of the order of events and of failures of others."""

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
from eqx_decoders.rl.answer_batch import answer_numbers, pack_answers
from eqx_decoders.rl.drawn_answers import ENDS, AnswerFiles, StepAnswers
from eqx_decoders.rl.environments import Environment, checked_beginning, checked_turn
from eqx_decoders.rl.episodes import EpisodeAnswerer
from eqx_decoders.rl.rewards import reward_figures
from eqx_decoders.serving.engine.request import QueueFull, RequestOutput
from eqx_decoders.serving.engine.sampler import TokenScore
from eqx_decoders.training.methods.rl_config import RLConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import assert_names, refused
from tests.rl.test_turn_writer import TRIMS


GAMES = """
import os, random, time

class Sums:
    def reset(self, task, seed):
        self.task, self.sum, self.answers = task, random.Random(seed).randrange(5), 0
        with open(__file__ + ".begun", "a") as file:
            file.write("begun\\n")
        messages = [{"role": "user", "content": f"{self.sum}+"}]
        return {"messages": messages, "tools": [{"type": "function"}]} if task.get("tools_of_game") else messages
    def step(self, answer):
        time.sleep(random.random() * self.task.get("slow", 0))
        self.answers += 1
        last = self.answers == 2
        if last and self.task.get("kind") == "raise":
            raise ValueError("no more")
        if last and self.task.get("kind") == "hang":
            time.sleep(100)
        if last and self.task.get("kind") == "exit":
            os._exit(3)
        assert answer["message"] == {"role": "assistant", "content": answer["text"]}
        self.sum += int(answer["text"])
        reward = {"none": None, "sum": {"sum": self.sum}}[self.task.get("reward", "sum")]
        done = self.answers == self.task.get("done", 3)
        messages = [{"role": self.task.get("role", "user"), "content": f"={self.sum}+"}]
        return dict(messages=messages, reward=reward, done=done, metrics={"left": answer["tokens_left"]})
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
    """Engine whose answers are digits, by hashes of prompt and seed, in a random order."""

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
        """Drop nothing."""


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path


# A template that writes the first message of a conversation of five differently.
FORKS = ChatTemplate(source=TRIMS.replace("{{ m.c", "{% if loop.first and messages | length == 5 %}!{% endif %}{{ m.c"))


def play(games, tasks, *, order=0, samples=2, limit=60, template=None, end=True, **settings: Any):
    closed = Path(f"{games}.closed")
    closed.unlink(missing_ok=True)
    Path(f"{games}.begun").unlink(missing_ok=True)
    settings.setdefault("slots", 2)
    config = RLConfig(environment=f"{games}:Sums", reward_seconds=0.5, **settings)
    engine = Digits(order, end=end)
    answerer = EpisodeAnswerer(config, ByteTokenizer(), template, limit=limit, stop_ids=(257,), engine=engine)
    prompts = [Prompt(number, (), task) for number, task in enumerate(tasks)]
    groups = answerer.answer(prompts, samples=samples, temperature=1.0, seed="1/1")
    answerer.close()
    assert answerer.tokens == sum(each.length for group in groups for each in group)
    return config, groups, closed.read_text().count("closed")


def content(answer):
    return {**answer.to_json(), "seconds": 0}


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
    _, ((answer,),), _ = play(games, [{}], samples=1)
    part = answer.parts[0]
    text = bytes(each for each in (*part.context[1:], *part.rollout.tokens) if each < 256).decode()
    numbers = [int(each.partition("=")[0]) for each in text.split("+")]
    start, drawn = numbers[0], numbers[1:]
    sums = [start + sum(drawn[: count + 1]) for count in range(3)]
    assert text == f"{start}+{drawn[0]}={sums[0]}+{drawn[1]}={sums[1]}+{drawn[2]}"
    digits = part.rollout.tokens[part.drawn & (part.rollout.tokens < 256)].tolist()
    assert bytes(digits).decode() == "".join(map(str, drawn))
    assert (part.rollout.tokens == 257).sum() == 3 and part.drawn[part.rollout.tokens == 257].all()
    assert_allclose(part.rollout.log_probs, np.where(part.drawn, -0.01 * part.rollout.tokens, 0))
    assert answer.reward == sum(sums) and answer.columns == {"sum": sum(sums)} and answer.length == part.drawn.sum()
    assert answer.episode is not None and answer.episode.turn_rewards == tuple(sums)
    ends = np.flatnonzero(part.rollout.tokens[part.drawn] == 257) + 1
    assert answer.episode.turn_tokens == tuple(np.diff(ends, prepend=0))
    left = 60 - len(part.context) - len(part.rollout.tokens)
    assert answer.episode is not None and answer.episode.metrics == {"left": left} and answer.episode.end == "done"


def test_the_ends_of_episodes(games):
    ends = []
    each: Any
    for each in (dict(max_turns=2), dict(limit=20)):
        _, ((answer,),), _ = play(games, [{"done": 9}], samples=1, **each)
        assert answer.episode is not None and answer.parts[-1].drawn[-1]  # the last answer comes last
        ends.append((answer.episode.end, answer.rollout.finish_reason))
        assert sum(part.size for part in answer.parts) <= each.get("limit", 60)
    assert ends == [("turns", "stop"), ("tokens", "length")]
    config, ((answer,),), _ = play(games, [{}], samples=1, limit=3)
    assert "3 tokens" in str(answer.error) and answer.length == 0
    assert config.longest_answer == 8 * 256 and RLConfig(strict_prefix=True, environment="a.py:A").most_rows == 1


def test_failures_do_not_affect_other_episodes(games):
    """The environments of a killed process are made again and replay their answers."""
    kinds = ["raise", "hang", "exit"]
    long: Any = {"done": 6}
    more: Any = dict(limit=120, slots=8)
    _, groups, closed = play(games, [long, *({"kind": kind} for kind in kinds), {}], reward_workers=1, **more)
    assert Path(f"{games}.begun").read_text().count("begun") > 10  # some started again
    _, alone, _ = play(games, [long], samples=2, **more)
    assert [content(each) for each in groups[0]] == [content(each) for each in alone[0]]
    assert closed >= 4 and all(each.error is None and each.reward > 0 for each in (*groups[0], *groups[4]))
    names = (["turn 2", "ValueError: no more", "games.py, line 16"], ["0.5 s"], ["3"])
    for group, expected in zip(groups[1:4], names, strict=True):
        for each in group:
            assert_names(str(each.error), *expected)
            assert math.isnan(each.reward) and not each.columns
        assert {each.episode.end for each in group if each.episode} == {"error"}


@pytest.mark.slow
def test_a_template_that_rewrites_earlier_turns_makes_parts(games):
    _, groups, _ = play(games, [{}, {"done": 1}], template=FORKS, limit=400, end=False, max_new_tokens=2)
    three, one = groups[0][0], groups[1][0]
    assert [len(each.parts) for each in (three, one)] == [2, 1]
    first, second = three.parts
    assert 2 <= first.drawn.sum() < len(first.drawn) and first.drawn[-1] and second.drawn.all()
    assert bytes(second.context).startswith(b"<u>!")
    found = reward_figures([*groups[0], *groups[1]])
    assert found["forked_rows"] == 2 and found["turns"] == 2 and found["turns_max"] == 3 and found["truncated"] == 0
    assert [found[f"ended_{end}"] for end in ENDS] == [1, 0, 0, 0] and "ended_tokens" in found
    assert found["metric/left"] > 0 and found["answer_tokens"] < 6
    with refused(DataError, "rl.strict_prefix", "task 0", "turn 3"):
        play(games, [{}], template=FORKS, limit=400, end=False, strict_prefix=True)


@pytest.mark.slow
def test_templates_list_tools(games):
    template = ChatTemplate(source="{% if tools %}{{ tools | length }} tools{% endif %}" + TRIMS)
    tasks = [{"tools_of_game": 1, "role": "tool"}, {"tools": [{"name": "a"}, {"name": "b"}]}]
    _, ((first,), (second,)), _ = play(games, tasks, samples=1, template=template, limit=200, max_new_tokens=3)
    assert bytes(first.prompt.tokens).startswith(b"1 tools<u>") and bytes(second.prompt.tokens).startswith(b"2 tools")
    between = first.rollout.tokens[~first.parts[0].drawn]
    assert bytes(between.tolist()).count(b"</><t>=") == 2 and len(first.parts) == 1 and "tool: =" in first.text


@pytest.fixture(scope="module")
def mixed(games):
    """A step with plain episodes, one that failed before its first token, and two of several parts."""
    config, groups, _ = play(games, [{}], template=FORKS, limit=400, end=False, max_new_tokens=2)
    _, (short, failed), _ = play(games, [{}, {"kind": "raise"}])
    nothing = play(games, [{}], samples=1, limit=3)[1][0][0]
    answers = [*groups[0], *short, *failed, nothing]
    numbered = [each._replace(prompt=each.prompt._replace(number=n // 2)) for n, each in enumerate(answers)]
    return config, numbered


def test_rows_of_episodes(mixed):
    """Each sampled token has its advantage and weight, in all parts; tokens between answers have none."""
    config, answers = mixed
    rewards = np.asarray([each.reward for each in answers])
    numbers = answer_numbers(config, answers)
    lengths = np.asarray([each.length for each in answers])
    known = ~np.isnan(rewards)
    assert_allclose(numbers.weights[known], 1 / lengths[known].sum())
    assert numbers.advantages[0][0] == -numbers.advantages[1][0] != 0 and not numbers.weights[~known].any()
    packed = pack_answers(answers, numbers, choices=[2, 4, 8], seq_len=256, answers_per_row=8)
    batch: Any = packed.batch
    marks, signals = np.asarray(batch.signals.answers), batch.signals
    assert_array_equal(batch.loss_mask, marks > 0)
    assert not signals.policy[marks == 0].any() and not signals.sampler[marks == 0].any()
    assert signals.policy.sum() == pytest.approx(1) and (marks > 0).sum() == lengths.sum()
    for answer, places, advantage in zip(answers, packed.drawn, numbers.advantages, strict=True):
        drawn = np.concatenate([part.rollout.tokens[part.drawn] for part in answer.parts])
        scores = np.concatenate([part.rollout.log_probs[part.drawn] for part in answer.parts])
        assert_array_equal(batch.tokens[places], drawn)
        assert_array_equal(signals.sampler[places], scores)
        assert signals.advantages[places].tolist() == advantage.tolist()
        assert len(drawn) == 0 or len(np.unique(marks[places])) == 1  # ratios of answers are those of whole episodes
        for part, number in zip(answer.parts, np.unique(batch.segment_ids[places]), strict=len(drawn) > 0):
            row = places[0][0]
            segment = batch.tokens[row][batch.segment_ids[row] == number]
            assert_array_equal(segment, [*part.context, *part.rollout.tokens])
            positions = batch.positions[row][batch.segment_ids[row] == number]
            assert_array_equal(positions, np.arange(part.size))
    by_turn = answer_numbers(dataclasses.replace(config, returns="turn"), answers)
    assert [len(each) for each in by_turn.advantages] == lengths.tolist()
    first, other = (each.episode.turn_rewards for each in answers[:2] if each.episode)  # of two parts
    assert by_turn.advantages[0][-1] == pytest.approx((first[-1] - other[-1]) / 2)
    row_sums = answer_numbers(RLConfig(samples=2, aggregation="row"), answers)
    assert_allclose(row_sums.weights[known] * lengths[known], 1 / known.sum())  # an episode counts once


def test_files_of_episodes_are_exact(mixed, tmp_path):
    _, answers = mixed
    files = AnswerFiles(tmp_path)
    files.write(1, "key", StepAnswers(answers, prompts=3))
    again = files.read(1, "key")
    assert again is not None and [each.to_json() for each in again.answers] == [each.to_json() for each in answers]
    for one, other in zip(answers, again.answers, strict=True):
        for mine, theirs in zip(one.parts, other.parts, strict=True):
            assert mine.context == theirs.context and mine.drawn.dtype == theirs.drawn.dtype == bool
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
def test_bad_results_of_reset(value, names):
    with refused(DataError, "reset", *names):
        checked_beginning(value)


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
def test_bad_results_of_step(value, names):
    with refused(DataError, "step", *names):
        checked_turn(value)


def test_results_of_reset_and_step():
    user, tools = {"role": "user", "content": "1"}, [{"type": "function"}]
    assert checked_beginning({"messages": [user], "tools": tools}) == ([user], {"tools": tools})
    assert checked_turn({"done": True, "reward": 2}) == ([], {"reward": 2.0}, True, {})
    assert checked_turn({"messages": [user], "reward": None, "metrics": {"a": 1}}) == ([user], None, False, {"a": 1.0})
    assert isinstance(type("Game", (), {"reset": print, "step": print})(), Environment)


@pytest.mark.parametrize(
    ("name", "names"), [("NoStep", ["TypeError: ", "step"]), ("function", ["reset", "step"])], ids=["class", "function"]
)
def test_bad_classes(games, name, names):
    config = RLConfig(environment=f"{games}:{name}")
    with refused(ConfigError, f"rl.environment='{games}:{name}'", *names):
        EpisodeAnswerer(config, ByteTokenizer(), None, limit=9, stop_ids=(), engine=None)


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
def test_bad_settings(settings, names):
    with refused(ConfigError, *names, "rl.environment"):
        RLConfig(**settings)
