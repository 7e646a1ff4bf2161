"""fp8 checkpoints: on a CPU the tokens of the same model multiplied out, and what a product of fp8 is made of."""

import pytest
import torch

from engine_worker.model.preflight import check_files
from tests.builders import make_request
from tests.engine_worker.execution.reference import Reference, generate, make_runner
from tests.engine_worker.model.families import FP32_MARGIN
from tests.engine_worker.model.fp8_checkpoints import LAYOUTS, Fp8Model, write_fp8

PROMPT = torch.randint(3, 900, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fp8Model:
    return write_fp8(tmp_path_factory.mktemp("fp8"), LAYOUTS[request.param])


def test_a_checkpoint_is_dequantised_on_a_cpu(model: Fp8Model) -> None:
    check_files(model.directory)
    runner = make_runner(model.directory, num_blocks=16)
    outputs, _ = generate(
        runner,
        [make_request(PROMPT, "p", max_tokens=40, ignore_eos=True)],
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    assert max(Reference(model.exact).shortfalls(PROMPT, outputs["p"])) < FP32_MARGIN
