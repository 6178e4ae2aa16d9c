"""A family of checkpoints: how `config.json` is read and written, and a table of its weights.

The table tells which tensor of a checkpoint is which weight here, with an einops pattern by which a tensor is seen in
our order: to be read for import, and to be filled for export. `read` and `write` translate the configuration; an export
is refused unless `read` gives the same configuration back from what `write` wrote.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.stack import segments
from eqx_decoders.errors import ConfigError, ConversionError, check
from eqx_decoders.families.config_reader import IGNORED_KEYS, Fields, abbreviate
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.model.decoder import Decoder, DecoderConfig
from eqx_decoders.model.mtp import MTPConfig
from eqx_decoders.sharding.axes import Axes, axes, named_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Which one of several weights that share a tensor: they stand one after the other along one of its dimensions.

    **Arguments:**

    - `index`, `count`: which of them this is, counted from 0, and how many they are.
    - `axis`: the dimension.
    - `within`: an axis of the layer, of whose size the dimension has equal blocks, each with a share of every weight in
        turn, as where a query head stands beside its gate; None for one block.
    """

    index: int
    count: int
    axis: int = 0
    within: str | None = None


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a family's table.

    **Arguments:**

    - `name`: the tensor's name in a checkpoint; `{layer}` and `{expert}` stand for numbers, and `{depth}` for that of a
        layer of multi-token prediction where these are counted by themselves.
    - `path`: the weight's path here, within a block if `name` has a layer, else within the decoder. In a block of an
        encoder it begins with the encoder's name: `vision.mixer.query`.
    - `pattern`: from the tensor's dimensions to ours, for `einops.rearrange`. Of a part of a tensor it is written as if
        this were the whole.
    - `part`: where several weights share the tensor.
    """

    name: str
    path: str
    pattern: str
    part: Part | None = None

    def fits(self, words: Axes) -> bool:
        """Whether this is the row of a weight with these axes: an MLP's and its experts' gates have the same path."""
        stacked = ["layers"] * ("{layer}" in self.name or self.is_of_depths)
        stacked += ["experts"] * ("{expert}" in self.name)
        return (*stacked, *self.pattern.split("->")[1].split()) == words

    @property
    def is_of_depths(self) -> bool:
        """Whether it tells of layers of multi-token prediction alone."""
        return self.path.startswith(_DEPTHS)

    @property
    def owner(self) -> str:
        """The encoder that the weight belongs to; empty for the decoder."""
        first = self.path.split(".")[0]
        return first if first in ENCODERS else ""

    def inside(self, stack: str) -> str:
        """Its path in a block of a stack, or in the model where that is empty."""
        inner = self.path.removeprefix(f"{self.owner}.") if stack and self.owner else self.path
        return f"{stack}.{inner}".strip(".")


ENCODERS = ("vision", "audio")
_DEPTHS = "mtp.depth."


def at_depths(weights: Iterable[Weight], layer: str, depth: str) -> tuple[Weight, ...]:
    """The rows whose names begin with `layer`, for layers of multi-token prediction, whose names begin with `depth`."""
    return tuple(
        dataclasses.replace(weight, name=weight.name.replace(layer, depth), path=f"{_DEPTHS}block.{weight.path}")
        for weight in weights
        if weight.name.startswith(layer)
    )


def sharing(name: str, *rows: tuple[str, str], axis: int = 0, within: str | None = None) -> tuple[Weight, ...]:
    """Rows of weights that share the tensor `name`, in their order, each with its path and its pattern."""
    return tuple(
        Weight(name, path, pattern, Part(index=index, count=len(rows), axis=axis, within=within))
        for index, (path, pattern) in enumerate(rows)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Which part of a tensor's dimension is one weight's: the same rows of each of its equal blocks.

    **Arguments:**

    - `index`: which of the weights that share the tensor it is.
    - `axis`: the dimension.
    - `blocks`: how many it has.
    - `begin`, `size`: the weight's rows in each block, of `block_size` rows that it has.
    """

    index: int
    axis: int
    blocks: int
    begin: int
    size: int
    block_size: int

    def of(self, x: np.ndarray) -> np.ndarray:
        """The weight's rows of some whole blocks, without a copy: `[..., blocks, size, ...]`."""
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        own = slice(self.begin, self.begin + self.size)
        return x.reshape(*before, -1, self.block_size, *after)[(*[slice(None)] * (self.axis + 1), own)]


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """The tensors of a checkpoint that hold one weight of a model.

    **Arguments:**

    - `names`: the tensors that hold it, in the order of its leading axes.
    - `stack`: the sizes of these axes: none, the layers, or the layers and the experts.
    - `pattern`: of one of the tensors, or of its section.
    - `sizes`: of every word in `pattern`, 1 among them.
    - `section`: the part of each tensor that is this weight's; None for all of it.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    pattern: str
    sizes: Mapping[str, int]
    section: Section | None = None

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
        shape, section = self.own_shape, self.section
        if section is None:
            return shape
        return (*shape[: section.axis], section.blocks * section.block_size, *shape[section.axis + 1 :])

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape that each tensor would have without the other weights in it."""
        return tuple(math.prod(self.sizes[word] for word in group) for group in self.groups)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The words of each dimension in the checkpoint."""
        left = self.pattern.split("->")[0]
        return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", left))

    @property
    def words(self) -> tuple[str, ...]:
        """The words of our dimensions, without those of `stack`."""
        return tuple(self.pattern.split("->")[1].split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one kind of checkpoint is read and written.

    **Arguments:**

    - `model_type`, `architecture`: what `config.json` calls it.
    - `read`: the configuration of a checkpoint's settings; `finish` is called after it.
    - `write`: the settings of a configuration, which `read` must give back.
    - `weights`: the table.
    - `prefix`: of the base model; files saved without a head may lack it.
    - `ignored_keys`: keys of `config.json` that have no effect here, besides `IGNORED_KEYS`, each with the reason.
    - `ignored_tensors`: regular expression of tensors that hold nothing learned, such as tables of frequencies; or a
        function that makes it of a configuration.
    - `aliases`: further words for `model_type`; none of them is written.
    - `fused`: rows in place of some of `weights` where all experts of a layer share a tensor.
    - `copies`: tensors that repeat others, `{layer}` being a layer of multi-token prediction.
    - `with_depth`: the configuration with a layer of multi-token prediction, for checkpoints that store one and don't
        say so in `config.json`.
    - `renamed`: regular expressions of tensors' names, and what is read in their place.
    - `modules`: regular expressions of tensors' names, and how transformers calls them once they are loaded.
    - `text`: of a family with encoders, that of its decoder alone.
    - `text_names`: how the tensors of `text` begin, and how they do here.
    - `auto_class`: the class of transformers that opens such a directory.
    - `own_settings`: of all settings of a `config.json` those of the family, as `read` has them: for files that spell
        them otherwise, or describe more than this model.
    - `stored_rows`: rows in place of some of `weights`, for tensors of these names and shapes.
    - `default_settings`: ignored keys that transformers cannot do without, and that a new model has none of.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    weights: tuple[Weight, ...]
    prefix: str = "model."
    ignored_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored_tensors: str | Callable[[DecoderConfig], str] = r".*rotary_emb\.inv_freq"
    aliases: tuple[str, ...] = ()
    fused: tuple[Weight, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    with_depth: Callable[[DecoderConfig], DecoderConfig] | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    text: "Family | None" = None
    text_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    own_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    stored_rows: Callable[[Mapping[str, Any]], tuple[Weight, ...]] | None = None
    default_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def decode(self, content: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
        """The configuration that `config.json` describes, and the keys that it ignores. Raises ConversionError."""
        return self.decode_fields(Fields(self.own_settings(content)))

    def stored_name(self, name: str) -> str:
        """What a tensor is called in the files that are written here."""
        for pattern, text in self.renamed.items():
            name = re.sub(pattern, text, name)
        return name

    def module_name(self, name: str) -> str:
        """What transformers calls a stored tensor once it is loaded."""
        for pattern, text in self.modules.items():
            name = re.sub(pattern, text, name)
        return name

    def decode_fields(self, fields: Fields) -> tuple[DecoderConfig, dict[str, Any]]:
        """`decode` of an object that may stand in another one."""
        for key in ("model_type", "dtype", "torch_dtype", "quantization_config"):  # they say how tensors are stored
            fields.take(key, None)
        named = fields.take("architectures", [self.architecture])
        base = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        if not isinstance(named, list) or not {self.architecture, base} & set(map(str, named)):
            raise fields.error(
                f"architectures={abbreviate(named)} must name {self.architecture}: other heads are not implemented."
            )
        try:
            config = self.read(fields)
        except ConfigError as error:
            raise fields.error(str(error)) from error
        return config, fields.kept({**IGNORED_KEYS, **self.ignored_keys})

    def encode(self, config: DecoderConfig) -> dict[str, Any]:
        """The settings that describe `config`; ConversionError with the differences where none do."""
        config = for_inference(config)
        try:
            written = self.named(self.write(config))
            again, _ = self.decode(written)
        except (AttributeError, TypeError, IndexError, ConversionError) as error:  # other classes than it expects
            raise ConversionError(f"This model is no {self.architecture}: {error}") from error
        different = list(itertools.islice(_differences(again, config, "DecoderConfig"), 5))
        check(not different, f"This model is no {self.architecture}: {'; '.join(different)}.", ConversionError)
        return written

    def named(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with what says whose they are."""
        return {"architectures": [self.architecture], "model_type": self.model_type, **settings}

    @property
    def head(self) -> str:
        """The tensor of the output head."""
        return next(weight.name for weight in self.weights if weight.path == "head.kernel")

    def text_tensor(self, name: str) -> str | None:
        """The name that a tensor of the decoder has in `text`; None for those of encoders."""
        for text, here in self.text_names.items():
            if name.startswith(here):
                return text + name.removeprefix(here)
        return None

    def stored_as(self, names: Iterable[str]) -> "Family":
        """The family with its rows for fused experts, if the names of a checkpoint's tensors are those.

        Where these are given with shapes, also with the rows that these tell.
        """
        if self.stored_rows is not None and isinstance(names, Mapping):
            return dataclasses.replace(self, weights=self.weights + self.stored_rows(names), stored_rows=None)
        endings = {weight.name.rpartition(".")[2] for weight in self.fused if weight.part is not None}
        together = any(name.rpartition(".")[2] in endings for name in names)
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if together else self

    def bind(self, model: Decoder) -> dict[str, WeightMapping]:
        """For the path of every weight of `model` (arrays or shapes) the tensors that hold it."""
        stacks: dict[str, list[int]] = {}
        for stack, layer in _places(model.config):
            stacks.setdefault(stack, []).append(layer)
        owners = {stack: stack.split(".")[0] if stack.startswith(ENCODERS) else "" for stack in stacks}
        words, leaves = axes(model), named_leaves(model)
        rows: dict[str, tuple[Weight, str]] = {}
        for weight in self.weights:
            own = [stack for stack in stacks if owners[stack] == weight.owner]
            for stack in own if "{layer}" in weight.name else [""]:
                path = weight.inside(stack)
                if path in leaves and weight.fits(words[path]):
                    rows[path] = (weight, stack)
        lacking = sorted(set(leaves) - set(rows))
        check(not lacking, f"{self.architecture} has no tensor for {', '.join(lacking[:5])}.", ConversionError)
        sizes = {path: dict(zip(words[path], leaf.shape, strict=True)) for path, leaf in leaves.items()}
        depths = list(range(0 if model.config.mtp is None else model.config.mtp.num_depths))
        found = {
            path: _mapping(weight, depths if weight.is_of_depths else stacks.get(stack), sizes[path])
            for path, (weight, stack) in rows.items()
        }
        for path, section in _sections(rows, found, sizes).items():
            found[path] = dataclasses.replace(found[path], section=section)
        return found

    def is_ignored(self, tensor: str, config: DecoderConfig) -> bool:
        """Whether a tensor of such a model holds nothing that it reads."""
        rule = self.ignored_tensors
        return re.fullmatch(rule if isinstance(rule, str) else rule(config), tensor) is not None

    def copied(self, config: DecoderConfig) -> dict[str, str]:
        """Tensors that repeat others, each with the name of the one that it repeats."""
        return {copy.format(layer=layer): name for layer in depth_layers(config) for copy, name in self.copies.items()}


