"""Families of checkpoints. A `Family` has a table of settings in `config.json` and a table of weights.

A row of `settings` maps keys of `config.json` to values of a configuration, in both directions. An export is refused
unless reading it returns the same configuration. A row of `weights` maps a tensor of a checkpoint to a weight, with an
einops pattern between the dimensions of the tensor and those of the weight. Import and export use the same row.
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
from eqx_decoders.families.setting_rows import Rule, Setting, public, read_all, write_all
from eqx_decoders.families.weight_rows import ENCODERS, Section, Weight, WeightMapping, are_transposed
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.shared_transformer import AidedMixerConfig
from eqx_decoders.model.decoder_config import DecoderConfig, with_scores
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.sharding.axes import axes, computed, named_leaves


class NotExpressedError(ConversionError):
    """The settings of a family cannot describe a configuration. `distance`: number of fields that differ."""

    def __init__(self, message: str, distance: int | float):
        super().__init__(message)
        self.distance = distance


@runtime_checkable
class HasConfig(Protocol):
    """A `Decoder` of arrays or of shapes."""

    @property
    def config(self) -> DecoderConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of checkpoint: how its `config.json` and its tensors map to a decoder.

    **Arguments:**

    - `model_type`, `architecture`: values of these keys in `config.json`.
    - `settings`: table of settings.
    - `build`: returns the configuration from the values of `settings`.
    - `weights`: table of weights.
    - `prefix`: prefix of the tensors of the base model; checkpoints without an output head may omit it. Default: the
        first word of the name of the embedding table.
    - `ignored_keys`: keys of `config.json` that have no effect, with the reason, in addition to `IGNORED_KEYS`. Keys
        with the same reason may be separated by spaces.
    - `ignored_tensors`: regular expression of tensors that are not learned, such as tables of frequencies; or a
        function that returns it for a configuration.
    - `kept_tensors`: regular expression of ignored tensors that transformers reads, and computes if they are missing.
        An export copies them from the checkpoint that was loaded, if that still exists.
    - `zero_tensors`: returns the names and shapes of ignored tensors that transformers requires, for a configuration.
        An export copies them from the checkpoint that was loaded, or fills them with zeros.
    - `fixed_tensors`: returns tensors that are computed from a configuration, such as multipliers of hashes. An export
        writes them. A checkpoint with other values is refused.
    - `aliases`: other values of `model_type` that are read, but never written.
    - `other_architectures`: other values of `architectures` that are read, but never written: classes whose code is
        published with a checkpoint.
    - `fused`: rows that replace some rows of `weights` for checkpoints that store all experts of a layer in one tensor.
    - `writes_fused`: whether an export uses the rows of `fused`, because transformers reads no other format.
    - `copies`: names of tensors that duplicate other tensors, with the names of the originals. `{layer}` stands for
        the index of a layer of multi-token prediction.
    - `with_depths`: returns a configuration with a number of layers of multi-token prediction, for checkpoints that
        store such layers but do not mention them in `config.json`. None: there are no such checkpoints.
    - `renamed`: regular expressions of tensor names, with the replacement that gives the name in `weights`.
    - `modules`: regular expressions of tensor names, with the replacement that gives the name in a loaded transformers
        model.
    - `text`: family of the decoder, for a family with encoders.
    - `variants`: this family with decoders of other text families.
    - `text_names`: prefixes of tensor names in `text`, with the prefix that replaces them in this family.
    - `auto_class`: class of transformers that loads the checkpoint.
    - `own_settings`: converts a `config.json` to the spelling of `settings`, for files that use another spelling or
        describe more than this model.
    - `transposed`: rows that replace some rows of `weights` for checkpoints that store experts as `[in, out]`.
    - `integer_tensors`: regular expression of tensors that hold integers.
    - `default_settings`: ignored keys that transformers requires, with the values that an export writes if the loaded
        `config.json` had no value.
    - `blocks_per_layer`: number of blocks that a checkpoint counts as one `{layer}`. `{part}` is the index of a block
        in its layer.
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
        """Return the configuration that a `config.json` describes, and its keys without effect.

        Raises ConversionError if the library does not support a setting.
        """
        return self.decode_fields(Fields(self.own_settings(content)))

    def for_config(self, content: Mapping[str, Any]) -> "Family":
        """Return this family, or `self.scoring()` if `architectures` names a sequence classification class."""
        names = content.get("architectures")
        is_scorer = isinstance(names, list) and any(str(name).endswith(SCORER) for name in names)
        return self.scoring() if is_scorer else self

    def scoring(self) -> "Family":
        """Return the family of sequence classification models with this decoder, such as reward models.

        Raises ConversionError if transformers has no such class for this model type.
        """
        score_row = Weight("score.weight", "head.kernel", "scores embed -> embed scores")
        num_scores = Rule("_scores", number_of_scores, lambda config: {"num_labels": config.scores})
        return dataclasses.replace(
            self,
            architecture=scorer_name(self.model_type, self.architecture),
            settings=(*self.settings, num_scores),
            weights=tuple(score_row if row.path == score_row.path else row for row in self.weights),
            other_architectures=(),
            with_depths=None,
            auto_class=SCORER_CLASS,
        )

    def stored_name(self, name: str) -> str:
        """Return the name in `weights` of a tensor of a checkpoint, which may use an older name."""
        for pattern, replacement in self.renamed.items():
            name = re.sub(pattern, replacement, name)
        return name

    def module_name(self, name: str) -> str:
        """Return the name that a stored tensor has in a loaded transformers model."""
        for pattern, replacement in self.modules.items():
            name = re.sub(pattern, replacement, name)
        return name

    def decode_fields(self, fields: Fields) -> tuple[DecoderConfig, dict[str, Any]]:
        """Return the result of `decode` for an object that may be nested in another object."""
        for key in ("model_type", "dtype", "torch_dtype", "quantization_config"):  # not part of the architecture
            fields.take(key, None)
        architectures = fields.take("architectures", [self.architecture])
        base_model = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        known = {self.architecture, base_model, *self.other_architectures}
        if not isinstance(architectures, list) or not known & set(map(str, architectures)):
            raise fields.error(
                f"architectures={abbreviate(architectures)} must contain {self.architecture!r}: models with other "
                "heads are not supported."
            )
        try:
            config = self.read(fields)
        except ConfigError as error:
            raise fields.error(str(error)) from error
        return config, fields.ignored({**IGNORED_KEYS, **self.ignored_keys}, ALLOWED_VALUES, GENERATION_KEYS)

    def read(self, fields: Fields) -> DecoderConfig:
        """Return the configuration from the keys of `settings`."""
        values = read_all(self.settings, fields)
        config = self.build(**public(values))
        return with_scores(config, values["_scores"]) if "_scores" in values else config

    def encode(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the `config.json` that describes `config`.

        Raises ConversionError with the differences if this family cannot describe it.
        """
        return self.expressing(config)[1]

    def expressing(self, config: DecoderConfig) -> tuple["Family", dict[str, Any]]:
        """Return the family that can describe `config`, and the `config.json`.

        The family is the first match among `variants` and this family. Its `weights` are the tensors of an export.
        Raises ConversionError with the differences if no family matches.
        """
        if config.scores is not None and self.auto_class != SCORER_CLASS:
            return self.scoring().expressing(config)
        errors: list[NotExpressedError] = []
        for family in (*self.variants, self):
            try:
                return family._as_written(), family._encode(config)
            except NotExpressedError as error:
                errors.append(error)
        errors.reverse()  # for equal distances `min` returns the first error: prefer this family to its variants
        raise min(errors, key=lambda error: error.distance)

    def _as_written(self) -> "Family":
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if self.writes_fused else self

    def _encode(self, config: DecoderConfig) -> dict[str, Any]:
        config = for_inference(config)
        try:
            settings = write_all(self.settings, config)
            written = {"architectures": [self.architecture], "model_type": self.model_type, **settings}
            decoded, _ = self.decode(written)
        except ConversionError as error:
            raise NotExpressedError(f"{self.architecture} cannot describe this model: {error}", math.inf) from error
        except AttributeError as error:
            if not dataclasses.is_dataclass(error.obj):
                raise
            # a layer of another class lacks a field that the settings describe
            raise NotExpressedError(f"{self.architecture} cannot describe this model: {error}.", math.inf) from error
        different = list(_differences(decoded, config, "DecoderConfig"))
        if different:
            raise NotExpressedError(
                f"{self.architecture} cannot describe this model: {'; '.join(different[:5])}.", len(different)
            )
        return written

    @property
    def head(self) -> str:
        """Name of the tensor of the output head."""
        return next(row.name for row in self.weights if row.path == "head.kernel")

    def text_tensor(self, name: str) -> str | None:
        """Return the name in `text` of a tensor of the decoder; None for a tensor of an encoder."""
        for text_prefix, prefix in self.text_names.items():
            if name.startswith(prefix):
                return text_prefix + name.removeprefix(prefix)
        return None

    def for_tensors(self, tensors: Iterable[str]) -> "Family":
        """Return the family with rows for the expert format of a checkpoint: fused experts or transposed matrices.

        `tensors`: names of the tensors. For a mapping from names to tensors, the shapes decide whether experts are
        transposed; names alone cannot.
        """
        if self.transposed and isinstance(tensors, Mapping):
            rows = self.transposed if are_transposed(tensors) else ()
            return dataclasses.replace(self, weights=self.weights + rows, transposed=())
        fused_endings = {row.name.rpartition(".")[2] for row in self.fused if row.part is not None}
        is_fused = any(name.rpartition(".")[2] in fused_endings for name in tensors)
        return dataclasses.replace(self, weights=self.weights + self.fused, fused=()) if is_fused else self

    def bind(self, model: HasConfig) -> dict[str, WeightMapping]:
        """Return the tensors that hold each weight of `model` (arrays or shapes), by the path of the weight.

        Buffers that are computed from the configuration have no tensors. Raises ConversionError if another weight has
        no row in `weights`.
        """
        stacks: dict[str, list[int]] = {}
        for stack, layer in _layer_paths(model.config):
            stacks.setdefault(stack, []).append(layer)
        owners = {stack: stack.split(".")[0] if stack.startswith(ENCODERS) else "" for stack in stacks}
        axis_names = axes(model)
        leaves = named_leaves(model)
        rows: dict[str, tuple[Weight, str]] = {}
        for row in self.weights:
            row_stacks = [stack for stack in stacks if owners[stack] == row.owner]
            for stack in row_stacks if row.of_layers else [""]:
                path = row.inside(stack)
                is_used = not row.needs or f"{stack}.{row.needs}" in leaves
                if path in leaves and row.fits(axis_names[path]) and is_used:
                    rows[path] = (row, stack)
        missing = sorted(set(leaves) - set(rows) - computed(model))
        check(
            not missing,
            f"{self.architecture} has no tensors for these weights of the model: {', '.join(missing[:5])}.",
            ConversionError,
        )
        sizes = {path: dict(zip(axis_names[path], leaf.shape, strict=True)) for path, leaf in leaves.items()}
        name_fields = {**_stage_indices(model.config), **_shared_block_indices(model.config)}
        depths = list(range(0 if model.config.mtp is None else model.config.mtp.num_depths))
        mappings = {
            path: _mapping(
                row, depths if row.is_mtp else stacks.get(stack), sizes[path], self.blocks_per_layer, name_fields
            )
            for path, (row, stack) in rows.items()
        }
        for path, section in _sections(rows, mappings, sizes).items():
            mappings[path] = dataclasses.replace(mappings[path], section=section)
        return mappings

    def is_ignored(self, tensor: str, config: DecoderConfig) -> bool:
        """Return whether a tensor of a model with this configuration is one of `ignored_tensors`."""
        pattern = self.ignored_tensors if isinstance(self.ignored_tensors, str) else self.ignored_tensors(config)
        return re.fullmatch(pattern, tensor) is not None

    def stored_depths(self, names: Iterable[str]) -> int:
        """Return the number of layers of multi-token prediction in a checkpoint with tensors of these `names`.

        The result is 0 for a family whose tensor names do not contain `{depth}`.
        """
        prefixes = {row.name.partition("{depth}")[0] for row in self.weights if "{depth}" in row.name}
        pattern = f"(?:{'|'.join(map(re.escape, prefixes))})([0-9]+)[.].*"
        matches = (re.fullmatch(pattern, name) for name in names if prefixes)
        return max((int(match[1]) + 1 for match in matches if match), default=0)

    def copied(self, config: DecoderConfig) -> dict[str, str]:
        """Return the names of tensors that duplicate other tensors, with the names of the originals."""
        return {copy.format(layer=layer): name for layer in _depth_layers(config) for copy, name in self.copies.items()}


