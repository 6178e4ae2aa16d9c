"""Keys of `config.json` that all families read in the same way: ignored keys, allowed values, names of activations."""

from collections.abc import Mapping
from typing import Any

from eqx_decoders.errors import ConversionError


def by_key(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each key, from the reasons for groups of keys that are separated by spaces."""
    return {key: reason for keys, reason in reasons.items() for key in keys.split()}


# Keys that do not change what a loaded model computes, with the reason. An export has the values that were loaded,
# except those of internal keys of transformers.
IGNORED_KEYS: dict[str, str] = by_key(
    {
        "transformers_version _name_or_path name_or_path _model_name_or_path model_name_or_path _commit_hash "
        "_original_object_hash _from_pipeline _from_auto _from_model_config unsloth_version unsloth_fixed "
        "is_llama_config transformers.js_config": "the program that wrote the file, and its source",
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id "
        "forced_eos_token_id unk_token_id tokenizer_class model_max_length": "for tokenizers and generation",
        "early_stopping bad_words_ids output_scores return_dict_in_generate remove_invalid_values "
        "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
        "cache_implementation use_cache": "generation settings of transformers",
        "attention_dropout resid_pdrop embd_pdrop attn_pdrop "
        "hidden_dropout hidden_dropout_prob": "dropout is only used in training, and a loaded model has no dropout",
        "use_return_dict output_attentions output_hidden_states return_dict torchscript use_bfloat16 "
        "tf_legacy_loss chunk_size_feed_forward task_specific_params pretraining_tp output_past "
        "gradient_checkpointing _attn_implementation "
        "_attn_implementation_autoset _flash_attn_2_enabled attn_implementation": "how transformers runs it",
        "problem_type finetuning_task id2label label2id num_labels _num_labels": "for classification heads",
        "max_position_embeddings": "the recommended length, not a limit: rotary embeddings need no table of positions",
    }
)

# Generation settings that transformers 4 writes into the config.json of every family, with the types of their values.
# Values of other types are refused, because a model may use a name such as `prefix` for a setting of its architecture.
GENERATION_KEYS: dict[str, tuple[type, ...]] = {
    "prefix": (str,),
    "do_sample": (bool,),
    **dict.fromkeys(("max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences"), (int,)),
    **dict.fromkeys(("top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "typical_p"), (int, float)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "diversity_penalty"), (int, float)),
}
# Default values in transformers 4. Since transformers 4 may write all keys, such a value is not the author's choice.
GENERATION_DEFAULTS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}

# Keys with their supported values. Any other value changes what a model computes in a way that is not supported.
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "is_decoder": (False, True),  # all models of this library are decoders
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
}

# Our activation function for each name in transformers. An export has the first name of a function.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}


def json_name(names: Mapping[str, Any], value: Any, key: str) -> str:
    """Return the name of a value in `config.json`; if several names have this value, the first.

    Raises ConversionError if the value has no name. `key` is the key of `config.json`, for the error message.
    """
    for name, other in names.items():
        if other == value:
            return name
    raise ConversionError(f"{key} of config.json has no name for {value!r}. Supported names: {', '.join(names)}.")


def activation_name(activation: str) -> str:
    """Return transformers' name of an activation function. Raises ConversionError if it has no name."""
    return json_name(ACTIVATIONS, activation, "the activation")
