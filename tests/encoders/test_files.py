"""Images in files: a model of a directory answers, and is tuned on conversations with them."""

import json
import re

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.cli.generate import GenerateConfig
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset
from eqx_decoders.data.media_documents import ProcessorReader, reader_from_json
from eqx_decoders.inference.text_model import Files, load_text_model
from eqx_decoders.io.text.tokenizer import load_tokenizer
from tests.commands import call, outcome
from tests.compare import assert_array_equal
from tests.encoders.directories import save_image, vision_directory
from tests.errors import assert_names, refused


pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    vision_directory(folder / "model")
    for number, (width, height) in enumerate([(16, 16), (24, 16), (8, 32)]):
        save_image(folder / f"{number}.png", width, height, number)
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return load_text_model(folder / "model", "float32")


@pytest.mark.slow
def test_a_prompt_has_as_many_placeholders_as_its_images(text, folder):
    """In messages or before a text; and text alone needs no processor."""
    image = text.model.config.media.image_token
    parts = [{"type": "image", "image": str(folder / f"{n}.png")} for n in (0, 1)] + [{"type": "text", "text": "?"}]
    ids, media = text.prepare([{"role": "user", "content": parts}])
    assert (ids == image).sum() == 4 + 6 and media.index.shape == (1, len(ids))
    plain, seen = text.prepare("What?", Files(images=(str(folder / "2.png"),)))
    assert (plain == image).sum() == 4 and seen.grid_positions.shape == (1, len(plain), 3)
    assert text.prepare("What?")[1] is None
    with refused(ed.EqxDecodersError, "2.jpg"):
        text.prepare("What?", Files(images=(str(folder / "2.jpg"),)))


@pytest.mark.slow
def test_answers_depend_on_the_image(folder):
    """By the program, as users run it."""
    words = ("generate", "--model", folder / "model", "--temperature", "0", "--max-new-tokens", "8")
    found = [
        call(*words, "--image", folder / f"{number}.png", "--image", folder / "0.png", "--prompt", "What is it?")[0]
        for number in (1, 2)
    ]
    assert found[0] != found[1]
    code, _, err = outcome(*words, "--image", folder / "none.png", "--prompt", "What is it?")
    assert code == 3
    assert_names(err, "none.png")
    assert GenerateConfig(image=("a",), video=("b",), audio=("c",)).files == Files(("a",), ("b",), ("c",))


def write_chats(path):
    lines = []
    for number in range(12):
        parts = [{"type": "image", "image": f"{number % 3}.png"}, {"type": "text", "text": f"number {number}?"}]
        answer = {"role": "assistant", "content": f"it is {number % 3}"}
        lines.append({"messages": [{"role": "user", "content": parts}, answer]})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.slow
def test_conversations_with_images_are_packed_and_only_answers_are_learned(text, folder):
    """Every image stands in its own document, at its own size, whatever is beside it in the row."""
    chats, config = write_chats(folder / "chats.jsonl"), text.model.config
    reader = ProcessorReader(str(folder / "model"), config.media.image_token)
    assert reader_from_json(reader.to_json()) == reader
    data = DataConfig(path=str(chats), batch_size=2, seq_len=96, held_out_fraction=0.0, cache_dir=str(folder / "c"))
    tokenizer = load_tokenizer(folder / "model")
    options = dict(template=text.chat, media=(config, reader))
    with make_dataset(data, tokenizer, folder=folder / "run", **options) as batches:
        batch = next(batches)
    sizes = {0: 4, 1: 6, 2: 4}
    for row, segments, targets in zip(batch.tokens, batch.segment_ids, batch.loss_mask, strict=True):
        assert segments.max() > 1
        for segment in range(1, segments.max() + 1):
            own = row[segments == segment]
            words = tokenizer.decode([int(token) for token in own if token != reader.token])
            number = int(re.search(r"number (\d+)\?", words)[1])
            assert (own == reader.token).sum() == sizes[number % 3]
            said = tokenizer.decode([int(token) for token in row[(segments == segment) & targets]])
            assert said.startswith(f"it is {number % 3}")
    loss, metrics = ed.next_token_loss(text.model, batch)
    assert np.isfinite(float(loss)) and float(metrics.tokens) == batch.loss_mask.sum()


@pytest.mark.slow
def test_a_checkpoint_is_tuned_on_images_and_exported(folder):
    """With a frozen encoder; the export answers, and has the encoder's tensors as they were."""
    chats = write_chats(folder / "tuned.jsonl")
    options = ("--steps", 3, "--batch-size", 2, "--seq-len", 96, "--held-out", chats)
    trained = ("--optimizer.trainable", "scanned_layers.*", "vision.projector.*")
    words = ("--init-from", folder / "model", "--data", chats, "--export", folder / "new", *options, *trained)
    out, _ = call("train", "--run-dir", folder / "tuning", *words)
    assert (folder / "tuning" / "answers.png").exists()
    assert_names(out, "of 12", "%")
    before, after = (ed.load_hf(folder / name) for name in ("model", "new"))
    assert_array_equal(before.vision.stem.kernel, after.vision.stem.kernel)
    assert (
        np.abs(np.asarray(before.vision.projector.layers[0].kernel - after.vision.projector.layers[0].kernel)).max() > 0
    )
    assert load_text_model(folder / "new").prepare("?", Files(images=(str(folder / "0.png"),)))[1] is not None
