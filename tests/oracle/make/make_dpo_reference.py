"""Make the numbers of the DPO authors' code again, from a checkout of eric-mitchell/direct-preference-optimization."""

import typing
from types import SimpleNamespace

import torch
from common import gradient, load, main, tensors


def load_code(folder):
    """Take two functions by ast from trainers.py, whose imports need tensor_parallel."""
    namespace = vars(typing) | {"torch": torch, "F": torch.nn.functional}
    trainers = folder / "trainers.py"
    return SimpleNamespace(
        preference_loss=load(trainers, "preference_loss", namespace),
        get_batch_logps=load(trainers, "_get_batch_logps", namespace),
    )


def make_preference_loss(code, case):
    config, inputs = case["config"], tensors(case["inputs"])
    chosen = inputs["policy_chosen_logps"].requires_grad_()
    rejected = inputs["policy_rejected_logps"].requires_grad_()
    losses, chosen_rewards, rejected_rewards = code.preference_loss(
        chosen,
        rejected,
        inputs["reference_chosen_logps"],
        inputs["reference_rejected_logps"],
        beta=config["beta"],
        label_smoothing=config["label_smoothing"],
        ipo=config["ipo"],
    )
    loss = losses.mean()
    return {
        "losses": losses.tolist(),
        "loss": loss.item(),
        "chosen_rewards": chosen_rewards.tolist(),
        "rejected_rewards": rejected_rewards.tolist(),
        "grad_chosen": gradient(loss, chosen),
        "grad_rejected": gradient(loss, rejected),
    }


def make_logprobs(code, case):
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64).requires_grad_()
    sums = code.get_batch_logps(logits, torch.tensor(case["inputs"]["labels"]))
    return {"sum_logps": sums.tolist(), "grad_logits": gradient(sums.sum(), logits)}


MAKERS = {"dpo_eric_mitchell": make_preference_loss, "logprob": make_logprobs}


if __name__ == "__main__":
    main(MAKERS, load_code)
