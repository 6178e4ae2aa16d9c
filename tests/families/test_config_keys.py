"""Keys of `config.json`: what they must be, and that no other is passed over in silence."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from tests.families.samples import decode, sample


def test_activations_are_those_of_transformers():
    assert decode(sample("llama", hidden_act="gelu")).blocks[0].mlp.activation == "gelu"
    assert decode(sample("llama", hidden_act="swish")).blocks[0].mlp.activation == "silu"
    assert decode(sample("gemma2", hidden_activation="gelu")).blocks[0].mlp.activation == "gelu"
    assert decode(sample("gemma3_text", hidden_act="relu")).blocks[0].mlp.activation == "gelu_tanh"  # is ignored


WRONG = [
    (dict(num_attention_heads=0), "num_attention_heads=0 must be an integer of at least 1"),
    (dict(num_hidden_layers=-2), "num_hidden_layers=-2 must be an integer"),
    (dict(num_hidden_layers=10**6), "num_hidden_layers=1000000 must be at most 1024"),
    (dict(hidden_size=64.0), "hidden_size=64.0 must be an integer"),
    (dict(hidden_size=True), "hidden_size=true must be an integer"),
    (dict(vocab_size="128"), 'vocab_size="128" must be an integer'),
    (dict(vocab_size=10**12), "vocab_size=1000000000000 must be an integer of at least 1, at most 2147483647"),
    (dict(vocab_size=None), "vocab_size is missing"),
    (dict(num_key_value_heads=3), "must be a multiple of num_kv_heads=3"),
    (dict(head_dim=7), "must be even"),
    (dict(head_dim=None, num_attention_heads=5, num_key_value_heads=5), "must be a multiple of num_attention_heads=5"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps=NaN must be a finite number"),
    (dict(rms_norm_eps=0), "rms_norm_eps=0 must be a finite number above 0"),
    (dict(rms_norm_eps=10**400), "must be a finite number"),
    (dict(tie_word_embeddings="no"), "tie_word_embeddings=no must be true or false"),
    (dict(hidden_act="mish"), "hidden_act=mish is not known here"),
    (dict(hidden_act="Silu"), "hidden_act=Silu is not known here. Did you mean 'silu'"),
    (dict(hidden_act=["silu"]), "is not known here"),
    (dict(sliding_window=128), "sliding_window: not known here"),
    (dict(logits_scaling=8.0), "logits_scaling: not known here"),
    (dict(atention_bias=True), "Did you mean 'attention_bias'"),
    (dict(auto_map={"AutoModel": "modeling_x.X"}), "auto_map: not known here"),
    (dict(architectures=["LlamaForSequenceClassification"]), "must name LlamaForCausalLM"),
    (dict(is_causal=False), "is_causal=false changes what the model computes"),
    (dict(add_cross_attention=True), "add_cross_attention=true changes"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 changes"),
    (dict(_attn_implementation_internal="evil/kernel"), "_attn_implementation_internal: not known here"),
]


@pytest.mark.parametrize("keys, sentence", WRONG, ids=lambda value: str(value)[:60])
def test_wrong_keys_are_refused_by_name(keys, sentence):
    with pytest.raises(ed.ConversionError) as caught:
        decode(sample("llama") | keys)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert len(str(caught.value)) < 500


def test_kernel_choices_are_neither_obeyed_nor_passed_on():
    config, kept = FAMILIES["llama"].decode(sample("llama", _attn_implementation="org/kernel"))
    assert config == decode(sample("llama"))
    assert "_attn_implementation" not in kept
