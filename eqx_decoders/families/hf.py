"""What families and Hugging Face directories have in common: checked reading of `config.json`, and names of weights.

A family says in one table which tensor of a checkpoint is which weight here, with an einops pattern that is run
forwards for import and backwards for export. Its `read` and `write` translate the configuration; `write` is only
believed where `read` gives the same configuration back.
"""

import dataclasses
import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from eqx_decoders.axes import Axes, axes, named_leaves
from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import Decoder, DecoderConfig
from eqx_decoders.errors import ConfigError, ConversionError, check
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, Rope, YarnRope
from eqx_decoders.layers.router import RouterConfig
from eqx_decoders.mtp import MTPConfig
from eqx_decoders.stack import segments


T = TypeVar("T")
_REQUIRED: Any = object()
_LARGEST = 2**31 - 1
MOST_LAYERS = 1024

_KERNELS = "which kernels transformers takes; here they are chosen by `attention=`"

# Keys that don't change what a loaded model computes, each with the reason. They are carried over into an export.
HARMLESS: dict[str, str] = {
    key: reason
    for reason, keys in {
        "who wrote it": "transformers_version _name_or_path name_or_path unsloth_version unsloth_fixed "
        "is_llama_config transformers.js_config",
        "for tokenizers and generation": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id "
        "forced_bos_token_id forced_eos_token_id unk_token_id tokenizer_class prefix model_max_length",
        "generation settings of transformers": "max_length min_length do_sample early_stopping num_beams "
        "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
        "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
        "return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens cache_implementation use_cache",
        "dropout happens in training only, and a loaded model has none": "attention_dropout resid_pdrop embd_pdrop "
        "attn_pdrop hidden_dropout hidden_dropout_prob",
        "how transformers runs it": "use_return_dict output_attentions output_hidden_states return_dict torchscript "
        "use_bfloat16 tf_legacy_loss chunk_size_feed_forward problem_type finetuning_task id2label label2id num_labels "
        "_num_labels task_specific_params pretraining_tp output_past gradient_checkpointing",
        _KERNELS: "_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation",
        "a promise, not a limit: rotary positions have no table": "max_position_embeddings",
    }.items()
    for key in keys.split()
}

# Keys of every configuration that must be off where they are given: their effect does not exist here.
OFF: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "is_decoder": (False, True),  # every model here is one
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
}

# transformers' names of activations and ours; the first of several with one meaning is the one that is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}


def activation_name(activation: str) -> str:
    """transformers' name of one of our activations."""
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)


