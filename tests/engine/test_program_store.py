"""Programs on disk: found by what they are, replaced when they are not, never trusted blindly."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicas.engine import program_key
from replicas.engine.program_store import ProgramStore, read_program

ENVIRONMENT = {"platform": "cpu", "jaxlib": "1", "device_kind": "cpu", "devices": "0"}


class Toy:
    """A program small enough to compile in milliseconds, with counts of what was done to it."""

    def __init__(self, addend: float = 1.0) -> None:
        self.addend = addend
        self.num_lowered = 0

    def lower(self) -> jax.stages.Lowered:
        self.num_lowered += 1
        argument = jax.ShapeDtypeStruct((3,), jnp.float32)
        return jax.jit(lambda x: x + self.addend).lower(argument)

    def run(self, store: ProgramStore, name: str = "8x8") -> list[float]:
        program = store.load_or_compile(name, self.lower, lambda lowered: lowered.compile())
        return np.asarray(program(jnp.zeros(3))).tolist()


def open_store(directory: Path, **overrides: Any) -> ProgramStore:
    fields: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "fingerprint": "f" * 64,
        "sources": "s" * 64,
        "model": "toy",
        "devices": jax.devices()[:1],
    }
    return ProgramStore(directory, **(fields | overrides))


def fill(directory: Path, toy: Toy) -> Path:
    """Compile, store and index the toy; return its file."""
    store = open_store(directory)
    assert toy.run(store) == [toy.addend] * 3
    store.save_index()
    assert (store.num_loaded, store.num_compiled) == (0, 1)
    (path,) = directory.glob("*.program")
    return path


def test_a_second_start_neither_lowers_nor_compiles(tmp_path: Path) -> None:
    fill(tmp_path, Toy())
    toy, store = Toy(), open_store(tmp_path)
    assert toy.run(store) == [1.0] * 3
    assert (store.num_loaded, store.num_compiled, toy.num_lowered) == (1, 0, 0)


def test_prefetched_programs_are_what_would_have_been_loaded(tmp_path: Path) -> None:
    path = fill(tmp_path, Toy())
    toy, store = Toy(), open_store(tmp_path)
    store.prefetch()
    assert toy.run(store) == [1.0] * 3
    assert (store.num_loaded, store.num_compiled, toy.num_lowered) == (1, 0, 0)

    path.write_bytes(path.read_bytes()[:-1])
    toy, store = Toy(), open_store(tmp_path)
    store.prefetch()
    assert toy.run(store) == [1.0] * 3
    assert (store.num_loaded, store.num_compiled) == (0, 1)


def test_another_fingerprint_with_the_same_program_compiles_nothing(tmp_path: Path) -> None:
    fill(tmp_path, Toy())
    toy, store = Toy(), open_store(tmp_path, fingerprint="0" * 64)
    assert toy.run(store) == [1.0] * 3
    assert (store.num_loaded, store.num_compiled, toy.num_lowered) == (1, 0, 1)


def test_another_program_of_the_same_name_is_compiled(tmp_path: Path) -> None:
    fill(tmp_path, Toy())
    store = open_store(tmp_path, fingerprint="0" * 64)
    assert Toy(2.0).run(store) == [2.0] * 3
    assert store.num_compiled == 1


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def cut(path: Path, directory: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_to_nothing(path: Path, directory: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path, directory: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def damage_the_header(path: Path, directory: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"parts"', b'"ports"', 1))


def take_another_programs_file(path: Path, directory: Path) -> None:
    other = fill(directory / "other", Toy(5.0))
    path.write_bytes(other.read_bytes())


def claim_another_jaxlib(path: Path, directory: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"jaxlib": "1"', b'"jaxlib": "2"', 1))


def put_a_foreign_pickle(path: Path, directory: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(directory / "mark")))


def put_a_bomb_under_the_wrong_digest(path: Path, directory: Path) -> None:
    _, payload = read_program(path)
    bomb = pickle.dumps(Bomb(directory / "mark"))
    assert len(bomb) <= len(payload)
    path.write_bytes(path.read_bytes()[: -len(payload)] + bomb.ljust(len(payload), b"."))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "cut off"),
        (cut_to_nothing, "not a program of this format"),
        (flip_a_bit, "digest"),
        (damage_the_header, "header is damaged"),
        (take_another_programs_file, "its name is not its key"),
        (claim_another_jaxlib, "its name is not its key"),
        (put_a_foreign_pickle, "not a program of this format"),
        (put_a_bomb_under_the_wrong_digest, "digest"),
    ],
)
def test_a_file_that_is_not_the_program_is_named_and_replaced(
    tmp_path: Path, damage: Callable[[Path, Path], None], reason: str
) -> None:
    directory, toy = tmp_path / "store", Toy()
    path = fill(directory, toy)
    damage(path, tmp_path)
    assert reason in (open_store(directory).check("8x8", toy.lower) or "")

    store = open_store(directory)
    assert toy.run(store) == [1.0] * 3
    assert (store.num_loaded, store.num_compiled) == (0, 1)
    assert not (tmp_path / "mark").exists(), "nothing was unpickled"
    assert open_store(directory).check("8x8", toy.lower) is None


def test_a_payload_that_does_not_load_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file with sound digests, of a jaxlib that calls itself the same."""
    path = fill(tmp_path, Toy())
    header, payload = read_program(path)
    store = open_store(tmp_path)
    junk = pickle.dumps((b"junk", None, None))
    text = path.read_bytes()[: -len(payload)].replace(
        f'"payload_bytes": {len(payload)}'.encode(), f'"payload_bytes": {len(junk)}'.encode()
    )
    digest = hashlib.sha256(junk).hexdigest()
    path.write_bytes(text.replace(header.payload_sha256.encode(), digest.encode()) + junk)
    assert Toy().run(store) == [1.0] * 3
    assert store.num_compiled == 1
    assert "does not load" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": "0"}', None])
