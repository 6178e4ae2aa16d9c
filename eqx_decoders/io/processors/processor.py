"""From files and a prompt to what a model reads: the processors of transformers, without them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.families.fields import Fields, abbreviate
from eqx_decoders.io.chat import ChatTemplate, load_chat_template
from eqx_decoders.io.directory import Directory
from eqx_decoders.io.processors.films import open_film
from eqx_decoders.io.processors.gemma import Gemma3Pictures, Gemma4Films, Gemma4Pictures
from eqx_decoders.io.processors.gemma_sounds import Gemma4Sounds
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.llama4 import Llama4Pictures
from eqx_decoders.io.processors.pictures import name_of, open_picture
from eqx_decoders.io.processors.pixtral import PixtralPictures
from eqx_decoders.io.processors.prompts import ARGUMENTS, Kind, check_parts, expand, in_order, render
from eqx_decoders.io.processors.qwen import Qwen3Films, QwenFilms, QwenPictures
from eqx_decoders.io.processors.rules import FilmRules, PictureRules, Seen, Settings, together
from eqx_decoders.io.processors.smolvlm import SmolVLMFilms, SmolVLMPictures
from eqx_decoders.io.processors.sounds import QwenSounds
from eqx_decoders.io.tokenizer import JsonTokenizer, Span, hidden, load_tokenizer


FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How the settings of one of transformers' processors are read; None for what it does not take."""

    pictures: Callable[[Settings], PictureRules] | None = None
    films: Callable[[Settings], FilmRules] | None = None
    sounds: Callable[[Settings], QwenSounds | Gemma4Sounds] | None = None


