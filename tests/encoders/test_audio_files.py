"""Videos and audio in files: what the generate program answers to them is what the model makes of their arrays."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.media_documents import ProcessorReader
from eqx_decoders.data.sources.documents import reference
from eqx_decoders.errors import DataError
from eqx_decoders.families.qwen.processor import QwenVideoProcessor
from eqx_decoders.inference.generation import stream
from eqx_decoders.inference.text_model import TextModel, load_text_model
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.processors.processor import read_settings
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.media_files.audio import LogMel
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.video import Video, open_video
from tests.commands import call
from tests.compare import assert_array_equal
from tests.encoders.directories import save_image
from tests.errors import refused
from tests.io.processors.media_files import audio, video


pytest.importorskip("av")
soundfile, soxr = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
FIXTURES = Path(__file__).parents[1] / "fixtures"
SPECIAL = {51: "<|vision_start|>", 52: "<|vision_end|>", 53: "<|image_pad|>", 54: "<|video_pad|>", 55: "<|audio_pad|>"}
IMAGE, VIDEO, AUDIO = 53, 54, 55
SIZES = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16, "max_pixels": 4096}
CHUNK_AUDIO = {"feature_size": 8, "n_fft": 400, "hop_length": 160, "sampling_rate": 16_000}
NEW = 12


def directory(folder: Path, name: str, processor: str) -> Path:
    """A fixture of transformers with a tokenizer, whose words are `w0` and so on, and the settings of a processor."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    shutil.copytree(FIXTURES / name, folder)
    words = {SPECIAL.get(number, f"w{number}"): number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w63"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"processor_class": processor, **SIZES, **CHUNK_AUDIO}))
    return folder


def answered(folder: Path, *words: object) -> list[int]:
    """The tokens that the program writes."""
    common = ("--temperature", "0", "--max-new-tokens", NEW, "--no-chat", "--prompt", "w7 w8")
    out, _ = call("generate", "--model", folder, *words, *common)
    assert out.startswith("w7 w8")
    return [int(word[1:]) for word in out[len("w7 w8") :].split()]


def expected(text: TextModel, before: Sequence[int], prompt: Sequence[int] = (7, 8), **arrays: np.ndarray) -> list[int]:
    """What the model makes of arrays; the program shows no special tokens."""
    ids = np.asarray([[*before, *prompt]], np.int32)
    media = ed.Media.create(text.model.config, ids, **arrays)
    sampler = text.model.generation_config.sampler(temperature=0.0)
    options = dict(sampler=sampler, key=jax.random.key(0), stop_ids=text.stop_ids, num_draft_tokens=0)
    found = [int(one[0]) for one in stream(text.model, ids, max_new_tokens=NEW, media=media, **options)]
    return [one for one in found if one not in SPECIAL and one not in text.stop_ids]


@pytest.mark.slow
def test_answers_to_a_video(tmp_path):
    """All frames of it, lossless: of the arrays that its pixels give."""
    folder, answers = directory(tmp_path / "model", "qwen2_5_vl", "Qwen2_5_VLProcessor"), []
    text = load_text_model(folder)
    for seed in (0, 1):
        frames = list(np.random.default_rng(seed).integers(0, 256, (4, 16, 24, 3), dtype=np.uint8))
        (tmp_path / "video.mkv").write_bytes(video("matroska", "ffv1", frames=frames, coded_as="bgr0"))
        with open_video(Video(frames=frames, fps=10.0)) as clip:
            made = QwenVideoProcessor(patch_size=2, min_pixels=16, max_pixels=4096).process(clip, MediaLimits())
        count = made.text.count("<|video_pad|>")
        answers.append(answered(folder, "--video", tmp_path / "video.mkv"))
        assert answers[-1] == expected(text, [VIDEO] * count, **made.arrays) and count == 48
    assert answers[0] != answers[1] and len(answers[0]) > 3


# Settings of directories whose videos become an image for each of few frames, and which of 30 frames are taken.
SPARSE = {
    "smolvlm": (
        dict(processor_class="SmolVLMProcessor", image_seq_len=4, image_token="<|image_pad|>")
        | dict(fake_image_token="<|vision_start|>", global_image_token="<|vision_end|>", video_token="<|video_pad|>"),
        dict(
            max_image_size={"longest_edge": 16},
            video_sampling=dict(fps=1, max_frames=2, video_size={"longest_edge": 24}),
        ),
        ["00:00", "00:02"],
    ),
    "gemma4_audio": (
        dict(processor_class="Gemma4Processor", boi_token="<|vision_start|>", eoi_token="<|vision_end|>")
        | dict(video_token="<|video_pad|>", image_token="<|image_pad|>"),
        dict(patch_size=2, pooling_kernel_size=2, max_soft_tokens=16, num_frames=2),
        ["00:00", "00:01"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", "gemma4_audio"])
def test_answers_to_a_video_of_few_frames(name, tmp_path):
    """With words and times before them; and training reads the same file alike."""
    whole, settings, times = SPARSE[name]
    folder = directory(tmp_path / "model", name, whole["processor_class"])
    (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    frames = list(np.random.default_rng(0).integers(0, 256, (30, 16, 24, 3), dtype=np.uint8))
    (tmp_path / "video.mkv").write_bytes(video("matroska", "ffv1", frames=frames, coded_as="bgr0"))
    family, read = read_settings(Directory(folder))
    assert family.videos is not None
    rules = family.videos(read)
    with open_video(Video(frames=frames, fps=10.0)) as clip:
        made = rules.process(dataclasses.replace(clip, use_all_frames=False), MediaLimits())
    assert re.findall(r"(?<!:)\b\d\d:\d\d(?=:?[ <])", made.text) == times
    text = load_text_model(folder)
    assert isinstance(text.tokenizer, JsonTokenizer)
    ids, arrays = text.tokenizer.encode(made.text, special=True).tolist(), rules.join([made])
    answer = answered(folder, "--video", tmp_path / "video.mkv")
    assert answer == expected(text, ids, **arrays) and len(answer) > 3
    reader, one = ProcessorReader(str(folder), IMAGE), reference("video", str(tmp_path / "video.mkv"))
    grown = len(made.text) - len("<|video_pad|>")
    assert reader.expand_text("<|video_pad|>w1", [(13, 15)], [one], "x") == (
        f"{made.text}w1",
        ((grown + 13, grown + 15),),
    )
    for key, array in reader.arrays([one]).items():
        assert_array_equal(array, arrays[key])
    save_image(tmp_path / "image.png", 16, 16)
    mixed = ("<|video_pad|><|image_pad|>", [], [str(tmp_path / "image.png"), one], "x")
    if name == "smolvlm":
        with refused(DataError, "x ", "video", "image"):
            reader.expand_text(*mixed)
    else:
        assert reader.expand_text(*mixed)[0].startswith(made.text)


GLM = {"<|vision_start|>": "<|begin_of_image|>", "<|vision_end|>": "<|end_of_image|>", "<|image_pad|>": "<|image|>"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Glm4vProcessor", "Glm46VProcessor"])
def test_answers_to_a_video_whose_frames_are_images(name, tmp_path):
    """Two videos have two answers, of more than special tokens; where the first token ends the text there is none."""
    folder, answers = directory(tmp_path / "model", "glm4v", name), []
    words = (folder / "tokenizer.json").read_text()
    for ours, theirs in GLM.items():
        words = words.replace(ours, theirs)
    (folder / "tokenizer.json").write_text(words)
    family, read = read_settings(Directory(folder))
    assert family.videos is not None
    rules, text = family.videos(read), load_text_model(folder)
    assert isinstance(text.tokenizer, JsonTokenizer)
    for seed in (0, 1):
        frames = list(np.random.default_rng(seed).integers(0, 256, (30, 16, 24, 3), dtype=np.uint8))
        (tmp_path / "video.mkv").write_bytes(video("matroska", "ffv1", frames=frames, coded_as="bgr0"))
        with open_video(Video(frames=frames, fps=10.0)) as clip:
            made = rules.process(dataclasses.replace(clip, use_all_frames=False), MediaLimits())
        ids = text.tokenizer.encode(made.text + "w7 w8", special=True).tolist()  # behind the last second: "2w7"
        answers.append(answered(folder, "--video", tmp_path / "video.mkv"))
        assert answers[-1] == expected(text, ids, (), **rules.join([made])) and len(answers[-1]) > 3
    assert answers[0] != answers[1]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{answers[1][0]}"}))
    assert answered(folder, "--video", tmp_path / "video.mkv") == []


@pytest.mark.slow
def test_answers_to_an_audio_clip(tmp_path):
    """Of two channels, at the rate of a CD."""
    folder, answers = directory(tmp_path / "model", "qwen3_omni", "Qwen3OmniMoeProcessor"), []
    text = load_text_model(folder)
    for scale in (1.0, 0.2):
        samples = np.stack([audio(0.5, 44_100), audio(0.5, 44_100, seed=1) * scale], 1)
        soundfile.write(tmp_path / "audio.wav", samples, 44_100, subtype="FLOAT")
        resampled = soxr.resample(samples.mean(axis=1), 44_100, 16_000, quality="soxr_hq")
        spectrum = LogMel(bands=8)(resampled)
        arrays = {"input_features": spectrum[None], "feature_attention_mask": np.ones((1, 50), np.int32)}
        answers.append(answered(folder, "--audio", tmp_path / "audio.wav"))
        assert answers[-1] == expected(text, [AUDIO] * 7, **arrays)
    assert answers[0] != answers[1] and len(answers[0]) > 3
