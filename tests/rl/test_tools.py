"""Test Python functions as tools: schemas, calls, errors, and the tokens of calls and results."""

import json
from typing import Any, Literal

import numpy as np
import pytest

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.tokenizer import load_tokenizer, with_special_tokens_as_text
from eqx_decoders.rl.environments import Environment, EpisodeSampler, parse_reset_result, parse_step_result
from eqx_decoders.rl.tools import ToolEnvironment, tool_schema
from eqx_decoders.rl.turns import accepts_tool_calls_in_text
from eqx_decoders.serving.engine.request import RequestOutput
from eqx_decoders.serving.engine.sampler import TokenScore
from eqx_decoders.training.settings.rl import RLConfig
from tests.data.test_chats import FOLDER, template_of
from tests.errors import assert_names, refused


FILE = '''
from eqx_decoders.rl.tools import ToolEnvironment

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def exact(task, completion):
    return {"right": float(completion.strip() == task["answer"])}

Sums = ToolEnvironment.of([add], exact)

class Counter(ToolEnvironment):
    """Tools with state."""

    def first_messages(self, task, seed):
        self.count = seed
        return [{"role": "user", "content": "count"}]

    def more(self, by: int = 1) -> int:
        """Count on.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    @property
    def tools(self):
        return (self.more,)

    def reward(self, task, completion):
        return float(self.count)

class Unjudged(ToolEnvironment):
    tools = (add,)
'''


def weather(city: str, days: int = 2, unit: str = "C") -> dict[str, float]:
    """Tell the weather.

    It is that of the next days.

    Args:
        city: The city, in full.
            Not its code.
        days: How many days.
        unit: The unit of temperatures (choices: ["C", "F"])

    Returns:
        The temperatures.
    """
    return {city: days * (1.0 if unit == "C" else 1.8)}


def many(a: list[int], b: float | None, c: int | str, d: Any, e: Literal["x", "y"], f: bool | dict[str, int] = True):
    """Do it.

    Args:
        a: One: two.
        b: Two.
        c: Three.
        d: Four.
        e: Five.
        f: Six.

    Raises:
        ValueError: never.
    """


# `get_json_schema` of transformers 5.23 for both functions.
RECORDED = """
{"type": "function", "function": {"name": "weather",
 "description": "Tell the weather.\\n\\nIt is that of the next days.",
 "parameters": {"type": "object", "properties": {
 "city": {"type": "string", "description": "The city, in full. Not its code."},
 "days": {"type": "integer", "description": "How many days."},
 "unit": {"type": "string", "enum": ["C", "F"], "description": "The unit of temperatures"}}, "required": ["city"]},
 "return": {"type": "object", "additionalProperties": {"type": "number"}, "description": "The temperatures."}}}
{"type": "function", "function": {"name": "many", "description": "Do it.",
 "parameters": {"type": "object", "properties": {
 "a": {"type": "array", "items": {"type": "integer"}, "description": "One: two."},
 "b": {"type": "number", "nullable": true, "description": "Two."},
 "c": {"type": ["integer", "string"], "description": "Three."}, "d": {"description": "Four."},
 "e": {"type": "string", "enum": ["x", "y"], "description": "Five."},
 "f": {"anyOf": [{"type": "boolean"}, {"type": "object", "additionalProperties": {"type": "integer"}}],
 "description": "Six."}}, "required": ["a", "b", "c", "d", "e"]}}}
"""


def test_schemas_equal_those_of_transformers():
    decoder, text, found = json.JSONDecoder(), RECORDED.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found, text = [*found, value], text[end:].strip()
    assert [tool_schema(weather), tool_schema(many)] == found


def undocumented(a: int):
    pass


def untyped(a):
    """Do.

    Args:
        a: It.
    """


def unlisted(a: int):
    """Do."""


def strange(a: np.ndarray):
    """Do.

    Args:
        a: It.
    """


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (undocumented, ["undocumented", "docstring"]),
        (untyped, ["untyped", "type hint"]),
        (unlisted, ["unlisted", "Args:"]),
        (strange, ["strange.a", "ndarray"]),
    ],
    ids=["docstring", "type-hint", "args", "type"],
)
def test_functions_without_a_schema_are_refused(function, names):
    with refused(TypeError, *names):
        tool_schema(function)
    with refused(TypeError, *names):
        ToolEnvironment.of([function], print)


