"""Engines such as vLLM that provide caches and attention: logits equal those of the model's own attention."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.rope import DynamicRope
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.external_engine import external_layers, external_logits, run_with_caches
from tests.compare import assert_allclose
from tests.errors import refused
from tests.models import filled, rich_decoder
from tests.serving.engines import FIXTURES


PAGE, PAGES, PLACES = 4, 40, 8


class Metadata(NamedTuple):
    """As in vLLM: concatenated tokens of all sequences, and the pages of each sequence."""

    starts: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray


def attention(cache, query, key, value, metadata, sinks, call):
    """Plain attention over pages of shape [page, slot, key or value, heads, features], for one sequence at a time."""
    outs, cache = [], np.array(cache)
    query, key, value, sinks = (None if x is None else np.asarray(x) for x in (query, key, value, sinks))
    for number, length in enumerate(metadata.lengths.tolist()):
        begin, end = metadata.starts[number : number + 2].tolist()
        places = np.arange(length - (end - begin), length)
        pages = metadata.tables[number][places // PAGE]
        if call.writes:
            both = np.stack([key[begin:end], (key if value is None else value)[begin:end]], axis=1)
            cache[pages, places % PAGE] = both
        everything = cache[metadata.tables[number]].reshape(-1, *cache.shape[2:])[:length]
        keys, values = everything[:, 0], everything[:, 1]
        heads, kv_heads = query.shape[1], keys.shape[1]
        keys, values = (np.repeat(x, heads // kv_heads, axis=1) for x in (keys, values))
        scores = np.einsum("thd,shd->hts", query[begin:end], keys)
        scores = scores if call.soft_cap is None else call.soft_cap * np.tanh(scores / call.soft_cap)
        ahead = places[:, None] - np.arange(length)[None]
        seen = (ahead >= 0) & (ahead < (call.window or length))
        scores = np.where(seen[None], scores, -np.inf)
        if sinks is not None:
            extra = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, extra], axis=-1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True))[..., :length]
        outs.append(np.einsum("hts,shd->thd", weights, values))
    return jnp.asarray(cache), jnp.asarray(np.concatenate(outs), query.dtype)


def run_in_pieces(model, sequences, cuts):
    """Return the logits of sequences that are computed together, in pieces."""
    shapes = external_layers(model)
    caches = [jnp.zeros((PAGES, PAGE, 2, shape.kv_heads, shape.head_dim)) for shape in shapes]
    tables = np.random.default_rng(0).permutation(PAGES)[: len(sequences) * PLACES].reshape(-1, PLACES)
    found, done = [[] for _ in sequences], [0] * len(sequences)
    for cut in cuts:
        pieces = [text[begin : begin + count] for text, begin, count in zip(sequences, done, cut, strict=True)]
        positions = np.concatenate([np.arange(begin, begin + n) for begin, n in zip(done, cut, strict=True)])
        done = [begin + count for begin, count in zip(done, cut, strict=True)]
        metadata = Metadata(np.cumsum([0, *cut]), np.asarray(done), tables)
        caches, hidden = run_with_caches(model, caches, np.concatenate(pieces), positions, metadata, attention)
        logits = np.split(np.asarray(external_logits(model, hidden)), np.cumsum(cut)[:-1])
        for each, piece in zip(found, logits, strict=True):
            each.append(piece)
    return [np.concatenate(each) for each in found]


MODELS = ["llama_rope", "gemma2_odd", "gpt_oss_yarn", "deepseek2_groups", "gemma4_small", "qwen3_moe_mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("fixture", MODELS)
def test_logits_of_batched_pieces_equal_separate_sequences(fixture):
    model = ed.load_hf(FIXTURES / fixture, dtype="float32")
    generator = np.random.default_rng(1)
    sequences = [generator.integers(3, model.config.vocab_size, length) for length in (13, 7)]
    found = run_in_pieces(model, sequences, [(6, 1), (6, 5), (1, 1)])
    for text, logits in zip(sequences, found, strict=True):
        assert_allclose(logits, np.asarray(model(text[None]).logits[0]), atol=2e-4)


@pytest.mark.slow
def test_shared_keys_are_those_of_the_last_layer_that_shares_them():
    """Two layers write keys under one name. Two later layers read the keys of the second one."""
    config, full = rich_decoder(1), AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    first = dataclasses.replace(config.blocks[0], mixer=full, shares_kv_as="keys")
    other = dataclasses.replace(config.blocks[0], mixer=dataclasses.replace(full, kv_shared_from="keys"))
    model = filled(dataclasses.replace(config, blocks=(first, first, other, other)))
    sequences = [np.arange(3, 10), np.arange(20, 24)]
    logits = run_in_pieces(model, sequences, [(5, 1), (1, 3), (1, 0)])
    for text, each in zip(sequences, logits, strict=True):
        assert_allclose(each, np.asarray(model(text[None]).logits[0]), atol=2e-4)


def test_refuses_layers_without_an_external_cache():
    with refused(ed.ConfigError, "layer 0", "mixer", "dict"):
        external_layers(ed.abstract_hf(FIXTURES / "qwen3_next"))
    model = ed.load_hf(FIXTURES / "llama_rope", dtype="float32")
    one = np.zeros(1, np.int32)
    with refused(ed.ConfigError, "caches", "1", "2 layers"):
        run_with_caches(model, [None], one, one, None, attention)


def test_refuses_rope_that_depends_on_the_length():
    """External engines run all texts as one row.

    Our engine accepts such a RoPE only below the length where it changes.
    """
    rope = DynamicRope(factor=2.0, original_length=64)
    config = ed.get_config("tiny")
    blocks = (dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, rope=rope)) for block in config.blocks)
    model = ed.abstract(dataclasses.replace(config, blocks=tuple(blocks)))
    with refused(ed.ConfigError, "RoPE", "64 tokens"):
        external_layers(model)
    EngineConfig(max_length=64).check_model(model)
    with refused(ed.ConfigError, "EngineConfig.max_length=65", "64"):
        EngineConfig(max_length=65).check_model(model)
