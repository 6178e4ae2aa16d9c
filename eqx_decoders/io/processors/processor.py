"""Processors: from files and a prompt to a model's inputs, without transformers."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.families.gemma.audio_processor import Gemma3nAudio, Gemma4Audio
from eqx_decoders.families.gemma.processor import Gemma3Images, Gemma3nImages, Gemma4Images, Gemma4Videos
from eqx_decoders.families.glm.processor import Glm46Videos, GlmImages, GlmVideos
from eqx_decoders.families.idefics3.processor import SmolVLMImages, SmolVLMVideos
from eqx_decoders.families.internvl.processor import InternVLImages, InternVLVideos
from eqx_decoders.families.lfm2.processor import Lfm2VLImages
from eqx_decoders.families.llama4.processor import Llama4Images
from eqx_decoders.families.llava.processor import LlavaImages, LlavaNextImages
from eqx_decoders.families.mistral.processor import PixtralImages
from eqx_decoders.families.phi.processor import Phi4Audio, Phi4Images
from eqx_decoders.families.qwen.audio_processor import QwenAudio
from eqx_decoders.families.qwen.processor import Qwen3Videos, QwenImages, QwenVideos
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.processors.prompts import ARGUMENTS, PromptFiles, check_parts, expand, in_order, render
from eqx_decoders.io.text.chat_template import ChatTemplate, Rendered, load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, hidden, load_tokenizer
from eqx_decoders.media_files.base import ImageRules, ProcessedFile, Settings, VideoRules, merge_arrays
from eqx_decoders.media_files.images import image_size, name_of, open_image
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.video import open_video


AudioRules = QwenAudio | Gemma3nAudio | Gemma4Audio | Phi4Audio
FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorFamily:
    """Readers of the settings of one of transformers' processors; None for kinds that it does not take."""

    images: Callable[[Settings], ImageRules] | None = None
    videos: Callable[[Settings], VideoRules] | None = None
    audio: Callable[[Settings], AudioRules] | None = None


