"""Dimensions and settings of vision encoders that several families share."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.families.setting_rows import (
    Check,
    Group,
    Integer,
    Layers,
    Rule,
    Setting,
    Table,
    Values,
    sized,
    value_at,
)
from eqx_decoders.layers.mlp import MLPConfig


# Patterns of the weights of a patch embedding, which is stored as a convolution: over images, or over videos.
KERNEL = "embed (channels frames) patch_rows patch_columns -> channels frames patch_rows patch_columns embed"
KERNEL_IN_TIME = "embed channels frames patch_rows patch_columns -> channels frames patch_rows patch_columns embed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Dimensions of a vision encoder whose layers all have the same dimensions.

    **Arguments:**

    - `embed_dim`: number of features of the residual stream.
    - `layers`, `heads`, `mlp_dim`: number of layers, attention heads and MLP features.
    - `out_dim`: number of features of an output token.
    - `size`: side of a patch, in pixels.
    - `merge`: side of the square of patches that are merged to one token, in patches.
    - `channels`: number of color channels.
    - `activation`: activation function of the MLPs.
    """

    embed_dim: int
    layers: int
    heads: int
    mlp_dim: int
    out_dim: int
    size: int
    merge: int = 2
    channels: int = 3
    activation: str = "gelu_tanh"

    def mlp(self, *, gated: bool = False, bias: bool = True) -> MLPConfig:
        """Return the configuration of the MLP of a layer."""
        return MLPConfig(mlp_dim=self.mlp_dim, activation=self.activation, gated=gated, bias=bias)

    def stem(self, **options: Any) -> PatchStemConfig:
        """Return the configuration of the patch embedding. `options`: other fields of `PatchStemConfig`."""
        return PatchStemConfig(size=self.size, channels=self.channels, merge=self.merge, **options)


OUT_DIM = Rule("out_dim", lambda fields, values: values["text"].embed_dim)


def vision_config(
    make: Callable[..., EncoderConfig],
    *settings: Setting,
    model_type: str | None,
    ignored: Mapping[str, str],
    what: str = "the encoder",
) -> Table:
    """Return the row of `vision_config`, whose value `vision` is the configuration of the encoder.

    **Arguments:**

    - `make`: returns the configuration, from an `EncoderSizes` and a keyword argument per other value of `settings`.
    - `settings`: rows of the keys of `vision_config`, including `encoder_sizes`.
    - `model_type`, `ignored`, `what`: see `Table`.
    """
    group = Group("vision", sized(EncoderSizes, make), (OUT_DIM, *settings), path="media.vision")
    return Table("vision_config", (group,), model_type=model_type, ignored=ignored, what=what)


def outer_values(*names: str) -> tuple[Rule, ...]:
    """Return the rows of values that keys outside of `vision_config` determine.

    The value `name` of a row equals the value `_name` of an earlier row outside of `vision_config`.
    """
    return tuple(Rule(name, lambda fields, values, name=name: values["_" + name]) for name in names)


def encoder_sizes(
    *,
    width: int,
    heads: int,
    layers: int,
    mlp_dim: int,
    size: int | Callable[[Values], int],
    keys: Mapping[str, str] = {},
) -> tuple[Setting, ...]:
    """Return the rows of the values of `EncoderSizes`, except `out_dim`, `merge` and `activation`.

    **Arguments:**

    - `width`, `heads`, `layers`, `mlp_dim`, `size`: transformers' defaults. `width` is the default of `embed_dim`.
    - `keys`: the family's name of a key, by the name in SigLIP.
    """
    rows = (
        Integer("hidden_size", "embed_dim", width),
        Integer("num_attention_heads", "attention.num_heads", heads, name="heads"),
        Layers("num_hidden_layers", "blocks", layers, name="layers"),
        Integer("intermediate_size", "mlp.mlp_dim", mlp_dim),
        Integer("patch_size", "stem.size", size),
        Integer("num_channels", "stem.channels", 3),
    )
    embed_key, heads_key = (keys.get(key, key) for key in ("hidden_size", "num_attention_heads"))
    check = Check(
        lambda values: values["embed_dim"] % values["heads"] == 0,
        f"{embed_key}={{embed_dim}} must be a multiple of {heads_key}={{heads}}: correct one of them.",
    )
    embed_dim, num_heads, *others = (dataclasses.replace(row, key=keys.get(row.key, row.key)) for row in rows)
    return (embed_dim, num_heads, check, *others)


