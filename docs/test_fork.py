"""Tests of docs/fork.md and examples/http_judge.py: forks train, a judge may fail, and tests fail on wrong losses."""

import ast
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.error

import pytest
import torch
from sync_copies import MARKER, split
from toy import ROOT, TINY, gradient_of, load_module, parse, read_jsonl, record, relative_error
from transformers import AutoModelForCausalLM

import cispo
import grpo

PAGE = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
SOURCE = (ROOT / "grpo.py").read_text(encoding="utf-8")
[TEST, SUMS] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SIZES = {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 8, "seed": 3}
SIZES |= {"warmup_steps": 0, "learning_rate": 4e-4, "dataset": ROOT / "data" / "addition" / "test.jsonl"}
COPY = "    cp grpo.py my_short.py\n    sed -n '/^--- my_short.py/,/^```$/p' docs/fork.md | git apply -p0\n"


def edited(source, edits, path):
    """Import a script in which each old text, which must occur once, is replaced by the new one."""
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path.write_text(source, encoding="utf-8")
    return load_module(path)


def test_the_table_has_all_functions_in_their_order():
    table = PAGE.partition("\n| part |")[2].partition("\n\n")[0]
    functions = re.findall(r"^(?:def|class) (\w+)", SOURCE, re.M)
    assert [name for name in re.findall(r"`(\w+)`", table) if name in functions] == functions


def test_functions_need_what_the_page_says():
    imports = re.findall(r"^(?:from \S+ )?import (\S+)(?: as \S+)?$", SOURCE, re.M)
    names = {*imports, *split(SOURCE)}
    rows = re.findall(r"^\| `(compute_advantages|policy_loss|Policy|generate)` \| (.*) \|$", PAGE, re.M)
    assert len(rows) == 4
    for name, needs in rows:
        needs = {*re.findall("`(.*?)`", needs)}
        own = [split(SOURCE)[needed] for needed in {*needs, name} - {*imports}]
        used = {node.id for node in ast.walk(ast.parse("\n".join(own))) if isinstance(node, ast.Name)}
        assert used & names - {name} == needs, name


def test_the_length_penalty_is_what_the_page_says(tmp_path):
    """The page's command makes a fork, which differs above the line and halves rewards every 1000 characters."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "models").symlink_to(ROOT / "models")
    shutil.copy(ROOT / "grpo.py", tmp_path)
    assert COPY in PAGE
    subprocess.run(["sh", "-c", COPY], cwd=tmp_path, check=True)
    text = (tmp_path / "my_short.py").read_text(encoding="utf-8")
    assert text != SOURCE and text.partition(MARKER)[2] == SOURCE.partition(MARKER)[2]
    fork = load_module(tmp_path / "my_short.py")
    fork.main(parse(fork, run_dir=tmp_path / "run", **SIZES))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    found = {pair for line in samples for pair in zip(line["completions"], line["rewards"])}
    right = [(text, reward) for text, reward in found if reward]
    assert right and len(right) < len(found)
    assert [reward for _, reward in right] == pytest.approx([0.5 ** (len(text) / 1000) for text, _ in right])


# ---- the reward from an HTTP service


class Handler(http.server.BaseHTTPRequestHandler):
    """Grade completions by their length, or reply what the test wants first: a status, or a text without grades."""

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            trouble = server.troubles.pop() if server.troubles else None
        if isinstance(trouble, int):
            return self.send_error(trouble)
        server.together.wait(20)
        completion = re.search(r"^Student's answer: (.*)\n\n", body["messages"][0]["content"], re.M)[1]
        grades = f'First {{"right": 0, "clear": 0}}, but:\n```json\n{json.dumps(grades_of(completion))}\n```'
        with server.lock:
            server.asked.append(completion)
        answer = json.dumps({"choices": [{"message": {"content": trouble or grades}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def grades_of(completion):
    return {"right": len(completion) % 11, "clear": len(completion) // 2 % 11}


def parts_of(completion):
    grades = grades_of(completion)
    return {"right": pytest.approx(0.08 * grades["right"]), "clear": pytest.approx(0.02 * grades["clear"])}


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.troubles, server.asked, server.together, server.lock = [], [], threading.Barrier(1), threading.Lock()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def judge(server, monkeypatch):
    """Import examples/http_judge.py with the address of that server and short pauses."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    module = load_module(ROOT / "examples" / "http_judge.py")
    module.URL, module.PAUSES = f"http://127.0.0.1:{server.server_port}", [0.01] * 3
    return module


ROW = [{"prompt": "p", "answer": "5"}]


@pytest.mark.parametrize("trouble", [503, "I cannot grade this.", '{"right": 10}', '{"right": 11, "clear": 10}'])
def test_a_reply_without_grades_is_asked_for_again_and_never_a_reward(trouble, judge, server):
    server.troubles = [trouble] * 3
    assert judge.score_completions(["xyz"], ROW) == [parts_of("xyz")]
    server.troubles = [trouble] * 4
    with pytest.raises(urllib.error.HTTPError if trouble == 503 else ValueError, match="503|lacks a grade"):
        judge.score_completions(["xyz"], ROW)
    assert not server.troubles


