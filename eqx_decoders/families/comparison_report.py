"""Text report of a comparison of a checkpoint with the families of the library."""

import re
import textwrap
from collections.abc import Iterable, Mapping

from eqx_decoders.core.config_reader import abbreviate
from eqx_decoders.families.comparison import Ranking, TensorGroup, is_off, setting_paths
from eqx_decoders.model.decoder_config import DecoderConfig


_WIDTH = 118
_MAX_FAMILIES = 3
_MAX_REASON = 300
# Regular expressions of keys that usually do not change the output, with the reason.
_NO_EFFECT = {
    r"drop(out|path|_rate)?\b|dropout|pdrop|layerdrop": "dropout, which only training uses",
    r"initializer|(^|_)init(_|$)|dt_(min|max)$": "initial weights",
    r"aux_loss|jitter|z_loss|output_router_logits|loss_coef|loss_weight": "training of routers",
    r"^output_|^use_cache|gradient_checkpointing|flash_attn|fused_kernels": "how transformers runs the model",
}


def comparison_report(ranking: Ranking) -> str:
    """Return the report as text. Characters that are not printable are replaced by "?"."""
    nearest = ranking.nearest
    name = nearest.family.model_type
    layers = {layer for group in nearest.groups for layer in group.layers}
    lines = [
        f"The checkpoint has {len(nearest.groups)} kinds of tensors in {len(layers)} layers, and config.json has "
        f"{len(ranking.content)} keys.",
        "",
        "Nearest families, with the share of the checkpoint's tensors and keys whose names they use:",
    ]
    for candidate in ranking.candidates[:_MAX_FAMILIES]:
        shares = f"{candidate.tensor_share:>6.0%} of tensors, {candidate.key_share:>4.0%} of keys"
        lines.append(f"  {candidate.family.model_type:22}{shares}")
    sections = {
        f"Settings that differ from `{name}`": _settings(ranking),
        f"Tensors that differ from `{name}`": _tensors(ranking),
        f"Open questions that neither keys nor tensors answer (value in `{name}`; values in similar families)": (
            _open_questions(ranking)
        ),
    }
    for title, sentences in sections.items():
        lines += ["", f"{title}:", *(f"  {sentence}" for sentence in sentences or ["none"])]
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent="    ", drop_whitespace=True)
    return "\n".join(part for line in lines for part in wrapper.wrap(_printable(line)) or [""])


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# --- settings ---


def _settings(ranking: Ranking) -> list[str]:
    content = ranking.content
    reading = ranking.nearest.reading
    name = ranking.nearest.family.model_type
    sentences = [f"{abbreviate(old)} is called {new} by `{name}`." for old, new in reading.renamed.items()]
    for key, message in reading.refused.items():
        reason = message.partition(" Known:")[0][:_MAX_REASON]
        sentences.append(f"`{name}` refuses a value: {reason} {_readers(key, ranking, 'accept')}")
    for key, value in reading.unread.items():
        setting = f"{abbreviate(key)}={abbreviate(value)}"
        effects = [effect for pattern, effect in _NO_EFFECT.items() if re.search(pattern, key)]
        if effects:
            sentences.append(f"{setting} is not read. It probably has no effect: {effects[0]}.")
        elif is_off(value):
            sentences.append(f"{setting} is not read. It seems to turn a feature off. {_readers(key, ranking)}")
        else:
            sentences.append(f"{setting} is not read. {_readers(key, ranking)}")
    if reading.error:
        sentences.append(f"`{name}` cannot build a model from these settings: {reading.error[:_MAX_REASON]}")
    own_keys = setting_paths(ranking.nearest.family)
    absent = sorted(own_keys.keys() - content.keys() - set(reading.renamed.values()))
    if absent:
        sentences.append(f"config.json lacks {', '.join(absent)}. The defaults of `{name}` would be used.")
    return sentences


def _readers(key: str, ranking: Ranking, verb: str = "read") -> str:
    """Return a sentence on which families read a key, and as which setting."""
    readers: list[str] = []
    for candidate in ranking.candidates:
        if key in candidate.reading.read and key not in candidate.reading.refused:
            path = setting_paths(candidate.family).get(key)
            readers.append(f"`{candidate.family.model_type}`{f' as {path}' if path else ''}")
    readers.sort(key=lambda reader: " as " not in reader)
    if not readers:
        return f"No family {verb}s it."
    return f"Families that {verb} it: {', '.join(readers[:_MAX_FAMILIES])}."


# --- tensors ---


