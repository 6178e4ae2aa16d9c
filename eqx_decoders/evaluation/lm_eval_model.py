"""`make_lm`: a model as an `LM` of lm-eval (EleutherAI's evaluation harness, extra "lm-eval"), run by an engine."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eqx_decoders.errors import ConfigError, check, missing_package
from eqx_decoders.evaluation.engine_requests import (
    CompletionRequest,
    EvaluationEngine,
    Progress,
    generate_completions,
    no_progress,
)
from eqx_decoders.evaluation.scoring import score_continuations, score_texts
from eqx_decoders.evaluation.task_run import AnswerSettings, TextSource
from eqx_decoders.evaluation.text_sets import prefix_id, with_prefix
from eqx_decoders.io.text.chat_template import up_to_end_mark, with_end_mark
from eqx_decoders.io.text.output_parsing.formats import find_reasoning_format
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.serving.engine.sampler import SamplingParams


_log = logging.getLogger("eqx_decoders")

DEFAULT_NEW_TOKENS = 256  # lm-eval's default of `max_gen_toks`

# lm-eval's names for the maximum number of generated tokens. The first one that is set is used.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_p", "top_k", "min_p", "max_length"}
# Unsupported settings are accepted with these values, which do not change the result.
NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty", "length_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("early_stopping", "output_scores", "return_dict_in_generate"), False),
    "use_cache": True,
}


class EngineMethods:
    """Implementation of the methods of lm-eval's `LM` with an engine.

    **Arguments:**

    - `text`: model, tokenizer and chat template.
    - `engine`: engine of the model.
    - `name`: name of the model, for lm-eval's caches.
    - `seed`: sampling seed for tasks with sampling.
    - `progress`: called with the number of newly finished requests.
    """

    def __init__(
        self,
        text: TextSource,
        engine: EvaluationEngine,
        *,
        name: str = "",
        seed: int = 0,
        progress: Progress = no_progress,
    ):
        super().__init__()
        self.text = text
        self.engine = engine
        self.name = name
        self.seed = seed
        self.progress = progress
        self._num_generated = 0
        self._is_templated = False  # lm-eval applies the chat template to the contexts of all requests, or of none

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a context and its continuation."""
        return self.engine.config.max_length

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would generate it."""
        pairs = [self.encode_pair(*request.args) for request in requests]
        self._warn_of_long_contexts(len(context) + len(continuation) for context, continuation in pairs)
        likelihoods = score_continuations(self.engine, pairs, self.progress)
        results = [(likelihood.logprob, likelihood.is_greedy) for likelihood in likelihoods]
        self._cache("loglikelihood", requests, results)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, computed in windows of `max_length` tokens."""
        texts = [with_prefix(self.text.tokenizer, self.encode(*request.args, begins=False)) for request in requests]
        results = score_texts(self.engine, texts, progress=self.progress)
        self._cache("loglikelihood_rolling", requests, results)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the completion of each context, up to one of the stop strings `until`."""
        prepared = [
            self._completion_request(number, *request.args)
            for number, request in enumerate(requests, self._num_generated)
        ]
        self._num_generated += len(prepared)
        self._warn_of_long_contexts(len(request.prompt) + request.max_new_tokens for request in prepared)
        truncated = [
            request._replace(prompt=request.prompt[request.max_new_tokens - self.max_length :]) for request in prepared
        ]
        completions = generate_completions(self.text.tokenizer, self.engine, truncated, self.progress)
        results = [completion.text for completion in completions]
        self._cache("generate_until", requests, results)
        return results

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation rendered by the chat template.

        Without `add_generation_prompt` the text ends with the content of the last message (the task's `gen_prefix`), so
        that the model continues it, as with `continue_final_message` in transformers.
        """
        if self.text.chat is None:
            raise ConfigError("--lm-eval-chat needs a chat template, but the model has none: leave out --lm-eval-chat.")
        self._is_templated = True
        if add_generation_prompt:
            return self.text.chat.render(list(chat_history))
        rendered = self.text.chat.rendered(with_end_mark(chat_history), add_generation_prompt=False)
        return up_to_end_mark(rendered, chat_history[-1]["content"]).text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template."""
        return self.text.chat.source if chat_template and self.text.chat is not None else None

    @property
    def tokenizer_name(self) -> str:
        """Identifier of the tokenizer and the chat template, for lm-eval's caches."""
        chat = "" if self.text.chat is None else self.text.chat.content_hash
        return "-".join(filter(None, (self.name.replace("/", "__"), self.text.tokenizer.content_hash, chat)))

    def get_model_info(self) -> dict[str, Any]:
        """Return information about the model for lm-eval's results."""
        return {"model": self.name, "model_dtype": str(self.text.model.execution.precision.compute)}

    def encode(self, string: str, *, begins: bool = True) -> list[int]:
        """Return the token ids of a text.

        `begins`: add the tokens that the tokenizer puts before a text (usually BOS). They are not added if the text
        starts with BOS, nor to a rendered conversation, as in training.
        """
        tokenizer = self.text.tokenizer
        if not isinstance(tokenizer, JsonTokenizer):
            return (self.text.encode(string) if begins else tokenizer.encode(string)).tolist()
        first = None if tokenizer.bos_id is None else tokenizer.name_of(tokenizer.bos_id)
        if begins and not self._is_templated and not (first and string.startswith(first)):
            return self.text.encode(string).tolist()
        return tokenizer.encode(string, special=True).tolist()

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode `context + continuation`, and split the token ids into a context and a continuation to be scored.

        Whitespace at the end of the context belongs to the continuation, as in lm-eval. The continuation starts at the
        first token that differs from the tokens of the context alone. If the tokenizer merges the end of the context
        and the start of the continuation into one token, that token belongs to the continuation. lm-eval differs in
        this case: it splits after as many tokens as the context has alone. A context without tokens is replaced by the
        tokenizer's bos_id or eos_id.

        Raises ConfigError if the continuation has no tokens, because it would have the best possible score, 0.
        """
        if continuation == "":
            raise ConfigError(
                f"lm-eval: continuation='' after the context {context[-60:]!r} has no text to score. Remove the empty "
                f"choice or target from the task."
            )
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if context == "":
            tokens = self.encode(continuation, begins=False)
            first = prefix_id(self.text.tokenizer)
            context_length = 1 if first is not None and tokens[:1] == [first] else 0
        else:
            tokens = self.encode(context + continuation)
            context_length = _common_length(self.encode(context), tokens)
        if context_length == len(tokens):
            raise ConfigError(
                f"lm-eval: continuation={continuation[:60]!r} after the context {context[-60:]!r} adds no token, so "
                f"there is nothing to score. Remove it from the task."
            )
        return self._with_context(tokens[:context_length], tokens[context_length:])

    def _with_context(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return a context of at least one token, and the tokens of the continuation that can be scored after it.

        An empty context is replaced by the tokenizer's bos_id or eos_id, or else by the first token of the
        continuation.
        """
        if context:
            return context, continuation
        first = prefix_id(self.text.tokenizer)
        if first is not None:
            return [first], continuation
        if len(continuation) < 2:
            raise ConfigError(
                "lm-eval: a continuation of one token cannot be scored without a context, because the tokenizer has "
                "neither bos_id nor eos_id to precede it. Use a task with contexts, or another tokenizer."
            )
        return continuation[:1], continuation[1:]

    def _completion_request(self, number: int, context: str, options: Mapping[str, Any]) -> CompletionRequest:
        """Return the request for one completion. Its prompt can be too long."""
        unknown = sorted(
            name
            for name, value in options.items()
            if name not in KNOWN and value is not None and (name not in NEUTRAL or value != NEUTRAL[name])
        )
        check(
            not unknown,
            f"generation_kwargs of the lm-eval task has {', '.join(unknown)}, which is not supported: leave it out.",
        )
        max_new_tokens = int(
            next((options[name] for name in LENGTHS if options.get(name) is not None), DEFAULT_NEW_TOKENS)
        )
        check(
            max_new_tokens < self.max_length,
            f"max_gen_toks={max_new_tokens} leaves no room for a prompt in max_length={self.max_length}: increase it.",
        )
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        does_sample = bool(options.get("do_sample", options.get("temperature", 0.0)))
        filters = {name: options[name] for name in ("top_k", "top_p", "min_p") if (options.get(name) or 0) > 0}
        temperature = float(options.get("temperature", 1.0)) if does_sample else 0.0
        seed = AnswerSettings(seed=self.seed).sampling("generate_until", number, 0).seed
        first = prefix_id(self.text.tokenizer)
        special_ids = [token for stop in until if (token := self._special_token(stop)) is not None]
        return CompletionRequest(
            prompt=tuple(self.encode(context) or ([] if first is None else [first])),
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed, **filters),
            stop=tuple(stop for stop in until if stop and self._special_token(stop) is None),
            stop_ids=tuple({*self.text.stop_ids, *special_ids}),
            reasoning=None if self.text.chat is None else find_reasoning_format(self.text.chat.source),
        )

    def _warn_of_long_contexts(self, lengths: Iterable[int]) -> None:
        """Log how many contexts are truncated. `lengths`: number of tokens of each context and its continuation."""
        truncated = [length > self.max_length for length in lengths]
        if any(truncated):
            _log.warning(
                "lm-eval: %d of %d contexts are truncated on the left, because with their continuation they have more "
                "than max_length=%d tokens. Increase --max-length, or use fewer examples (--fewshot).",
                sum(truncated),
                len(truncated),
                self.max_length,
            )

    def _special_token(self, stop: str) -> int | None:
        """Return the id of a stop string that is a special token, or None."""
        tokenizer = self.text.tokenizer
        if not isinstance(tokenizer, JsonTokenizer) or stop not in tokenizer.special_names:
            return None
        ids = tokenizer.encode(stop, special=True).tolist()
        return ids[0] if len(ids) == 1 else None

    def _cache(self, kind: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        """Add results to lm-eval's cache (`--use_cache`), if it is enabled."""
        hook: Any = getattr(self, "cache_hook", None)
        if hook is not None:
            for request, result in zip(requests, results, strict=True):
                hook.add_partial(kind, request.args, result)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def make_lm(text: TextSource, engine: EvaluationEngine, **options: Any) -> Any:
    """Return the model as lm-eval's `LM`, to be passed to `lm_eval.simple_evaluate(model=…, tasks=[…])`.

    `options`: keyword arguments of `EngineMethods`. Raises MissingPackage if lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise missing_package("lm_eval", "lm-eval") from error

    class EngineLM(EngineMethods, LM):
        """`LM` of lm-eval that runs an engine."""

    return EngineLM(text, engine, **options)
