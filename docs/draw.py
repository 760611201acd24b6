"""Draw the pictures that explain the scripts: python docs/draw.py

It writes data_flow.png and family_map.png to docs/pictures.
"""

import io
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image, PngImagePlugin

ROOT, PICTURES = Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent / "pictures"
sys.path.append(str(ROOT))

import grpo  # noqa: E402, after its folder is on the path

BLUE, ORANGE, BROWN, GREY, PALE = "#d6e8f7", "#fde3bd", "#8a3b00", "#484848", "#f4f4f4"
CODE = {"family": "DejaVu Sans Mono", "size": 12.5}


def table(text):
    return [[cell.strip() for cell in f"{line} ".split(" | ")] for line in text.strip().splitlines()]


# The data of a step: variables | shape | the function that makes the next | note
FLOW = table("""
    rows | {prompts_per_step} prompts, group_size {group_size} of each: B = {B} rows | generate | token by token
    completions | B pairs of lists: ids and log-probabilities | torch.tensor | prompt, completion, padding
    ids, completion_mask, sampler_logprobs | (B, L) = ({B}, {L}) | tokenizer.decode | the completions
    texts | B texts | score_completions | with the answers in rows
    rewards | (B,) | compute_advantages | as (B/G, G) = ({prompts_per_step}, {group_size})
    advantages | (B,); batch has all tensors but rewards
    minibatches | {updates} × {minibatch_size} shuffled indices of completions | compute_logprobs | of policy and ref
    old_logprobs, ref_logprobs | (B, L), before the first update | microbatches | ≤ {microbatch_tokens} tokens
    microbatch | b completions: (b, L), cut to the longest, and (b,) | policy | with gradient
    logprobs, entropies | (b, L) | policy_loss | with its other tensors
    loss | sum over b completions, / minibatch_size; backward() | step_optimizer | after the last microbatch
    policy | with new weights""")
# script | title | what a row of its data has | the script that it starts from | what changes, as in side_by_side.md
FAMILY = table("""
    dr_grpo | Dr. GRPO | prompt, answer | grpo | advantage R − mean; weight 1/(L × N); no KL ; cut off: counts as wrong
    dapo | DAPO | prompt, answer | grpo | clips 0.2 below, 0.28 above; no groups with equal rewards; no KL
    gspo | GSPO | prompt, answer | grpo | ratio of the completion; clips 3e-4 below, 4e-4 above; no KL
    cispo | CISPO | prompt, answer | grpo | clips nothing: the ratio, capped at 5, weights log π; no KL
    grpo_process | GRPO, process | prompt, answer | grpo | a reward for every step, so an advantage for every token
    grpo_tools | GRPO, tools | prompt, answer | grpo | a tool writes tokens, too, with weight 0; no KL
    gkd | GKD, distillation | prompt | grpo | no rewards; D(teacher ‖ student) over the vocabulary, per token
    ppo_rlhf | PPO | prompt | grpo | no groups; GAE of a value model, per token; k1, in the reward
    dpo | DPO | prompt, chosen, rejected | reward_model | score it implies: ; β Σₜ log π/π_ref
    reward_model | reward model | prompt, chosen, rejected | sft | scores s of pairs: ; log σ(s_w − s_l)
    sft | SFT | prompt, completion
    grpo | GRPO | prompt, answer | reinforce | clipped ratio of the token; advantage / std; KL: k3, in the loss
    reinforce | REINFORCE | prompt, answer""")
COLOURS = {"prompt, answer": BLUE, "prompt": "#f6dcea", "prompt, completion": "#cdeee1"}  # else orange


def flow():
    """Return FLOW with the settings of grpo.py for the bundled model."""
    sizes = dict(vars(grpo.TINY))
    sizes["B"] = sizes["prompts_per_step"] * sizes["group_size"]
    sizes["L"] = sizes["max_prompt_length"] + sizes["max_completion_length"]
    sizes["updates"] = sizes["B"] // sizes["minibatch_size"] * sizes["update_epochs"]
    return [[cell.format(**sizes) for cell in row] for row in FLOW]


