"""Requests by which one client could block all other clients, sent to a local server.

    python tests/serving/attacks.py                            # all attacks, against this checkout
    python tests/serving/attacks.py A1 A5 --tree ../older      # two attacks, against another checkout

During each attack, an ordinary client reads a text stream, another client requests /health, and a third client sends
the kind of request that the attack should block. The program prints a table row per attack: the longest waiting time
of each client in seconds, the number of failed requests of the third client, and the server's memory in MB before the
attack, at its maximum, and afterwards. All requests go to 127.0.0.1. Each attack sends a fixed number of requests, and
ends after at most one minute.
"""

import argparse
import base64
import contextlib
import dataclasses
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST = 60.0  # maximum seconds per attack
HEADERS = {"Content-Type": "application/json"}
HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
TREE = Path(__file__).parents[2]
# A server whose image program fails once: no input is known to make the program fail.
BROKEN = """
import sys
from eqx_decoders.cli.serve import main
failed = []
def broken(*given, **named):
    if len(failed) < 1:
        failed.append(1)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    return works(*given, **named)
try:
    from eqx_decoders.serving.engine.multimodal_prefill import MultimodalPrefill as owner
    name = "prefill"
except ImportError:  # in older checkouts
    try:
        from eqx_decoders.serving.sight import Sight as owner
        name = "read"
    except ImportError:
        from eqx_decoders.serving import engine as owner
        name = "prefilled"
works = getattr(owner, name)
setattr(owner, name, broken)
sys.exit(main())
"""


class Server:
    """Run `scripts/serve.py` of a checkout on a free port."""

    def __init__(self, tree: Path, folder: Path, model: Path, *flags: object, code: str = ""):
        self.log = folder / "log"

        script = ["-c", code] if code else [str(tree / "scripts" / "serve.py")]
        command = [sys.executable, *script, "--model", str(model), "--served-name", "m", "--port", "0"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree)}
        with self.log.open("wb") as log:
            words = [*command, *map(str, flags)]
            pipes: Any = dict(stdout=subprocess.PIPE, stderr=log)
            self.process = subprocess.Popen(words, cwd=tree, env=env, **pipes)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if "http" not in line:
            raise SystemExit(f"no server: {self.log.read_text()[-2000:]}")
        self.port = int(line.strip().rpartition(":")[2])

    @property
    def memory(self) -> float:
        """Return the resident memory of the server process in MB."""
        rows = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) / 1e3 for row in rows if row.startswith("VmRSS"))

    def send(self, path: str, body: Any, seconds: float = MOST) -> int:
        """Send a request and discard the response. Returns its status, or 0 if there was no response."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            link.request("GET" if data is None else "POST", path, data, HEADERS)
            answer = link.getresponse()
            while answer.read(1 << 20):
                pass
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            link.close()

    def begin(self, path: str, body: bytes, length: int | None = None) -> socket.socket:
        """Send a request without reading the response."""
        link = socket.create_connection(("127.0.0.1", self.port), timeout=MOST)
        link.sendall(HEAD.format(path, len(body) if length is None else length).encode() + body)
        return link


@dataclasses.dataclass
class Observations:
    """The longest waiting times of the ordinary clients in seconds, failed requests, and the server's memory in MB."""

    stream: float = 0.0
    health: float = 0.0
    other: float = 0.0
    refused: int = 0
    memory: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Watch:
    """Three ordinary clients that send requests during an attack. `other`: path and body for the third client."""

    def __init__(self, server: Server, other: tuple[str, Any], stream: Any):
        self._server, self._other, self._stream = server, other, stream
        self._end, self.seen = threading.Event(), Observations()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Observations]:
        before, most = self._server.memory, [0.0]

        def weigh() -> None:
            most[0] = max(most[0], self._server.memory)

        def other() -> None:
            self.seen.refused += self._server.send(*self._other) != 200

        jobs: dict[str, Callable[[], None]] = {"health": lambda: self._health(), "other": other, "": weigh}
        threads = [threading.Thread(target=self._read, daemon=True)]
        threads += [threading.Thread(target=self._again, args=pair, daemon=True) for pair in jobs.items()]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        self.seen.stream = self.seen.health = self.seen.other = 0.0
        try:
            yield self.seen
        finally:
            time.sleep(0.5)
            self._end.set()
            for thread in threads:
                thread.join(MOST)
            self.seen.memory = before, most[0], self._server.memory

    def _health(self) -> None:
        self._server.send("/health", None)

    def _again(self, name: str, call: Callable[[], None]) -> None:
        while not self._end.is_set():
            begun = time.monotonic()
            call()
            if name:
                setattr(self.seen, name, max(getattr(self.seen, name), time.monotonic() - begun))
            time.sleep(0.02)

    def _read(self) -> None:
        """Read streams one after another. Also counts the silence at the end of the attack."""
        last = [time.monotonic()]

        def note() -> None:
            now = time.monotonic()
            self.seen.stream, last[0] = max(self.seen.stream, now - last[0]), now

        while not self._end.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                link = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=MOST)
                link.request("POST", COMPLETIONS, json.dumps(self._stream), HEADERS)
                answer = link.getresponse()
                while (row := answer.readline()) and not self._end.is_set():
                    if row.startswith(b"data"):
                        note()
                link.close()
            time.sleep(0.01)
        note()


