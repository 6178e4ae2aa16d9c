"""Repositories on huggingface.co: their local copies."""

import re
from pathlib import Path

from eqx_decoders.errors import ConversionError, missing_package
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.huggingface.directory import Directory, exists
from eqx_decoders.io.run_lock import is_of_a_run
from eqx_decoders.io.text.chat_template import ADDITIONAL
from eqx_decoders.io.text.tokenizer_formats import PATTERNS


# Files of a tokenizer, and of a processor of images and audio; copied into an export, never interpreted here but for
# the .json files.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def resolve(source: str | Path, revision: str | None = None) -> Directory:
    """Return the directory or GGUF file `source`, or the local copy of the repository `"org/name"`.

    Raises ConversionError for a run directory.
    """
    path = Path(expanded(source))
    if not (path / "config.json").is_file() and is_of_a_run(path):
        raise ConversionError(
            f"{path} is a run directory of scripts/train.py, not a Hugging Face checkpoint. generate.py, "
            f"serve.py and evaluate.py load it with --run-dir; `python scripts/convert.py export {path} DIRECTORY` "
            "writes a checkpoint."
        )
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        from eqx_decoders.io.gguf.gguf_directory import GGUFDirectory  # needs the extra `gguf`

        return GGUFDirectory(path)
    repository = isinstance(source, str) and re.fullmatch(r"[\w\-][\w.\-]*/[\w\-][\w.\-]*", source)
    if exists(path) or not repository:
        return Directory(path)
    return Directory(_download(str(source), revision))


def _download(name: str, revision: str | None) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_package("huggingface_hub", "hf") from error
    wanted = ["*.json", "model.safetensors", "model-*-of-*.safetensors", *TOKENIZER_FILES]
    wanted += [*PATTERNS, f"{ADDITIONAL}/*.jinja"]
    # Other subfolders hold other formats of the same weights. Of the files in subfolders, only names of templates
    # (.jinja) end with "a".
    nested = ["*/*[!a]"]
    try:
        return snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=nested)
    except Exception as error:  # of huggingface_hub, of its transport, and OSError
        lines = str(error).strip().splitlines() or [""]
        cause = f"{type(error).__name__}: {' '.join(dict.fromkeys((lines[0][:200], lines[-1][:200])))}"
        raise ConversionError(
            f"{name!r} is no directory here, and could not be downloaded ({cause}). Check the name and the network, or "
            "give a directory."
        ) from error
