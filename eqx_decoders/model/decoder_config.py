"""The configuration of a decoder, with its JSON form."""

import dataclasses
from typing import Annotated, Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.kv_sharing import check_sharing
from eqx_decoders.blocks.layer_inputs import check_per_layer, takers
from eqx_decoders.blocks.residual.gated_streams import GatedStreams
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.blocks.residual.registry import ResidualConfig
from eqx_decoders.encoders.media_config import MediaConfig, check_media
from eqx_decoders.errors import CheckedFields, ConfigError, NonEmpty, PositiveFloat, PositiveInt, Rate, check
from eqx_decoders.layers.embedding.embedding import PositionsConfig
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig
from eqx_decoders.layers.norm import NormConfig
from eqx_decoders.layers.shared_transformer import AidedMixerConfig, SharedTransformerConfig
from eqx_decoders.model.config_json import decoder_from_json, decoder_to_json
from eqx_decoders.model.mtp_config import MTPConfig, needs_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(CheckedFields):
    """Configuration of a decoder: one `BlockConfig` per layer, between an embedding and a head.

    **Arguments:**

    - `vocab_size`: token ids.
    - `embed_dim`: features of the residual stream.
    - `blocks`: one configuration per layer, in order.
    - `final_norm`: before the head; None for none.
    - `tied`: whether the embedding table is the head.
    - `embedding_rank`: features of the embedding table where they are not those of the stream, to which a matrix maps
        them (Lan et al. 2020); None where they are.
    - `head_transform`: what maps the normalized stream to the head's input; None for nothing.
    - `scores`: numbers that the head gives for a token in place of logits, such as the reward of the text so far; None
        for logits. Such a model generates nothing.
    - `head_bias`: whether the head, tied or not, adds a bias to the logits.
    - `embedding_scale`: multiplies embeddings (Gemma: `embed_dim ** 0.5`).
    - `embedding_norm`: normalization of the input of the first layer (BLOOM); None for none.
    - `positions`: absolute positions added to the embeddings; None for none.
    - `logit_divisor`: logits are divided by it (Granite).
    - `logit_soft_cap`: logits become `cap * tanh(logits / cap)`; None for none.
    - `dropout`: rate on the embeddings and before the head.
    - `init_std`: standard deviation of a new embedding table.
    - `per_layer_embedding`: embeddings that single layers have for themselves; None for none.
    - `mtp`: multi-token prediction; None for none. It changes no logits.
    - `media`: encoders of images and audio, and which tokens their features replace; None for none.
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
        streams = {block.residual.streams for block in self.blocks}
        rule = "must have as many residual streams in all layers"
        check(len(streams) == 1, f"DecoderConfig.blocks {rule}, not {' and '.join(map(str, sorted(streams)))}.")
        if self.mtp is not None:
            _check_mtp_streams(self.mtp, self.residual)
        read, stored = self.head_features, self.table_features
        rule = f"a head of {read} features, and the embedding table has {stored}"
        remedy = "Set head_transform.features to embedding_rank"
        check(not self.tied or read == stored, f"DecoderConfig.tied=True needs {rule}. {remedy}, or tied=False.")
        if self.scores is not None:
            self._check_scores()
        check_sharing(self.blocks)
        _check_mtp_block(None if self.mtp is None else self.mtp.block)
        _ = self.shared_transformer
        check_per_layer(self.blocks, self.per_layer_embedding)
        check_media(self.media, self.blocks, self.embed_dim)

    def _check_scores(self) -> None:
        """Raise ConfigError for what only logits have."""
        plain = {"tied": False, "head_bias": False, "logit_soft_cap": None, "logit_divisor": 1.0, "mtp": None}
        others = [f"{name}={getattr(self, name)!r}" for name in plain if getattr(self, name) != plain[name]]
        rule = f"DecoderConfig.scores={self.scores} excludes {', '.join(others)}"
        check(not others, f"{rule}: these are of logits. Use `with_scores`.")

    def check_logits(self, what: str) -> None:
        """Raise ConfigError if the model gives scores: `what` needs logits."""
        rule = f"DecoderConfig.scores={self.scores}: {what} needs a model with logits, and this one scores texts"
        check(self.scores is None, f"{rule}.")

    @property
    def residual(self) -> ResidualConfig:
        """Residual connection of the first layer, which has the number of residual streams."""
        return self.blocks[0].residual

    @property
    def table_features(self) -> int:
        """Features of the embedding table."""
        return self.embedding_rank or self.embed_dim

    @property
    def hidden_features(self) -> int:
        """Features of `Output.hidden`: of all residual streams where multi-token prediction reads them, else of one."""
        return self.embed_dim * (self.residual.streams if self.hands_on_streams else 1)

    @property
    def hands_on_streams(self) -> bool:
        """Whether `Output.hidden` has all residual streams, one behind the other."""
        return self.mtp is not None and self.mtp.all_streams

    @property
    def head_features(self) -> int:
        """Features that the output head reads."""
        return (self.head_transform and self.head_transform.features) or self.embed_dim

    @property
    def head_sizes(self) -> tuple[int, int | None]:
        """Logits of a token, and the scores that it has in their place."""
        return self.vocab_size, self.scores

    @property
    def shared_transformer(self) -> SharedTransformerConfig | None:
        """Transformer block whose weights layers share; None where there is none."""
        mixers = (block.mixer for block in self.blocks)
        kinds = {mixer.transformer for mixer in mixers if isinstance(mixer, AidedMixerConfig)}
        rule = "must be the same in all layers, whose weights are shared"
        check(len(kinds) <= 1, f"AidedMixerConfig.transformer {rule}, not one of {len(kinds)} configurations.")
        return next(iter(kinds), None)

    @property
    def has_grid_positions(self) -> bool:
        """Return whether rotary positions have time, row and column."""
        return self.media is not None and self.media.positions is not None

    @property
    def fixed_length(self) -> int | None:
        """Tokens up to which the rotation of a key does not depend on the length of its text; None: it never does."""
        ropes = (getattr(mixer, "rope", None) for block in self.blocks for mixer in block.mixers())
        return min((rope.fixed_length for rope in ropes if rope is not None and rope.fixed_length), default=None)

    def to_json(self) -> str:
        """Return the configuration as JSON, for `from_json`; repeated layers are written once: `{"repeat": 4, "blocks":
        …}`.

        Every field is there, whatever its default, so that it means the same in later versions.
        """
        return decoder_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """Return the configuration of a text of `to_json`. Raise ConfigError for unknown classes, fields and values."""
        return decoder_from_json(text, cls)


def with_scores(config: DecoderConfig, scores: int) -> DecoderConfig:
    """Return the configuration with a head of scores in place of that of logits."""
    none: dict[str, Any] = dict(head_bias=False, logit_soft_cap=None, logit_divisor=1.0, mtp=None)
    return dataclasses.replace(config, scores=scores, tied=False, **none)


def _check_mtp_streams(mtp: MTPConfig, residual: ResidualConfig) -> None:
    """Raise ConfigError where depths sum streams otherwise than the model, or read others than it has."""
    where = f"{type(residual).__name__}.weighted_sum"
    rule = f"DecoderConfig.mtp must have all_streams=True where {where} is: depths that read their sum add them up as"
    check(mtp.all_streams or not residual.weighted_sum, f"{rule} they are.")
    mixed = isinstance(residual, HyperConnections | GatedStreams) and mtp.block.residual == residual
    rule = "needs HyperConnections or GatedStreams, the same in MTPConfig.block as in the first layer"
    check(mixed or not mtp.all_streams, f"DecoderConfig.mtp.all_streams=True {rule}.")


def _check_mtp_block(block: BlockConfig | None) -> None:
    """Raise ConfigError where the block of multi-token prediction needs what only the model's layers have."""
    alone = block is None or not (needs_model(block) or takers((block,)) or block.pre_layers)
    rule = "can't use what another layer shares, take an embedding of its own, or have branches before its mixer"
    check(alone, f"DecoderConfig.mtp.block {rule}, or find experts by token ids.")