def _shared_block_indices(config: DecoderConfig) -> dict[int, dict[str, int]]:
    """Return `owner` and `use` of each layer that uses a shared transformer block.

    `owner` is the first layer that uses the same block, and `use` counts the layers that use any shared block.
    """
    mixers = {layer: block.mixer for layer, block in enumerate(config.blocks)}
    mixers = {layer: mixer for layer, mixer in mixers.items() if isinstance(mixer, AidedMixerConfig)}
    owners: dict[int, int] = {}
    for layer, mixer in mixers.items():
        owners.setdefault(mixer.number, layer)
    return {layer: {"owner": owners[mixer.number], "use": use} for use, (layer, mixer) in enumerate(mixers.items())}


def _stage_indices(config: DecoderConfig) -> dict[int, dict[str, int]]:
    """Return `stage` and `block` (the index in its stage) of each layer, for a vision encoder with stages."""
    stem = None if config.media is None or config.media.vision is None else config.media.vision.stem
    stages: Any = getattr(stem, "stages", ())
    indices = [(stage, block) for stage, blocks in enumerate(stages) for block in range(len(blocks))]
    return {layer: {"stage": stage, "block": block} for layer, (stage, block) in enumerate(indices)}


def _mapping(
    row: Weight,
    layers: list[int] | None,
    sizes: Mapping[str, int],
    blocks_per_layer: int,
    name_fields: Mapping[int, Mapping[str, int]],
) -> WeightMapping:
    """Return the tensors that hold a weight of a stack.

    **Arguments:**

    - `layers`: indices of the layers in the stack; None for a weight outside of layers.
    - `sizes`: size of each axis of the weight.
    - `blocks_per_layer`: see `Family`.
    - `name_fields`: for some layers, values of other fields in the names of tensors.
    """
    # The fields of a tensor's name, each with its values. The weight has a leading axis for each field.
    fields = [] if layers is None else [("depth" if row.is_mtp else "layer", layers)]
    has_one_depth = row.is_mtp and "{depth}" not in row.name
    check(
        not (has_one_depth and len(layers or ()) > 1),
        f"MTPConfig.num_depths={len(layers or ())} must be 1: checkpoints of this model type store a single layer of "
        f"multi-token prediction ({row.name}).",
        ConversionError,
    )
    fields += [(field, list(range(sizes[axis]))) for field, axis in row.numbered.items()]

    def tensor_name(*index: int) -> str:
        values = dict(zip((field for field, _ in fields), index, strict=True))
        values |= name_fields.get(values.get("layer", -1), {})
        if blocks_per_layer > 1 and "layer" in values:
            values["layer"], values["part"] = divmod(values["layer"], blocks_per_layer)
        return row.name.format(**values)

    indices = itertools.product(*(values for _, values in fields))
    return WeightMapping(
        names=tuple(itertools.starmap(tensor_name, indices)),
        stack=tuple(len(values) for _, values in fields),
        pattern=row.pattern,
        sizes={**sizes, "1": 1},
    )


