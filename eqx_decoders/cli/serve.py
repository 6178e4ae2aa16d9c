"""Serve a model over HTTP with OpenAI's API and a chat page.

    python scripts/serve.py --model Qwen/Qwen3-0.6B --port 8000 --max-batch-size 16 --max-length 8192
    python scripts/serve.py --run-dir runs/tiny
    python scripts/serve.py --model path/to/Llama-3.1-70B-Instruct --mesh.tensor 8 --api-key "$KEY" --host 0.0.0.0

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "What is a decoder?"}]}'

The server compiles all programs, and then prints its address; the chat page is at /. After SIGTERM or Ctrl-C it accepts
no new requests, finishes open requests within --drain-seconds, and exits with status 0. Without --api-key or
EQX_DECODERS_API_KEY (keys separated by commas), everyone who reaches the port is served.
"""

import asyncio
import dataclasses
import functools
import gc
import itertools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import jax

from eqx_decoders.cli import program
from eqx_decoders.cli.devices import Devices
from eqx_decoders.cli.model_source import ModelSource
from eqx_decoders.cli.setting_flags import flag_names, parse_flags
from eqx_decoders.core.malloc import keep_memory
from eqx_decoders.errors import AtLeast, ConfigError, NonNegativeFloat, PositiveInt, check, missing_package
from eqx_decoders.inference.draft_model import DraftModel
from eqx_decoders.inference.drafters import PromptLookup
from eqx_decoders.inference.mtp_draft import MTPDrafter
from eqx_decoders.inference.text_model import TextModel, load_text_model
from eqx_decoders.inference.unstack import unstack_in_place
from eqx_decoders.io.huggingface.generation_config import read_generation_config
from eqx_decoders.io.huggingface.peft import load_peft
from eqx_decoders.io.interrupt import Interrupt
from eqx_decoders.io.program_cache import keep_programs
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.output_parsing.formats import ToolFormatName, find_tool_format
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.quantize import GROUPED, QuantizationMode, group_sizes, quantize
from eqx_decoders.numerics.low_rank import low_rank_weights
from eqx_decoders.serving import Engine
from eqx_decoders.serving.engine.adapters import AdapterPairs, adapter_pairs
from eqx_decoders.serving.engine.config import EngineConfig, EngineLimits
from eqx_decoders.serving.engine.engine_weights import shape_of
from eqx_decoders.serving.frontend.prompts import create_frontend
from eqx_decoders.serving.http.config import ApiConfig, ServerConfig
from eqx_decoders.serving.http.server import address_of, bind, raise_file_limit, serve
from eqx_decoders.serving.scoring_engine import ScoringEngine
from eqx_decoders.sharding.axes import named_leaves


KEYS = "EQX_DECODERS_API_KEY"
PACKAGES = ("tyro", "starlette", "uvicorn", "prometheus_client", "llguidance", "msgspec")

