"""The HTTP API, called with OpenAI's client and with plain requests, in front of an engine without a model."""

import base64
import dataclasses
import functools
import json
import threading
import time
from typing import Any

import pytest

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.config import ApiConfig, ServerConfig
from eqx_decoders.serving.http.protocol import choice_seed
from tests.data.test_chats import FOLDER as SPECIAL
from tests.errors import assert_names, refused
from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import Running, chat_frontend, serving


openai = pytest.importorskip("openai")
types = pytest.importorskip("openai.types")
chat_types = pytest.importorskip("openai.types.chat")

# Bytes are tokens: 97 is "a". The engine answers with the following letters of the alphabet.
LETTERS = TextFrontend(tokenizer=ByteTokenizer(), stop_ids=(257,))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    """A server with a tokenizer of bytes."""
    with serving(frontend=LETTERS) as running:
        yield running


class PlainTemplate(ChatTemplate):
    """A chat template that writes conversations without Jinja."""

    def render_many(self, conversations):
        return [Rendered(self._one(one), None, []) for one in conversations]

    def _one(self, one: Conversation) -> str:
        said = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in one.messages)
        return said + "<|assistant|>" * one.add_generation_prompt + json.dumps(one.variables) * bool(one.variables)


@pytest.fixture(scope="module")
def chats():
    """A server with a published tokenizer and a chat template."""
    with serving(FakeEngine(per_step=2), chat_frontend(chat=PlainTemplate(source="messages"))) as running:
        yield running


def client(server: Running, **options):
    return openai.OpenAI(base_url=server.url, api_key=options.pop("api_key", "none"), max_retries=0, **options)


def text_of(server: Running, prompt="a", **options) -> str:
    return server.json(COMPLETIONS, {"prompt": prompt, "temperature": 0, **options})["choices"][0]["text"]


def engine_request(server: Running, **options):
    """Send a completion request. Returns the request that the engine received."""
    server.json(COMPLETIONS, {"prompt": "a", **options})
    return server.engine.seen[-1]


# --- OpenAI's client --------------------------------------------------------------------------------------------------


def test_completion_has_the_schema_of_the_client(server):
    found = client(server).completions.with_raw_response.create(
        model="fake", prompt="abc", max_tokens=5, temperature=0, logprobs=2, n=2
    )
    whole = types.Completion.model_validate_json(found.text, strict=True)
    assert [choice.text for choice in whole.choices] == ["defgh", "defgh"]
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.choices[0].finish_reason == "length"
    logprobs = whole.choices[0].logprobs
    assert logprobs.tokens == list("defgh") and logprobs.text_offset == [0, 1, 2, 3, 4]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 5 and all(one < 0 for one in logprobs.token_logprobs)
    assert whole.usage.prompt_tokens == 4 and whole.usage.completion_tokens == 10
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    assert whole.id.removeprefix("cmpl-") == found.headers["x-request-id"]


def test_return_tokens_as_token_ids(server):
    """As in vLLM. Two tokens with the same text remain distinct."""
    body = dict(prompt="ab", max_tokens=1, temperature=0, logprobs=1, echo=True, return_tokens_as_token_ids=True)
    (choice,) = server.json(COMPLETIONS, body)["choices"]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == [
        f"token_id:{index}" for index in (256, 97, 98, 99)
    ]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][1])


def test_first_token_of_an_echoed_prompt_has_no_logprob(server):
    body = dict(prompt="abc", max_tokens=2, temperature=0, logprobs=1, echo=True)
    choice = server.json(COMPLETIONS, body)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abcde" and logprobs["tokens"] == ["", *"abcde"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    # lm-eval decides by the value whether a token is the most likely one
    pairs = zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    assert [own == max(top.values()) for own, top in pairs] == [True, True, True, False, True]


def test_chat_completion_has_the_schema_of_the_client(chats):
    found = client(chats).chat.completions.with_raw_response.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    whole = chat_types.ChatCompletion.model_validate_json(found.text, strict=True)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and len(choice.logprobs.content) == 5
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert all(bytes(one.bytes).decode() == one.token for one in choice.logprobs.content)
    assert [len(one.top_logprobs) for one in choice.logprobs.content] == [3] * 5
    assert chats.engine.seen[-1].prompt[-1] == 259 and chats.engine.seen[-1].prompt[0] == 258


