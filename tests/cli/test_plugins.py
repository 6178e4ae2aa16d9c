"""Test `--plugin` (a Python file with custom layers and models) in every program, with the layers/README.md example."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.cli import serve
from eqx_decoders.cli.plan import PlanConfig, plan
from eqx_decoders.cli.plugins import load_plugin
from eqx_decoders.families import registry
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.planning.machine import Machine
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.sharding.chips import CHIPS
from tests.commands import ROOT, call, flags, steps_of, write_corpus
from tests.errors import assert_names, refused


def plugin_source() -> str:
    """Return the layers and MODELS of the README example, without the lines that use the model."""
    readme = (ROOT / "eqx_decoders" / "layers" / "README.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "ShortConvolution" in block)
    (models,) = re.findall(r"```text\n(MODELS = .*?)```", readme, re.S)
    return example.partition("config = ed.DecoderConfig")[0] + models


def options(folder, **more) -> list[str]:
    """Return the flags of a training run. `more`: additional flags without `--`."""
    settings = dict(plugin=folder / "my_layers.py", run_dir=folder / "run", data=folder / "data", steps=2)
    settings |= dict(seq_len=32, batch_size=2, checkpoint_every=1, **more)
    return flags({"--" + name.replace("_", "-"): value for name, value in settings.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a plugin, data, and a run of two steps."""
    folder = tmp_path_factory.mktemp("plugin")
    write_corpus(folder / "data", count=2)
    (folder / "my_layers.py").write_text(plugin_source())
    with mock.patch.dict(registry._REGISTERED_MODELS, clear=True):
        call("train", *options(folder, model="my-model"))
    return folder


def test_plugin_model_is_resumed_sampled_and_adapted(folder):
    call("train", *options(folder), "--steps", 3)
    assert [row["step"] for row in steps_of(folder / "run")] == [1, 2, 3]
    call("generate", "--plugin", folder / "my_layers.py", "--run-dir", folder / "run", "--prompt", "the")
    adapter = {"model": "my-model", "lora.rank": 2, "lora.targets": "*.mlp.*"}
    call("train", *options(folder, **adapter), "--run-dir", folder / "adapter")
    assert len(steps_of(folder / "adapter")) == 2


def test_plugin_model_is_planned_quantized_and_served(folder):
    with mock.patch.dict(registry._REGISTERED_MODELS):
        load_plugin(str(folder / "my_layers.py"))
        settings = PlanConfig(model="my-model", batch_size=2, seq_len=16, xla_flags="none")
        with mock.patch.object(Machine, "of", return_value=Machine(CHIPS[0], ((0, (0,), 0),), (1,))):
            planned, _, _ = plan(settings, jax.devices()[:1])
        assert planned.memory.total > 0
        config = serve.parse(flags({"--run-dir": folder / "run", "--quantize": "int8", "--max-length": 64}))
        model = serve.load(config).model
        assert quantized_weights(model)
        engine = serve.make_engine(config, model, {})
        request = Request(prompt=(3, 4, 5), max_new_tokens=4)
        new = ed.generate(model, jnp.asarray([request.prompt]), max_new_tokens=4, sampler=ed.Greedy())
        assert list(engine.run([request])[0]) == new[0].tolist()


def test_run_with_undefined_layers_is_refused(folder):
    text = (folder / "run" / "model.json").read_text()
    assert "ShortConvolutionConfig" in text
    with refused(ed.ConfigError, "class='LongConvolutionConfig'", "ShortConvolutionConfig", "--plugin"):
        ed.DecoderConfig.from_json(text.replace("ShortConvolutionConfig", "LongConvolutionConfig"))


def test_plugins_that_define_nothing_or_fail_are_refused(tmp_path):
    file = tmp_path / "own.py"
    library_class = (
        "from eqx_decoders.layers.base import MixerConfig\n"
        "class AttentionConfig(MixerConfig):\n    def build(self, embed_dim, *, key): ..."
    )
    for text, named in (
        ("x = 1", [file, "MODELS", "FAMILY"]),
        ("from eqx_decoders.layers import MLSTMConfig", [file, "MODELS", "FAMILY"]),
        ("MODELS = 3", [file, "MODELS"]),
        ("MODELS = {'tiny': None}", ["'tiny'"]),
        (library_class, ["AttentionConfig"]),
    ):
        file.write_text(text)
        _, err = call("generate", "--plugin", file, "--prompt", "x", code=2)
        assert_names(err, *named)
    config = ed.get_config("tiny")  # a refused class does not replace the library's class
    assert ed.DecoderConfig.from_json(config.to_json()) == config
