"""Limits on requests: bytes, characters, messages, log-probabilities; and work that is not done on the event loop."""

import asyncio
import errno
import json
import resource
import threading

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.chat_template import ChatTemplate, Rendered
from eqx_decoders.io.text.tokenizer import ByteTokenizer, train_bpe
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.frontend.prompts import PromptPreparer, TextFrontend, is_too_long
from eqx_decoders.serving.http import api, streaming
from eqx_decoders.serving.http.config import ServerConfig
from eqx_decoders.serving.http.responses import Choice, CollectedDeltas, Delta, ResponseBuilder
from eqx_decoders.serving.http.server import raise_file_limit
from tests.errors import refused
from tests.serving.fake_engine import FakeEngine
from tests.serving.http.test_hostile import head
from tests.serving.servers import chat_frontend, serving


LETTERS = TextFrontend(tokenizer=ByteTokenizer(), stop_ids=(257,))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class PlainTemplate(ChatTemplate):
    """A chat template that writes the message contents without Jinja. `rendered` stores the sizes of its batches."""

    rendered: list[int] = []  # noqa: RUF012 - of the test

    def render_many(self, conversations):
        self.rendered.append(len(conversations))
        made = ("".join(str(one.get("content")) for one in each.messages) for each in conversations)
        return [Rendered(text, None, []) for text in made]


@pytest.fixture(scope="module")
def chats():
    with serving(FakeEngine(), chat_frontend(chat=PlainTemplate(source="tools"))) as running:
        yield running


# --- texts ------------------------------------------------------------------------------------------------------------


class CountingTokenizer(ByteTokenizer):
    """A tokenizer that counts the characters that it encodes."""

    letters = 0

    def encode(self, text):
        self.letters += len(text)
        return super().encode(text)


def test_encodes_only_the_start_of_a_long_text():
    tokenizer = CountingTokenizer()
    text = "hello world and more of it, " * 150_000
    assert is_too_long(tokenizer, text, 8192) and 0 < tokenizer.letters < len(text) / 8


TEXTS = ["hello world ", "a", " ", "\n\n", "héllo", "<|end|>", "<|end|>   ", "12345678", "-", "\u200b", "word\t\t"]


@pytest.mark.slow(fast=("hello world ",))
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_fits_is_never_too_long(text):
    whitespace = 5000 * " " + text
    for tokenizer in (chat_frontend().tokenizer, ByteTokenizer(), train_bpe(TEXTS, 280)):
        for whole in (text * 8_000, whitespace * 9):
            options = {"special": True} if hasattr(tokenizer, "to_json") else {}
            assert not is_too_long(tokenizer, whole, len(tokenizer.encode(whole, **options)))


def test_length_check_with_a_normalizer_that_removes_most_text():
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    from eqx_decoders.io.text.tokenizer import JsonTokenizer

    inner = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    inner.normalizer = normalizers.Sequence([normalizers.Replace(Regex("[ x]+"), " "), normalizers.Strip()])
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer, text = JsonTokenizer(inner), "a" + " x" * 500_000 + "a"
    assert len(tokenizer.encode(text)) == 2 and not is_too_long(tokenizer, text, 2)
    assert is_too_long(tokenizer, "a " * 100_000, 2000)


def test_length_check_with_a_token_that_strips_following_spaces():
    from tokenizers import AddedToken

    tokenizer = train_bpe(["hello world"], 280)
    tokenizer._inner.add_special_tokens([AddedToken("<u>", rstrip=True)])
    text = "<u>" + " " * 200_000 + "hello"
    count = len(tokenizer.encode(text, special=True))
    assert count < 10 and not is_too_long(tokenizer, text, count)


