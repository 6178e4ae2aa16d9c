"""Sampled completions for training: their seeds and log-probabilities."""

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import ConfigError
from eqx_decoders.inference.drafters import PromptLookup
from eqx_decoders.inference.mtp_draft import MTPDrafter
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.rollouts import rollout, sample_seed
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.serving.engines import FIXTURES, SMALL, engine_for


PROMPTS = [(5, 6, 7), tuple(range(3, 30)), (9,), (5, 6, 7)]


@pytest.fixture(scope="module")
def engine():
    return engine_for("llama_rope", max_waiting=3)


def sample_completions(engine, prompts=PROMPTS, samples=3, seed="run/1", **options):
    """Return the completions of each prompt."""
    groups = {
        group.number: group
        for group in rollout(engine, prompts, samples=samples, max_new_tokens=5, seed=seed, **options)
    }
    return [groups[index].rollouts for index in range(len(prompts))]


@pytest.mark.slow
def test_completions_depend_only_on_seed_prompt_id_and_sample(engine):
    first = sample_completions(engine)
    assert len({sample_seed("run/1", name, sample) for name in range(4) for sample in range(3)}) == 12
    texts = [[completion.tokens.tolist() for completion in group] for group in first]
    # equal prompts have different ids
    assert len({tuple(completion) for completion in texts[0]}) > 1 and texts[0] != texts[3]
    other = sample_completions(engine, PROMPTS[1::-1], ids=[1, 0])  # in another order, without the other prompts
    for one, same in ((first[0], other[1]), (first[1], other[0])):
        for completion, again in zip(one, same, strict=True):
            assert_array_equal(completion.tokens, again.tokens)
            assert_array_equal(completion.log_probs, again.log_probs)
    assert texts != [
        [completion.tokens.tolist() for completion in group] for group in sample_completions(engine, seed="run/2")
    ]


@pytest.mark.slow(fast=("0.6",))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_match_the_model(engine, temperature):
    stops = [3, 4, 5, 6]
    for group in rollout(engine, PROMPTS[1:3], samples=2, max_new_tokens=7, temperature=temperature, stop_ids=stops):
        for completion in group.rollouts:
            tokens = np.asarray([*group.prompt, *completion.tokens])
            logits = engine.model(tokens[None, :-1]).logits[0, len(group.prompt) - 1 :] / temperature
            expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), completion.tokens[:, None], -1)[:, 0]
            assert_allclose(completion.log_probs, expected, atol=1e-5)
            stopped = completion.tokens[-1] in stops
            assert completion.finish_reason == ("stop" if stopped else "length") and (
                stopped or len(completion.tokens) == 7
            )
            assert not set(completion.tokens[:-1].tolist()) & set(stops) and set(completion.versions.tolist()) == {0}


def test_completions_end_at_the_maximum_length(engine):
    long = (3, 4) * 31
    ((completion,),) = sample_completions(engine, [long], samples=1)
    assert len(completion.tokens) == 2 and completion.finish_reason == "length"
    with refused(ConfigError, "prompt 1", "64 tokens", "max_length=64"):
        sample_completions(engine, [(1,), (1,) * 64])


LIMITS = {"recurrent": 3e-4, "delta": 3e-5}  # chunks of a delta rule add up in another order than single tokens
KINDS = {
    "paged": ("llama_rope", {"pages": PageConfig(page_size=4)}),
    "prompt look-up": ("llama_rope", {"drafts": PromptLookup(num_tokens=3, shortest=1)}),
    "drafts in pages": (
        "llama_rope",
        {"drafts": PromptLookup(num_tokens=3, shortest=1), "pages": PageConfig(page_size=4)},
    ),
    "few rows": ("llama_rope", {"batch_invariant": False}),
    "MTP": ("mimo_v2_flash", {"drafts": MTPDrafter()}),
    "windows": ("gemma3_pattern", {}),
    "latent": ("deepseek3_groups", {"pages": PageConfig(page_size=4)}),
    "recurrent": ("qwen3_next", {}),
    "convolutions": ("lfm2_bias", {}),
    "selective": ("mamba2", {}),
    "delta": ("kimi_linear", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_agree(kind):
    """For every cache and drafter, log-probs in the trainer equal the log-probs of the sampler."""
    fixture, options = KINDS[kind]
    model, gaps = ed.load_hf(FIXTURES / fixture, dtype="float32"), []
    model = ed.add_mtp(model, 1, key=jax.random.key(0)) if kind == "MTP" else model
    engine = Engine(model, EngineConfig(**SMALL | options))
    for group in rollout(engine, PROMPTS[:2], samples=3, max_new_tokens=12, temperature=0.9, seed=1):
        for completion in group.rollouts:
            tokens = np.asarray([[*group.prompt, *completion.tokens]], np.int32)
            sample_completions = np.arange(tokens.shape[1])[None] >= len(group.prompt)
            found = token_log_probs(model, Batch(tokens=tokens, loss_mask=sample_completions), temperature=0.9)
            gaps.append(np.abs(np.asarray(found)[0, len(group.prompt) :] - completion.log_probs).max())
    assert len(gaps) == 6 and max(gaps) <= LIMITS.get(kind, 1e-5), gaps