def _sections(
    rows: Mapping[str, tuple[Weight, str]],
    mappings: Mapping[str, WeightMapping],
    sizes: Mapping[str, Mapping[str, int]],
) -> dict[str, Section]:
    """Return the section of each weight that shares a tensor with other weights, by path."""
    shared: dict[tuple[str, str], dict[int, str]] = {}
    for path, (row, stack) in rows.items():
        if row.part is not None:
            shared.setdefault((row.name, stack), {})[row.part.index] = path
    sections_by_path: dict[str, Section] = {}
    for (name, _), paths in shared.items():
        sections: dict[str, Section] = {}
        start = 0
        for index, path in sorted(paths.items()):
            part = rows[path][0].part
            assert part is not None
            check(
                len(paths) == part.count,
                f"{path}: the tensor {name} holds {part.count} weights, but the model has {len(paths)} of them. "
                "Use a configuration with all or none of these weights.",
                ConversionError,
            )
            blocks = 1 if part.within is None else _axis_size_in_module(path, part.within, sizes)
            num_rows = mappings[path].own_shape[part.axis]
            check(
                num_rows % blocks == 0,
                f"{path}: its {num_rows} rows in the tensor {name} must be a multiple of {part.within}={blocks}.",
                ConversionError,
            )
            size = num_rows // blocks
            sections[path] = Section(index=index, axis=part.axis, blocks=blocks, begin=start, size=size, block_size=0)
            start += size
        sections_by_path |= {path: dataclasses.replace(section, block_size=start) for path, section in sections.items()}
    return sections_by_path


