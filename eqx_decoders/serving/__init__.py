"""Inference engine with continuous batching, and an HTTP server with OpenAI's API (`python scripts/serve.py`).

Generate
    An `Engine` with an `EngineConfig` takes `Request`s with `SamplingParams`, and returns a `RequestOutput` per step
    and request, with `TokenScore`s. `Constraint` restricts the tokens of a completion. `QueueFull` is raised if too
    many requests wait. `EngineStats` has counters.

Sample completions for training
    `rollout` yields a `RolloutGroup` of `Rollout`s for each prompt. `Engine.load` replaces the weights of the engine,
    and `Engine.release` frees them before.

Decode speculatively
    `PromptLookup`, `MTPDrafter`, `DraftModel`.

Page the KV cache
    `PageConfig` allocates pages to slots as needed.

Run in an engine that owns the memory
    `run_with_caches`, `external_layers`, `external_logits`, `ExternalCall`. vLLM on TPU uses them
    (`serving.vllm_tpu`).

Serve over HTTP
    `serve` and `run_in_thread` with a `ServerConfig` and an `ApiConfig`. `create_frontend` creates the `TextFrontend`
    of a model, which converts texts to prompts.
"""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


if TYPE_CHECKING:
    from eqx_decoders.inference.draft_model import DraftModel as DraftModel
    from eqx_decoders.inference.drafters import PromptLookup as PromptLookup
    from eqx_decoders.inference.mtp_draft import MTPDrafter as MTPDrafter
    from eqx_decoders.layers.cache.engine_owned import ExternalCall as ExternalCall
    from eqx_decoders.layers.cache.paged import PageConfig as PageConfig
    from eqx_decoders.serving.engine.config import EngineConfig as EngineConfig
    from eqx_decoders.serving.engine.engine import Engine as Engine
    from eqx_decoders.serving.engine.request import (
        EngineStats as EngineStats,
        QueueFull as QueueFull,
        Request as Request,
        RequestOutput as RequestOutput,
    )
    from eqx_decoders.serving.engine.sampler import (
        Constraint as Constraint,
        SamplingParams as SamplingParams,
        TokenScore as TokenScore,
    )
    from eqx_decoders.serving.external_engine import (
        external_layers as external_layers,
        external_logits as external_logits,
        run_with_caches as run_with_caches,
    )
    from eqx_decoders.serving.frontend.prompts import (
        TextFrontend as TextFrontend,
        create_frontend as create_frontend,
    )
    from eqx_decoders.serving.http.config import ApiConfig as ApiConfig, ServerConfig as ServerConfig
    from eqx_decoders.serving.http.server import run_in_thread as run_in_thread, serve as serve
    from eqx_decoders.serving.rollouts import Rollout as Rollout, RolloutGroup as RolloutGroup, rollout as rollout

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "inference.draft_model": "DraftModel",
        "inference.drafters": "PromptLookup",
        "inference.mtp_draft": "MTPDrafter",
        "layers.cache.engine_owned": "ExternalCall",
        "layers.cache.paged": "PageConfig",
        "serving.http.config": "ApiConfig ServerConfig",
        "serving.engine.engine": "Engine",
        "serving.engine.config": "EngineConfig",
        "serving.external_engine": "external_layers external_logits run_with_caches",
        "serving.frontend.prompts": "TextFrontend create_frontend",
        "serving.engine.request": "EngineStats QueueFull Request RequestOutput",
        "serving.engine.sampler": "Constraint SamplingParams TokenScore",
        "serving.rollouts": "Rollout RolloutGroup rollout",
        "serving.http.server": "run_in_thread serve",
    },
)
