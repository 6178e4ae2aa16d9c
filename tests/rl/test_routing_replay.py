"""Test saved experts of sampled tokens: in files, packed rows, turns of an episode, and runs."""

import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.sources.data_files import zstd_module
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.rl.completions import Completion, CompletionFiles, StepCompletions
from eqx_decoders.rl.environments import OpenEpisode, ParsedTurn
from eqx_decoders.rl.packing import StepAdvantages, pack_completions
from eqx_decoders.serving.rollouts import Rollout
from tests.commands import ROOT, steps_of
from tests.compare import assert_allclose, assert_array_equal
from tests.rl.test_run import BASE, completions_of, folder, metrics_of, train  # noqa: F401


LAYERS, CHOICES = 2, 3


def experts_of(tokens, first=0):
    """Return different experts for each token, and -1 for the last token."""
    experts = (first + np.arange(tokens * LAYERS * CHOICES, dtype=np.int16)).reshape(tokens, LAYERS, CHOICES)
    experts[-1] = -1
    return experts


def completion_of(prompt, tokens, first=0):
    ids, zeros = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    rollout = Rollout(ids, zeros, ids * 0, "stop", experts_of(prompt + tokens, first))
    return Completion(Prompt(first, (7,) * prompt, {"prompt": ""}), rollout, "", 1.0)


@pytest.mark.parametrize("first", [0, 300])
def test_experts_are_saved_and_packed_with_their_tokens(tmp_path, first):
    """Padding has -1."""
    plain = completion_of(2, 2)
    plain = plain._replace(rollout=plain.rollout._replace(experts=None))
    completions = [completion_of(3, 2, first), completion_of(1, 4), plain]
    files = CompletionFiles(tmp_path)
    files.write(1, "key", StepCompletions(completions, num_prompts=3))
    found = files.read(1, "key")
    assert found is not None and found.completions[2].rollout.experts is None
    for one, other in zip(completions[:2], found.completions[:2], strict=True):
        experts: Any = other.rollout.experts
        assert experts.dtype == np.int16
        assert_array_equal(one.rollout.experts, experts)
    options: Any = dict(row_counts=[1], seq_len=20, completions_per_row=4)
    signals: Any = pack_completions(found.completions, StepAdvantages(np.ones(3), np.ones(3)), **options).batch.signals
    wanted = np.full((20, LAYERS, CHOICES), -1)
    wanted[:5], wanted[5:10] = experts_of(5, first), experts_of(5)
    assert_array_equal(signals.experts, wanted[None])
    assert signals.experts.dtype == np.int16
    nothing: Any = pack_completions(completions[2:], StepAdvantages(np.ones(1), np.ones(1)), **options).batch.signals
    assert nothing.experts is None


def test_turns_keep_the_experts_used_for_sampling():
    """The next turn processes all tokens again, and adds the experts of tokens that are new."""
    episode = OpenEpisode(prompt=Prompt(0, (), {}), sample=0, seed=0, number=0)
    episode.start_segment((1, 2, 3))
    first, second = completion_of(3, 2).rollout, completion_of(7, 3, 100).rollout
    silence, left = ParsedTurn({"message": {}}, {"role": "assistant", "content": ""}), dict(tokens_left=9, turns_left=9)
    episode.add_completion(first, silence, **left)
    episode.add_environment_tokens([4, 5])
    episode.add_completion(second, silence, **left)
    episode.add_environment_tokens([6])
    (part,) = episode.completion({}).segments
    experts: Any = part.rollout.experts
    assert part.size == len(experts) == 11
    assert_array_equal(experts[:4], experts_of(5)[:4])
    assert_array_equal(experts[4:9], experts_of(10, 100)[4:9])
    assert (experts[9:] == -1).all()
    silent = OpenEpisode(prompt=Prompt(0, (), {}), sample=0, seed=0, number=0)
    silent.start_segment((1,))
    silent.add_completion(Rollout(*first[:4]), silence, **left)
    assert silent.completion({}).segments[0].rollout.experts is None


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Return a checkpoint with experts and small differences between router logits."""
    config, _ = read_config(ROOT / "tests" / "fixtures" / "mixtral_window")
    model = ed.init(with_fields(config, ["vocab_size=320", "num_experts=6"]), key=jax.random.key(1))
    path = tmp_path_factory.mktemp("sparse") / "model"
    ed.save_hf(model, path, family="mixtral", tokenizer=BASE)
    return path


def _lines(path, step):
    return zstd_module().decompress(CompletionFiles(path).path(step).read_bytes()).splitlines()


def _elsewhere(rollout):
    return rollout._replace(experts=np.where(rollout.experts < 0, -1, (rollout.experts + 1) % 6).astype(np.int16))


@pytest.mark.slow
def test_runs_replay_the_experts_of_the_sampler(folder, sparse):  # noqa: F811
    """Cases: one device, meshes, and sampling one step ahead. Files of completions contain the experts after a kill."""
    more: Any = dict(init_from=sparse, steps=3, batch_size=8)
    train(folder, "plain-routing", **more)
    train(folder, "replayed", "--rl.routing-replay", **more)
    found: Any = completions_of(folder, "replayed", 3).completions
    assert all(each.rollout.experts.shape == (len(each.prompt.tokens) + each.num_tokens, 2, 2) for each in found)
    assert all(0 <= each.rollout.experts[:-1].min() <= each.rollout.experts.max() < 6 for each in found)
    assert all(row["log_prob_gap"] <= 1e-5 for row in steps_of(folder / "replayed"))
    assert_allclose(metrics_of(folder, "replayed"), metrics_of(folder, "plain-routing"), atol=1e-4)
    shutil.rmtree(folder / "replayed" / "checkpoints")
    (folder / "rewards.py.closed").write_text("")
    train(folder, "replayed", "--rl.routing-replay", **more)
    (folder / "rewards.py.closed").unlink()
    shutil.rmtree(folder / "replayed" / "checkpoints")  # the trainer must use the experts of the edited file
    files, (key, *_) = CompletionFiles(folder / "replayed" / "rollouts"), _lines(folder / "replayed" / "rollouts", 1)
    changed: Any = files.read(1, json.loads(key)["key"])
    moved = [each._replace(rollout=_elsewhere(each.rollout)) for each in changed.completions]
    files.write(1, json.loads(key)["key"], changed._replace(completions=moved))
    train(folder, "replayed", "--rl.routing-replay", **more)
    assert steps_of(folder / "replayed")[0]["log_prob_gap"] > 1e-3
    split = ("--rl.routing-replay", "--mesh.fsdp", 2, "--mesh.expert", 2)
    train(folder, "split", *split, "--sampler.tensor", 2, devices=4, **more)
    train(folder, "in-parts", "--rl.routing-replay", "--step.gradient-accumulation-steps", 2, **more)
    for name in ("split", "in-parts"):
        assert_allclose(metrics_of(folder, name), metrics_of(folder, "plain-routing"), atol=1e-4)
    train(folder, "ahead-replayed", *split, "--sampler.devices", 4, "--rl.max-staleness", 1, **more)
    train(folder, "ahead-plain", *split[1:], "--sampler.devices", 4, "--rl.max-staleness", 1, **more)
    one, other = (steps_of(folder / name)[1]["log_prob_gap"] for name in ("ahead-replayed", "ahead-plain"))
    assert one > 1e-4 and other > 1e-4
    with_reference: Any = dict(rl__kl=0.1, rl__kl_in="reward")
    train(folder, "k1", "--rl.routing-replay", **more, **with_reference)
    assert abs(steps_of(folder / "k1")[0]["k1"]) < 1e-6
