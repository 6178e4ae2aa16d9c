"""From what clients send to what a model reads."""

import asyncio
import base64
import errno
import io

import numpy as np
import pytest

from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.text.chat_template import ChatTemplate, Rendered
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.serving.frontend import chat_rendering
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.create_frontend import create_frontend
from eqx_decoders.serving.frontend.prompts import PromptPreparer, TextFrontend, longest_token
from tests.compare import assert_array_equal
from tests.encoders.directories import vision_directory
from tests.errors import assert_names, refused
from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import CHAT, Running, chat_frontend, serving


class Slow(ChatTemplate):
    """Notes how many conversations each process renders; one that is told to fails ends its process."""

    batches: list[int] = []  # noqa: RUF012 - of the test

    def render_some(self, conversations, process=None):
        self.batches.append(len(conversations))
        texts = [one.messages[0]["content"] for one in conversations]
        if texts[0] == "fail":
            return [ConversionError("it takes more than 1 s of processor time")]
        done = texts[: texts.index("fail")] if "fail" in texts else texts
        return [Rendered(text, None, []) for text in done]


def read(frontend: TextFrontend, texts: list[str], **options):
    """What becomes of conversations that come at once: their ids, or errors."""

    async def run():
        reader = PromptPreparer(frontend, max_length=64, **options)
        try:
            messages = [[{"role": "user", "content": text}] for text in texts]
            work = (reader.chat(one, {}, answer=True) for one in messages)
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            reader.close()

    return asyncio.run(run())


def test_conversations_that_come_at_once_share_a_process():
    frontend, Slow.batches = chat_frontend(chat=Slow(source="")), []
    found = read(frontend, [f"text {number}" for number in range(40)])
    assert [frontend.tokenizer.decode(one.ids) for one in found] == [f"text {number}" for number in range(40)]
    assert sum(Slow.batches) == 40 and len(Slow.batches) <= 3


def test_one_that_ends_its_process_takes_no_others_with_it():
    frontend, Slow.batches = chat_frontend(chat=Slow(source="")), []
    found = read(frontend, ["a", "fail", "b", "c"])
    assert [isinstance(one, ApiError) for one in found] == [False, True, False, False]
    assert found[1].param == "messages"
    assert frontend.tokenizer.decode(found[3].ids) == "c"


SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content.replace('/no_think', '').strip() }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def chat_messages(messages: list[dict[str, str]]):
    """Prepare a conversation with a template that writes a message of the role system only at the start."""

    async def run():
        preparer = PromptPreparer(chat_frontend(chat=ChatTemplate(source=SYSTEM_FIRST)), max_length=512)
        try:
            return await preparer.chat(messages, {}, answer=True)
        finally:
            preparer.close()

    return asyncio.run(run())


@pytest.mark.parametrize("role", ["system", "developer"])
def test_refuses_messages_that_the_template_leaves_out(role):
    first, user, late = ({"role": role, "content": text} for text in ("Be kind.", "Hi", "Speak French."))
    user["role"] = "user"
    for messages, index in (([first, late, user], 1), ([first, user, late], 2), ([user, late], 1)):
        with refused(ApiError, f'messages[{index}].content="Speak French."', "'system'") as error:
            chat_messages(messages)
        assert error.value.param == f"messages[{index}].content"


@pytest.mark.parametrize("system", ["Be kind.", " Be \n kind. ", "/no_think Be kind.", "Be kind. /no_think", ""])
def test_accepts_messages_that_the_template_changes(system):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
    text = chat_frontend().tokenizer.decode(chat_messages(messages).ids)
    assert text == system.replace("/no_think", "").strip() + "<user>Hi"


def test_refuses_long_prompts_before_encoding():
    tokenizer = chat_frontend().tokenizer
    longest = max(len(tokenizer.name_of(index) or "") for index in range(tokenizer.vocab_size))
    assert longest_token(tokenizer) == longest and longest_token(ByteTokenizer()) == 1
    (found,) = read(chat_frontend(chat=Slow(source="")), ["a" * (64 * longest * 4 + 1)])
    assert isinstance(found, ApiError) and found.code == "context_length_exceeded"


def test_texts_begin_as_the_model_was_trained():
    frontend = chat_frontend()
    assert frontend.encode("a") == (256, *frontend.encode("a", special=False)) == frontend.encode("<|begin|>a")
    assert frontend.encode("<|end|>", special=False) == (257,)


# --- images ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A model that sees, as text and as a language."""
    pytest.importorskip("PIL.Image")
    text = load_text_model(vision_directory(tmp_path_factory.mktemp("models") / "seeing"), "float32")
    return text, create_frontend(text)


@pytest.fixture(scope="module")
def server(seeing):
    with serving(FakeEngine(vocab_size=seeing[0].model.config.vocab_size), seeing[1], max_files=2) as running:
        yield running


