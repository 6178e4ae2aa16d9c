"""Generate text with a model from a run or from Hugging Face.

    python scripts/generate.py --run-dir runs/tiny --prompt "def main("
    python scripts/generate.py --model Qwen/Qwen3-0.6B --prompt "What is a decoder?"
    python scripts/generate.py --model Qwen/Qwen3-VL-2B-Instruct --image cat.png --prompt "What is this?"
    python scripts/generate.py --model Qwen/Qwen3-0.6B --adapter adapter --prompt "What is a decoder?"
    python scripts/generate.py --model path/to/Llama-3.1-70B-Instruct --mesh.tensor 8

If the model has a chat template, the prompt is a user message; otherwise, and with --no-chat, the prompt is continued.
Without --prompt, prompts are read from the terminal as one conversation; type /help for its commands. A mesh splits a
model that is larger than one device. With several processes, the first one reads and prints.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax

from eqx_decoders.cli import program, require
from eqx_decoders.cli.devices import Devices
from eqx_decoders.cli.model_source import AdaptedModelSource, ModelSource
from eqx_decoders.cli.setting_flags import flag_names, parse_flags
from eqx_decoders.core.malloc import keep_memory
from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import NonNegativeFloat, NonNegativeInt, PositiveInt, check
from eqx_decoders.inference.text_model import Files, Prompt, TextModel
from eqx_decoders.inference.unstack import unstack_in_place
from eqx_decoders.io.atomic_files import expand_paths, write_atomically
from eqx_decoders.io.processes import broadcast_json
from eqx_decoders.io.program_cache import keep_programs
from eqx_decoders.io.status import StatusLine


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(AdaptedModelSource):
    """Generate text from a prompt, or from prompts that are read from the terminal."""

    prompt: str | None = None
    """User message, or text to continue. None: read prompts from the terminal, one per line."""
    chat: bool = True
    """Format the prompt as a message if the model has a chat template."""
    image: tuple[str, ...] = ()
    """Image file, placed before the first prompt. Repeat the flag for several images."""
    video: tuple[str, ...] = ()
    """Video file. Repeat the flag for several videos."""
    audio: tuple[str, ...] = ()
    """Audio file. Repeat the flag for several clips."""
    system: str | None = None
    """System message."""
    max_new_tokens: PositiveInt = 200
    """Maximum number of generated tokens."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature. 0: greedy decoding. None: the model's published value, or 0.7."""
    top_k: int | None = None
    """Sample from the k most likely tokens. None: the model's published value, or all tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities add up to p. None: the model's published value, or
    0.95."""
    min_p: float | None = None
    """Sample from tokens whose probability is at least min_p times the largest one. None: the model's published value,
    or all tokens."""
    seed: int = 0
    """Sampling seed."""
    num_draft_tokens: NonNegativeInt = 0
    """Number of draft tokens per step from multi-token prediction (speculative decoding)."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "image", "video", "audio")
        check(
            self.chat or self.system is None,
            f"system={self.system!r} needs a chat template: leave out --no-chat, or the system message.",
        )
        GenerationConfig().sampler(**self.sampling())

    @property
    def files(self) -> Files:
        """Return the files of the first prompt."""
        return Files(images=self.image, videos=self.video, audio=self.audio)

    def sampling(self) -> dict[str, int | float | None]:
        """Return the sampling flags. None: not set."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


