"""The make.py of bundled data sets writes them: python -m pytest tests/test_embedded_data.py"""

import pytest
from processes import run_file
from toy import ROOT, read_jsonl

import grpo

DATA = ROOT / "data"


@pytest.mark.parametrize("name, counts", [("addition", [4096, 512, 20_000]), ("long", [8192, 512, 40_000])])
def test_make_rebuilds_embedded_data_of_different_prompts_and_right_answers(tmp_path, name, counts):
    run_file(DATA / name / "make.py", tmp_path)
    rows = []
    for file in ("train.jsonl", "test.jsonl", "sft.jsonl"):
        rows += read_jsonl(tmp_path / file)
        if (DATA / name / file).exists():
            assert (tmp_path / file).read_bytes() == (DATA / name / file).read_bytes()
    assert len(rows) == sum(counts) == len({row["prompt"] for row in rows})
    for row in rows:
        answer = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row.get("answer") == answer or grpo.reward_fn(row["completion"], answer) == 1.0
