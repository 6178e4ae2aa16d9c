"""Decoders with every type of attention that has a cache."""

import dataclasses

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.mask import Chunked, SlidingWindow
from tests.models import rich_decoder


FULL = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
LATENT = LatentAttentionConfig(num_heads=2, q_rank=None, kv_rank=8, nope_dim=5, rope_dim=4, value_dim=3)
INDEXED = dataclasses.replace(LATENT, q_rank=16, indexer=IndexerConfig(num_heads=4, head_dim=4, top_k=3))
MIXERS = {
    "keys": (dataclasses.replace(FULL, sinks=True), dataclasses.replace(FULL, mask=SlidingWindow(4), soft_cap=5.0)),
    "chunks": (dataclasses.replace(FULL, mask=Chunked(8)), dataclasses.replace(FULL, num_kv_heads=1)),
    "blocks": (dataclasses.replace(FULL, selection=BlockSelection(size=3, top_k=2)),),
    "latents": (LATENT,),
    "indexed": (INDEXED,),
}


def decoder(kind: str) -> ed.DecoderConfig:
    config = rich_decoder(1)
    blocks = tuple(dataclasses.replace(config.blocks[0], mixer=mixer) for mixer in MIXERS[kind])
    return dataclasses.replace(config, blocks=blocks * 2)
