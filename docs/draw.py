"""Draw docs/pictures/data_flow.png, the data of one step of grpo.py: python docs/draw.py"""

import io
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image, PngImagePlugin

ROOT, PICTURES = Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent / "pictures"
sys.path.append(str(ROOT))

import grpo  # noqa: E402, after its folder is on the path

BLUE, BROWN, GREY, PALE = "#d6e8f7", "#8a3b00", "#484848", "#f4f4f4"
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

    def arrow(self, *points):
        self.axes.plot(*zip(*points[:-1]), color=GREY, lw=1.3, snap=False)
        head = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 0, "shrinkB": 0, "lw": 1.3}
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


if __name__ == "__main__":
    draw_flow()
