"""Configuration of a decoder, and its conversion to and from JSON."""

import dataclasses
from typing import Annotated

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.layer_inputs import check_per_layer, per_layer_input_configs
from eqx_decoders.blocks.residual.base import Residual
from eqx_decoders.blocks.shared_values import check_shared_values
from eqx_decoders.encoders.media_config import MediaConfig, check_media
from eqx_decoders.errors import CheckedFields, ConfigError, NonEmpty, PositiveFloat, PositiveInt, Rate, check
from eqx_decoders.layers.embedding.embedding import PositionsConfig
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.shared_transformer import AidedMixerConfig, SharedTransformerConfig
from eqx_decoders.model.config_json import decoder_from_json, decoder_to_json
from eqx_decoders.model.mtp_config import MTPConfig, depends_on_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(CheckedFields):
    """Configuration of a decoder: one `BlockConfig` per layer, between an embedding and a head.

    **Arguments:**

    - `vocab_size`: number of token ids.
    - `embed_dim`: features of the residual stream.
    - `blocks`: one configuration per layer, in order.
    - `final_norm`: norm before the head; None for no norm.
    - `tied`: whether the head uses the embedding table as its weight.
    - `embedding_rank`: features of a factorized embedding table, which a matrix maps to `embed_dim` features (ALBERT;
        Lan et al. 2020). None: the table has `embed_dim` features.
    - `head_transform`: layer between the final norm and the head; None for no layer.
    - `scores`: number of scores per token that the head returns in place of logits, such as the reward of the text so
        far (reward model); None for logits. A model with scores cannot generate.
    - `head_bias`: whether the head, tied or not, adds a bias to the logits.
    - `embedding_scale`: factor of the embeddings (Gemma: `embed_dim ** 0.5`).
    - `embedding_norm`: norm of the input of the first layer (BLOOM); None for no norm.
    - `positions`: absolute positions added to the embeddings; None for no absolute positions.
    - `logit_divisor`: divisor of the logits (Granite).
    - `logit_soft_cap`: logits become `cap * tanh(logits / cap)`; None for no cap.
    - `dropout`: dropout rate on the embeddings and before the head.
    - `init_std`: standard deviation of a new embedding table.
    - `per_layer_embedding`: per-layer embeddings (Gemma 3n); None for no such embeddings.
    - `mtp`: multi-token prediction; None for no MTP. It does not change the logits.
    - `media`: encoders of images and audio, and the tokens that their features replace; None for a text model.
    """

    vocab_size: PositiveInt
    embed_dim: PositiveInt
    blocks: Annotated[tuple[BlockConfig, ...], NonEmpty("BlockConfig")]
    final_norm: NormConfig | None
    tied: bool = False
    embedding_rank: PositiveInt | None = None
    head_transform: HeadTransformConfig | None = None
    scores: PositiveInt | None = None
    head_bias: bool = False
    embedding_scale: PositiveFloat = 1.0
    embedding_norm: NormConfig | None = None
    positions: PositionsConfig | None = None
    logit_divisor: PositiveFloat = 1.0
    logit_soft_cap: PositiveFloat | None = None
    dropout: Rate = 0.0
    init_std: PositiveFloat = 0.02
    per_layer_embedding: PerLayerEmbeddingConfig | None = None
    mtp: MTPConfig | None = None
    media: MediaConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        for index, block in enumerate(self.blocks):
            if not isinstance(block, BlockConfig):
                raise ConfigError(f"DecoderConfig.blocks[{index}]={block!r} must be a BlockConfig.")
        stream_counts = sorted({block.residual_config.streams for block in self.blocks})
        check(
            len(stream_counts) == 1,
            "DecoderConfig.blocks must have the same number of residual streams in all layers, "
            f"not {' and '.join(map(str, stream_counts))}.",
        )
        if self.mtp is not None:
            _check_mtp_streams(self.mtp, self.residual)
        check(
            not self.tied or self.head_features == self.table_features,
            f"DecoderConfig.tied=True needs a head and an embedding table with equal features, but the head reads "
            f"{self.head_features} and the table has {self.table_features}. Set head_transform.features to "
            "embedding_rank, or tied=False.",
        )
        if self.scores is not None:
            self._check_scores()
        check_shared_values(self.blocks)
        _check_mtp_block(None if self.mtp is None else self.mtp.block)
        self._check_shared_transformer()
        check_per_layer(self.blocks, self.per_layer_embedding)
        check_media(self.media, self.blocks, self.embed_dim)

    def _check_scores(self) -> None:
        """Raise ConfigError for options that are defined only for logits."""
        required = {"tied": False, "head_bias": False, "logit_soft_cap": None, "logit_divisor": 1.0, "mtp": None}
        others = [f"{name}={getattr(self, name)!r}" for name in required if getattr(self, name) != required[name]]
        check(
            not others,
            f"DecoderConfig.scores={self.scores} excludes {', '.join(others)}, which apply only to logits. "
            "Use `with_scores`, which resets these fields.",
        )

    def check_logits(self, what: str) -> None:
        """Raise ConfigError unless the model returns logits. `what` names the function that needs them."""
        check(
            self.scores is None,
            f"DecoderConfig.scores={self.scores}: {what} needs a model with logits, but this model returns scores.",
        )

    @property
    def residual(self) -> Residual:
        """Residual connection of the first layer; all layers have the same number of residual streams."""
        return self.blocks[0].residual_config

    @property
    def table_features(self) -> int:
        """Features of the embedding table."""
        return self.embedding_rank or self.embed_dim

    @property
    def hidden_features(self) -> int:
        """Features of `Output.hidden`: `embed_dim`, times the number of streams with `MTPConfig.all_streams`."""
        return self.embed_dim * (self.residual.streams if self.returns_all_streams else 1)

    @property
    def returns_all_streams(self) -> bool:
        """Whether `Output.hidden` is the concatenation of all residual streams."""
        return self.mtp is not None and self.mtp.all_streams

    @property
    def head_features(self) -> int:
        """Input features of the output head."""
        return (self.head_transform and self.head_transform.features) or self.embed_dim

    @property
    def head_sizes(self) -> tuple[int, int | None]:
        """Number of logits per token, and number of scores that replace them (None: the head returns logits)."""
        return self.vocab_size, self.scores

    @property
    def shared_transformer(self) -> SharedTransformerConfig | None:
        """Transformer block whose weights several layers share (Zamba 2); None for a model without it."""
        return next(iter(self._transformers()), None)

    def _transformers(self) -> set[SharedTransformerConfig]:
        mixers = (block.mixer for block in self.blocks)
        return {mixer.transformer for mixer in mixers if isinstance(mixer, AidedMixerConfig)}

    def _check_shared_transformer(self) -> None:
        num_configs = len(self._transformers())
        check(
            num_configs <= 1,
            "AidedMixerConfig.transformer must be equal in all layers, because they share its weights, "
            f"but there are {num_configs} different configurations.",
        )

    @property
    def has_grid_positions(self) -> bool:
        """Whether rotary positions have three dimensions: time, row and column."""
        return self.media is not None and self.media.positions is not None

    @property
    def fixed_length(self) -> int | None:
        """Length in tokens above which keys rotate differently (length-dependent RoPE scaling); None: no such length.

        Up to this length a key does not depend on the length of its text.
        """
        ropes = (getattr(mixer, "rope", None) for block in self.blocks for mixer in block.mixers())
        return min((rope.fixed_length for rope in ropes if rope is not None and rope.fixed_length), default=None)

    def to_json(self) -> str:
        """Return the configuration as JSON, for `from_json`.

        Repeated layers are written once: `{"repeat": 4, "blocks": …}`. Fields with default values are written, too, so
        that the text keeps its meaning if a later version changes a default.
        """
        return decoder_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """Parse a text of `to_json`. Raises ConfigError for unknown classes, fields or values."""
        return decoder_from_json(text, cls)


