"""The command `convert draft`: a draft of the table of a family that is not here."""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eqx_decoders.core.config_reader import abbreviate
from eqx_decoders.errors import CheckedFields, ConfigError, ConversionError, EqxDecodersError, check
from eqx_decoders.families.draft.draft_report import report
from eqx_decoders.families.draft.questions import notes_of
from eqx_decoders.families.draft.ranking import rank
from eqx_decoders.families.draft.source import draft_source, python_name
from eqx_decoders.families.draft.tensor_groups import Shape
from eqx_decoders.families.registry import is_known, library_families
from eqx_decoders.io.atomic_files import expand_paths, write_atomically
from eqx_decoders.io.huggingface.directory import Directory, tensor_shapes
from eqx_decoders.io.huggingface.load import abstract_hf, read_config
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft(CheckedFields):
    """Draft the table of a family that is not here, from config.json and the names and shapes of its tensors.

    No weight is read: an index without its files is enough. The draft is that of the nearest family with what differs;
    what is not certain stands in it as QUESTION.
    """

    checked_name = ""

    directory: str
    """Directory with config.json and safetensors files, or their index alone."""
    output: str | None = None
    """File of the draft, a new one; None: MODEL_TYPE.py."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "directory", "output")

    def __call__(self) -> int:
        directory = Directory(self.directory)
        content = directory.json("config.json")
        kind = _checked_type(content, directory.path)
        file = Path(self.output or f"{python_name(kind)}.py")
        check(file.suffix == ".py", f"output={str(file)!r} must end with .py.")
        shapes = _shapes(directory, content)
        if is_known(kind):
            return self._known(directory, kind, all(shape is not None for shape in shapes.values()))
        check(not file.exists(), f"output={str(file)!r} exists: name a new file with --output.")
        families = {name: family for name, (family, _) in library_families().items() if family.text is None}
        ranking = rank(families.values(), content, shapes)
        nearest, shares = ranking.nearest, [each.shares for each in ranking.likeness]
        notes = notes_of(nearest, ranking.words)
        draft = draft_source(nearest, notes, _source(library_families()[nearest.family.model_type][1]))
        write_atomically(file, draft.encode())
        print(f"{directory.path}: {abbreviate(kind)} is no family here yet")
        print(report(shares, ranking.suspects, nearest, notes, draft))
        print(_next_steps(file, directory.path, draft))
        return 0

    def _known(self, directory: Directory, kind: str, complete: bool) -> int:
        """Say that a family of the library reads the directory. Raises ConversionError where it doesn't."""
        try:
            abstract_hf(directory.path) if complete else read_config(directory.path)
        except EqxDecodersError as error:
            reason = f"{kind} is a family here, which refuses this directory: {error}"
            raise ConversionError(f"{reason}\nFor a draft give it a model_type of its own in config.json.") from error
        print(f"{directory.path} is read by the family {kind} already, and no draft is written. To compare its logits:")
        print(f"  python scripts/convert.py verify {directory.path}")
        return 0


def _checked_type(content: Mapping[str, Any], path: Path) -> str:
    kind = content.get("model_type")
    named = isinstance(kind, str) and bool(kind.strip())
    check(named, f"{path}/config.json: model_type={abbreviate(kind)} must name the family.", ConversionError)
    nested = [key for key in ("text_config", "vision_config", "audio_config", "llm_config") if key in content]
    rule = "a model with encoders, and drafts are of decoders alone: give the directory of its decoder"
    check(not nested, f"{path}/config.json has {', '.join(nested)}: {rule}.", ConversionError)
    return str(kind)


def _shapes(directory: Directory, content: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors, of quantized ones as those of the numbers that they encode."""
    shapes = tensor_shapes(directory)
    if content.get("quantization_config") is None or None in shapes.values():
        return shapes
    return {name: tensor.shape for name, tensor in checkpoint_tensors(directory).items()}


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except OSError as error:
        raise ConfigError(f"{module} is installed without its source, of which drafts are made.") from error


def _next_steps(file: Path, directory: Path, draft: str) -> str:
    steps = ["answer its QUESTION lines"] if "# QUESTION:" in draft else []
    steps.append(f"python scripts/convert.py verify {directory} --family {file}    # against transformers")
    steps.append(f"python scripts/generate.py --model {directory} --family {file}    # and so in every program")
    numbered = [f"  {number}. {step}" for number, step in enumerate(steps, 1)]
    return "\n".join(["", f"the draft is {file}. Next:", *numbered])
