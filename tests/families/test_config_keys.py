"""Keys of `config.json`: what they must be, and that no other is passed over in silence."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.io.huggingface.load import decode_config
from tests.families.samples import SAMPLES, decode, sample


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
    (dict(sliding_window=128), "Unknown keys: sliding_window"),
    (dict(logits_scaling=8.0), "Unknown keys: logits_scaling"),
    (dict(atention_bias=True), "Did you mean 'attention_bias'"),
    (dict(auto_map={"AutoModel": "modeling_x.X"}), "Unknown keys: auto_map"),
    (dict(architectures=["LlamaForSequenceClassification"]), "must name LlamaForCausalLM"),
    (dict(is_causal=False), "is_causal=false is not supported"),
    (dict(add_cross_attention=True), "add_cross_attention=true is not supported"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
    (dict(_attn_implementation_internal="evil/kernel"), "Unknown keys: _attn_implementation_internal"),
    (dict(temperature=[1.0]), "temperature=[1.0]: expected "),
    (dict(top_k=2.5), "top_k=2.5: expected "),
    (dict(prefix=4), "prefix=4: expected "),
    (dict(max_length=True), "max_length=true: expected "),
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


# PretrainedConfig().to_dict() of transformers 4.57. A configuration that is saved with all keys has these keys in each
# of its objects.
PRETRAINED = {
    **dict(
        return_dict=True, output_hidden_states=False, output_attentions=False, torchscript=False, use_bfloat16=False
    ),
    **dict(pruned_heads={}, chunk_size_feed_forward=0, tie_encoder_decoder=False, tf_legacy_loss=False),
    **dict(is_encoder_decoder=False, is_decoder=False, cross_attention_hidden_size=None, add_cross_attention=False),
    **dict(id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id={"LABEL_0": 0, "LABEL_1": 1}, problem_type=None),
    **dict(finetuning_task=None, task_specific_params=None, tokenizer_class=None, prefix=None, _name_or_path=""),
    **dict(bos_token_id=None, pad_token_id=None, eos_token_id=None, sep_token_id=None, decoder_start_token_id=None),
    **dict(max_length=20, min_length=0, do_sample=False, early_stopping=False, num_beams=1, num_beam_groups=1),
    **dict(temperature=1.0, top_k=50, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, length_penalty=1.0),
    **dict(diversity_penalty=0.0, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, bad_words_ids=None),
    **dict(num_return_sequences=1, output_scores=False, return_dict_in_generate=False, remove_invalid_values=False),
    **dict(forced_bos_token_id=None, forced_eos_token_id=None, exponential_decay_length_penalty=None),
    **dict(suppress_tokens=None, begin_suppress_tokens=None, _attn_implementation_autoset=False),
    **dict(use_bfloat16=False, dtype=None),
    **dict(transformers_version="4.57.6"),
}
SUBCONFIGS = ("text_config", "vision_config", "audio_config", "attn_config", "ffn_config")


def saved_with_all_keys(content: dict) -> dict:
    saved = {**PRETRAINED, **content}
    for key in SUBCONFIGS:
        if isinstance(content.get(key), dict):
            tied = {} if key == "text_config" else dict(tie_word_embeddings=True)
            saved[key] = {**PRETRAINED, **tied, **content[key]}
    return saved


@pytest.mark.parametrize("name", SAMPLES)
def test_keys_of_pretrained_config_have_no_effect(name):
    assert decode(saved_with_all_keys(SAMPLES[name])) == decode(SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_unknown_keys_are_refused_by_name(name):
    content = SAMPLES[name]
    nested = [key for key in SUBCONFIGS if isinstance(content.get(key), dict)]
    for changed in (content | dict(surprise=3), *(content | {key: content[key] | dict(surprise=3)} for key in nested)):
        with pytest.raises(ed.ConversionError, match="Unknown keys: surprise") as caught:
            decode(changed)
        assert "is not supported" not in str(caught.value)


# Keys that transformers 4.5x writes, and that later versions do not write.
OF_TRANSFORMERS_4 = [
    ("granitemoe", dict(position_embedding_type="rope")),
    ("granitemoeshared", dict(position_embedding_type="rope")),
    ("longcat_flash", dict(num_hidden_layers=56)),
    ("lfm2_vl", dict(model_type="lfm2-vl")),
    ("llama", dict(temperature=0.6, top_k=20, max_length=4096)),
]


@pytest.mark.parametrize("kind, keys", OF_TRANSFORMERS_4, ids=str)
def test_keys_of_transformers_4_have_no_effect(kind, keys):
    assert decode_config(sample(kind) | keys, "config.json")[0] == decode(sample(kind))


def test_other_position_embeddings_are_refused():
    with pytest.raises(ed.ConversionError, match="position_embedding_type=nope"):
        decode(sample("granitemoe", position_embedding_type="nope"))


def test_modernbert_window_without_local_attention():
    """transformers 4 saves `sliding_window`, but not `local_attention`."""
    content = sample("modernbert-decoder", "local_attention", "sliding_window")
    assert decode(content | dict(sliding_window=5)) == decode(content | dict(local_attention=10))


def test_sizes_of_experts_are_ignored_without_experts():
    """transformers 5 writes its default sizes for a Nemotron-H without experts."""
    content = FAMILIES["nemotron_h"].encode(ed.get_config("nemotron-h-8b"))
    sizes = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688, norm_topk_prob=True)
    assert decode(content | sizes) == decode(content)
