"""Tests of docs/fork.md and examples/http_judge.py: forks train, a judge may fail, and tests fail on wrong losses."""

import ast
import http.server
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import urllib.error

import pytest
import torch
from sync_copies import MARKER, split
from toy import ROOT, TINY, build_model, gradient_of, load_module, pad, parse, read_jsonl, record, relative_error
from transformers import AutoModelForCausalLM

import cispo
import dapo
import dr_grpo
import grpo
import gspo
import reinforce

PAGE = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"^```diff\n--- (\w+)\.py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
[TEST, OVER_LENGTHS] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
JUDGE = ROOT / "examples" / "http_judge.py"
# The edits of grpo.py that the section on the entropy bonus describes: {old text: new text}.
BONUS = "".join(re.search(r"^    (entropy = .*\n)    (loss = .*\n)", PAGE, re.MULTILINE).groups())
BONUS = BONUS.replace("0.01", "args.entropy_coef")
NO_GRAD = """\
    with torch.no_grad():  # entropies are only logged
        entropies = -(logprobs.exp() * logprobs).sum(-1)
"""
ATTACHED = "    entropies = -(logprobs.exp() * logprobs).sum(-1)\n"
LEFT_OUT = """\
        if ref is None:  # without a KL term, completions of advantage 0 have no gradient: leave them out
            minibatches = [indices[batch["advantages"][indices] != 0] for indices in minibatches]
"""
DIVISION = "                loss = loss / rank_minibatch_size"
ENTROPY_BONUS = {
    NO_GRAD: ATTACHED,
    LEFT_OUT: "",
    DIVISION: re.sub("(?m)^", " " * 16, BONUS.strip("\n")) + "\n" + DIVISION,
    "(entropies.sum(), mask.sum())": "(entropies.detach().sum(), mask.sum())",
    "    sampler_weight_cap: float": '    entropy_coef: float = 0.01\n    """weight"""\n    sampler_weight_cap: float',
}
COPY = "    cp grpo.py {0}.py\n    sed -n '/^--- {0}.py/,/^```$/p' docs/fork.md | git apply -p0\n"
SIZES = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "warmup_steps": 0, "learning_rate": 4e-4}
SIZES["dataset"] = ROOT / "data" / "addition" / "test.jsonl"  # of 512 rows
TWO_GROUPS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), 3
WRONG = {  # {mistake in the loss of cispo.py: (old text, new text)}
    "the gradient goes through the ratio": (".clamp(max=1 + clip_eps_high).detach()", ".clamp(max=1 + clip_eps_high)"),
    "no cap": (".clamp(max=1 + clip_eps_high)", ""),
    "a bound below": (".clamp(max=1 + clip_eps_high)", ".clamp(1 - clip_eps_high, 1 + clip_eps_high)"),
    "capped tokens are dropped": ("* advantages * logprobs", "* advantages * logprobs * (ratio < 1 + clip_eps_high)"),
    "the wrong sign": ("token_loss = -clipped_ratio", "token_loss = clipped_ratio"),
    "a mean instead of the sum": ("token_loss, 0.0).sum()", "token_loss, 0.0).mean()"),
    "padding counts": ("torch.where(mask, weight * token_loss, 0.0).sum()", "(weight * token_loss).sum()"),
}


ROW = r"^\| `(compute_advantages|policy_loss|Policy|generate)` \| (.*) \|$"
NEEDS = {name: re.findall("`(.*?)`", needs) for name, needs in re.findall(ROW, PAGE, re.MULTILINE)}


def pasted(name):
    """What a function is in an empty file, with what the page says that it needs."""
    source = (ROOT / "grpo.py").read_text()
    imports = dict(re.findall(r"^((?:from \S+ )?import (\S+)(?: as \S+)?)$", source, re.MULTILINE))
    imports = {bound: line for line, bound in imports.items()}
    text = "\n".join(imports.get(needed) or split(source)[needed] for needed in (*NEEDS[name], name))
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert used & (imports.keys() | split(source).keys()) - {name} == {*NEEDS[name]} - {name}  # no more, and no less
    namespace = {}
    exec(text, namespace)
    return namespace[name]