def with_scores(config: DecoderConfig, scores: int) -> DecoderConfig:
    """Return the configuration with a head of scores in place of a head of logits."""
    return dataclasses.replace(
        config, scores=scores, tied=False, head_bias=False, logit_soft_cap=None, logit_divisor=1.0, mtp=None
    )


def _check_mtp_streams(mtp: MTPConfig, residual: Residual) -> None:
    """Raise ConfigError if MTP depths reduce or read residual streams in a way that does not fit the model."""
    check(
        mtp.all_streams or not residual.weighted_sum,
        f"DecoderConfig.mtp must have all_streams=True if {type(residual).__name__}.weighted_sum is True: "
        "otherwise the depths would read an unweighted sum of the streams.",
    )
    same_streams = residual.mtp_streams and mtp.block.residual_config == residual
    check(
        same_streams or not mtp.all_streams,
        "DecoderConfig.mtp.all_streams=True needs HyperConnections or GatedStreams as residual connection, "
        "with equal options in MTPConfig.block and in the first layer.",
    )


def _check_mtp_block(block: BlockConfig | None) -> None:
    """Raise ConfigError if the block of the MTP depths depends on other layers or on inputs of the model."""
    independent = block is None or not (
        depends_on_model(block) or per_layer_input_configs((block,)) or block.pre_layers
    )
    check(
        independent,
        "DecoderConfig.mtp.block cannot use keys, values or weights that another layer shares, per-layer embeddings, "
        "pre_layers, or experts that are selected by token ids. Remove them from the block.",
    )
