"""Configuration of the encoders of a decoder, and of the placeholder tokens that their features replace."""

import dataclasses
import itertools

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.geometry import TilesConfig
from eqx_decoders.encoders.projector import EncoderTokensConfig, ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import PatchStemConfig, StemConfig, WholeImageStem
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.norm import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(CheckedFields):
    """Configuration of an encoder: `projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`.

    **Arguments:**

    - `embed_dim`: width of the encoder.
    - `stem`: input layer for patches, chunks of audio or complete audio clips; or a complete network, such as
        `MobileNetConfig`.
    - `blocks`: configuration of each layer; attention must have `mask=Bidirectional(...)` or be local. () if the
        stem is a complete network.
    - `pre_norm`, `post_norm`: norms before the first and after the last layer; None: no norm.
    - `projector`: maps encoder outputs to features that replace placeholder tokens.
    - `projector_beside`: used instead of `projector` in calls that also have images (Phi-4's audio); None:
        `projector`.
    - `depths`: numbers of layers after which the projector's inputs are taken; several inputs are concatenated.
        `post_norm` and layers after the maximum depth have weights, but are not run (LLaVA). (): the input is the
        output of `post_norm`.
    - `deepstack`: indices of layers whose outputs are also added to the decoder: the first one after the first decoder
        layer, and so on (DeepStack; Meng et al. 2024).
    - `deepstack_projector`: configuration of the projectors of these layers, with separate weights for each layer.
    - `into`: linear layer from the projector's outputs to the decoder's width, if the two differ (Llama 4); None: no
        such layer.
    - `clipped`: whether every linear layer clips its inputs and outputs to bounds from the checkpoint (Gemma 4). New
        models clip nothing.
    - `tokens`: token ids that the encoder embeds instead of the decoder (Gemma 3n); None: no such tokens.
    - `tiles`: how images are split into tiles, and the order of their tokens (LLaVA-NeXT); None: images are not tiled.
    """

    embed_dim: PositiveInt
    stem: StemConfig
    blocks: tuple[BlockConfig, ...]
    projector: ProjectorConfig
    projector_beside: ProjectorConfig | None = None
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    depths: tuple[NonNegativeInt, ...] = ()
    deepstack: tuple[NonNegativeInt, ...] = ()
    deepstack_projector: ProjectorConfig | None = None
    into: ProjectionConfig | None = None
    clipped: bool = False
    tokens: EncoderTokensConfig | None = None
    tiles: TilesConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        check(
            bool(self.blocks) != self.stem.complete,
            f"EncoderConfig.blocks has {len(self.blocks)} layers. It must have at least one BlockConfig, or () if "
            "the stem is a complete network, such as MobileNetConfig.",
        )
        pads_clips = getattr(self.stem, "rows_per_clip", None) is not None
        check(
            pads_clips == (self.tokens is not None and self.tokens.fill is not None),
            "FrameStemConfig.rows_per_clip and EncoderConfig.tokens.fill must be set together. Set both or neither.",
        )
        check(
            sorted({*self.deepstack}) == [*self.deepstack] and max(self.deepstack, default=-1) < len(self.blocks),
            f"EncoderConfig.deepstack={self.deepstack} must be ascending, different indices of layers from 0 to "
            f"{len(self.blocks) - 1}.",
        )
        check(
            max(self.depths, default=0) <= len(self.blocks),
            f"EncoderConfig.depths={self.depths} must be numbers of layers, at most {len(self.blocks)}.",
        )
        self._check_tiles()
        check(
            len(self._table_shapes) < 2,
            "EncoderConfig.blocks: all RelativeAttentionConfig must have the same num_heads, distances and symmetric, "
            "since they share one table.",
        )
        check(
            (self.deepstack_projector is not None) == bool(self.deepstack),
            "EncoderConfig.deepstack and deepstack_projector must be set together. Set both or neither.",
        )
        for field in ("projector", "projector_beside", "deepstack_projector"):
            projector = getattr(self, field)
            check(
                projector is None or projector.group == self.stem.group,
                f"EncoderConfig.{field}.group={getattr(projector, 'group', None)} must be {self.stem.group}, "
                "the number of patches that the stem merges into one feature.",
            )

    def _check_tiles(self) -> None:
        if self.tiles is None:
            return
        check(
            isinstance(self.stem, PatchStemConfig),
            f"EncoderConfig.tiles needs a PatchStemConfig as stem, not a {type(self.stem).__name__}.",
        )
        check(
            self.into is None,
            "EncoderConfig.tiles does not support EncoderConfig.into, since the learned vectors have the size of the "
            "projector's outputs. Leave one of them out.",
        )

    @property
    def _table_shapes(self) -> set[tuple[int, int]]:
        shapes = (mixer.table_shape for block in self.blocks for mixer in block.mixers())
        return {shape for shape in shapes if shape is not None}

    @property
    def distance_table(self) -> tuple[int, int] | None:
        """Shape of the relative-position table that all layers share; None without relative attention."""
        return next(iter(self._table_shapes), None)

    @property
    def input_dim(self) -> int:
        """Size of the projector's input per patch."""
        return self.embed_dim * max(len(self.depths), 1)

    @property
    def out_dim(self) -> int:
        """Size of a feature that replaces a placeholder."""
        return self.projector.out_dim if self.into is None else self.into.dim

    @property
    def parts(self) -> tuple[tuple[tuple[BlockConfig, ...], int], ...]:
        """Layers as `(unit, repeats)`, one scan for each; scans end at the layers in `deepstack` and `depths`."""
        ends = sorted({*(layer + 1 for layer in self.deepstack), *self.depths, len(self.blocks)} - {0})
        starts = [0, *ends][: len(ends)]
        return tuple(
            part for start, end in zip(starts, ends, strict=True) if start < end
            for part in find_repeats(self.blocks[start:end])
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaConfig(CheckedFields):
    """Configuration of encoders, and of the placeholder tokens whose embeddings their features replace in order.

    **Arguments:**

    - `vision`, `audio`: encoders of images and of audio; None: no such encoder.
    - `image_token`, `video_token`, `audio_token`: ids of placeholders; None: no such placeholder. Without
        `video_token`, frames of videos are images.
    - `spans`: whether tokens of an image attend to all tokens of the image, in layers with `AttentionConfig.spans`.
    - `positions`: M-RoPE positions; None: tokens of images have consecutive positions, as text.
    - `feature_scale`: factor of the features that replace placeholders (Granite: `embedding_scale`).
    - `lookup_token`: token id that per-layer embedding tables look up for placeholders (Gemma 4).
    """

    vision: EncoderConfig | None = None
    audio: EncoderConfig | None = None
    image_token: NonNegativeInt | None = None
    video_token: NonNegativeInt | None = None
    audio_token: NonNegativeInt | None = None
    spans: bool = False
    positions: GridPositions | None = None
    feature_scale: PositiveFloat = 1.0
    lookup_token: NonNegativeInt = 0

    @property
    def patch_stem(self) -> PatchStemConfig | WholeImageStem | None:
        """Stem of the vision encoder; None without a vision encoder."""
        stem = None if self.vision is None else self.vision.stem
        return stem if isinstance(stem, PatchStemConfig | WholeImageStem) else None

    @property
    def tiles(self) -> TilesConfig | None:
        """How images are split into tiles; None if images are not tiled."""
        return None if self.vision is None else self.vision.tiles

    @property
    def audio_stem(self) -> AudioStemConfig | FrameStemConfig | None:
        """Stem of the audio encoder; None without an audio encoder."""
        stem = None if self.audio is None else self.audio.stem
        return stem if isinstance(stem, AudioStemConfig | FrameStemConfig) else None

    def __post_init__(self):
        super().__post_init__()
        tokens_by_name = {name: getattr(self, name) for name in ("image_token", "video_token", "audio_token")}
        ids = [token for token in tokens_by_name.values() if token is not None]
        check(len(ids) == len({*ids}), f"MediaConfig: the placeholder ids {tokens_by_name} must be different.")
        for kind, encoder, stem, stem_names, tokens in (
            (
                "vision",
                self.vision,
                self.patch_stem,
                "PatchStemConfig or a MobileNetConfig",
                (self.image_token, self.video_token),
            ),
            ("audio", self.audio, self.audio_stem, "AudioStemConfig or a FrameStemConfig", (self.audio_token,)),
        ):
            if encoder is not None:
                check(
                    stem is not None,
                    f"MediaConfig.{kind}.stem must be a {stem_names}, or derived from one of them, not a "
                    f"{type(encoder.stem).__name__}.",
                )
                check(
                    any(token is not None for token in tokens),
                    f"MediaConfig.{kind} needs a placeholder token that its features replace.",
                )
        check(
            self.positions is None or self.tiles is None,
            "MediaConfig.positions must be None with MediaConfig.vision.tiles, since M-RoPE does not support tiles.",
        )
        check(
            self.vision is None or self.vision.projector_beside is None,
            "MediaConfig.vision.projector_beside must be None: only audio encoders have a separate projector for calls "
            "with images.",
        )
        tables = [encoder.tokens for encoder in (self.vision, self.audio) if encoder is not None and encoder.tokens]
        ranges = sorted((tokens.first, tokens.first + tokens.count) for tokens in tables)
        check(
            all(first[1] <= second[0] for first, second in itertools.pairwise(ranges)),
            f"MediaConfig: the token ids of the encoders, {ranges} (first, end), must not overlap.",
        )


def placeholders(media: MediaConfig | None) -> tuple[int, ...]:
    """Return the ids of placeholders. A new tokenizer must not use them."""
    tokens = () if media is None else (media.image_token, media.video_token, media.audio_token)
    return tuple(token for token in tokens if token is not None)


def check_media(media: MediaConfig | None, blocks: tuple[BlockConfig, ...], embed_dim: int) -> None:
    """Raise ConfigError if the encoders do not fit the decoder, or the decoder has layers that only encoders support.

    `blocks` and `embed_dim` are the fields of `DecoderConfig`.
    """
    layers = [layer for block in blocks for layer in block.branches().values()]
    for layer in layers:
        check(
            not layer.encoder_only,
            f"DecoderConfig.blocks has a {type(layer).__name__}, which has no cache. Use it only in encoders.",
        )
    num_added = sum(isinstance(layer, AddedFeaturesConfig) for layer in layers)
    if media is None:
        return
    has_indexer = any(getattr(block.mixer, "block_indexer", None) for block in blocks)
    check(
        media.positions is None or not has_indexer,
        "AttentionConfig.selection of DecoderConfig.blocks has a block indexer, which does not support M-RoPE. Leave "
        "MediaConfig.positions out.",
    )
    num_levels = 0 if media.vision is None else len(media.vision.deepstack)
    check(
        num_levels == num_added,
        f"MediaConfig.vision.deepstack has {num_levels} layers, but DecoderConfig.blocks has {num_added} "
        "AddedFeaturesConfig. These numbers must be equal.",
    )
    for name, encoder in (("vision", media.vision), ("audio", media.audio)):
        if encoder is None:
            continue
        further = (encoder.deepstack_projector, encoder.projector_beside)
        sizes = {encoder.out_dim} | {projector.out_dim for projector in further if projector is not None}
        check(
            sizes == {embed_dim},
            f"MediaConfig.{name}: the projectors have output sizes {sorted(sizes)}, which must be "
            f"DecoderConfig.embed_dim={embed_dim}.",
        )
