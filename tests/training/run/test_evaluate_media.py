"""Test image files in runs: paths, cached tokens, held-out documents, and questions about images."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset, make_held_out_sets, training_texts
from eqx_decoders.data.media_documents import ProcessorReader
from eqx_decoders.data.sources.data_files import RemoteFile
from eqx_decoders.data.sources.documents import parse_reference
from eqx_decoders.data.sources.sources import folder_of
from eqx_decoders.errors import DataError
from eqx_decoders.io.huggingface.load import abstract_hf, read_config
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.training.run import evaluate as module
from eqx_decoders.training.run.evaluate import Question, answer_questions, describe_answers, plot_answers
from eqx_decoders.training.run.preview import describe_data
from eqx_decoders.training.settings.run import TrainConfig
from tests.commands import call
from tests.encoders.directories import save_image
from tests.encoders.test_audio_files import IMAGE, VIDEO, directory
from tests.errors import assert_names, refused
from tests.training.run.test_media_kinds import TEMPLATE


SEEN = "<|image_pad|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = directory(tmp_path_factory.mktemp("seeing") / "model", "qwen2_5_vl", "Qwen2_5_VLProcessor")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write(path: Path, *records: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def conversation(number: int, *names: str, text: str = "w2") -> dict:
    words = "".join(f"{SEEN} " for _ in names) + f"{text}{number % 10} "
    return {"prompt": words, "completion": f"w{30 + number % 20}", **({"images": list(names)} if names else {})}


def opened(model: Path, run: Path, *paths, make=make_dataset, held_out=0.0, **settings):
    """Return the batches of a data set and the reader of its images."""
    reader = ProcessorReader(str(model), IMAGE)
    data = DataConfig(
        path=[str(path) for path in paths],
        held_out_fraction=held_out,
        **{"seq_len": 160, "batch_size": 2, "cache_dir": str(run.parent / "cache")} | settings,
    )
    options = {"template": load_chat_template(model), "media": (read_config(model)[0], reader)}
    return make(data, load_tokenizer(model), folder=run, **options), reader


def placeholders_of(store) -> list[int]:
    return [int((store[document] == IMAGE).sum()) for document in range(len(store))]


@pytest.mark.slow(fast=("files",))
@pytest.mark.parametrize("form", ["files", "directory", "pattern"])
def test_relative_image_paths_start_at_the_data_file(model, tmp_path, form):
    """Three files have the same content and image names, in directories with dots and behind a symbolic link."""
    root = tmp_path / "data.v2"
    for folder, width in (("a", 8), ("b.1", 16), ("deep/er", 24)):
        write(root / folder / "x.jsonl", conversation(1, "1.png"))
        save_image(root / folder / "1.png", width, 8)
    (tmp_path / "link").symlink_to("data.v2")
    paths = {
        "files": [tmp_path / "link" / one / "x.jsonl" for one in ("a", "b.1", "deep/er")],
        "directory": [tmp_path / "link"],
        "pattern": [root / "*" / "x.jsonl", root / "**" / "er" / "x.jsonl"],
    }
    batches, reader = opened(model, tmp_path / "run", *paths[form])
    with batches:
        assert placeholders_of(batches.store) == [4, 8, 12]
        folders = [Path(parse_reference(batches.store.media(document)[0])[1]).parent for document in range(3)]
        assert folders == [root / one for one in ("a", "b.1", "deep/er")]
        assert (
            len({float(batches.store.shard(number).split_hashes[0]) for number in range(3)}) == 1
        )  # the held-out split depends on a hash of the content
        assert [reader.pixels(batches.store.media(document)[0]).shape[1] for document in range(3)] == [8, 16, 24]
        assert next(batches).media.index.shape == (2, 160)
    names = [batches.store.name(document).split(" of ")[0] for document in range(3)]
    assert names == ["document 1"] * 3


def test_relative_image_paths_in_remote_files_are_refused(model, tmp_path):
    assert folder_of(RemoteFile("gs://bucket/x.jsonl")) is None and folder_of(tmp_path) == tmp_path.resolve()
    reader = ProcessorReader(str(model), IMAGE)
    with refused(DataError, "x.jsonl:3", "'1.png'"):
        reader.locate(["1.png"], None, "x.jsonl:3")
    given = [str(tmp_path / "1.png"), "https://x.org/1.png"]
    assert reader.locate(given, None, "x") == tuple(given)


@pytest.mark.slow
def test_equal_processors_share_cached_tokens(model, tmp_path):
    """The directories may differ. Different settings give different tokens."""
    save_image(tmp_path / "1.png", 8, 8)
    data = write(tmp_path / "x.jsonl", *(conversation(number, "1.png") for number in range(3)))
    copy = shutil.copytree(model, tmp_path / "copy")
    rules = copy / "preprocessor_config.json"
    rules.write_text(json.dumps(json.loads(rules.read_text()), indent=4))

    def kept() -> int:
        return len(list((tmp_path / "cache" / "tokens").glob("*/*.tokens")))

    for number, (folder, tokens, shards) in enumerate(((model, 4, 1), (copy, 4, 1), (copy, 64, 2), (model, 4, 2))):
        if tokens == 64:
            rules.write_text(json.dumps(json.loads(rules.read_text()) | {"min_pixels": 1024}))
        batches, _ = opened(folder, tmp_path / f"run{number}", data)
        with batches:
            assert placeholders_of(batches.store) == [tokens] * 3 and kept() == shards
            next(batches)


@pytest.mark.slow(fast=("no-targets",))
@pytest.mark.parametrize("kind", ["images", "parts", "no-targets"])
def test_small_corpora_have_a_held_out_document(model, tmp_path, kind):
    """The document with the smallest hash is held out, independently of its images and of dropped documents."""
    save_image(tmp_path / "1.png", 8, 8)
    part = [{"type": "image", "image": "1.png"}, {"type": "text", "text": "w20"}]
    for number in range(3 if kind == "parts" else 6):
        records: list[dict] = [conversation(10 * number + one, "1.png") for one in range(8)]
        if kind == "parts":
            answers = [{"role": "assistant", "content": f"w{30 + one} w{10 + number}"} for one in range(8)]
            records = [{"messages": [{"role": "user", "content": part}, answer]} for answer in answers]
        elif kind == "no-targets":
            records = [{"prompt": f"w{one} w{number} ", "completion": "w3" * (one > 5)} for one in range(8)]
        data = write(tmp_path / f"{number}.jsonl", *records)
        sets, _ = opened(model, tmp_path / f"run{number}", data, make=make_held_out_sets, held_out=1e-6)
        counts = [sets[""].store.counts(split).documents for split in ("held_out", "train")]
        assert counts[0] >= 1 and counts[1] >= 1 and sum(counts) == (2 if kind == "no-targets" else 8)


def test_tokenizer_training_excludes_held_out_text(model, tmp_path):
    """This also holds if the document with the smallest hash has no targets."""
    records = [{"prompt": f"w{one} ", "completion": f"w{one}" * (one % 3 == 0)} for one in range(12)]
    data = write(tmp_path / "x.jsonl", *records)
    sets, _ = opened(model, tmp_path / "run", data, make=make_held_out_sets, held_out=1e-6)
    texts = list(training_texts(DataConfig(path=data, held_out_fraction=1e-6)))
    assert len(texts) == sets[""].store.counts("train").documents == 3


def question(tokens: list[int], targets: list[int]) -> Question | None:
    inside = np.isin(np.arange(len(tokens)), targets)
    return Question.of(np.asarray(tokens, np.uint16), inside, ("1.png",), (IMAGE, VIDEO))


@pytest.mark.parametrize(
    "tokens, targets, prompt, answer",
    [
        ([63, IMAGE, IMAGE, 20, 30, 63], [4, 5], 4, [30, 63]),
        ([63, 22, IMAGE, IMAGE, 30, 31, 63], [1, 4, 5, 6], 4, [30, 31, 63]),
        ([63, IMAGE, 7, VIDEO, VIDEO, 20, 30, 63], [6, 7], 6, [30, 63]),
        ([1, 20, 30, 9, 1, IMAGE, IMAGE, 21, 31, 9, 1, 22, 32, 9], [2, 3, 8, 9, 12, 13], 8, [31, 9]),
        ([63, 30, 31, IMAGE], [1, 2], 0, None),
    ],
    ids=["image", "caption", "image-and-video", "later-turn", "no-answer"],
)
def test_question_ends_before_the_first_answer_after_the_last_image(tokens, targets, prompt, answer):
    found = question(tokens, targets)
    assert (found is None) == (answer is None)
    if found is not None:
        assert found.prompt.tolist() == tokens[:prompt] and found.answer.tolist() == answer


class FakeGenerate:
    """Replacement of `generate` that returns text n for row n."""

    def __init__(self, *texts: str):
        self.texts, self.sizes, self.stops = [[int(word[1:]) for word in text.split()] for text in texts], [], set()
        self.asked = 0

    def __call__(self, model, rows, *, prompt_lengths, max_new_tokens, stop_ids, pad_id, media, **_):
        self.sizes.append((len(rows), rows.shape[1] + max_new_tokens))
        self.stops |= {stop_ids}
        found = np.full((len(rows), max_new_tokens), pad_id)
        for row in range(len(rows)):
            text = self.texts[min(self.asked + row, len(self.texts) - 1)][:max_new_tokens]
            found[row, : len(text)] = text
        self.asked += len(rows)
        assert media.index.shape == rows.shape
        return found


def test_questions_are_generated_in_small_batches(model, tmp_path, monkeypatch):
    """Documents without images are skipped. A generated text is correct if it starts with the answer."""
    for number in range(2):
        save_image(tmp_path / f"{number}.png", 8 + 8 * number, 8)
    records = [conversation(5), *(conversation(one, "0.png", *["1.png"] * (one % 2)) for one in range(5))]
    data = write(tmp_path / "x.jsonl", *records)
    sets, reader = opened(model, tmp_path / "run", data, make=make_held_out_sets, held_out_path=data)
    generate = FakeGenerate("w30 w63", "w31 w5 w63", "w9 w63", "w33 w63", "w34 w63")
    monkeypatch.setattr(module, "generate", generate)
    shapes = abstract_hf(model)
    tokenizer, stores = load_tokenizer(model), [one.store for one in sets.values()]

    def ask(**options):
        sizes = {"max_new_tokens": 8, "max_tokens": 50} | options
        return answer_questions(shapes, reader, tokenizer, stores, **sizes)

    found = ask()
    assert [one.is_correct for one in found] == [True, False, False, True, True]
    assert [one.files for one in found] == ["0.png", "0.png, 1.png", "0.png", "0.png, 1.png", "0.png"]
    assert (found[1].question, found[1].expected, found[1].answer) == ("w21", "w31", "w31 w5")
    assert generate.stops == {(63,)} and len(generate.sizes) > 1 and len(set(generate.sizes)) == 1
    assert all(rows * length <= 50 for rows, length in generate.sizes)
    summary, first, *_ = describe_answers(found).splitlines()
    assert_names(summary, "3", "5", "60.0")
    assert_names(first, "0.png", "w20", "'w30'")
    plot_answers(reader, found, tmp_path / "answers.png")
    assert (tmp_path / "answers.png").stat().st_size > 1000
    assert len(ask(max_questions=2, max_tokens=1)) == 2 and generate.sizes[-1][0] == 1
    assert [one.expected for one in ask(max_new_tokens=1)] == [f"w3{one}" for one in range(5)]
    sets, reader = opened(
        model,
        tmp_path / "plain",
        write(tmp_path / "t.jsonl", *map(conversation, range(4))),
        make=make_held_out_sets,
        held_out=0.5,
    )
    stores = [one.store for one in sets.values()]
    assert ask() == []


def test_description_counts_images_and_collapses_placeholders(model, tmp_path):
    for number in range(2):
        save_image(tmp_path / f"{number}.png", 8 + 32 * number, 8)
    data = write(tmp_path / "x.jsonl", conversation(0), conversation(1, "0.png"), conversation(2, "1.png", "0.png"))
    config = DataConfig(path=data, seq_len=16, held_out_fraction=0.0)
    text = describe_data(TrainConfig(run_dir=str(tmp_path / "run"), init_from=str(model), data=config))
    assert re.search(r"document 1\b.*\b7\b.*\b2\b.*\b1\b.*\n<4 [^>]*>w21⟦w31 w63⟧", text)  # tokens, targets, images
    assert re.search(r"\b2\b.*\n<24 [^>]*>w22", text)
    images, longer, uncut = text.splitlines()[-3:]
    assert re.match(r"3\b.*\b2\b", images)  # number of images and of documents with images
    assert re.match(r"1\b.*--seq-len 16\b", longer) and re.match(r"1\b", uncut)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "captions"])
def test_vision_language_model_trains_on_all_kinds_of_documents(model, tmp_path, kind):
    save_image(tmp_path / "1.png", 8, 8)
    caption = {"text": f"w2 {SEEN} w30 w11", "images": ["1.png"]}
    data = write(tmp_path / "x.jsonl", *(conversation(one) if kind == "text" else caption for one in range(20)))
    flags = ("--steps", 2, "--eval-every", 1, "--seq-len", 64, "--batch-size", 2, "--sample-tokens", 4)
    out, _ = call(
        "train", "--run-dir", tmp_path / "run", "--init-from", model, "--data", data, "--held-out", data, *flags
    )
    assert ("1.png" in out) == (kind == "captions") and "sample" in out