def png(height: int = 20, width: int = 24) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def ask(server: Running, *urls: str, code: int = 200):
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    content = [*images, {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return server.json("/v1/chat/completions", body, code=code)


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_uploaded_images_equal_files(seeing, server, tmp_path):
    text, frontend = seeing
    (tmp_path / "a.png").write_bytes(png())
    parts = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "what?"}]
    ids, media = text.prepare([{"role": "user", "content": parts}])
    ask(server, url_of(png()))
    request = server.engine.seen[-1]
    assert frontend.takes_images and request.prompt == tuple(ids.tolist())
    assert_array_equal(request.media.index, media.index)
    assert_array_equal(request.media.images.patches, media.images.patches)
    assert b'"sees": true' in server.call("/")[2]


def test_a_conversation_without_images_has_no_media(server):
    ask(server)
    assert server.engine.seen[-1].media is None


URL = "messages[0].content[0].image_url.url"
INVALID_IMAGES = {
    "remote": (["https://example.org/a.png"], [f'{URL}="https://example.org/a.png"', "data:", "base64"]),
    "empty": (["data:image/png;base64,"], [URL, "bytes"]),
    "no base64": (["data:image/png;base64,§"], [URL, "base64"]),
    "no PNG": (["data:image/png;base64,AAAA"], ["image 1", "PNG", "JPEG"]),
    "SVG": (["data:image/svg+xml;base64,PHN2Zy8+"], ["image 1", "PNG", "JPEG"]),
    "many": (["data:image/png;base64,AAAA"] * 3, ["messages", "2 files"]),
}


@pytest.mark.slow(fast=("remote", "empty", "no base64", "many"))
@pytest.mark.parametrize("case", INVALID_IMAGES)
def test_invalid_images_are_refused(server, case):
    urls, names = INVALID_IMAGES[case]
    message = ask(server, *urls, code=400)["error"]["message"]
    assert_names(message, *names)
    assert str(CHAT) not in message


def test_more_parts_than_tokens_are_refused_before_they_are_looked_at(server):
    """Where others would be refused for their form."""
    for content in ([{"type": "text", "text": ""}] * 513, [5] * 513):
        body = {"messages": [{"role": "user", "content": content}]}
        error = server.error("/v1/chat/completions", body)
        assert error["param"] == "messages" and error["code"] == "context_length_exceeded"


def test_images_that_are_too_large(server):
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (7000, 7000)).save(file, "PNG")  # 49 million pixels in 6 kB
    message = ask(server, url_of(file.getvalue()), code=400)["error"]["message"]
    assert_names(message, "image 1", "7,000", "MediaLimits.max_pixels=")


def test_a_process_waits_for_the_next_conversation():
    """And is gone when the reader is closed."""
    seen = []

    class Noting(Slow):
        def render_some(self, conversations, process=None):
            seen.append(process)
            return super().render_some(conversations)

    async def run():
        reader = PromptPreparer(chat_frontend(chat=Noting(source="")), max_length=64)
        for _ in range(3):
            await reader.chat([{"role": "user", "content": "a"}], {}, answer=True)
        assert reader._renderer is not None
        waiting = reader._renderer._short._process
        assert waiting is not None and waiting.alive
        reader.close()
        return waiting

    waiting = asyncio.run(run())
    assert seen[0] is None and None not in seen[1:] and not waiting.alive


def test_where_no_process_can_be_started_ahead_what_is_rendered_stays(monkeypatch):
    def full():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(chat_rendering, "RenderingProcess", full)
    assert [len(one.ids) for one in read(chat_frontend(chat=Slow(source="")), ["a", "bc"])] == [1, 2]


def test_an_error_of_a_batch_is_that_of_the_one_that_causes_it():
    class Breaking(Slow):
        def render_some(self, conversations, process=None):
            if any(one.messages[0]["content"] == "break" for one in conversations):
                raise ValueError("broken")
            return super().render_some(conversations)

    Slow.batches = []
    found = read(chat_frontend(chat=Breaking(source="")), ["a", "b", "break", "c", *["d"] * 40])
    assert [isinstance(one, ValueError) for one in found] == [one == 2 for one in range(44)]
    assert max(Slow.batches) > 1  # later ones share again


LONG = pytest.param(chat_rendering.LONG, marks=pytest.mark.slow)


@pytest.mark.parametrize("size", [1, LONG], ids=["short", "long"])
def test_clients_take_turns_at_texts_and_their_ids(size, monkeypatch):
    """However many one of them has sent before, and whatever of its texts takes long."""
    monkeypatch.setattr(chat_rendering, "BATCH", 1)
    rendered, encoded = [], []

    class Noting(Slow):
        def render_some(self, conversations, process=None):
            rendered.extend(one.messages[0]["content"][0] for one in conversations)
            return super().render_some(conversations)

    async def run():
        reader = PromptPreparer(chat_frontend(chat=Noting(source="")), max_length=2 * size + 64)
        try:
            given = [*"aaaaaab"]
            work = [
                reader.chat([{"role": "user", "content": one * size}], {}, answer=True, client=one) for one in given
            ]
            assert all(one.ids for one in await asyncio.gather(*work))
            work = [reader.run(encoded.append, one, client=one) for one in given]
            await asyncio.gather(*work)
        finally:
            reader.close()

    asyncio.run(run())
    assert rendered.index("b") <= 1 and len(rendered) == 7
    assert encoded == [*"abaaaaa"]