@pytest.mark.parametrize("whitespace", [" ", "\n", " \n\t", "\u3000"])
def test_length_check_counts_whitespace_that_becomes_tokens(whitespace):
    tokenizer = CountingTokenizer()
    for begin in ("", "a"):
        tokenizer.letters = 0
        assert is_too_long(tokenizer, begin + whitespace * 1_000_000 + "a", 100) and tokenizer.letters < 50_000
    bpe = train_bpe(["a" + " " * 40 + "a"] * 9, 290)
    assert is_too_long(bpe, "a" + whitespace * 500_000, 2000) and not is_too_long(bpe, "a" + whitespace * 1000, 3000)


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_length_check_ignores_whitespace_that_tokens_strip(side):
    from tokenizers import AddedToken

    tokenizer = train_bpe(["hello world"], 280)
    tokenizer._inner.add_special_tokens([AddedToken("<u>", **{side: True})])
    pair = "hello", "<u>"
    first, last = pair if side == "lstrip" else pair[::-1]
    text = (first + " " * 50_000 + last) * 3
    assert not is_too_long(tokenizer, text, len(tokenizer.encode(text, special=True)))
    other = (last + " " * 50_000 + first) * 3
    assert is_too_long(tokenizer, other, len(tokenizer.encode(other, special=True)) // 4)


def test_refuses_long_conversations_before_rendering(chats):
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    PlainTemplate.rendered = []
    for count in (257, 30_000):
        assert chats.error(CHAT, {"messages": pair * count})["code"] == "context_length_exceeded"
    long = {"messages": [{"role": "user", "content": "a b " * 100_000}]}
    assert chats.error(CHAT, long)["code"] == "context_length_exceeded"
    kwargs = {str(number): [1] * 9000 for number in range(5)}
    chats.error(CHAT, {"messages": pair, "chat_template_kwargs": kwargs}, "chat_template_kwargs", "45,014")
    assert PlainTemplate.rendered == []
    assert chats.json(CHAT, {"messages": pair * 20, "max_tokens": 1})["choices"] and PlainTemplate.rendered == [1]


def test_long_conversations_do_not_delay_short_ones():
    gate, order = threading.Event(), []

    class SlowTemplate(PlainTemplate):
        def render_many(self, conversations):
            if len(conversations[0].messages[0]["content"]) > 9000:
                gate.wait(10)
            order.append(conversations[0].messages[0]["content"][0])
            return super().render_many(conversations)

    async def run():
        reader = PromptPreparer(chat_frontend(chat=SlowTemplate(source="")), max_length=100_000)
        try:

            def ask(text):
                messages = [dict(role="user", content=text)]
                return asyncio.ensure_future(reader.chat(messages, {}, add_generation_prompt=True))

            long, gone = ask("a" * 50_000), ask("b" * 50_000)
            await asyncio.sleep(0.01)
            await ask("c")
            gone.cancel()
            gate.set()
            return await long, await asyncio.gather(gone, return_exceptions=True)
        finally:
            reader.close()

    long, _ = asyncio.run(run())
    assert len(long.ids) == 50_000 and order[0] == "c"


# --- response sizes -------------------------------------------------------------------------------------------------


def test_number_of_logprobs_per_response_is_limited():
    with serving(FakeEngine(), LETTERS, max_scores=1000) as server:
        ask = dict(prompt=[97] * 40, max_tokens=10, logprobs=4, temperature=0)
        server.json(COMPLETIONS, ask | {"n": 4, "echo": True})  # (40 + 10) x 5 x 4
        for more in ({"n": 5, "echo": True}, {"n": 4, "echo": True, "max_tokens": 11}, {"n": 4, "max_tokens": 51}):
            assert server.error(COMPLETIONS, ask | more, "1,000")["param"] == "logprobs"
        server.json(COMPLETIONS, ask | {"n": 5, "echo": True, "logprobs": None})
    with serving(FakeEngine(), chat_frontend(chat=PlainTemplate(source="")), max_scores=1000) as server:
        ask = dict(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=4, temperature=0)
        server.json(CHAT, ask)  # an answer without max_tokens counts with the remaining length
        assert server.engine.seen[-1].max_new_tokens == 200


def test_echoed_prompts_per_response_are_limited(monkeypatch):
    monkeypatch.setattr(api, "MAX_ECHO", 400)
    with serving(FakeEngine(), LETTERS) as server:
        ask = dict(max_tokens=1, echo=True, temperature=0, n=4)
        for prompt in ([97] * 100, "a" * 100, ["a" * 50, [97] * 50]):
            assert "a" * 50 + "b" in server.json(COMPLETIONS, ask | {"prompt": prompt})["choices"][0]["text"]
            assert server.error(COMPLETIONS, ask | {"prompt": prompt, "n": 5}, "400")["param"] == "echo"


def test_long_echo_is_not_copied_for_each_token():
    class Text(str):
        def __add__(self, other):
            raise AssertionError("copied")

    joined = CollectedDeltas()
    for text in (Text("a" * 100), "b", "c"):
        joined.add(Delta(text=text, tokens=[1]))
    assert joined.join().text == "a" * 100 + "bc" and joined.join().tokens == [1] * 3


class DecodeCounter(ByteTokenizer):
    """A tokenizer that counts its decode calls per thread."""

    calls: dict[str, int] = {}  # noqa: RUF012 - of the test

    def decode(self, ids):
        name = threading.current_thread().name
        self.calls[name] = self.calls.get(name, 0) + 1
        return super().decode(ids)


def test_end_of_a_prompt_is_decoded_once_for_all_its_answers():
    with serving(FakeEngine(max_waiting=200), TextFrontend(tokenizer=DecodeCounter(), stop_ids=(257,))) as server:
        body, counts = dict(max_tokens=1, temperature=0), []
        for ask in ({"prompt": [97] * 40}, {"prompt": [97] * 40, "n": 64}, {"prompt": [[97] * 40] * 64}):
            DecodeCounter.calls.clear()
            found = server.json(COMPLETIONS, body | ask)["choices"]
            assert {choice["text"] for choice in found} == {"b"}
            counts.append(
                (
                    sum(DecodeCounter.calls.values()),
                    sum(n for at, n in DecodeCounter.calls.items() if at[:6] != "worker"),
                )
            )
    alone, several, many = counts
    assert several[0] - alone[0] <= 6 * 63  # the decode calls for the token of each answer
    assert many[1] <= 6 * 64 + 6  # many prompts are not decoded on the event loop


def test_large_requests_and_responses_are_handled_off_the_event_loop(monkeypatch):
    threads = {}

    def record_threads(owner, name):
        real = getattr(owner, name)

        def recording(*given, **named):
            threads.setdefault(name, []).append(threading.current_thread().name)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, recording)

    with serving(FakeEngine(max_length=1000), LETTERS) as server:
        ask = dict(max_tokens=1, echo=True, logprobs=2, n=2, temperature=0)
        (
            record_threads(ResponseBuilder, "complete"),
            record_threads(ResponseBuilder, "chunk"),
            record_threads(Choice, "take"),
        )
        record_threads(api, "parse_request_body")
        for count, large in ((5, False), (600, True)):
            threads.clear()
            whitespace = b" " * (large * 70_000)
            server.json(COMPLETIONS, raw=json.dumps(ask | {"prompt": [97] * count}).encode() + whitespace)
            assert server.call(COMPLETIONS, ask | {"prompt": [97] * count, "stream": True})[0] == 200
            beside = {name: any(one.startswith("worker") for one in found) for name, found in threads.items()}
            assert beside == dict.fromkeys(("complete", "chunk", "take", "parse_request_body"), large)


