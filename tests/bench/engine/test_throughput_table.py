"""Compare the engine's throughput with its best peer."""

from typing import Any

from bench.engine.throughput_table import ratios


def run(side: str, concurrency: int, rep: int, decode: float) -> dict[str, Any]:
    return {"side": side, "concurrency": concurrency, "rep": rep, "decode_tokens_per_second": decode}


def test_figures_are_compared_with_the_best_peer() -> None:
    runs = [
        *(run("pagestream int8", 1, rep, decode) for rep, decode in enumerate((10.0, 30.0, 20.0))),
        run("pagestream none", 1, 0, 40.0),
        run("llama.cpp Q4_1", 1, 0, 40.0),
        run("llama.cpp BF16", 1, 0, 16.0),
        run("pagestream int8", 4, 0, 50.0),
        run("llama.cpp Q4_1", 4, 0, 20.0),
        run("llama.cpp BF16", 4, 0, 25.0),
    ]
    assert ratios(runs, "pagestream") == [
        {"side": "pagestream int8", "concurrency": 1, "ratio": 0.5, "best_peer": "llama.cpp Q4_1"},
        {"side": "pagestream none", "concurrency": 1, "ratio": 1.0, "best_peer": "llama.cpp Q4_1"},
        {"side": "pagestream int8", "concurrency": 4, "ratio": 2.0, "best_peer": "llama.cpp BF16"},
    ]


def test_no_peer_gives_no_ratio() -> None:
    assert ratios([run("pagestream", 1, 0, 10.0)], "pagestream") == []
