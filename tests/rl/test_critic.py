"""Test PPO runs with a critic: warmup, exact resuming, and settings."""

import json
import re
import shutil
import types
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints, load_weights
from eqx_decoders.model.decoder_config import with_scores
from eqx_decoders.model.init import add_score_head
from eqx_decoders.rl.completions import Completion
from eqx_decoders.rl.packing import CompletionPacker
from eqx_decoders.rl.run import RLRun
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.run.load_export import load_run
from tests.commands import call, steps_of
from tests.compare import assert_allclose, assert_close
from tests.errors import assert_names
from tests.models import VOCAB, filled, rich_decoder
from tests.rl.test_environment_run import GAMES
from tests.rl.test_run import BASE, completions_of, train, write_task


CHATS = BASE.parent / "chats"  # this model has another vocabulary
NAMES = ("loss", "grad_norm", "reward", "value", "return", "explained_variance", "value_loss", "value_clip")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("critic"))


def ppo(folder, name, *more, **changes):
    settings: Any = dict(rl__preset="ppo", steps=3, checkpoint_every=1, optimizer__schedule="constant")
    return train(folder, name, *more, **settings | changes)


def metrics_of(folder, name):
    return [[row[each] for each in (*NAMES, "critic_grad_norm")] for row in steps_of(folder / name)]


def critic_of(folder, name):
    checkpoints = Checkpoints(folder / name / "checkpoints", max_checkpoints=3)
    target = add_score_head(ed.load_hf(BASE), key=jax.random.key(0))
    return named_leaves(load_weights(checkpoints.directory, target, prefix="critic.model.").tree)


def have_equal_arrays(one, other):
    return all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_run_with_a_critic_resumes_exactly(folder):
    """The run is killed after the critic warmup, in which the policy does not change."""
    more: Any = dict(steps=2, rl__critic__warmup_steps=1, rl__critic__updates=2)
    _, err = ppo(folder, "whole", **more)
    assert_names(err, "rl.preset=ppo", "rl.baseline=critic", "rl.whiten=True", "critic: ")
    rows, base = steps_of(folder / "whole"), named_leaves(ed.load_hf(BASE))
    assert rows[0]["value"] == 0 and rows[1]["value"] != 0 and rows[0]["value_loss"] > 0 and rows[0]["grad_norm"] > 0
    assert all(row["log_prob_gap"] <= 1e-5 and not row["skipped"] for row in rows)
    assert have_equal_arrays(named_leaves(load_run(folder / "whole", 1)), base)
    assert not have_equal_arrays(named_leaves(load_run(folder / "whole", 2)), base)
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(next((folder / "killed" / "checkpoints").glob("*2")))
    ppo(folder, "killed", **more)
    assert metrics_of(folder, "killed") == metrics_of(folder, "whole")
    assert have_equal_arrays(critic_of(folder, "killed"), critic_of(folder, "whole"))
    assert have_equal_arrays(named_leaves(load_run(folder / "killed")), named_leaves(load_run(folder / "whole")))
    _, err = ppo(
        folder,
        "killed",
        "--allow-changes",
        code=2,
        rl__preset="None",
        rl__baseline="none",
        steps=4,
        rl__critic__warmup_steps=0,
        rl__critic__updates=1,
    )
    assert_names(err, "rl.baseline", "step 2", "critic")