def _tensors(ranking: Ranking) -> list[str]:
    nearest = ranking.nearest
    name = nearest.family.model_type
    sentences: list[str] = []
    if nearest.prefix is not None:
        sentences.append(f"The prefix of layers is {nearest.prefix[1]!r} instead of {nearest.prefix[0]!r}.")
    modules: dict[tuple[str, str], bool] = {}
    for rename in nearest.renames:
        words = rename.file_words.strip("."), rename.family_words.strip(".")
        modules[words] = modules.get(words, True) and rename.certain
    for (new, old), certain in modules.items():
        sentences.append(f"{new} {'is' if certain else 'may be'} what `{name}` calls {old}.")
    for group, expected_group in nearest.different:
        if group.layers != expected_group.layers:
            expected_layers = _listed(expected_group.layers)
            sentences.append(f"{group} is in {_listed(group.layers)}, and in {expected_layers} of `{name}`.")
        else:
            expected_shapes = str(expected_group).removeprefix(expected_group.pattern)
            sentences.append(f"{group} is{expected_shapes} in `{name}`.")
    for group, path in nearest.disabled:
        sentences.append(f"{group} is {path} of `{name}`, which these settings do not turn on.")
    for group in nearest.missing:
        sentences.append(f"The checkpoint lacks {group}, which `{name}` has.")
    all_layers = {layer for group in nearest.groups for layer in group.layers}
    for group in nearest.unexplained:
        where = "" if group.layers in (frozenset(), all_layers) else f" in {_listed(group.layers)}"
        sentences.append(f"{group}{where} is not explained.{_meaning(group, ranking)}")
    return sentences


def _listed(layers: Iterable[int]) -> str:
    numbers = sorted(layers)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    text = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"


def _meaning(group: TensorGroup, ranking: Ranking) -> str:
    """Return a sentence on what a tensor probably is, by its name in other families, or else by its shape.

    The result is empty if neither suggests a meaning.
    """
    paths = ranking.names.paths(group.pattern, group.rank)
    if paths:
        return f" Other families store {' or '.join(paths[:2])} under such a name."
    config = ranking.nearest.reading.config
    if len(group.shapes) != 1 or config is None:
        return ""
    meanings = shape_meanings(group.shapes[0], _sizes(config))
    is_bias = group.pattern.endswith("bias")
    meanings = [meaning for meaning in meanings if ("bias" in meaning) == is_bias] or meanings
    return f" By its shape it may be {' or '.join(meanings[:2])}." if meanings else ""


def _sizes(config: DecoderConfig) -> dict[str, int]:
    """Return the sizes of the decoder; where layers differ, of the first layer that has a size."""
    sizes = {"embed": config.embed_dim, "vocab": config.vocab_size}
    fields = {"heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim", "mlp": "mlp_dim"}
    fields["experts"] = "num_experts"
    for block in reversed(config.blocks):
        for layer in (block.mixer, block.mlp):
            sizes |= {size: getattr(layer, field) for size, field in fields.items() if hasattr(layer, field)}
    return sizes


def shape_meanings(shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    """Return what a tensor of this shape may be, likeliest first.

    `sizes`: sizes of the decoder, with the keys `embed`, `vocab`, `heads`, `kv_heads`, `head_dim`, `mlp`, `experts`.
    """
    embed, mlp, experts = (sizes.get(name, 0) for name in ("embed", "mlp", "experts"))
    heads, kv_heads, head_dim = (sizes.get(name, 0) for name in ("heads", "kv_heads", "head_dim"))
    queries = heads * head_dim
    keys = kv_heads * head_dim
    meanings: list[tuple[tuple[int, ...], str]] = [
        ((), "a single number"),
        ((1,), "a single number"),
        ((head_dim,), "the weight of a QK norm of single heads"),
        ((embed,), "the weight of a norm"),
        ((embed,), "the bias of an output projection"),
        ((queries,), "the bias of queries"),
        ((queries,), "the weight of a QK norm of all heads"),
        ((keys,), "the bias of keys or values"),
        ((keys,), "the weight of a QK norm of all key heads"),
        ((queries + 2 * keys,), "the bias of a fused projection of queries, keys and values"),
        ((mlp,), "the bias of a gate or up projection"),
        ((2 * mlp,), "the bias of a fused gate and up projection"),
        ((heads,), "a number for each head, such as attention sinks"),
        ((experts,), "the bias of a router"),
        ((queries + 2 * keys, embed), "a fused projection of queries, keys and values"),
        ((2 * mlp, embed), "a fused gate and up projection"),
        ((mlp, embed), "a gate or up projection"),
        ((embed, mlp), "a down projection"),
        ((experts, embed), "a router"),
        ((experts * mlp, embed), "a projection of all experts"),
        ((sizes.get("vocab", 0), embed), "an embedding table or an output head"),
    ]
    return [meaning for size, meaning in meanings if size == shape and 0 not in size]


# --- open questions ---


def _open_questions(ranking: Ranking) -> list[str]:
    """Return a line for each open property of the nearest family, with other values in similar families."""
    candidates = ranking.similar_candidates()
    lines: list[str] = []
    usual: list[str] = []
    for prop, value in ranking.nearest.reading.open_properties.items():
        families_by_value: dict[str, list[str]] = {}
        for candidate in candidates:
            other_value = candidate.reading.open_properties.get(prop, value)
            if other_value != value:
                families_by_value.setdefault(other_value, []).append(f"`{candidate.family.model_type}`")
        alternatives = [f"{other} in {', '.join(names[:_MAX_FAMILIES])}" for other, names in families_by_value.items()]
        if value == prop.usual and not alternatives:
            usual.append(f"{prop.name} ({value})")
        else:
            lines.append(f"{prop.name}: {'; '.join([value, *alternatives])}")
    if usual:
        lines.append(f"as in most families: {', '.join(usual)}")
    return lines