def test_functions_work_where_they_are_pasted():
    """Log-probabilities are computed in more than one chunk."""
    assert pasted("compute_advantages")(*TWO_GROUPS).tolist() == grpo.compute_advantages(*TWO_GROUPS).tolist()
    generate, policy_class, policy_loss = map(pasted, ("generate", "Policy", "policy_loss"))
    model = build_model("llama", vocab_size=2**16, dtype=torch.float32)
    policy_class.forward.__globals__["LOGITS_AT_ONCE"] = 2**20
    prompts = [[3, 4], [5]]
    torch.manual_seed(1)
    completions, sampler_logprobs = zip(*generate(model, prompts, 12, 1.0, [7]))
    ids, mask = pad(prompts, completions)
    logprobs, _ = policy_class(model, "float32")(ids, mask, 1.0)
    assert mask.sum() == 24 > 2**20 // 2**16
    sampler_logprobs = torch.zeros_like(logprobs).masked_scatter(mask.bool(), torch.tensor(sum(sampler_logprobs, [])))
    torch.testing.assert_close(logprobs, sampler_logprobs, rtol=1e-4, atol=1e-4)
    loss, _ = policy_loss(logprobs, logprobs, sampler_logprobs, None, torch.ones(2), mask, 0.2, 0.0, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-2, rel=1e-3) and model.lm_head.weight.grad.abs().sum() > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with the current grpo.py, the bundled model, and the forks that the page's commands create."""
    folder = tmp_path_factory.mktemp("forks")
    for name in ("docs", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "grpo.py", folder)
    for name in DIFFS:
        assert COPY.format(name) in PAGE
        subprocess.run(["sh", "-c", COPY.format(name)], cwd=folder, check=True)
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    for old, new in ENTROPY_BONUS.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "my_entropy.py").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def forks(folder):
    """Import the forks as {name: module}."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {name: importlib.import_module(name) for name in [*DIFFS, "my_entropy"]}


def train(fork, folder, **settings):
    """Train for two steps of two minibatches; return metrics and samples."""
    with pytest.MonkeyPatch.context() as patch:
        updates = record(patch, fork, "step_optimizer")
        fork.main(parse(fork, run_dir=folder, num_steps=2, eval_prompts=8, seed=3, **SIZES | settings))
    lines, samples = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["policy/approx_kl"] > 0 for line in lines[1:])
    assert len(updates) == 4
    return lines, samples


def failures(fork, text=TEST):
    """Return the names of the page's tests, and of those that fail if this module replaces cispo.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cispo", fork)
        names = {}
        exec(text, names)
    tests, failed = [name for name in names if name.startswith("test_")], []
    for name in tests:
        try:
            names[name]()
        except AssertionError:
            failed.append(name)
    return tests, failed


def test_the_length_penalty_is_one_line_above_the_line(folder):
    [diff] = DIFFS.values()
    source, fork = ((folder / f"{script}.py").read_text(encoding="utf-8") for script in ("grpo", "my_short"))
    assert [line[0] for line in diff.splitlines()[1:] if line[:1] in "+-"].count("+") == 1 and source != fork
    assert source.partition(MARKER)[2] == fork.partition(MARKER)[2]


def test_the_length_penalty_is_what_the_page_says(forks, tmp_path):
    lines, samples = train(forks["my_short"], tmp_path / "run")
    found = {(text, reward) for line in samples for text, reward in zip(line["completions"], line["rewards"])}
    right = [(text, reward) for text, reward in found if reward]
    assert right and len(right) < len(found)
    assert [reward for _, reward in right] == pytest.approx([0.5 ** (len(text) / 1000) for text, _ in right])
    assert lines[0]["eval/reward"] < lines[0]["eval/accuracy"]  # accuracy counts is_correct


