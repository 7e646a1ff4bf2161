"""200 Kubernetes schemas (a source of JSONSchemaBench): a random model at temperature 1 follows each."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.engine.schema_corpus import kubernetes
from bench.engine.structured import answer, followable, spread
from tests.engine_worker.execution.reference import make_engine, make_runner, write_model_of_words
from tests.tiny_model import IM_END

NUM_SCHEMAS = 200


@pytest.mark.timeout(600)
def test_schema_corpus_every_answer_is_valid(tmp_path: Path) -> None:
    directory = write_model_of_words(tmp_path / "tiny", max_position_embeddings=4096, num_hidden_layers=1)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    runner = make_runner(directory, num_blocks=2000, block_size=32)
    taken, _ = followable(kubernetes())
    schemas = spread(taken, NUM_SCHEMAS)
    assert len(schemas) == NUM_SCHEMAS
    # A random model would rarely end a string, a list, or an object.
    ends = {tokenizer.token_to_id(char): bias for char, bias in (('"', 12.0), ("]", 8.0), ("}", -5.0))}
    answers = answer(
        make_engine(runner, max_num_seqs=32, max_num_batched_tokens=256),
        tokenizer,
        schemas,
        lambda schema: "the end",
        max_tokens=2000,
        stop_token_ids=(IM_END,),
        logit_bias=ends,
    )
    assert (answers.invalid, answers.failed) == ([], [])
    assert (answers.valid, answers.cut) == (NUM_SCHEMAS, [])
    assert answers.tokens > 60 * NUM_SCHEMAS  # few answers are {}