BASIC = ("model", "run_dir", "host", "port", "max_batch_size", "max_length", "quantize", "api_key", "mesh.tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(ModelSource, EngineLimits):
    """Serve a model over HTTP."""

    quantize: Literal["keep", "none", QuantizationMode] = "keep"
    """Weight quantization. keep: as in the checkpoint; none: convert quantized weights to --dtype; otherwise quantize
    at startup (fp8_block: tiles of 128 x 128)."""
    group_size: PositiveInt | None = None
    """Quantization group size of int4 and nf4. None: the largest of 128 (nf4: 64), 64 and 32 that divides the
    matrix."""
    cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "float8_e4m3fn"] = "auto"
    """Dtype of the KV cache. auto: the dtype of activations. Dtypes of 4 and 8 bits have scales."""
    cache_scale_block: PositiveInt | None = None
    """Features of a head that share a scale of the KV cache, such as 32. None: all features of the head."""
    page_size: PositiveInt | None = None
    """Page size of the KV cache in tokens. Requests get pages as they need them. None: no pages; --max-length tokens
    for each slot."""
    num_pages: PositiveInt | None = None
    """Number of pages per layer. None: enough for --max-batch-size requests of --max-length tokens."""
    draft: Literal["none", "prompt", "mtp"] = "none"
    """Speculative decoding. prompt: prompt lookup; mtp: multi-token prediction."""
    draft_model: str | None = None
    """Draft model for speculative decoding, with the same vocabulary: a directory, or "org/name"."""
    num_draft_tokens: PositiveInt = 2
    """Number of draft tokens per step."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all addresses of this machine."""
    port: Annotated[int, AtLeast(0, maximum=65535)] = 8000
    """Port to listen on. 0: any free port."""
    served_name: str | None = None
    """Model name in the API. None: the name of --model or of the run directory."""
    adapter: tuple[str, ...] = ()
    """LoRA adapter as name=directory, in the format of PEFT. Requests select it by their `model`. Repeat the flag for
    several adapters."""
    allow_adapter_loading: bool = False
    """Let clients load adapters from directories of this machine and unload them (/v1/load_lora_adapter)."""
    batch_invariant: bool = False
    """Make completions independent of the other requests in a batch, to the last bit. Slower on CPUs for few
    requests."""
    allow_priority: bool = False
    """Let clients set the `priority` of requests. Requests with a higher priority preempt others."""
    max_choices: PositiveInt = ApiConfig.max_choices
    """Maximum number of completions per request: its prompts times n."""
    max_body_bytes: PositiveInt | None = None
    """Maximum size of a request body. None: 32 MB for models with images or audio, otherwise 4 MB, or 64 bytes per
    token of --max-length if that is more."""
    limit_concurrency: PositiveInt | None = None
    """Maximum number of open connections. Requests of further connections are answered with status 503. None: 1000, or
    the number of requests that may wait or run if that is more."""
    tool_call_parser: Literal["auto", "none"] | ToolFormatName = "auto"
    """Tool-call format of the model. auto: detected from the chat template; none: tool calls are returned as text."""
    special_tokens_in_content: bool = False
    """Tokenize names of special tokens in messages as special tokens, as transformers does. False: as plain text."""
    api_key: tuple[str, ...] = ()
    """API key that clients must send. Repeat the flag for several keys. Other users can see flags in the process list;
    the environment variable EQX_DECODERS_API_KEY is safer."""
    allow_origin: tuple[str, ...] = ()
    """Origin of web pages that may call the server, such as https://example.org (CORS). Repeat the flag for several
    origins. "*": all."""
    seed: int | None = None
    """Seed of requests without a seed. None: a random seed for each request."""
    drain_seconds: NonNegativeFloat = ServerConfig.drain_seconds
    """Time in seconds that open requests have to finish at shutdown."""
    log_level: Literal["error", "warning", "info"] = "warning"
    """Log level. info: one line per request."""

    def __post_init__(self):
        super().__post_init__()
        if self.distributed:
            raise ConfigError("distributed=True is not supported for serving: a single process uses all its devices.")
        if self.group_size is not None and self.quantize not in GROUPED:
            modes = " or ".join(map(repr, GROUPED))
            raise ConfigError(
                f"group_size={self.group_size} cannot be combined with quantize={self.quantize!r}. It requires "
                f"quantize={modes}."
            )
        if self.draft != "none" and self.draft_model is not None:
            raise ConfigError(
                f"draft={self.draft!r} and draft_model={self.draft_model!r} cannot be combined. Use one of them."
            )
        if self.num_pages is not None and self.page_size is None:
            raise ConfigError(f"num_pages={self.num_pages} requires page_size, such as 64.")
        for entry in self.adapter:
            name, _, directory = entry.partition("=")
            if not name or not directory:
                raise ConfigError(f"adapter={entry!r} must be a name and a directory, as name=directory.")
        if self.allow_adapter_loading and self.max_adapters == 0:
            raise ConfigError("allow_adapter_loading=True requires max_adapters, such as 4.")
        self.engine()

    @property
    def adapters(self) -> dict[str, str]:
        """Directories of adapters by their names."""
        return {name: directory for name, _, directory in (entry.partition("=") for entry in self.adapter)}

    def engine(self, draft_model: Decoder | None = None) -> EngineConfig:
        """Return the settings of the engine. `draft_model`: the loaded draft model."""
        kinds = {"prompt": PromptLookup, "mtp": MTPDrafter}
        drafts = kinds[self.draft](num_tokens=self.num_draft_tokens) if self.draft in kinds else None
        if draft_model is not None:
            drafts = DraftModel(model=draft_model, num_tokens=self.num_draft_tokens)
        pages = None if self.page_size is None else PageConfig(page_size=self.page_size, num_pages=self.num_pages)
        limits: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineLimits)}
        limits["max_adapters"] = max(self.max_adapters, len(self.adapter))
        cache_dtype: str | CacheFormat | None = None if self.cache_dtype == "auto" else self.cache_dtype
        if self.cache_scale_block is not None:
            cache_dtype = CacheFormat(dtype=cache_dtype or "bfloat16", scale_block=self.cache_scale_block)
        modes: dict[str, Any] = dict(cache_dtype=cache_dtype, pages=pages, batch_invariant=self.batch_invariant)
        return EngineConfig(**limits, **modes, drafts=drafts)

    @property
    def name(self) -> str:
        """Name of the model in the API."""
        return self.served_name or self.model or self.run_dir or "runs/tiny"


