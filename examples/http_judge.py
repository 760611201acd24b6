"""Run grpo.py with a language model behind an HTTP service as the judge.

    python examples/http_judge.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset my_prompts.jsonl

It takes the flags of grpo.py. The judge grades every completion by RUBRIC and is asked through OpenAI's chat interface,
which vLLM and llama.cpp serve, too. Set URL, MODEL and HEADERS. The reward is the sum of the weighted grades, at most
1. docs/fork.md says what to do if the judge fails.
"""

import http.client
import json
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo

URL, MODEL = "http://localhost:8000/v1/chat/completions", "Qwen/Qwen2.5-7B-Instruct"
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}  # your key, if the server asks for one
TIMEOUT = 60  # seconds, for each attempt
PAUSES = [1, 5, 25]  # seconds to wait after the first, second and third failed attempt; the fourth failure ends the run
WORKERS = 512  # requests at the same time, on each rank
WEIGHTS = {"right": 0.8, "clear": 0.2}
RUBRIC = """Grade the student's answer with a whole number from 0 to 10 for each criterion:
right: the result is that of the reference answer
clear: every step is shown and follows from the steps before
End your reply with the grades as JSON, such as {"right": 10, "clear": 3}."""


def read_grades(reply):
    """Return the parts of the reward; raise an error if a grade is missing. The last grades of the reply count."""
    grades = {name: re.findall(rf'"{name}": *(10|[0-9])\s*[,}}]', reply) for name in WEIGHTS}
    if not all(grades.values()):
        raise ValueError(f"the judge's reply lacks a grade: {reply!r}")
    return {name: weight * int(grades[name][-1]) / 10 for name, weight in WEIGHTS.items()}


def grade(completion, row):
    """Return the parts of the reward of one completion; raise the last error if every attempt fails."""
    task = f"Question: {row['prompt']}\nReference answer: {row['answer']}\nStudent's answer: {completion}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"{task}\n\n{RUBRIC}"}]}
    request = urllib.request.Request(URL, json.dumps(body).encode(), HEADERS)
    for pause in [*PAUSES, None]:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return read_grades(json.load(response)["choices"][0]["message"]["content"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            if pause is None:  # no connection, a timeout, a status such as 503, or a reply without grades
                raise
            time.sleep(pause)


def score_completions(completions, rows):
    """Return the parts of each completion's reward, in their order."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(grade, completions, rows))


if __name__ == "__main__":
    grpo.score_completions = score_completions
    grpo.main(grpo.parse_args())
