"""Run one program in a sandbox, and write the values of calls to its functions: the child process of code_reward.py.

It reads the job from stdin and writes the values to stdout, both as JSON. Before the program runs, it writes to stderr
that the sandbox is ready. If the sandbox cannot be created, it writes the reason instead and does not run the program.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from contextlib import suppress
from glob import glob

# System calls to refuse, because namespaces and limits may not stop them: name, number on x86-64, number on aarch64.
CALLS = """socket 41 198, execve 59 221, execveat 322 281, memfd_create 319 279, shmget 29 194, msgget 68 186
semget 64 190, socketpair 53 199, mq_open 240 180, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240, pidfd_open 434 434, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271
prctl 157 167, unshare 272 97, mount 165 40, pivot_root 155 41, keyctl 250 219, add_key 248 217, request_key 249 218
io_uring_setup 425 425, bpf 321 280, userfaultfd 323 282, perf_event_open 298 241"""
MACHINE, COLUMN = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}[os.uname().machine]
NUMBERS = {words[0]: int(words[COLUMN]) for words in map(str.split, CALLS.replace("\n", ",").split(","))}


def system(name, *args):
    """Call a function of the C library. If it fails, raise an error with its name and the reason."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")


def enter_box():
    """Move to a root in memory (16 MB, 256 files) with read-only libraries, and unmount the host's root."""
    os.umask(0)
    system("mount", b"none", b"/proc", b"tmpfs", 0xE, b"size=16m,nr_inodes=256")  # MS_NOSUID, NODEV, NOEXEC
    folders = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.realpath(f"{os.__file__}/../..")}
    for folder in filter(os.path.isdir, sorted(folders)):
        os.makedirs(f"/proc/box{folder}", exist_ok=True)
        system("mount", folder.encode(), f"/proc/box{folder}".encode(), None, 0x5000, None)  # MS_BIND, REC
        below = 0x8000, struct.pack("4Q", 7, 0, 0, 0), 32  # AT_RECURSIVE: RDONLY, NOSUID, NODEV
        system("syscall", 442, -100, f"/proc/box{folder}".encode(), *below)  # mount_setattr
        for packages in glob(f"/proc/box{folder}/python3*/*-packages"):  # hide them: they may contain data sets
            system("mount", b"none", packages.encode(), b"tmpfs", 0xF, None)
    os.chdir("/proc")
    system("syscall", NUMBERS["pivot_root"], b".", b".")
    system("umount2", b".", 2)  # MNT_DETACH
    os.chroot("/box")  # after chroot, the kernel refuses to create a user namespace
    os.chdir("/")


def drop_rights(nobody, seconds, memory):
    """Set the limits, give up root and all capabilities, and have the kernel refuse the system calls above."""
    limits = {"CPU": seconds, "AS": memory, "FSIZE": 2**20, "NOFILE": 64, "NPROC": 0, "MEMLOCK": 0, "SIGPENDING": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if nobody:
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
    open(os.__file__).close()  # fail here if this user cannot read the standard library
    system("prctl", 1, 9)  # PR_SET_PDEATHSIG, SIGKILL: die with the parent
    system("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    system("prctl", 38, *map(ctypes.c_ulong, (1, 0, 0, 0)))  # PR_SET_NO_NEW_PRIVS
    end = len(NUMBERS) + 5  # the rule that refuses: calls above, calls of another machine, and x32's (from 2**30)
    rules = [(0x20, 0, 0, 4), (0x15, 0, end - 2, MACHINE), (0x20, 0, 0, 0), (0x35, end - 4, 0, 2**30)]
    rules += [(0x15, end - 5 - place, 0, number) for place, number in enumerate(NUMBERS.values())]
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001)]  # allow, EPERM
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    system("prctl", 22, 2, struct.pack("HP", len(rules), ctypes.addressof(code)))  # PR_SET_SECCOMP


if __name__ == "__main__":
    values, nothing = os.dup(1), os.open("/dev/null", os.O_RDWR)
    program, calls, box, nobody, seconds, memory = json.load(sys.stdin)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the system kills this process before the training
    if box:
        enter_box()
    drop_rights(nobody, seconds, memory)
    os.write(2, b"sandbox is ready\n")  # from here on, a failure is the program's and not the sandbox's
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.environ.clear()
    exec(program, space := {})
    os.write(values, json.dumps([eval(call, space) for call in calls], sort_keys=True).encode())
    os._exit(0)