@pytest.mark.parametrize("usage", [False, True])
def test_streamed_completion_equals_the_complete_one(server, usage):
    options = dict(model="fake", prompt=["abc", "x"], max_tokens=7, temperature=0, logprobs=1, n=2, echo=True)
    more = {"stream_options": {"include_usage": True}} if usage else {}
    whole = client(server).completions.create(**options)
    chunks = list(client(server).completions.create(**options, stream=True, **more))
    texts, tokens, ends = ["", "", "", ""], [[], [], [], []], {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] == ["abcdefghij"] * 2 + ["xyz{|}~\x7f"] * 2
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert ends == dict.fromkeys(range(4), "length")
    assert [len(chunk.choices) for chunk in chunks].count(0) == usage
    assert not usage or chunks[-1].usage == whole.usage


def test_streamed_chat_equals_the_complete_one(chats):
    options = dict(model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=9, temperature=0, n=2)
    whole = client(chats).chat.completions.create(**options)
    chunks = list(client(chats).chat.completions.create(**options, stream=True))
    for chunk in chunks:
        chat_types.ChatCompletionChunk.model_validate_json(chunk.model_dump_json(), strict=True)
    for number in (0, 1):
        deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == number]
        assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
        assert all(choice.finish_reason is None for choice in deltas[:-1])
        assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[number].message.content


def test_events_follow_the_sse_standard(server):
    status, headers, content = server.call(COMPLETIONS, dict(prompt="a", max_tokens=3, stream=True))
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *events, done, rest = content.decode().split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    assert all(event.startswith("data: {") and "\n" not in event for event in events)


def test_errors_raise_the_exception_classes_of_the_client(server):
    with pytest.raises(openai.BadRequestError) as bad:
        client(server).completions.create(model="fake", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    assert_names(str(bad.value), "temperature=-1")
    with pytest.raises(openai.NotFoundError) as unknown:
        client(server).completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    assert [model.id for model in client(server).models.list()] == ["fake"]
    assert client(server).models.retrieve("fake").id == "fake"


# --- request fields ---------------------------------------------------------------------------------------------------


def test_prompts_are_texts_or_ids_or_lists_of_these(server):
    assert text_of(server, "a", max_tokens=2) == text_of(server, [97], max_tokens=2) == "bc"
    for prompts in (["a", "b"], [[97], [98]], ["a", [98]]):
        found = server.json(COMPLETIONS, dict(prompt=prompts, max_tokens=2, temperature=0))
        assert [choice["text"] for choice in found["choices"]] == ["bc", "cd"]
    assert server.engine.seen[-2].prompt == (256, 97) and server.engine.seen[-1].prompt == (98,)


@pytest.mark.parametrize(
    "given, field, value",
    [
        ({}, "temperature", 1.0),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 1e-9}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_p": 1}, "top_p", None),
        ({"top_k": 7}, "top_k", 7),
        ({"top_k": -1}, "top_k", None),
        ({"top_k": 0}, "top_k", None),
        ({"top_k": 10**9}, "top_k", 320),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"min_p": 0}, "min_p", None),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"frequency_penalty": -2}, "frequency_penalty", -2.0),
        ({"presence_penalty": 2}, "presence_penalty", 2.0),
        ({"logit_bias": {"98": 5, "99": -100}}, "logit_bias", ((98, 5.0), (99, -100.0))),
        ({"seed": -5}, "seed", -5),
        ({"seed": None, "top_p": None}, "top_p", None),
    ],
)
def test_sampling_parameters_reach_the_engine(server, given, field, value):
    assert getattr(engine_request(server, **given).sampling, field) == value


@pytest.mark.parametrize(
    "given, field, value",
    [
        ({}, "max_new_tokens", 16),
        ({"max_tokens": 30}, "max_new_tokens", 30),
        ({"min_tokens": 5}, "min_new_tokens", 5),
        ({"stop_token_ids": [98, 99]}, "stop_ids", (257, 98, 99)),
        ({"ignore_eos": True}, "stop_ids", ()),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 2, "echo": True}, "prompt_logprobs", 2),
        ({"logprobs": 2}, "prompt_logprobs", None),
        ({"user": "me"}, "client", "me"),
        ({}, "client", "127.0.0.1"),
        ({"cache_salt": "x"}, "cache_salt", "x"),
    ],
)
def test_other_fields_reach_the_engine(server, given, field, value):
    assert getattr(engine_request(server, **given), field) == value


def test_priorities_are_refused_unless_enabled(server):
    """A request with priority makes the engine store the state of a preempted request."""
    error = server.error(COMPLETIONS, {"prompt": "a", "priority": -3}, "priority=-3")
    assert error["param"] == "priority" and error["code"] == "unsupported_parameter"
    assert engine_request(server, priority=0).priority == 0
    with serving(frontend=LETTERS, allow_priority=True) as allowing:
        assert engine_request(allowing, priority=3).priority == -3


