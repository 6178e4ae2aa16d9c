"""Test that two processes export, import and sample a sharded model like one process."""

import json

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.io.checkpoint.checkpoints import load_weights
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.load_export import export_adapter
from eqx_decoders.training.run.model import abstract_run
from tests.commands import call, write_corpus
from tests.data.test_host_rows import finish, launch
from tests.errors import assert_names


pytestmark = pytest.mark.slow


PIECE = 3000  # bytes; smaller than the matrix of a layer and than the embedding table
# Arguments of a process: folder, arguments of the training program as JSON.
WORKER = f"""
import io, json, os, pathlib, sys
from unittest import mock
folder, words, number = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["JAX_PROCESS_ID"])
import jax
from eqx_decoders.cli import convert, generate, train
from eqx_decoders.io.huggingface import gather as gather_module
from eqx_decoders.training import connected

sizes = []

def gathered(*args, gather=gather_module.gathered_rows):
    rows = gather(*args)
    sizes.append([rows.nbytes, max(leaf.nbytes for leaf in jax.live_arrays() if leaf.is_fully_replicated)])
    return rows

def call(program, *args):
    assert program.main([*map(str, args)]) == 0

def written(program, *args):
    with mock.patch.object(sys, "stdout", io.StringIO()) as out:
        call(program, *args)
    return out.getvalue()

with connected(60), mock.patch.multiple(gather_module, PIECE_BYTES={PIECE}, gathered_rows=gathered):
    call(train, "--distributed", "--mesh.data", 1, "--mesh.fsdp", 2, "--mesh.tensor", 2, *words)
    (folder / f"sizes{{number}}.json").write_text(json.dumps(sizes))
    both = ("--distributed", "--distributed-timeout", 60, "--mesh.fsdp", 2, "--mesh.tensor", 2)
    told = [written(convert, "export", folder / "run", folder / "again" / "merged", "--distributed", "--mesh.fsdp", -1)]
    told.append(written(convert, "import", folder / "two" / "merged", folder / "imported", *both))
    lines = iter(["the\\n", "old\\n", ""])
    asked = mock.Mock(isatty=lambda: False, readline=(lambda: next(lines)) if number == 0 else None)
    with mock.patch.object(sys, "stdin", asked):
        told.append(written(generate, "--run-dir", folder / "imported", "--max-new-tokens", 4, "--seed", 3, *both))
    (folder / f"told{{number}}.json").write_text(json.dumps(told))
    print("done", number, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run two processes and return their folder."""
    folder = tmp_path_factory.mktemp("two")
    sizes = (
        "num_layers=3",
        "embed_dim=32",
        "mlp_dim=48",
        "num_heads=4",
        "num_kv_heads=2",
        "head_dim=8",
        "vocab_size=260",
    )
    (folder / "model.json").write_text(with_fields(ed.get_config("tiny"), sizes).to_json())
    options = {
        "--run-dir": folder / "run",
        "--data": write_corpus(folder / "corpus", 12, 40),
        "--model-config": folder / "model.json",
        "--tokenizer": "bytes",
        "--steps": 2,
        "--batch-size": 4,
        "--seq-len": 16,
        "--eval-every": 0,
        "--sample-tokens": 0,
        "--held-out-fraction": 0,
        "--lora.rank": 2,
        "--optimizer.learning-rate": 0.1,
        "--export": folder / "two" / "merged",
        "--export-adapter": folder / "two" / "adapter",
    }
    processes = launch(folder, options, worker=WORKER)
    outputs = finish(processes, 300)
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and f"done {number}" in output, output[-4000:]
    return folder


def same_files(one, other) -> None:
    """Assert that files are equal byte by byte."""
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path


def test_exports_of_two_processes_equal_one_process(folder):
    """Cases: exports at the end of the run and of its checkpoint on another mesh; merged weights and adapters."""
    call("convert", "export", folder / "run", folder / "one" / "merged")
    same_files(folder / "two" / "merged", folder / "one" / "merged")
    same_files(folder / "again" / "merged", folder / "one" / "merged")
    run = RunDirectory.open(folder / "run")
    model = load_weights(folder / "run" / "checkpoints", abstract_run(run)).tree
    export_adapter(model, run, folder / "one" / "adapter")
    same_files(folder / "two" / "adapter", folder / "one" / "adapter")
    assert any(np.any(leaf) for name, leaf in named_leaves(model).items() if name.endswith("lora_b"))


def test_no_full_weight_is_replicated(folder):
    """Neither the weights of a layer nor the embedding table are ever replicated on all devices."""
    layer = 4 * 32 * 48
    for number in (0, 1):
        sizes = np.asarray(json.loads((folder / f"sizes{number}.json").read_text()))
        assert len(sizes) > 30 and sizes[:, 0].max() <= PIECE < layer and sizes[:, 1].max() < 2 * layer


def test_two_processes_load_equal_weights(folder):
    call("convert", "export", folder / "imported", folder / "back" / "merged")
    one, other = (named_leaves(ed.load_hf(folder / name / "merged")) for name in ("two", "back"))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_only_the_first_process_reads_and_prints(folder):
    told, silence = (json.loads((folder / f"told{number}.json").read_text()) for number in (0, 1))
    assert silence == ["", "", ""]
    for line in told[:2]:
        assert_names(line, folder)
    words = ("--run-dir", folder / "imported", "--max-new-tokens", 4, "--seed", 3)
    assert told[2] == call("generate", *words, stdin="the\nold\n")[0]
    assert told[2].startswith("the") and "\nold" in told[2]
