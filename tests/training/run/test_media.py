"""Test training with images: documents with image references, batches, losses, microbatches and meshes."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset
from eqx_decoders.data.media_documents import SyntheticReader, reader_from_json
from eqx_decoders.data.synthetic_images import NUMBERS, SIZE, draw, drawn_pixels, write_questions
from eqx_decoders.encoders.stem import LearnedGrid
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.loss import token_loss_sum
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.encoders.samples import MEDIA, STEM, VISION, media_decoder
from tests.errors import refused
from tests.models import filled


TOKEN = 300
VISION_32 = dataclasses.replace(
    VISION, stem=dataclasses.replace(STEM, size=8, frames=1, positions=LearnedGrid(side=4)), blocks=VISION.blocks[:2]
)
CONFIG = media_decoder(
    dataclasses.replace(MEDIA, vision=VISION_32, audio=None, audio_token=None, image_token=TOKEN, positions=None),
    layers=2,
    vocab_size=301,
)
READER = SyntheticReader.of(CONFIG)


def test_synthetic_images_are_deterministic():
    assert READER.tokens == 4 and reader_from_json(READER.to_json()) == READER
    some = [draw(number) for number in range(200)]
    for number, one in enumerate(some[:5]):
        assert_array_equal(one.pixels, draw(number).pixels)
    assert all(one.pixels.shape == (3, SIZE, SIZE) and one.pixels.min() >= 0 and one.pixels.max() <= 1 for one in some)
    assert len({one.question for one in some}) == 6 and len({one.answer for one in some}) > 40
    counted = [one for one in some if one.question.startswith("How many")]
    assert {one.answer.split()[0] for one in counted} == set(NUMBERS)
    pixels = drawn_pixels(["drawn:3", "drawn:0"])
    assert_allclose(pixels[0], 2 * draw(3).pixels - 1)
    for bad in ("cat.png", "drawn:", "drawn:../x", "drawn:1e3"):
        with refused(DataError, repr(bad), "drawn:"):
            drawn_pixels([bad])


@pytest.mark.parametrize(
    "tokens, expected",
    [
        pytest.param([256, 7, 8], [256, *[TOKEN] * 8, 7, 8], id="inserted"),  # after the first token
        pytest.param([256, TOKEN, 7, TOKEN], [256, *[TOKEN] * 4, 7, *[TOKEN] * 4], id="expanded"),
    ],
)
def test_each_image_has_its_placeholders(tokens, expected):
    targets = np.arange(len(tokens)) > 0
    found, kept = READER.expand_tokens((np.asarray(tokens), targets), ("drawn:1", "drawn:2"), "here")
    assert found.tolist() == expected
    assert kept.tolist() == [token in (7, 8) for token in expected]


def test_wrong_numbers_of_placeholders_are_refused():
    with refused(DataError, "there: 1", "1 placeholder", "2 images"):
        READER.expand_tokens((np.asarray([256, TOKEN]), np.ones(2, bool)), ("drawn:1", "drawn:2"), "there: 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    records = [json.loads(line) for line in write_questions(folder / "drawn.jsonl", 40).read_text().splitlines()]
    records[3] = {"prompt": "no image ", "completion": "here"}
    records[5]["images"] = ["drawn:5", "drawn:6"]
    (folder / "mixed.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def batches(folder):
    data = DataConfig(
        path=str(folder / "mixed.jsonl"), batch_size=4, seq_len=160, held_out_fraction=0.0, cache_dir=str(folder / "c")
    )
    made = make_dataset(data, ByteTokenizer(), folder=folder / "run", media=(CONFIG, READER), groups=4)
    yield made
    made.close()


@pytest.mark.slow
def test_batches_contain_the_images_of_their_documents(batches):
    """Images are in document order, also for documents with two images or without images. Only answers are targets."""
    seen = 0
    for _ in range(3):
        batch, pixels = next(batches), []
        for row, segments in zip(batch.tokens, batch.segment_ids, strict=True):
            for segment in range(1, segments.max() + 1):
                text = bytes(int(token) for token in row[segments == segment] if token < 256).decode()
                count = int((row[segments == segment] == TOKEN).sum()) // 4
                owners = [n for n in range(40) if f"{draw(n).question}\n{draw(n).answer}" == text]
                assert (count == 0) == text.startswith("no image")
                pixels.append((count, owners))
        media = batch.media
        assert_array_equal(media.index >= 0, batch.tokens == TOKEN)
        assert not batch.loss_mask[batch.tokens == TOKEN].any()
        patches = media.images.patches.reshape(4, -1, 16, media.images.patches.shape[-1])
        number = 0
        for row in range(4):
            own = [entry for entry in patches[row] if np.abs(entry).sum() > 0]
            for entry in own:
                while pixels[number][0] == 0:
                    number += 1
                count, owners = pixels[number]
                pixels[number] = (count - 1, owners)
                known = [np.allclose(entry.sum(), drawn_pixels([f"drawn:{n}"]).sum(), atol=1e-2) for n in range(40)]
                assert sum(known) == 1 and (count > 1 or known.index(True) in {*owners, 6})
                seen += 1
    assert seen > 20


def test_missing_image_readers_and_short_rows_are_refused(folder):
    data = DataConfig(path=str(folder / "drawn.jsonl"), seq_len=16, held_out_fraction=0.0, cache_dir=str(folder / "c"))
    with refused(DataError, "drawn.jsonl", "images"):
        make_dataset(data, ByteTokenizer(), folder=folder / "blind")
    with refused(DataError, "document 1 of drawn.jsonl", "--seq-len 16", "40 documents") as caught:
        make_dataset(data, ByteTokenizer(), folder=folder / "short", media=(CONFIG, READER))
    largest = max(int(number) for number in re.findall(r"\d+", str(caught.value)))  # the sufficient length
    enough = dataclasses.replace(data, seq_len=largest)
    make_dataset(enough, ByteTokenizer(), folder=folder / "short", media=(CONFIG, READER)).close()


@pytest.fixture(scope="module")
def model():
    return filled(CONFIG, 1, attention="dot")


def example(groups: int) -> Batch:
    """Return four rows with two, one, one and zero images."""
    tokens = np.random.default_rng(0).integers(1, 200, (4, 14)).astype(np.int32)
    tokens[0, 0:4] = tokens[0, 6:10] = tokens[1, 3:7] = tokens[2, 9:13] = TOKEN
    media = ed.Media.create(CONFIG, tokens, **READER.arrays([f"drawn:{n}" for n in range(4)]), groups=groups)
    return Batch(tokens=tokens, media=media, loss_mask=tokens != TOKEN)


@eqx.filter_jit
def loss_of(model, batch):
    return eqx.filter_value_and_grad(lambda model: token_loss_sum(model, batch)[0])(model)


@pytest.mark.slow
def test_image_groups_do_not_change_the_loss(model):
    whole, _ = loss_of(model, example(1))
    assert float(loss_of(model, example(4))[0]) == pytest.approx(float(whole), rel=1e-5)
    mean, metrics = ed.next_token_loss(model, example(1))
    assert float(mean * metrics.tokens) == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.slow
def test_loss_is_the_sum_of_the_losses_of_rows(model):
    whole, _ = loss_of(model, example(1))
    batch, alone = example(4), 0.0
    images = READER.arrays([f"drawn:{n}" for n in range(4)])["pixel_values"]
    for row, own in enumerate(([0, 1], [2], [3], [])):
        tokens = batch.tokens[row : row + 1]
        given = {"pixel_values": images[own]} if own else {}
        media = ed.Media.create(CONFIG, tokens, **given)
        alone += float(loss_of(model, Batch(tokens=tokens, media=media, loss_mask=tokens != TOKEN))[0])
    assert alone == pytest.approx(float(whole), rel=1e-5)


def stepped(model, batch, **step):
    trainer = Trainer.create(OptimizerConfig(learning_rate=1e-2), model, steps=4, config=StepConfig(**step))
    state = trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(0))
    return trainer.step(state, batch)


@pytest.mark.slow
def test_microbatches_equal_one_batch(model):
    """Microbatches need one group of images per row."""
    _, plain = stepped(model, example(1))
    _, parts = stepped(model, example(4), gradient_accumulation_steps=2)
    assert float(parts.loss) == pytest.approx(float(plain.loss), rel=1e-5)
    assert float(parts.grad_norm) == pytest.approx(float(plain.grad_norm), rel=1e-4)
    with refused(ed.ConfigError, "Media.create", "groups=4"):
        stepped(model, example(1), gradient_accumulation_steps=2)


@pytest.mark.slow
def test_encoder_can_be_frozen(model):
    optimizer = OptimizerConfig(learning_rate=1e-2, trainable=("scanned_layers.*", "vision.projector.*"))
    trainer = Trainer.create(optimizer, model, steps=4, config=StepConfig())
    state, _ = trainer.step(trainer.init(jax.tree.map(jnp.copy, model), key=jax.random.key(0)), example(1))
    assert_array_equal(state.model.vision.stem.kernel, model.vision.stem.kernel)
    before, after = (m.vision.projector.layers[0].kernel for m in (model, state.model))
    assert np.abs(np.asarray(before - after)).max() > 1e-4