class Fields:
    """A JSON object being read: each key is asked for once, with its type and bounds; `finish` refuses what is left.

    null counts as missing, except where a method has `null`: what an explicit null means there.
    """

    def __init__(self, content: Mapping[str, Any], where: str = "config.json"):
        self.content = dict(content)
        self.where = where
        self._read: set[str] = set()

    def error(self, sentence: str) -> ConversionError:
        return ConversionError(f"{self.where}: {sentence}")

    def unknown(self, told: str, word: Any, known: Iterable[str]) -> ConversionError:
        return self.error(f"{told} is not known here.{_near(word, known)} Known: {', '.join(known)}.")

    def take(self, key: str, default: Any = _REQUIRED, null: Any = _REQUIRED) -> Any:
        """The raw value of `key`."""
        self._read.add(key)
        if key in self.content and self.content[key] is None and null is not _REQUIRED:
            return null
        value = self.content.get(key)
        if value is None and default is _REQUIRED:
            raise self.error(f"{key} is missing, and the model's shape depends on it: add it.")
        return default if value is None else value

    def integer(self, key: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED, least: int = 1) -> Any:
        """A whole number between `least` and 2^31 - 1."""
        value = self.take(key, default, null)
        if value is default or value is null:
            return value
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= _LARGEST:
            raise self.error(f"{key}={_short(value)} must be an integer of at least {least}, at most {_LARGEST}.")
        return value

    def layers(self, key: str, default: Any = _REQUIRED) -> int:
        """The number of layers: an integer with a bound, since each layer has a configuration of its own."""
        count = self.integer(key, default)
        if count > MOST_LAYERS:
            raise self.error(f"{key}={count} must be at most {MOST_LAYERS}.")
        return count

    def number(self, key: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED) -> Any:
        """A finite number above 0."""
        value = self.take(key, default, null)
        if value is default or value is null:
            return value
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
        if not good:
            raise self.error(f"{key}={_short(value)} must be a finite number above 0.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key}={_short(value)} must be true or false.")
        return value

    def word(self, key: str, known: Mapping[str, T], default: str = _REQUIRED) -> T:
        """What one of the known words stands for."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(
                f"{key}={_short(value)} is not known here.{_near(value, known)} Known: {', '.join(known)}."
            )
        return known[value]

    def table(self, key: str) -> "Fields | None":
        """A nested object; None where there is none."""
        value = self.take(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key}={_short(value)} must be an object.")
        return Fields(value, f"{self.where}: {key}")

    def words(self, key: str, known: tuple[str, ...], length: int) -> list[str] | None:
        """A list of `length` known words; None where there is none."""
        value = self.take(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(f"{key}={_short(value)} must be a list of words.")
        for word in value:
            if word not in known:
                raise self.error(
                    f"{key}: {_short(word)} is not known here.{_near(word, known)} Known: {', '.join(known)}."
                )
        if len(value) != length:
            raise self.error(f"{key} has {len(value)} entries, but there are {length} layers: give one for each.")
        return value

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers, empty where there is none."""
        value = self.take(key, [])
        good = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
        if not good:
            raise self.error(f"{key}={_short(value)} must be a list of whole numbers.")
        return value

    def off(self, key: str, *allowed: Any) -> None:
        """`key` changes the mathematics in a way that does not exist here, unless it is missing, null or `allowed`."""
        value = self.take(key, None)
        same = value is None or any(type(value) is type(good) and value == good for good in allowed)
        if not same:
            expected = " or ".join(json.dumps(good) for good in allowed) or "null"
            raise self.error(
                f"{key}={_short(value)} changes what the model computes and is not implemented: only {expected} is."
            )

    def rename(self, old: str, new: str) -> None:
        """Read the key `old` as `new`; if both are given they must agree."""
        if old not in self.content:
            return
        value = self.content.pop(old)
        if new in self.content and self.content[new] != value:
            raise self.error(
                f"{old}={_short(value)} and {new}={_short(self.content[new])} are the same setting: make them equal."
            )
        self.content[new] = value

    def supply(self, key: str, value: Any) -> None:
        """Give a key that stands elsewhere; if it stands here too they must agree."""
        if self.content.get(key, value) != value:
            raise self.error(f"{key}={_short(self.content[key])}, but {_short(value)} outside of it: make them equal.")
        self.content[key] = value

    def finish(self, harmless: Mapping[str, str] = {}) -> None:
        """Refuse keys that nothing has read and that are not known to be harmless. null is as good as missing."""
        given = (key for key, value in self.content.items() if value is not None)
        unknown = [key for key in given if key not in self._read and key not in harmless]
        if unknown:
            near = _near(unknown[0], self._read)
            raise self.error(
                f"{_listed(unknown)}: not known here, so they may change what the model computes.{near} "
                "Remove them if they do not."
            )


