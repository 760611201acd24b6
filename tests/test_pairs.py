"""Preference pairs: the forms rows may come in, what is dropped, and the embedded pairs."""

import ast
import json
import math
import re
from collections import Counter

import pytest
from tiny import ALTERNATING, ROOT, TEMPLATE, TINY, assistant, parse, read_jsonl, user, word_tokenizer, write_rows

import ppo_rlhf
import reward_model

pytestmark = pytest.mark.usefixtures("alone")
PREFERENCES = ROOT / "data" / "preferences"
HH = ROOT / "tests" / "data" / "hh_60.jsonl"
ASSISTANT = "\n\nAssistant:"
STOP_ID = 5  # <|end|> of models/tiny
ROWS = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(1, 9)]


def load(tmp_path, rows, tokenizer, lengths=(32, 48), num_held_out=0, system_prompt=""):
    dataset = rows if isinstance(rows, str) else write_rows(tmp_path / "pairs.jsonl", rows)
    settings = {"max_prompt_length": lengths[0], "max_completion_length": lengths[1], "system_prompt": system_prompt}
    return reward_model.load_pairs(reward_model.Args(dataset=dataset, eval_prompts=num_held_out, **settings), tokenizer)


def texts_of(pair, tokenizer):
    """(prompt, chosen, rejected) of a pair, decoded with special tokens."""
    return tuple(tokenizer.decode(pair[key]) for key in ("prompt_ids", "chosen_ids", "rejected_ids"))


# ---- forms of a row

HISTORY = [user("1+1="), assistant("2"), user("2+2=")]
CONVERSATIONS = {"chosen": [*HISTORY, assistant("4")], "rejected": [*HISTORY, assistant("5")]}
DIALOGUE = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+2=\n\nAssistant:"
DIALOGUES = {"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}
AFTER = {"chosen": [assistant("4")], "rejected": [assistant("5")]}
FORMS = [
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2="),
    ({"question": "2+2=", "problem": "9", "chosen": "4", "rejected": "5"}, "2+2="),
    ({"problem": "2+2=", "chosen": 4, "rejected": 5}, "2+2="),
    ({"prompt": HISTORY, "chosen": "4", "rejected": "5"}, HISTORY),
    (CONVERSATIONS, HISTORY),
    ({"prompt": None, **CONVERSATIONS}, HISTORY),
    ({"prompt": "2+2=", **CONVERSATIONS}, HISTORY),
    ({"prompt": HISTORY, **CONVERSATIONS}, HISTORY),
    ({"prompt": HISTORY, **AFTER}, HISTORY),
    ({"prompt": "2+2=", **AFTER}, HISTORY[2:]),
    ({"prompt": "2+2= ", **{key: [*HISTORY[2:], *turns] for key, turns in AFTER.items()}}, HISTORY[2:]),
    ({"prompt": "2+2= ", **AFTER, "chosen": [*HISTORY[2:], assistant("4")]}, HISTORY[2:]),
    ({"prompt": json.dumps(HISTORY), **{key: json.dumps(turns) for key, turns in AFTER.items()}}, HISTORY),
    ({key: json.dumps(chat) for key, chat in CONVERSATIONS.items()}, HISTORY),
    ({"prompt": HISTORY[:1], **{key: [*HISTORY[1:], *turns] for key, turns in AFTER.items()}}, HISTORY),
    (DIALOGUES, HISTORY),
    ({"prompt": None, **DIALOGUES}, HISTORY),
]


@pytest.mark.parametrize("row, expected", FORMS)
def test_every_form_is_encoded_with_the_chat_template_and_a_stop_token(tmp_path, tokenizer, row, expected):
    assert reward_model.split_pair(row, True) == (expected, "4", "5")
    [pair], _ = load(tmp_path, [row], tokenizer)
    prompt = "<|user|>2+2=<|assistant|>"
    if expected is HISTORY:
        prompt = "<|user|>1+1=<|assistant|>2<|end|>" + prompt
    assert texts_of(pair, tokenizer) == (prompt, "4<|end|>", "5<|end|>")


def test_a_dialogue_is_encoded_as_text_without_a_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template = None
    assert reward_model.split_pair(DIALOGUES, False) == (DIALOGUE, " 4", " 5")
    [pair], _ = load(tmp_path, [DIALOGUES], tokenizer, lengths=(100, 9))
    assert pair["prompt_ids"] == tokenizer(DIALOGUE)["input_ids"]
    assert texts_of(pair, tokenizer)[1:] == (" 4<|end|>", " 5<|end|>")


@pytest.mark.parametrize("has_template", [True, False])
def test_dialogues_part_where_the_last_common_turn_of_the_assistant_begins(has_template):
    """Not where the texts part, which is inside the answers; nor at their own last turns, which differ."""
    row = {"chosen": DIALOGUE + " 44\n\nHuman: 3+3=\n\nAssistant: 6", "rejected": DIALOGUE + " 45"}
    prompt, chosen, rejected = reward_model.split_pair(row, has_template)
    assert prompt == (HISTORY if has_template else DIALOGUE)
    assert (chosen.strip(), rejected.strip()) == ("44\n\nHuman: 3+3=\n\nAssistant: 6", "45")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "4", "rejected": "5"},
        {"chosen": "\n\nHuman: 2+2=\n\nAssistant: 4", "rejected": "\n\nHuman: 3+3=\n\nAssistant: 6"},
        {"chosen": [user("2+2="), assistant("4")], "rejected": [user("3+3="), assistant("6")]},
        AFTER,
        {"chosen": None, "rejected": [user("2+2="), assistant("5")]},
        {"prompt": "2+2=", "chosen": [assistant("4")], "rejected": [assistant("2"), user("2+2="), assistant("5")]},
    ],
)
def test_no_prompt_is_shared(row):
    assert not reward_model.split_pair(row, True)[0]


