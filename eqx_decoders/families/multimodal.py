"""Families with encoders for images or audio, whose decoder is described by a text family."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.families.common import map_blocks
from eqx_decoders.families.family import Family
from eqx_decoders.families.setting_rows import Integer, Rule, Setting, Values, write_all
from eqx_decoders.families.weight_rows import Weight, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.rope import AxialRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_TIED = "tie_word_embeddings"

# transformers' defaults for keys that a text_config of Llama lacks. Mistral's default for intermediate_size differs,
# but published files of Mistral have that key.
LLAMA_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}

# Fields of `MultimodalFamily` for checkpoints whose decoder is stored as `language_model`.
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
    """Return an encoder layer with bidirectional attention.

    **Arguments:**

    - `embed_dim`, `heads`: number of features and of attention heads.
    - `mlp`, `norm`: the MLP, and the norm before attention and before the MLP.
    - `rope`: rotary embedding; None: no rotary embedding.
    - `bias`: whether the projections of attention have biases.
    - `window`: size of the chunks of tokens that attend to each other; None: all tokens attend to each other.
    - `options`: other fields of `AttentionConfig`.
    """
    attention_fields = {
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": embed_dim // heads,
        "qkv_bias": bias,
        "out_bias": bias,
        **options,
    }
    mixer = AttentionConfig(**attention_fields, mask=Bidirectional(window), rope=rope)
    return BlockConfig(mixer=mixer, mlp=mlp, pre_mixer_norm=norm, pre_mlp_norm=norm)


def text_fields(fields: Fields) -> Fields:
    """Return the settings of the decoder: `text_config`, with `tie_word_embeddings` of the outer object."""
    table = fields.table("text_config")
    if table is None:
        raise fields.error("text_config is missing, but it must describe the decoder: add it.")
    table.content.pop("architectures", None)  # the class of the decoder; the outer object has the class of the model
    if isinstance(tied := fields.take(_TIED, None), bool):
        table.content[_TIED] = tied  # the outer value takes precedence: the inner value may be a class default
    return table


# Keys that do not describe the decoder, in files without a nested text_config.
_OUTER_KEYS = {
    *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("vision_config", "text_config", _TIED),
}


def nested(*outside: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that moves the decoder's settings of a `config.json` to `text_config`.

    Old files have the decoder's settings in the outer object, or in both objects. In these files the word embeddings
    are tied if either object says so.

    `outside`: keys of the outer object that do not describe the decoder, in addition to common ones.
    """
    outer_keys = _OUTER_KEYS | set(outside)

    def nest(content: Mapping[str, Any]) -> Mapping[str, Any]:
        text = content.get("text_config")
        if isinstance(text, Mapping):
            text = {key: value for key, value in text.items() if key != "architectures"}
            outer = {key: value for key, value in content.items() if key in outer_keys or key not in text}
            outer[_TIED] = outer.get(_TIED) or text.get(_TIED) or False
            return {**outer, "text_config": text}
        if text is not None:
            return content
        text = {key: value for key, value in content.items() if key not in outer_keys}
        outer = {key: value for key, value in content.items() if key in outer_keys}
        return {**outer, "text_config": text}

    return nest


