"""Processors that convert a prompt and its image, video and audio files to the inputs of a model."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.families.gemma.audio_processor import Gemma3nAudioProcessor, Gemma4AudioProcessor
from eqx_decoders.families.gemma.processor import (
    Gemma3ImageProcessor,
    Gemma3nImageProcessor,
    Gemma4ImageProcessor,
    Gemma4VideoProcessor,
)
from eqx_decoders.families.glm.processor import Glm46VideoProcessor, GlmImageProcessor, GlmVideoProcessor
from eqx_decoders.families.idefics3.processor import SmolVLMImageProcessor, SmolVLMVideoProcessor
from eqx_decoders.families.internvl.processor import InternVLImageProcessor, InternVLVideoProcessor
from eqx_decoders.families.lfm2.processor import Lfm2VLImageProcessor
from eqx_decoders.families.llama4.processor import Llama4ImageProcessor
from eqx_decoders.families.llava.processor import LlavaImageProcessor, LlavaNextImageProcessor
from eqx_decoders.families.mistral.processor import PixtralImageProcessor
from eqx_decoders.families.phi.processor import Phi4AudioProcessor, Phi4ImageProcessor
from eqx_decoders.families.qwen.audio_processor import QwenAudioProcessor
from eqx_decoders.families.qwen.processor import Qwen3VideoProcessor, QwenImageProcessor, QwenVideoProcessor
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.processors.prompts import ARGUMENTS, PromptFiles, check_parts, expand, in_order, render
from eqx_decoders.io.text.chat_template import ChatTemplate, Rendered, load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, hidden, load_tokenizer
from eqx_decoders.media_files.base import ImageProcessor, ProcessedFile, Settings, VideoProcessor, merge_arrays
from eqx_decoders.media_files.images import image_size, name_of, open_image
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.video import open_video


AudioProcessor = QwenAudioProcessor | Gemma3nAudioProcessor | Gemma4AudioProcessor | Phi4AudioProcessor
SETTINGS_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorFamily:
    """Functions that create the processors of a model family from settings; None: the family has no such inputs."""

    images: Callable[[Settings], ImageProcessor] | None = None
    videos: Callable[[Settings], VideoProcessor] | None = None
    audio: Callable[[Settings], AudioProcessor] | None = None


# By the name of the processor class in transformers: the family, and the values of `model_type` that use this class.
FAMILIES: dict[str, tuple[ProcessorFamily, tuple[str, ...]]] = {
    "Gemma3Processor": (ProcessorFamily(images=Gemma3ImageProcessor.read), ("gemma3",)),
    "Gemma3nProcessor": (
        ProcessorFamily(images=Gemma3nImageProcessor.read, audio=Gemma3nAudioProcessor.read),
        ("gemma3n",),
    ),
    "Gemma4Processor": (
        ProcessorFamily(
            images=Gemma4ImageProcessor.read, videos=Gemma4VideoProcessor.read, audio=Gemma4AudioProcessor.read
        ),
        ("gemma4",),
    ),
    "Llama4Processor": (ProcessorFamily(images=Llama4ImageProcessor.read), ("llama4",)),
    "PixtralProcessor": (ProcessorFamily(images=PixtralImageProcessor.read), ("mistral3",)),
    "SmolVLMProcessor": (
        ProcessorFamily(images=SmolVLMImageProcessor.read, videos=SmolVLMVideoProcessor.read),
        ("smolvlm",),
    ),
    "Idefics3Processor": (ProcessorFamily(images=SmolVLMImageProcessor.read), ("idefics3",)),
    "Glm4vProcessor": (
        ProcessorFamily(images=GlmImageProcessor.read, videos=GlmVideoProcessor.read),
        ("glm4v", "glm4v_moe"),
    ),
    "Glm46VProcessor": (ProcessorFamily(images=GlmImageProcessor.read, videos=Glm46VideoProcessor.read), ("glm46v",)),
    "InternVLProcessor": (
        ProcessorFamily(images=InternVLImageProcessor.read, videos=InternVLVideoProcessor.read),
        ("internvl",),
    ),
    "Lfm2VlProcessor": (ProcessorFamily(images=Lfm2VLImageProcessor.read), ("lfm2_vl",)),
    "LlavaProcessor": (ProcessorFamily(images=LlavaImageProcessor.read), ("llava",)),
    "LlavaNextProcessor": (ProcessorFamily(images=LlavaNextImageProcessor.read), ("llava_next",)),
    "Phi4MultimodalProcessor": (
        ProcessorFamily(images=Phi4ImageProcessor.read, audio=Phi4AudioProcessor.read),
        ("phi4_multimodal",),
    ),
    "Qwen2VLProcessor": (
        ProcessorFamily(images=QwenImageProcessor.read, videos=QwenVideoProcessor.read_qwen2),
        ("qwen2_vl",),
    ),
    "Qwen2_5_VLProcessor": (
        ProcessorFamily(images=QwenImageProcessor.read, videos=QwenVideoProcessor.read),
        ("qwen2_5_vl",),
    ),
    "Qwen3VLProcessor": (
        ProcessorFamily(images=QwenImageProcessor.read, videos=Qwen3VideoProcessor.read),
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    ),
    "Qwen3OmniMoeProcessor": (
        ProcessorFamily(
            images=QwenImageProcessor.read, videos=QwenVideoProcessor.read_omni, audio=QwenAudioProcessor.read
        ),
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Inputs of a model for a prompt.

    **Arguments:**

    - `input_ids`: token ids of `text`, `[1, length]`.
    - `arrays`: arguments of `Media.create` by name; empty for a prompt without files.
    - `text`: the prompt with expanded placeholders.
    """

    input_ids: Int[np.ndarray, "1 length"]
    arrays: Mapping[str, np.ndarray]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileReader:
    """Part of a processor that decodes and converts files. It needs no tokenizer.

    **Arguments:**

    - `images`, `videos`, `audio`: processors of each kind of file; None: the model has no such inputs.
    - `limits`: limits of decoded files.
    """

    images: ImageProcessor | None = None
    videos: VideoProcessor | None = None
    audio: AudioProcessor | None = None
    limits: MediaLimits = MediaLimits()

    @classmethod
    def load_reader(cls, directory: str | Path, *, limits: MediaLimits = MediaLimits()) -> "FileReader":
        """Load the processors of files from a model's directory. Raises ConversionError for unsupported settings."""
        family, settings = read_settings(Directory(directory))
        return FileReader(
            images=None if family.images is None else family.images(settings),
            videos=None if family.videos is None else family.videos(settings),
            audio=None if family.audio is None else family.audio(settings),
            limits=limits,
        )

    @property
    def processors(self) -> dict[str, Any]:
        """Processors by kind of file, "image", "video" and "audio"; None for kinds that the model does not have."""
        return {"image": self.images, "video": self.videos, "audio": self.audio}

    def read(
        self, files: Mapping[str, Sequence[Any]], *, max_tokens: int | None = None, max_bytes: int | None = None
    ) -> dict[str, list[ProcessedFile]]:
        """Decode and convert files by kind.

        Audio clips are padded to the same length: the first clip has the arrays of all clips, the others have none.
        Raises DataError for files that cannot be decoded, that exceed `limits`, or whose total exceeds `max_tokens`
        tokens or `max_bytes` bytes of arrays.
        """
        limits = self.limits
        results: dict[str, list[ProcessedFile]] = {}
        budget = _Budget(max_tokens, max_bytes)
        for kind, processor in self.processors.items():
            self._check_files(kind, files.get(kind, ()), is_supported=processor is not None)
        self._check_total_pixels(files.get("image", ()))
        for kind, sources in files.items():
            processor = self.processors[kind]
            names = _file_names(kind, sources)
            if kind == "audio":
                if sources:
                    arrays, texts = processor.process_all(sources, limits, names)
                    results[kind] = [ProcessedFile({} if index else arrays, text) for index, text in enumerate(texts)]
                    budget.add(results[kind], names[-1])
                continue
            for source, where in zip(sources, names, strict=True):
                if kind == "image":
                    processed = processor.process(open_image(source, limits, where), limits, where)
                else:
                    with open_video(source, limits, where) as clip:
                        processed = processor.process(clip, limits)
                    limits = limits.after_video(clip.num_frames * clip.height * clip.width)
                budget.add([processed], where)
                results.setdefault(kind, []).append(processed)
        return results

    def _check_files(self, kind: str, sources: Any, *, is_supported: bool) -> None:
        name = ARGUMENTS[kind]
        max_files = self.limits.max_files
        if not isinstance(sources, Sequence) or isinstance(sources, str | bytes):
            raise DataError(f"{name}={str(sources)[:60]!r} must be a list of files.")
        if not is_supported and len(sources) > 0:
            raise DataError(f"{name} has {len(sources)} files, but this model has no {kind} inputs. Remove the files.")
        if len(sources) > max_files:
            raise DataError(
                f"{name} has {len(sources):,} files, more than MediaLimits.max_files={max_files:,}. Pass fewer files "
                "or raise the limit."
            )

    def _check_total_pixels(self, images: Sequence[Any]) -> None:
        """Raise DataError for images that have too many pixels in total, before any of them is decoded."""
        if len(images) < 2:
            return
        total = 0
        for file, where in zip(images, _file_names("image", images), strict=True):
            width, height = image_size(file, self.limits, where)
            total += width * height
            self.limits.check_total_pixels(f"images up to {where}", total)