@pytest.mark.slow
def test_critic_with_microbatches_packing_and_meshes(folder):
    more: Any = dict(rl__kl=0.05, batch_size=8)
    ppo(folder, "one", **more)
    ppo(folder, "mesh", "--mesh.fsdp", 2, "--mesh.context", 2, devices=4, **more)
    ppo(folder, "parts", "--step.gradient-accumulation-steps", 2, "--rl.completions-per-row", 2, **more)
    for name in ("mesh", "parts"):
        assert_allclose(metrics_of(folder, name), metrics_of(folder, "one"), rtol=1e-3, atol=1e-4)
    assert steps_of(folder / "one")[-1]["k1"] != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--rl.critic.learning-rate 0.05",
        "--rl.critic.clip 0.01 --rl.critic.updates 4",
        "--rl.critic.gamma 0.5",
        "--rl.critic.lam 0.5 --rl.critic.no-bootstrap",  # truncated completions are bootstrapped
        "--rl.samples 1 --rl.prompts 12",
        "--lora.rank 2 --rl.kl 0.1",
        "--rl.critic.init-from judge --rl.reward-model judge",
        "--optimizer.name muon --optimizer.ema-decay 0.5",
    ],
)
def test_settings_take_effect(folder, flags):
    if not (folder / "plain").exists():
        ed.save_hf(add_score_head(ed.load_hf(BASE), key=jax.random.key(1)), folder / "judge", tokenizer=BASE)
        ppo(folder, "plain", batch_size=8)
    name = "".join(re.findall(r"\w+", flags))
    words = flags.replace("judge", str(folder / "judge")).split()
    ppo(folder, name, *words, batch_size=8)
    rows = steps_of(folder / name)
    assert all(np.isfinite(row["loss"]) and row["log_prob_gap"] <= 1e-5 for row in rows)
    assert metrics_of(folder, name) != metrics_of(folder, "plain")
    assert (rows[0]["value"] == 0) == ("init" not in flags)
    ppo(folder, name, *words, steps=4, batch_size=8)
    assert len(steps_of(folder / name)) == 4


