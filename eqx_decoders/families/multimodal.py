"""Families with encoders: a text family whose settings and tensors are nested in others."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.families.common import map_blocks
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Integer, Rule, Setting, Values, write_all
from eqx_decoders.families.weight_rows import Weight, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.rope import AxialRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_TIED = "tie_word_embeddings"

# transformers' defaults for keys that text_config lacks, where it is one of Llama; Mistral's MLP is wider, and
# published files have that size.
LLAMA_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}

# Names of tensors in files where the decoder stands in a `language_model`, and in transformers once they are loaded.
LANGUAGE_MODEL: dict[str, Any] = {
    "text_names": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "renamed": {
        r"^model\.language_model\.": "language_model.model.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^lm_head\.": "language_model.lm_head.",
    },
    "modules": {
        r"^language_model\.model\.": "model.language_model.",
        r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
        r"^language_model\.lm_head\.": "lm_head.",
    },
}


def encoder_layer(
    embed_dim: int,
    heads: int,
    mlp: MLPConfig,
    norm: NormConfig,
    *,
    rope: AxialRope | None = None,
    bias: bool = True,
    window: int | None = None,
    **options: Any,
) -> BlockConfig:
    """Return a layer in which patches, or tokens of audio, attend to all of their image or window.

    `options` are further fields of its attention.
    """
    sizes = dict(num_heads=heads, num_kv_heads=heads, head_dim=embed_dim // heads)
    bias_fields = dict(qkv_bias=bias, out_bias=bias)
    mixer = AttentionConfig(**{**sizes, **bias_fields, **options}, mask=Bidirectional(window), rope=rope)
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


# keys that are not the decoder's where all settings stand in one object
_OUTSIDE = {
    *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("vision_config", "text_config", _TIED),
}


def nested(*outside: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that nests the decoder's settings: old files have them next to the encoder's, or twice.

    `outside` are keys that are not the decoder's.
    """
    own = _OUTSIDE | set(outside)

    def settings(content: Mapping[str, Any]) -> Mapping[str, Any]:
        inner = content.get("text_config")
        if isinstance(inner, Mapping):
            inner = {key: value for key, value in inner.items() if key != "architectures"}
            outer = {key: value for key, value in content.items() if key in own or key not in inner}
            outer[_TIED] = outer.get(_TIED) or inner.get(_TIED) or False
            return {**outer, "text_config": inner}
        if inner is not None:
            return content
        inner = {key: value for key, value in content.items() if key not in own}
        return {**{key: value for key, value in content.items() if key in own}, "text_config": inner}

    return settings