def test_a_damaged_index_costs_lowering_only(tmp_path: Path, content: bytes | None) -> None:
    fill(tmp_path, Toy())
    (index,) = tmp_path.glob("*.index.json")
    if content is None:  # well-formed, but not what was written
        data = json.loads(index.read_bytes())
        data["programs"]["8x8"] = "0" * 64
        content = json.dumps(data).encode()
    index.write_bytes(content)
    toy, store = Toy(), open_store(tmp_path)
    assert toy.run(store) == [1.0] * 3
    assert (store.num_loaded, store.num_compiled, toy.num_lowered) == (1, 0, 1)
    store.save_index()
    toy, store = Toy(), open_store(tmp_path)
    toy.run(store)
    assert toy.num_lowered == 0, "the index was written again"


@pytest.mark.parametrize("part", ["jaxlib", "xla_flags", "xla_options", "cpu_features"])
def test_another_environment_is_another_program(tmp_path: Path, part: str) -> None:
    fill(tmp_path, Toy())
    environment = ENVIRONMENT | {part: "other"}
    store = open_store(tmp_path, environment=environment, fingerprint="0" * 64)
    problem = store.check("8x8", Toy().lower) or ""
    assert problem.startswith("stale: ")
    assert part in problem
    assert Toy().run(store) == [1.0] * 3
    assert store.num_compiled == 1


def test_prune_keeps_what_a_start_would_load(tmp_path: Path) -> None:
    kept = {fill(tmp_path, Toy())}
    other_platform = open_store(
        tmp_path, environment=ENVIRONMENT | {"platform": "tpu"}, fingerprint="1" * 64
    )
    Toy().run(other_platform)
    kept = set(tmp_path.glob("*.program"))
    # Another configuration of today's sources, with an index.
    other = open_store(tmp_path, fingerprint="2" * 64)
    Toy(3.0).run(other)
    other.save_index()
    kept |= set(tmp_path.glob("*.program")) | set(tmp_path.glob("*.index.json"))
    # What nobody needs: an older jaxlib, older sources, a damaged file, an interrupted write.
    Toy().run(open_store(tmp_path, environment=ENVIRONMENT | {"jaxlib": "0"}, fingerprint="4" * 64))
    older = open_store(tmp_path, fingerprint="3" * 64, sources="0" * 64)
    Toy(4.0).run(older)
    older.save_index()
    (tmp_path / "old.program").write_bytes(b"x")
    partial = tmp_path / ".partial-x"
    partial.touch()
    os.utime(partial, (0, time.time() - 7200))

    store = open_store(tmp_path)
    store.find_key("8x8", Toy().lower)
    removed = dict(store.prune())
    assert set(tmp_path.iterdir()) == kept
    assert len(removed) == 5
    assert any("jaxlib was '0', is '1'" in reason for reason in removed.values())
    assert removed[tmp_path / "old.program"] == "not a program of this format"


def test_an_index_that_names_a_program_of_another_environment_is_not_followed(
    tmp_path: Path,
) -> None:
    fill(tmp_path, Toy())
    store = open_store(tmp_path, environment=ENVIRONMENT | {"jaxlib": "2"})
    assert store.check("8x8", Toy().lower) == "stale: jaxlib was '1', is '2'"
    assert Toy().run(store) == [1.0] * 3
    assert store.num_compiled == 1


def test_a_directory_that_cannot_be_written_still_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = open_store(tmp_path / "file" / "store")
    assert Toy().run(store) == [1.0] * 3
    store.save_index()
    assert "not writable" in caplog.text


def test_a_full_disk_is_served_from_and_keeps_no_partial_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    store = open_store(tmp_path)
    assert Toy().run(store) == [1.0] * 3
    store.save_index()
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_sources_hash_sees_every_device_module(tmp_path: Path) -> None:
    for name in ("kernels/a.py", "kernels/cpu/b.py", "replicas/c.py", "replicas/models/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        before = program_key.hash_sources(tmp_path)
        (tmp_path / name).write_text("x = 1\n")
        assert program_key.hash_sources(tmp_path) != before


def test_the_argument_tree_is_part_of_a_program() -> None:
    """Two trees with equal leaves lower to the same text and are called differently."""
    leaf = jax.ShapeDtypeStruct((3,), jnp.float32)
    add = jax.jit(lambda tree: sum(jax.tree.leaves(tree)))
    first = program_key.describe_lowered(add.lower({"a": leaf, "b": leaf}))
    second = program_key.describe_lowered(add.lower({"a": leaf, "c": leaf}))
    assert first["stablehlo"] == second["stablehlo"]
    assert first["arguments"] != second["arguments"]
