"""Sources of checkpoints: directories, GGUF files and repositories on huggingface.co; and their fingerprints."""

import hashlib
import re
from pathlib import Path

from eqx_decoders.errors import ConversionError, missing_package
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.huggingface.directory import Directory, exists
from eqx_decoders.io.run_lock import is_of_a_run
from eqx_decoders.io.text.chat_template import ADDITIONAL
from eqx_decoders.io.text.tokenizer_formats import PATTERNS


# Files of tokenizers and of processors of images and audio. Exports copy them.
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
    """Return the directory or GGUF file `source`, or a local copy of the repository `"org/name"`.

    Raises ConversionError for a run directory, and for a repository that cannot be downloaded.
    """
    path = Path(expanded(source))
    if not (path / "config.json").is_file() and is_of_a_run(path):
        raise ConversionError(
            f"{path} is a run directory of scripts/train.py, not a Hugging Face checkpoint. generate.py, "
            f"serve.py and evaluate.py load it with --run-dir; `python scripts/convert.py export {path} DIRECTORY` "
            "writes a checkpoint."
        )
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        base = adapter_base(path)
        raise ConversionError(
            f"{path} contains only a LoRA adapter, without its base model{f' {base}' if base else ''}. Load the base "
            f"model, with --adapter {path} in generate.py and evaluate.py, --adapter name={path} in serve.py, or "
            f"load_peft(model, {str(path)!r}) in Python. `python scripts/convert.py merge {path} DIRECTORY` writes a "
            "merged model."
        )
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        from eqx_decoders.io.gguf.gguf_directory import GGUFDirectory  # needs the extra `gguf`

        return GGUFDirectory(path)
    repository = isinstance(source, str) and re.fullmatch(r"[\w\-][\w.\-]*/[\w\-][\w.\-]*", source)
    if exists(path) or not repository:
        return Directory(path)
    return Directory(_download(str(source), revision))


def adapter_base(directory: str | Path) -> str | None:
    """Return the base model that the `adapter_config.json` of a PEFT adapter names, if there is one."""
    name = Directory(directory).json("adapter_config.json").get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _download(name: str, revision: str | None) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_package("huggingface_hub", "hf") from error
    allowed = ["*.json", "model.safetensors", "model-*-of-*.safetensors", *TOKENIZER_FILES]
    allowed += [*PATTERNS, f"{ADDITIONAL}/*.jinja"]
    # Subfolders contain other formats of the same weights, and chat templates. "a" is the last letter of .jinja.
    ignored = ["*/*[!a]"]
    try:
        return snapshot_download(name, revision=revision, allow_patterns=allowed, ignore_patterns=ignored)
    except Exception as error:  # exceptions of huggingface_hub and its HTTP client, and OSError
        lines = str(error).strip().splitlines() or [""]
        cause = f"{type(error).__name__}: {' '.join(dict.fromkeys((lines[0][:200], lines[-1][:200])))}"
        raise ConversionError(
            f"{name!r} is not a local directory, and could not be downloaded as a repository ({cause}). Check the name "
            "and the network, or give a directory."
        ) from error


_BLOCK_BYTES = 4096
_NUM_BLOCKS = 64


def fingerprint(source: str | Path) -> str:
    """Return a hash of a checkpoint's `config.json`, and of the sizes and 64 blocks of each file with weights.

    The blocks are evenly spaced. Training changes nearly every weight, so that the hash changes. The hash may stay the
    same if only a few weights were edited.
    """
    path = Path(resolve(source).path)
    suffixes = (".safetensors", ".gguf")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in suffixes)
    digest = hashlib.blake2b(digest_size=16)
    if (path / "config.json").is_file():
        digest.update((path / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for block in range(_NUM_BLOCKS):
                stream.seek(max(0, size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1))
                digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()
