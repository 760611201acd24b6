"""data/word_problems and data/manners: what their READMEs say of them, and what make.py does with what is odd."""

import json

import pytest
from tiny import ROOT, load_module, read_jsonl

import grpo
import grpo_process

WORDS, MANNERS = ROOT / "data" / "word_problems", ROOT / "data" / "manners"
FILES = {"svamp/train": 700, "svamp/test": 300, "mawps/train": 1504, "mawps/test": 200}
make = load_module(WORDS / "make.py")


def test_sizes():
    for folder, files in ((WORDS, FILES), (MANNERS, {"train": 994, "test": 100})):
        for name, count in files.items():
            assert len(read_jsonl(folder / f"{name}.jsonl")) == count
            assert f"{count:,}" in (folder / "README.md").read_text()
    assert sum(path.stat().st_size for folder in (WORDS, MANNERS) for path in folder.rglob("*.*")) < 2e6


def test_no_text_is_in_two_files():
    texts = [{make.without_numbers(row["prompt"]) for row in read_jsonl(WORDS / f"{name}.jsonl")} for name in FILES]
    assert sum(map(len, texts)) == len(set().union(*texts))
    prompts = [{row["prompt"] for row in read_jsonl(MANNERS / f"{name}.jsonl")} for name in ("train", "test")]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == 100


def test_every_equation_is_right_and_found_as_a_step():
    for name in ("mawps/train", "mawps/test"):
        for row in read_jsonl(WORDS / f"{name}.jsonl"):
            *equations, box = row["answer"].splitlines()
            for equation in equations:
                a, op, b, _, c = equation.split()
                assert eval(f"{a} {op} {b}") == pytest.approx(float(c), rel=1e-4, abs=1e-5)
            assert box == rf"\boxed{{{equations[-1].split()[-1]}}}"
            assert grpo.is_right(row["answer"], row["answer"]) and grpo.is_right(box, row["answer"])
    steps = grpo_process.step_rewards("5 + 6 = 11\n11 * 2 = 23", {"prompt": "5, 6, twice", "answer": "5 + 6 = 11"})
    assert [reward for _, reward in steps] == [1.0, 0.0]


def test_what_is_odd_in_the_sources(tmp_path):
    svamp = [{"Body": "He had 3 pens", "Question": "How many are left?", "Answer": 2.0}]
    svamp += [{"Body": "He had 3 pens.", "Question": "How many are left?", "Answer": 2.5}]
    (tmp_path / "svamp.json").write_text(json.dumps(svamp))
    assert make.read_svamp(tmp_path / "svamp.json") == [
        {"prompt": "He had 3 pens, how many are left?", "answer": "2"},
        {"prompt": "He had 3 pens. How many are left?", "answer": "2.5"},
    ]
    lines = ["Question,Numbers,Equation,Answer", "number0 and number1 ?,3.0 4.0,- number1 number0,1"]
    lines += ["number0 and number1 ?,3.0 4.0,+ number1 number0,8", "A number0 .,0.5,* 100.0 number0,50.0"]
    (tmp_path / "mawps.csv").write_text("\n".join(lines))
    assert make.read_mawps(tmp_path / "mawps.csv") == [  # the second is not what its equation gives
        {"prompt": "3 and 4?", "answer": "4 - 3 = 1\n\\boxed{1}"},
        {"prompt": "A 0.5.", "answer": "100 * 0.5 = 50\n\\boxed{50}"},
    ]
    rows = [{"prompt": text} for text in ("a 1", "a 2", "a 1", "b 1", "c", "d")]
    train, test = make.split(rows, 2, {"d"})
    assert len(test) == 2 and {row["prompt"] for row in train + test} <= {"a 1", "a 2", "b 1", "c"}
    assert not {make.without_numbers(row["prompt"]) for row in train} & {
        make.without_numbers(row["prompt"]) for row in test
    }


def test_pairs_that_do_not_differ_are_dropped(tmp_path):
    manners = load_module(MANNERS / "make.py")
    rows = [{"instruction": f"{i}", "input": "", "chosen": "yes", "rejected": "no" * (i > 0)} for i in range(150)]
    rows += [{"instruction": "0", "input": "x", "chosen": "no", "rejected": "no"}]
    (tmp_path / "source.json").write_text(json.dumps(rows))
    manners.main(tmp_path / "source.json", tmp_path)
    train, test = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert len(test) == 100 and len(train) == 50 and "0\n\nx" not in {row["prompt"] for row in train + test}
