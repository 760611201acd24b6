"""Make the numbers of Huang et al. again, from a checkout of vwxyzjn/summarize_from_feedback_details."""

import ast
from types import SimpleNamespace

import torch
from common import between, execute, load, main, tensors


def make_gae(path, case):
    """Execute the statements of the main program from the padding masks to the whitened advantages."""
    config, inputs = case["config"], tensors(case["inputs"])
    ppo = SimpleNamespace(kl_coef=config["kl_coef"], gamma=config["gamma"], lam=config["lam"], whiten_rewards=False)
    namespace = {
        "torch": torch,
        "args": SimpleNamespace(ppo=ppo),
        "responses": inputs["mask"],
        "logprobs": inputs["old_logp"],
        "ref_logprobs": inputs["ref_logp"],
        "values": inputs["values"],
        "scores": inputs["scores"],
        "sequence_lengths": torch.tensor(case["inputs"]["last_token_index"]),
    }
    for name in ("masked_mean", "masked_var", "masked_whiten"):
        load(path, name, namespace)
    program = ast.parse(path.read_text())
    execute(between(program, "INVALID_LOGPROB = ", "INVALID_LOGPROB = "), namespace)
    execute(between(program, "sequence_lengths_p1 = ", "advantages = torch.masked_fill("), namespace)
    return {
        "token_rewards": namespace["rewards"].tolist(),
        "returns": namespace["returns"].tolist(),
        "advantages_whitened": namespace["advantages"].tolist(),
    }


MAKERS = {"gae_summarize": make_gae}


if __name__ == "__main__":
    main(MAKERS, lambda folder: folder / "summarize_from_feedback_details/ppo.py")
