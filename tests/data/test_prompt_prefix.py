"""Test that training rows start with the tokens of the prompt at inference, for all kinds of tokenizers."""

import json
import random

import numpy as np
import pytest

from eqx_decoders.data.chats import TOKEN_SPANS_PROMPT_END, TOKENIZED_SEPARATELY
from eqx_decoders.data.preferences import read_labeled_completions, read_pairs
from eqx_decoders.data.prompt_batches import read_prompts
from eqx_decoders.data.sources.documents import ReadReport
from eqx_decoders.data.store.corpus import read_documents
from eqx_decoders.data.store.shards import Shard, TokenizationConfig, write_shard
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, prompt_ids, train_bpe
from eqx_decoders.serving.frontend.prompts import TextFrontend
from tests.data.test_chats import CHATML, write


WORDS = [
    "the",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    ".",
    "A:",
    "Rome",
    "Q:",
    "1234",
    "67",
    "é",
    "ü",
    "日本",
    "\n\n",
    "\n",
    "a",
    "",
    "b",
    "",
    "",
    "c",
    "\t",
    "x",
]
TEXTS = [" ".join(random.Random(seed).choices(WORDS, k=30)) for seed in range(300)]
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
PIECES = ["A:", " ", "  ", "Paris", " Rome", "\n", "\n\n", "12", "345", "é", "日", "<|end|>", "<s>", "a", ".", "[T]"]
# newlines, spaces and words on both sides of the boundary
TEMPLATES = {
    "chatml": CHATML,
    "lines": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "words": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}


def trained_tokenizer(kind: str) -> JsonTokenizer:
    """Train a small tokenizer of the given kind. `bos`: the post-processor puts `<s>` before a text."""
    from tokenizers import (
        AddedToken,
        Tokenizer as Inner,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    model, *options = kind.split()
    if model == "unigram":
        inner = Inner(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>", *SPECIAL])
    else:
        inner = Inner(models.BPE(unk_token=None if model == "bytes" else "<unk>", byte_fallback=False, fuse_unk=True))
        alphabet = pre_tokenizers.ByteLevel.alphabet() if model == "bytes" else []
        special = list(SPECIAL) if model == "bytes" else ["<unk>", *SPECIAL]
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    if model == "bytes":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="prefix" in options)
        inner.decoder = decoders.ByteLevel()
    elif "legacy" in options:  # Llama 2
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        scheme = next((option for option in options if option in ("first", "always", "never")), "first")
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split="split" in options)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    inner.train_from_iterator(TEXTS, trainer)
    inner.add_tokens([AddedToken("[T]", normalized=False)])
    if "strips" in options:
        inner.add_special_tokens([AddedToken("<|assistant|>", rstrip=True), AddedToken("<|end|>", lstrip=True)])
    if "bos" in options:
        start = ("<s>", inner.token_to_id("<s>"))
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return JsonTokenizer(inner, bos=None if "nobos" in options else "<s>", eos="</s>")


KINDS = [
    *("bytes bos", "bytes", "bytes nobos", "bytes prefix bos", "bytes bos strips"),
    *("pieces first bos", "pieces always bos", "pieces never", "pieces first split", "pieces legacy bos"),
    *("unigram first bos", "unigram always"),
]
_made: dict[str, Tokenizer] = {"own": ByteTokenizer(), "trained here": train_bpe(TEXTS, 400)}


def tokenizer_of(kind: str) -> Tokenizer:
    pytest.importorskip("tokenizers")
    if kind not in _made:
        _made[kind] = trained_tokenizer(kind)
    return _made[kind]


def rows_of(path: str, tokenizer: Tokenizer, tmp_path, template: ChatTemplate | None = None):
    """Return the tokens and the targets of each document of a file, and the report of the reader."""
    report = ReadReport()
    documents = read_documents(path, tokenizer=tokenizer, report=report)
    write_shard(tmp_path / "shard", documents, TokenizationConfig(tokenizer, template=template), report=report)
    shard = Shard(tmp_path / "shard")
    return [(shard[number].tolist(), shard.targets(number)) for number in range(len(shard))], report