def completion_with_calls(*calls, text="", unread=(), turns=5):
    """Return a completion with tool calls, as it is passed to environments."""
    tool_calls = [
        {"type": "function", "id": str(number), "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})
    more = {"malformed_calls": [{"id": "9", "error": error} for error in unread]} if unread else {}
    return {"text": text, "message": message, "finish_reason": "stop", "tokens_left": 9, "turns_left": turns} | more


def test_calls_are_run_and_errors_are_returned():
    def broken(a: int) -> int:
        """Break.

        Args:
            a: Not used.
        """
        raise KeyError("no")

    environment = ToolEnvironment.of([weather, broken], lambda task, completion: float(completion == task["answer"]))()
    assert isinstance(environment, Environment)
    start = parse_reset_result(environment.reset({"prompt": "?", "answer": "yes"}, 0))
    assert [*start.messages] == [{"role": "user", "content": "?"}] and len(start.variables["tools"]) == 2
    calls = [("weather", {"city": "Ü"}), ("weather", {"town": 1}), ("broken", {"a": 1}), ("wether", {})]
    turn = parse_step_result(environment.step(completion_with_calls(*calls, unread=["it is no JSON"])))
    texts = [str(each["content"]) for each in turn.messages]
    assert texts[0] == '{"Ü": 2.0}'
    names = (["TypeError: ", "'town'"], ["KeyError: 'no'"], ["'wether'", "weather, broken"], ["it is no JSON"])
    for text, expected in zip(texts[1:], names, strict=True):
        assert_names(text, "Error: ", *expected)
    assert [each["tool_call_id"] for each in turn.messages] == ["0", "1", "2", "3", "9"] and not turn.done
    assert {each["role"] for each in turn.messages} == {"tool"} and turn.messages[0]["name"] == "weather"
    assert turn.metrics == {"tool_calls": 4, "failed_calls": 3, "malformed_calls": 1} and turn.rewards == {}
    end = parse_step_result(environment.step(completion_with_calls(text="yes")))
    assert end.done and end.rewards == {"reward": 1.0} and not end.messages
    limit = parse_step_result(environment.step(completion_with_calls(("weather", {"city": "a"}), text="no", turns=0)))
    assert not limit.done and limit.rewards == {"reward": 0.0} and limit.messages
    with refused(ValueError, "messages", "prompt"):
        environment.reset({}, 0)


class Script:
    """Fake engine that returns the given completions in order."""

    config: Any = None

    def __init__(self, tokenizer, completions):
        self._tokenizer, self._answers, self._open, self.prompts = tokenizer, list(completions), [], []

    def submit(self, request):
        self._open.append(request)
        self.prompts.append(request.prompt)
        return len(self.prompts) - 1

    def step(self):
        request = self._open.pop()
        tokens = tuple(self._tokenizer.encode(self._answers[len(self.prompts) - 1], special=True).tolist())
        reason = "stop" if tokens[-1] in request.stop_ids else "length"
        scores = tuple(TokenScore(token, -1.0) for token in tokens)
        return [
            RequestOutput(
                request_id=len(self.prompts) - 1, tokens=tokens, scores=scores, finish_reason=reason, version=1
            )
        ]

    def release(self):
        """Do nothing."""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER / "tokenizer.json")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(FILE)
    return path


def play(file, tokenizer, name, completions, *, which="Sums", task=None, **settings: Any):
    """Run an episode in which the model generates `completions`."""
    template = with_special_tokens_as_text(template_of(name), tokenizer)
    config = RLConfig(environment=f"{file}:{which}", reward_workers=1, **settings)
    stops = [
        each for each in range(tokenizer.vocab_size) if tokenizer.name_of(each) in ("<|im_end|>", "<|eot_id|>", "</s>")
    ]
    engine = Script(tokenizer, completions)
    sampler = EpisodeSampler(config, tokenizer, template, max_tokens=3000, stop_ids=stops, engine=engine)
    prompt = Prompt(0, (), task or {"prompt": "2+3", "answer": "5"})
    ((completion,),) = sampler.sample([prompt], samples=1, temperature=1.0, seed="1/1")
    sampler.close()
    assert completion.error is None
    return completion, engine


def text_of(tokenizer, completion):
    part = completion.segments[0]
    return tokenizer.decode([*part.context, *part.rollout.tokens.tolist()], special=True)


HERMES = '<tool_call>\n{"name":"add",  "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
LLAMA = '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>'
MISTRAL = '[TOOL_CALLS] [{"name":"add", "arguments": {"a": 2, "b": 3}}]</s>'
RESULTS = {
    "qwen3": "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": 5, "call_id": "000000000"}[/TOOL_RESULTS]',
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call", "last"),
    [("qwen3", HERMES, "5<|im_end|>"), ("llama3", LLAMA, "5<|eot_id|>"), ("mistral", MISTRAL, " 5</s>")],
)
def test_tool_results_follow_the_sampled_tokens(file, tokenizer, name, call, last):
    """Sampled tokens are kept, even if the template would render the call with different whitespace."""
    completion, engine = play(file, tokenizer, name, [call, last])
    assert completion.reward == 1.0 and len(completion.segments) == 1 and completion.rewards == {"right": 1.0}
    assert completion.episode is not None and (completion.episode.turns, completion.episode.end) == (2, "done")
    assert completion.episode.metrics == {"tool_calls": 1, "failed_calls": 0, "malformed_calls": 0}
    part, sampled = completion.segments[0], [tokenizer.encode(each, special=True).tolist() for each in (call, last)]
    assert part.rollout.tokens[part.sampled].tolist() == [*sampled[0], *sampled[1]]
    between = part.rollout.tokens[~part.sampled].tolist()
    assert tokenizer.decode(between, special=True).lstrip("\n") == RESULTS[name]
    assert engine.prompts[1] == (*engine.prompts[0], *sampled[0], *between)
    assert "add" in tokenizer.decode(part.context, special=True)  # the template lists the tools
    assert accepts_tool_calls_in_text(template_of(name)) == (name != "mistral")


