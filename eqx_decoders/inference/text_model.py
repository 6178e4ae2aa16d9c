"""Text in, text out: a decoder with its tokenizer and chat template."""

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
from eqx_decoders.inference.stream_decoder import StreamDecoder
from eqx_decoders.io.huggingface.generation_config import parse_token_ids
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import QuantizedName, load_hf
from eqx_decoders.io.processes import broadcast_json
from eqx_decoders.io.text.chat_template import (
    ChatTemplate,
    Conversation,
    check_messages,
    load_chat_template,
    up_to_end_mark,
    with_end_mark,
)
from eqx_decoders.io.text.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    prompt_ids,
    with_special_tokens_as_text,
)
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.backend import backend_of


Prompt = str | Sequence[Mapping[str, Any]]


class Files(NamedTuple):
    """Paths of the images, videos and audio files of a prompt."""

    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(map(len, self))


def _has_media_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
    """A decoder with its tokenizer and chat template.

    **Arguments:**

    - `model`, `tokenizer`: must have the same vocabulary.
    - `chat`: chat template; None: the model only completes plain text.
    - `stops`: stop ids in addition to the tokenizer's eos; None: the stop ids in the files of `model.origin`.
    """

    model: Decoder
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    stops: tuple[int, ...] | None = None

    def with_special_tokens_as_text(self) -> "TextModel":
        """Return a copy that encodes the names of special tokens in message contents as ordinary text.

        See `ChatTemplate.literal`.
        """
        return dataclasses.replace(self, chat=with_special_tokens_as_text(self.chat, self.tokenizer))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the tokenizer's eos and `stops`.

        If `stops` is None: the tokenizer's eos, and `eos_token_id` of `generation_config.json` and `config.json`.
        """
        origin = self.model.origin
        eos_ids = None if origin is None else json.loads(origin.settings).get("eos_token_id")
        ids = {*self.model.generation_config.stop_ids, *parse_token_ids("config.json: eos_token_id", eos_ids)}
        ids = ids if self.stops is None else {*self.stops}
        if self.tokenizer.eos_id is not None:
            ids.add(self.tokenizer.eos_id)
        return tuple(sorted(ids))

    def encode(self, prompt: Prompt) -> Int[np.ndarray, "length"]:
        """Return the token ids of a prompt: a text to complete, or messages to respond to.

        If the last message is from the assistant, the model continues this message.
        """
        (ids,) = self.encode_many([prompt])
        return ids

    def encode_many(
        self, prompts: Sequence[Prompt], variables: Sequence[Mapping[str, Any]] | None = None
    ) -> list[np.ndarray]:
        """Return the token ids of each prompt. All conversations are rendered in one batch.

        `variables`: further variables of the chat template for each prompt, such as `tools`.
        """
        variables = [{}] * len(prompts) if variables is None else variables
        conversations = [
            (prompt, prompt_variables)
            for prompt, prompt_variables in zip(prompts, variables, strict=True)
            if not isinstance(prompt, str)
        ]
        conversation_ids = iter(self._encode_conversations(conversations))
        return [
            prompt_ids(self.tokenizer, prompt) if isinstance(prompt, str) else next(conversation_ids)
            for prompt in prompts
        ]

    def prepare(self, prompt: Prompt, files: Files = Files()) -> tuple[Int[np.ndarray, "length"], Media | None]:
        """Return the token ids of a prompt, and its images, videos and audio; None for a prompt of text only.

        **Arguments:**

        - `prompt`: a text, or messages. Contents of messages are texts, or lists of parts that refer to files. If a
            text has no placeholders for its files, the placeholders are inserted before the text.
        - `files`: files of a prompt that is a text.
        """
        if not files and (isinstance(prompt, str) or not _has_media_parts(prompt)):
            return self.encode(prompt), None
        check(
            self.model.config.media is not None,
            "The prompt has images, videos or audio files, but this model accepts only text. Remove the files, or use "
            "a vision-language or audio model.",
        )
        check(
            jax.process_count() == 1,
            f"Prompts with images, videos or audio files need a run of one process, but this run has "
            f"{jax.process_count()}.",
        )
        origin = self.model.origin
        if origin is None or origin.directory is None:
            raise ConfigError(
                "Images, videos and audio files are processed according to preprocessor_config.json, but this model "
                "was not loaded from a directory. Load it from a directory with this file."
            )
        from eqx_decoders.io.processors.processor import Processor

        tokenizer = self.tokenizer if isinstance(self.tokenizer, JsonTokenizer) else None
        processor = Processor.load(origin.directory, tokenizer=tokenizer)
        if self.chat is not None:
            processor = processor.with_special_tokens_as_text(self.chat.literal)
        paths_by_kind: dict[str, Any] = {kind: paths for kind, paths in files._asdict().items() if paths}
        if isinstance(prompt, str):
            num_files = {kind: len(paths) for kind, paths in paths_by_kind.items()}
            prompt = processor.with_placeholders(prompt, **num_files)
        prepared = processor(prompt, **paths_by_kind)
        arrays: dict[str, Any] = dict(prepared.arrays)
        media = Media.create(self.model.config, prepared.input_ids, **arrays) if arrays else None
        return prepared.input_ids[0], media

    def _encode_conversations(
        self, conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]]
    ) -> list[np.ndarray]:
        if not conversations:
            return []
        if self.chat is None:
            raise ConfigError("This model has no chat template. Pass a text instead of messages.")
        if not isinstance(self.tokenizer, JsonTokenizer):
            raise ConfigError(
                f"Messages need the tokenizer of a tokenizer.json (JsonTokenizer), but this model has a "
                f"{type(self.tokenizer).__name__}. Pass a text instead of messages, or add tokenizer.json."
            )
        requests: list[Conversation] = []
        continued: list[str | None] = []  # content of the last message if the model continues this message; else None
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

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        sampler: Sampler,
        key: PRNGKeyArray | int | None = None,
        num_draft_tokens: int = 0,
        files: Files = Files(),
    ) -> Iterator[str]:
        """Yield the completion of a prompt, or the response to messages, as pieces of text.

        `num_draft_tokens` as in `generate`, `files` as in `prepare`. With learned positions, generation ends at the
        last position. With several processes, all processes must call this and consume all pieces; the prompt of the
        first process is used.

        Raises ConfigError if the prompt is empty, or if it leaves no learned position for a new token.
        """
        # All processes use the ids of the first process: chat templates may insert the date, which may differ.
        local_ids, media = self.prepare(prompt, files) if jax.process_index() == 0 else (None, None)
        ids = np.asarray(broadcast_json("prompt", None if local_ids is None else local_ids.tolist()), np.int32)
        check(len(ids) > 0, "The prompt has no tokens. Pass a prompt that is not empty.")
        tokens = stream(
            self.model,
            ids[None],
            max_new_tokens=self._limit_new_tokens(len(ids), max_new_tokens),
            sampler=sampler,
            key=key,
            stop_ids=self.stop_ids,
            num_draft_tokens=num_draft_tokens,
            media=media,
        )
        return self._decode(tokens)

    def _limit_new_tokens(self, prompt_length: int, max_new_tokens: int) -> int:
        """Return `max_new_tokens`, reduced to the number of learned positions after the prompt."""
        positions = self.model.config.positions
        if not isinstance(positions, LearnedPositions):
            return max_new_tokens
        max_positions = positions.max_positions
        check(
            prompt_length < max_positions,
            f"The prompt has {prompt_length} tokens, but the model has {max_positions} learned positions. Shorten the "
            "prompt.",
        )
        return min(max_new_tokens, max_positions - prompt_length)

    def _decode(self, tokens: Iterator[np.ndarray]) -> Iterator[str]:
        decoder = StreamDecoder(self.tokenizer)
        stop_ids = self.stop_ids
        for token in tokens:
            if token[0] not in stop_ids:
                yield decoder.push(token[0])
        yield decoder.flush()


def build_text_model(model: Decoder, tokenizer: Tokenizer, folder: Path) -> TextModel:
    """Return a `TextModel` with the chat template in `folder`, the directory of the tokenizer."""
    return TextModel(model=model, tokenizer=tokenizer, chat=load_chat_template(folder))


def load_text_model(
    source: str | Path,
    dtype: DTypeLike | None = None,
    *,
    revision: str | None = None,
    quantized: QuantizedName = "expand",
    **execution: Unpack[ExecutionOptions],
) -> TextModel:
    """Load a model, its tokenizer and its chat template.

    **Arguments:**

    - `source`: a directory, a GGUF file, or a Hugging Face repository `"org/name"`; see `load_hf`.
    - `dtype`: dtype of the weights. None: float32 on CPUs, bfloat16 elsewhere.
    - `revision`, `quantized`, `execution`: as in `load_hf`.
    """
    folder = resolve(source, revision).path
    if dtype is None:
        dtype = backend_of(jax.default_backend()).compute_dtype
    tokenizer = load_tokenizer(folder)  # before the weights, so that an error is raised early
    return build_text_model(load_hf(folder, dtype, quantized=quantized, **execution), tokenizer, folder)