def pairs_of_texts(count: int) -> list[tuple[str, str]]:
    rng = random.Random(1)
    found = [
        ("".join(rng.choices(PIECES, k=rng.randint(1, 5))), "".join(rng.choices(PIECES, k=rng.randint(1, 4))))
        for _ in range(count)
    ]
    return [("A: ", "Paris"), ("x", "\n\ny"), ("a\n", "\nb"), *found]


def decoded(tokenizer: Tokenizer, ids) -> str:
    return tokenizer.decode(ids, special=True) if isinstance(tokenizer, JsonTokenizer) else tokenizer.decode(ids)


@pytest.mark.slow(fast=("own", "trained here", "bytes prefix bos", "pieces first bos"))
@pytest.mark.parametrize("kind", ["own", "trained here", *KINDS])
def test_training_rows_start_with_the_inference_prompt(kind, tmp_path):
    """Prompts and completions are texts. This holds for `generate`, the server and RL."""
    tokenizer, pairs = tokenizer_of(kind), pairs_of_texts(60)
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    rows, report = rows_of(write(tmp_path / "a.jsonl", *records), tokenizer, tmp_path)
    asked = read_prompts(write(tmp_path / "b.jsonl", *records), tokenizer, max_tokens=10_000).prompts
    frontend, mismatches = TextFrontend(tokenizer=tokenizer), 0
    for (prompt, completion), (row, targets), question in zip(pairs, rows, asked, strict=True):
        ids = prompt_ids(tokenizer, prompt).tolist()
        assert list(question.tokens) == ids == list(frontend.encode(prompt))
        if row[: len(ids)] != ids:
            mismatches += 1
            continue
        assert not targets[: len(ids)].any() and targets[max(1, len(ids)) :].all()
        if not any(name in prompt + completion for name in ("<|end|>", "<s>")):
            end = [tokenizer.eos_id]
            assert decoded(tokenizer, row) == decoded(
                tokenizer, prompt_ids(tokenizer, prompt + completion).tolist() + end
            )
    assert mismatches <= report.notes[TOKEN_SPANS_PROMPT_END] <= 10
    if kind in ("bytes bos", "trained here"):
        assert mismatches == 0 and report.notes[TOKENIZED_SEPARATELY] > 2


@pytest.mark.parametrize("kind", ["own", "trained here", *KINDS])
def test_documents_start_like_prompts(kind, tmp_path):
    """They start with bos or without a special token, but never with eos as a substitute."""
    tokenizer = tokenizer_of(kind)
    ((row, _),), _ = rows_of(write(tmp_path / "a.jsonl", {"text": "the capital of France"}), tokenizer, tmp_path)
    ids = prompt_ids(tokenizer, "the capital of France").tolist()
    assert row == [*ids, tokenizer.eos_id]
    if "nobos" in kind or "bos" not in kind:
        assert row[0] != tokenizer.eos_id or kind == "trained here"


@pytest.mark.parametrize("kind", ["trained here", *KINDS])
def test_preference_answers_follow_the_inference_prompt(kind, tmp_path):
    tokenizer, pairs = tokenizer_of(kind), pairs_of_texts(30)
    records = [{"prompt": p, "chosen": c + "a", "rejected": c + "b"} for p, c in pairs]
    found = read_pairs(write(tmp_path / "a.jsonl", *records), tokenizer, seq_len=10_000)
    labeled = [{"prompt": p, "completion": c + "a", "label": True} for p, c in pairs]
    single = read_labeled_completions(write(tmp_path / "b.jsonl", *labeled), tokenizer, seq_len=10_000)
    assert len(found.examples) == len(single.examples) == len(pairs)
    mismatches = 0
    for (prompt, _), pair, answer in zip(pairs, found.examples, single.examples, strict=True):
        ids = prompt_ids(tokenizer, prompt).tolist()
        assert pair.completions[0].tokens.tolist() == answer.completions[0].tokens.tolist()
        mismatches += sum(each.prompt.tolist() != (ids or each.tokens[:1].tolist()) for each in pair.completions)
    assert mismatches == found.notes.get(TOKEN_SPANS_PROMPT_END, 0) and mismatches <= 10


