"""What the documents say exists: files, anchors, make targets, options, fields of the examples."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from app.openai_schema import ChatRequest, CompletionRequest, parse_request
from bench import serve

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "ops", ROOT / "bench", ROOT / "bench" / "traces")
    for path in folder.glob("*.md")
)
README = ROOT / "README.md"


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_examples_compile(path: Path) -> None:
    for block in blocks(path, "python"):
        ast.parse(block)


def test_curl_examples_send_what_the_server_accepts() -> None:
    text = "\n".join(blocks(README, "bash"))
    bodies = re.findall(r"(/v1/\S+).*?-d '(\{.*?\})'", text, re.DOTALL)
    assert bodies
    for route, body in bodies:
        schema = ChatRequest if "chat" in route else CompletionRequest
        parse_request(schema, json.loads(body))


def test_the_line_that_serves_your_own_model_changes_the_model_and_nothing_else() -> None:
    (pattern, replacement) = re.findall(r"sed 's\|(.*?)\|(.*?)\|'", README.read_text())[0]
    text = (ROOT / "serve_config.yaml").read_text()
    changed, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    before, after = yaml.safe_load(text), yaml.safe_load(changed)
    assert count == 1
    assert after["applications"][0]["args"].pop("model") == "/path/to/your/model"
    before["applications"][0]["args"].pop("model")
    assert before == after


def test_parameters_that_the_readme_lists_are_those_of_the_schema() -> None:
    """Every parameter is listed but the three that an example shows, and the ignored hints."""
    hints = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
    shown = {"model", "prompt", "messages", "add_special_tokens"}
    fields = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)
    (listing,) = re.findall(r"^Parameters: (.*?)\. A parameter", README.read_text(), re.S | re.M)
    listed = {name.split(".")[0] for name in re.findall(r"`([a-z_.]+)`", listing)}
    assert listed == fields - hints - shown


def test_bench_options_in_the_documents_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Engine alone")[0]
    assert set(re.findall(r"--[a-z][a-z-]+", section)) <= known


def test_every_top_level_directory_is_in_the_layout() -> None:
    tracked = {"app", "replicas", "kernels", "bench", "tests", "ops", "docs"}
    rows = set(re.findall(r"^\| `([a-z]+)/` \|", README.read_text(), re.MULTILINE))
    assert rows == tracked
    assert all((ROOT / name).is_dir() for name in rows)


def test_no_placeholder_is_left() -> None:
    for path in DOCUMENTS:
        assert "<!--" not in path.read_text(), path
