"""Families with encoders: a text family whose settings and tensors are nested in others."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.common import map_blocks, self_attention
from eqx_decoders.families.config_reader import IGNORED_KEYS, Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder_config import DecoderConfig


_TIED = "tie_word_embeddings"


def encoder_layer(
    embed_dim: int,
    heads: int,
    mlp: MLPConfig,
    norm: NormConfig,
    *,
    rope: AxialRope | None = None,
    bias: bool = True,
    window: int | None = None,
) -> BlockConfig:
    """Return a layer in which patches, or tokens of audio, attend to all of their image or window."""
    mixer = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed_dim // heads,
        mask=Bidirectional(window),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )
    return BlockConfig(mixer=mixer, mlp=mlp, pre_mixer_norm=norm, pre_mlp_norm=norm)


def text_fields(fields: Fields) -> Fields:
    """Return the settings of the decoder, with those that stand outside of them."""
    table = fields.table("text_config")
    if table is None:
        raise fields.error("text_config is missing: it describes the decoder.")
    table.content.pop("architectures", None)  # the class of the decoder: the outer object names that of the model
    if isinstance(tied := fields.take(_TIED, None), bool):
        table.content[_TIED] = tied  # the outer value counts: the inner one may be the default of a class
    return table


class ExtendedModel(NamedTuple):
    """Published model that adds encoders to the published model called `text`."""

    text: str
    add_encoders: Callable[[DecoderConfig], DecoderConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalFamily:
    """Family of checkpoints with encoders, whose decoder is one of a text family.

    **Arguments:**

    - `text`: the `model_type` of the text family.
    - `adapt`: changes the text family to the form that its settings have in these checkpoints.
    - `reads_as_text`: whether the decoder is opened by itself as one of the text family before `adapt`.
    - `read`: the whole configuration, from the settings and the decoder's configuration.
    - `write`: the settings outside of `text_config`.
    - `weights`: rows of the encoders.
    - `names`: prefixes of the tensors of the text family, and those that replace them.

    The other fields are those of `Family`.
    """

    text: str
    adapt: Callable[[Family], Family] = lambda text: text
    reads_as_text: bool = False
    model_type: str
    architecture: str
    read: Callable[[Fields, DecoderConfig], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    weights: tuple[Weight, ...]
    names: Mapping[str, str]
    ignored_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored_tensors: str | Callable[[DecoderConfig], str] = r".*(rotary_emb\.inv_freq|position_ids)"
    auto_class: str = "AutoModelForImageTextToText"
    own_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    aliases: tuple[str, ...] = ()
    default_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_text(self, base: Family) -> Family:
        """Return the family with the decoder of `base`, the text family."""
        text = self.adapt(base)
        stored = text.stored_rows
        return dataclasses.replace(
            text,
            model_type=self.model_type,
            architecture=self.architecture,
            read=self._reader(text),
            write=self._writer(text),
            weights=(*map(self._renamed_row, text.weights), *self.weights),
            fused=tuple(map(self._renamed_row, text.fused)),
            prefix="",
            ignored_keys=self.ignored_keys,
            ignored_tensors=self.ignored_tensors,
            aliases=self.aliases,
            copies={self._renamed(copy): self._renamed(name) for copy, name in text.copies.items()},
            renamed={**text.renamed, **self.renamed},
            modules=self.modules,
            text=_opened_as(text, base) if self.reads_as_text else text,
            text_names=self.names,
            auto_class=self.auto_class,
            own_settings=self.own_settings,
            default_settings=self.default_settings,
            stored_rows=None if stored is None else lambda tensors: tuple(map(self._renamed_row, stored(tensors))),
        )

    def _reader(self, text: Family) -> Callable[[Fields], DecoderConfig]:
        def read(fields: Fields) -> DecoderConfig:
            config, ignored = text.decode_fields(text_fields(fields))
            fields.carry("text_config", ignored)
            return self.read(fields, config)

        return read

    def _writer(self, text: Family) -> Callable[[DecoderConfig], dict[str, Any]]:
        def write(config: DecoderConfig) -> dict[str, Any]:
            inner = text.write(config)
            tied = {_TIED: inner[_TIED]} if _TIED in inner else {}
            return {"text_config": {"model_type": text.model_type, **inner}, **tied, **self.write(config)}

        return write

    def _renamed(self, name: str) -> str:
        inner = next((inner for inner in self.names if name.startswith(inner)), "")
        return self.names.get(inner, "") + name.removeprefix(inner)

    def _renamed_row(self, weight: Weight) -> Weight:
        return dataclasses.replace(weight, name=self._renamed(weight.name))


def _opened_as(text: Family, plain: Family) -> Family:
    """Return `plain`, read from the settings and tensors of `text`: text has the same position in all dimensions."""

    def read(fields: Fields) -> DecoderConfig:
        return map_blocks(text.read(fields), _without_sections)

    return dataclasses.replace(
        plain,
        read=read,
        weights=text.weights,
        fused=text.fused,
        ignored_keys=text.ignored_keys,
        stored_rows=text.stored_rows,
    )


def _without_sections(block: BlockConfig) -> BlockConfig:
    mixer = block.mixer
    if not isinstance(mixer, AttentionConfig) or mixer.rope is None:
        return block
    rope = dataclasses.replace(mixer.rope, sections=(), interleaved_sections=True)
    return dataclasses.replace(block, mixer=dataclasses.replace(mixer, rope=rope))


def check_model_type(fields: Fields, model_type: str) -> None:
    """Refuse another `model_type` of a nested object, which may lack the key."""
    kind = fields.content.get("model_type", model_type)
    if kind != model_type:
        raise fields.unknown(f"model_type={kind}", kind, (model_type,))


def with_defaults(text: Family, defaults: Mapping[str, int]) -> Family:
    """Return a text family whose settings may lack these keys, as `text_config` of published files does."""

    def read(fields: Fields) -> DecoderConfig:
        for key, value in defaults.items():
            fields.content.setdefault(key, value)
        return text.read(fields)

    return dataclasses.replace(text, read=read)


def finish(fields: Fields, key: str, table: Fields, ignored: Mapping[str, str] = {}) -> None:
    """Refuse unread keys of a nested object, and carry those that have no effect."""
    for name in ("model_type", "dtype", "torch_dtype"):
        table.take(name, None)
    fields.carry(key, table.ignored({**IGNORED_KEYS, **ignored}))


def with_spans(config: DecoderConfig, chosen: Callable[[AttentionConfig], bool] = lambda _: True) -> DecoderConfig:
    """Return the configuration whose (chosen) layers attend to whole images."""

    def with_span(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer
        if not isinstance(mixer, AttentionConfig) or not chosen(mixer):
            return block
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, spans=True))

    return map_blocks(config, with_span)


def linear(name: str, path: str) -> tuple[Weight, ...]:
    """Return the rows of one matrix of a projector."""
    return (
        Weight(f"{name}.weight", f"{path}.kernel", "outer inner -> inner outer"),
        Weight(f"{name}.bias", f"{path}.bias", "outer -> outer"),
    )


def norm(name: str, path: str) -> tuple[Weight, ...]:
    """Return the rows of a norm."""
    return (
        Weight(f"{name}.weight", f"{path}.scale", "norm -> norm"),
        Weight(f"{name}.bias", f"{path}.bias", "norm -> norm"),
    )


def plain_mlp(layer: str, first: str, second: str, owner: str = "vision") -> tuple[Weight, ...]:
    """Return the rows of an MLP without a gate."""
    return (
        Weight(f"{layer}{first}.weight", f"{owner}.mlp.up", "mlp embed -> embed mlp"),
        Weight(f"{layer}{first}.bias", f"{owner}.mlp.up_bias", "mlp -> mlp"),
        Weight(f"{layer}{second}.weight", f"{owner}.mlp.down", "embed mlp -> mlp embed"),
        Weight(f"{layer}{second}.bias", f"{owner}.mlp.down_bias", "embed -> embed"),
    )


def attention(layer: str, name: str = "self_attn.", out: str = "o_proj", owner: str = "vision") -> tuple[Weight, ...]:
    """Return the rows of attention with one matrix each for queries, keys, values and output."""
    return tuple(
        dataclasses.replace(row, name=row.name.replace("o_proj", out), path=f"{owner}.{row.path}")
        for row in self_attention(layer, name)
    )