# By the name of transformers' class, and the model types whose directories have it.
FAMILIES: dict[str, tuple[ProcessorFamily, tuple[str, ...]]] = {
    "Gemma3Processor": (ProcessorFamily(images=Gemma3Images.read), ("gemma3",)),
    "Gemma3nProcessor": (ProcessorFamily(images=Gemma3nImages.read, audio=Gemma3nAudio.read), ("gemma3n",)),
    "Gemma4Processor": (
        ProcessorFamily(images=Gemma4Images.read, videos=Gemma4Videos.read, audio=Gemma4Audio.read),
        ("gemma4",),
    ),
    "Llama4Processor": (ProcessorFamily(images=Llama4Images.read), ("llama4",)),
    "PixtralProcessor": (ProcessorFamily(images=PixtralImages.read), ("mistral3",)),
    "SmolVLMProcessor": (ProcessorFamily(images=SmolVLMImages.read, videos=SmolVLMVideos.read), ("smolvlm",)),
    "Idefics3Processor": (ProcessorFamily(images=SmolVLMImages.read), ("idefics3",)),
    "Glm4vProcessor": (ProcessorFamily(images=GlmImages.read, videos=GlmVideos.read), ("glm4v", "glm4v_moe")),
    "Glm46VProcessor": (ProcessorFamily(images=GlmImages.read, videos=Glm46Videos.read), ("glm46v",)),
    "InternVLProcessor": (ProcessorFamily(images=InternVLImages.read, videos=InternVLVideos.read), ("internvl",)),
    "Lfm2VlProcessor": (ProcessorFamily(images=Lfm2VLImages.read), ("lfm2_vl",)),
    "LlavaProcessor": (ProcessorFamily(images=LlavaImages.read), ("llava",)),
    "LlavaNextProcessor": (ProcessorFamily(images=LlavaNextImages.read), ("llava_next",)),
    "Phi4MultimodalProcessor": (
        ProcessorFamily(images=Phi4Images.read, audio=Phi4Audio.read),
        ("phi4_multimodal",),
    ),
    "Qwen2VLProcessor": (ProcessorFamily(images=QwenImages.read, videos=QwenVideos.read_untimed), ("qwen2_vl",)),
    "Qwen2_5_VLProcessor": (ProcessorFamily(images=QwenImages.read, videos=QwenVideos.read), ("qwen2_5_vl",)),
    "Qwen3VLProcessor": (
        ProcessorFamily(images=QwenImages.read, videos=Qwen3Videos.read),
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    ),
    "Qwen3OmniMoeProcessor": (
        ProcessorFamily(images=QwenImages.read, videos=QwenVideos.read_omni, audio=QwenAudio.read),
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Inputs of a model for a prompt.

    **Arguments:**

    - `input_ids`: tokens, `[1, length]`, in which placeholders are expanded.
    - `arrays`: arguments of `Media.create` by name; empty for a prompt of text alone.
    - `text`: the text with expanded placeholders.
    """

    input_ids: Int[np.ndarray, "1 length"]
    arrays: Mapping[str, np.ndarray]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileReader:
    """Decoder and converter of files: the costly half of a processor, which needs no tokenizer.

    **Arguments:**

    - `images`, `videos`, `audio`: rules; None where a model takes none.
    - `limits`: bounds on decoded files.
    """

    images: ImageRules | None = None
    videos: VideoRules | None = None
    audio: AudioRules | None = None
    limits: MediaLimits = MediaLimits()

    @classmethod
    def load_rules(cls, directory: str | Path, *, limits: MediaLimits = MediaLimits()) -> "FileReader":
        """Read the rules for files from a model's directory. Raises ConversionError."""
        family, settings = read_settings(Directory(directory))
        return FileReader(
            images=None if family.images is None else family.images(settings),
            videos=None if family.videos is None else family.videos(settings),
            audio=None if family.audio is None else family.audio(settings),
            limits=limits,
        )

    @property
    def rules(self) -> dict[str, Any]:
        """Rules by kind of file: `"image"`, `"video"` and `"audio"`."""
        return {"image": self.images, "video": self.videos, "audio": self.audio}

    def read(
        self, files: Mapping[str, Sequence[Any]], *, max_tokens: int | None = None, max_bytes: int | None = None
    ) -> dict[str, list[ProcessedFile]]:
        """Decode and convert files by kind.

        The arrays of all audio clips, which are padded to one length, are those of the first clip. Raises DataError for
        files that cannot be read, that `limits` do not allow, or that become more than `max_tokens` tokens, or
        `max_bytes`, together.
        """
        limits, results, budget = self.limits, dict[str, list[ProcessedFile]](), _Budget(max_tokens, max_bytes)
        for kind, rules in self.rules.items():
            self._check_files(kind, files.get(kind, ()), known=rules is not None)
        self._check_sizes(files.get("image", ()))
        for kind, sources in files.items():
            rules, names = self.rules[kind], _names(kind, sources)
            if kind == "audio" and sources:
                arrays, texts = rules.process_all(sources, limits, names)
                results[kind] = [ProcessedFile({} if number else arrays, text) for number, text in enumerate(texts)]
                budget.take(results[kind], names[-1])
            for file, where in zip(sources, names, strict=True) if kind != "audio" else ():
                if kind == "image":
                    processed = rules.process(open_image(file, limits, where), limits, where)
                else:
                    with open_video(file, limits, where) as clip:
                        processed = rules.process(clip, limits)
                    limits = limits.without(clip.count * clip.height * clip.width)
                budget.take([processed], where)
                results.setdefault(kind, []).append(processed)
        return results

    def _check_files(self, kind: str, sources: Any, *, known: bool) -> None:
        name, most = ARGUMENTS[kind], self.limits.max_files
        good = isinstance(sources, Sequence) and not isinstance(sources, str | bytes)
        check(good, f"{name}={str(sources)[:60]!r} must be a list of files.", DataError)
        check(known or len(sources) == 0, f"{name} has {len(sources)} files, but this model takes none.", DataError)
        rule = f"more than MediaLimits.max_files={most:,}"
        check(len(sources) <= most, f"{name} has {len(sources):,} files: {rule}.", DataError)

    def _check_sizes(self, images: Sequence[Any]) -> None:
        """Raise DataError for images that have too many pixels together, before one of them is decoded."""
        total = 0
        for file, where in zip(images, _names("image", images), strict=True) if len(images) > 1 else ():
            width, height = image_size(file, self.limits, where)
            total += width * height
            self.limits.check_together(f"images up to {where}", total)


_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # the special tokens of all families, and little else


class _Budget:
    """Counter of the tokens and bytes of converted files, with limits."""

    def __init__(self, max_tokens: int | None, max_bytes: int | None):
        self._most = {"tokens": max_tokens, "bytes": max_bytes}
        self._count = dict.fromkeys(self._most, 0)

    def take(self, files: Sequence[ProcessedFile], where: str) -> None:
        """Count files; raise DataError where a limit is exceeded."""
        self._count["tokens"] += sum(len(_TOKEN.findall(one.text)) for one in files)
        self._count["bytes"] += sum(array.nbytes for one in files for array in one.arrays.values())
        for unit, most in self._most.items():
            message = f"{where}: the files up to it become {self._count[unit]:,} {unit}"
            good = most is None or self._count[unit] <= most
            check(good, f"{message}, and {most} are taken: make them smaller, or give fewer.", DataError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor(FileReader):
    """Converter of prompts and files to the tokens and arrays that a model was trained on.

    `processor(prompt, images=[...])` returns `Prepared`, whose `arrays` are arguments of `Media.create`.

    **Arguments:**

    - `tokenizer`, `template`: of the model's directory; None for no chat template.
    """

    tokenizer: JsonTokenizer
    template: ChatTemplate | None = None

    @classmethod
    def load(
        cls, directory: str | Path, *, tokenizer: JsonTokenizer | None = None, limits: MediaLimits = MediaLimits()
    ) -> "Processor":
        """Load the processor that the files of a model's directory describe.

        The files are `processor_config.json`, `preprocessor_config.json`, `video_preprocessor_config.json`, and those
        of the tokenizer. Raises ConversionError where they describe no known processor.
        """
        folder = Directory(directory)
        reader = cls.load_rules(directory, limits=limits)
        tokenizer_found = load_tokenizer(folder.path) if tokenizer is None else tokenizer
        if not isinstance(tokenizer_found, JsonTokenizer):
            raise ConversionError(f"{folder.path} holds no tokenizer.json: prompts with placeholders need one.")
        rules = {field.name: getattr(reader, field.name) for field in dataclasses.fields(reader)}
        return cls(tokenizer=tokenizer_found, template=load_chat_template(folder.path), **rules)

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
        """Return the tokens of a prompt, and the arrays of its files.

        **Arguments:**

        - `prompt`: a text in which the family's placeholders stand for files, or messages for the chat template,
            whose contents are texts or lists of parts (see `prompts.message`).
        - `images`, `videos`, `audio`: files (see `open_image`, `open_video`, `open_audio`), in the order of their
            placeholders.
        - `add_generation_prompt`: end messages with the beginning of an answer.
        - `variables`: additional variables of the chat template.

        Raises DataError for files that cannot be read, and where there are fewer or more placeholders than files.
        """
        files: dict[str, Sequence[Any]] = {"image": images, "video": videos, "audio": audio}
        if isinstance(prompt, str):
            return self.join(prompt, self.read(files))
        text, files = self._rendered(prompt, files, variables, answer=add_generation_prompt)
        return self.join(text, self.read(files))

    def join(self, text: str | Rendered, read: Mapping[str, Sequence[ProcessedFile]]) -> Prepared:
        """Return the tokens of a text whose placeholders stand for files, and the arrays of these.

        **Arguments:**

        - `text`: a text with a placeholder for each file; one that the chat template rendered may begin with the token
            that begins a text.
        - `read`: the result of `read`.

        Raises DataError where there are fewer or more placeholders than files.
        """
        begin, literal = None, ()
        if isinstance(text, Rendered):
            begin = None if self.template is None else self.template.variables.get("bos_token")
            text, literal = text.text, text.literal
        known = {kind: rules for kind, rules in self.rules.items() if rules is not None}
        kinds = [
            PromptFiles(kind, self.placeholder(rules, text), [one.text for one in read.get(kind, ())])
            for kind, rules in known.items()
        ]
        left = {kind: iter(files) for kind, files in read.items() if kind != "audio"}
        order, begun = (
            in_order(hidden(text, literal), kinds),
            bool(begin) and hidden(text, literal).startswith(str(begin)),
        )
        whole, literal = expand(text, kinds, literal)
        arrays = merge_arrays((known[kind], next(left[kind])) for kind in order if kind in left)
        arrays |= {name: array for one in read.get("audio", ()) for name, array in one.arrays.items()}
        encode = functools.partial(self.tokenizer.encode, special=True) if begun else self.tokenizer.encode_prompt
        return Prepared(input_ids=encode(whole, literal=literal)[None], arrays=arrays, text=whole)

    def with_special_tokens_as_text(self, literal: Sequence[str]) -> "Processor":
        """Return a copy with names of special tokens in messages as ordinary text, see `ChatTemplate.literal`."""
        template = None if self.template is None else dataclasses.replace(self.template, literal=tuple(literal))
        return dataclasses.replace(self, template=template)

    def with_placeholders(self, text: str, *, images: int = 0, videos: int = 0, audio: int = 0) -> str:
        """Return a text with placeholders before it, for each kind of which it has none."""
        counts = ((self.images, images), (self.videos, videos), (self.audio, audio))
        missing = [(rules, count) for rules, count in counts if rules is not None and rules.placeholder not in text]
        return "".join(rules.placeholder * count for rules, count in missing) + text

    def template_for(self, messages: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return the chat template for messages that `check_parts` has checked; DataError for none."""
        if self.template is None:
            raise DataError("messages need a chat template, and this model's directory has none: give a text.")
        contents = (one.get("content") for one in messages)
        parts = [part["type"] for content in contents if isinstance(content, list) for part in content]
        video_template = None if self.videos is None else self.videos.template
        return (
            dataclasses.replace(self.template, source=video_template)
            if "video" in parts and video_template is not None
            else self.template
        )

    def _rendered(
        self, prompt: Sequence[Any], files: Mapping[str, Sequence[Any]], variables: Mapping[str, Any], *, answer: bool
    ) -> tuple[Rendered, dict[str, Sequence[Any]]]:
        """Return the text of messages, and all files."""
        messages, files_in_messages = check_parts(prompt)
        for kind, sources in files_in_messages.items():
            twice = len(sources) > 0 and len(files.get(kind, ())) > 0
            rule = f"and {ARGUMENTS[kind]} has files, too: give them in one place"
            check(not twice, f"parts of type {kind!r} in messages carry files, {rule}.", DataError)
        text = render(self.template_for(messages), messages, variables, answer=answer)
        return text, {kind: sources or files.get(kind, ()) for kind, sources in files_in_messages.items()}

    def placeholder(self, rules: Any, text: str) -> str:
        """Return the placeholder of a file: for Qwen3-VL's videos with the tokens around it."""
        framed = f"{rules.begin}{rules.placeholder}{rules.end}" if isinstance(rules, Qwen3Videos) else ""
        return framed if framed and framed in text else rules.placeholder


def _names(kind: str, files: Sequence[Any]) -> list[str]:
    """Return the names of files in errors."""
    return [name_of(file, kind, number) for number, file in enumerate(files)]


def read_settings(folder: Directory) -> tuple[ProcessorFamily, Settings]:
    """Return the family of a directory's processor, and its settings."""
    whole, images, videos = (folder.json(name) if folder.has(name) else {} for name in FILES)
    tokenizer_config = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    config = folder.json("config.json") if folder.has("config.json") else {}
    names = [file.get("processor_class") for file in (whole, images, videos, tokenizer_config)]
    name = next((one for one in names if isinstance(one, str)), None)
    if name is None:
        kinds = {model_type: one for one, (_, types) in FAMILIES.items() for model_type in types}
        name = kinds.get(str(config.get("model_type")))
    where = folder.path / FILES[0]
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        says = f"processor_class={abbreviate(name)}" if name else f"{folder.path} names no processor_class, which"
        raise ConversionError(f"{where}: {says} is not known here. Known: {known}.")
    parts = [whole.get(key) or other for key, other in (
        ("image_processor", images), ("video_processor", videos or images),
        ("audio_processor" if "audio_processor" in whole else "feature_extractor", images),
    )]  # fmt: skip
    tables = [Fields(part if isinstance(part, dict) else {}, str(folder.path / FILES[1])) for part in parts]
    settings = Settings(
        images=tables[0],
        videos=tables[1],
        audio=tables[2],
        processor=Fields(whole, str(where)),
        tokens=_named_tokens(tokenizer_config),
    )
    return FAMILIES[name][0], settings


def settings_content(directory: str | Path) -> dict[str, Any]:
    """Return all settings of a directory's processor but the tokenizer's own, for comparison."""
    folder = Directory(directory)
    contents = {name: folder.json(name) for name in FILES if folder.has(name)}
    tokenizer_config = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    config = folder.json("config.json") if folder.has("config.json") else {}
    names = {"processor_class": tokenizer_config.get("processor_class"), "model_type": config.get("model_type")}
    return contents | names | {"tokens": _named_tokens(tokenizer_config)}


def _named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer gives names of their own, such as `image_token`."""
    tables = [tokenizer_config.get(key) for key in ("model_specific_special_tokens", "extra_special_tokens")]
    tokens: dict[str, str] = {}
    for table in (*tables, tokenizer_config):
        for name, token in table.items() if isinstance(table, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str) and text:
                tokens[name] = text
    return tokens
