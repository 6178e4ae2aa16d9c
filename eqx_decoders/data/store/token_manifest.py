"""Manifest in a run's directory: the sources of its data with their hashes, and the shards with their documents.

A run that goes on with its manifest has the same data; shards that the cache has lost are made again.
"""

import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.data.sources.readers import Part
from eqx_decoders.data.sources.sources import Entry
from eqx_decoders.data.store.corpus import held_out_draws
from eqx_decoders.data.store.shards import ShardInfo
from eqx_decoders.data.store.token_store import OWN
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.text.chat_template import ChatTemplate


FLAGS = {
    name: "--" + name.replace("_", "-")
    for name in ("tokenizer", "text_field", "chat_template", "special_tokens_in_text")
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest in a run's directory, or None. Raises DataError for a file with other content."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError):  # none, or one that was cut short
        return None
    valid = isinstance(manifest, dict) and {"sources", "fingerprint", "shards"} <= manifest.keys()
    check(valid, f"{file} is no manifest of tokens: give another folder, or move it.", DataError)
    return manifest


def part_of(row: Mapping[str, Any]) -> Part | None:
    """Return the part of its source that a shard's entry names; None for the whole source."""
    return None if row["part"] is None else (row["part"][0], row["part"][1])


def describe_shards(infos: Sequence[ShardInfo], trained: Sequence[ShardInfo], fraction: float) -> dict[str, Any]:
    """Return the manifest's entries on all shards: which draws are held out, targets, and counts of dropped records.

    trained: shards of the training data, of whose documents `fraction` is held out.
    """
    smallest = min((info.smallest for info in trained), default=1.0)
    largest = max((info.largest for info in trained), default=0.0)
    below, equal = held_out_draws(fraction, smallest, largest)
    has_targets = any("targets" in info.sections for info in infos)
    counts: dict[str, collections.Counter[str]] = {"dropped": collections.Counter(), "notes": collections.Counter()}
    for info in infos:
        counts["dropped"].update(info.dropped)
        counts["notes"].update(info.notes)
    totals = {name: dict(count) for name, count in counts.items()}
    return {"held_out": {"below": below, "equal": equal}, "has_targets": has_targets, **totals}


def _held_out_part(settings: Mapping[str, Any]) -> str:
    has_path = settings.get("own_held_out_path")
    return "the data of --held-out" if has_path else f"--held-out-fraction {settings.get('held_out_fraction')}"


def check_unchanged(
    folder: Path,
    manifest: Mapping[str, Any],
    request: Mapping[str, Any],
    entries: Mapping[str, Entry],
    template: ChatTemplate | None,
) -> None:
    """Raise DataError that lists every difference between the run's data and the requested ones."""
    if "chat_template" in manifest:
        request = {**request, "chat_template": None if template is None else template.content_hash}
    changes = [
        f"{FLAGS.get(key, key)} was {manifest.get(key)!r} and is {now!r}"
        for key, now in request.items()
        if manifest.get(key) != now and key not in ("held_out_fraction", "own_held_out_path")
    ]
    was, now = _held_out_part(manifest), _held_out_part(request)
    changes += [f"held out was {was} and is {now}"] * (was != now)
    old = manifest["sources"]
    if was != now:  # a file that comes or goes with them is no change of its own
        old = {name: entry for name, entry in old.items() if not name.startswith(OWN)}
        entries = {name: entry for name, entry in entries.items() if not name.startswith(OWN)}
    changes += [f"{name} is gone" for name in old if name not in entries]
    changes += [f"{name} is new" for name in entries if name not in old]
    changes += [
        f"{name} has other contents"
        for name, now in entries.items()
        if name in old and old[name]["hash"] != now["hash"]
    ]
    if changes:
        listed = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
        raise DataError(
            f"the data are not those of the tokens in {folder}: {listed}. "
            "Restore them to go on with this run, or start another run directory."
        )