def test_only_the_prompt_begins_with_a_bos_token(tmp_path):
    tokenizer = word_tokenizer(TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }} be"))
    tokenizer.add_special_tokens({"eos_token": "be"})
    rows = [{"prompt": "one two", "chosen": "three", "rejected": "four two"}]
    [pair], _ = load(tmp_path, rows, tokenizer, system_prompt="brief")
    prompt, chosen, rejected = [" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in pair.values()]
    assert prompt == "<bos> system brief be user one two be assistant"
    assert (chosen, rejected) == ("three be", "four two be")


@pytest.mark.parametrize("column, system", [({}, 7), ({"system": None}, 7), ({"system": "9"}, 9)])
def test_a_column_system_replaces_the_system_prompt(tmp_path, tokenizer, column, system):
    [pair], _ = load(tmp_path, [ROWS[0] | column], tokenizer, system_prompt="7")
    assert texts_of(pair, tokenizer)[0] == f"<|system|>{system}<|user|>1+1=<|assistant|>"


def test_every_completion_ends_in_one_stop_token(tmp_path, tokenizer):
    train, _ = load(tmp_path, ROWS, tokenizer)
    assert len(train) == len(ROWS) == 8
    for pair, row in zip(train, ROWS):
        for key in ("chosen", "rejected"):
            assert pair[f"{key}_ids"] == tokenizer(row[key], add_special_tokens=False)["input_ids"] + [STOP_ID]
            assert pair[f"{key}_ids"].count(STOP_ID) == 1


# ---- dirt

DIRT = [
    {"rejected": "2", "chosen": "2"},
    *[{key: text} for key in ("chosen", "rejected") for text in (None, "", "  ", "\n")],
    *[{"prompt": prompt} for prompt in (None, "")],
    {"prompt": "1+" * 20 + "1="},
    {"chosen": "1" * 48},
    {"rejected": "1" * 48},
]
DIRTY_CHATS = [
    {"rejected": [user("3+3="), assistant("6")]},  # another prompt
    {"rejected": [*HISTORY, assistant("")]},
    {"rejected": [*HISTORY, assistant(None)]},
    {"rejected": CONVERSATIONS["chosen"]},
    {"rejected": [*HISTORY, assistant("1" * 48)]},
]


UNFIT, EQUAL = "without one prompt and two completions", "with two equal completions"
COUNTS = {EQUAL: 1, UNFIT: 10, "too long": 3}, {UNFIT: 3, EQUAL: 1, "too long": 1}


@pytest.mark.parametrize("good, dirt, counts", zip((ROWS[0], CONVERSATIONS), (DIRT, DIRTY_CHATS), COUNTS))
def test_dirt_is_dropped_and_counted(tmp_path, tokenizer, capsys, good, dirt, counts):
    others = ROWS[1:] if good is ROWS[0] else [CONVERSATIONS] * 7
    train, _ = load(tmp_path, [*({**good, **change} for change in dirt), *others], tokenizer)
    said = f"7 training rows of {tmp_path / 'pairs.jsonl'}, split train, dropped: {counts}\n"
    assert said in capsys.readouterr().out
    found = [texts_of(pair, tokenizer) for pair in train]
    if good is ROWS[0]:
        assert found == [
            (f"<|user|>{r['prompt']}<|assistant|>", *(f"{r[k]}<|end|>" for k in ("chosen", "rejected"))) for r in others
        ]
    assert len(found) == 7


def test_the_longest_that_fits_is_kept(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "chosen": "1" * 7, "rejected": "2"}] * 3  # 6 tokens, and 8 with a stop token
    assert len(load(tmp_path, rows, tokenizer, lengths=(6, 8))[0]) == 3
    for lengths in ((5, 8), (6, 7)):
        with pytest.raises(SystemExit, match="0 training rows .*: {'too long': 3}"):
            load(tmp_path, rows, tokenizer, lengths=lengths)