@program(lambda: flag_names(GenerateConfig))
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the program with command line arguments; return the exit code."""
    require("tyro")
    config = parse(args, prog)
    keep_memory()
    with config.connected():
        keep_programs()
        text = load(config)
        respond = ChatSession(text, config) if config.chat and text.chat is not None else Continuation(text, config)
        if config.prompt is not None:
            respond(config.prompt)
        else:
            read_prompts(respond)
    return 0


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> GenerateConfig:
    """Parse the arguments of a command line; exit with 2 for unknown ones."""
    import tyro

    repeatable = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]  # --image a.png --image b.png
    titles = {GenerateConfig: "text", AdaptedModelSource: "model", ModelSource: "model", Devices: "devices"}
    types: dict[str, Any] = dict.fromkeys(("image", "video", "audio"), repeatable)
    return parse_flags(GenerateConfig(), titles=titles, types=types, args=args, prog=prog, description=__doc__)


def load(config: GenerateConfig) -> TextModel:
    """Load the model and the tokenizer."""
    text = config.load()
    check(
        config.system is None or text.chat is not None,
        f"system={config.system!r} needs a chat template, but the model has none: put the text into the prompt.",
    )
    text = dataclasses.replace(text, model=unstack_in_place(text.model))
    return text if config.special_tokens_in_content else text.with_special_tokens_as_text()


def read_prompts(respond: "Continuation | ChatSession") -> None:
    """Respond to each non-empty line of the standard input, or run it if it is a command, such as `/reset`."""
    if sys.stdin.isatty():
        show("Type /help for a list of commands, and /exit or Ctrl-D to leave.\n")
    while line := broadcast_json("line", read_line() if jax.process_index() == 0 else None, seconds=1e6):
        line = line.strip("\n")
        name, _, argument = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return
        if name == "/help":
            show("".join(f"  {command:18}{text}\n" for command, text in COMMANDS.items()))
        elif name in ("/reset", "/system", "/save") and isinstance(respond, ChatSession):
            show(f"{respond.run_command(name, argument.strip())}\n")
        elif line.strip():
            respond(line)


def read_line() -> str:
    """Read a line from the standard input. Returns an empty string at its end."""
    if sys.stdin.isatty():
        print("prompt> ", end="", flush=True)
    # the status keeps the other processes waiting without a timeout; it is not shown
    with StatusLine("waiting for a prompt", show=lambda text: None):
        return sys.stdin.readline()


def show(text: str) -> None:
    """Print text in the first process."""
    if jax.process_index() == 0:
        print(text, end="", flush=True)


COMMANDS = {
    "/reset": "start a new conversation",
    "/system TEXT": "start a new conversation with this system message",
    "/save FILE": "write the messages of the conversation to a JSON file",
    "/help": "show this list",
    "/exit": "leave; also Ctrl-D",
}


class Continuation:
    """Generation without a chat template: each prompt is continued independently."""

    def __init__(self, text: TextModel, config: GenerateConfig):
        self.text, self.config = text, config

    def __call__(self, prompt: str) -> None:
        show(prompt)
        write(self.text, self.config, prompt, self.config.files)


class ChatSession:
    """Generation with a chat template: each prompt is the next user message of one conversation."""

    def __init__(self, text: TextModel, config: GenerateConfig):
        self.text, self.config = text, config
        self.system = config.system
        self.messages: list[dict[str, Any]] = self._first_messages()

    def _first_messages(self) -> list[dict[str, Any]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def run_command(self, name: str, argument: str) -> str:
        """Run a command of `COMMANDS`; return the text to show."""
        if name == "/save":
            if not argument:
                return "/save needs the name of a file."
            if jax.process_index() == 0:
                try:
                    text = json.dumps(self.messages, indent=2, ensure_ascii=False)
                    write_atomically(Path(argument).expanduser(), f"{text}\n".encode())
                except OSError as error:
                    return f"{argument} cannot be written: {error}."
            return f"{len(self.messages)} messages are saved in {argument}."
        if name == "/system":
            self.system = argument or None
        self.messages = self._first_messages()
        return "new conversation" + (f" with the system message {self.system!r}" if self.system else "")

    def __call__(self, prompt: str) -> None:
        content: Any = prompt
        if self.config.files and not any(message["role"] == "user" for message in self.messages):
            names = {"image": self.config.image, "video": self.config.video, "audio": self.config.audio}
            content = [{"type": kind, kind: file} for kind, files in names.items() for file in files]
            content.append({"type": "text", "text": prompt})
        self.messages.append({"role": "user", "content": content})
        response = write(self.text, self.config, self.messages)
        self.messages.append({"role": "assistant", "content": response})


def write(text: TextModel, config: GenerateConfig, prompt: Prompt, files: Files = Files()) -> str:
    """Generate and print a completion, and return it."""
    stream = text.stream(
        prompt,
        max_new_tokens=config.max_new_tokens,
        sampler=text.model.generation_config.sampler(**config.sampling()),
        key=jax.random.key(config.seed),
        num_draft_tokens=config.num_draft_tokens,
        files=files,
    )
    with StatusLine("compiling"):
        first = next(stream, "")
    pieces = []
    for piece in itertools.chain([first], stream):
        pieces.append(piece)
        show(piece)
    show("\n")
    return "".join(pieces)
