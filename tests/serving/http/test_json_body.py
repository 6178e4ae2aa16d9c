"""Request bodies as declared types: invalid JSON, size limits, and errors with the field, its value and the rule."""

import json
import random
import time

import pytest

from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.http import json_body
from eqx_decoders.serving.http.chat_protocol import ChatCompletionRequest, TokenizeRequest, conversation
from eqx_decoders.serving.http.config import ApiConfig
from eqx_decoders.serving.http.json_body import parse, write
from eqx_decoders.serving.http.protocol import CompletionRequest, DetokenizeRequest, parse_request_body
from eqx_decoders.serving.http.unsupported_fields import IGNORED, NEUTRAL, is_neutral
from tests.errors import refused


CONFIG = ApiConfig(name="m", max_length=8192, vocab_size=1000)


def random_value(pick: random.Random, depth: int):
    """Return a random JSON value with strings and lists longer than the chunks in which entries are counted."""
    kind = pick.randrange(8 if depth else 5)
    if kind < 5:
        letters = "".join(pick.choice('ab"\\\n€😀\u2028é[{,:') for _ in range(pick.randrange(40)))
        return [pick.random() * 10.0 ** pick.randrange(-5, 6), pick.randrange(-9, 9), letters, None, "x" * 3000][kind]
    if kind < 7:
        return [random_value(pick, depth - 1) for _ in range(pick.randrange(12))]
    return {str(random_value(pick, 0)): random_value(pick, depth - 1) for _ in range(pick.randrange(12))}


