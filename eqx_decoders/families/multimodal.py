"""Families with encoders: a text family whose settings and tensors stand inside of others."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.common import self_attention
from eqx_decoders.families.config_reader import IGNORED_KEYS, Fields
from eqx_decoders.families.hf_table import Family, Weight
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.rope import AxialRope
from eqx_decoders.model.decoder import DecoderConfig


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
    """A layer in which patches, or tokens of audio, see all of their image or window, in both directions."""
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
    """The settings of the decoder; what stands outside of them and is about it, too."""
    table = fields.table("text_config")
    if table is None:
        raise fields.error("text_config is missing: it describes the decoder.")
    table.content.pop("architectures", None)  # what the decoder was alone: the outer object names the class
    if isinstance(tied := fields.take(_TIED, None), bool):
        table.content[_TIED] = tied  # what stands outside counts: inside may be the default of a class
    return table


def multimodal(
    text: Family,
    *,
    model_type: str,
    architecture: str,
    read: Callable[[Fields, DecoderConfig], DecoderConfig],
    write: Callable[[DecoderConfig], dict[str, Any]],
    weights: tuple[Weight, ...],
    names: Mapping[str, str],
    ignored_keys: Mapping[str, str] = {},
    renamed: Mapping[str, str] = {},
    modules: Mapping[str, str] = {},
    ignored_tensors: str | Callable[[DecoderConfig], str] = r".*(rotary_emb\.inv_freq|position_ids)",
    auto_class: str = "AutoModelForImageTextToText",
    own_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    aliases: tuple[str, ...] = (),
    alone: Family | None = None,
    default_settings: Mapping[str, Any] = {},
) -> Family:
    """A family whose decoder is one of `text`.

    **Arguments:**

    - `read`: of the settings, and the decoder's configuration, the whole configuration.
    - `write`: the settings beside `text_config`.
    - `weights`: rows of the encoders.
    - `names`: how the tensors of `text` begin, and how they do here.
    - `alone`: a family as one of which the decoder is opened by itself; None for `text`.
    """

    def read_all(fields: Fields) -> DecoderConfig:
        table = text_fields(fields)
        config, kept = text.decode_fields(table)
        fields.keep("text_config", kept)
        return read(fields, config)

    def write_all(config: DecoderConfig) -> dict[str, Any]:
        inner = text.write(config)
        tied = {_TIED: inner[_TIED]} if _TIED in inner else {}
        return {"text_config": {"model_type": text.model_type, **inner}, **tied, **write(config)}

    def renamed_row(weight: Weight) -> Weight:
        for inner, here in names.items():
            if weight.name.startswith(inner):
                return dataclasses.replace(weight, name=here + weight.name.removeprefix(inner))
        return weight

    stored = text.stored_rows
    return dataclasses.replace(
        text,
        model_type=model_type,
        architecture=architecture,
        read=read_all,
        write=write_all,
        weights=(*map(renamed_row, text.weights), *weights),
        fused=tuple(map(renamed_row, text.fused)),
        prefix="",
        ignored_keys=ignored_keys,
        ignored_tensors=ignored_tensors,
        aliases=aliases,
        copies={renamed_name(copy, names): renamed_name(name, names) for copy, name in text.copies.items()},
        renamed={**text.renamed, **renamed},
        modules=modules,
        text=text if alone is None else _opened_as(text, alone),
        text_names=names,
        auto_class=auto_class,
        own_settings=own_settings,
        default_settings=default_settings,
        stored_rows=None if stored is None else lambda tensors: tuple(map(renamed_row, stored(tensors))),
    )


def _opened_as(text: Family, plain: Family) -> Family:
    """`plain`, read from the settings and tensors of `text`: positions of text are the same in all dimensions."""

    def read(fields: Fields) -> DecoderConfig:
        config = text.read(fields)
        blocks = {block: _without_sections(block) for block in dict.fromkeys(config.blocks)}
        return dataclasses.replace(config, blocks=tuple(blocks[block] for block in config.blocks))

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


def with_defaults(text: Family, defaults: Mapping[str, int]) -> Family:
    """A text family whose settings may lack these keys, as `text_config` of published files does."""

    def read(fields: Fields) -> DecoderConfig:
        for key, value in defaults.items():
            fields.content.setdefault(key, value)
        return text.read(fields)

    return dataclasses.replace(text, read=read)


def renamed_name(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name here."""
    inner = next((inner for inner in names if name.startswith(inner)), "")
    return names.get(inner, "") + name.removeprefix(inner)


def finish(fields: Fields, key: str, table: Fields, ignored: Mapping[str, str] = {}) -> None:
    """Refuse what nothing has read of a nested object, and keep what changes nothing."""
    for name in ("model_type", "dtype", "torch_dtype"):
        table.take(name, None)
    fields.keep(key, table.kept({**IGNORED_KEYS, **ignored}))


def with_spans(config: DecoderConfig, chosen: Callable[[AttentionConfig], bool] = lambda _: True) -> DecoderConfig:
    """The configuration whose (chosen) layers see images whole."""

    def changed(block: Any) -> Any:
        mixer = block.mixer
        if not isinstance(mixer, AttentionConfig) or not chosen(mixer):
            return block
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, spans=True))

    blocks = {block: changed(block) for block in dict.fromkeys(config.blocks)}
    return dataclasses.replace(config, blocks=tuple(blocks[block] for block in config.blocks))


def linear(name: str, path: str) -> tuple[Weight, ...]:
    """Rows of one matrix of a projector."""
    return (
        Weight(f"{name}.weight", f"{path}.kernel", "outer inner -> inner outer"),
        Weight(f"{name}.bias", f"{path}.bias", "outer -> outer"),
    )


def norm(name: str, path: str) -> tuple[Weight, ...]:
    """Rows of a norm."""
    return (
        Weight(f"{name}.weight", f"{path}.scale", "norm -> norm"),
        Weight(f"{name}.bias", f"{path}.bias", "norm -> norm"),
    )


def plain_mlp(layer: str, first: str, second: str, owner: str = "vision") -> tuple[Weight, ...]:
    """Rows of an MLP without a gate."""
    return (
        Weight(f"{layer}{first}.weight", f"{owner}.mlp.up", "mlp embed -> embed mlp"),
        Weight(f"{layer}{first}.bias", f"{owner}.mlp.up_bias", "mlp -> mlp"),
        Weight(f"{layer}{second}.weight", f"{owner}.mlp.down", "embed mlp -> mlp embed"),
        Weight(f"{layer}{second}.bias", f"{owner}.mlp.down_bias", "embed -> embed"),
    )


def attention(layer: str, name: str = "self_attn.", out: str = "o_proj", owner: str = "vision") -> tuple[Weight, ...]:
    """Rows of attention with one matrix each for queries, keys, values and output."""
    return tuple(
        dataclasses.replace(row, name=row.name.replace("o_proj", out), path=f"{owner}.{row.path}")
        for row in self_attention(layer, name)
    )
