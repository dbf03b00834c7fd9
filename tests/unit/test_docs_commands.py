"""Every command in the documents is one that runs, or is marked as needing the cloud or a peer.

Python modules of ours are started with the arguments that the page gives, up to the point where
those have been parsed; what the commands then do is tested where the modules are.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "ops" / "README.md",
    ROOT / "bench" / "traces" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LANGUAGES = {"bash", "json", "python", "yaml", ""}
"""Of blocks: a shell by another name would go unseen here. Blocks without one are drawings."""
NEEDS_CLOUD = ("gcloud", "ray", "serve", "kubectl", "helm", "gsutil")
OTHERS = ("make", "curl", "sed", "cd", "cp", "python3.11", "python3.12", "printf", "uv")
"""Tools of the user's machine; `make` has a test of its own."""
CLOUD_WORDS = re.compile(r"Google Cloud|GKE|cluster|cloud", re.IGNORECASE)
PARSE = """
import argparse, json, runpy, sys

class Parsed(BaseException):
    pass

original = argparse.ArgumentParser.parse_args

def parse_args(self, args=None, namespace=None):
    original(self, args, namespace)
    raise Parsed

argparse.ArgumentParser.parse_args = parse_args
failed = {}
for command in json.load(sys.stdin):
    module, *arguments = command
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except Parsed:
        continue
    except BaseException as error:
        failed[" ".join(command)] = repr(error)
    else:
        failed[" ".join(command)] = "it parsed nothing"
print(json.dumps(failed))
"""


def block_commands(page: Path) -> list[str]:
    """Command lines of the page's shell blocks, continued lines joined."""
    found: list[str] = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", " ", block)
        # A quoted argument may go over lines.
        command = ""
        for line in joined.splitlines():
            command = f"{command}\n{line}" if command else line
            try:
                words = shlex.split(command, comments=True)
            except ValueError:
                continue
            if words:
                found.append(command)
            command = ""
        assert not command, command
    return found


def modules() -> list[list[str]]:
    """`python -m` commands of all pages, in blocks and in running text, with their arguments."""
    found: list[list[str]] = []
    for page in PAGES:
        text = page.read_text()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        inline = [
            span.replace("\n", " ") for span in re.findall(r"`([^`]*python -m [^`]*)`", prose)
        ]
        for command in [*block_commands(page), *inline]:
            match = re.search(r"(?:\.venv/bin/)?python -m ([\w.]+)(.*)", command, re.DOTALL)
            if match and match[1].split(".")[0] in ("app", "bench", "replicas", "tests"):
                given = shlex.split(re.sub(r"[][]", "", match[2]), comments=True)
                if ">" in given:
                    given = given[: given.index(">")]
                found.append([match[1], *(re.sub(r"<name>|\.\.\.", "x", word) for word in given)])
    return found


def source_of(module: str) -> str:
    path = ROOT / Path(*module.split("."))
    return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_commands_of_ours_take_the_arguments_that_the_pages_give() -> None:
    commands = modules()
    assert len(commands) > 20
    parsed = [command for command in commands if "argparse" in source_of(command[0])]
    assert len(parsed) > 15
    for command in commands:
        assert command in parsed or len(command) == 1, f"{command} takes no arguments"
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(parsed),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == {}, result.stderr[-2000:]


def inline_commands(page: Path) -> list[str]:
    """Commands in running text of programs that need a cluster."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    programs = "|".join(NEEDS_CLOUD)
    return re.findall(rf"`((?:{programs}) [a-z][^`]*)`", prose)


def test_blocks_are_in_languages_that_are_looked_at() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= LANGUAGES, page
        assert set(fences[1::2]) <= {""}, page
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
            programs = "|".join((*NEEDS_CLOUD, *OTHERS, "python", r"\.venv\S*"))
            assert language or not re.search(rf"^({programs}) ", text, re.MULTILINE), text


def test_make_is_given_variables_that_it_knows() -> None:
    known = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    given = re.findall(r"(?:`|^)make ([a-z-]+(?: \w+=[^\s`]+)+)", text, re.MULTILINE)
    assert len(given) > 3
    names = {name for command in given for name in re.findall(r"(\w+)=", command)}
    assert names <= known


def test_curl_asks_for_routes_of_ours() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "app").rglob("*.py"))
    commands = [c for page in PAGES for c in block_commands(page) if c.startswith("curl")]
    assert commands
    for command in commands:
        (route,) = re.findall(r"http://127\.0\.0\.1:8000(/[\w/]+)", command)
        assert f'"{route}"' in sources, command


def test_python_examples_import_what_exists() -> None:
    imports = [
        node
        for page in PAGES
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.DOTALL)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom)
    ]
    assert len(imports) > 3
    for node in imports:
        assert node.module
        module = importlib.import_module(node.module)
        for alias in node.names:
            assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_is_ours_or_says_what_it_needs(page: Path) -> None:
    text = page.read_text()
    for command in block_commands(page):
        words = shlex.split(command, comments=True)
        program = next(word for word in words if "=" not in word)
        if program.startswith((".venv/bin/", "../peers/")) or program in OTHERS:
            continue
        assert program in NEEDS_CLOUD, command
        assert CLOUD_WORDS.search(text.partition(command.split("\n")[0][:40])[0]), command
    for command in inline_commands(page):
        assert CLOUD_WORDS.search(text.partition(f"`{command}`")[0]), command
