"""Gemma 4: heads by layer, borrowed keys and values, embeddings of layers, experts beside the MLP."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.gemma4 import gemma4
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import ProportionalRope, Rope
from tests.families.samples import FIXTURES, decode, mixers, sample
from tests.models import filled


SHAPE = DecoderSizes(
    vocab_size=32, embed_dim=16, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=4, mlp_dim=24, tied=True,
    activation="gelu_tanh",
)  # fmt: skip
MASKS = (SlidingWindow(4), Causal(), SlidingWindow(4), Causal())
HEADS = ((4, 4), (2, 8), (4, 4), (2, 8))
MODELS = {
    "small": gemma4(
        SHAPE, masks=MASKS, heads=HEADS, num_kv_shared_layers=2, double_wide=True,
        per_layer=PerLayerEmbeddingConfig(features=4, vocab_size=32),
    ),
    "experts": gemma4(
        SHAPE, masks=MASKS[:2], heads=HEADS[:2], shared_kv=True,
        experts=dict(num_experts=4, num_experts_per_token=2, mlp_dim=8),
    ),
}  # fmt: skip


# --- sizes ---


@pytest.mark.parametrize(
    ("name", "period", "window", "full_heads"),
    [("gemma4-e2b", 5, 512, (1, 512)), ("gemma4-26b", 6, 1024, (2, 512)), ("gemma4-31b", 6, 1024, (4, 512))],
)
def test_layers_of_each_type(name, period, window, full_heads):
    for index, mixer in enumerate(mixers(ed.get_config(name))):
        local = (index + 1) % period != 0
        assert mixer.mask == (SlidingWindow(window) if local else Causal())
        assert mixer.rope == (Rope(theta=10_000.0) if local else ProportionalRope(theta=1e6, fraction=0.25))
        assert mixer.query_scale == 1.0
        if not local:
            assert (mixer.num_kv_heads, mixer.head_dim) == full_heads


@pytest.mark.parametrize(("name", "first"), [("gemma4-e2b", 15), ("gemma4-e4b", 24)])
def test_the_last_layers_borrow(name, first):
    config = ed.get_config(name)
    givers = [index for index, block in enumerate(config.blocks) if block.shares_kv_as is not None]
    assert givers == [first - 2, first - 1]
    assert [mixer.kv_shared_from is not None for mixer in mixers(config)] == [
        i >= first for i in range(len(config.blocks))
    ]
    wide = {block.mlp.mlp_dim for block in config.blocks[first:]}
    assert wide == {config.blocks[0].mlp.mlp_dim * (2 if name == "gemma4-e2b" else 1)}


def test_few_blocks_are_traced():
    traced = {
        name: sum(len(unit) for unit, _ in ed.segments(ed.get_config(f"gemma4-{name}").blocks))
        for name in ("e2b", "e4b", "26b", "31b")
    }
    assert traced == {"e2b": 12, "e4b": 15, "26b": 6, "31b": 6}


def test_layers_that_borrow_remember_nothing():
    cache = ed.init_cache(MODELS["small"], 1, 8)
    kept = [dict(each) for segment in cache.segments for each in segment]
    assert [list(each) for each in kept] == [["mixer"], ["mixer"], [], []]


# --- config.json ---


def test_heads_in_the_words_of_old_files():
    layers = dict(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2, num_kv_shared_layers=0)
    base = sample("gemma4_text", "per_layer_config", "global_head_dim", "num_global_key_value_heads", **layers)
    own = (base["num_key_value_heads"], base["head_dim"])

    def heads(**keys):
        return [(mixer.num_kv_heads, mixer.head_dim) for mixer in mixers(decode(base | keys))]

    assert heads() == [own, (own[0], 512)]
    assert heads(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True) == [own, (1, 32)]
    assert heads(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=False) == [own, (own[0], 32)]
    assert heads(per_layer_config={"01": {"head_dim": 16}}) == [own, (own[0], 16)]  # as transformers pads numbers
    assert heads(per_layer_config={}) == [own, own]


def test_the_last_layer_sees_everything():
    layers = dict(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2, num_kv_shared_layers=0)
    assert mixers(decode(sample("gemma4_text", "per_layer_config", **layers)))[-1].mask == Causal()


def test_images_see_each_other_and_there_are_none():
    assert decode(sample("gemma4_text", use_bidirectional_attention="vision")) == decode(sample("gemma4_text"))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention=all is not supported"),
        (dict(num_kv_shared_layers=5), "num_kv_shared_layers=5 leaves no layer of each type"),
        (dict(num_kv_shared_layers=99), "num_kv_shared_layers=99 leaves no layer of each type"),
        (dict(per_layer_config={"77": {"head_dim": 8}}), 'per_layer_config: Unknown keys: "77"'),
        (dict(per_layer_config={"0": {"num_attention_heads": 8}}), "Unknown keys: num_attention_heads"),
        (dict(enable_moe_block=True, num_experts=None), "num_experts is missing"),
    ],
)
def test_settings_that_describe_nothing(keys, sentence):
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(sample("gemma4_text", **keys))


@pytest.mark.slow
def test_tensors_that_nothing_reads_are_passed_over(tmp_path):
    """Published files have keys and values of layers that borrow them."""
    source = FIXTURES / "gemma4_small"
    directory = shutil.copytree(source, tmp_path / "more")
    tensors = load_file(source / "model.safetensors")
    unread = {f"model.layers.5.self_attn.{name}.weight": np.ones((4, 4), np.float32) for name in ("k_proj", "v_norm")}
    save_file(tensors | unread, directory / "model.safetensors")
    plain, more = (jax.tree.leaves(ed.load_hf(each)) for each in (source, directory))
    assert all(np.array_equal(one, other) for one, other in zip(plain, more, strict=True))
    save_file(
        tensors | {"model.layers.0.self_attn.v_norm.weight": np.ones(8, np.float32)}, directory / "model.safetensors"
    )
    with pytest.raises(ed.ConversionError, match=r"model.layers.0.self_attn.v_norm.weight"):
        ed.load_hf(directory)


def test_other_models_are_no_gemma4():
    for name in ("tiny", "gemma3-1b", "deepseek-custom"):
        with pytest.raises(ed.ConversionError, match="is no Gemma4ForCausalLM"):
            FAMILIES["gemma4_text"].encode(ed.get_config(name))


# --- errors ---


def test_what_belongs_together():
    small = MODELS["small"]
    with pytest.raises(ed.ConfigError, match=r"blocks\[1\].mixer.kv_shared_from='full_attention'"):
        type(small)(**(vars(small) | dict(blocks=small.blocks[:1] + small.blocks[3:])))
    with pytest.raises(ed.ConfigError, match=r"per_layer_embedding makes \[\] features, but layers take \[4\]"):
        type(small)(**(vars(small) | dict(per_layer_embedding=None)))
    model = filled(small)
    with pytest.raises(ed.ConfigError, match="Per-layer embeddings are looked up"):
        model(embeds=np.zeros((1, 3, 16), np.float32))
