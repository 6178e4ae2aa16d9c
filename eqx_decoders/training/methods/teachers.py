"""Teachers of a run: models with the student's tokenizer, loaded or behind an OpenAI-compatible server."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import ConfigError, EqxDecodersError, check
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.saved_signals import RowSegment
from eqx_decoders.training.run.log import print_status


def load_teacher(source: str, tokenizer: Tokenizer, execution: Execution, field: str = "distill.teacher") -> Decoder:
    """Load a teacher. Raises ConfigError if its vocabulary differs. `field`: the setting that names it, for errors."""
    with StatusLine(f"loading the teacher {source}", remains="what was downloaded is kept"):
        remedy = "Use a teacher with the student's tokenizer, or train on texts that the teacher generated"
        teacher_tokenizer = load_tokenizer(resolve(source).path)
        check_same_tokens(tokenizer, teacher_tokenizer, f"{field}={source!r}", "the student's", remedy)
        return load_hf(source, **vars(execution))


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, other_name: str, owner: str, remedy: str) -> None:
    """Raise ConfigError unless both tokenizers have the same token for each id. Their merge rules may differ.

    `other_name`: the model of `other`; `owner`: the model of `tokenizer`, such as "the student's".
    """
    if tokenizer.content_hash == other.content_hash:
        return
    if not (isinstance(tokenizer, JsonTokenizer) and isinstance(other, JsonTokenizer)):
        raise ConfigError(
            f"{other_name} has another vocabulary: a {type(other).__name__}, but {owner} tokenizer is a "
            f"{type(tokenizer).__name__}. {remedy}."
        )
    for index in range(max(tokenizer.vocab_size, other.vocab_size)):
        token, other_token = tokenizer.name_of(index), other.name_of(index)
        check(
            token == other_token,
            f"{other_name} has another vocabulary: its token {index} is {other_token!r}, {owner} is {token!r}. "
            f"{remedy}.",
        )


# --- teachers behind a server -----------------------------------------------------------------------------------------


API_KEY = "OPENAI_API_KEY"
MAX_CONNECTIONS, MAX_ATTEMPTS, TIMEOUT = 16, 6, 600.0
BUSY = (429, 502, 503, 504)
SAMPLE_TEXT = "The quick brown fox, 12345 + 67.8: naïve café – 你好, мир! def f(x):\n    return x"


def is_server(teacher: str) -> bool:
    """Return whether a teacher is the address of a server."""
    return teacher.startswith(("http://", "https://"))


class TeacherServer:
    """Teacher behind a server that returns log-probs of prompts (vLLM, or `scripts/serve.py`).

    **Arguments:**

    - `url`: address of the API, such as `http://host:8000/v1`. The API key is the environment variable OPENAI_API_KEY.
    - `top`: number of most likely tokens for each token.
    - `vocab_size`: vocabulary size of the student.

    Raises EqxDecodersError if the server does not respond, or returns fewer tokens.
    """

    def __init__(self, url: str, *, top: int, vocab_size: int):
        self._url, self._top, self._vocab_size = url.rstrip("/"), top, vocab_size
        self.name = str(self._request("/models")["data"][0]["id"])

    def __call__(self, batch: Batch, segments: Sequence[RowSegment]) -> Mapping[str, np.ndarray]:
        """Return the teacher's most likely tokens and their log-probs for some segments of a batch."""
        shape = (*np.shape(batch.tokens), self._top)
        ids, log_probs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        with ThreadPoolExecutor(MAX_CONNECTIONS) as threads:
            results = threads.map(self.top_tokens, [segment.tokens for segment in segments])
            for segment, (segment_ids, segment_log_probs) in zip(segments, results, strict=True):
                ids[segment.row, segment.span] = segment_ids
                log_probs[segment.row, segment.span] = segment_log_probs
        return {"top_ids": ids, "top_log_probs": log_probs}

    def top_tokens(
        self, tokens: Int32[np.ndarray, "length"]
    ) -> tuple[Int32[np.ndarray, "length top"], Float32[np.ndarray, "length top"]]:
        """Return the most likely tokens at each position and their log-probs; zeros at the first position."""
        body = {"model": self.name, "prompt": tokens.tolist(), "add_special_tokens": False}
        body |= {"echo": True, "logprobs": self._top, "max_tokens": 1, "return_tokens_as_token_ids": True}
        response = self._request("/completions", body)
        positions = response["choices"][0]["logprobs"]["top_logprobs"][1 : len(tokens)]
        first = [(0, 0.0)] * self._top
        pairs = np.array([first, *(self._sorted_pairs(position) for position in positions)], np.float64)
        return pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32)

    def _sorted_pairs(self, log_probs: Mapping[str, float]) -> list[tuple[int, float]]:
        """Return the `top` most likely ids of a position; the server may add the text's own token."""
        pairs = [(int(name.removeprefix("token_id:")), value) for name, value in log_probs.items()]
        check(
            len(pairs) >= self._top,
            f"distill.top={self._top}, but {self._url} returns only {len(pairs)} tokens for a position: lower it.",
            EqxDecodersError,
        )
        max_id = max(index for index, _ in pairs)
        check(
            max_id < self._vocab_size,
            f"{self._url} returns token {max_id}, but the student's vocabulary has {self._vocab_size} tokens: use a "
            "teacher with the student's tokenizer.",
            EqxDecodersError,
        )
        return sorted(pairs, key=lambda pair: -pair[1])[: self._top]

    def check_tokens(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the server tokenizes a text differently; print a line if it has no /tokenize."""
        try:
            address = self._url.removesuffix("/v1") + "/tokenize"
            body = {"model": self.name, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
            tokens = self._request(address, body)["tokens"]
        except EqxDecodersError:
            print_status(f"{self._url} has no /tokenize: cannot check that it uses the student's tokenizer")
            return
        check(
            tokens == tokenizer.encode(SAMPLE_TEXT).tolist(),
            f"distill.teacher={self._url!r} has another vocabulary: it encodes a text to other ids. Use a teacher with "
            "the student's tokenizer.",
        )

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a response; retry if the server is busy."""
        address = path if "://" in path else f"{self._url}{path}"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(API_KEY, 'none')}"}
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(MAX_ATTEMPTS):
            is_last = attempt == MAX_ATTEMPTS - 1
            try:
                request = urllib.request.Request(address, data, headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or is_last:
                    text = error.read().decode(errors="replace")[:300]
                    raise EqxDecodersError(f"{address} returned status {error.code}: {text}.") from error
            except (OSError, ValueError) as error:
                if is_last or isinstance(error, ValueError):
                    raise EqxDecodersError(f"{address} does not respond: {error}. Is the server running?") from error
            time.sleep(0.5 * 2**attempt)
        raise AssertionError  # the last attempt has returned or raised
