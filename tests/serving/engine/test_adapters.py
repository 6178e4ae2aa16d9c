"""Several adapters in one batch: each answer equals the answer with that adapter alone; loading never recompiles."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.inference.drafters import PromptLookup
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.huggingface.peft import load_peft
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.quantize import quantize
from eqx_decoders.numerics.quantized_weight import whole_weights
from eqx_decoders.serving.engine.adapters import adapter_pairs
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.lora import add_lora, merge_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.compare import assert_allclose
from tests.errors import refused


BASE = Path(__file__).parents[2] / "fixtures" / "peft_dora"
EVERY = ("*.query", "*.key", "*.value", "*.out", "*.gate", "*.up", "*.down")
PLAIN = LoRAConfig(rank=2, targets=EVERY, rank_pattern=(("*.up", 3),))
PISSA = LoRAConfig(rank=2, targets=("*.value", "*.down"), init="pissa")
CONFIG = EngineConfig(max_batch_size=4, max_length=48, prefill_chunk=16, max_adapters=2, max_adapter_rank=4)
PROMPTS = tuple(tuple(range(1 + index, 6 + 3 * index)) for index in range(4))


def noisy(model, seed: int = 0):
    """Add noise to the low-rank pairs of a model, as if they had been trained."""
    draws = np.random.default_rng(seed)
    own = {name: leaf for name, leaf in named_leaves(model).items() if ".lora_" in name}
    return replaced(
        model, {name: leaf + draws.normal(0, 0.3, leaf.shape).astype(leaf.dtype) for name, leaf in own.items()}
    )


@pytest.fixture(scope="module")
def base():
    return load_hf(BASE / "base")


@pytest.fixture(scope="module")
def adapted(base):
    """Return models with adapters:

    LoRA of two ranks, a PEFT adapter with magnitudes (DoRA), and PiSSA on some weights.
    """
    return {
        "lora": noisy(add_lora(base, PLAIN, key=jax.random.key(0))),
        "dora": load_peft(base, BASE / "adapter"),
        "pissa": noisy(add_lora(base, PISSA, key=jax.random.key(0))),
    }


@pytest.fixture(scope="module")
def engine(base):
    engine = Engine(base, CONFIG)
    engine.warm_up()
    return engine


@pytest.fixture(autouse=True)
def drop_all_adapters(request):
    """Drop all adapters after each test."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        while engine.has_work:
            engine.step()
        for name in engine.adapters:
            engine.drop_adapter(name)


def ask(adapter: str | None = None, prompt=PROMPTS[1], **options) -> Request:
    return Request(prompt=prompt, adapter=adapter, **dict(max_new_tokens=6, logprobs=0) | options)


