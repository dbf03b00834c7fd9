import concurrent.futures
import logging
import shutil
import stat

import pytest

from kernels.cpu import library

# Takes the compiler's place: writes its command line to the file named after -o.
FAKE_COMPILER = """#!/bin/sh
args="$*"
while [ $# -gt 0 ]; do
  if [ "$1" = "-o" ]; then echo "$args" > "$2"; fi
  shift
done
"""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache without a library and a PATH with nothing but `bin`."""
    cache = tmp_path / "native"
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(library, "_CACHE_DIR", cache)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return cache


def install_compiler(cache, script):
    path = cache.parent / "bin" / "g++"
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_no_compiler_is_said_once_and_raised_each_time(empty_cache, monkeypatch, caplog):
    monkeypatch.setattr(
        library, "_register", library.functools.cache(library._register.__wrapped__)
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(library.NativeUnavailable, match=r"no C\+\+ compiler .* on PATH"):
                library.load()
    assert len(caplog.records) == 1
    assert "the slower jnp path serves" in caplog.text


def test_a_failing_compiler_is_reported_with_its_last_words(empty_cache):
    install_compiler(empty_cache, "#!/bin/sh\necho 'no such flag: -march' >&2\nexit 7\n")
    with pytest.raises(library.NativeUnavailable, match=r"status 7:\nno such flag: -march"):
        library.build()
    assert list(empty_cache.iterdir()) == []


def test_concurrent_builds_leave_one_whole_library(empty_cache):
    install_compiler(empty_cache, FAKE_COMPILER)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: library.build(), range(4)))
    (path,) = paths
    assert path.read_text().startswith("-shared")
    assert [p.name for p in empty_cache.iterdir()] == [library.fingerprint()]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_built_library_needs_no_compiler(empty_cache):
    install_compiler(empty_cache, FAKE_COMPILER)
    path = library.build()
    (empty_cache.parent / "bin" / "g++").unlink()
    assert library.build() == path


def test_an_unwritable_cache_makes_the_kernels_unavailable(empty_cache):
    install_compiler(empty_cache, FAKE_COMPILER)
    empty_cache.write_text("a file where the directory should be")
    with pytest.raises(library.NativeUnavailable, match="cannot write the native kernels to"):
        library.build()


def test_the_fingerprint_follows_the_sources_and_the_cpu(tmp_path, monkeypatch):
    fresh = library.fingerprint.__wrapped__
    original = fresh()
    assert original == library.fingerprint()
    monkeypatch.setattr(library, "_cpu_features", lambda: "another machine")
    assert fresh() != original
    monkeypatch.undo()
    shutil.copytree(library._SOURCE_DIR, tmp_path / "src")
    monkeypatch.setattr(library, "_SOURCE_DIR", tmp_path / "src")
    assert fresh() == original
    (tmp_path / "src" / "simd.h").write_text("// changed")
    assert fresh() != original


def test_an_instruction_set_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no kernels for 'mmx'"):
        library.use_instruction_set("mmx")