def test_health_reports_a_hanging_device(monkeypatch):
    with serving(FakeEngine(), LETTERS) as server:
        monkeypatch.setattr("eqx_decoders.serving.http.engine_thread.EngineThread.hangs", True)
        assert server.json("/health", code=503) == {"status": "hanging"}


def test_published_sampling_settings_are_defaults():
    published = GenerationConfig(temperature=0.6, top_p=0.9, repetition_penalty=1.3)
    with serving(frontend=LETTERS, defaults=published) as server:
        sampling = engine_request(server).sampling
        assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.6, 0.9, 1.3)
        sampling = engine_request(server, temperature=1, top_p=1, repetition_penalty=1).sampling
        assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, None, 1.0)


def test_n_answers_match_n_requests_with_consecutive_seeds(server):
    body = dict(prompt="a", max_tokens=6, temperature=1, seed=2**63 - 1)
    found = server.json(COMPLETIONS, body | {"n": 3})
    seeds = [choice_seed(2**63 - 1, number) for number in range(3)]
    assert seeds == [2**63 - 1, -(2**63), 1 - 2**63]
    alone = [text_of(server, "a", max_tokens=6, seed=seed, **{"temperature": 1}) for seed in seeds]
    assert [choice["text"] for choice in found["choices"]] == alone and found["usage"]["completion_tokens"] == 18
    assert found["usage"]["prompt_tokens"] == 2


def test_requests_without_a_seed_have_different_seeds(server):
    assert len({engine_request(server).sampling.seed for _ in range(3)}) == 3


def test_max_tokens_defaults_to_the_remaining_length(chats, server):
    body = dict(messages=[{"role": "user", "content": "hi"}], temperature=0)
    chats.json(CHAT, body)
    request = chats.engine.seen[-1]
    assert len(request.prompt) + request.max_new_tokens == 512
    chats.json(CHAT, body | {"max_tokens": 5, "max_completion_tokens": 3})
    assert chats.engine.seen[-1].max_new_tokens == 3
    assert engine_request(server, prompt=[97] * 505).max_new_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options, text, tokens, reason",
    [
        ({"stop": "e"}, "bcd", 4, "e"),
        ({"stop": ["xyz", "def"]}, "bc", 5, "def"),
        ({"stop": "def", "include_stop_str_in_output": True}, "bcdef", 5, "def"),
        ({"stop": ["cde", "e", "d"]}, "bc", 3, "d"),
        ({"stop": "d", "min_tokens": 3, "max_tokens": 5}, "bcdef", 5, None),
        ({"stop_token_ids": [101]}, "bcd", 4, 101),
        ({"stop_token_ids": [101], "include_stop_str_in_output": True}, "bcde", 4, 101),
        ({"stop": ["fgz"], "max_tokens": 6}, "bcdefg", 6, None),
    ],
)
def test_answer_ends_at_stop_strings_and_tokens(server, options, text, tokens, reason, stream):
    body = dict(prompt="a", max_tokens=20, temperature=0, return_token_ids=True) | options
    if stream:
        content = server.call(COMPLETIONS, body | {"stream": True})[2].decode()
        found = [json.loads(row[6:])["choices"][0] for row in content.split("\n\n")[:-2]]
    else:
        found = server.json(COMPLETIONS, body)["choices"]
    assert "".join(choice["text"] for choice in found) == text
    assert [token for choice in found for token in choice["token_ids"]] == list(range(98, 98 + tokens))
    assert (found[-1]["stop_reason"], found[-1]["finish_reason"]) == (reason, "length" if reason is None else "stop")


def test_engine_stops_an_answer_after_a_stop_string(server):
    text_of(server, "a", max_tokens=500, stop="d")
    deadline = time.monotonic() + 5
    while server.engine.order:
        assert time.monotonic() < deadline
    assert len(server.engine.answers[len(server.engine.seen) - 1]) < 400


def test_end_token_is_not_part_of_the_text():
    with serving(FakeEngine(script=(98, 99, 257)), LETTERS) as server:
        body = dict(prompt="a", temperature=0, return_token_ids=True, logprobs=0)
        choice = server.json(COMPLETIONS, body)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bc", "stop", None)
        assert choice["token_ids"] == [98, 99, 257] and len(choice["logprobs"]["tokens"]) == 3
        assert text_of(server, "a", ignore_eos=True, max_tokens=4) == "bc\x02"  # generation continues