@program(lambda: flag_names(ServeConfig) | engine_flags())
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Serve with the settings of the command line until a signal. Returns the exit code."""
    for package in PACKAGES:
        _require(package)
    config = parse(args, prog)
    log_to_stderr(config.log_level)
    raise_file_limit()
    sock = bind(config.host, config.port)  # before the weights are loaded, so that errors are reported at once
    keep_memory()
    keep_programs()
    text = load(config)
    adapters = {name: read_adapter(text.model, directory) for name, directory in config.adapters.items()}
    base, text = text.model, dataclasses.replace(text, model=unstack_in_place(text.model))
    if text.model is not base:  # its arrays are deleted
        base = jax.tree.map(shape_of, base)
    engine = make_engine(config, text.model, adapters)
    with StatusLine("compiling"):
        engine.warm_up()
    gc.freeze()  # the garbage collector need not scan the model and the programs
    with Interrupt() as interrupt:
        ended = asyncio.run(
            serve(
                create_frontend(text, special_tokens_in_content=config.special_tokens_in_content),
                engine,
                api_config(config, text),
                sock,
                should_stop=lambda: interrupt.requested,
                ready=lambda: print(f"serving {config.name} at {address_of(sock)}", flush=True),
                allow_origins=config.allow_origin,
                server_config=server_config(config),
                read_adapter=functools.partial(read_adapter, base) if config.allow_adapter_loading else None,
            )
        )
    engine.close()
    return exit_code_of(ended)


def exit_code_of(ended: bool) -> int:
    """Return the exit code 0 if the engine's last step has ended.

    Otherwise, terminate the process with the exit code 1: a regular exit would wait for the thread of the step.
    """
    if not ended:
        print("error: the last engine step is still running; exiting without waiting for it", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    return 0


def log_to_stderr(level: str) -> None:
    """Write the log of the server to standard error, independently of the logs of other packages."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("eqx_decoders.serving", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level.upper())


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> ServeConfig:
    """Parse the arguments of a command line. Exits with status 2 for unknown arguments."""
    import tyro

    repeated = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]  # --api-key a --api-key b
    return parse_flags(
        ServeConfig(),
        titles={ServeConfig: "server", EngineLimits: "engine", ModelSource: "model", Devices: "devices"},
        first=BASIC,
        types=dict.fromkeys(("api_key", "allow_origin", "adapter"), repeated),
        args=args,
        prog=prog,
        description=__doc__,
    )


def load(config: ServeConfig) -> TextModel:
    """Load the model and the tokenizer."""
    text = config.load("keep" if config.quantize == "keep" else "expand")
    stops = [read_generation_config(directory).stop_ids for directory in config.adapters.values()]
    text = dataclasses.replace(text, stops=tuple(sorted({*text.stop_ids, *itertools.chain.from_iterable(stops)})))
    if config.quantize in ("keep", "none"):
        return text
    model = quantize(text.model, config.quantize, group_size=config.group_size)
    if sizes := group_sizes(model):
        groups = ", ".join(f"{size} rows in {count} weights" for size, count in sizes.items())
        print(f"--quantize {config.quantize}: groups of {groups}", file=sys.stderr, flush=True)
    return dataclasses.replace(text, model=model)


def read_adapter(base: Decoder, directory: str) -> dict[str, AdapterPairs]:
    """Read an adapter of PEFT for a model. DoRA and PiSSA adapters require the arrays of the model, not only shapes.

    Raises ConfigError for an adapter that replaces weights of the model: requests with different adapters share them.
    """
    adapted = load_peft(base, directory)
    adapted_weights = low_rank_weights(adapted)
    base_leaves = named_leaves(base)
    for path, leaf in named_leaves(adapted).items():
        is_low_rank = any(path.startswith(f"{weight}.") for weight in adapted_weights)
        if not is_low_rank and base_leaves.get(path) is not leaf:
            raise ConfigError(
                f"adapter={directory!r} replaces the weight {path} (modules_to_save or bias in adapter_config.json). "
                "The server supports only low-rank updates of weights in adapters. Merge the adapter into the model "
                "and serve the merged model."
            )
    return adapter_pairs(adapted)


