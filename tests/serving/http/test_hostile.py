"""Invalid and hostile requests: each gets an informative error, and the server continues to serve."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest

from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.config import ServerConfig
from tests.errors import assert_names
from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import Running, chat_frontend, serving


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST = 200_000  # maximum bytes of a body
LARGE = 10**400


@pytest.fixture(scope="module")
def server():
    frontend = TextFrontend(tokenizer=ByteTokenizer(), stop_ids=(257,))
    times = ServerConfig(timeout_keep_alive=1, drain_seconds=0.5, shutdown_seconds=0.5)
    with serving(FakeEngine(), frontend, times, max_body_bytes=MOST) as running:
        yield running


@pytest.fixture(scope="module")
def chats():
    with serving(frontend=chat_frontend(), max_body_bytes=MOST) as running:
        yield running


def check_alive(server: Running) -> None:
    found = server.json(COMPLETIONS, dict(prompt="a", max_tokens=2, temperature=0))
    assert found["choices"][0]["text"] == "bc" and server.json("/health") == {"status": "ok"}


def error_message(server: Running, path: str, raw: bytes, codes=(400,)) -> str:
    """Send a body and return the error message, which must be short and in a well-formed error object."""
    status, _, content = server.call(path, raw=raw)
    error = json.loads(content)["error"]
    assert status in codes, (status, content[:300], raw[:100])
    assert set(error) == {"message", "type", "param", "code"} and 5 < len(error["message"]) < 600
    return error["message"]


# Bodies that are not JSON objects.
RAW = [
    b"", b"{", b"[]", b"null", b"5", b'"a"', b"{]", b'{"prompt"}', b"{'prompt': 'a'}", b'{"prompt": "a",}',
    b'{"prompt": "a"} x', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": ["a", "\\udfff"]}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": Infinity}',
    b'{"prompt": "a", "seed": -Infinity}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": 1e999}',
    b"[" * 100_000, b'{"prompt":' * 10_000, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b"\x00" * 100, b"\xef\xbb\xbf{}", b'{"prompt": "a"', b"--boundary\r\n", b"prompt=a", b"<xml/>", b'{"\\ud800": 1}',
]  # fmt: skip


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_refuses_bodies_that_are_not_objects(server, raw):
    error_message(server, COMPLETIONS, raw)


# For each field, invalid values.
WORDS = ["hot", True, [], {}, [1], "1"]
NUMBERS = [-1e300, 1e300, LARGE, -LARGE]
WRONG = {
    "prompt": [None, 5, True, {}, [], [[]], [None], [True], [-1], [10**9], [LARGE], [1.5], ["a", 5], [[1], []], [["a"]],
               [[1], [320]], ["a"] * 200],
    "max_tokens": [-1, 0, 10**9, LARGE, 1.5, *WORDS],
    "temperature": [-1, -1e-9, *NUMBERS, *WORDS],
    "top_p": [-1, 2, 1.0001, *NUMBERS, *WORDS],
    "top_k": [-2, 1.5, LARGE, *WORDS],
    "min_p": [-0.1, 1.1, *WORDS],
    "frequency_penalty": [3, -3, *WORDS],
    "presence_penalty": [3, -3, *WORDS],
    "repetition_penalty": [0, -1, *NUMBERS, *WORDS],
    "logit_bias": [[], "a", 5, {"a": 1}, {"-1": 1}, {"999": 1}, {"1": 101}, {"1": "a"}, {"1": True}, {"1.5": 1},
                   {"٣": 1}, {"1" * 5000: 1}, {"01": 1, "1": 1}, {str(n): 1 for n in range(320)}],
    "seed": [1.5, LARGE, 2**63, "a", True, []],
    "n": [0, -1, 1.5, 129, LARGE, *WORDS],
    "stop": ["", [""], [5], {}, 5, True, ["a"] * 17, ["a" * 5000], [["a"]], [None]],
    "stop_token_ids": ["a", 5, [-1], [320], ["1"], [True], [1] * 17, [LARGE]],
    "logprobs": [-1, 21, True, "1", 1.5, []],
    "min_tokens": [-1, 513, 1.5, "a", LARGE],
    "echo": [1, "true", []],
    "stream": [1, "true", [], {}],
    "stream_options": [5, [], {"include_usage": True}],
    "ignore_eos": ["a", 1],
    "priority": [1.5, "a", LARGE],
    "user": [5, [], "a" * 300],
    "cache_salt": [5, "a" * 300],
    "best_of": [2, "a"],
    "suffix": ["a"],
    "use_beam_search": [True],
    "prompt_logprobs": [1, [1]],
    "response_format": [5, "json", [], {"type": 5}, {"type": "json_schema", "json_schema": 5}],
    "guided_json": [5, [], "", "{", '["a"]', {"$ref": "file:///etc/passwd"}, {"type": 5}],
    "guided_regex": [5, "", "(", "(" * 10_000, "(?<=a)b", "\\p{Nope}"],
    "guided_choice": ["a", [], [5], [""], ["a"] * 1001],
    "guided_grammar": [5, "", "x", "start: (", "start: " + "(" * 5000, 'start: start "a"'],
    "model": [5, [], "x" * 10_000],
}  # fmt: skip
CASES = [(field, value) for field, values in WRONG.items() for value in values]


@pytest.mark.parametrize("field", WRONG)
def test_refuses_invalid_values_of_fields(server, field):
    for value in WRONG[field]:
        body = {"prompt": "a", **{field: value}}
        if field == "min_tokens":
            body["max_tokens"] = 5
        status, _, content = server.call(COMPLETIONS, body)
        assert status in (400, 404), (field, str(value)[:60], status, content[:300])
        error = json.loads(content)["error"]
        assert field.split(".")[0] in (error["message"] + str(error["param"])), (str(value)[:60], error)
        assert len(error["message"]) < 600
    check_alive(server)


def test_number_of_cases():
    assert len(CASES) + len(RAW) > 200


WELL = {"prompt": "a ü 😀", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": {"70": 1}, "n": 2}
BODY = json.dumps(WELL, ensure_ascii=False).encode()


def test_refuses_truncated_bodies(server):
    server.json(COMPLETIONS, WELL)
    for size in range(len(BODY)):
        error_message(server, COMPLETIONS, BODY[:size])


def test_bodies_with_a_changed_byte(server):
    """The request is answered or refused: some changed bodies are still valid."""
    pick = random.Random(0)
    statuses = set()
    for _ in range(60):
        broken = bytearray(BODY)
        broken[pick.randrange(len(BODY))] = pick.choice([pick.randrange(256), *b'"{}[],:-9e\\\0'])
        status, _, content = server.call(COMPLETIONS, raw=bytes(broken))
        statuses.add(status)
        assert status == 200 or set(json.loads(content)["error"]) == {"message", "type", "param", "code"}, broken
    assert statuses == {200, 400}
    check_alive(server)


STRANGE = [
    "\0", "\u202e abc", "e" + "\u0301" * 150, "\ufeff", "\ufffe\uffff", "👩\u200d👩\u200d👧" * 9, "\U0010ffff", "İ",
    "ﷺ" * 100, "\u2028", "\r\n\r\nHTTP/1.1 200 OK", "<script>alert(1)</script>", "{{ 7 * 7 }}", "{% raw %}",
    "%s%n%99999d", "'; DROP TABLE x", "<|end|>" * 20, "<|user|>", "data: [DONE]\n\n", "\x7f\x1b[2J",
    "٣", "\t" * 300, "ß" * 200,
]  # fmt: skip


@pytest.mark.slow
def test_unusual_unicode_texts(server, chats):
    """As a prompt, every text is answered. As a name or a format, it is accepted or refused with an error."""
    begin = {"max_tokens": 2, "temperature": 0}
    for text in STRANGE:
        assert server.json(COMPLETIONS, {"prompt": text, **begin})["usage"]["completion_tokens"] > 0
        assert server.json("/detokenize", server.json("/tokenize", {"prompt": text}))["prompt"].endswith(text)
        for field, codes in (("model", (404,)), ("guided_regex", (200, 400)), ("user", (200, 400))):
            status, _, content = server.call(COMPLETIONS, {"prompt": "a", **begin, field: text})
            assert status in codes, (field, text, content)
            assert status == 200 or 5 < len(json.loads(content)["error"]["message"]) < 600
    messages = [{"role": "user", "content": "".join(text[:9] for text in STRANGE)}]
    assert chats.json(CHAT, {"messages": messages, **begin})["choices"]
    messages[0]["role"] = "".join(text[:9] for text in STRANGE)
    error_message(chats, CHAT, json.dumps({"messages": messages}).encode())
    check_alive(server)


CHATS = [
    {}, {"messages": None}, {"messages": []}, {"messages": {}}, {"messages": "a"}, {"messages": [[]]},
    {"messages": [None]},
    {"tools": "a"}, {"tools": [5]}, {"tools": [{"type": "function"}]}, {"tool_choice": {"type": "function"}},
    {"functions": [{}]}, {"function_call": {"name": "f"}}, {"audio": {}}, {"modalities": ["audio"]},
    {"modalities": "text"},
    {"chat_template_kwargs": 5}, {"chat_template_kwargs": {"messages": []}}, {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21}, {"logprobs": 2}, {"max_completion_tokens": 0}, {"max_tokens": -5},
    {"add_generation_prompt": "a"}, {"prediction": {"type": "content"}},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_refuses_invalid_conversations(chats, number):
    body = {"messages": [{"role": "user", "content": "a"}]} if number > 6 else {}
    error_message(chats, CHAT, json.dumps(body | CHATS[number]).encode())


def test_urls_and_paths_of_files_are_not_opened(chats):
    for url in (
        "http://127.0.0.1:1/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png,abc",
        "data:;base64,%",
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        error_message(chats, CHAT, json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())


def test_unknown_paths_and_methods(server):
    for path, raw, codes in (
        ("/v1/completions/x", b"{}", (404,)), ("/../etc/passwd", b"{}", (404,)), ("/v1/models", b"{}", (405,)),
        ("/tokenize", b"{}", (400,)), ("/tokenize", b'{"prompt": 5}', (400,)),
        ("/detokenize", b'{"tokens": [-1]}', (400,)),
        ("/detokenize", b'{"tokens": "a"}', (400,)), ("/tokenize", b'{"messages": [5]}', (400,)),
        ("/" + "a" * 5000, b"{}", (404,)), ("/%00%ff", b"{}", (404,)),
    ):  # fmt: skip
        error_message(server, path, raw, codes)
    assert server.call("/v1/models/none")[0] == 404
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
        assert server.call(COMPLETIONS, method=method)[0] == 405
    check_alive(server)


# --- sizes and time ---------------------------------------------------------------------------------------------------


def test_refuses_large_bodies_and_prompts(server, chats):
    assert_names(error_message(server, COMPLETIONS, b'{"prompt": "' + b"a" * MOST + b'"}', (413,)), "200,000")
    error_message(server, COMPLETIONS, b'{"prompt": "' + b"a" * 20_000_000 + b'"}', (413,))
    assert_names(error_message(server, COMPLETIONS, b'{"prompt": "' + b"a" * 190_000 + b'"}'), "190,000")
    error_message(server, COMPLETIONS, json.dumps({"prompt": [97] * 600, "max_tokens": 1}).encode())
    error_message(chats, COMPLETIONS, b'{"prompt": "' + b"x " * 90_000 + b'"}')
    message = {"role": "user", "content": "a b " * 20_000}
    assert_names(error_message(chats, CHAT, json.dumps({"messages": [message]}).encode()), "512")
    check_alive(server)


def head(length: int | str = 5, more: str = "") -> bytes:
    kind = "Content-Type: application/json\r\n"
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{kind}Content-Length: {length}\r\n{more}\r\n".encode()


def read_all(link: socket.socket) -> bytes:
    """Read until the connection is closed."""
    parts = []
    with contextlib.suppress(OSError):
        while part := link.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_refuses_chunked_bodies_beyond_the_limit(server):
    with server.connect() as link:
        start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        link.sendall(f"{start}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(30):
            link.sendall(b"2710\r\n" + b"a" * 10_000 + b"\r\n")
        link.sendall(b"0\r\n\r\n")
        assert b" 413 " in read_all(link)[:20]


def test_idle_connections_are_closed_after_a_response(server):
    with server.connect() as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        begun = time.monotonic()
        assert read_all(link).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - begun < 6


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/2\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 3_000_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
        head("9" * 400),
        head("1e3"),
        b"\r\n" * 1000,
    ],
    ids=range(10),
)
def test_refuses_invalid_http(server, sent):
    with server.connect() as link:
        with contextlib.suppress(OSError):
            link.sendall(sent)
        link.settimeout(10)
        answer = read_all(link)
    assert answer == b"" or answer.split(b" ", 2)[1] in (b"400", b"413", b"431", b"404", b"405")
    check_alive(server)


def test_half_closed_and_cut_connections_are_cleaned_up(server):
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True}).encode()
    for cut in (10, len(head(len(body))), len(head(len(body))) + 5, 10_000):
        for close in (lambda link: link.shutdown(socket.SHUT_WR), lambda link: link.close()):
            with server.connect() as link:
                link.sendall((head(len(body)) + body)[:cut])
                close(link)
                if link.fileno() >= 0:
                    read_all(link)
    with server.connect() as link:  # pipelined: a second request before the first response
        link.sendall(2 * (head(len(body)) + body))
        link.recv(10)
    deadline = time.monotonic() + 5
    while server.engine.order:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check_alive(server)


@pytest.mark.slow
def test_client_that_reads_nothing_does_not_delay_others():
    engine = FakeEngine(per_step=50, max_length=60_000, seconds=0.005)
    frontend = TextFrontend(tokenizer=ByteTokenizer(), stop_ids=(257,))
    config = ServerConfig(drain_seconds=0.5, shutdown_seconds=0.5)
    with serving(engine, frontend, config, max_scores=1 << 21) as server, socket.socket() as link:
        body = json.dumps({"prompt": "a", "max_tokens": 10_000, "stream": True, "logprobs": 20}).encode()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", server.port))
        link.sendall(head(len(body)) + body)
        deadline = time.monotonic() + 20
        while engine.order or not engine.seen:  # until its slot is free
            assert time.monotonic() < deadline
            alive_before = time.monotonic()
            check_alive(server)
            assert time.monotonic() - alive_before < 5


def test_floods_are_refused_with_retry(server):
    server.engine.gate.clear()
    found: list[int] = []

    def ask() -> None:
        found.append(server.call(COMPLETIONS, {"prompt": "a", "max_tokens": 5})[0])

    threads = [threading.Thread(target=ask) for _ in range(60)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert server.call("/health")[0] == 200  # monitoring must still work
    server.engine.gate.set()
    for thread in threads:
        thread.join()
    assert set(found) == {200, 429} and found.count(200) >= 4
    check_alive(server)


def test_request_ids_of_clients_must_be_short_ascii_words(server):
    assert server.call("/health", x_request_id="my-id.1")[1]["x-request-id"] == "my-id.1"
    for name in ("a" * 65, "a b", "é", "<script>"):
        assert server.call("/health", x_request_id=name.encode("latin-1").decode("latin-1"))[1]["x-request-id"] != name