WORDS = {"prompt": "one and one", "chosen": "two", "rejected": "three"}  # a column of digits would be read as numbers
BAD_VALUES = {"was read as a dict": {"a": 1}, "object has no attribute": ["a", "b"], "AttributeError": [1]}
CALLS = [{**user("2+2="), "tool_calls": ["f"]}]


@pytest.mark.parametrize(
    "good, row, message",
    [
        ([], {"prompt": "1+1=", "answer": "2"}, "columns chosen is needed, but there are prompt, answer"),
        ([], {"prompt": "1+1=", "chosen": "2"}, "columns rejected is needed, but there are prompt, chosen"),
        (ROWS, {**ROWS[0], "rejected": "9<|end|>"}, "'9<.end.>' already has the chat template's tokens"),
        ([], {**AFTER, "prompt": CALLS}, "only a role and a text as content can be read, .*'tool_calls': "),
        ([], {"prompt": "2+2=", **AFTER, "chosen": [{"content": "4"}]}, "role"),
        *[([WORDS] * 6, {**WORDS, key: v}, m) for key in ("chosen", "rejected") for m, v in BAD_VALUES.items()],
    ],
)
def test_a_row_that_is_no_pair_is_named(tmp_path, tokenizer, good, row, message):
    with pytest.raises(SystemExit, match=f"pairs.jsonl, training row {len(good)}: .*{message}.*; the row is {{"):
        load(tmp_path, [*good, row], tokenizer)


@pytest.mark.parametrize("second", [user("two"), assistant("two")])
def test_a_prompt_that_no_template_takes_ends_the_run(tmp_path, second):
    row = {"prompt": [user("one"), second], "chosen": "three", "rejected": "four"}
    with pytest.raises(SystemExit, match=r"training row 0: TemplateError\('roles must alternate'\)"):
        load(tmp_path, [row] * 2, word_tokenizer(ALTERNATING))


# ---- batches


def test_prompts_are_padded_left_and_completions_right():
    pairs = [
        {"prompt_ids": [7], "chosen_ids": [1, 5], "rejected_ids": [2, 2, 2, 5]},
        {"prompt_ids": [8, 9, 9], "chosen_ids": [3, 3, 5], "rejected_ids": [4, 5]},
    ]
    batch = reward_model.collate_pairs(pairs, "cpu")
    assert {key: value.tolist() for key, value in batch.items()} == {
        "prompt_ids": [[0, 0, 7], [8, 9, 9]],
        "prompt_mask": [[0, 0, 1], [1, 1, 1]],
        "completion_ids": [[[1, 5, 0, 0], [2, 2, 2, 5]], [[3, 3, 5, 0], [4, 5, 0, 0]]],
        "completion_mask": [[[1, 1, 0, 0], [1, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 0, 0]]],
        "lengths": [2 * (1 + 4), 2 * (3 + 3)],
        "live": [True, True],
    }


# ---- dialogues of Anthropic's HH


def expected_split(row):
    """(prompt, chosen, rejected) by looking from turn to turn of the assistant."""
    chosen, rejected = (row[key].split(ASSISTANT) for key in ("chosen", "rejected"))
    same = 0
    while same + 1 < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    return ASSISTANT.join(chosen[:same]) + ASSISTANT, *(ASSISTANT.join(turns[same:]) for turns in (chosen, rejected))


def test_hh_dialogues_are_split_at_the_last_common_turn():
    rows = read_jsonl(HH)
    assert len(rows) == 60
    for row in rows:
        assert reward_model.split_pair(row, False) == expected_split(row)
        prompt, chosen, rejected = reward_model.split_pair(row, True)
        text, *completions = expected_split(row)
        assert (chosen, rejected) == tuple(completion.strip() for completion in completions)
        assert prompt[0]["role"] == prompt[-1]["role"] == "user"
        contents = re.split(r"\n\n(?:Human|Assistant):", text)[1:-1]
        assert [message["content"] for message in prompt] == [content.strip() for content in contents]