# Special tokens of all families. Other text seldom matches.
_SPECIAL_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


class _Budget:
    """Counter of the tokens and bytes of converted files, with limits."""

    def __init__(self, max_tokens: int | None, max_bytes: int | None):
        self._limits = {"tokens": max_tokens, "bytes": max_bytes}
        self._totals = dict.fromkeys(self._limits, 0)

    def add(self, files: Sequence[ProcessedFile], where: str) -> None:
        """Add files to the totals. Raises DataError, with the last file's name `where`, if a limit is exceeded."""
        self._totals["tokens"] += sum(len(_SPECIAL_TOKEN.findall(file.text)) for file in files)
        self._totals["bytes"] += sum(array.nbytes for file in files for array in file.arrays.values())
        for unit, limit in self._limits.items():
            if limit is not None and self._totals[unit] > limit:
                raise DataError(
                    f"the files up to {where} become {self._totals[unit]:,} {unit}. The maximum is {limit}. Resize or "
                    "shorten the files, or pass fewer."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor(FileReader):
    """Processor of prompts with files: converts them to token ids and arrays, in the format of the model's training.

    `processor(prompt, images=[...])` returns `Prepared`, whose `arrays` are arguments of `Media.create`.

    **Arguments:**

    - `tokenizer`: tokenizer of the model.
    - `template`: chat template of the model; None: there is none.
    """

    tokenizer: JsonTokenizer
    template: ChatTemplate | None = None

    @classmethod
    def load(
        cls, directory: str | Path, *, tokenizer: JsonTokenizer | None = None, limits: MediaLimits = MediaLimits()
    ) -> "Processor":
        """Load the processor of a model's directory.

        Reads `processor_config.json`, `preprocessor_config.json`, `video_preprocessor_config.json`, the chat template
        and, unless `tokenizer` is given, the tokenizer. Raises ConversionError for an unknown processor class and for
        unsupported settings.
        """
        folder = Directory(directory)
        reader = cls.load_reader(directory, limits=limits)
        loaded_tokenizer = load_tokenizer(folder.path) if tokenizer is None else tokenizer
        if not isinstance(loaded_tokenizer, JsonTokenizer):
            raise ConversionError(f"{folder.path} has no tokenizer.json, which prompts with placeholders need. Add it.")
        return cls(
            tokenizer=loaded_tokenizer,
            template=load_chat_template(folder.path),
            images=reader.images,
            videos=reader.videos,
            audio=reader.audio,
            limits=reader.limits,
        )

    def __call__(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Prepared:
        """Return the token ids of a prompt and the arrays of its files.

        Raises DataError for files that cannot be decoded, and if the numbers of placeholders and files differ.

        **Arguments:**

        - `prompt`: a text with the placeholders of the model family, or messages for the chat template. The content of
            a message is a string or a list of parts (see `prompts.message`).
        - `images`, `videos`, `audio`: files (see `open_image`, `open_video`, `open_audio`), in the order of their
            placeholders.
        - `add_generation_prompt`: whether to end messages with the start of the assistant's turn.
        - `variables`: additional variables of the chat template.
        """
        files: dict[str, Sequence[Any]] = {"image": images, "video": videos, "audio": audio}
        if isinstance(prompt, str):
            return self.join(prompt, self.read(files))
        text, files = self._render(prompt, files, variables, answer=add_generation_prompt)
        return self.join(text, self.read(files))

    def join(self, text: str | Rendered, files: Mapping[str, Sequence[ProcessedFile]]) -> Prepared:
        """Expand the placeholders of a text. Returns the token ids and the arrays of all files.

        Raises DataError if the numbers of placeholders and files differ.

        **Arguments:**

        - `text`: a text with a placeholder for each file. A text that the chat template rendered may start with the
            BOS token, which is then not added again.
        - `files`: the result of `read`.
        """
        bos_token = None
        literal = ()
        if isinstance(text, Rendered):
            bos_token = None if self.template is None else self.template.variables.get("bos_token")
            literal = text.literal
            text = text.text
        processors = {kind: processor for kind, processor in self.processors.items() if processor is not None}
        prompt_files = [
            PromptFiles(kind, self.placeholder(processor, text), [file.text for file in files.get(kind, ())])
            for kind, processor in processors.items()
        ]
        visible = hidden(text, literal)
        order = in_order(visible, prompt_files)
        has_bos = bool(bos_token) and visible.startswith(str(bos_token))
        expanded, literal = expand(text, prompt_files, literal)
        remaining = {kind: iter(processed) for kind, processed in files.items() if kind != "audio"}
        arrays = merge_arrays((processors[kind], next(remaining[kind])) for kind in order if kind in remaining)
        arrays |= {name: array for file in files.get("audio", ()) for name, array in file.arrays.items()}
        encode = functools.partial(self.tokenizer.encode, special=True) if has_bos else self.tokenizer.encode_prompt
        return Prepared(input_ids=encode(expanded, literal=literal)[None], arrays=arrays, text=expanded)

    def with_special_tokens_as_text(self, literal: Sequence[str]) -> "Processor":
        """Return a copy that encodes special tokens in messages as ordinary text; see `ChatTemplate.literal`."""
        template = None if self.template is None else dataclasses.replace(self.template, literal=tuple(literal))
        return dataclasses.replace(self, template=template)

    def with_placeholders(self, text: str, *, images: int = 0, videos: int = 0, audio: int = 0) -> str:
        """Prepend placeholders for the numbers of files, for each kind that has no placeholder in the text yet."""
        placeholders = ""
        for processor, count in ((self.images, images), (self.videos, videos), (self.audio, audio)):
            if processor is not None and processor.placeholder not in text:
                placeholders += processor.placeholder * count
        return placeholders + text

    def template_for(self, messages: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return the chat template for messages that `check_parts` has checked. Raises DataError if there is none."""
        if self.template is None:
            raise DataError("messages need a chat template, but the model's directory has none. Pass a text prompt.")
        contents = (message.get("content") for message in messages)
        part_types = [part["type"] for content in contents if isinstance(content, list) for part in content]
        video_template = None if self.videos is None else self.videos.template
        if "video" in part_types and video_template is not None:
            return dataclasses.replace(self.template, source=video_template)
        return self.template

    def _render(
        self, prompt: Sequence[Any], files: Mapping[str, Sequence[Any]], variables: Mapping[str, Any], *, answer: bool
    ) -> tuple[Rendered, dict[str, Sequence[Any]]]:
        """Return the text of messages, and the files of messages and arguments."""
        messages, files_in_messages = check_parts(prompt)
        for kind, sources in files_in_messages.items():
            if len(sources) > 0 and len(files.get(kind, ())) > 0:
                raise DataError(
                    f"messages contain files in parts of type {kind!r}, and {ARGUMENTS[kind]} has files, too. Pass all "
                    "files of this type in one of the two."
                )
        text = render(self.template_for(messages), messages, variables, answer=answer)
        return text, {kind: sources or files.get(kind, ()) for kind, sources in files_in_messages.items()}

    def placeholder(self, processor: Any, text: str) -> str:
        """Return the placeholder of a processor's files in a text.

        For videos of Qwen3-VL, it includes the start and end tokens, if the text has them around the video token.
        """
        if isinstance(processor, Qwen3VideoProcessor):
            with_start_and_end = f"{processor.start_token}{processor.placeholder}{processor.end_token}"
            if with_start_and_end in text:
                return with_start_and_end
        return processor.placeholder


def _file_names(kind: str, files: Sequence[Any]) -> list[str]:
    """Return the names of files in error messages."""
    return [name_of(file, kind, index) for index, file in enumerate(files)]


def read_settings(folder: Directory) -> tuple[ProcessorFamily, Settings]:
    """Return the family and the settings of the processors of a model's directory.

    Raises ConversionError if the directory names no known processor class.
    """
    processor_config, image_config, video_config = (_read_json(folder, name) for name in SETTINGS_FILES)
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    files = (processor_config, image_config, video_config, tokenizer_config)
    class_names = [file.get("processor_class") for file in files]
    name = next((class_name for class_name in class_names if isinstance(class_name, str)), None)
    if name is None:
        by_model_type = {
            model_type: class_name for class_name, (_, model_types) in FAMILIES.items() for model_type in model_types
        }
        name = by_model_type.get(str(_read_json(folder, "config.json").get("model_type")))
    if not name:
        raise ConversionError(
            f"{folder.path} has no processor_class, and model_type in its config.json has no known processor. Add "
            f"processor_class to {SETTINGS_FILES[0]}. Known: {', '.join(FAMILIES)}."
        )
    if name not in FAMILIES:
        raise ConversionError(
            f"{folder.path / SETTINGS_FILES[0]}: processor_class={abbreviate(name)} is not known here. Known: "
            f"{', '.join(FAMILIES)}."
        )
    audio_key = "audio_processor" if "audio_processor" in processor_config else "feature_extractor"

    def fields(key: str, default: Any) -> Fields:
        content = processor_config.get(key) or default
        return Fields(content if isinstance(content, dict) else {}, str(folder.path / SETTINGS_FILES[1]))

    settings = Settings(
        images=fields("image_processor", image_config),
        videos=fields("video_processor", video_config or image_config),
        audio=fields(audio_key, image_config),
        processor=Fields(processor_config, str(folder.path / SETTINGS_FILES[0])),
        tokens=_named_tokens(tokenizer_config),
    )
    return FAMILIES[name][0], settings


def settings_content(directory: str | Path) -> dict[str, Any]:
    """Return the content of all settings on which the processor of a directory depends, except the tokenizer."""
    folder = Directory(directory)
    contents: dict[str, Any] = {name: folder.json(name) for name in SETTINGS_FILES if folder.has(name)}
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    contents["processor_class"] = tokenizer_config.get("processor_class")
    contents["model_type"] = _read_json(folder, "config.json").get("model_type")
    contents["tokens"] = _named_tokens(tokenizer_config)
    return contents


def _read_json(folder: Directory, name: str) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dictionary if the file does not exist."""
    return folder.json(name) if folder.has(name) else {}


def _named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens with a name in `tokenizer_config.json`, such as `image_token`."""
    tables = [tokenizer_config.get(key) for key in ("model_specific_special_tokens", "extra_special_tokens")]
    tokens: dict[str, str] = {}
    for table in (*tables, tokenizer_config):
        for name, token in table.items() if isinstance(table, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str) and text:
                tokens[name] = text
    return tokens