def test_stream_does_not_split_characters_of_several_tokens():
    ids = tuple("né你👩".encode())
    with serving(FakeEngine(script=ids), LETTERS) as server:
        body = dict(prompt="a", max_tokens=len(ids), temperature=0, logprobs=0)
        content = server.call(COMPLETIONS, body | {"stream": True})[2].decode()
        pieces = [json.loads(row[6:])["choices"][0]["text"] for row in content.split("\n\n")[:-2]]
        whole = server.json(COMPLETIONS, body)["choices"][0]
        assert "".join(pieces) == whole["text"] == "né你👩" and not any("\ufffd" in piece for piece in pieces)
        assert whole["logprobs"]["tokens"][1] == "bytes:\\xc3" and whole["logprobs"]["text_offset"][:4] == [0, 1, 1, 2]
        assert text_of(server, max_tokens=2) == "n\ufffd"  # ends within a character


def test_max_tokens_0_echoes_the_prompt(server):
    body = dict(prompt="abc", max_tokens=0, echo=True, logprobs=1)
    found = server.json(COMPLETIONS, body)
    assert found["choices"][0]["text"] == "abc" and found["usage"]["completion_tokens"] == 0
    assert len(found["choices"][0]["logprobs"]["token_logprobs"]) == 4
    assert server.json(COMPLETIONS, body | {"echo": False}, code=400)["error"]["param"] == "max_tokens"


def test_infinite_logprobs_are_written_as_finite_numbers(server):
    logprobs = server.json(COMPLETIONS, dict(prompt="c", max_tokens=1, temperature=0, logprobs=0))["choices"][0][
        "logprobs"
    ]
    assert logprobs == {
        "tokens": ["d"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"d": -9999.0}],
        "text_offset": [0],
    }


# --- structured output ------------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_answers_match_the_requested_schema(server, options):
    for seed in range(3):
        found = server.json(COMPLETIONS, dict(prompt="a", max_tokens=300, seed=seed, **options))["choices"][0]
        assert found["finish_reason"] == "stop" and json.loads(found["text"])["a"] in (1, 2)


def test_other_structured_output_formats(server):
    assert set(text_of(server, guided_regex="[xy]{3}")) <= {"x", "y"}
    assert text_of(server, guided_choice=["left", "right"]) in ("left", "right")
    assert text_of(server, guided_grammar='start: "x" "y"') == "xy"
    assert text_of(server, structured_outputs={"choice": ["ü"]}) == "ü"
    assert text_of(server, response_format={"type": "json_object"}, max_tokens=1) in "{ \n\r\t"
    assert text_of(server, response_format={"type": "text"}, max_tokens=2) == "bc"


# For each request: its options, the field of the error, and another word of the error message.
INVALID_FORMATS = {
    "regex": ({"guided_regex": "(["}, "guided_regex", "regular expression"),
    "schema": ({"guided_json": {"type": "nope"}}, "guided_json", '`type="nope"`'),
    "no schema": ({"guided_json": 5}, "guided_json", "guided_json=5"),
    "no choices": ({"guided_choice": []}, "guided_choice", "guided_choice=[]"),
    "empty choice": ({"guided_choice": ["a", ""]}, "guided_choice", 'guided_choice=["a", ""]'),
    "two formats": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos=true"),
    "min_tokens": ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "min_tokens=1"),
    "type": ({"response_format": {"type": "xml"}}, "response_format.type", 'response_format.type="xml"'),
    "no type": ({"response_format": {}}, "response_format.type", "json_schema"),
    "no json_schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "response_format.json_schema.schema",
    ),
    "no object": ({"structured_outputs": "x"}, "structured_outputs", 'structured_outputs="x"'),
}


@pytest.mark.parametrize("case", INVALID_FORMATS)
def test_invalid_response_formats_are_refused(server, case):
    options, field, name = INVALID_FORMATS[case]
    assert server.error(COMPLETIONS, dict(prompt="a", **options), name)["param"] == field


# --- chats ------------------------------------------------------------------------------------------------------------


def prompt_of(server: Running, messages, **options) -> str:
    """Return the prompt text that the model receives for a conversation."""
    server.json(CHAT, dict(messages=messages, max_tokens=1, **options))
    return server.json("/detokenize", {"tokens": server.engine.seen[-1].prompt})["prompt"]