def _mapping(weight: Weight, layers: list[int] | None, sizes: Mapping[str, int]) -> WeightMapping:
    numbers = [] if layers is None else [("depth" if weight.is_of_depths else "layer", layers)]
    single = weight.is_of_depths and "{depth}" not in weight.name and len(layers or ()) > 1
    check(not single, f"{weight.name} has room for one layer of multi-token prediction.", ConversionError)
    if "{expert}" in weight.name:
        numbers.append(("expert", list(range(sizes["experts"]))))
    places = itertools.product(*(values for _, values in numbers))
    return WeightMapping(
        names=tuple(weight.name.format(**dict(zip((k for k, _ in numbers), place, strict=True))) for place in places),
        stack=tuple(len(values) for _, values in numbers),
        pattern=weight.pattern,
        sizes={**sizes, "1": 1},
    )


def _sections(
    rows: Mapping[str, tuple[Weight, str]],
    mappings: Mapping[str, WeightMapping],
    sizes: Mapping[str, Mapping[str, int]],
) -> dict[str, Section]:
    """Where the weights that share tensors stand in them: it follows from the sizes of all of them."""
    together: dict[tuple[str, str], dict[int, str]] = {}
    for path, (weight, stack) in rows.items():
        if weight.part is not None:
            together.setdefault((weight.name, stack), {})[weight.part.index] = path
    found: dict[str, Section] = {}
    for (name, _), paths in together.items():
        sections, begin = {}, 0
        for index, path in sorted(paths.items()):
            part = rows[path][0].part
            assert part is not None
            rule = f"{name} holds {part.count} weights, and the model has {len(paths)} of them"
            check(len(paths) == part.count, f"{path}: {rule}.", ConversionError)
            blocks = 1 if part.within is None else _size_beside(path, part.within, sizes)
            size, rest = divmod(mappings[path].own_shape[part.axis], blocks)
            check(
                rest == 0, f"{path}: its rows in {name} must be a multiple of {part.within}={blocks}.", ConversionError
            )
            sections[path] = Section(index=index, axis=part.axis, blocks=blocks, begin=begin, size=size, block_size=0)
            begin += size
        found |= {path: dataclasses.replace(section, block_size=begin) for path, section in sections.items()}
    return found


