"""Fields of other servers that this server does not support: neutral values, and what to send instead.

Clients send all fields of the server for which they were written (OpenAI, vLLM, SGLang, llama.cpp, Ollama, OpenRouter,
Mistral). Most of these fields have neutral values, which do not change the completion, such as a sampler that is off.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def _fields(value: Any, *names: str) -> dict[str, Sequence[Any]]:
    return dict.fromkeys(names, (value,))


# Neutral values. Other values are refused, because a client that sends them expects another completion.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    # samplers that are off, or that filter no tokens
    **_fields(1, "best_of", "length_penalty", "typical_p", "typical", "tfs_z", "tfs"),
    **_fields(1, "repeat_penalty", "dynatemp_exponent", "smoothing_curve", "guidance_scale", "num_return_sequences"),
    **_fields(0, "mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier", "dynatemp_range"),
    **_fields(0, "top_a", "eta_cutoff", "epsilon_cutoff", "no_repeat_ngram_size", "min_keep", "num_beam_groups"),
    **_fields(0, "n_probs", "top_logprobs", "n_discard", "diversity_penalty", "smoothing_factor", "n_indent"),
    **_fields(0, "min_length", "penalty_alpha", "top_n_tokens"),
    **_fields(-1, "adaptive_target", "reasoning_budget", "thinking_budget_tokens"),
    "t_max_predict_ms": (-1, 0),
    "num_beams": (1,),
    "top_n_sigma": (-1, 0),
    "n_predict": (-1,),
    "n_keep": (0, -1),
    "id_slot": (-1,),
    "truncate_prompt_tokens": (0,),
    "thinking_token_budget": (-1,),
    # switches
    **_fields(True, "parallel_tool_calls", "spaces_between_special_tokens", "cache_prompt", "detokenize", "do_sample"),
    **_fields(True, "include_reasoning", "separate_reasoning", "stream_reasoning", "parse_tool_calls"),
    **_fields(False, "use_beam_search", "early_stopping", "continue_final_message", "echo", "store", "no_stop_trim"),
    **_fields(False, "prompt_logprobs", "return_tokens_as_token_ids", "add_special_tokens", "logprobs", "raw"),
    **_fields(False, "continuous_usage_stats", "return_token_strs", "disable_fallback", "return_hidden_states"),
    **_fields(False, "disable_any_whitespace", "disable_additional_properties", "return_tokens", "return_progress"),
    **_fields(False, "timings_per_token", "post_sampling_probs", "return_full_text", "safe_prompt"),
    **_fields(False, "return_routed_experts", "return_cached_tokens_details", "return_meta_info", "return_logprob"),
    **_fields(False, "details", "decoder_input_details", "watermark", "ban_eos_token", "grammar_lazy", "raw_output"),
    **_fields(False, "backend_sampling", "perf_metrics_in_response"),
    **_fields(False, "thinking_forced_open", "use_audio_in_video", "return_prompt_text", "background"),
    # empty lists, objects and strings
    **_fields([], "functions", "allowed_token_ids", "bad_words", "documents", "tools", "transforms", "plugins", "lora"),
    **_fields([], "logits_processors", "data_sources", "models", "image_data", "logprob_token_ids", "stop_regex"),
    **_fields(
        [],
        "samplers",
        "response_fields",
        "bad_words_ids",
        "force_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
    ),
    **_fields({}, "mm_processor_kwargs", "vllm_xargs", "custom_params", "options", "provider", "chat_template_kwargs"),
    **_fields({}, "reasoning", "kv_transfer_params", "usage"),
    **_fields("", "suffix", "grammar", "guided_whitespace_pattern", "format", "chat_template", "lora_path"),
    **_fields("", "adapter_id", "tool_prompt", "custom_logit_processor"),
    # strings
    "verbosity": ("medium",),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "guided_decoding_backend": ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "reasoning_format": ("auto", "deepseek"),
    "route": ("fallback",),
    "truncation": ("disabled",),
    "context_length_exceeded_behavior": ("error",),
}
# Fields that are ignored with any value: parameters of samplers that are off, ids of requests, and the time for which
# Ollama keeps a model in memory.
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
# What to send instead, for the error message. Fields of objects are named with their path.
ADVICE: Mapping[str, str] = {
    "best_of": "is not supported. Request n completions and select one",
    "suffix": "is not supported. Write it into the prompt in the format of the model",
    "prompt_logprobs": "is not supported. Use echo with logprobs in /v1/completions instead",
    "functions": "is deprecated and not supported. Use tools instead",
    "function_call": "is deprecated and not supported. Use tool_choice instead",
    "audio": "is not supported. This server generates text only",
    "documents": "is not supported. Write them into a message",
    "chat_template": "is not supported. The server uses the chat template of the model",
    "grammar": "is not supported. Use guided_grammar instead, in llguidance's dialect of Lark",
    "ebnf": "is not supported. Use guided_grammar instead, in llguidance's dialect of Lark",
    "regex": "is not supported. Use guided_regex instead",
    "json_schema": "is not supported. Use response_format instead",
    "format": "is not supported. Use response_format instead",
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "is not supported. Use max_tokens instead"),
    "n_probs": "is not supported. Use logprobs instead",
    "messages": "is a field of /v1/chat/completions. Send the request there",
    "prompt": "is not a field of chats. Use messages instead, or send the request to /v1/completions",
    "input": "is not supported. Use messages in /v1/chat/completions, or prompt in /v1/completions, instead",
    "instructions": "is not supported. Use a message with the role system instead",
    "max_output_tokens": "is not supported. Use max_tokens instead",
    "max_completion_tokens": "is a field of chats. Use max_tokens instead",
    "store": "is not supported: this server does not store answers. Remove it",
    "num_ctx": "is set when the server starts, with --max-length. Remove it",
    "repeat_penalty": "is not supported. Use repetition_penalty instead",
    "random_seed": "is not supported. Use seed instead",
    "reasoning": "is not supported. Use reasoning_effort instead",
    **dict.fromkeys(("think", "thinking", "enable_thinking"), "is not supported. Use chat_template_kwargs instead"),
    "truncate_prompt_tokens": "is not supported. Shorten the prompt",
    "continue_final_message": "is not supported. Use /v1/completions with the text to continue instead",
    **dict.fromkeys(("use_beam_search", "prediction"), "is not supported. Remove it"),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), "is not supported. Use logit_bias instead"),
    "structured_outputs.structural_tag": "is not supported. Use json, regex, choice or grammar instead",
    **dict.fromkeys(
        ("response_format.name", "response_format.strict", "response_format.description"),
        "is in the wrong place. Move it into response_format.json_schema, next to the schema",
    ),
    **dict.fromkeys(
        ("response_format.json_schema.type", "response_format.json_schema.properties"),
        "is in the wrong place. Move the JSON Schema into response_format.json_schema.schema",
    ),
    **dict.fromkeys(
        (
            *("response_format.value", "response_format.pattern", "response_format.grammar", "response_format.regex"),
            *("response_format.structures", "response_format.triggers", "response_format.format"),
        ),
        "is not supported. Use response_format with json_schema, guided_regex or guided_grammar instead",
    ),
}


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value of an unsupported field is neutral."""
    return name in IGNORED or any(_equal(value, neutral) for neutral in NEUTRAL.get(name, ()))


def _equal(value: Any, neutral: Any) -> bool:
    """Compare values as JSON does: 1 equals 1.0, but not true."""
    numbers = (int, float)
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    same_kind = type(value) is type(neutral) or (isinstance(value, numbers) and isinstance(neutral, numbers))
    return same_kind and value == neutral
