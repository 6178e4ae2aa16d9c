"""Between text and decoder: what is fed, where it stops, what is shown."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.sampling import Greedy, Sample
from eqx_decoders.errors import ConfigError, ConversionError
from eqx_decoders.inference import text_model as text_module
from eqx_decoders.inference.stream_decoder import StreamDecoder
from eqx_decoders.inference.text_model import Files, TextModel, load_text_model
from eqx_decoders.io.huggingface.load import abstract_hf
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract
from eqx_decoders.model.provenance import Provenance
from tests.errors import refused


FIXTURES = Path(__file__).parents[1] / "fixtures"
CHAT = FIXTURES / "chat_llama"
HELLO = [{"role": "user", "content": "What is the answer?"}]


@pytest.fixture
def shapes(monkeypatch):
    """Models are loaded without their weights, and tokens come from a list."""
    fed = {"tokens": []}

    def stream(model, prompt, **options):
        fed.update(options, prompt=prompt, model=model)
        return (np.asarray([token]) for token in fed["tokens"])

    monkeypatch.setattr(text_module, "load_hf", lambda folder, dtype, **_: abstract_hf(folder, dtype))
    monkeypatch.setattr(text_module, "stream", stream)
    return fed


def write(text: TextModel, prompt, new: int = 8) -> str:
    return "".join(text.stream(prompt, max_new_tokens=new, sampler=Greedy()))


def test_a_conversation_is_fed_as_transformers_encodes_it(shapes):
    text = load_text_model(CHAT)
    recorded = json.loads((CHAT / "rendered.json").read_text())["chats"][1]
    assert recorded["add_generation_prompt"] and recorded["messages"] == HELLO
    write(text, HELLO)
    assert shapes["prompt"].tolist() == [recorded["ids"]]
    assert text.model.generation_config.sampler() == Sample(temperature=0.6, top_p=0.9)


def test_a_text_begins_as_its_tokenizer_says(shapes):
    text = load_text_model(CHAT)
    write(text, "the fox<|end|>")
    begin = [256, *text.tokenizer.encode("the fox").tolist(), 257]
    assert shapes["prompt"].tolist() == [begin]
    ours = dataclasses.replace(text, tokenizer=ByteTokenizer())
    assert ours.encode("a").tolist() == [256, 97]


def test_it_ends_with_any_of_the_ids_that_the_files_name(shapes, tmp_path):
    folder = Path(shutil.copytree(CHAT, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, -1]}))
    text = load_text_model(folder)
    assert text.stop_ids == (3, 257, 258)  # config.json, generation_config.json and tokenizer, generation_config.json
    for stop in (3, 258):  # also one that is no special token is not shown
        shapes["tokens"] = [*text.tokenizer.encode("the fox").tolist(), stop]
        assert write(text, HELLO) == "the fox" and shapes["stop_ids"] == (3, 257, 258)
    (folder / "generation_config.json").unlink()
    assert load_text_model(folder).stop_ids == (3, 257)


def test_characters_come_whole(shapes):
    text = load_text_model(CHAT)
    shapes["tokens"] = text.tokenizer.encode("Grö🦊é").tolist()
    pieces = list(text.stream(HELLO, max_new_tokens=9, sampler=Greedy()))
    assert "".join(pieces) == "Grö🦊é" and not any("\ufffd" in piece for piece in pieces)


def learned(room: int) -> TextModel:
    """A model of bytes with a table of `room` positions."""
    block = BlockConfig(mixer=None, mlp=MLPConfig(mlp_dim=8), pre_mlp_norm=RMSNormConfig())
    config = DecoderConfig(
        vocab_size=259,
        embed_dim=8,
        blocks=(block,),
        final_norm=RMSNormConfig(),
        positions=LearnedPositions(max_positions=room),
    )
    return TextModel(model=abstract(config), tokenizer=ByteTokenizer())


@pytest.mark.parametrize(
    "room, length, new, left",
    [
        (200, 10, 20, 20),
        (32, 12, 20, 20),
        (32, 30, 20, 2),  # fewer new tokens than wanted
        (32, 31, 20, 1),
    ],
)
def test_learned_positions_bound_prompt_and_answer(shapes, room, length, new, left):
    write(learned(room), "x" * (length - 1), new)  # and the id that begins a text
    assert shapes["prompt"].shape == (1, length) and shapes["max_new_tokens"] == left


def test_a_prompt_without_room_for_an_answer_is_refused(shapes):
    with refused(ConfigError, "32 tokens", "32 learned positions"):
        write(learned(32), "x" * 31)


def test_prompts_that_cannot_be_encoded_are_refused(shapes):
    with refused(ConfigError, "chat template"):
        write(learned(32), HELLO)
    text = load_text_model(CHAT)
    with refused(ConfigError, "tokenizer.json", "ByteTokenizer"):
        write(dataclasses.replace(text, tokenizer=ByteTokenizer()), HELLO)
    without = load_tokenizer(CHAT)
    without.start_ids = ()  # type: ignore[attr-defined]
    with refused(ConfigError, "no tokens"):
        write(dataclasses.replace(text, tokenizer=without), "")
    with refused(ConversionError, "Roles must alternate"):
        write(text, HELLO * 2)


def test_files_beside_a_prompt_need_a_model_in_a_directory_and_one_process(shapes, monkeypatch):
    text = load_text_model(CHAT)
    files = Files(images=("image.png",))
    with refused(ConfigError, "only text"):
        text.prepare("What is it?", files)
    seeing = dataclasses.replace(text, model=dataclasses.replace(abstract_hf(FIXTURES / "smolvlm"), origin=None))
    with refused(ConfigError, "preprocessor_config.json"):
        seeing.prepare("What is it?", files)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refused(ConfigError, "one process"):
        seeing.prepare("What is it?", files)


def test_wrong_published_stop_ids_are_refused(shapes):
    text = learned(32)
    origin = Provenance(family="llama", settings='{"eos_token_id": "x"}')
    with refused(ConversionError, "config.json", "eos_token_id=x"):
        write(dataclasses.replace(text, model=dataclasses.replace(text.model, origin=origin)), "x")


def test_the_model_of_a_directory_writes():
    """The one test here that compiles: greedy, until the end or the last token."""
    text = load_text_model(CHAT)
    sampler = Sample(temperature=0.8)
    one = "".join(text.stream(HELLO, max_new_tokens=12, sampler=sampler, key=jax.random.key(0)))
    assert one == "".join(text.stream(HELLO, max_new_tokens=12, sampler=sampler, key=jax.random.key(0)))
    assert one and "<|" not in one


# --- decoding as ids come ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request):
    return (
        ByteTokenizer() if request.param == "bytes" else train_bpe(["the cat, the hat; naïve café 東京 🙂🙂"] * 5, 300)
    )


@pytest.mark.slow(fast=("bytes",))
@given(ids=st.lists(st.integers(0, 255), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=100, deadline=None)
def test_stream_equals_decode_even_of_broken_text(tokenizer, ids, cuts):
    stream = StreamDecoder(tokenizer)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    pieces = [stream.push(ids[start:stop]) for start, stop in itertools.pairwise(edges)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_stream_never_shows_half_of_a_character(tokenizer):
    text = "é東🙂👩‍👩‍👧 plain " * 8
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(one) for one in tokenizer.encode(text)]
    assert "".join(pieces) == text and stream.flush() == ""
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces, "some ids must have been held back"


def test_stream_flush_shows_the_rest_and_starts_anew(tokenizer):
    stream = StreamDecoder(tokenizer)
    half = tokenizer.encode("a🙂")[:-1] if isinstance(tokenizer, ByteTokenizer) else tokenizer.encode("a東京")[:2]
    assert stream.push(half) == "a" and stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("b")) == "b" and stream.flush() == ""


def test_stream_keeps_context_for_decoders_that_strip_the_first_space():
    from tokenizers import Tokenizer as Inner, decoders, models, pre_tokenizers

    inner = Inner(models.WordLevel({"▁word": 0}, unk_token="▁word"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer, text = JsonTokenizer(inner), " ".join(["word"] * 80)
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(one) for one in tokenizer.encode(text)]
    assert len(pieces) == 80 and "".join(pieces) == text


def test_stream_with_byte_fallback():
    from tokenizers import Tokenizer as Inner, decoders, models

    vocab = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    inner = Inner(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer, text = JsonTokenizer(inner), "a東京🙂a"
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(one) for one in tokenizer.encode(text)]
    assert "".join(pieces) == text == tokenizer.decode(tokenizer.encode(text))
    assert not any("\ufffd" in piece for piece in pieces)