def test_requests_of_a_rollout_run_in_parallel_and_their_parts_are_logged(judge, server, tmp_path, monkeypatch):
    """The server answers none of a rollout's 16 requests before it has all of them."""
    server.together = threading.Barrier(16)
    monkeypatch.setattr(grpo, "score_completions", judge.score_completions)
    grpo.main(parse(grpo, run_dir=tmp_path / "run", **SIZES | {"eval_prompts": 0, "max_completion_length": 16}))
    assert len(server.asked) == 2 * 16
    for number, line in enumerate(read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]):
        grades = [grades_of(completion) for completion in server.asked[16 * number : 16 * (number + 1)]]
        assert line["reward/right"] == pytest.approx(0.08 * sum(grade["right"] for grade in grades) / 16)
        assert line["reward/mean"] == pytest.approx(line["reward/right"] + line["reward/clear"])
    for sample in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        assert sample["rewards"] == [parts_of(text) for text in sample["completions"]]


# ---- the entropy bonus

ATTACHED = "    entropies = -(logprobs.exp() * logprobs).sum(-1)\n"
DETACHED = f"    with torch.no_grad():  # entropies are only logged\n    {ATTACHED}"
LEFT_OUT = re.search(r"^ +if ref is None:.*\n.*\n", SOURCE, re.M)[0]
DIVISION = "                loss = loss / rank_minibatch_size"
BONUS = "".join(" " * 16 + line + "\n" for line in re.findall(r"^    (entropy = .*|loss = loss - .*)\n", PAGE, re.M))
# The edits of grpo.py that the page describes: {old text: new text}.
ENTROPY_BONUS = {DETACHED: ATTACHED, LEFT_OUT: "", DIVISION: BONUS + DIVISION}
ENTROPY_BONUS["(entropies.sum(), mask.sum())"] = "(entropies.detach().sum(), mask.sum())"


def test_the_entropy_bonus_has_the_gradient_of_the_entropy(tmp_path, monkeypatch):
    """With advantages of 0 and without a KL term, only the bonus is left in a step of one update."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    fork = edited(SOURCE, ENTROPY_BONUS, tmp_path / "my_entropy.py")
    gradients, step_optimizer = [], fork.step_optimizer

    def recorded(policy, *rest):
        gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
        return step_optimizer(policy, *rest)

    monkeypatch.setattr(fork, "step_optimizer", recorded)
    monkeypatch.setattr(fork, "reward_fn", lambda *_: 0.0)
    calls = record(monkeypatch, fork, "microbatches")
    settings = SIZES | {"num_steps": 1, "minibatch_size": 16, "eval_prompts": 0, "kl_coef": 0.0, "temperature": 0.7}
    fork.main(parse(fork, run_dir=tmp_path / "run", microbatch_tokens=200, **settings))
    [gradient], batch = gradients, calls[0][0][0]
    model, mean_entropies = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), []
    for ids, mask in zip(batch["ids"], batch["completion_mask"]):
        places = mask.nonzero().squeeze(1)
        distributions = (model(ids[: places[-1]].unsqueeze(0)).logits[0, places - 1] / 0.7).log_softmax(-1)
        mean_entropies.append(-(distributions.exp() * distributions).sum(1).mean())
    assert len(mean_entropies) == 16
    exact = gradient_of(model, sum(mean_entropies) / 16)
    assert relative_error(-gradient, 0.01 * exact) < 1e-4


# ---- the test to copy

WRONG = {  # {mistake in the loss of grpo.py: (old text, new text)}
    "no clip": ("torch.min(ratio * advantages, clipped_ratio * advantages)", "ratio * advantages"),
    "max instead of min": ("torch.min(ratio", "torch.max(ratio"),
    "the wrong sign": ("token_loss = -torch.min", "token_loss = torch.min"),
    "a mean instead of the sum": ("(token_loss.sum(1) / lengths).sum()", "(token_loss.sum(1) / lengths).mean()"),
    "the padded length": ("mask.sum(1).clamp(min=1)  # (B,)", "mask.shape[1]  # (B,)"),
    "padding counts": ("torch.where(mask, weight * token_loss, 0.0)", "weight * token_loss"),
}
SUM = {"(token_loss.sum(1) / lengths).sum()": "token_loss.sum()"}


def failures(fork, text=TEST):
    """Return, for each of the page's tests, whether it fails if this module replaces grpo.py."""
    names, failed = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "grpo", fork)
        exec(text, names)
    for name in [name for name in names if name.startswith("test_")]:
        try:
            names[name]()
            failed.append(False)
        except AssertionError:
            failed.append(True)
    return failed


def test_the_tests_of_the_page_tell_a_sum_from_a_mean_over_the_length(tmp_path):
    assert failures(grpo, TEST + SUMS) == [False, False, True]
    summed = edited((ROOT / "grpo.py").read_text(encoding="utf-8"), SUM, tmp_path / "summed.py")
    assert failures(summed, TEST + SUMS) == [True, True, False]
    with pytest.raises(TypeError, match="clip_eps"):  # an argument that the function does not have
        failures(cispo)


@pytest.mark.parametrize("mistake", WRONG)
def test_the_test_of_the_page_fails_on_a_wrong_loss(mistake, tmp_path):
    source, (old, new) = (ROOT / "grpo.py").read_text(encoding="utf-8"), WRONG[mistake]
    assert any(failures(edited(source, {old: new}, tmp_path / "wrong.py")))
