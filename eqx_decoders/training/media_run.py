"""What a training run does for a model that sees: its data, and what it answers in the end."""

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.decoder import Decoder, DecoderConfig
from eqx_decoders.encoders.media import Media
from eqx_decoders.inference.generate import generate
from eqx_decoders.io.files import cache_directory
from eqx_decoders.io.tokenizer import Tokenizer
from eqx_decoders.sampling import Greedy
from eqx_decoders.training.batches import Batches
from eqx_decoders.training.data import DataConfig
from eqx_decoders.training.drawn_pictures import write_questions
from eqx_decoders.training.media_data import DrawnReader, MediaReader, ProcessedReader
from eqx_decoders.training.plots import plot_answers
from eqx_decoders.training.records import referred


PICTURES = 60_000  # of the data that a model gets if it sees, and none are given
ASKED = 256  # held-out questions that are answered in the end


def placeholders(config: DecoderConfig) -> tuple[int, ...]:
    """The ids of placeholders: a tokenizer that is trained here has none that is as large."""
    media = config.media
    tokens = () if media is None else (media.image_token, media.video_token, media.audio_token)
    return tuple(token for token in tokens if token is not None)


def with_pictures(data: DataConfig, config: DecoderConfig, source: Path) -> tuple[DataConfig, MediaReader | None]:
    """The data of a run, and what reads their files; a new model that sees, and is given none, gets drawn pictures.

    `source` is the directory with the processor of the model that the run starts from, if there is one.
    """
    media, own = config.media, placeholders(config)
    if media is None or not own:
        return data, None
    if source.is_dir():
        first = data.path if isinstance(data.path, str) or data.path is None else data.path[0]
        root = Path() if first is None else Path(first)
        return data, ProcessedReader(str(source), str((root.parent if root.suffix else root).absolute()), own[0])
    if data.path is not None or media.vision is None or media.image_token is None:
        return data, None
    reader = DrawnReader.of(config)
    file = write_questions(cache_directory(data.cache_dir) / "pictures" / f"{PICTURES}.jsonl", PICTURES)
    return dataclasses.replace(data, path=str(file)), reader


@dataclasses.dataclass(frozen=True)
class Answered:
    """A held-out question about a picture, and what was said.

    **Arguments:**

    - `reference`: of the picture, film or sound.
    - `question`, `answer`, `said`: in words.
    """

    reference: str
    question: str
    answer: str
    said: str

    @property
    def name(self) -> str:
        """That of the file."""
        return referred(self.reference)[1]

    @property
    def right(self) -> bool:
        """Whether both are the same."""
        return self.said == self.answer


def answers(
    model: Decoder, reader: MediaReader, tokenizer: Tokenizer, batches: Batches, most: int = ASKED
) -> list[Answered]:
    """What the model says, greedily, to the first held-out questions about one picture each."""
    store, found = batches.store, []
    held_out = np.flatnonzero(store.is_held_out(0, len(store)))
    for document in held_out[:most]:
        tokens, targets = np.asarray(store[document]), np.asarray(store.targets(document))
        media = store.media(document)
        if len(media) == 1 and targets.any():
            first = int(np.argmax(targets))
            found.append((media[0], tokens[:first].astype(np.int32), tokens[first:].astype(np.int32)))
    said = _said(model, reader, [prompt for _, prompt, _ in found], [media for media, _, _ in found], found)
    words = [
        (_text(tokenizer, prompt, reader), _text(tokenizer, answer, reader), _text(tokenizer, made, reader))
        for (_, prompt, answer), made in zip(found, said, strict=True)
    ]
    return [Answered(media, *own) for (media, _, _), own in zip(found, words, strict=True)]


def _said(
    model: Decoder, reader: MediaReader, prompts: Sequence[np.ndarray], media: Sequence[str], found: Sequence[Any]
) -> list[np.ndarray]:
    if not prompts:
        return []
    width, new = max(map(len, prompts)), max(len(answer) for _, _, answer in found)
    rows = np.zeros((len(prompts), width), np.int32)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    given = Media.create(model.config, rows, **reader.arrays(media))
    stops = tuple(sorted({int(answer[-1]) for _, _, answer in found}))
    options: dict[str, Any] = dict(max_new_tokens=new, sampler=Greedy(), stop_ids=stops, pad_id=stops[0])
    return list(np.asarray(generate(model, rows, prompt_lengths=lengths, media=given, **options)))


def _text(tokenizer: Tokenizer, tokens: np.ndarray, reader: MediaReader) -> str:
    left_out = {reader.token, tokenizer.eos_id, tokenizer.bos_id}
    return tokenizer.decode([int(token) for token in tokens if int(token) not in left_out]).strip()


def draw_answers(reader: MediaReader, found: Sequence[Answered], out_png: Path) -> None:
    """Draw the pictures, each under its question and what was said; films and sounds are left out."""
    shown = [(pixels, one) for one in found if (pixels := reader.pixels(one.reference)) is not None]
    if shown:
        titles = ["\n".join(textwrap.shorten(words, 48) for words in (one.question, one.said)) for _, one in shown]
        plot_answers([pixels for pixels, _ in shown], titles, [one.right for _, one in shown], out_png)


def describe_answers(found: Sequence[Answered]) -> str:
    """How many are right, and one of each."""
    right = [one for one in found if one.right]
    wrong = [one for one in found if not one.right]
    lines = [f"held-out pictures: {len(right)} of {len(found)} answers exact ({100 * len(right) / len(found):.1f} %)"]
    lines += [f"{one.name} {one.question} {one.said!r}" for one in right[:1]]
    lines += [f"{one.name} {one.question} {one.said!r}, not {one.answer!r}" for one in wrong[:1]]
    return "\n".join(lines)
