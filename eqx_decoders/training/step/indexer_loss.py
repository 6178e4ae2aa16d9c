"""Loss of the indexers of sparse attention."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from eqx_decoders.layers.attention.indexer import IndexerConfig, IndexerStats
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def indexer_configs(config: DecoderConfig) -> tuple[IndexerConfig, ...]:
    """Return the configurations of the indexers that learn, in the order of `BlockStats.indexer`.

    Those of multi-token prediction come last; statistics of a call without it stop before them.
    """
    ahead = () if config.mtp is None else (config.mtp.block,) * config.mtp.num_depths
    mixers = [block.mixer for block in (*config.blocks, *ahead)]
    indexers = [mixer.indexer for mixer in mixers if isinstance(mixer, LatentAttentionConfig) and mixer.chooses]
    return tuple(indexer for indexer in indexers if indexer is not None and indexer.loss_weight > 0)


def indexer_loss(config: DecoderConfig, stats: IndexerStats) -> Float32[Array, ""]:
    """Compute `loss_weight` times the mean divergence over tokens, the mean over the layers whose indexer learns."""
    weights = [each.loss_weight for each in indexer_configs(config)[: stats.tokens.shape[0]]]
    return jnp.mean(jnp.asarray(np.asarray(weights, np.float32)) * stats.loss / jnp.maximum(stats.tokens, 1.0))
