"""Directories of exports, which are written completely or not at all, and the tokenizer files in them."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from eqx_decoders.errors import ConversionError
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import write_tokenizer
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.huggingface.hub import TOKENIZER_FILES
from eqx_decoders.io.processes import all_gather_json, broadcast_json
from eqx_decoders.io.text.chat_template import ADDITIONAL, unify_chat_templates
from eqx_decoders.io.text.tokenizer_formats import find_tokenizer_file


def check_new_directory(directory: str | Path) -> None:
    """Raise ConversionError if the first process could not create the directory. All processes must call it."""
    folder = Path(expanded(directory)).absolute()
    message = broadcast_json("export", _reason_against(folder) if jax.process_index() == 0 else None)
    if message is not None:
        raise ConversionError(message)


def _reason_against(folder: Path) -> str | None:
    """Return an error message if an export cannot be written to `folder`, else None."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        return f"{folder} is not empty. Give a new or empty directory for the export."
    parent = next(path for path in folder.parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return f"{folder} cannot be created, because {parent} is not a writable directory. Give another directory."
    return None


@contextlib.contextmanager
def exported_directory(directory: str | Path) -> Iterator[Path | None]:
    """Yield a temporary directory, which is renamed to `directory` after the with block; None in other processes.

    The first process gets the directory. If the with block raises an error, the temporary directory is removed. All
    processes must call it and wait for each other at the end. Raises ConversionError if `directory` is not empty or
    cannot be written.
    """
    folder = Path(expanded(directory)).absolute()
    partial = None
    check_new_directory(folder)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            stack.callback(shutil.rmtree, partial, ignore_errors=True)  # has no effect after the renaming
            partial.chmod(0o755)
        yield partial
        if partial is not None:
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
    all_gather_json("exported")


def check_tokenizer(source: Path) -> None:
    """Raise ConversionError for a path from which `copy_tokenizer` cannot copy."""
    if not source.is_dir() and not (is_gguf(source) and source.is_file()):
        raise ConversionError(
            f"save_hf: tokenizer={str(source)!r} must be a directory or a GGUF file that contains a tokenizer."
        )


def copy_tokenizer(source: str | Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer, its chat templates and `generation_config.json`, as far as they exist.

    `source`: a directory or a GGUF file. With None and other paths, nothing is copied. If `source` has several
    different chat templates, the copy has only the template that `load_chat_template` loads.
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
