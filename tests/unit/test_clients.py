"""The command that runs other people's clients: what it pins, and that a failure is one."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from ops.setup import read_pins
from tests.clients import __main__ as clients
from tests.clients import tools
from tests.clients.suites import SUITES, Suite, SuiteFailed, Target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target("http://127.0.0.1:1", "key", "tiny", tmp_path, tmp_path)


def test_the_page_has_every_suite() -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == [suite.name for suite in SUITES]


@pytest.mark.parametrize("name", ["lm-eval", "aiperf", "schemathesis"])
def test_a_lock_pins_what_was_asked_for_and_names_no_host(name: str) -> None:
    wanted = (tools.LOCKS / f"{name}.in").read_text().split()
    lock = tools.LOCKS / f"{name}.txt"
    assert {re.sub(r"\[.*\]", "", pin) for pin in wanted} <= read_pins(lock)
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert all(re.match(r"[\w.\-]+==[^\s;]+( ; .*)?$", line) for line in lines)
    assert tools.version_of(name)


def test_nodes_lock_has_a_digest_of_each_package_and_no_host() -> None:
    lock = json.loads((tools.NODE_SUITE / "package-lock.json").read_text())
    wanted = json.loads((tools.NODE_SUITE / "package.json").read_text())["dependencies"]
    packages = {k.removeprefix("node_modules/"): v for k, v in lock["packages"].items() if k}
    assert {name: package["version"] for name, package in packages.items()} == wanted
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())


def test_a_client_that_fails_or_hangs_fails_its_suite(target: Target) -> None:
    assert target.run("echo", ["echo", "seen"], limit_s=30) == "seen\n"
    with pytest.raises(SuiteFailed, match=r"status 3; [\s\S]*why"):
        target.run("exit", ["sh", "-c", "echo why; exit 3"], limit_s=30)
    with pytest.raises(SuiteFailed, match=r"longer than 0\.2 s"):
        target.run("sleep", [sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.2)


def test_one_failed_suite_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Target) -> str:
        raise SuiteFailed("a wrong answer")

    suites = (Suite("good", lambda target: f"asked {target.model}"), Suite("bad", fail))
    monkeypatch.setattr(clients, "SUITES", suites)
    monkeypatch.setattr(clients, "running", lambda *_, **__: contextlib.nullcontext())
    assert clients.main(["--keep", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^ok +good +asked smollm2-135m-instruct", shown, re.MULTILINE)
    assert re.search(r"^FAILED bad +a wrong answer", shown, re.MULTILINE)
    assert shown.endswith("1 of 2 suites passed\n")
    assert clients.main(["--keep", str(tmp_path), "--only", "good"]) == 0
