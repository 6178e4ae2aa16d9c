"""Adapters over HTTP: list them, request one by name, and load and drop them while the server runs."""

import functools

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.cli.serve import read_adapter
from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.huggingface.peft import save_peft
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.frontend.prompts import create_frontend
from eqx_decoders.serving.http.config import ApiConfig
from eqx_decoders.serving.http.server import bind, run_in_thread
from eqx_decoders.training.lora import merge_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.adapters import trained
from tests.compare import assert_array_equal
from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import CHAT, Running, serving


def reader(path: str) -> str:
    if path == "nowhere":
        raise ConversionError("nowhere does not exist.")
    return path


@pytest.fixture
def server():
    engine = FakeEngine()
    with serving(engine, read_adapter=reader, adapters=("first",)) as running:
        engine.loaded["first"] = "at the start"
        yield running


def names(server) -> list[tuple[str, str | None]]:
    return [(each["id"], each["parent"]) for each in server.json("/v1/models")["data"]]


def complete(server, model: str | None, code: int = 200):
    body = {"prompt": [1, 2, 3], "max_tokens": 2} | ({} if model is None else {"model": model})
    return server.json("/v1/completions", body, code=code)


def test_request_selects_the_adapter_by_model_name(server):
    assert names(server) == [("fake", None), ("first", "fake")]
    assert server.json("/v1/models/first")["parent"] == "fake"
    for model, adapter in ((None, None), ("fake", None), ("first", "first")):
        assert complete(server, model)["model"] == (model or "fake")
        assert server.engine.seen[-1].adapter == adapter
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "first"}
    assert server.json("/v1/chat/completions", chat)["model"] == "first"
    assert server.engine.seen[-1].adapter == "first"
    error = server.error("/v1/completions", {"prompt": [1], "model": "never"}, "'fake'", "'first'", code=404)
    assert error["code"] == "model_not_found"


def test_adapters_are_loaded_and_dropped(server):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    status, _, content = server.call(load, {"lora_name": "second", "lora_path": "here"})
    assert (status, content) == (200, b"Success: LoRA adapter 'second' added successfully.")
    assert names(server)[1:] == [("first", "fake"), ("second", "fake")] and server.engine.loaded["second"] == "here"
    assert complete(server, "second")["model"] == "second"
    for body, name in (
        ({"lora_name": "second", "lora_path": "there"}, "lora_name='second'"),
        ({"lora_name": "fake", "lora_path": "there"}, "lora_name='fake'"),
        ({"lora_name": "third", "lora_path": "nowhere"}, "nowhere"),
        ({"lora_name": "third", "lora_path": "too large"}, "third"),
        ({"lora_name": "third"}, "lora_path"),
    ):
        server.error(load, body, name)
    assert server.call(load, {"lora_name": "second", "lora_path": "there", "load_inplace": True})[0] == 200
    assert server.engine.loaded["second"] == "there" and len(names(server)) == 3
    assert server.call(unload, {"lora_name": "second"})[0] == 200
    assert names(server) == [("fake", None), ("first", "fake")] and server.engine.adapters == ("first",)
    complete(server, "second", 404)
    assert server.json(unload, {"lora_name": "second"}, code=404)["error"]["code"] == "model_not_found"


def test_loading_is_refused_unless_enabled():
    with serving() as server:
        for path, body in (("load", {"lora_name": "a", "lora_path": "b"}), ("unload", {"lora_name": "a"})):
            server.error(f"/v1/{path}_lora_adapter", body, "--allow-adapter-loading", code=404)
        assert server.engine.loaded == {}


@pytest.mark.slow
def test_adapter_from_a_directory_answers_as_the_merged_model(tmp_path):
    """With a real engine. The base model answers at the same time."""
    text = load_text_model(str(CHAT), "float32")
    adapted = trained(text.model, LoRAConfig(rank=2, targets=("*.query", "*.down")))
    save_peft(adapted, tmp_path / "adapter")
    engine = Engine(text.model, EngineConfig(max_batch_size=2, max_length=64, prefill_chunk=16, max_adapters=1))
    sock = bind("127.0.0.1", 0)
    config = ApiConfig(name="base", max_length=64, vocab_size=text.model.config.vocab_size)
    options = dict(frontend=create_frontend(text), engine=engine, config=config, sock=sock)
    stop = run_in_thread(**options, read_adapter=functools.partial(read_adapter, text.model))
    try:
        server = Running(sock.getsockname()[1], FakeEngine(), stop)
        body = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        server.call("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": str(tmp_path / "adapter")})
        for name, model in (("base", text.model), ("tuned", merge_lora(adapted))):
            got = server.json("/v1/completions", body | {"model": name})["choices"][0]["token_ids"]
            prompt = np.asarray([[5, 6, 7]], np.int32)
            want = ed.generate(model, prompt, max_new_tokens=5, sampler=ed.Greedy(), stop_ids=())
            assert got == np.asarray(jax.device_get(want))[0].tolist()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), text.model)
        parts = [read_adapter(base, str(tmp_path / "adapter")) for base in (text.model, shapes)]
        jax.tree.map(assert_array_equal, *parts)  # also without arrays
    finally:
        stop()