@pytest.mark.slow(fast=("trained here-chatml", "bytes bos-lines", "pieces first bos-words"))
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["trained here", *KINDS])
def test_conversations_start_with_the_generation_prompt(kind, name, tmp_path):
    tokenizer, template, rng = tokenizer_of(kind), ChatTemplate(source=TEMPLATES[name]), random.Random(2)
    contents = [["".join(rng.choices(PIECES[:11], k=3)) for _ in range(4)] for _ in range(20)]
    contents.append(["a", "\n b", "c", " d"])
    roles = ("user", "assistant") * 2
    conversations = [
        [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)] for texts in contents
    ]
    rows, report = rows_of(
        write(tmp_path / "a.jsonl", *({"messages": conversation} for conversation in conversations)),
        tokenizer,
        tmp_path,
        template,
    )
    requests = template.render_many([Conversation(conversation[:1], {}, True) for conversation in conversations])
    mismatches = 0
    for request, (row, targets) in zip(requests, rows, strict=True):
        ids = tokenizer.encode(request.text, special=True).tolist()
        if row[: len(ids)] != ids:
            mismatches += 1
            continue
        assert int(np.argmax(targets)) == len(ids)
    assert mismatches <= report.notes[TOKEN_SPANS_PROMPT_END] + report.notes[TOKENIZED_SEPARATELY] and mismatches <= 5


@pytest.mark.slow(fast=("bytes bos-True",))
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", ["trained here", *KINDS])
def test_generation_prompt_may_end_within_the_targets(kind, marked, tmp_path):
    """The generation prompt starts the reasoning and ends with whitespace that a token may join with the next text."""
    answer = "<|assistant|>{{ m.content }}<|end|>"
    answer = "{% generation %}" + answer + "{% endgeneration %}" if marked else answer
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}<|user|>{{ m.content }}<|end|>"
    )
    source += "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>a:' }}{{ space }}{% endif %}"
    tokenizer, user = tokenizer_of(kind), {"role": "user", "content": "Q:"}
    for space, text in (("\n", "\nParis"), ("\n", " b"), ("\n", "Paris"), (" ", "Paris")):
        template, content = ChatTemplate(source=source, variables={"space": space}), f"a:{space}{text}"
        record = {"messages": [user, {"role": "assistant", "content": content}]}
        ((row, targets),), report = rows_of(write(tmp_path / "a.jsonl", record), tokenizer, tmp_path, template)
        ids = tokenizer.encode(template.render([user]), special=True).tolist()
        assert row[: len(ids)] == ids or report.notes[TOKEN_SPANS_PROMPT_END] == 1
        assert targets[len(ids) :].all()


def test_special_tokens_in_rendered_chats(tmp_path):
    """A text that starts with the name of a special token and contains another is tokenized like a conversation."""
    tokenizer = tokenizer_of("bytes bos")
    text = "<s><|user|>a b<|end|><|assistant|>Paris<|end|>"
    records = [{"text": text}, {"text": "<s>strike</s-->"}, {"text": "a <s> b <|end|>"}]
    path = write(tmp_path / "a.jsonl", *records)
    rows, report = rows_of(path, tokenizer, tmp_path)
    assert rows[0][0] == [*tokenizer.encode(text, special=True).tolist(), tokenizer.eos_id]
    assert [*report.notes.values()] == [1]
    for row, record in zip(rows[1:], records[1:], strict=True):
        assert row[0] == [*tokenizer.start_ids, *tokenizer.encode(record["text"]).tolist(), tokenizer.eos_id]
    for setting, encoded in ((True, records), (False, [])):
        config = TokenizationConfig(tokenizer, special_tokens_in_text=setting)
        write_shard(tmp_path / "b", read_documents(path), config)
        shard = Shard(tmp_path / "b")
        for number, record in enumerate(records):
            ids = tokenizer.encode(record["text"], special=bool(encoded)).tolist()
            assert shard[number].tolist()[-len(ids) - 1 : -1] == ids
    assert json.dumps(report.lines(3))