class ExtendedModel(NamedTuple):
    """Published model that adds encoders to the published model called `text`."""

    text: str
    add_encoders: Callable[[DecoderConfig], DecoderConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalFamily(Family):
    """Family of checkpoints with encoders, whose decoder is one of a text family.

    **Arguments:**

    - `text_type`: the `model_type` of the text family.
    - `other_texts`: those of further text families, for `variants`; `alternatives` are variants that differ in more.
    - `changes`: fields of the text family that differ in these checkpoints.
    - `text_settings`: rows that stand before those of the text family, in `text_config`.
    - `reads_as_text`: whether the decoder is opened by itself as one of the text family without `changes`.
    - `flat`: whether the decoder's settings are written beside the encoders', without a `text_config`.
    - `settings`: the rows outside of `text_config`, which see the decoder's configuration as `text`.
    - `build`: returns the configuration from the decoder's, `text`, and the values of `settings`.
    - `weights`: rows of the encoders; `with_text` adds those of the decoder.

    The other fields are those of `Family`.
    """

    text_type: str
    other_texts: tuple[str, ...] = ()
    alternatives: tuple["MultimodalFamily", ...] = ()
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text_settings: tuple[Setting, ...] = ()
    reads_as_text: bool = False
    flat: bool = False
    prefix: str = ""
    ignored_tensors: str | Callable[[DecoderConfig], str] = r".*(rotary_emb\.inv_freq|position_ids)"
    auto_class: str = "AutoModelForImageTextToText"

    def with_texts(self, find: Callable[[str], Family]) -> Family:
        """Return the family with the decoders of its text families, which `find` returns by `model_type`."""
        variants = tuple(self._with_text(find(kind)) for kind in self.other_texts)
        variants += tuple(each._with_text(find(each.text_type)) for each in self.alternatives)
        return dataclasses.replace(self._with_text(find(self.text_type)), variants=variants)

    def decode(self, content: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
        """Return the configuration of a `config.json`, and the keys that it ignores. Raises ConversionError."""
        family = self.described_by(content)
        return super().decode(content) if family is self else family.decode(content)

    def described_by(self, content: Mapping[str, Any]) -> Family:
        """Return the family, or one of `variants`, whose decoder a `config.json` names."""
        inner = content.get("text_config")
        kind = inner.get("model_type") if isinstance(inner, Mapping) else None
        return next((each for each in self.variants if kind == _inner_type(each)), self)

    def _with_text(self, base: Family) -> Family:
        """Return the family with the decoder of `base`, a text family."""
        text = dataclasses.replace(base, **self.changes)
        known = (base.model_type, self.text_type, *self.other_texts)
        checked = (needs_model_type(*dict.fromkeys(known)),) if self.other_texts else ()
        text = dataclasses.replace(text, settings=(*checked, *self.text_settings, *text.settings))
        return dataclasses.replace(
            self,
            settings=(_TextSettings(text, self.flat), *self.settings),
            weights=(*self._renamed_rows(text.weights), *self.weights),
            fused=self._renamed_rows(text.fused),
            transposed=self._renamed_rows(text.transposed),
            copies={self._renamed(copy): self._renamed(name) for copy, name in text.copies.items()},
            renamed={**text.renamed, **self.renamed},
            with_depths=text.with_depths,
            text=_opened_as(text, base) if self.reads_as_text else text,
        )

    def _renamed(self, name: str) -> str:
        inner = next((inner for inner in self.text_names if name.startswith(inner)), "")
        return self.text_names.get(inner, "") + name.removeprefix(inner)

    def _renamed_rows(self, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(dataclasses.replace(weight, name=self._renamed(weight.name)) for weight in weights)


@dataclasses.dataclass(frozen=True)
class _TextSettings(Setting):
    """Rows of a text family, under `text_config`, or with `flat` written beside others; its configuration is `text`."""

    family: Family
    flat: bool = False

    def read(self, fields: Fields, values: Values) -> None:
        values["text"], ignored = self.family.decode_fields(text_fields(fields))
        fields.carry("" if self.flat else "text_config", ignored)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        inner = write_all(self.family.settings, config)
        if self.flat:
            return inner
        tied = {_TIED: inner[_TIED]} if _TIED in inner else {}
        return {"text_config": {"model_type": self.family.model_type, **inner}, **tied}


def _inner_type(family: Family) -> str | None:
    """Return the `model_type` of the decoder's settings, which stand inside of others."""
    return next((row.family.model_type for row in family.settings if isinstance(row, _TextSettings)), None)


def _opened_as(text: Family, plain: Family) -> Family:
    """Return `plain`, read from the settings and tensors of `text`: text has the same position in all dimensions."""
    return dataclasses.replace(
        plain,
        settings=text.settings,
        build=lambda **values: with_rope(text.build(**values), sections=(), interleaved_sections=True),
        weights=text.weights,
        fused=text.fused,
        ignored_keys=text.ignored_keys,
        transposed=text.transposed,
    )


def with_rope(config: DecoderConfig, kind: type[Rope] | None = None, **changes: Any) -> DecoderConfig:
    """Return the configuration with other fields of its rotary embeddings, and of another `kind` if that is given."""

    def changed(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.rope is None:
            return block
        rope = (kind or type(mixer.rope))(**{**vars(mixer.rope), **changes})
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, rope=rope))

    return map_blocks(config, changed)


def needs_model_type(*known: str) -> Rule:
    """Return a row that refuses a `model_type` of a nested object other than the first, which may lack the key."""

    def read(fields: Fields, values: Values) -> None:
        kind = fields.content.get("model_type", known[0])
        if kind != known[0]:
            raise fields.unknown(f"model_type={kind}", kind, known)

    return Rule("", read)


def token(key: str, field: str, default: int) -> Integer:
    """Return the row of a placeholder's id: a field of `MediaConfig`."""
    return Integer(key, f"media.{field}", default, least=0)


def with_images(text: DecoderConfig, vision: EncoderConfig, *, image_token: int) -> DecoderConfig:
    """Return a decoder with this encoder of images."""
    return dataclasses.replace(text, media=MediaConfig(vision=vision, image_token=image_token))


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


def attention(layer: str, name: str = "self_attn.", out: str = "o_proj", owner: str = "vision") -> tuple[Weight, ...]:
    """Return the rows of attention with one matrix each for queries, keys, values and output."""
    return tuple(
        dataclasses.replace(row, name=row.name.replace("o_proj", out), path=f"{owner}.{row.path}")
        for row in self_attention(layer, name)
    )
