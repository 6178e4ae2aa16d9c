"""Directories beside each other: every other number and shape is found, and what only spells it differently is not."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eqx_decoders.io.verify import compare_directories


MISTRAL = Path(__file__).parent.parent / "fixtures" / "mistral_window"
TABLE, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize("value, gap", [(0.5, "0.5"), (np.nan, "nan"), (np.inf, "inf")])
def test_another_number_is_found(tmp_path, value, gap):
    """In the second of two tensors, at one place."""
    directory = Path(shutil.copytree(MISTRAL, tmp_path / "other"))
    tensors = load_file(directory / "model.safetensors")
    tensors[TABLE][3, 2] = np.nan  # in both
    save_file(tensors, directory / "model.safetensors")
    again = Path(shutil.copytree(directory, tmp_path / "again"))
    assert compare_directories(directory, again) == ([], [])
    tensors[NORM][1] = tensors[NORM][1] + value
    save_file(tensors, again / "model.safetensors")
    assert compare_directories(directory, again) == ([], [f"{NORM}: by up to {gap}"])
    assert compare_directories(again, directory) == ([], [f"{NORM}: by up to {gap}"])
