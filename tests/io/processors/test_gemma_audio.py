"""Audio of Gemma 4 is processed as in transformers, and prompts get one placeholder per audio token."""

import json
import pathlib

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.families.gemma.audio_processor import Gemma4AudioProcessor, LogMagnitudes
from eqx_decoders.inference.text_model import Files, load_text_model
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.media_files.limits import MediaLimits
from tests.commands import call
from tests.compare import assert_allclose, assert_array_equal
from tests.encoders.directories import audio_directory
from tests.errors import refused
from tests.io.processors.media_files import GEMMA_AUDIO, audio, summary_of


EXPECTED = np.load(pathlib.Path(__file__).parents[2] / "fixtures" / "processors" / "gemma_audio.npz")
LIMITS = MediaLimits()
RULES = Gemma4AudioProcessor()


def process(rules, audio, limits=LIMITS):
    return rules.process_all(audio, limits, [f"audio {number}" for number in range(len(audio))])


@pytest.mark.parametrize("name", GEMMA_AUDIO)
def test_spectrograms_match_transformers(name):
    settings, lengths = GEMMA_AUDIO[name]
    rules = Gemma4AudioProcessor(spectrum=LogMagnitudes.read(Fields(settings)))
    arrays, texts = process(rules, [audio(seconds, rules.spectrum.rate) for seconds in lengths])
    values, mask = arrays["input_features"], arrays["input_features_mask"]
    assert values.shape == tuple(EXPECTED[f"{name}/shape"]) and values.dtype == np.float32
    assert_allclose(summary_of(values), EXPECTED[f"{name}/input_features"], atol=1e-5)
    assert_array_equal(np.packbits(mask, axis=1), EXPECTED[f"{name}/input_features_mask"])
    # the number that transformers' processor inserts
    assert [text.count("<|audio|>") for text in texts] == mask[:, ::4].sum(axis=1).tolist()
    assert all(text.startswith("<|audio><|audio|>") and text.endswith("<|audio|><audio|>") for text in texts)


@pytest.mark.parametrize("side", ["left", "right"])
def test_clips_of_a_batch_equal_separate_clips(side):
    rules = Gemma4AudioProcessor(spectrum=LogMagnitudes(padding_side=side))
    files = [audio(seconds) for seconds in (0.7, 0.345, 0.1)]
    (together, texts), alone = process(rules, files), [process(rules, [file]) for file in files]
    for index, (own, (text,)) in enumerate(alone):
        count = own["input_features"].shape[1]
        assert_array_equal(together["input_features"][index, :count], own["input_features"][0])
        assert not together["input_features"][index, count:].any()
        assert together["input_features_mask"][index].sum() == own["input_features_mask"].sum()
        assert texts[index] == text


def test_short_and_long_clips_are_refused():
    with refused(DataError, "audio 0", "160 samples"):
        process(RULES, [np.zeros(160, np.float32)])
    assert process(RULES, [np.zeros(161, np.float32)])[1] == ["<|audio><|audio|><audio|>"]
    with refused(DataError, "audio 1", "2.0 s", "MediaLimits.max_seconds=1.5"):
        process(RULES, [audio(1.0)] * 2, MediaLimits(max_seconds=1.5))


INVALID = dict(
    dither=0.1, padding_value=1.0, padding_side="top", preemphasis=-1, per_bin_mean=[1, "a"], sampling_rate=10
)


@pytest.mark.parametrize(("name", "value"), INVALID.items(), ids=INVALID)
def test_invalid_settings_of_a_directory_are_refused(name, value):
    with refused(ConversionError, f"{name}="):
        LogMagnitudes.read(Fields({name: value}))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (dict(mean=(0.0,)), ["LogMagnitudes.mean", "128 bands"]),
        (dict(bands=2, std=(1.0, 0.0)), ["LogMagnitudes.std", "0"]),
        (dict(bands=10**6), ["1000000 bands", "1024"]),
        (dict(window_ms=1e9), ["16000000000", "65536"]),
        (dict(hop_ms=1e-9), ["0 samples", "hop"]),
        (dict(padding_side="left", window_ms=5.0), ["LogMagnitudes.padding_side='left'", "80 samples"]),
        (dict(min_frequency=9000.0), ["LogMagnitudes.max_frequency=8000.0", "9000.0"]),
        (dict(mel_floor=0.0), ["LogMagnitudes.mel_floor=0.0"]),
    ],
    ids=["mean", "std", "bands", "window", "hop", "padding", "lowest", "floor"],
)
def test_invalid_spectra_are_refused(keys, named):
    with refused(ed.ConfigError, *named):
        LogMagnitudes(**keys)


# --- a model directory with an audio encoder ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return audio_directory(tmp_path_factory.mktemp("hearing") / "model")


@pytest.fixture(scope="module")
def text(folder):
    return load_text_model(folder, "float32")


@pytest.mark.slow
def test_settings_of_a_directory(folder):
    rules = Processor.load(folder).audio
    content = json.loads((folder / "processor_config.json").read_text())
    assert rules.spectrum == LogMagnitudes(bands=8, padding_side=content["feature_extractor"]["padding_side"])
    assert (rules.placeholder, rules.start_token, rules.end_token) == ("<|audio|>", "<|audio>", "<audio|>")


@pytest.mark.slow
def test_prompts_have_a_placeholder_for_each_audio_token(text):
    token = text.model.config.media.audio_token
    files = [audio(0.2), audio(0.345)]
    parts = [{"type": "audio", "audio": file} for file in files] + [{"type": "text", "text": "?"}]
    ids, media = text.prepare([{"role": "user", "content": parts}])
    assert (ids == token).sum() == 5 + 9 and media.index.shape == (1, len(ids))
    plain, prepared = text.prepare("What?", Files(audio=(files[1],)))
    assert (plain == token).sum() == 9 and prepared.audio.real.sum() == 35
    own = np.asarray(text.model.encode(prepared).features)[:9]
    assert_allclose(own, np.asarray(text.model.encode(media).features)[5:14], atol=1e-5)


@pytest.mark.slow
def test_answers_depend_on_the_audio(folder, tmp_path):
    """With the command-line program."""
    soundfile = pytest.importorskip("soundfile")
    other = -np.sqrt(np.abs(audio(0.3)))[::-1]
    for name, samples in (("one", audio(0.5)), ("other", other)):
        soundfile.write(tmp_path / f"{name}.wav", samples, 16_000, subtype="FLOAT")
    words = ("generate", "--model", folder, "--temperature", "0", "--max-new-tokens", "8", "--prompt", "What is it?")
    found = [call(*words, "--audio", tmp_path / f"{name}.wav")[0] for name in ("one", "other")]
    assert found[0] != found[1]