@pytest.mark.parametrize("row", [CONVERSATIONS, {key: json.dumps(CONVERSATIONS[key]) for key in AFTER}, DIALOGUES])
def test_ppo_samples_after_what_precedes_the_last_turn_of_chosen(tokenizer, row):
    [prompt] = ppo_rlhf.read_any_prompt(row, tokenizer, ppo_rlhf.Args(system_prompt=""))
    assert tokenizer.decode(prompt["prompt_ids"]) == "<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"


def test_a_step_of_ppo_on_the_prompts_of_hh_dialogues(tmp_path, monkeypatch, capsys):
    """They have no answers, so no accuracy is logged."""
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 8)
    lengths = {"max_prompt_length": 128, "max_completion_length": 16}
    sizes = {"num_steps": 1, "prompts_per_step": 4, "minibatch_size": 4, "eval_prompts": 2, "warmup_steps": 0}
    run = tmp_path / "run"
    ppo_rlhf.main(parse(ppo_rlhf, model=TINY, dataset=HH, run_dir=run, **lengths, **sizes))
    lines = read_jsonl(run / "metrics.jsonl")
    found = [sorted(key for key in line if key.startswith("eval/")) for line in lines]
    assert found == [["eval/reward", "eval/score"]] * 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[1]["optim/grad_norm"] > 0
    printed = capsys.readouterr().out
    assert f"\n52 training rows of {HH}, split train, dropped: " in printed
    for reason in ("'too long': 4", '"without a user\'s turn at its end": 2', "'with a held-out prompt': 2"):
        assert reason in printed


# ---- the embedded pairs


def classify(prompt, completion):
    """Add the sum up again and say what a completion shows, and whether it is right."""
    first, *others = map(int, prompt.removesuffix("=").split("+"))
    steps, total = [], first
    for number in others:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    shown, box = re.fullmatch(r"(?:<think>(.*)</think>)?\\boxed\{(.*)\}", completion).groups()
    if shown is None:
        return "right answer" if box == str(total) else "wrong answer"
    return "right work" if (shown, box) == (";".join(steps), str(total)) else "wrong work"


@pytest.fixture(scope="module")
def files():
    return {name: read_jsonl(PREFERENCES / f"{name}.jsonl") for name in ("train", "test")}


@pytest.fixture(scope="module")
def kinds():
    """The table of shares in data/preferences/make.py."""
    tree = ast.parse((PREFERENCES / "make.py").read_text())
    named = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
    return next(ast.literal_eval(node.value) for node in named if node.targets[0].id == "KINDS")


def test_kinds_of_the_embedded_pairs_are_what_their_texts_say(files, kinds):
    for row in files["train"] + files["test"]:
        kind = tuple(classify(row["prompt"], row[key]) for key in ("chosen", "rejected"))
        assert kind in kinds and row["kind"] == ", ".join(kind), row
        assert list(row) == ["prompt", "chosen", "rejected", "kind"] and row["chosen"] != row["rejected"]


@pytest.mark.parametrize("name, num_rows", [("train", 4096), ("test", 512)])
def test_shares_of_the_kinds(files, kinds, name, num_rows):
    found = Counter(row["kind"] for row in files[name])
    assert found.total() == num_rows and sum(kinds.values()) == pytest.approx(1)
    assert found == {", ".join(kind): pytest.approx(share * num_rows, abs=1) for kind, share in kinds.items()}


def test_no_pair_is_there_twice_and_prompts_are_fresh(files):
    rows = [tuple(row.values()) for row in files["train"] + files["test"]]
    assert len(set(rows)) == len(rows)
    train, test = ({row["prompt"] for row in files[name]} for name in ("train", "test"))
    assert not train & test
    for path in (ROOT / "data" / "addition").glob("*.jsonl"):
        assert not {row["prompt"] for row in read_jsonl(path)} & (train | test), path


def test_the_embedded_pairs_load(tokenizer):
    """A completion that was sampled up to the maximum has no room for a stop token."""
    train, held_out = load(None, str(PREFERENCES), tokenizer, num_held_out=512)
    for pairs, num_rows in ((train, 4096), (held_out, 512)):
        assert num_rows >= len(pairs) >= 0.99 * num_rows
    ids = {index for pair in train + held_out for key in ("chosen_ids", "rejected_ids") for index in pair[key]}
    assert tokenizer.unk_token_id not in ids
