"""Sizes and settings of encoders of images that several families share."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.encoders.media_config import EncoderConfig
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.families.settings_table import (
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


# the pattern of a convolution's weights
KERNEL = "embed (channels frames) patch_rows patch_columns -> channels frames patch_rows patch_columns embed"
KERNEL_IN_TIME = "embed channels frames patch_rows patch_columns -> channels frames patch_rows patch_columns embed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Sizes of an encoder of images whose layers all have the same.

    **Arguments:**

    - `embed_dim`, `layers`, `heads`, `mlp_dim`: features, number, heads and MLP width of the layers.
    - `out_dim`: number of features of a token.
    - `size`, `channels`: rows and columns of pixels in a patch, and values of a pixel.
    - `merge`: rows and columns of patches that become one token.
    - `activation`: activation of the MLPs.
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
        """Return the MLP of a layer."""
        return MLPConfig(mlp_dim=self.mlp_dim, activation=self.activation, gated=gated, bias=bias)

    def stem(self, **options: Any) -> PatchStemConfig:
        """Return an input layer with patches of these sizes."""
        return PatchStemConfig(size=self.size, channels=self.channels, merge=self.merge, **options)


OUT_DIM = Rule("out_dim", lambda fields, values: values["text"].embed_dim)


def vision_config(
    make: Callable[..., EncoderConfig],
    *settings: Setting,
    model_type: str | None,
    ignored: Mapping[str, str],
    what: str = "the encoder",
) -> Table:
    """Return the rows of `vision_config`: `make` has a first argument of `EncoderSizes`, and theirs as keywords.

    `what` is empty where there may be none. `model_type` is None where one of `settings` has that key.
    """
    group = Group("vision", sized(EncoderSizes, make), (OUT_DIM, *settings), path="media.vision")
    return Table("vision_config", (group,), model_type=model_type, ignored=ignored, what=what)


def encoder_sizes(
    *,
    width: int,
    heads: int,
    layers: int,
    mlp_dim: int,
    size: int | Callable[[Values], int],
    keys: Mapping[str, str] = {},
) -> tuple[Setting, ...]:
    """Return the rows of `EncoderSizes`; the numbers are transformers' defaults, `keys` the family's names of keys."""
    rows = (
        Integer("hidden_size", "embed_dim", width),
        Integer("num_attention_heads", "attention.num_heads", heads, name="heads"),
        Layers("num_hidden_layers", "blocks", layers, name="layers"),
        Integer("intermediate_size", "mlp.mlp_dim", mlp_dim),
        Integer("patch_size", "stem.size", size),
        Integer("num_channels", "stem.channels", 3),
    )
    name = keys.get("num_attention_heads", "num_attention_heads")
    rule = Check(
        lambda values: values["embed_dim"] % values["heads"] == 0,
        f"hidden_size={{embed_dim}} must be a multiple of {name}={{heads}}.",
    )
    first, second, *others = (dataclasses.replace(row, key=keys.get(row.key, row.key)) for row in rows)
    return (first, second, rule, *others)


def grid_side(default: int) -> tuple[Setting, ...]:
    """Return the rows of the side of the grid of learned positions: the whole patches of an image of `image_size`."""
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
    """Return the rows of the side of the grid of learned positions, whose number stands under `key`."""
    return (
        Integer(key, lambda encoder: value_at(encoder, "stem.positions.side") ** 2, default, name="_positions"),
        Check(
            lambda values: math.isqrt(values["_positions"]) ** 2 == values["_positions"],
            f"{key}={{_positions}} must be a square: positions are a grid.",
        ),
        Rule("side", lambda fields, values: math.isqrt(values["_positions"])),
    )


def squares(*keys: str) -> Rule:
    """Return the row of sizes that may be lists of rows and columns, which must be equal."""

    def read(fields: Fields, values: Values) -> None:
        for key in keys:
            size = fields.content.get(key)
            if isinstance(size, list | tuple):
                if len(size) != 2 or size[0] != size[1]:
                    raise fields.error(f"{key}={list(size)} must be two equal numbers: images and patches are squares.")
                fields.content[key] = size[0]

    return Rule("", read)


def shuffle_ratio(key: str, path: str, *, name: str = "") -> Rule:
    """Return the row of one divided by the rows of patches that become one token, which stand at `path`."""

    def read(fields: Fields, values: Values) -> int:
        ratio = fields.number(key, 0.5)
        merge = round(1 / ratio)
        if merge < 1 or abs(merge * ratio - 1) > 1e-6:
            raise fields.error(f"{key}={ratio} must be one divided by a whole number.")
        return merge

    return Rule(name or path.rpartition(".")[2], read, lambda config: {key: 1 / value_at(config, path)})


def axial_theta(*kinds: str, default: float = 10_000.0, key: str = "rope_theta") -> Rule:
    """Return the row of the base of an encoder's rotary embedding, `theta`, in `rope_parameters` of these kinds.

    The first one is written. Older files have it under `key`, unless that is empty.
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