def _size_beside(path: str, word: str, sizes: Mapping[str, Mapping[str, int]]) -> int:
    """The size of an axis of the weights in the module of the one at `path`."""
    module = path.rpartition(".")[0] + "."
    beside = [known[word] for other, known in sizes.items() if other.startswith(module) and word in known]
    check(bool(beside), f"{path}: no weight of its module has the axis {word}.", ConversionError)
    return beside[0]


def depth_layers(config: DecoderConfig) -> range:
    """The layers of multi-token prediction, counted on from the others."""
    begin = len(config.blocks)
    return range(begin, begin + (0 if config.mtp is None else config.mtp.num_depths))


def _places(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """The path of the stack that each layer is in, and the layer's number, ascending within a stack."""
    for layer in depth_layers(config):
        yield "mtp.depth", layer
        yield "mtp.depth.block", layer
    yield from _places_in("", segments(config.blocks))
    for name in ENCODERS:
        encoder = None if config.media is None else getattr(config.media, name)
        if encoder is not None:
            yield from _places_in(f"{name}.", encoder.parts)


def _places_in(path: str, parts: Iterable[tuple[tuple[BlockConfig, ...], int]]) -> Iterator[tuple[str, int]]:
    begin = 0
    for index, (unit, repeats) in enumerate(parts):
        for place in range(len(unit)):
            for repeat in range(repeats):
                yield f"{path}segments.{index}.unit.{place}", begin + repeat * len(unit) + place
        begin += len(unit) * repeats


def for_inference(config: DecoderConfig) -> DecoderConfig:
    """The same model without what a checkpoint does not store since only training needs it: dropout, further losses."""

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


def _differences(first: Any, second: Any, where: str) -> Iterator[str]:
    """Where two configurations differ."""
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
