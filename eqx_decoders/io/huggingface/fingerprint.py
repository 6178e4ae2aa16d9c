"""Fingerprint of a checkpoint's files, by which another one is recognized without reading all of its weights."""

import hashlib
from pathlib import Path

from eqx_decoders.io.huggingface.hub import resolve


_BLOCK, _BLOCKS = 4096, 64
_WEIGHTS = (".safetensors", ".gguf")


def fingerprint(source: str | Path) -> str:
    """Return a hash of a checkpoint: of `config.json`, and of the sizes and 64 spread blocks of its weight files.

    Training moves nearly every weight, so that some block changes; a single number that was edited may go unnoticed.
    """
    path = Path(resolve(source).path)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in _WEIGHTS)
    digest = hashlib.blake2b(digest_size=16)
    if (path / "config.json").is_file():
        digest.update((path / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for number in range(_BLOCKS):
                stream.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()
