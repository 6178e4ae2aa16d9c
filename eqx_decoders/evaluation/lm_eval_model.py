"""The model as lm-eval (EleutherAI's harness, extra "lm-eval") takes it: an `LM` in this process, over an engine."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eqx_decoders.errors import ConfigError, check, missing_package
from eqx_decoders.evaluation.engine_requests import (
    AnswerRequest,
    EvaluationEngine,
    Progress,
    no_progress,
    write_answers,
)
from eqx_decoders.evaluation.scoring import score_continuations, score_texts
from eqx_decoders.evaluation.task_run import AnswerSettings, TextSource
from eqx_decoders.evaluation.text_sets import prefix_id, with_prefix
from eqx_decoders.io.text.answers.formats import reasoning_format
from eqx_decoders.io.text.chat_template import up_to_end_mark, with_end_mark
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.serving.engine.sampler import SamplingParams


_log = logging.getLogger("eqx_decoders")

DEFAULT_NEW_TOKENS = 256  # lm-eval's `max_gen_toks`

# lm-eval's names of the maximum length of an answer, the first of which counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_p", "top_k", "min_p", "max_length"}
# Values of other settings that do not change the answer.
NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty", "length_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("early_stopping", "output_scores", "return_dict_in_generate"), False),
    "use_cache": True,
}


class EngineMethods:
    """Methods of lm-eval's `LM`, each a batch of requests to an engine.

    **Arguments:**

    - `text`: model, tokenizer and chat template.
    - `engine`: engine of the model.
    - `name`: name of the model, for lm-eval's caches.
    - `seed`: seed of the draws of tasks that draw.
    - `progress`: called as requests end.
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
        self.text, self.engine, self.name, self.seed, self.progress = text, engine, name, seed, progress
        self._drawn = 0
        self._is_templated = False  # lm-eval renders the contexts of all requests, or none

    @property
    def max_length(self) -> int:
        """Tokens of a context and its continuation together."""
        return self.engine.config.max_length

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether the model would have written it."""
        pairs = [self.encode_pair(*request.args) for request in requests]
        self._warn_of_long_contexts(len(context) + len(continuation) for context, continuation in pairs)
        scored = score_continuations(self.engine, pairs, self.progress)
        results = [(each.logprob, each.is_greedy) for each in scored]
        self._cache("loglikelihood", requests, results)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows as long as the engine has room."""
        texts = [with_prefix(self.text.tokenizer, self.encode(*request.args, begins=False)) for request in requests]
        results = score_texts(self.engine, texts, progress=self.progress)
        self._cache("loglikelihood_rolling", requests, results)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each context, up to one of the texts `until`."""
        answers = [self._answer_request(number, *request.args) for number, request in enumerate(requests, self._drawn)]
        self._drawn += len(answers)
        self._warn_of_long_contexts(len(answer.prompt) + answer.max_new_tokens for answer in answers)
        answers = [
            answer._replace(prompt=answer.prompt[answer.max_new_tokens - self.max_length :]) for answer in answers
        ]
        results = [answer.text for answer in write_answers(self.text.tokenizer, self.engine, answers, self.progress)]
        self._cache("generate_until", requests, results)
        return results

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text that the model reads.

        Without `add_generation_prompt` the text ends with the last message, which is the task's `gen_prefix`, and the
        model continues the message, as with `continue_final_message` in transformers.
        """
        if self.text.chat is None:
            raise ConfigError("This model has no chat template: leave out --lm-eval-chat.")
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
        """Name of the tokenizer and the chat template, for lm-eval's caches."""
        chat = "" if self.text.chat is None else self.text.chat.content_hash
        return "-".join(filter(None, (self.name.replace("/", "__"), self.text.tokenizer.content_hash, chat)))

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes about the model."""
        return {"model": self.name, "model_dtype": str(self.text.model.execution.precision.compute)}

    def encode(self, string: str, *, begins: bool = True) -> list[int]:
        """Encode a text. With `begins`, the tokens that the tokenizer puts before a text (usually bos) are added.

        They are not added if the text starts with bos, nor to a rendered conversation, as in training.
        """
        tokenizer = self.text.tokenizer
        if not isinstance(tokenizer, JsonTokenizer):
            return (self.text.encode(string) if begins else tokenizer.encode(string)).tolist()
        first = None if tokenizer.bos_id is None else tokenizer.name_of(tokenizer.bos_id)
        if begins and not self._is_templated and not (first and string.startswith(first)):
            return self.text.encode(string).tolist()
        return tokenizer.encode(string, special=True).tolist()

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode `context + continuation`, and split the tokens into a context and a continuation to be scored.

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

    def _answer_request(self, number: int, context: str, options: Mapping[str, Any]) -> AnswerRequest:
        """Return the request for one answer. Its prompt may be too long."""
        unknown = sorted(
            name
            for name, value in options.items()
            if name not in KNOWN and value is not None and (name not in NEUTRAL or value != NEUTRAL[name])
        )
        check(not unknown, f"generation_kwargs has {', '.join(unknown)}, which this model does not take: leave it out.")
        new = int(next((options[name] for name in LENGTHS if options.get(name) is not None), DEFAULT_NEW_TOKENS))
        rule = f"leaves no room for a prompt in max_length={self.max_length}: raise it"
        check(new < self.max_length, f"max_gen_toks={new} {rule}.")
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        drawn = bool(options.get("do_sample", options.get("temperature", 0.0)))
        filters = {name: options[name] for name in ("top_k", "top_p", "min_p") if (options.get(name) or 0) > 0}
        temperature = float(options.get("temperature", 1.0)) if drawn else 0.0
        seed = AnswerSettings(seed=self.seed).sampling("generate_until", number, 0).seed
        first = prefix_id(self.text.tokenizer)
        return AnswerRequest(
            prompt=tuple(self.encode(context) or ([] if first is None else [first])),
            max_new_tokens=new,
            sampling=SamplingParams(temperature=temperature, seed=seed, **filters),
            stop=tuple(stop for stop in until if stop and self._special(stop) is None),
            stop_ids=tuple(
                {*self.text.stop_ids, *(each for stop in until if (each := self._special(stop)) is not None)}
            ),
            reasoning=None if self.text.chat is None else reasoning_format(self.text.chat.source),
        )

    def _warn_of_long_contexts(self, lengths: Iterable[int]) -> None:
        """Log how many contexts lose their start. lengths: tokens of each context and what follows it."""
        cut = [length > self.max_length for length in lengths]
        if any(cut):
            _log.warning(
                "lm-eval: %d of %d contexts are cut at the start, because with their continuation or answer they have "
                "more than max_length=%d tokens. Raise --max-length, or use fewer examples (--fewshot).",
                sum(cut),
                len(cut),
                self.max_length,
            )

    def _special(self, stop: str) -> int | None:
        """Return the id of a special token with this name, which has no text; None for another text."""
        tokenizer = self.text.tokenizer
        if not isinstance(tokenizer, JsonTokenizer) or stop not in tokenizer.special_names:
            return None
        ids = tokenizer.encode(stop, special=True).tolist()
        return ids[0] if len(ids) == 1 else None

    def _cache(self, kind: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        """Hand results to lm-eval's cache (`--use_cache`), where it has one."""
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

    `options` are those of `EngineMethods`. Raises MissingPackage without lm-eval.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise missing_package("lm_eval", "lm-eval") from error

    class EngineLM(EngineMethods, LM):
        """Decoder over an engine, as lm-eval's `LM`."""

    return EngineLM(text, engine, **options)
