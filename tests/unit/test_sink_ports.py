"""Token sinks stay within the ports that a firewall lets through."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.launch_config import find_free
from app.settings import parse_settings
from app.token_sink import TokenSink
from tests.tiny_tokenizer import write_model_dir


async def test_sinks_take_the_ports_of_the_range_and_no_other() -> None:
    for _ in range(20):  # two neighbours that are free now
        first = find_free()
        blocker = TokenSink(host="127.0.0.1", ports=(first, first))
        neighbour = TokenSink(host="127.0.0.1", ports=(first, first + 1))
        try:
            await blocker.start()
            await neighbour.start()
            break
        except OSError:
            await blocker.close()
    else:
        pytest.fail("no two neighbouring ports are free")
    assert (blocker.address.port, neighbour.address.port) == (first, first + 1)
    third = TokenSink(host="127.0.0.1", ports=(first, first + 1))
    with pytest.raises(
        OSError, match=f"no port of sink_ports {first}-{first + 1} is free"
    ) as caught:
        await third.start()
    assert caught.value.errno == errno.EADDRINUSE
    await blocker.close()
    await neighbour.close()


def test_a_range_that_is_none_is_refused(tmp_path: Path) -> None:
    model = write_model_dir(tmp_path / "model")
    (model / "model.safetensors").touch()
    args = {"model": str(model)}
    assert parse_settings({**args, "sink_ports": [20000, 20009]}).sink_ports == (20000, 20009)
    for ports in ([20009, 20000], [80, 90], [1, 2, 3], "20000"):
        with pytest.raises(ConfigError, match="sink_ports"):
            parse_settings({**args, "sink_ports": ports})
