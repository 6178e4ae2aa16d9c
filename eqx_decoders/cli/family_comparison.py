"""The command `convert compare`: finds the families of the library that are nearest to an unknown checkpoint."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eqx_decoders.core.config_reader import abbreviate
from eqx_decoders.errors import CheckedFields, ConversionError, check
from eqx_decoders.families.comparison import Shape, rank
from eqx_decoders.families.comparison_report import comparison_report
from eqx_decoders.families.registry import is_known, library_families
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.io.huggingface.directory import Directory, tensor_shapes
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(CheckedFields):
    """Compare a checkpoint of an unknown model type with the families of the library.

    Reads config.json and the names and shapes of the tensors, but no weights: an index without weight files is enough.
    Writes no files.
    """

    checked_name = ""

    directory: str
    """Directory with config.json and safetensors files, or with their index only."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "directory")

    def __call__(self) -> int:
        directory = Directory(self.directory)
        content = directory.json("config.json")
        model_type = _checked_type(content, directory.path)
        shapes = _tensor_shapes(directory, content)
        if is_known(model_type):
            print(
                f"{directory.path}: the library knows model_type={model_type}. To check that it reads the checkpoint:"
            )
            print(f"  python scripts/convert.py verify {directory.path}")
            print("To compare a variant of this model type, give it another model_type in config.json.")
            return 0
        families = {family.model_type: (family, module) for family, module in library_families().values()}
        ranking = rank([family for family, _ in families.values() if family.text is None], content, shapes)
        print(f"{directory.path}: the library does not know model_type={abbreviate(model_type)}.")
        print(comparison_report(ranking))
        print(_next_steps(directory.path, families[ranking.nearest.family.model_type][1]))
        return 0


def _checked_type(content: Mapping[str, Any], path: Path) -> str:
    """Return the model type. Raises ConversionError if it is not a string, or if the model has encoders."""
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or not model_type.strip():
        raise ConversionError(
            f"{path}/config.json: model_type={abbreviate(model_type)} must be the name of a model type: add it."
        )
    nested = [key for key in ("text_config", "vision_config", "audio_config", "llm_config") if key in content]
    check(
        not nested,
        f"{path}/config.json has {', '.join(nested)}: models with encoders cannot be compared. Give a directory whose "
        f"config.json describes only the decoder.",
        ConversionError,
    )
    return model_type


def _tensor_shapes(directory: Directory, content: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors by name. The shape of a quantized tensor is that of the dequantized one."""
    shapes = tensor_shapes(directory)
    if content.get("quantization_config") is None or None in shapes.values():
        return shapes
    return {name: tensor.shape for name, tensor in checkpoint_tensors(directory).items()}


def _next_steps(directory: Path, module: str) -> str:
    steps = (
        f"Copy {module.replace('.', '/')}.py, the file of the nearest family, to FILE.py.",
        "In FILE.py keep only this family, as FAMILY.",
        "Set model_type and architecture as in config.json and MODELS = {}, and remove aliases.",
        "Change settings, weights and the function that builds the configuration, as the differences above require.",
        f"python scripts/convert.py verify {directory} --plugin FILE.py    # compares the logits with transformers",
        "If the logits differ, go through the open questions.",
        'To add the family to the library, see "Add a family" in eqx_decoders/families/README.md.',
    )
    return "\n".join(["", "Next steps:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))])