@dataclasses.dataclass(frozen=True)
class Attack:
    """An attack function, the model and flags of the server, and the request of the third ordinary client."""

    do: Callable[[Server], object]
    model: Callable[[Path], Path]
    flags: str = ""
    other: Callable[[], tuple[str, Any]] = lambda: (COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    stream: Any = "a"
    code: str = ""


def at_once(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + MOST
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


# --- models -----------------------------------------------------------------------------------------------------------


def chat_model(folder: Path) -> Path:
    """Copy the fixture with a chat template, and add one long token, as published vocabularies have."""
    from tokenizers import AddedToken, Tokenizer

    shutil.copytree(TREE / "tests" / "fixtures" / "chat_llama", folder)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("-" * 128, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def wide_model(folder: Path) -> Path:
    """Write a model with large keys and values: 64 MB for 2,048 tokens."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    shutil.copytree(TREE / "tests" / "fixtures" / "chat_llama", folder)
    sizes = dict(hidden_size=64, num_attention_heads=16, num_key_value_heads=16, head_dim=64, num_hidden_layers=4)
    more = dict(intermediate_size=64, max_position_embeddings=4096)
    config = json.loads((folder / "config.json").read_text()) | sizes | more
    (folder / "config.json").write_text(json.dumps(config))

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.1).astype(np.float32)

    weights = {"model.embed_tokens.weight": weight(320, 64), "model.norm.weight": weight(64)}
    for layer in range(4):
        at = f"model.layers.{layer}."
        weights |= {f"{at}self_attn.{name}_proj.weight": weight(1024, 64) for name in "qkv"}
        weights |= {f"{at}mlp.{name}_proj.weight": weight(64, 64) for name in ("gate", "up", "down")}
        weights |= {f"{at}{name}_layernorm.weight": weight(64) for name in ("input", "post_attention")}
        weights[f"{at}self_attn.o_proj.weight"] = weight(64, 1024)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def vision_model(folder: Path) -> Path:
    """Write a small Qwen2.5-VL with a tokenizer of 64 words, w0 to w63."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    kinds = ("vision_start", "vision_end", "image_pad", "video_pad", "audio_pad")
    special = dict(zip(range(51, 56), kinds, strict=True))
    words = [f"<|{special[i]}|>" if i in special else f"w{i}" for i in range(64)]
    tokenizer: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(words[i], special=True) for i in special])
    shutil.copytree(TREE / "tests" / "fixtures" / "qwen2_5_vl", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w63"}))
    sizes = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16, "max_pixels": 4096}
    settings = {"processor_class": "Qwen2_5_VLProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    part = "{% if p.type == 'text' %}{{ p.text }}{% else %}{{ '<|' + p.type + '_pad|> ' }}{% endif %}"
    parts = f"{{% for p in m.content %}}{part}{{% endfor %}}"
    body = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    head = "{{ 'w1 ' if m.role == 'user' else 'w2 ' }}"
    source = f"{{% for m in messages %}}{head}{body}{{{{ ' w9 ' }}}}{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(source)
    return folder


# --- request bodies ---------------------------------------------------------------------------------------------------


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}


def address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode()


def image(width: int = 8, height: int = 8, text: str = "w20 ") -> list[dict[str, Any]]:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    url = address("image/png", file.getvalue())
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def video(frames: int) -> list[dict[str, Any]]:
    """Return a message with a video of gray frames of 1920 x 1080 pixels, which is a few kilobytes large."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream: Any = out.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 1920, 1080, "yuv420p"
        stream.options = {"preset": "ultrafast", "crf": "40", "g": "250"}
        frame = av.VideoFrame(1920, 1080, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes([100]) * plane.buffer_size)
        for number in range(frames):
            frame.pts = number
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    url = address("video/x-matroska", file.getvalue())
    return [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "w20"}]


def schema(number: int) -> dict[str, Any]:
    """Return a different JSON schema for each number; 1.3 kB that take half a second to compile."""
    count = 12

    def link(i: int) -> dict[str, Any]:
        following = {"$ref": f"#/$defs/d{i + 1}"}
        return {"anyOf": [following, {"allOf": [following, {"required": [f"k{i}"]}]}]}

    last = {f"d{count}": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    return {"title": str(number), "$ref": "#/$defs/d0", "$defs": {f"d{i}": link(i) for i in range(count)} | last}


# --- the attacks ------------------------------------------------------------------------------------------------------


def long_text(server: Server) -> None:
    body = json.dumps({"prompt": ("hello world and more of it, " * 150_000)[:3_900_000], "max_tokens": 1}).encode()
    for _ in range(3):
        server.send(COMPLETIONS, body)


def text_beside_image(server: Server) -> None:
    body = json.dumps(chat(image(text="w7 " * 1_300_000))).encode()
    for _ in range(3):
        server.send(CHAT, body)


def scores(server: Server) -> None:
    server.send(COMPLETIONS, dict(prompt=[5, 6, 7, 8] * 511, echo=True, logprobs=20, n=128, max_tokens=1))
    server.send(COMPLETIONS, dict(prompt=[5, 6, 7, 8] * 511, echo=True, logprobs=20, n=6, max_tokens=1))


def long_conversations(server: Server) -> None:
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = json.dumps({"max_tokens": 1, "messages": pair * 58_000 + pair[:1]}, separators=(",", ":")).encode()
    at_once(*[lambda: [server.send(CHAT, body) for _ in range(3)]] * 4)


def priorities(server: Server) -> list[socket.socket]:
    links = []
    for number in range(20):
        asked = dict(prompt=[5, 6, 7, 8] * 450, max_tokens=240, stream=True, ignore_eos=True, priority=-1 - number)
        links.append(server.begin(COMPLETIONS, json.dumps(asked).encode()))
        time.sleep(0.5)
    time.sleep(5)
    return links


def videos(server: Server) -> None:
    body = json.dumps(chat(video(300))).encode()
    for _ in range(2):
        server.send(CHAT, body, seconds=1.0)
    time.sleep(8)


def sizes(server: Server) -> None:
    for width, height in ((12, 8), (20, 12), (28, 16), (36, 20), (44, 24)):
        server.send(CHAT, chat(image(width, height)))


def failing_image(server: Server) -> None:
    server.send(CHAT, chat(image(12, 8)))
    time.sleep(2)


def schemas(server: Server) -> None:
    bodies = [json.dumps(dict(prompt="a", max_tokens=1, guided_json=schema(number))).encode() for number in range(32)]
    at_once(*[lambda mine=bodies[at::8]: [server.send(COMPLETIONS, one) for one in mine] for at in range(8)])


SEES = "--max-length 256 --max-batch-size 4 --prefill-chunk 32"
ATTACKS = {
    "A1": Attack(long_text, chat_model, "--max-length 8192 --max-batch-size 4"),
    "A2": Attack(text_beside_image, vision_model, SEES, lambda: (CHAT, chat("w7")), "w7"),
    "A3": Attack(scores, chat_model, "--max-length 2048"),
    "A5": Attack(long_conversations, chat_model, "--max-length 2048 --max-batch-size 4", lambda: (CHAT, chat("a"))),
    "A6": Attack(
        priorities,
        wide_model,
        "--max-length 2048 --max-batch-size 2 --prefill-chunk 512 --token-budget 2048 --prefix-cache-bytes 0",
    ),
    "A8": Attack(videos, vision_model, SEES, lambda: (CHAT, chat(image())), "w7"),
    "A9": Attack(sizes, vision_model, SEES, lambda: (CHAT, chat("w7")), "w7"),
    "A10": Attack(failing_image, vision_model, SEES, lambda: (CHAT, chat("w7")), "w7", code=BROKEN),
    "A11": Attack(schemas, chat_model, "--max-length 512 --max-batch-size 4", lambda: (CHAT, chat("a"))),
}


def run_attack(name: str, tree: Path = TREE) -> Observations:
    """Run one attack against the server of a checkout. Returns what the ordinary clients observed."""
    attack = ATTACKS[name]
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        model = attack.model(Path(folder) / "m")
        server = Server(tree, Path(folder), model, *attack.flags.split(), code=attack.code)
        try:
            other = attack.other()
            if not attack.code:
                server.send(*other)  # compiles programs or starts processes
            stream = dict(prompt=attack.stream, max_tokens=200, stream=True, ignore_eos=True)
            with Watch(server, other, stream).watching() as seen:
                kept = attack.do(server)
            for link in kept if isinstance(kept, list) else ():
                link.close()
        finally:
            server.process.kill()
            server.process.wait()
    return seen


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []], default=[], help="attacks to run (default: all)")
    parser.add_argument("--tree", type=Path, default=TREE, help="checkout whose server is attacked")
    asked = parser.parse_args(args)
    print("| attack | stream | health | other | not answered | MB before | most | after |\n" + 8 * "|---" + "|")
    for name in asked.names or ATTACKS:
        seen = run_attack(name, asked.tree.resolve())
        waits = " | ".join(f"{wait:.1f}" for wait in (seen.stream, seen.health, seen.other))
        sizes = " | ".join(f"{size:,.0f}" for size in seen.memory)
        title = ATTACKS[name].do.__name__.replace("_", " ")
        print(f"| {name} {title} | {waits} | {seen.refused} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
