"""Table of the kernel benchmark."""

import pytest

from bench.kernel.device_ceilings import Ceilings
from bench.kernel.table import table, with_ratio

CEILINGS = Ceilings(copy_bytes_per_second=4e12, read_bytes_per_second=5e12, matmul_flops_per_second=8e14)


def test_ratio_uses_the_binding_floor() -> None:
    by_bytes = {"seconds": 2e-4, "bytes": 5e8, "flops": 1e9}
    by_operations = {"seconds": 2e-3, "bytes": 5e8, "flops": 8e11}
    assert with_ratio(by_bytes, CEILINGS)["ceiling_ratio"] == pytest.approx(0.5)
    assert with_ratio(by_operations, CEILINGS)["ceiling_ratio"] == pytest.approx(0.5)


def test_table_has_one_line_per_case() -> None:
    row = with_ratio({"group": "linear", "case": "o, 1 rows", "seconds": 1e-5, "bytes": 4e7, "flops": 4e7}, CEILINGS)
    first, _, plain, beside = table(CEILINGS, [row, {**row, "cublas_seconds": 2e-5}]).splitlines()
    assert first == "ceilings: copy 4.00 TB/s, read 5.00 TB/s, matmul 800 TFLOP/s"
    assert " ".join(plain.split()) == "linear o, 1 rows 10.0 4.00 4.0 0.80"
    assert " ".join(beside.split()) == "linear o, 1 rows 10.0 4.00 4.0 0.80 20.0"
