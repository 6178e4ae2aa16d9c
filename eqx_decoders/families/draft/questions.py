"""What a draft says of keys and tensors: rows where they are certain, and questions where they are not."""

import re
from collections.abc import Iterable
from typing import Any

from eqx_decoders.core.config_reader import abbreviate
from eqx_decoders.families.draft.comparison import Comparison, is_off
from eqx_decoders.families.draft.notes import Note, Notes, literal
from eqx_decoders.families.draft.tensor_groups import TensorGroup, meanings
from eqx_decoders.families.draft.vocabulary import Vocabulary, flat_rows
from eqx_decoders.layers.moe.experts import ExpertsConfig


# Keys that change no output, by their words, with the reason.
_HARMLESS = {
    r"drop(out|path|_rate)?\b|dropout|pdrop|layerdrop": "dropout happens in training only, and a loaded model has none",
    r"initializer|(^|_)init(_|$)|dt_(min|max)$": "initial weights alone depend on it",
    r"aux_loss|jitter|z_loss|output_router_logits|loss_coef|loss_weight": "routers are trained with it",
    r"^output_|^use_cache|gradient_checkpointing|flash_attn|fused_kernels": "how transformers runs it",
}
_LONGEST = 80


def notes_of(comparison: Comparison, words: Vocabulary) -> Notes:
    """Return what a draft says of a comparison."""
    keys, harmless = _key_notes(comparison, words)
    return Notes(keys, harmless, _tensor_notes(comparison, words), _model_notes(comparison))


def _key_notes(comparison: Comparison, words: Vocabulary) -> tuple[list[Note], dict[str, str]]:
    """Return the rows of keys that the family does not read, and keys without effect, each with the reason."""
    notes, harmless = [], {}
    for key in comparison.unknown_keys:
        reason = next((text for pattern, text in _HARMLESS.items() if re.search(pattern, key)), None)
        if reason is None:
            notes.append(_key_note(key, comparison, words))
        else:
            harmless[key] = reason
    notes += [Note(question=sentence.partition(" Known:")[0][:300]) for sentence in comparison.reading.refused.values()]
    if comparison.reading.error:
        notes.append(
            Note(question=f"the settings do not make a model of this family: {comparison.reading.error[:200]}")
        )
    return notes, harmless


def _key_note(key: str, comparison: Comparison, words: Vocabulary) -> Note:
    value = comparison.content[key]
    code = f"Only({literal(key)}, {literal(value)}, written=True)"
    code = code if len(code) <= _LONGEST else ""
    if is_off(value):
        return Note(code, reason="off: other values are refused")
    if value is True and _is_visible(key, comparison, words):
        return Note(code, reason="the tensors say it")
    readers = [f"`{family}` reads it as {path}" for family, path in words.readers.get(key, ())[:2]]
    what = ", ".join(readers) or "no family here reads it"
    return Note(code, f"what does {abbreviate(key)}={abbreviate(value)} change? {what[:1].upper()}{what[1:]}.")


def _is_visible(key: str, comparison: Comparison, words: Vocabulary) -> bool:
    """Return True for a key that says what the tensors do: that there are these biases, or these norms."""
    config = comparison.config
    if config is None:
        return False
    block = config.blocks[0]
    seen = {"head_bias": config.head_bias, "mlp.bias": getattr(block.mlp, "bias", False)}
    for field in ("qkv_bias", "out_bias", "qk_norm", "sinks"):
        seen[field] = bool(getattr(block.mixer, field, None))
    paths = [path for _, path in words.readers.get(key, ())]
    names = [key.replace("qk_layernorm", "qk_norm").replace("mlp_bias", "mlp.bias"), *paths]
    return any(there and field in name for field, there in seen.items() for name in names)


def _tensor_notes(comparison: Comparison, words: Vocabulary) -> list[Note]:
    """Return the questions of tensors that no row explains, and of rows without a tensor; and the rows to add."""
    notes = [
        Note(f"Weight({literal(row.name)}, {literal(row.path)}, {literal(row.pattern)})") for row in comparison.added
    ]
    for members in _by_module(comparison).values():
        notes.append(Note(question=_module_question(members, comparison, words)))
    lacking: dict[str, list[TensorGroup]] = {}
    for group in comparison.lacking.values():
        lacking.setdefault(group.pattern.rsplit(".", 2)[0], []).append(group)
    for module, members in lacking.items():
        names = ", ".join(member.text.removeprefix(f"{module}.") for member in members)
        name = comparison.family.model_type
        notes.append(Note(question=f"the file has no {names} in {module}, as `{name}` has. What is there instead?"))
    return notes


