"""Keys come from the configuration and from a file that only its owner may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from emlxd.config import ServerSettings
from emlxd.errors import UserError
from emlxd.keys import read_keys


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_file_of_its_owner_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("abc\n")
    path.chmod(mode)
    assert read_keys(ServerSettings(api_keys_file=path)) == [b"abc"]


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("abc\n")
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode 0{mode:o}: others may use it") as caught:
        read_keys(ServerSettings(api_keys_file=path))
    assert "abc" not in caught.value.message
