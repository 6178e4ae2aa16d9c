"""Text in, text out: a decoder with its tokenizer and its chat template, if it has one."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int, PRNGKeyArray

from eqx_decoders.context import ExecutionOptions
from eqx_decoders.core.sampling import Sampler
from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import ConfigError, ConversionError, check
from eqx_decoders.inference.generation import stream
from eqx_decoders.inference.stream_decoder import StreamDecoder, prompt_ids
from eqx_decoders.io.coordination import from_first
from eqx_decoders.io.huggingface.generation_config import parse_token_ids
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import QuantizedName, load_hf
from eqx_decoders.io.text.chat_template import (
    ChatTemplate,
    Conversation,
    check_messages,
    load_chat_template,
    up_to_end_mark,
    with_end_mark,
)
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer, with_letters
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.backend import backend_of


Prompt = str | Sequence[Mapping[str, Any]]


class Files(NamedTuple):
    """Files for a prompt: images, videos and audio."""

    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(map(len, self))


def _has_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message holds more than text."""
    contents = [one.get("content") for one in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
    """A decoder with its tokenizer and chat template.

    **Arguments:**

    - `model`, `tokenizer`: of the same vocabulary.
    - `chat`: template of conversations; None: the model only continues texts.
    - `stops`: ids that end a text in addition to the tokenizer's eos; None: the ids in the files of `model.origin`.
    """

    model: Decoder
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    stops: tuple[int, ...] | None = None

    def with_letters(self) -> "TextModel":
        """Return the same model, but names of special tokens in messages are letters (see `ChatTemplate.literal`)."""
        return dataclasses.replace(self, chat=with_letters(self.chat, self.tokenizer))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text: the tokenizer's eos and `stops`.

        If `stops` is None: the tokenizer's eos, and `eos_token_id` of `generation_config.json` and `config.json`.
        """
        origin = self.model.origin
        ends = None if origin is None else json.loads(origin.settings).get("eos_token_id")
        ids = {*self.model.generation_config.stop_ids, *parse_token_ids("config.json: eos_token_id", ends)}
        ids = ids if self.stops is None else {*self.stops}
        if self.tokenizer.eos_id is not None:
            ids.add(self.tokenizer.eos_id)
        return tuple(sorted(ids))

    def encode(self, prompt: Prompt) -> Int[np.ndarray, "length"]:
        """Return the ids of a text to be continued, or of a conversation to be answered.

        If the last message is from the assistant, it is continued.
        """
        (ids,) = self.encode_many([prompt])
        return ids

    def encode_many(
        self, prompts: Sequence[Prompt], variables: Sequence[Mapping[str, Any]] | None = None
    ) -> list[np.ndarray]:
        """Return the ids of each prompt; conversations are rendered together.

        variables: other variables of the chat template for each prompt, such as `tools`.
        """
        settings = [{}] * len(prompts) if variables is None else variables
        pairs = zip(prompts, settings, strict=True)
        conversations = iter(self._conversations([(each, more) for each, more in pairs if not isinstance(each, str)]))
        return [prompt_ids(self.tokenizer, each) if isinstance(each, str) else next(conversations) for each in prompts]

    def prepare(self, prompt: Prompt, files: Files = Files()) -> tuple[Int[np.ndarray, "length"], Media | None]:
        """Return the ids of a prompt, and its images, videos and audio; None for text alone.

        **Arguments:**

        - `prompt`: a text; without placeholders for images, videos and audio these precede it. Or
            messages, whose contents are texts or lists of parts that carry files of their own.
        - `files`: for a text.
        """
        if not files and (isinstance(prompt, str) or not _has_parts(prompt)):
            return self.encode(prompt), None
        rule = "This model takes text alone, and files are given: leave them out, or choose a model that sees and hears"
        check(self.model.config.media is not None, f"{rule}.")
        check(jax.process_count() == 1, "files beside a prompt need a run of one process.")
        origin = self.model.origin
        if origin is None or origin.directory is None:
            raise ConfigError(
                "This model has no directory with a preprocessor_config.json, which says how files are read."
            )
        from eqx_decoders.io.processors.processor import Processor

        tokenizer = self.tokenizer if isinstance(self.tokenizer, JsonTokenizer) else None
        processor = Processor.load(origin.directory, tokenizer=tokenizer)
        if self.chat is not None:
            processor = processor.with_letters(self.chat.literal)
        given_files: dict[str, Any] = {name: paths for name, paths in files._asdict().items() if paths}
        if isinstance(prompt, str):
            prompt = processor.with_placeholders(prompt, **{name: len(paths) for name, paths in given_files.items()})
        prepared = processor(prompt, **given_files)
        arrays: dict[str, Any] = dict(prepared.arrays)
        media = Media.create(self.model.config, prepared.input_ids, **arrays) if arrays else None
        return prepared.input_ids[0], media

    def _conversations(
        self, conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]]
    ) -> list[np.ndarray]:
        if not conversations:
            return []
        if self.chat is None or not isinstance(self.tokenizer, JsonTokenizer):
            raise ConfigError("This model has no chat template: give a text to be continued.")
        requests: list[Conversation] = []
        continued: list[str | None] = []  # text of the last message if the model continues the message
        for messages, variables in conversations:
            checked = check_messages(messages)
            content = checked[-1].get("content")
            by_assistant = checked[-1].get("role") == "assistant"
            continued.append(content if by_assistant and isinstance(content, str) else None)
            marked = checked if continued[-1] is None else with_end_mark(checked)
            requests.append(Conversation(marked, variables, add_generation_prompt=not by_assistant))
        ids = []
        for content, rendered in zip(continued, self.chat.render_many(requests), strict=True):
            if isinstance(rendered, ConversionError):
                raise rendered
            if content is not None:
                rendered = up_to_end_mark(rendered, content)
            ids.append(self.tokenizer.encode(rendered.text, special=True, literal=rendered.literal))
        return ids

    def write(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        sampler: Sampler,
        key: PRNGKeyArray | None = None,
        num_draft_tokens: int = 0,
        files: Files = Files(),
    ) -> Iterator[str]:
        """Yield the model's answer to a prompt, piece by piece; all pieces together are the text.

        `num_draft_tokens` as in `generate`, `files` as in `prepare`.

        Raises ConfigError for an empty prompt, or for one that fills all learned positions; a text ends where these do.
        In a run of several processes all must call this and take all pieces; the first one's prompt counts.
        """
        # Only the prompt of the first process counts: some templates insert the date, which may differ.
        own_ids, media = self.prepare(prompt, files) if jax.process_index() == 0 else (None, None)
        ids = np.asarray(from_first("prompt", None if own_ids is None else own_ids.tolist()), np.int32)
        check(len(ids) > 0, "prompt='' is empty, and the tokenizer has no token that begins a text: give some text.")
        tokens = stream(
            self.model,
            ids[None],
            max_new_tokens=self._fitting(len(ids), max_new_tokens),
            sampler=sampler,
            key=key,
            stop_ids=self.stop_ids,
            num_draft_tokens=num_draft_tokens,
            media=media,
        )
        return self._decoded(tokens)

    def _fitting(self, count: int, new: int) -> int:
        """Return the number of new tokens that fit after a prompt of so many."""
        positions = self.model.config.positions
        if not isinstance(positions, LearnedPositions):
            return new
        room = positions.max_positions
        check(count < room, f"The prompt has {count} tokens, but the model has {room} learned positions. Shorten it.")
        return min(new, room - count)

    def _decoded(self, tokens: Iterator[np.ndarray]) -> Iterator[str]:
        text, stops = StreamDecoder(self.tokenizer), self.stop_ids
        for token in tokens:
            if token[0] not in stops:
                yield text.push(token[0])
        yield text.flush()


def build_text_model(model: Decoder, tokenizer: Tokenizer, folder: Path) -> TextModel:
    """Return a model with the chat template in the directory of its tokenizer."""
    return TextModel(
        model=model,
        tokenizer=tokenizer,
        chat=load_chat_template(folder),
    )


def load_text_model(
    source: str | Path,
    dtype: DTypeLike | None = None,
    *,
    revision: str | None = None,
    quantized: QuantizedName = "expand",
    **execution: Unpack[ExecutionOptions],
) -> TextModel:
    """Load the model and the tokenizer of a directory, a GGUF file or the repository `"org/name"` (see `load_hf`).

    dtype: None for float32 on CPUs, bfloat16 elsewhere.
    """
    folder = resolve(source, revision).path
    if dtype is None:
        dtype = backend_of(jax.default_backend()).compute_dtype
    tokenizer = load_tokenizer(folder)  # first, since it fails faster than the weights
    return build_text_model(load_hf(folder, dtype, quantized=quantized, **execution), tokenizer, folder)
