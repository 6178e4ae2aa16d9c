"""`--epochs`: the number of steps follows from the data, and is saved."""

import json

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.training.settings.preference import PreferenceConfig
from eqx_decoders.training.settings.run import TrainConfig
from tests.commands import ROOT, call, steps_of
from tests.errors import refused


CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello, friend"}]}
PAIR = {"prompt": "hello", "chosen": " friend", "rejected": " you"}


@pytest.mark.parametrize(("method", "record"), [("sft", CHAT), ("dpo", PAIR)])
def test_steps_follow_from_epochs(tmp_path, method, record):
    data, run = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text((json.dumps(record) + "\n") * 7)
    options = ["--method", method, "--init-from", ROOT / "tests/fixtures/chat_llama", "--data", data, "--no-pack"]
    options += ["--batch-size", 2, "--seq-len", 64, "--held-out-fraction", 0, "--sample-tokens", 0, "--run-dir", run]
    options += ["--eval-every", 0, "--optimizer.schedule", "constant"]
    options += ["--preference.examples-per-row", 1] if method == "dpo" else []
    call("train", *options, "--epochs", 1.5)
    assert [row["step"] for row in steps_of(run)] == list(range(1, 7))  # 7 x 1.5 / 2, rounded up
    settings = json.loads((run / "settings.json").read_text())
    assert (settings["steps"], settings["epochs"]) == (6, None)
    call("train", "--run-dir", run)  # the saved number of steps is reached
    assert len(steps_of(run)) == 6
    call("train", "--run-dir", run, "--epochs", 2)
    assert len(steps_of(run)) == 7


def test_epochs_are_refused_for_methods_that_need_the_number_of_steps_first(tmp_path):
    options = dict(epochs=2.0, init_from="org/chat")
    with refused(ConfigError, "epochs=2.0", "method='rl'", "rl.prompts"):
        TrainConfig(method="rl", **options)
    with refused(ConfigError, "epochs=2.0", "save_reference"):
        TrainConfig(method="dpo", preference=PreferenceConfig(save_reference=True), **options)
