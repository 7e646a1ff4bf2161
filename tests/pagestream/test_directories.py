"""The XDG rules for the directories of our files."""

from pathlib import Path

import pytest

from pagestream.directories import cache_directory, state_directory


@pytest.mark.parametrize(
    ("cache_home", "expected"),
    [("/big", "/big/pagestream"), ("", "/home/me/.cache/pagestream"), ("rel", "/home/me/.cache/pagestream")],
)
def test_xdg_variable_counts_only_as_an_absolute_path(
    monkeypatch: pytest.MonkeyPatch, cache_home: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert cache_directory() == Path(expected)
    assert state_directory() == Path("/home/me/.local/state/pagestream")
