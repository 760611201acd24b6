"""A CUDA device that is not there: python tests/fake_cuda.py SCRIPT FLAGS runs a script on it.

fake_cuda.cpp, compiled by g++, registers on the CUDA dispatch key of a CPU build of torch an allocator (host memory
that says it is cuda:0), a device guard, and a fallback that runs every operator on the CPU. Tensors are thus genuine
CUDA tensors to autograd, FSDP2, DTensor, the optimizers, transformers and the scripts.

It shows operators that mix cuda and CPU tensors, as CUDA refuses them (CPU indices and single numbers pass, but in
lists); collectives without a backend for their tensors: NCCL's stand-in takes CUDA tensors only; and code that only
runs where there is a GPU. It cannot show operators without a CUDA kernel, CUDA's rounding and random numbers, races
(nothing is asynchronous), memory, speed, NCCL itself, or more than one device in a process.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

FORK = multiprocessing.get_context("fork")
LIBRARY = "FAKE_CUDA_LIBRARY"  # in the environment: where build has put it


def build(folder):
    """Compile the library into a folder and return its path."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    source, path = Path(__file__).with_suffix(".cpp"), Path(folder, "fake_cuda.so")
    command = f"g++ -std=c++20 -O0 -w -shared -fPIC -I{include} -I{include}/torch/csrc/api/include {source}"
    command += f" -L{lib} -Wl,-rpath,{lib} -ltorch -ltorch_cpu -lc10 -o {path}"
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source.name} does not fit the torch of {torch_folder}: {done.stderr:.1000}")
    return str(path)


def load():
    """Load the library, built before or now, and put the rest of the device into torch; keep what is returned."""
    assert "torch" not in sys.modules, "fake_cuda.load() must come before torch"
    with tempfile.TemporaryDirectory() as folder:
        ctypes.CDLL(os.environ.get(LIBRARY) or build(folder), mode=ctypes.RTLD_GLOBAL)
    import torch

    if torch.version.cuda is not None:
        raise SystemExit(f"torch {torch.__version__} has CUDA: fake_cuda needs a CPU build")
    patch_cuda(torch)
    return stand_in_for_nccl(torch)


class Stream:
    """A stream or an event; everything has happened already."""

    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def nothing(self, *_, **__): ...

    __init__ = __enter__ = __exit__ = nothing
    record = wait = wait_stream = wait_event = record_event = synchronize = query = nothing


def patch_cuda(torch):
    """What torch.cuda of a CPU build refuses."""
    Stream.device = torch.device("cuda", 0)
    facts = {"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0}
    facts |= {"get_device_capability": (9, 0), "get_device_name": "fake", "is_bf16_supported": True}
    facts |= {"current_stream": Stream(), "device": contextlib.nullcontext(), "_is_in_bad_fork": False}
    facts["get_device_properties"] = SimpleNamespace(name="fake", total_memory=80 * 2**30, major=9, minor=0)
    facts |= dict.fromkeys(("max_memory_allocated", "memory_allocated", "memory_reserved"), 0)
    nothing = "_lazy_init set_device synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all"
    for name, value in (facts | dict.fromkeys(nothing.split())).items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Stream, lambda _: contextlib.nullcontext()
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        if storage.device.type == "cuda":
            tensor = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
            return torch.ops.fake_cuda.resize_storage(tensor, size)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_


def stand_in_for_nccl(torch):
    """A backend of CUDA tensors only; gloo works on the memory behind them. What is returned must be kept."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    dist.Backend.register_backend("notnccl", lambda *where: c10d.ProcessGroupGloo(*where), devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = "notnccl"
    library, host = torch.library.Library("c10d", "IMPL", "CUDA"), torch.ops.fake_cuda.host
    init = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        return init(backend and backend.replace("nccl", "notnccl"), *args, **kwargs)

    def hosts(value):
        return [hosts(item) for item in value] if isinstance(value, list | tuple) else host(value)

    def run(group, name, *args, **options):
        backend = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cuda"))
        if options:
            kind = options.pop("kind")()
            for key, value in options.items():
                setattr(kind, key, value)
            args += (kind,)
        work = getattr(backend, name)(*args)
        work.wait()
        return work.boxed()

    def kind_of(op):
        return dist.ReduceOp(dist.ReduceOp.RedOpType(op.op()))

    def all_reduce(tensors, group, op, *_):
        return tensors, run(group, "allreduce", hosts(tensors), kind=dist.AllreduceOptions, reduceOp=kind_of(op))

    def all_gather(out, tensor, group, *_):
        return out, run(group, "_allgather_base", host(out), host(tensor))

    def reduce_scatter(out, tensor, group, op, *_):
        more = {"kind": dist.ReduceScatterOptions, "reduceOp": kind_of(op)}
        return out, run(group, "_reduce_scatter_base", host(out), host(tensor), **more)

    def broadcast(tensors, group, root, root_tensor, *_):
        more = {"kind": dist.BroadcastOptions, "rootRank": root, "rootTensor": root_tensor}
        return tensors, run(group, "broadcast", hosts(tensors), **more)

    names = {"allreduce_": all_reduce, "_allgather_base_": all_gather, "_reduce_scatter_base_": reduce_scatter}
    with warnings.catch_warnings(action="ignore"):  # that these take the place of others is the purpose
        for name, function in (names | {"broadcast_": broadcast}).items():
            library.impl(name, function, allow_override=True)
    dist.init_process_group = c10d.init_process_group = init_process_group
    return library


def run_script(argv):
    """Run a script with its flags in this process."""
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


def run_rank(argv, log, environment):
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.environ |= environment
    run_script(argv)


def fork_ranks(argv, log, ranks):
    """Run a script in forked processes, one for each environment; end all when one fails; return exit statuses."""
    forked = [FORK.Process(target=run_rank, args=(argv, log, environment)) for environment in ranks]
    for process in forked:
        process.start()
    running = list(forked)
    while running:
        wait([process.sentinel for process in running])
        running = [process for process in running if process.exitcode is None]
        if any(process.exitcode for process in forked):
            for process in running:
                process.kill()
    return [process.exitcode for process in forked]


def serve():
    """Run what each line of standard input asks for, without the seconds of importing torch; answer with statuses."""
    modules = "datasets tyro wandb torch.distributed.checkpoint torch.distributed.fsdp".split()
    modules += "transformers.models.qwen3.modeling_qwen3 transformers.generation transformers.models.auto".split()
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(fork_ranks(*json.loads(line))), flush=True)


if __name__ == "__main__":
    kept = load()
    run_script(sys.argv[1:]) if len(sys.argv) > 1 else serve()