class Picture:  # its unit is a pixel at a width of 900, and y points down
    def __init__(self, height, title, about):
        self.axes = Figure((9, height / 100)).add_axes((0, 0, 1, 1), xlim=(0, 900), ylim=(height, 0))
        self.axes.axis("off")
        self.text(24, 28, title, size=20, weight="bold")
        self.text(24, 58, about, color=GREY)

    def text(self, x, y, text, size=13, **style):
        self.axes.text(x, y, text, size=size * 0.72, **{"va": "center_baseline", "linespacing": 1.4} | style)

    def box(self, x, y, width, height, colour):
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, "round,rounding_size=5", fc=colour, ec=GREY, lw=1))

    def arrow(self, *points, dashed=False):
        style = "dashed" if dashed else "solid"
        self.axes.plot(*zip(*points[:-1]), color=GREY, lw=1.3, snap=False, linestyle=style)
        head = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 0, "shrinkB": 0, "lw": 1.3, "linestyle": style}
        self.axes.annotate("", points[-1], points[-2], arrowprops=head)

    def save(self, name, shown):
        data, info = io.BytesIO(), PngImagePlugin.PngInfo()
        self.axes.figure.savefig(data, dpi=160)
        info.add_itxt("drawn", repr(shown))  # a test compares it
        Image.open(data).convert("RGB").quantize(32).save(PICTURES / f"{name}.png", optimize=True, pnginfo=info)


def draw_flow():
    picture = Picture(690, "The data of one step of grpo.py", "brown: functions; sizes: those of the bundled model")
    frames = [(16, 154, 412, 312, "sample_completions"), (458, 257, 434, 350, "for indices in minibatches")]
    for x, y, width, height, label in [*frames, (463, 293, 402, 276, "for microbatch in microbatches")]:
        picture.box(x, y, width, height, PALE)
        picture.text(x + width - 13, y + height / 2, label, rotation=90, ha="center", va="center", **CODE)
    picture.arrow((404, 641), (452, 641), (452, 121), (470, 121))
    picture.text(440, 400, "torch.randperm", rotation=90, ha="center", va="center", color=BROWN, weight="bold", **CODE)
    for i, (names, shape, *step) in enumerate(flow()):
        x, y = (24, 470)[i // 6], 96 + 104 * (i % 6)
        picture.box(x, y, 380 - 12 * (i // 6), 50, BLUE)
        picture.text(x + 8, y + 14, names, **CODE)
        picture.text(x + 8, y + 35, shape)
        if step:
            picture.arrow((x + 24, y + 50), (x + 24, y + 104))
            picture.text(x + 38, y + 75, step[0], color=BROWN, weight="bold", **CODE)
            picture.text(x + 52 + 7.8 * len(step[0]), y + 75, step[1])
    picture.save("data_flow", flow())


def draw_family():
    about = "arrow: what changes; dashed: PPO is older than GRPO; box: the columns of the data"
    picture = Picture(830, "The family of the thirteen scripts", about)
    places = [*((696, 104 + 70 * i) for i in range(8)), (696, 708), (350, 708), (24, 708), (24, 314), (24, 104)]
    places = dict(zip([row[0] for row in FAMILY], places))
    for script, title, data, *step in FAMILY:
        x, y = places[script]
        picture.box(x, y, 180, 60, COLOURS.get(data, ORANGE))
        for dy, text, style in ((11, title, {"weight": "bold"}), (29, f"{script}.py", CODE), (46, data, {})):
            picture.text(x + 8, y + dy, text, **style)
        if script == "grpo":
            picture.arrow((36, 164), (36, 314))
            picture.text(46, 239, step[1].replace("; ", "\n"), va="center")
        elif step:
            left, top = places[step[0]]
            start = [(left + 180, top + 30), (left + 200, top + 30), (left + 200, y + 30)]
            if script == "ppo_rlhf":
                start = [(left + 90, top + 60), (left + 90, y + 30)]
            picture.arrow(*start, (x, y + 30), dashed=script == "ppo_rlhf")
            picture.text(left + 190 + 20 * (y < 690), y + 26, step[1].replace(" ; ", "\n"), va="bottom")
    picture.arrow((440, 708), (440, 642), (696, 642))
    picture.text(450, 656, "its score is the reward")
    legend = "L: --max-completion-length; N: completions of an optimizer step; s_w, s_l: scores of chosen and rejected"
    picture.text(24, 790, legend, color=GREY)
    picture.text(24, 812, "sft.py also made the bundled model, from which the others start", color=GREY)
    picture.save("family_map", FAMILY)


if __name__ == "__main__":
    draw_flow()
    draw_family()
