"""A batch in parts: the law that it equals the whole in values, gradients and statistics."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.batch_overlap import cut_batch, join_batch
from eqx_decoders.cli.xla_flags import options as xla_options
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from tests.compare import assert_array_equal, assert_close, root_mean_square
from tests.errors import refused
from tests.models import VOCAB, filled, packed, rich_decoder, some_tokens
from tests.programs import tpu_devices
from tests.steps import ATTENTION, DENSE, NORM, SPARSE, decoder, results


def check_equal(model: ed.Decoder, layout: ed.Layout, parts: int = 2, rows: int = 8, **changes):
    tokens, segments = packed(rows)
    batch = ed.Batch(tokens=tokens, segment_ids=segments)
    want = results(model.replace(remat=None), batch)
    got = results(model.replace(batch_split=parts, **changes).place(layout), batch)
    assert_close(got, want, units=256)


@pytest.mark.slow
def test_a_model_equals_itself_in_one_part():
    """Weights of five repeats and of one more layer; on a mesh that splits batch, weights and heads."""
    model = filled(rich_decoder(5), remat="full", layer_stats=True)
    check_equal(model, ed.Layout.create(data=2, fsdp=2, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_statistics_of_experts_match_the_whole_batch(exchange):
    model = filled(decoder(*(SPARSE,) * 3), remat="save_qkv_proj", experts="dropless", expert_exchange=exchange)
    check_equal(model, ed.Layout.create(expert=2, fsdp=2, tensor=2))


@pytest.mark.slow
def test_parts_on_one_device_without_a_scan():
    check_equal(filled(rich_decoder(4), layer_stats=True, scan=False), ed.Layout(), parts=4)


@pytest.mark.slow
def test_parts_of_microbatches_in_a_pipeline():
    model = filled(decoder(*(SPARSE,) * 5), remat="full", layer_stats=True)
    layout = ed.Layout.create(stage=2, fsdp=2, tensor=2)
    check_equal(model, layout, rows=16, pipeline=ed.Pipeline(microbatches=2, repeats=2))


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(context=2), dict(context=4), dict(tensor_sequence=2)])
def test_rows_that_are_split_too(options):
    model = filled(rich_decoder(4), remat="full")
    tokens, segments = packed(16, 16)
    batch = ed.Batch(tokens=tokens, segment_ids=segments)
    split = model.replace(batch_split=2).place(ed.Layout.create(**options, fsdp=-1))
    assert_close(results(split, batch), results(model, batch), units=256)


@pytest.mark.slow
def test_what_layers_read_beside_the_stream():
    """Embeddings of their own for each layer and token, and keys and values of an earlier layer."""
    per_layer = PerLayerEmbeddingConfig(features=8, vocab_size=VOCAB)
    further = (ed.ExtraLayerConfig(layer=PerLayerInputConfig(features=8), pre_norm=NORM),)
    first = dataclasses.replace(DENSE, post_layers=further, shares_kv_as="first")
    mixer = dataclasses.replace(ATTENTION, kv_shared_from="first")
    later = dataclasses.replace(DENSE, mixer=mixer, post_layers=further)
    mtp = ed.MTPConfig(num_depths=1, block=DENSE, norm=NORM)
    model = filled(decoder(first, *(later,) * 3, per_layer_embedding=per_layer, mtp=mtp), remat="full")
    check_equal(model, ed.Layout.create(fsdp=4, tensor=2))


@pytest.mark.slow
def test_with_gradient_accumulation_and_in_half_precision():
    model = filled(decoder(*(SPARSE,) * 3), remat="full", precision=ed.Precision(compute=jnp.bfloat16))
    tokens, segments = packed(16)
    batch = ed.Batch(tokens=tokens, segment_ids=segments)
    layout = ed.Layout.create(fsdp=4, tensor=2)
    want = results(model.place(layout), batch, gradient_accumulation_steps=2)
    got = results(model.replace(batch_split=2).place(layout), batch, gradient_accumulation_steps=2)
    assert_close(got, want, units=12, dtype="bfloat16", measure=root_mean_square)


def test_each_device_keeps_its_rows():
    """Device i of four has rows 4 i, … of sixteen, and in each of two parts two of them."""
    layout = ed.Layout.create(data=4, tensor=2)
    execution = ed.Execution(layout=layout, batch_split=2)
    x = jnp.broadcast_to(jnp.arange(16.0)[:, None, None], (16, 2, 4))
    x = jax.device_put(x, layout.activation_sharding("batch length embed", x.shape))
    cut = jax.jit(lambda x: tuple(layout.constrain(part, "batch length embed") for part in cut_batch(x, execution)))
    for part in cut(x):
        for shard in part.addressable_shards:
            (begin,) = {shard.index[0].start or 0}
            assert_array_equal(np.asarray(shard.data)[:, 0, 0] // 4, begin // 2)
    text = cut.lower(x).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))
    assert_array_equal(join_batch(cut_batch(x, execution)), x)


@pytest.mark.slow
def test_a_cache_has_all_rows_at_once():
    model = filled(rich_decoder(2))
    tokens = some_tokens(3, 4)
    cache = ed.init_cache(model.config, 3, 8)
    whole, split = (each(tokens, cache=cache).logits for each in (model, model.replace(batch_split=2)))
    assert_array_equal(whole, split)


def test_dropout_is_drawn_for_each_part():
    """The rates are kept, and the same key gives the same numbers."""
    model = filled(decoder(dataclasses.replace(DENSE, dropout=0.5)), batch_split=2)
    tokens = jnp.broadcast_to(some_tokens(1, 6), (4, 6))
    run = eqx.filter_jit(lambda key: model(tokens, key=key).hidden)
    one, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    assert_array_equal(one, again)
    assert np.any(one != other)
    assert np.any(one[0] != one[1])  # the first rows of two parts


def test_wrong_settings_are_refused():
    model = filled(decoder(DENSE), batch_split=2)
    with refused(ed.ConfigError, "3 rows", "Execution.batch_split=2"):
        model(some_tokens(3, 4))
    with refused(ed.ConfigError, "8 rows", "Execution.batch_split=2"):
        model.place(ed.Layout.create(data=8))(some_tokens(8, 4))
    with refused(ed.ConfigError, "batch_split=0"):
        ed.Execution(batch_split=0)


# --- what travels meanwhile ---


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib 0.10 can't print programs of today's libtpu")
def test_rows_travel_while_others_are_worked_on():
    """The order in a compiled program: rows of one part go to the experts while the other attends, rows of the other
    while experts work on those of the first, and results of the first come back while they work on the second."""
    layout = ed.Layout.create(expert=8, devices=tpu_devices("tpu7x:2x2x1"))
    experts = ExpertsConfig(num_experts=16, num_experts_per_token=2, mlp_dim=256, router=RouterConfig())
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=128, rope=Rope())
    blocks = (dataclasses.replace(SPARSE, mixer=attention, mlp=experts),) * 2
    config = dataclasses.replace(decoder(*blocks), embed_dim=512)
    precision = ed.Precision(compute=jnp.bfloat16)
    model = ed.abstract(config, layout=layout, precision=precision, batch_split=2)
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    sharding = layout.activation_sharding("batch length embed")
    x = jax.ShapeDtypeStruct((16, 1024, 512), jnp.bfloat16, sharding=sharding)
    run = jax.jit(lambda arrays, x: eqx.combine(arrays, static).run(embeds=x)[0])
    # gathers inside of the experts' loops would take the SparseCores, which send
    options = {**xla_options("v7x"), "xla_tpu_offload_gather_to_sparsecore": "false"}
    text = run.trace(arrays, x).lower().compile(compiler_options=options).as_text()
    body = next(part.splitlines() for part in text.split("\n\n") if len(re.findall("%gmm.* = ", part)) > 3)

    def at(pattern: str) -> list[int]:
        return [number for number, line in enumerate(body) if re.search(pattern, line)]

    attends, products = at(r"%interval_attention_forward\S* = .*custom-call\("), at(r"%gmm\S* = .*custom-call\(")
    assert (len(attends), len(products)) == (2, 6)
    names = [re.search(r"%(\S+)\.call-done = bf16", body[number]) for number in at("%ragged-all-to-all.*call-done = ")]
    travels = [[at(rf"%{name[1]}\.call-{end} = ")[0] for end in ("update", "done")] for name in names if name]
    assert len(travels) == 4

    def beside(first: int, last: int) -> bool:
        return any(begin < first and last < end for begin, end in travels)

    assert beside(attends[1], attends[1])
    assert beside(products[0], products[2])
    assert sum(begin < products[3] and products[5] < end for begin, end in travels) == 1
    assert not beside(attends[0], attends[0])
