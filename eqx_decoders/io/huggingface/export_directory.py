"""New directories of exports, which appear completely or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from eqx_decoders.errors import ConversionError, check
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import write_tokenizer
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.huggingface.hub import TOKENIZER_FILES
from eqx_decoders.io.processes import all_gather_json, from_first
from eqx_decoders.io.text.chat_template import ADDITIONAL, unify_chat_templates
from eqx_decoders.io.text.tokenizer_formats import find_tokenizer_file


def check_new_directory(directory: str | Path) -> None:
    """Raise ConversionError if `exported_directory` could not make a directory, as seen by the first process."""
    folder = Path(expanded(directory)).absolute()
    refusal = from_first("export", _refusal(folder) if jax.process_index() == 0 else None)
    check(refusal is None, f"{folder} {refusal}.", ConversionError)


def _refusal(folder: Path) -> str | None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        return "is not empty: give a new directory"
    above = next(path for path in folder.parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        return f"cannot be made: {above} is not a directory that may be written to"
    return None


@contextlib.contextmanager
def exported_directory(directory: str | Path) -> Iterator[Path | None]:
    """Make a directory for the block to fill, which gets its name at the end; None in all processes but the first.

    Raises ConversionError if `directory` is neither new nor an empty directory, or cannot be written. All processes
    wait for each other at the end.
    """
    folder, partial = Path(expanded(directory)).absolute(), None
    check_new_directory(folder)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            stack.callback(shutil.rmtree, partial, ignore_errors=True)  # the rest of it after an error
            partial.chmod(0o755)
        yield partial
        if partial is not None:
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
    all_gather_json("exported")


def check_tokenizer(source: Path) -> None:
    """Raise ConversionError for a path from which `copy_tokenizer` would copy nothing."""
    is_there = source.is_dir() or (is_gguf(source) and source.is_file())
    check(
        is_there,
        f"save_hf: tokenizer={str(source)!r} is neither a directory nor a GGUF file: give one that holds a tokenizer.",
        ConversionError,
    )


def copy_tokenizer(source: str | Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer and the generation settings that exist.

    If `source` has several different chat templates, the copy only has the template that `load_chat_template` loads.
    """
    if source is not None and is_gguf(source) and Path(source).is_file():
        write_tokenizer(source, folder)
    if source is None or not Path(source).is_dir():
        return
    directory = Directory(source)
    vocabulary = find_tokenizer_file(directory.path)
    names: list[str] = [*TOKENIZER_FILES, *([] if vocabulary is None else [vocabulary]), "generation_config.json"]
    for name in dict.fromkeys(names):
        if directory.has(name):
            shutil.copyfile(directory.file(name), folder / name)
    for path in directory.files(ADDITIONAL, ".jinja"):
        (folder / ADDITIONAL).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / ADDITIONAL / path.name)
    unify_chat_templates(folder)