def make_engine(config: ServeConfig, model: Decoder, adapters: Mapping[str, Any]) -> Engine | ScoringEngine:
    """Create the engine of a model: `ScoringEngine` for reward models and classifiers, otherwise `Engine`."""
    if model.config.scores is not None:
        check(config.max_adapters == 0 and not adapters, "adapter: a model that scores texts cannot have adapters.")
        return ScoringEngine(model, config)
    engine = Engine(model, config.engine(load_draft_model(config)))
    for name, parts in adapters.items():
        engine.load_adapter(name, parts)
    return engine


def load_draft_model(config: ServeConfig) -> Decoder | None:
    """Load the draft model, if there is one."""
    if config.draft_model is None:
        return None
    return unstack_in_place(load_text_model(config.draft_model, config.weights_dtype).model)


def server_config(config: ServeConfig) -> ServerConfig:
    """Return the limits and timeouts of the HTTP server."""
    max_requests = config.max_waiting + config.max_batch_size
    limit = config.limit_concurrency or max(ServerConfig.limit_concurrency, max_requests)
    return ServerConfig(limit_concurrency=limit, drain_seconds=config.drain_seconds)


def api_config(config: ServeConfig, text: TextModel) -> ApiConfig:
    """Return the limits and defaults of the API."""
    keys = tuple(key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip())
    return ApiConfig(
        name=config.name,
        adapters=tuple(config.adapters),
        max_length=config.max_length,
        vocab_size=text.model.config.vocab_size,
        scores=text.model.config.scores,
        max_logprobs=EngineConfig.max_logprobs,
        max_bias=EngineConfig.max_logit_bias,
        max_choices=config.max_choices,
        max_body_bytes=config.max_body_bytes or body_bytes(text, config.max_length),
        allow_priority=config.allow_priority,
        tool_call_parser=_call_format(config.tool_call_parser, text.chat),
        api_keys=(*config.api_key, *keys),
        seed=config.seed,
        defaults=text.model.generation_config,
    )


def _call_format(parser: Any, chat: ChatTemplate | None) -> ToolFormatName | None:
    """Return the tool-call format for `--tool-call-parser`; None: tool calls are returned as text.

    Logs a warning if the chat template takes tools and its tool-call format is unknown.
    """
    if parser != "auto":
        return None if parser == "none" else parser
    if chat is None or "tools" not in chat.source_with_tools:
        return None
    found = find_tool_format(chat.source_with_tools)
    if found is None:
        logging.getLogger("eqx_decoders.serving").warning(
            "%s: the chat template takes tools, but its tool-call format is unknown. Tool calls are parsed in the"
            " format 'hermes'. Select the format with --tool-call-parser.",
            chat.where,
        )
    return found or "hermes"


def body_bytes(text: TextModel, max_length: int) -> int:
    """Return the default of `max_body_bytes`."""
    return max(4_000_000 if text.model.config.media is None else ApiConfig.max_body_bytes, 64 * max_length)


def engine_flags() -> dict[str, str]:
    """Return the flags of settings of the engine and the API by their names in error messages."""
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    pairs = ((group.__name__, field.name) for group in (EngineConfig, ApiConfig) for field in dataclasses.fields(group))
    flags = {f"{group}.{name}": f"--{name.replace('_', '-')}" for group, name in pairs if name in names}
    flags |= {"ApiConfig.api_keys": "--api-key", "ApiConfig.name": "--served-name"}
    flags |= {f"{name}.num_tokens": "--num-draft-tokens" for name in ("PromptLookup", "MTPDrafter")}
    pages = {f"PageConfig.{name}": f"--{name.replace('_', '-')}" for name in ("page_size", "num_pages")}
    flags |= {"CacheFormat.scale_block": "--cache-scale-block", "CacheFormat.dtype": "--cache-dtype"}
    return flags | pages | {"pages.page_size": "--page-size"}


def _require(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise missing_package(package.replace("_", "-"), "serve")
