"""Fields that request bodies may have. Others are refused: a client that sends them expects another answer."""

from collections.abc import Mapping, Sequence
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FORMS = _words("response_format structured_outputs guided_json guided_regex guided_choice guided_grammar")
_SAMPLING = _words(
    "temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty logit_bias seed"
)
_ANSWERS = _FORMS | _SAMPLING | _words(
    "model n max_tokens min_tokens logprobs stop stop_token_ids include_stop_str_in_output ignore_eos stream "
    "stream_options skip_special_tokens return_token_ids priority user cache_salt"
)  # fmt: skip
# About the caller and the accounts of a service: they change no answer.
_HINTS = _words("metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention")
_TEMPLATE = _words("messages add_generation_prompt chat_template_kwargs tools tool_choice reasoning_effort")

COMPLETION = _ANSWERS | _HINTS | _words("prompt echo add_special_tokens")
CHAT = _ANSWERS | _HINTS | _TEMPLATE | _words("max_completion_tokens top_logprobs modalities")
TOKENIZE = _TEMPLATE | _words("model prompt add_special_tokens")
DETOKENIZE = _words("model tokens count max_model_len")  # so that it takes the response of /tokenize
STREAM_OPTIONS = _words("include_usage include_obfuscation")
STRUCTURED_OUTPUTS = _words("json regex choice grammar json_object")
RESPONSE_FORMAT = _words("type json_schema")
JSON_SCHEMA = _words("name description schema strict")

# Values of other servers' fields that change nothing here.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "verbosity": ("medium",),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    **dict.fromkeys(("parallel_tool_calls", "spaces_between_special_tokens", "cache_prompt", "detokenize"), (True,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "continue_final_message", "echo", "store"), (False,)),
    **dict.fromkeys(("prompt_logprobs", "return_tokens_as_token_ids", "add_special_tokens"), (False,)),
    **dict.fromkeys(("continuous_usage_stats", "return_token_strs", "disable_fallback"), (False,)),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
}
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
    "grammar": "is another server's: give guided_grammar, in llguidance's dialect of Lark",
    "json_schema": "is another server's: give response_format",
    "n_predict": "is another server's: give max_tokens",
    "truncate_prompt_tokens": "is not offered: shorten the prompt",
    "continue_final_message": "is not offered: use /v1/completions with a text that ends where it is to go on",
    **dict.fromkeys(("use_beam_search", "prediction"), "is not offered: leave it out"),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), "is not offered: give logit_bias"),
    "structural_tag": "is not offered: give json, regex, choice or grammar",
}