def grid_side(default: int) -> tuple[Setting, ...]:
    """Return the rows of the value `side`: side of the grid of learned positions, from `image_size` in pixels.

    It is the number of complete patches along a side of the image. `default`: transformers' default of `image_size`.
    """
    return (
        Integer(
            "image_size",
            lambda encoder: value_at(encoder, "stem.positions.side") * encoder.stem.size,
            default,
            name="_pixels",
        ),
        Check(
            lambda values: values["_pixels"] >= values["size"],
            "image_size={_pixels} must be at least patch_size={size}.",
        ),
        Rule("side", lambda fields, values: values["_pixels"] // values["size"]),
    )


def square_grid(key: str, default: int) -> tuple[Setting, ...]:
    """Return the rows of the value `side`: side of the grid of learned positions, from the number of positions.

    `key`: key of the number of positions. `default`: transformers' default for this key.
    """
    return (
        Integer(key, lambda encoder: value_at(encoder, "stem.positions.side") ** 2, default, name="_positions"),
        Check(
            lambda values: math.isqrt(values["_positions"]) ** 2 == values["_positions"],
            f"{key}={{_positions}} must be a square number, because positions are a square grid.",
        ),
        Rule("side", lambda fields, values: math.isqrt(values["_positions"])),
    )


def squares(*keys: str) -> Rule:
    """Return a row that converts sizes `[height, width]`, which must be equal, to a single number."""

    def read(fields: Fields, values: Values) -> None:
        for key in keys:
            size = fields.content.get(key)
            if isinstance(size, list | tuple):
                if len(size) != 2 or size[0] != size[1]:
                    raise fields.error(
                        f"{key}={list(size)} must be two equal numbers: only square images and patches are supported."
                    )
                fields.content[key] = size[0]

    return Rule("", read)


def shuffle_ratio(key: str, path: str, *, name: str = "") -> Rule:
    """Return the row of the ratio of pixel shuffle, whose inverse is the side of the merged squares of patches.

    `path`: path of this side in a configuration. `name`: name of the value; the last word of `path` by default.
    """

    def read(fields: Fields, values: Values) -> int:
        ratio = fields.number(key, 0.5)
        merge = round(1 / ratio)
        if merge < 1 or abs(merge * ratio - 1) > 1e-6:
            raise fields.error(f"{key}={ratio} must be the inverse of an integer, such as 0.5.")
        return merge

    return Rule(name or path.rpartition(".")[2], read, lambda config: {key: 1 / value_at(config, path)})


def axial_theta(*kinds: str, default: float = 10_000.0, key: str = "rope_theta") -> Rule:
    """Return the row of the value `theta`: base of the rotary embedding of an encoder, in `rope_parameters`.

    **Arguments:**

    - `kinds`: supported values of `rope_type`; the first is written.
    - `default`: transformers' default of theta.
    - `key`: key outside of `rope_parameters` that old files have instead. Empty: there is no such key.
    """

    def read(fields: Fields, values: Values) -> float:
        theta = fields.number(key, default) if key else default
        rope = fields.table("rope_parameters")
        if rope is not None:
            theta = rope.number("rope_theta", theta)
            rope.allow_only("rope_type", *kinds)
            rope.finish()
        return theta

    def write(encoder: EncoderConfig) -> dict[str, Any]:
        return {"rope_parameters": {"rope_type": kinds[0], "rope_theta": value_at(encoder, "attention.rope.theta")}}

    return Rule("theta", read, write)