def entries_of(value) -> int:
    """Count lists, objects and keys of a value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(entries_of, value.values()))
    return 1 + sum(map(entries_of, value)) if isinstance(value, list) else 0


@pytest.mark.slow(fast=("0", "1"))
@pytest.mark.parametrize("seed", range(6))
def test_entries_of_bodies_are_counted_correctly(seed, monkeypatch):
    """For every position at which the text is split into chunks."""
    monkeypatch.setattr(json_body, "SMALL", 7 + 11 * seed)
    pick = random.Random(seed)
    value = {"a": [random_value(pick, 5) for _ in range(12)], "b": list(range(900))}
    text = json.dumps(value, ensure_ascii=seed % 2 == 0, indent=2 if seed % 3 == 0 else None).encode()
    count = entries_of(value)
    assert parse(text, count) == json.loads(write(value)) == value
    with refused(ApiError, f"{count - 1:,}"):
        parse(text, count - 1)


PAD = " " * json_body.SMALL
WRONG = ["", "{", '{"a" 1}', '{"a": 1,}', "{1: 2}", '{"a": [1 2]}', '{"a": 1} 2', '{"a": nul}', '{"a": "b', "[1]"]
WRONG += ['{"a": NaN}', '{"a": 1e999}', '{"a": -1e999}', '{"a": "\\ud800"}', '{"a": [{"b": "\\udc00"}]}']
WRONG += ['{"\\ud800": 1}', '{"a": ' + "9" * 5000 + "}", "[" * 10_000, '{"a":' * 10_000]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_refuses_bodies_that_are_not_json_objects(text):
    long = '["' + "x" * 70_000 + '"]'
    bodies = [text, text + PAD]
    bodies += [] if text == "[1]" else [f'{{"long": {long}, "given": {text}}}', f'{{"given": [{text}, {long}]}}']
    for body in bodies:
        with refused(ApiError, "JSON") as error:
            parse(body.encode())
        assert error.value.status == 400


WRONG_STRINGS = ["\\ud83d", "\\ude00", "\\ud83d\\n", "\\ud83d\\u0041", "\\ud83dx", "\\x", "\\u12", "\\u12g4"]
WRONG_STRINGS += ["\n", "\\"]


@pytest.mark.parametrize("wrong", WRONG_STRINGS, ids=range(len(WRONG_STRINGS)))
def test_refuses_invalid_escapes_in_long_strings(wrong):
    for before, behind in ((70_000, 0), (0, 70_000), (json_body.SMALL - 3, 70_000)):
        with refused(ApiError, "JSON"):
            parse(f'{{"a": "{"x" * before}{wrong}{"x" * behind}"}}'.encode())
    with refused(ApiError, "UTF-8"):
        parse(b'{"a": "' + b"x" * 70_000 + b'\xff"}')


@pytest.mark.slow(fast=("lists-prompt", "lists-metadata", "objects-prompt", "objects-metadata"))
@pytest.mark.parametrize(
    "text", ['{"prompt": [%s]}', '{"prompt": "a", "metadata": {"b": [[%s]]}}'], ids=["prompt", "metadata"]
)
@pytest.mark.parametrize("entry", ["[]", "{}", '{"a":"b"}', "12345"], ids=["lists", "objects", "names", "numbers"])
def test_bodies_with_too_many_entries_are_refused_quickly(text, entry):
    """In a fraction of the time that parsing takes."""
    body = (text % ",".join([entry] * 3_000_000)).encode()
    begin = time.process_time()
    with refused(ApiError, "82,768", "2,097,152") as found:
        parse_request_body(CompletionRequest, body, CONFIG)
    assert time.process_time() - begin < 0.5 and found.value.code == "context_length_exceeded"


def processor_seconds(body: bytes) -> float:
    begin = time.thread_time()
    parse(body)
    return time.thread_time() - begin


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["hello world and more of it, ", "a line\\n", "é漢 ", "\\u00e9"])
def test_large_body_holds_the_gil_only_briefly(piece):
    """For 32 MB, counting takes about 50 ms, which other threads can interrupt, and the following call about 40 ms."""
    text = piece * (32_000_000 // len(piece.encode()))
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()
    assert min(processor_seconds(body) for _ in range(5)) < 0.25


CHAT = {"messages": [{"role": "user", "content": "a"}]}


def format_of(**fields) -> dict:
    return {"prompt": "a", "response_format": fields}


def tool_of(**fields) -> dict:
    return CHAT | {"tools": [fields]}


# For each error: the type of the body, the body, and words of the message.
COMPLETION_ERRORS = {
    "missing": ({}, ["prompt"]),
    "unknown": ({"prompt": "a", "temprature": 1}, ["temprature=1"]),
    "best_of": ({"prompt": "a", "best_of": 2}, ["best_of=2", "n "]),
    "negative": ({"prompt": "a", "temperature": -1}, ["temperature=-1", "1000"]),
    "word": ({"prompt": "a", "n": "two"}, ['n="two"']),
    "number": ({"prompt": "a", "stream": 1}, ["stream=1"]),
    "large": ({"prompt": "a", "seed": 2**63}, ["seed=9223372036854775808"]),
    "prompts": ({"prompt": ["a", 5]}, ["prompt=5"]),
    "token": ({"prompt": [1000]}, ["prompt=1000", "999"]),
    "stop": ({"prompt": "a", "stop": [5]}, ["stop=[5]"]),
    "logprobs": ({"prompt": "a", "logprobs": 21}, ["logprobs=21", "20"]),
    "logit_bias": ({"prompt": "a", "logit_bias": {"5": 101}}, ['logit_bias={"5": 101}']),
    "stream_options": (
        {"prompt": "a", "stream_options": {"usage": True}, "stream": True},
        ["stream_options.usage=true"],
    ),
    "format of others": (
        format_of(type="regex", pattern="a"),
        ['response_format.pattern="a"', "json_schema", "guided_regex"],
    ),
    "flat format": (
        format_of(type="json_schema", name="a", schema={}),
        ['response_format.name="a"', "response_format.json_schema"],
    ),
    "schema": (
        format_of(type="json_schema", json_schema={"type": "object"}),
        ['response_format.json_schema.type="object"', "JSON Schema"],
    ),
    "structured_outputs": ({"prompt": "a", "structured_outputs": {"format": "a"}}, ['structured_outputs.format="a"']),
    "chat": (CHAT, ["messages", "/v1/chat/completions"]),
}
CHAT_ERRORS = {
    "input": ({"input": "a"}, ['input="a"', "messages", "/v1/chat/completions"]),
    "empty name": (tool_of(type="function", function={"name": ""}), ['tools[0].function.name=""']),
    "parameters": (
        tool_of(type="function", function={"name": "f", "parameters": "{}"}),
        ['tools[0].function.parameters="{}"', "JSON Schema"],
    ),
    "tool": (tool_of(type="custom", custom={"name": "f"}), ['tools[0].type="custom"', "'function'"]),
    "top_logprobs": (CHAT | {"top_logprobs": 2}, ["top_logprobs=2", "logprobs=true"]),
    "no function": (tool_of(type="function"), ["tools[0].function"]),
    "no tools": (CHAT | {"tool_choice": "required"}, ['tool_choice="required"', "tools"]),
    "tool_choice": (CHAT | {"tool_choice": "any"}, ['tool_choice="any"']),
}
TOKEN_ERRORS = {
    "no prompt": (TokenizeRequest, {}, ["prompt"]),
    "many": (DetokenizeRequest, {"tokens": [5] * 10_001}, ["tokens", "10,001", "10,000"]),
    "text": (DetokenizeRequest, {"tokens": "a"}, ['tokens="a"']),
}
ERRORS = {name: (CompletionRequest, *error) for name, error in COMPLETION_ERRORS.items()}
ERRORS |= {name: (ChatCompletionRequest, *error) for name, error in CHAT_ERRORS.items()}
ERRORS |= TOKEN_ERRORS


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_field_and_its_value(case):
    kind, body, names = ERRORS[case]
    with refused(ApiError, *names) as error:
        parse_request_body(kind, json.dumps(body).encode(), CONFIG)
    assert error.value.param and error.value.status == 400


WORDING = {
    "value": ({"prompt": "a", "temperature": -1}, "temperature=-1 must be a number from 0 to 1000."),
    "missing": ({}, "prompt is missing: it must be a text, a list of token ids, or a list of texts or"),
    "unknown": ({"prompt": "a", "temprature": 1}, "temprature=1 is an unknown field. Remove it."),
    "of other servers": ({"prompt": "a", "n_predict": 5}, "n_predict=5 is not supported. Use max_tokens instead."),
    "place": (format_of(name="a"), 'response_format.name="a" is in the wrong place. Move it into'),
}


@pytest.mark.parametrize("case", WORDING)
def test_wording_of_each_kind_of_error(case):
    body, wording = WORDING[case]
    with pytest.raises(ApiError) as error:
        parse_request_body(CompletionRequest, json.dumps(body).encode(), CONFIG)
    assert error.value.message.startswith(wording)


def test_whole_numbers_and_null():
    body = b'{"prompt": "a", "n": 2.0, "temperature": 1.0, "seed": null, "other": null, "max_tokens": 1e2}'
    request = parse_request_body(CompletionRequest, body, CONFIG)
    assert (request.n, request.temperature, request.seed, request.max_tokens) == (2, 1.0, None, 100)
    assert type(request.n) is type(request.max_tokens) is int
    body = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1.0, "b": null}}'
    variables = parse_request_body(ChatCompletionRequest, body, CONFIG).chat_template_kwargs
    # as a template would write the numbers
    assert variables == {"a": 1.0, "b": None} and isinstance(variables["a"], float)


# --- fields of other servers ------------------------------------------------------------------------------------------


def other_number(value):
    """Return an integer as a float, and a float with an integral value as an integer: JSON clients send either."""
    return float(value) if type(value) is int else int(value) if type(value) is float and value.is_integer() else value


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_neutral_values_of_unknown_fields_are_accepted(kind):
    plain = {"prompt": "a"} if kind is CompletionRequest else CHAT
    known = json_body.fields_of(kind)
    for name, values in NEUTRAL.items():
        for value in values if name not in known else ():
            for written in (value, other_number(value), None):
                request = parse_request_body(kind, write(plain | {name: written}), CONFIG)
                assert request == parse_request_body(kind, write(plain), CONFIG)
    for name in IGNORED:
        parse_request_body(kind, write(plain | {name: 5}), CONFIG)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_other_values_of_unknown_fields_are_refused(kind):
    plain = {"prompt": "a"} if kind is CompletionRequest else CHAT
    known = json_body.fields_of(kind)
    for name in sorted(NEUTRAL.keys() - known.keys()):
        for value in (7, "seven", ["seven"], {"seven": 7}, 1 if NEUTRAL[name][0] is True else 0.25):
            with pytest.raises(ApiError) as error:
                parse_request_body(kind, write(plain | {name: value}), CONFIG)
            assert error.value.param == name and error.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("top_n_tokens", 0),
            ("watermark", False),
            ("samplers", []),
            ("reasoning_budget", -1),
            ("grammar_lazy", False),
        ],
        *[("guided_decoding_backend", "xgrammar"), ("guidance_scale", 1.0), ("custom_logit_processor", "")],
    ],
)
def test_accepts_disabled_settings_of_other_servers(name, value):
    assert is_neutral(name, value) and not is_neutral(name, "other")


def test_booleans_do_not_equal_numbers():
    assert is_neutral("typical_p", 1) and is_neutral("typical_p", 1.0)
    assert not is_neutral("typical_p", True) and not is_neutral("use_beam_search", 0)
    assert not is_neutral("mirostat", False) and not is_neutral("anything", None)


# --- tool_choice ------------------------------------------------------------------------------------------------------


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
ONE = {"type": "function", "function": {"name": "g"}}


def chat(**fields) -> ChatCompletionRequest:
    return parse_request_body(ChatCompletionRequest, write(CHAT | {"tools": TOOLS} | fields), CONFIG)


CHOICES = {
    "required": ({"tool_choice": "required"}, "fg", True, None),
    "named": ({"tool_choice": ONE}, "g", True, 1),
    "named, flat": ({"tool_choice": {"type": "function", "name": "f"}}, "f", True, 1),
    "allowed": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ONE]}}},
                "g", False, None),
    "allowed, flat": ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [ONE]}}, "g", True, None),
    "one call": ({"parallel_tool_calls": False}, "fg", False, 1),
    "required, one call": ({"tool_choice": "required", "parallel_tool_calls": False}, "fg", True, 1),
    "with a form": ({"response_format": {"type": "json_object"}}, "fg", False, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_tool_choice_becomes_a_grammar_of_calls(name):
    fields, names, required, max_calls = CHOICES[name]
    calls = chat(**fields).calls("hermes")
    assert calls is not None and [tool for tool, _ in calls.tools] == list(names)
    assert (calls.required, calls.max_calls) == (required, max_calls)


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True},
                                    {"tool_choice": "none", "parallel_tool_calls": False}, {"tool_choice": None},
                                    {"tools": [], "parallel_tool_calls": False}])  # fmt: skip
def test_unconstrained_calls_have_no_grammar(fields):
    assert chat(**fields).calls("hermes") is None


def test_constraints_on_calls_need_a_known_format():
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ):
        with pytest.raises(ApiError) as error:
            chat(**fields).calls(None)
        assert error.value.status == 400 and error.value.param == param
    assert chat(response_format={"type": "json_object"}).calls(None) is None  # only the final answer is constrained


@pytest.mark.parametrize("choice", [
    "any", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": {"name": "h"}}, {"type": "custom"},
    {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [ONE]}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    {"type": "allowed_tools", "allowed_tools": 5},
    {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "function": {"name": "h"}}]}},
])  # fmt: skip
def test_invalid_tool_choices_are_refused(choice):
    with pytest.raises(ApiError) as error:
        chat(tool_choice=choice)
    assert error.value.status == 400 and error.value.param.startswith("tool_choice")


@pytest.mark.parametrize(
    ("message", "content"),
    [({"tool_calls": []}, ""), ({"refusal": "no", "tool_calls": []}, "no"), ({}, ""), ({"content": "a"}, "a")],
)
def test_assistant_messages_without_tool_calls_have_text_content(message, content):
    messages, _ = conversation(chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", **message}]))
    assert messages[1]["content"] == content


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_constrained_calls_exclude_ignore_eos_and_min_tokens(field):
    with pytest.raises(ApiError) as error:
        chat(tool_choice="required", **field)
    assert error.value.param in field
