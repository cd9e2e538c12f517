"""The system calls that no sandboxed program needs, as a BPF filter."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# name: number on x86_64, on aarch64 (None: not there)
_DENIED: dict[str, tuple[int, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "setpriority": (141, 140), "ioprio_set": (251, 30),
    # mounts, roots and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "statmount": (457, 457),
    "listmount": (458, 458), "unshare": (272, 97), "setns": (308, 268), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # ways into the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "fanotify_init": (300, 262), "modify_ldt": (154, None),
    "iopl": (172, None), "ioperm": (173, None), "uselib": (134, None), "_sysctl": (156, None), "sysfs": (139, None),
    "personality": (135, 92), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "syslog": (103, 116),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450), "inotify_init": (253, None), "inotify_init1": (294, 26),  # few for a user
    # the machine
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    # memory that no process seems to hold
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
_MISSING: dict[str, tuple[int, int | None]] = {"clone3": (435, 435), "memfd_create": (319, 279)}
"""Answered as by an older kernel, so that the C library falls back: clone3's flags can't be seen from here."""
_FIRST_ARGUMENT_MUST_BE: dict[str, tuple[int, int, int]] = {
    "socket": (41, 198, 1), "socketpair": (53, 199, 1),  # AF_UNIX: vsock would even reach the host of a virtual machine
    "prlimit64": (302, 261, 0), "sched_setaffinity": (203, 122, 0), "sched_setscheduler": (144, 119, 0),
    "sched_setparam": (142, 118, 0), "sched_setattr": (314, 274, 0),  # of itself
}  # fmt: skip
_CLONE, _NEW_NAMESPACES = (56, 220), 0x7E020000
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _ABOVE, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def program() -> _Program:
    """The filter for `prctl(PR_SET_SECCOMP)`. Raises OSError on a machine it isn't written for."""
    if (machine := os.uname().machine) not in _ARCHES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    column, arch = _ARCHES[machine]
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":  # x32's numbers
        code += [(_ABOVE, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for table, error in ((_DENIED, errno.EPERM), (_MISSING, errno.ENOSYS)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    tests = [(row[column], (_EQUAL, 1, 0, row[2])) for row in _FIRST_ARGUMENT_MUST_BE.values()]
    for number, allowed in (*tests, (_CLONE[column], (_SET, 0, 1, _NEW_NAMESPACES))):
        code += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENT), allowed]
        code += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_LOAD, 0, 0, _NUMBER)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return _Program(len(code), b"".join(struct.pack("HBBI", *one) for one in code))