def test_values_of_packed_completions_equal_unpacked_values():
    critic, rng = filled(with_scores(rich_decoder(1), 1)), np.random.default_rng(0)
    completions = []
    for number, (before, count) in enumerate(((3, 3), (1, 1), (4, 2))):
        tokens = rng.integers(0, VOCAB, count).astype(np.int32)
        rollout = Rollout(tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")
        prompt = Prompt(number, tuple(rng.integers(0, VOCAB, before).tolist()), {"prompt": "1+1"})
        completions.append(Completion(prompt, rollout, "2", 0.0, {"reward": 0.0}, None, 0.25))
    packer = CompletionPacker(ed.Layout(), row_counts=[1, 2], seq_len=12, completions_per_row=2)
    run: Any = types.SimpleNamespace(_packer=packer)
    found = RLRun._values(run, completions, critic)
    for completion, values in zip(completions, found, strict=True):
        tokens = np.asarray([[*completion.prompt.tokens, *completion.rollout.tokens]])
        assert_close(values.astype(np.float32), critic(tokens).logits[0, len(completion.prompt.tokens) - 1 :, 0])


@pytest.mark.slow
def test_value_of_a_token_is_computed_before_the_token(folder):
    """The critic starts from a reward model. All completions are truncated, so that the last value is bootstrapped."""
    scorer = add_score_head(ed.load_hf(BASE), key=jax.random.key(1))
    ed.save_hf(scorer, folder / "scorer", tokenizer=BASE)
    ppo(folder, "read", steps=1, rl__critic__init_from=folder / "scorer", rl__critic__gamma=0.5, rl__critic__lam=0.0)
    values, returns = [], []
    for completion in completions_of(folder, "read", 1).completions:
        tokens = np.asarray([*completion.prompt.tokens, *completion.rollout.tokens])
        behind = np.asarray(scorer(tokens[None]).logits[0, len(completion.prompt.tokens) - 1 :, 0])
        values += behind[:-1].tolist()
        last = completion.reward + 0.5 * behind[-1] * (completion.rollout.finish_reason == "length")
        returns += [*(0.5 * behind[1:-1]), last]
    (row,) = steps_of(folder / "read")
    assert row["value"] == pytest.approx(np.mean(values), abs=1e-5) and np.ptp(values) > 0.1
    assert row["return"] == pytest.approx(np.mean(returns), abs=1e-5) and row["truncated"] > 0


@pytest.mark.slow
def test_critic_starts_from_a_reward_run(folder):
    """LoRA factors are merged, as in the exported directory of the run."""
    pairs = [{"prompt": f"the {word}", "chosen": "cat sat", "rejected": "mat"} for word in ("old", "green", "many")]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    words = [
        "--method",
        "reward",
        "--init-from",
        BASE,
        "--data",
        folder / "pairs.jsonl",
        "--steps",
        2,
        "--lora.rank",
        2,
    ]
    words += ["--steps", 2, "--batch-size", 2, "--seq-len", 32, "--sample-tokens", 0, "--optimizer.learning-rate", 0.1]
    call("train", "--run-dir", folder / "pairs", *words, "--export", folder / "pairs exported")
    for name in ("pairs", "pairs exported"):
        ppo(folder, f"of {name}", steps=2, rl__critic__init_from=folder / name, rl__reward_model=folder / name)
    assert metrics_of(folder, "of pairs") == metrics_of(folder, "of pairs exported")
    assert steps_of(folder / "of pairs")[0]["value"] != 0


@pytest.mark.slow
def test_sampling_one_step_ahead_with_a_critic(folder):
    """This also works during the critic warmup, in which steps do not change the policy."""
    words = ("--mesh.fsdp", 2, "--sampler.devices", 4, "--rl.max-staleness", 1)
    more: Any = dict(steps=4, batch_size=8, rl__critic__warmup_steps=2, max_checkpoints=5)
    ppo(folder, "ahead", *words, **more)
    assert [row["staleness"] for row in steps_of(folder / "ahead")] == [0, 1, 1, 1]
    for last in (1, 2, 3):
        name = f"ahead-{last}"
        shutil.copytree(folder / "ahead", folder / name)
        for step in range(last + 1, 5):
            shutil.rmtree(next((folder / name / "checkpoints").glob(f"*{step}")))
            (folder / name / "rollouts" / f"step-{step + 1:06d}.jsonl.zst").unlink(missing_ok=True)
        ppo(folder, name, *words, **more)
        assert metrics_of(folder, name) == metrics_of(folder, "ahead")


@pytest.mark.slow
def test_a_resumed_run_may_change_its_optimizer(folder):
    ppo(folder, "adam", steps=1)
    _, err = ppo(folder, "adam", "--allow-changes", steps=2, optimizer__name="muon")
    assert_names(err, "muon", "adamw")
    assert len(steps_of(folder / "adam")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo", "grpo"])
def test_critic_with_multi_turn_environments(folder, preset):
    """Turns have rewards, with and without a critic. Tool tokens have no value and are no targets."""
    games = folder / "games"
    games.mkdir(exist_ok=True)
    (games / "rewards.py").write_text(GAMES)
    (games / "prompts.jsonl").write_text("\n".join(json.dumps({"number": number}) for number in range(10)))
    for returns in ("turn", "episode"):
        name = f"{preset}-{returns}"
        settings: Any = {"rl__environment": f"{games / 'rewards.py'}:Guess", "rl__max_turns": 3, "batch_size": 12}
        more: Any = dict(rl__preset=preset, rl__returns=returns, reward=None, rl__kl=0.1)
        ppo(games, name, **settings, **more)
        rows = steps_of(games / name)
        assert all(row["log_prob_gap"] <= 1e-5 and row["turns"] > 1 and row["grad_norm"] > 0 for row in rows)
        for completion in completions_of(games, name, 1).completions:
            assert completion.episode is not None and sum(completion.episode.turn_tokens) == completion.num_tokens
            assert sum(completion.episode.turn_rewards) == pytest.approx(completion.reward)
    losses = [[row["grad_norm"] for row in steps_of(games / f"{preset}-{each}")] for each in ("turn", "episode")]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({"rl__critic__warmup_steps": 3}, ["--rl.critic.warmup-steps=3", "--steps=3"], id="warmup"),
        pytest.param({"rl__critic__init_from": CHATS}, ["--rl.critic.init-from=", CHATS], id="init"),
    ],
)
def test_invalid_settings_are_refused(folder, changes, names):
    _, err = ppo(folder, "refused", code=2, **changes)
    assert_names(err, *names)
