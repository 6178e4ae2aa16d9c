"""Helpers that open or resume a run directory."""

import dataclasses
import re
from pathlib import Path

from eqx_decoders.training.run.directory import RunDirectory, resume
from eqx_decoders.training.settings.files import Changes
from eqx_decoders.training.settings.run import TrainConfig


def run_at(settings: TrainConfig, folder: Path | str) -> RunDirectory:
    """Return the run directory `folder`; it replaces `settings.run_dir`."""
    return RunDirectory(dataclasses.replace(settings, run_dir=str(folder)))


def resumed(settings: TrainConfig, folder: Path | str) -> tuple[TrainConfig, Changes]:
    """Return the settings of the resumed run in `folder`, and the changed settings."""
    run, changes = resume(run_at(settings, folder))
    return dataclasses.replace(run.settings, run_dir=settings.run_dir), changes


def first_step(err: str) -> int | None:
    """Return the step from which a program reports to resume; None for a new run."""
    found = re.search(r"resum\w*\D*(\d+)", err)
    return int(found[1]) if found else None
