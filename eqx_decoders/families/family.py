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

from eqx_decoders.axes import Axes, axes, named_leaves
from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import Decoder, DecoderConfig
from eqx_decoders.errors import ConfigError, ConversionError, check
from eqx_decoders.families.fields import ALLOWED_VALUES, IGNORED_KEYS, Fields, abbreviate
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.router import RouterConfig
from eqx_decoders.mtp import MTPConfig
from eqx_decoders.stack import segments


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
        """Whether this is the row of a weight with these axes: an MLP's and its experts' gates have the same path."""
        stacked = [word for word in ("layers", "experts") if f"{{{word[:-1]}}}" in self.name]
        own = [word for word in self.pattern.split("->")[1].split() if word != "part"]
        return (*stacked, *own) == words


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """The tensors of a checkpoint that hold one weight of a model.

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
    - `ignored_tensors`: regular expression of tensors that hold nothing learned, such as tables of frequencies.
    - `aliases`: further words for `model_type`; none of them is written.
    - `fused`: rows in place of some of `weights` where all experts of a layer share a tensor.
    - `copies`: tensors that repeat others, `{layer}` being a layer of multi-token prediction.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    weights: tuple[Weight, ...]
    prefix: str = "model."
    ignored_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored_tensors: str = r".*rotary_emb\.inv_freq"
    aliases: tuple[str, ...] = ()
    fused: tuple[Weight, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def decode(self, content: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
        """The configuration that `config.json` describes, and the keys that it ignores. Raises ConversionError."""
        fields = Fields(content)
        for key in ("model_type", "dtype", "torch_dtype", "quantization_config"):  # they say how tensors are stored
            fields.take(key, None)
        named = fields.take("architectures", [self.architecture])
        base = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        if not isinstance(named, list) or not {self.architecture, base} & set(map(str, named)):
            raise fields.error(
                f"architectures={abbreviate(named)} must name {self.architecture}: other heads are not implemented."
            )
        for key, allowed in ALLOWED_VALUES.items():
            fields.allow_only(key, *allowed)
        try:
            config = self.read(fields)
        except ConfigError as error:
            raise fields.error(str(error)) from error
        ignored = {**IGNORED_KEYS, **self.ignored_keys}
        fields.finish(ignored)
        internal = ("_", "attn_implementation")  # how transformers runs a model: no part of an export
        kept = {key: value for key, value in fields.content.items() if key in ignored and not key.startswith(internal)}
        return config, kept

    def encode(self, config: DecoderConfig) -> dict[str, Any]:
        """The settings that describe `config`; ConversionError with the differences where none do."""
        config = for_inference(config)
        try:
            written = {"architectures": [self.architecture], "model_type": self.model_type, **self.write(config)}
            again, _ = self.decode(written)
        except (AttributeError, TypeError, IndexError, ConversionError) as error:  # other classes than it expects
            raise ConversionError(f"This model is no {self.architecture}: {error}") from error
        different = list(itertools.islice(_differences(again, config, "DecoderConfig"), 5))
        check(not different, f"This model is no {self.architecture}: {'; '.join(different)}.", ConversionError)
        return written

    def stored_as(self, names: Iterable[str]) -> "Family":
        """The family with its rows for fused experts, if the names of a checkpoint's tensors are those."""
        endings = {weight.name.rpartition(".")[2] for weight in self.fused if weight.part is not None}
        together = any(name.rpartition(".")[2] in endings for name in names)
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if together else self

    def bind(self, model: Decoder) -> dict[str, WeightMapping]:
        """For the path of every weight of `model` (arrays or shapes) the tensors that hold it."""
        stacks: dict[str, list[int]] = {}
        for stack, layer in _places(model.config):
            stacks.setdefault(stack, []).append(layer)
        words, leaves = axes(model), named_leaves(model)
        found: dict[str, WeightMapping] = {}
        for weight in self.weights:
            layered = "{layer}" in weight.name
            for stack, layers in stacks.items() if layered else [("", [0])]:
                path = f"{stack}.{weight.path}" if layered else weight.path
                if path in leaves and weight.fits(words[path]):
                    found[path] = _mapping(weight, layers if layered else None, words[path], leaves[path].shape)
        lacking = sorted(set(leaves) - set(found))
        check(not lacking, f"{self.architecture} has no tensor for {', '.join(lacking[:5])}.", ConversionError)
        return found

    def copied(self, config: DecoderConfig) -> dict[str, str]:
        """Tensors that repeat others, each with the name of the one that it repeats."""
        return {copy.format(layer=layer): name for layer in depth_layers(config) for copy, name in self.copies.items()}


def _mapping(weight: Weight, layers: list[int] | None, words: Axes, shape: tuple[int, ...]) -> WeightMapping:
    sizes = dict(zip(words, shape, strict=True)) | ({} if weight.part is None else {"part": weight.part[1]})
    numbers = [("layer", layers)] if layers is not None else []
    if "{expert}" in weight.name:
        numbers.append(("expert", list(range(sizes["experts"]))))
    places = itertools.product(*(values for _, values in numbers))
    return WeightMapping(
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
    """The path of the stack that each layer is in, and the layer's number, ascending within a stack."""
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

    def inference_block(block: BlockConfig) -> BlockConfig:
        return dataclasses.replace(block, dropout=0.0, mlp=inference_mlp(block.mlp))

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