def _by_module(comparison: Comparison) -> dict[tuple[str, bool], list[TensorGroup]]:
    """Return the tensors that are not explained by their modules, and whether the family has others in their place."""
    modules: dict[tuple[str, bool], list[TensorGroup]] = {}
    for pattern, wanted in comparison.unexplained.items():
        key = (pattern, True) if wanted is not None else (pattern.rpartition(".")[0], False)
        modules.setdefault(key, []).append(comparison.groups[pattern])
    return modules


def _module_question(members: list[TensorGroup], comparison: Comparison, words: Vocabulary) -> str:
    first = members[0]
    wanted = comparison.unexplained[first.pattern]
    layers = len(_blocks(comparison)) or 1 + max(first.layers, default=0)
    partly = first.layers and first.layers != set(range(layers))
    where = f" (layers {_listed(first.layers)})" if partly else ""
    guesses = meanings(first.shape, comparison.sizes)
    if wanted is not None and wanted.layers != first.layers:
        return f"{first.text} is in the layers {_listed(first.layers)}, and would be in {_listed(wanted.layers)}."
    if wanted is not None:
        return f"{first.text} would be {wanted.text.removeprefix(first.pattern).strip()}.{_guessed(guesses)}"
    names = ", ".join(member.text.rpartition(".")[2] for member in members)
    module = first.pattern.rpartition(".")[0]
    name = first.text if len(members) == 1 else f"{module}: {names}"
    paths = [f"what other families have at {path}" for path in words.paths(first.pattern)[:1]]
    verb = "belongs" if len(members) == 1 else "belong"
    text = f"{name}{where} {verb} to no weight.{_guessed(guesses + paths)}"
    return text if len(members) == 1 else text.replace(" It may be", " The first may be")


def _guessed(guesses: Iterable[str]) -> str:
    text = ", or ".join(list(guesses)[:2])
    return f" It may be {text}." if text else ""


def _listed(layers: Iterable[int]) -> str:
    numbers = sorted(layers)
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _model_notes(comparison: Comparison) -> list[Note]:
    """Return questions of what neither a tensor nor a key says."""
    name = comparison.family.model_type
    notes = [
        Note(question=f"{habit} as in `{name}`: neither a tensor nor a key says it.") for habit in comparison.habits
    ]
    has_rope = any(getattr(block.mixer, "rope", None) for block in _blocks(comparison))
    if has_rope and not any("rope" in key or "rotary" in key for key in comparison.content):
        notes.append(Note(question="no key speaks of rotary embeddings: are positions learned, ALiBi's or none?"))
    routers = dict.fromkeys(block.mlp.router for block in _blocks(comparison) if isinstance(block.mlp, ExpertsConfig))
    for router in routers:
        rules = ", ".join(f"{rule}={getattr(router, rule)}" for rule in ("score", "order", "renormalize"))
        notes.append(Note(question=f"are experts chosen and weighed as in `{name}`, by {rules}? No tensor says it."))
    notes += [Note(reason=f"assumed: {change.assumed}") for change in comparison.changes if change.assumed]
    doubtful = [rename for rename in comparison.renames if not rename.sure]
    notes += [
        Note(question=f"is {rename.group.pattern} what `{name}` calls {rename.row}? The shapes agree.")
        for rename in doubtful
    ]
    lacking = sorted(row.key for row in flat_rows(comparison.family.settings) if row.key not in comparison.content)
    lacking = [key for key in lacking if key and key not in comparison.reading.renamed.values()]
    if lacking:
        keys = ", ".join(lacking)
        notes.append(Note(reason=f"assumed: keys that the file lacks have the defaults of `{name}`: {keys}"))
    return notes


def _blocks(comparison: Comparison) -> tuple[Any, ...]:
    config = comparison.reading.config
    return () if config is None else config.blocks
