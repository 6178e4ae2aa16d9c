"""Convert between Hugging Face directories, GGUF files and run directories, check conversions, compare unknown models.

python scripts/convert.py import Qwen/Qwen3-0.6B runs/qwen
python scripts/convert.py export runs/tiny exported/tiny --dtype bfloat16
python scripts/convert.py merge adapter merged/tuned
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
from typing import Literal

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
    ConfigError,
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
from eqx_decoders.io.huggingface.export import save_hf
from eqx_decoders.io.huggingface.export_directory import check_new_directory
from eqx_decoders.io.huggingface.hub import adapter_base, resolve
from eqx_decoders.io.huggingface.load import load_hf, read_config
from eqx_decoders.io.huggingface.peft import load_peft
from eqx_decoders.io.processes import broadcast_json
from eqx_decoders.io.run_lock import RunLock, check_run_dir
from eqx_decoders.model.init import count_parameters
from eqx_decoders.training.lora import merge_lora
from eqx_decoders.training.run.directory import RunDirectory, write_source
from eqx_decoders.training.run.load_export import export_run, load_run
from eqx_decoders.training.settings.files import settings_json
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.step import MeshConfig


DIFFERENT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(Devices):
    """Import a Hugging Face directory as a run directory, with its weights as the checkpoint of step 0."""

    source: str
    """Directory with config.json and safetensors files, or "org/name" on huggingface.co."""
    run_dir: str
    """Run directory to be created."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "source", "run_dir")

    def __call__(self) -> int:
        require("filelock")  # fail before the weights are loaded
        source, writes = Path(self.source), jax.process_index() == 0
        init_from = str(source.resolve()) if source.exists() else self.source
        run = RunDirectory(TrainConfig(run_dir=self.run_dir, init_from=init_from))
        is_run = run.has_settings or run.source_dir.exists() or Path(run.checkpoint_directory).exists()
        check(
            not broadcast_json("is_run", is_run),
            f"run_dir={self.run_dir!r} already contains a run: choose another directory.",
            CheckpointError,
        )
        check_run_dir(run.path) if writes else None
        model = load_hf(resolve(self.source).path, layout=self.layout())
        with RunLock(run.path) if writes else contextlib.nullcontext():
            if writes:
                write_source(model, run.source_dir)
                run.save_settings()  # training in this directory continues with this model
            with Checkpoints(run.checkpoint_directory) as checkpoints:
                checkpoints.save(0, {"model": model}, data_state={}, config=settings_json(run.settings))
            if writes:
                print(f"imported {self.source} ({count_parameters(model.config):,} parameters) as step 0 of {run.path}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Devices):
    """Export the model (with merged adapters) and the tokenizer of a run for from_pretrained and load_hf."""

    run_dir: str
    """Run directory of scripts/train.py, or the checkpoint directory of a run, such as gs://…"""
    directory: str
    """Directory to be created."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint. None: the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the tensors. None: the dtype of the run's weights."""
    ema: bool = True
    """Export the exponential moving average of the weights, if the run has one."""
    shard_gb: PositiveFloat = 5.0
    """Maximum size of a file in GB."""

    def __call__(self) -> int:
        run = RunDirectory.open(self.run_dir)
        check_new_directory(self.directory)
        model = load_run(run.path, self.step, ema=self.ema, layout=self.layout())
        export_run(model, run, self.directory, dtype=self.dtype, shard_bytes=max(1, int(self.shard_gb * 1e9)))
        if jax.process_index() == 0:
            print(f"exported {self.run_dir} ({count_parameters(model.config):,} parameters) to {self.directory}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge(Devices):
    """Merge a LoRA adapter into its base model, and write the model for from_pretrained and load_hf."""

    adapter: str
    """Directory with adapter_config.json and adapter_model.safetensors, in the format of PEFT."""
    directory: str
    """Directory to be created."""
    base: str | None = None
    """Base model: a directory, or "org/name" on huggingface.co. None: the base model that adapter_config.json names."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the tensors. None: the dtype of the base model."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "adapter", "directory", "base")

    def __call__(self) -> int:
        check_new_directory(self.directory)
        base = self.base or adapter_base(self.adapter)
        if base is None:
            raise ConfigError(
                f"base=None: {self.adapter}/adapter_config.json names no base model. Set --base to the model of the "
                "adapter."
            )
        adapted = load_peft(load_hf(base, dtype=None, layout=self.layout()), self.adapter, dtype="float32")
        model = merge_lora(adapted)
        save_hf(model, self.directory, dtype=self.dtype)
        if jax.process_index() == 0:
            print(f"wrote {base} with {self.adapter} to {self.directory}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToGGUF(Devices):
    """Write a model and its tokenizer as a GGUF file for llama.cpp."""

    source: str
    """Directory with config.json and safetensors files, "org/name" on huggingface.co, or another GGUF file."""
    file: str
    """File to be created."""
    dtype: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """GGUF type of matrices. Vectors are in float32."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "source", "file")

    def __call__(self) -> int:
        model = load_hf(self.source, dtype=None, layout=self.layout())
        save_gguf(model, self.file, dtype=self.dtype)
        if jax.process_index() == 0:
            print(f"wrote {self.source} ({count_parameters(model.config):,} parameters) to {self.file}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(CheckedFields):
    """Check that this library reads a Hugging Face directory or GGUF file correctly.

    If transformers and torch are installed, compares logits of random token ids with transformers. Otherwise, loads and
    exports the model again, and compares the tensors bit by bit. The exit code is 1 if there are differences.
    """

    checked_name = ""

    directory: str
    """Directory with config.json and safetensors files, GGUF file, or "org/name" on huggingface.co."""
    against: str | None = None
    """Second directory or file. If set, settings, tensors and logits of both are compared with each other."""
    tolerance: NonNegativeFloat = 1e-3
    """Maximum allowed difference of logits."""
    rows: PositiveInt = 2
    """Number of random sequences."""
    length: PositiveInt = 32
    """Length of the random sequences in tokens."""
    seed: int = 0
    """Seed of the random sequences."""
    mesh: MeshConfig = ONE_DEVICE

    def __call__(self) -> int:
        folder = resolve(self.directory).path
        if self.against is not None:
            return self._directories(folder, resolve(self.against).path)
        return self._transformers(folder) if verify.has_transformers() else self._tensors(folder)

    def _transformers(self, folder: Path) -> int:
        print(f"{folder}, compared with transformers:")
        ids = self._ids(folder)
        ours = self._logits(folder, ids)  # first, so that files that are refused are not opened with transformers
        return self._judge(verify.compare_logits(ours, verify.transformers_logits(folder, ids)))

    def _tensors(self, folder: Path) -> int:
        print(f"{folder}: transformers is not installed, so tensors are compared instead of logits:")
        count, different = verify.compare_tensors(folder, layout_of(self.mesh))
        if different:
            print(f"different: {len(different)} of {count} tensors change after load and export: {_first(different)}")
            return DIFFERENT
        print(f"the same: all {count} tensors are bit-identical after load and export")
        return 0

    def _directories(self, first: Path, second: Path) -> int:
        print(f"{first}, compared with {second}:")
        structure, values = verify.compare_directories(first, second)
        print(f"values: {len(values)} tensors differ{': ' if values else ''}{_first(values)}")
        if structure:
            print(f"different: {_first(structure)}")
            return DIFFERENT
        ids = self._ids(first)
        return self._judge(verify.compare_logits(self._logits(first, ids), self._logits(second, ids)))

    def _logits(self, folder: Path, ids: Int[np.ndarray, "rows length"]) -> Float[np.ndarray, "rows length vocab"]:
        return verify.model_logits(load_hf(folder, layout=layout_of(self.mesh)), ids)

    def _ids(self, folder: Path) -> Int[np.ndarray, "rows length"]:
        return verify.random_ids(read_config(folder)[0], self.rows, self.length, self.seed)

    def _judge(self, difference: verify.Difference) -> int:
        print(difference)
        is_same = difference.maximum <= self.tolerance
        result = "the same" if is_same else "different"
        print(f"{result}: maximum difference {difference.maximum:.3g}, tolerance {self.tolerance:.3g}")
        return 0 if is_same else DIFFERENT


def _first(lines: list[str], count: int = 10) -> str:
    rest = f"; and {len(lines) - count} more" if len(lines) > count else ""
    return "; ".join(lines[:count]) + rest


COMMANDS = {
    "import": (Import(source="", run_dir=""), ("source", "run_dir")),
    "export": (Export(run_dir="", directory=""), ("run_dir", "directory")),
    "merge": (Merge(adapter="", directory=""), ("adapter", "directory")),
    "gguf": (ToGGUF(source="", file=""), ("source", "file")),
    "verify": (Verify(directory=""), ("directory",)),
    "compare": (Compare(directory=""), ("directory",)),
}


Command = Import | Export | Merge | ToGGUF | Verify | Compare


def _flags() -> dict[str, str]:
    """Return the flag of each setting of all commands."""
    return {name: flag for command, _ in COMMANDS.values() for name, flag in flag_names(type(command)).items()}


@program(_flags)
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the program with command line arguments; return the exit code."""
    require("tyro")
    commands = {
        name: (str(inspect.getdoc(default)).partition("\n")[0], functools.partial(_run, name))
        for name, (default, _) in COMMANDS.items()
    }
    return run_command(commands, args, prog or sys.argv[0], (__doc__ or "").strip())


def parse(name: str, args: Sequence[str], prog: str | None = None) -> Command:
    """Parse the arguments of a command. Exits with code 2 for unknown arguments."""
    default, required = COMMANDS[name]
    titles = {type(default): type(default).__name__, Devices: "devices"}
    return parse_flags(
        default, titles=titles, required=required, args=args, prog=prog, description=inspect.getdoc(default)
    )


def _run(name: str, args: Sequence[str], prog: str) -> int:
    command = parse(name, args, prog)
    with contextlib.nullcontext() if isinstance(command, Verify | Compare) else command.connected():
        return command()