def test_conversations_are_rendered_by_the_template(chats):
    say = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert prompt_of(chats, [say]) == "<|user|>a\nb<|end|><|assistant|>"
    assert prompt_of(chats, [{"role": "developer", "content": "x"}, say]).startswith("<|system|>x")
    assert prompt_of(chats, [say], add_generation_prompt=False) == "<|user|>a\nb<|end|>"
    assert prompt_of(chats, [say], chat_template_kwargs={"think": 1}).endswith('{"think": 1}')
    assert prompt_of(chats, [say], reasoning_effort="low").endswith('{"reasoning_effort": "low"}')


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.slow
def test_tools_need_a_template_that_renders_them(chats):
    body = dict(messages=[{"role": "user", "content": "a"}], tools=[TOOL], max_tokens=1)
    assert chats.error(CHAT, body)["param"] == "tools"
    chats.json(CHAT, body | {"tool_choice": "none"})
    frontend = chat_frontend(chat=ChatTemplate(source="{{ messages[0].content }}{{ tools[0].function.name }}"))
    with serving(frontend=frontend) as server:
        assert prompt_of(server, body["messages"], tools=[TOOL]) == "af"


HERMES = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "ü", "b": 1}}\n</tool_call>'


@pytest.mark.slow(fast=("two calls",))
@pytest.mark.parametrize(
    ("said", "calls"),
    [(HERMES, 1), (HERMES[:-20], 0), ("Well. <tool>", 0), (HERMES[6:] * 2, 2)],
    ids=["call", "cut off", "no call", "two calls"],
)
def test_tool_calls_in_answers_are_parsed(said, calls):
    """Also in a stream, where text before the calls is sent at once. A malformed call is returned as text."""
    frontend = chat_frontend(chat=PlainTemplate(source="messages and tools"))
    script = (*frontend.tokenizer.encode(said).tolist(), 257)
    options: Any = dict(model="fake", messages=[{"role": "user", "content": "a"}], max_tokens=200, tools=[TOOL], n=2)
    with serving(FakeEngine(script=script, per_step=3), frontend, tool_call_parser="hermes") as server:
        whole, chunks, text = (
            client(server).chat.completions.create(**options | more)
            for more in ({}, {"stream": True}, {"tool_choice": "none"})
        )
        chunks = list(chunks)
    assert text.choices[0].message.content == said and text.choices[0].finish_reason == "stop"
    content = said if not calls else "Well." if said.startswith("W") else None
    for number, choice in enumerate(whole.choices):
        found = choice.message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert content == (choice.message.content and choice.message.content.rstrip())
        assert [json.loads(each.function.arguments) for each in found] == [{"a": "ü", "b": 1}] * calls
        assert len({each.id for each in found}) == calls
        deltas = [each for chunk in chunks for each in chunk.choices if each.index == number]
        assert "".join(each.delta.content or "" for each in deltas).rstrip() == (content or "")
        streamed = [each for delta in deltas for each in delta.delta.tool_calls or []]
        assert [each.index for each in streamed] == list(range(calls))
        assert [each.function.model_dump() for each in streamed] == [each.function.model_dump() for each in found]
        assert deltas[-1].finish_reason == choice.finish_reason


def test_tool_calls_that_start_with_special_tokens_are_parsed():
    tokenizer = load_tokenizer(SPECIAL)
    frontend = chat_frontend(chat=PlainTemplate(source="messages and tools"), tokenizer=tokenizer, stop_ids=(5,))
    script = (*tokenizer.encode('[TOOL_CALLS]f[ARGS]{"a": 1}', special=True).tolist(), 5)
    body = dict(messages=[{"role": "user", "content": "a"}], tools=[TOOL], max_tokens=200)
    with serving(FakeEngine(vocab_size=400, script=script), frontend, tool_call_parser="mistral") as server:
        (choice,) = server.json(CHAT, body)["choices"]
        (text,) = server.json(CHAT, body | {"tool_choice": "none"})["choices"]
    assert [each["function"] for each in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert choice["message"]["content"] is None and text["message"]["content"] == 'f[ARGS]{"a": 1}'


def test_reasoning_and_tool_calls_are_separate_fields():
    """The answer to one prompt: complete, streamed, and without tools."""
    call = '<tool_call>{"name": "f", "arguments": {"b": "ü"}}</tool_call>'
    frontend = chat_frontend(chat=PlainTemplate(source="messages tools tool_calls <think>"))
    script = frontend.tokenizer.encode(f"<think>Hm.</think>\nSee:\n{call}").tolist()
    with serving(FakeEngine(per_step=3, script=(*script, 257)), frontend, tool_call_parser="hermes") as server:
        ask = functools.partial(client(server).chat.completions.create, model="fake", max_tokens=200)
        asked = dict(messages=[{"role": "user", "content": "a"}], tools=[TOOL])
        whole = ask(**asked).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "See:")
        assert whole.message.reasoning_content == "Hm."
        (called,) = whole.message.tool_calls
        assert (called.type, called.function.name, called.function.arguments) == ("function", "f", '{"b": "ü"}')
        chunks = [chunk.choices[0] for chunk in ask(**asked, stream=True)]
        deltas = [chunk.delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "See:"
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
        assert chunks[-1].finish_reason == "tool_calls"
        (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert streamed.id != called.id and len(called.id) == 9 and called.id.isalnum()
        assert streamed.index == 0 and streamed.function.arguments == called.function.arguments
        plain = ask(**asked | {"tool_choice": "none"}).choices[0]
        assert (plain.finish_reason, plain.message.content) == ("stop", f"See:\n{call}")
        turn = [
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "content": "1", "tool_call_id": called.id},
        ]
        assert ask(messages=[*asked["messages"], *turn], tools=[TOOL]).choices[0].message.content == "See:"


@pytest.mark.slow
def test_jinja_template_renders_prompts_and_reports_its_errors():
    with serving() as server:
        assert prompt_of(server, [{"role": "user", "content": "hi"}]) == "<|begin|><|user|>hi<|end|>\n\n<|assistant|>"
        wrong = [{"role": "assistant", "content": "hi"}]
        assert server.error(CHAT, dict(messages=wrong), "Roles must alternate")["param"] == "messages"
        found = server.json("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
        assert found["tokens"] == list(server.engine.seen[-1].prompt)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"png").decode()}}


