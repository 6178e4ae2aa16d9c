"""`scripts/serve.py` with models that compute: its answers, many clients at once, lm-eval, and how it ends."""

import asyncio
import base64
import contextlib
import io
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.inference.text import Files, load_text_model
from eqx_decoders.io.tokenizer import load_tokenizer
from tests.commands import ENVIRONMENT, ROOT
from tests.encoders.directories import seeing_directory
from tests.serving.servers import CHAT, Running


openai = pytest.importorskip("openai")
LENGTH = 192


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def served(folder: Path, *flags: object):
    """The script, ready; killed if it has not ended."""
    port = free_port()
    options = ("--model", folder, "--served-name", "m", "--port", port, "--max-length", LENGTH, "--max-batch-size", 4)
    command = [sys.executable, ROOT / "scripts" / "serve.py", *options, *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT)
    process = subprocess.Popen(list(map(str, command)), **pipes)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line == f"serving m at http://127.0.0.1:{port}\n", (
            line,
            process.stderr.read()[-3000:] if not line else "",
        )
        yield process, Running(port, None, None)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server():
    with served(CHAT, "--prefill-chunk", 16) as (_, running):
        yield running


@pytest.fixture(scope="module")
def model():
    return ed.load_hf(CHAT, dtype="float32")


def solo(model, ids: list[int], new: int) -> list[int]:
    found = ed.generate(model, np.asarray([ids]), max_new_tokens=new, sampler=ed.Greedy(), stop_ids=())
    return np.asarray(found)[0].tolist()


@pytest.mark.slow
def test_answers_under_load_are_those_that_each_gets_alone(server, model):
    """Poisson arrivals of clients that stream, that do not, and that go away; nothing of anybody is lost or mixed."""
    pick = random.Random(0)
    begin, cases = [pick.randrange(3, 250) for _ in range(32)], []
    for _ in range(60):
        own = [pick.randrange(3, 250) for _ in range(pick.choice([1, 17, 40]))]
        cases.append((begin[: pick.choice([0, 32])] + own, pick.choice([1, 8, 24])))
    client = openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0)

    async def ask(number: int, ids: list[int], new: int):
        await asyncio.sleep(number * 0.02 + pick.expovariate(50))
        extra = {"return_token_ids": True, "ignore_eos": True}
        options = dict(model="m", prompt=ids, max_tokens=new, temperature=0, extra_body=extra)
        if number % 3 == 0:
            return (await client.completions.create(**options)).choices[0].token_ids
        stream, found = await client.completions.create(**options, stream=True), []
        async for chunk in stream:
            found += chunk.choices[0].token_ids
            if number % 5 == 0:
                await stream.close()
                return None
        return found

    async def all_of_them():
        return await asyncio.gather(*(ask(number, *case) for number, case in enumerate(cases)))

    for (ids, new), found in zip(cases, asyncio.run(all_of_them()), strict=True):
        assert found is None or found == solo(model, ids, new)
    deadline = time.monotonic() + 10
    while 'vllm:num_requests_running{model_name="m"} 0.0' not in server.call("/metrics")[2].decode():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def memory_of(process: subprocess.Popen) -> float:
    """Megabytes that a process holds."""
    rows = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) / 1e3 for row in rows if row.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_half_a_minute_of_everything_leaves_nothing_behind():
    """Clients stream, stop, ask for forms, make mistakes and go away; then nothing runs, and memory is as before."""
    with served(CHAT) as (process, server):
        end, errors = time.monotonic() + 30, []

        def ask(number: int) -> None:
            pick = random.Random(number)
            while time.monotonic() < end:
                body = dict(prompt=[pick.randrange(250) for _ in range(pick.randrange(1, 60))], max_tokens=60)
                more = [{}, {"stop": "a"}, {"n": 3}, {"guided_regex": "[a-d]*x"}, {"logprobs": 3, "echo": True}]
                more += [{"top_p": -1}, {"max_tokens": 10**6}, {"guided_regex": "("}, {"prompt": []}]
                body |= pick.choice(more)
                data, leaves = json.dumps(body | {"stream": pick.random() < 0.5}).encode(), pick.random() < 0.3
                if leaves:
                    kind = "Content-Type: application/json\r\n"
                    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}Content-Length: {len(data)}\r\n\r\n"
                    with server.connect() as link:
                        link.sendall(head.encode() + data)
                        time.sleep(pick.expovariate(20))
                    continue
                status = server.call("/v1/completions", raw=data)[0]
                if status not in (200, 400, 429):
                    errors.append((status, body))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(12)
        before = memory_of(process)
        for thread in threads:
            thread.join()
        assert not errors
        deadline = time.monotonic() + 10
        while 'vllm:num_requests_running{model_name="m"} 0.0' not in server.call("/metrics")[2].decode():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert memory_of(process) < before + 40
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_echoed_logprobs_are_those_of_the_model(server, model):
    import jax

    ids = [256, 40, 41, 99, 123, 7]
    body = dict(prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
    found = server.json("/v1/completions", body)["choices"][0]["logprobs"]
    logprobs = np.asarray(jax.nn.log_softmax(model(np.asarray([ids])).logits[0], axis=-1))
    expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    np.testing.assert_allclose(found["token_logprobs"][1:-1], expected, rtol=1e-4)
    best = [float(row.max()) for row in logprobs]
    np.testing.assert_allclose([max(top.values()) for top in found["top_logprobs"][1:]], best, rtol=1e-4)


@pytest.mark.slow
def test_drawn_answers_of_a_form_have_it(server):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = dict(messages=[{"role": "user", "content": "x"}], response_format=form, n=4, max_tokens=100, seed=3)
    for choice in server.json("/v1/chat/completions", body)["choices"]:
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"a"}
        else:
            assert choice["finish_reason"] == "length"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_answer_under_any_load(server):
    body = dict(prompt="def f(", max_tokens=12, temperature=1.0, seed=7)
    alone = server.json("/v1/completions", body)["choices"][0]["text"]
    many = server.json("/v1/completions", body | {"n": 6})["choices"]
    assert many[0]["text"] == alone and len({choice["text"] for choice in many}) > 1