def _axis_size_in_module(path: str, axis: str, sizes: Mapping[str, Mapping[str, int]]) -> int:
    """Return the size of an axis that some weight in the module of `path` has."""
    module = path.rpartition(".")[0] + "."
    axis_sizes = [known[axis] for other, known in sizes.items() if other.startswith(module) and axis in known]
    check(bool(axis_sizes), f"{path}: no weight of the module {module[:-1]} has the axis {axis}.", ConversionError)
    return axis_sizes[0]


def _depth_layers(config: DecoderConfig) -> range:
    """Return the indices of the layers of multi-token prediction, which follow those of the decoder's layers."""
    start = len(config.blocks)
    return range(start, start + (0 if config.mtp is None else config.mtp.num_depths))


def _layer_paths(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Yield the path of its stack and the index of each layer. Indices are ascending within a stack."""
    for layer in _depth_layers(config):
        yield "mtp.depth", layer
        yield "mtp.depth.block", layer
    owners = {indices["owner"] for indices in _shared_block_indices(config).values()}
    yield from (("shared", layer) for layer in sorted(owners))
    yield from _layer_paths_in("scanned_layers", find_repeats(config.blocks))
    for name in ENCODERS:
        encoder = None if config.media is None else getattr(config.media, name)
        if encoder is not None:
            yield from _layer_paths_in(f"{name}.scanned_layers", encoder.parts)
            yield from _layer_paths_in(f"{name}.stem.repeated_planes", getattr(encoder.stem, "parts", ()))


def _layer_paths_in(path: str, parts: Iterable[tuple[tuple[Any, ...], int]]) -> Iterator[tuple[str, int]]:
    start = 0
    for index, (unit, repeats) in enumerate(parts):
        for position in range(len(unit)):
            for repeat in range(repeats):
                yield f"{path}.{index}.unit.{position}", start + repeat * len(unit) + position
        start += len(unit) * repeats


def for_inference(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration without settings that only affect training: dropout and auxiliary losses."""

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
    """Return descriptions of the first differences between two configurations, at most 5."""
    return list(itertools.islice(_differences(first, second, "DecoderConfig"), 5))


def _differences(first: Any, second: Any, where: str) -> Iterator[str]:
    if first == second:
        return
    if type(first) is type(second) and dataclasses.is_dataclass(first):
        for field in dataclasses.fields(first):
            yield from _differences(getattr(first, field.name), getattr(second, field.name), f"{where}.{field.name}")
    elif isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        for index, (first_item, second_item) in enumerate(zip(first, second, strict=True)):
            yield from _differences(first_item, second_item, f"{where}[{index}]")
    else:
        yield f"{where}={second!r} would have to be {first!r}"
