"""Test training with video, audio and image files: documents, packed batches and microbatches."""

import json

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset
from eqx_decoders.data.media_documents import ProcessorReader, reader_from_json
from eqx_decoders.data.sources.documents import parse_reference, reference
from eqx_decoders.errors import DataError
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import load_tokenizer
from tests.compare import assert_array_equal
from tests.encoders.directories import save_image
from tests.encoders.test_audio_files import AUDIO, VIDEO, directory
from tests.errors import refused
from tests.io.processors.media_files import audio, video


pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
IMAGE = 53
CLIP, SEEN, HEARD = "<|video_pad|>", "<|image_pad|>", "<|audio_pad|>"
TEMPLATE = """{%- for message in messages %}{{ 'w1 ' if message.role == 'user' else 'w2 ' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}{{ '<|' + part.type + '_pad|> ' }}{% endif %}
{%- endfor %}{% endif %}{{ ' w9 ' }}{% endfor %}"""
FRAMES, SECONDS = (2, 4, 6), (0.3, 0.5, 1.3)  # video frames and audio seconds of the files
VIDEO_TOKENS = [frames // 2 * 24 for frames in FRAMES]  # of 16 x 24 pixels
AUDIO_TOKENS = [4, 7, 13 + 4]  # of 30, 50 and 130 frames, by chunks of 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    for name, processor in (("qwen2_5_vl", "Qwen2_5_VLProcessor"), ("qwen3_omni", "Qwen3OmniMoeProcessor")):
        (directory(folder / name, name, processor) / "chat_template.jinja").write_text(TEMPLATE)
    generator = np.random.default_rng(0)
    for number, (count, seconds) in enumerate(zip(FRAMES, SECONDS, strict=True)):
        frames = list(generator.integers(0, 256, (count, 16, 24, 3), dtype=np.uint8))
        (folder / f"{number}.mkv").write_bytes(video("matroska", "ffv1", frames=frames, coded_as="bgr0"))
        soundfile.write(folder / f"{number}.wav", audio(seconds, 44_100, seed=number), 44_100)
        save_image(folder / f"{number}.png", 8, 8, number)
    return folder


def batches_of(folder, name, records, **options):
    """Return batches of documents and the reader of their files."""
    text = load_text_model(folder / name)
    reader = ProcessorReader(str(folder / name), IMAGE)
    assert reader_from_json(json.loads(json.dumps(reader.to_json()))) == reader
    path = folder / f"{name}.{len(records)}.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    data = DataConfig(path=str(path), seq_len=160, held_out_fraction=0.0, cache_dir=str(folder / "cache"), batch_size=2)
    run = folder / "-".join([path.stem, *map(str, options.values())])
    media = {"template": load_chat_template(folder / name), "media": (text.model.config, reader)}
    return text.model, reader, make_dataset(data, load_tokenizer(folder / name), folder=run, **media, **options)


def records_with_videos():
    """Return records with videos in fields or content parts. The last word identifies the record."""
    part = [{"type": kind, kind: name} for kind, name in (("video", "0.mkv"), ("image", "2.png"))]
    asked = {"role": "user", "content": [*part, {"type": "text", "text": "w20"}]}
    messages = [asked, {"role": "assistant", "content": "w33"}]
    return [
        {"prompt": f"{CLIP} w20 ", "completion": "w30", "videos": ["0.mkv"]},
        {"prompt": f"w20 {CLIP} w21 {CLIP} ", "completion": "w31", "videos": ["1.mkv", "0.mkv"]},
        {"prompt": f"{CLIP} w20 {SEEN} w21 ", "completion": "w32", "images": ["1.png"], "videos": ["2.mkv"]},
        {"messages": messages},
        {"prompt": "w20 ", "completion": "w34"},
        {"text": f"w20 {CLIP} w35", "videos": ["0.mkv"]},  # all tokens except the video are targets
    ]


def test_documents_with_videos_are_packed(folder):
    """Each document has its own pixels and placeholders. Placeholders are no targets."""
    _, reader, batches = batches_of(folder, "qwen2_5_vl", records_with_videos())
    known = [([0], []), ([1, 0], []), ([2], [1]), ([0], [2]), ([], []), ([0], [])]
    with batches:
        batch = next(one for one in iter(lambda: next(batches), None) if (one.tokens == 35).any())
    order = {"image": [], "video": []}
    for row, segments, targets in zip(batch.tokens, batch.segment_ids, batch.loss_mask, strict=True):
        assert segments.max() >= 1
        for segment in range(1, segments.max() + 1):
            own, said = row[segments == segment], row[(segments == segment) & targets]
            number = next(int(token) for token in said if 30 <= token < 36) - 30
            videos, images = known[number]
            assert (own == VIDEO).sum() == sum(VIDEO_TOKENS[video] for video in videos)
            assert (own == IMAGE).sum() == 4 * len(images)
            order["video"] += [reference("video", str(folder / f"{one}.mkv")) for one in videos]
            order["image"] += [str(folder / f"{one}.png") for one in images]
        assert not np.isin(row[targets], [IMAGE, VIDEO]).any()
    assert_array_equal(batch.media.index >= 0, np.isin(batch.tokens, [IMAGE, VIDEO]))
    # Videos may come after or between the images of a row; their patches are identified by their sums.
    arrays = reader.arrays([*order["image"], *order["video"]])
    whole = sum(float(np.abs(arrays[name]).sum()) for name in ("pixel_values", "pixel_values_videos"))
    assert float(np.abs(batch.media.images.patches).sum()) == pytest.approx(whole, rel=1e-4)
    assert len(order["video"]) >= 2


@pytest.mark.slow
def test_microbatches_equal_one_batch(folder):
    records = [record for record in records_with_videos() if "videos" in record][:2]
    found = []
    for groups in (1, 2):
        model, _, batches = batches_of(folder, "qwen2_5_vl", records, groups=groups)
        with batches:
            loss, metrics = ed.next_token_loss(model, next(batches))
        found.append((float(loss), float(metrics.tokens)))
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[0][1] > 0


def test_documents_with_audio_are_packed(folder):
    """The features of a clip do not depend on longer clips in the batch."""
    part = [{"type": "audio", "audio": "2.wav"}, {"type": "text", "text": "w20"}]
    records = [
        {"prompt": f"{HEARD} w20 ", "completion": "w30", "audios": ["0.wav"]},
        {
            "prompt": f"{HEARD} w20 {HEARD} w21 {SEEN} ",
            "completion": "w31",
            "audios": ["1.wav", "0.wav"],
            "images": ["0.png"],
        },
        {"messages": [{"role": "user", "content": part}, {"role": "assistant", "content": "w32"}]},
    ]
    (folder / "qwen3_omni" / "preprocessor_config.json").write_text(
        json.dumps(json.loads((folder / "qwen3_omni" / "preprocessor_config.json").read_text()) | {"min_pixels": 16})
    )
    _, reader, batches = batches_of(folder, "qwen3_omni", records)
    known = [([0], 0), ([1, 0], 1), ([2], 0)]
    with batches:
        batch = next(batches)
    for row, segments, targets in zip(batch.tokens, batch.segment_ids, batch.loss_mask, strict=True):
        for segment in range(1, segments.max() + 1):
            own, said = row[segments == segment], row[(segments == segment) & targets]
            audio, images = known[next(int(token) for token in said if 30 <= token < 33) - 30]
            assert (own == AUDIO).sum() == sum(AUDIO_TOKENS[one] for one in audio)
            assert (own == IMAGE).sum() == 4 * images
        assert not np.isin(row[targets], [IMAGE, AUDIO]).any()
    assert_array_equal(batch.media.index >= 0, np.isin(batch.tokens, [IMAGE, AUDIO]))
    together = reader.arrays([reference("audio", str(folder / f"{number}.wav")) for number in (0, 2, 1)])
    for place, number in enumerate((0, 2, 1)):
        alone = reader.arrays([reference("audio", str(folder / f"{number}.wav"))])
        frames = alone["input_features"].shape[-1]
        assert together["feature_attention_mask"][place].sum() == frames == round(100 * SECONDS[number])
        assert_array_equal(together["input_features"][place, :, :frames], alone["input_features"][0])


def test_changed_file_is_refused(folder):
    """This also holds if the size is the same."""
    record = {"prompt": f"{SEEN} w20 ", "completion": "w30", "images": ["new.png"]}
    save_image(folder / "new.png", 8, 8, 5)
    _, reader, batches = batches_of(folder, "qwen2_5_vl", [record] * 5)
    (one,) = batches.store.media(0)
    assert parse_reference(one)[:2] == ("image", str(folder / "new.png")) and reader.pixels(one).shape == (8, 8, 3)
    batches._batch(0)
    save_image(folder / "new.png", 8, 8, 6)
    with refused(DataError, "image", folder / "new.png"):
        batches._batch(0)
    assert reader.pixels(reference("video", str(folder / "0.mkv"))) is None


def test_media_references_have_kind_path_and_hash():
    assert parse_reference(reference("video", "a:b")) == ("video", "a:b", "")
    assert parse_reference("x.png") == ("image", "x.png", "")
    assert parse_reference(reference("image", "x.png", "1f")) == ("image", "x.png", "1f")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "names"),
    [
        pytest.param(
            {"text": f"{CLIP} w1", "videos": ["0.mkv", "1.mkv"]},
            ["1 placeholder", f"'{CLIP}'", "2 videos"],
            id="videos",
        ),
        pytest.param(
            {"text": f"{CLIP} w1 w2", "images": ["0.png"]}, ["0 placeholder", f"'{SEEN}'", "1 image"], id="images"
        ),
        pytest.param({"text": "w1", "videos": ["none.mkv"]}, ["video", "/none.mkv'"], id="missing"),
        pytest.param({"text": "w1", "audios": ["0.wav"]}, ["audio", "/0.wav'"], id="audio"),
        pytest.param({"text": "w1", "videos": "0.mkv"}, ["'videos'", "'video'"], id="no-list"),
    ],
)
def test_wrong_numbers_and_kinds_of_files_are_refused(folder, record, names):
    with refused(DataError, *names):
        batches_of(folder, "qwen2_5_vl", [record] * 3)
