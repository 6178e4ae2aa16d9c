"""Serving: one model continues the prompts of many requests; `python scripts/serve.py` is its HTTP server.

Answer requests
    `Engine` with an `EngineConfig` takes `Request`s with `SamplingParams` and returns a `RequestOutput` for each step,
    with `TokenScore`s. `Constraint` binds an answer to a form, `QueueFull` refuses a request, `EngineStats` counts.

Draw answers to train on
    `rollout` yields a `RolloutGroup` of `Rollout`s for each prompt. `Engine.load` gives the engine the weights of the
    next step, and `Engine.release` drops them before it.

Draft tokens, which one step verifies
    `PromptLookup`, `MTPDrafter`, `DraftModel`.

Share memory
    `PageConfig` lets slots take pages as they need them.

Run in an engine that owns the memory
    `run_with_caches`, `external_layers`, `external_logits`, `ExternalCall`. vLLM on TPU uses them
    (`serving.vllm_tpu`).

Answer over HTTP
    `serve` and `run_in_thread` with a `ServerConfig` and an `ApiConfig`; `create_frontend` makes the
    `TextFrontend` of a model, which turns texts into prompts.
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