def answers(engine: Engine, requests: list[Request]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the tokens and log-probabilities of each request."""
    ids = [engine.submit(request) for request in requests]
    tokens, scores = (dict.fromkeys(ids, ()) for _ in range(2))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.tokens
            scores[output.request_id] += tuple(score.logprob for score in output.scores)
    return [(tokens[each], scores[each]) for each in ids]


@pytest.mark.slow
def test_batch_of_several_adapters_equals_separate_requests(base, adapted, engine):
    """Greedy tokens equal those of the merged models, and results are bit-equal to a batch with one adapter."""
    engine.load_adapter("lora", adapted["lora"])
    engine.load_adapter("dora", adapted["dora"])
    requests = [ask(name, prompt) for name, prompt in zip(("lora", None, "dora", "lora"), PROMPTS, strict=True)]
    together = answers(engine, requests)
    engine.clear_prefix_cache()
    for request, (tokens, scores) in zip(requests, together, strict=True):
        ((alone, their_scores),) = answers(engine, [request])
        assert (alone, their_scores) == (tokens, scores)
        model = base if request.adapter is None else merge_lora(adapted[request.adapter])
        ids = jnp.asarray([request.prompt + tokens])
        log_probs = jax.nn.log_softmax(model(ids).logits[0, len(request.prompt) - 1 : -1])
        assert tokens == tuple(np.argmax(log_probs, axis=-1).tolist())
        assert_allclose(scores, log_probs[np.arange(6), list(tokens)], atol=2e-5)
    assert len({tokens for tokens, _ in together}) == 4


@pytest.mark.slow
def test_base_model_is_equal_in_an_engine_without_adapter_slots(base, adapted, engine):
    engine.load_adapter("lora", adapted["lora"])
    bare = Engine(base, dataclasses.replace(CONFIG, max_adapters=0))
    ((tokens, scores),) = answers(bare, [ask()])
    (mine, _) = answers(engine, [ask(), ask("lora")])
    assert mine[0] == tokens
    assert_allclose(mine[1], scores, atol=1e-6)


@pytest.mark.slow
def test_loading_does_not_compile_and_slots_are_freed_after_the_last_answer(adapted, engine):
    """Open requests of a dropped adapter are completed. A new adapter with the same name is a different adapter."""
    parts = {name: adapter_pairs(model) for name, model in adapted.items()}
    engine.load_adapter("one", parts["lora"])
    engine.load_adapter("two", parts["pissa"])
    want = [answer for (answer,) in ([each] for each in answers(engine, [ask("one"), ask("two")]))]
    with refused(ConfigError, "'three'", "max_adapters=2", "'one'", "'two'"):
        engine.load_adapter("three", parts["dora"])
    late, tokens = engine.submit(ask("one", max_new_tokens=20)), ()
    tokens += sum((output.tokens for output in engine.step()), ())
    compiled = dict(engine._runner._programs)
    engine.drop_adapter("one")
    assert engine.adapters == ("two",)
    for request in (ask("one"), ask("never")):
        with refused(ConfigError, f"adapter={request.adapter!r}", "'two'"):
            engine.submit(request)
    with refused(ConfigError, "max_adapters=2", "'one'", "'two'"):
        engine.load_adapter("one", parts["dora"])
    while engine.has_work:
        tokens += sum((output.tokens for output in engine.step() if output.request_id == late), ())
    assert tokens[:6] == want[0][0] and len(tokens) == 20
    engine.load_adapter("one", parts["dora"])
    other, same = answers(engine, [ask("one"), ask("two")])
    assert other[0] != want[0][0] and same == want[1]
    assert engine._runner._programs == compiled


@pytest.mark.slow
def test_prefix_cache_is_separate_for_each_adapter(adapted, engine):
    prompt, parts = tuple(range(1, 31)), adapter_pairs(adapted["lora"])
    engine.load_adapter("one", parts)

    def cached(name):
        engine.submit(ask(name, prompt))
        outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
        return max(output.cached_tokens for output in outputs)

    engine.clear_prefix_cache()
    assert [cached("one"), cached(None), cached("one"), cached(None)] == [0, 0, 16, 16]
    engine.drop_adapter("one")
    engine.load_adapter("one", parts)
    assert cached("one") == 0


@pytest.mark.slow
def test_preempted_requests_keep_their_adapters(adapted, engine):
    engine.load_adapter("lora", adapted["lora"])
    (want,) = answers(engine, [ask("lora", max_new_tokens=12)])
    slow = engine.submit(ask("lora", max_new_tokens=12))
    tokens: tuple[int, ...] = ()
    for count in range(200):
        if count == 3:
            for index in range(4):
                engine.submit(ask(None, PROMPTS[index], priority=1))
        tokens += sum((output.tokens for output in engine.step() if output.request_id == slow), ())
        if not engine.has_work:
            break
    assert engine.counts().preemptions > 0 and tokens == want[0]


@pytest.mark.slow
def test_refuses_incompatible_adapters(base, adapted, engine):
    large = noisy(add_lora(base, LoRAConfig(rank=5, targets=("*.query",)), key=jax.random.key(0)))
    with refused(ConfigError, "'large'", "mixer.query", "rank 5", "max_adapter_rank=4"):
        engine.load_adapter("large", large)
    with refused(ConfigError, "Engine.load_adapter", "load_peft"):
        engine.load_adapter("none", base)
    engine.load_adapter("dora", adapted["dora"])
    with refused(ConfigError, "Engine.load_adapter", "'dora'"):
        engine.load_adapter("dora", adapted["dora"])
    with refused(ConfigError, "Engine.load", "'dora'", "DoRA"):
        engine.load(base)
    few = Engine(base, dataclasses.replace(CONFIG, adapter_targets=("*.query",)))
    with refused(ConfigError, "'lora'", "mixer.key", "EngineConfig.adapter_targets"):
        few.load_adapter("lora", adapted["lora"])
    with refused(ConfigError, "'lora'", "EngineConfig.max_adapters"):
        Engine(base, dataclasses.replace(CONFIG, max_adapters=0)).load_adapter("lora", adapted["lora"])
    with refused(ConfigError, "EngineConfig.adapter_targets", "'*.nothing'", "mixer.query"):
        Engine(base, dataclasses.replace(CONFIG, adapter_targets=("*.nothing",)))


# --- every kind of engine ---


def greedy(model, request: Request) -> tuple[int, ...]:
    """Return the greedy tokens of a model with merged weights. The top logit must lead by a clear margin."""
    prompt = jnp.asarray([request.prompt], jnp.int32)
    return tuple(np.asarray(ed.generate(model, prompt, max_new_tokens=6, sampler=ed.Greedy(), stop_ids=()))[0].tolist())


def check(base, targets: tuple[str, ...], model=None, **changes) -> None:
    """Check a batch of two adapters and the base model against the merged models."""
    kinds = {name: LoRAConfig(rank=2, targets=targets, dora=name == "dora") for name in ("plain", "dora")}
    adapted = {name: noisy(add_lora(base, lora, key=jax.random.key(0)), 3) for name, lora in kinds.items()}
    engine = Engine(base if model is None else model, dataclasses.replace(CONFIG, **changes))
    for name, one in adapted.items():
        engine.load_adapter(name, one)
    requests = [ask(name, prompt) for name, prompt in zip(("plain", None, "dora", "plain"), PROMPTS, strict=True)]
    for request, (tokens, _) in zip(requests, answers(engine, requests), strict=True):
        assert tokens == greedy(merge_lora(adapted[request.adapter]) if request.adapter else base, request)


ENGINES = {
    "pages": dict(pages=PageConfig(page_size=16)),
    "few rows": dict(batch_invariant=False),
    "drafts": dict(drafts=PromptLookup(num_tokens=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_adapters_with_other_engine_settings(base, kind):
    check(base, EVERY, **ENGINES[kind])


@pytest.mark.slow
def test_adapters_of_unstacked_layers(base, monkeypatch):
    monkeypatch.setattr("eqx_decoders.inference.unstack.MIN_BYTES", 0)
    check(base, EVERY)


@pytest.mark.slow
def test_adapters_of_quantized_weights(base):
    check(quantize(base, "int8"), EVERY)


@pytest.mark.slow
def test_adapters_of_sharded_weights():
    base = load_hf(BASE.parent / "peft_llama" / "base")
    check(base, EVERY, base.place(ed.Layout.create(data=2, fsdp=2, tensor=2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek3_groups", "qwen3_next", "gemma3_pattern", "gpt2"])
def test_adapters_of_other_architectures(name):
    """Both forms of latent attention, with experts; recurrent layers; scans over several blocks; biases."""
    base = load_hf(BASE.parent / name)
    words = [path for path in whole_weights(base)[0] if path.startswith("scanned_layers.")]
    names = {path.rpartition(".")[2] for path in words}
    wanted = {"query", "query_down", "kv_down", "kv_up", "query_up", "qkv", "key", "value", "out", "down", "up"} & names
    targets = [
        f"scanned_layers.*.mixer.{name}" for name in wanted if any(path.endswith(f"mixer.{name}") for path in words)
    ]
    check(base, tuple(targets), max_length=32)
