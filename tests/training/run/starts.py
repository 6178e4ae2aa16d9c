"""Run directories as a start with some settings sees them."""

import dataclasses
import re
from pathlib import Path

from eqx_decoders.training.run.directory import RunDirectory, resume
from eqx_decoders.training.settings.files import Changes
from eqx_decoders.training.settings.run import TrainConfig


def run_at(settings: TrainConfig, folder: Path | str) -> RunDirectory:
    """Return the run in a folder, whatever folder the settings name."""
    return RunDirectory(dataclasses.replace(settings, run_dir=str(folder)))


def resumed(settings: TrainConfig, folder: Path | str) -> tuple[TrainConfig, Changes]:
    """Return the settings with which a run in a folder is resumed, and what they change."""
    run, changes = resume(run_at(settings, folder))
    return dataclasses.replace(run.settings, run_dir=settings.run_dir), changes


def first_step(err: str) -> int | None:
    """Return the step at which a program says that it resumes a run; None if it started a new one."""
    found = re.search(r"resum\w*\D*(\d+)", err)
    return int(found[1]) if found else None
