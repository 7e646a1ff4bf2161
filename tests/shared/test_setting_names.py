"""Variables that no program reads are named once, with the one that was probably meant."""

import pytest

from shared.setting_names import discard_unread_variables


def test_misspelled_variable_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PAGESTREAM_PROT": "3", "PAGESTREAM_PORT": "8000", "PAGESTREAM_MAX_NUM_SEQS": "4", "HOME": "/root"}
    discard_unread_variables(environ, "pagestream gateway")
    discard_unread_variables(environ, "pagestream gateway")
    warning = "pagestream gateway: warning: no program reads PAGESTREAM_PROT; did you mean PAGESTREAM_PORT?\n"
    assert capsys.readouterr().err == warning
    assert environ == {"PAGESTREAM_PORT": "8000", "PAGESTREAM_MAX_NUM_SEQS": "4", "HOME": "/root"}


def test_variable_like_none_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    discard_unread_variables({"PAGESTREAM_XYZZY": "1"}, "pagestream worker")
    assert capsys.readouterr().err == "pagestream worker: warning: no program reads PAGESTREAM_XYZZY\n"


def test_service_links_are_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    links = {
        "PAGESTREAM_GATEWAY_PORT": "tcp://10.0.0.9:8000",
        "PAGESTREAM_GATEWAY_SERVICE_HOST": "10.0.0.9",
        "PAGESTREAM_GATEWAY_SERVICE_PORT": "8000",
        "PAGESTREAM_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "PAGESTREAM_GATEWAY_PORT_8000_TCP": "tcp://10.0.0.9:8000",
        "PAGESTREAM_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.9",
    }
    discard_unread_variables(environ := dict(links), "pagestream gateway")
    assert (capsys.readouterr().err, environ) == ("", links)
