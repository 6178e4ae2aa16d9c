"""Fields of other servers, which no declared type has: values that change no answer, and what to send instead.

Clients and proxies send all fields of the server for which they were written (OpenAI, vLLM, SGLang, llama.cpp, Ollama,
OpenRouter, Mistral), most of them with values that change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def _each(value: Any, *names: str) -> dict[str, Sequence[Any]]:
    return dict.fromkeys(names, (value,))


# Values that change no answer here. Other values are refused: a client that sends them expects another answer.
# Numbers are compared by value: 1 is 1.0.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    # samplers that are off, or filter nothing
    **_each(1, "best_of", "length_penalty", "typical_p", "typical", "tfs_z", "tfs"),
    **_each(1, "repeat_penalty", "dynatemp_exponent", "smoothing_curve"),
    **_each(0, "mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier", "dynatemp_range", "smoothing_factor"),
    **_each(0, "top_a", "eta_cutoff", "epsilon_cutoff", "no_repeat_ngram_size", "min_keep", "num_beam_groups"),
    **_each(0, "n_probs", "top_logprobs", "t_max_predict_ms", "n_discard", "n_indent", "diversity_penalty"),
    "num_beams": (1,),
    "top_n_sigma": (-1, 0),
    "n_predict": (-1,),
    "n_keep": (0, -1),
    "id_slot": (-1,),
    "truncate_prompt_tokens": (0,),
    "thinking_token_budget": (-1,),
    # switches
    **_each(True, "parallel_tool_calls", "spaces_between_special_tokens", "cache_prompt", "detokenize", "do_sample"),
    **_each(True, "include_reasoning", "separate_reasoning", "stream_reasoning", "parse_tool_calls"),
    **_each(False, "use_beam_search", "early_stopping", "continue_final_message", "echo", "store", "no_stop_trim"),
    **_each(False, "prompt_logprobs", "return_tokens_as_token_ids", "add_special_tokens", "logprobs", "raw"),
    **_each(False, "continuous_usage_stats", "return_token_strs", "disable_fallback", "return_hidden_states"),
    **_each(False, "disable_any_whitespace", "disable_additional_properties", "return_tokens", "return_progress"),
    **_each(False, "timings_per_token", "post_sampling_probs", "return_full_text", "safe_prompt", "watermark"),
    **_each(False, "return_routed_experts", "return_cached_tokens_details", "return_meta_info", "return_logprob"),
    **_each(False, "thinking_forced_open", "use_audio_in_video", "return_prompt_text", "details", "background"),
    # empty lists, objects and texts
    **_each([], "functions", "allowed_token_ids", "bad_words", "documents", "tools", "transforms", "plugins", "lora"),
    **_each([], "logits_processors", "data_sources", "models", "image_data", "logprob_token_ids", "stop_regex"),
    **_each([], "bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    **_each({}, "mm_processor_kwargs", "vllm_xargs", "custom_params", "options", "provider", "chat_template_kwargs"),
    **_each({}, "reasoning", "kv_transfer_params", "usage"),
    **_each("", "suffix", "grammar", "guided_whitespace_pattern", "format", "chat_template", "lora_path"),
    # words
    "verbosity": ("medium",),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "guided_decoding_backend": ("auto", "guidance"),
    "reasoning_format": ("auto", "deepseek"),
    "route": ("fallback",),
    "truncation": ("disabled",),
    "context_length_exceeded_behavior": ("error",),
}
# Settings of samplers that are off, and names under which other servers file a request.
IGNORED = frozenset(
    {
        "mirostat_tau",
        "mirostat_eta",
        "xtc_threshold",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "repeat_last_n",
        "penalty_last_n",
        "penalize_nl",
        "keep_alive",
        "rid",
        "request_id",
        "extra_key",
    }
)
# What to do instead, for the error message.
ADVICE: Mapping[str, str] = {
    "best_of": "is not offered: ask for n answers and choose",
    "suffix": "is not offered: write it into the prompt as the model's training had it",
    "prompt_logprobs": "is not offered: use echo with logprobs in /v1/completions",
    "functions": "is out of date: give tools",
    "function_call": "is out of date: give tool_choice",
    "audio": "is not offered: this server writes text",
    "documents": "is not offered: write them into a message",
    "chat_template": "is not offered: messages are written as the model's own template has it",
    "grammar": "is not supported. Use guided_grammar instead, in llguidance's dialect of Lark",
    "ebnf": "is not supported. Use guided_grammar instead, in llguidance's dialect of Lark",
    "regex": "is not supported. Use guided_regex instead",
    "json_schema": "is not supported. Use response_format instead",
    "format": "is not supported. Use response_format instead",
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "is not supported. Use max_tokens instead"),
    "n_probs": "is not supported. Use logprobs instead",
    "repeat_penalty": "is not supported. Use repetition_penalty instead",
    "random_seed": "is not supported. Use seed instead",
    "reasoning": "is not supported. Use reasoning_effort instead",
    **dict.fromkeys(("think", "thinking", "enable_thinking"), "is not supported. Use chat_template_kwargs instead"),
    "truncate_prompt_tokens": "is not offered: shorten the prompt",
    "continue_final_message": "is not offered: use /v1/completions with a text that ends where it is to go on",
    **dict.fromkeys(("use_beam_search", "prediction"), "is not offered: leave it out"),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), "is not offered: give logit_bias"),
    "structural_tag": "is not offered: give json, regex, choice or grammar",
}


def changes_nothing(name: str, value: Any) -> bool:
    """Return whether a field of another server has a value that changes no answer."""
    return name in IGNORED or any(_equal(value, neutral) for neutral in NEUTRAL.get(name, ()))


def _equal(value: Any, neutral: Any) -> bool:
    numbers = (int, float)
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    same_kind = type(value) is type(neutral) or (isinstance(value, numbers) and isinstance(neutral, numbers))
    return same_kind and value == neutral
