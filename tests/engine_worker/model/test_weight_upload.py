"""Chunked weight upload on a CPU: every byte arrives at any chunk size, and the result is a copy."""

import pytest
import torch

from engine_worker.model.weight_upload import WeightUpload, uploader

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_uploaded_weights_have_every_byte(chunk_bytes: int, dtype: torch.dtype) -> None:
    upload = WeightUpload(CPU, chunk_bytes)
    sources = [torch.randn(shape).to(dtype) for shape in ((16, 31), (5,), (3, 2, 4), (8, 8))]
    sources.append(sources[0].T)
    for source, arrived in [(source, upload(source)) for source in sources]:
        assert arrived.dtype == dtype and torch.equal(arrived, source)
        assert arrived.data_ptr() != source.data_ptr()


def test_upload_on_a_cpu_moves_nothing() -> None:
    tensor = torch.zeros(3)
    assert uploader(CPU)(tensor) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_uploaded_weights_have_every_byte_on_a_gpu() -> None:
    upload = WeightUpload(torch.device("cuda"), 1000)
    sources = [torch.randn(999, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    for source, arrived in [(source, upload(source)) for source in sources]:
        assert torch.equal(arrived.cpu(), source)