class ExtendedModel(NamedTuple):
    """Published model that adds encoders to another published model.

    **Arguments:**

    - `text`: name of the model without encoders; see `get_config`.
    - `add_encoders`: returns the configuration with encoders.
    """

    text: str
    add_encoders: Callable[[DecoderConfig], DecoderConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalFamily(Family):
    """Family of checkpoints with encoders. The family of its decoder is called the text family.

    Other fields are described in `Family`.

    **Arguments:**

    - `text_type`: `model_type` of the text family.
    - `other_texts`: `model_type` of other supported text families; each of them becomes a variant.
    - `alternatives`: variants that differ in other fields than the text family.
    - `changes`: fields of the text family to replace.
    - `text_settings`: rows of `text_config` that precede the rows of the text family.
    - `reads_as_text`: whether a decoder that is loaded without its encoders is a model of the text family, without
        `changes`.
    - `flat`: whether the decoder's settings are written to the outer object instead of `text_config`.
    - `settings`: rows outside of `text_config`. They can use the value `text`, the configuration of the decoder.
    - `build`: returns the configuration from `text`, the configuration of the decoder, and the values of `settings`.
    - `weights`: rows of the encoders. `with_texts` adds the rows of the decoder.
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
        """Return the family with the settings and weights of its text families.

        `find`: returns the family of a `model_type`.
        """
        variants = [self._with_text(find(text_type)) for text_type in self.other_texts]
        variants += [family._with_text(find(family.text_type)) for family in self.alternatives]
        return dataclasses.replace(self._with_text(find(self.text_type)), variants=tuple(variants))

    def decode(self, content: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
        """Return the configuration that a `config.json` describes, and its keys without effect; see `Family.decode`."""
        family = self.for_config(content)
        return super().decode(content) if family is self else family.decode(content)

    def for_config(self, content: Mapping[str, Any]) -> Family:
        """Return the variant whose text family is the `model_type` of `text_config`; this family if there is none."""
        text = content.get("text_config")
        text_type = text.get("model_type") if isinstance(text, Mapping) else None
        return next((variant for variant in self.variants if text_type == _text_type(variant)), self)

    def _with_text(self, base: Family) -> Family:
        """Return the family with the settings and weights of the text family `base`."""
        text = dataclasses.replace(base, **self.changes)
        type_check: tuple[Setting, ...] = ()
        if self.other_texts:
            known = (base.model_type, self.text_type, *self.other_texts)
            type_check = (needs_model_type(*dict.fromkeys(known)),)
        text = dataclasses.replace(text, settings=(*type_check, *self.text_settings, *text.settings))
        return dataclasses.replace(
            self,
            settings=(_TextSettings(text, self.flat), *self.settings),
            weights=(*self._renamed_rows(text.weights), *self.weights),
            fused=self._renamed_rows(text.fused),
            transposed=self._renamed_rows(text.transposed),
            copies={self._renamed(copy): self._renamed(name) for copy, name in text.copies.items()},
            renamed={**text.renamed, **self.renamed},
            with_depths=text.with_depths,
            text=_as_plain_text(text, base) if self.reads_as_text else text,
        )

    def _renamed(self, name: str) -> str:
        prefix = next((prefix for prefix in self.text_names if name.startswith(prefix)), "")
        return self.text_names.get(prefix, "") + name.removeprefix(prefix)

    def _renamed_rows(self, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(dataclasses.replace(weight, name=self._renamed(weight.name)) for weight in weights)


@dataclasses.dataclass(frozen=True)
class _TextSettings(Setting):
    """Row of the value `text`: the configuration of the decoder, read from `text_config` with a text family.

    `flat`: whether the keys are written to the outer object instead of `text_config`.
    """

    family: Family
    flat: bool = False

    def read(self, fields: Fields, values: Values) -> None:
        values["text"], ignored = self.family.decode_fields(text_fields(fields))
        fields.carry("" if self.flat else "text_config", ignored)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        settings = write_all(self.family.settings, config)
        if self.flat:
            return settings
        tied = {_TIED: settings[_TIED]} if _TIED in settings else {}
        return {"text_config": {"model_type": self.family.model_type, **settings}, **tied}


def _text_type(family: Family) -> str | None:
    """Return the `model_type` of the family's `text_config`."""
    return next((row.family.model_type for row in family.settings if isinstance(row, _TextSettings)), None)


def _as_plain_text(text: Family, base: Family) -> Family:
    """Return a family that reads the settings and tensors of `text` as a text model of `base`.

    A text token has the same position in all dimensions, so M-RoPE becomes plain RoPE.
    """
    return dataclasses.replace(
        base,
        settings=text.settings,
        build=lambda **values: with_rope(text.build(**values), sections=(), interleaved_sections=True),
        weights=text.weights,
        fused=text.fused,
        ignored_keys=text.ignored_keys,
        transposed=text.transposed,
    )


def with_rope(config: DecoderConfig, kind: type[Rope] | None = None, **changes: Any) -> DecoderConfig:
    """Return the configuration with changed fields of all rotary embeddings.

    `kind`: class of the new rotary embeddings; None: the class stays the same.
    """

    def changed(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.rope is None:
            return block
        rope = (kind or type(mixer.rope))(**{**vars(mixer.rope), **changes})
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, rope=rope))

    return map_blocks(config, changed)


def needs_model_type(*known: str) -> Rule:
    """Return a row that refuses a `model_type` of a nested object other than `known[0]`. The key may be missing.

    `known`: all model types that the error message lists as supported.
    """

    def read(fields: Fields, values: Values) -> None:
        model_type = fields.content.get("model_type", known[0])
        if model_type != known[0]:
            raise fields.unknown(f"model_type={model_type}", model_type, known)

    return Rule("", read)


def token(key: str, field: str, default: int) -> Integer:
    """Return the row of the id of a placeholder token. `field`: name of the field of `MediaConfig`."""
    return Integer(key, f"media.{field}", default, least=0)


def with_images(text: DecoderConfig, vision: EncoderConfig, *, image_token: int) -> DecoderConfig:
    """Return the decoder with an encoder for images. `image_token`: id of the placeholder token of images."""
    return dataclasses.replace(text, media=MediaConfig(vision=vision, image_token=image_token))


def with_spans(config: DecoderConfig, selected: Callable[[AttentionConfig], bool] = lambda _: True) -> DecoderConfig:
    """Return the configuration with bidirectional attention among the tokens of an image (see `Spans`).

    `selected`: returns whether a layer has such attention; by default all attention layers have it.
    """

    def with_span(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer
        if not isinstance(mixer, AttentionConfig) or not selected(mixer):
            return block
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, spans=True))

    return map_blocks(config, with_span)


def linear(name: str, path: str) -> tuple[Weight, ...]:
    """Return the rows of a linear layer of a projector."""
    return (
        Weight(f"{name}.weight", f"{path}.kernel", "outer inner -> inner outer"),
        Weight(f"{name}.bias", f"{path}.bias", "outer -> outer"),
    )


def encoder_attention(
    layer: str, name: str = "self_attn.", out: str = "o_proj", owner: str = "vision"
) -> tuple[Weight, ...]:
    """Return the rows of the attention of an encoder, with separate projections of queries, keys and values.

    **Arguments:**

    - `layer`: prefix of the tensors of a layer.
    - `name`, `out`: names of the modules of attention and of its output projection.
    - `owner`: name of the encoder.
    """
    return tuple(
        dataclasses.replace(row, name=row.name.replace("o_proj", out), path=f"{owner}.{row.path}")
        for row in self_attention(layer, name)
    )