# ---- the reward from an HTTP service


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait to be accepted: as many as a batch has


@pytest.fixture
def server():
    """Run a local judge whose grades follow from the completion's length, and which can fail on request."""
    server = Server(("127.0.0.1", 0), Handler)
    server.troubles, server.answers_left, server.together = [], math.inf, threading.Barrier(1)
    server.asked, server.over, server.lock = [], threading.Event(), threading.Lock()
    server.given_up_on = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def grades_of(completion):
    return {"right": len(completion) % 11, "clear": len(completion) // 2 % 11}


def parts_of(completion):
    grades = grades_of(completion)
    return {"right": pytest.approx(0.08 * grades["right"]), "clear": pytest.approx(0.02 * grades["clear"])}


# What a judge may reply that is no full set of grades.
NO_GRADES = {
    "refusal": "I cannot grade this.",
    "nothing": None,
    "cut off": '{"right": 10, "clear": 1',
    "one missing": '{"right": 10}',
    "too high": '{"right": 11, "clear": 10}',
    "negative": '{"right": -1, "clear": 10}',
    "a fraction": '{"right": 7.5, "clear": 10}',
    "a word": '{"right": "high", "clear": 10}',
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        [message] = body["messages"]
        asked = re.fullmatch(
            r"Question: (.*)\nReference answer: (.*)\nStudent's answer: (.*)\n\nGrade the .*",
            message["content"],
            re.DOTALL,
        )
        with server.lock:
            trouble = server.troubles.pop() if server.troubles else None
            if trouble is None and server.answers_left <= 0:
                trouble = "status"
            if trouble is None:
                server.answers_left -= 1
                server.asked.append((self.path, body["model"], message["role"], *asked.groups()))
        if trouble == "status":
            self.send_error(503)
        elif trouble == "silence":
            server.given_up_on = server.over.wait(30)  # False if the client still waits
        elif trouble in NO_GRADES:
            self.reply({"choices": [{"message": {"role": "assistant", "content": NO_GRADES[trouble]}}]})
        elif trouble == "another format":
            self.reply({"error": "no such model"})
        elif trouble is None:
            server.together.wait(20)
            grades = json.dumps(grades_of(asked[3]), indent=len(asked[3]) % 2 or None)
            reply = f'First I thought {{"right": 0, "clear": 0}}, but:\n```json\n{grades}\n```'
            self.reply({"choices": [{"message": {"role": "assistant", "content": reply}}]})

    def reply(self, answer):
        answer = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge(server, monkeypatch):
    """Import examples/http_judge.py with the address of that server and short pauses."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    module = load_module(JUDGE)
    path = module.URL.removeprefix("http://localhost:8000")
    module.URL, module.PAUSES = f"http://127.0.0.1:{server.server_port}{path}", [0.01] * len(module.PAUSES)
    return module


COMPLETIONS = ["x" * i for i in range(7)] + ['{"right": 10, "clear": 10}']  # the last one grades itself
QUESTIONS = [{"prompt": f"p{i}", "answer": str(i), "x": i} for i in range(8)]


def test_requests_run_in_parallel_keep_their_order_and_are_repeated(judge, server):
    """First the server holds its answers until all eight have come. Then requests fail, each in another way."""
    server.together = threading.Barrier(8)
    assert judge.score_completions(COMPLETIONS, QUESTIONS) == [parts_of(text) for text in COMPLETIONS]
    judge.TIMEOUT, server.troubles, server.together = 3, ["status", "silence", "hang up"], threading.Barrier(1)
    assert judge.score_completions(COMPLETIONS, QUESTIONS) == [parts_of(text) for text in COMPLETIONS]
    assert not server.troubles and server.given_up_on
    about = "/v1/chat/completions", judge.MODEL, "user"
    expected = [(*about, row["prompt"], row["answer"], text) for text, row in zip(COMPLETIONS, QUESTIONS)]
    assert sorted(server.asked) == [row for row in expected for _ in range(2)]


@pytest.mark.parametrize("trouble", [*NO_GRADES, "another format"])
def test_a_reply_without_grades_is_asked_for_again_and_never_a_reward(trouble, judge, server):
    server.troubles = [trouble] * 3
    assert judge.score_completions(["xyz"], QUESTIONS[:1]) == [parts_of("xyz")] and not server.troubles
    server.troubles = [trouble] * 4
    with pytest.raises((ValueError, LookupError, TypeError)):
        judge.score_completions(["xyz"], QUESTIONS[:1])
    assert not server.troubles


def test_the_last_attempt_raises_whatever_the_failure_is(judge, server):
    server.answers_left = 0
    server.troubles = ["hang up"] * len(judge.PAUSES)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        judge.score_completions(["x"], [{"prompt": "p", "answer": None}])
    assert not server.troubles
    server.troubles = ["refusal"] * 4
    with pytest.raises(ValueError, match="the judge's reply lacks a grade: 'I cannot grade this.'"):
        judge.score_completions(["x"], [{"prompt": "p", "answer": None}])
    judge.URL = "http://127.0.0.1:9/v1/chat/completions"  # no server listens there
    with pytest.raises(urllib.error.URLError):
        judge.score_completions(["x"], [{"prompt": "p", "answer": None}])


def test_a_rollout_waits_for_its_slowest_reply_only_and_logs_the_parts(judge, server, tmp_path, monkeypatch):
    """The server answers none of a rollout's 64 requests before it has all of them."""
    monkeypatch.setattr(grpo, "score_completions", judge.score_completions)
    server.together = threading.Barrier(64)
    settings = {"num_steps": 2, "eval_prompts": 0, "seed": 3, "max_completion_length": 16} | SIZES
    settings |= {"prompts_per_step": 16, "minibatch_size": 32}
    grpo.main(parse(grpo, run_dir=tmp_path / "run", **settings))
    assert len(server.asked) == 2 * 64
    for number, line in enumerate(read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]):
        texts = [asked[-1] for asked in server.asked[64 * number : 64 * (number + 1)]]
        for name, weight in (("right", 0.08), ("clear", 0.02)):
            mean = sum(grades_of(text)[name] for text in texts) / 64
            assert line[f"reward/{name}"] == pytest.approx(weight * mean)
        assert line["reward/mean"] == pytest.approx(line["reward/right"] + line["reward/clear"]) and mean > 0
    for sample in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        assert sample["rewards"] == [parts_of(text) for text in sample["completions"]]


def test_a_judge_that_goes_down_ends_the_run_and_resumed_it_ends_as_if_nothing_had_happened(
    judge, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(grpo, "score_completions", judge.score_completions)
    settings = {"num_steps": 2, "eval_prompts": 0, "save_every": 1, "seed": 3, "max_completion_length": 16, **SIZES}
    grpo.main(parse(grpo, run_dir=tmp_path / "whole", **settings))
    server.answers_left = 16  # the first rollout
    with pytest.raises(urllib.error.HTTPError, match="503"):
        grpo.main(parse(grpo, run_dir=tmp_path / "cut", **settings))
    grpo.dist.destroy_process_group()  # as the end of the process does
    cut = read_jsonl(tmp_path / "cut" / "metrics.jsonl")
    assert [line["step"] for line in cut] == [0, 1]
    server.answers_left = math.inf
    grpo.main(parse(grpo, resume=tmp_path / "cut"))
    runs = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    whole, cut = ([{k: v for k, v in line.items() if k[:5] != "perf/"} for line in lines] for lines in runs)
    assert whole == cut and len(cut) == 3 and cut[2]["reward/mean"] > 0


# ---- the entropy bonus, and the test to copy


def test_the_test_of_the_page_passes_on_cispo_and_fails_on_grpo():
    tests, failed = failures(cispo)
    assert len(tests) == 2 and not failed
    assert failures(grpo)[1] == tests
    assert failures(reinforce)[1] == failures(dapo)[1] == tests[:1]  # the numbers by hand are those of a capped ratio
    assert failures(gspo)[1] == failures(dr_grpo)[1] == tests
    assert len(WRONG) == 7 and "seven wrong versions" in " ".join(PAGE.split())


def test_the_second_test_for_losses_that_divide_by_lengths():
    for script in (grpo, gspo):
        tests, failed = failures(script, TEST + OVER_LENGTHS)
        assert len(tests) == 3 and tests[2] not in failed
    for script in (cispo, reinforce, dapo):
        assert failures(script, TEST + OVER_LENGTHS)[1][-1] == tests[2]


def first_update(fork, folder, patch):
    """Make a step of one update, in which only the bonus has a gradient; return that gradient, and the batch."""
    gradients, step_optimizer = [], fork.step_optimizer

    def recorded(policy, *rest):
        gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
        return step_optimizer(policy, *rest)

    patch.setattr(fork, "step_optimizer", recorded)
    patch.setattr(fork, "reward_fn", lambda *_: 0.0)
    calls = record(patch, fork, "microbatches")
    settings = SIZES | {"minibatch_size": 16, "kl_coef": 0.0, "temperature": 0.7, "entropy_coef": 0.3}
    fork.main(parse(fork, run_dir=folder, num_steps=1, eval_prompts=0, seed=3, microbatch_tokens=200, **settings))
    [gradient] = gradients
    return gradient, calls[0][0][0]


def test_entropies_have_the_gradient_of_plain_logits_in_the_fork_and_none_in_grpo(forks, folder, tmp_path, monkeypatch):
    """With advantages of 0 and without a KL term, only the bonus is left."""
    gradient, batch = first_update(forks["my_entropy"], tmp_path / "bonus", monkeypatch)
    model, mean_entropies = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), []
    for ids, mask in zip(batch["ids"], batch["completion_mask"]):
        places = mask.nonzero().squeeze(1)
        distributions = (model(ids[: places[-1]].unsqueeze(0)).logits[0, places - 1] / 0.7).log_softmax(-1)
        mean_entropies.append(-(distributions.exp() * distributions).sum(1).mean())
    assert len(mean_entropies) == 16
    exact = gradient_of(model, sum(mean_entropies) / 16)
    assert relative_error(-gradient, 0.3 * exact) < 1e-4
    # Without the edit below the line, nothing fails, but the bonus has no effect.
    source = (folder / "my_entropy.py").read_text(encoding="utf-8")
    assert source.count(ATTACHED) == 1
    (folder / "detached.py").write_text(source.replace(ATTACHED, NO_GRAD), encoding="utf-8")
    gradient, _ = first_update(load_module(folder / "detached.py"), tmp_path / "detached", monkeypatch)
    assert not gradient.any()
    policy = grpo.Policy(model, "float32")
    assert not policy(batch["ids"], batch["completion_mask"], 0.7)[1].requires_grad


def test_the_entropy_bonus_trains(forks, tmp_path):
    lines, _ = train(forks["my_entropy"], tmp_path / "run")
    assert all(line["policy/entropy"] > 0 for line in lines[1:])


@pytest.mark.parametrize("mistake", WRONG)
def test_the_test_of_the_page_fails_on_a_wrong_loss(mistake, tmp_path):
    source, (old, new) = (ROOT / "cispo.py").read_text(encoding="utf-8"), WRONG[mistake]
    assert source.count(old) == 1
    (tmp_path / "wrong.py").write_text(source.replace(old, new), encoding="utf-8")
    assert failures(load_module(tmp_path / "wrong.py"))[1]