# By the name of transformers' class, and the model types whose directories have it.
FAMILIES: dict[str, tuple[Family, tuple[str, ...]]] = {
    "Gemma3Processor": (Family(pictures=Gemma3Pictures.read), ("gemma3",)),
    "Gemma4Processor": (
        Family(pictures=Gemma4Pictures.read, films=Gemma4Films.read, sounds=Gemma4Sounds.read),
        ("gemma4",),
    ),
    "Llama4Processor": (Family(pictures=Llama4Pictures.read), ("llama4",)),
    "PixtralProcessor": (Family(pictures=PixtralPictures.read), ("mistral3",)),
    "SmolVLMProcessor": (Family(pictures=SmolVLMPictures.read, films=SmolVLMFilms.read), ("smolvlm",)),
    "Idefics3Processor": (Family(pictures=SmolVLMPictures.read), ("idefics3",)),
    "Qwen2VLProcessor": (Family(pictures=QwenPictures.read, films=QwenFilms.read_untimed), ("qwen2_vl",)),
    "Qwen2_5_VLProcessor": (Family(pictures=QwenPictures.read, films=QwenFilms.read), ("qwen2_5_vl",)),
    "Qwen3VLProcessor": (
        Family(pictures=QwenPictures.read, films=Qwen3Films.read),
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    ),
    "Qwen3OmniMoeProcessor": (
        Family(pictures=QwenPictures.read, films=QwenFilms.read_omni, sounds=QwenSounds.read),
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a prompt became.

    **Arguments:**

    - `input_ids`: tokens, `[1, length]`, in which placeholders are expanded.
    - `arrays`: arguments of `Media.create` by name; empty for a prompt of text alone.
    - `text`: what was encoded.
    """

    input_ids: Int[np.ndarray, "1 length"]
    arrays: Mapping[str, np.ndarray]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """Makes of a prompt and files the tokens and arrays that a model was trained on.

    `processor(prompt, images=[...])` gives `Prepared`, whose `arrays` are arguments of `Media.create`.

    **Arguments:**

    - `tokenizer`, `template`: of the model's directory; None for no chat template.
    - `pictures`, `films`, `sounds`: rules; None where a model takes none.
    - `limits`: bounds on what is decoded.
    """

    tokenizer: JsonTokenizer
    template: ChatTemplate | None = None
    pictures: PictureRules | None = None
    films: FilmRules | None = None
    sounds: QwenSounds | Gemma4Sounds | None = None
    limits: MediaLimits = MediaLimits()

    @classmethod
    def load(
        cls, directory: str | Path, *, tokenizer: JsonTokenizer | None = None, limits: MediaLimits = MediaLimits()
    ) -> "Processor":
        """The processor that the files of a model's directory describe.

        These are `processor_config.json`, `preprocessor_config.json`, `video_preprocessor_config.json`, and those of
        the tokenizer. Raises ConversionError where they describe none that is known here.
        """
        folder = Directory(directory)
        family, settings = read_settings(folder)
        found = load_tokenizer(folder.path) if tokenizer is None else tokenizer
        if not isinstance(found, JsonTokenizer):
            raise ConversionError(f"{folder.path} holds no tokenizer.json: prompts with placeholders need one.")
        return cls(
            tokenizer=found,
            template=load_chat_template(folder.path),
            pictures=None if family.pictures is None else family.pictures(settings),
            films=None if family.films is None else family.films(settings),
            sounds=None if family.sounds is None else family.sounds(settings),
            limits=limits,
        )

    def __call__(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        sounds: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Prepared:
        """The tokens of a prompt, and the arrays of its files.

        **Arguments:**

        - `prompt`: a text in which the family's placeholders stand for files, or messages for the chat template,
            whose contents are texts or lists of parts (see `prompts.message`).
        - `images`, `videos`, `sounds`: files (see `open_picture`, `open_film`, `open_sound`), in the order of their
            placeholders.
        - `add_generation_prompt`: end messages with what begins an answer.
        - `variables`: further ones of the chat template.

        Raises DataError for files that cannot be read, and where there are fewer or more placeholders than files.
        """
        files: dict[str, Sequence[Any]] = {"image": images, "video": videos, "audio": sounds}
        if isinstance(prompt, str):
            text, special, literal = prompt, True, []
        else:
            text, special, literal, files = self._rendered(prompt, files, variables, answer=add_generation_prompt)
        kinds: list[Kind] = []
        heard: dict[str, np.ndarray] = {}
        seen: dict[str, Iterator[tuple[Any, Seen]]] = {}
        for name, rules in (("image", self.pictures), ("video", self.films), ("audio", self.sounds)):
            given, texts = files[name], []
            self._check_files(name, given, known=rules is not None)
            if rules is None:
                continue
            if len(given) > 0 and isinstance(rules, QwenSounds | Gemma4Sounds):
                heard, texts = rules.all(given, self.limits, _names(name, given))
            elif len(given) > 0:
                read = self._seen(name, rules, given)
                texts, seen[name] = [one.text for one in read], zip([rules] * len(read), read, strict=True)
            kinds.append(Kind(name, self.placeholder(rules, text), texts))
        order = in_order(hidden(text, literal), kinds)
        text, literal = expand(text, kinds, literal)
        arrays = together(next(seen[name]) for name in order if name in seen) | heard
        encode = self.tokenizer.encode_prompt if special else functools.partial(self.tokenizer.encode, special=True)
        ids = encode(text, literal=literal)
        return Prepared(input_ids=ids[None], arrays=arrays, text=text)

    def with_letters(self, literal: Sequence[str]) -> "Processor":
        """The same, but these names of special tokens are letters in messages (see `ChatTemplate.literal`)."""
        template = None if self.template is None else dataclasses.replace(self.template, literal=tuple(literal))
        return dataclasses.replace(self, template=template)

    def with_placeholders(self, text: str, *, images: int = 0, videos: int = 0, sounds: int = 0) -> str:
        """A text with so many placeholders before it, of each kind of which it has none itself."""
        counts = ((self.pictures, images), (self.films, videos), (self.sounds, sounds))
        missing = [(rules, count) for rules, count in counts if rules is not None and rules.placeholder not in text]
        return "".join(rules.placeholder * count for rules, count in missing) + text

    def _rendered(
        self, prompt: Sequence[Any], files: Mapping[str, Sequence[Any]], variables: Mapping[str, Any], *, answer: bool
    ) -> tuple[str, bool, Sequence[Span], dict[str, Sequence[Any]]]:
        """The text of messages, whether the tokenizer adds special tokens to it, what is letters, and all files."""
        if self.template is None:
            raise DataError("messages need a chat template, and this model's directory has none: give a text.")
        messages, carried = check_parts(prompt)
        for kind, found in carried.items():
            twice = len(found) > 0 and len(files.get(kind, ())) > 0
            rule = f"and {ARGUMENTS[kind]} has files, too: give them in one place"
            check(not twice, f"parts of type {kind!r} in messages carry files, {rule}.", DataError)
        template, contents = self.template, (one.get("content") for one in messages)
        parts = [part["type"] for content in contents if isinstance(content, list) for part in content]
        own = None if self.films is None else self.films.template
        if "video" in parts and own is not None:
            template = dataclasses.replace(template, source=own)
        found = render(template, messages, variables, answer=answer)
        begin = self.template.variables.get("bos_token")
        whole = {kind: some or files.get(kind, ()) for kind, some in carried.items()}
        begun = bool(begin) and hidden(found.text, found.literal).startswith(begin or "")
        return found.text, not begun, found.literal, whole

    def _check_files(self, name: str, given: Any, *, known: bool) -> None:
        kind, most = ARGUMENTS[name], self.limits.max_files
        good = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        check(good, f"{kind}={str(given)[:60]!r} must be a list of files.", DataError)
        check(known or len(given) == 0, f"{kind} has {len(given)} files, but this model takes none.", DataError)
        rule = f"more than MediaLimits.max_files={most:,}"
        check(len(given) <= most, f"{kind} has {len(given):,} files: {rule}.", DataError)

    def _seen(self, name: str, rules: Any, files: Sequence[Any]) -> list[Seen]:
        """What becomes of all pictures, or films."""
        seen: list[Seen] = []
        for file, where in zip(files, _names(name, files), strict=True):
            if name == "image":
                seen.append(rules.one(open_picture(file, self.limits, where), self.limits, where))
            else:
                with open_film(file, self.limits, where) as clip:
                    seen.append(rules.one(clip, self.limits))
        return seen

    def placeholder(self, rules: Any, text: str) -> str:
        """What stands for a file: of Qwen3-VL's films with the tokens around it, which each frame gets for itself."""
        framed = f"{rules.begin}{rules.placeholder}{rules.end}" if isinstance(rules, Qwen3Films) else ""
        return framed if framed and framed in text else rules.placeholder


def _names(kind: str, files: Sequence[Any]) -> list[str]:
    """How errors call files."""
    word = {"image": "picture", "video": "film", "audio": "sound"}[kind]
    return [name_of(file, word, number) for number, file in enumerate(files)]


def read_settings(folder: Directory) -> tuple[Family, Settings]:
    """The family of a directory's processor, and its settings."""
    whole, pictures, films = (folder.json(name) if folder.has(name) else {} for name in FILES)
    given = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    config = folder.json("config.json") if folder.has("config.json") else {}
    names = [file.get("processor_class") for file in (whole, pictures, films, given)]
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
        ("image_processor", pictures), ("video_processor", films or pictures), ("feature_extractor", pictures),
    )]  # fmt: skip
    tables = [Fields(part if isinstance(part, dict) else {}, str(folder.path / FILES[1])) for part in parts]
    settings = Settings(
        pictures=tables[0],
        films=tables[1],
        sounds=tables[2],
        processor=Fields(whole, str(where)),
        tokens=_named_tokens(given),
    )
    return FAMILIES[name][0], settings


def _named_tokens(given: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens to which a tokenizer gives names of its own, such as `image_token`."""
    tables = [given.get(key) for key in ("model_specific_special_tokens", "extra_special_tokens")]
    found: dict[str, str] = {}
    for table in (*tables, given):
        for name, token in table.items() if isinstance(table, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str) and text:
                found[name] = text
    return found