@pytest.mark.slow
def test_pictures_are_seen(tmp_path):
    """What is sent as a data: URL becomes what the file becomes."""
    image = pytest.importorskip("PIL.Image")
    folder, file = seeing_directory(tmp_path / "model"), tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8)
    image.fromarray(pixels).save(file)
    text = load_text_model(folder, "float32")
    part = {"type": "image", "image": str(file)}
    prompt = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    ids, media = text.prepare(prompt, Files())
    expected = ed.generate(text.model, ids[None], max_new_tokens=6, sampler=ed.Greedy(), stop_ids=(), media=media)
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    body = dict(messages=[{"role": "user", "content": content}], max_tokens=6, temperature=0)
    body |= dict(return_token_ids=True, ignore_eos=True)
    with served(folder) as (_, server):
        found = server.json("/v1/chat/completions", body)["choices"][0]
        assert found["prompt_token_ids"] == ids.tolist() and found["token_ids"] == np.asarray(expected)[0].tolist()
        broken = base64.b64encode(io.BytesIO(b"no picture").getvalue()).decode()
        content[0]["image_url"]["url"] = f"data:image/png;base64,{broken}"
        error = server.json("/v1/chat/completions", body, code=400)["error"]["message"]
        assert "is no sound picture of a known format" in error
        content[0]["image_url"]["url"] = "https://example.org/a.png"
        assert "fetches no files" in server.json("/v1/chat/completions", body, code=400)["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_also_where_clients_hang(number):
    with served(CHAT, "--drain-seconds", 2) as (process, server), contextlib.ExitStack() as links:
        body = json.dumps(dict(prompt="a", max_tokens=LENGTH - 10, stream=True, ignore_eos=True)).encode()
        kind = "Content-Type: application/json\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}Content-Length: {len(body)}\r\n\r\n".encode()
        for sent in (head + body, head, b"GET /", b"", head + body):
            links.enter_context(server.connect()).sendall(sent)
        time.sleep(0.3)
        process.send_signal(number)
        begun = time.monotonic()
        assert process.wait(timeout=20) == 0
        assert time.monotonic() - begun < 15
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_lm_eval_scores_a_served_model(server, model):
    """Its local-completions, with the tokenizer asked over HTTP: the sums of log-probabilities are the model's."""
    import jax

    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        base_url=f"{server.url}/completions",
        model="m",
        tokenizer_backend="remote",
        num_concurrent=2,
        max_length=LENGTH - 1,
    )
    pairs = [("the quick", " brown fox"), ("a", " b c"), ("hello", " world")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    tokenizer = load_tokenizer(CHAT)
    for (context, text), (score, greedy) in zip(pairs, client.loglikelihood(asked), strict=True):
        ids, begin = tokenizer.encode(context + text).tolist(), len(tokenizer.encode(context))
        logprobs = np.asarray(jax.nn.log_softmax(model(np.asarray([ids])).logits[0], axis=-1))
        own = [float(logprobs[at - 1, ids[at]]) for at in range(begin, len(ids))]
        assert score == pytest.approx(sum(own), rel=1e-4)
        assert greedy == all(int(logprobs[at - 1].argmax()) == ids[at] for at in range(begin, len(ids)))
