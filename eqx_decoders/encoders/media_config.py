"""Configuration of a decoder's encoders, and of the placeholder tokens that their features replace."""

import dataclasses
import itertools

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.geometry import TilesConfig
from eqx_decoders.encoders.mobilenet.mobilenet import MobileNetConfig
from eqx_decoders.encoders.projector import EncoderTokensConfig, ProjectionConfig, ProjectorConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.attention.conformer import LocalAttentionConfig
from eqx_decoders.layers.attention.relative_attention import RelativeAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.norm import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(CheckedFields):
    """Configuration of an encoder: `projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`.

    **Arguments:**

    - `embed_dim`: number of features of its residual stream.
    - `stem`: the input layer, for patches, chunks of audio or whole audio clips; or a network of convolutions.
    - `blocks`: one configuration per layer, whose attention has `mask=Bidirectional(...)`, or is local; none behind a
        network of convolutions.
    - `pre_norm`, `post_norm`: norms before the first layer and behind the last one; None for none.
    - `projector`: makes the rows that replace placeholder tokens.
    - `projector_beside`: does so in calls that have images, too (Phi-4's audio); None for the same.
    - `depths`: numbers of layers behind which features are taken for the projector, and joined if there are several, in
        place of those of `post_norm`; layers and a norm behind the deepest one are kept, but not run (LLaVA). Empty for
        the latter.
    - `deepstack`: the layers, counted from 0, whose output also reaches the decoder: the features of the first are
        added behind the decoder's first layer, and so on (Meng et al. 2024).
    - `deepstack_projector`: the projector of these layers, each with weights of its own.
    - `into`: one more matrix, from the encoder's features to those of the decoder, where these differ (Llama 4); None
        for none.
    - `clipped`: whether every matrix of the layers clips its inputs and outputs, by bounds that come with a
        checkpoint; new ones clip nothing (Gemma 4).
    - `tokens`: tokens whose embeddings the projector makes, too (Gemma 3n); None for none.
    - `tiles`: how images are cut into tiles and their tokens put in order, where a placeholder stands for each of these
        (LLaVA-NeXT); None where each image that it gets is one by itself.
    """

    embed_dim: PositiveInt
    stem: PatchStemConfig | MobileNetConfig | AudioStemConfig | FrameStemConfig
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
        good = bool(self.blocks) != isinstance(self.stem, MobileNetConfig)
        rule = "must have at least one BlockConfig, and none behind a MobileNetConfig"
        check(good, f"EncoderConfig.blocks: {len(self.blocks)} layers: {rule}.")
        filled = getattr(self.stem, "rows_per_clip", None) is not None
        rule = "and EncoderConfig.tokens.fill: give both, or neither"
        check(
            filled == (self.tokens is not None and self.tokens.fill is not None),
            f"FrameStemConfig.rows_per_clip {rule}.",
        )
        good = sorted({*self.deepstack}) == [*self.deepstack] and max(self.deepstack, default=-1) < len(self.blocks)
        rule = f"must name layers from 0 to {len(self.blocks) - 1}, each once, ascending"
        check(good, f"EncoderConfig.deepstack={self.deepstack} {rule}.")
        good = max(self.depths, default=0) <= len(self.blocks)
        check(good, f"EncoderConfig.depths={self.depths} must be numbers of layers, at most {len(self.blocks)}.")
        self._check_tiles()
        shapes = {mixer.table_shape for mixer in self._relative_mixers}
        rule = "must have the same num_heads, distances and symmetric: they share a table"
        check(len(shapes) < 2, f"EncoderConfig.blocks: each RelativeAttentionConfig {rule}.")
        both = (self.deepstack_projector is not None) == bool(self.deepstack)
        check(both, "EncoderConfig.deepstack and deepstack_projector: give both, or neither.")
        groups = {self.stem.group, self.projector.group}
        groups |= set() if self.projector_beside is None else {self.projector_beside.group}
        groups |= set() if self.deepstack_projector is None else {self.deepstack_projector.group}
        rule = f"must be {self.stem.group}, as many patches as the stem puts together"
        check(len(groups) == 1, f"EncoderConfig.projector.group={self.projector.group} {rule}.")

    def _check_tiles(self) -> None:
        if self.tiles is None:
            return
        rule = "needs a PatchStemConfig: it makes a token of each group of patches of a tile"
        check(isinstance(self.stem, PatchStemConfig), f"EncoderConfig.tiles {rule}.")
        check(self.into is None, "EncoderConfig.tiles: leave `into` out: the learned vector is one of the projector's.")

    @property
    def _relative_mixers(self) -> list[RelativeAttentionConfig]:
        return [block.mixer for block in self.blocks if isinstance(block.mixer, RelativeAttentionConfig)]

    @property
    def distance_table(self) -> tuple[int, int] | None:
        """Shape of the table of distances that all layers share; None where none has one."""
        return next((mixer.table_shape for mixer in self._relative_mixers), None)

    @property
    def input_dim(self) -> int:
        """Number of features that the projector gets of a patch."""
        return self.embed_dim * max(len(self.depths), 1)

    @property
    def out_dim(self) -> int:
        """Number of features of a row that replaces a placeholder."""
        return self.projector.out_dim if self.into is None else self.into.dim

    @property
    def parts(self) -> tuple[tuple[tuple[BlockConfig, ...], int], ...]:
        """The layers as `(unit, repeats)`, each a scan: one ends where features leave for the decoder."""
        ends = sorted({*(layer + 1 for layer in self.deepstack), *self.depths, len(self.blocks)} - {0})
        begins = [0, *ends][: len(ends)]
        return tuple(
            part for begin, end in zip(begins, ends, strict=True) if begin < end
            for part in find_repeats(self.blocks[begin:end])
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaConfig(CheckedFields):
    """Encoders of images and audio, and the placeholder tokens whose embeddings their features replace, in order.

    **Arguments:**

    - `vision`, `audio`: encoders of images and of audio; None for none.
    - `image_token`, `video_token`, `audio_token`: ids of placeholders; None where there are none of the kind.
    - `spans`: whether the tokens of an image attend to all of it, in layers whose attention has spans.
    - `positions`: rotary positions of several dimensions; None where an image's tokens are counted like text.
    - `feature_scale`: multiplies the rows that replace placeholders (Granite: `embedding_scale`).
    - `lookup_token`: the id that per-layer embedding tables read in place of a placeholder (Gemma 4).
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
    def patch_stem(self) -> PatchStemConfig | MobileNetConfig | None:
        """Input layer of the vision encoder; None for a model without one."""
        stem = None if self.vision is None else self.vision.stem
        return stem if isinstance(stem, PatchStemConfig | MobileNetConfig) else None

    @property
    def tiles(self) -> TilesConfig | None:
        """How images are cut into tiles; None for images that are encoded as they are."""
        return None if self.vision is None else self.vision.tiles

    @property
    def audio_stem(self) -> AudioStemConfig | FrameStemConfig | None:
        """Input layer of the audio encoder; None for a model without one."""
        stem = None if self.audio is None else self.audio.stem
        return stem if isinstance(stem, AudioStemConfig | FrameStemConfig) else None

    def __post_init__(self):
        super().__post_init__()
        tokens_by_name = {name: getattr(self, name) for name in ("image_token", "video_token", "audio_token")}
        ids = [token for token in tokens_by_name.values() if token is not None]
        check(len(ids) == len({*ids}), f"MediaConfig: {tokens_by_name} must be different ids.")
        for kind, encoder, stems, tokens in (
            ("vision", self.vision, (PatchStemConfig, MobileNetConfig), (self.image_token, self.video_token)),
            ("audio", self.audio, (AudioStemConfig, FrameStemConfig), (self.audio_token,)),
        ):
            if encoder is not None:
                names = " or a ".join(stem.__name__ for stem in stems)
                check(isinstance(encoder.stem, stems), f"MediaConfig.{kind}.stem must be a {names}.")
                rule = "needs a placeholder token for its features"
                check(any(token is not None for token in tokens), f"MediaConfig.{kind} {rule}.")
        rule = "must be None with MediaConfig.vision.tiles: rows of tokens are not those of one image"
        check(self.positions is None or self.tiles is None, f"MediaConfig.positions {rule}.")
        beside = None if self.vision is None else self.vision.projector_beside
        check(beside is None, "MediaConfig.vision.projector_beside must be None: it is of audio beside images.")
        tables = [encoder.tokens for encoder in (self.vision, self.audio) if encoder is not None and encoder.tokens]
        ranges = sorted((tokens.first, tokens.first + tokens.count) for tokens in tables)
        rule = f"{ranges} must be different ids"
        check(all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), f"MediaConfig: tokens of the encoders {rule}.")


def placeholders(media: MediaConfig | None) -> tuple[int, ...]:
    """Return the ids of placeholders; they bound the size of a new tokenizer."""
    tokens = () if media is None else (media.image_token, media.video_token, media.audio_token)
    return tuple(token for token in tokens if token is not None)


def check_media(media: MediaConfig | None, blocks: tuple[BlockConfig, ...], embed_dim: int) -> None:
    """Raise ConfigError unless the encoders fit the decoder, and none of its layers is for encoders alone."""
    layers = [layer for block in blocks for layer in block.branches().values()]
    for layer in layers:
        rule = "remembers nothing of earlier calls: it is for the layers of encoders"
        only = isinstance(layer, LocalAttentionConfig | RelativeAttentionConfig | LightConvolutionConfig)
        check(not only, f"DecoderConfig.blocks has a {type(layer).__name__}, which {rule}.")
    takers = sum(isinstance(layer, AddedFeaturesConfig) for layer in layers)
    if media is None:
        return
    turning = media.positions is not None and any(getattr(block.mixer, "block_indexer", None) for block in blocks)
    rule = "turns its keys by one position of a token: leave MediaConfig.positions out"
    check(not turning, f"AttentionConfig.selection of DecoderConfig.blocks has an indexer, which {rule}.")
    levels = 0 if media.vision is None else len(media.vision.deepstack)
    rule = f"but {takers} layers of DecoderConfig.blocks have an AddedFeaturesConfig: give as many"
    check(levels == takers, f"MediaConfig.vision.deepstack has {levels} layers, {rule}.")
    for name, encoder in (("vision", media.vision), ("audio", media.audio)):
        if encoder is None:
            continue
        deepstack_projector = encoder.deepstack_projector
        beside = encoder.projector_beside
        sizes = {encoder.out_dim} | {each.out_dim for each in (deepstack_projector, beside) if each is not None}
        rule = f"must make DecoderConfig.embed_dim={embed_dim} features"
        check(sizes == {embed_dim}, f"MediaConfig.{name}: its projectors make {sorted(sizes)}, and {rule}.")
