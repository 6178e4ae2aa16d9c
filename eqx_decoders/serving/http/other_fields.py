"""Fields of other servers, which no declared type has: values that change nothing here, and what to do instead."""

from collections.abc import Mapping, Sequence
from typing import Any


# Values that change nothing here; others are refused: a client that sends them expects another answer.
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