def test_many_ids_are_serialized_off_the_event_loop(monkeypatch):
    threads, real = [], streaming.write

    def recording(value):
        threads.append(threading.current_thread().name.startswith("worker"))
        return real(value)

    monkeypatch.setattr(streaming, "write", recording)
    with serving(FakeEngine(), LETTERS, max_length=5000) as server:
        for count in (10, 3000):
            assert server.json("/tokenize", {"prompt": "a" * count})["count"] == count + 1
        for count in (10, 9000):
            assert len(server.json("/detokenize", {"tokens": [97] * count})["prompt"]) == count
    assert threads == [False, True] * 2


def test_refuses_batches_that_exceed_the_queue():
    with serving(FakeEngine(slots=1, max_waiting=3), LETTERS) as server:
        server.error(COMPLETIONS, {"prompt": "a", "n": 5, "max_tokens": 1}, "max_waiting=3")
        server.json(COMPLETIONS, {"prompt": "a", "n": 4, "max_tokens": 1})
    config = EngineConfig(max_waiting=3, max_waiting_tokens=10)
    many = [Request(prompt=(1,) * 6, max_new_tokens=1)] * 4
    config.check_together(many[:1]), config.check_together([Request(prompt=(1,) * 60, max_new_tokens=1)])
    for count, limit in ((2, "max_waiting_tokens=10"), (4, "max_waiting=3")):
        with refused(ConfigError, limit):
            config.check_together(many[:count])


# --- bodies, files and connections ------------------------------------------------------------------------------------


def test_requests_without_a_key_are_refused_before_reading_the_body():
    with serving(FakeEngine(), LETTERS, api_keys=("right",)) as server, server.connect() as link:
        link.sendall(head(10))
        assert b" 401 " in link.recv(100)[:20]


def test_connections_beyond_the_limit_are_refused():
    with serving(FakeEngine(), LETTERS, ServerConfig(limit_concurrency=3)) as server:
        links = [server.connect() for _ in range(2)]
        for link in links:
            link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in link.recv(100)[:20]
        assert server.call("/health")[0] == 503
        for link in links:
            link.close()
        while server.call("/health")[0] == 503:
            pass


def test_api_keys_do_not_share_cached_prefixes():
    with serving(FakeEngine(), LETTERS, api_keys=("a", "b")) as server:
        for key in ("a", "b", "a"):
            server.json(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, Authorization=f"Bearer {key}")
        salts = [request.cache_salt for request in server.engine.seen]
        assert salts[0] == salts[2] != salts[1]


