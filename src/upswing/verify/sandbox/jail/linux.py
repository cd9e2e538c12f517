"""Namespaces, mounts and privileges, by ctypes: `os` has only some of them, and only since Python 3.12."""

from __future__ import annotations

import ctypes
import glob
import os
import signal
import socket
from collections.abc import Iterable

from . import seccomp

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)
"""The same, without letting go of the interpreter meanwhile."""
_NR_PIVOT_ROOT, _NR_CAPSET, _NR_CLONE = {"aarch64": (41, 91, 220)}.get(os.uname().machine, (155, 126, 56))
_NR_MOUNT_SETATTR = 442
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
NEWNS = 0x20000
_NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in range(25, 31))
_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _SET_CHILD_SUBREAPER = 1, 4, 22, 24, 36
_SET_NO_NEW_PRIVS, _CAP_AMBIENT, _CLEAR_ALL = 38, 47, 4
_UID, _NOBODY = 1000, 65534
"""Who a program is, as it sees it; and on the host, when the launcher is root (else the user)."""
_ROOT = "/root"
"""Where, within the launcher's own small root, the programs' root lies."""
BOX = "/sandbox"
"""The only place to write: one tmpfs."""
WORKSPACE = f"{BOX}/workspace"
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/etc/alternatives",
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {
    "/tmp": f"{BOX}/tmp", "/dev/shm": f"{BOX}/shm", "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
}  # fmt: skip
_TEXTS = {
    "/etc/passwd": f"sandbox:x:{_UID}:{_UID}::{WORKSPACE}:/bin/sh\n", "/etc/group": f"sandbox:x:{_UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n", "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}  # fmt: skip


def _check(value: int, what: str) -> None:
    if value < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {kind or source or ''} on {target}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def prctl(option: int, *values: object) -> None:
    _check(_libc.prctl(option, *values, *[ctypes.c_ulong(0)] * (4 - len(values))), f"prctl {option}")


def adopt_orphans() -> None:
    prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def die_with_parent() -> None:
    prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _pivot(new: str, old: str) -> None:
    _check(_libc.syscall(_NR_PIVOT_ROOT, os.fsencode(new), os.fsencode(old)), "pivot_root")


def _detach(path: str) -> None:
    _check(_libc.umount2(os.fsencode(path), _DETACH), f"unmount {path}")


def _restrict(path: str, attributes: int, recursive: bool) -> None:
    """Add RDONLY, NOSUID, NODEV or NOEXEC to a mount; with `recursive` to all beneath (Linux 5.12)."""
    wanted = (ctypes.c_uint64 * 4)(attributes)
    flags = _AT_RECURSIVE if recursive else 0
    value = _libc.syscall(_NR_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, ctypes.byref(wanted), 32)
    _check(value, f"mount_setattr {path}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _map_user(uid: int, gid: int) -> None:
    """In a new user namespace, where this process has all capabilities, the one user that there is becomes _UID."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_UID} {uid} 1")
    _write("/proc/self/gid_map", f"{_UID} {gid} 1")


def _fork_into(flags: int) -> int:
    """`os.fork`, into new namespaces at once: 0 in the child. Raises OSError."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid: int = _held.syscall(_NR_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), *[ctypes.c_ulong(0)] * 4)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    _check(pid, "new namespaces")
    return pid


# -- once, in the launcher --------------------------------------------------------------------------------------------


def leave_host(prefixes: Iterable[tuple[str, str]]) -> None:
    """Give up the host's files for good: `/` becomes a tmpfs that holds the programs' root, read-only, and /proc.

    `prefixes`: where the interpreter lies as (real path, path that it is known by). Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWNS | _NEWUSER * bool(uid))
    if uid:
        _map_user(uid, gid)
    mount(None, "/", flags=REC | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "mode=755,size=16m")
    for name in ("old", "proc", "empty", _ROOT[1:]):
        os.mkdir(f"/tmp/{name}")
    _pivot("/tmp", "/tmp/old")
    os.chdir("/")
    mount("/old/proc", "/proc", flags=BIND | REC)
    mount(_ROOT, _ROOT, flags=BIND)
    _fill_root([*((path, path) for path in _SYSTEM), *prefixes])
    _hide([path for _, path in prefixes])
    _restrict(_ROOT, RDONLY | NOSUID | NODEV, recursive=True)
    for name in _DEVICES:
        mount(f"/old/dev/{name}", f"{_ROOT}/dev/{name}", flags=BIND)
        _restrict(f"{_ROOT}/dev/{name}", RDONLY | NOSUID | NOEXEC, recursive=False)
    _detach("/old")
    if not uid:  # root is never needed again; and the kernel doesn't limit how many processes it has
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        prctl(_SET_DUMPABLE, ctypes.c_ulong(1))  # else a child couldn't write its own maps


def _fill_root(binds: Iterable[tuple[str, str]]) -> None:
    for name in ("dev", "etc", "proc", BOX[1:]):
        os.mkdir(f"{_ROOT}/{name}")
    for source, target in binds:
        here = _ROOT + target
        if os.path.islink(f"/old{source}"):
            os.symlink(os.readlink(f"/old{source}"), here)
        elif os.path.isdir(f"/old{source}") and not (os.path.isdir(here) and os.path.samefile(f"/old{source}", here)):
            os.makedirs(here, exist_ok=True)
            mount(f"/old{source}", here, flags=BIND | REC)
    for name in _DEVICES:
        _write(f"{_ROOT}/dev/{name}", "")
    for link, target in _LINKS.items():
        os.symlink(target, _ROOT + link)
    for path, text in _TEXTS.items():
        _write(_ROOT + path, text)
    if os.path.isfile("/old/etc/ld.so.cache"):
        with open("/old/etc/ld.so.cache", "rb") as old, open(f"{_ROOT}/etc/ld.so.cache", "wb") as new:
            new.write(old.read())


def _hide(prefixes: list[str]) -> None:
    """Installed packages are the project's; /usr/local is the host's own, unless Python lies there."""
    hidden = {f"{_ROOT}/usr/src"}
    if not any(f"{path}/".startswith("/usr/local/") for path in prefixes):
        hidden.add(f"{_ROOT}/usr/local")
    for path in {*prefixes, "/usr", "/usr/local"}:
        hidden.update(glob.glob(f"{_ROOT}{path}/lib*/python3*/*-packages"))
    for path in sorted(hidden):
        if os.path.isdir(path):
            mount("/empty", path, flags=BIND)


# -- for every sandbox ------------------------------------------------------------------------------------------------


def fork_sandbox() -> int:
    """Fork process 1 of a sandbox: 0 in it. Raises OSError."""
    return _fork_into(NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET)


def enter(ids: tuple[int, int], disk_mb: int) -> None:
    """Build the sandbox, in its process 1. `ids`: user and group of the launcher. Raises OSError."""
    _map_user(*ids)
    prctl(_SET_DUMPABLE, ctypes.c_ulong(0))
    socket.sethostname("sandbox")
    mount(_ROOT, _ROOT, flags=BIND | REC)
    mount("tmpfs", _ROOT + BOX, "tmpfs", NOSUID | NODEV, _size(disk_mb))
    mount("proc", f"{_ROOT}/proc", "proc", RDONLY | NOSUID | NODEV | NOEXEC, "hidepid=2,subset=pid")
    os.chdir(_ROOT)
    _pivot(".", ".")
    _detach(".")
    os.chdir("/")
    for name in ("workspace", "tmp", "shm"):
        os.mkdir(f"{BOX}/{name}")


def _size(disk_mb: int) -> str:
    return f"mode=755,size={disk_mb}m,nr_inodes={128 * disk_mb}"


def resize(disk_mb: int) -> None:
    mount(None, BOX, flags=REMOUNT | NOSUID | NODEV, options=_size(disk_mb))


# -- for every program ------------------------------------------------------------------------------------------------


def drop_privileges(filter_: seccomp._Program) -> None:
    """Give up every capability and the denied system calls, for this process and all that come from it."""
    prctl(_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))
    for capability in range(64):
        if _libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    prctl(_CAP_AMBIENT, ctypes.c_ulong(_CLEAR_ALL))
    header, none = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
    _check(_libc.syscall(_NR_CAPSET, ctypes.byref(header), ctypes.byref(none)), "capset")
    prctl(_SET_DUMPABLE, ctypes.c_ulong(1))  # its own /proc/self
    prctl(_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(filter_))