AUDIO = {"type": "input_audio", "input_audio": {"data": "eA=="}}
PATH = {"type": "image", "path": "/etc/passwd"}
# For each message: the field of the error after "messages[0]", and another word of the error message.
INVALID_MESSAGES = {
    "image": ({"role": "user", "content": [IMAGE]}, ".content[0].type", "images"),
    "audio": ({"role": "user", "content": [AUDIO]}, ".content[0].type", "audio"),
    "path": ({"role": "user", "content": [PATH]}, ".content[0]", "image_url"),
    "part": ({"role": "user", "content": ["a"]}, ".content[0]", '="a"'),
    "no text": ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", ""),
    "role": ({"role": "king", "content": "a"}, ".role", '="king"'),
    "no content": ({"role": "user"}, ".content", "=null"),
    "number": ({"role": "user", "content": 5}, ".content", "=5"),
    "no role": ({"content": "a"}, ".role", "assistant"),
    "text": ("a", "", '="a"'),
    "refusal": ({"role": "assistant", "content": None, "refusal": 5}, ".refusal", "=5"),
    "call": ({"role": "assistant", "tool_calls": [5]}, ".tool_calls", "=[5]"),
    "arguments": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        ".tool_calls[0].function.arguments",
        '="{"',
    ),
    "no name": (
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        ".tool_calls[0].function.name",
        "",
    ),
    "null name": (
        {"role": "assistant", "tool_calls": [{"function": {"name": None}}]},
        ".tool_calls[0].function.name",
        "=null",
    ),
    "function_call": (
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        ".function_call",
        "tool_calls",
    ),
    "stored audio": ({"role": "assistant", "audio": {"id": "audio_1"}}, ".audio", '={"id": "audio_1"}'),
    "prefix": ({"role": "assistant", "content": "a", "prefix": True}, ".prefix", "/v1/completions"),
}


@pytest.mark.parametrize("case", INVALID_MESSAGES)
def test_invalid_messages_are_refused(chats, case):
    message, field, name = INVALID_MESSAGES[case]
    field = f"messages[0]{field}"
    assert chats.error(CHAT, {"messages": [message]}, field, name)["param"] == field


@pytest.mark.parametrize("name", ["images", "videos", "audio", "prompt", "messages", "add_generation_prompt"])
def test_template_variables_cannot_replace_files_or_messages(chats, name):
    body = dict(messages=[{"role": "user", "content": "a"}], chat_template_kwargs={name: ["/etc/passwd"]})
    assert chats.error(CHAT, body, f"'{name}'")["param"] == "chat_template_kwargs"


def rendered_variables(chats, **options) -> dict[str, Any]:
    """Send a chat and return the variables of its chat template."""
    chats.json(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **options})
    text = chat_frontend().tokenizer.decode(chats.engine.seen[-1].prompt)
    return json.loads(text[text.index("{") :])


