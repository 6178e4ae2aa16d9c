"""Convert between Hugging Face directories, GGUF files and run directories, check conversions, compare unknown models.

python scripts/convert.py import Qwen/Qwen3-0.6B runs/qwen
python scripts/convert.py export runs/tiny exported/tiny --dtype bfloat16
python scripts/convert.py gguf exported/tiny tiny.gguf --dtype q8_0
python scripts/convert.py verify exported/tiny
python scripts/convert.py compare path/to/NewModel

A mesh (--mesh.fsdp -1) splits a model that is larger than one device, also over several processes (--distributed) with
access to the same directories.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, Int

from eqx_decoders.cli import program, require, run_command
from eqx_decoders.cli.devices import ONE_DEVICE, Devices, layout_of
from eqx_decoders.cli.family_comparison import Compare
from eqx_decoders.cli.setting_flags import flag_names, parse_flags
from eqx_decoders.errors import (
    CheckedFields,
    CheckpointError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.gguf.gguf_export import save_gguf
from eqx_decoders.io.huggingface import verify
from eqx_decoders.io.huggingface.export_directory import check_new_directory
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf, read_config
from eqx_decoders.io.processes import from_first
from eqx_decoders.io.run_lock import RunLock, check_run_dir
from eqx_decoders.model.init import count_parameters
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.mesh_config import MeshConfig
from eqx_decoders.training.run.directory import RunDirectory, write_source
from eqx_decoders.training.run.load_export import export_run, load_run
from eqx_decoders.training.settings_file import settings_json


DIFFERENT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(Devices):
    """Import a Hugging Face directory as a run directory: weights as checkpoint of step 0, description, tokenizer."""

    source: str
    """Directory with config.json and safetensors files, or "org/name" on huggingface.co."""
    run_dir: str
    """A new run directory."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "source", "run_dir")

    def __call__(self) -> int:
        require("filelock")  # now, not when the weights are loaded
        given, writes = Path(self.source), jax.process_index() == 0
        init_from = str(given.resolve()) if given.exists() else self.source
        run = RunDirectory(TrainConfig(run_dir=self.run_dir, init_from=init_from))
        parts = run.has_settings, run.source_dir.exists(), Path(run.checkpoint_directory).exists()
        used = from_first("used", any(parts))
        check(not used, f"{run.path} is a run directory already: choose another one.", CheckpointError)
        check_run_dir(run.path) if writes else None
        model = load_hf(resolve(self.source).path, layout=self.layout())
        with RunLock(run.path) if writes else contextlib.nullcontext():
            if writes:
                write_source(model, run.source_dir)
                run.save_settings()  # a run there goes on with this model in any case
            with Checkpoints(run.checkpoint_directory) as checkpoints:
                checkpoints.save(0, {"model": model}, data_state={}, config=settings_json(run.settings))
            if writes:
                print(f"{count_parameters(model.config):,} weights of {self.source} are step 0 of {run.path}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Devices):
    """Export the weights of a run, adapters merged, and its tokenizer for from_pretrained and load_hf."""

    run_dir: str
    """Run directory of scripts/train.py, or gs://…: the checkpoint directory of a run."""
    directory: str
    """A new directory."""
    step: NonNegativeInt | None = None
    """Checkpoint to export; None: the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the tensors; None: that of the run's weights."""
    ema: bool = True
    """Where the run keeps running means of its weights, export these; otherwise the weights themselves."""
    shard_gb: PositiveFloat = 5.0
    """Size of a file at most."""

    def __call__(self) -> int:
        run = RunDirectory.open(self.run_dir)
        check_new_directory(self.directory)
        model = load_run(run.path, self.step, ema=self.ema, layout=self.layout())
        export_run(model, run, self.directory, dtype=self.dtype, shard_bytes=max(1, int(self.shard_gb * 1e9)))
        if jax.process_index() == 0:
            print(f"{count_parameters(model.config):,} weights of {self.run_dir} are in {self.directory}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToGGUF(Devices):
    """Write the model and the tokenizer of a directory as a GGUF file, which llama.cpp opens."""

    source: str
    """Directory with config.json and safetensors files, "org/name" on huggingface.co, or another GGUF file."""
    file: str
    """A new file."""
    dtype: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """Type of matrices; vectors are in float32."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "source", "file")

    def __call__(self) -> int:
        model = load_hf(self.source, dtype=None, layout=self.layout())
        save_gguf(model, self.file, dtype=self.dtype)
        if jax.process_index() == 0:
            print(f"{count_parameters(model.config):,} weights of {self.source} are in {self.file}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(CheckedFields):
    """Check that a Hugging Face directory or a GGUF file is read as it is meant.

    Where transformers and torch are installed its logits are compared with theirs on random ids; elsewhere the tensors
    of the loaded model, exported again, are compared with those in the files, bit by bit. Exits with 1 if they differ.
    """

    checked_name = ""

    directory: str
    """Directory with config.json and safetensors files, GGUF file, or "org/name" on huggingface.co."""
    against: str | None = None
    """Compare with this other directory or file instead: settings, tensors by name, and logits."""
    tolerance: NonNegativeFloat = 1e-3
    """Largest difference of logits."""
    rows: PositiveInt = 2
    """Sequences of random ids."""
    length: PositiveInt = 32
    """Ids of a sequence."""
    seed: int = 0
    """Seed of the ids."""
    mesh: MeshConfig = ONE_DEVICE

    def __call__(self) -> int:
        folder = resolve(self.directory).path
        if self.against is not None:
            return self._directories(folder, resolve(self.against).path)
        return self._transformers(folder) if verify.has_transformers() else self._tensors(folder)

    def _transformers(self, folder: Path) -> int:
        print(f"{folder} here and in transformers:")
        ids = self._ids(folder)
        ours = self._logits(folder, ids)  # first: what our reader refuses is not shown to another
        return self._judge(verify.compare_logits(ours, verify.transformers_logits(folder, ids)))

    def _tensors(self, folder: Path) -> int:
        print(f"{folder}: transformers is not installed, so its tensors are compared, not its logits:")
        count, different = verify.compare_tensors(folder, layout_of(self.mesh))
        if different:
            print(f"different: {len(different)} of {count} tensors change when loaded and exported: {_some(different)}")
            return DIFFERENT
        print(f"the same: all {count} tensors, loaded and exported again, have the bits of the files")
        return 0

    def _directories(self, one: Path, other: Path) -> int:
        print(f"{one} and {other}:")
        wrong, values = verify.compare_directories(one, other)
        print(f"values: {len(values)} tensors differ{': ' if values else ''}{_some(values)}")
        if wrong:
            print(f"different: {_some(wrong)}")
            return DIFFERENT
        ids = self._ids(one)
        return self._judge(verify.compare_logits(*(self._logits(folder, ids) for folder in (one, other))))

    def _logits(self, folder: Path, ids: Int[np.ndarray, "rows length"]) -> Float[np.ndarray, "rows length vocab"]:
        return verify.model_logits(load_hf(folder, layout=layout_of(self.mesh)), ids)

    def _ids(self, folder: Path) -> Int[np.ndarray, "rows length"]:
        return verify.random_ids(read_config(folder)[0], self.rows, self.length, self.seed)

    def _judge(self, difference: verify.Difference) -> int:
        print(difference)
        largest, good = difference.maximum, difference.maximum <= self.tolerance
        print(f"{'the same' if good else 'different'}: {largest:.3g} with a tolerance of {self.tolerance:.3g}")
        return 0 if good else DIFFERENT


def _some(lines: list[str], most: int = 10) -> str:
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more


COMMANDS = {
    "import": (Import(source="", run_dir=""), ("source", "run_dir")),
    "export": (Export(run_dir="", directory=""), ("run_dir", "directory")),
    "gguf": (ToGGUF(source="", file=""), ("source", "file")),
    "verify": (Verify(directory=""), ("directory",)),
    "compare": (Compare(directory=""), ("directory",)),
}


@program(
    lambda: flag_names(Import) | flag_names(Export) | flag_names(ToGGUF) | flag_names(Verify) | flag_names(Compare)
)
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Convert as the command line says; return the exit code."""
    require("tyro")
    commands = {
        name: (str(inspect.getdoc(default)).partition("\n")[0], functools.partial(_run, default, arguments))
        for name, (default, arguments) in COMMANDS.items()
    }
    return run_command(commands, args, prog or sys.argv[0], (__doc__ or "").strip())


def _run(
    default: Import | Export | ToGGUF | Verify | Compare, required: Sequence[str], args: Sequence[str], prog: str
) -> int:
    """Parse the arguments of a command and run it."""
    titles = {type(default): type(default).__name__, Devices: "devices"}
    options: dict[str, Any] = dict(args=args, prog=prog, description=inspect.getdoc(default))
    command = parse_flags(default, titles=titles, required=required, **options)
    with contextlib.nullcontext() if isinstance(command, Verify | Compare) else command.connected():
        return command()