def test_open_file_limit_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_system_error_is_logged_as_server_error(monkeypatch, caplog):
    async def failing(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(PromptPreparer, "text", failing)
    with serving(FakeEngine(), LETTERS) as server, caplog.at_level("ERROR", "eqx_decoders.serving"):
        assert server.call(COMPLETIONS, {"prompt": "a"})[0] == 500
    assert "Too many open files" in caplog.text


# --- request fields ---------------------------------------------------------------------------------------------------


UNKNOWN = {"allowed_token_ids": [97], "bad_words": ["a"], "continue_final_message": True, "truncate_prompt_tokens": 1,
           "chat_template": "X", "grammar": 'root ::= "yes"', "json_schema": {"type": "object"}, "documents": [{}],
           "n_predict": 5, "anything": 0, "x" * 500: 1, "functions": [{}], "best_of": 2, "use_beam_search": True,
           "structured_outputs": {"structural_tag": "x"}, "response_format": {"type": "text", "other": 1},
           "store": True}  # fmt: skip
PATHS = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]},
         "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [97]}}  # fmt: skip


@pytest.mark.slow(fast=("/v1/completions",))
@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_refused_by_name(chats, path):
    for field, value in UNKNOWN.items():
        error = chats.error(path, PATHS[path] | {field: value}, field[:60])
        assert error["code"] == "unsupported_parameter" and error["param"]
        assert len(error["message"]) < 300
    assert chats.call(path, PATHS[path] | dict.fromkeys(UNKNOWN))[0] == 200  # null means an absent field


def test_accepts_neutral_fields_of_other_servers(chats):
    more = {"best_of": 1, "suffix": "", "use_beam_search": False, "parallel_tool_calls": True, "metadata": {"a": "b"},
            "spaces_between_special_tokens": True, "service_tier": "auto", "documents": [], "store": False}  # fmt: skip
    for path in (COMPLETIONS, CHAT):
        assert chats.json(path, PATHS[path] | more | {"max_tokens": 1})["choices"]
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    assert chats.call(CHAT, PATHS[CHAT] | stream | {"max_tokens": 1})[0] == 200
    assert chats.json("/detokenize", chats.json("/tokenize", {"prompt": "a"}))["prompt"].endswith("a")


def test_tokenize_accepts_the_fields_of_a_chat():
    class VariablesTemplate(PlainTemplate):
        def render_many(self, conversations):
            return [Rendered(json.dumps(one.variables), None, []) for one in conversations]

    tool = {"type": "function", "function": {"name": "f"}}
    body = PATHS[CHAT] | {"tools": [tool], "chat_template_kwargs": {"thinking": True}}
    with serving(FakeEngine(), chat_frontend(chat=VariablesTemplate(source="tools"))) as server:
        server.json(CHAT, body | {"max_tokens": 1})
        assert server.json("/tokenize", body)["tokens"] == list(server.engine.seen[-1].prompt)
        for name in ("messages", "self"):
            wrong = body | {"chat_template_kwargs": {name: 1}}
            assert server.error(CHAT, wrong, name) == server.error("/tokenize", wrong)


def test_client_errors_have_status_400(chats):
    raw = b'{"prompt": "a", "guided_json": {"type": "number", "maximum": 1e999}}'
    chats.error(COMPLETIONS, None, "1e999", raw=raw)
    silent = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "b"},
    ]
    assert chats.json(CHAT, {"messages": silent, "max_tokens": 1})["choices"]
    assert chats.error(CHAT, {"messages": [{"role": "user", "content": None}]})["param"] == "messages[0].content"
    chats.json(COMPLETIONS, {"prompt": "a", "top_p": 0, "temperature": 1, "max_tokens": 1})
    sampling = chats.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, None)  # only the most likely token


def test_template_errors_do_not_contain_paths(tmp_path):
    template = ChatTemplate(source="{{ raise_exception('unsuitable') }}", where=str(tmp_path / "chat_template.jinja"))
    with serving(FakeEngine(), chat_frontend(chat=template)) as server:
        error = server.error(CHAT, PATHS[CHAT], "unsuitable")
    assert str(tmp_path) not in error["message"]


def test_clients_that_send_large_bodies_can_read_the_error():
    with serving(FakeEngine(), LETTERS, max_body_bytes=1000) as server:
        for size in (2000, 20_000_000):
            assert server.call(COMPLETIONS, raw=b"a" * size)[0] == 413
        assert server.call(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
