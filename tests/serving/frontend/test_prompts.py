"""Requests become prompts: conversations, token ids and images."""

import asyncio
import base64
import io

import numpy as np
import pytest

from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.text.chat_template import ChatTemplate, Rendered
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.prompts import PromptPreparer, TextFrontend, create_frontend, longest_token
from tests.compare import assert_array_equal
from tests.encoders.directories import vision_directory
from tests.errors import assert_names, refused
from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import CHAT, Running, chat_frontend, serving


class PlainTemplate(ChatTemplate):
    """A chat template that writes the content of the first message, or raises an error if the content requests it."""

    def render_many(self, conversations):
        (conversation,) = conversations
        content = conversation.messages[0]["content"]
        return [ConversionError("it cannot be rendered") if content == "fail" else Rendered(content, None, [])]


def read(frontend: TextFrontend, texts: list[str], **options):
    """Prepare conversations at the same time. Returns their ids, or errors."""

    async def run():
        reader = PromptPreparer(frontend, max_length=64, **options)
        try:
            messages = [[{"role": "user", "content": text}] for text in texts]
            work = (reader.chat(one, {}, add_generation_prompt=True) for one in messages)
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            reader.close()

    return asyncio.run(run())


def test_an_error_of_one_conversation_does_not_affect_the_others():
    frontend = chat_frontend(chat=PlainTemplate(source=""))
    found = read(frontend, ["a", "fail", "b", "c"])
    assert [isinstance(prompt, ApiError) for prompt in found] == [False, True, False, False]
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
            return await preparer.chat(messages, {}, add_generation_prompt=True)
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
    (found,) = read(chat_frontend(chat=PlainTemplate(source="")), ["a" * (64 * longest * 4 + 1)])
    assert isinstance(found, ApiError) and found.code == "context_length_exceeded"


def test_texts_get_the_start_token_of_the_tokenizer():
    frontend = chat_frontend()
    assert frontend.encode("a") == (256, *frontend.encode("a", special=False)) == frontend.encode("<|begin|>a")
    assert frontend.encode("<|end|>", special=False) == (257,)


# --- images ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    """Write a vision-language model with a text tokenizer."""
    pytest.importorskip("PIL.Image")
    text = load_text_model(vision_directory(tmp_path_factory.mktemp("models") / "seeing"), "float32")
    return text, create_frontend(text)


@pytest.fixture(scope="module")
def server(vision_model):
    with serving(
        FakeEngine(vocab_size=vision_model[0].model.config.vocab_size), vision_model[1], max_files=2
    ) as running:
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


def test_uploaded_images_equal_files(vision_model, server, tmp_path):
    text, frontend = vision_model
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


def test_more_parts_than_tokens_are_refused_before_validation(server):
    """The parts themselves are invalid and would be refused with another error."""
    for content in ([{"type": "text", "text": ""}] * 513, [5] * 513):
        body = {"messages": [{"role": "user", "content": content}]}
        error = server.error("/v1/chat/completions", body)
        assert error["param"] == "messages" and error["code"] == "context_length_exceeded"


def test_refuses_images_with_too_many_pixels(server):
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (7000, 7000)).save(file, "PNG")  # 49 million pixels in 6 kB
    message = ask(server, url_of(file.getvalue()), code=400)["error"]["message"]
    assert_names(message, "image 1", "7,000", "MediaLimits.max_pixels=")
