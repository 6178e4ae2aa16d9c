"""Tokens of a corpus, made once: a memory-mapped file, an index of its documents and a manifest of what they are.

A document is stored as `[start] tokens [end]`, where `end` is the tokenizer's eos and `start` its bos (eos, if it has
none). The model thus predicts the first real token from the separator and learns where documents end. A prompt with its
completion is stored like that, too, but gets no second `start` or `end` where its text has one. A conversation stands
as its chat template writes it, with nothing around it: the template knows how conversations begin and end.

Of these two only a part is trained on: `targets.bin` then tells for every token of the corpus whether it is a target.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.errors import DataError
from eqx_decoders.io.chat import ChatTemplate
from eqx_decoders.io.lock import lock_file
from eqx_decoders.io.tokenizer import Tokenizer
from eqx_decoders.training.corpus import HELD_OUT, Paths, find_sources
from eqx_decoders.training.token_writer import TARGETS, Counts, describe_file, write_store


FORMAT = 1
FLAGS = {
    name: "--" + name.replace("_", "-") for name in ("tokenizer", "text_field", "held_out_fraction", "chat_template")
} | {"own_held_out_path": "whether --held-out is given"}


class TokenStore:
    """The finished tokens of a corpus; `store[i]` are those of document `i`."""

    def __init__(self, folder: Path):
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        self.offsets: np.ndarray = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        self._held_out: np.ndarray = np.load(folder / "held_out.npy", mmap_mode="r", allow_pickle=False)
        self.tokens: np.ndarray = np.memmap(folder / "tokens.bin", self.manifest["dtype"], "r")
        self.has_targets: bool = TARGETS in self.manifest["sizes"]
        self._targets = np.memmap(folder / TARGETS, bool, "r") if self.has_targets else None

    def __len__(self) -> int:
        return len(self._held_out)

    def __getitem__(self, document: int | np.integer) -> np.ndarray:
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def targets(self, document: int | np.integer) -> np.ndarray:
        """Which tokens of `document` are targets; the first never is."""
        place = slice(self.offsets[document], self.offsets[document + 1])
        return np.arange(place.stop - place.start) > 0 if self._targets is None else self._targets[place]

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Tokens of each of the documents from `start` to before `stop`, with their separators."""
        return np.diff(np.asarray(self.offsets[start : stop + 1]))

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        """Which of these documents are held out."""
        return np.asarray(self._held_out[start:stop])

    @property
    def content_hash(self) -> str:
        """Equal for equal documents, tokenizers and chat templates, wherever and whenever they were read."""
        return self.manifest["fingerprint"]

    def counts(self, split: str) -> Counts:
        """How much there is of `split`."""
        return Counts(**self.manifest["counts"][split])


def open_store(
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    path: Paths = None,
    held_out_path: Paths = None,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
    template: ChatTemplate | None = None,
    most: int | None = None,
) -> TokenStore:
    """Open the tokens of a corpus in `folder`, making them first if they aren't there.

    The manifest is written last, by a rename: a store without it was interrupted and is made again. One process at a
    time makes it (a file lock), others wait and then open it. `template` writes conversations as texts. `most` takes
    only so many documents into a new store, to look at them: it is not opened again.

    Raises DataError if the files, the tokenizer, the split or, where there are conversations, the template are not
    those from which an existing store was made, and says what changed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    request = {
        "format": FORMAT,
        "tokenizer": tokenizer.content_hash,
        "text_field": text_field,
        "held_out_fraction": 0.0 if held_out_path else held_out_fraction,
        "own_held_out_path": held_out_path is not None,
    }
    files = {f"train:{one.name}": one.file for one in find_sources(path)}
    held_out = find_sources(held_out_path, HELD_OUT) if held_out_path else ()
    files |= {f"held_out:{one.name}": one.file for one in held_out}
    with _locked(folder / "lock"):
        manifest = _read_manifest(folder)
        if manifest is None:
            write_store(folder, tokenizer, path, held_out_path, request, files, template, most)
        else:
            if "chat_template" in manifest:
                request["chat_template"] = None if template is None else template.content_hash
            _check_unchanged(folder, manifest, request, files)
    return TokenStore(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        lock_file(file.fileno(), wait=True)
        yield


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete store; None if a file is missing or has another length."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if sizes == manifest["sizes"] else None


def _check_unchanged(
    folder: Path, manifest: dict[str, Any], request: dict[str, Any], files: Mapping[str, Path]
) -> None:
    """Raise DataError with every difference between the store and what is asked for."""
    changes = [
        f"{FLAGS.get(key, key)} was {manifest.get(key)!r} and is {now!r}"
        for key, now in request.items()
        if manifest.get(key) != now
    ]
    old = manifest["sources"]
    changes += [f"{name} is gone" for name in old if name not in files]
    changes += [f"{name} is new" for name in files if name not in old]
    changes += [f"{name} has other contents" for name in files if name in old and _file_changed(files[name], old[name])]
    if changes:
        listed = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
        raise DataError(
            f"the data are not those of the tokens in {folder}: {listed}. "
            "Restore them to go on with this run, or start another run directory."
        )


def _file_changed(file: Path, old: dict[str, Any]) -> bool:
    stat = file.stat()
    if stat.st_size == old["size"] and stat.st_mtime_ns == old["mtime_ns"]:
        return False
    return stat.st_size != old["size"] or describe_file(file)["hash"] != old["hash"]
