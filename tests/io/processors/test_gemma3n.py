"""Images and audio of Gemma 3n are processed as in transformers, and `generate` answers questions about files."""

import json
import pathlib

import numpy as np
import pytest

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.families.gemma.audio_processor import USM, Gemma3nAudioProcessor, LogMagnitudes
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.processors.processor import read_settings
from eqx_decoders.media_files.images import open_image
from eqx_decoders.media_files.limits import MediaLimits
from tests.compare import assert_allclose, assert_array_equal
from tests.encoders.directories import save_image
from tests.encoders.test_audio_files import answered, directory, expected
from tests.errors import refused
from tests.io.processors.media_files import GEMMA3N_AUDIO, audio, summary_of


EXPECTED = np.load(pathlib.Path(__file__).parents[2] / "fixtures" / "processors" / "gemma_audio.npz")
LIMITS = MediaLimits()
WORDS = dict(processor_class="Gemma3nProcessor", image_seq_length=4, audio_seq_length=5, image_token="<|image_pad|>")
WORDS |= dict(boi_token="<|vision_start|>", eoi_token="<|vision_end|>", audio_token="<|audio_pad|>")
WORDS |= dict(boa_token="<|vision_start|>", eoa_token="w57")
SETTINGS = dict(size={"height": 48, "width": 48}, do_normalize=False, resample=2, feature_size=6, dither=0.0)


@pytest.mark.parametrize("name", GEMMA3N_AUDIO)
def test_spectrograms_match_transformers(name):
    settings, lengths = GEMMA3N_AUDIO[name]
    rules = Gemma3nAudioProcessor(spectrum=LogMagnitudes.read(Fields(settings), USM))
    clips = [audio(seconds, rules.spectrum.rate) for seconds in lengths]
    arrays, texts = rules.process_all(clips, LIMITS, ["one"] * len(clips))
    values = arrays["input_features"]
    assert values.shape == tuple(EXPECTED[f"{name}/shape"]) and values.dtype == np.float32
    assert_allclose(summary_of(values), EXPECTED[f"{name}/input_features"], atol=1e-6)
    mask = np.packbits(arrays["input_features_mask"], axis=1)
    assert_array_equal(mask, EXPECTED[f"{name}/input_features_mask"])
    assert all(text.count("<audio_soft_token>") == 188 for text in texts)
    assert all(text.startswith("\n\n<start_of_audio><") and text.endswith("<end_of_audio>\n\n") for text in texts)


def test_short_clips_and_left_padding_are_refused(tmp_path):
    with refused(DataError, "one has 512 samples"):
        Gemma3nAudioProcessor().process_all([np.zeros(512, np.float32)], LIMITS, ["one"])
    assert (
        Gemma3nAudioProcessor()
        .process_all([np.zeros(513, np.float32)], LIMITS, ["one"])[0]["input_features_mask"]
        .all()
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "processor_config.json").write_text(json.dumps(WORDS))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | dict(padding_side="left")))
    family, settings = read_settings(Directory(folder))
    assert family.audio is not None
    with refused(ConversionError, "padding_side=left"):
        family.audio(settings)


@pytest.mark.slow
def test_generate_answers_for_an_image_and_an_audio_clip(tmp_path):
    """The output of the program equals the tokens that the model generates for these arrays."""
    soundfile = pytest.importorskip("soundfile")
    folder, answers = directory(tmp_path / "model", "gemma3n_vision", "Gemma3nProcessor"), []
    (folder / "processor_config.json").write_text(json.dumps(WORDS))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    text = load_text_model(folder, "float32")
    family, settings = read_settings(Directory(folder))
    assert family.images is not None and family.audio is not None
    for seed in range(2):
        picture = save_image(tmp_path / f"{seed}.png", 30 + seed, 50, seed)
        soundfile.write(tmp_path / f"{seed}.wav", samples := audio(0.3 - 0.1 * seed), 16_000, subtype="FLOAT")
        seen = family.images(settings).process(open_image(picture), LIMITS, "image")
        heard, words = family.audio(settings).process_all([samples], LIMITS, ["audio"])
        ids = text.tokenizer.encode(f"{seen.text}{words[0]}", special=True).tolist()
        answer = answered(folder, "--image", picture, "--audio", tmp_path / f"{seed}.wav", "--dtype", "float32")
        assert answer == expected(text, ids, **seen.arrays, **heard) and len(answer) > 3
        answers.append(answer)
    assert answers[0] != answers[1]
