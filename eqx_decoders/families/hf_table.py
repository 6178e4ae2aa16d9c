"""Family of checkpoints: a table of its settings in `config.json`, and one of its weights.

A row of `weights` maps a tensor of a checkpoint to a weight, with an einops pattern that views the tensor in the
weight's order: to read it for import, and to fill it for export. A row of `settings` maps keys of `config.json` to
values of a configuration, in both directions; an export is refused unless reading it returns the same configuration.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConfigError, ConversionError, check
from eqx_decoders.families.config_keys import ALLOWED_VALUES, GENERATION_KEYS, IGNORED_KEYS, by_key
from eqx_decoders.families.scorers import SCORER, SCORER_CLASS, number_of_scores, scorer_name
from eqx_decoders.families.settings_table import Rule, Setting, public, read_all, write_all
from eqx_decoders.families.weight_rows import ENCODERS, Section, Weight, WeightMapping, are_transposed
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.shared_transformer import AidedMixerConfig
from eqx_decoders.model.decoder_config import DecoderConfig, with_scores
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.sharding.axes import axes, computed, named_leaves


class _NotExpressed(ConversionError):
    """A family cannot express a configuration. `distance` is the number of fields that differ."""

    def __init__(self, message: str, distance: int | float):
        super().__init__(message)
        self.distance = distance


@runtime_checkable
class HasConfig(Protocol):
    """A `Decoder`, of arrays or shapes."""

    @property
    def config(self) -> DecoderConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Description of one kind of checkpoint.

    **Arguments:**

    - `model_type`, `architecture`: its names in `config.json`.
    - `settings`: the table of settings.
    - `build`: returns the configuration from the values of `settings`.
    - `weights`: the table of weights.
    - `prefix`: of the base model's tensors, by default the embedding's first word; files without a head may lack it.
    - `ignored_keys`: keys of `config.json` without effect here, besides `IGNORED_KEYS`, and the reason; several keys
        with one reason have spaces between them.
    - `ignored_tensors`: regular expression of tensors that hold nothing learned, such as tables of frequencies; or a
        function that makes it of a configuration.
    - `kept_tensors`: regular expression of those of them that transformers reads, and makes where they are missing: an
        export has them as their source has, if it is still there.
    - `zero_tensors`: those of them that transformers needs, of a configuration, with their shapes: an export has them
        as their source has, or zeros.
    - `fixed_tensors`: tensors that follow from a configuration, such as numbers of hashes: an export has them, and
        those of a checkpoint must be the same.
    - `aliases`: other names for `model_type`, which are read and never written.
    - `other_architectures`: the same of `architecture`: classes of code beside published files.
    - `fused`: rows that replace some of `weights` where all experts of a layer share a tensor.
    - `writes_fused`: whether an export has the tensors of `fused`: where transformers opens no others.
    - `copies`: tensors that repeat others, `{layer}` being a layer of multi-token prediction.
    - `with_depths`: the configuration with so many layers of multi-token prediction, for checkpoints that store some
        and don't say so in `config.json`.
    - `renamed`: regular expressions of tensors' names, and their replacements when read.
    - `modules`: regular expressions of tensors' names, and transformers' names once they are loaded.
    - `text`: the text family of the decoder of a family with encoders.
    - `variants`: the same family with decoders of other text families.
    - `text_names`: prefixes of the tensors of `text`, and those that replace them.
    - `auto_class`: the class of transformers that opens such a directory.
    - `own_settings`: returns the family's settings from those of a `config.json`, in the spelling of `settings`: for
        files that spell them otherwise, or describe more than this model.
    - `transposed`: rows that replace some of `weights` where experts are stored as matrices `[in, out]`.
    - `blocks_per_layer`: number of blocks that a checkpoint counts as one `{layer}`; `{part}` numbers them there.
    - `integer_tensors`: regular expression of tensors that hold integers.
    - `default_settings`: ignored keys that transformers needs, for models that lack them or have null.
    """

    model_type: str
    architecture: str
    settings: tuple[Setting, ...]
    build: Callable[..., DecoderConfig]
    weights: tuple[Weight, ...]
    prefix: str = None  # pyright: ignore[reportAssignmentType] - __post_init__ sets it
    ignored_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored_tensors: str | Callable[[DecoderConfig], str] = r".*rotary_emb\.inv_freq"
    kept_tensors: str = ""
    zero_tensors: Callable[[DecoderConfig], Mapping[str, tuple[int, ...]]] = lambda config: {}
    fixed_tensors: Callable[[DecoderConfig], Mapping[str, np.ndarray]] = lambda config: {}
    aliases: tuple[str, ...] = ()
    other_architectures: tuple[str, ...] = ()
    fused: tuple[Weight, ...] = ()
    writes_fused: bool = False
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    with_depths: Callable[[DecoderConfig, int], DecoderConfig] | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    text: "Family | None" = None
    variants: tuple["Family", ...] = ()
    text_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    own_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    transposed: tuple[Weight, ...] = ()
    integer_tensors: str = "(?!)"
    default_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    blocks_per_layer: int = 1

    def __post_init__(self):
        object.__setattr__(self, "ignored_keys", by_key(self.ignored_keys))
        if self.prefix is None:
            embedding = next(weight.name for weight in self.weights if weight.path == "embedding.table")
            object.__setattr__(self, "prefix", embedding.partition(".")[0] + ".")

    def decode(self, content: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
        """Return the configuration of a `config.json`, and the keys that it ignores. Raises ConversionError."""
        return self.decode_fields(Fields(self.own_settings(content)))

    def described_by(self, content: Mapping[str, Any]) -> "Family":
        """Return the family, or one of its kinds, that a `config.json` names: a variant, or models that score texts."""
        names = content.get("architectures")
        scores = isinstance(names, list) and any(str(name).endswith(SCORER) for name in names)
        return self.scoring() if scores else self

    def scoring(self) -> "Family":
        """Return the family of its models that score texts. Raises ConversionError where transformers has no such."""
        row = Weight("score.weight", "head.kernel", "scores embed -> embed scores")
        number = Rule("_scores", number_of_scores, lambda config: {"num_labels": config.scores})
        return dataclasses.replace(
            self,
            architecture=scorer_name(self.model_type, self.architecture),
            settings=(*self.settings, number),
            weights=tuple(row if weight.path == row.path else weight for weight in self.weights),
            other_architectures=(),
            with_depths=None,
            auto_class=SCORER_CLASS,
        )

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in the files that are written here."""
        for pattern, text in self.renamed.items():
            name = re.sub(pattern, text, name)
        return name

    def module_name(self, name: str) -> str:
        """Return transformers' name of a stored tensor once it is loaded."""
        for pattern, text in self.modules.items():
            name = re.sub(pattern, text, name)
        return name

    def decode_fields(self, fields: Fields) -> tuple[DecoderConfig, dict[str, Any]]:
        """Decode an object that may be nested in another one, as `decode` does."""
        for key in ("model_type", "dtype", "torch_dtype", "quantization_config"):  # they say how tensors are stored
            fields.take(key, None)
        named = fields.take("architectures", [self.architecture])
        base = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        known = {self.architecture, base, *self.other_architectures}
        if not isinstance(named, list) or not known & set(map(str, named)):
            raise fields.error(
                f"architectures={abbreviate(named)} must name {self.architecture}: other heads are not implemented."
            )
        try:
            config = self.read(fields)
        except ConfigError as error:
            raise fields.error(str(error)) from error
        return config, fields.ignored({**IGNORED_KEYS, **self.ignored_keys}, ALLOWED_VALUES, GENERATION_KEYS)

    def read(self, fields: Fields) -> DecoderConfig:
        """Return the configuration of a checkpoint's settings."""
        values = read_all(self.settings, fields)
        config = self.build(**public(values))
        return with_scores(config, values["_scores"]) if "_scores" in values else config

    def encode(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the settings that describe `config`; ConversionError with the differences where none do."""
        return self.expressing(config)[1]

    def expressing(self, config: DecoderConfig) -> tuple["Family", dict[str, Any]]:
        """Return the family, or the first of `variants`, that can express `config`, and the settings.

        Its weights are the tensors that are written.
        """
        if config.scores is not None and self.auto_class != SCORER_CLASS:
            return self.scoring().expressing(config)
        errors: list[_NotExpressed] = []
        for family in (*self.variants, self):
            try:
                return family._as_written(), family._encode(config)
            except _NotExpressed as error:
                errors.append(error)
        errors.reverse()  # `min` returns the first of equal errors: prefer the family to its variants
        raise min(errors, key=lambda error: error.distance)

    def _as_written(self) -> "Family":
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if self.writes_fused else self

    def _encode(self, config: DecoderConfig) -> dict[str, Any]:
        config = for_inference(config)
        try:
            written = self.named(write_all(self.settings, config))
            decoded, _ = self.decode(written)
        except (AttributeError, TypeError, IndexError, ConversionError) as error:  # other classes than it expects
            raise _NotExpressed(f"This model is no {self.architecture}: {error}", math.inf) from error
        different = list(_differences(decoded, config, "DecoderConfig"))
        if different:
            shown = "; ".join(different[:5])
            raise _NotExpressed(f"This model is no {self.architecture}: {shown}.", len(different))
        return written

    def named(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with the names of the family."""
        return {"architectures": [self.architecture], "model_type": self.model_type, **settings}

    @property
    def head(self) -> str:
        """Name of the output head's tensor."""
        return next(weight.name for weight in self.weights if weight.path == "head.kernel")

    def text_tensor(self, name: str) -> str | None:
        """Return the name of a decoder's tensor in `text`; None for those of encoders."""
        for text, prefix in self.text_names.items():
            if name.startswith(prefix):
                return text + name.removeprefix(prefix)
        return None

    def stored_as(self, names: Iterable[str]) -> "Family":
        """Return the family with its rows for fused experts if `names`, of a checkpoint's tensors, are those.

        Where `names` have shapes, also with the rows for these shapes.
        """
        if self.transposed and isinstance(names, Mapping):
            rows = self.transposed if are_transposed(names) else ()
            return dataclasses.replace(self, weights=self.weights + rows, transposed=())
        endings = {weight.name.rpartition(".")[2] for weight in self.fused if weight.part is not None}
        together = any(name.rpartition(".")[2] in endings for name in names)
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if together else self

    def bind(self, model: HasConfig) -> dict[str, WeightMapping]:
        """Return, for the path of every weight of `model` (arrays or shapes), the tensors that hold it.

        Buffers that are computed have none.
        """
        stacks: dict[str, list[int]] = {}
        for stack, layer in _layer_paths(model.config):
            stacks.setdefault(stack, []).append(layer)
        owners = {stack: stack.split(".")[0] if stack.startswith(ENCODERS) else "" for stack in stacks}
        words, leaves = axes(model), named_leaves(model)
        rows: dict[str, tuple[Weight, str]] = {}
        for weight in self.weights:
            owned = [stack for stack in stacks if owners[stack] == weight.owner]
            for stack in owned if weight.of_layers else [""]:
                path, needed = weight.inside(stack), f"{stack}.{weight.needs}"
                if path in leaves and weight.fits(words[path]) and (not weight.needs or needed in leaves):
                    rows[path] = (weight, stack)
        lacking = sorted(set(leaves) - set(rows) - computed(model))
        check(not lacking, f"{self.architecture} has no tensor for {', '.join(lacking[:5])}.", ConversionError)
        sizes = {path: dict(zip(words[path], leaf.shape, strict=True)) for path, leaf in leaves.items()}
        uses = {**_stages(model.config), **_uses(model.config)}
        depths = list(range(0 if model.config.mtp is None else model.config.mtp.num_depths))
        mappings = {
            path: _mapping(
                weight, depths if weight.is_mtp else stacks.get(stack), sizes[path], self.blocks_per_layer, uses
            )
            for path, (weight, stack) in rows.items()
        }
        for path, section in _sections(rows, mappings, sizes).items():
            mappings[path] = dataclasses.replace(mappings[path], section=section)
        return mappings

    def is_ignored(self, tensor: str, config: DecoderConfig) -> bool:
        """Return True for a tensor of such a model that holds nothing learned."""
        rule = self.ignored_tensors
        return re.fullmatch(rule if isinstance(rule, str) else rule(config), tensor) is not None

    def stored_depths(self, names: Iterable[str]) -> int:
        """Return how many layers of multi-token prediction the names of tensors count by themselves."""
        prefixes = {weight.name.partition("{depth}")[0] for weight in self.weights if "{depth}" in weight.name}
        pattern = f"(?:{'|'.join(map(re.escape, prefixes))})([0-9]+)[.].*"
        matches = (re.fullmatch(pattern, name) for name in names if prefixes)
        return max((int(match[1]) + 1 for match in matches if match), default=0)

    def copied(self, config: DecoderConfig) -> dict[str, str]:
        """Return the tensors that repeat others, each with the name of the original."""
        return {copy.format(layer=layer): name for layer in depth_layers(config) for copy, name in self.copies.items()}


def _uses(config: DecoderConfig) -> dict[int, dict[str, int]]:
    """Return, for each layer that shares a transformer block, `owner`, the first layer that does, and its own `use`."""
    aided = {index: block.mixer for index, block in enumerate(config.blocks)}
    aided = {index: mixer for index, mixer in aided.items() if isinstance(mixer, AidedMixerConfig)}
    owners: dict[int, int] = {}
    for index, mixer in aided.items():
        owners.setdefault(mixer.number, index)
    return {index: {"owner": owners[mixer.number], "use": use} for use, (index, mixer) in enumerate(aided.items())}


def _stages(config: DecoderConfig) -> dict[int, dict[str, int]]:
    """Return, for each layer of an encoder that is a network of stages, its `stage` and its number there, `block`."""
    stem = None if config.media is None or config.media.vision is None else config.media.vision.stem
    stages: Any = getattr(stem, "stages", ())
    numbers = [(stage, block) for stage, blocks in enumerate(stages) for block in range(len(blocks))]
    return {layer: {"stage": stage, "block": block} for layer, (stage, block) in enumerate(numbers)}


def _mapping(
    weight: Weight,
    layers: list[int] | None,
    sizes: Mapping[str, int],
    blocks: int,
    uses: Mapping[int, Mapping[str, int]],
) -> WeightMapping:
    """Return the tensors of a weight of these layers; a layer has a number of `blocks` in a checkpoint.

    `uses` are further numbers of layers, for the names of their tensors.
    """
    numbers = [] if layers is None else [("depth" if weight.is_mtp else "layer", layers)]
    single = weight.is_mtp and "{depth}" not in weight.name and len(layers or ()) > 1
    check(not single, f"{weight.name} has room for one layer of multi-token prediction.", ConversionError)
    numbers += [(number, list(range(sizes[axis]))) for number, axis in weight.numbered.items()]

    def name(*place: int) -> str:
        found = dict(zip((kind for kind, _ in numbers), place, strict=True))
        found |= uses.get(found.get("layer", -1), {})
        if blocks > 1 and "layer" in found:
            found["layer"], found["part"] = divmod(found["layer"], blocks)
        return weight.name.format(**found)

    indices = itertools.product(*(values for _, values in numbers))
    return WeightMapping(
        names=tuple(itertools.starmap(name, indices)),
        stack=tuple(len(values) for _, values in numbers),
        pattern=weight.pattern,
        sizes={**sizes, "1": 1},
    )


def _sections(
    rows: Mapping[str, tuple[Weight, str]],
    mappings: Mapping[str, WeightMapping],
    sizes: Mapping[str, Mapping[str, int]],
) -> dict[str, Section]:
    """Return the sections of the weights that share tensors, from the sizes of all of them."""
    together: dict[tuple[str, str], dict[int, str]] = {}
    for path, (weight, stack) in rows.items():
        if weight.part is not None:
            together.setdefault((weight.name, stack), {})[weight.part.index] = path
    sections_by_path: dict[str, Section] = {}
    for (name, _), paths in together.items():
        sections, begin = {}, 0
        for index, path in sorted(paths.items()):
            part = rows[path][0].part
            assert part is not None
            rule = f"{name} holds {part.count} weights, and the model has {len(paths)} of them"
            check(len(paths) == part.count, f"{path}: {rule}.", ConversionError)
            blocks = 1 if part.within is None else _axis_size_in_module(path, part.within, sizes)
            size, rest = divmod(mappings[path].own_shape[part.axis], blocks)
            check(
                rest == 0, f"{path}: its rows in {name} must be a multiple of {part.within}={blocks}.", ConversionError
            )
            sections[path] = Section(index=index, axis=part.axis, blocks=blocks, begin=begin, size=size, block_size=0)
            begin += size
        sections_by_path |= {path: dataclasses.replace(section, block_size=begin) for path, section in sections.items()}
    return sections_by_path


def _axis_size_in_module(path: str, word: str, sizes: Mapping[str, Mapping[str, int]]) -> int:
    """Return the size of an axis of the other weights in the module of `path`."""
    module = path.rpartition(".")[0] + "."
    known_sizes = [known[word] for other, known in sizes.items() if other.startswith(module) and word in known]
    check(bool(known_sizes), f"{path}: no weight of its module has the axis {word}.", ConversionError)
    return known_sizes[0]


def depth_layers(config: DecoderConfig) -> range:
    """Return the layers of multi-token prediction, counted on from the others."""
    begin = len(config.blocks)
    return range(begin, begin + (0 if config.mtp is None else config.mtp.num_depths))


def _layer_paths(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Yield the path of the stack of each layer, and the layer's number, ascending within a stack."""
    for layer in depth_layers(config):
        yield "mtp.depth", layer
        yield "mtp.depth.block", layer
    yield from (("shared", layer) for layer in sorted({use["owner"] for use in _uses(config).values()}))
    yield from _layer_paths_in("scanned_layers", find_repeats(config.blocks))
    for name in ENCODERS:
        encoder = None if config.media is None else getattr(config.media, name)
        if encoder is not None:
            yield from _layer_paths_in(f"{name}.scanned_layers", encoder.parts)
            yield from _layer_paths_in(f"{name}.stem.repeated_planes", getattr(encoder.stem, "parts", ()))


def _layer_paths_in(path: str, parts: Iterable[tuple[tuple[Any, ...], int]]) -> Iterator[tuple[str, int]]:
    begin = 0
    for index, (unit, repeats) in enumerate(parts):
        for place in range(len(unit)):
            for repeat in range(repeats):
                yield f"{path}.{index}.unit.{place}", begin + repeat * len(unit) + place
        begin += len(unit) * repeats


def for_inference(config: DecoderConfig) -> DecoderConfig:
    """Return the same model without settings that only training needs: dropout and additional losses."""

    def inference_mlp(mlp: Any) -> Any:
        if isinstance(mlp, MLPConfig):
            return dataclasses.replace(mlp, dropout=0.0)
        if isinstance(mlp, ExpertsConfig):
            names = ("balance_loss", "balance_form", "z_loss", "bias_update_rate")
            defaults = {name: getattr(RouterConfig(), name) for name in names}
            return dataclasses.replace(
                mlp, shared=inference_mlp(mlp.shared), router=dataclasses.replace(mlp.router, **defaults)
            )
        return mlp

    def inference_mixer(mixer: Any) -> Any:
        if isinstance(mixer, LatentAttentionConfig) and mixer.indexer is not None:
            return dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, loss_weight=0.0, warmup=False))
        return mixer

    def inference_block(block: BlockConfig) -> BlockConfig:
        mixer, mlp = inference_mixer(block.mixer), inference_mlp(block.mlp)
        return dataclasses.replace(block, dropout=0.0, mixer=mixer, mlp=mlp)

    blocks = {block: inference_block(block) for block in dict.fromkeys(config.blocks)}
    mtp = config.mtp
    if mtp is not None:
        mtp = dataclasses.replace(mtp, block=inference_block(mtp.block), loss_weight=MTPConfig.loss_weight)
    return dataclasses.replace(config, dropout=0.0, blocks=tuple(blocks[block] for block in config.blocks), mtp=mtp)


def differences(first: DecoderConfig, second: DecoderConfig) -> list[str]:
    """Return the first differences between two configurations, each a phrase."""
    return list(itertools.islice(_differences(first, second, "DecoderConfig"), 5))


def _differences(first: Any, second: Any, where: str) -> Iterator[str]:
    """Yield the differences between two configurations."""
    if first == second:
        return
    if type(first) is type(second) and dataclasses.is_dataclass(first):
        for field in dataclasses.fields(first):
            yield from _differences(getattr(first, field.name), getattr(second, field.name), f"{where}.{field.name}")
    elif isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    else:
        yield f"{where}={second!r} would have to be {first!r}"
