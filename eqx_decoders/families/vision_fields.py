"""Settings of `vision_config` that several families share."""

import dataclasses
from typing import Any

from eqx_decoders.encoders.media_config import EncoderConfig, MediaConfig
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.model.decoder_config import DecoderConfig


# the pattern of a convolution's weights
KERNEL = "embed (channels frames) patch_rows patch_columns -> channels frames patch_rows patch_columns embed"


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


def vision_fields(fields: Fields) -> Fields:
    """Return the settings of the encoder."""
    table = fields.table("vision_config")
    if table is None:
        raise fields.error("vision_config is missing: it describes the encoder.")
    return table


def read_sizes(
    table: Fields, *, width: int, heads: int, layers: int, mlp_dim: int, size: int, channels: int = 3
) -> dict[str, int]:
    """Read the sizes of an encoder as keywords; the arguments are transformers' defaults."""
    width, heads = table.integer("hidden_size", width), table.integer("num_attention_heads", heads)
    if width % heads:
        raise table.error(f"hidden_size={width} must be a multiple of num_attention_heads={heads}.")
    return {
        "embed_dim": width,
        "heads": heads,
        "layers": table.layers("num_hidden_layers", layers),
        "mlp_dim": table.integer("intermediate_size", mlp_dim),
        "size": table.integer("patch_size", size),
        "channels": table.integer("num_channels", channels),
    }


def read_side(table: Fields, size: int, image_size: int) -> int:
    """Read the side of the grid of learned positions: the whole patches of an image of `image_size`."""
    pixels = table.integer("image_size", image_size)
    if pixels < size:
        raise table.error(f"image_size={pixels} must be at least patch_size={size}.")
    return pixels // size


def read_theta(table: Fields, *kinds: str) -> float:
    """Read the base of the rotary embedding, from `rope_parameters` of one of these kinds or older `rope_theta`."""
    theta = table.number("rope_theta", 10_000.0)
    rope = table.table("rope_parameters")
    if rope is not None:
        theta = rope.number("rope_theta", theta)
        rope.allow_only("rope_type", *kinds)
        rope.finish()
    return theta


def vision_of(config: DecoderConfig) -> tuple[MediaConfig, EncoderConfig]:
    """Return the encoders, and the one of images; ConversionError unless it is the only one."""
    media = config.media
    if media is None or media.vision is None or media.audio is not None:
        raise ConversionError("DecoderConfig.media must have an encoder of images, and none of audio.")
    return media, media.vision


def write_sizes(vision: EncoderConfig) -> dict[str, Any]:
    """Return the keys that `read_sizes` and `read_side` read."""
    stem, mixer, mlp = vision.stem, vision.blocks[0].mixer, vision.blocks[0].mlp
    patches = isinstance(stem, PatchStemConfig)
    if not patches or not isinstance(mixer, AttentionConfig) or not isinstance(mlp, MLPConfig):
        raise ConversionError("MediaConfig.vision must have patches, attention and an MLP.")
    side = {"image_size": stem.positions.side * stem.size} if isinstance(stem.positions, LearnedGrid) else {}
    return {
        "hidden_size": vision.embed_dim,
        "num_attention_heads": mixer.num_heads,
        "num_hidden_layers": len(vision.blocks),
        "intermediate_size": mlp.mlp_dim,
        "patch_size": stem.size,
        "num_channels": stem.channels,
        **side,
    }