def test_malformed_calls_are_counted_and_returned(file, tokenizer):
    bad = {"qwen3": ("<tool_call>{</tool_call><|im_end|>", "6<|im_end|>"), "mistral": ("[TOOL_CALLS] [{</s>", "6</s>")}
    for name, (call, last) in bad.items():
        completion, _ = play(file, tokenizer, name, [call, call, last])
        assert completion.reward == 0.0 and len(completion.segments) == 1
        assert completion.episode is not None and completion.episode.metrics["malformed_calls"] == 2
        assert text_of(tokenizer, completion).count("Error: ") == 2


@pytest.mark.slow
def test_tools_with_state_and_the_limit_of_turns(file, tokenizer):
    call = HERMES.replace("add", "more").replace('{"a": 2, "b": 3}', '{"by": 4}')
    completion, _ = play(file, tokenizer, "qwen3", [call] * 3, which="Counter", max_turns=2)
    assert completion.episode is not None and (completion.episode.turns, completion.episode.end) == (2, "turns")
    start = int(completion.reward) - 8
    assert f"<tool_response>\n{start + 4}\n</tool_response>" in text_of(tokenizer, completion) and completion.reward > 8


@pytest.mark.slow
def test_format_of_calls_is_a_setting(file, tokenizer):
    call = LLAMA.replace("<|eot_id|>", "<|im_end|>")
    completion, _ = play(file, tokenizer, "qwen3", [call, "5<|im_end|>"], tool_call_parser="llama3_json")
    assert completion.reward == 1.0 and completion.episode is not None and completion.episode.metrics["tool_calls"] == 1
    completion, _ = play(file, tokenizer, "qwen3", [call])
    assert completion.episode is not None and completion.episode.turns == 1 and completion.reward == 0.0  # no call


@pytest.mark.parametrize(
    ("which", "names"),
    [("Unjudged", ["TypeError: ", "reward"]), ("add", ["reset", "step"])],
    ids=["no-reward", "function"],
)
def test_invalid_tool_classes_are_refused(file, tokenizer, which, names):
    with refused(ConfigError, f"rl.environment='{file}:{which}'", *names):
        EpisodeSampler(RLConfig(environment=f"{file}:{which}"), tokenizer, None, max_tokens=9, stop_ids=(), engine=None)
