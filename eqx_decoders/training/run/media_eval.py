"""Data and held-out questions of a run with images, videos or audio."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.core.sampling import Greedy
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.media_documents import ProcessorReader, SyntheticReader
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import parse_reference
from eqx_decoders.data.store.token_store import TokenStore
from eqx_decoders.data.synthetic_images import write_questions
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.inference.generation import generate
from eqx_decoders.io.atomic_files import cache_directory
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.training.run.plots import plot_answers


IMAGES = 60_000  # of the data that a model gets if it sees, and none are given
QUESTIONS = 256  # held-out questions that are answered in the end


def with_images(data: DataConfig, config: DecoderConfig, source: Path) -> tuple[DataConfig, MediaReader | None]:
    """Return the data of a run and the reader of their files; a new vision model without data gets drawn images.

    `source` is the directory with the processor of the model that the run starts from, if there is one.
    """
    media, marks = config.media, placeholders(config.media)
    if media is None or not marks:
        return data, None
    if source.is_dir():
        return data, ProcessorReader(str(source), marks[0])
    if data.path is not None or media.vision is None or media.image_token is None:
        return data, None
    reader = SyntheticReader.of(config)
    file = write_questions(cache_directory(data.cache_dir) / "images" / f"{IMAGES}.jsonl", IMAGES)
    return dataclasses.replace(data, path=str(file)), reader


class Question(NamedTuple):
    """A held-out document, cut behind its last image, video or audio and before the answer.

    **Arguments:**

    - `references`: of all its files.
    - `prompt`, `answer`: tokens, `[length]`.
    """

    references: tuple[str, ...]
    prompt: np.ndarray
    answer: np.ndarray

    @classmethod
    def of(
        cls, tokens: np.ndarray, targets: np.ndarray, references: tuple[str, ...], marks: Sequence[int]
    ) -> "Question | None":
        """Cut a document with `marks` as placeholders; None if nothing behind them is trained on."""
        behind = int(np.flatnonzero(np.isin(tokens, marks))[-1]) + 1
        if not targets[behind:].any():
            return None
        first = behind + int(np.argmax(targets[behind:]))
        last = np.flatnonzero(~targets[first:])  # of a conversation only this turn
        stop = len(tokens) if len(last) == 0 else first + int(last[0])
        return cls(references, tokens[:first].astype(np.int32), tokens[first:stop].astype(np.int32))


@dataclasses.dataclass(frozen=True)
class AnsweredQuestion:
    """A held-out question about images, and the model's answer.

    **Arguments:**

    - `references`: of the images, videos and audio.
    - `question`, `answer`, `said`: in words; `said` is the model's.
    """

    references: tuple[str, ...]
    question: str
    answer: str
    said: str

    @property
    def name(self) -> str:
        """Return the names of the files."""
        return ", ".join(Path(parse_reference(one)[1]).name for one in self.references)

    @property
    def right(self) -> bool:
        """Return whether the model gave the expected answer."""
        return self.said == self.answer


def answers(
    model: Decoder,
    reader: MediaReader,
    tokenizer: Tokenizer,
    stores: Iterable[TokenStore],
    *,
    most_new: int,
    at_once: int,
    most: int = QUESTIONS,
) -> list[AnsweredQuestion]:
    """Answer the first held-out questions about images greedily; the list is empty where there are none.

    **Arguments:**

    - `stores`: the tokens of the held-out sets.
    - `most_new`: tokens of an answer: of a longer one only the first are generated and compared.
    - `at_once`: tokens, with those of the answers, that are computed together.
    - `most`: number of questions.
    """
    marks = placeholders(model.config.media)
    questions = list(itertools.islice(_questions(stores, marks), most))
    questions = [one._replace(answer=one.answer[:most_new]) for one in questions]
    left_out = {*marks, tokenizer.eos_id, tokenizer.bos_id}

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode([int(token) for token in tokens if int(token) not in left_out]).strip()

    generated = _generate_answers(model, reader, questions, tokenizer.eos_id, at_once)
    return [
        AnsweredQuestion(one.references, text(one.prompt), text(one.answer), text(tokens))
        for one, tokens in zip(questions, generated, strict=True)
    ]


def _questions(stores: Iterable[TokenStore], marks: Sequence[int]) -> Iterator[Question]:
    for store in stores:
        for start, stop in store.ranges():
            for document in start + np.flatnonzero(store.is_held_out(start, stop) & store.has_media(start, stop)):
                tokens, targets = np.asarray(store[document]), np.asarray(store.targets(document))
                question = Question.of(tokens, targets, store.media(document), marks)
                if question is not None:
                    yield question


def _generate_answers(
    model: Decoder, reader: MediaReader, questions: Sequence[Question], eos: int | None, at_once: int
) -> Iterator[np.ndarray]:
    """Generate the tokens of each answer, for as many questions at a time as `at_once` allows."""
    if not questions:
        return
    width, new = (max(len(one[part]) for one in questions) for part in (1, 2))
    count = min(len(questions), max(1, at_once // (width + new)))
    ends = {int(one.answer[-1]) for one in questions}
    stops = tuple(ends) if len(ends) == 1 else () if eos is None else (eos,)
    options: dict[str, Any] = dict(max_new_tokens=new, sampler=Greedy(), stop_ids=stops, pad_id=(*stops, 0)[0])
    for start in range(0, len(questions), count):
        some = [*questions[start : start + count]]
        some += some[:1] * (count - len(some))  # so that all are one program
        rows = np.zeros((count, width), np.int32)
        for row, one in zip(rows, some, strict=True):
            row[: len(one.prompt)] = one.prompt
        references = [reference for one in some for reference in one.references]
        media = Media.create(model.config, rows, **reader.arrays(references))
        lengths = np.asarray([len(one.prompt) for one in some], np.int32)
        tokens = np.asarray(generate(model, rows, prompt_lengths=lengths, media=media, **options))
        yield from itertools.starmap(_cut_answer, zip(tokens, questions[start : start + count], strict=False))


def _cut_answer(tokens: np.ndarray, one: Question) -> np.ndarray:
    """Cut generated tokens at the end of the expected answer, or at the first token with which answers end."""
    if np.array_equal(tokens[: len(one.answer)], one.answer):
        return one.answer
    ends = np.flatnonzero(tokens == one.answer[-1])
    return tokens[: int(ends[0]) + 1] if len(ends) else tokens


def draw_answers(reader: MediaReader, answered: Sequence[AnsweredQuestion], out_png: Path) -> None:
    """Draw the last image of each question under its text and the answer; videos and audio are left out."""
    drawn = ((map(reader.pixels, reversed(one.references)), one) for one in answered)
    images = ((next((each for each in pixels if each is not None), None), one) for pixels, one in drawn)
    shown = [(pixels, one) for pixels, one in images if pixels is not None]
    if shown:
        titles = ["\n".join(textwrap.shorten(words, 48) for words in (one.question, one.said)) for _, one in shown]
        plot_answers([pixels for pixels, _ in shown], titles, [one.right for _, one in shown], out_png)


def describe_answers(answered: Sequence[AnsweredQuestion]) -> str:
    """Describe the share of right answers, with an example of a right and a wrong one; there is at least one."""
    right = [one for one in answered if one.right]
    wrong = [one for one in answered if not one.right]
    lines = [
        f"held-out images: {len(right)} of {len(answered)} answers exact ({100 * len(right) / len(answered):.1f} %)"
    ]
    lines += [f"{one.name} {one.question} {one.said!r}" for one in right[:1]]
    lines += [f"{one.name} {one.question} {one.said!r}, not {one.answer!r}" for one in wrong[:1]]
    return "\n".join(lines)
