"""Test the settings and errors of the serve program. tests/serving/test_served_models.py serves models."""

import dataclasses
import logging
import resource
import socket
from importlib import util
from typing import Any

import pytest

from eqx_decoders.cli import serve
from eqx_decoders.inference.draft_model import DraftModel
from eqx_decoders.inference.drafters import PromptLookup
from eqx_decoders.inference.mtp_draft import MTPDrafter
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.serving.http.config import ApiConfig, ServerConfig
from tests.commands import ROOT, call
from tests.errors import assert_names


CHAT, GPT2 = (ROOT / "tests" / "fixtures" / name for name in ("chat_llama", "gpt2"))


@pytest.fixture(scope="module")
def text():
    return load_text_model(CHAT)


@dataclasses.dataclass
class ServedArguments:
    """Arguments that the program passes to the server."""

    engine: Any = None
    api: ApiConfig | None = None
    sock: socket.socket | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    adapters: dict[str, Any] = dataclasses.field(default_factory=dict)
    loaded: Any = None
    language: Any = None

    @property
    def server_config(self) -> ServerConfig:
        return self.options["server_config"]

    @property
    def address(self) -> tuple[str, int]:
        return self.sock.getsockname()[:2]


@pytest.fixture
def served_arguments(monkeypatch, text):
    """Replace loading, compilation and serving with fakes that record their arguments."""
    found = ServedArguments()

    class Engine(serve.Engine):
        def __init__(self, model, config):
            found.engine = config

        def load_adapter(self, name, parts) -> None:
            found.adapters[name] = parts

        def warm_up(self) -> None:
            pass

        def close(self) -> None:
            pass

    async def served(language, engine, config, sock, *, ready, **options) -> bool:
        found.api, found.sock, found.options, found.language = config, sock, options, language
        ready()
        return True

    def load(config):
        found.loaded = config
        return text

    monkeypatch.setattr(serve, "Engine", Engine)
    monkeypatch.setattr(serve, "serve", served)
    monkeypatch.setattr(serve, "load", load)
    monkeypatch.setattr(serve, "read_adapter", lambda base, directory: (base, directory))
    monkeypatch.delenv(serve.KEYS, raising=False)
    logs = [logging.getLogger(name) for name in ("eqx_decoders.serving", "uvicorn")]
    before = [(log.handlers, log.propagate, log.level) for log in logs]
    yield found
    for log, (handlers, propagate, level) in zip(logs, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


LOG = logging.getLogger("eqx_decoders.serving")
ONE_AHEAD = MTPDrafter(num_tokens=1)
# Flags, and their effect.
EFFECTS = {
    "model": (["--model", "x"], lambda found: found.loaded.model == found.api.name == "x"),
    "run_dir": (["--run-dir", "x"], lambda found: found.loaded.run_dir == found.api.name == "x"),
    "step": (["--step", "3"], lambda found: found.loaded.step == 3),
    "dtype": (["--dtype", "bfloat16"], lambda found: found.loaded.dtype == "bfloat16"),
    "mesh": (["--mesh.tensor", "2"], lambda found: found.loaded.mesh.tensor == 2),
    "quantize": (["--quantize", "int8"], lambda found: found.loaded.quantize == "int8"),
    "group_size": (["--quantize", "int4", "--group-size", "16"], lambda found: found.loaded.group_size == 16),
    "special_tokens_in_content": (
        ["--special-tokens-in-content"],
        lambda found: found.loaded.special_tokens_in_content and not found.language.chat.literal,
    ),
    "batch_invariant": (["--batch-invariant"], lambda found: found.engine.batch_invariant),
    "cache_dtype": (["--cache-dtype", "bfloat16"], lambda found: found.engine.cache_dtype == "bfloat16"),
    "cache_scale_block": (
        ["--cache-dtype", "int8", "--cache-scale-block", "8"],
        lambda found: found.engine.cache_dtype == CacheFormat(dtype="int8", scale_block=8),
    ),
    "page_size": (["--page-size", "32"], lambda found: found.engine.pages == PageConfig(page_size=32)),
    "num_pages": (["--page-size", "32", "--num-pages", "9"], lambda found: found.engine.pages.num_pages == 9),
    "draft": (["--draft", "prompt"], lambda found: found.engine.drafts == PromptLookup(num_tokens=2)),
    "draft_model": (["--draft-model", CHAT], lambda found: isinstance(found.engine.drafts, DraftModel)),
    "num_draft_tokens": (["--draft", "mtp", "--num-draft-tokens", "1"], lambda found: found.engine.drafts == ONE_AHEAD),
    "host": (["--host", "0.0.0.0"], lambda found: found.address[0] == "0.0.0.0"),
    "port": (["--port", "0"], lambda found: found.address[1] not in (0, 8000)),
    "served_name": (["--served-name", "me"], lambda found: found.api.name == "me"),
    "max_batch_size": (["--max-batch-size", "3"], lambda found: found.engine.max_batch_size == 3),
    "max_length": (["--max-length", "99"], lambda found: found.engine.max_length == found.api.max_length == 99),
    "prefill_chunk": (["--prefill-chunk", "16"], lambda found: found.engine.prefill_chunk == 16),
    "token_budget": (["--token-budget", "64"], lambda found: found.engine.token_budget == 64),
    "prefix_cache_bytes": (["--prefix-cache-bytes", "0"], lambda found: found.engine.prefix_cache_bytes == 0),
    "max_waiting": (["--max-waiting", "5"], lambda found: found.engine.max_waiting == 5),
    "max_waiting_tokens": (["--max-waiting-tokens", "7"], lambda found: found.engine.max_waiting_tokens == 7),
    "preempted_bytes": (["--preempted-bytes", "0"], lambda found: found.engine.preempted_bytes == 0),
    "adapter": (
        ["--adapter", "one=some/path", "--adapter", "two=a=b"],
        lambda found: (
            {name: path for name, (_, path) in found.adapters.items()} == {"one": "some/path", "two": "a=b"}
            and found.api.adapters == ("one", "two")
            and found.engine.max_adapters == 2
        ),
    ),
    "allow_adapter_loading": (
        ["--allow-adapter-loading", "--max-adapters", "1"],
        lambda found: found.options["read_adapter"]("x")[1] == "x" and found.adapters == {},
    ),
    "max_adapters": (["--max-adapters", "3"], lambda found: found.engine.max_adapters == 3),
    "max_adapter_rank": (["--max-adapter-rank", "64"], lambda found: found.engine.max_adapter_rank == 64),
    "adapter_targets": (["--adapter-targets", "*.query"], lambda found: found.engine.adapter_targets == ("*.query",)),
    "allow_priority": (["--allow-priority"], lambda found: found.api.allow_priority),
    "limit_concurrency": (["--limit-concurrency", "9"], lambda found: found.server_config.limit_concurrency == 9),
    "max_choices": (["--max-choices", "2"], lambda found: found.api.max_choices == 2),
    "max_body_bytes": (["--max-body-bytes", "1000"], lambda found: found.api.max_body_bytes == 1000),
    "tool_call_parser": (["--tool-call-parser", "hermes"], lambda found: found.api.tool_call_parser == "hermes"),
    "api_key": (["--api-key", "a", "--api-key", "b"], lambda found: found.api.api_keys == ("a", "b")),
    "allow_origin": (["--allow-origin", "*"], lambda found: found.options["allow_origins"] == ("*",)),
    "seed": (["--seed", "5"], lambda found: found.api.seed == 5),
    "drain_seconds": (["--drain-seconds", "2"], lambda found: found.server_config.drain_seconds == 2),
    "log_level": (["--log-level", "info"], lambda found: LOG.level == logging.INFO),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_every_setting_takes_effect(served_arguments, name):
    flags, effect = EFFECTS[name]
    out, _ = call("serve", *([] if name == "port" else ["--port", 0]), *flags)
    assert effect(served_arguments)
    assert_names(out, served_arguments.api.name, f"http://127.0.0.1:{served_arguments.address[1]}")


@pytest.mark.slow(fast=("keep",))
@pytest.mark.parametrize("kind, bits", [("keep", None), ("int8", 8)], ids=["keep", "int8"])
def test_quantize_flag_quantizes_matrices(kind, bits):
    found = serve.load(serve.ServeConfig(model=str(CHAT), quantize=kind)).model
    weights = quantized_weights(found)
    assert bool(weights) == (bits is not None)
    assert all(8 * node.values.dtype.itemsize == bits for node in weights.values())


def test_default_of_limit_concurrency_depends_on_the_queue(served_arguments):
    call("serve", "--port", 0)
    assert served_arguments.server_config.limit_concurrency == 1032  # 1024 queued requests, and 8 in the batch
    call("serve", "--port", 0, "--max-waiting", "4000", "--max-batch-size", "2")
    assert served_arguments.server_config.limit_concurrency == 4002


def test_limit_of_open_files_is_raised(served_arguments):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
        call("serve", "--port", 0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_quantization_group_size_is_reported(capsys):
    serve.load(serve.ServeConfig(model=str(CHAT), quantize="int4", group_size=8))
    assert_names(capsys.readouterr().err, "--quantize int4", "8")


def test_names_of_special_tokens_in_messages_are_text(served_arguments):
    call("serve", "--port", 0)
    assert "<|end|>" in served_arguments.language.chat.literal


def test_api_keys_are_read_from_the_environment(served_arguments, monkeypatch):
    monkeypatch.setenv(serve.KEYS, " one, two,")
    call("serve", "--port", 0, "--api-key", "zero")
    assert served_arguments.api.api_keys == ("zero", "one", "two")


def test_published_sampling_settings_are_the_defaults(served_arguments):
    call("serve", "--port", 0)
    assert (served_arguments.api.defaults.temperature, served_arguments.api.defaults.top_p) == (0.6, 0.9)
    assert served_arguments.api.vocab_size == 320


@pytest.mark.slow(fast=("run and model", "step", "large port", "negative port"))
@pytest.mark.parametrize(
    "arguments, code, named",
    [
        pytest.param(("--model", CHAT, "--run-dir", "runs/x"), 2, ["--model=", "--run-dir="], id="run and model"),
        pytest.param(("--model", CHAT, "--step", "3"), 2, ["--step=3", f"--model='{CHAT}'"], id="step"),
        pytest.param(("--port", "70000"), 2, ["--port=70000", "65535"], id="large port"),
        pytest.param(("--port", "-1"), 2, ["--port=-1"], id="negative port"),
        pytest.param(("--quantize", "int8", "--group-size", "32"), 2, ["--group-size=32"], id="group size"),
        pytest.param(("--max-length", "1"), 2, ["--max-length=1", "2"], id="length"),
        pytest.param(("--max-batch-size", "0"), 2, ["--max-batch-size=0"], id="batch size"),
        pytest.param(("--drain-seconds", "-1"), 2, ["--drain-seconds=-1"], id="drain"),
        pytest.param(("--draft", "prompt", "--draft-model", "x"), 2, ["--draft", "--draft-model"], id="drafts"),
        pytest.param(("--adapter", "path/alone"), 2, ["--adapter='path/alone'"], id="adapter"),
        pytest.param(
            ("--allow-adapter-loading",), 2, ["--allow-adapter-loading=True", "--max-adapters"], id="adapter loading"
        ),
        pytest.param(("--draft", "mtp", "--num-draft-tokens", "0"), 2, ["--num-draft-tokens=0"], id="draft tokens"),
        pytest.param(("--cache-scale-block", "8"), 2, ["--cache-scale-block=8", "int8", "bfloat16"], id="scale block"),
        pytest.param(("--num-pages", "5"), 2, ["--num-pages=5", "--page-size"], id="pages"),
        pytest.param(("--page-size", "48"), 2, ["--prefill-chunk=128", "--page-size=48"], id="page size"),
        pytest.param(("--distributed", "--mesh.fsdp", "-1"), 2, ["--distributed=True"], id="distributed"),
        pytest.param(("--distributed-timeout", "0"), 2, ["--distributed-timeout=0"], id="timeout"),
        pytest.param(("--port", "0", "--model", GPT2), 3, [GPT2, "tokenizer.json"], id="no tokenizer"),
        pytest.param(("--port", "0", "--model", "nothing/at/all"), 4, ["nothing/at/all"], id="no model"),
        pytest.param(("--port", "0", "--run-dir", ROOT), 2, [ROOT / "settings.json"], id="no run"),
    ],
)
def test_invalid_arguments_are_refused(arguments, code, named):
    _, err = call("serve", *arguments, code=code)
    assert_names(err, *named)


def test_exit_code_is_1_if_the_last_engine_step_hangs(monkeypatch, capsys):
    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)
    assert serve.exit_code_of(True) == 0
    with pytest.raises(SystemExit) as ended:
        serve.exit_code_of(False)
    assert ended.value.code == 1 and capsys.readouterr().err


def test_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, err = call("serve", "--model", CHAT, "--port", port, code=2)
    assert_names(err, f"--port={port}")


@pytest.mark.parametrize("package", ["tyro", "uvicorn"])
def test_missing_package_is_named(monkeypatch, package):
    known = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == package else known(name))
    _, err = call("serve", "--model", CHAT, "--port", 0, code=1)
    assert_names(err, package, "[serve]'")


def test_logs_a_warning_for_an_unknown_tool_call_format(caplog):
    def call_format(parser, source):
        return serve._call_format(parser, ChatTemplate(source=source))

    assert call_format("auto", "{{ tools }}") == "hermes"
    assert_names(caplog.text, "--tool-call-parser")
    caplog.clear()
    assert call_format("auto", "{{ tools }} <arg_key>") == "glm4_moe"
    assert call_format("auto", "{{ messages }}") is None
    assert (call_format("none", "{{ tools }}"), call_format("mistral", "{{ tools }}")) == (None, "mistral")
    assert not caplog.text
