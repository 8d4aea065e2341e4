"""Where a process that torchrun started is reached: at an address that the others can reach, or nowhere."""

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure.torchrun import Process, own_address

TOLD = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"},
}


def test_an_address_that_others_cannot_reach_is_refused() -> None:
    alone = Process.read({**TOLD, "GROUP_WORLD_SIZE": "1"})
    assert own_address(alone, None) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 here, which other hosts cannot.* alone.*--interface lo$"):
        own_address(Process.read(TOLD), None)
    assert own_address(Process.read(TOLD), "lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="choose one of"):
        own_address(alone, "nonsense0")
    with pytest.raises(ConfigError, match="none of this host's"):
        own_address(Process.read({**TOLD, "MASTER_ADDR": "192.0.2.1"}), None)
