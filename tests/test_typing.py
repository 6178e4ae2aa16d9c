"""A type checker finds nothing in the examples of the READMEs, and wrong options in calls of the library."""

import dataclasses
import json
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from eqx_decoders import context
from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.layers.attention.kernels.registry import KERNELS
from eqx_decoders.model.quantizations import QUANTIZATIONS
from eqx_decoders.model.quantize import QuantizationMode
from eqx_decoders.remat import POLICIES, RematName
from tests.commands import ROOT
from tests.test_readme import EXAMPLES


RIGHT_AND_WRONG = """
import jax
import eqx_decoders as ed
from eqx_decoders.training import load_run

config, key = ed.get_config("tiny"), jax.random.key(0)
model = ed.init(config, key=key, remat="full", attention="dot", scan=False)
ed.init(config, key=key, remat="fulll")  # wrong
ed.abstract(config, remat=ed.Remat(), expert="dense")  # wrong
model = model.replace(remat="minimal", precision=ed.Precision(), layout=ed.Layout(), lookup="one_hot")
model.replace(remat="fulll")  # wrong
model.replace(rmat="full")  # wrong
model.replace(scan="no")  # wrong
model = ed.load_hf("org/name", "bfloat16", remat="full", precision=ed.Precision())
ed.load_hf("org/name", dtype="bfloat16", remat="fulll")  # wrong
ed.abstract_hf("org/name", revison="main")  # wrong
load_run("runs/tiny", attention="dott")  # wrong
ed.load_text_model("org/name", experts="some")  # wrong
logits: jax.Array = model(jax.numpy.ones((1, 2), int)).logits
"""


def test_batches_hold_arrays_of_any_kind_but_one_shape():
    tokens = np.zeros((2, 3), np.int32)
    for kind in (np.asarray, jnp.asarray, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)):
        batch = Batch(tokens=kind(tokens), loss_mask=kind(tokens.astype(np.float32)))
        assert len(jax.tree.leaves(batch)) == 2
    with pytest.raises(jaxtyping.TypeCheckError):
        Batch(tokens=tokens, segment_ids=tokens[:, 1:])


def test_the_words_that_are_typed_are_those_that_are_known():
    assert set(typing.get_args(RematName)) == set(POLICIES)
    assert set(typing.get_args(QuantizationMode)) == set(QUANTIZATIONS)
    assert set(typing.get_args(context.AttentionName)) == {"auto", *KERNELS}
    fields = typing.get_type_hints(Execution)
    del fields["checked_name"]  # of the class
    assert typing.get_type_hints(context.ExecutionOptions) == fields
    assert set(fields) - set(typing.get_type_hints(context.RunOptions)) == {"layout", "precision"}
    assert {field.name for field in dataclasses.fields(Execution)} == set(fields)


@pytest.mark.slow
def test_a_type_checker_finds_wrong_options_and_nothing_in_the_readmes(tmp_path):
    files = {f"example{number}.py": example for number, example in enumerate(EXAMPLES)} | {"wrong.py": RIGHT_AND_WRONG}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    lines = {one["range"]["start"]["line"] for one in errors if one["file"].endswith("wrong.py")}
    assert [one for one in errors if not one["file"].endswith("wrong.py")] == []
    assert lines == {number for number, line in enumerate(RIGHT_AND_WRONG.splitlines()) if line.endswith("# wrong")}