def _short(value: Any) -> str:
    """A value in an error message: a hostile file must not fill the screen."""
    try:
        text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = str(type(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return ", ".join(map(_short, words[:20])) + more


def _near(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word)[:60], sorted(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


# --- rotary embedding -------------------------------------------------------------------------------------------------

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NESTED = ("full_attention", "sliding_attention")


def read_rope(fields: Fields, *, theta: float = 10_000.0, pairing: Literal["half", "interleaved"] = "half") -> Rope:
    """The rotary embedding of all layers, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    outer = _Outer(fields.number("rope_theta", None), theta, fields.integer("max_position_embeddings", None))
    original = fields.integer("original_max_position_embeddings", None)
    tables = [fields.table(key) for key in ("rope_parameters", "rope_scaling")]
    for table in tables:
        if table is not None and original is not None:
            table.supply("original_max_position_embeddings", original)
        if table is not None:
            table.rename("type", "rope_type")
    return dataclasses.replace(_agreeing(fields, tables, outer), pairing=pairing)


def read_ropes(fields: Fields, *, theta: float, local_theta: float, local_key: str | None) -> dict[str, Rope]:
    """The rotary embeddings of `full_attention` and `sliding_attention` layers.

    New files nest them by the type of the layer. In old ones `rope_theta` and `rope_scaling` are those of the full
    layers, and `local_key` names the others' theta (None: always `local_theta`).
    """
    length = fields.integer("max_position_embeddings", None)
    parameters, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    full, sliding = (None if parameters is None else parameters.table(name) for name in NESTED)
    if parameters is not None:
        parameters.finish()
    local = None if local_key is None else fields.number(local_key, None)
    outer = _Outer(fields.number("rope_theta", None), theta, length, nested=True)
    return {
        "full_attention": _agreeing(fields, [full, scaling], outer),
        "sliding_attention": _agreeing(fields, [sliding], _Outer(local, local_theta, length, nested=True)),
    }


@dataclasses.dataclass(frozen=True)
class _Outer:
    """What stands outside of a table: theta or, without it, the default; the context length; whether layers differ."""

    theta: float | None
    default: float
    length: int | None
    nested: bool = False


def _agreeing(fields: Fields, tables: list[Fields | None], outer: _Outer) -> Rope:
    """What the tables that are there say."""
    found = [_rope(table, outer) for table in tables if table is not None]
    if any(rope != found[0] for rope in found):
        raise fields.error("rope_parameters and rope_scaling say different things: remove one of them.")
    return found[0] if found else Rope(theta=outer.theta or outer.default)


def _rope(fields: Fields, outer: _Outer) -> Rope:
    """One table of rotary settings."""
    own = fields.number("rope_theta", None)
    if own is not None and outer.theta is not None and own != outer.theta:
        raise fields.error(f"rope_theta={own}, but {outer.theta} outside of it: make them equal.")
    theta = own or outer.theta or outer.default
    fields.off("partial_rotary_factor", 1, 1.0)
    kind = fields.word("rope_type", {name: name for name in ROPE_TYPES}, "default")
    idle = ["max_position_embeddings", "finetuned"]
    if kind == "default":
        rope, idle = Rope(theta=theta), [*idle, "factor", "original_max_position_embeddings"]
    elif kind == "linear":
        rope, idle = (
            LinearRope(theta=theta, factor=fields.number("factor")),
            [*idle, "original_max_position_embeddings"],
        )
    else:
        original = fields.integer("original_max_position_embeddings", outer.length)
        if original is None:
            raise fields.error("original_max_position_embeddings is missing: add it.")
        rope = (_llama3_rope if kind == "llama3" else _yarn_rope)(fields, theta, original, outer)
    fields.finish(dict.fromkeys(idle, "has no effect on this type"))
    return rope


def _llama3_rope(fields: Fields, theta: float, original: int, outer: _Outer) -> Rope:
    return Llama3Rope(
        theta=theta,
        factor=fields.number("factor"),
        low_frequency_factor=fields.number("low_freq_factor"),
        high_frequency_factor=fields.number("high_freq_factor"),
        original_length=original,
    )


def _yarn_rope(fields: Fields, theta: float, original: int, outer: _Outer) -> Rope:
    # an explicit null stands for the ratio of the two lengths
    factor = fields.number("factor", null=None if outer.length is None else outer.length / original)
    if factor is None:
        raise fields.error("factor is null, and there is no max_position_embeddings to tell it: give one of them.")
    attention = fields.number("attention_factor", None)
    mscale, everywhere = fields.number("mscale", None), fields.number("mscale_all_dim", None)
    if attention is None and mscale is not None and everywhere is not None:
        attention = _mscale(factor, mscale) / _mscale(factor, everywhere)
    truncate = fields.flag("truncate", True)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_length=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        # transformers looks for it beside nested tables, where no file has it
        truncate=truncate or outer.nested,
        attention_factor=attention,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def write_rope(rope: Rope | None) -> dict[str, Any]:
    """The table of one rotary embedding, as transformers 5 writes it."""
    if rope is None:
        raise ConversionError("AttentionConfig.rope=None: there must be a rotary embedding.")
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if isinstance(rope, LinearRope):
        table |= {"rope_type": "linear", "factor": rope.factor}
    elif isinstance(rope, Llama3Rope):
        table |= {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_frequency_factor,
            "high_freq_factor": rope.high_frequency_factor,
            "original_max_position_embeddings": rope.original_length,
        }
    elif isinstance(rope, YarnRope):
        table |= {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
        table |= {} if rope.truncate else {"truncate": False}
        table |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return table


def write_ropes(rope: Rope | None) -> dict[str, Any]:
    """`rope_parameters`, and beside it the spelling that transformers 4 reads."""
    table = write_rope(rope)
    scaling = {key: value for key, value in table.items() if key != "rope_theta"}
    old = {"rope_scaling": scaling} if scaling["rope_type"] != "default" else {}
    return {"rope_parameters": table, "rope_theta": table["rope_theta"]} | old


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a family's table.

    **Arguments:**

    - `name`: the tensor's name in a checkpoint; `{layer}` and `{expert}` stand for numbers.
    - `path`: the weight's path here, within a block if `name` has a layer, else within the decoder.
    - `pattern`: from the tensor's dimensions to ours, for `einops.rearrange`. Of weights that share a tensor, ours
        begin with the word `part`.
    - `part`: which of them this is, counted from 0, and how many they are.
    """

    name: str
    path: str
    pattern: str
    part: tuple[int, int] | None = None

    def fits(self, words: Axes) -> bool:
        """Whether this is the row of a weight with these axes: gates of one MLP and of many experts share a path."""
        stacked = [word for word in ("layers", "experts") if f"{{{word[:-1]}}}" in self.name]
        own = [word for word in self.pattern.split("->")[1].split() if word != "part"]
        return (*stacked, *own) == words


@dataclasses.dataclass(frozen=True)
class Bound:
    """Where one weight of a model comes from.

    **Arguments:**

    - `names`: the tensors that hold it, in the order of its leading axes.
    - `stack`: the sizes of these axes: none, the layers, or the layers and the experts.
    - `pattern`: of one of the tensors.
    - `sizes`: of every word in `pattern`.
    - `part`: which part of the tensor it is; None for all of it.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    pattern: str
    sizes: Mapping[str, int]
    part: int | None = None

    def name(self, place: tuple[int, ...]) -> str:
        """The tensor at a place of the leading axes."""
        return self.names[sum(i * math.prod(self.stack[axis + 1 :]) for axis, i in enumerate(place))]

    @property
    def stacked(self) -> bool:
        """Whether it is made of several tensors."""
        return bool(self.stack)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the checkpoint."""
        return tuple(math.prod(self.sizes[word] for word in group) for group in self.groups)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The words of each dimension in the checkpoint."""
        left = self.pattern.split("->")[0]
        return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", left))

    @property
    def words(self) -> tuple[str, ...]:
        """The words of our dimensions, without those of `stack`."""
        return tuple(word for word in self.pattern.split("->")[1].split() if word != "part")

    @property
    def backwards(self) -> str:
        """The pattern from ours to the checkpoint's."""
        left, right = self.pattern.split("->")
        return f"{right.strip()} -> {left.strip()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one kind of checkpoint is read and written.

    **Arguments:**

    - `model_type`, `architecture`: what `config.json` calls it.
    - `read`: the configuration of a checkpoint's settings; `finish` is called after it.
    - `write`: the settings of a configuration, which `read` must give back.
    - `weights`: the table.
    - `prefix`: of the base model; files saved without a head may lack it.
    - `harmless`: further keys that have no effect here, with the reason.
    - `ignored`: regular expression of tensors without information, such as stored tables of frequencies.
    - `aliases`: further words for `model_type`; none of them is written.
    - `fused`: rows in place of some of `weights` where all experts of a layer share a tensor.
    - `copies`: tensors that hold others once more, `{layer}` being a layer of multi-token prediction.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    weights: tuple[Weight, ...]
    prefix: str = "model."
    harmless: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: str = r".*rotary_emb\.inv_freq"
    aliases: tuple[str, ...] = ()
    fused: tuple[Weight, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def decode(self, content: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
        """The configuration that `config.json` describes, and its harmless keys. Raises ConversionError."""
        fields = Fields(content)
        for key in ("model_type", "dtype", "torch_dtype", "quantization_config"):  # they say how tensors are stored
            fields.take(key, None)
        named = fields.take("architectures", [self.architecture])
        base = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        if not isinstance(named, list) or not {self.architecture, base} & set(map(str, named)):
            raise fields.error(
                f"architectures={_short(named)} must name {self.architecture}: other heads are not implemented."
            )
        for key, allowed in OFF.items():
            fields.off(key, *allowed)
        try:
            config = self.read(fields)
        except ConfigError as error:
            raise fields.error(str(error)) from error
        harmless = {**HARMLESS, **self.harmless}
        fields.finish(harmless)
        kept = {key: value for key, value in fields.content.items() if key in harmless}
        return config, {key: value for key, value in kept.items() if harmless[key] != _KERNELS and key[0] != "_"}

    def encode(self, config: DecoderConfig) -> dict[str, Any]:
        """The settings that describe `config`; ConversionError with the differences where none do."""
        config = for_inference(config)
        try:
            written = {"architectures": [self.architecture], "model_type": self.model_type, **self.write(config)}
            again, _ = self.decode(written)
        except (
            AttributeError,
            TypeError,
            IndexError,
            ConversionError,
        ) as error:  # a part of another kind than expected
            raise ConversionError(f"This model is no {self.architecture}: {error}") from error
        different = list(_differences(again, config, "DecoderConfig"))
        check(not different, f"This model is no {self.architecture}: {'; '.join(different[:5])}.", ConversionError)
        return written

    def stored_as(self, names: Iterable[str]) -> "Family":
        """The family with the rows that suit the names of a checkpoint's tensors."""
        own = {weight.name.rpartition(".")[2] for weight in self.fused if weight.part is not None}
        together = any(name.rpartition(".")[2] in own for name in names)
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if together else self

    def bind(self, model: Decoder) -> dict[str, Bound]:
        """For the path of every weight of `model` (arrays or shapes) the tensors that hold it."""
        stacks: dict[str, list[int]] = {}
        for stack, layer in _places(model.config):
            stacks.setdefault(stack, []).append(layer)
        words, leaves = axes(model), named_leaves(model)
        found: dict[str, Bound] = {}
        for weight in self.weights:
            layered = "{layer}" in weight.name
            for stack, layers in stacks.items() if layered else [("", [0])]:
                path = f"{stack}.{weight.path}" if layered else weight.path
                if path in leaves and weight.fits(words[path]):
                    found[path] = _bound(weight, layers if layered else None, words[path], leaves[path].shape)
        lacking = sorted(set(leaves) - set(found))
        check(not lacking, f"{self.architecture} has no tensor for {', '.join(lacking[:5])}.", ConversionError)
        return found

    def copied(self, config: DecoderConfig) -> dict[str, str]:
        """For each tensor that holds another one once more the name of that one."""
        return {copy.format(layer=layer): name for layer in depth_layers(config) for copy, name in self.copies.items()}


def _bound(weight: Weight, layers: list[int] | None, words: Axes, shape: tuple[int, ...]) -> Bound:
    sizes = dict(zip(words, shape, strict=True)) | ({} if weight.part is None else {"part": weight.part[1]})
    numbers = [("layer", layers)] if layers is not None else []
    if "{expert}" in weight.name:
        numbers.append(("expert", list(range(sizes["experts"]))))
    places = itertools.product(*(values for _, values in numbers))
    return Bound(
        names=tuple(weight.name.format(**dict(zip((k for k, _ in numbers), place, strict=True))) for place in places),
        stack=tuple(len(values) for _, values in numbers),
        pattern=weight.pattern,
        sizes=sizes,
        part=None if weight.part is None else weight.part[0],
    )


def depth_layers(config: DecoderConfig) -> range:
    """The layers of multi-token prediction, counted on from the others."""
    begin = len(config.blocks)
    return range(begin, begin + (0 if config.mtp is None else config.mtp.num_depths))


def _places(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """For each layer, in an order in which those of a stack ascend: the path of its stack and the layer's number."""
    for layer in depth_layers(config):
        yield "mtp.depth", layer
        yield "mtp.depth.block", layer
    begin = 0
    for index, (unit, repeats) in enumerate(segments(config.blocks)):
        for place in range(len(unit)):
            for repeat in range(repeats):
                yield f"segments.{index}.unit.{place}", begin + repeat * len(unit) + place
        begin += len(unit) * repeats


def for_inference(config: DecoderConfig) -> DecoderConfig:
    """The same model without what only training asks for and a checkpoint says nothing of: dropout, further losses."""

    def bare(mlp: Any) -> Any:
        if isinstance(mlp, MLPConfig):
            return dataclasses.replace(mlp, dropout=0.0)
        if isinstance(mlp, ExpertsConfig):
            names = ("balance_loss", "balance_form", "z_loss", "bias_update_rate")
            defaults = {name: getattr(RouterConfig(), name) for name in names}
            return dataclasses.replace(mlp, shared=bare(mlp.shared), router=dataclasses.replace(mlp.router, **defaults))
        return mlp

    def of(block: BlockConfig) -> BlockConfig:
        return dataclasses.replace(block, dropout=0.0, mlp=bare(block.mlp))

    blocks = {block: of(block) for block in dict.fromkeys(config.blocks)}
    mtp = config.mtp
    if mtp is not None:
        mtp = dataclasses.replace(mtp, block=of(mtp.block), loss_weight=MTPConfig.loss_weight)
    return dataclasses.replace(config, dropout=0.0, blocks=tuple(blocks[block] for block in config.blocks), mtp=mtp)


def _differences(first: Any, second: Any, where: str) -> Iterator[str]:
    """Where two configurations differ."""
    if type(first) is type(second) and dataclasses.is_dataclass(first):
        for field in dataclasses.fields(first):
            yield from _differences(getattr(first, field.name), getattr(second, field.name), f"{where}.{field.name}")
    elif isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif first != second:
        yield f"{where}={second!r} would have to be {first!r}"
