"""Keys of `config.json`: keys without effect, and refusal of unknown keys."""

import pytest

import eqx_decoders as ed
from tests.errors import refused
from tests.families.samples import SAMPLES, decode


# PretrainedConfig().to_dict() of transformers 4.57. A configuration that is saved with all keys has these keys in all
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
        with refused(ed.ConversionError, "surprise"):
            decode(changed)