def test_omits_null_fields_of_tools():
    function = {"name": "f", "description": None, "strict": None, "parameters": {"default": None}}
    with serving(frontend=chat_frontend(chat=PlainTemplate(source="messages tools"))) as chats:
        found = rendered_variables(chats, tools=[{"type": "function", "function": function}])
    assert found["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]


def test_reasoning_effort_none_turns_reasoning_off(chats):
    off = {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    assert rendered_variables(chats, reasoning_effort="none") == off
    options = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert rendered_variables(chats, **options) == off | {"enable_thinking": True}
    assert rendered_variables(chats, reasoning_effort="low") == {"reasoning_effort": "low"}


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/responses", "/v1/v1/chat/completions"])
def test_unknown_paths_are_answered_with_known_paths(server, path):
    error = server.error(path, {}, path, CHAT, "/openapi.json", "base_url", code=404)
    assert error["type"] == "not_found_error"


def test_length_errors_name_the_field_of_the_request(server, chats):
    def refused_field(running, path, **body):
        error = running.error(path, body)
        assert error["code"] == "context_length_exceeded"
        return error["param"]

    for count in (600, 60_000):
        assert refused_field(server, COMPLETIONS, prompt="a" * count) == "prompt"
        assert refused_field(chats, CHAT, messages=[{"role": "user", "content": "ab" * count}]) == "messages"
    short = [{"role": "user", "content": "a"}]
    for name in ("max_tokens", "max_completion_tokens"):
        assert refused_field(chats, CHAT, messages=short, **{name: 10_000}) == name
    assert refused_field(server, COMPLETIONS, prompt="a", max_tokens=10_000) == "max_tokens"


def test_chat_is_refused_without_a_template(server):
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert server.error(CHAT, body, "/v1/completions")["param"] == "messages"


# --- health, authentication and shutdown
# --------------------------------------------------------------------------------


def test_health_and_metrics(server):
    before = server.call("/metrics")[2].decode()
    text_of(server, "abc", max_tokens=5)
    text_of(server, "abc", max_tokens=9, stop="f")
    after = server.call("/metrics")[2].decode()

    def increase(name: str) -> float:
        rows = ([row for row in text.splitlines() if row.startswith(name)] for text in (after, before))
        return sum(float(row.split()[-1]) for row in next(rows)) - sum(float(row.split()[-1]) for row in next(rows))

    assert server.json("/health") == {"status": "ok"}
    assert increase("vllm:prompt_tokens_total") == 8
    assert increase('vllm:request_success_total{finished_reason="length"') == 1
    assert increase('vllm:request_success_total{finished_reason="stop"') == 1
    assert increase("vllm:time_to_first_token_seconds_count") == increase("vllm:e2e_request_latency_seconds_count") == 2
    assert increase("vllm:inter_token_latency_seconds_count") >= 6
    assert increase("vllm:request_queue_time_seconds_count") >= 2
    names = "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total"
    names += " prefix_cache_hits_total num_preemptions_total generation_tokens_total"
    assert all(f"\nvllm:{name}{{" in after for name in names.split())


def test_tokenizer_endpoints(chats):
    found = chats.json("/tokenize", {"prompt": "hello"})
    assert found["tokens"][0] == 256 and found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert chats.json("/tokenize", {"prompt": "hello", "add_special_tokens": False})["tokens"] == found["tokens"][1:]
    assert chats.json("/detokenize", {"tokens": found["tokens"]})["prompt"] == "<|begin|>hello"
    info = chats.json("/tokenizer_info")
    assert (info["bos_token"], info["eos_token"]) == ("<|begin|>", "<|end|>") and "messages" in info["chat_template"]


def test_page_loads_nothing_from_other_sites(server):
    status, headers, content = server.call("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"] and b'"model": "fake"' in content
    assert b"http://" not in content and b"https://" not in content and b"/*settings*/" not in content


def test_api_key_is_required_if_keys_are_configured():
    with serving(frontend=LETTERS, api_keys=("one", "two")) as server:
        assert server.json("/v1/models", code=401)["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client(server, api_key="wrong").completions.create(model="fake", prompt="a")
        for number, key in enumerate(("one", "two")):
            client(server, api_key=key).completions.create(model="fake", prompt="a", user="x", max_tokens=1)
            assert server.engine.seen[-1].client == f"key {number}"
        assert server.json("/v1/models", Authorization="Basic one", code=401)
        for path in ("/health", "/", "/metrics"):
            assert server.call(path)[0] == 200
        assert server.json("/tokenize", {"prompt": "a"}, code=401)


def test_cross_origin_requests_need_an_allowed_origin():
    with serving(frontend=LETTERS, allow_origins=("https://a.example",)) as server:
        for site, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            _, headers, _ = server.call("/v1/models", Origin=site)
            assert headers.get("access-control-allow-origin") == allowed
    with serving(frontend=LETTERS) as server:
        assert "access-control-allow-origin" not in server.call("/v1/models", Origin="https://a.example")[1]
        body = b'{"prompt": "a"}'  # an HTML form of another site can send this without a CORS preflight
        assert server.call(COMPLETIONS, raw=body, **{"Content-Type": "text/plain"})[0] == 415


def test_full_queue_answers_with_retry_after():
    engine = FakeEngine(slots=1, max_waiting=1, seconds=0.02)
    with serving(engine, LETTERS) as server:
        engine.gate.clear()
        link = server.connect()
        body = json.dumps({"prompt": ["a", "b"], "max_tokens": 400}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while len(engine.order) < 2:
            time.sleep(0.005)
        engine.gate.set()
        status, headers, content = server.call(COMPLETIONS, {"prompt": "a"})
        assert status == 429 and headers["retry-after"] == "1" and b"queue_full" in content
        link.close()
        deadline = time.monotonic() + 5
        while engine.order:  # disconnected clients have left the queue
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert text_of(server, max_tokens=2) == "bc"


@pytest.mark.slow(fast=("False",))
@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_is_cancelled(stream):
    engine = FakeEngine(seconds=0.005)
    with serving(engine, LETTERS) as server:
        link = server.connect()
        body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert link.recv(20)
        while not engine.order:
            time.sleep(0.002)
        link.close()
        deadline = time.monotonic() + 2
        while not engine.cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert engine.cancelled == [0] and not engine.order
        assert 'finished_reason="abort"' in server.call("/metrics")[2].decode()


@pytest.mark.slow(fast=("False",))
@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_is_reported(stream):
    engine = FakeEngine(seconds=0.01)
    with serving(engine, LETTERS) as server:
        if stream:
            answer = client(server).completions.create(model="fake", prompt="a", max_tokens=400, stream=True)
            next(iter(answer))
            engine.fails = True
            with refused(openai.APIError, "RuntimeError"):
                list(answer)
        else:
            engine.fails = True
            assert server.error(COMPLETIONS, {"prompt": "a"}, "RuntimeError", code=500)["type"] == "server_error"
        assert server.json("/health", code=503) == {"status": "failed"}
        assert server.error(COMPLETIONS, {"prompt": "a"}, code=503)["type"] == "service_unavailable_error"


@pytest.mark.slow
def test_stopping_ends_open_streams_with_an_error():
    engine = FakeEngine(seconds=0.02)
    with serving(engine, LETTERS) as server:
        answer = client(server).completions.create(model="fake", prompt="a", max_tokens=400, stream=True)
        found = iter(answer)
        next(found)
        begun = time.monotonic()
        assert server.stop()
        assert time.monotonic() - begun < 5
        with refused(openai.APIError, "stopping"):
            list(found)


@pytest.mark.slow
def test_stopping_drains_open_streams():
    engine = FakeEngine(seconds=0.02)
    with serving(engine, LETTERS, ServerConfig(drain_seconds=20.0, shutdown_seconds=0.5)) as server:
        answer = client(server).completions.create(model="fake", prompt="a", max_tokens=40, stream=True)
        found = iter(answer)
        next(found)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        while server.json("/health", code=None) == {"status": "ok"}:
            time.sleep(0.01)
        assert server.json("/health", code=503) == {"status": "stopping"}
        error = server.error(COMPLETIONS, {"prompt": "a"}, code=503)
        assert error["type"] == "service_unavailable_error"
        assert [chunk.choices[0].finish_reason for chunk in found][-1] == "length"
        stopping.join(10)
        assert not stopping.is_alive()


def test_refuses_invalid_settings():
    for field, value in (("name", ""), ("max_length", 0), ("max_choices", 0), ("api_keys", ("",))):
        with refused(ConfigError, f"ApiConfig.{field}"):
            ApiConfig(**(dict(name="x", max_length=5, vocab_size=5) | {field: value}))
    assert dataclasses.replace(ApiConfig(name="x", max_length=5, vocab_size=5), seed=3).seed == 3


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ApiConfig) if field.type in ("int", int)])
def test_negative_sizes_are_refused(field):
    with refused(ConfigError, f"ApiConfig.{field}=-1"):
        ApiConfig(**dict(name="m", max_length=8, vocab_size=8) | {field: -1})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ServerConfig)])
def test_negative_limits_and_timeouts_are_refused(field):
    with refused(ConfigError, f"ServerConfig.{field}=-1"):
        ServerConfig(**{field: -1})
