"""`scripts/serve.py` with real models: answers, many concurrent clients, lm-eval, and shutdown."""

import asyncio
import base64
import contextlib
import importlib.util
import io
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.inference.text_model import Files, load_text_model
from eqx_decoders.io.text.tokenizer import load_tokenizer
from tests.commands import ENVIRONMENT, TEXT
from tests.compare import assert_allclose
from tests.encoders.directories import vision_directory
from tests.serving.processes import LENGTH, memory_of, served, until_idle
from tests.serving.servers import CHAT


openai = pytest.importorskip("openai")


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
def test_answers_under_load_equal_separate_requests(server, model):
    """Clients arrive as a Poisson process; some stream, and some disconnect."""
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
    until_idle(server)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mixed_load_of_30_seconds_does_not_leak():
    """Clients stream, use stop strings and grammars, send errors and disconnect.

    Afterwards no request runs, and memory has not grown.
    """
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
        until_idle(server)
        assert memory_of(process) < before + 40
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_echoed_logprobs_match_the_model(server, model):
    import jax

    ids = [256, 40, 41, 99, 123, 7]
    body = dict(prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
    found = server.json("/v1/completions", body)["choices"][0]["logprobs"]
    logprobs = np.asarray(jax.nn.log_softmax(model(np.asarray([ids])).logits[0], axis=-1))
    expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert_allclose(found["token_logprobs"][1:-1], expected, rtol=1e-4)
    best = [float(row.max()) for row in logprobs]
    assert_allclose([max(top.values()) for top in found["top_logprobs"][1:]], best, rtol=1e-4)


@pytest.mark.slow
def test_sampled_answers_match_the_schema(server):
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
def test_answer_depends_on_the_seed_and_not_on_the_load(server):
    body = dict(prompt="def f(", max_tokens=12, temperature=1.0, seed=7)
    alone = server.json("/v1/completions", body)["choices"][0]["text"]
    many = server.json("/v1/completions", body | {"n": 6})["choices"]
    assert many[0]["text"] == alone and len({choice["text"] for choice in many}) > 1


@pytest.mark.slow
def test_images_in_data_urls_equal_image_files(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder, file = vision_directory(tmp_path / "model"), tmp_path / "a.png"
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
        broken = base64.b64encode(io.BytesIO(b"no image").getvalue()).decode()
        content[0]["image_url"]["url"] = f"data:image/png;base64,{broken}"
        server.error("/v1/chat/completions", body, "image 1", "PNG")
        content[0]["image_url"]["url"] = "https://example.org/a.png"
        server.error("/v1/chat/completions", body, 'url="https://example.org/a.png"', "base64")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shuts_down_although_clients_hang(number):
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
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def lm_eval(folder: Path, url: str, tasks: dict[str, tuple[dict, list[dict]]]) -> tuple[dict, dict[str, list[dict]]]:
    """Run lm-eval on tasks, each a configuration and its documents, without downloads. Returns results and samples."""
    for name, (config, documents) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **where, **config}))  # JSON is valid YAML
    model = f"base_url={url}/completions,model=m,num_concurrent=2,max_length={LENGTH},eos_string=<|end|>"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", ",".join(tasks), "--include_path", str(folder), "--output_path", str(folder / "found")]
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    options: Any = dict(env=ENVIRONMENT | offline, cwd=folder, capture_output=True, text=True, timeout=300)
    done = subprocess.run([*command, "--log_samples"], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "found").rglob("results_*.json")
    files = {name: next((folder / "found").rglob(f"samples_{name}_*.jsonl")) for name in tasks}
    samples = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    return json.loads(results.read_text())["results"], samples


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: extra clients")
def test_lm_eval_results_match_the_model(server, model, tmp_path):
    """lm-eval's program uses the tokenizer over HTTP. Log-probabilities, texts and scores equal those of the model."""
    import jax

    tokenizer, count = load_tokenizer(CHAT), 12
    texts = [" ".join(TEXT.split()[at : at + 3 + at % 4]) for at in range(count)]
    choices = [["lazy dog", "the", f"{at}"][at % 3 :] + ["lazy dog", "the", f"{at}"][: at % 3] for at in range(count)]

    def score(context: str, more: str) -> tuple[float, bool]:
        ids, begin = tokenizer.encode(context + more).tolist(), len(tokenizer.encode(context))
        logprobs = np.asarray(jax.nn.log_softmax(model(np.asarray([ids])).logits[0], axis=-1))
        own = [float(logprobs[at - 1, ids[at]]) for at in range(begin, len(ids))]
        return sum(own), all(int(logprobs[at - 1].argmax()) == ids[at] for at in range(begin, len(ids)))

    scores = [[score(text, f" {choice}") for choice in own] for text, own in zip(texts, choices, strict=True)]
    best = [int(np.argmax([own[0] for own in each])) for each in scores]
    assert len(set(best)) == 3 and {greedy for each in scores for _, greedy in each} == {True, False}
    # half of the targets are the model's own continuations
    chosen = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices"}
    chosen |= {"doc_to_target": "target", "metric_list": [{"metric": "acc"}]}
    rows = [dict(text=texts[at], choices=choices[at], target=(best[at] + at % 2) % 3) for at in range(count)]
    greedy = [tokenizer.decode(solo(model, tokenizer.encode(text).tolist(), 12)) for text in texts]
    said = [text.split("e")[0] for text in greedy]
    written = {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}"}
    written |= {"generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "temperature": 0}}
    written |= {"metric_list": [{"metric": "exact_match"}]}
    targets = [own + "?" * (at % 2) for at, own in enumerate(said)]
    texts_of = [dict(text=text, target=target) for text, target in zip(texts, targets, strict=True)]
    assert said != greedy and len(set(said)) > 3  # different lengths
    results, samples = lm_eval(tmp_path, server.url, {"chosen": (chosen, rows), "written": (written, texts_of)})

    assert results["chosen"]["acc,none"] == 0.5 and results["written"]["exact_match,none"] == 0.5
    for row in samples["chosen"]:
        for (found,), (own, is_greedy) in zip(row["resps"], scores[row["doc_id"]], strict=True):
            assert float(found[0]) == pytest.approx(own, rel=1e-4) and str(found[1]) == str(is_greedy)
    assert {row["doc_id"]: row["resps"][0][0] for row in samples["written"]} == dict(enumerate(said))
