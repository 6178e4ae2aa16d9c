"""Files from clients are decoded in worker processes: a broken or slow file fails only its own request."""

import asyncio
import base64
import dataclasses
import gc
import io
import json
import os
import pathlib
import signal

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.io.processors.processor import FileReader
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.media_files import MediaFiles, MediaFilesConfig, Upload
from tests.compare import assert_array_equal
from tests.encoders.directories import AUDIO_RULES
from tests.errors import assert_names, refused
from tests.io.processors.media_files import KINDS, audio, image, video
from tests.io.processors.test_media_files import FORMS


pytest.importorskip("av")
CONFIG = MediaFilesConfig(
    limits=MediaLimits(max_pixels=64_000_000),
    processes=2,
    seconds=5.0,
    memory=600_000_000,
    max_request_bytes=1 << 26,
    max_bytes=1000,
)
SIZES = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70, "num_frames": 4}
RULES = AUDIO_RULES | {"image_processor": SIZES, "video_processor": SIZES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the processor settings of a model with images, videos and audio."""
    pytest.importorskip("soundfile")
    made = tmp_path_factory.mktemp("model")
    (made / "processor_config.json").write_text(json.dumps(RULES))
    return made


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def reading(folder, runner):
    found = MediaFiles(folder, 20_000, CONFIG)
    yield found
    found.close()
    assert all(not process.alive and process._process.returncode is not None for process in found._all)


def upload(content: bytes) -> Upload:
    return Upload("url", "data:x;base64," + base64.b64encode(content).decode(), 14)


def wav(samples: np.ndarray) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    return file.getvalue()


async def read(reading: MediaFiles, kind: str, *contents: bytes):
    """Decode files and return the results."""
    async with reading.read({kind: [upload(one) for one in contents]}) as found:
        return found[kind]


SMALL = image("RGB", 12, 10)


def black_image(width: int, height: int) -> bytes:
    """Return an image file of a few kilobytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def stop_next_process(reading: MediaFiles) -> int:
    """Stop the process that decodes the next file, so that it never answers. Returns its id."""
    process = reading._idle[-1]
    process.start()
    os.kill(process._process.pid, signal.SIGSTOP)
    return process._process.pid


@pytest.mark.slow
def test_decoding_in_a_worker_equals_decoding_in_this_process(folder, reading, runner):
    """The worker cannot open further files, from which a decoder might load modules."""
    pytest.importorskip("soxr")
    here = FileReader.load_reader(folder, limits=CONFIG.limits)
    files = {
        "image": [image(kind, 20, 14) for kind in KINDS],
        "video": [video(**options) for options in FORMS.values()],
        "audio": [wav(audio(0.3)), wav(audio(0.1))],
    }
    for kind, given in files.items():
        for one, known in zip(runner.run(read(reading, kind, *given)), here.read({kind: given})[kind], strict=True):
            assert one.text == known.text and one.arrays.keys() == known.arrays.keys()
            for name, array in known.arrays.items():
                assert one.arrays[name].dtype == array.dtype
                assert_array_equal(one.arrays[name], array)


@pytest.mark.slow(fast=("none", "large"))
@pytest.mark.parametrize(
    "content, names",
    [
        (b"GIF89a", ["image 1", "PNG", "JPEG"]),
        (black_image(9000, 9000), ["image 1", "9,000", "MediaLimits.max_pixels=64,000,000"]),
        (black_image(7900, 7900), ["image 1", "memory"]),
    ],
    ids=["none", "large", "memory"],
)
def test_unreadable_file_is_an_error_of_its_request(reading, runner, content, names):
    with refused(ApiError, *names) as error:
        runner.run(read(reading, "image", content))
    assert error.value.status == 400
    assert runner.run(read(reading, "image", SMALL))[0].arrays


@pytest.mark.parametrize(
    "text, name", [("§§§§", "base64"), ("A", "base64"), (" \n", "bytes")], ids=["other letters", "cut off", "empty"]
)
def test_invalid_base64_is_refused(reading, runner, text, name):
    async def run():
        async with reading.read({"image": [Upload("url", text)]}):
            pass

    with refused(ApiError, "url", name) as error:
        runner.run(run())
    assert error.value.param == "url"


def test_error_names_the_first_file_beyond_the_limits(folder, runner):
    """Limits on tokens and on bytes. The following files are not decoded."""
    reader = FileReader.load_reader(folder)
    (one,) = reader.read({"image": [SMALL]})["image"]
    tokens, size = one.text.count("<"), sum(array.nbytes for array in one.arrays.values())
    reader.read({"image": [SMALL] * 2}, max_tokens=2 * tokens, max_bytes=2 * size)
    for limits, names in (
        (dict(max_tokens=2 * tokens - 1), [f"{2 * tokens} tokens", 2 * tokens - 1]),
        (dict(max_bytes=2 * size - 1), [f"{2 * size:,} bytes", 2 * size - 1]),
    ):
        with refused(DataError, "image 2", *names):
            reader.read({"image": [SMALL, SMALL, SMALL[:200]]}, **limits)


def test_killed_worker_fails_only_its_request(reading, runner):
    async def run():
        pid = stop_next_process(reading)
        broken = asyncio.ensure_future(read(reading, "image", SMALL))
        other = asyncio.ensure_future(read(reading, "image", SMALL))
        assert (await other)[0].arrays
        os.kill(pid, signal.SIGKILL)
        with refused(ApiError, "-9") as error:
            await broken
        assert error.value.status == 500
        for _ in range(3):
            assert (await read(reading, "image", SMALL))[0].arrays

    runner.run(run())


@pytest.mark.slow
def test_worker_that_ended_while_idle_is_replaced_without_an_error(reading, runner):
    runner.run(read(reading, "image", SMALL))
    process = reading._idle[-1]._process
    process.kill()
    process.wait()
    assert runner.run(read(reading, "image", SMALL))[0].arrays and len(reading._all) == 2


@pytest.mark.slow
def test_refuses_files_beyond_the_processor_time_limit(folder, runner):
    async def run():
        reading = MediaFiles(folder, 100, dataclasses.replace(CONFIG, processes=1, seconds=0.02, memory=1 << 31))
        try:
            with refused(ApiError, "0.02 s") as error:
                await read(reading, "image", black_image(7900, 7900))
            assert error.value.status == 400
        finally:
            reading.close()

    runner.run(run())


def test_decoding_stops_when_its_client_disconnects(reading, runner):
    """A worker that does not stop soon is killed and replaced."""

    async def run():
        pid = stop_next_process(reading)
        work = asyncio.ensure_future(read(reading, "video", video()))
        while reading._idle[-1]._process is None or reading._idle[-1]._process.pid == pid:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert pid not in {process._process and process._process.pid for process in reading._all}
        assert len(reading._idle) == 2 and len(reading._all) == 2
        assert (await read(reading, "video", video()))[0].arrays
        while pathlib.Path(f"/proc/{pid}").exists():  # the waiting thread reaps the process
            await asyncio.sleep(0.01)

    runner.run(run())


@pytest.mark.slow
def test_one_worker_is_reserved_for_images(reading, runner):
    async def run():
        pid = stop_next_process(reading)
        videos = [asyncio.ensure_future(read(reading, "video", video())) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await read(reading, "image", SMALL))[0].arrays
        assert not any(one.done() for one in videos)
        os.kill(pid, signal.SIGCONT)
        assert all(found[0].arrays for found in await asyncio.gather(*videos))

    runner.run(run())


@pytest.mark.slow
def test_decoding_waits_until_arrays_are_freed(reading, runner):
    async def run():
        arrays = [np.zeros(500, np.uint8), np.zeros(500, np.uint8)]
        reading.hold(arrays)
        assert reading.bytes == 1000
        waiting = [asyncio.ensure_future(read(reading, "image", SMALL)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(work.done() for work in waiting) and len(reading._idle) == 2
        waiting.pop(0).cancel()
        del arrays
        gc.collect()
        assert all(found[0].arrays for found in await asyncio.gather(*waiting))
        assert reading.bytes == 0

    runner.run(run())


def test_worker_is_killed_after_the_wall_clock_limit(folder, runner):
    """For example on a machine that other programs keep busy."""

    async def run():
        reading = MediaFiles(folder, 100, dataclasses.replace(CONFIG, processes=1, wall_seconds=0.1))
        try:
            pid = stop_next_process(reading)
            with refused(ApiError, "0.1 s") as error:
                await read(reading, "image", SMALL)
            assert error.value.status == 400 and pid not in [one._process and one._process.pid for one in reading._all]
        finally:
            reading.close()

    runner.run(run())


def test_closing_kills_busy_workers(folder, runner):
    """The shutdown of the server does not wait for a video."""

    async def run():
        reading = MediaFiles(folder, 100, dataclasses.replace(CONFIG, processes=1))
        stop_next_process(reading)
        work = asyncio.ensure_future(read(reading, "image", SMALL))
        waiting = asyncio.ensure_future(read(reading, "image", SMALL))
        while reading._idle:
            await asyncio.sleep(0)
        reading.close()
        for one, statuses in ((work, (500, 503)), (waiting, (503,))):
            with pytest.raises(ApiError) as error:
                await one
            assert error.value.status in statuses
        reading._threads.shutdown(wait=True)  # returns

    runner.run(run())


@pytest.mark.slow
def test_directory_without_processor_class_is_an_error_of_the_server(tmp_path, runner, caplog):
    async def run():
        reading = MediaFiles(tmp_path, 100, dataclasses.replace(CONFIG, processes=1))
        try:
            with pytest.raises(ApiError) as error:
                await read(reading, "image", SMALL)
            assert error.value.status == 500 and str(tmp_path) not in error.value.message
        finally:
            reading.close()

    runner.run(run())
    assert_names(caplog.text, "processor_class")


def test_refuses_invalid_settings():
    for field in dataclasses.fields(MediaFilesConfig):
        if field.name != "limits":
            value = 0.0 if "seconds" in field.name else 0
            with refused(ConfigError, f"FilesConfig.{field.name}=0"):
                MediaFilesConfig(**{field.name: value})
    assert MediaFilesConfig().count >= 2
