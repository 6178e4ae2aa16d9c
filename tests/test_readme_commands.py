"""Commands and links of all READMEs: programs accept the flags, and links lead to existing headings."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from eqx_decoders.training.settings.files import save_settings
from eqx_decoders.training.settings.run import TrainConfig
from tests.commands import ROOT


READMES = [
    ROOT / "README.md",
    *sorted((ROOT / "eqx_decoders").rglob("*.md")),
    ROOT / "scripts" / "README.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
]
PROGRAMS = ("train", "generate", "serve", "evaluate", "plan", "convert")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the programs and arguments of the commands in the console examples of a page."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        for line in re.findall(r"^\$ (.*)", block.replace("\\\n", " "), re.M):
            if not re.search(r"scripts/\w+\.py|eqx-decoders \w", line):
                continue
            words = [word for word in shlex.split(line, comments=True) if word != "…"]
            for index, word in enumerate(words):
                script = re.fullmatch(r"scripts/(\w+)\.py", word)
                name = script.group(1) if script else words[index + 1] if word == "eqx-decoders" else ""
                if name in PROGRAMS:
                    rest = words[index + 1 + (not script) :]
                    end = next((i for i, word in enumerate(rest) if word in ("&&", "|", ">", ";")), len(rest))
                    found.append((name, rest[:end]))
                    break
    return found


COMMANDS = [(page, name, args) for page in READMES if page.exists() for name, args in commands(page.read_text())]


def test_commands_are_found():
    assert {name for _, name, _ in COMMANDS} == set(PROGRAMS) and len(COMMANDS) > 60


@pytest.mark.parametrize(
    ("page", "name", "args"),
    COMMANDS,
    ids=[f"{page.relative_to(ROOT).parent}-{name}-{index}" for index, (page, name, _) in enumerate(COMMANDS)],
)
def test_program_accepts_command(page: Path, name: str, args: list[str], tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "run.yaml").write_text("steps: 10\n")
    (tmp_path / "runs/a").mkdir(parents=True)
    save_settings(TrainConfig(), tmp_path / "runs/a/settings.json")
    monkeypatch.chdir(tmp_path)
    args = [word.replace("gs://bucket", str(tmp_path)) for word in args]  # no test uses the network
    module = importlib.import_module(f"eqx_decoders.cli.{name}")
    if name == "convert":
        module.parse(args[0], args[1:])
    else:
        module.parse(args)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)", text, re.M)
    }


@pytest.mark.parametrize(
    "page", [page for page in READMES if page.exists()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_existing_headings(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link} does not exist"
        assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)}: {link} has no such heading"
